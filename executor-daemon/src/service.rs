//! The gRPC service: verify, convert, call one engine method, encode.
//!
//! Before a request gets here, [`edge`] has decided who is calling and put the tenant into the request. What a call
//! decided is one line in the log, see [`CallLog`].

pub(crate) mod auth;
mod call_log;
mod convert;
pub(crate) mod edge;
mod status;
mod streams;

#[cfg(fuzzing)]
pub use convert::fuzzing::requests;

use std::time::Duration;

use executor_proto::{
    MAX_DAEMON_MESSAGE_BYTES, MAX_REQUEST_BYTES,
    error::ExecutorError,
    types::TaskId,
    v1::{self, executor_server::ExecutorServer},
};
use futures_util::{StreamExt, stream};
use tokio::task::JoinError;
use tokio_util::task::TaskTracker;
use tonic::{Request, Response, Status};

use self::{
    call_log::{CallLog, outcome},
    edge::{Admitted, Line},
    streams::{EventStream, ReadOutputEvents, ReadStreamEvents, RunEvents, WatchEvents, events},
};
use crate::{
    crash::Point,
    engine::Engine,
    ids::{Caller, TenantId},
};

/// The service over an engine.
#[derive(Debug, Clone)]
pub(crate) struct Service {
    engine: Engine,
    heartbeat: Duration,
    calls: TaskTracker,
}

/// Makes the service. `calls` counts those that are under way, until the last event of their answer is taken.
pub(crate) fn service(engine: Engine, heartbeat: Duration, calls: TaskTracker) -> ExecutorServer<Service> {
    ExecutorServer::new(Service { engine, heartbeat, calls })
        .max_decoding_message_size(MAX_REQUEST_BYTES)
        .max_encoding_message_size(MAX_DAEMON_MESSAGE_BYTES)
}

impl Service {
    /// Takes a request apart into who is calling and what for, and begins the call's log line.
    fn open<T>(&self, rpc: &'static str, request: Request<T>) -> Result<(CallLog, TenantId, T), Status> {
        let (_, mut extensions, message) = request.into_parts();
        let peer = extensions.remove::<Line>().map(|line| line.peer);
        let admitted = extensions.remove::<Admitted>();
        let tenant = admitted.as_ref().map(|admitted| admitted.tenant.clone());
        let mut log = CallLog::new(rpc, peer, admitted, &self.calls);
        match tenant {
            Some(tenant) => Ok((log, tenant, message)),
            None => Err(log.refuse(&ExecutorError::Internal { problem: "a call without a tenant".to_owned() })),
        }
    }
}

/// Runs a start or an end in a task of its own, so that a client that goes away in the middle cannot leave it half done.
async fn whole<T: Send + 'static>(
    work: impl Future<Output = Result<T, ExecutorError>> + Send + 'static,
) -> Result<T, ExecutorError> {
    tokio::spawn(work)
        .await
        .unwrap_or_else(|lost: JoinError| Err(ExecutorError::Internal { problem: lost.to_string() }))
}

#[tonic::async_trait]
impl v1::executor_server::Executor for Service {
    type RunStream = EventStream<v1::RunEvent>;
    type ReadOutputStream = EventStream<v1::ReadOutputEvent>;
    type ListTasksStream = EventStream<v1::ListTasksResponse>;
    type WatchTasksStream = EventStream<v1::WatchTasksEvent>;
    type ReadStreamStream = EventStream<v1::ReadStreamEvent>;

    async fn get_info(&self, request: Request<v1::GetInfoRequest>) -> Result<Response<v1::GetInfoResponse>, Status> {
        let (mut log, tenant, v1::GetInfoRequest {}) = self.open("GetInfo", request)?;
        let info = convert::info(self.engine.info(&tenant));
        log.outcome("ok");
        Ok(Response::new(info))
    }

