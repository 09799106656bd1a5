//! Random schedules of lost requests, lost replies, refusals and restarts, for a client that repeats what the table lets it
//! repeat: nothing is done twice, and what is said of a call that was given up is true. There is no clock and no connection.

use std::collections::{BTreeMap, HashMap};

use proptest::{
    prelude::*,
    test_runner::{Config, TestRunner},
};

use super::{Effect, Features, RETRIES, Reached, Rpc, pause};

/// Schedules that are played.
const SCHEDULES: u32 = 10_000;

/// The key of a command that another client has started.
const OF_SOMEBODY_ELSE: u64 = u64::MAX;

/// What becomes of one attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Attempt {
    Answered,
    /// No connection.
    NotSent,
    /// Sent, and lost on its way.
    RequestLost,
    /// Carried out, and the reply lost on its way.
    ReplyLost,
    /// Carried out, the reply lost, and the executor is another one since.
    ReplyLostAndRestarted,
    Refused,
}

#[derive(Debug, Clone)]
struct Call {
    rpc: Rpc,
    attempts: Vec<Attempt>,
}

fn call() -> impl Strategy<Value = Call> {
    let rpc = prop_oneof![
        3 => Just(Rpc::StartTask),
        1 => Just(Rpc::Run),
        4 => Just(Rpc::ReadOutput),
        2 => Just(Rpc::KillTask),
        1 => Just(Rpc::CancelRun),
        1 => Just(Rpc::AckCompletions),
        1 => prop::sample::select(vec![Rpc::GetInfo, Rpc::GetTask, Rpc::ListTasks, Rpc::WatchTasks, Rpc::ReadStream]),
    ];
    let attempt = prop_oneof![
        4 => Just(Attempt::Answered),
        2 => Just(Attempt::NotSent),
        2 => Just(Attempt::RequestLost),
        3 => Just(Attempt::ReplyLost),
        1 => Just(Attempt::ReplyLostAndRestarted),
        1 => Just(Attempt::Refused),
    ];
    (rpc, prop::collection::vec(attempt, 1..8)).prop_map(|(rpc, attempts)| Call { rpc, attempts })
}

/// What an executor does with what arrives. What it remembers is what it announces.
#[derive(Debug, Default)]
struct ModelExecutor {
    features: Features,
    keys: HashMap<u64, u64>,
    /// How often the command of a key was started, over all executors.
    started: BTreeMap<u64, u32>,
    /// Whose command an id names. An executor that keeps nothing begins to count anew.
    ids: HashMap<u64, u64>,
    written: u64,
    position: u64,
    latest_read: Option<(u64, (u64, u64))>,
    acknowledged: u64,
    /// Commands that were ended, by key.
    ended: Vec<u64>,
}

impl ModelExecutor {
    fn restart(&mut self) {
        if !self.features.resume {
            self.keys.clear();
            // Somebody else has started something since.
            self.ids = HashMap::from([(1, OF_SOMEBODY_ELSE)]);
        }
        if !self.features.read_id {
            self.latest_read = None;
        }
    }

    /// Returns the id.
    fn start(&mut self, key: u64) -> u64 {
        if let Some(id) = self.keys.get(&key).filter(|_| self.features.resume) {
            return *id;
        }
        *self.started.entry(key).or_default() += 1;
        let id = self.ids.len() as u64 + 1;
        self.keys.insert(key, id);
        self.ids.insert(id, key);
        id
    }

    fn read(&mut self, read_id: u64) -> (u64, u64) {
        if let Some((latest, range)) = self.latest_read
            && latest == read_id
            && self.features.read_id
        {
            return range;
        }
        self.written += 10;
        let range = (self.position, self.written);
        self.position = self.written;
        self.latest_read = Some((read_id, range));
        range
    }

    fn kill(&mut self, id: u64) {
        if let Some(key) = self.ids.get(&id).filter(|key| !self.ended.contains(key)) {
            self.ended.push(*key);
        }
    }
}

/// A client as the table makes it, and what it was told.
#[derive(Debug, Default)]
struct ModelClient {
    /// The latest task: its key and its id.
    task: Option<(u64, u64)>,
    read_to: u64,
    gaps: u64,
    reads_given_up: u64,
    kills_wanted: Vec<u64>,
    next_name: u64,
    /// How often something of interest happened: repeated, given up for good, said to be unknown.
    seen: [u64; 3],
}

