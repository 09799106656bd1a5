//! Cut connections do not show: runs go on and are attached to again, starts and reads happen once (kinds M, O, and B15, F9, J4).
//!
//! Between the client and the daemon is a wire that cuts on command.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use executor_proto::types::{CommandSpec, Exit, OwnerId, RunResult, StreamChunk, StreamName, TaskStatus};
use executor_tests::{Backend, Stopwatch, World, on_backend, wait_for};
use serde_json::json;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{UnixListener, UnixStream},
    sync::watch,
};
use tokio_util::sync::CancellationToken;
use tool_client::{
    executor::{
        Executor, ExecutorError, OutputSink,
        connect::Endpoint,
        remote::{Deadlines, RemoteExecutor},
    },
    tools::{Abort, Tools},
};

const SOON: Duration = Duration::from_secs(20);

/// What the wire does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    Forward,
    /// Requests go through; whatever is answered goes nowhere.
    LoseAnswers,
    /// Connections are closed, new ones too.
    Cut,
}

/// A socket in front of the daemon's.
struct Wire {
    socket: PathBuf,
    mode: watch::Sender<Mode>,
    /// Bytes that were answered so far.
    answered: watch::Sender<u64>,
}

impl Wire {
    fn before(world: &World) -> Self {
        let endpoint = world.daemon().expect("there is one").endpoint().to_owned();
        let daemon = PathBuf::from(endpoint.strip_prefix("unix:").expect("a Unix socket"));
        let socket = world.tmp().join("wire");
        let listener = UnixListener::bind(&socket).expect("a free path");
        let (mode, modes) = watch::channel(Mode::Forward);
        let answered = watch::Sender::new(0);
        let counter = answered.clone();
        tokio::spawn(async move {
            while let Ok((near, _)) = listener.accept().await {
                tokio::spawn(forward(near, daemon.clone(), modes.clone(), counter.clone()));
            }
        });
        Self { socket, mode, answered }
    }

    fn set(&self, mode: Mode) {
        self.mode.send_replace(mode);
    }

    /// Cuts every connection, and lets new ones through.
    fn cut(&self) {
        self.set(Mode::Cut);
        self.set(Mode::Forward);
    }

    fn client(&self) -> RemoteExecutor {
        let endpoint = Endpoint::parse(&format!("unix:{}", self.socket.display())).expect("an endpoint");
        RemoteExecutor::with_deadlines(&endpoint, None, Deadlines::default())
    }
}

async fn forward(near: UnixStream, daemon: PathBuf, modes: watch::Receiver<Mode>, answered: watch::Sender<u64>) {
    // What was set before this connection does not cut it.
    let mut changes = modes.clone();
    if *changes.borrow_and_update() == Mode::Cut {
        return;
    }
    let Ok(far) = UnixStream::connect(daemon).await else { return };
    let (mut near_in, mut near_out) = near.into_split();
    let (mut far_in, mut far_out) = far.into_split();
    let answers = async {
        let mut buffer = vec![0; 16 * 1024];
        while let Ok(length @ 1..) = far_in.read(&mut buffer).await {
            if *modes.borrow() == Mode::LoseAnswers {
                continue;
            }
            if near_out.write_all(&buffer[..length]).await.is_err() {
                return;
            }
            answered.send_modify(|bytes| *bytes += length as u64);
        }
    };
    // Every change cuts, but the one to lose answers.
    let cut = async { while changes.changed().await.is_ok() && *changes.borrow_and_update() == Mode::LoseAnswers {} };
    tokio::select! {
        _ = tokio::io::copy(&mut near_in, &mut far_out) => {}
        () = answers => {}
        () = cut => {}
    }
}

#[derive(Default)]
struct Collected {
    bytes: Vec<u8>,
    starts: usize,
}

#[async_trait::async_trait]
impl OutputSink for Collected {
    async fn accepted(&mut self, _accepted: &executor_proto::types::RunAccepted) {
        self.starts += 1;
    }

    async fn output(&mut self, chunk: StreamChunk) {
        assert_eq!(
            (chunk.stream, chunk.offset),
            (StreamName::Stdout, self.bytes.len() as u64),
            "no gap, nothing twice"
        );
        self.bytes.extend_from_slice(&chunk.data);
    }
}

fn spec(world: &World, command: &str) -> CommandSpec {
    CommandSpec {
        command: command.to_owned().into(),
        workdir: Some(world.tmp().to_string_lossy().into_owned().into()),
        ..CommandSpec::default()
    }
}

