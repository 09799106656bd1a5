//! The remote executor against a daemon that misbehaves, over a wire that fails.

#![allow(missing_docs, reason = "tests say what they show by their names")]

use std::time::Duration;

use bytes::Bytes;
use executor_proto::{
    types::{CommandSpec, EnvironmentVariable, Exit, StreamChunk, StreamName, TaskId},
    v1::{self, run_event::Event},
};
use futures_util::StreamExt;
use tokio_util::sync::CancellationToken;
use tonic::Status;
use tool_client::executor::{
    Executor, ExecutorError, OutputSink,
    connect::{Endpoint, Token},
    remote::{Deadlines, RemoteExecutor},
};

#[path = "../support/fake.rs"]
#[allow(dead_code, reason = "the tests of the command line use the rest")]
mod fake;

mod reads;

use fake::{Daemon, Script, WireMode};

const SHORT: Duration = Duration::from_millis(300);

fn client(daemon: &Daemon) -> RemoteExecutor {
    client_of(&daemon.endpoint())
}

fn client_of(endpoint: &str) -> RemoteExecutor {
    let endpoint = Endpoint::parse(endpoint).expect("the tests write endpoints well");
    let deadlines = Deadlines { connect: Duration::from_secs(2), call: SHORT, silence: SHORT };
    RemoteExecutor::with_deadlines(&endpoint, Some(Token::new("t0ken").expect("a token")), deadlines)
}

fn command(text: &'static str) -> CommandSpec {
    CommandSpec { command: Bytes::from_static(text.as_bytes()), ..CommandSpec::default() }
}

fn event(event: Event) -> v1::RunEvent {
    v1::RunEvent { event: Some(event) }
}

fn accepted() -> v1::RunEvent {
    event(Event::Accepted(v1::RunAccepted {
        run_id: "run-1".into(),
        timeout_ms: 1000.0,
        workdir: Bytes::from_static(b"/"),
        sandbox_mode: v1::SandboxMode::DangerFullAccess.into(),
    }))
}

fn chunk(offset: u64, data: &'static [u8]) -> v1::StreamChunk {
    v1::StreamChunk { stream: v1::StreamName::Stdout.into(), offset, data: Bytes::from_static(data) }
}

fn finished(exit: v1::exit::Exit, total: u64, aborted: bool) -> v1::RunEvent {
    event(Event::Finished(v1::RunFinished {
        exit: Some(v1::Exit { exit: Some(exit) }),
        aborted,
        stdout: Some(v1::StreamResult { total, tail_start: 0, spill: None }),
        stderr: Some(v1::StreamResult::default()),
        ..v1::RunFinished::default()
    }))
}

fn one_run(events: Vec<v1::RunEvent>) -> Script {
    Script { runs: [Ok(events)].into(), ..Script::default() }
}

/// The calls that the daemon has seen, but for the questions what it remembers of lost ones.
fn but_info(daemon: &Daemon) -> Vec<&'static str> {
    daemon.seen().calls.into_iter().filter(|call| *call != "GetInfo").collect()
}

async fn run(client: &RemoteExecutor) -> Result<executor_proto::types::RunResult, ExecutorError> {
    client.run(None, command("true"), &CancellationToken::new(), None).await
}

#[derive(Default)]
struct Collected(Vec<StreamChunk>);

#[async_trait::async_trait]
impl OutputSink for Collected {
    async fn output(&mut self, chunk: StreamChunk) {
        self.0.push(chunk);
    }
}

#[tokio::test]
async fn a_run_brings_its_tails_and_its_exit() {
    let tail = |offset, data| event(Event::Tail(chunk(offset, data)));
    let daemon = Daemon::start(one_run(vec![
        accepted(),
        v1::RunEvent { event: None },
        tail(0, b"a"),
        tail(1, b"b"),
        finished(v1::exit::Exit::Code(7), 2, false),
    ]));
    let result = run(&client(&daemon)).await.expect("it runs");
    assert_eq!((result.exit, &result.stdout.tail[..], result.stdout.total), (Exit::Code(7), &b"ab"[..], 2));
    let seen = daemon.seen();
    assert_eq!(seen.metadata[0].get("authorization").expect("a token"), "Bearer t0ken");
    assert_eq!(seen.metadata[0].get("executor-client-version").expect("a version"), env!("CARGO_PKG_VERSION"));
    assert!(seen.keys[0].len() == 32 && seen.keys[0].bytes().all(|byte| byte.is_ascii_hexdigit()), "{seen:?}");
}

