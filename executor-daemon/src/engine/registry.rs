//! What exists: runs and tasks by id, start keys, who may see what, and what is forgotten when. Pure: the caller holds the
//! lock and says what time it is. `E` is what the engine keeps of each.
//!
//! A key goes `reserved → in use → forgotten with its run or task`; a start that fails gives it back.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use executor_proto::{
    error::ExecutorError,
    types::{OwnerId, StartKey, TaskId},
};
use tokio::sync::watch;

use crate::ids::{Caller, TenantId};

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

/// What a start key stands for.
#[derive(Debug)]
enum KeyUse {
    /// Its command is being started.
    Starting {
        /// Somebody has taken it back meanwhile.
        aborted: bool,
        /// Closes when the start has succeeded (true then) or failed.
        done: watch::Receiver<bool>,
    },
    /// Its command is known: the row's number.
    Known(u64),
}

/// What a start key names for who wants to take its run back.
#[derive(Debug)]
pub(super) enum KeyLookup<E> {
    /// Nothing that is known.
    Unknown,
    /// A start under way, which will be ended as soon as it has happened. This closes then: true, or false if it failed.
    Starting(watch::Receiver<bool>),
    /// This.
    Known(Arc<E>),
}

/// A key that is taken for a start under way. [`Registry::register`] or [`Registry::give_back`] takes it; dropped, it wakes
/// who waits for the start.
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

/// One tenant's.
#[derive(Debug)]
struct Tenant<E> {
    /// By age.
    rows: BTreeMap<u64, Row<E>>,
    ids: HashMap<TaskId, u64>,
    keys: HashMap<(Option<OwnerId>, StartKey), KeyUse>,
}

impl<E> Tenant<E> {
    fn new() -> Self {
        Self { rows: BTreeMap::new(), ids: HashMap::new(), keys: HashMap::new() }
    }

    fn forget(&mut self, number: u64) -> Option<Arc<E>> {
        let row = self.rows.remove(&number)?;
        self.ids.remove(&row.id);
        self.keys.remove(&(row.owner, row.key));
        Some(row.entry)
    }
}

/// All runs and tasks that are known.
#[derive(Debug)]
pub(super) struct Registry<E> {
    tenants: HashMap<TenantId, Tenant<E>>,
    next_number: u64,
    draining: bool,
}

impl<E> Registry<E> {
    /// Nothing yet.
    pub(super) fn new() -> Self {
        Self { tenants: HashMap::new(), next_number: 0, draining: false }
    }

    /// Takes a key for a start.
    ///
    /// # Errors
    /// Draining, or the key is in use: also for the same command, since attaching to a start is not offered yet.
    pub(super) fn reserve(&mut self, caller: &Caller, key: &StartKey) -> Result<Reservation, ExecutorError> {
        if self.draining {
            return Err(ExecutorError::Stopping);
        }
        let tenant = self.tenants.entry(caller.tenant.clone()).or_insert_with(Tenant::new);
        let full_key = (caller.owner.clone(), key.clone());
        if tenant.keys.contains_key(&full_key) {
            return Err(ExecutorError::KeyConflict);
        }
        let (done, watcher) = watch::channel(false);
        tenant.keys.insert(full_key, KeyUse::Starting { aborted: false, done: watcher });
        Ok(Reservation { caller: caller.clone(), key: key.clone(), done })
    }

    /// The start of this key has failed.
    pub(super) fn give_back(&mut self, reservation: Reservation) {
        let Reservation { caller, key, done: _done } = reservation;
        if let Some(tenant) = self.tenants.get_mut(&caller.tenant) {
            tenant.keys.remove(&(caller.owner, key));
        }
    }

    /// The start of this key has succeeded. Says whether it was taken back meanwhile.
    pub(super) fn register(&mut self, reservation: Reservation, id: TaskId, entry: Arc<E>) -> bool {
        let Reservation { caller, key, done } = reservation;
        done.send_replace(true);
        let number = self.next_number;
        self.next_number += 1;
        let tenant = self.tenants.entry(caller.tenant).or_insert_with(Tenant::new);
        tenant.ids.insert(id.clone(), number);
        let before = tenant.keys.insert((caller.owner.clone(), key.clone()), KeyUse::Known(number));
        tenant.rows.insert(number, Row { id, owner: caller.owner, key, finished_at_ms: None, entry });
        matches!(before, Some(KeyUse::Starting { aborted: true, .. }))
    }

