//! The records that tasks ended, per owner, until they are acknowledged. What is here is in the journal, too.
//!
//! [`Ledger`] is the pure rule of one owner; [`Completions`] holds all of them and wakes who watches. A completion is
//! delivered to every watcher of its owner at least once, from the oldest that is not acknowledged on.

use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use executor_proto::types::{Completion, OwnerId, TaskId, TaskStatus, WatchEvent};
use tokio::sync::watch;

use crate::{
    crash::Point,
    ids::{Caller, TenantId},
    journal::{self, Account, Journal, StartNumber},
};

/// One owner's completions.
#[derive(Debug, Default)]
struct Ledger {
    /// The number of the latest.
    latest: u64,
    /// Those that are not acknowledged, oldest first.
    waiting: VecDeque<Completion>,
}

impl Ledger {
    /// Adds one; above `cap` the oldest goes and is returned.
    fn add(&mut self, task_id: TaskId, status: TaskStatus, ended_at_ms: u64, cap: u64) -> Option<Completion> {
        self.latest += 1;
        self.waiting.push_back(Completion { sequence: self.latest, task_id, status, ended_at_ms });
        (self.waiting.len() as u64 > cap).then(|| self.waiting.pop_front()).flatten()
    }

    /// The first that waits after this number.
    fn after(&self, sequence: u64) -> Option<&Completion> {
        let at = self.waiting.partition_point(|completion| completion.sequence <= sequence);
        self.waiting.get(at)
    }

    fn acknowledge(&mut self, up_to: u64) {
        let at = self.waiting.partition_point(|completion| completion.sequence <= up_to);
        self.waiting.drain(..at);
    }
}

/// An owner within its tenant.
type Key = (TenantId, OwnerId);

#[derive(Debug)]
struct Entry {
    ledger: Ledger,
    /// Moves when a completion is added.
    news: watch::Sender<()>,
}

#[derive(Debug, Default)]
struct Owners {
    entries: HashMap<Key, Entry>,
    /// Owners that are new count from the one after this.
    first_sequence: u64,
    closed: bool,
}

impl Owners {
    fn entry(&mut self, key: &Key) -> &mut Entry {
        let latest = self.first_sequence;
        self.entries.entry(key.clone()).or_insert_with(|| Entry {
            ledger: Ledger { latest, waiting: VecDeque::new() },
            news: watch::Sender::new(()),
        })
    }
}

/// All owners' completions. Cheap to clone.
#[derive(Debug, Clone)]
pub(super) struct Completions {
    owners: Arc<Mutex<Owners>>,
    cap: u64,
    /// `None`: nothing outlives this process.
    journal: Option<Journal>,
}

impl Completions {
    /// Keeps at most `cap` unacknowledged per owner, in memory only.
    #[cfg(test)]
    fn new(cap: u64) -> Self {
        Self { owners: Arc::default(), cap, journal: None }
    }

    /// Keeps at most `cap` unacknowledged per owner, in a journal too, and begins with what that held. Owners that it did not
    /// know count from the one after `first_sequence`.
    pub(super) fn recalled(cap: u64, journal: Journal, ledgers: Vec<journal::Ledger>, first_sequence: u64) -> Self {
        let entries = ledgers.into_iter().filter_map(|ledger| {
            let Caller { tenant, owner } = Caller::from(&ledger.account);
            let waiting = ledger.waiting.into_iter().map(|completed| Completion {
                sequence: completed.sequence,
                task_id: TaskId(completed.task),
                status: completed.status.into(),
                ended_at_ms: completed.ended_at_ms,
            });
            let ledger = Ledger { latest: ledger.latest, waiting: waiting.collect() };
            Some(((tenant, owner?), Entry { ledger, news: watch::Sender::new(()) }))
        });
        let owners = Owners { entries: entries.collect(), first_sequence, closed: false };
        Self { owners: Arc::new(Mutex::new(owners)), cap, journal: Some(journal) }
    }

