//! `mcp`: the tools for an agent that speaks the Model Context Protocol over stdin and stdout.

use std::{sync::Arc, time::Duration};

use executor_proto::types::{OwnerId, TaskStatus};
use tokio::io::BufReader;

use super::{
    Failure, Outcome,
    backend::{Backend, Files},
    interrupt::Interrupt,
    settings::Settings,
};
use crate::{executor::Executor, mcp, session::Session};

/// How long tasks that nobody can name any more may take to be ended, before the client is not kept waiting for it.
const LAST_ENDS: Duration = Duration::from_secs(10);

pub(super) async fn mcp(settings: &Settings) -> Outcome {
    let interrupt = Interrupt::listen()?;
    let prepared = interrupt.or(async {
        let backend = Backend::new(settings, Files::AreTold).await?;
        let cwd = backend.callers_directory().await?;
        Ok((backend, cwd))
    });
    let (backend, cwd) = prepared.await?;
    let named = backend.owner.clone();
    let owner = match &named {
        Some(owner) => owner.clone(),
        None => random_owner()?,
    };
    let session = Session { id: owner.clone(), cwd, sandbox: settings.sandbox };
    let (input, output) = (BufReader::new(tokio::io::stdin()), tokio::io::stdout());
    let served = mcp::serve(Arc::clone(&backend.executor), session, input, output, interrupt.token()).await;
    if named.is_none() {
        // What is left cannot be handed on: nobody knows the owner.
        let _ = tokio::time::timeout(LAST_ENDS, end_tasks(&*backend.executor, &owner)).await;
    }
    backend.close().await;
    served.map_err(|error| Failure::Own(format!("the client: {error}")))?;
    Ok(interrupt.code().unwrap_or(0))
}

fn random_owner() -> Result<OwnerId, Failure> {
    let number = getrandom::u64().map_err(|error| Failure::Own(format!("no random numbers: {error}")))?;
    Ok(OwnerId(format!("mcp-{number:016x}")))
}

/// Ends what is running for an owner, and what is left over.
async fn end_tasks(executor: &dyn Executor, owner: &OwnerId) {
    let Ok(tasks) = executor.list_tasks(Some(owner)).await else { return };
    for task in tasks.iter().filter(|task| task.status == TaskStatus::Running || !task.leftovers.is_empty()) {
        // One that is not ended now goes on; the daemon still knows it.
        let _ = executor.kill_task(Some(owner), &task.id).await;
    }
}
