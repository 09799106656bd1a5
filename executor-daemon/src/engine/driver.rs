//! Takes one command from its spawn to its end, and what is left of it to its own: the only one who asks the keeper to
//! end it, makes its result, and forgets it. Others change its state ([`super::task`]) and the driver acts on that.
//!
//! ```text
//!   until the shell has ended ─► until the output is settled ─► result ─► until nothing is alive ─► forget or keep
//! ```
//! Requests to end it are answered in each of the first four. The driver does not read output (the streams do) and knows no
//! caller.

use std::{
    future::poll_fn,
    sync::{Arc, Weak},
    time::{Duration, Instant},
};

use executor_proto::types::{Exit, RunResult, StreamName};
use futures_core::future::BoxFuture;
use futures_util::future::join;
use tokio::sync::{mpsc, watch};

use super::{
    Inner,
    entry::{Entry, Facts},
    now_ms,
    registry::{Keep, Kind},
    task::{Cause, Phase, State, exit_of},
};
use crate::{
    crash::Point,
    ids::Caller,
    journal::{EndCause, Ended},
    keeper::link::ProcessEvent,
    limits::{CommandPermit, OwnerPermit},
    sandbox,
};

/// How long the news of the shell's exit may come after the news that nothing is alive.
const EXIT_NEWS: Duration = Duration::from_secs(1);

/// How long after its result a command's streams and its place at the keeper are given back.
const TIDY_AFTER: Duration = Duration::from_millis(5);

/// How long a run's result can be made anew from what the keeper has, where its client has not taken it.
const RESULT_AT_KEEPER: Duration = Duration::from_secs(2);

/// Longest wait for a spill file to be finished, before a command is forgotten.
const SPILL_FINISHED: Duration = Duration::from_secs(10);

/// Why an exit is unknown when the keeper is lost, in the words of the model's text.
pub(super) const KEEPER_LOST: &str = "executor restarted";

/// Why an exit is unknown when the host is another since, in the same words.
pub(super) const HOST_RESTARTED: &str = "executor host restarted";

/// What a driver is started with.
pub(super) struct Driver {
    engine: Weak<Inner>,
    entry: Arc<Entry>,
    /// `None`: no more will come.
    events: Option<mpsc::UnboundedReceiver<ProcessEvent>>,
    states: watch::Receiver<State>,
    /// The end that the keeper is asked for.
    end: Option<BoxFuture<'static, Vec<u32>>>,
    /// When the run's timer fires.
    deadline: Option<tokio::time::Instant>,
    /// How long the run goes on when nobody waits for its result.
    resume_window: Duration,
    /// When the news of the shell's exit are overdue.
    exit_due: Option<tokio::time::Instant>,
    exited: Option<Instant>,
    /// Until the result is made.
    owner_permit: Option<OwnerPermit>,
    _command_permit: CommandPermit,
}

impl Driver {
    /// For a command that has just been started. `timeout`: from its start, for runs.
    pub(super) fn new(
        engine: Weak<Inner>,
        entry: Arc<Entry>,
        events: mpsc::UnboundedReceiver<ProcessEvent>,
        timeout: Option<Duration>,
        permits: (CommandPermit, OwnerPermit),
    ) -> Self {
        let started = tokio::time::Instant::from_std(entry.facts.started);
        Self {
            resume_window: engine.upgrade().map_or(Duration::ZERO, |engine| engine.resume_window()),
            engine,
            states: entry.subscribe(),
            events: Some(events),
            end: None,
            // A timeout beyond what the clock can count never fires.
            deadline: timeout.and_then(|timeout| started.checked_add(timeout)),
            exit_due: None,
            exited: None,
            owner_permit: Some(permits.1),
            _command_permit: permits.0,
            entry,
        }
    }

