//! The hook that may stop a tool call before anything happens.

use async_trait::async_trait;
use executor_proto::types::SandboxMode;

use crate::{session::Session, text::check};

/// What a hook says of a call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Permission {
    /// Go on.
    Allow,
    /// The call becomes an error result with this reason.
    Deny(String),
    /// Ask a person, showing this question; a no becomes an error result with the reason that [`PreExecute::ask`] gives.
    Ask(String),
}

/// A tool call that is about to be made: its arguments have passed the tool's checks.
#[derive(Debug, Clone)]
pub struct PendingCall<'a> {
    /// `bash`, `bash_output` or `bash_kill`.
    pub tool: &'a str,
    /// The arguments that the tool knows; unknown ones are not in here.
    pub arguments: &'a serde_json::Map<String, serde_json::Value>,
    /// For whom; `None`: no agent.
    pub session: Option<&'a Session>,
    /// The harness asks for more than the session has. `None`: it does not.
    pub wider: Option<WiderSandbox>,
}

/// A call that is to run in a wider sandbox mode than its session's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WiderSandbox {
    /// The session's mode.
    pub session: SandboxMode,
    /// The mode asked for.
    pub asked: SandboxMode,
}

impl WiderSandbox {
    /// The question that a person is asked.
    #[must_use]
    pub fn question(&self) -> String {
        check::wider_sandbox(self.asked, self.session)
    }
}

/// Decides whether a call is made. The default allows everything that the session may, and asks a person about more. Both futures are dropped when a `bash` call is aborted.
#[async_trait]
pub trait PreExecute: Send + Sync + std::fmt::Debug {
    /// Called once per call, before anything reaches the executor.
    async fn check(&self, call: &PendingCall<'_>) -> Permission {
        call.wider.map_or(Permission::Allow, |wider| Permission::Ask(wider.question()))
    }

    /// Puts a question to a person.
    ///
    /// # Errors
    /// A no, with its reason.
    async fn ask(&self, call: &PendingCall<'_>, question: &str) -> Result<(), String> {
        let _ = (call, question);
        Err("nobody is there to be asked".to_owned())
    }
}
