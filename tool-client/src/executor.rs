//! The executor trait: what the tools, the command line and harnesses call, wherever commands run.
//!
//! # The contract
//! - Every call ends. A run ends by `min(exit, timeout + grace)` and about two seconds; other calls by their deadline.
//! - The same calls give the same values from every implementation; only times, process ids and paths differ.
//! - `owner` is the session that a call is made for. `None` is no session; the empty string is a real owner. A task that
//!   has an owner answers everybody else of its tenant with [`ExecutorError::ForeignTask`].
//! - Exit codes, signals and timeouts are results. An error means that the command did not run, except
//!   [`ExecutorError::OutcomeUnknown`].
//! - Nothing but what is in [`CommandSpec`] reaches a command.
//! - Futures may be dropped: a dropped `run` ends its command (its caller is gone); a dropped `start_task` may or may not
//!   have started one; all others change nothing by being dropped, except that a dropped `read_output` may have moved the
//!   read position.

use std::{fmt, time::Duration};

use async_trait::async_trait;
use executor_proto::types::{
    CommandSpec, ExecutorInfo, KillOutcome, OwnerId, ReadStreamEvent, RunAccepted, RunResult, StreamChunk, StreamName,
    TaskId, TaskInfo, TaskOutput, WatchEvent,
};
pub use executor_proto::{error::ExecutorError, types};
use futures_core::stream::BoxStream;
use tokio_util::sync::CancellationToken;

pub(crate) mod backoff;
pub mod connect;
mod convert;
mod error;
pub mod local;
pub mod pinned;
mod placement;
pub mod remote;
mod retry;

pub use self::{local::LocalExecutor, remote::RemoteExecutor};

#[cfg(fuzzing)]
pub use convert::fuzzing::{answers, start};

/// Takes a run's output as it comes. Called in order; a slow sink delays only itself, never the command.
#[async_trait]
pub trait OutputSink: Send {
    /// The run has been started.
    async fn accepted(&mut self, accepted: &RunAccepted) {
        let _ = accepted;
    }

    /// The next bytes of one stream. An offset above the end of the chunk before is a gap that nothing fills.
    async fn output(&mut self, chunk: StreamChunk);
}

/// Where commands run. See the module for the contract.
#[async_trait]
pub trait Executor: Send + Sync + fmt::Debug {
    /// How people name it in messages: `embedded`, or the endpoint as it was given.
    fn endpoint(&self) -> &str;

    /// What it is.
    ///
    /// # Errors
    /// When it cannot be reached or refuses the caller.
    async fn info(&self) -> Result<ExecutorInfo, ExecutorError>;

    /// Runs a command in the foreground and returns its result. With a `sink` the output goes there as it comes and the
    /// result's tails are empty. When `abort` is raised, everything that the command started is ended and the result says
    /// `aborted`; an abort that is raised before the command was started may still start it, and then ends it. An executor
    /// that had not been reached by then is [`ExecutorError::Unavailable`].
    ///
    /// # Errors
    /// Nothing ran, except for [`ExecutorError::OutcomeUnknown`].
    async fn run(
        &self,
        owner: Option<&OwnerId>,
        spec: CommandSpec,
        abort: &CancellationToken,
        sink: Option<&mut dyn OutputSink>,
    ) -> Result<RunResult, ExecutorError>;

    /// Starts a background task. Its timeout is ignored.
    ///
    /// # Errors
    /// As [`Executor::run`]; no id is used then.
    async fn start_task(&self, owner: Option<&OwnerId>, spec: CommandSpec) -> Result<TaskId, ExecutorError>;

    /// What a task wrote since the previous read, and its status. With `wait`, waits that long for its end first.
    ///
    /// # Errors
    /// Unknown or foreign task, or the executor is lost.
    async fn read_output(
        &self,
        owner: Option<&OwnerId>,
        id: &TaskId,
        wait: Option<Duration>,
    ) -> Result<TaskOutput, ExecutorError>;

    /// Ends a task, or what is left over of a task or run.
    ///
    /// # Errors
    /// Unknown or foreign task, or the executor is lost.
    async fn kill_task(&self, owner: Option<&OwnerId>, id: &TaskId) -> Result<KillOutcome, ExecutorError>;

    /// One task or run.
    ///
    /// # Errors
    /// Unknown or foreign task, or the executor is lost.
    async fn get_task(&self, owner: Option<&OwnerId>, id: &TaskId) -> Result<TaskInfo, ExecutorError>;

    /// All tasks that the owner may see, and the runs that are running or have leftovers, oldest first.
    ///
    /// # Errors
    /// When the executor is lost.
    async fn list_tasks(&self, owner: Option<&OwnerId>) -> Result<Vec<TaskInfo>, ExecutorError>;

    /// The owner's completions: those that wait, then [`WatchEvent::CaughtUp`], then live. Ends with an error when the
    /// executor is lost; what was not acknowledged comes again on the next watch.
    ///
    /// # Errors
    /// When the executor cannot be reached.
    async fn watch_tasks(
        &self,
        owner: &OwnerId,
    ) -> Result<BoxStream<'static, Result<WatchEvent, ExecutorError>>, ExecutorError>;

    /// The owner's completions up to and including this number are not delivered again.
    ///
    /// # Errors
    /// When the executor is lost.
    async fn ack_completions(&self, owner: &OwnerId, up_to: u64) -> Result<(), ExecutorError>;

    /// Raw bytes of one stream by offset, for people. Never moves the read position of [`Executor::read_output`].
    ///
    /// # Errors
    /// Unknown or foreign task, or the executor is lost.
    async fn read_stream(
        &self,
        owner: Option<&OwnerId>,
        id: &TaskId,
        stream: StreamName,
        offset: u64,
        follow: bool,
    ) -> Result<BoxStream<'static, Result<ReadStreamEvent, ExecutorError>>, ExecutorError>;
}
