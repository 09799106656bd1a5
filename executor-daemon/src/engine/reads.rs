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
    journal::{self, MAX_READS, ReadRange},
};

/// Owners whose latest read of a task is kept whole, so that it can be repeated. Only an ownerless task has more than one.
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
    /// What was answered here, oldest first.
    answers: VecDeque<Answer>,
    /// Reads of which the ranges alone are known, the latest first: a process before this one has answered them, or another
    /// reader without a session has read on since. Their replies may be lost. With the answers at most [`MAX_READS`].
    before: Vec<journal::Read>,
    /// Whether the task has several readers, so that one who reads on says nothing of what another has had.
    shared: bool,
}

/// What an owner's latest read was answered. Its bytes are kept, since the ring may have moved on when they are asked for again.
#[derive(Debug)]
struct Answer {
    owner: Option<OwnerId>,
    read: journal::Read,
    output: TaskOutput,
}

impl journal::Read {
    /// Where it began in each stream.
    pub(super) fn begins(&self) -> Both<u64> {
        Both { stdout: self.stdout.from, stderr: self.stderr.from }
    }
}

impl Reads {
    /// Of a task; `before`: the latest that a process before this one has answered, the latest first.
    /// `shared`: it has no owner, so that anybody reads it.
    pub(super) fn recalled(before: Vec<journal::Read>, shared: bool) -> Self {
        let cursors =
            before.first().map_or_else(Both::default, |read| Both { stdout: read.stdout.to, stderr: read.stderr.to });
        Self { cursors, before, shared, ..Self::default() }
    }

    /// What is to be answered.
    pub(super) fn ask(&mut self, caller: &Caller, read_id: &ReadId) -> Asked {
        if let Some(output) = self.answered(caller, read_id) {
            return Asked::Answered(output.clone());
        }
        match self.before.iter().find(|before| before.read_id == read_id.0) {
            Some(before) => Asked::Before(before.clone()),
            None => Asked::New(self.cursors),
        }
    }

    /// Whether this read was answered already.
    pub(super) fn was_answered(&self, caller: &Caller, read_id: &ReadId) -> bool {
        self.answered(caller, read_id).is_some() || self.before.iter().any(|before| before.read_id == read_id.0)
    }

    /// Answers a new read with what the streams have from its positions on. The records are to be written before the answer is
    /// given, in place of those before.
    pub(super) fn answer(
        &mut self,
        caller: &Caller,
        read_id: &ReadId,
        status: TaskStatus,
        deltas: Both<Delta>,
    ) -> (Vec<journal::Read>, TaskOutput) {
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
        if !self.shared {
            // Its one reader reads on, and so has had what came before.
            self.before.clear();
        }
        self.remember(caller, read, &output);
        (self.records(), output)
    }

    /// Gives the answer that a process before this one gave, as far as its bytes are among what the streams still have from its
    /// positions on.
    pub(super) fn answer_again(&mut self, caller: &Caller, before: &journal::Read, deltas: Both<Delta>) -> TaskOutput {
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
        self.remember(caller, before.clone(), &output);
        output
    }

    fn answered(&self, caller: &Caller, read_id: &ReadId) -> Option<&TaskOutput> {
        let same = |answer: &&Answer| answer.owner == caller.owner && answer.read.read_id == read_id.0;
        self.answers.iter().find(same).map(|answer| &answer.output)
    }

    /// Keeps an answer. An owner's new one takes the place of its latest; of those who call for no session, who may be several,
    /// the ranges of earlier ones are kept, and what the streams still have of them.
    fn remember(&mut self, caller: &Caller, read: journal::Read, output: &TaskOutput) {
        self.before.retain(|before| before.read_id != read.read_id);
        let owner = caller.owner.clone();
        let replaced = self.answers.iter().position(|answer| answer.owner == owner);
        if let Some(replaced) = replaced.and_then(|at| self.answers.remove(at))
            && owner.is_none()
        {
            self.before.insert(0, replaced.read);
        }
        if self.answers.len() == MAX_ANSWERS
            && let Some(oldest) = self.answers.pop_front()
        {
            self.before.insert(0, oldest.read);
        }
        self.answers.push_back(Answer { owner, read, output: output.clone() });
        self.before.truncate(MAX_READS.saturating_sub(self.answers.len()));
    }

    /// What is to be written down: the reads that may have to be repeated, the latest first.
    fn records(&self) -> Vec<journal::Read> {
        self.answers.iter().rev().map(|answer| &answer.read).chain(&self.before).cloned().collect()
    }
}
