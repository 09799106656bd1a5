//! `bash`: checks, where the command starts, and the run or task that it becomes.

use std::os::unix::ffi::OsStrExt;

use bytes::Bytes;
use executor_proto::types::{CommandSpec, OwnerId, SandboxMode};

use super::{
    Abort, ToolResult,
    arguments::{Arguments, is_blank},
    path,
};
use crate::{
    executor::Executor,
    session::Session,
    text::{
        self, check,
        failure::{Asked, failure},
    },
};

/// A call whose arguments are right.
#[derive(Debug)]
pub(super) struct Bash {
    spec: CommandSpec,
    background: bool,
}

impl Bash {
    /// Checks the values of the arguments, in the order in which they are declared, and what the kernel cannot take.
    ///
    /// # Errors
    /// The message of the first check that fails.
    pub(super) fn check(arguments: &Arguments, session: Option<&Session>) -> Result<Self, String> {
        let command = arguments.string("command").unwrap_or_default();
        for (name, value) in
            [("command", command), ("description", arguments.string("description").unwrap_or_default())]
        {
            if is_blank(value) {
                return Err(check::blank(name));
            }
        }
        let timeout_ms = arguments.number("timeoutMs");
        if let Some(timeout_ms) = timeout_ms
            && !(timeout_ms.is_finite() && timeout_ms > 0.0)
        {
            return Err(check::invalid_timeout(timeout_ms));
        }
        let workdir = workdir(arguments.string("workdir"), session);
        for (name, value) in [("command", command.as_bytes()), ("workdir", workdir.as_deref().unwrap_or_default())] {
            if value.contains(&0) {
                return Err(check::nul_byte(name));
            }
        }
        let spec = CommandSpec {
            command: Bytes::copy_from_slice(command.as_bytes()),
            workdir,
            timeout_ms,
            workspace: session.and_then(cwd).filter(|cwd| cwd.starts_with(b"/")).map(Bytes::copy_from_slice),
            ..CommandSpec::default()
        };
        Ok(Self { spec, background: arguments.bool("run_in_background").unwrap_or(false) })
    }

    /// The sandbox mode that it asks for; `None`: the executor's default.
    pub(super) fn set_sandbox(&mut self, mode: Option<SandboxMode>) {
        self.spec.sandbox_mode = mode;
    }

    /// Makes the call. The abort ends a run; a task that was started lives on.
    pub(super) async fn call(self, executor: &dyn Executor, owner: Option<&OwnerId>, abort: &Abort) -> ToolResult {
        let workdir = self.spec.workdir.clone();
        let outcome = if self.background {
            executor.start_task(owner, self.spec).await.map(|id| ToolResult::success(text::task::started(&id)))
        } else {
            executor.run(owner, self.spec, &abort.token, None).await.map(|result| {
                if result.aborted {
                    ToolResult::error(&text::run::aborted(&result))
                } else {
                    ToolResult::success(text::run::result(&result))
                }
            })
        };
        outcome.unwrap_or_else(|error| {
            let asked = Asked { endpoint: executor.endpoint(), workdir: workdir.as_deref(), task: None };
            ToolResult::error(&failure(&error, &asked))
        })
    }
}

/// Where the command starts. An absolute workdir is taken as it is; a relative one is resolved against the session's
/// directory, or else by the executor, which knows where it was started; without one it is the session's directory, or
/// else the executor's choice.
fn workdir(given: Option<&str>, session: Option<&Session>) -> Option<Bytes> {
    let cwd = session.and_then(cwd);
    match given {
        None => cwd.map(Bytes::copy_from_slice),
        Some(given) if given.starts_with('/') => Some(Bytes::copy_from_slice(given.as_bytes())),
        Some(given) => Some(Bytes::from(path::resolve(cwd.unwrap_or_default(), given.as_bytes()))),
    }
}

/// The session's directory.
fn cwd(session: &Session) -> Option<&[u8]> {
    session.cwd.as_ref().map(|cwd| cwd.as_os_str().as_bytes())
}

#[cfg(test)]
mod tests {
    use super::{super::definitions::Tool, *};

