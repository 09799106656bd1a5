//! What the promises are, as far as clients can see them: what was asked and answered, and what the commands did.

use std::collections::{BTreeMap, HashMap, VecDeque};

use executor_proto::{
    error::ExecutorError,
    types::{Completion, Exit, StartKey, StreamDelta, TaskId, TaskOutput, TaskStatus},
};

use super::{
    server::{MAX_COMPLETIONS, MAX_FINISHED, pick},
    task::Task,
    world::{Command, World},
};
use crate::{
    engine::{keys::CommandDigest, registry::Kind},
    ids::{Caller, TenantId},
};

/// How long a used key is not free, in milliseconds.
const DAY_MS: u64 = 24 * 60 * 60 * 1_000;

/// What clients know and may rely on.
#[derive(Debug, Default)]
pub(super) struct Model {
    keys: HashMap<(Caller, String), Used>,
    readers: BTreeMap<(TenantId, TaskId), Reader>,
    /// Not acknowledged, of each owner.
    waiting: HashMap<Caller, VecDeque<Completion>>,
    told: HashMap<(TenantId, TaskId), Completion>,
    latest: HashMap<Caller, u64>,
    /// The status with which a task was said to have ended.
    ended: HashMap<(TenantId, TaskId), TaskStatus>,
    /// Finished tasks that can still be asked for.
    kept: HashMap<Caller, Vec<TaskId>>,
}

/// What a key was used for.
#[derive(Debug)]
struct Used {
    at_ms: u64,
    digest: CommandDigest,
    begun: bool,
    command: Option<u64>,
    /// Nobody can say whether it ran.
    unknown: bool,
}

/// A client that reads a task.
#[derive(Debug)]
struct Reader {
    caller: Caller,
    command: u64,
    read_id: u64,
    /// Nobody has had the answer to it.
    pending: bool,
    last: Option<TaskOutput>,
    position: [u64; 2],
    dropped: [u64; 2],
    text: [String; 2],
}

impl Model {
    /// What was under way is gone; the keeper with it, or not.
    pub(super) fn server_died(&mut self, keeper: bool) {
        self.keys.retain(|_, used| {
            used.unknown |= keeper && used.begun && used.command.is_none();
            used.unknown || used.command.is_some()
        });
    }

    // Keys: one start key, at most one process.

    /// The key was free: nothing ran under it, or that was a day ago.
    pub(super) fn check_new(&mut self, world: &mut World, caller: &Caller, key: &StartKey, digest: CommandDigest) {
        if let Some(used) = self.keys.get(&(caller.clone(), key.0.clone())) {
            assert!(used.at_ms + DAY_MS <= world.now_ms, "a used key is free again: {used:?}");
            assert!(!self.must_be_known(world, used), "{used:?}");
            world.seen.keys_again += 1;
        }
        let used = Used { at_ms: world.now_ms, digest, begun: false, command: None, unknown: false };
        self.keys.insert((caller.clone(), key.0.clone()), used);
        world.seen.starts += 1;
    }

    pub(super) fn begun(&mut self, caller: &Caller, key: &StartKey) {
        self.used(caller, key).begun = true;
    }

    pub(super) fn given_back(&mut self, caller: &Caller, key: &StartKey) {
        self.keys.remove(&(caller.clone(), key.0.clone()));
    }

    pub(super) fn spawned(&mut self, world: &World, caller: &Caller, key: &StartKey, command: u64) {
        let of_key = world.commands.values().filter(|one| one.caller == *caller && one.key == key.0);
        let alive = of_key.filter(|one| one.alive()).count();
        assert!(alive <= 1, "two commands of one key are alive");
        let used = self.used(caller, key);
        assert!(used.command.is_none(), "a second process for a key: {used:?}");
        used.command = Some(command);
    }

    fn used(&mut self, caller: &Caller, key: &StartKey) -> &mut Used {
        self.keys.get_mut(&(caller.clone(), key.0.clone())).expect("a start is made with a key that was free")
    }

    /// Whether the same start again must find what it has started.
    fn must_be_known(&self, world: &World, used: &Used) -> bool {
        let Some(command) = used.command.map(|command| &world.commands[&command]) else { return false };
        let kept = || {
            let id = command.name.as_ref();
            self.kept.get(&command.caller).is_some_and(|kept| kept.iter().any(|one| Some(one) == id))
        };
        command.held || kept()
    }

