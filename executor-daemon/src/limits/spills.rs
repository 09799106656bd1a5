//! How many bytes of spills each owner, each tenant and all of them may have, and which go first.
//!
//! A spill asks for room before it grows. Where there is none, the spills of what has ended go: the owner's oldest first, then, where it
//! is the tenant that has too much, the tenant's oldest; never another tenant's, and none of a stream that is still written. Where
//! that is not enough either, the spill that asks keeps its head.

use std::{
    collections::{BTreeMap, HashMap},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use executor_proto::error::ExecutorError;

use super::{Account, shares::Shares};
use crate::ids::{Caller, TenantId};

/// One spill that has bytes.
#[derive(Debug)]
struct Held {
    account: Account,
    bytes: u64,
    /// There once it is over, and may go then.
    over: Option<PathBuf>,
}

#[derive(Debug, Default)]
struct State {
    tenants: HashMap<TenantId, u64>,
    owners: HashMap<Account, u64>,
    /// By age.
    held: BTreeMap<u64, Held>,
    next: u64,
}

#[derive(Debug)]
struct Budget {
    shares: Shares,
    /// What one owner may have, of each tenant that is known, and of the others.
    per_owner: (HashMap<TenantId, u64>, u64),
    state: Mutex<State>,
}

/// The budget of spills. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct SpillBudget(Arc<Budget>);

/// What came of asking for room.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Grown {
    /// So many of the bytes may be written.
    pub(crate) granted: u64,
    /// The files that went for it: to be removed.
    pub(crate) gone: Vec<PathBuf>,
    /// Why it was not more.
    pub(crate) over: Option<ExecutorError>,
}

impl SpillBudget {
    pub(super) fn new(shares: Shares, per_owner: (HashMap<TenantId, u64>, u64)) -> Self {
        Self(Arc::new(Budget { shares, per_owner, state: Mutex::default() }))
    }

    /// That of a test: so much in all, and for each owner.
    #[cfg(test)]
    pub(crate) fn of(total: u64, per_owner: u64) -> Self {
        Self::new(Shares::new(total, []), (HashMap::new(), per_owner))
    }

    /// For a spill of this caller's, which has no byte yet.
    pub(crate) fn room(&self, caller: &Caller) -> SpillRoom {
        let account = (caller.tenant.clone(), caller.owner.clone());
        let mut state = self.lock();
        let number = state.next;
        state.next += 1;
        SpillRoom { budget: self.clone(), account, number }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What is left for an account, and the budget that leaves the least.
    fn left(&self, state: &State, account: &Account) -> (u64, &'static str, u64, u64) {
        let Budget { shares, per_owner: (of_tenant, of_others), .. } = &*self.0;
        let limit = of_tenant.get(&account.0).copied().unwrap_or(*of_others);
        let used = state.owners.get(account).copied().unwrap_or(0);
        let owner = (limit.saturating_sub(used), OF_OWNER, used, limit);
        let limit = shares.limit(&state.tenants, &account.0);
        let used = state.tenants.get(&account.0).copied().unwrap_or(0);
        let tenant = (limit.saturating_sub(used), OF_TENANT, used, limit);
        if owner.0 <= tenant.0 { owner } else { tenant }
    }
}

/// What is said to be used up.
const OF_OWNER: &str = "spill bytes of the owner";
const OF_TENANT: &str = "spill bytes";

impl State {
    fn add(&mut self, number: u64, account: &Account, bytes: u64) {
        if bytes == 0 {
            return;
        }
        let new = || Held { account: account.clone(), bytes: 0, over: None };
        self.held.entry(number).or_insert_with(new).bytes += bytes;
        *self.tenants.entry(account.0.clone()).or_default() += bytes;
        *self.owners.entry(account.clone()).or_default() += bytes;
    }

    fn remove(&mut self, number: u64) -> Option<Held> {
        let held = self.held.remove(&number)?;
        take(&mut self.tenants, &held.account.0, held.bytes);
        take(&mut self.owners, &held.account, held.bytes);
        Some(held)
    }

