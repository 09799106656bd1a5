//! What is logged of every call: one line, with who, what and why; and never output, tokens, values or the text of commands.

use super::*;

/// In the text of commands, in what they write, in what they are given.
const SECRETS: [&str; 5] = ["CANARY-COMMAND", "CANARY-OUTPUT", "CANARY-VALUE", "CANARY-STDIN", "CANARY-WORDS"];

fn secret_spec(rest: &str) -> Option<v1::CommandSpec> {
    // What it writes is not in its text.
    let command = format!(": CANARY-COMMAND; printf 'CANARY-%s\\n' OUTPUT; cat; printenv SECRET >&2; {rest}");
    Some(v1::CommandSpec {
        command: command.into(),
        environment: vec![v1::EnvironmentVariable { name: "SECRET".into(), value: "CANARY-VALUE".into() }],
        stdin: Some("CANARY-STDIN".into()),
        ..v1::CommandSpec::default()
    })
}

fn owner() -> Option<v1::Caller> {
    Some(v1::Caller { owner: Some("me".to_owned()) })
}

/// Makes every call once, and some that are refused; returns how often each was made.
async fn everything(daemon: &Daemon) -> BTreeMap<&'static str, usize> {
    let mut client = client(daemon.unix().await);
    let caller = owner();
    client.get_info(v1::GetInfoRequest {}).await.expect("info");
    let request = v1::RunRequest {
        caller: caller.clone(),
        key: key(),
        spec: secret_spec("true"),
        stream_output: true,
        ..v1::RunRequest::default()
    };
    let mut events = client.run(request.clone()).await.expect("it starts").into_inner();
    let mut written = Vec::new();
    while let Some(event) = events.message().await.expect("it goes on") {
        if let Some(Event::Output(chunk)) = event.event {
            written.extend_from_slice(&chunk.data);
        }
    }
    let written = String::from_utf8(written).expect("text");
    for secret in ["CANARY-OUTPUT", "CANARY-STDIN", "CANARY-VALUE"] {
        assert!(written.contains(secret), "{written}");
    }
    // The same key with another command.
    let other = v1::RunRequest { spec: run(": CANARY-COMMAND again"), ..request };
    assert_eq!(error(client.run(other).await.expect_err("a conflict")), ExecutorError::KeyConflict);
    let start = v1::StartTaskRequest { caller: caller.clone(), key: key(), spec: secret_spec("sleep 60") };
    let task_id = client.start_task(start).await.expect("it starts").into_inner().task_id;
    let over = v1::StartTaskRequest { caller: caller.clone(), key: key(), spec: secret_spec("true") };
    client.start_task(over).await.expect_err("one task is all");
    let read = v1::ReadOutputRequest {
        caller: caller.clone(),
        task_id: task_id.clone(),
        read_id: "1".into(),
        ..v1::ReadOutputRequest::default()
    };
    let mut events = client.read_output(read).await.expect("it is read").into_inner();
    while events.message().await.expect("it goes on").is_some() {}
    client.get_task(v1::GetTaskRequest { caller: caller.clone(), task_id: task_id.clone() }).await.expect("known");
    let unknown = v1::GetTaskRequest { caller: caller.clone(), task_id: "bash-999".into() };
    client.get_task(unknown).await.expect_err("never issued");
    let mut tasks =
        client.list_tasks(v1::ListTasksRequest { caller: caller.clone() }).await.expect("a list").into_inner();
    while tasks.message().await.expect("it goes on").is_some() {}
    let stream = v1::ReadStreamRequest {
        caller: caller.clone(),
        task_id: task_id.clone(),
        stream: v1::StreamName::Stdout.into(),
        ..v1::ReadStreamRequest::default()
    };
    let mut events = client.read_stream(stream).await.expect("it is read").into_inner();
    while events.message().await.expect("it goes on").is_some() {}
    client.kill_task(v1::KillTaskRequest { caller: caller.clone(), task_id }).await.expect("killed");
    client.cancel_run(v1::CancelRunRequest { caller: caller.clone(), key: key() }).await.expect("nothing to end");
    let ack = v1::AckCompletionsRequest { caller: caller.clone(), up_to_sequence: 1 };
    client.ack_completions(ack).await.expect("acknowledged");
    let watch = client.watch_tasks(v1::WatchTasksRequest { caller }).await.expect("a watch");
    drop(watch);
    // Refused before it was a call of anybody.
    let mut stranger = super::client(daemon.tcp().await);
    stranger.get_info(bearer(v1::GetInfoRequest {}, "CANARY-WORDS-0123456789")).await.expect_err("not known");
    BTreeMap::from([
        ("GetInfo", 1),
        ("Run", 2),
        ("StartTask", 2),
        ("ReadOutput", 1),
        ("GetTask", 2),
        ("ListTasks", 1),
        ("ReadStream", 1),
        ("KillTask", 1),
        ("CancelRun", 1),
        ("AckCompletions", 1),
        ("WatchTasks", 1),
    ])
}

