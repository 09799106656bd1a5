//! What exists: runs and tasks by id, start keys, who may see what, and what is forgotten when. Pure: the caller holds the
//! lock and says what time it is. `E` is what the engine keeps of each.
//!
//! What a start key stands for, and how long, is in [`super::keys`].

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::Arc,
};

use executor_proto::{
    error::ExecutorError,
    types::{OwnerId, StartKey, TaskId},
};
use tokio::sync::watch;

use super::keys::{CommandDigest, Found, Keys};
use crate::{
    ids::{Caller, TenantId},
    journal::StartNumber,
};

/// Foreground or background.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Kind {
    /// `run-N`.
    Run,
    /// `bash-N`.
    Task,
}

/// One run or task.
#[derive(Debug)]
struct Row<E> {
    id: TaskId,
    owner: Option<OwnerId>,
    key: StartKey,
    /// Milliseconds since the Unix epoch when nothing of it was alive any more and its result stood.
    finished_at_ms: Option<u64>,
    entry: Arc<E>,
}

/// What a start comes to.
#[derive(Debug)]
pub(super) enum Reserved<E> {
    /// The key was free and is taken now.
    New(Reservation),
    /// The same start was made before.
    Found(Found<E>),
}

/// A key that is taken for a start under way. [`Registry::register`], [`Registry::give_back`] or [`Registry::lose`] takes it;
/// dropped, it wakes who waits for the start, and the key answers unknown.
#[derive(Debug)]
pub(super) struct Reservation {
    caller: Caller,
    key: StartKey,
    done: watch::Sender<bool>,
}

impl Reservation {
    /// Who starts.
    pub(super) fn caller(&self) -> &Caller {
        &self.caller
    }
}

/// A run or task that a process before this one has started.
#[derive(Debug)]
pub(super) struct Recalled<E> {
    /// By which it has its age.
    pub(super) number: StartNumber,
    pub(super) caller: Caller,
    pub(super) key: StartKey,
    pub(super) command: CommandDigest,
    pub(super) id: TaskId,
    /// `None`: it is still running.
    pub(super) finished_at_ms: Option<u64>,
    pub(super) entry: Arc<E>,
}

/// What stays of a run or task that is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Keep {
    /// It can still be asked for by its id.
    pub(super) id: bool,
    /// The bytes of the result that is held for its client, if it is.
    pub(super) result: Option<u64>,
}

/// One tenant's.
#[derive(Debug)]
struct Tenant<E> {
    /// By age.
    rows: BTreeMap<StartNumber, Row<E>>,
    ids: HashMap<TaskId, StartNumber>,
    keys: HashMap<Option<OwnerId>, Keys<E>>,
}

impl<E> Tenant<E> {
    fn new() -> Self {
        Self { rows: BTreeMap::new(), ids: HashMap::new(), keys: HashMap::new() }
    }

    fn keys(&mut self, owner: &Option<OwnerId>) -> &mut Keys<E> {
        self.keys.entry(owner.clone()).or_insert_with(Keys::new)
    }

    fn forget(&mut self, number: StartNumber, now_ms: u64) -> Option<Arc<E>> {
        let row = self.rows.remove(&number)?;
        self.ids.remove(&row.id);
        self.keys(&row.owner).forget(&row.key, number, now_ms);
        Some(row.entry)
    }

    /// Forgets what of an owner's finished ones is above their number: those that finished first.
    fn forget_above(&mut self, owner: &Option<OwnerId>, max_finished: u64, now_ms: u64) -> Vec<Arc<E>> {
        let finished = self.rows.iter().filter(|(_, row)| row.owner == *owner);
        let mut finished: Vec<(u64, StartNumber)> =
            finished.filter_map(|(number, row)| Some((row.finished_at_ms?, *number))).collect();
        finished.sort_unstable();
        let above = (finished.len() as u64).saturating_sub(max_finished);
        finished.truncate(usize::try_from(above).unwrap_or(usize::MAX));
        finished.into_iter().filter_map(|(_, number)| self.forget(number, now_ms)).collect()
    }
}

