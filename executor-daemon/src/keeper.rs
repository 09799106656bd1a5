//! The keeper: the small parent process that starts, reaps and signals commands and holds descriptors.
//!
//! ```text
//!   keeper ── helper ── bash -c …          one helper per running command, parent and sub-reaper of all that comes of it
//!     │  └─── helper ── bash -c … ── …
//!     └────── server                       daemon mode; embedded, the host program is the keeper's parent instead
//! ```
//!
//! The keeper has one thread and no async runtime. It reads messages from the engine's process ([`protocol`]), makes pipes
//! and spill files, and hands each command to a helper, which speaks the same messages. Stream files are made by the engine's
//! process, which has the keeper hold them. A helper tells an end to the engine first, over a socket of its own, then to
//! the keeper. Read in this order:
//! `protocol` (the messages), `wire` (packets), `channel` (what the other end does not take yet), `streams` (pipes), `spill`
//! (spill files), `page` (stream files), `confine` (what a command is refused), `spawn` (from helper to command), `tree` (who descends from whom, proven), `helper`
//! (one command), `fence` (a tenant's helpers, from which no signal gets out), `pool` (the helpers), `desk` (the keeper's loop), `left` (what a keeper before left), `listen` (the daemon's sockets), `serve` (the daemon around
//! it), `privileges` (those that the server gives up), `keyring` (that of the login, which no command has), `init` (as PID 1), `embedded` (without a daemon), `link` (the engine's end).
//!
//! Not here: what a command means, timeouts, output, owners. Nothing here decides whether something may happen, except
//! that commands run as one of the identities that were fixed at start.

mod channel;
pub(crate) mod confine;
mod desk;
pub mod embedded;
mod fence;
pub(crate) mod groups;
mod helper;
mod init;
mod keyring;
pub(crate) mod left;
pub mod link;
mod listen;
pub mod page;
mod pool;
mod privileges;
pub mod protocol;
mod serve;
mod share;
mod spawn;
mod spill;
mod streams;
mod tree;
mod victims;
mod wire;

use std::{ffi::OsStr, fmt, net::SocketAddr, os::fd::OwnedFd, path::PathBuf, time::Duration};

pub use serve::serve;

use protocol::Identity;

/// First argument of a process that is to become an embedded keeper; the second is its spill directory, its descriptor 0 the
/// link.
const KEEPER_ARGUMENT: &str = "__keeper";
/// First argument of a process that is to become the daemon's server; its descriptor 0 is the link. The uid and gid that it is to
/// become follow, if it is to become another.
const SERVER_ARGUMENT: &str = "__server";

/// Where the daemon listens.
#[derive(Debug)]
pub enum Listener {
    /// A Unix socket, made with mode 0600. A dead socket that lies there is replaced.
    Unix(PathBuf),
    /// The same with mode 0666: whoever gets there may connect, and the server decides by the peer's uid.
    SharedUnix(PathBuf),
    /// A TCP address; port 0 takes a free one.
    Tcp(SocketAddr),
    /// Already bound and listening.
    Open(OwnedFd),
}

/// A user that the server becomes before it does anything else.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ServerUser {
    /// Its uid, for which no command runs.
    pub uid: u32,
    /// Its only group.
    pub gid: u32,
}

/// Reads again what may have changed, and makes the server's settings of it. The errors are lines for the operator.
pub struct Renewal(pub Box<dyn Fn() -> Result<Vec<u8>, Vec<String>>>);

impl fmt::Debug for Renewal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Renewal(…)")
    }
}

/// What the daemon's keeper lives by, all of it checked by whoever parsed it.
#[derive(Debug)]
pub struct KeeperOptions {
    /// Who commands may run as; not empty, index 0 is the default.
    pub identities: Vec<Identity>,
    /// What the processes of each tenant may have together, by the tenants' numbers.
    pub groups: Vec<protocol::GroupLimits>,
    /// Where to listen.
    pub listeners: Vec<Listener>,
    /// Who the server runs as. `None`: as the keeper.
    pub server_user: Option<ServerUser>,
    /// What the server is told, as it wants it.
    pub server_settings: Vec<u8>,
    /// What a server is told that is started on SIGHUP.
    pub renewal: Renewal,
    /// Where spill files go; made if missing. Where commands run under another uid, its parents must let that uid through.
    pub spill_dir: PathBuf,
    /// Real paths that the fence around commands hides from them, but for the spill directory, whose files they may read.
    pub hidden: Vec<PathBuf>,
    /// Longest drain after SIGTERM: the grace of commands and what the server needs around it. After it the keeper ends what
    /// is left.
    pub drain_limit: Duration,
    /// What is unprotected in this mode, for the ready line. `None`: nothing to state.
    pub unprotected: Option<String>,
}

/// The first line of `main` of every program that embeds the engine, and of `executor-daemon`: if this process was
/// started to be a keeper (or the daemon's server), it becomes that and never returns.
#[expect(clippy::disallowed_methods, reason = "the process is the keeper or the server from here on, and ends as such")]
pub fn enter_if_asked() {
    let mut arguments = std::env::args_os().skip(1);
    let first = arguments.next();
    let code = match first.as_deref().and_then(OsStr::to_str) {
        Some(KEEPER_ARGUMENT) => embedded::keeper_main(arguments.next().map(PathBuf::from)),
        Some(SERVER_ARGUMENT) => link::server::server_main(arguments.collect()),
        Some(_) | None => return,
    };
    std::process::exit(code);
}
