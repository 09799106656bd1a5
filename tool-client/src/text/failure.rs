//! What is said when the executor did not do what it was asked for. Without the `Error: ` in front.

use executor_proto::{
    error::{ExecutorError, NulField, SizedPart, SpawnStage},
    types::TaskId,
};
use nix::errno::Errno;

use super::{check, decode, task};

/// What was asked, for what an error does not repeat. Texts name what the caller asked for where they can, so that they
/// are the same from every executor.
#[derive(Debug, Clone, Copy, Default)]
pub struct Asked<'a> {
    /// The executor, as people name it.
    pub endpoint: &'a str,
    /// The directory that the command was to start in.
    pub workdir: Option<&'a [u8]>,
    /// The task.
    pub task: Option<&'a TaskId>,
}

/// The message of an error.
#[must_use]
pub fn failure(error: &ExecutorError, asked: &Asked<'_>) -> String {
    let unavailable = |cause: &str| format!("executor unavailable: {}: {cause}", asked.endpoint);
    match error {
        ExecutorError::NulByte { field } => check::nul_byte(match field {
            NulField::Command => "command",
            NulField::Workdir => "workdir",
            NulField::Environment => "environment",
        }),
        ExecutorError::TooLarge { part, name, bytes, limit } => {
            let part = match part {
                SizedPart::Command => "command",
                SizedPart::Stdin => "stdin",
                SizedPart::Workdir => "workdir",
                SizedPart::Environment => "environment",
                SizedPart::Request => "request",
            };
            let name = name.as_ref().map(|name| format!("{name}: ")).unwrap_or_default();
            format!("{part} too large: {name}{bytes} bytes, at most {limit}")
        }
        ExecutorError::Spawn { stage, errno, path } => spawn(*stage, *errno, &workdir(path.as_deref(), asked)),
        ExecutorError::UnknownTask(id) => task::unknown(asked.task.unwrap_or(id)),
        ExecutorError::ForeignTask(id) => task::foreign(asked.task.unwrap_or(id)),
        ExecutorError::Refused { reason } => format!("executor refused the caller: {reason}"),
        ExecutorError::OverLimit { what, used, limit } => format!(
            "executor over its limit: {what} ({used} of {limit}); finish or kill a background task, or try again later"
        ),
        ExecutorError::KeyConflict => "start key conflict: the key was used for another command".to_owned(),
        ExecutorError::OutcomeUnknown { reason } => {
            format!("outcome unknown: the command may have run ({reason})")
        }
        ExecutorError::WorkdirOutsideRoots { path } => {
            format!("workdir \"{}\" is outside the allowed roots", workdir(Some(path), asked))
        }
        ExecutorError::SandboxUnavailable { mode, reason } => {
            format!("sandbox mode {} is not available here: {reason}", mode.as_str())
        }
        ExecutorError::Unavailable { endpoint, cause } => format!("executor unavailable: {endpoint}: {cause}"),
        // Their own messages are clauses that say what happened; nothing was started in any of them.
        ExecutorError::InvalidRequest { .. }
        | ExecutorError::Stopping
        | ExecutorError::UnsupportedVersion { .. }
        | ExecutorError::Internal { .. } => unavailable(&error.to_string()),
    }
}

/// The directory that an error is about: the one that was asked for where that is a whole path, else the one that the
/// executor made of it.
fn workdir(path: Option<&[u8]>, asked: &Asked<'_>) -> String {
    let whole = asked.workdir.filter(|workdir| workdir.starts_with(b"/"));
    let made = path.filter(|path| !path.is_empty());
    decode(whole.or(made).or(asked.workdir).unwrap_or_default()).into_owned()
}

