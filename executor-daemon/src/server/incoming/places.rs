//! The places that the connections of one socket share.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::timeout,
};
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};

use crate::service::edge::{Latest, Line};

/// How soon whoever has to go is gone.
const GONE_BY: Duration = Duration::from_secs(1);

/// A number of places. Cheap to clone.
#[derive(Debug, Clone)]
pub(super) struct Places {
    free: Arc<Semaphore>,
    taken: Arc<Mutex<Taken>>,
}

/// Who may have to go, by age.
#[derive(Debug, Default)]
struct Taken {
    next: u64,
    waiting: BTreeMap<u64, (Line, CancellationToken)>,
}

impl Places {
    pub(super) fn new(places: usize) -> Self {
        Self { free: Arc::new(Semaphore::new(places)), taken: Arc::default() }
    }

    fn lock(&self) -> MutexGuard<'_, Taken> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A place for this connection. Where none is free, the oldest of those over which no call was admitted has to go; where
    /// a call was admitted over each, one of them is waited for.
    pub(super) async fn take(&self, line: &Line) -> Place {
        let permit = match Arc::clone(&self.free).try_acquire_owned() {
            Ok(permit) => permit,
            Err(_taken) => loop {
                self.lock().displace_oldest();
                // One that had its first call admitted meanwhile stays: then it is the next one's turn.
                if let Ok(permit) = timeout(GONE_BY, Arc::clone(&self.free).acquire_owned()).await {
                    break permit.expect("nobody closes the semaphore");
                }
            },
        };
        let displaced = CancellationToken::new();
        let mut taken = self.lock();
        let number = taken.next;
        taken.next += 1;
        taken.waiting.insert(number, (line.clone(), displaced.clone()));
        Place { places: self.clone(), number, displaced, _permit: permit }
    }
}

impl Taken {
    fn displace_oldest(&mut self) {
        // Whoever may call stays for good.
        self.waiting.retain(|_, (line, _)| line.calls.latest() != Latest::Admitted);
        if let Some((_, (line, displaced))) = self.waiting.pop_first() {
            tracing::info!(peer = %line.peer, "a connection without an admitted call goes: its place is needed");
            displaced.cancel();
        }
    }
}

/// One place, until it is dropped.
#[derive(Debug)]
pub(super) struct Place {
    places: Places,
    number: u64,
    displaced: CancellationToken,
    _permit: OwnedSemaphorePermit,
}

impl Place {
    /// Resolves when its holder has to go.
    pub(super) fn displaced(&self) -> WaitForCancellationFutureOwned {
        self.displaced.clone().cancelled_owned()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.places.lock().waiting.remove(&self.number);
    }
}
