//! The answers that are streams.
//!
//! Each is a value with one method, `next`, which the library asks when the client has room for more: nothing is made in
//! advance, so a client that stalls costs no memory, and a client that goes away drops the value and what it holds (for a
//! run: its part in the run, which is ended if nobody comes back for it). A silence of `heartbeat` gives a heartbeat.

use std::{collections::VecDeque, pin::Pin, time::Duration};

use executor_proto::{
    MAX_DAEMON_MESSAGE_BYTES,
    error::ExecutorError,
    types::{ReadStreamEvent, StreamName, TaskOutput, WatchEvent},
    v1,
};
use futures_core::Stream;
use futures_util::{StreamExt, stream};
use prost::Message as _;
use tokio::time::timeout;
use tonic::Status;

use super::{
    call_log::{CallLog, outcome},
    convert,
};
use crate::{
    crash::Point,
    engine::{Run, StreamReader, TaskWatch},
};

/// What the service answers with where an rpc is a stream.
pub(super) type EventStream<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// Makes events when they are asked for.
pub(super) trait Events: Send + 'static {
    /// The message of the stream.
    type Event: Send + 'static;

    /// The next event; `None` ends the stream. Not asked again after an error.
    fn next(&mut self) -> impl Future<Output = Option<Result<Self::Event, Status>>> + Send;
}

/// The stream of somebody's events.
pub(super) fn events<E: Events>(events: E) -> EventStream<E::Event> {
    stream::unfold(Some(events), |events| async move {
        let mut events = events?;
        let event = events.next().await?;
        let rest = event.is_ok().then_some(events);
        Some((event, rest))
    })
    .boxed()
}

// ── Run ──

/// `Accepted` → output as it comes, if asked for → the result: tails, unless the output was sent → `Finished`.
#[derive(Debug)]
pub(super) struct RunEvents {
    run: Run,
    phase: RunPhase,
    /// Where the output begins that is sent as it comes, of stdout and stderr; `None`: it is not.
    output_from: Option<[u64; 2]>,
    heartbeat: Duration,
    log: CallLog,
}

#[derive(Debug)]
enum RunPhase {
    /// Nothing has been sent.
    Started,
    /// Output is being sent; each reader is there until it has ended.
    Output { stdout: Option<StreamReader>, stderr: Option<StreamReader> },
    /// The result is awaited.
    Waiting,
    /// The result is being sent.
    Result { tails: VecDeque<v1::StreamChunk>, finished: v1::RunFinished },
    /// Everything has been sent.
    Over,
}

impl RunEvents {
    pub(super) fn new(run: Run, output_from: Option<[u64; 2]>, heartbeat: Duration, mut log: CallLog) -> Self {
        log.task(run.accepted().run_id);
        Self { run, phase: RunPhase::Started, output_from, heartbeat, log }
    }

    fn accepted(&mut self) -> v1::run_event::Event {
        self.phase = match self.output_from {
            Some([stdout, stderr]) => RunPhase::Output {
                stdout: Some(self.run.output_from(StreamName::Stdout, stdout)),
                stderr: Some(self.run.output_from(StreamName::Stderr, stderr)),
            },
            None => RunPhase::Waiting,
        };
        v1::run_event::Event::Accepted(convert::accepted(self.run.accepted()))
    }

    /// Waits for the result and makes what is to be sent of it.
    async fn result(&mut self) {
        let result = self.run.finished().await;
        self.log.outcome(outcome::of_run(&result));
        let (tails, finished) = convert::finished(result);
        let tails = if self.output_from.is_some() { VecDeque::new() } else { tails };
        self.phase = RunPhase::Result { tails, finished };
    }
}

/// The next chunk of a run's output, whichever stream has one; `None` after the end of both. Cancel-safe.
async fn either(stdout: &mut Option<StreamReader>, stderr: &mut Option<StreamReader>) -> Option<v1::StreamChunk> {
    while stdout.is_some() || stderr.is_some() {
        let (reader, event) = tokio::select! {
            event = next_of(stdout) => (&mut *stdout, event),
            event = next_of(stderr) => (&mut *stderr, event),
        };
        match event {
            Some(ReadStreamEvent::Chunk(chunk)) => return Some(convert::chunk(chunk)),
            Some(ReadStreamEvent::End { .. }) | None => *reader = None,
        }
    }
    None
}