    async fn run(&self, request: Request<v1::RunRequest>) -> Result<Response<Self::RunStream>, Status> {
        let (mut log, tenant, message) = self.open("Run", request)?;
        let v1::RunRequest { caller, key, spec, stream_output, stdout_offset, stderr_offset } = message;
        // Who names an offset was told of the start before, so there is nothing to start.
        let only_attach = stdout_offset.is_some() || stderr_offset.is_some();
        let offsets = [stdout_offset, stderr_offset].map(Option::unwrap_or_default);
        let started = async {
            let caller = log.caller(convert::caller(tenant, caller)?)?;
            let key = convert::start_key(key)?;
            let spec = convert::command_spec(spec)?;
            log.command(&spec);
            let engine = self.engine.clone();
            whole(async move {
                match only_attach {
                    true => engine.attach(&caller, key, spec).await,
                    false => engine.run(&caller, key, spec).await,
                }
            })
            .await
        };
        match started.await {
            Ok(run) => {
                Point::StartReplied.pass();
                let from = stream_output.then_some(offsets);
                Ok(Response::new(events(RunEvents::new(run, from, self.heartbeat, log))))
            }
            Err(error) => Err(log.refuse(&error)),
        }
    }

    async fn cancel_run(
        &self,
        request: Request<v1::CancelRunRequest>,
    ) -> Result<Response<v1::CancelRunResponse>, Status> {
        let (mut log, tenant, v1::CancelRunRequest { caller, key }) = self.open("CancelRun", request)?;
        let cancelled = async {
            let caller = log.caller(convert::caller(tenant, caller)?)?;
            let key = convert::start_key(key)?;
            let engine = self.engine.clone();
            whole(async move { engine.cancel_run(&caller, &key).await }).await
        };
        match cancelled.await {
            Ok(killed) => {
                log.outcome(outcome::of_kill(&killed));
                Ok(Response::new(v1::CancelRunResponse { outcome: Some(convert::kill_outcome(killed)) }))
            }
            Err(error) => Err(log.refuse(&error)),
        }
    }

    async fn start_task(
        &self,
        request: Request<v1::StartTaskRequest>,
    ) -> Result<Response<v1::StartTaskResponse>, Status> {
        let (mut log, tenant, v1::StartTaskRequest { caller, key, spec }) = self.open("StartTask", request)?;
        let started = async {
            let caller = log.caller(convert::caller(tenant, caller)?)?;
            let key = convert::start_key(key)?;
            let spec = convert::command_spec(spec)?;
            log.command(&spec);
            let engine = self.engine.clone();
            whole(async move { engine.start_task(&caller, key, spec).await }).await
        };
        match started.await {
            Ok(id) => {
                Point::StartReplied.pass();
                let TaskId(task_id) = log.task(id);
                log.outcome("started");
                Ok(Response::new(v1::StartTaskResponse { task_id }))
            }
            Err(error) => Err(log.refuse(&error)),
        }
    }

    async fn read_output(
        &self,
        request: Request<v1::ReadOutputRequest>,
    ) -> Result<Response<Self::ReadOutputStream>, Status> {
        let (mut log, tenant, message) = self.open("ReadOutput", request)?;
        let v1::ReadOutputRequest { caller, task_id, read_id, wait_ms } = message;
        let asked = (|| {
            let caller = log.caller(convert::caller(tenant, caller)?)?;
            let id = log.task(convert::task_id(task_id));
            Ok((caller, id, convert::read_id(read_id)?, convert::wait(wait_ms)?))
        })();
        let (caller, id, read_id, wait) = asked.map_err(|error| log.refuse(&error))?;
        let engine = self.engine.clone();
        let read = async move { engine.read_output(&caller, &id, &read_id, wait).await };
        Ok(Response::new(events(ReadOutputEvents::begin(Box::pin(read), self.heartbeat, log).await?)))
    }

    async fn kill_task(&self, request: Request<v1::KillTaskRequest>) -> Result<Response<v1::KillTaskResponse>, Status> {
        let (mut log, tenant, v1::KillTaskRequest { caller, task_id }) = self.open("KillTask", request)?;
        let killed = async {
            let caller = log.caller(convert::caller(tenant, caller)?)?;
            let id = log.task(convert::task_id(task_id));
            let engine = self.engine.clone();
            whole(async move { engine.kill_task(&caller, &id).await }).await
        };
        match killed.await {
            Ok(killed) => {
                log.outcome(outcome::of_kill(&killed));
                Ok(Response::new(v1::KillTaskResponse { outcome: Some(convert::kill_outcome(killed)) }))
            }
            Err(error) => Err(log.refuse(&error)),
        }
    }