    pub(super) fn check_attached(
        &mut self,
        world: &mut World,
        caller: &Caller,
        key: &StartKey,
        digest: CommandDigest,
        task: &Task,
    ) {
        let used = &self.keys[&(caller.clone(), key.0.clone())];
        assert_eq!((used.digest, used.command), (digest, Some(task.command)), "{key:?} is attached to another start");
        self.known(task);
        world.seen.attached += 1;
    }

    pub(super) fn check_refused(
        &self,
        world: &mut World,
        caller: &Caller,
        key: &StartKey,
        digest: CommandDigest,
        error: &ExecutorError,
    ) {
        let used =
            self.keys.get(&(caller.clone(), key.0.clone())).unwrap_or_else(|| panic!("{key:?} is free: {error}"));
        match error {
            ExecutorError::KeyConflict => {
                assert_ne!(used.digest, digest);
                world.seen.conflicts += 1;
            }
            ExecutorError::OutcomeUnknown { .. } => {
                assert_eq!(used.digest, digest);
                assert!(!self.must_be_known(world, used), "unknown, and it is there: {used:?}");
                world.seen.unknown_outcomes += 1;
            }
            other => panic!("{other}"),
        }
    }

    pub(super) fn digest(&self, caller: &Caller, key: &StartKey) -> Option<CommandDigest> {
        self.keys.get(&(caller.clone(), key.0.clone())).map(|used| used.digest)
    }

    // Reads: every byte once, in order; a gap is marked.

    /// Its client has the id.
    pub(super) fn known(&mut self, task: &Task) {
        let name = (task.caller.tenant.clone(), task.id.clone());
        if task.kind == Kind::Task && !self.readers.contains_key(&name) {
            let reader = Reader {
                caller: task.caller.clone(),
                command: task.command,
                read_id: 0,
                pending: true,
                last: None,
                position: [0; 2],
                dropped: [0; 2],
                text: Default::default(),
            };
            self.readers.insert(name, reader);
        }
    }

    pub(super) fn reader_at(&self, at: u8) -> Option<(Caller, TaskId)> {
        let at = pick(at, self.readers.len())?;
        self.readers.iter().nth(at).map(|((_, id), reader)| (reader.caller.clone(), id.clone()))
    }

    pub(super) fn readers(&self) -> Vec<(Caller, TaskId)> {
        self.readers.iter().map(|((_, id), reader)| (reader.caller.clone(), id.clone())).collect()
    }

    pub(super) fn forget_reader(&mut self, caller: &Caller, id: &TaskId) {
        self.readers.remove(&(caller.tenant.clone(), id.clone()));
    }

    /// The name of the next read: a new one, unless the answer to the one before was lost, or it is to be repeated.
    pub(super) fn read_id(&mut self, caller: &Caller, id: &TaskId, again: bool) -> String {
        let reader = self.readers.get_mut(&(caller.tenant.clone(), id.clone())).expect("it is read");
        let repeats = again && reader.last.is_some();
        if !(reader.pending || repeats) {
            reader.read_id += 1;
            (reader.pending, reader.last) = (true, None);
        }
        format!("{} {}", id.0, reader.read_id)
    }

    pub(super) fn check_read(&mut self, world: &mut World, task: &Task, read_id: &str, output: &TaskOutput) {
        self.check_status(world, task, &output.status);
        let reader = self.readers.get_mut(&(task.caller.tenant.clone(), task.id.clone())).expect("it is read");
        let command = &world.commands[&reader.command];
        if let Some(last) = &reader.last {
            world.seen.repeated_reads += 1;
            assert_eq!(output.status, last.status, "{read_id} is answered otherwise");
            for (now, before) in [(&output.stdout, &last.stdout), (&output.stderr, &last.stderr)] {
                // Of what was shown before, the end: some of it may be kept no longer, or all of it with its keeper.
                let same = before.data.ends_with(&now.data) && end(now) == end(before);
                assert!(same || (command.lost && now.data.is_empty()), "{read_id}: {now:?}, before {before:?}");
            }
            return;
        }
        let streams = [(&output.stdout, &command.written.stdout), (&output.stderr, &command.written.stderr)];
        for (at, (delta, written)) in streams.into_iter().enumerate() {
            if delta.start != reader.position[at] + delta.dropped {
                // With its keeper goes what had not been written down yet.
                assert!(command.lost && delta.data.is_empty(), "{read_id}: a gap that is not marked: {delta:?}");
                continue;
            }
            let range = usize::try_from(delta.start).unwrap()..usize::try_from(end(delta)).unwrap();
            assert_eq!(delta.data, written[range], "{read_id}: other bytes");
            reader.position[at] = end(delta);
            reader.dropped[at] += delta.dropped;
            reader.text[at].push_str(&String::from_utf8_lossy(&delta.data));
            world.seen.dropped_bytes += delta.dropped;
            world.seen.read_bytes += delta.data.len() as u64;
        }
        (reader.pending, reader.last) = (false, Some(output.clone()));
        world.seen.reads += 1;
    }