#[tokio::test]
async fn a_sink_gets_each_byte_once_and_sees_gaps() {
    let output = |offset, data| event(Event::Output(chunk(offset, data)));
    let daemon = Daemon::start(one_run(vec![
        accepted(),
        output(0, b"abc"),
        output(2, b"cd"),
        output(0, b"ab"),
        output(10, b"z"),
        finished(v1::exit::Exit::Code(0), 11, false),
    ]));
    let mut sink = Collected::default();
    let abort = CancellationToken::new();
    client(&daemon).run(None, command("x"), &abort, Some(&mut sink)).await.expect("it runs");
    let got: Vec<_> = sink.0.iter().map(|chunk| (chunk.offset, &chunk.data[..])).collect();
    assert_eq!(got, [(0, &b"abc"[..]), (3, b"d"), (10, b"z")]);
    assert!(sink.0.iter().all(|chunk| chunk.stream == StreamName::Stdout));
}

#[tokio::test]
async fn a_run_that_is_cut_after_its_start_is_a_result_without_an_exit() {
    let daemon = Daemon::start(one_run(vec![accepted(), event(Event::Output(chunk(0, b"so far")))]));
    let client = client(&daemon);
    let mut sink = Collected::default();
    let abort = CancellationToken::new();
    let cut = async {
        daemon.wait_for_call("Run").await;
        daemon.send_to_run(event(Event::Output(chunk(6, b"!")))).await;
        daemon.set_wire(WireMode::Cut);
    };
    let (result, ()) = tokio::join!(client.run(None, command("x"), &abort, Some(&mut sink)), cut);
    // Whether the answer's head had come through before the cut is the wire's to say; either answer is honest.
    match result {
        Ok(result) => {
            let Exit::Unknown(reason) = &result.exit else { panic!("{result:?}") };
            let waited =
                reason.strip_prefix("connection lost for longer than ").and_then(|rest| rest.strip_suffix("ms"));
            let waited: u128 = waited.and_then(|waited| waited.parse().ok()).expect("one of the listed reasons");
            assert!(waited >= SHORT.as_millis(), "as long as an answer may take: {waited}");
            assert_eq!(result.stdout.total, sink.0.iter().map(|chunk| chunk.data.len() as u64).sum::<u64>());
        }
        Err(error) => assert!(matches!(error, ExecutorError::OutcomeUnknown { .. }), "{error:?}"),
    }
    assert_eq!(daemon.seen().calls, ["Run"]);
}

/// Breaks a run under an executor that is on boot `first` before it, where it is asked then, and on `after` afterwards;
/// `again` is its answer to another run. How the run is said to have ended.
async fn broken(
    asked_before: bool,
    info: impl Fn(&str) -> v1::GetInfoResponse,
    after: &str,
    again: Option<Status>,
) -> Exit {
    let before = asked_before.then(|| Ok(info("first")));
    let not_yet = Err(Status::unavailable("not yet"));
    let runs = [Ok(vec![accepted()])].into_iter().chain(again.map(Err)).collect();
    let info = before.into_iter().chain([not_yet, Ok(info(after))]).collect();
    let daemon = Daemon::start(Script { info, runs, ..Script::default() });
    let client = client(&daemon);
    if asked_before {
        client.info().await.expect("it answers");
    }
    let broken = async {
        daemon.wait_for_call("Run").await;
        daemon.break_run();
    };
    let (result, ()) = tokio::join!(run(&client), broken);
    result.expect("it was started").exit
}

#[tokio::test]
async fn a_run_that_is_broken_is_not_said_to_have_met_a_restart_that_nobody_knows_of() {
    let info = |boot_id: &str| v1::GetInfoResponse { boot_id: boot_id.into(), ..v1::GetInfoResponse::default() };
    for (asked_before, after, reason) in [
        (true, "first", "connection lost for longer than 0ms"),
        (true, "second", "executor host restarted"),
        (false, "second", "connection lost for longer than 0ms"),
    ] {
        assert_eq!(broken(asked_before, info, after, None).await, Exit::Unknown(reason.into()));
    }
}

#[tokio::test]
async fn a_run_that_its_executor_does_not_know_any_more_has_met_a_restart() {
    let info = |boot_id: &str| v1::GetInfoResponse {
        boot_id: boot_id.into(),
        resume_window_ms: 60_000,
        features: vec!["resume".into()],
        ..v1::GetInfoResponse::default()
    };
    for (after, reason) in [("first", "executor restarted"), ("second", "executor host restarted")] {
        let not_known = ExecutorError::OutcomeUnknown { reason: "not known here".into() }.to_status();
        assert_eq!(broken(true, info, after, Some(not_known)).await, Exit::Unknown(reason.into()));
    }
}

