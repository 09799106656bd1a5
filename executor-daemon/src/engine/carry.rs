//! What an engine before this one has left running: the keeper hands over its pipes and files, the journal says what it is.
//!
//! ```text
//!   keeper and journal know it ─► goes on as if nothing had happened
//!   only the keeper             ─► ended: nobody knows whose it is
//!   only the journal, started   ─► its end was not seen: see `recall`
//!   only the journal, begun     ─► the keeper was never asked: nothing ran, its key is free
//! ```

use std::{
    collections::HashMap,
    io,
    sync::Arc,
    time::{Duration, Instant},
};

use executor_proto::types::{StartKey, StreamName, TaskId};

use super::{
    Inner,
    entry::{Entry, Facts},
    now_ms,
    reads::Both,
    recall,
    registry::{Kind, Recalled},
    start,
    task::{Cause, State},
};
use crate::{
    ids::Caller,
    journal::{self, RecordedStart, World},
    keeper::{
        left,
        link::{Carried, Spawned},
    },
};

/// Goes on with what is carried over; returns the recorded starts of which nothing is alive.
pub(super) fn take_over(
    engine: &Arc<Inner>,
    recorded: Vec<RecordedStart>,
    carried: Vec<Carried>,
) -> Vec<RecordedStart> {
    let Compared { go_on: going_on, nobodys, never_ran, over } =
        compare(recorded, carried, |carried| carried.spawned.handle.0);
    if !going_on.is_empty() {
        tracing::info!(commands = going_on.len(), "what runs is taken over");
    }
    for (recorded, carried) in going_on {
        go_on(engine, recorded, carried);
    }
    for carried in nobodys {
        tracing::error!(pid = carried.spawned.pid, "a command that nobody recorded is ended");
        engine.drivers.spawn(discard(Arc::clone(engine), carried));
    }
    for recorded in never_ran {
        engine.journal.failed(recorded.number);
    }
    over
}

/// What the journal and the keeper say together of what was started before: the table above.
#[derive(Debug)]
pub(super) struct Compared<C> {
    /// Both know it. In the order in which the keeper has started them.
    pub(super) go_on: Vec<(RecordedStart, C)>,
    /// The keeper alone knows it.
    pub(super) nobodys: Vec<C>,
    /// The keeper was never asked for it. Oldest first.
    pub(super) never_ran: Vec<RecordedStart>,
    /// The journal alone knows it, or it was another keeper's. Oldest first.
    pub(super) over: Vec<RecordedStart>,
}

/// Compares the two; `handle_of` is the keeper's name for what it hands over.
pub(super) fn compare<C>(recorded: Vec<RecordedStart>, carried: Vec<C>, handle_of: impl Fn(&C) -> u64) -> Compared<C> {
    let (ours, mut over): (Vec<_>, Vec<_>) =
        recorded.into_iter().partition(|recorded| recorded.world == World::ThisKeeper);
    let mut ours: HashMap<u64, RecordedStart> =
        ours.into_iter().filter_map(|recorded| Some((handle(&recorded)?, recorded))).collect();
    let (mut go_on, mut nobodys, mut never_ran) = (Vec::new(), Vec::new(), Vec::new());
    for one in carried {
        match ours.remove(&handle_of(&one)) {
            Some(recorded) => go_on.push((recorded, one)),
            None => nobodys.push(one),
        }
    }
    for recorded in ours.into_values() {
        if recorded.started.is_none() { never_ran.push(recorded) } else { over.push(recorded) }
    }
    never_ran.sort_unstable_by_key(|recorded| recorded.number);
    over.sort_unstable_by_key(|recorded| recorded.number);
    Compared { go_on, nobodys, never_ran, over }
}

/// The keeper's name for it.
fn handle(recorded: &RecordedStart) -> Option<u64> {
    recorded.started.as_ref().map(|started| started.handle).or(recorded.start.handle)
}

fn go_on(engine: &Arc<Inner>, recorded: RecordedStart, carried: Carried) {
    let Carried { spawned, empty: _, files, spills, mode } = carried;
    let Spawned { handle, pid, stdout, stderr, events } = spawned;
    let caller = Caller::from(&recorded.start.account);
    let kind = Kind::from(recorded.start.kind);
    let state = state_of(&recorded, Instant::now());
    let [stdout_file, stderr_file] = files;
    let [stdout_spill, stderr_spill] = spills;
    let made = name(engine, &recorded, &caller, kind, pid).and_then(|(id, started_at_ms)| {
        let files = |name| start::Files::new(engine, &id, handle, name, kind, recorded.number);
        let take = |name, pipe, held| start::take_over_stream(engine, &caller, files(name), pipe, held);
        let stdout = take(StreamName::Stdout, stdout, (stdout_file, stdout_spill))?;
        let stderr = take(StreamName::Stderr, stderr, (stderr_file, stderr_spill))?;
        Ok((id, started_at_ms, Both { stdout, stderr }))
    });
    let (id, started_at_ms, streams) = match made {
        Ok(made) => made,
        Err(error) => {
            tracing::error!(%error, pid, "a command cannot be taken over and is ended");
            recall::forget(engine, recorded.number, &recorded.start);
            let of_task = Arc::clone(engine);
            engine.drivers.spawn(async move { start::discard(&of_task, handle, events).await });
            return;
        }
    };
    let lived = Duration::from_millis(now_ms().saturating_sub(started_at_ms));
    let facts = Facts {
        id: id.clone(),
        kind,
        caller: caller.clone(),
        command: recorded.start.command.into(),
        workdir: recorded.start.workdir.into(),
        timeout_ms: recorded.start.timeout_ms,
        sandbox_mode: mode,
        handle,
        pid,
        started: Instant::now().checked_sub(lived).unwrap_or_else(Instant::now),
        started_at_ms,
        number: recorded.number,
    };
    let entry = Arc::new(Entry::recalled(facts, streams, state, recorded.reads));
    let key = StartKey(recorded.start.key);
    engine.registry().recall(Recalled {
        number: recorded.number,
        caller: caller.clone(),
        key,
        command: recorded.start.digest,
        id,
        finished_at_ms: None,
        entry: Arc::clone(&entry),
    });
    let of_owner = match kind {
        Kind::Run => engine.limits.run_there(&caller),
        Kind::Task => engine.limits.task_there(&caller),
    };
    let permits = (engine.limits.command_there(&caller), of_owner);
    start::drive(engine, &entry, events, permits);
}

