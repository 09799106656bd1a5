//! Does to the rules what the engine does, in its order, one step at a time.

use std::{
    sync::{Arc, Mutex},
    time::Instant,
};

use executor_proto::{
    error::ExecutorError,
    types::{Exit, ReadId, StartKey, TaskId, TaskOutput, WatchEvent},
};

use super::{
    Spawn, Step, caller, callers,
    model::Model,
    task::{Driver, Permits, Task},
    world::{Command, World, window},
};
use crate::{
    engine::{
        carry::{self, Compared},
        completions::{Completions, Watch},
        driver::end_facts,
        keys::{CommandDigest, FORGOTTEN, Found},
        reads::{Asked, Both, Reads},
        recall,
        registry::{Keep, Kind, Recalled, Registry, Reservation, Reserved},
        task::{Cause, Phase, State},
    },
    ids::Caller,
    journal::{self, RecordedStart, Recovered, StartNumber},
    limits::{Budget, Budgets, HostLimits, Limits},
};

/// Caps that a short schedule reaches.
const MAX_TASKS_PER_OWNER: u64 = 2;
pub(super) const MAX_FINISHED: u64 = 1;
pub(super) const MAX_COMPLETIONS: u64 = 3;

/// How long a finished task is kept, in milliseconds.
const FINISHED_KEPT_MS: u64 = 24 * 60 * 60 * 1_000;

/// What an engine has.
pub(super) struct Server {
    registry: Registry<Task>,
    completions: Completions,
    limits: Limits,
    starts: Vec<Starting>,
    /// Those that have a driver.
    driven: Vec<Arc<Task>>,
    next_handle: u64,
}

/// A start under way.
struct Starting {
    kind: Kind,
    key: StartKey,
    digest: CommandDigest,
    reservation: Reservation,
    permits: Permits,
    handle: u64,
    stage: Stage,
}

enum Stage {
    Reserved,
    Begun(StartNumber),
    Runs(StartNumber),
    Named(StartNumber, TaskId),
}

/// Only the tasks of an owner are few.
fn limits() -> Limits {
    let others = Budget { max_tasks_per_owner: Some(MAX_TASKS_PER_OWNER), ..Budget::default() };
    let budgets = Budgets { max_tasks: u64::MAX, others, known: Vec::new() };
    Limits::new(budgets, HostLimits::default(), std::path::Path::new("/"))
}

impl Server {
    /// Starts with what the journal and the keeper know: `carry` and `recall`.
    pub(super) fn take_over(world: &mut World, model: &mut Model) -> Self {
        let Recovered { starts, keys, ledgers, first_sequence, set_aside: _ } = world.recovered();
        let mut server = Self {
            registry: recall::keys(keys),
            completions: Completions::recalled(MAX_COMPLETIONS, world.journal.clone(), ledgers, first_sequence),
            limits: limits(),
            starts: Vec::new(),
            driven: Vec::new(),
            next_handle: world.next_handle(),
        };
        let Compared { go_on, nobodys, never_ran, over } =
            carry::compare(starts, world.carried(), |command| World::handle(*command));
        for (recorded, command) in go_on {
            server.go_on(world, recorded, command);
        }
        assert!(nobodys.is_empty(), "everything that the keeper has was begun in the journal");
        for recorded in never_ran {
            world.journal.failed(recorded.number);
        }
        for recorded in over {
            server.bring_back(world, model, recorded);
        }
        server.registry.forget_above(MAX_FINISHED, world.now_ms).iter().for_each(|task| forget(world, model, task));
        server
    }

