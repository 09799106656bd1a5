//! One run or task, as everybody who deals with it holds it: facts that never change, its state, its streams.

use std::{
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use bytes::Bytes;
use executor_proto::types::{
    KillOutcome, Process, ReadId, RunResult, SandboxMode, StreamName, TaskId, TaskInfo, TaskOutput, TaskStatus,
};
use tokio::sync::{Mutex, watch};

use super::{
    reads::{Asked, Both, Delta, Reads},
    registry::Kind,
    task::{Cause, Phase, Request, State},
};
use crate::{
    crash::Point,
    ids::{Caller, ProcessHandle},
    journal::{self, Journal, StartNumber},
    output::Stream,
};

/// The command is shown to people up to this many bytes.
const SHOWN_COMMAND_BYTES: usize = 4_096;

/// What is known of a command when it has been started.
#[derive(Debug)]
pub(super) struct Facts {
    pub(super) id: TaskId,
    pub(super) kind: Kind,
    /// Who started it.
    pub(super) caller: Caller,
    pub(super) command: Bytes,
    pub(super) workdir: Bytes,
    /// The timeout in force, in milliseconds; of runs.
    pub(super) timeout_ms: f64,
    /// The sandbox mode in force.
    pub(super) sandbox_mode: SandboxMode,
    pub(super) handle: ProcessHandle,
    /// The shell's. 0: not known.
    pub(super) pid: u32,
    pub(super) started: Instant,
    pub(super) started_at_ms: u64,
    /// The journal's name for it.
    pub(super) number: StartNumber,
}

/// What is shown of a command.
pub(super) fn shown(command: &[u8]) -> &[u8] {
    &command[..command.len().min(SHOWN_COMMAND_BYTES)]
}

/// One run or task.
#[derive(Debug)]
pub(super) struct Entry {
    pub(super) facts: Facts,
    pub(super) streams: Both<Arc<Stream>>,
    /// Under its lock the rules of [`State`] are applied; whoever waits for something waits for a change of it.
    state: watch::Sender<State>,
    result: OnceLock<RunResult>,
    /// Where the run's result ends in each stream, once that is known.
    result_ends: Both<watch::Sender<Option<u64>>>,
    /// How far the task was read. Held across a read, so that reads come one after the other.
    reads: Mutex<Reads>,
    /// Processes that were left over when the result was made.
    leftovers: AtomicU64,
}

impl Entry {
    /// A command that has just been started.
    pub(super) fn new(mut facts: Facts, streams: Both<Arc<Stream>>) -> Self {
        if facts.command.len() > SHOWN_COMMAND_BYTES {
            // A copy, so that the whole of a large command is not held for what is shown of it.
            facts.command = Bytes::copy_from_slice(shown(&facts.command));
        }
        let shared = facts.caller.owner.is_none();
        Self {
            facts,
            streams,
            state: watch::Sender::new(State::started()),
            result: OnceLock::new(),
            result_ends: Both { stdout: watch::Sender::new(None), stderr: watch::Sender::new(None) },
            reads: Mutex::new(Reads::recalled(Vec::new(), shared)),
            leftovers: AtomicU64::new(0),
        }
    }

    /// One that was started under a process before this one; `reads`: the latest that were answered there, the latest first.
    pub(super) fn recalled(facts: Facts, streams: Both<Arc<Stream>>, state: State, reads: Vec<journal::Read>) -> Self {
        let reads = Mutex::new(Reads::recalled(reads, facts.caller.owner.is_none()));
        Self { state: watch::Sender::new(state), reads, ..Self::new(facts, streams) }
    }

    /// Applies a rule to the state and wakes who waits for it.
    pub(super) fn apply<T>(&self, rule: impl FnOnce(&mut State) -> T) -> T {
        let mut outcome = None;
        self.state.send_modify(|state| outcome = Some(rule(state)));
        outcome.expect("send_modify calls its closure exactly once")
    }

    /// Looks at the state.
    pub(super) fn look<T>(&self, question: impl FnOnce(&State) -> T) -> T {
        question(&self.state.borrow())
    }

    /// Changes of the state from now on.
    pub(super) fn subscribe(&self) -> watch::Receiver<State> {
        self.state.subscribe()
    }

    /// Returns when the state answers yes. Cancel-safe.
    pub(super) async fn wait_for<T>(&self, mut question: impl FnMut(&State) -> Option<T>) -> T {
        let mut states = self.subscribe();
        loop {
            if let Some(answer) = question(&states.borrow_and_update()) {
                return answer;
            }
            states.changed().await.expect("the sender lives in this entry");
        }
    }

    /// Returns when the result stands. Cancel-safe.
    pub(super) async fn ended(&self) {
        self.wait_for(|state| (state.phase() == Phase::Ended).then_some(())).await;
    }

    /// Nobody came back for the run's result within the window: it is ended.
    pub(super) fn caller_gone(&self, window: Duration) {
        let window_ms = window.as_millis();
        let Caller { tenant, owner } = &self.facts.caller;
        tracing::info!(
            tenant = tenant.0,
            owner = owner.as_ref().map(|owner| &*owner.0),
            task = self.facts.id.0,
            window_ms,
            "a run is ended: its caller is gone and did not come back"
        );
        self.apply(|state| state.request(Cause::CallerGone));
    }

    /// Whether this is a run that has ended and whose result is not there: it was made by a process before this one.
    pub(super) fn result_lost(&self) -> bool {
        self.look(|state| state.phase() == Phase::Ended) && self.result.get().is_none()
    }

    /// The result of a run that has ended.
    pub(super) fn result(&self) -> Option<&RunResult> {
        self.result.get()
    }

    /// Sets the run's result, before its state becomes [`Phase::Ended`].
    pub(super) fn set_result(&self, result: RunResult) {
        self.result_ends.stdout.send_replace(Some(result.stdout.total));
        self.result_ends.stderr.send_replace(Some(result.stderr.total));
        // Only the driver sets it, once.
        let _ = self.result.set(result);
    }

    /// Where the run's result ends in a stream.
    pub(super) fn result_end(&self, name: StreamName) -> watch::Receiver<Option<u64>> {
        self.result_ends.get(name).subscribe()
    }

    /// How many processes were left over when the result was made.
    pub(super) fn leftovers(&self) -> u64 {
        self.leftovers.load(Ordering::Relaxed)
    }

    /// Remembers how many processes are left over.
    pub(super) fn set_leftovers(&self, count: u64) {
        self.leftovers.store(count, Ordering::Relaxed);
    }

    /// Ends it for this cause and returns when nothing of it is alive and its result stands, or with what could not be ended.
    /// The end goes on if this is dropped.
    pub(super) async fn end(&self, cause: Cause) -> KillOutcome {
        match self.apply(|state| state.request(cause)) {
            Request::Nothing => {
                // What has just ended by itself gets its final state before anybody is told that it had ended.
                self.wait_for(|state| (state.phase() == Phase::Ended || state.alive()).then_some(())).await;
                KillOutcome { already_finished: true, survivors: Vec::new() }
            }
            Request::Round { number, repeated } => {
                let survivors = self.wait_for(|state| {
                    let shell_survives = state.phase() == Phase::Running && !state.survivors().is_empty();
                    let over = state.ends_done() >= number && (state.phase() == Phase::Ended || shell_survives);
                    over.then(|| state.survivors().to_vec())
                });
                let survivors = survivors.await;
                KillOutcome { already_finished: repeated && survivors.is_empty(), survivors }
            }
        }
    }

    /// What was written since the previous read, and the status; the same answer again where this read was answered already.
    /// The status is looked at first: whoever is shown the end has been shown everything up to it. Cancel-safe: what is not
    /// returned was not read, or can be read again with the same `read_id`.
    /// What was read is in the journal when this returns.
    pub(super) async fn read(&self, caller: &Caller, read_id: &ReadId, journal: &Journal) -> TaskOutput {
        let mut reads = self.reads.lock().await;
        match reads.ask(caller, read_id) {
            Asked::Answered(output) => output,
            Asked::Before(before) => {
                let deltas = self.deltas(before.begins()).await;
                reads.answer_again(caller, &before, deltas)
            }
            Asked::New(cursors) => {
                let status = self.look(State::status);
                let deltas = self.deltas(cursors).await;
                let (reads, output) = reads.answer(caller, read_id, status, deltas);
                journal.read(self.facts.number, &reads);
                Point::ReadRecorded.pass();
                output
            }
        }
    }

    /// What each stream has from these positions on.
    async fn deltas(&self, from: Both<u64>) -> Both<Delta> {
        let (stdout, stderr) =
            futures_util::future::join(self.streams.stdout.delta(from.stdout), self.streams.stderr.delta(from.stderr))
                .await;
        Both { stdout, stderr }
    }

    /// Whether this read was answered already.
    pub(super) async fn was_read(&self, caller: &Caller, read_id: &ReadId) -> bool {
        self.reads.lock().await.was_answered(caller, read_id)
    }

    /// What people see of it; `leftovers` is what the keeper says is alive.
    pub(super) fn info(&self, leftovers: Vec<Process>) -> TaskInfo {
        let (status, ended_at_ms) = self.look(|state| (state.status(), state.exited_at_ms()));
        TaskInfo {
            id: self.facts.id.clone(),
            owner: self.facts.caller.owner.clone(),
            command: self.facts.command.clone(),
            workdir: self.facts.workdir.clone(),
            status,
            started_at_ms: self.facts.started_at_ms,
            ended_at_ms,
            stdout_total: self.streams.stdout.total(),
            stderr_total: self.streams.stderr.total(),
            shell_pid: Some(self.facts.pid).filter(|pid| *pid != 0 && ended_at_ms.is_none()),
            leftovers,
        }
    }

    /// The shell has ended and something else lives.
    pub(super) fn has_leftovers(&self) -> bool {
        self.look(|state| state.phase() != Phase::Running && state.alive())
    }

    /// It runs, for people.
    pub(super) fn running(&self) -> bool {
        self.look(State::status) == TaskStatus::Running
    }
}