    /// Its reader has had everything, and where nothing was dropped the text is the whole one.
    pub(super) fn check_all_read(&self, world: &World, caller: &Caller, id: &TaskId) {
        let Some(reader) = self.readers.get(&(caller.tenant.clone(), id.clone())) else { return };
        let command = &world.commands[&reader.command];
        if command.lost {
            return;
        }
        let streams = [&command.written.stdout, &command.written.stderr];
        for (at, written) in streams.into_iter().enumerate() {
            assert_eq!(reader.position[at], written.len() as u64, "{id:?} was not read to its end");
            if reader.dropped[at] == 0 {
                assert_eq!(reader.text[at], String::from_utf8_lossy(written), "a character was split");
            }
        }
    }

    // Ends: exit facts are honest.

    pub(super) fn check_status(&mut self, world: &mut World, task: &Task, status: &TaskStatus) {
        let command = &world.commands[&task.command];
        match status {
            TaskStatus::Running => return,
            TaskStatus::Ended(Exit::Unknown(_)) => {
                assert!(command.lost, "unknown, and its keeper lived: {command:?}");
                world.seen.unknown_exits += 1;
            }
            TaskStatus::Ended(exit) => {
                assert_eq!(Some(exit), command.exit.as_ref());
                world.seen.exits += 1;
            }
            TaskStatus::Killed(signal) => {
                assert!(command.asked, "killed, and nobody asked for it: {command:?}");
                let died_of = match &command.exit {
                    Some(Exit::Signal(signal)) => Some(*signal),
                    _ => None,
                };
                assert_eq!(*signal, died_of);
                world.seen.kills += 1;
            }
        }
        if task.kind == Kind::Task {
            let before =
                self.ended.entry((task.caller.tenant.clone(), task.id.clone())).or_insert_with(|| status.clone());
            assert_eq!(status, before, "{:?} ended in two ways", task.id);
        }
    }

    // Completions: one for each task, to its owner, until it is acknowledged.

    pub(super) fn told(&mut self, world: &mut World, task: &Task, completion: &Completion) {
        assert_eq!(completion.task_id, task.id);
        assert!(!world.commands[&task.command].stopped, "of an end that the executor's stopping brought about");
        self.check_status(world, task, &completion.status);
        let before = self.told.insert((task.caller.tenant.clone(), task.id.clone()), completion.clone());
        assert_eq!(before, None, "told twice");
        let latest = self.latest.entry(task.caller.clone()).or_default();
        assert!(completion.sequence > *latest, "a number that was used");
        *latest = completion.sequence;
        let waiting = self.waiting.entry(task.caller.clone()).or_default();
        waiting.push_back(completion.clone());
        if waiting.len() as u64 > MAX_COMPLETIONS {
            waiting.pop_front();
        }
        world.seen.completions += 1;
    }

    pub(super) fn acknowledged(&mut self, caller: &Caller, up_to: u64) {
        if let Some(waiting) = self.waiting.get_mut(caller) {
            waiting.retain(|completion| completion.sequence > up_to);
        }
    }

    pub(super) fn check_waiting(&self, world: &mut World, caller: &Caller, told: &[Completion]) {
        let expected: Vec<_> = self.waiting.get(caller).into_iter().flatten().cloned().collect();
        assert_eq!(told, expected, "what waits for {caller:?}");
        world.seen.delivered += told.len() as u64;
    }

    /// Everybody was told of everything that has ended.
    pub(super) fn check_told(&self, world: &World) {
        for command in world.commands.values().filter(|command| command.kind == Kind::Task && !command.stopped) {
            let Some(id) = command.name.as_ref().filter(|_| command.caller.owner.is_some()) else { continue };
            let told = self.told.contains_key(&(command.caller.tenant.clone(), id.clone()));
            // One that died with its keeper before the journal had its name is known by its key alone.
            assert!(told || command.unnamed, "nobody was told of {id:?}: {command:?}");
        }
    }

    // Who may see what, and for how long.