async fn run(client: &RemoteExecutor, spec: CommandSpec) -> RunResult {
    client.run(None, spec, &CancellationToken::new(), None).await.expect("it runs")
}

fn lines(path: &Path) -> usize {
    std::fs::read_to_string(path).unwrap_or_default().lines().count()
}

fn numbers(last: u32) -> String {
    (1..=last).map(|n| format!("{n}\n")).collect()
}

on_backend!(Backend::Unix, m05_a_cut_of_seconds_does_not_show);
async fn m05_a_cut_of_seconds_does_not_show(world: &World) {
    let wire = Wire::before(world);
    let client = wire.client();
    let command = spec(world, "echo x >> starts; for i in $(seq 50); do echo $i; sleep .1; done; exit 7");
    for with_sink in [false, true] {
        let starts = world.tmp().join("starts");
        let _ = std::fs::remove_file(&starts);
        let cut = async {
            wait_for("it runs", SOON, || lines(&starts) == 1).await;
            wire.set(Mode::Cut);
            tokio::time::sleep(Duration::from_secs(3)).await;
            wire.set(Mode::Forward);
        };
        let mut sink = Collected::default();
        let abort = CancellationToken::new();
        let streamed = with_sink.then_some(&mut sink as &mut dyn OutputSink);
        let (result, ()) = tokio::join!(client.run(None, command.clone(), &abort, streamed), cut);
        let result = result.expect("it runs");
        assert_eq!((result.exit, result.stdout.total), (Exit::Code(7), numbers(50).len() as u64));
        let text = if with_sink { &sink.bytes[..] } else { &result.stdout.tail[..] };
        assert_eq!(text, numbers(50).as_bytes());
        assert_eq!((lines(&starts), sink.starts), (1, usize::from(with_sink)));
    }
}

on_backend!(Backend::Unix, m06_two_calls_in_flight_both_go_on);
async fn m06_two_calls_in_flight_both_go_on(world: &World) {
    let wire = Wire::before(world);
    let client = wire.client();
    let command = |n: u32| spec(world, &format!("echo x >> starts; until [ -e go ]; do sleep .05; done; exit {n}"));
    let cut = async {
        wait_for("both run", SOON, || lines(&world.tmp().join("starts")) == 2).await;
        for _ in 0..5 {
            let before = *wire.answered.borrow();
            wire.cut();
            let mut answered = wire.answered.subscribe();
            answered.wait_for(|bytes| *bytes > before).await.expect("the wire lives");
        }
        std::fs::write(world.tmp().join("go"), "").expect("a file");
    };
    let (one, other, ()) = tokio::join!(run(&client, command(1)), run(&client, command(2)), cut);
    assert_eq!((one.exit, other.exit), (Exit::Code(1), Exit::Code(2)));
    assert_eq!(lines(&world.tmp().join("starts")), 2);
}

on_backend!(Backend::Unix, f09_a_long_output_through_many_cuts_is_whole);
async fn f09_a_long_output_through_many_cuts_is_whole(world: &World) {
    let wire = Wire::before(world);
    let client = wire.client();
    client.info().await.expect("it answers");
    let done = CancellationToken::new();
    let cuts = async {
        let mut answered = wire.answered.subscribe();
        let mut next = 100_000;
        while !done.is_cancelled() {
            tokio::select! {
                _ = answered.wait_for(|bytes| *bytes >= next) => {}
                () = done.cancelled() => {}
            }
            next = *answered.borrow() + 1_500_000;
            wire.cut();
        }
    };
    let mut sink = Collected::default();
    let command = spec(world, "echo x >> starts; seq 1 2000000");
    let abort = CancellationToken::new();
    let running = async {
        let result = client.run(None, command, &abort, Some(&mut sink)).await;
        done.cancel();
        result
    };
    let (result, ()) = tokio::join!(running, cuts);
    assert_eq!(result.expect("it runs").exit, Exit::Code(0));
    assert!(sink.bytes == numbers(2_000_000).as_bytes(), "{} bytes", sink.bytes.len());
    assert_eq!(lines(&world.tmp().join("starts")), 1);
}

