//! What a journal held when this engine was started: finished tasks are there again, those whose end nobody saw have ended
//! with an unknown exit, and what a dead keeper left alive is ended where it is proven to be ours.
//!
//! ```text
//!   not known whether it was started ─► forgotten, its key kept
//!   ended ─────────────────────────┐
//!   end not seen ─► exit unknown ──┴─► a task, or a run with a spill: there again; its owner told, if it was not
//!                                      any other run: forgotten, its key kept
//! ```

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use executor_proto::types::{Exit, SandboxMode, StartKey, StreamName, TaskId};

use super::{
    Inner,
    driver::{HOST_RESTARTED, KEEPER_LOST},
    entry::{Entry, Facts},
    keys::FORGOTTEN,
    now_ms,
    reads::Both,
    registry::{Kind, Recalled, Registry},
    start,
    task::{Cause, State},
};
use crate::{
    ids::{Caller, ProcessHandle},
    journal::{self, EndCause, Ended, ExitFact, RecordedStart, StartNumber, Started, UsedKey, World},
    keeper::protocol::{LeftShell, Verdict},
    output::{self, KeptStream, Stream},
};

/// Longest time that a start of the engine waits for the end of what a dead keeper left.
const LEFTOVERS_LIMIT: Duration = Duration::from_secs(2);

impl From<Kind> for journal::Kind {
    fn from(kind: Kind) -> Self {
        match kind {
            Kind::Run => Self::Run,
            Kind::Task => Self::Task,
        }
    }
}

impl From<journal::Kind> for Kind {
    fn from(kind: journal::Kind) -> Self {
        match kind {
            journal::Kind::Run => Self::Run,
            journal::Kind::Task => Self::Task,
        }
    }
}

impl From<Cause> for EndCause {
    fn from(cause: Cause) -> Self {
        match cause {
            Cause::Timeout => Self::Timeout,
            Cause::Abort => Self::Abort,
            Cause::Kill => Self::Kill,
            Cause::CallerGone => Self::CallerGone,
            Cause::Stopping => Self::Stopping,
            Cause::Leftovers => Self::Leftovers,
        }
    }
}

impl From<EndCause> for Cause {
    fn from(cause: EndCause) -> Self {
        match cause {
            EndCause::Timeout => Self::Timeout,
            EndCause::Abort => Self::Abort,
            EndCause::Kill => Self::Kill,
            EndCause::CallerGone => Self::CallerGone,
            EndCause::Stopping => Self::Stopping,
            EndCause::Leftovers => Self::Leftovers,
        }
    }
}

/// A registry that knows the keys of which nothing else is known any more.
pub(super) fn keys<E>(used: Vec<UsedKey>) -> Registry<E> {
    let mut registry = Registry::new();
    for used in used {
        let caller = Caller::from(&used.account);
        registry.recall_key(&caller, StartKey(used.key), used.digest, FORGOTTEN, used.forgotten_at_ms);
    }
    registry
}

/// Brings back what was recorded. Nothing is started before this returns.
pub(super) async fn recall(engine: &Inner, starts: Vec<RecordedStart>) {
    let shells = left_shells(&starts);
    let verdicts = if shells.is_empty() { Vec::new() } else { engine.keeper.end_left(shells, LEFTOVERS_LIMIT).await };
    // Of most there is nothing to say, and looked for are the few others.
    for (number, verdict) in verdicts.into_iter().filter(|(_, verdict)| *verdict != Verdict::Gone) {
        let start = starts.iter().find(|start| start.number.0 == number).and_then(|start| start.started.as_ref());
        report(start.map_or("", |started| &started.id), &verdict);
    }
    for start in starts {
        bring_back(engine, start);
    }
    let forgotten = engine.registry().forget_above(engine.settings.max_finished_per_owner, now_ms());
    engine.forget(&forgotten);
}

