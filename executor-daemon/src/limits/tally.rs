//! What is used of a budget, by whom. A place that was taken is a [`Permit`], and comes back when that is dropped.

use std::{
    collections::HashMap,
    hash::Hash,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use executor_proto::error::ExecutorError;

/// How many places each has. Nothing is kept of who has none. Cheap to clone.
#[derive(Debug)]
pub(super) struct Tally<K: Eq + Hash>(Arc<Mutex<HashMap<K, u64>>>);

impl<K: Eq + Hash> Clone for Tally<K> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<K: Eq + Hash> Default for Tally<K> {
    fn default() -> Self {
        Self(Arc::default())
    }
}

impl<K: Eq + Hash + Clone> Tally<K> {
    fn lock(&self) -> MutexGuard<'_, HashMap<K, u64>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One place more of `what`, where `limit` (of what everybody has) allows it.
    ///
    /// # Errors
    /// [`ExecutorError::OverLimit`].
    pub(super) fn take(
        &self,
        key: &K,
        what: &'static str,
        limit: impl FnOnce(&HashMap<K, u64>) -> u64,
    ) -> Result<Permit<K>, ExecutorError> {
        let mut all = self.lock();
        let (used, limit) = (all.get(key).copied().unwrap_or(0), limit(&all));
        if used >= limit {
            return Err(ExecutorError::OverLimit { what: what.to_owned(), used, limit });
        }
        all.insert(key.clone(), used + 1);
        drop(all);
        Ok(Permit { of: self.clone(), key: key.clone() })
    }

    /// The place of something that is there already: it cannot be refused, and counts.
    pub(super) fn there(&self, key: &K) -> Permit<K> {
        *self.lock().entry(key.clone()).or_default() += 1;
        Permit { of: self.clone(), key: key.clone() }
    }

    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.lock().is_empty()
    }

    #[cfg(test)]
    pub(super) fn used(&self) -> HashMap<K, u64> {
        self.lock().clone()
    }
}

/// One place.
#[derive(Debug)]
pub(super) struct Permit<K: Eq + Hash + Clone> {
    of: Tally<K>,
    key: K,
}

impl<K: Eq + Hash + Clone> Drop for Permit<K> {
    fn drop(&mut self) {
        let mut all = self.of.lock();
        if let Some(used) = all.get_mut(&self.key) {
            *used -= 1;
            if *used == 0 {
                all.remove(&self.key);
            }
        }
    }
}