    /// One that ended under a process before this one. Those are recalled from the oldest on, before anything is started.
    pub(super) fn recall(&mut self, caller: Caller, key: StartKey, id: TaskId, finished_at_ms: u64, entry: Arc<E>) {
        let number = self.next_number;
        self.next_number += 1;
        let tenant = self.tenants.entry(caller.tenant).or_insert_with(Tenant::new);
        tenant.ids.insert(id.clone(), number);
        tenant.keys.insert((caller.owner.clone(), key.clone()), KeyUse::Known(number));
        let finished_at_ms = Some(finished_at_ms);
        tenant.rows.insert(number, Row { id, owner: caller.owner, key, finished_at_ms, entry });
    }

    /// Takes back what a key names, if it is still being started.
    pub(super) fn abort_start(&mut self, caller: &Caller, key: &StartKey) -> KeyLookup<E> {
        let Some(tenant) = self.tenants.get_mut(&caller.tenant) else { return KeyLookup::Unknown };
        match tenant.keys.get_mut(&(caller.owner.clone(), key.clone())) {
            None => KeyLookup::Unknown,
            Some(KeyUse::Starting { aborted, done }) => {
                *aborted = true;
                KeyLookup::Starting(done.clone())
            }
            Some(KeyUse::Known(number)) => {
                tenant.rows.get(number).map_or(KeyLookup::Unknown, |row| KeyLookup::Known(Arc::clone(&row.entry)))
            }
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

    /// Takes no more starts; what is known, oldest first. A start that is under way learns of it from
    /// [`Registry::draining`] when it registers.
    pub(super) fn drain(&mut self) -> Vec<Arc<E>> {
        self.draining = true;
        self.tenants.values().flat_map(|tenant| tenant.rows.values()).map(|row| Arc::clone(&row.entry)).collect()
    }

    /// No more starts are taken.
    pub(super) fn draining(&self) -> bool {
        self.draining
    }

    /// Nothing of it is alive any more and its result stands. Forgets it at once unless it is to be kept; then the owner's
    /// oldest finished ones above `max_finished` are forgotten. Returns what was forgotten.
    pub(super) fn finished(
        &mut self,
        tenant: &TenantId,
        id: &TaskId,
        keep: bool,
        now_ms: u64,
        max_finished: u64,
    ) -> Vec<Arc<E>> {
        let Some(tenant) = self.tenants.get_mut(tenant) else { return Vec::new() };
        let Some(number) = tenant.ids.get(id).copied() else { return Vec::new() };
        if !keep {
            return tenant.forget(number).into_iter().collect();
        }
        let Some(row) = tenant.rows.get_mut(&number) else { return Vec::new() };
        row.finished_at_ms = Some(now_ms);
        let owner = row.owner.clone();
        let finished = tenant.rows.iter().filter(|(_, row)| row.finished_at_ms.is_some() && row.owner == owner);
        let finished: Vec<u64> = finished.map(|(number, _)| *number).collect();
        let above = (finished.len() as u64).saturating_sub(max_finished);
        let oldest = finished.into_iter().take(usize::try_from(above).unwrap_or(usize::MAX));
        oldest.filter_map(|number| tenant.forget(number)).collect()
    }

    /// Forgets what was finished before this time.
    pub(super) fn forget_older(&mut self, before_ms: u64) -> Vec<Arc<E>> {
        let mut forgotten = Vec::new();
        for tenant in self.tenants.values_mut() {
            let old = tenant.rows.iter().filter(|(_, row)| row.finished_at_ms.is_some_and(|at| at < before_ms));
            let old: Vec<u64> = old.map(|(number, _)| *number).collect();
            forgotten.extend(old.into_iter().filter_map(|number| tenant.forget(number)));
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

    fn id(number: u64) -> TaskId {
        TaskId(format!("bash-{number}"))
    }

    fn start(registry: &mut Registry<u64>, caller: &Caller, number: u64) -> bool {
        let reservation = registry.reserve(caller, &key(&number.to_string())).unwrap();
        registry.register(reservation, id(number), Arc::new(number))
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
    fn a_key_is_used_once_while_it_is_known_and_belongs_to_its_owner() {
        let mut registry = Registry::<u64>::new();
        let a = caller("t", Some("a"));
        let first = registry.reserve(&a, &key("k")).unwrap();
        assert_eq!(registry.reserve(&a, &key("k")).unwrap_err(), ExecutorError::KeyConflict);
        registry.give_back(first);
        let again = registry.reserve(&a, &key("k")).unwrap();
        registry.register(again, id(1), Arc::new(1));
        assert_eq!(registry.reserve(&a, &key("k")).unwrap_err(), ExecutorError::KeyConflict);
        assert!(registry.reserve(&caller("t", Some("b")), &key("k")).is_ok());
        registry.finished(&a.tenant, &id(1), false, 0, 9);
        assert!(registry.reserve(&a, &key("k")).is_ok());
    }

    #[test]
    fn a_start_that_was_taken_back_meanwhile_says_so() {
        let mut registry = Registry::<u64>::new();
        let a = caller("t", Some("a"));
        let reservation = registry.reserve(&a, &key("k")).unwrap();
        assert!(matches!(registry.abort_start(&caller("t", None), &key("k")), KeyLookup::Unknown));
        let KeyLookup::Starting(done) = registry.abort_start(&a, &key("k")) else { panic!("it is being started") };
        assert!(done.has_changed().is_ok());
        assert!(registry.register(reservation, id(1), Arc::new(1)));
        assert!(done.has_changed().is_err() && *done.borrow());
        assert!(matches!(registry.abort_start(&a, &key("k")), KeyLookup::Known(_)));
    }

    #[test]
    fn draining_takes_no_more_starts() {
        let mut registry = Registry::<u64>::new();
        let a = caller("t", Some("a"));
        start(&mut registry, &a, 1);
        assert_eq!(registry.drain().len(), 1);
        assert_eq!(registry.reserve(&a, &key("k")).unwrap_err(), ExecutorError::Stopping);
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
            forgotten.extend(registry.finished(&a.tenant, &id(number), true, 10 * number, 2));
        }
        // Tasks 2, 3 and 5 are finished and two are kept: the oldest went. Running 1 and 4 and the other owner's stay.
        assert_eq!(forgotten, [Arc::new(2)]);
        assert_eq!(registry.forget_older(50), [Arc::new(3)]);
        let left: Vec<u64> = registry.visible_to(&a).iter().map(|entry| **entry).collect();
        assert_eq!(left, [1, 4, 5]);
        assert!(registry.access(&b, &id(6)).is_ok());
    }

    proptest! {
        /// Whatever is started, given back and finished: no key and no id outlives its row, and the caps hold.
        #[test]
        fn nothing_is_kept_of_what_is_forgotten(steps in proptest::collection::vec((0_u8..4, 0_u64..12), 0..80)) {
            let mut registry = Registry::new();
            let a = caller("t", Some("a"));
            let mut next = 0;
            for (step, number) in steps {
                match step {
                    0 => { next += 1; start(&mut registry, &a, next); }
                    1 => { registry.finished(&a.tenant, &id(number), true, number, 3); }
                    2 => { registry.finished(&a.tenant, &id(number), false, number, 3); }
                    _ => { registry.forget_older(number); }
                }
                if let Some(tenant) = registry.tenants.get(&a.tenant) {
                    prop_assert_eq!(tenant.rows.len(), tenant.ids.len());
                    prop_assert_eq!(tenant.rows.len(), tenant.keys.len());
                    prop_assert!(tenant.rows.values().filter(|row| row.finished_at_ms.is_some()).count() <= 3);
                }
            }
        }
    }
}
