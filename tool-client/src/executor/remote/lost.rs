//! Why the end of a run that had been started was not seen: one of the reasons that the contract lists.
//!
//! A connection that was cut says nothing about the other side, so the other side is asked. An executor that answers has
//! lost its server and has it again, on the same boot of its host or on another one.

use std::time::Duration;

use tokio::time::Instant;

use super::{
    super::{Executor, error::Fault},
    Known, RemoteExecutor,
};

/// Longest wait for an executor to answer again. It replaces a server that died within a fraction of it.
const BACK_WITHIN: Duration = Duration::from_secs(2);
/// Between two questions.
const PAUSE: Duration = Duration::from_millis(100);

/// The reason. `before` is what was known of the executor when the run began.
pub(super) async fn reason(remote: &RemoteExecutor, before: Option<&Known>, fault: &Fault) -> String {
    let window = before.map_or(Duration::ZERO, |known| known.resume_window);
    let begun = Instant::now();
    let waited = match fault {
        // It spoke, or it had its time: there is nothing to ask it.
        Fault::Answer(_) => Duration::ZERO,
        Fault::Silence { after, .. } => *after,
        Fault::Lost { .. } => match tokio::time::timeout(BACK_WITHIN.min(remote.deadlines.call), back(remote)).await {
            Ok(boot_id) => {
                let other = before.is_some_and(|known| !known.boot_id.is_empty() && known.boot_id != boot_id);
                return if other { "executor host restarted" } else { "executor restarted" }.to_owned();
            }
            Err(_elapsed) => begun.elapsed(),
        },
    };
    format!("connection lost for longer than {}ms", window.max(waited).as_millis())
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
