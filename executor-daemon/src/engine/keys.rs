//! What the start keys of one owner stand for, and the results that wait under them. Pure: the caller says what time it is.
//!
//! ```text
//!  free ── begin ──► Starting ── known ──► Known ── forgotten ──► Unknown ── its time, or the cap ──► free
//!    ▲                 │  │                                          ▲
//!    └── given back ───┘  └──────────── lost after its spawn ────────┘
//! ```
//! A finished run's result is held until its client has had all of it and a little longer, or for its time. Above the caps the
//! result that was taken first goes first, then the oldest. A key whose command is forgotten does not become free: somebody
//! may still retry it, and must be told that it cannot be known.

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    sync::Arc,
};

use executor_proto::{error::ExecutorError, types::StartKey};
use tokio::sync::watch;

use crate::journal::StartNumber;

/// How long a result is held for a client that does not come, in milliseconds.
const RESULT_KEPT_MS: u64 = 10 * 60 * 1_000;

/// How long a result is held after it was taken, in milliseconds: until then its last bytes may be lost on the wire.
const TAKEN_KEPT_MS: u64 = 30 * 1_000;

/// How long a key answers that its outcome is not known, in milliseconds.
const UNKNOWN_KEPT_MS: u64 = 24 * 60 * 60 * 1_000;

/// Results held for one owner.
const MAX_HELD_PER_OWNER: usize = 1_024;

/// Bytes of output in the results held for one owner; the newest is held whatever its size.
const MAX_HELD_BYTES_PER_OWNER: u64 = 32 * 1024 * 1024;

/// Keys of one owner that answer unknown, before the oldest become free.
const MAX_UNKNOWN_PER_OWNER: usize = 8_192;

/// Why the outcome of a forgotten key is not known.
pub(super) const FORGOTTEN: &str = "its result is no longer kept";

/// Why the outcome of a key is not known whose start was begun and never came to an end.
const ABANDONED: &str = "its start was given up";

/// Why the outcome of a key is not known that is to be attached to.
const NOT_KNOWN: &str = "the start key is not known here";

/// The digest of everything in a start that must be the same when it is retried.
pub(super) type CommandDigest = [u8; 32];

/// What a key names.
#[derive(Debug)]
pub(super) enum Found<E> {
    /// A start under way. This closes when it has succeeded (true then) or failed.
    Starting(watch::Receiver<bool>),
    /// A run or task that was started.
    Known(Arc<E>),
}

#[derive(Debug)]
struct KeyUse<E> {
    command: CommandDigest,
    state: KeyState<E>,
}

#[derive(Debug)]
enum KeyState<E> {
    Starting {
        /// Somebody has taken it back meanwhile.
        aborted: bool,
        done: watch::Receiver<bool>,
    },
    Known {
        number: StartNumber,
        entry: Arc<E>,
        /// A client has had the whole result.
        taken: bool,
    },
    Unknown(Box<str>),
}

/// A finished run's result that waits for its client.
#[derive(Debug)]
struct Held {
    key: StartKey,
    bytes: u64,
    since_ms: u64,
}

/// All keys of one owner.
#[derive(Debug)]
pub(super) struct Keys<E> {
    uses: HashMap<StartKey, KeyUse<E>>,
    /// By age.
    held: BTreeMap<StartNumber, Held>,
    held_bytes: u64,
    /// When which of the held ones was taken, in that order.
    taken: VecDeque<(u64, StartNumber)>,
    /// Since when which key answers unknown, in that order.
    unknown: VecDeque<(u64, StartKey)>,
}

impl<E> Keys<E> {
    /// None yet.
    pub(super) fn new() -> Self {
        Self {
            uses: HashMap::new(),
            held: BTreeMap::new(),
            held_bytes: 0,
            taken: VecDeque::new(),
            unknown: VecDeque::new(),
        }
    }

    /// Nothing is kept here.
    pub(super) fn is_empty(&self) -> bool {
        self.uses.is_empty()
    }

    /// What a start with this key and command attaches to. `None`: the key is free.
    ///
    /// # Errors
    /// The key was used for another command, or nobody knows what came of it.
    pub(super) fn find(
        &mut self,
        key: &StartKey,
        command: &CommandDigest,
        now_ms: u64,
    ) -> Result<Option<Found<E>>, ExecutorError> {
        self.settle_abandoned(key, now_ms);
        let Some(found) = self.uses.get(key) else { return Ok(None) };
        if found.command != *command {
            return Err(ExecutorError::KeyConflict);
        }
        match &found.state {
            KeyState::Starting { done, .. } => Ok(Some(Found::Starting(done.clone()))),
            KeyState::Known { entry, .. } => Ok(Some(Found::Known(Arc::clone(entry)))),
            KeyState::Unknown(reason) => Err(ExecutorError::OutcomeUnknown { reason: reason.as_ref().to_owned() }),
        }
    }

