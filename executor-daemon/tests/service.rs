//! The service as a stranger meets it: the real daemon, asked over Unix and TCP with nothing but the generated client.

#[path = "service/budgets.rs"]
mod budgets;
#[path = "service/daemon.rs"]
mod daemon;
#[path = "service/logs.rs"]
mod logs;

use std::{collections::BTreeMap, time::Duration};

use bytes::Bytes;
use executor_proto::{
    MAX_CHUNK_BYTES, MAX_DAEMON_MESSAGE_BYTES,
    error::{ExecutorError, SizedPart},
    v1::{self, executor_client::ExecutorClient, run_event::Event},
};
use tokio_stream::StreamExt as _;
use tonic::{Code, Request, Status, transport::Channel};
use tonic_health::pb::{HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient};

use daemon::{Daemon, TOKEN, bearer, client, key, nobody, run, wait_until};

fn error(status: Status) -> ExecutorError {
    ExecutorError::from_status(&status).unwrap_or_else(|| panic!("no reason: {status:?}"))
}

fn refusal(status: Status) -> String {
    assert_eq!(status.code(), Code::Unauthenticated);
    match error(status) {
        ExecutorError::Refused { reason } => reason,
        other => panic!("not refused: {other:?}"),
    }
}

#[tokio::test]
async fn both_transports_say_what_the_daemon_is() {
    let daemon = Daemon::start(&["--grace-ms", "700"]);
    for channel in [daemon.unix().await, daemon.tcp().await] {
        let info = client(channel).get_info(bearer(v1::GetInfoRequest {}, TOKEN)).await.expect("info").into_inner();
        assert_eq!(info.version, env!("CARGO_PKG_VERSION"));
        assert_eq!(info.protocol_revision, executor_proto::PROTOCOL_REVISION);
        assert_eq!(info.grace_ms, 700);
        assert_eq!(info.default_workdir, daemon.dir().as_os_str().as_encoded_bytes());
        assert_eq!(info.run_as_uid, nix::unistd::geteuid().as_raw());
    }
}

#[tokio::test]
async fn tcp_wants_a_known_token_and_health_wants_none() {
    let daemon = Daemon::start(&[]);
    let mut tcp = client(daemon.tcp().await);
    let none = tcp.get_info(v1::GetInfoRequest {}).await.expect_err("no token");
    assert!(refusal(none).starts_with("no token"));
    let wrong = tcp.get_info(bearer(v1::GetInfoRequest {}, "0123456789abcdeX")).await.expect_err("a wrong token");
    assert_eq!(refusal(wrong), "the token is not known");
    let run = v1::RunRequest { caller: nobody(), key: key(), spec: run("touch ran"), ..v1::RunRequest::default() };
    refusal(tcp.run(run).await.expect_err("no token"));
    assert!(!daemon.dir().join("ran").exists());

    for service in ["", "executor.v1.Executor"] {
        let request = HealthCheckRequest { service: service.to_owned() };
        let health = HealthClient::new(daemon.tcp().await).check(request).await.expect("health").into_inner();
        assert_eq!(health.status(), ServingStatus::Serving, "{service}");
    }
    for endpoint in daemon.endpoints() {
        let output = Daemon::program(&["health", "--endpoint", &endpoint]);
        assert!(output.status.success(), "{endpoint}: {output:?}");
    }
}

#[tokio::test]
async fn reflection_lists_the_service_to_callers_only() {
    let daemon = Daemon::start(&[]);
    assert!(services_v1(daemon.unix().await).await.expect("a list").contains(&"executor.v1.Executor".to_owned()));
    assert!(services_v1alpha(daemon.unix().await).await.contains(&"executor.v1.Executor".to_owned()));
    refusal(services_v1(daemon.tcp().await).await.expect_err("no token"));
}

async fn services_v1(channel: Channel) -> Result<Vec<String>, Status> {
    use tonic_reflection::pb::v1::{
        ServerReflectionRequest, server_reflection_client::ServerReflectionClient,
        server_reflection_request::MessageRequest, server_reflection_response::MessageResponse,
    };
    let request = ServerReflectionRequest {
        host: String::new(),
        message_request: Some(MessageRequest::ListServices(String::new())),
    };
    let mut answers =
        ServerReflectionClient::new(channel).server_reflection_info(tokio_stream::iter([request])).await?.into_inner();
    let answer = answers.message().await?.expect("an answer").message_response;
    let Some(MessageResponse::ListServicesResponse(list)) = answer else { panic!("no list: {answer:?}") };
    Ok(list.service.into_iter().map(|service| service.name).collect())
}

