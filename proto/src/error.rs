//! Every way in which an executor can refuse or fail, and its one mapping to and from the wire.
//!
//! On the wire an error is a gRPC status with a `google.rpc.ErrorInfo`: domain [`DOMAIN`], a reason from the list in
//! `executor.proto`, and metadata. Both directions stand here side by side and are tested against each other, so a new
//! error cannot be added to one of them only.

use std::collections::HashMap;

use bytes::Bytes;
use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt};

use crate::types::{SandboxMode, TaskId};

/// The `ErrorInfo` domain of this protocol.
pub const DOMAIN: &str = "executor.v1";

/// A path longer than this is left out of an error on the wire: replies carry errors in headers, which have limits. The
/// client knows the path that it asked for.
const MAX_PATH_IN_ERROR_BYTES: usize = 4096;

/// Why an executor did not do what it was asked for. Exit codes, signals and timeouts are results, not errors.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ExecutorError {
    /// A field is missing or malformed.
    #[error("{field} {problem}")]
    InvalidRequest {
        /// The field.
        field: String,
        /// What is wrong with it, as the end of a sentence.
        problem: String,
    },
    /// A text that goes to the kernel holds a NUL.
    #[error("{} contains a NUL byte", .field.as_str())]
    NulByte {
        /// Where.
        field: NulField,
    },
    /// Something is larger than what can be passed on.
    #[error("{} too large: {}{bytes} bytes, at most {limit}", .part.as_str(), name_prefix(.name.as_deref()))]
    TooLarge {
        /// What.
        part: SizedPart,
        /// The variable, for one variable of the environment.
        name: Option<String>,
        /// Its size.
        bytes: u64,
        /// The largest that is taken.
        limit: u64,
    },
    /// The command could not be started. Nothing ran.
    #[error("spawn failed at {}: errno {errno}", .stage.as_str())]
    Spawn {
        /// What was being done.
        stage: SpawnStage,
        /// The kernel's answer, by Linux number.
        errno: i32,
        /// The path it was about: the workdir for [`SpawnStage::Chdir`].
        path: Option<Bytes>,
    },
    /// Never issued, forgotten, or another tenant's.
    #[error("unknown task {0}")]
    UnknownTask(TaskId),
    /// It belongs to another owner of this tenant.
    #[error("task {0} belongs to another owner")]
    ForeignTask(TaskId),
    /// The caller may not use this executor.
    #[error("refused the caller: {reason}")]
    Refused {
        /// Why, as people read it.
        reason: String,
    },
    /// A budget is used up.
    #[error("over its limit: {what} ({used} of {limit})")]
    OverLimit {
        /// Of what, e.g. `running tasks`.
        what: String,
        /// How much is used.
        used: u64,
        /// How much there is.
        limit: u64,
    },
    /// The start key was used for another command.
    #[error("start key conflict")]
    KeyConflict,
    /// Whether the start happened cannot be known.
    #[error("outcome unknown: {reason}")]
    OutcomeUnknown {
        /// Why.
        reason: String,
    },
    /// The tenant may not work there.
    #[error("workdir outside the allowed roots")]
    WorkdirOutsideRoots {
        /// The workdir.
        path: Bytes,
    },
    /// The sandbox mode cannot be enforced here.
    #[error("sandbox mode {} is not available: {reason}", .mode.as_str())]
    SandboxUnavailable {
        /// The mode asked for.
        mode: SandboxMode,
        /// Why not.
        reason: String,
    },
    /// The executor is draining; nothing was started.
    #[error("the executor is stopping")]
    Stopping,
    /// The peer does not speak this protocol.
    #[error("the executor does not speak this protocol; {speaks}")]
    UnsupportedVersion {
        /// What it speaks, as a clause.
        speaks: String,
    },
    /// The executor could not be reached, or was lost before it answered. Made by clients, never sent.
    #[error("{endpoint}: {cause}")]
    Unavailable {
        /// Which executor.
        endpoint: String,
        /// Why.
        cause: String,
    },
    /// A fault of the executor.
    #[error("internal fault: {problem}")]
    Internal {
        /// What happened.
        problem: String,
    },
}

fn name_prefix(name: Option<&str>) -> String {
    name.map(|name| format!("{name}: ")).unwrap_or_default()
}