    /// What an attach to a key is told that was never used here, or so long ago that nothing is left of it.
    pub(super) fn not_known() -> ExecutorError {
        ExecutorError::OutcomeUnknown { reason: NOT_KNOWN.to_owned() }
    }

    /// A key of an engine before this one, whose run or task is known.
    pub(super) fn recall(&mut self, key: StartKey, command: CommandDigest, number: StartNumber, entry: Arc<E>) {
        self.uses.insert(key, KeyUse { command, state: KeyState::Known { number, entry, taken: false } });
    }

    /// A key of an engine before this one, of which nothing else is known. Those come in the order in which they were
    /// forgotten.
    pub(super) fn recall_unknown(&mut self, key: StartKey, command: CommandDigest, reason: &str, since_ms: u64) {
        self.uses.insert(key.clone(), KeyUse { command, state: KeyState::Unknown(reason.into()) });
        self.unknown.push_back((since_ms, key));
    }

    /// A free key is taken for a start. `done` closes when that has come to an end, in one of the next three methods.
    pub(super) fn begin(&mut self, key: StartKey, command: CommandDigest, done: watch::Receiver<bool>) {
        self.uses.insert(key, KeyUse { command, state: KeyState::Starting { aborted: false, done } });
    }

    /// The start has failed and nothing ran.
    pub(super) fn give_back(&mut self, key: &StartKey) {
        self.uses.remove(key);
    }

    /// The start has failed, and something may have run.
    pub(super) fn lose(&mut self, key: &StartKey, reason: &str, now_ms: u64) {
        if let Some(found) = self.uses.get_mut(key) {
            found.state = KeyState::Unknown(reason.into());
            self.keep_unknown(key.clone(), now_ms);
        }
    }

    /// The start has succeeded. Says whether it was taken back meanwhile.
    pub(super) fn known(&mut self, key: &StartKey, number: StartNumber, entry: Arc<E>) -> bool {
        let Some(found) = self.uses.get_mut(key) else { return false };
        let before = std::mem::replace(&mut found.state, KeyState::Known { number, entry, taken: false });
        matches!(before, KeyState::Starting { aborted: true, .. })
    }

    /// Takes back what a key names, if it is still being started.
    pub(super) fn abort(&mut self, key: &StartKey, now_ms: u64) -> Option<Found<E>> {
        self.settle_abandoned(key, now_ms);
        match &mut self.uses.get_mut(key)?.state {
            KeyState::Starting { aborted, done } => {
                *aborted = true;
                Some(Found::Starting(done.clone()))
            }
            KeyState::Known { entry, .. } => Some(Found::Known(Arc::clone(entry))),
            KeyState::Unknown(_) => None,
        }
    }

    /// The run of this key has ended, and nothing of it is alive: its result is held for its client.
    pub(super) fn hold(&mut self, key: &StartKey, bytes: u64, now_ms: u64) {
        let Some(KeyState::Known { number, taken, .. }) = self.uses.get(key).map(|found| &found.state) else { return };
        let number = *number;
        if *taken {
            self.taken.push_back((now_ms, number));
        }
        self.held.insert(number, Held { key: key.clone(), bytes, since_ms: now_ms });
        self.held_bytes += bytes;
        while self.held.len() > MAX_HELD_PER_OWNER
            || (self.held_bytes > MAX_HELD_BYTES_PER_OWNER && self.held.len() > 1)
        {
            let taken = self.taken.pop_front().map(|(_, number)| number);
            let Some(first) = taken.or_else(|| self.held.keys().next().copied()) else { break };
            self.release(first, now_ms);
        }
    }

    /// A client has had the whole result of this key's run.
    pub(super) fn taken(&mut self, key: &StartKey, now_ms: u64) {
        let Some(KeyState::Known { number, taken, .. }) = self.uses.get_mut(key).map(|found| &mut found.state) else {
            return;
        };
        if !std::mem::replace(taken, true) && self.held.contains_key(number) {
            self.taken.push_back((now_ms, *number));
        }
    }

    /// What this key named is forgotten, and from now on the key answers unknown.
    pub(super) fn forget(&mut self, key: &StartKey, number: StartNumber, now_ms: u64) {
        if let Some(held) = self.held.remove(&number) {
            self.held_bytes -= held.bytes;
        }
        let Some(found) = self.uses.get_mut(key) else { return };
        if matches!(found.state, KeyState::Known { number: known, .. } if known == number) {
            found.state = KeyState::Unknown(FORGOTTEN.into());
            self.keep_unknown(key.clone(), now_ms);
        }
    }