/// The next event of a reader that may have ended; one that has is never ready.
async fn next_of(reader: &mut Option<StreamReader>) -> Option<ReadStreamEvent> {
    match reader {
        Some(reader) => reader.next().await,
        None => std::future::pending().await,
    }
}

impl Events for RunEvents {
    type Event = v1::RunEvent;

    async fn next(&mut self) -> Option<Result<v1::RunEvent, Status>> {
        use v1::run_event::Event;
        let event = loop {
            match &mut self.phase {
                RunPhase::Started => break self.accepted(),
                RunPhase::Output { stdout, stderr } => match timeout(self.heartbeat, either(stdout, stderr)).await {
                    Ok(Some(chunk)) => break Event::Output(chunk),
                    Ok(None) => self.phase = RunPhase::Waiting,
                    Err(_silence) => break Event::Heartbeat(v1::Heartbeat {}),
                },
                RunPhase::Waiting => {
                    if timeout(self.heartbeat, self.result()).await.is_err() {
                        break Event::Heartbeat(v1::Heartbeat {});
                    }
                }
                RunPhase::Result { tails, finished } => match tails.pop_front() {
                    Some(chunk) => break Event::Tail(chunk),
                    None => {
                        let finished = std::mem::take(finished);
                        self.phase = RunPhase::Over;
                        break Event::Finished(finished);
                    }
                },
                RunPhase::Over => {
                    // Asked for more than the last event, so that one has been taken.
                    self.run.taken();
                    return None;
                }
            }
        };
        Some(Ok(v1::RunEvent { event: Some(event) }))
    }
}

// ── ReadOutput ──

/// A read that may still wait for its task's end.
type Read = Pin<Box<dyn Future<Output = Result<TaskOutput, ExecutorError>> + Send>>;

/// Heartbeats while the read waits → chunks → the status.
pub(super) struct ReadOutputEvents {
    /// There until it has answered.
    read: Option<Read>,
    /// A silence has passed and the client has not been told.
    silent: bool,
    chunks: VecDeque<v1::StreamChunk>,
    status: Option<v1::ReadOutputStatus>,
    heartbeat: Duration,
    log: CallLog,
}

impl ReadOutputEvents {
    /// Begins a read. One that fails within the first silence, as all do that do not wait, is refused as a whole.
    pub(super) async fn begin(read: Read, heartbeat: Duration, log: CallLog) -> Result<Self, Status> {
        let mut begun = Self { read: Some(read), silent: false, chunks: VecDeque::new(), status: None, heartbeat, log };
        begun.go_on().await?;
        Ok(begun)
    }

    /// Lets the read go on for as long as a silence may last.
    async fn go_on(&mut self) -> Result<(), Status> {
        let Some(read) = &mut self.read else { return Ok(()) };
        let Ok(answer) = timeout(self.heartbeat, read).await else {
            self.silent = true;
            return Ok(());
        };
        self.read = None;
        let TaskOutput { status, stdout, stderr } = answer.map_err(|error| self.log.refuse(&error))?;
        self.log.outcome(outcome::of_status(&status));
        let (chunks, stdout) = convert::delta(StreamName::Stdout, stdout);
        self.chunks = chunks;
        let (chunks, stderr) = convert::delta(StreamName::Stderr, stderr);
        self.chunks.extend(chunks);
        self.status = Some(v1::ReadOutputStatus {
            status: Some(convert::status(status)),
            stdout: Some(stdout),
            stderr: Some(stderr),
        });
        Ok(())
    }
}

impl Events for ReadOutputEvents {
    type Event = v1::ReadOutputEvent;