    async fn get_task(&self, request: Request<v1::GetTaskRequest>) -> Result<Response<v1::GetTaskResponse>, Status> {
        let (mut log, tenant, v1::GetTaskRequest { caller, task_id }) = self.open("GetTask", request)?;
        let found = async {
            let caller = log.caller(convert::caller(tenant, caller)?)?;
            let id = log.task(convert::task_id(task_id));
            self.engine.get_task(&caller, &id).await
        };
        match found.await {
            Ok(info) => {
                log.outcome("ok");
                Ok(Response::new(v1::GetTaskResponse { task: Some(convert::task_info(info)) }))
            }
            Err(error) => Err(log.refuse(&error)),
        }
    }

    async fn list_tasks(
        &self,
        request: Request<v1::ListTasksRequest>,
    ) -> Result<Response<Self::ListTasksStream>, Status> {
        let (mut log, tenant, v1::ListTasksRequest { caller }) = self.open("ListTasks", request)?;
        let caller: Caller = match convert::caller(tenant, caller).and_then(|caller| log.caller(caller)) {
            Ok(caller) => caller,
            Err(error) => return Err(log.refuse(&error)),
        };
        let tasks = self.engine.list_tasks(&caller).await.into_iter().map(convert::task_info);
        log.outcome("ok");
        // The log line is written, and the call counts as under way, until the last batch has been taken.
        let batches = streams::batches(tasks).into_iter().map(Ok);
        Ok(Response::new(
            stream::unfold((batches, log), |(mut batches, log)| async move {
                batches.next().map(|batch| (batch, (batches, log)))
            })
            .boxed(),
        ))
    }

    async fn watch_tasks(
        &self,
        request: Request<v1::WatchTasksRequest>,
    ) -> Result<Response<Self::WatchTasksStream>, Status> {
        let (mut log, tenant, v1::WatchTasksRequest { caller }) = self.open("WatchTasks", request)?;
        let caller = convert::caller(tenant, caller).and_then(|caller| log.caller(caller));
        let watch = caller.and_then(|caller| self.engine.watch_tasks(&caller));
        match watch {
            Ok(watch) => Ok(Response::new(events(WatchEvents::new(watch, self.heartbeat, log)))),
            Err(error) => Err(log.refuse(&error)),
        }
    }

    async fn ack_completions(
        &self,
        request: Request<v1::AckCompletionsRequest>,
    ) -> Result<Response<v1::AckCompletionsResponse>, Status> {
        let (mut log, tenant, message) = self.open("AckCompletions", request)?;
        let v1::AckCompletionsRequest { caller, up_to_sequence } = message;
        Point::CompletionDelivered.pass();
        let caller = convert::caller(tenant, caller).and_then(|caller| log.caller(caller));
        let acknowledged = caller.and_then(|caller| self.engine.ack_completions(&caller, up_to_sequence));
        match acknowledged {
            Ok(()) => {
                log.outcome("ok");
                Ok(Response::new(v1::AckCompletionsResponse {}))
            }
            Err(error) => Err(log.refuse(&error)),
        }
    }

    async fn read_stream(
        &self,
        request: Request<v1::ReadStreamRequest>,
    ) -> Result<Response<Self::ReadStreamStream>, Status> {
        let (mut log, tenant, message) = self.open("ReadStream", request)?;
        let v1::ReadStreamRequest { caller, task_id, stream, offset, follow } = message;
        let reader = (|| {
            let caller = log.caller(convert::caller(tenant, caller)?)?;
            let id = log.task(convert::task_id(task_id));
            self.engine.read_stream(&caller, &id, convert::stream_name(stream)?, offset, follow)
        })();
        match reader {
            Ok(reader) => Ok(Response::new(events(ReadStreamEvents::new(reader, self.heartbeat, log)))),
            Err(error) => Err(log.refuse(&error)),
        }
    }
}