/// The shells of other keepers. Those of this one, and those from before the host or the container was started again, are not
/// looked for.
fn left_shells(starts: &[RecordedStart]) -> Vec<LeftShell> {
    let left = starts.iter().filter(|start| start.world == World::SamePids);
    let shells = left.filter_map(|start| {
        let Started { pid, pid_started, .. } = start.started.as_ref()?;
        Some(LeftShell { number: start.number.0, pid: *pid, started: *pid_started })
    });
    shells.collect()
}

fn report(id: &str, verdict: &Verdict) {
    match verdict {
        Verdict::Gone => {}
        Verdict::Ended(pids) => tracing::info!(id, ?pids, "what a keeper that is gone had left was ended"),
        Verdict::Survive(pids) => {
            tracing::error!(id, ?pids, "what a keeper that is gone had left could not be ended yet")
        }
        Verdict::Unverified { pids, why } => {
            tracing::warn!(id, ?pids, why, "what a keeper that is gone may have left was not proven and is left alone");
        }
    }
}

/// Nothing is left of it but its key, which answers that nobody knows.
pub(super) fn forget(engine: &Inner, number: StartNumber, start: &journal::Start) {
    let now_ms = now_ms();
    engine.journal.forgotten(number, now_ms);
    let key = StartKey(start.key.clone());
    engine.registry().recall_key(&Caller::from(&start.account), key, start.digest, FORGOTTEN, now_ms);
}

/// The end of what was started and of which nothing lives, and whether it was seen.
pub(super) fn end_of(recorded: &RecordedStart, now_ms: u64) -> (Ended, bool) {
    match &recorded.ended {
        Some(ended) => (ended.clone(), true),
        None => (unseen(recorded.world, recorded.asked_to_end.first().copied(), now_ms), false),
    }
}

/// Whether the owner of what has ended is still to be told.
pub(super) fn to_be_told(recorded: &RecordedStart, ended: &Ended) -> bool {
    recorded.start.kind == journal::Kind::Task && ended.to_be_told && !recorded.told
}

fn bring_back(engine: &Inner, recorded: RecordedStart) {
    let (ended, seen) = end_of(&recorded, now_ms());
    let tell = to_be_told(&recorded, &ended);
    let RecordedStart { number, world, start, started, reads, .. } = recorded;
    let Some(started) = started else { return forget(engine, number, &start) };
    let kept = kept_output(engine, &start, &started, (number, world, seen), reads.first());
    if !seen {
        tracing::warn!(id = started.id, exit = ?ended.exit, "its end was not seen");
        engine.journal.ended(number, &ended);
    }
    let has_spill = |kept: &Option<KeptStream>| kept.as_ref().is_some_and(|kept| kept.spill.is_some());
    let kind = Kind::from(start.kind);
    if kind == Kind::Run && !has_spill(&kept.stdout) && !has_spill(&kept.stderr) {
        return forget(engine, number, &start);
    }
    let caller = Caller::from(&start.account);
    let stream = |name, kept: Option<KeptStream>| {
        Stream::recalled(start::stream_options(engine, &caller, name), kept.unwrap_or_default())
    };
    let streams =
        Both { stdout: stream(StreamName::Stdout, kept.stdout), stderr: stream(StreamName::Stderr, kept.stderr) };
    let Ended { exit, ended_for, at_ms, to_be_told: _ } = ended;
    let state = State::recalled(exit.into(), ended_for.map(Cause::from), at_ms);
    let Started { id, handle, pid, pid_started: _, at_ms: started_at_ms } = started;
    let facts = Facts {
        id: TaskId(id.clone()),
        kind,
        caller: caller.clone(),
        command: start.command.into(),
        workdir: start.workdir.into(),
        timeout_ms: start.timeout_ms,
        sandbox_mode: SandboxMode::DangerFullAccess,
        // Nothing of it is alive, so nobody is asked by this name.
        handle: ProcessHandle(handle),
        pid,
        started: Instant::now(),
        started_at_ms,
        number,
    };
    let entry = Arc::new(Entry::recalled(facts, streams, state, reads));
    if tell {
        engine.tell(&entry);
    }
    engine.registry().recall(Recalled {
        number,
        caller,
        key: StartKey(start.key),
        command: start.digest,
        id: TaskId(id),
        finished_at_ms: Some(at_ms),
        entry,
    });
}

