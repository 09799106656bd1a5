//! A daemon that does what a test says, behind a wire that a test can cut or freeze.

use std::{
    collections::VecDeque,
    path::{Path, PathBuf},
    pin::Pin,
    sync::{Arc, Mutex},
};

use bytes::Bytes;
use executor_proto::v1::{self, executor_server};
use futures_core::Stream;
use tokio::{
    net::{UnixListener, UnixStream},
    sync::{mpsc, oneshot, watch},
};
use tokio_stream::wrappers::{ReceiverStream, UnixListenerStream};
use tonic::{Request, Response, Status};

pub(crate) type Events<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// What the fake does with the calls of one kind, one entry per call; `None` in an answer leaves the call without one.
#[derive(Default)]
pub(crate) struct Script {
    pub(crate) info: VecDeque<Result<v1::GetInfoResponse, Status>>,
    pub(crate) starts: VecDeque<Option<Result<v1::StartTaskResponse, Status>>>,
    pub(crate) runs: VecDeque<Result<Vec<v1::RunEvent>, Status>>,
    pub(crate) reads: VecDeque<Vec<v1::ReadOutputEvent>>,
    pub(crate) kills: VecDeque<v1::KillOutcome>,
    /// Not given: the list is not to be had.
    pub(crate) lists: VecDeque<Vec<v1::TaskInfo>>,
    pub(crate) watches: VecDeque<Vec<v1::WatchTasksEvent>>,
    /// For stdout and stderr. Not given: a chunk that is too large.
    pub(crate) streams: Option<[Vec<v1::ReadStreamEvent>; 2]>,
    /// Goes to the open run when it is cancelled, before the reply.
    pub(crate) on_cancel: Vec<v1::RunEvent>,
    pub(crate) cancels: VecDeque<v1::KillOutcome>,
}

/// What the fake has seen.
#[derive(Debug, Default, Clone)]
pub(crate) struct Seen {
    pub(crate) calls: Vec<&'static str>,
    pub(crate) keys: Vec<String>,
    pub(crate) specs: Vec<v1::CommandSpec>,
    pub(crate) owners: Vec<Option<String>>,
    pub(crate) acknowledged: Vec<u64>,
    pub(crate) metadata: Vec<tonic::metadata::MetadataMap>,
}

struct State {
    script: Mutex<Script>,
    seen: watch::Sender<Seen>,
    /// Events that are sent into the run that is open.
    open_run: Mutex<Option<mpsc::Sender<Result<v1::RunEvent, Status>>>>,
    heartbeat: Option<std::time::Duration>,
}

#[derive(Clone)]
struct Fake(Arc<State>);

impl Fake {
    fn see(&self, call: &'static str, key: Option<&str>, metadata: &tonic::metadata::MetadataMap) {
        self.0.seen.send_modify(|seen| {
            seen.calls.push(call);
            seen.keys.extend(key.map(str::to_owned));
            seen.metadata.push(metadata.clone());
        });
    }

    fn see_start(&self, caller: &Option<v1::Caller>, spec: &Option<v1::CommandSpec>) {
        self.0.seen.send_modify(|seen| {
            seen.owners.push(caller.as_ref().and_then(|caller| caller.owner.clone()));
            seen.specs.extend(spec.clone());
        });
    }

    fn script<T>(&self, take: impl FnOnce(&mut Script) -> T) -> T {
        take(&mut self.0.script.lock().expect("no test panics while it holds this"))
    }
}

#[tonic::async_trait]
impl executor_server::Executor for Fake {
    type RunStream = Events<v1::RunEvent>;
    type ReadOutputStream = Events<v1::ReadOutputEvent>;
    type ListTasksStream = Events<v1::ListTasksResponse>;
    type WatchTasksStream = Events<v1::WatchTasksEvent>;
    type ReadStreamStream = Events<v1::ReadStreamEvent>;

    async fn get_info(&self, request: Request<v1::GetInfoRequest>) -> Result<Response<v1::GetInfoResponse>, Status> {
        self.see("GetInfo", None, request.metadata());
        self.script(|script| script.info.pop_front())
            .unwrap_or_else(|| Ok(v1::GetInfoResponse::default()))
            .map(Response::new)
    }

