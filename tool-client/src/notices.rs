//! Completions become notices in the sessions that own them.
//!
//! Each attached owner has one watcher, a task that goes through these states:
//!
//! ```text
//!            attach                     a stream opens
//!   (none) ────────► connecting ───────────────────────► watching ──┐ completion: deliver, then acknowledge
//!                        ▲  ▲                             │  │  ▲   │
//!                        │  └── back-off, the stream ends ┘  │  └───┘
//!                        │                                  │ the registry does not take it
//!                        └────────── attach ── parked ◄─────┘
//! ```
//!
//! `detach`, and dropping the last clone of [`Notices`], end it in every state, after a delivery that is under way.
//!
//! The executor delivers a completion until it is acknowledged, so it may come again after any failure. What was delivered is
//! remembered, also while its owner is detached, so that the registry gets it once as long as this value lives. The
//! executor's numbers may begin anew with another executor; a completion is therefore known by its number, task and
//! time of end together, and only numbers that have come over the present stream are acknowledged.

use std::{
    collections::HashMap,
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use async_trait::async_trait;
use executor_proto::types::{OwnerId, TaskId};
use tokio::sync::watch;
use tokio_util::sync::{CancellationToken, DropGuard};

use self::{
    memory::Memories,
    watcher::{PACE, Watcher},
};
use crate::executor::{Executor, backoff::Backoff};

mod memory;
mod watcher;

#[cfg(test)]
mod tests;

/// The sentence that tells a session that its task has ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Notice {
    /// The session that owns the task.
    pub owner: OwnerId,
    /// The task.
    pub task_id: TaskId,
    /// Its number within the owner. A harness that stores it can tell a notice that it has had before its restart.
    pub sequence: u64,
    /// The words.
    pub text: String,
}

impl Notice {
    /// Where it comes from, as harnesses name sources: `{"kind": "plugin", "plugin": "tool-bash"}`.
    #[must_use]
    pub fn source() -> serde_json::Value {
        serde_json::json!({"kind": "plugin", "plugin": "tool-bash"})
    }
}

/// Where the harness keeps its agents. A notice must not wake an idle agent.
#[async_trait]
pub trait AgentRegistry: Send + Sync + fmt::Debug {
    /// Hands a notice to the agent of `notice.owner`. Returns whether it was taken: `false` (there is no such agent any more)
    /// leaves it unacknowledged, to be delivered when the owner is attached again. Never dropped half-way: what it
    /// returns decides whether the notice comes again, so it must return.
    async fn deliver(&self, notice: Notice) -> bool;
}

/// Watches the completions of the owners that are attached, and hands each to the registry once. Clones share everything;
/// when the last one is dropped all watching stops.
#[derive(Debug, Clone)]
pub struct Notices {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    executor: Arc<dyn Executor>,
    registry: Arc<dyn AgentRegistry>,
    pace: Backoff,
    owners: Mutex<Owners>,
    /// Parent of every watcher's stop.
    stop: CancellationToken,
    _stop_on_drop: DropGuard,
}

#[derive(Debug, Default)]
struct Owners {
    watchers: HashMap<OwnerId, Handle>,
    memories: Memories,
}

/// What is kept of a watcher outside it.
#[derive(Debug)]
struct Handle {
    stop: CancellationToken,
    /// Cancelled when the watcher has ended, however it did.
    ended: CancellationToken,
    /// Counts the attachments: a parked watcher goes on with the next one.
    attached: watch::Sender<u64>,
}

impl Notices {
    /// Notices from this executor into this registry.
    #[must_use]
    pub fn new(executor: Arc<dyn Executor>, registry: Arc<dyn AgentRegistry>) -> Self {
        Self::with_pace(executor, registry, PACE)
    }

    fn with_pace(executor: Arc<dyn Executor>, registry: Arc<dyn AgentRegistry>, pace: Backoff) -> Self {
        let stop = CancellationToken::new();
        let _stop_on_drop = stop.clone().drop_guard();
        Self { shared: Arc::new(Shared { executor, registry, pace, owners: Mutex::default(), stop, _stop_on_drop }) }
    }

    /// Begins to watch an owner; watching twice is watching once. What the registry did not take is offered again.
    /// Must be called inside a tokio runtime.
    pub fn attach(&self, owner: OwnerId) {
        let mut owners = self.shared.owners();
        if let Some(handle) = owners.watchers.get(&owner)
            && !handle.stop.is_cancelled()
            && !handle.ended.is_cancelled()
        {
            handle.attached.send_modify(|count| *count += 1);
            return;
        }
        let (attached, attachments) = watch::channel(0);
        let handle = Handle { stop: self.shared.stop.child_token(), ended: CancellationToken::new(), attached };
        let watcher = Watcher {
            executor: Arc::clone(&self.shared.executor),
            registry: Arc::clone(&self.shared.registry),
            owner: owner.clone(),
            pace: self.shared.pace,
            stop: handle.stop.clone(),
            attachments,
        };
        // A watcher before this one may still be ending: the memory is locked until it has.
        let memory = owners.memories.of_attached(&owner);
        let ended = handle.ended.clone().drop_guard();
        tokio::spawn(async move {
            let _ended = ended;
            watcher.run(&mut *memory.lock().await).await;
        });
        owners.watchers.insert(owner, handle);
    }

    /// Stops watching an owner: its notices wait in the executor. Returns when no delivery is under way. Cancel-safe: the
    /// watching stops also when this is dropped.
    pub async fn detach(&self, owner: &OwnerId) {
        let ended = {
            let owners = self.shared.owners();
            let Some(handle) = owners.watchers.get(owner) else { return };
            handle.stop.cancel();
            handle.ended.clone()
        };
        ended.cancelled().await;
        let mut owners = self.shared.owners();
        // It may have been attached again meanwhile.
        if owners.watchers.get(owner).is_some_and(|handle| handle.ended.is_cancelled()) {
            owners.watchers.remove(owner);
            owners.memories.keep_of_detached(owner);
        }
    }
}

impl Shared {
    fn owners(&self) -> MutexGuard<'_, Owners> {
        // Nothing that holds the lock can leave it half-changed.
        self.owners.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