    /// Forgets whatever had its time.
    pub(super) fn expire(&mut self, now_ms: u64) {
        while self.taken.front().is_some_and(|(at, _)| *at + TAKEN_KEPT_MS <= now_ms)
            && let Some((_, number)) = self.taken.pop_front()
        {
            self.release(number, now_ms);
        }
        let waited = |held: &Held| held.since_ms + RESULT_KEPT_MS <= now_ms;
        let waited: Vec<StartNumber> =
            self.held.iter().filter(|(_, held)| waited(held)).map(|(number, _)| *number).collect();
        for number in waited {
            self.release(number, now_ms);
        }
        while self.unknown.front().is_some_and(|(at, _)| *at + UNKNOWN_KEPT_MS <= now_ms)
            && let Some((_, key)) = self.unknown.pop_front()
        {
            self.uses.remove(&key);
        }
    }

    /// A result is held no longer.
    fn release(&mut self, number: StartNumber, now_ms: u64) {
        if let Some(key) = self.held.get(&number).map(|held| held.key.clone()) {
            self.forget(&key, number, now_ms);
        }
    }

    fn keep_unknown(&mut self, key: StartKey, now_ms: u64) {
        self.unknown.push_back((now_ms, key));
        if self.unknown.len() > MAX_UNKNOWN_PER_OWNER
            && let Some((_, oldest)) = self.unknown.pop_front()
        {
            self.uses.remove(&oldest);
        }
    }