    /// The whole way. Returns what is left to do when the executor stops and something survives: [`Driver::linger`].
    pub(super) async fn drive(mut self) -> Option<Self> {
        self.until_shell_ended().await;
        if self.entry.has_leftovers() && self.engine.upgrade().is_some_and(|engine| engine.settings.reap_descendants) {
            self.entry.apply(|state| state.request(Cause::Leftovers));
        }
        self.until_settled().await;
        self.make_result().await;
        while self.entry.look(|state| state.alive() || state.ending()) {
            if self.draining() && self.entry.look(|state| !state.ending()) {
                return Some(self);
            }
            self.step().await;
        }
        // Whoever waits for the result has it first, from the next server if need be: as long as the keeper has its files.
        if self.entry.facts.kind == Kind::Run && !self.resume_window.is_zero() && !self.draining() {
            let taken = self.entry.wait_for(|state| state.is_taken().then_some(()));
            let _ = tokio::time::timeout(RESULT_AT_KEEPER, taken).await;
        }
        tokio::time::sleep(TIDY_AFTER).await;
        self.finish().await;
        None
    }

    /// Goes on until nothing is alive, for who still asks after the executor's drain.
    pub(super) async fn linger(mut self) {
        while self.entry.look(|state| state.alive() || state.ending()) {
            self.step().await;
        }
        self.finish().await;
    }

    async fn until_shell_ended(&mut self) {
        while self.entry.look(State::phase) == Phase::Running {
            if self.gave_up() {
                // Its caller gets an answer in time; what survives is named beside it.
                self.shell_ended(Exit::Unknown("still running".to_owned()), false);
                return;
            }
            self.step().await;
        }
    }

    /// What was to be ended could not be, and nobody can wait for it any longer.
    fn gave_up(&self) -> bool {
        let hopeless = self.entry.look(|state| !state.ending() && !state.survivors().is_empty());
        hopeless && (self.entry.facts.kind == Kind::Run || self.draining())
    }

    fn draining(&self) -> bool {
        self.engine.upgrade().is_none_or(|engine| engine.registry().draining())
    }

    /// Takes the last output: all of it when everything is dead, else what comes within the drain.
    async fn until_settled(&mut self) {
        let Some((quiet, total)) = self.engine.upgrade().map(|engine| engine.drain_times()) else { return };
        loop {
            // What is being ended may still write: first the end, then the drain.
            while self.entry.look(State::ending) {
                self.step().await;
            }
            let ends_done = self.entry.look(State::ends_done);
            let entry = Arc::clone(&self.entry);
            let until = Instant::now() + total;
            let settle = join(entry.streams.stdout.settle(quiet, until), entry.streams.stderr.settle(quiet, until));
            let mut settle = std::pin::pin!(settle);
            loop {
                tokio::select! {
                    biased;
                    _ = &mut settle => break,
                    () = self.step() => {}
                }
            }
            if self.entry.look(|state| !state.ending() && state.ends_done() == ends_done) {
                return;
            }
        }
    }

    async fn make_result(&mut self) {
        let Some(engine) = self.engine.upgrade() else { return };
        let entry = &self.entry;
        let left = match entry.has_leftovers() {
            true => engine.keeper.processes(entry.facts.handle).await,
            false => Vec::new(),
        };
        entry.set_leftovers(left.len() as u64);
        if entry.facts.kind == Kind::Run {
            let (stdout, stderr) = join(entry.streams.stdout.result(), entry.streams.stderr.result()).await;
            let state = entry.look(State::clone);
            let survivors = state.survivors().to_vec();
            let leftovers = left.iter().map(|process| process.pid).filter(|pid| !survivors.contains(pid)).collect();
            let exited = self.exited.unwrap_or_else(Instant::now);
            let exit = state.exit().cloned().unwrap_or_else(|| Exit::Unknown(KEEPER_LOST.to_owned()));
            entry.set_result(RunResult {
                sandbox_denied: sandbox::denied(entry.facts.sandbox_mode, &exit, &stderr.tail),
                exit,
                timed_out_after_ms: state.timed_out().then_some(entry.facts.timeout_ms),
                ended_by: state.ended_by(),
                aborted: state.aborted(),
                stdout,
                stderr,
                survivors,
                leftovers,
                duration_ms: exited.duration_since(entry.facts.started).as_secs_f64() * 1e3,
            });
            Point::ResultMade.pass();
        }
        // It no longer runs, so its place is free before anybody is told.
        self.owner_permit = None;
        if entry.facts.kind == Kind::Task {
            record_end(entry, &engine);
            Point::EndRecorded.pass();
        }
        entry.apply(State::settled);
        if entry.facts.kind == Kind::Task {
            engine.tell(entry);
        }
        if entry.has_leftovers() {
            engine.limit_leftovers(&entry.facts.caller);
        }
    }

