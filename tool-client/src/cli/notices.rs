//! `notices`: what the daemon has to tell an owner.

use std::{collections::HashSet, time::Duration};

use executor_proto::{
    error::ExecutorError,
    types::{Completion, OwnerId, TaskId, WatchEvent},
};
use futures_util::StreamExt;

use super::{Failure, Outcome, backend::Backend, json, output};
use crate::text::task;

/// While notices are followed, how long to wait before an executor that was lost is asked again, and how often.
const AGAIN_AFTER: Duration = Duration::from_secs(1);
const MOST_FAILURES: u32 = 30;

pub(super) async fn notices(backend: &Backend, follow: bool, json: bool) -> Outcome {
    let Some(owner) = &backend.owner else {
        return Err(Failure::Usage("notices belong to a session: give --owner".to_owned()));
    };
    let mut printed = HashSet::new();
    let mut failures = 0;
    loop {
        let before = printed.len();
        let Err(error) = watch(backend, owner, follow, json, &mut printed).await? else { return Ok(0) };
        failures = if printed.len() > before { 0 } else { failures + 1 };
        // Another answer than "lost" would be the same the next time.
        if !follow || failures > MOST_FAILURES || !matches!(error, ExecutorError::Unavailable { .. }) {
            return Err(backend.failure(&error));
        }
        tokio::time::sleep(AGAIN_AFTER).await;
    }
}

/// One watch, to its end. Each notice is acknowledged after it was printed; one that comes again, because the
/// acknowledgement was lost, is only acknowledged.
async fn watch(
    backend: &Backend,
    owner: &OwnerId,
    follow: bool,
    json: bool,
    printed: &mut HashSet<(u64, TaskId)>,
) -> Result<Result<(), ExecutorError>, Failure> {
    let mut events = match backend.executor.watch_tasks(owner).await {
        Ok(events) => events,
        Err(error) => return Ok(Err(error)),
    };
    while let Some(event) = events.next().await {
        match event {
            Ok(WatchEvent::Completion(completion)) => {
                if printed.insert((completion.sequence, completion.task_id.clone())) {
                    output::stdout(line(owner, &completion, json)).await?;
                }
                if let Err(error) = backend.executor.ack_completions(owner, completion.sequence).await {
                    return Ok(Err(error));
                }
            }
            Ok(WatchEvent::CaughtUp) if follow => {}
            Ok(WatchEvent::CaughtUp) => break,
            Err(error) => return Ok(Err(error)),
        }
    }
    Ok(Ok(()))
}

fn line(owner: &OwnerId, completion: &Completion, json: bool) -> String {
    if json {
        format!("{}\n", json::notice(owner, completion))
    } else {
        task::notice(&completion.task_id, &completion.status) + "\n"
    }
}
