//! A foreground run over gRPC.
//!
//! ```text
//!               ┌──── attached again ────┐
//!               ▼                          │
//! opening ──Accepted──▶ running ──lost──▶ lost   an error before Accepted says whether the command can have run;
//!    │ lost, unsent        │               │     after it there is always a result
//!    │   → unavailable     │ Finished      │ not within the executor's window
//!    │ lost, sent, not     ▼               ▼
//!    │ found again       result          result with an unknown exit
//!    │   → outcome unknown
//! ```
//! An abort asks the executor to end the run, waits for its word that nothing is alive, and reads the stream to its end; all
//! of it within the executor's grace and a little more, so that an executor that does not answer keeps nobody waiting. What
//! was never sent needs no end. A run that is dropped is ended as by an abort, without waiting for it.

use std::{future::Future, pin::pin, time::Duration};

use bytes::Buf;
use executor_proto::{
    error::ExecutorError,
    types::{CommandSpec, Exit, KillOutcome, OwnerId, RunAccepted, RunResult, StreamChunk, StreamResult},
    v1::{self, executor_client::ExecutorClient, run_event::Event},
};
use tokio::{sync::watch, time::Instant};
use tokio_util::sync::CancellationToken;

use super::{
    super::{
        OutputSink,
        connect::{Sent, Wire},
        convert::{self, Malformed},
        error::Fault,
        retry::Rpc,
    },
    RemoteExecutor,
    attach::{CancelOnDrop, NotAttached, attach},
    check,
    incoming::{Gathered, Incoming, index},
    lost, random_name,
};

/// What an abort may take beyond the executor's grace. Below it where calls are to be answered sooner.
const ABORT_SPARE: Duration = Duration::from_secs(3);

/// What is known of a run so far.
#[derive(Debug, Default)]
struct Progress {
    accepted: Option<(RunAccepted, Instant)>,
    /// Offset after the last byte that has arrived, of stdout and stderr.
    received: [u64; 2],
    tails: Gathered,
    /// The stream was lost, and the next one begins with what was agreed again.
    begins_again: bool,
}

pub(super) async fn run(
    remote: &RemoteExecutor,
    owner: Option<&OwnerId>,
    spec: CommandSpec,
    abort: &CancellationToken,
    sink: Option<&mut dyn OutputSink>,
) -> Result<RunResult, ExecutorError> {
    check(&spec)?;
    let mut progress = Progress::default();
    if abort.is_cancelled() {
        return Ok(progress.aborted(Vec::new()));
    }
    let key = random_name();
    let request = v1::RunRequest {
        caller: convert::caller(owner),
        key: key.clone(),
        spec: Some(convert::spec(spec)),
        stream_output: sink.is_some(),
        stdout_offset: None,
        stderr_offset: None,
    };
    let sent = Sent::default();
    let (accepted, is_accepted) = watch::channel(false);
    let mut dropped = CancelOnDrop::new(remote, owner, &key, &sent, is_accepted.clone());
    let survivors = {
        let mut driven = pin!(drive(remote, request, &sent, accepted, &mut progress, sink));
        tokio::select! {
            biased;
            result = &mut driven => {
                dropped.disarm();
                return result;
            }
            () = abort.cancelled() => {}
        }
        if sent.withdraw() {
            let cause = "aborted before a connection was established".to_owned();
            return Err(ExecutorError::Unavailable { endpoint: remote.endpoint.clone(), cause });
        }
        let mut cancelled = pin!(cancel(remote, owner, key, is_accepted));
        let mut limit = pin!(abort_limit(remote));
        tokio::select! {
            biased;
            // It ended while it was being aborted. The executor's word that nothing is alive is still awaited.
            result = &mut driven => {
                let outcome = within(&mut limit, cancelled).await.and_then(Result::ok);
                if outcome.is_some() {
                    dropped.disarm();
                }
                return Ok(result?.after_abort(outcome.map(|outcome| outcome.survivors).unwrap_or_default()));
            }
            outcome = within(&mut limit, &mut cancelled) => match outcome {
                Some(Ok(outcome)) => {
                    dropped.disarm();
                    match within(&mut limit, driven).await {
                        Some(result) => return Ok(result?.after_abort(outcome.survivors)),
                        None => outcome.survivors,
                    }
                }
                // It could not be told to end the run in time. It is told for a little longer, without waiting for it.
                Some(Err(_)) | None => Vec::new(),
            },
        }
    };
    Ok(progress.aborted(survivors))
}