#[tokio::test]
async fn a_run_that_is_lost_for_good_is_lost_for_at_least_the_window_of_its_executor() {
    let info = v1::GetInfoResponse { resume_window_ms: 60_000, ..v1::GetInfoResponse::default() };
    let daemon = Daemon::start(Script { info: [Ok(info)].into(), ..one_run(vec![accepted()]) });
    let client = client(&daemon);
    client.info().await.expect("it answers");
    let result = run(&client).await.expect("it was started");
    assert_eq!(result.exit, Exit::Unknown("connection lost for longer than 60000ms".into()));
}

#[tokio::test]
async fn a_run_whose_executor_falls_silent_ends_and_heartbeats_keep_it_alive() {
    let daemon = Daemon::start(one_run(vec![accepted()]));
    let result = run(&client(&daemon)).await.expect("it was started");
    assert_eq!(result.exit, Exit::Unknown("connection lost for longer than 300ms".into()));

    let daemon = Daemon::with_heartbeat(one_run(vec![accepted()]), Some(SHORT / 6));
    let client = client(&daemon);
    let end = async {
        daemon.wait_for_call("Run").await;
        tokio::time::sleep(SHORT * 3).await;
        daemon.send_to_run(finished(v1::exit::Exit::Code(0), 0, false)).await;
    };
    let (result, ()) = tokio::join!(run(&client), end);
    assert_eq!(result.expect("it runs").exit, Exit::Code(0));
}

#[tokio::test]
async fn a_half_open_wire_hangs_nothing() {
    let daemon = Daemon::start(Script { starts: [None].into(), ..one_run(vec![]) });
    let client = client(&daemon);
    client.info().await.expect("it answers");
    daemon.set_wire(WireMode::Frozen);
    let unknown =
        |error| matches!(error, ExecutorError::OutcomeUnknown { reason } if reason == "no answer within 300ms");
    assert!(unknown(run(&client).await.expect_err("nothing answers")));
    assert!(unknown(client.start_task(None, command("x")).await.expect_err("nothing answers")));
    let error = client.info().await.expect_err("nothing answers");
    assert!(
        matches!(&error, ExecutorError::Unavailable { cause, .. } if cause == "no answer within 300ms"),
        "{error:?}"
    );
}

#[tokio::test]
async fn a_start_whose_reply_is_lost_is_made_once_and_its_outcome_is_unknown() {
    let daemon = Daemon::start(Script { starts: [None].into(), ..Script::default() });
    let client = client(&daemon);
    let cut = async {
        daemon.wait_for_call("StartTask").await;
        daemon.set_wire(WireMode::Cut);
    };
    let (started, ()) = tokio::join!(client.start_task(None, command("echo x >> f")), cut);
    let error = started.expect_err("the reply is lost");
    assert!(matches!(error, ExecutorError::OutcomeUnknown { .. }), "{error:?}");
    assert_eq!(daemon.seen().calls, ["StartTask"]);
}

#[tokio::test]
async fn a_status_without_a_reason_after_the_start_was_sent_is_not_tried_again() {
    let status = || Status::unavailable("a proxy says");
    let daemon = Daemon::start(Script {
        starts: [Some(Err(status()))].into(),
        runs: [Err(status())].into(),
        ..Script::default()
    });
    let client = client(&daemon);
    let unknown = ExecutorError::OutcomeUnknown { reason: "a proxy says".into() };
    assert_eq!(client.start_task(None, command("x")).await, Err(unknown.clone()));
    assert_eq!(run(&client).await, Err(unknown));
    assert_eq!(but_info(&daemon), ["StartTask", "Run"]);
}

#[tokio::test]
async fn reads_are_tried_again_a_few_times() {
    let unavailable = || Err(Status::unavailable("not yet"));
    let daemon = Daemon::start(Script { info: [unavailable(), unavailable()].into(), ..Script::default() });
    let client = client(&daemon);
    client.info().await.expect("the third answer is good");
    assert_eq!(daemon.seen().calls.len(), 3);
    let error = client.list_tasks(None).await.expect_err("it never answers");
    assert!(matches!(&error, ExecutorError::Unavailable { cause, .. } if cause == "not now"), "{error:?}");
    assert_eq!(daemon.seen().calls.len(), 3 + 5);
}