/// Defines an enum of words that travel as text, with both directions from one list.
macro_rules! words {
    ($(#[$doc:meta])* $name:ident { $($(#[$variant_doc:meta])* $variant:ident = $word:literal,)+ }) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum $name { $($(#[$variant_doc])* $variant,)+ }

        impl $name {
            /// All of them.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)+];

            /// The word on the wire and in messages.
            #[must_use]
            pub fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $word,)+ }
            }

            /// The one with this word.
            #[must_use]
            pub fn parse(word: &str) -> Option<Self> {
                Self::ALL.iter().copied().find(|one| one.as_str() == word)
            }
        }
    };
}

words! {
    /// A field that may not hold a NUL.
    NulField {
        /// The command's text.
        Command = "command",
        /// The directory.
        Workdir = "workdir",
        /// A variable's name or value.
        Environment = "environment",
    }
}

words! {
    /// A part of a request that has a size limit.
    SizedPart {
        /// The command's text.
        Command = "command",
        /// What the command reads.
        Stdin = "stdin",
        /// The directory.
        Workdir = "workdir",
        /// The environment: one variable, or all together.
        Environment = "environment",
        /// The message as a whole.
        Request = "request",
    }
}

words! {
    /// A step of starting a command, in the order in which they are taken.
    SpawnStage {
        /// Making pipes, stream files and the like.
        Prepare = "prepare",
        /// Making the process.
        Clone = "clone",
        /// A session of its own.
        Setsid = "setsid",
        /// Resource limits and signal dispositions.
        Limits = "limits",
        /// Descriptors 0, 1 and 2.
        Descriptors = "descriptors",
        /// Groups and user.
        Identity = "identity",
        /// The working directory.
        Chdir = "chdir",
        /// The sandbox.
        Sandbox = "sandbox",
        /// Finding and executing bash.
        Exec = "exec",
    }
}

impl ExecutorError {
    /// A field that is missing or malformed; the problem ends the sentence that the field begins.
    #[must_use]
    pub fn invalid(field: &str, problem: &str) -> Self {
        Self::InvalidRequest { field: field.to_owned(), problem: problem.to_owned() }
    }

    /// The status that carries this error.
    #[must_use]
    pub fn to_status(&self) -> Status {
        let mut metadata: HashMap<String, String> = HashMap::new();
        let mut put = |name: &str, value: String| {
            metadata.insert(name.to_owned(), value);
        };
        let (code, reason) = match self {
            Self::InvalidRequest { field, problem } => {
                put("field", field.clone());
                put("problem", problem.clone());
                (Code::InvalidArgument, "INVALID_REQUEST")
            }
            Self::NulByte { field } => {
                put("field", field.as_str().to_owned());
                (Code::InvalidArgument, "NUL_BYTE")
            }
            Self::TooLarge { part, name, bytes, limit } => {
                if let Some(name) = name {
                    put("name", name.clone());
                }
                put("bytes", bytes.to_string());
                put("limit", limit.to_string());
                (Code::ResourceExhausted, too_large_reason(*part))
            }
            Self::Spawn { stage, errno, path } => {
                put("stage", stage.as_str().to_owned());
                put("errno", errno.to_string());
                if let Some(path) = path.as_ref().filter(|path| path.len() <= MAX_PATH_IN_ERROR_BYTES) {
                    put("path", escape(path));
                }
                (Code::FailedPrecondition, "SPAWN_FAILED")
            }
            Self::UnknownTask(TaskId(id)) => {
                put("id", short(id));
                (Code::NotFound, "UNKNOWN_TASK")
            }
            Self::ForeignTask(TaskId(id)) => {
                put("id", short(id));
                (Code::PermissionDenied, "FOREIGN_TASK")
            }
            Self::Refused { reason } => {
                put("problem", reason.clone());
                (Code::Unauthenticated, "UNAUTHENTICATED")
            }
            Self::OverLimit { what, used, limit } => {
                put("what", what.clone());
                put("used", used.to_string());
                put("limit", limit.to_string());
                (Code::ResourceExhausted, "OVER_LIMIT")
            }
            Self::KeyConflict => (Code::AlreadyExists, "KEY_CONFLICT"),
            Self::OutcomeUnknown { reason } => {
                put("problem", reason.clone());
                (Code::FailedPrecondition, "KEY_UNKNOWN")
            }
            Self::WorkdirOutsideRoots { path } => {
                if path.len() <= MAX_PATH_IN_ERROR_BYTES {
                    put("path", escape(path));
                }
                (Code::PermissionDenied, "WORKDIR_OUTSIDE_ROOTS")
            }
            Self::SandboxUnavailable { mode, reason } => {
                put("mode", mode.as_str().to_owned());
                put("problem", reason.clone());
                (Code::FailedPrecondition, "SANDBOX_UNAVAILABLE")
            }
            Self::Stopping => (Code::Unavailable, "STOPPING"),
            Self::UnsupportedVersion { speaks } => {
                put("speaks", speaks.clone());
                (Code::Unimplemented, "UNSUPPORTED_VERSION")
            }
            Self::Internal { problem } | Self::Unavailable { cause: problem, .. } => {
                put("problem", problem.clone());
                (Code::Internal, "INTERNAL")
            }
        };
        let message = match self {
            // The id is the caller's own text and may be long.
            Self::UnknownTask(TaskId(id)) => Self::UnknownTask(TaskId(short(id))).to_string(),
            Self::ForeignTask(TaskId(id)) => Self::ForeignTask(TaskId(short(id))).to_string(),
            other => other.to_string(),
        };
        Status::with_error_details(code, message, ErrorDetails::with_error_info(reason, DOMAIN, metadata))
    }

