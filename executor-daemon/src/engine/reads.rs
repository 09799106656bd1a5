//! How far a task was read, and what the latest reads were answered. Pure: the caller holds the lock, takes the bytes out of
//! the streams, and writes down what was answered.
//!
//! ```text
//!   a read id ─► answered here ──────────────► the same answer
//!            ├─► answered by a process before ─► the same range, as far as it is still kept
//!            └─► new ─────────────────────────► from the position on, which moves
//! ```

use std::collections::VecDeque;

use bytes::Bytes;
use executor_proto::types::{OwnerId, ReadId, StreamDelta, StreamName, TaskOutput, TaskStatus};

use crate::{
    ids::Caller,
    journal::{self, ReadRange},
};

/// Owners whose latest read of a task is kept, so that it can be repeated. Only an ownerless task has more than one.
const MAX_ANSWERS: usize = 4;

/// Both streams of a command, or something of each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Both<T> {
    pub(super) stdout: T,
    pub(super) stderr: T,
}

impl<T> Both<T> {
    /// The one with this name.
    pub(super) fn get(&self, name: StreamName) -> &T {
        match name {
            StreamName::Stdout => &self.stdout,
            StreamName::Stderr => &self.stderr,
        }
    }
}

/// What a stream has from a position on, and where the next delta begins.
pub(super) type Delta = (StreamDelta, u64);

/// What a read comes to.
#[derive(Debug)]
pub(super) enum Asked {
    /// This answer again.
    Answered(TaskOutput),
    /// A process before this one has answered it; see [`Reads::answer_again`].
    Before(journal::Read),
    /// It is new, and begins at these positions; see [`Reads::answer`].
    New(Both<u64>),
}

/// The reads of one task.
#[derive(Debug, Default)]
pub(super) struct Reads {
    /// Where the next read begins.
    cursors: Both<u64>,
    answers: VecDeque<Answer>,
    /// The latest read that a process before this one has answered: its reply may be lost.
    before: Option<journal::Read>,
}

/// What an owner's latest read was answered. Its bytes are kept, since the ring may have moved on when they are asked for again.
#[derive(Debug)]
struct Answer {
    owner: Option<OwnerId>,
    read_id: ReadId,
    output: TaskOutput,
}

impl journal::Read {
    /// Where it began in each stream.
    pub(super) fn begins(&self) -> Both<u64> {
        Both { stdout: self.stdout.from, stderr: self.stderr.from }
    }
}

impl Reads {
    /// Of a task that a process before this one has started; `read`: the latest that was answered there.
    pub(super) fn recalled(read: Option<journal::Read>) -> Self {
        let cursors =
            read.as_ref().map_or_else(Both::default, |read| Both { stdout: read.stdout.to, stderr: read.stderr.to });
        Self { cursors, before: read, ..Self::default() }
    }

    /// What is to be answered.
    pub(super) fn ask(&mut self, caller: &Caller, read_id: &ReadId) -> Asked {
        if let Some(output) = self.answered(caller, read_id) {
            return Asked::Answered(output.clone());
        }
        // Whoever reads on has had that answer.
        match self.before.take_if(|before| before.read_id != read_id.0) {
            Some(_) => Asked::New(self.cursors),
            None => self.before.clone().map_or(Asked::New(self.cursors), Asked::Before),
        }
    }

    /// Whether this read was answered already.
    pub(super) fn was_answered(&self, caller: &Caller, read_id: &ReadId) -> bool {
        self.answered(caller, read_id).is_some()
            || self.before.as_ref().is_some_and(|before| before.read_id == read_id.0)
    }

    /// Answers a new read with what the streams have from its positions on. The record is to be written before the answer is
    /// given.
    pub(super) fn answer(
        &mut self,
        caller: &Caller,
        read_id: &ReadId,
        status: TaskStatus,
        deltas: Both<Delta>,
    ) -> (journal::Read, TaskOutput) {
        let Both { stdout: (stdout, stdout_next), stderr: (stderr, stderr_next) } = deltas;
        let range = |from, delta: &StreamDelta, to| ReadRange { from, shown_from: delta.start, to };
        let read = journal::Read {
            read_id: read_id.0.clone(),
            status: (&status).into(),
            stdout: range(self.cursors.stdout, &stdout, stdout_next),
            stderr: range(self.cursors.stderr, &stderr, stderr_next),
        };
        let output = TaskOutput { status, stdout, stderr };
        self.cursors = Both { stdout: stdout_next, stderr: stderr_next };
        self.remember(caller, read_id, &output);
        (read, output)
    }

    /// Gives the answer that a process before this one gave, as far as its bytes are among what the streams still have from its
    /// positions on.
    pub(super) fn answer_again(
        &mut self,
        caller: &Caller,
        read_id: &ReadId,
        before: &journal::Read,
        deltas: Both<Delta>,
    ) -> TaskOutput {
        let up_to = |(delta, _next): Delta, range: &ReadRange| {
            let start = delta.start.min(range.to);
            let length = usize::try_from(range.to - start).unwrap_or(usize::MAX).min(delta.data.len());
            let data = if delta.start <= range.to { delta.data.slice(..length) } else { Bytes::new() };
            // What that answer had and what died with its host since is missing now.
            let missing = if delta.missing > 0 { range.to - start - data.len() as u64 } else { 0 };
            StreamDelta { start, dropped: start.saturating_sub(range.from), data, spill: delta.spill, missing }
        };
        let output = TaskOutput {
            status: before.status.clone().into(),
            stdout: up_to(deltas.stdout, &before.stdout),
            stderr: up_to(deltas.stderr, &before.stderr),
        };
        self.remember(caller, read_id, &output);
        output
    }

    fn answered(&self, caller: &Caller, read_id: &ReadId) -> Option<&TaskOutput> {
        let same = |answer: &&Answer| answer.owner == caller.owner && answer.read_id == *read_id;
        self.answers.iter().find(same).map(|answer| &answer.output)
    }

    fn remember(&mut self, caller: &Caller, read_id: &ReadId, output: &TaskOutput) {
        self.answers.retain(|answer| answer.owner != caller.owner);
        if self.answers.len() == MAX_ANSWERS {
            self.answers.pop_front();
        }
        let owner = caller.owner.clone();
        self.answers.push_back(Answer { owner, read_id: read_id.clone(), output: output.clone() });
    }
}