    /// A start that ended without saying how, as a fault of this program would have it, is not waited for.
    fn settle_abandoned(&mut self, key: &StartKey, now_ms: u64) {
        let Some(KeyState::Starting { done, .. }) = self.uses.get(key).map(|found| &found.state) else { return };
        if done.has_changed().is_err() {
            self.lose(key, ABANDONED, now_ms);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const ONE: CommandDigest = [1; 32];
    const OTHER: CommandDigest = [2; 32];

    fn order(number: u64) -> StartNumber {
        StartNumber(i64::try_from(number).unwrap())
    }

    fn key(number: u64) -> StartKey {
        StartKey(number.to_string())
    }

    /// Starts the command of this number.
    fn start(keys: &mut Keys<u64>, number: u64) {
        let (done, watcher) = watch::channel(false);
        keys.begin(key(number), ONE, watcher);
        assert!(!keys.known(&key(number), order(number), Arc::new(number)));
        drop(done);
    }

    fn known(keys: &mut Keys<u64>, number: u64, now_ms: u64) -> bool {
        matches!(keys.find(&key(number), &ONE, now_ms), Ok(Some(Found::Known(entry))) if *entry == number)
    }

    fn unknown(keys: &mut Keys<u64>, number: u64, now_ms: u64) -> bool {
        matches!(keys.find(&key(number), &ONE, now_ms), Err(ExecutorError::OutcomeUnknown { .. }))
    }

    #[test]
    fn the_same_command_attaches_and_another_one_is_a_conflict() {
        let mut keys = Keys::<u64>::new();
        let (done, watcher) = watch::channel(false);
        keys.begin(key(1), ONE, watcher);
        assert!(matches!(keys.find(&key(1), &ONE, 0), Ok(Some(Found::Starting(_)))));
        assert_eq!(keys.find(&key(1), &OTHER, 0).unwrap_err(), ExecutorError::KeyConflict);
        keys.known(&key(1), order(1), Arc::new(1));
        drop(done);
        assert!(known(&mut keys, 1, 0));
        assert_eq!(keys.find(&key(1), &OTHER, 0).unwrap_err(), ExecutorError::KeyConflict);
        keys.forget(&key(1), order(1), 0);
        assert!(unknown(&mut keys, 1, 0));
        // What is not known any more is still known to have been another command.
        assert_eq!(keys.find(&key(1), &OTHER, 0).unwrap_err(), ExecutorError::KeyConflict);
        assert!(keys.find(&key(2), &ONE, 0).unwrap().is_none());
    }

    #[test]
    fn a_start_that_failed_for_sure_frees_its_key_and_one_that_may_have_run_does_not() {
        let mut keys = Keys::<u64>::new();
        let (_done, watcher) = watch::channel(false);
        keys.begin(key(1), ONE, watcher.clone());
        keys.give_back(&key(1));
        assert!(keys.find(&key(1), &ONE, 0).unwrap().is_none());
        keys.begin(key(1), ONE, watcher);
        keys.lose(&key(1), "it could not be kept", 5);
        let reason = "it could not be kept".to_owned();
        assert_eq!(keys.find(&key(1), &ONE, 5).unwrap_err(), ExecutorError::OutcomeUnknown { reason });
        keys.expire(5 + UNKNOWN_KEPT_MS - 1);
        assert!(unknown(&mut keys, 1, 5));
        keys.expire(5 + UNKNOWN_KEPT_MS);
        assert!(keys.is_empty());
    }

    #[test]
    fn a_start_that_nobody_ends_is_not_waited_for() {
        let mut keys = Keys::<u64>::new();
        let (done, watcher) = watch::channel(false);
        keys.begin(key(1), ONE, watcher.clone());
        keys.begin(key(2), ONE, watcher);
        drop(done);
        assert!(unknown(&mut keys, 1, 0));
        assert!(keys.abort(&key(2), 0).is_none());
    }

    #[test]
    fn a_result_waits_its_time_and_a_taken_one_a_little() {
        let mut keys = Keys::<u64>::new();
        for number in 1..=3 {
            start(&mut keys, number);
        }
        // Taken before everything of it had ended, and after.
        keys.taken(&key(1), 90);
        for number in 1..=3 {
            keys.hold(&key(number), 10, 100);
        }
        keys.taken(&key(2), 200);
        keys.taken(&key(2), 900);
        keys.expire(99 + TAKEN_KEPT_MS);
        assert!((1..=3).all(|number| known(&mut keys, number, 0)));
        keys.expire(100 + TAKEN_KEPT_MS);
        assert!(unknown(&mut keys, 1, 0) && known(&mut keys, 2, 0));
        keys.expire(200 + TAKEN_KEPT_MS);
        assert!(unknown(&mut keys, 2, 0) && known(&mut keys, 3, 0));
        keys.expire(99 + RESULT_KEPT_MS);
        assert!(known(&mut keys, 3, 0));
        keys.expire(100 + RESULT_KEPT_MS);
        assert!(unknown(&mut keys, 3, 0));
        assert_eq!((keys.held.len(), keys.held_bytes, keys.taken.len()), (0, 0, 0));
    }

    #[test]
    fn above_the_cap_the_first_taken_goes_and_then_the_oldest() {
        let mut keys = Keys::<u64>::new();
        let third = MAX_HELD_BYTES_PER_OWNER / 3;
        for number in 1..=5 {
            start(&mut keys, number);
        }
        for number in 1..=3 {
            keys.hold(&key(number), third, 0);
        }
        keys.taken(&key(3), 1);
        keys.taken(&key(2), 2);
        keys.hold(&key(4), third, 3);
        assert!(unknown(&mut keys, 3, 3));
        // One that is larger than all of them together may stay, as the newest.
        keys.hold(&key(5), 2 * MAX_HELD_BYTES_PER_OWNER, 4);
        assert!([1, 2, 4].into_iter().all(|number| unknown(&mut keys, number, 4)) && known(&mut keys, 5, 4));
    }

    proptest! {
        /// Whatever happens in whatever order: the caps hold, the sums are right, and a key that was used is never free
        /// before its time.
        #[test]
        fn nothing_is_doubled_and_the_caps_hold(steps in proptest::collection::vec((0_u8..6, 0_u64..12), 0..200)) {
            let mut keys = Keys::<u64>::new();
            let mut now_ms = 0;
            let mut started = std::collections::BTreeSet::new();
            for (step, number) in steps {
                now_ms += 7_000;
                match step {
                    0 if started.insert(number) => start(&mut keys, number),
                    0 | 1 => keys.hold_once(number, number * MAX_HELD_BYTES_PER_OWNER / 20, now_ms),
                    2 => keys.taken(&key(number), now_ms),
                    3 => keys.forget(&key(number), order(number), now_ms),
                    4 => keys.expire(now_ms),
                    _ => { let _ = keys.abort(&key(number), now_ms); }
                }
                prop_assert_eq!(keys.held_bytes, keys.held.values().map(|held| held.bytes).sum::<u64>());
                prop_assert!(keys.held_bytes <= MAX_HELD_BYTES_PER_OWNER || keys.held.len() == 1);
                for number in &started {
                    prop_assert!(keys.find(&key(*number), &ONE, now_ms).map_or(true, |found| found.is_some()));
                }
                let unknown = keys.uses.values().filter(|one| matches!(one.state, KeyState::Unknown(_))).count();
                prop_assert_eq!(unknown, keys.unknown.len());
            }
        }
    }

    impl Keys<u64> {
        /// A run ends once.
        fn hold_once(&mut self, number: u64, bytes: u64, now_ms: u64) {
            if !self.held.contains_key(&order(number)) {
                self.hold(&key(number), bytes, now_ms);
            }
        }
    }
}