/// All runs and tasks that are known.
#[derive(Debug)]
pub(super) struct Registry<E> {
    tenants: HashMap<TenantId, Tenant<E>>,
    draining: bool,
}

impl<E> Registry<E> {
    /// Nothing yet.
    pub(super) fn new() -> Self {
        Self { tenants: HashMap::new(), draining: false }
    }

    /// Takes a key for a start of this command, or finds what it names already. With `only_known` nothing is to be started.
    ///
    /// # Errors
    /// The key was used for another command, nobody knows what came of it, or it is free and nothing may be started.
    pub(super) fn reserve(
        &mut self,
        caller: &Caller,
        key: &StartKey,
        command: &CommandDigest,
        only_known: bool,
        now_ms: u64,
    ) -> Result<Reserved<E>, ExecutorError> {
        let draining = self.draining;
        let keys = self.tenants.entry(caller.tenant.clone()).or_insert_with(Tenant::new).keys(&caller.owner);
        if let Some(found) = keys.find(key, command, now_ms)? {
            return Ok(Reserved::Found(found));
        }
        if only_known {
            return Err(Keys::<E>::not_known());
        }
        if draining {
            return Err(ExecutorError::Stopping);
        }
        let (done, watcher) = watch::channel(false);
        keys.begin(key.clone(), *command, watcher);
        Ok(Reserved::New(Reservation { caller: caller.clone(), key: key.clone(), done }))
    }

    /// The start of this key has failed, and nothing ran.
    pub(super) fn give_back(&mut self, reservation: Reservation) {
        let Reservation { caller, key, done: _done } = reservation;
        self.keys_of(&caller, |keys| keys.give_back(&key));
    }

    /// The start of this key has failed, and something may have run: its outcome is not known from now on.
    pub(super) fn lose(&mut self, reservation: Reservation, reason: &str, now_ms: u64) {
        let Reservation { caller, key, done: _done } = reservation;
        self.keys_of(&caller, |keys| keys.lose(&key, reason, now_ms));
    }

    /// The start of this key has succeeded. Says whether it was taken back meanwhile.
    pub(super) fn register(
        &mut self,
        reservation: Reservation,
        number: StartNumber,
        id: TaskId,
        entry: Arc<E>,
    ) -> bool {
        let Reservation { caller, key, done } = reservation;
        done.send_replace(true);
        let tenant = self.tenants.entry(caller.tenant).or_insert_with(Tenant::new);
        tenant.ids.insert(id.clone(), number);
        let aborted = tenant.keys(&caller.owner).known(&key, number, Arc::clone(&entry));
        tenant.rows.insert(number, Row { id, owner: caller.owner, key, finished_at_ms: None, entry });
        aborted
    }

    /// A key of a process before this one, of which nothing else is known.
    pub(super) fn recall_key(
        &mut self,
        caller: &Caller,
        key: StartKey,
        command: CommandDigest,
        reason: &str,
        since_ms: u64,
    ) {
        let tenant = self.tenants.entry(caller.tenant.clone()).or_insert_with(Tenant::new);
        tenant.keys(&caller.owner).recall_unknown(key, command, reason, since_ms);
    }

    /// One of a process before this one.
    pub(super) fn recall(&mut self, recalled: Recalled<E>) {
        let Recalled { number, caller, key, command, id, finished_at_ms, entry } = recalled;
        let tenant = self.tenants.entry(caller.tenant).or_insert_with(Tenant::new);
        tenant.ids.insert(id.clone(), number);
        tenant.keys(&caller.owner).recall(key.clone(), command, number, Arc::clone(&entry));
        tenant.rows.insert(number, Row { id, owner: caller.owner, key, finished_at_ms, entry });
    }

    /// Takes back what a key names, if it is still being started. `None`: nothing that is known.
    pub(super) fn abort_start(&mut self, caller: &Caller, key: &StartKey, now_ms: u64) -> Option<Found<E>> {
        self.tenants.get_mut(&caller.tenant)?.keys.get_mut(&caller.owner)?.abort(key, now_ms)
    }

