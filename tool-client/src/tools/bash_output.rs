//! `bash_output`: what a task wrote since the previous call.

use executor_proto::types::{OwnerId, TaskId};

use super::{ToolResult, arguments::Arguments, task_id};
use crate::{
    executor::Executor,
    text::{
        self,
        failure::{Asked, failure},
    },
};

/// A call whose arguments are right.
#[derive(Debug)]
pub(super) struct BashOutput(TaskId);

impl BashOutput {
    /// # Errors
    /// The message of the first check that fails.
    pub(super) fn check(arguments: &Arguments) -> Result<Self, String> {
        task_id::check(arguments).map(Self)
    }

    pub(super) async fn call(self, executor: &dyn Executor, owner: Option<&OwnerId>) -> ToolResult {
        match executor.read_output(owner, &self.0, None).await {
            Ok(output) => ToolResult::success(text::task::output(&output)),
            Err(error) => {
                let asked = Asked { endpoint: executor.endpoint(), workdir: None, task: Some(&self.0) };
                ToolResult::error(&failure(&error, &asked))
            }
        }
    }
}