    fn go_on(&mut self, world: &mut World, recorded: RecordedStart, command: u64) {
        let (kind, caller) = (Kind::from(recorded.start.kind), Caller::from(&recorded.start.account));
        let id = match &recorded.started {
            Some(started) => TaskId(started.id.clone()),
            None => {
                let id = world.next_id(&caller.tenant, kind);
                world.journal.started(recorded.number, &started(&id, World::handle(command), world.now_ms));
                id
            }
        };
        world.commands.get_mut(&command).unwrap().name = Some(id.clone());
        let permits =
            (self.limits.command_there(&caller), (kind == Kind::Task).then(|| self.limits.task_there(&caller)));
        let facts = (id.clone(), kind, caller.clone(), command, recorded.number);
        let state = carry::state_of(&recorded, Instant::now());
        let task = Arc::new(Task::new(facts, state, Reads::recalled(recorded.reads, caller.owner.is_none()), permits));
        let key = StartKey(recorded.start.key);
        self.registry.recall(Recalled {
            number: recorded.number,
            caller,
            key,
            command: recorded.start.digest,
            id,
            finished_at_ms: None,
            entry: Arc::clone(&task),
        });
        self.driven.push(task);
    }

    fn bring_back(&mut self, world: &mut World, model: &mut Model, recorded: RecordedStart) {
        let (ended, seen) = recall::end_of(&recorded, world.now_ms);
        let tell = recall::to_be_told(&recorded, &ended);
        let RecordedStart { number, start, started, reads, .. } = recorded;
        let caller = Caller::from(&start.account);
        if started.is_some() && !seen {
            world.journal.ended(number, &ended);
        }
        let started = started.filter(|_| start.kind == journal::Kind::Task);
        let key = StartKey(start.key);
        let Some(started) = started else {
            world.journal.forgotten(number, world.now_ms);
            return self.registry.recall_key(&caller, key, start.digest, FORGOTTEN, world.now_ms);
        };
        let id = TaskId(started.id);
        let state = State::recalled(ended.exit.into(), ended.ended_for.map(Cause::from), ended.at_ms);
        let kept = world.kept.get(&(caller.tenant.clone(), id.clone())).cloned();
        let task = Arc::new(Task {
            id: id.clone(),
            kind: Kind::Task,
            caller: caller.clone(),
            command: world.named(&caller.tenant, &id),
            number,
            state: Mutex::new(state),
            reads: Mutex::new(Reads::recalled(reads, caller.owner.is_none())),
            kept: Mutex::new(Some(kept.unwrap_or_default())),
            driver: Mutex::new(Driver { over: true, ..Driver::default() }),
        });
        if tell {
            self.tell(world, model, &task);
        }
        model.finished(&task, &[]);
        let (command, finished_at_ms) = (start.digest, Some(ended.at_ms));
        self.registry.recall(Recalled { number, caller, key, command, id, finished_at_ms, entry: task });
    }

