//! An executor that says what a test has written down.

use std::{
    collections::VecDeque,
    sync::{Mutex, MutexGuard},
    time::Duration,
};

use async_trait::async_trait;
use executor_proto::types::{
    CommandSpec, Completion, ExecutorInfo, Exit, KillOutcome, OwnerId, ReadStreamEvent, RunResult, StreamName,
    StreamResult, TaskId, TaskInfo, TaskOutput, WatchEvent,
};
use futures_core::stream::BoxStream;
use tokio::sync::{mpsc, watch};
use tokio_stream::{StreamExt, wrappers::ReceiverStream};
use tokio_util::sync::CancellationToken;

use crate::executor::{Executor, ExecutorError, OutputSink};

/// Events that wait for a watcher to read them.
const EVENTS: usize = 1_024;

/// What a test says that one call answers.
#[derive(Debug)]
pub(crate) enum Answer {
    Run(Result<RunResult, ExecutorError>),
    /// Runs until it is aborted.
    RunUntilAborted,
    Start(Result<TaskId, ExecutorError>),
    /// Starts when the gate is opened.
    StartAfter(CancellationToken, TaskId),
    Read(Result<TaskOutput, ExecutorError>),
    Kill(Result<KillOutcome, ExecutorError>),
}

/// What the executor was asked.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Question {
    Run(Option<OwnerId>, CommandSpec),
    Start(Option<OwnerId>, CommandSpec),
    Read(Option<OwnerId>, TaskId),
    Kill(Option<OwnerId>, TaskId),
}

#[derive(Debug)]
pub(crate) struct Fake {
    answers: Mutex<VecDeque<Answer>>,
    questions: Mutex<Vec<Question>>,
    completions: Mutex<Completions>,
    /// Counts the streams that were opened or refused.
    pub(crate) watches: watch::Sender<u64>,
    /// Counts the acknowledgements that came, also those that failed.
    pub(crate) acks: watch::Sender<u64>,
}

/// The completions of the only owner that a fake has.
#[derive(Debug, Default)]
pub(crate) struct Completions {
    pub(crate) unacknowledged: Vec<Completion>,
    streams: Vec<mpsc::Sender<Result<WatchEvent, ExecutorError>>>,
    /// How many of the next watches are refused.
    pub(crate) refused_watches: u64,
    /// How many of the next acknowledgements are lost.
    pub(crate) lost_acks: u64,
    /// Acknowledgements are never answered.
    pub(crate) acks_hang: bool,
    pub(crate) acked: Vec<u64>,
}

impl Default for Fake {
    fn default() -> Self {
        Self {
            answers: Mutex::default(),
            questions: Mutex::default(),
            completions: Mutex::default(),
            watches: watch::channel(0).0,
            acks: watch::channel(0).0,
        }
    }
}

impl Fake {
    pub(crate) fn answering(answers: impl IntoIterator<Item = Answer>) -> Self {
        Self { answers: Mutex::new(answers.into_iter().collect()), ..Self::default() }
    }

    /// What was asked so far.
    pub(crate) fn questions(&self) -> Vec<Question> {
        self.questions.lock().expect("no test panics in it").clone()
    }

    pub(crate) fn completions(&self) -> MutexGuard<'_, Completions> {
        self.completions.lock().expect("no test panics in it")
    }

    /// A task ends: its completion waits, and goes to who watches.
    pub(crate) fn complete(&self, completion: Completion) {
        let mut completions = self.completions();
        completions.unacknowledged.push(completion.clone());
        completions.streams.retain(|stream| stream.try_send(Ok(WatchEvent::Completion(completion.clone()))).is_ok());
    }

    /// All streams end, with an error or without one.
    pub(crate) fn cut(&self, error: Option<&ExecutorError>) {
        for stream in self.completions().streams.drain(..) {
            if let Some(error) = error {
                // A full stream ends without it.
                let _ = stream.try_send(Err(error.clone()));
            }
        }
    }

    fn ask(&self, question: Question) -> Answer {
        self.questions.lock().expect("no test panics in it").push(question);
        self.answers.lock().expect("no test panics in it").pop_front().expect("the test has an answer for every call")
    }
}

/// The result of a command that wrote this to stdout and ended like this.
pub(crate) fn run_result(stdout: &str, exit: Exit) -> RunResult {
    RunResult {
        exit,
        timed_out_after_ms: None,
        ended_by: None,
        aborted: false,
        stdout: StreamResult { total: stdout.len() as u64, tail: stdout.to_owned().into(), ..StreamResult::default() },
        stderr: StreamResult::default(),
        survivors: Vec::new(),
        leftovers: Vec::new(),
        sandbox_denied: None,
        duration_ms: 1.0,
    }
}

