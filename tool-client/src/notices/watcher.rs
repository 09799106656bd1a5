//! The watcher of one owner. Its states are drawn in the module above.

use std::{sync::Arc, time::Duration};

use executor_proto::types::{Completion, OwnerId, WatchEvent};
use futures_core::stream::BoxStream;
use futures_util::{FutureExt, StreamExt};
use tokio::{sync::watch, time::Instant};
use tokio_util::sync::CancellationToken;

use super::{AgentRegistry, Notice, memory::Delivered};
use crate::{
    executor::{
        Executor, ExecutorError,
        backoff::{self, Backoff},
    },
    text,
};

/// How long what is acknowledged may take after the watcher was told to stop: an owner must not wait long for its detaching,
/// and a completion that comes again is known.
const ACKNOWLEDGE_AFTER_STOP: Duration = Duration::from_secs(1);

/// How soon a stream that ended is opened again. Short enough that a cut is not noticed, long enough that a thousand clients
/// do not keep a daemon from starting.
pub(super) const PACE: Backoff = Backoff { first: Duration::from_millis(100), longest: Duration::from_secs(5) };

#[derive(Debug)]
pub(super) struct Watcher {
    pub(super) executor: Arc<dyn Executor>,
    pub(super) registry: Arc<dyn AgentRegistry>,
    pub(super) owner: OwnerId,
    pub(super) pace: Backoff,
    pub(super) stop: CancellationToken,
    pub(super) attachments: watch::Receiver<u64>,
}

/// Why a stream is no longer read.
enum Ended {
    /// The watcher was told to stop.
    Stopped,
    /// The registry did not take a notice.
    Parked,
    /// The stream ended, or did not open, with this error if there was one.
    Cut { was: Opened, error: Option<ExecutorError> },
}

/// What became of an attempt to watch.
#[derive(Debug, Clone, Copy)]
enum Opened {
    No,
    /// Open for so long.
    For {
        time: Duration,
        brought_any: bool,
    },
}

impl Opened {
    /// Whether it counts as a failure: it did not open, or brought nothing and did not even last for a pause.
    fn failed(self, pause: Duration) -> bool {
        match self {
            Self::No => true,
            Self::For { time, brought_any } => !brought_any && time <= pause,
        }
    }
}

type Events = BoxStream<'static, Result<WatchEvent, ExecutorError>>;

impl Watcher {
    /// Runs until it is told to stop. A delivery that is under way then is finished first.
    pub(super) async fn run(mut self, delivered: &mut Delivered) {
        let stop = self.stop.clone();
        let mut failures = 0_u32;
        loop {
            let opened = tokio::select! {
                biased;
                () = stop.cancelled() => return,
                opened = self.executor.watch_tasks(&self.owner) => opened,
            };
            let ended = match opened {
                Ok(events) => self.watch(events, delivered).await,
                Err(error) => Ended::Cut { was: Opened::No, error: Some(error) },
            };
            match ended {
                Ended::Stopped => return,
                Ended::Parked => {
                    failures = 0;
                    tokio::select! {
                        biased;
                        () = stop.cancelled() => return,
                        changed = self.attachments.changed() => if changed.is_err() { return },
                    }
                }
                Ended::Cut { was, error } => {
                    let failed = was.failed(self.pace.ceiling(failures.max(1)));
                    failures = if failed { failures.saturating_add(1) } else { 1 };
                    if failures == 1 {
                        let error = error.map_or_else(|| "the stream ended".to_owned(), |error| error.to_string());
                        tracing::debug!(owner = %self.owner, error, "watching for completions again");
                    }
                    let pause = self.pace.pause(failures, backoff::jitter());
                    tokio::select! {
                        biased;
                        () = stop.cancelled() => return,
                        () = tokio::time::sleep(pause) => {}
                    }
                }
            }
        }
    }

    /// Reads one stream to its end, delivers, and acknowledges when nothing more is ready. An acknowledgement that fails is
    /// made good by the next one, or by the next stream, on which the completion comes again.
    async fn watch(&mut self, mut events: Events, delivered: &mut Delivered) -> Ended {
        let stop = self.stop.clone();
        let opened_at = Instant::now();
        let (mut brought_any, mut unacknowledged) = (false, None);
        loop {
            let ready = if stop.is_cancelled() { None } else { events.next().now_or_never() };
            let next = match ready {
                Some(next) => next,
                None => {
                    if let Some(up_to) = unacknowledged.take() {
                        self.acknowledge(up_to).await;
                        continue;
                    }
                    tokio::select! {
                        biased;
                        () = stop.cancelled() => return Ended::Stopped,
                        next = events.next() => next,
                    }
                }
            };
            let completion = match next {
                Some(Ok(WatchEvent::Completion(completion))) => completion,
                Some(Ok(WatchEvent::CaughtUp)) => continue,
                Some(Err(error)) => {
                    let was = Opened::For { time: opened_at.elapsed(), brought_any };
                    return Ended::Cut { was, error: Some(error) };
                }
                None => {
                    return Ended::Cut { was: Opened::For { time: opened_at.elapsed(), brought_any }, error: None };
                }
            };
            brought_any = true;
            if !self.deliver(&completion, delivered).await {
                if let Some(up_to) = unacknowledged {
                    self.acknowledge(up_to).await;
                }
                return Ended::Parked;
            }
            unacknowledged = Some(completion.sequence);
        }
    }

    /// Whether a completion has been delivered, now or before.
    async fn deliver(&mut self, completion: &Completion, delivered: &mut Delivered) -> bool {
        if delivered.contains(completion) {
            return true;
        }
        // Marked as seen before the registry is asked: an attachment that comes while it answers ends the parking.
        self.attachments.borrow_and_update();
        let notice = Notice {
            owner: self.owner.clone(),
            task_id: completion.task_id.clone(),
            sequence: completion.sequence,
            text: text::task::notice(&completion.task_id, &completion.status),
        };
        let taken = self.registry.deliver(notice).await;
        if taken {
            delivered.insert(completion);
        }
        taken
    }

    async fn acknowledge(&self, up_to: u64) {
        let too_late = async {
            self.stop.cancelled().await;
            tokio::time::sleep(ACKNOWLEDGE_AFTER_STOP).await;
        };
        tokio::select! {
            biased;
            acknowledged = self.executor.ack_completions(&self.owner, up_to) => if let Err(error) = acknowledged {
                tracing::debug!(owner = %self.owner, up_to, %error, "an acknowledgement failed");
            },
            () = too_late => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_did_not_open_or_was_over_at_once_is_a_failure() {
        let pause = Duration::from_millis(100);
        let open = |millis, brought_any| Opened::For { time: Duration::from_millis(millis), brought_any };
        assert!(Opened::No.failed(pause), "however long it took");
        assert!(open(0, false).failed(pause) && open(100, false).failed(pause));
        assert!(!open(0, true).failed(pause), "it brought something");
        assert!(!open(101, false).failed(pause), "it lasted");
    }
}