    pub(super) fn step(&mut self, world: &mut World, model: &mut Model, step: &Step) {
        match *step {
            Step::Start { by, key, kind, other, stages, spawn } => {
                self.start(world, model, (caller(by), StartKey(format!("k{}", key % 3)), kind, other), (stages, spawn));
            }
            Step::Advance { at, stages, spawn } => {
                if let Some(at) = pick(at, self.starts.len()) {
                    self.advance(world, model, at, (stages, spawn));
                }
            }
            Step::Cancel { by, key } => {
                let key = StartKey(format!("k{}", key % 3));
                if let Some(Found::Known(task)) = self.registry.abort_start(&caller(by), &key, world.now_ms)
                    && task.kind == Kind::Run
                {
                    task.request(world, Cause::Abort);
                }
            }
            Step::Take { by, key } => self.take(world, model, &caller(by), &StartKey(format!("k{}", key % 3))),
            Step::Read { at, lost, again } => {
                if let Some((owner, id)) = model.reader_at(at) {
                    self.read(world, model, &owner, &id, lost, again);
                }
            }
            Step::Ask { by, of, at } => {
                let id = model.reader_at(at).map_or(TaskId(format!("bash-{}", 900 + u32::from(of))), |(_, id)| id);
                let answer = self.registry.access(&caller(by), &id);
                model.check_access(world, &caller(by), &id, answer.as_deref());
                let never = TaskId("bash-999".to_owned());
                let unknown = self.registry.access(&caller(by), &never).unwrap_err();
                assert_eq!(unknown, ExecutorError::UnknownTask(never));
            }
            Step::Kill { at } => {
                if let Some((owner, id)) = model.reader_at(at)
                    && let Ok(task) = self.registry.access(&owner, &id)
                {
                    task.request(world, Cause::Kill);
                }
            }
            Step::Watch { by, acknowledge } => self.watch(world, model, &caller(by), u64::from(acknowledge) % 4),
            Step::Acknowledge { by, up_to } => {
                let caller = caller(by);
                if let Some(owner) = &caller.owner {
                    self.completions.acknowledge(&caller.tenant, owner, u64::from(up_to) % 6);
                    model.acknowledged(&caller, u64::from(up_to) % 6);
                }
            }
            Step::Drive { at, steps } => {
                if let Some(at) = pick(at, self.driven.len()) {
                    let task = Arc::clone(&self.driven[at]);
                    for _ in 0..steps {
                        self.drive(world, model, &task);
                    }
                }
            }
            Step::Alone { at } => {
                if let Some(task) = pick(at, self.driven.len()).map(|at| Arc::clone(&self.driven[at]))
                    && task.kind == Kind::Run
                {
                    task.state().detach(Instant::now());
                    if task.state().alone_since().is_some() {
                        task.request(world, Cause::CallerGone);
                    }
                }
            }
            Step::Sweep { minutes } => {
                world.now_ms += u64::from(minutes) * 60_000;
                let before = world.now_ms.saturating_sub(FINISHED_KEPT_MS);
                let forgotten = self.registry.forget_older(before, world.now_ms);
                forgotten.iter().for_each(|task| forget(world, model, task));
                self.completions.sweep();
            }
            Step::Write { .. } | Step::Exit { .. } | Step::Empty { .. } => world.happens(step),
            Step::ServerDies | Step::KeeperDies | Step::HostRestarts | Step::Stop => {}
        }
    }

    fn start(
        &mut self,
        world: &mut World,
        model: &mut Model,
        (caller, key, kind, other): (Caller, StartKey, Kind, bool),
        further: (u8, Spawn),
    ) {
        let digest = [2 * u8::from(kind == Kind::Task) + u8::from(other); 32];
        let under_way = self
            .starts
            .iter()
            .any(|start| *start.reservation.caller() == caller && start.key == key && start.digest == digest);
        match self.registry.reserve(&caller, &key, &digest, false, world.now_ms) {
            Ok(Reserved::New(reservation)) => {
                model.check_new(world, &caller, &key, digest);
                let task_permit = (kind == Kind::Task).then(|| self.limits.task(&caller)).transpose();
                match task_permit {
                    Ok(task_permit) => {
                        let permits = (self.limits.command(&caller).unwrap(), task_permit);
                        let handle = self.next_handle;
                        self.next_handle += 1;
                        let stage = Stage::Reserved;
                        self.starts.push(Starting { kind, key, digest, reservation, permits, handle, stage });
                        self.advance(world, model, self.starts.len() - 1, further);
                    }
                    Err(error) => {
                        assert!(matches!(error, ExecutorError::OverLimit { .. }), "{error}");
                        let running = self.driven.iter().filter(|task| {
                            task.kind == Kind::Task && task.caller == caller && task.state().phase() != Phase::Ended
                        });
                        let starting = self.starts.iter().filter(|start| *start.reservation.caller() == caller).count();
                        assert!(running.count() + starting >= usize::try_from(MAX_TASKS_PER_OWNER).unwrap());
                        self.registry.give_back(reservation);
                        model.given_back(&caller, &key);
                        world.seen.over_limit += 1;
                    }
                }
            }
            Ok(Reserved::Found(Found::Starting(_))) => assert!(under_way, "nobody starts {key:?}"),
            Ok(Reserved::Found(Found::Known(task))) => {
                model.check_attached(world, &caller, &key, digest, &task);
                if task.kind == Kind::Run {
                    task.state().attach();
                }
            }
            Err(error) => model.check_refused(world, &caller, &key, digest, &error),
        }
    }

