//! The executor on another host, over gRPC.
//!
//! Each method makes one call of the protocol. What happens when its connection fails is decided by the table in `retry`
//! and put into words by `error`; how long it may take is in [`Deadlines`]. A foreground run is more than a call and has its
//! own file, `remote/run`.

use std::{
    fmt::Write as _,
    future::Future,
    net::SocketAddr,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use async_trait::async_trait;
use executor_proto::{
    MAX_REQUEST_BYTES,
    error::{ExecutorError, SizedPart},
    transport,
    types::{
        CommandSpec, ExecutorInfo, KillOutcome, OwnerId, ReadStreamEvent, RunResult, StreamName, TaskId, TaskInfo,
        TaskOutput, TaskStatus, WatchEvent,
    },
    v1::{self, executor_client::ExecutorClient},
};
use futures_core::{future::BoxFuture, stream::BoxStream};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Status, Streaming};

use super::{
    Executor, OutputSink, backoff,
    connect::{Access, ConnectError, Endpoint, Keepalive, Peer, Sent, Token, Wire},
    convert::{self, Malformed},
    error::Fault,
    retry::{self, Effect, Features, Reached, Rpc},
};

mod attach;
mod incoming;
mod lost;
mod reads;
mod run;

use incoming::{Gathered, Incoming, More, events};
use reads::Unanswered;

/// Largest message that is read. The daemon's own limit is a quarter of it.
const MAX_MESSAGE_BYTES: usize = 1024 * 1024;
/// Largest environment that is sent: what Linux takes at most for arguments and environment together.
const MAX_ENVIRONMENT_BYTES: usize = 6 * 1024 * 1024;
/// Longest time that a lost executor is looked for which has not said how long it keeps what is lost.
const DEFAULT_PATIENCE: Duration = Duration::from_secs(30);
/// SIGTERM to SIGKILL, where the daemon cannot be asked for its own.
const DEFAULT_GRACE: Duration = Duration::from_secs(3);

/// How long an executor may take before it is taken for lost.
#[derive(Debug, Clone, Copy)]
pub struct Deadlines {
    /// To connect. Default 5 s.
    pub connect: Duration,
    /// To answer a call; one that ends something has the daemon's grace on top. Default 30 s.
    pub call: Duration,
    /// To send anything on a stream. Default 45 s: three times the longest heartbeat that the protocol allows.
    pub silence: Duration,
}

impl Default for Deadlines {
    fn default() -> Self {
        Self { connect: transport::CONNECT_LIMIT, call: transport::CALL_LIMIT, silence: transport::LONGEST_SILENCE }
    }
}

/// An executor that is reached over gRPC. Connects when it is first called, and again after the connection was lost.
#[derive(Debug)]
pub struct RemoteExecutor {
    endpoint: String,
    client: ExecutorClient<Wire>,
    peer: Peer,
    deadlines: Deadlines,
    /// What the daemon last said of itself.
    known: Mutex<Option<Known>>,
    /// Reads that may have been answered.
    unanswered: Unanswered,
}

/// What a client remembers of a daemon.
#[derive(Debug, Clone)]
struct Known {
    grace: Duration,
    resume_window: Duration,
    features: Features,
    boot_id: String,
}

impl RemoteExecutor {
    /// The executor at an endpoint that is given as text, as the holder of a token; not for `https://`, which needs a CA
    /// ([`RemoteExecutor::new`]). Must be called inside a tokio runtime;
    /// connects nothing yet.
    ///
    /// # Errors
    /// The endpoint is not understood or the token cannot be sent.
    pub fn connect(endpoint: &str, token: Option<String>) -> Result<Self, ConnectError> {
        let token = token.as_deref().map(Token::new).transpose()?;
        Ok(Self::new(&Endpoint::parse(endpoint)?, token))
    }

    /// The executor at an endpoint, as the holder of a token or a certificate ([`Access`]). Must be called inside a tokio
    /// runtime; connects nothing yet.
    #[must_use]
    pub fn new(endpoint: &Endpoint, access: impl Into<Access>) -> Self {
        Self::with_deadlines(endpoint, access, Deadlines::default())
    }

    /// The same with other deadlines.
    #[must_use]
    pub fn with_deadlines(endpoint: &Endpoint, access: impl Into<Access>, deadlines: Deadlines) -> Self {
        Self::with_times(endpoint, access, deadlines, Keepalive::default())
    }

    /// The same with other deadlines and pings.
    #[must_use]
    pub fn with_times(
        endpoint: &Endpoint,
        access: impl Into<Access>,
        deadlines: Deadlines,
        keepalive: Keepalive,
    ) -> Self {
        Self::over(endpoint, None, access.into(), deadlines, keepalive)
    }

