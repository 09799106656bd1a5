//! `bash_kill`: ends a task.

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
pub(super) struct BashKill(TaskId);

impl BashKill {
    /// # Errors
    /// The message of the first check that fails.
    pub(super) fn check(arguments: &Arguments) -> Result<Self, String> {
        task_id::check(arguments).map(Self)
    }

    pub(super) async fn call(self, executor: &dyn Executor, owner: Option<&OwnerId>) -> ToolResult {
        let said = match executor.kill_task(owner, &self.0).await {
            Ok(outcome) => text::task::killed(&self.0, &outcome),
            Err(error) => {
                let asked = Asked { endpoint: executor.endpoint(), workdir: None, task: Some(&self.0) };
                Err(failure(&error, &asked))
            }
        };
        said.map_or_else(|message| ToolResult::error(&message), ToolResult::success)
    }
}