async fn services_v1alpha(channel: Channel) -> Vec<String> {
    use tonic_reflection::pb::v1alpha::{
        ServerReflectionRequest, server_reflection_client::ServerReflectionClient,
        server_reflection_request::MessageRequest, server_reflection_response::MessageResponse,
    };
    let request = ServerReflectionRequest {
        host: String::new(),
        message_request: Some(MessageRequest::ListServices(String::new())),
    };
    let answers = ServerReflectionClient::new(channel).server_reflection_info(tokio_stream::iter([request])).await;
    let answer = answers.expect("answers").into_inner().message().await.expect("no error").expect("an answer");
    let Some(MessageResponse::ListServicesResponse(list)) = answer.message_response else { panic!("no list") };
    list.service.into_iter().map(|service| service.name).collect()
}

#[tokio::test]
async fn another_protocol_is_told_what_is_spoken() {
    let daemon = Daemon::start(&[]);
    for path in ["/executor.v2.Executor/Run", "/executor.v1.Executor/Rewind", "/somebody.Else/Call"] {
        let mut grpc = tonic::client::Grpc::new(daemon.unix().await);
        grpc.ready().await.expect("a connection");
        let codec = tonic_prost::ProstCodec::<v1::GetInfoRequest, v1::GetInfoResponse>::default();
        let status = grpc
            .unary(Request::new(v1::GetInfoRequest {}), http::uri::PathAndQuery::from_static(path), codec)
            .await
            .expect_err("no such method");
        assert_eq!(status.code(), Code::Unimplemented, "{path}");
        let speaks = "it speaks executor.v1, revision 1".to_owned();
        assert_eq!(error(status), ExecutorError::UnsupportedVersion { speaks }, "{path}");
    }
}

#[tokio::test]
async fn what_is_too_large_says_so() {
    let daemon = Daemon::start(&[]);
    let mut client = client(daemon.unix().await);
    let request = |command: usize, stdin: usize| v1::RunRequest {
        caller: nobody(),
        key: key(),
        spec: Some(v1::CommandSpec {
            command: Bytes::from(vec![b':'; command]),
            stdin: Some(Bytes::from(vec![0; stdin])),
            ..v1::CommandSpec::default()
        }),
        ..v1::RunRequest::default()
    };
    let limit = 8 << 20;
    for (command, stdin, part) in [(limit + 1, 0, SizedPart::Command), (1, limit + 1, SizedPart::Stdin)] {
        let status = client.run(request(command, stdin)).await.expect_err("too large");
        assert_eq!(status.code(), Code::ResourceExhausted);
        let bytes = limit as u64 + 1;
        assert_eq!(error(status), ExecutorError::TooLarge { part, name: None, bytes, limit: limit as u64 });
    }
    let status = client.run(request(1, 25 << 20)).await.expect_err("too large");
    assert_eq!(status.code(), Code::ResourceExhausted);
    match error(status) {
        ExecutorError::TooLarge { part: SizedPart::Request, name: None, bytes, limit } => {
            assert!(bytes > limit && limit == executor_proto::MAX_REQUEST_BYTES as u64, "{bytes} of {limit}");
        }
        other => panic!("another refusal: {other:?}"),
    }
}

#[tokio::test]
async fn what_is_malformed_is_named() {
    let daemon = Daemon::start(&[]);
    let mut client = client(daemon.unix().await);
    let good = v1::RunRequest { caller: nobody(), key: key(), spec: run("true"), ..v1::RunRequest::default() };
    for (field, request) in [
        ("caller", v1::RunRequest { caller: None, ..good.clone() }),
        ("key", v1::RunRequest { key: String::new(), ..good.clone() }),
        ("spec", v1::RunRequest { spec: None, ..good.clone() }),
        ("command", v1::RunRequest { spec: run(""), ..good.clone() }),
    ] {
        let status = client.run(request).await.expect_err(field);
        assert_eq!(status.code(), Code::InvalidArgument);
        match error(status) {
            ExecutorError::InvalidRequest { field: named, .. } => assert_eq!(named, field),
            other => panic!("{field}: {other:?}"),
        }
    }
}

