//! A run or task as the engine's entry and driver hold it.

use std::sync::{Mutex, MutexGuard};

use bytes::Bytes;
use executor_proto::types::{
    StreamName::{Stderr, Stdout},
    TaskId,
};

use super::world::{TAIL_BYTES, World, window};
use crate::{
    engine::{
        reads::{Both, Delta, Reads},
        registry::Kind,
        task::{Cause, Phase, State},
    },
    ids::Caller,
    journal::StartNumber,
    limits::{CommandPermit, OwnerPermit},
    output,
};

pub(super) type Permits = (CommandPermit, Option<OwnerPermit>);

/// One run or task.
#[derive(Debug)]
pub(super) struct Task {
    pub(super) id: TaskId,
    pub(super) kind: Kind,
    pub(super) caller: Caller,
    pub(super) command: u64,
    pub(super) number: StartNumber,
    pub(super) state: Mutex<State>,
    pub(super) reads: Mutex<Reads>,
    /// What is kept of its output, once no more comes.
    pub(super) kept: Mutex<Option<Both<(u64, Bytes)>>>,
    pub(super) driver: Mutex<Driver>,
}

/// How far a driver is.
#[derive(Debug, Default)]
pub(super) struct Driver {
    pub(super) recorded: bool,
    pub(super) told: bool,
    pub(super) tidied: bool,
    pub(super) released: bool,
    pub(super) over: bool,
    pub(super) permits: Option<Permits>,
}

impl Task {
    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    pub(super) fn over(&self) -> bool {
        self.driver.lock().unwrap().over
    }

    pub(super) fn new(
        facts: (TaskId, Kind, Caller, u64, StartNumber),
        state: State,
        reads: Reads,
        permits: Permits,
    ) -> Self {
        let (id, kind, caller, command, number) = facts;
        let driver = Mutex::new(Driver { permits: Some(permits), ..Driver::default() });
        let (state, reads) = (Mutex::new(state), Mutex::new(reads));
        Self { id, kind, caller, command, number, state, reads, kept: Mutex::default(), driver }
    }

    /// What its streams have from these positions on.
    pub(super) fn deltas(&self, world: &World, from: Both<u64>) -> Both<Delta> {
        let kept = self.kept.lock().unwrap();
        let delta = |name, cursor| {
            let needed = output::needed_from(cursor);
            let (start, bytes, closed) = match &*kept {
                Some(kept) => {
                    let (start, bytes) = kept.get(name);
                    let from = needed.clamp(*start, start + bytes.len() as u64);
                    (from, bytes.slice(usize::try_from(from - start).unwrap()..), true)
                }
                None => {
                    let command = &world.commands[&self.command];
                    let (start, bytes) = window(command.written.get(name), needed);
                    (start, bytes, !command.alive())
                }
            };
            output::delta_of(start, &bytes, cursor, TAIL_BYTES, closed)
        };
        Both { stdout: delta(Stdout, from.stdout), stderr: delta(Stderr, from.stderr) }
    }

    pub(super) fn request(&self, world: &mut World, cause: Cause) {
        let mut state = self.state();
        let running = state.phase() == Phase::Running;
        state.request(cause);
        if running && let Some(command) = world.commands.get_mut(&self.command) {
            command.asked = true;
            // Nothing before it has asked for the end.
            command.stopped |= state.ended_for() == Some(Cause::Stopping);
        }
    }
}