    /// A client has had the whole result of this key's run.
    pub(super) fn taken(&mut self, caller: &Caller, key: &StartKey, now_ms: u64) {
        self.keys_of(caller, |keys| keys.taken(key, now_ms));
    }

    fn keys_of(&mut self, caller: &Caller, change: impl FnOnce(&mut Keys<E>)) {
        if let Some(keys) = self.tenants.get_mut(&caller.tenant).and_then(|tenant| tenant.keys.get_mut(&caller.owner)) {
            change(keys);
        }
    }

    /// What an id names, if this caller may touch it. Another tenant's is unknown, as if it had never been issued.
    pub(super) fn access(&self, caller: &Caller, id: &TaskId) -> Result<Arc<E>, ExecutorError> {
        let row = self
            .tenants
            .get(&caller.tenant)
            .and_then(|tenant| tenant.rows.get(tenant.ids.get(id)?))
            .ok_or_else(|| ExecutorError::UnknownTask(id.clone()))?;
        if visible(row.owner.as_ref(), caller) {
            Ok(Arc::clone(&row.entry))
        } else {
            Err(ExecutorError::ForeignTask(id.clone()))
        }
    }

    /// All that this caller may see, oldest first.
    pub(super) fn visible_to(&self, caller: &Caller) -> Vec<Arc<E>> {
        let rows = self.tenants.get(&caller.tenant).into_iter().flat_map(|tenant| tenant.rows.values());
        rows.filter(|row| visible(row.owner.as_ref(), caller)).map(|row| Arc::clone(&row.entry)).collect()
    }

    /// All of one owner, oldest first.
    pub(super) fn of_owner(&self, tenant: &TenantId, owner: Option<&OwnerId>) -> Vec<Arc<E>> {
        let rows = self.tenants.get(tenant).into_iter().flat_map(|tenant| tenant.rows.values());
        rows.filter(|row| row.owner.as_ref() == owner).map(|row| Arc::clone(&row.entry)).collect()
    }

    /// The owners in a tenant of whom something is known.
    pub(super) fn owners(&self, tenant: &TenantId) -> HashSet<Option<OwnerId>> {
        let rows = self.tenants.get(tenant).into_iter().flat_map(|tenant| tenant.rows.values());
        rows.map(|row| row.owner.clone()).collect()
    }

    /// Takes no more starts; what is known, oldest first. A start that is under way learns of it from
    /// [`Registry::draining`] when it registers.
    pub(super) fn drain(&mut self) -> Vec<Arc<E>> {
        self.draining = true;
        self.all()
    }

    /// All that is known, oldest first.
    pub(super) fn all(&self) -> Vec<Arc<E>> {
        self.tenants.values().flat_map(|tenant| tenant.rows.values()).map(|row| Arc::clone(&row.entry)).collect()
    }

    /// No more starts are taken.
    pub(super) fn draining(&self) -> bool {
        self.draining
    }

    /// Nothing of it is alive any more and its result stands. Forgets its id at once unless it is to be kept; then the owner's
    /// first finished ones above `max_finished` are forgotten. Returns what was forgotten. A `result` of so many bytes is
    /// held for who comes with its key.
    pub(super) fn finished(
        &mut self,
        tenant: &TenantId,
        id: &TaskId,
        keep: Keep,
        now_ms: u64,
        max_finished: u64,
    ) -> Vec<Arc<E>> {
        let Keep { id: keep, result } = keep;
        let Some(tenant) = self.tenants.get_mut(tenant) else { return Vec::new() };
        let Some(number) = tenant.ids.get(id).copied() else { return Vec::new() };
        if let Some(bytes) = result
            && let Some(Row { owner, key, .. }) = tenant.rows.get(&number)
        {
            let (owner, key) = (owner.clone(), key.clone());
            tenant.keys(&owner).hold(&key, bytes, now_ms);
        }
        match (keep, result) {
            (false, None) => return tenant.forget(number, now_ms).into_iter().collect(),
            (false, Some(_)) => {
                tenant.ids.remove(id);
                return tenant.rows.remove(&number).map(|row| row.entry).into_iter().collect();
            }
            (true, _) => {}
        }
        let Some(row) = tenant.rows.get_mut(&number) else { return Vec::new() };
        row.finished_at_ms = Some(now_ms);
        let owner = row.owner.clone();
        tenant.forget_above(&owner, max_finished, now_ms)
    }