    /// Nothing is alive: takes what is still in the pipes, gives everything back, and forgets or keeps.
    async fn finish(self) {
        let Some(engine) = self.engine.upgrade() else { return };
        let (quiet, total) = engine.drain_times();
        drop(engine);
        let Entry { facts, streams, .. } = &*self.entry;
        let until = Instant::now() + total;
        join(streams.stdout.settle(quiet, until), streams.stderr.settle(quiet, until)).await;
        streams.stdout.compact();
        streams.stderr.compact();
        // The keeper makes no spill for a command that it was told to forget, a run is kept for its spill's sake, and only a file that
        // is finished is known after a restart. A keeper that does not answer has lost more than this file.
        let decided = join(streams.stdout.spill_decided(), streams.stderr.spill_decided());
        let _ = tokio::time::timeout(SPILL_FINISHED, decided).await;
        let Some(engine) = self.engine.upgrade() else { return };
        let spilled = streams.stdout.spill_path().is_some() || streams.stderr.spill_path().is_some();
        let keep = Keep { id: facts.kind == Kind::Task || spilled, result: engine.bytes_to_hold(&self.entry) };
        if keep.id {
            if facts.kind == Kind::Run {
                record_end(&self.entry, &engine);
            }
            let (journal, entry) = (engine.journal.clone(), Arc::clone(&self.entry));
            // Written by a thread that may wait for a disk. Only a panic there is an error here, and costs this output.
            let _ = tokio::task::spawn_blocking(move || {
                let Facts { id, caller, number, .. } = &entry.facts;
                let keep = |name| journal.keep_tail(&caller.tenant.0, &id.0, name, &entry.streams.get(name).to_keep());
                if StreamName::BOTH.map(keep) == [true; 2] {
                    journal.remove_rings(*number);
                }
            })
            .await;
            Point::OutputKept.pass();
        }
        // From here on the next server would not find it at the keeper: all that it needs is written down.
        engine.keeper.release(facts.handle);
        Point::Released.pass();
        let max_finished = engine.settings.max_finished_per_owner;
        let forgotten = engine.registry().finished(&facts.caller.tenant, &facts.id, keep, now_ms(), max_finished);
        for Entry { facts: Facts { id, caller, .. }, .. } in forgotten.iter().map(AsRef::as_ref) {
            if *id != facts.id {
                let Caller { tenant, owner } = caller;
                tracing::info!(
                    tenant = tenant.0,
                    owner = owner.as_ref().map(|owner| &*owner.0),
                    task = id.0,
                    cap = max_finished,
                    "a finished task is forgotten: its owner has too many"
                );
            }
        }
        engine.forget(&forgotten);
    }

    /// Waits for the next thing that happens and applies it. Cancel-safe: whatever is taken is applied before this returns.
    async fn step(&mut self) {
        self.begin_wanted_end();
        let alone_since = self.entry.look(State::alone_since);
        let alone_until = alone_since.map(|since| tokio::time::Instant::from_std(since) + self.resume_window);
        tokio::select! {
            // The exit comes before the end that it belongs to, and is to be seen so.
            biased;
            event = next_event(&mut self.events) => self.event(event),
            survivors = poll_end(&mut self.end) => self.end_done(survivors),
            () = at(self.deadline) => {
                self.deadline = None;
                self.entry.apply(|state| state.request(Cause::Timeout));
            }
            () = at(alone_until) => self.entry.caller_gone(self.resume_window),
            () = at(self.exit_due) => {
                self.shell_ended(Exit::Unknown("its exit was not reported".to_owned()), true);
            }
            // The sender lives in the entry that this driver holds.
            _ = self.states.changed() => {}
        }
    }