    /// At one of the addresses that an endpoint's name has, known to people by `name`.
    pub(super) fn at(endpoint: &Endpoint, address: Option<SocketAddr>, name: &str, access: Access) -> Self {
        let made = Self::over(endpoint, address, access, Deadlines::default(), Keepalive::default());
        Self { endpoint: name.to_owned(), ..made }
    }

    fn over(
        endpoint: &Endpoint,
        address: Option<SocketAddr>,
        access: Access,
        deadlines: Deadlines,
        keepalive: Keepalive,
    ) -> Self {
        let wire = Wire::new(endpoint, address, access, deadlines.connect, keepalive);
        let peer = wire.peer().clone();
        let client = ExecutorClient::new(wire)
            .max_decoding_message_size(MAX_MESSAGE_BYTES)
            .max_encoding_message_size(MAX_REQUEST_BYTES);
        Self {
            endpoint: endpoint.to_string(),
            client,
            peer,
            deadlines,
            known: Mutex::default(),
            unanswered: Unanswered::default(),
        }
    }

    /// Asks for one read until it is answered, or until that is hopeless.
    async fn read(
        &self,
        mut request: v1::ReadOutputRequest,
        wait: Option<Duration>,
    ) -> Result<TaskOutput, ExecutorError> {
        let until = wait.map(|wait| Instant::now() + wait);
        let open = |mut client: ExecutorClient<Wire>, request| async move {
            client.read_output(request).await.map(tonic::Response::into_inner)
        };
        let begun = Instant::now();
        let mut lost_since = None;
        for failed in 1_u32.. {
            let message = request.clone();
            let stream = self.call(Rpc::ReadOutput, self.deadlines.silence, &Sent::default(), message, open).await?;
            let mut incoming = self.incoming(Rpc::ReadOutput, stream);
            let fault = match task_output(&mut incoming).await? {
                Ok(output) => return Ok(output),
                Err(fault) => fault,
            };
            let since = *lost_since.get_or_insert_with(Instant::now);
            // The answer was lost on its way: the executor gives the same again for the same name.
            match self.pause_before_next(Rpc::ReadOutput, &fault, failed, begun, Some(since)).await {
                Some(pause) => tokio::time::sleep(pause).await,
                None => return Err(incoming.error(fault)),
            }
            request.wait_ms = until.map(|until| until.saturating_duration_since(Instant::now()).as_secs_f64() * 1000.0);
        }
        unreachable!("the attempts are counted without an end")
    }

    /// Makes a call, and makes it again where the retry table allows that. `sent` tells, at any time and also after this
    /// future was dropped, whether the request can have arrived.
    async fn call<M, T, F, Fut>(
        &self,
        rpc: Rpc,
        deadline: Duration,
        sent: &Sent,
        message: M,
        make: F,
    ) -> Result<T, ExecutorError>
    where
        M: Clone,
        F: Fn(ExecutorClient<Wire>, Request<M>) -> Fut,
        Fut: Future<Output = Result<T, Status>>,
    {
        let begun = Instant::now();
        let mut failed = 0;
        // Since when an attempt may have done something, and why nobody knows.
        let mut lost: Option<(Instant, String)> = None;
        loop {
            // What was sent stays sent: only a call of which no attempt was sent can be withdrawn.
            let attempt = if lost.is_some() { Sent::default() } else { sent.clone() };
            attempt.reset();
            let mut request = Request::new(message.clone());
            request.extensions_mut().insert(attempt.clone());
            let fault = match tokio::time::timeout(deadline, make(self.client.clone(), request)).await {
                Ok(Ok(answer)) => return Ok(answer),
                Ok(Err(status)) => Fault::of(&status, &attempt).on_behalf_of(&self.peer),
                Err(_elapsed) => Fault::Silence { after: deadline, sent: attempt.get() },
            };
            let fault = match &lost {
                Some((_, earlier)) => fault.after_lost_attempt(rpc, earlier),
                None => fault,
            };
            failed += 1;
            if let (Fault::Lost { cause, sent: true }, None) = (&fault, &lost) {
                lost = Some((Instant::now(), cause.clone()));
            }
            match self.pause_before_next(rpc, &fault, failed, begun, lost.as_ref().map(|(since, _)| *since)).await {
                Some(pause) => tokio::time::sleep(pause).await,
                None => return Err(fault.into_error(rpc, &self.endpoint)),
            }
        }
    }