/// Passes when an abort has taken as long as it may. Where the executor's grace is not known it is asked for, but an executor
/// that does not answer gets no time for that.
async fn abort_limit(remote: &RemoteExecutor) {
    let begun = Instant::now();
    let spare = ABORT_SPARE.min(remote.deadlines.call);
    let grace = tokio::time::timeout(spare, remote.grace()).await.unwrap_or_else(|_elapsed| remote.known_grace());
    tokio::time::sleep_until(begun + grace + spare).await;
}

/// What a future brings before the limit passes.
async fn within<T>(limit: &mut (impl Future<Output = ()> + Unpin), future: impl Future<Output = T>) -> Option<T> {
    tokio::select! {
        biased;
        output = future => Some(output),
        () = limit => None,
    }
}

/// Asks for the end of a run, without a limit of its own. A request that overtook the run's own found nothing, and is made again once the run is known
/// to have been started.
async fn cancel(
    remote: &RemoteExecutor,
    owner: Option<&OwnerId>,
    key: String,
    mut is_accepted: watch::Receiver<bool>,
) -> Result<KillOutcome, ExecutorError> {
    let request = v1::CancelRunRequest { caller: convert::caller(owner), key };
    let make = |mut client: ExecutorClient<Wire>, request| async move {
        client.cancel_run(request).await.map(tonic::Response::into_inner)
    };
    let was_accepted = *is_accepted.borrow();
    loop {
        let v1::CancelRunResponse { outcome } =
            remote.call(Rpc::CancelRun, Duration::MAX, &Sent::default(), request.clone(), make).await?;
        let outcome = convert::kill_outcome(outcome).map_err(|malformed| remote.malformed(malformed))?;
        let overtook = outcome.already_finished && !was_accepted;
        // An error means that the run is over without ever having been started.
        if !overtook || is_accepted.changed().await.is_err() {
            return Ok(outcome);
        }
    }
}

/// Opens the stream and reads it to its end, attaching to the run again whenever the connection is lost.
async fn drive(
    remote: &RemoteExecutor,
    request: v1::RunRequest,
    sent: &Sent,
    accepted: watch::Sender<bool>,
    progress: &mut Progress,
    mut sink: Option<&mut dyn OutputSink>,
) -> Result<RunResult, ExecutorError> {
    let open = |mut client: ExecutorClient<Wire>, request| async move {
        client.run(request).await.map(tonic::Response::into_inner)
    };
    let before = remote.known().clone();
    let mut again = request.clone();
    let stream = remote.call(Rpc::Run, remote.deadlines.silence, sent, request, open).await?;
    let mut incoming = remote.incoming(Rpc::Run, stream);
    loop {
        let fault = match follow(&mut incoming, &accepted, progress, sink.as_deref_mut()).await? {
            Ok(result) => return Ok(*result),
            Err(fault) => fault,
        };
        if progress.accepted.is_some() {
            progress.lost(sink.is_some());
            // Whoever names offsets was told of the start, so that nothing is started again.
            again.stdout_offset = Some(progress.received[0]);
            again.stderr_offset = Some(progress.received[1]);
        }
        match (attach(remote, &again, &fault).await, progress.accepted.is_some()) {
            (Ok(stream), _) => incoming = remote.incoming(Rpc::Run, stream),
            (Err(NotAttached::Answered(error)), false) => {
                return Err(Fault::Answer(error)
                    .after_lost_attempt(Rpc::Run, "the connection was lost at its start")
                    .into_error(Rpc::Run, &remote.endpoint));
            }
            (Err(_), false) => return Err(incoming.error(fault)),
            (Err(refusal), true) => {
                return Ok(progress.unseen(lost::reason(remote, before.as_ref(), &fault, &refusal).await));
            }
        }
    }
}