    fn begin_wanted_end(&mut self) {
        // What this driver itself changed is no news to it.
        self.states.mark_unchanged();
        self.write_causes();
        if !self.states.borrow().ending() || self.end.is_some() || !self.entry.apply(State::begin_end) {
            return;
        }
        let Some(engine) = self.engine.upgrade() else { return self.entry.apply(|state| state.end_done(Vec::new())) };
        let keeper = engine.keeper.clone();
        let handle = self.entry.facts.handle;
        let grace = Duration::from_millis(engine.settings.grace_ms);
        self.end = Some(Box::pin(async move { keeper.end(handle, grace).await }));
    }

    /// Writes down who has asked for the end, before the keeper is asked and before anybody is answered.
    fn write_causes(&self) {
        if !self.entry.look(State::has_unwritten) {
            return;
        }
        let causes = self.entry.apply(State::take_unwritten);
        let Some(engine) = self.engine.upgrade() else { return };
        for cause in causes {
            engine.journal.asked_to_end(self.entry.facts.number, cause.into());
            Point::KillRecorded.pass();
        }
    }

    fn event(&mut self, event: Option<ProcessEvent>) {
        match event {
            Some(ProcessEvent::Exited { status, empty }) => {
                Point::ExitSeen.pass();
                self.shell_ended(exit_of(status), empty);
            }
            Some(ProcessEvent::Empty) => self.entry.apply(State::emptied),
            None => {
                self.events = None;
                if self.entry.look(State::alive) {
                    // The keeper is gone, and with it everything that it had started.
                    self.shell_ended(Exit::Unknown(KEEPER_LOST.to_owned()), true);
                }
            }
        }
    }

    fn shell_ended(&mut self, exit: Exit, empty: bool) {
        self.deadline = None;
        self.exit_due = None;
        self.exited.get_or_insert_with(Instant::now);
        self.entry.apply(|state| state.shell_ended(exit, empty, now_ms()));
    }

    fn end_done(&mut self, survivors: Vec<u32>) {
        Point::KillDone.pass();
        self.end = None;
        if !survivors.is_empty() {
            tracing::warn!(id = %self.entry.facts.id, ?survivors, "processes could not be ended yet");
        }
        let phase = self.entry.apply(|state| {
            state.end_done(survivors);
            (state.phase() == Phase::Running && !state.alive()).then_some(())
        });
        self.exit_due = phase.map(|()| tokio::time::Instant::now() + EXIT_NEWS);
    }
}

/// The facts of an end are final: they are written down before an owner is told them.
fn record_end(entry: &Entry, engine: &Inner) {
    engine.journal.ended(entry.facts.number, &entry.look(|state| end_facts(state, now_ms())));
}

/// What is written down of an end.
pub(super) fn end_facts(state: &State, now_ms: u64) -> Ended {
    let lost = || Exit::Unknown(KEEPER_LOST.to_owned());
    Ended {
        exit: (&state.exit().cloned().unwrap_or_else(lost)).into(),
        ended_for: state.ended_for().map(EndCause::from),
        at_ms: state.exited_at_ms().unwrap_or(now_ms),
        to_be_told: state.to_be_told(),
    }
}

/// The next event; never, when no more will come.
async fn next_event(events: &mut Option<mpsc::UnboundedReceiver<ProcessEvent>>) -> Option<ProcessEvent> {
    match events {
        Some(events) => events.recv().await,
        None => std::future::pending().await,
    }
}

/// What the end that is under way comes to; never, when none is.
async fn poll_end(end: &mut Option<BoxFuture<'static, Vec<u32>>>) -> Vec<u32> {
    match end {
        Some(end) => poll_fn(|context| end.as_mut().poll(context)).await,
        None => std::future::pending().await,
    }
}

/// Returns at this time; never, where there is none.
async fn at(time: Option<tokio::time::Instant>) {
    match time {
        Some(time) => tokio::time::sleep_until(time).await,
        None => std::future::pending().await,
    }
}