    /// A start gets so many stages further.
    fn advance(&mut self, world: &mut World, model: &mut Model, at: usize, (stages, spawn): (u8, Spawn)) {
        for _ in 0..stages {
            let Starting { kind, key, digest, reservation, permits, handle, stage } = self.starts.remove(at);
            let caller = reservation.caller().clone();
            let stage = match stage {
                Stage::Reserved => {
                    model.begun(&caller, &key);
                    Stage::Begun(world.journal.begin(&journal::Start {
                        account: (&caller).into(),
                        key: key.0.clone(),
                        kind: kind.into(),
                        digest,
                        command: Vec::new(),
                        workdir: Vec::new(),
                        timeout_ms: 1.0,
                        begun_at_ms: world.now_ms,
                        handle: Some(handle),
                    }))
                }
                Stage::Begun(number) => match spawn {
                    Spawn::Runs => {
                        world.spawn(handle, Command::new(&caller, &key, kind));
                        model.spawned(world, &caller, &key, world.uid(handle));
                        Stage::Runs(number)
                    }
                    Spawn::Fails => {
                        world.journal.failed(number);
                        self.registry.give_back(reservation);
                        return model.given_back(&caller, &key);
                    }
                    Spawn::Lost => {
                        world.spawn(handle, Command::new(&caller, &key, kind));
                        model.spawned(world, &caller, &key, world.uid(handle));
                        let uid = world.uid(handle);
                        let command = world.commands.get_mut(&uid).unwrap();
                        command.die();
                        command.held = false;
                        world.journal.forgotten(number, world.now_ms);
                        return self.registry.lose(reservation, "it could not be kept", world.now_ms);
                    }
                },
                Stage::Runs(number) => {
                    let id = world.next_id(&caller.tenant, kind);
                    let uid = world.uid(handle);
                    world.commands.get_mut(&uid).unwrap().name = Some(id.clone());
                    world.journal.started(number, &started(&id, handle, world.now_ms));
                    Stage::Named(number, id)
                }
                Stage::Named(number, id) => {
                    let shared = caller.owner.is_none();
                    let facts = (id.clone(), kind, caller, world.uid(handle), number);
                    let task =
                        Arc::new(Task::new(facts, State::started(), Reads::recalled(Vec::new(), shared), permits));
                    if kind == Kind::Run {
                        task.state().attach();
                    }
                    if self.registry.register(reservation, number, id, Arc::clone(&task)) && kind == Kind::Run {
                        task.request(world, Cause::Abort);
                    }
                    if self.registry.draining() {
                        task.request(world, Cause::Stopping);
                    }
                    model.known(&task);
                    return self.driven.push(task);
                }
            };
            self.starts.insert(at, Starting { kind, key, digest, reservation, permits, handle, stage });
        }
    }

    fn take(&mut self, world: &mut World, model: &mut Model, caller: &Caller, key: &StartKey) {
        let Some(digest) = model.digest(caller, key) else { return };
        match self.registry.reserve(caller, key, &digest, true, world.now_ms) {
            Ok(Reserved::Found(Found::Known(task))) => {
                model.check_attached(world, caller, key, digest, &task);
                if task.kind == Kind::Run && task.state().phase() == Phase::Ended {
                    model.check_status(world, &task, &task.state().status());
                    task.state().taken();
                    self.registry.taken(caller, key, world.now_ms);
                }
            }
            Ok(Reserved::Found(Found::Starting(_))) => {}
            Ok(Reserved::New(_)) => panic!("an attach starts nothing"),
            Err(error) => assert!(matches!(error, ExecutorError::OutcomeUnknown { .. }), "{error}"),
        }
    }