#[async_trait]
impl Executor for Fake {
    fn endpoint(&self) -> &str {
        "fake"
    }

    async fn info(&self) -> Result<ExecutorInfo, ExecutorError> {
        unreachable!("the tools do not ask it")
    }

    async fn run(
        &self,
        owner: Option<&OwnerId>,
        spec: CommandSpec,
        abort: &CancellationToken,
        sink: Option<&mut dyn OutputSink>,
    ) -> Result<RunResult, ExecutorError> {
        assert!(sink.is_none(), "the tools take the tails");
        match self.ask(Question::Run(owner.cloned(), spec)) {
            Answer::Run(result) => result,
            Answer::RunUntilAborted => {
                abort.cancelled().await;
                Ok(RunResult { aborted: true, ..run_result("partial", Exit::Signal(15)) })
            }
            other => panic!("asked to run, told {other:?}"),
        }
    }

    async fn start_task(&self, owner: Option<&OwnerId>, spec: CommandSpec) -> Result<TaskId, ExecutorError> {
        match self.ask(Question::Start(owner.cloned(), spec)) {
            Answer::Start(result) => result,
            Answer::StartAfter(gate, id) => {
                gate.cancelled().await;
                Ok(id)
            }
            other => panic!("asked to start, told {other:?}"),
        }
    }

    async fn read_output(
        &self,
        owner: Option<&OwnerId>,
        id: &TaskId,
        wait: Option<Duration>,
    ) -> Result<TaskOutput, ExecutorError> {
        assert_eq!(wait, None, "the tools do not wait");
        match self.ask(Question::Read(owner.cloned(), id.clone())) {
            Answer::Read(result) => result,
            other => panic!("asked to read, told {other:?}"),
        }
    }

    async fn kill_task(&self, owner: Option<&OwnerId>, id: &TaskId) -> Result<KillOutcome, ExecutorError> {
        match self.ask(Question::Kill(owner.cloned(), id.clone())) {
            Answer::Kill(result) => result,
            other => panic!("asked to kill, told {other:?}"),
        }
    }

    async fn get_task(&self, _: Option<&OwnerId>, _: &TaskId) -> Result<TaskInfo, ExecutorError> {
        unreachable!("the tools do not ask it")
    }

    async fn list_tasks(&self, _: Option<&OwnerId>) -> Result<Vec<TaskInfo>, ExecutorError> {
        unreachable!("the tools do not ask it")
    }

    async fn watch_tasks(
        &self,
        _: &OwnerId,
    ) -> Result<BoxStream<'static, Result<WatchEvent, ExecutorError>>, ExecutorError> {
        let mut completions = self.completions();
        self.watches.send_modify(|count| *count += 1);
        if completions.refused_watches > 0 {
            completions.refused_watches -= 1;
            return Err(ExecutorError::Unavailable { endpoint: "fake".to_owned(), cause: "refused".to_owned() });
        }
        let (sender, receiver) = mpsc::channel(EVENTS);
        for completion in &completions.unacknowledged {
            sender.try_send(Ok(WatchEvent::Completion(completion.clone()))).expect("there is room");
        }
        sender.try_send(Ok(WatchEvent::CaughtUp)).expect("there is room");
        completions.streams.push(sender);
        Ok(Box::pin(ReceiverStream::new(receiver).fuse()))
    }

    async fn ack_completions(&self, _: &OwnerId, up_to: u64) -> Result<(), ExecutorError> {
        let (lost, hangs) = {
            let mut completions = self.completions();
            let lost = completions.lost_acks > 0;
            if lost {
                completions.lost_acks -= 1;
            } else {
                completions.acked.push(up_to);
                completions.unacknowledged.retain(|completion| completion.sequence > up_to);
            }
            (lost, completions.acks_hang)
        };
        self.acks.send_modify(|count| *count += 1);
        if hangs {
            std::future::pending::<()>().await;
        }
        if lost {
            return Err(ExecutorError::Unavailable { endpoint: "fake".to_owned(), cause: "lost".to_owned() });
        }
        Ok(())
    }

    async fn read_stream(
        &self,
        _: Option<&OwnerId>,
        _: &TaskId,
        _: StreamName,
        _: u64,
        _: bool,
    ) -> Result<BoxStream<'static, Result<ReadStreamEvent, ExecutorError>>, ExecutorError> {
        unreachable!("the tools do not ask it")
    }
}
