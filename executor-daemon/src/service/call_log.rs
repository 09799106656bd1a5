//! One line in the log for each call: what was asked, by whom and for whom, what came of it and how long it took.
//!
//! Never output, never a token. A command's text only at trace level, since commands carry secrets.

use std::{sync::Arc, time::Instant};

use executor_proto::{
    error::ExecutorError,
    types::{CommandSpec, TaskId},
};
use tokio_util::task::{TaskTracker, task_tracker::TaskTrackerToken};
use tonic::Status;

use super::{auth::Peer, edge::Admitted};
use crate::{
    ids::{Caller, TenantId},
    limits::{OwnerPermit, RequestPermit},
};

/// The words for what came of a call.
pub(super) mod outcome {
    use executor_proto::types::{Exit, KillOutcome, RunResult, TaskStatus};

    pub(in crate::service) fn of_kill(killed: &KillOutcome) -> String {
        match killed {
            KillOutcome { survivors, .. } if !survivors.is_empty() => format!("{} still running", survivors.len()),
            KillOutcome { already_finished: true, .. } => "already finished".to_owned(),
            KillOutcome { already_finished: false, .. } => "killed".to_owned(),
        }
    }

    fn of_exit(exit: &Exit) -> String {
        match exit {
            Exit::Code(code) => format!("exit code {code}"),
            Exit::Signal(signal) => format!("signal {signal}"),
            Exit::Unknown(reason) => format!("exit unknown: {reason}"),
        }
    }

    pub(in crate::service) fn of_run(result: &RunResult) -> String {
        let exit = of_exit(&result.exit);
        match result.timed_out_after_ms {
            Some(timeout_ms) => format!("timed out after {timeout_ms} ms, {exit}"),
            None if result.aborted => format!("aborted, {exit}"),
            None => exit,
        }
    }

    pub(in crate::service) fn of_status(status: &TaskStatus) -> String {
        match status {
            TaskStatus::Running => "running".to_owned(),
            TaskStatus::Ended(exit) => of_exit(exit),
            TaskStatus::Killed(Some(signal)) => format!("killed by signal {signal}"),
            TaskStatus::Killed(None) => "killed".to_owned(),
        }
    }
}

/// A call under way; dropped, it writes its line. A call without an outcome by then is one whose client went away.
#[derive(Debug)]
pub(super) struct CallLog {
    rpc: &'static str,
    peer: Option<Peer>,
    tenant: Option<TenantId>,
    caller: Option<Caller>,
    task: Option<TaskId>,
    outcome: Option<String>,
    begun: Instant,
    /// Its place among those of its tenant, and of its owner.
    room: Option<Arc<RequestPermit>>,
    of_owner: Option<OwnerPermit>,
    /// Counts the call as under way.
    _token: TaskTrackerToken,
}

impl CallLog {
    pub(super) fn new(rpc: &'static str, peer: Option<Peer>, admitted: Option<Admitted>, calls: &TaskTracker) -> Self {
        let (tenant, room) = admitted.map(|Admitted { tenant, room }| (tenant, room)).unzip();
        Self {
            rpc,
            peer,
            tenant,
            caller: None,
            task: None,
            outcome: None,
            begun: Instant::now(),
            room,
            of_owner: None,
            _token: calls.token(),
        }
    }

    /// Notes who is calling, takes the owner's place for it, and hands the caller on.
    ///
    /// # Errors
    /// When the owner has too many requests under way.
    pub(super) fn caller(&mut self, caller: Caller) -> Result<Caller, ExecutorError> {
        let caller = self.caller.insert(caller).clone();
        if let Some(room) = &self.room {
            self.of_owner = Some(room.made_for(&caller)?);
        }
        Ok(caller)
    }

    /// Notes which task it is about, and hands it on.
    pub(super) fn task(&mut self, id: TaskId) -> TaskId {
        self.task.insert(id).clone()
    }

    /// Notes what came of it.
    pub(super) fn outcome(&mut self, outcome: impl Into<String>) {
        self.outcome = Some(outcome.into());
    }

    /// Notes a refusal, and makes the status that says so.
    pub(super) fn refuse(&mut self, error: &ExecutorError) -> Status {
        self.outcome(format!("refused: {error}"));
        error.to_status()
    }

    /// Writes the beginning of a command's text, for those who asked for everything.
    pub(super) fn command(&self, spec: &CommandSpec) {
        /// The rest of a longer one says little about what it is.
        const MAX_BYTES: usize = 4_096;

        let text = &spec.command[..spec.command.len().min(MAX_BYTES)];
        tracing::trace!(rpc = self.rpc, command = %text.escape_ascii(), "command");
    }
}

/// Texts that a client chose are cut to this many characters in the log.
const MAX_LOGGED_CHARS: usize = 128;

fn cut(text: &str) -> String {
    text.chars().take(MAX_LOGGED_CHARS).collect()
}

impl Drop for CallLog {
    fn drop(&mut self) {
        let peer = self.peer.as_ref().map(ToString::to_string);
        let tenant = self.tenant.as_ref().map(|tenant| tenant.0.as_str());
        let owner = self.caller.as_ref().and_then(|caller| caller.owner.as_ref()).map(|owner| cut(&owner.0));
        let task = self.task.as_ref().map(|task| cut(&task.0));
        let outcome = self.outcome.as_deref().unwrap_or("client gone");
        let ms = u64::try_from(self.begun.elapsed().as_millis()).unwrap_or(u64::MAX);
        tracing::info!(rpc = self.rpc, peer, tenant, owner, task, outcome, ms, "call");
    }
}
