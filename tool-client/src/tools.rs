//! The three tools: what the model is told, what its arguments must be, and the calls that they become.

use std::sync::Arc;

use tokio_util::sync::CancellationToken;

use crate::{executor::Executor, permissions::PreExecute, session::Session};

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

/// Kinds of errors that harnesses tell apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorCode {
    /// The arguments do not fit the schema. `INVALID_ARGS`.
    InvalidArgs,
    /// No such tool. `UNKNOWN_TOOL`.
    UnknownTool,
}

/// The abort of one call: a token that is cancelled, and the reason that is shown when it was cancelled before the call began.
#[derive(Debug, Clone, Default)]
pub struct Abort {
    /// Raised by the harness.
    pub token: CancellationToken,
    /// Shown as `aborted before spawn: <reason>`. `None`: `cancelled`.
    pub reason: Option<String>,
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

    /// Makes one call. `arguments` is the model's own JSON text. Never fails: whatever goes wrong is an error result.
    pub async fn call(&self, session: Option<&Session>, tool: &str, arguments: &str, abort: &Abort) -> ToolResult {
        let _ = (session, tool, arguments, abort, &self.executor, &self.hook);
        unimplemented!()
    }
}