/// What is kept of both streams: as it was written down at the end, else as the ring file has it that was left behind, which
/// is written down now. The file goes once that is done.
fn kept_output(
    engine: &Inner,
    start: &journal::Start,
    started: &Started,
    (number, world, end_known): (StartNumber, World, bool),
    read: Option<&journal::Read>,
) -> Both<Option<KeptStream>> {
    let (tenant, id) = (&start.account.tenant, &started.id);
    let mut written = true;
    let mut kept = |name, read: Option<&journal::ReadRange>| {
        let tail = engine.journal.tail(tenant, id, name);
        tail.or_else(|| {
            let (read_to, tail_bytes) = (read.map_or(0, |read| read.to), engine.settings.max_output_bytes);
            let tail = match engine.journal.ring(number, name) {
                Some(Ok(file)) => output::recover_ring_file(&file, world != World::OtherBoot, read_to, tail_bytes),
                Some(Err(error)) => {
                    tracing::warn!(%error, id, stream = name.as_str(), "what it had written cannot be read");
                    KeptStream::lost(read_to)
                }
                // Some of it was read, and went with the keeper's memory.
                None if read_to > 0 && !end_known => KeptStream::lost(read_to),
                None => return None,
            };
            if tail.missing > 0 {
                tracing::warn!(id, stream = name.as_str(), "the end of its output is missing");
            }
            written &= engine.journal.keep_tail(tenant, id, name, &tail);
            Some(tail)
        })
    };
    let stdout = kept(StreamName::Stdout, read.map(|read| &read.stdout));
    let stderr = kept(StreamName::Stderr, read.map(|read| &read.stderr));
    if written {
        engine.journal.remove_rings(number);
    }
    Both { stdout, stderr }
}

/// The end of what ran under a keeper or a host that is gone.
fn unseen(world: World, ended_for: Option<EndCause>, now_ms: u64) -> Ended {
    let reason = match world {
        World::OtherBoot => HOST_RESTARTED,
        World::ThisKeeper | World::SamePids | World::OtherPids => KEEPER_LOST,
    };
    let exit = ExitFact::from(&Exit::Unknown(reason.to_owned()));
    // The executor's own stopping is no news.
    Ended { exit, ended_for, at_ms: now_ms, to_be_told: ended_for != Some(EndCause::Stopping) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::journal::{Account, Start};

    fn recorded(world: World, started: bool) -> RecordedStart {
        let start = Start {
            account: Account { tenant: "t".into(), owner: None },
            key: "k".into(),
            kind: journal::Kind::Task,
            digest: [0; 32],
            command: Vec::new(),
            workdir: Vec::new(),
            timeout_ms: 1.0,
            begun_at_ms: 1,
            handle: None,
        };
        let started = started.then(|| Started {
            id: "bash-1".to_owned(),
            handle: 1,
            pid: 4_711,
            pid_started: Some(99),
            at_ms: 1,
        });
        RecordedStart {
            number: StartNumber(7),
            world,
            start,
            started,
            asked_to_end: Vec::new(),
            ended: None,
            told: false,
            reads: Vec::new(),
        }
    }

    #[test]
    fn only_shells_of_another_keeper_with_the_same_pids_are_looked_for() {
        let shells = |world, started| left_shells(&[recorded(world, started)]);
        let shell = LeftShell { number: 7, pid: 4_711, started: Some(99) };
        assert_eq!(shells(World::SamePids, true), [shell]);
        assert_eq!(shells(World::SamePids, false), []);
        for world in [World::ThisKeeper, World::OtherPids, World::OtherBoot] {
            assert_eq!(shells(world, true), []);
        }
    }
}