/// The state in which one goes on that both know. What was written down of its end stays as it is, whatever is asked from now on:
/// somebody may have been told.
pub(super) fn state_of(recorded: &RecordedStart, now: Instant) -> State {
    let mut state = State::started();
    for cause in recorded.asked_to_end.iter().copied().map(Cause::from) {
        state.request(cause);
    }
    // They are what was written down.
    state.take_unwritten();
    if let Some(ended) = &recorded.ended {
        state.shell_ended(ended.exit.clone().into(), false, ended.at_ms);
    }
    if recorded.told {
        state.told();
    }
    if recorded.start.kind == journal::Kind::Run {
        // Its caller has lost the connection to the engine before, and has the usual time to come back.
        state.detach(now);
    }
    state
}

/// The id and when it was started. One that was killed before it had a name gets it now.
fn name(engine: &Inner, recorded: &RecordedStart, caller: &Caller, kind: Kind, pid: u32) -> io::Result<(TaskId, u64)> {
    if let Some(started) = &recorded.started {
        return Ok((TaskId(started.id.clone()), started.at_ms));
    }
    let id = engine.next_id(&caller.tenant, kind)?;
    let handle = recorded.start.handle.unwrap_or(0);
    let at_ms = recorded.start.begun_at_ms;
    let pid_started = left::start_time(pid);
    engine.journal.started(recorded.number, &journal::Started { id: id.0.clone(), handle, pid, pid_started, at_ms });
    Ok((id, at_ms))
}

async fn discard(engine: Arc<Inner>, carried: Carried) {
    start::discard(&engine, carried.spawned.handle, carried.spawned.events).await;
}

#[cfg(test)]
mod tests {
    use executor_proto::types::{Exit, TaskStatus};

    use super::{super::task::Phase, *};
    use crate::journal::{Account, EndCause, Ended, ExitFact, Start, StartNumber, Started};

    fn recorded(handle: u64) -> RecordedStart {
        let account = Account { tenant: "t".into(), owner: None };
        let start = Start {
            account,
            key: "k".into(),
            kind: journal::Kind::Task,
            digest: [0; 32],
            command: Vec::new(),
            workdir: Vec::new(),
            timeout_ms: 1.0,
            begun_at_ms: 1,
            handle: Some(handle),
        };
        RecordedStart {
            number: StartNumber(i64::try_from(handle).unwrap()),
            world: World::ThisKeeper,
            start,
            started: Some(Started { id: format!("bash-{handle}"), handle, pid: 1, pid_started: None, at_ms: 1 }),
            asked_to_end: Vec::new(),
            ended: None,
            told: false,
            reads: Vec::new(),
        }
    }

    #[test]
    fn journal_and_keeper_say_together_what_has_happened() {
        let never_asked = RecordedStart { started: None, ..recorded(3) };
        let of_another = RecordedStart { world: World::SamePids, started: None, ..recorded(4) };
        let all = vec![recorded(1), recorded(2), never_asked, of_another];
        let compared = compare(all, vec![2, 9], |handle| *handle);
        let numbers = |all: &[RecordedStart]| all.iter().map(|one| one.number.0).collect::<Vec<_>>();
        assert_eq!(compared.go_on.iter().map(|(one, handle)| (one.number.0, *handle)).collect::<Vec<_>>(), [(2, 2)]);
        assert_eq!(compared.nobodys, [9]);
        assert_eq!((numbers(&compared.never_ran), numbers(&compared.over)), (vec![3], vec![1, 4]));
    }

    #[test]
    fn an_end_that_was_written_down_is_not_changed_by_what_is_asked_afterwards() {
        let ended = Ended { exit: ExitFact::Code(3), ended_for: None, at_ms: 5, to_be_told: true };
        let mut state = state_of(&RecordedStart { ended: Some(ended), told: true, ..recorded(1) }, Instant::now());
        assert!(state.phase() == Phase::Draining && state.alive() && !state.to_be_told());
        state.request(Cause::Kill);
        state.shell_ended(Exit::Code(3), true, 9);
        state.settled();
        assert_eq!((state.status(), state.exited_at_ms()), (TaskStatus::Ended(Exit::Code(3)), Some(5)));
    }

    #[test]
    fn an_end_that_was_asked_for_is_asked_for_again() {
        let asked = RecordedStart { asked_to_end: vec![EndCause::Timeout, EndCause::Abort], ..recorded(1) };
        let state = state_of(&asked, Instant::now());
        assert!(state.ending() && state.timed_out() && state.aborted() && state.phase() == Phase::Running);
        assert!(!state.has_unwritten() && state.ended_for() == Some(Cause::Timeout));
    }
}