    /// The owner's oldest that is over, else, where it is the tenant's room that is used up, the tenant's.
    fn first_to_go(&self, account: &Account, what: &str) -> Option<u64> {
        let mut over = self.held.iter().filter(|(_, held)| held.over.is_some() && held.account.0 == account.0);
        let of_tenant = over.clone().next().filter(|_| what == OF_TENANT);
        over.find(|(_, held)| held.account == *account).or(of_tenant).map(|(number, _)| *number)
    }
}

fn take<K: Eq + std::hash::Hash>(of: &mut HashMap<K, u64>, key: &K, bytes: u64) {
    if let Some(used) = of.get_mut(key) {
        *used -= bytes;
        if *used == 0 {
            of.remove(key);
        }
    }
}

/// The room of one spill. Given back when it is dropped, or with [`SpillRoom::give_back`].
#[derive(Debug)]
pub(crate) struct SpillRoom {
    budget: SpillBudget,
    account: Account,
    number: u64,
}

impl SpillRoom {
    /// Asks for so many bytes more.
    pub(crate) fn grow(&self, wanted: u64) -> Grown {
        let mut state = self.budget.lock();
        let mut gone = Vec::new();
        loop {
            let (left, what, used, limit) = self.budget.left(&state, &self.account);
            if left < wanted
                && let Some(number) = state.first_to_go(&self.account, what)
            {
                gone.extend(state.remove(number).and_then(|held| held.over));
                continue;
            }
            let granted = wanted.min(left);
            state.add(self.number, &self.account, granted);
            let over = (granted < wanted).then(|| ExecutorError::OverLimit { what: what.to_owned(), used, limit });
            return Grown { granted, gone, over };
        }
    }

    /// So many bytes are there already: they cannot be refused, and count.
    pub(crate) fn there(&self, bytes: u64) {
        self.budget.lock().add(self.number, &self.account, bytes);
    }

    /// So many of the bytes that were granted were not written.
    pub(crate) fn shrink(&self, bytes: u64) {
        let mut state = self.budget.lock();
        let Some(held) = state.held.get_mut(&self.number) else { return };
        let bytes = bytes.min(held.bytes);
        held.bytes -= bytes;
        take(&mut state.tenants, &self.account.0, bytes);
        take(&mut state.owners, &self.account, bytes);
    }

    /// Nothing more is written to it: the file at this path may go when others need its room.
    pub(crate) fn over(&self, path: &Path) {
        if let Some(held) = self.budget.lock().held.get_mut(&self.number) {
            held.over = Some(path.to_owned());
        }
    }

    /// Its file is gone.
    pub(crate) fn give_back(&self) {
        self.budget.lock().remove(self.number);
    }

    /// Whose it is.
    pub(crate) fn account(&self) -> (&str, Option<&str>) {
        (&self.account.0.0, self.account.1.as_ref().map(|owner| owner.0.as_str()))
    }
}

impl Drop for SpillRoom {
    fn drop(&mut self) {
        self.give_back();
    }
}

#[cfg(test)]
mod tests {
    use executor_proto::types::OwnerId;
    use proptest::prelude::*;

    use super::*;

    fn caller(tenant: &str, owner: &str) -> Caller {
        Caller { tenant: TenantId(tenant.into()), owner: Some(OwnerId(owner.into())) }
    }

    fn budget(total: u64, tenants: &[&str], per_owner: u64) -> SpillBudget {
        let caps = tenants.iter().map(|name| (TenantId((*name).into()), u64::MAX));
        SpillBudget::new(Shares::new(total, caps), (HashMap::new(), per_owner))
    }

    fn granted(granted: u64) -> Grown {
        Grown { granted, ..Grown::default() }
    }