    fn lock(&self) -> MutexGuard<'_, Owners> {
        self.owners.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A task of this owner has ended. When this returns, a kill of this process does not take it away.
    pub(super) fn add(
        &self,
        (tenant, owner): (&TenantId, &OwnerId),
        number: StartNumber,
        task_id: TaskId,
        status: TaskStatus,
        ended_at_ms: u64,
    ) {
        let mut owners = self.lock();
        let entry = owners.entry(&(tenant.clone(), owner.clone()));
        let gone = entry.ledger.add(task_id, status, ended_at_ms, self.cap);
        // Under the lock, so that the journal has them in the order of their numbers, and before anybody is woken.
        if let (Some(journal), Some(latest)) = (&self.journal, entry.ledger.waiting.back()) {
            let completed = journal::Completed {
                sequence: latest.sequence,
                task: latest.task_id.0.clone(),
                status: (&latest.status).into(),
                ended_at_ms: latest.ended_at_ms,
            };
            let first_kept = entry.ledger.waiting.front().map_or(0, |first| first.sequence);
            journal.completed(&account(tenant, owner), &completed, first_kept, Some(number));
            Point::CompletionRecorded.pass();
        }
        entry.news.send_replace(());
        drop(owners);
        if let Some(gone) = gone {
            tracing::warn!(
                owner = %owner, task = %gone.task_id, sequence = gone.sequence, cap = self.cap,
                "an unacknowledged completion was dropped: too many wait"
            );
        }
    }

    /// Forgets an owner's completions up to and including this one.
    pub(super) fn acknowledge(&self, tenant: &TenantId, owner: &OwnerId, up_to: u64) {
        let mut owners = self.lock();
        let Some(entry) = owners.entries.get_mut(&(tenant.clone(), owner.clone())) else { return };
        let before = entry.ledger.waiting.len();
        entry.ledger.acknowledge(up_to);
        if let Some(journal) = self.journal.as_ref().filter(|_| entry.ledger.waiting.len() < before) {
            journal.acknowledged(&account(tenant, owner), up_to);
            Point::CompletionAcknowledged.pass();
        }
    }

    /// Watches an owner from its oldest unacknowledged completion on.
    pub(super) fn watch(&self, tenant: &TenantId, owner: &OwnerId) -> Watch {
        let key = (tenant.clone(), owner.clone());
        let news = self.lock().entry(&key).news.subscribe();
        Watch { completions: self.clone(), key, news, delivered: 0, caught_up: false }
    }

    /// Forgets owners that were watched, never had a completion, and are watched no more.
    pub(super) fn sweep(&self) {
        let mut owners = self.lock();
        let first = owners.first_sequence;
        owners.entries.retain(|_, entry| entry.ledger.latest > first || entry.news.receiver_count() > 0);
    }

    /// No more will come: watchers end when they have had what waits.
    pub(super) fn close(&self) {
        let mut owners = self.lock();
        owners.closed = true;
        for entry in owners.entries.values() {
            entry.news.send_replace(());
        }
    }
}

fn account(tenant: &TenantId, owner: &OwnerId) -> Account {
    Account { tenant: tenant.0.clone(), owner: Some(owner.0.clone()) }
}

/// One watcher of one owner.
#[derive(Debug)]
pub(super) struct Watch {
    completions: Completions,
    key: Key,
    news: watch::Receiver<()>,
    /// The number of the latest completion that this watcher had.
    delivered: u64,
    caught_up: bool,
}

