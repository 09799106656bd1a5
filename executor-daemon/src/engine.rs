//! The domain: runs and tasks, who owns them, what is kept of them. Knows nothing of gRPC and nothing of `fork`.

use std::time::Duration;

use executor_proto::{
    error::ExecutorError,
    types::{
        CommandSpec, ExecutorInfo, KillOutcome, ReadId, ReadStreamEvent, RunAccepted, RunResult, StartKey, StreamName,
        TaskId, TaskInfo, TaskOutput, WatchEvent,
    },
};

use crate::{config::Settings, ids::Caller, keeper::link::KeeperLink};

/// The executor of one host. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Engine {}

/// The engine could not be started: the state directory cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("state directory {path}: {source}")]
pub struct StartError {
    path: String,
    source: std::io::Error,
}

impl Engine {
    /// Starts the engine over a keeper. Must be called inside a tokio runtime.
    ///
    /// # Errors
    /// When the state directory cannot be made or read.
    pub async fn start(settings: Settings, keeper: KeeperLink) -> Result<Self, StartError> {
        let _ = (settings, keeper);
        unimplemented!()
    }

    /// What this executor is. `version` is this crate's; `stated_limits` and `features` say what holds in this mode.
    #[must_use]
    pub fn info(&self) -> ExecutorInfo {
        unimplemented!()
    }

    /// Starts a foreground run. Dropping the returned [`Run`] before it has finished ends it (its caller is gone).
    ///
    /// # Errors
    /// What [`CommandSpec::check`] finds, a spawn failure, a budget, a key that is in use, or draining.
    pub async fn run(&self, caller: &Caller, key: StartKey, spec: CommandSpec) -> Result<Run, ExecutorError> {
        let _ = (caller, key, spec);
        unimplemented!()
    }

    /// The caller's abort: ends the run of this key and returns when nothing of it is alive, or with the survivors. A key that
    /// is not running is `already_finished`. A key whose run is just being started is ended as soon as it is started.
    ///
    /// # Errors
    /// A malformed key.
    pub async fn cancel_run(&self, caller: &Caller, key: &StartKey) -> Result<KillOutcome, ExecutorError> {
        let _ = (caller, key);
        unimplemented!()
    }

    /// Starts a background task.
    ///
    /// # Errors
    /// As [`Engine::run`]. No id is used then.
    pub async fn start_task(&self, caller: &Caller, key: StartKey, spec: CommandSpec) -> Result<TaskId, ExecutorError> {
        let _ = (caller, key, spec);
        unimplemented!()
    }

    /// What a task wrote since the previous read, and its status; moves the read position. With `wait`, waits that long for
    /// the task to end first. Cancel-safe while it waits.
    ///
    /// # Errors
    /// Unknown or foreign task.
    pub async fn read_output(
        &self,
        caller: &Caller,
        id: &TaskId,
        read_id: &ReadId,
        wait: Option<Duration>,
    ) -> Result<TaskOutput, ExecutorError> {
        let _ = (caller, id, read_id, wait);
        unimplemented!()
    }

    /// Ends a task, or the leftovers of a finished task or run.
    ///
    /// # Errors
    /// Unknown or foreign task.
    pub async fn kill_task(&self, caller: &Caller, id: &TaskId) -> Result<KillOutcome, ExecutorError> {
        let _ = (caller, id);
        unimplemented!()
    }

    /// One task or run that the caller may see.
    ///
    /// # Errors
    /// Unknown or foreign task.
    pub async fn get_task(&self, caller: &Caller, id: &TaskId) -> Result<TaskInfo, ExecutorError> {
        let _ = (caller, id);
        unimplemented!()
    }

    /// All tasks that the caller may see, and the runs that are running or have leftovers, oldest first.
    pub async fn list_tasks(&self, caller: &Caller) -> Vec<TaskInfo> {
        let _ = caller;
        unimplemented!()
    }

    /// The completions of the caller's owner.
    ///
    /// # Errors
    /// A caller without an owner.
    pub fn watch_tasks(&self, caller: &Caller) -> Result<TaskWatch, ExecutorError> {
        let _ = caller;
        unimplemented!()
    }

    /// Forgets the completions of the caller's owner up to and including this one.
    ///
    /// # Errors
    /// A caller without an owner.
    pub fn ack_completions(&self, caller: &Caller, up_to: u64) -> Result<(), ExecutorError> {
        let _ = (caller, up_to);
        unimplemented!()
    }

    /// Raw bytes of one stream by offset.
    ///
    /// # Errors
    /// Unknown or foreign task.
    pub fn read_stream(
        &self,
        caller: &Caller,
        id: &TaskId,
        stream: StreamName,
        offset: u64,
        follow: bool,
    ) -> Result<StreamReader, ExecutorError> {
        let _ = (caller, id, stream, offset, follow);
        unimplemented!()
    }

    /// Takes no more starts, ends everything (SIGTERM, grace, SIGKILL), lets every run return its result and every task
    /// have its final state, without notices. Returns when nothing is alive or what is had its time.
    pub async fn drain(&self) {
        unimplemented!()
    }
}

/// A foreground run. Dropped before it has finished, it is ended: its caller is gone.
#[derive(Debug)]
pub struct Run {}

impl Run {
    /// What was agreed.
    #[must_use]
    pub fn accepted(&self) -> &RunAccepted {
        unimplemented!()
    }

    /// The bytes of one stream from the start, as they come. Ends where the run's result ends, also if leftovers write on.
    #[must_use]
    pub fn output(&self, stream: StreamName) -> StreamReader {
        let _ = stream;
        unimplemented!()
    }

    /// Waits for the result. Cancel-safe; later calls return the same.
    pub async fn finished(&mut self) -> RunResult {
        unimplemented!()
    }
}

/// Reads one stream by offset. A reader that is slower than the command is served from the spill, and where there is none
/// any more its next chunk begins later: a gap.
#[derive(Debug)]
pub struct StreamReader {}

impl StreamReader {
    /// The next chunk (at most [`executor_proto::MAX_CHUNK_BYTES`]), or the end; `None` after the end. Cancel-safe.
    pub async fn next(&mut self) -> Option<ReadStreamEvent> {
        unimplemented!()
    }
}

/// An owner's completions: those that wait, then [`WatchEvent::CaughtUp`], then live.
#[derive(Debug)]
pub struct TaskWatch {}

impl TaskWatch {
    /// The next event; `None` when the engine has drained. Cancel-safe.
    pub async fn next(&mut self) -> Option<WatchEvent> {
        unimplemented!()
    }
}
mod command; mod completions; mod state_dir; mod task;
