//! Which start keys are kept after their runs and tasks are forgotten: a day long, so many per owner and in all, the oldest
//! go first. Pure: numbers in, numbers out.

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    sync::Arc,
};

use super::record::{Account, UsedKey};

/// How long a key is kept, in milliseconds.
pub(super) const KEPT_MS: u64 = 24 * 60 * 60 * 1_000;

/// Keys kept per owner.
pub(super) const MAX_PER_OWNER: usize = 4_096;

/// Keys kept in all.
pub(super) const MAX: usize = 65_536;

/// The numbers of the keys that are kept, by age.
#[derive(Debug, Default)]
pub(super) struct Keys {
    by_age: BTreeMap<i64, (Arc<Account>, u64)>,
    by_owner: HashMap<Arc<Account>, VecDeque<i64>>,
}

impl Keys {
    /// Those that a journal held, oldest first, and which of them are to go.
    pub(super) fn recovered(keys: &[(i64, UsedKey)], now_ms: u64) -> (Self, Vec<i64>) {
        let mut all = Self::default();
        let mut over = Vec::new();
        for (number, key) in keys {
            let gone = all.make_room(&key.account, now_ms);
            all.forget(&gone);
            over.extend(gone);
            all.add(*number, key);
        }
        let old = all.old(now_ms);
        all.forget(&old);
        over.extend(old);
        (all, over)
    }

    /// What has to go for one more key of this account.
    pub(super) fn make_room(&self, account: &Account, now_ms: u64) -> Vec<i64> {
        let mut gone = self.old(now_ms);
        let oldest_of_owner =
            self.by_owner.get(account).filter(|own| own.len() >= MAX_PER_OWNER).and_then(VecDeque::front);
        let oldest = self.by_age.keys().next().filter(|_| self.by_age.len() >= MAX);
        gone.extend(oldest_of_owner.or(oldest));
        gone.sort_unstable();
        gone.dedup();
        gone
    }

    /// Those whose time is over.
    fn old(&self, now_ms: u64) -> Vec<i64> {
        let old = self.by_age.iter().take_while(|(_, (_, forgotten))| forgotten.saturating_add(KEPT_MS) < now_ms);
        old.map(|(number, _)| *number).collect()
    }

    /// One more, younger than all others.
    pub(super) fn add(&mut self, number: i64, key: &UsedKey) {
        let account = match self.by_owner.get_key_value(&key.account) {
            Some((account, _)) => Arc::clone(account),
            None => Arc::new(key.account.clone()),
        };
        self.by_owner.entry(Arc::clone(&account)).or_default().push_back(number);
        self.by_age.insert(number, (account, key.forgotten_at_ms));
    }

    /// These are kept no longer.
    pub(super) fn forget(&mut self, gone: &[i64]) {
        for number in gone {
            let Some((account, _)) = self.by_age.remove(number) else { continue };
            if let Some(own) = self.by_owner.get_mut(&account) {
                own.retain(|own| own != number);
                if own.is_empty() {
                    self.by_owner.remove(&account);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{super::record::Kind, *};

    fn key(owner: &str, forgotten_at_ms: u64) -> UsedKey {
        let account = Account { tenant: "t".into(), owner: Some(owner.into()) };
        UsedKey {
            account,
            key: "k".into(),
            kind: Kind::Run,
            digest: [0; 32],
            id: None,
            end_known: false,
            forgotten_at_ms,
        }
    }

    fn add(keys: &mut Keys, number: i64, used: &UsedKey) {
        let gone = keys.make_room(&used.account, used.forgotten_at_ms);
        keys.forget(&gone);
        keys.add(number, used);
    }

    #[test]
    fn the_oldest_go_by_owner_by_number_in_all_and_by_age() {
        let mut keys = Keys::default();
        add(&mut keys, 0, &key("quiet", 1));
        for number in 1..=5_000 {
            add(&mut keys, number, &key("busy", 1));
        }
        assert_eq!(keys.by_age.len(), 1 + MAX_PER_OWNER);
        assert!(keys.by_age.contains_key(&0) && !keys.by_age.contains_key(&900));
        for number in 5_001..75_000 {
            add(&mut keys, number, &key(&(number % 500).to_string(), 2));
        }
        assert_eq!(keys.by_age.len(), MAX);
        assert!(!keys.by_age.contains_key(&0));
        add(&mut keys, 75_000, &key("late", KEPT_MS + 2));
        assert!(keys.by_age.values().all(|(_, forgotten)| *forgotten >= 2));
        add(&mut keys, 75_001, &key("later", KEPT_MS + 3));
        assert_eq!((keys.by_age.len(), keys.by_owner.len()), (2, 2));
    }
}
