//! The three tools: what the model is told, what its arguments must be, and the calls that they become.
//!
//! A call passes `arguments` (the schema), the tool's own checks and the [`PreExecute`] hook, and only then reaches the
//! executor. Whatever fails becomes an error result with one text.

use std::sync::Arc;

use executor_proto::types::{OwnerId, SandboxMode};
use serde_json::json;
use tokio_util::sync::CancellationToken;

#[cfg(fuzzing)]
pub use self::arguments::fuzzing::arguments as fuzz_arguments;
pub use self::definitions::{ToolDefinition, definitions};
use self::{arguments::Arguments, bash::Bash, bash_kill::BashKill, bash_output::BashOutput, definitions::Tool};
use crate::{
    executor::Executor,
    permissions::{PendingCall, Permission, PreExecute, WiderSandbox},
    session::Session,
    text::{self, check},
};

pub(crate) mod arguments;
mod bash;
mod bash_kill;
mod bash_output;
pub(crate) mod definitions;
mod json;
mod path;
mod task_id;

#[cfg(test)]
pub(crate) mod fake;
#[cfg(test)]
mod tests;

/// What a call answers the model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ToolResult {
    /// The one text block.
    pub text: String,
    /// Whether it is an error result.
    pub is_error: bool,
    /// The machine-readable kind of an error that was found before anything ran.
    pub code: Option<ErrorCode>,
}

impl ToolResult {
    /// As harnesses store it: `{"content": [{"type": "text", "text": …}], "isError": …}`.
    #[must_use]
    pub fn to_json(&self) -> serde_json::Value {
        json!({"content": [{"type": "text", "text": self.text}], "isError": self.is_error})
    }

    fn success(text: String) -> Self {
        Self { text, is_error: false, code: None }
    }

    fn error(message: &str) -> Self {
        Self { text: text::error(message), is_error: true, code: None }
    }

    fn error_of(code: ErrorCode, message: &str) -> Self {
        Self { code: Some(code), ..Self::error(message) }
    }
}

/// Kinds of errors that harnesses tell apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorCode {
    /// The arguments do not fit the schema. `INVALID_ARGS`.
    InvalidArgs,
    /// No such tool. `UNKNOWN_TOOL`.
    UnknownTool,
}

impl ErrorCode {
    /// The word that harnesses know it by.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::InvalidArgs => "INVALID_ARGS",
            Self::UnknownTool => "UNKNOWN_TOOL",
        }
    }
}

/// The abort of one call: a token that is cancelled, and the reason that is shown when it was cancelled before the call began.
#[derive(Debug, Clone, Default)]
pub struct Abort {
    /// Raised by the harness.
    pub token: CancellationToken,
    /// Shown as `aborted before spawn: <reason>`. `None`: `cancelled`.
    pub reason: Option<String>,
}

/// A section of the system prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PromptSection {
    /// Its name.
    pub name: &'static str,
    /// Sections are joined in ascending order.
    pub order: u32,
    /// What it says.
    pub text: &'static str,
}

/// What the system prompt says of the tools.
#[must_use]
pub fn prompt_section() -> PromptSection {
    PromptSection { name: "tool:bash", order: 105, text: text::PROMPT }
}

/// The tools over one executor. Cheap to clone. Holds no state of tasks and owners: building it anew loses nothing.
#[derive(Debug, Clone)]
pub struct Tools {
    executor: Arc<dyn Executor>,
    hook: Option<Arc<dyn PreExecute>>,
}

impl Tools {
    /// The tools over an executor.
    #[must_use]
    pub fn new(executor: Arc<dyn Executor>) -> Self {
        Self { executor, hook: None }
    }

    /// With a hook that every call passes.
    #[must_use]
    pub fn with_hook(mut self, hook: Arc<dyn PreExecute>) -> Self {
        self.hook = Some(hook);
        self
    }

    /// Makes one call. `arguments` is the model's own JSON text. Never fails: whatever goes wrong is an error result. The
    /// abort is heard by `bash` only; what `bash_output` and `bash_kill` ask takes bounded time.
    pub async fn call(&self, session: Option<&Session>, tool: &str, arguments: &str, abort: &Abort) -> ToolResult {
        self.call_in(None, session, tool, arguments, abort).await
    }