impl Watch {
    /// The next event; `None` when no more will come. Cancel-safe: nothing is counted as delivered before it is returned.
    pub(super) async fn next(&mut self) -> Option<WatchEvent> {
        loop {
            self.news.mark_unchanged();
            {
                let mut owners = self.completions.lock();
                let closed = owners.closed;
                let ledger = &owners.entry(&self.key).ledger;
                if let Some(completion) = ledger.after(self.delivered) {
                    self.delivered = completion.sequence;
                    return Some(WatchEvent::Completion(completion.clone()));
                }
                if !self.caught_up {
                    self.caught_up = true;
                    return Some(WatchEvent::CaughtUp);
                }
                if closed {
                    return None;
                }
            }
            // The sender lives in the map as long as `completions`, which this value holds.
            if self.news.changed().await.is_err() {
                return None;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn world(cap: u64) -> (Completions, TenantId, OwnerId) {
        (Completions::new(cap), TenantId::default_tenant(), OwnerId("a".into()))
    }

    fn end(completions: &Completions, owner: &OwnerId, task: u64) {
        let id = TaskId(format!("bash-{task}"));
        completions.add((&TenantId::default_tenant(), owner), StartNumber(1), id, TaskStatus::Killed(None), 5);
    }

    fn now(watch: &mut Watch) -> Option<Option<WatchEvent>> {
        let mut next = std::pin::pin!(watch.next());
        let waker = std::task::Waker::noop();
        match next.as_mut().poll(&mut std::task::Context::from_waker(waker)) {
            std::task::Poll::Ready(event) => Some(event),
            std::task::Poll::Pending => None,
        }
    }

    fn sequence(event: Option<Option<WatchEvent>>) -> Option<u64> {
        match event {
            Some(Some(WatchEvent::Completion(completion))) => Some(completion.sequence),
            Some(Some(WatchEvent::CaughtUp) | None) | None => None,
        }
    }

    #[test]
    fn what_waits_comes_first_then_caught_up_then_live_to_every_watcher() {
        let (completions, tenant, owner) = world(9);
        end(&completions, &owner, 1);
        end(&completions, &OwnerId("b".into()), 2);
        let mut watchers = [completions.watch(&tenant, &owner), completions.watch(&tenant, &owner)];
        for watch in &mut watchers {
            assert_eq!(sequence(now(watch)), Some(1));
            assert_eq!(now(watch), Some(Some(WatchEvent::CaughtUp)));
            assert_eq!(now(watch), None);
        }
        end(&completions, &owner, 3);
        for watch in &mut watchers {
            assert_eq!(sequence(now(watch)), Some(2));
            assert_eq!(now(watch), None);
        }
        completions.close();
        assert_eq!(now(&mut watchers[0]), Some(None));
    }

    #[test]
    fn nothing_is_kept_of_an_owner_that_only_watched() {
        let (completions, tenant, owner) = world(9);
        let mut watch = completions.watch(&tenant, &owner);
        completions.sweep();
        end(&completions, &owner, 1);
        assert_eq!(sequence(now(&mut watch)), Some(1));
        drop(completions.watch(&tenant, &OwnerId("passer-by".into())));
        completions.sweep();
        assert_eq!(completions.lock().entries.len(), 1);
    }

    #[test]
    fn what_was_not_acknowledged_comes_again_and_the_oldest_go_above_the_cap() {
        let (completions, tenant, owner) = world(3);
        for task in 1..=5 {
            end(&completions, &owner, task);
        }
        assert_eq!(sequence(now(&mut completions.watch(&tenant, &owner))), Some(3));
        completions.acknowledge(&tenant, &owner, 4);
        assert_eq!(sequence(now(&mut completions.watch(&tenant, &owner))), Some(5));
        completions.acknowledge(&tenant, &owner, 5);
        let mut watch = completions.watch(&tenant, &owner);
        assert_eq!(now(&mut watch), Some(Some(WatchEvent::CaughtUp)));
        end(&completions, &owner, 6);
        assert_eq!(sequence(now(&mut watch)), Some(6));
    }

    #[test]
    fn what_waited_and_the_latest_number_are_there_for_the_next_process() {
        let directory = tempfile::tempdir().unwrap();
        let open = || {
            let keeper = journal::KeeperInstance([1; 16]);
            let (journal, recovered) = Journal::open(directory.path(), "boot", keeper, 1).unwrap();
            Completions::recalled(2, journal, recovered.ledgers, recovered.first_sequence)
        };
        let (tenant, owner) = (TenantId::default_tenant(), OwnerId("a".into()));
        let completions = open();
        for task in 1..=4 {
            end(&completions, &owner, task);
        }
        completions.acknowledge(&tenant, &owner, 3);
        drop(completions);
        let completions = open();
        let mut watch = completions.watch(&tenant, &owner);
        assert_eq!(sequence(now(&mut watch)), Some(4));
        assert_eq!(now(&mut watch), Some(Some(WatchEvent::CaughtUp)));
        completions.acknowledge(&tenant, &owner, 4);
        drop((watch, completions));
        let completions = open();
        end(&completions, &owner, 5);
        assert_eq!(sequence(now(&mut completions.watch(&tenant, &owner))), Some(5));
    }

    proptest! {
        /// Whatever is added and acknowledged in between, a watcher sees every number above the acknowledged ones once, in order.
        #[test]
        fn numbers_grow_by_one(steps in proptest::collection::vec(proptest::option::of(0_u64..30), 0..60)) {
            let (completions, tenant, owner) = world(1_000);
            let mut watch = completions.watch(&tenant, &owner);
            let (mut added, mut acknowledged) = (0, 0);
            for step in steps {
                match step {
                    None => { added += 1; end(&completions, &owner, added); }
                    Some(up_to) => {
                        completions.acknowledge(&tenant, &owner, up_to);
                        acknowledged = acknowledged.max(up_to.min(added));
                    }
                }
            }
            let mut seen = Vec::new();
            while let Some(Some(event)) = now(&mut watch) {
                if let WatchEvent::Completion(completion) = event {
                    seen.push(completion.sequence);
                }
            }
            prop_assert_eq!(seen, (acknowledged + 1..=added).collect::<Vec<_>>());
        }
    }
}