    async fn run(&self, request: Request<v1::RunRequest>) -> Result<Response<Self::RunStream>, Status> {
        let events = self.script(|script| script.runs.pop_front()).expect("the test expects this run");
        let (sender, receiver) = mpsc::channel(64);
        for event in events.clone().unwrap_or_default() {
            sender.try_send(Ok(event)).expect("a script is short");
        }
        if let Some(interval) = self.0.heartbeat {
            let beating = sender.clone();
            tokio::spawn(async move {
                let beat = v1::RunEvent { event: Some(v1::run_event::Event::Heartbeat(v1::Heartbeat {})) };
                while beating.send(Ok(beat.clone())).await.is_ok() {
                    tokio::time::sleep(interval).await;
                }
            });
        }
        *self.0.open_run.lock().expect("not poisoned") = Some(sender);
        let v1::RunRequest { caller, spec, .. } = request.get_ref();
        self.see_start(caller, spec);
        // Seen only now, so that a test which waits for the call finds the run open.
        self.see("Run", Some(&request.get_ref().key), request.metadata());
        events.map(|_| Response::new(Box::pin(ReceiverStream::new(receiver)) as Self::RunStream))
    }

    async fn cancel_run(
        &self,
        request: Request<v1::CancelRunRequest>,
    ) -> Result<Response<v1::CancelRunResponse>, Status> {
        self.see("CancelRun", Some(&request.get_ref().key), request.metadata());
        let outcome = self.script(|script| script.cancels.pop_front()).unwrap_or_default();
        if !outcome.already_finished {
            let open = self.0.open_run.lock().expect("not poisoned").clone().expect("a run is open");
            for event in self.script(|script| std::mem::take(&mut script.on_cancel)) {
                open.send(Ok(event)).await.expect("the client listens");
            }
        }
        Ok(Response::new(v1::CancelRunResponse { outcome: Some(outcome) }))
    }

    async fn start_task(
        &self,
        request: Request<v1::StartTaskRequest>,
    ) -> Result<Response<v1::StartTaskResponse>, Status> {
        let v1::StartTaskRequest { caller, spec, .. } = request.get_ref();
        self.see_start(caller, spec);
        self.see("StartTask", Some(&request.get_ref().key), request.metadata());
        match self.script(|script| script.starts.pop_front()).expect("the test expects this start") {
            Some(answer) => answer.map(Response::new),
            None => std::future::pending().await,
        }
    }

    async fn read_output(
        &self,
        request: Request<v1::ReadOutputRequest>,
    ) -> Result<Response<Self::ReadOutputStream>, Status> {
        self.see("ReadOutput", Some(&request.get_ref().read_id), request.metadata());
        let events = self.script(|script| script.reads.pop_front()).expect("the test expects this read");
        Ok(Response::new(Box::pin(tokio_stream::iter(events.into_iter().map(Ok)))))
    }

    async fn kill_task(&self, request: Request<v1::KillTaskRequest>) -> Result<Response<v1::KillTaskResponse>, Status> {
        self.see("KillTask", None, request.metadata());
        match self.script(|script| script.kills.pop_front()) {
            Some(outcome) => Ok(Response::new(v1::KillTaskResponse { outcome: Some(outcome) })),
            None => std::future::pending().await,
        }
    }

    async fn get_task(&self, request: Request<v1::GetTaskRequest>) -> Result<Response<v1::GetTaskResponse>, Status> {
        self.see("GetTask", None, request.metadata());
        Err(Status::unimplemented("not here"))
    }

    async fn list_tasks(
        &self,
        request: Request<v1::ListTasksRequest>,
    ) -> Result<Response<Self::ListTasksStream>, Status> {
        self.see("ListTasks", None, request.metadata());
        let tasks = self.script(|script| script.lists.pop_front()).ok_or_else(|| Status::unavailable("not now"))?;
        let pages = tasks.into_iter().map(|task| Ok(v1::ListTasksResponse { tasks: vec![task] }));
        Ok(Response::new(Box::pin(tokio_stream::iter(pages.collect::<Vec<_>>()))))
    }

    async fn watch_tasks(
        &self,
        request: Request<v1::WatchTasksRequest>,
    ) -> Result<Response<Self::WatchTasksStream>, Status> {
        self.see("WatchTasks", None, request.metadata());
        let events = self.script(|script| script.watches.pop_front()).unwrap_or_default();
        Ok(Response::new(Box::pin(tokio_stream::iter(events.into_iter().map(Ok)))))
    }

    async fn ack_completions(
        &self,
        request: Request<v1::AckCompletionsRequest>,
    ) -> Result<Response<v1::AckCompletionsResponse>, Status> {
        self.see("AckCompletions", None, request.metadata());
        self.0.seen.send_modify(|seen| seen.acknowledged.push(request.get_ref().up_to_sequence));
        Ok(Response::new(v1::AckCompletionsResponse {}))
    }