on_backend!(Backend::Unix, j04_a_lost_result_is_asked_for_again);
async fn j04_a_lost_result_is_asked_for_again(world: &World) {
    let wire = Wire::before(world);
    let client = wire.client();
    client.info().await.expect("it answers");
    let lose = async {
        wait_for("it runs", SOON, || lines(&world.tmp().join("starts")) == 1).await;
        wire.set(Mode::LoseAnswers);
        std::fs::write(world.tmp().join("go"), "").expect("a file");
        wait_for("it has ended", SOON, || world.tmp().join("ended").exists()).await;
        wire.cut();
    };
    let command = "echo x >> starts; until [ -e go ]; do sleep .05; done; echo out; touch ended; exit 5";
    let (result, ()) = tokio::join!(run(&client, spec(world, command)), lose);
    assert_eq!((result.exit, &result.stdout.tail[..]), (Exit::Code(5), &b"out\n"[..]));
    assert_eq!(lines(&world.tmp().join("starts")), 1);
}

on_backend!(Backend::Unix, o01_a_start_whose_reply_is_lost_happens_once);
async fn o01_a_start_whose_reply_is_lost_happens_once(world: &World) {
    let wire = Wire::before(world);
    let client = wire.client();
    let f = world.tmp().join("f");
    for n in 1..=3 {
        wire.set(Mode::LoseAnswers);
        let back = async {
            wait_for("it has run", SOON, || lines(&f) == n).await;
            wire.cut();
        };
        // A new connection each time, so that nothing but the start is lost.
        let client = wire.client();
        let (task, ()) = tokio::join!(client.start_task(None, spec(world, "echo x >> f")), back);
        assert_eq!(task.expect("it is found again").0, format!("bash-{n}"));
        assert_eq!(lines(&f), n);
    }
    // The same with a run, whose answer is lost before it is accepted.
    wire.set(Mode::LoseAnswers);
    let back = async {
        wait_for("it has run", SOON, || lines(&f) == 4).await;
        wire.cut();
    };
    let (result, ()) = tokio::join!(run(&client, spec(world, "echo x >> f; exit 3")), back);
    assert_eq!((result.exit, lines(&f)), (Exit::Code(3), 4));
}

on_backend!(Backend::Unix, o02_no_way_to_start_a_command_starts_it_twice);
async fn o02_no_way_to_start_a_command_starts_it_twice(world: &World) {
    let wire = Wire::before(world);
    let f = world.tmp().join("f");
    let abort = CancellationToken::new();
    let arguments = |background: bool| {
        let command = format!("cd {}; echo x >> f", world.tmp().display());
        json!({"command": command, "description": "mark", "run_in_background": background}).to_string()
    };
    for way in ["run", "run with output", "start", "bash", "bash in the background"] {
        let _ = std::fs::remove_file(&f);
        // A new connection each time, so that nothing but the start is lost.
        let client: Arc<dyn Executor> = Arc::new(wire.client());
        wire.set(Mode::LoseAnswers);
        let start = async {
            let (command, mut sink) = (spec(world, "echo x >> f"), Collected::default());
            let tools = Tools::new(Arc::clone(&client));
            match way {
                "run" => client.run(None, command, &abort, None).await.map(drop).expect("it runs"),
                "run with output" => {
                    client.run(None, command, &abort, Some(&mut sink)).await.map(drop).expect("it runs")
                }
                "start" => client.start_task(None, command).await.map(drop).expect("it starts"),
                _ => {
                    let text = tools.call(None, "bash", &arguments(way != "bash"), &Abort::default()).await;
                    assert!(!text.is_error, "{way}: {text:?}");
                }
            }
        };
        let back = async {
            wait_for("it has run", SOON, || lines(&f) == 1).await;
            wire.cut();
        };
        tokio::join!(start, back);
        assert_eq!(lines(&f), 1, "{way}");
    }
    // Whatever was started twice has run by now.
    run(&wire.client(), spec(world, "true")).await;
    assert_eq!(lines(&f), 1);
}

on_backend!(Backend::Unix, b15_a_dropped_run_is_ended);
async fn b15_a_dropped_run_is_ended(world: &World) {
    let wire = Wire::before(world);
    let client = wire.client();
    let watch = Stopwatch::start();
    let abort = CancellationToken::new();
    let command = format!("touch begun; {}", world.sleep(300));
    tokio::select! {
        result = client.run(None, spec(world, &command), &abort, None) => panic!("it ended: {result:?}"),
        () = wait_for("it runs", SOON, || world.tmp().join("begun").exists()) => {}
    }
    wait_for("it is ended", SOON, || world.survivors().is_empty()).await;
    // Dropped at once, whatever of it has been sent.
    for _ in 0..10 {
        let start = client.run(None, spec(world, &world.sleep(300)), &abort, None);
        let _ = tokio::time::timeout(Duration::from_millis(1), start).await;
    }
    assert_eq!(run(&client, spec(world, "exit 2")).await.exit, Exit::Code(2));
    wait_for("all are ended", SOON, || world.survivors().is_empty()).await;
    // The window of 30 s was not waited for.
    watch.assert_within("eleven dropped runs", Duration::from_secs(15));
}