#[tokio::test]
async fn an_endpoint_where_nobody_listens_is_named_with_the_cause() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("none");
    let client = client_of(&format!("unix:{}", path.display()));
    let expected = ExecutorError::Unavailable {
        endpoint: format!("unix:{}", path.display()),
        cause: "no such file or directory".into(),
    };
    assert_eq!(run(&client).await, Err(expected.clone()));
    assert_eq!(client.info().await, Err(expected.clone()));
    assert_eq!(client.kill_task(None, &TaskId("bash-1".into())).await, Err(expected));

    let free = std::net::TcpListener::bind("127.0.0.1:0").and_then(|one| one.local_addr()).expect("a free port");
    let error = run(&client_of(&format!("http://{free}"))).await.expect_err("nobody listens");
    assert_eq!(
        error,
        ExecutorError::Unavailable { endpoint: format!("http://{free}"), cause: "connection refused".into() }
    );
}

#[tokio::test]
async fn a_server_that_is_replaced_between_two_calls_is_not_noticed() {
    let done = || Ok(vec![accepted(), finished(v1::exit::Exit::Code(0), 0, false)]);
    let mut daemon = Daemon::start(Script { runs: (0..20).map(|_| done()).collect(), ..Script::default() });
    let client = client(&daemon);
    for _ in 0..20 {
        assert_eq!(run(&client).await.expect("it runs").exit, Exit::Code(0));
        daemon.replace();
    }
    assert_eq!(daemon.seen().calls.len(), 20, "each was run once");
}

#[tokio::test]
async fn a_refused_stream_is_known_to_have_done_nothing() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("h2");
    let listener = tokio::net::UnixListener::bind(&path).expect("a free path");
    let (count, counted) = tokio::sync::watch::channel(0);
    tokio::spawn(async move {
        let (stream, _) = listener.accept().await.expect("the client connects");
        let mut connection = h2::server::handshake(stream).await.expect("it speaks HTTP/2");
        while let Some(Ok((mut request, mut respond))) = connection.accept().await {
            count.send_modify(|count| *count += 1);
            tokio::spawn(async move {
                // Refused after the whole request has come, so that only the peer's word tells that nothing was done.
                while request.body_mut().data().await.is_some() {}
                respond.send_reset(h2::Reason::REFUSED_STREAM);
            });
        }
    });
    let error = run(&client_of(&format!("unix:{}", path.display()))).await.expect_err("it is refused");
    assert!(matches!(error, ExecutorError::Unavailable { .. }), "{error:?}");
    assert_eq!(*counted.borrow(), 5, "it was tried again");
}

#[tokio::test]
async fn a_peer_that_speaks_something_else_has_run_nothing() {
    for word in ["HTTP/1.1 400 Bad Request\r\n\r\n", "SSH-2.0-OpenSSH_9.2\r\n"] {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("it is bound");
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (mut from, mut to) = stream.into_split();
                let _ = tokio::io::AsyncWriteExt::write_all(&mut to, word.as_bytes()).await;
                // Until the client has gone: a connection that is closed with bytes unread takes the word back.
                let _ = tokio::io::copy(&mut from, &mut tokio::io::sink()).await;
            }
        });
        let error = run(&client_of(&format!("http://{address}"))).await.expect_err("it is no executor");
        assert_eq!(error, ExecutorError::UnsupportedVersion { speaks: "it does not speak HTTP/2".into() }, "{word}");
    }
}

#[tokio::test]
async fn a_peer_that_says_something_else_and_closes_has_run_nothing() {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    // What it reads before it answers decides whether it is the word, a failed write or a reset that is seen first.
    for (reads, word) in [(10, "HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n"), (0, "220 mail\r\n"), (10, "")]
    {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("it is bound");
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                let mut some = vec![0; reads];
                let _ = stream.read_exact(&mut some).await;
                let _ = stream.write_all(word.as_bytes()).await;
                if word.is_empty() {
                    // In order, and whatever the client had sent is read: it ends with an EOF.
                    let _ = stream.shutdown().await;
                    let _ = tokio::io::copy(&mut stream, &mut tokio::io::sink()).await;
                }
            }
        });
        let endpoint = format!("http://{address}");
        let expected = if word.is_empty() {
            ExecutorError::Unavailable {
                endpoint: endpoint.clone(),
                cause: "it closed the connection without a word".into(),
            }
        } else {
            ExecutorError::UnsupportedVersion { speaks: "it does not speak HTTP/2".into() }
        };
        // A mute peer is tried again, with pauses, so it is asked less often.
        for _ in 0..if word.is_empty() { 5 } else { 100 } {
            assert_eq!(run(&client_of(&endpoint)).await, Err(expected.clone()), "{word:?}");
        }
    }
}