/// All events of a run, heartbeats aside.
async fn events(client: &mut ExecutorClient<Channel>, command: &str, stream_output: bool) -> (Vec<Event>, usize) {
    let spec = run(command);
    let request = v1::RunRequest { caller: nobody(), key: key(), spec, stream_output, ..v1::RunRequest::default() };
    let stream = client.run(request).await.expect("a run").into_inner();
    let all: Vec<Event> =
        stream.map(|event| event.expect("no error").event.expect("an event")).collect::<Vec<_>>().await;
    let (heartbeats, events): (Vec<_>, Vec<_>) =
        all.into_iter().partition(|event| matches!(event, Event::Heartbeat(_)));
    (events, heartbeats.len())
}

/// Joins the chunks of each stream, which must follow one another.
fn joined<'a>(chunks: impl Iterator<Item = &'a v1::StreamChunk>) -> BTreeMap<i32, Vec<u8>> {
    let mut streams: BTreeMap<i32, Vec<u8>> = BTreeMap::new();
    for chunk in chunks {
        assert!(chunk.data.len() <= MAX_CHUNK_BYTES);
        let stream = streams.entry(chunk.stream).or_default();
        assert_eq!(chunk.offset, stream.len() as u64, "no gap");
        stream.extend_from_slice(&chunk.data);
    }
    streams
}

#[tokio::test]
async fn a_run_is_accepted_then_its_tails_then_finished() {
    let daemon = Daemon::start(&[]);
    for channel in [daemon.unix().await, daemon.tcp().await] {
        let mut client = ExecutorClient::with_interceptor(channel, daemon::with_token);
        let request = v1::RunRequest {
            caller: nobody(),
            key: key(),
            spec: run("printf out; printf err >&2; exit 3"),
            ..v1::RunRequest::default()
        };
        let stream = client.run(request).await.expect("a run").into_inner();
        let events: Vec<_> = stream.map(|event| event.expect("no error").event.expect("an event")).collect().await;
        let [Event::Accepted(accepted), Event::Tail(out), Event::Tail(err), Event::Finished(finished)] = &events[..]
        else {
            panic!("other events: {events:?}");
        };
        assert_eq!(accepted.workdir, daemon.dir().as_os_str().as_encoded_bytes());
        assert_eq!((&out.data[..], &err.data[..]), (&b"out"[..], &b"err"[..]));
        assert_eq!(finished.exit, Some(v1::Exit { exit: Some(v1::exit::Exit::Code(3)) }));
    }
}

#[tokio::test]
async fn output_comes_as_it_is_written_and_silence_has_heartbeats() {
    let daemon = Daemon::start(&["--heartbeat-ms", "20"]);
    let mut client = client(daemon.unix().await);
    // The command waits for a file that is made only after its first output has arrived.
    let request = v1::RunRequest {
        caller: nobody(),
        key: key(),
        spec: run("echo first; while [ ! -e go ]; do sleep 0.05; done; echo second >&2"),
        stream_output: true,
        ..v1::RunRequest::default()
    };
    let mut stream = client.run(request).await.expect("a run").into_inner();
    let mut chunks = Vec::new();
    let mut heartbeats = 0;
    while let Some(event) = stream.message().await.expect("no error") {
        match event.event.expect("an event") {
            Event::Output(chunk) => chunks.push(chunk),
            Event::Heartbeat(_) => heartbeats += 1,
            Event::Accepted(_) | Event::Finished(_) => {}
            Event::Tail(tail) => panic!("a tail beside the output: {tail:?}"),
        }
        if !chunks.is_empty() && heartbeats > 1 {
            std::fs::write(daemon.dir().join("go"), "").expect("a file");
        }
    }
    assert!(heartbeats > 1);
    let streams = joined(chunks.iter());
    assert_eq!(streams[&v1::StreamName::Stdout.into()], b"first\n");
    assert_eq!(streams[&v1::StreamName::Stderr.into()], b"second\n");
}