/// Reads a stream to its end. The inner error is a connection's that failed.
async fn follow(
    incoming: &mut Incoming<v1::RunEvent>,
    accepted: &watch::Sender<bool>,
    progress: &mut Progress,
    mut sink: Option<&mut (dyn OutputSink + '_)>,
) -> Result<Result<Box<RunResult>, Fault>, ExecutorError> {
    loop {
        let event = match incoming.next().await {
            Ok(v1::RunEvent { event }) => event,
            Err(fault) => return Ok(Err(fault)),
        };
        match progress.take(event, sink.is_some()) {
            Ok(Step::Nothing) => {}
            Ok(Step::Accepted(agreed)) => {
                accepted.send_replace(true);
                if let Some(sink) = sink.as_deref_mut() {
                    sink.accepted(&agreed).await;
                }
            }
            Ok(Step::Output(chunk)) => {
                if let Some(sink) = sink.as_deref_mut() {
                    sink.output(chunk).await;
                }
            }
            Ok(Step::Finished(result)) => return Ok(Ok(result)),
            Err(malformed) => return Err(incoming.malformed(malformed)),
        }
    }
}

/// What an event asks for.
enum Step {
    Nothing,
    Accepted(RunAccepted),
    Output(StreamChunk),
    Finished(Box<RunResult>),
}

impl Progress {
    fn take(&mut self, event: Option<Event>, streams: bool) -> Result<Step, Malformed> {
        // An event that this client does not know is an addition to the protocol.
        let Some(event) = event else { return Ok(Step::Nothing) };
        let Some((agreed, _)) = &self.accepted else {
            return match event {
                Event::Accepted(message) => {
                    let agreed = convert::accepted(message)?;
                    self.accepted = Some((agreed.clone(), Instant::now()));
                    Ok(Step::Accepted(agreed))
                }
                Event::Heartbeat(v1::Heartbeat {}) => Ok(Step::Nothing),
                Event::Output(_) | Event::Tail(_) | Event::Finished(_) => Err(Malformed("output before the start")),
            };
        };
        match event {
            Event::Heartbeat(v1::Heartbeat {}) => Ok(Step::Nothing),
            Event::Accepted(message) if self.begins_again => {
                self.begins_again = false;
                let same = convert::accepted(message)?.run_id == agreed.run_id;
                if same { Ok(Step::Nothing) } else { Err(Malformed("another run")) }
            }
            Event::Accepted(_) => Err(Malformed("a second start")),
            Event::Output(message) if streams => {
                let mut chunk = convert::chunk(message)?;
                let received = &mut self.received[index(chunk.stream)];
                let end = chunk.offset + chunk.data.len() as u64;
                if end <= *received {
                    return Ok(Step::Nothing);
                }
                // Bytes that came before are not handed on twice.
                let doubled = usize::try_from(received.saturating_sub(chunk.offset)).unwrap_or(usize::MAX);
                chunk.data.advance(doubled.min(chunk.data.len()));
                chunk.offset = chunk.offset.max(*received);
                *received = end;
                Ok(Step::Output(chunk))
            }
            Event::Tail(message) if !streams => {
                let chunk = convert::chunk(message)?;
                self.received[index(chunk.stream)] = chunk.offset + chunk.data.len() as u64;
                self.tails.add(&chunk).map(|()| Step::Nothing)
            }
            Event::Output(_) | Event::Tail(_) => Err(Malformed("output that was not asked for")),
            Event::Finished(message) => {
                let mode = agreed.sandbox_mode;
                convert::finished(message, mode, self.tails.take()).map(|result| Step::Finished(Box::new(result)))
            }
        }
    }

    /// The stream was lost. Another one goes on with the output, but sends the tails from their start.
    fn lost(&mut self, streams: bool) {
        self.begins_again = true;
        if !streams {
            self.received = [0; 2];
            self.tails = Gathered::default();
        }
    }

    /// A run whose end was not seen, with the output that has arrived.
    fn unseen(&mut self, reason: String) -> RunResult {
        let [stdout_tail, stderr_tail] = self.tails.take();
        let [stdout_total, stderr_total] = self.received;
        let stream = |total: u64, tail: bytes::Bytes| StreamResult {
            total,
            dropped: total - tail.len() as u64,
            tail,
            spill: None,
        };
        RunResult {
            exit: Exit::Unknown(reason),
            timed_out_after_ms: None,
            ended_by: None,
            aborted: false,
            stdout: stream(stdout_total, stdout_tail),
            stderr: stream(stderr_total, stderr_tail),
            survivors: Vec::new(),
            leftovers: Vec::new(),
            sandbox_denied: None,
            duration_ms: self.accepted.as_ref().map_or(0.0, |(_, since)| since.elapsed().as_secs_f64() * 1000.0),
        }
    }

    /// An aborted run of which nothing more will be heard.
    fn aborted(&mut self, survivors: Vec<u32>) -> RunResult {
        self.unseen("aborted".to_owned()).after_abort(survivors)
    }
}

trait AfterAbort {
    /// The result of a run that was aborted before it was known, and the processes that the abort could not end.
    fn after_abort(self, survivors: Vec<u32>) -> Self;
}

impl AfterAbort for RunResult {
    fn after_abort(mut self, survivors: Vec<u32>) -> Self {
        self.aborted = true;
        self.survivors.extend(survivors);
        self.survivors.sort_unstable();
        self.survivors.dedup();
        self
    }
}