    /// As [`Tools::call`], where the harness wants another sandbox mode for this call than the session's. A wider one needs the
    /// hook's permission; without a hook it is refused. `None`: the session's mode.
    pub async fn call_in(
        &self,
        sandbox: Option<SandboxMode>,
        session: Option<&Session>,
        tool: &str,
        arguments: &str,
        abort: &Abort,
    ) -> ToolResult {
        let checked = match CheckedCall::new(session, tool, arguments) {
            Ok(checked) => checked,
            Err(refused) => return refused,
        };
        let (checked, wider) = checked.sandboxed(sandbox, session);
        let call = match self.permitted(session, checked, wider, abort).await {
            Ok(call) => call,
            Err(refused) => return refused,
        };
        let owner: Option<&OwnerId> = session.map(|session| &session.id);
        match call {
            Call::Bash(bash) => bash.call(&*self.executor, owner, abort).await,
            Call::BashKill(kill) => kill.call(&*self.executor, owner).await,
            Call::BashOutput(output) => output.call(&*self.executor, owner).await,
        }
    }

    /// Asks the hook, and looks at the abort before and meanwhile.
    async fn permitted(
        &self,
        session: Option<&Session>,
        checked: CheckedCall,
        wider: Option<WiderSandbox>,
        abort: &Abort,
    ) -> Result<Call, ToolResult> {
        let CheckedCall { tool, arguments, call } = checked;
        let hook = async {
            let Some(hook) = &self.hook else {
                return wider.map_or(Ok(()), |wider| Err(check::nobody_allows(wider.asked, wider.session)));
            };
            let arguments = arguments.to_map();
            let pending = PendingCall { tool: tool.name(), arguments: &arguments, session, wider };
            match hook.check(&pending).await {
                Permission::Allow => Ok(()),
                Permission::Deny(reason) => Err(reason),
                Permission::Ask(question) => hook.ask(&pending, &question).await,
            }
        };
        let verdict = if matches!(call, Call::Bash(_)) {
            let aborted = || check::aborted_before_spawn(abort.reason.as_deref());
            tokio::select! {
                biased;
                () = abort.token.cancelled() => Err(aborted()),
                verdict = hook => verdict,
            }
        } else {
            hook.await
        };
        verdict.map(|()| call).map_err(|message| ToolResult::error(&message))
    }
}

/// A call that has passed every check that needs nobody else.
struct CheckedCall {
    tool: Tool,
    arguments: Arguments,
    call: Call,
}

enum Call {
    Bash(Bash),
    BashKill(BashKill),
    BashOutput(BashOutput),
}

impl CheckedCall {
    fn new(session: Option<&Session>, tool: &str, arguments: &str) -> Result<Self, ToolResult> {
        let Some(tool) = Tool::named(tool) else {
            return Err(ToolResult::error_of(ErrorCode::UnknownTool, &check::unknown_tool(tool)));
        };
        let arguments = Arguments::parse(tool, arguments).map_err(|violations| {
            ToolResult::error_of(ErrorCode::InvalidArgs, &check::invalid_arguments(&violations))
        })?;
        let call = match tool {
            Tool::Bash => Bash::check(&arguments, session).map(Call::Bash),
            Tool::BashKill => BashKill::check(&arguments).map(Call::BashKill),
            Tool::BashOutput => BashOutput::check(&arguments).map(Call::BashOutput),
        }
        .map_err(|message| ToolResult::error(&message))?;
        Ok(Self { tool, arguments, call })
    }

    /// In this sandbox mode, or the session's, and whether that is more than the session has.
    fn sandboxed(mut self, asked: Option<SandboxMode>, session: Option<&Session>) -> (Self, Option<WiderSandbox>) {
        let own = session.and_then(|session| session.sandbox);
        let Call::Bash(bash) = &mut self.call else { return (self, None) };
        bash.set_sandbox(asked.or(own));
        let wider = asked.zip(own).filter(|(asked, own)| asked > own);
        (self, wider.map(|(asked, session)| WiderSandbox { session, asked }))
    }
}