    /// The error that a status carries; `None` where it carries none of this protocol: it then comes from the transport,
    /// a proxy or another server.
    #[must_use]
    pub fn from_status(status: &Status) -> Option<Self> {
        let info = status.get_details_error_info()?;
        if info.domain != DOMAIN {
            return None;
        }
        let text = |name: &str| info.metadata.get(name).cloned();
        let number = |name: &str| info.metadata.get(name).and_then(|value| value.parse::<u64>().ok());
        let words = |name: &str| text(name).unwrap_or_default();
        Some(match info.reason.as_str() {
            "INVALID_REQUEST" => Self::InvalidRequest { field: words("field"), problem: words("problem") },
            "NUL_BYTE" => Self::NulByte { field: NulField::parse(&words("field"))? },
            "SPAWN_FAILED" => Self::Spawn {
                stage: SpawnStage::parse(&words("stage")).unwrap_or(SpawnStage::Prepare),
                errno: words("errno").parse().ok()?,
                path: text("path").map(|path| unescape(&path)),
            },
            "UNKNOWN_TASK" => Self::UnknownTask(TaskId(words("id"))),
            "FOREIGN_TASK" => Self::ForeignTask(TaskId(words("id"))),
            "UNAUTHENTICATED" => Self::Refused { reason: words("problem") },
            "OVER_LIMIT" => Self::OverLimit { what: words("what"), used: number("used")?, limit: number("limit")? },
            "KEY_CONFLICT" => Self::KeyConflict,
            "KEY_UNKNOWN" => Self::OutcomeUnknown { reason: words("problem") },
            "WORKDIR_OUTSIDE_ROOTS" => Self::WorkdirOutsideRoots { path: unescape(&words("path")) },
            "SANDBOX_UNAVAILABLE" => {
                Self::SandboxUnavailable { mode: SandboxMode::parse(&words("mode"))?, reason: words("problem") }
            }
            "STOPPING" => Self::Stopping,
            "UNSUPPORTED_VERSION" => Self::UnsupportedVersion { speaks: words("speaks") },
            "INTERNAL" => Self::Internal { problem: words("problem") },
            reason => Self::TooLarge {
                part: SizedPart::ALL.iter().copied().find(|part| too_large_reason(*part) == reason)?,
                name: text("name"),
                bytes: number("bytes").unwrap_or_default(),
                limit: number("limit").unwrap_or_default(),
            },
        })
    }
}

fn too_large_reason(part: SizedPart) -> &'static str {
    match part {
        SizedPart::Command => "COMMAND_TOO_LARGE",
        SizedPart::Stdin => "STDIN_TOO_LARGE",
        SizedPart::Workdir => "WORKDIR_TOO_LARGE",
        SizedPart::Environment => "ENVIRONMENT_TOO_LARGE",
        SizedPart::Request => "REQUEST_TOO_LARGE",
    }
}

impl SandboxMode {
    /// All modes, from least to most.
    pub const ALL: [Self; 3] = [Self::ReadOnly, Self::WorkspaceWrite, Self::DangerFullAccess];

    /// The mode with this word.
    #[must_use]
    pub fn parse(word: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|mode| mode.as_str() == word)
    }
}