    /// Forgets of every owner's finished ones those above `max_finished`: many may have ended while no engine was there.
    pub(super) fn forget_above(&mut self, max_finished: u64, now_ms: u64) -> Vec<Arc<E>> {
        let mut forgotten = Vec::new();
        for tenant in self.tenants.values_mut() {
            let owners: HashSet<_> = tenant.rows.values().map(|row| row.owner.clone()).collect();
            forgotten.extend(owners.iter().flat_map(|owner| tenant.forget_above(owner, max_finished, now_ms)));
        }
        forgotten
    }

    /// Forgets what was finished before this time, and what of the keys had its time.
    pub(super) fn forget_older(&mut self, before_ms: u64, now_ms: u64) -> Vec<Arc<E>> {
        let mut forgotten = Vec::new();
        for tenant in self.tenants.values_mut() {
            let old = tenant.rows.iter().filter(|(_, row)| row.finished_at_ms.is_some_and(|at| at < before_ms));
            let old: Vec<StartNumber> = old.map(|(number, _)| *number).collect();
            forgotten.extend(old.into_iter().filter_map(|number| tenant.forget(number, now_ms)));
            tenant.keys.values_mut().for_each(|keys| keys.expire(now_ms));
            tenant.keys.retain(|_, keys| !keys.is_empty());
        }
        forgotten
    }
}