on_backend!(Backend::Unix, an_abort_through_a_cut_ends_the_run);
async fn an_abort_through_a_cut_ends_the_run(world: &World) {
    let wire = Wire::before(world);
    let client = wire.client();
    client.info().await.expect("it answers");
    let abort = CancellationToken::new();
    let command = format!("touch begun; {}", world.sleep(300));
    let raise = async {
        wait_for("it runs", SOON, || world.tmp().join("begun").exists()).await;
        wire.set(Mode::Cut);
        abort.cancel();
        tokio::time::sleep(Duration::from_millis(300)).await;
        wire.set(Mode::Forward);
    };
    let (result, ()) = tokio::join!(client.run(None, spec(world, &command), &abort, None), raise);
    assert!(result.expect("an abort is a result").aborted);
    wait_for("it is ended", SOON, || world.survivors().is_empty()).await;
}

on_backend!(Backend::Unix, m11_reads_through_cuts_bring_every_byte_once);
async fn m11_reads_through_cuts_bring_every_byte_once(world: &World) {
    let wire = Wire::before(world);
    let client = wire.client();
    client.info().await.expect("it answers");
    let owner = OwnerId("reader".into());
    let command = spec(world, "for i in $(seq 400); do echo $i; sleep .005; done");
    let id = client.start_task(Some(&owner), command).await.expect("a task");
    let done = CancellationToken::new();
    let cuts = async {
        let mut answered = wire.answered.subscribe();
        while !done.is_cancelled() {
            let next = *answered.borrow_and_update() + 300;
            // The answers that follow are lost, and then the connection: what was read by them is asked for again.
            wire.set(Mode::LoseAnswers);
            tokio::time::sleep(Duration::from_millis(15)).await;
            wire.cut();
            tokio::select! {
                _ = answered.wait_for(|bytes| *bytes > next) => {}
                () = done.cancelled() => {}
            }
        }
    };
    let reads = async {
        let mut bytes = Vec::new();
        loop {
            let output = client.read_output(Some(&owner), &id, None).await.expect("it reads");
            assert_eq!((output.stdout.start, output.stdout.dropped), (bytes.len() as u64, 0));
            bytes.extend_from_slice(&output.stdout.data);
            if output.status != TaskStatus::Running {
                done.cancel();
                return (bytes, output.status);
            }
        }
    };
    let ((bytes, status), ()) = tokio::join!(reads, cuts);
    assert_eq!(status, TaskStatus::Ended(Exit::Code(0)));
    assert!(bytes == numbers(400).as_bytes(), "{} bytes", bytes.len());
}

on_backend!(Backend::Unix, an_executor_that_is_lost_for_good_is_said_to_be);
async fn an_executor_that_is_lost_for_good_is_said_to_be(world: &World) {
    let wire = Wire::before(world);
    let endpoint = Endpoint::parse(&format!("unix:{}", wire.socket.display())).expect("an endpoint");
    let call = Duration::from_millis(700);
    let client = RemoteExecutor::with_deadlines(&endpoint, None, Deadlines { call, ..Deadlines::default() });
    let command = format!("echo before; touch begun; {}", world.sleep(300));
    let cut = async {
        wait_for("it runs", SOON, || world.tmp().join("begun").exists()).await;
        wire.set(Mode::Cut);
    };
    let (result, ()) = tokio::join!(run(&client, spec(world, &command)), cut);
    assert_eq!(result.exit, Exit::Unknown("connection lost for longer than 700ms".into()));
    // What nobody will come back for is ended here by its name.
    let there = world.executor();
    for task in there.list_tasks(None).await.expect("a list") {
        there.kill_task(None, &task.id).await.expect("it is ended");
    }
    wait_for("it is ended", SOON, || world.survivors().is_empty()).await;
    // A start that is lost for good is unknown, and never said to have failed.
    let error = client.start_task(None, spec(world, "true")).await.expect_err("nothing listens");
    assert!(matches!(error, ExecutorError::Unavailable { .. } | ExecutorError::OutcomeUnknown { .. }), "{error:?}");
}