#[tokio::test]
async fn no_message_is_larger_than_the_protocol_allows() {
    let daemon = Daemon::start(&["--max-output-bytes", "4000000", "--max-finished-per-owner", "200"]);
    // A client that takes no more than the protocol allows.
    let mut client = client(daemon.unix().await).max_decoding_message_size(MAX_DAEMON_MESSAGE_BYTES);
    let command = "head -c 3000000 /dev/zero; head -c 3000000 /dev/zero >&2";
    for stream_output in [false, true] {
        let (events, _) = events(&mut client, command, stream_output).await;
        let chunks = events.iter().filter_map(|event| match event {
            Event::Output(chunk) | Event::Tail(chunk) => Some(chunk),
            Event::Accepted(_) | Event::Heartbeat(_) | Event::Finished(_) => None,
        });
        let streams = joined(chunks);
        assert_eq!(streams.values().map(Vec::len).collect::<Vec<_>>(), [3_000_000, 3_000_000]);
    }

    // 100 tasks with 4 KiB of command each are more than one message.
    let padding = "#".repeat(4_096);
    for _ in 0..100 {
        let request = v1::StartTaskRequest { caller: nobody(), key: key(), spec: run(&format!("true {padding}")) };
        client.start_task(request).await.expect("a task");
    }
    let mut batches = client.list_tasks(v1::ListTasksRequest { caller: nobody() }).await.expect("a list").into_inner();
    let mut ids = Vec::new();
    let mut messages = 0;
    while let Some(batch) = batches.message().await.expect("no error") {
        messages += 1;
        ids.extend(batch.tasks.into_iter().map(|task| task.task_id));
    }
    assert!(messages > 1, "{messages}");
    let wanted: Vec<_> = (1..=100).map(|n| format!("bash-{n}")).collect();
    assert_eq!(ids.into_iter().filter(|id| id.starts_with("bash-")).collect::<Vec<_>>(), wanted);
}

#[tokio::test]
async fn a_read_that_waits_has_heartbeats_and_then_the_end() {
    use v1::read_output_event::Event;
    let daemon = Daemon::start(&["--heartbeat-ms", "20"]);
    let mut client = client(daemon.unix().await);
    let spec = run("echo begun; while [ ! -e go ]; do sleep 0.05; done; exit 7");
    let start = v1::StartTaskRequest { caller: nobody(), key: key(), spec };
    let task_id = client.start_task(start).await.expect("a task").into_inner().task_id;
    let read = v1::ReadOutputRequest { caller: nobody(), task_id, read_id: key(), wait_ms: Some(600_000.0) };
    let mut stream = client.read_output(read).await.expect("a read").into_inner();
    let (mut heartbeats, mut text, mut status) = (0, Vec::new(), None);
    while let Some(event) = stream.message().await.expect("no error") {
        match event.event.expect("an event") {
            Event::Heartbeat(_) => heartbeats += 1,
            Event::Chunk(chunk) => text.extend_from_slice(&chunk.data),
            Event::Status(last) => status = Some(last),
        }
        if heartbeats == 2 {
            std::fs::write(daemon.dir().join("go"), "").expect("a file");
        }
    }
    assert!(heartbeats >= 2);
    assert_eq!(text, b"begun\n");
    let status = status.expect("a status");
    let code = v1::Exit { exit: Some(v1::exit::Exit::Code(7)) };
    assert_eq!(status.status.expect("one").status, Some(v1::task_status::Status::Ended(code)));
    assert_eq!(status.stdout.expect("a delta").end, 6);
}

#[tokio::test]
async fn completions_are_watched_and_acknowledged() {
    use v1::watch_tasks_event::Event;
    let daemon = Daemon::start(&["--heartbeat-ms", "50"]);
    let mut client = client(daemon.unix().await);
    let caller = Some(v1::Caller { owner: Some("s".into()) });
    let ownerless = client.watch_tasks(v1::WatchTasksRequest { caller: nobody() }).await.expect_err("no owner");
    assert_eq!(ownerless.code(), Code::InvalidArgument);

    let start = v1::StartTaskRequest { caller: caller.clone(), key: key(), spec: run("exit 4") };
    let task_id = client.start_task(start).await.expect("a task").into_inner().task_id;
    let mut watch =
        client.watch_tasks(v1::WatchTasksRequest { caller: caller.clone() }).await.expect("a watch").into_inner();
    let completion = loop {
        match watch.message().await.expect("no error").expect("no end").event.expect("an event") {
            Event::Completion(completion) => break completion,
            Event::CaughtUp(_) | Event::Heartbeat(_) => {}
        }
    };
    assert_eq!(completion.task_id, task_id);
    let ack = v1::AckCompletionsRequest { caller: caller.clone(), up_to_sequence: completion.sequence };
    client.ack_completions(ack).await.expect("acknowledged");
    let mut again = client.watch_tasks(v1::WatchTasksRequest { caller }).await.expect("a watch").into_inner();
    let first = again.message().await.expect("no error").expect("no end").event.expect("an event");
    assert!(matches!(first, Event::CaughtUp(_)), "{first:?}");
}

