//! What has been delivered: bounded, per owner, also while an owner is not attached.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    sync::Arc,
};

use executor_proto::types::{Completion, OwnerId, TaskId};
use tokio::sync::Mutex;

/// Deliveries remembered per owner; the oldest go first. A daemon keeps 4 096 unacknowledged completions of an owner unless
/// it is configured otherwise, and only those can come again.
const MAX_DELIVERED: usize = 8_192;

/// Owners remembered while they are not attached; the one that was detached first goes first.
const MAX_DETACHED: usize = 1_024;

/// What makes a completion another one: numbers and task ids may begin anew with another executor.
type Identity = (u64, TaskId, u64);

/// The deliveries to one owner.
#[derive(Debug, Default)]
pub(super) struct Delivered {
    known: HashSet<Identity>,
    oldest_first: VecDeque<Identity>,
}

impl Delivered {
    pub(super) fn contains(&self, completion: &Completion) -> bool {
        self.known.contains(&identity(completion))
    }

    pub(super) fn insert(&mut self, completion: &Completion) {
        let identity = identity(completion);
        if !self.known.insert(identity.clone()) {
            return;
        }
        self.oldest_first.push_back(identity);
        if self.oldest_first.len() > MAX_DELIVERED
            && let Some(oldest) = self.oldest_first.pop_front()
        {
            self.known.remove(&oldest);
        }
    }
}

fn identity(completion: &Completion) -> Identity {
    let Completion { sequence, task_id, status: _, ended_at_ms } = completion;
    (*sequence, task_id.clone(), *ended_at_ms)
}

/// The memories of all owners. An owner's watcher holds the lock of its memory for its whole life.
#[derive(Debug, Default)]
pub(super) struct Memories {
    by_owner: HashMap<OwnerId, Arc<Mutex<Delivered>>>,
    detached_first: VecDeque<OwnerId>,
}

impl Memories {
    /// The memory of an owner that is being attached.
    pub(super) fn of_attached(&mut self, owner: &OwnerId) -> Arc<Mutex<Delivered>> {
        self.detached_first.retain(|one| one != owner);
        Arc::clone(self.by_owner.entry(owner.clone()).or_default())
    }

    /// Keeps the memory of an owner that was detached, among the latest ones.
    pub(super) fn keep_of_detached(&mut self, owner: &OwnerId) {
        self.detached_first.push_back(owner.clone());
        if self.detached_first.len() > MAX_DETACHED
            && let Some(first) = self.detached_first.pop_front()
        {
            self.by_owner.remove(&first);
        }
    }
}

#[cfg(test)]
mod tests {
    use executor_proto::types::TaskStatus;

    use super::*;

    fn completion(sequence: u64, ended_at_ms: u64) -> Completion {
        let task_id = TaskId(format!("bash-{sequence}"));
        Completion { sequence, task_id, status: TaskStatus::Killed(None), ended_at_ms }
    }

    #[test]
    fn the_oldest_deliveries_are_forgotten_first() {
        let mut delivered = Delivered::default();
        for sequence in 0..=MAX_DELIVERED as u64 {
            delivered.insert(&completion(sequence, 0));
            delivered.insert(&completion(sequence, 0));
        }
        assert!(!delivered.contains(&completion(0, 0)));
        assert!(delivered.contains(&completion(1, 0)));
        assert_eq!((delivered.known.len(), delivered.oldest_first.len()), (MAX_DELIVERED, MAX_DELIVERED));
    }

    #[test]
    fn the_same_number_of_another_executor_is_another_completion() {
        let mut delivered = Delivered::default();
        delivered.insert(&completion(1, 1_000));
        assert!(!delivered.contains(&completion(1, 2_000)));
    }

    #[test]
    fn the_first_detached_owners_are_forgotten_first() {
        let owner = |number: usize| OwnerId(number.to_string());
        let mut memories = Memories::default();
        let first = memories.of_attached(&owner(0));
        memories.keep_of_detached(&owner(0));
        assert!(Arc::ptr_eq(&first, &memories.of_attached(&owner(0))));
        memories.keep_of_detached(&owner(0));
        let attached = memories.of_attached(&owner(1));
        for number in 2..=MAX_DETACHED + 1 {
            memories.of_attached(&owner(number));
            memories.keep_of_detached(&owner(number));
        }
        assert!(!Arc::ptr_eq(&first, &memories.of_attached(&owner(0))));
        assert!(Arc::ptr_eq(&attached, &memories.of_attached(&owner(1))));
        assert_eq!(memories.detached_first.len(), MAX_DETACHED);
    }
}