    async fn read_stream(
        &self,
        request: Request<v1::ReadStreamRequest>,
    ) -> Result<Response<Self::ReadStreamStream>, Status> {
        self.see("ReadStream", None, request.metadata());
        let stream = usize::from(request.get_ref().stream == i32::from(v1::StreamName::Stderr));
        let events = self.script(|script| script.streams.as_mut().map(|streams| std::mem::take(&mut streams[stream])));
        let events = events.unwrap_or_else(|| {
            let oversize = v1::StreamChunk { stream: 1, offset: 0, data: Bytes::from(vec![0; 2 << 20]) };
            vec![v1::ReadStreamEvent { event: Some(v1::read_stream_event::Event::Chunk(oversize)) }]
        });
        Ok(Response::new(Box::pin(tokio_stream::iter(events.into_iter().map(Ok)))))
    }
}

/// How the wire in front of the daemon behaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WireMode {
    Forward,
    /// Bytes stop, connections stay: a half-open socket.
    Frozen,
    /// Connections are closed, new ones too.
    Cut,
}

/// The daemon and the wire, on a Unix socket of their own. Everything ends when it is dropped.
pub(crate) struct Daemon {
    dir: tempfile::TempDir,
    state: Arc<State>,
    wire: watch::Sender<WireMode>,
    stop: Option<oneshot::Sender<()>>,
}

impl Daemon {
    pub(crate) fn start(script: Script) -> Self {
        Self::with_heartbeat(script, None)
    }

    pub(crate) fn with_heartbeat(script: Script, heartbeat: Option<std::time::Duration>) -> Self {
        let dir = tempfile::tempdir().expect("a directory");
        let state = Arc::new(State {
            script: Mutex::new(script),
            seen: watch::Sender::new(Seen::default()),
            open_run: Mutex::new(None),
            heartbeat,
        });
        let wire = watch::Sender::new(WireMode::Forward);
        let listener = UnixListener::bind(dir.path().join("wire")).expect("a free path");
        tokio::spawn(forward_all(listener, dir.path().join("daemon"), wire.subscribe()));
        let mut daemon = Self { dir, state, wire, stop: None };
        daemon.serve();
        daemon
    }

    /// Serves on the daemon's path, which must be free.
    fn serve(&mut self) {
        let listener = UnixListener::bind(self.dir.path().join("daemon")).expect("a free path");
        let (stop, stopped) = oneshot::channel::<()>();
        let service = executor_server::ExecutorServer::new(Fake(self.state.clone()));
        tokio::spawn(tonic::transport::Server::builder().add_service(service).serve_with_incoming_shutdown(
            UnixListenerStream::new(listener),
            async {
                let _ = stopped.await;
            },
        ));
        self.stop = Some(stop);
    }

    /// Adds to what the daemon will do.
    pub(crate) fn rewrite(&self, change: impl FnOnce(&mut Script)) {
        change(&mut self.state.script.lock().expect("not poisoned"));
    }

    /// Another server takes over: the old one tells its clients to go away, and finishes what it has.
    pub(crate) fn replace(&mut self) {
        std::fs::remove_file(self.dir.path().join("daemon")).expect("it was there");
        let old = self.stop.take();
        self.serve();
        drop(old);
    }

    pub(crate) fn endpoint(&self) -> String {
        format!("unix:{}", self.dir.path().join("wire").display())
    }

    pub(crate) fn set_wire(&self, mode: WireMode) {
        self.wire.send_replace(mode);
    }

    pub(crate) fn seen(&self) -> Seen {
        self.state.seen.borrow().clone()
    }

    pub(crate) async fn wait_for_call(&self, call: &str) {
        let mut seen = self.state.seen.subscribe();
        seen.wait_for(|seen| seen.calls.contains(&call)).await.expect("the daemon outlives the test");
    }

    /// Ends the stream of the open run before its end, as a server does that dies.
    pub(crate) fn break_run(&self) {
        drop(self.state.open_run.lock().expect("not poisoned").take().expect("a run is open"));
    }

    pub(crate) async fn send_to_run(&self, event: v1::RunEvent) {
        let open = self.state.open_run.lock().expect("not poisoned").clone().expect("a run is open");
        open.send(Ok(event)).await.expect("the client listens");
    }
}

async fn forward_all(listener: UnixListener, to: PathBuf, wire: watch::Receiver<WireMode>) {
    while let Ok((near, _)) = listener.accept().await {
        tokio::spawn(forward(near, to.clone(), wire.clone()));
    }
}

async fn forward(mut near: UnixStream, to: PathBuf, mut wire: watch::Receiver<WireMode>) {
    let Ok(mut far) = UnixStream::connect(Path::new(&to)).await else { return };
    loop {
        let mode = *wire.borrow_and_update();
        match mode {
            WireMode::Cut => return,
            WireMode::Frozen => {
                if wire.changed().await.is_err() {
                    return;
                }
            }
            WireMode::Forward => {
                tokio::select! {
                    _ = tokio::io::copy_bidirectional(&mut near, &mut far) => return,
                    changed = wire.changed() => if changed.is_err() { return },
                }
            }
        }
    }
}