fn spawn(stage: SpawnStage, errno: i32, workdir: &str) -> String {
    match (stage, Errno::from_raw(errno)) {
        (SpawnStage::Exec, Errno::ENOENT) => "spawn bash ENOENT: bash not found on PATH".to_owned(),
        (SpawnStage::Chdir, Errno::ENOENT) => format!("spawn bash ENOENT: workdir \"{workdir}\" does not exist"),
        (SpawnStage::Chdir, Errno::EACCES) => format!("spawn bash EACCES: workdir \"{workdir}\": permission denied"),
        (SpawnStage::Chdir, Errno::ENOTDIR) => format!("spawn ENOTDIR: workdir \"{workdir}\" is not a directory"),
        (SpawnStage::Chdir, Errno::ELOOP) => format!("spawn ELOOP: workdir \"{workdir}\": too many symbolic links"),
        (SpawnStage::Chdir, Errno::ENAMETOOLONG) => {
            format!("spawn ENAMETOOLONG: workdir \"{workdir}\": name too long")
        }
        (stage, Errno::UnknownErrno) => format!("spawn bash errno {errno}: {}", stage.as_str()),
        (stage, name) => format!("spawn bash {name:?}: {}", stage.as_str()),
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use executor_proto::types::SandboxMode;

    use super::*;

    fn said(error: &ExecutorError) -> String {
        let task = TaskId("bash-7".to_owned());
        failure(error, &Asked { endpoint: "unix:/s", workdir: Some(b"/asked/\xff"), task: Some(&task) })
    }

    #[test]
    fn every_spawn_error_says_what_is_wrong() {
        use SpawnStage::{Chdir, Clone, Exec, Identity, Prepare};
        let cases = [
            (Chdir, number(Errno::ENOENT), "spawn bash ENOENT: workdir \"/asked/\u{fffd}\" does not exist"),
            (Chdir, number(Errno::EACCES), "spawn bash EACCES: workdir \"/asked/\u{fffd}\": permission denied"),
            (Chdir, number(Errno::ENOTDIR), "spawn ENOTDIR: workdir \"/asked/\u{fffd}\" is not a directory"),
            (Chdir, number(Errno::ELOOP), "spawn ELOOP: workdir \"/asked/\u{fffd}\": too many symbolic links"),
            (Chdir, number(Errno::ENAMETOOLONG), "spawn ENAMETOOLONG: workdir \"/asked/\u{fffd}\": name too long"),
            (Chdir, number(Errno::EIO), "spawn bash EIO: chdir"),
            (Exec, number(Errno::ENOENT), "spawn bash ENOENT: bash not found on PATH"),
            (Exec, number(Errno::EACCES), "spawn bash EACCES: exec"),
            (Exec, number(Errno::E2BIG), "spawn bash E2BIG: exec"),
            (Clone, number(Errno::EAGAIN), "spawn bash EAGAIN: clone"),
            (Identity, number(Errno::EPERM), "spawn bash EPERM: identity"),
            (Prepare, number(Errno::ENOENT), "spawn bash ENOENT: prepare"),
            (Prepare, number(Errno::EMFILE), "spawn bash EMFILE: prepare"),
            (Prepare, 4_000, "spawn bash errno 4000: prepare"),
        ];
        for (stage, errno, text) in cases {
            assert_eq!(said(&ExecutorError::Spawn { stage, errno, path: None }), text);
        }
    }

    fn number(errno: Errno) -> i32 {
        errno as i32
    }

    #[test]
    fn the_workdir_is_the_one_asked_for_or_else_the_executors() {
        let error = |path: Option<&'static str>| ExecutorError::Spawn {
            stage: SpawnStage::Chdir,
            errno: number(Errno::ENOENT),
            path: path.map(Bytes::from),
        };
        let text = |asked: Option<&'static str>, path| {
            failure(&error(path), &Asked { workdir: asked.map(str::as_bytes), ..Asked::default() })
        };
        let missing = |path: &str| format!("spawn bash ENOENT: workdir \"{path}\" does not exist");
        assert_eq!(text(Some("/a/../b"), Some("/b")), missing("/a/../b"));
        assert_eq!(text(Some("sub"), Some("/start/sub")), missing("/start/sub"));
        assert_eq!(text(Some("sub"), None), missing("sub"));
        assert_eq!(text(None, Some("/start")), missing("/start"));
    }

    #[test]
    fn every_other_error_has_its_text() {
        let id = || TaskId("cut off".to_owned());
        let too_large = |part, name: Option<&str>| ExecutorError::TooLarge {
            part,
            name: name.map(str::to_owned),
            bytes: 9,
            limit: 8,
        };
        let cases = [
            (ExecutorError::NulByte { field: NulField::Command }, "invalid command: contains a NUL byte"),
            (ExecutorError::NulByte { field: NulField::Workdir }, "invalid workdir: contains a NUL byte"),
            (ExecutorError::NulByte { field: NulField::Environment }, "invalid environment: contains a NUL byte"),
            (too_large(SizedPart::Command, None), "command too large: 9 bytes, at most 8"),
            (too_large(SizedPart::Stdin, None), "stdin too large: 9 bytes, at most 8"),
            (too_large(SizedPart::Workdir, None), "workdir too large: 9 bytes, at most 8"),
            (too_large(SizedPart::Environment, None), "environment too large: 9 bytes, at most 8"),
            (too_large(SizedPart::Environment, Some("X")), "environment too large: X: 9 bytes, at most 8"),
            (too_large(SizedPart::Request, None), "request too large: 9 bytes, at most 8"),
            (ExecutorError::UnknownTask(id()), "unknown bash task \"bash-7\""),
            (ExecutorError::ForeignTask(id()), "task bash-7 belongs to another session"),
            (ExecutorError::Refused { reason: "bad token".into() }, "executor refused the caller: bad token"),
            (
                ExecutorError::OverLimit { what: "running tasks".into(), used: 4, limit: 4 },
                "executor over its limit: running tasks (4 of 4); finish or kill a background task, or try again later",
            ),
            (ExecutorError::KeyConflict, "start key conflict: the key was used for another command"),
            (
                ExecutorError::OutcomeUnknown { reason: "connection lost".into() },
                "outcome unknown: the command may have run (connection lost)",
            ),
            (
                ExecutorError::WorkdirOutsideRoots { path: Bytes::from_static(b"/x") },
                "workdir \"/asked/\u{fffd}\" is outside the allowed roots",
            ),
            (
                ExecutorError::SandboxUnavailable { mode: SandboxMode::ReadOnly, reason: "no Landlock".into() },
                "sandbox mode read-only is not available here: no Landlock",
            ),
            (ExecutorError::Stopping, "executor unavailable: unix:/s: the executor is stopping"),
            (
                ExecutorError::UnsupportedVersion { speaks: "it speaks executor.v2".into() },
                "executor unavailable: unix:/s: the executor does not speak this protocol; it speaks executor.v2",
            ),
            (
                ExecutorError::Unavailable { endpoint: "http://h:1".into(), cause: "connection refused".into() },
                "executor unavailable: http://h:1: connection refused",
            ),
            (
                ExecutorError::Internal { problem: "the keeper is gone".into() },
                "executor unavailable: unix:/s: internal fault: the keeper is gone",
            ),
            (ExecutorError::invalid("start_key", "is empty"), "executor unavailable: unix:/s: start_key is empty"),
        ];
        for (error, text) in cases {
            assert_eq!(said(&error), text);
        }
    }
}