    fn check(arguments: &serde_json::Value) -> Result<Bash, String> {
        let session = Session { id: OwnerId("s".to_owned()), cwd: Some("/srv".into()), sandbox: None };
        let arguments = Arguments::parse(Tool::Bash, &arguments.to_string()).expect("the schema is kept");
        Bash::check(&arguments, Some(&session))
    }

    #[test]
    fn the_first_check_that_fails_is_named() {
        let cases = [
            (r#"{"command":"\ufeff","description":"","timeoutMs":0}"#, "invalid command: expected a non-empty string"),
            (
                r#"{"command":"x\u0000","description":"\u2003","timeoutMs":0}"#,
                "invalid description: expected a non-empty string",
            ),
            (
                r#"{"command":"x\u0000","description":"d","timeoutMs":0}"#,
                "invalid timeoutMs: expected a positive number, got 0",
            ),
            (
                r#"{"command":"x","description":"d","timeoutMs":-0.0}"#,
                "invalid timeoutMs: expected a positive number, got 0",
            ),
            (
                r#"{"command":"x","description":"d","timeoutMs":-5}"#,
                "invalid timeoutMs: expected a positive number, got -5",
            ),
            (
                r#"{"command":"x","description":"d","timeoutMs":-1e-7}"#,
                "invalid timeoutMs: expected a positive number, got -1e-7",
            ),
            (
                r#"{"command":"x","description":"d","timeoutMs":1e999}"#,
                "invalid timeoutMs: expected a positive number, got null",
            ),
            (
                r#"{"command":"x\u0000","description":"d\u0000","workdir":"\u0000"}"#,
                "invalid command: contains a NUL byte",
            ),
            (
                r#"{"command":"x","description":"d","workdir":"a\u0000","run_in_background":true}"#,
                "invalid workdir: contains a NUL byte",
            ),
        ];
        for (arguments, message) in cases {
            let arguments = Arguments::parse(Tool::Bash, arguments).expect("the schema is kept");
            assert_eq!(Bash::check(&arguments, None).expect_err("it fails"), message);
        }
    }

    #[test]
    fn a_call_becomes_what_the_executor_is_asked() {
        let bash =
            check(&serde_json::json!({"command": " x\n", "description": "d", "timeoutMs": 150.5, "workdir": "a/",
            "env": {"A": "b"}, "stdin": "s", "run_in_background": true}))
            .expect("valid");
        let spec = CommandSpec {
            command: Bytes::from_static(b" x\n"),
            workdir: Some(Bytes::from_static(b"/srv/a")),
            timeout_ms: Some(150.5),
            workspace: Some(Bytes::from_static(b"/srv")),
            ..CommandSpec::default()
        };
        assert_eq!((bash.spec, bash.background), (spec, true));
        assert!(!check(&serde_json::json!({"command": "x", "description": "d"})).expect("valid").background);
    }

    #[test]
    fn the_workdir_follows_the_session() {
        let session =
            |cwd: Option<&str>| Session { id: OwnerId(String::new()), cwd: cwd.map(Into::into), sandbox: None };
        let (with, without) = (session(Some("/srv/x/")), session(None));
        let cases = [
            (None, Some(&with), Some("/srv/x/")),
            (None, Some(&without), None),
            (None, None, None),
            (Some("/usr/../etc/"), Some(&with), Some("/usr/../etc/")),
            (Some("/usr/../etc/"), None, Some("/usr/../etc/")),
            (Some("sub/"), Some(&with), Some("/srv/x/sub")),
            (Some(".."), Some(&with), Some("/srv")),
            (Some("."), Some(&with), Some("/srv/x")),
            (Some(""), Some(&with), Some("/srv/x")),
            (Some("~"), Some(&with), Some("/srv/x/~")),
            (Some("sub"), Some(&without), Some("sub")),
            (Some("./sub/../deep//"), None, Some("deep")),
            (Some("../.."), None, Some("../..")),
            (Some(""), None, Some(".")),
        ];
        for (given, session, expected) in cases {
            assert_eq!(workdir(given, session).as_deref(), expected.map(str::as_bytes), "{given:?}");
        }
    }
}