#[tokio::test]
async fn the_reasons_of_the_executor_come_through() {
    let limit = ExecutorError::OverLimit { what: "running tasks".into(), used: 2, limit: 2 };
    let daemon = Daemon::start(Script {
        starts: [Some(Err(limit.to_status())), Some(Err(ExecutorError::KeyConflict.to_status()))].into(),
        runs: [Err(ExecutorError::Stopping.to_status())].into(),
        ..Script::default()
    });
    let client = client(&daemon);
    assert_eq!(client.start_task(None, command("x")).await, Err(limit));
    assert_eq!(client.start_task(None, command("x")).await, Err(ExecutorError::KeyConflict));
    assert_eq!(run(&client).await, Err(ExecutorError::Stopping));
    let error = client.get_task(None, &TaskId("bash-1".into())).await.expect_err("it is not there");
    assert!(matches!(error, ExecutorError::UnsupportedVersion { .. }), "{error:?}");
}

#[tokio::test]
async fn too_much_is_refused_in_both_directions() {
    let daemon = Daemon::start(Script::default());
    let client = client(&daemon);
    let huge = CommandSpec { command: Bytes::from(vec![b'x'; (8 << 20) + 1]), ..CommandSpec::default() };
    assert!(matches!(client.start_task(None, huge).await, Err(ExecutorError::TooLarge { .. })));
    let variable = |n: u32| EnvironmentVariable { name: format!("V{n}").into(), value: vec![b'x'; 100_000].into() };
    let many = CommandSpec { environment: (0..70).map(variable).collect(), ..command("true") };
    assert!(matches!(client.start_task(None, many).await, Err(ExecutorError::TooLarge { .. })));
    assert!(daemon.seen().calls.is_empty(), "nothing was sent");

    let id = TaskId("bash-1".into());
    let mut stream = client.read_stream(None, &id, StreamName::Stdout, 0, false).await.expect("it opens");
    let error = stream.next().await.expect("an item").expect_err("2 MiB are above what is read");
    assert!(matches!(&error, ExecutorError::Unavailable { cause, .. } if cause.contains("too large")), "{error:?}");
    assert!(stream.next().await.is_none());
}

#[tokio::test]
async fn an_abort_cancels_waits_and_reads_to_the_end() {
    let daemon = Daemon::start(Script {
        on_cancel: vec![event(Event::Tail(chunk(0, b"partial"))), finished(v1::exit::Exit::Signal(15), 7, true)],
        cancels: [v1::KillOutcome { already_finished: false, survivors: vec![42] }].into(),
        ..one_run(vec![accepted()])
    });
    let client = client(&daemon);
    let abort = CancellationToken::new();
    let raise = async {
        daemon.wait_for_call("Run").await;
        abort.cancel();
    };
    let (result, ()) = tokio::join!(client.run(None, command("sleep 9"), &abort, None), raise);
    let result = result.expect("an abort is a result");
    assert!(result.aborted);
    // Where the start was still on its way when the abort came, its answer is read before the tails.
    assert_eq!((result.exit, &result.stdout.tail[..]), (Exit::Signal(15), &b"partial"[..]));
    assert_eq!(result.survivors, [42]);
    let seen = daemon.seen();
    assert_eq!(seen.calls.iter().filter(|call| **call == "CancelRun").count(), 1);
    assert!(seen.keys.windows(2).all(|pair| pair[0] == pair[1]), "by the key of the run: {seen:?}");
}

#[tokio::test]
async fn an_abort_that_overtakes_its_run_is_made_again() {
    let daemon = Daemon::start(Script {
        on_cancel: vec![finished(v1::exit::Exit::Signal(15), 0, true)],
        cancels: [
            v1::KillOutcome { already_finished: true, survivors: vec![] },
            v1::KillOutcome { already_finished: false, survivors: vec![] },
        ]
        .into(),
        ..one_run(vec![])
    });
    let client = client(&daemon);
    let abort = CancellationToken::new();
    let raise = async {
        daemon.wait_for_call("Run").await;
        abort.cancel();
        daemon.wait_for_call("CancelRun").await;
        daemon.send_to_run(accepted()).await;
    };
    let (result, ()) = tokio::join!(client.run(None, command("sleep 9"), &abort, None), raise);
    let result = result.expect("an abort is a result");
    assert!(result.aborted);
    assert_eq!(result.exit, Exit::Signal(15));
}