/// Ownerless ones are open to their whole tenant.
fn visible(owner: Option<&OwnerId>, caller: &Caller) -> bool {
    owner.is_none() || owner == caller.owner.as_ref()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn caller(tenant: &str, owner: Option<&str>) -> Caller {
        Caller { tenant: TenantId(tenant.into()), owner: owner.map(|owner| OwnerId(owner.into())) }
    }

    fn key(text: &str) -> StartKey {
        StartKey(text.into())
    }

    fn order(number: u64) -> StartNumber {
        StartNumber(i64::try_from(number).unwrap())
    }

    fn id(number: u64) -> TaskId {
        TaskId(format!("bash-{number}"))
    }

    fn start(registry: &mut Registry<u64>, caller: &Caller, number: u64) -> bool {
        let Ok(Reserved::New(reservation)) = reserve(registry, caller, &number.to_string()) else { return false };
        registry.register(reservation, order(number), id(number), Arc::new(number))
    }

    fn reserve(registry: &mut Registry<u64>, caller: &Caller, text: &str) -> Result<Reserved<u64>, ExecutorError> {
        registry.reserve(caller, &key(text), &[0; 32], false, 0)
    }

    /// Ended, without a result that is waited for.
    fn over(keep: bool) -> Keep {
        Keep { id: keep, result: None }
    }

    #[test]
    fn owners_are_fenced_and_tenants_do_not_exist_for_each_other() {
        let mut registry = Registry::new();
        let [a, b, none] = [Some("a"), Some("b"), None].map(|owner| caller("t", owner));
        let empty = caller("t", Some(""));
        start(&mut registry, &a, 1);
        start(&mut registry, &none, 2);
        start(&mut registry, &empty, 3);
        let foreign = |number| Err(ExecutorError::ForeignTask(id(number)));
        assert_eq!(registry.access(&a, &id(1)), Ok(Arc::new(1)));
        assert_eq!(registry.access(&b, &id(1)), foreign(1));
        assert_eq!(registry.access(&none, &id(1)), foreign(1));
        assert_eq!(registry.access(&b, &id(2)), Ok(Arc::new(2)));
        assert_eq!(registry.access(&none, &id(3)), foreign(3));
        assert_eq!(registry.access(&empty, &id(3)), Ok(Arc::new(3)));
        assert_eq!(registry.access(&caller("u", Some("a")), &id(1)), Err(ExecutorError::UnknownTask(id(1))));
        assert_eq!(registry.access(&a, &id(9)), Err(ExecutorError::UnknownTask(id(9))));
        let seen: Vec<u64> = registry.visible_to(&a).iter().map(|entry| **entry).collect();
        assert_eq!(seen, [1, 2]);
    }

    #[test]
    fn a_key_names_one_start_of_its_owner() {
        let mut registry = Registry::<u64>::new();
        let a = caller("t", Some("a"));
        let Ok(Reserved::New(first)) = reserve(&mut registry, &a, "k") else { panic!("it is free") };
        assert!(matches!(reserve(&mut registry, &a, "k"), Ok(Reserved::Found(Found::Starting(_)))));
        registry.give_back(first);
        let Ok(Reserved::New(again)) = reserve(&mut registry, &a, "k") else { panic!("it was given back") };
        registry.register(again, order(1), id(1), Arc::new(1));
        assert!(matches!(reserve(&mut registry, &a, "k"), Ok(Reserved::Found(Found::Known(entry))) if *entry == 1));
        let other = registry.reserve(&a, &key("k"), &[1; 32], false, 0).unwrap_err();
        assert_eq!(other, ExecutorError::KeyConflict);
        for caller in [caller("t", Some("b")), caller("t", None), caller("u", Some("a"))] {
            assert!(matches!(reserve(&mut registry, &caller, "k"), Ok(Reserved::New(_))), "{caller:?}");
        }
    }

    #[test]
    fn a_run_that_is_over_is_known_by_its_key_alone_until_its_result_goes() {
        let mut registry = Registry::<u64>::new();
        let a = caller("t", Some("a"));
        start(&mut registry, &a, 1);
        registry.finished(&a.tenant, &id(1), Keep { id: false, result: Some(10) }, 0, 9);
        assert_eq!(registry.access(&a, &id(1)), Err(ExecutorError::UnknownTask(id(1))));
        assert!(registry.visible_to(&a).is_empty());
        assert!(matches!(reserve(&mut registry, &a, "1"), Ok(Reserved::Found(Found::Known(entry))) if *entry == 1));
        registry.taken(&a, &key("1"), 0);
        registry.forget_older(0, 60_000);
        assert!(matches!(reserve(&mut registry, &a, "1"), Err(ExecutorError::OutcomeUnknown { .. })));
        // Nothing is kept of an owner whose keys have had their time.
        registry.forget_older(0, 60_000 + 24 * 60 * 60 * 1_000);
        assert!(registry.tenants[&a.tenant].keys.is_empty());
    }

    #[test]
    fn an_attach_starts_nothing_and_a_lost_start_is_not_started_again() {
        let mut registry = Registry::<u64>::new();
        let a = caller("t", Some("a"));
        let attach = registry.reserve(&a, &key("k"), &[0; 32], true, 0);
        assert!(matches!(attach, Err(ExecutorError::OutcomeUnknown { .. })));
        let Ok(Reserved::New(first)) = reserve(&mut registry, &a, "k") else { panic!("it is free") };
        registry.lose(first, "it could not be kept", 0);
        assert!(matches!(reserve(&mut registry, &a, "k"), Err(ExecutorError::OutcomeUnknown { .. })));
        let Ok(Reserved::New(dropped)) = reserve(&mut registry, &a, "l") else { panic!("it is free") };
        drop(dropped);
        assert!(matches!(reserve(&mut registry, &a, "l"), Err(ExecutorError::OutcomeUnknown { .. })));
    }

    #[test]
    fn a_start_that_was_taken_back_meanwhile_says_so() {
        let mut registry = Registry::<u64>::new();
        let a = caller("t", Some("a"));
        let Ok(Reserved::New(reservation)) = reserve(&mut registry, &a, "k") else { panic!("it is free") };
        assert!(registry.abort_start(&caller("t", None), &key("k"), 0).is_none());
        let Some(Found::Starting(done)) = registry.abort_start(&a, &key("k"), 0) else { panic!("it is being started") };
        assert!(done.has_changed().is_ok());
        assert!(registry.register(reservation, order(1), id(1), Arc::new(1)));
        assert!(done.has_changed().is_err() && *done.borrow());
        assert!(matches!(registry.abort_start(&a, &key("k"), 0), Some(Found::Known(_))));
    }

    #[test]
    fn draining_takes_no_more_starts() {
        let mut registry = Registry::<u64>::new();
        let a = caller("t", Some("a"));
        start(&mut registry, &a, 1);
        assert_eq!(registry.drain().len(), 1);
        assert_eq!(reserve(&mut registry, &a, "k").unwrap_err(), ExecutorError::Stopping);
        // What was started before can still be waited for.
        assert!(matches!(reserve(&mut registry, &a, "1"), Ok(Reserved::Found(Found::Known(_)))));
        assert!(registry.draining());
    }

    #[test]
    fn finished_ones_go_by_age_and_by_number_per_owner_and_running_ones_never() {
        let mut registry = Registry::new();
        let [a, b] = [Some("a"), Some("b")].map(|owner| caller("t", owner));
        for number in 1..=5 {
            start(&mut registry, &a, number);
        }
        start(&mut registry, &b, 6);
        let mut forgotten = Vec::new();
        for number in [5, 2, 3, 6] {
            forgotten.extend(registry.finished(&a.tenant, &id(number), over(true), 10 * number, 2));
        }
        // Tasks 2, 3 and 5 are finished and two are kept: the oldest went. Running 1 and 4 and the other owner's stay.
        assert_eq!(forgotten, [Arc::new(2)]);
        assert_eq!(registry.forget_older(50, 50), [Arc::new(3)]);
        let left: Vec<u64> = registry.visible_to(&a).iter().map(|entry| **entry).collect();
        assert_eq!(left, [1, 4, 5]);
        assert!(registry.access(&b, &id(6)).is_ok());
    }

    #[test]
    fn what_finished_first_goes_first_whenever_it_was_started() {
        let mut registry = Registry::new();
        let a = caller("t", Some("a"));
        for number in 1..=3 {
            start(&mut registry, &a, number);
        }
        for (number, at) in [(2, 10), (3, 20)] {
            assert_eq!(registry.finished(&a.tenant, &id(number), over(true), at, 2), []);
        }
        // The oldest of them has only just ended, and its owner has seen nothing of its end.
        assert_eq!(registry.finished(&a.tenant, &id(1), over(true), 30, 2), [Arc::new(2)]);
        assert!(registry.access(&a, &id(1)).is_ok());
        // Several may have ended while no engine was there.
        for number in 4..=6 {
            registry.recall(Recalled {
                number: order(number),
                caller: a.clone(),
                key: key(&number.to_string()),
                command: [0; 32],
                id: id(number),
                finished_at_ms: Some(40 + number),
                entry: Arc::new(number),
            });
        }
        assert_eq!(registry.forget_above(2, 50), [3, 1, 4].map(Arc::new));
    }

    proptest! {
        /// Whatever is started and finished: no id outlives its row, and the caps hold.
        #[test]
        fn nothing_is_kept_of_what_is_forgotten(steps in proptest::collection::vec((0_u8..4, 0_u64..12), 0..80)) {
            let mut registry = Registry::new();
            let a = caller("t", Some("a"));
            let mut next = 0;
            for (step, number) in steps {
                match step {
                    0 => { next += 1; start(&mut registry, &a, next); }
                    1 => { registry.finished(&a.tenant, &id(number), over(true), number, 3); }
                    2 => { registry.finished(&a.tenant, &id(number), over(false), number, 3); }
                    _ => { registry.forget_older(number, number); }
                }
                if let Some(tenant) = registry.tenants.get(&a.tenant) {
                    prop_assert_eq!(tenant.rows.len(), tenant.ids.len());
                    prop_assert!(tenant.rows.values().filter(|row| row.finished_at_ms.is_some()).count() <= 3);
                }
            }
        }
    }
}