impl ModelClient {
    /// One call to its end.
    fn make(&mut self, executor: &mut ModelExecutor, call: &Call) {
        self.next_name += 1;
        let (name, task) = (self.next_name, self.task);
        let mut may_have_arrived = false;
        let mut attempts = 0;
        // What a schedule does not say is answered.
        let outcomes = call.attempts.iter().copied().chain(std::iter::repeat(Attempt::Answered));
        for (attempt, failures) in outcomes.zip(1..) {
            attempts += 1;
            assert!(attempts <= RETRIES + 1, "{:?} is made again without end", call.rpc);
            let arrives = matches!(attempt, Attempt::Answered | Attempt::ReplyLost | Attempt::ReplyLostAndRestarted);
            let answer = arrives.then(|| Self::carry_out(executor, call.rpc, name, task));
            if attempt == Attempt::ReplyLostAndRestarted {
                executor.restart();
            }
            let reached = match attempt {
                Attempt::Answered => return self.answered(call.rpc, name, answer.flatten()),
                Attempt::NotSent => Reached::NotSent,
                Attempt::RequestLost | Attempt::ReplyLost | Attempt::ReplyLostAndRestarted => Reached::NoAnswer,
                Attempt::Refused => Reached::Answered,
            };
            may_have_arrived |= reached == Reached::NoAnswer;
            if !call.rpc.may_repeat(reached, executor.features) || pause(failures, 0.0).is_none() {
                break;
            }
            self.seen[0] += 1;
        }
        self.given_up(executor, call.rpc, name, may_have_arrived);
    }

    fn carry_out(executor: &mut ModelExecutor, rpc: Rpc, name: u64, task: Option<(u64, u64)>) -> Option<(u64, u64)> {
        match rpc {
            Rpc::Run | Rpc::StartTask => Some((executor.start(name), 0)),
            Rpc::ReadOutput => Some(executor.read(name)),
            Rpc::KillTask | Rpc::CancelRun => {
                if let Some((_, id)) = task {
                    executor.kill(id);
                }
                None
            }
            Rpc::AckCompletions => {
                executor.acknowledged = executor.acknowledged.max(name);
                None
            }
            Rpc::GetInfo | Rpc::GetTask | Rpc::ListTasks | Rpc::WatchTasks | Rpc::ReadStream => None,
        }
    }

    fn answered(&mut self, rpc: Rpc, name: u64, answer: Option<(u64, u64)>) {
        match (rpc, answer) {
            (Rpc::Run | Rpc::StartTask, Some((id, _))) => self.task = Some((name, id)),
            (Rpc::ReadOutput, Some((from, to))) => {
                assert!(from >= self.read_to, "bytes {from}..{to} come again after {}", self.read_to);
                self.gaps += u64::from(from > self.read_to);
                self.read_to = to;
            }
            (Rpc::KillTask | Rpc::CancelRun, _) => self.kills_wanted.extend(self.task.map(|(key, _)| key)),
            _ => {}
        }
    }

    fn given_up(&mut self, executor: &ModelExecutor, rpc: Rpc, name: u64, may_have_arrived: bool) {
        self.seen[1] += 1;
        match rpc.effect() {
            Effect::Starts => {
                self.seen[2] += u64::from(may_have_arrived);
                // What is said not to have run has not.
                assert!(may_have_arrived || !executor.started.contains_key(&name));
            }
            Effect::Once if rpc == Rpc::ReadOutput => self.reads_given_up += 1,
            Effect::Once => self.kills_wanted.extend(self.task.map(|(key, _)| key)),
            Effect::None => {}
        }
    }
}

/// Plays a schedule; returns what was of interest.
fn play(features: Features, calls: &[Call]) -> [u64; 3] {
    let mut executor = ModelExecutor { features, ..ModelExecutor::default() };
    let mut client = ModelClient::default();
    for call in calls {
        client.make(&mut executor, call);
        // An id of an executor that is gone means nothing to its client any more.
        client.task = client.task.filter(|(key, id)| executor.ids.get(id) == Some(key));
    }
    assert!(executor.started.values().all(|starts| *starts == 1), "started twice: {:?}", executor.started);
    assert!(client.gaps <= client.reads_given_up, "bytes are missing, and no read was given up: {client:?}");
    let wanted = |key: &u64| client.kills_wanted.contains(key);
    assert!(executor.ended.iter().all(wanted), "another's command was ended: {executor:?}, {client:?}");
    client.seen
}

#[test]
fn ten_thousand_schedules_repeat_nothing_that_happens_twice() {
    let features = (any::<bool>(), any::<bool>()).prop_map(|(resume, read_id)| Features { resume, read_id });
    let (mut played, mut seen) = (0, [0; 3]);
    let cell = std::cell::RefCell::new((&mut played, &mut seen));
    let config = Config { cases: SCHEDULES, failure_persistence: None, ..Config::default() };
    let result = TestRunner::new(config).run(&(features, prop::collection::vec(call(), 1..20)), |(features, calls)| {
        let of_this = play(features, &calls);
        let mut counts = cell.borrow_mut();
        *counts.0 += 1;
        counts.1.iter_mut().zip(of_this).for_each(|(sum, count)| *sum += count);
        Ok(())
    });
    if let Err(failure) = result {
        panic!("{failure}");
    }
    println!("{played} schedules; repeated, given up, unknown: {seen:?}");
    assert_eq!(played, SCHEDULES);
    assert!(seen.iter().all(|count| *count > 0), "something never happened: {seen:?}");
}