    pub(super) fn read(
        &mut self,
        world: &mut World,
        model: &mut Model,
        caller: &Caller,
        id: &TaskId,
        lost: bool,
        again: bool,
    ) -> Option<TaskOutput> {
        let task = match self.registry.access(caller, id) {
            Ok(task) => task,
            error => {
                model.check_access(world, caller, id, error.as_deref());
                model.forget_reader(caller, id);
                return None;
            }
        };
        let read_id = ReadId(model.read_id(caller, id, again));
        let mut reads = task.reads.lock().unwrap();
        let output = match reads.ask(caller, &read_id) {
            Asked::Answered(output) => output,
            Asked::Before(before) => {
                let deltas = task.deltas(world, before.begins());
                reads.answer_again(caller, &before, deltas)
            }
            Asked::New(cursors) => {
                let status = task.state().status();
                let deltas = task.deltas(world, cursors);
                let (reads, output) = reads.answer(caller, &read_id, status, deltas);
                world.journal.read(task.number, &reads);
                output
            }
        };
        if lost {
            world.seen.lost_reads += 1;
        } else {
            model.check_read(world, &task, &read_id.0, &output);
        }
        Some(output)
    }

    fn watch(&mut self, world: &mut World, model: &mut Model, caller: &Caller, acknowledge: u64) {
        let Some(owner) = &caller.owner else { return };
        let told = waiting(&mut self.completions.watch(&caller.tenant, owner));
        model.check_waiting(world, caller, &told);
        if let Some(last) = told.iter().take(usize::try_from(acknowledge).unwrap()).next_back() {
            self.completions.acknowledge(&caller.tenant, owner, last.sequence);
            model.acknowledged(caller, last.sequence);
        }
    }

    fn tell(&self, world: &mut World, model: &mut Model, task: &Task) {
        let (status, told, at) = {
            let state = task.state();
            (state.status(), state.to_be_told(), state.exited_at_ms())
        };
        if let Some(owner) = task.caller.owner.as_ref().filter(|_| told) {
            let at = at.unwrap_or(world.now_ms);
            self.completions.add((&task.caller.tenant, owner), task.number, task.id.clone(), status.clone(), at);
            let latest = waiting(&mut self.completions.watch(&task.caller.tenant, owner)).last().cloned();
            model.told(world, task, &latest.expect("it was just added"));
        }
    }

    /// The next step of a driver; whether there was one.
    fn drive(&mut self, world: &mut World, model: &mut Model, task: &Arc<Task>) -> bool {
        let mut driver = task.driver.lock().unwrap();
        let mut state = task.state();
        let phase = state.phase();
        if driver.over {
            return false;
        }
        let causes = state.take_unwritten();
        for cause in &causes {
            world.journal.asked_to_end(task.number, (*cause).into());
        }
        if state.begin_end() || !causes.is_empty() {
            return true;
        }
        let command = world.commands.get_mut(&task.command).unwrap();
        let ending = state.ending();
        if ending {
            command.die();
        }
        match &command.exit {
            Some(exit) if phase == Phase::Running => state.shell_ended(exit.clone(), !command.leftover, world.now_ms),
            _ if ending => state.end_done(Vec::new()),
            Some(_) if state.alive() && !command.leftover => state.emptied(),
            Some(_) if phase == Phase::Draining && task.kind == Kind::Task && !driver.recorded => {
                driver.permits.as_mut().unwrap().1 = None;
                world.journal.ended(task.number, &end_facts(&state, world.now_ms));
                driver.recorded = true;
            }
            Some(_) if phase == Phase::Draining => {
                state.settled();
            }
            Some(_) if task.kind == Kind::Task && !driver.told => {
                driver.told = true;
                drop(state);
                self.tell(world, model, task);
            }
            Some(_) if state.alive() => return false,
            Some(_) if !driver.tidied => {
                driver.tidied = true;
                let kept =
                    Both { stdout: window(&command.written.stdout, 0), stderr: window(&command.written.stderr, 0) };
                if task.kind == Kind::Task {
                    world.kept.insert((task.caller.tenant.clone(), task.id.clone()), kept.clone());
                }
                *task.kept.lock().unwrap() = Some(kept);
            }
            Some(_) if !driver.released => {
                driver.released = true;
                command.held = false;
            }
            Some(_) => {
                *driver = Driver { over: true, ..Driver::default() };
                drop((driver, state));
                // No two finish at the same moment.
                world.now_ms += 1;
                let keep = Keep { id: task.kind == Kind::Task, result: (task.kind == Kind::Run).then_some(1) };
                let forgotten = self.registry.finished(&task.caller.tenant, &task.id, keep, world.now_ms, MAX_FINISHED);
                if keep.id {
                    model.finished(task, &forgotten);
                }
                forgotten.iter().for_each(|task| forget(world, model, task));
                self.driven.retain(|one| !Arc::ptr_eq(one, task));
            }
            None => return false,
        }
        true
    }