    /// How long to wait before a call is made again that has failed so often; `None`: it is not.
    async fn pause_before_next(
        &self,
        rpc: Rpc,
        fault: &Fault,
        failed: u32,
        begun: Instant,
        lost_since: Option<Instant>,
    ) -> Option<Duration> {
        let reached = fault.reached()?;
        if let (Reached::NoAnswer, Some(since), Effect::Starts | Effect::Once) = (reached, lost_since, rpc.effect()) {
            // What it has done is remembered, if at all, for as long as the executor says.
            let known = self.learn(since + self.patience()).await;
            let (features, window) = known.map_or_else(Default::default, |known| (known.features, known.resume_window));
            let in_time = since.elapsed() < window.max(self.deadlines.connect);
            return (in_time && rpc.may_repeat(reached, features)).then(|| retry::wait(failed, backoff::jitter()));
        }
        // A host that swallows packets has had its chance when the first attempt took as long as connecting may.
        let in_time = begun.elapsed() < self.deadlines.connect;
        let again = in_time && rpc.may_repeat(reached, Features::default());
        retry::pause(failed, backoff::jitter()).filter(|_| again)
    }

    /// What the executor has said of itself, once; asked for until then. `None`: it did not answer. Boxed, since asking is a
    /// call too, which may come here.
    fn learn(&self, until: Instant) -> BoxFuture<'_, Option<Known>> {
        Box::pin(async move {
            let asked = async {
                for failed in 1_u32.. {
                    if self.known().is_some() || self.info().await.is_ok() {
                        break;
                    }
                    tokio::time::sleep(retry::wait(failed, backoff::jitter())).await;
                }
            };
            // Without an answer it stays unknown.
            let _ = tokio::time::timeout_at(until, asked).await;
            self.known().clone()
        })
    }

    /// How long an executor is looked for of which nothing is known.
    fn patience(&self) -> Duration {
        DEFAULT_PATIENCE.min(self.deadlines.call)
    }

    /// A call with one answer, within the usual deadline.
    async fn unary<M, T, F, Fut>(&self, rpc: Rpc, message: M, make: F) -> Result<T, ExecutorError>
    where
        M: Clone,
        F: Fn(ExecutorClient<Wire>, Request<M>) -> Fut,
        Fut: Future<Output = Result<tonic::Response<T>, Status>>,
    {
        let make = |client, request| {
            let answer = make(client, request);
            async { answer.await.map(tonic::Response::into_inner) }
        };
        self.call(rpc, self.deadlines.call, &Sent::default(), message, make).await
    }

    /// A call that ends something: it may take the daemon's grace on top. The grace is asked for while the call is under way,
    /// so that it delays nothing.
    async fn ending<M, T, F, Fut>(&self, rpc: Rpc, message: M, make: F) -> Result<T, ExecutorError>
    where
        M: Clone,
        F: Fn(ExecutorClient<Wire>, Request<M>) -> Fut,
        Fut: Future<Output = Result<T, Status>>,
    {
        let limit = async {
            let allowed = self.grace().await + self.deadlines.call;
            tokio::time::sleep(allowed).await;
            allowed
        };
        let sent = Sent::default();
        tokio::select! {
            answer = self.call(rpc, Duration::MAX, &sent, message, make) => answer,
            allowed = limit => Err(Fault::Silence { after: allowed, sent: sent.get() }.into_error(rpc, &self.endpoint)),
        }
    }

    /// The daemon's grace, which is asked for where it is not known yet.
    async fn grace(&self) -> Duration {
        if self.known().is_none() {
            // Without an answer it stays unknown.
            let _ = self.info().await;
        }
        self.known_grace()
    }

    fn known_grace(&self) -> Duration {
        self.known().as_ref().map_or(DEFAULT_GRACE, |known| known.grace)
    }

    fn known(&self) -> MutexGuard<'_, Option<Known>> {
        // A value is put there whole, so it is good whatever happened to who put it there.
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn malformed(&self, malformed: Malformed) -> ExecutorError {
        ExecutorError::Unavailable { endpoint: self.endpoint.clone(), cause: malformed.to_string() }
    }

    /// The rest of a stream that was opened by `rpc`.
    fn incoming<T>(&self, rpc: Rpc, stream: Streaming<T>) -> Incoming<T> {
        Incoming { rpc, stream, endpoint: self.endpoint.clone(), silence: self.deadlines.silence }
    }
}

