//! What becomes of a run whose connection was lost: it is attached to again with its key, for as long as its executor keeps it;
//! and what a run is told whose caller has dropped it.

use std::time::Duration;

use executor_proto::{
    error::ExecutorError,
    types::OwnerId,
    v1::{self, executor_client::ExecutorClient},
};
use tokio::{runtime::Handle, sync::watch, time::Instant};
use tonic::{Request, Streaming};

use super::{
    super::{
        connect::{Sent, Wire},
        convert,
        error::Fault,
        retry::{self, Reached, Rpc},
    },
    RemoteExecutor,
};

/// How long the end of a run is asked for whose caller has dropped it. An executor that is not reached by then ends the run
/// when its own time for that is over.
const DROPPED: Duration = Duration::from_secs(5);

/// Why a run is not attached to again.
#[derive(Debug)]
pub(super) enum NotAttached {
    /// Its executor ends runs whose client has vanished.
    NotOffered,
    /// It was not reached for so long.
    LostFor(Duration),
    /// It has answered: this.
    Answered(ExecutorError),
}

/// Opens the stream of a run again. `fault` is how it was lost.
pub(super) async fn attach(
    remote: &RemoteExecutor,
    request: &v1::RunRequest,
    fault: &Fault,
) -> Result<Streaming<v1::RunEvent>, NotAttached> {
    if fault.reached() == Some(Reached::Answered) {
        return Err(NotAttached::NotOffered);
    }
    let lost = Instant::now();
    let patience = remote.patience();
    let Some(known) = remote.learn(lost + patience).await else { return Err(NotAttached::LostFor(patience)) };
    let window = known.resume_window;
    if window.is_zero() || !Rpc::Run.may_repeat(Reached::NoAnswer, known.features) {
        return Err(NotAttached::NotOffered);
    }
    let attempts = async {
        for failed in 1_u32.. {
            let sent = Sent::default();
            let mut attempt = Request::new(request.clone());
            attempt.extensions_mut().insert(sent.clone());
            match remote.client.clone().run(attempt).await {
                Ok(answer) => return Ok(answer.into_inner()),
                Err(status) => {
                    let fault = Fault::of(&status, &sent).on_behalf_of(&remote.peer);
                    match fault {
                        // There is no room for the request just now. That says nothing about the run, which goes on.
                        Fault::Answer(ExecutorError::OverLimit { .. }) => {}
                        Fault::Answer(_) | Fault::Untrusted { .. } => {
                            return Err(NotAttached::Answered(fault.into_error(Rpc::Run, &remote.endpoint)));
                        }
                        Fault::Lost { .. } | Fault::Silence { .. } => {}
                    }
                }
            }
            tokio::time::sleep(retry::wait(failed, crate::executor::backoff::jitter())).await;
        }
        Err(NotAttached::LostFor(window))
    };
    // Who learned only late how long the run is kept has a last try: it may still be there, or its end.
    let until = (lost + window).max(Instant::now() + remote.deadlines.connect.min(window));
    tokio::time::timeout_at(until, attempts).await.unwrap_or(Err(NotAttached::LostFor(window)))
}

/// Ends a run whose caller drops it: the executor would else wait for the caller to come back.
#[derive(Debug)]
pub(super) struct CancelOnDrop {
    client: ExecutorClient<Wire>,
    request: Option<v1::CancelRunRequest>,
    sent: Sent,
    accepted: watch::Receiver<bool>,
}

impl CancelOnDrop {
    /// Of the run with this key; `sent` is its request's.
    pub(super) fn new(
        remote: &RemoteExecutor,
        owner: Option<&OwnerId>,
        key: &str,
        sent: &Sent,
        accepted: watch::Receiver<bool>,
    ) -> Self {
        let request = v1::CancelRunRequest { caller: convert::caller(owner), key: key.to_owned() };
        Self { client: remote.client.clone(), request: Some(request), sent: sent.clone(), accepted }
    }

    /// The run is over, or its executor was told.
    pub(super) fn disarm(&mut self) {
        self.request = None;
    }
}

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        let Some(request) = self.request.take() else { return };
        // What was never sent needs no end. Without a runtime nobody can be told.
        if self.sent.withdraw() {
            return;
        }
        let Ok(runtime) = Handle::try_current() else { return };
        let (mut client, accepted) = (self.client.clone(), *self.accepted.borrow());
        runtime.spawn(tokio::time::timeout(DROPPED, async move {
            for failed in 1_u32.. {
                let outcome = client.cancel_run(request.clone()).await;
                // A request that overtook the run's own has found nothing, and is made again.
                let found =
                    |answer: &v1::CancelRunResponse| !answer.outcome.as_ref().is_some_and(|one| one.already_finished);
                if outcome.is_ok_and(|answer| accepted || found(answer.get_ref())) {
                    return;
                }
                tokio::time::sleep(retry::wait(failed, crate::executor::backoff::jitter())).await;
            }
        }));
    }
}
