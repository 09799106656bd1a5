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

use executor_proto::types::{SandboxMode, StartKey, StreamName, TaskId};

use super::{
    Inner,
    entry::{Both, Entry, Facts},
    now_ms, recall,
    registry::Kind,
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
    let (ours, mut others): (Vec<_>, Vec<_>) =
        recorded.into_iter().partition(|recorded| recorded.world == World::ThisKeeper);
    let mut ours: HashMap<u64, RecordedStart> =
        ours.into_iter().filter_map(|recorded| Some((handle(&recorded)?, recorded))).collect();
    // In the order in which they were started.
    for one in carried {
        match ours.remove(&one.spawned.handle.0) {
            Some(recorded) => go_on(engine, recorded, one),
            None => {
                tracing::error!(pid = one.spawned.pid, "a command that nobody recorded is ended");
                engine.drivers.spawn(discard(Arc::clone(engine), one));
            }
        }
    }
    let mut left: Vec<_> = ours.into_values().collect();
    left.sort_unstable_by_key(|recorded| recorded.number);
    for recorded in left {
        if recorded.started.is_some() {
            others.push(recorded);
        } else {
            engine.journal.failed(recorded.number);
        }
    }
    others.sort_unstable_by_key(|recorded| recorded.number);
    others
}

/// The keeper's name for it.
fn handle(recorded: &RecordedStart) -> Option<u64> {
    recorded.started.as_ref().map(|started| started.handle).or(recorded.start.handle)
}

fn go_on(engine: &Arc<Inner>, recorded: RecordedStart, carried: Carried) {
    let Carried { spawned, empty: _, files, spills } = carried;
    let Spawned { handle, pid, stdout, stderr, events } = spawned;
    let caller = Caller::from(&recorded.start.account);
    let kind = Kind::from(recorded.start.kind);
    let [stdout_file, stderr_file] = files;
    let [stdout_spill, stderr_spill] = spills;
    let made = name(engine, &recorded, &caller, kind, pid).and_then(|(id, started_at_ms)| {
        let take = |name, pipe, files| start::take_over_stream(engine, &id, handle, name, pipe, files);
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
        sandbox_mode: SandboxMode::DangerFullAccess,
        handle,
        pid,
        started: Instant::now().checked_sub(lived).unwrap_or_else(Instant::now),
        started_at_ms,
        number: recorded.number,
    };
    let entry = Arc::new(Entry::carried(facts, streams, recorded.read));
    for cause in recorded.asked_to_end.into_iter().map(Cause::from) {
        entry.apply(|state| state.request(cause));
    }
    if recorded.told {
        entry.apply(State::told);
    }
    if kind == Kind::Run {
        // Its caller has lost the connection to the engine before, and has the usual time to come back.
        entry.apply(|state| state.detach(Instant::now()));
    }
    let key = StartKey(recorded.start.key);
    engine.registry().recall(caller.clone(), key, recorded.start.digest, id, None, Arc::clone(&entry));
    let task_permit = (kind == Kind::Task).then(|| engine.limits.task_there(&caller));
    let permits = (engine.limits.command_there(), task_permit);
    start::drive(engine, &entry, events, permits);
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
