//! Completions become notices in the sessions that own them.

use std::{fmt, sync::Arc};

use async_trait::async_trait;
use executor_proto::types::{OwnerId, TaskId};

use crate::executor::Executor;

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
    /// leaves it unacknowledged, to be delivered when the owner is attached again.
    async fn deliver(&self, notice: Notice) -> bool;
}

/// Watches the completions of the owners that are attached, and hands each to the registry once.
#[derive(Debug, Clone)]
pub struct Notices {}

impl Notices {
    /// Notices from this executor into this registry.
    #[must_use]
    pub fn new(executor: Arc<dyn Executor>, registry: Arc<dyn AgentRegistry>) -> Self {
        let _ = (executor, registry);
        unimplemented!()
    }

    /// Begins to watch an owner; watching twice is watching once.
    pub fn attach(&self, owner: OwnerId) {
        let _ = owner;
        unimplemented!()
    }

    /// Stops watching an owner: its notices wait in the executor. Returns when no delivery is under way.
    pub async fn detach(&self, owner: &OwnerId) {
        let _ = owner;
        unimplemented!()
    }
}