#[tokio::test]
async fn a_stream_is_read_by_offset_and_followed() {
    use v1::read_stream_event::Event;
    let daemon = Daemon::start(&["--heartbeat-ms", "20"]);
    let mut client = client(daemon.unix().await);
    let spec = run("printf 0123456789; while [ ! -e go ]; do sleep 0.05; done; printf abc");
    let start = v1::StartTaskRequest { caller: nobody(), key: key(), spec };
    let task_id = client.start_task(start).await.expect("a task").into_inner().task_id;
    let stream = v1::StreamName::Stdout.into();
    let read = v1::ReadStreamRequest { caller: nobody(), task_id, stream, offset: 4, follow: true };
    let mut events = client.read_stream(read.clone()).await.expect("a stream").into_inner();
    let (mut bytes, mut end, mut heartbeats) = (Vec::new(), None, 0);
    while let Some(event) = events.message().await.expect("no error") {
        match event.event.expect("an event") {
            Event::Chunk(chunk) => {
                assert_eq!(chunk.offset, 4 + bytes.len() as u64);
                bytes.extend_from_slice(&chunk.data);
            }
            Event::Heartbeat(_) => heartbeats += 1,
            Event::End(last) => end = Some(last),
        }
        if bytes.len() == 6 && heartbeats > 0 {
            std::fs::write(daemon.dir().join("go"), "").expect("a file");
        }
    }
    assert_eq!(bytes, b"456789abc");
    assert_eq!(end, Some(v1::StreamEnd { total: 13, closed: true }));
    let bad = client.read_stream(v1::ReadStreamRequest { stream: 0, ..read }).await.expect_err("no stream");
    assert_eq!(error(bad), ExecutorError::invalid("stream", "is missing"));
}

#[tokio::test]
async fn sigterm_drains() {
    let mut daemon = Daemon::start(&["--grace-ms", "300"]);
    let mut client = client(daemon.unix().await);
    let request = v1::RunRequest {
        caller: nobody(),
        key: key(),
        // It outlives SIGTERM for as long as the grace, so that there is a time in which the daemon drains.
        spec: run("trap '' TERM; touch begun; while :; do sleep 0.05; done"),
        ..v1::RunRequest::default()
    };
    let mut stream = client.run(request.clone()).await.expect("a run").into_inner();
    wait_until("the command has begun", || daemon.dir().join("begun").exists().then_some(())).await;
    let mut health = HealthClient::new(daemon.unix().await);
    let mut watched = health.watch(HealthCheckRequest { service: String::new() }).await.expect("a watch").into_inner();
    let first = watched.message().await.expect("no error").expect("a status");
    assert_eq!(first.status(), ServingStatus::Serving);

    daemon.terminate();
    let second = watched.message().await.expect("no error").expect("a status");
    assert_eq!(second.status(), ServingStatus::NotServing);
    let refused = client.run(v1::RunRequest { key: key(), ..request }).await.expect_err("it stops");
    assert_eq!(error(refused), ExecutorError::Stopping);
    let mut finished = None;
    while let Some(event) = stream.message().await.expect("no error") {
        if let Some(Event::Finished(last)) = event.event {
            finished = Some(last);
        }
    }
    let finished = finished.expect("the run has its result");
    assert_eq!(finished.ended_by(), v1::EndedBy::ExecutorStopping);
    assert_eq!(finished.exit, Some(v1::Exit { exit: Some(v1::exit::Exit::Signal(9)) }));
    assert_eq!(daemon.wait().await.code(), Some(0));
    assert!(!daemon.socket().exists());
}

