//! The harness's side of notices: the agents that are there, and what each was told.

use std::{
    collections::HashSet,
    sync::{Mutex, PoisonError},
};

use async_trait::async_trait;
use executor_proto::types::OwnerId;
use tool_client::notices::{AgentRegistry, Notice};

/// Keeps the agents and the notices that they took.
#[derive(Debug, Default)]
pub struct Mailbox {
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    present: HashSet<OwnerId>,
    taken: Vec<Notice>,
}

impl Mailbox {
    /// An agent joins; returns whether it was not there before.
    pub fn join(&self, owner: &OwnerId) -> bool {
        self.lock().present.insert(owner.clone())
    }

    /// An agent leaves: notices for it are no longer taken.
    pub fn leave(&self, owner: &OwnerId) {
        self.lock().present.remove(owner);
    }

    /// All notices that were taken so far, in order.
    #[must_use]
    pub fn taken(&self) -> Vec<Notice> {
        self.lock().taken.clone()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[async_trait]
impl AgentRegistry for Mailbox {
    async fn deliver(&self, notice: Notice) -> bool {
        let mut inner = self.lock();
        let present = inner.present.contains(&notice.owner);
        if present {
            inner.taken.push(notice);
        }
        present
    }
}