/// The rest of a read. The inner error is a connection's that failed.
async fn task_output(incoming: &mut Incoming<v1::ReadOutputEvent>) -> Result<Result<TaskOutput, Fault>, ExecutorError> {
    use v1::read_output_event::Event;
    let mut gathered = Gathered::default();
    loop {
        let v1::ReadOutputEvent { event } = match incoming.next().await {
            Ok(event) => event,
            Err(fault) => return Ok(Err(fault)),
        };
        match event {
            Some(Event::Chunk(chunk)) => convert::chunk(chunk)
                .and_then(|chunk| gathered.add(&chunk))
                .map_err(|malformed| incoming.malformed(malformed))?,
            // An event that this client does not know is an addition to the protocol.
            Some(Event::Heartbeat(v1::Heartbeat {})) | None => {}
            Some(Event::Status(status)) => {
                let output = convert::task_output(status, gathered.take());
                return output.map(Ok).map_err(|malformed| incoming.malformed(malformed));
            }
        }
    }
}

/// 128 random bits as text: a name that nobody else has chosen.
fn random_name() -> String {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).expect("the kernel's random numbers are always there");
    bytes.iter().fold(String::with_capacity(32), |mut name, byte| {
        let _ = write!(name, "{byte:02x}");
        name
    })
}

/// What the executor would refuse is not sent.
fn check(spec: &CommandSpec) -> Result<(), ExecutorError> {
    spec.check()?;
    let bytes: usize = spec.environment.iter().map(|variable| variable.name.len() + variable.value.len() + 2).sum();
    if bytes > MAX_ENVIRONMENT_BYTES {
        return Err(ExecutorError::TooLarge {
            part: SizedPart::Environment,
            name: None,
            bytes: bytes as u64,
            limit: MAX_ENVIRONMENT_BYTES as u64,
        });
    }
    Ok(())
}

#[async_trait]
impl Executor for RemoteExecutor {
    fn endpoint(&self) -> &str {
        &self.endpoint
    }

    async fn info(&self) -> Result<ExecutorInfo, ExecutorError> {
        let make = |mut client: ExecutorClient<Wire>, request| async move { client.get_info(request).await };
        let info = self.unary(Rpc::GetInfo, v1::GetInfoRequest {}, make).await.map(convert::info)?;
        *self.known() = Some(Known {
            grace: Duration::from_millis(info.grace_ms),
            resume_window: Duration::from_millis(info.resume_window_ms),
            features: Features::of(&info.features),
            boot_id: info.boot_id.clone(),
        });
        Ok(info)
    }

    async fn run(
        &self,
        owner: Option<&OwnerId>,
        spec: CommandSpec,
        abort: &CancellationToken,
        sink: Option<&mut dyn OutputSink>,
    ) -> Result<RunResult, ExecutorError> {
        run::run(self, owner, spec, abort, sink).await
    }

    async fn start_task(&self, owner: Option<&OwnerId>, spec: CommandSpec) -> Result<TaskId, ExecutorError> {
        check(&spec)?;
        let request = v1::StartTaskRequest {
            caller: convert::caller(owner),
            key: random_name(),
            spec: Some(convert::spec(spec)),
        };
        let make = |mut client: ExecutorClient<Wire>, request| async move { client.start_task(request).await };
        let v1::StartTaskResponse { task_id } = self.unary(Rpc::StartTask, request, make).await?;
        Ok(TaskId(task_id))
    }

    async fn read_output(
        &self,
        owner: Option<&OwnerId>,
        id: &TaskId,
        wait: Option<Duration>,
    ) -> Result<TaskOutput, ExecutorError> {
        let read = self.unanswered.begin(owner, id);
        let request = v1::ReadOutputRequest {
            caller: convert::caller(owner),
            task_id: id.0.clone(),
            read_id: read.name(),
            wait_ms: wait.map(|wait| wait.as_secs_f64() * 1000.0),
        };
        let output = self.read(request, wait).await;
        if !matches!(output, Err(ExecutorError::Unavailable { .. } | ExecutorError::OutcomeUnknown { .. })) {
            read.answered();
        }
        output
    }

    async fn kill_task(&self, owner: Option<&OwnerId>, id: &TaskId) -> Result<KillOutcome, ExecutorError> {
        let request = v1::KillTaskRequest { caller: convert::caller(owner), task_id: id.0.clone() };
        let attempts = AtomicU32::new(0);
        let make = |mut client: ExecutorClient<Wire>, request| {
            attempts.fetch_add(1, Ordering::Relaxed);
            async move { client.kill_task(request).await.map(tonic::Response::into_inner) }
        };
        let v1::KillTaskResponse { outcome } = self.ending(Rpc::KillTask, request, make).await?;
        let mut outcome = convert::kill_outcome(outcome).map_err(|malformed| self.malformed(malformed))?;
        // An attempt whose answer was lost may be what has ended it.
        if outcome.already_finished && attempts.load(Ordering::Relaxed) > 1 {
            let status = self.get_task(owner, id).await?.status;
            outcome.already_finished = !matches!(status, TaskStatus::Killed(_));
        }
        Ok(outcome)
    }

