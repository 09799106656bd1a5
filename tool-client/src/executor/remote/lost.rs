//! Why the end of a run that had been started was not seen: one of the reasons that the contract lists.
//!
//! A connection that was cut says nothing about the other side, so that alone is never told as a restart. An executor that
//! answers and does not know the run any more has lost what it knew; its boot id says whether its host did too.

use std::time::Duration;

use executor_proto::error::ExecutorError;
use tokio::time::Instant;

use super::{
    super::{Executor, error::Fault},
    Known, RemoteExecutor,
    attach::NotAttached,
};

/// Longest wait for an executor to answer again. It replaces a server that died within a fraction of it.
const BACK_WITHIN: Duration = Duration::from_secs(2);
/// Between two questions.
const PAUSE: Duration = Duration::from_millis(100);

/// The reason. `before` is what was known of the executor when the run began, `fault` how the connection was lost, and
/// `refusal` why there is no other for this run.
pub(super) async fn reason(
    remote: &RemoteExecutor,
    before: Option<&Known>,
    fault: &Fault,
    refusal: &NotAttached,
) -> String {
    let window = before.map_or(Duration::ZERO, |known| known.resume_window);
    let begun = Instant::now();
    let lost_for = match (refusal, fault) {
        (NotAttached::LostFor(time), _) => *time,
        // It spoke, or it had its time: there is nothing to ask it.
        (NotAttached::NotOffered, Fault::Answer(_) | Fault::Untrusted { .. }) => window,
        (NotAttached::NotOffered, Fault::Silence { after, .. }) => window.max(*after),
        (NotAttached::NotOffered, Fault::Lost { .. }) | (NotAttached::Answered(_), _) => {
            match tokio::time::timeout(BACK_WITHIN.min(remote.deadlines.call), back(remote)).await {
                Ok(boot_id) if before.is_some_and(|known| !known.boot_id.is_empty() && known.boot_id != boot_id) => {
                    return "executor host restarted".to_owned();
                }
                Ok(_) if matches!(refusal, NotAttached::Answered(ExecutorError::OutcomeUnknown { .. })) => {
                    return "executor restarted".to_owned();
                }
                // It has been there all the time for all that is known, and kept the run for as long as it does.
                Ok(_) => window,
                Err(_elapsed) => window.max(begun.elapsed()),
            }
        }
    };
    format!("connection lost for longer than {}ms", lost_for.as_millis())
}

/// The executor's boot id, as soon as it answers.
async fn back(remote: &RemoteExecutor) -> String {
    loop {
        match remote.info().await {
            Ok(info) => return info.boot_id,
            Err(_not_yet) => tokio::time::sleep(PAUSE).await,
        }
    }
}