#[tokio::test]
async fn a_second_daemon_on_the_same_state_is_refused() {
    let daemon = Daemon::start(&[]);
    let state = daemon.dir().join("state").display().to_string();
    let me = nix::unistd::geteuid().to_string();
    let socket = format!("unix:{}", daemon.dir().join("second.sock").display());
    let second = Daemon::program(&["serve", "--listen", &socket, "--state-dir", &state, "--run-as", &me]);
    assert_eq!(second.status.code(), Some(125));
    let stderr = String::from_utf8(second.stderr).expect("UTF-8");
    assert_eq!(stderr.lines().count(), 1, "{stderr}");
    assert!(stderr.contains(&format!("another daemon (pid {}) uses it", daemon.pid())), "{stderr}");
}

#[tokio::test]
async fn each_call_is_one_line_in_the_log_without_its_command() {
    let daemon = Daemon::start(&["--log-format", "json"]);
    let mut client = client(daemon.unix().await);
    let (_, _) = events(&mut client, "echo hush-hush; exit 5", false).await;
    let lines = wait_until("the call is logged", || {
        let log = daemon.log();
        log.contains("\"rpc\":\"Run\"").then_some(log)
    })
    .await;
    let run: Vec<_> = lines.lines().filter(|line| line.contains("\"rpc\":\"Run\"")).collect();
    assert_eq!(run.len(), 1, "{lines}");
    for part in ["\"tenant\":\"default\"", "\"task\":\"run-1\"", "\"outcome\":\"exit code 5\"", "\"ms\":"] {
        assert!(run[0].contains(part), "{part}: {}", run[0]);
    }
    assert!(!lines.contains("hush"), "{lines}");
}

/// Started by other tests as somebody else: asks the daemon that the environment names, and fails.
#[tokio::test]
#[ignore = "run by other tests only"]
async fn as_somebody_else() {
    let Some(socket) = std::env::var_os("SOCKET_UNDER_TEST") else { return };
    let mut client = client(daemon::connect_unix(socket.into()).await);
    println!("reason: {}", refusal(client.get_info(v1::GetInfoRequest {}).await.expect_err("refused")));
}

#[tokio::test]
async fn a_command_of_the_daemon_is_not_served_on_its_socket() {
    let daemon = Daemon::start(&[]);
    let mut client = client(daemon.unix().await);
    let test = std::env::current_exe().expect("this program").display().to_string();
    let socket = daemon.socket().display().to_string();
    let command = format!("SOCKET_UNDER_TEST={socket} {test} --exact as_somebody_else --include-ignored --nocapture");
    // Directly, and from a process whose parents have all exited.
    for command in [
        command.clone(),
        format!(
            "(setsid bash -c '{command} > escaped; touch done' &) ; while [ ! -e done ]; do sleep 0.05; done; cat escaped"
        ),
    ] {
        let (events, _) = events(&mut client, &command, false).await;
        let chunks = events.iter().filter_map(|event| if let Event::Tail(chunk) = event { Some(chunk) } else { None });
        let out = joined(chunks).remove(&v1::StreamName::Stdout.into()).unwrap_or_default();
        let out = String::from_utf8_lossy(&out).into_owned();
        assert!(out.contains("reason: the caller is one of this executor's own commands"), "{out}");
    }
}

#[tokio::test]
async fn another_user_is_not_served_on_the_socket() {
    if !nix::unistd::geteuid().is_root() {
        println!("not root: another user cannot be tried");
        return;
    }
    let daemon = Daemon::start(&[]);
    daemon.open_to_everybody();
    let output = daemon::this_test_as(65_534, "as_somebody_else", &daemon.socket());
    let out = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(out.contains("reason: this socket serves uid 0, the caller is uid 65534"), "{output:?}");
}

/// A limit for tests that would hang otherwise is the harness's; this one is about a connection that says nothing.
#[tokio::test]
async fn a_connection_that_says_nothing_does_not_keep_the_daemon() {
    let mut daemon = Daemon::start(&[]);
    let _silent = tokio::net::UnixStream::connect(daemon.socket()).await.expect("a connection");
    daemon.terminate();
    let ended = tokio::time::timeout(Duration::from_secs(20), daemon.wait()).await.expect("it ends");
    assert_eq!(ended.code(), Some(0));
}