    #[test]
    fn an_owner_that_floods_keeps_heads_and_leaves_the_others_theirs() {
        let budget = budget(1_000, &["t"], 100);
        let (first, second) = (budget.room(&caller("t", "a")), budget.room(&caller("t", "a")));
        assert_eq!(first.grow(80), granted(80));
        let cut = second.grow(30);
        assert_eq!((cut.granted, cut.gone), (20, vec![]));
        assert_eq!(cut.over, Some(ExecutorError::OverLimit { what: OF_OWNER.into(), used: 80, limit: 100 }));
        assert_eq!(budget.room(&caller("t", "b")).grow(100), granted(100));
        drop((first, second));
        assert!(budget.lock().held.is_empty() && budget.lock().owners.is_empty() && budget.lock().tenants.is_empty());
    }

    #[test]
    fn what_has_ended_goes_first_the_oldest_and_nobody_elses() {
        let budget = budget(1_000, &["t"], 100);
        let other = budget.room(&caller("t", "b"));
        other.grow(50);
        other.over(Path::new("/b"));
        let rooms: Vec<_> = ["/0", "/1", "/2"].map(|path| (budget.room(&caller("t", "a")), path)).into();
        for (room, _) in &rooms {
            assert_eq!(room.grow(30), granted(30));
        }
        for (room, path) in rooms.iter().rev().take(2) {
            room.over(Path::new(path));
        }
        let new = budget.room(&caller("t", "a"));
        assert_eq!(new.grow(30), Grown { granted: 30, gone: vec!["/1".into()], over: None });
        assert_eq!(new.grow(30), Grown { granted: 30, gone: vec!["/2".into()], over: None });
        let full = new.grow(30);
        assert_eq!((full.granted, full.gone.len()), (10, 0), "the first is still written");
        // What is gone is not given back twice.
        drop(rooms);
        assert_eq!(budget.lock().owners[&(TenantId("t".into()), Some(OwnerId("a".into())))], 70);
    }

    #[test]
    fn a_tenant_that_floods_leaves_the_other_its_part() {
        let budget = budget(1_000, &["t", "u"], u64::MAX);
        let flood: Vec<_> = (0..20).map(|number| budget.room(&caller("t", &number.to_string()))).collect();
        let got: u64 = flood.iter().map(|room| room.grow(100).granted).sum();
        assert_eq!(got, 750);
        assert_eq!(budget.room(&caller("u", "x")).grow(300).granted, 250);
    }

    #[test]
    fn what_was_not_written_comes_back() {
        let budget = budget(100, &["t"], 100);
        let room = budget.room(&caller("t", "a"));
        room.there(40);
        room.grow(60);
        room.shrink(25);
        assert_eq!(budget.room(&caller("t", "b")).grow(100).granted, 25);
        room.give_back();
        assert_eq!(budget.room(&caller("t", "b")).grow(100).granted, 100);
    }

    proptest! {
        #[test]
        fn whatever_is_done_in_whatever_order_no_budget_is_exceeded_and_everything_comes_back(
            steps in proptest::collection::vec((0_usize..8, 0_u8..6, 0_u64..60), 0..300),
        ) {
            let budget = budget(500, &["0", "1"], 150);
            let new = |slot: usize| budget.room(&caller(&(slot % 2).to_string(), &(slot % 4).to_string()));
            let mut rooms: Vec<_> = (0..8).map(new).collect();
            for (slot, act, bytes) in steps {
                match act {
                    0 => rooms[slot] = new(slot),
                    1 => rooms[slot].over(Path::new("/x")),
                    2 => rooms[slot].shrink(bytes),
                    3 => rooms[slot].give_back(),
                    _ => {
                        let grown = rooms[slot].grow(bytes);
                        prop_assert_eq!(grown.granted < bytes, grown.over.is_some());
                    }
                }
                let state = budget.lock();
                prop_assert!(state.tenants.values().sum::<u64>() <= 500);
                prop_assert!(state.owners.values().all(|used| *used <= 150));
                prop_assert_eq!(state.held.values().map(|held| held.bytes).sum::<u64>(), state.tenants.values().sum::<u64>());
            }
            drop(rooms);
            let state = budget.lock();
            prop_assert!(state.held.is_empty() && state.owners.is_empty() && state.tenants.is_empty());
        }
    }
}