#[tokio::test]
async fn every_call_is_one_line_and_no_line_holds_what_is_nobodys_business() {
    for format in ["text", "json"] {
        let options = ["--log-format", format, "--log-level", "debug", "--max-tasks-per-owner", "1"];
        let mut daemon = Daemon::start(&options);
        let made = everything(&daemon).await;
        let all: usize = made.values().sum();
        let is_call = |line: &&str| match format {
            "json" => line.contains(r#""message":"call""#),
            _ => line.contains(" call "),
        };
        wait_until("every call has its line", || (daemon.log().lines().filter(is_call).count() >= all).then_some(()))
            .await;
        daemon.terminate();
        assert!(daemon.wait().await.success());
        let log = daemon.log();
        for secret in SECRETS.into_iter().chain([TOKEN]) {
            assert!(!log.contains(secret), "{secret}:\n{log}");
        }
        for (rpc, times) in made {
            let named = match format {
                "json" => format!(r#""rpc":"{rpc}""#),
                _ => format!(r#"rpc="{rpc}""#),
            };
            let lines: Vec<_> = log.lines().filter(|line| line.contains(&named)).collect();
            assert_eq!(lines.len(), times, "{rpc}:\n{log}");
            for line in lines {
                assert!(line.contains("unix uid ") && line.contains("default"), "who: {line}");
                assert!(line.contains("outcome"), "{line}");
            }
        }
        let told = |words: &str| log.lines().filter(|line| line.contains(words)).count();
        assert_eq!(told("the token is not known"), 1, "{log}");
        assert_eq!(told("refused: over its limit: running tasks (1 of 1)"), 1, "{log}");
        assert_eq!(told("refused: start key conflict"), 1, "{log}");
        if format == "json" {
            for line in log.lines().filter(|line| is_call(line)) {
                assert!(line.starts_with('{') && line.ends_with('}'), "{line}");
            }
        }
    }
}

#[tokio::test]
async fn at_trace_the_text_of_a_command_is_logged_and_still_nothing_else() {
    let daemon = Daemon::start(&["--log-level", "trace"]);
    let mut client = client(daemon.unix().await);
    let request =
        v1::RunRequest { caller: owner(), key: key(), spec: secret_spec("true"), ..v1::RunRequest::default() };
    let mut events = client.run(request).await.expect("it starts").into_inner();
    while events.message().await.expect("it goes on").is_some() {}
    wait_until("the call has its line", || daemon.log().contains("exit code 0").then_some(())).await;
    let log = daemon.log();
    assert_eq!(log.lines().filter(|line| line.contains("CANARY-COMMAND")).count(), 1, "{log}");
    for secret in &SECRETS[1..4] {
        assert!(!log.contains(secret), "{secret}:\n{log}");
    }
}