    /// All starts, all ends, as far as they come by themselves.
    fn drive_all(&mut self, world: &mut World, model: &mut Model) {
        while !self.starts.is_empty() {
            self.advance(world, model, 0, (4, Spawn::Runs));
        }
        while let Some(task) = self.driven.first().cloned() {
            let mut steps = 0;
            while self.drive(world, model, &task) {
                steps += 1;
                assert!(steps < 30, "a driver comes to an end: {task:?}");
            }
            if !task.over() {
                // What holds it up is the command, which ends now.
                let command = world.commands.get_mut(&task.command).unwrap();
                command.exit.get_or_insert(Exit::Code(0));
                command.leftover = false;
            }
        }
    }

    /// SIGTERM.
    pub(super) fn stop(&mut self, world: &mut World, model: &mut Model) {
        for task in self.registry.drain() {
            task.request(world, Cause::Stopping);
        }
        let late = self.registry.reserve(&caller(0), &StartKey("late".to_owned()), &[9; 32], false, world.now_ms);
        assert_eq!(late.unwrap_err(), ExecutorError::Stopping);
        self.drive_all(world, model);
        assert!(world.commands.values().all(|command| !command.alive()), "nothing outlives a stop");
        self.completions.close();
    }

    /// Whatever runs ends, and clients read and acknowledge everything.
    pub(super) fn let_everything_end(&mut self, world: &mut World, model: &mut Model) {
        self.drive_all(world, model);
        for (caller, id) in model.readers() {
            // Twice: the first may be a lost one, asked for again.
            for _ in 0..2 {
                self.read(world, model, &caller, &id, false, false);
            }
            model.check_all_read(world, &caller, &id);
        }
        for caller in callers() {
            self.watch(world, model, &caller, MAX_COMPLETIONS);
            self.watch(world, model, &caller, 0);
        }
    }

    pub(super) fn check_caps(&self, model: &mut Model) {
        for caller in callers() {
            let own = self.registry.of_owner(&caller.tenant, caller.owner.as_ref());
            let finished: Vec<_> = own.iter().filter(|task| task.over()).collect();
            assert!(finished.len() as u64 <= MAX_FINISHED, "too many are kept: {finished:?}");
            assert!(own.is_sorted_by_key(|task| task.number), "they are listed from the oldest on: {own:?}");
            model.check_finished(&caller, &finished);
        }
    }
}

fn forget(world: &mut World, model: &mut Model, task: &Task) {
    world.journal.forgotten(task.number, world.now_ms);
    world.kept.remove(&(task.caller.tenant.clone(), task.id.clone()));
    model.forgotten(task);
}

fn started(id: &TaskId, handle: u64, at_ms: u64) -> journal::Started {
    journal::Started { id: id.0.clone(), handle, pid: 7, pid_started: None, at_ms }
}

pub(super) fn pick(at: u8, of: usize) -> Option<usize> {
    (of > 0).then(|| usize::from(at) % of)
}

/// What a watcher is told before it has caught up.
fn waiting(watch: &mut Watch) -> Vec<executor_proto::types::Completion> {
    let mut told = Vec::new();
    loop {
        let mut next = std::pin::pin!(watch.next());
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        match next.as_mut().poll(&mut context) {
            std::task::Poll::Ready(Some(WatchEvent::Completion(completion))) => told.push(completion),
            std::task::Poll::Ready(Some(WatchEvent::CaughtUp)) => return told,
            std::task::Poll::Ready(None) | std::task::Poll::Pending => panic!("a watcher is caught up at once"),
        }
    }
}