    /// `answer` is what this caller got for this id.
    pub(super) fn check_access(
        &self,
        world: &mut World,
        caller: &Caller,
        id: &TaskId,
        answer: Result<&Task, &ExecutorError>,
    ) {
        let named = |command: &Command| command.caller.tenant == caller.tenant && command.name.as_ref() == Some(id);
        let of_tenant = world.commands.iter().find(|(_, command)| named(command));
        match (answer, of_tenant) {
            (Ok(task), Some((uid, command))) => {
                assert_eq!((&task.id, task.command), (id, *uid));
                assert!(command.caller == *caller || command.caller.owner.is_none(), "{caller:?} sees {id:?}");
            }
            (Err(ExecutorError::ForeignTask(foreign)), Some((_, command))) => {
                assert!(foreign == id && command.caller != *caller && command.caller.owner.is_some());
                world.seen.foreign += 1;
            }
            (Err(ExecutorError::UnknownTask(unknown)), of_tenant) => {
                assert_eq!(unknown, id);
                let had = self.readers.contains_key(&(caller.tenant.clone(), id.clone()));
                let here = had
                    && of_tenant.is_some_and(|(_, command)| {
                        command.held || self.kept.get(&command.caller).is_some_and(|kept| kept.contains(id))
                    });
                assert!(!here, "{id:?} is there and was not found");
                world.seen.unknown_tasks += 1;
            }
            (answer, of_tenant) => panic!("{id:?} of {of_tenant:?} was answered with {answer:?} to {caller:?}"),
        }
    }

    /// A task is over and kept; `forgotten` went for it.
    pub(super) fn finished(&mut self, task: &Task, forgotten: &[std::sync::Arc<Task>]) {
        let kept = self.kept.entry(task.caller.clone()).or_default();
        if !kept.contains(&task.id) {
            kept.push(task.id.clone());
        }
        let above = (kept.len() as u64).saturating_sub(MAX_FINISHED);
        assert!(forgotten.len() as u64 <= above, "{forgotten:?} went without need: {kept:?}");
        assert!(forgotten.iter().all(|one| one.id != task.id), "it went before older ones: {task:?}");
    }

    pub(super) fn forgotten(&mut self, task: &Task) {
        if let Some(kept) = self.kept.get_mut(&task.caller) {
            kept.retain(|id| *id != task.id);
        }
    }

    /// What is kept is what should be, also after another server has taken over.
    pub(super) fn check_finished(&mut self, caller: &Caller, finished: &[&std::sync::Arc<Task>]) {
        let kept = self.kept.entry(caller.clone()).or_default();
        let there: Vec<_> = finished.iter().map(|task| &task.id).collect();
        assert!(there.len() == kept.len() && there.iter().all(|id| kept.contains(id)), "{there:?}, not {kept:?}");
    }
}

fn end(delta: &StreamDelta) -> u64 {
    delta.start + delta.data.len() as u64
}

/// How often something happened that the promises are about.
#[derive(Debug, Default, Clone)]
pub(super) struct Seen {
    pub(super) starts: u64,
    pub(super) attached: u64,
    pub(super) conflicts: u64,
    pub(super) unknown_outcomes: u64,
    pub(super) keys_again: u64,
    pub(super) over_limit: u64,
    pub(super) reads: u64,
    pub(super) lost_reads: u64,
    pub(super) repeated_reads: u64,
    pub(super) read_bytes: u64,
    pub(super) dropped_bytes: u64,
    pub(super) exits: u64,
    pub(super) unknown_exits: u64,
    pub(super) kills: u64,
    pub(super) completions: u64,
    pub(super) delivered: u64,
    pub(super) foreign: u64,
    pub(super) unknown_tasks: u64,
}

impl Seen {
    fn counts(&mut self) -> [&mut u64; 18] {
        let Self {
            starts,
            attached,
            conflicts,
            unknown_outcomes,
            keys_again,
            over_limit,
            reads,
            lost_reads,
            repeated_reads,
            read_bytes,
            dropped_bytes,
            exits,
            unknown_exits,
            kills,
            completions,
            delivered,
            foreign,
            unknown_tasks,
        } = self;
        [
            starts,
            attached,
            conflicts,
            unknown_outcomes,
            keys_again,
            over_limit,
            reads,
            lost_reads,
            repeated_reads,
            read_bytes,
            dropped_bytes,
            exits,
            unknown_exits,
            kills,
            completions,
            delivered,
            foreign,
            unknown_tasks,
        ]
    }

    pub(super) fn add(&mut self, other: &Self) {
        let mut other = other.clone();
        for (sum, count) in self.counts().into_iter().zip(other.counts()) {
            *sum += *count;
        }
    }

    /// That the schedules were about something.
    pub(super) fn assert_not_idle(mut self) {
        let text = format!("{self:?}");
        assert!(self.counts().into_iter().all(|count| *count > 0), "something never happened: {text}");
    }
}