    async fn next(&mut self) -> Option<Result<v1::ReadOutputEvent, Status>> {
        use v1::read_output_event::Event;
        if !self.silent
            && let Err(status) = self.go_on().await
        {
            return Some(Err(status));
        }
        let event = if std::mem::take(&mut self.silent) {
            Event::Heartbeat(v1::Heartbeat {})
        } else if let Some(chunk) = self.chunks.pop_front() {
            Event::Chunk(chunk)
        } else {
            let Some(status) = self.status.take() else {
                Point::ReadTaken.pass();
                return None;
            };
            Event::Status(status)
        };
        Some(Ok(v1::ReadOutputEvent { event: Some(event) }))
    }
}

// ── WatchTasks ──

/// An owner's completions, until the client goes away or the daemon stops.
#[derive(Debug)]
pub(super) struct WatchEvents {
    watch: TaskWatch,
    heartbeat: Duration,
    log: CallLog,
}

impl WatchEvents {
    pub(super) fn new(watch: TaskWatch, heartbeat: Duration, log: CallLog) -> Self {
        Self { watch, heartbeat, log }
    }
}

impl Events for WatchEvents {
    type Event = v1::WatchTasksEvent;

    async fn next(&mut self) -> Option<Result<v1::WatchTasksEvent, Status>> {
        use v1::watch_tasks_event::{CaughtUp, Event};
        let event = match timeout(self.heartbeat, self.watch.next()).await {
            Ok(Some(WatchEvent::Completion(completion))) => Event::Completion(convert::completion(completion)),
            Ok(Some(WatchEvent::CaughtUp)) => Event::CaughtUp(CaughtUp {}),
            Ok(None) => return Some(Err(self.log.refuse(&ExecutorError::Stopping))),
            Err(_silence) => Event::Heartbeat(v1::Heartbeat {}),
        };
        Some(Ok(v1::WatchTasksEvent { event: Some(event) }))
    }
}

// ── ReadStream ──

/// Chunks of one stream → where it stands.
#[derive(Debug)]
pub(super) struct ReadStreamEvents {
    reader: StreamReader,
    heartbeat: Duration,
    log: CallLog,
}

impl ReadStreamEvents {
    pub(super) fn new(reader: StreamReader, heartbeat: Duration, log: CallLog) -> Self {
        Self { reader, heartbeat, log }
    }
}

impl Events for ReadStreamEvents {
    type Event = v1::ReadStreamEvent;

    async fn next(&mut self) -> Option<Result<v1::ReadStreamEvent, Status>> {
        use v1::read_stream_event::Event;
        let event = match timeout(self.heartbeat, self.reader.next()).await {
            Ok(Some(ReadStreamEvent::Chunk(chunk))) => Event::Chunk(convert::chunk(chunk)),
            Ok(Some(ReadStreamEvent::End { total, closed })) => {
                self.log.outcome(format!("read to {total}"));
                Event::End(v1::StreamEnd { total, closed })
            }
            Ok(None) => return None,
            Err(_silence) => Event::Heartbeat(v1::Heartbeat {}),
        };
        Some(Ok(v1::ReadStreamEvent { event: Some(event) }))
    }
}

// ── ListTasks ──

/// Puts tasks into as few messages as keep within the size of one. At least one message, so that an empty list is an
/// answer too.
pub(super) fn batches(tasks: impl Iterator<Item = v1::TaskInfo>) -> Vec<v1::ListTasksResponse> {
    /// What a message adds to each task: its tag and a length of up to three bytes.
    const WRAPPING_BYTES: usize = 4;

    let mut batches = vec![v1::ListTasksResponse::default()];
    let mut bytes = 0;
    for task in tasks {
        let task_bytes = task.encoded_len() + WRAPPING_BYTES;
        if bytes + task_bytes > MAX_DAEMON_MESSAGE_BYTES && bytes > 0 {
            batches.push(v1::ListTasksResponse::default());
            bytes = 0;
        }
        bytes += task_bytes;
        if let Some(batch) = batches.last_mut() {
            batch.tasks.push(task);
        }
    }
    batches
}