#[tokio::test]
async fn an_abort_before_anything_was_sent_sends_nothing() {
    let daemon = Daemon::start(Script::default());
    let abort = CancellationToken::new();
    abort.cancel();
    let result = client(&daemon).run(None, command("x"), &abort, None).await.expect("a result");
    assert!(result.aborted);
    assert!(matches!(result.exit, Exit::Unknown(_)));
    assert!(daemon.seen().calls.is_empty());
}

#[tokio::test]
async fn an_abort_before_there_is_a_connection_has_run_nothing() {
    // On one thread nothing has been connected when the call has been begun and its abort is raised at once.
    let daemon = Daemon::start(Script::default());
    let client = client(&daemon);
    let abort = CancellationToken::new();
    let (result, ()) = tokio::join!(client.run(None, command("x"), &abort, None), async { abort.cancel() });
    let cause = "aborted before a connection was established".to_owned();
    assert_eq!(result, Err(ExecutorError::Unavailable { endpoint: daemon.endpoint(), cause }));
    client.info().await.expect("it answers");
    assert_eq!(daemon.seen().calls, ["GetInfo"], "the run was not sent afterwards either");
}

#[tokio::test]
async fn an_abort_that_is_not_answered_ends_within_the_grace_and_a_little_more() {
    let info = v1::GetInfoResponse { grace_ms: 200, ..v1::GetInfoResponse::default() };
    let daemon = Daemon::start(Script { info: [Ok(info)].into(), ..one_run(vec![accepted()]) });
    let endpoint = Endpoint::parse(&daemon.endpoint()).expect("an endpoint");
    let client = RemoteExecutor::new(&endpoint, None);
    client.info().await.expect("it answers");
    let abort = CancellationToken::new();
    let raise = async {
        daemon.wait_for_call("Run").await;
        daemon.set_wire(WireMode::Frozen);
        abort.cancel();
    };
    let begun = std::time::Instant::now();
    let (result, ()) = tokio::join!(client.run(None, command("sleep 9"), &abort, None), raise);
    assert!(result.expect("an abort is a result").aborted);
    // 200 ms and 3 s; without the limit it would be 30 s more.
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
}

#[tokio::test]
async fn an_abort_over_a_dead_wire_still_ends() {
    let daemon = Daemon::start(one_run(vec![accepted()]));
    let client = client(&daemon);
    let abort = CancellationToken::new();
    let raise = async {
        daemon.wait_for_call("Run").await;
        daemon.set_wire(WireMode::Frozen);
        abort.cancel();
    };
    let (result, ()) = tokio::join!(client.run(None, command("sleep 9"), &abort, None), raise);
    match result {
        Ok(result) => assert!(result.aborted),
        Err(error) => assert!(matches!(error, ExecutorError::OutcomeUnknown { .. }), "{error:?}"),
    }
}

#[tokio::test]
async fn a_watch_that_ends_says_that_the_executor_is_lost() {
    let caught_up = v1::watch_tasks_event::Event::CaughtUp(v1::watch_tasks_event::CaughtUp {});
    let event = v1::WatchTasksEvent { event: Some(caught_up) };
    let daemon = Daemon::start(Script { watches: [vec![event]].into(), ..Script::default() });
    let owner = executor_proto::types::OwnerId("me".into());
    let events: Vec<_> = client(&daemon).watch_tasks(&owner).await.expect("it opens").collect().await;
    assert_eq!(events.len(), 2);
    assert_eq!(events[0], Ok(executor_proto::types::WatchEvent::CaughtUp));
    assert!(matches!(events[1], Err(ExecutorError::Unavailable { .. })), "{events:?}");
}

#[tokio::test]
async fn a_kill_has_the_grace_of_the_executor_on_top() {
    let daemon = Daemon::start(Script {
        info: [Ok(v1::GetInfoResponse { grace_ms: 250, ..v1::GetInfoResponse::default() })].into(),
        ..Script::default()
    });
    let error = client(&daemon).kill_task(None, &TaskId("bash-1".into())).await.expect_err("it never answers");
    assert!(
        matches!(&error, ExecutorError::Unavailable { cause, .. } if cause == "no answer within 550ms"),
        "{error:?}"
    );
    assert_eq!(daemon.seen().calls.iter().filter(|call| **call == "KillTask").count(), 1);
}
