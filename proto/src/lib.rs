//! The `executor.v1` protocol.
//!
//! - [`v1`] is the generated wire code of `executor/v1/executor.proto`. It is committed, so that nothing but the Rust
//!   toolchain is needed to build; the test `generated` says when it is out of date and how to renew it.
//! - [`types`] are the values that the protocol carries, as both sides use them: parsed once, at the edge, into a form
//!   that cannot be invalid.
//! - [`transport`] has the times that both sides of a connection keep.
//! - [`error`] is every way in which an executor can refuse or fail, with its one mapping to and from the wire.

pub mod error;
pub mod tls;
pub mod transport;
pub mod types;

/// Generated code of `executor/v1/executor.proto`, as prost and tonic write it.
#[allow(missing_docs, clippy::all, clippy::pedantic, unreachable_pub, missing_debug_implementations)]
#[rustfmt::skip]
#[path = "executor.v1.rs"]
pub mod v1;

/// The descriptors of `executor.v1`, for reflection and for tests that compare versions.
pub const FILE_DESCRIPTOR_SET: &[u8] = include_bytes!("executor.v1.bin");

/// Revision of the protocol that this crate speaks; `GetInfo` tells the peer's.
pub const PROTOCOL_REVISION: u32 = 1;

/// Largest message that either side sends from the daemon, in bytes.
pub const MAX_DAEMON_MESSAGE_BYTES: usize = 256 * 1024;

/// Most bytes of output in one chunk. Four fit into a message with room to spare.
pub const MAX_CHUNK_BYTES: usize = 64 * 1024;

/// Largest command and largest stdin, in bytes each.
pub const MAX_COMMAND_BYTES: usize = 8 * 1024 * 1024;

/// Largest `NAME=value` of an environment, in bytes without the closing NUL: the kernel's `MAX_ARG_STRLEN` less one.
pub const MAX_ENVIRONMENT_VARIABLE_BYTES: usize = 131_071;

/// Largest request that the daemon reads at all, in bytes: a command, a stdin and an environment at their limits, and
/// what wraps them.
pub const MAX_REQUEST_BYTES: usize = 2 * MAX_COMMAND_BYTES + 8 * 1024 * 1024;