/// Metadata values are text and paths are bytes: every byte that is not printable ASCII, and `%`, becomes `%XX`.
fn escape(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len());
    for byte in bytes {
        if matches!(byte, b' '..=b'~') && *byte != b'%' {
            text.push(char::from(*byte));
        } else {
            text.push_str(&format!("%{byte:02X}"));
        }
    }
    text
}

fn unescape(text: &str) -> Bytes {
    let bytes = text.as_bytes();
    let mut out = Vec::with_capacity(bytes.len());
    let mut rest = bytes;
    while let Some((first, tail)) = rest.split_first() {
        let hex = tail
            .get(..2)
            .and_then(|hex| std::str::from_utf8(hex).ok())
            .and_then(|hex| u8::from_str_radix(hex, 16).ok());
        match hex {
            Some(byte) if *first == b'%' => {
                out.push(byte);
                rest = &tail[2..];
            }
            _ => {
                out.push(*first);
                rest = tail;
            }
        }
    }
    Bytes::from(out)
}

/// A caller's own text is cut to what fits into a reply's headers.
fn short(text: &str) -> String {
    const MAX_BYTES: usize = 256;
    let mut end = text.len().min(MAX_BYTES);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text[..end].to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one_of_each() -> Vec<ExecutorError> {
        let mut all = vec![
            ExecutorError::invalid("key", "is empty"),
            ExecutorError::UnknownTask(TaskId("bash-9".into())),
            ExecutorError::ForeignTask(TaskId("bash-9".into())),
            ExecutorError::Refused { reason: "no token".into() },
            ExecutorError::OverLimit { what: "running tasks".into(), used: 256, limit: 256 },
            ExecutorError::KeyConflict,
            ExecutorError::OutcomeUnknown { reason: "restarted".into() },
            ExecutorError::WorkdirOutsideRoots { path: Bytes::from_static(b"/a %\xff\n") },
            ExecutorError::Stopping,
            ExecutorError::UnsupportedVersion { speaks: "it speaks executor.v1".into() },
            ExecutorError::Internal { problem: "the keeper is gone".into() },
        ];
        all.extend(NulField::ALL.iter().map(|field| ExecutorError::NulByte { field: *field }));
        all.extend(SizedPart::ALL.iter().map(|part| ExecutorError::TooLarge {
            part: *part,
            name: (*part == SizedPart::Environment).then(|| "X".to_owned()),
            bytes: 9,
            limit: 8,
        }));
        all.extend(SpawnStage::ALL.iter().map(|stage| ExecutorError::Spawn {
            stage: *stage,
            errno: 2,
            path: Some(Bytes::from_static(b"/tmp/\xc3\xa9")),
        }));
        all.extend(
            SandboxMode::ALL.map(|mode| ExecutorError::SandboxUnavailable { mode, reason: "no Landlock".into() }),
        );
        all
    }

    #[test]
    fn every_error_comes_back_from_the_wire_as_it_was() {
        for error in one_of_each() {
            assert_eq!(ExecutorError::from_status(&error.to_status()), Some(error));
        }
    }

    #[test]
    fn every_reason_is_listed_in_the_protocol_file() {
        let proto = include_str!("../executor/v1/executor.proto");
        for error in one_of_each() {
            let status = error.to_status();
            let reason = status.get_details_error_info().expect("errors carry a reason").reason;
            assert!(proto.contains(&format!("//   {reason} ")), "{reason} is not described");
        }
    }

    #[test]
    fn a_status_of_somebody_else_is_not_ours() {
        assert_eq!(ExecutorError::from_status(&Status::unavailable("proxy")), None);
        let foreign = ErrorDetails::with_error_info("KEY_CONFLICT", "example.com", HashMap::new());
        assert_eq!(ExecutorError::from_status(&Status::with_error_details(Code::Aborted, "x", foreign)), None);
    }

    #[test]
    fn an_error_fits_into_headers_whatever_the_caller_sent() {
        let long = "x".repeat(1 << 20);
        let errors = [
            ExecutorError::UnknownTask(TaskId(long.clone())),
            ExecutorError::Spawn { stage: SpawnStage::Chdir, errno: 36, path: Some(Bytes::from(long)) },
        ];
        for error in errors {
            let status = error.to_status();
            assert!(status.message().len() + status.details().len() < 8 * 1024, "{}", status.details().len());
        }
    }
}