    async fn get_task(&self, owner: Option<&OwnerId>, id: &TaskId) -> Result<TaskInfo, ExecutorError> {
        let request = v1::GetTaskRequest { caller: convert::caller(owner), task_id: id.0.clone() };
        let make = |mut client: ExecutorClient<Wire>, request| async move { client.get_task(request).await };
        let v1::GetTaskResponse { task } = self.unary(Rpc::GetTask, request, make).await?;
        task.ok_or(Malformed("no task")).and_then(convert::task_info).map_err(|malformed| self.malformed(malformed))
    }

    async fn list_tasks(&self, owner: Option<&OwnerId>) -> Result<Vec<TaskInfo>, ExecutorError> {
        let request = v1::ListTasksRequest { caller: convert::caller(owner) };
        // The whole list belongs to the call, so that a cut in the middle of it repeats all of it.
        let make = |mut client: ExecutorClient<Wire>, request| async move {
            let mut pages = client.list_tasks(request).await?.into_inner();
            let mut listed = Vec::new();
            while let Some(v1::ListTasksResponse { tasks }) = pages.message().await? {
                listed.extend(tasks);
            }
            Ok(listed)
        };
        let listed = self.call(Rpc::ListTasks, self.deadlines.call, &Sent::default(), request, make).await?;
        listed
            .into_iter()
            .map(convert::task_info)
            .collect::<Result<_, _>>()
            .map_err(|malformed| self.malformed(malformed))
    }

    async fn watch_tasks(
        &self,
        owner: &OwnerId,
    ) -> Result<BoxStream<'static, Result<WatchEvent, ExecutorError>>, ExecutorError> {
        let request = v1::WatchTasksRequest { caller: convert::caller(Some(owner)) };
        let make = |mut client: ExecutorClient<Wire>, request| async move { client.watch_tasks(request).await };
        let stream = self.unary(Rpc::WatchTasks, request, make).await?;
        Ok(events(self.incoming(Rpc::WatchTasks, stream), |v1::WatchTasksEvent { event }| {
            Ok(match event {
                Some(v1::watch_tasks_event::Event::Completion(completion)) => {
                    Some((WatchEvent::Completion(convert::completion(completion)?), More::Follows))
                }
                Some(v1::watch_tasks_event::Event::CaughtUp(v1::watch_tasks_event::CaughtUp {})) => {
                    Some((WatchEvent::CaughtUp, More::Follows))
                }
                Some(v1::watch_tasks_event::Event::Heartbeat(v1::Heartbeat {})) | None => None,
            })
        }))
    }

    async fn ack_completions(&self, owner: &OwnerId, up_to: u64) -> Result<(), ExecutorError> {
        let request = v1::AckCompletionsRequest { caller: convert::caller(Some(owner)), up_to_sequence: up_to };
        let make = |mut client: ExecutorClient<Wire>, request| async move { client.ack_completions(request).await };
        let v1::AckCompletionsResponse {} = self.unary(Rpc::AckCompletions, request, make).await?;
        Ok(())
    }

    async fn read_stream(
        &self,
        owner: Option<&OwnerId>,
        id: &TaskId,
        stream: StreamName,
        offset: u64,
        follow: bool,
    ) -> Result<BoxStream<'static, Result<ReadStreamEvent, ExecutorError>>, ExecutorError> {
        let request = v1::ReadStreamRequest {
            caller: convert::caller(owner),
            task_id: id.0.clone(),
            stream: convert::stream_name(stream).into(),
            offset,
            follow,
        };
        let make = |mut client: ExecutorClient<Wire>, request| async move { client.read_stream(request).await };
        let stream = self.unary(Rpc::ReadStream, request, make).await?;
        Ok(events(self.incoming(Rpc::ReadStream, stream), |v1::ReadStreamEvent { event }| {
            Ok(match event {
                Some(v1::read_stream_event::Event::Chunk(chunk)) => {
                    Some((ReadStreamEvent::Chunk(convert::chunk(chunk)?), More::Follows))
                }
                Some(v1::read_stream_event::Event::End(v1::StreamEnd { total, closed })) => {
                    Some((ReadStreamEvent::End { total, closed }, More::Ends))
                }
                Some(v1::read_stream_event::Event::Heartbeat(v1::Heartbeat {})) | None => None,
            })
        }))
    }
}
