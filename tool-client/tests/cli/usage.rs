//! What is written wrong, and executors that cannot be reached: one line each, that says what to do.

use super::*;

#[track_caller]
fn refused(ended: &Ended, code: i32, parts: &[&str]) {
    assert_eq!(ended.code, Some(code), "{ended:?}");
    assert_eq!(ended.stdout, "");
    assert!(ended.stderr.starts_with("tool-client: ") && ended.stderr.matches('\n').count() == 1, "{ended:?}");
    for part in parts {
        assert!(ended.stderr.contains(part), "{part:?} is not in {:?}", ended.stderr);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_usage_is_64_and_one_line() {
    let cli = Cli::new();
    for (arguments, part) in [
        (&[][..], "subcommand"),
        (&["bahs", "true"], "bash"),
        (&["bash"], "<COMMAND>"),
        (&["bash", ""], "the command is empty"),
        (&["bash", "true", "extra"], "extra"),
        (&["bash", "true", "--tiemout", "1"], "--timeout"),
        (&["bash", "true", "--timeout", "soon"], "expected"),
        (&["bash", "true", "--workdir", ""], "--workdir"),
        (
            &["bash", "true", "--endpoint", "https://x:1"],
            "needs the CA that has signed the daemon's certificate: --ca FILE",
        ),
        (&["bash", "true", "--endpoint", "x:1"], "use unix:/path, https://host:port or"),
        (&["bash", "true", "--endpoint", "http://x:1", "--token-file", "/none"], "token file /none: No such file"),
        (&["ps", "--endpoint", "https://x:1", "--ca", "/none"], "CA file /none: No such file"),
        (
            &["ps", "--endpoint", "https://x:1", "--ca", "/none", "--cert", "c"],
            "a certificate needs its key: --key FILE",
        ),
        (&["kill"], "<ID>"),
        (&["call", "bash"], "<JSON>"),
        (&["completions", "csh"], "csh"),
    ] {
        refused(&cli.run(arguments), 64, &[part]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_starts_or_names_a_task_needs_an_endpoint() {
    let cli = Cli::new();
    for arguments in [
        &["bash", "true", "--background"][..],
        &["output", "bash-1"],
        &["kill", "bash-1"],
        &["ps"],
        &["logs", "bash-1"],
        &["notices", "--owner", "me"],
        &["call", "bash", r#"{"command": "true", "description": "d", "run_in_background": true}"#],
        &["call", "bash_output", r#"{"task_id": "bash-1"}"#],
        &["call", "bash_kill", r#"{"task_id": "bash-1"}"#],
    ] {
        refused(&cli.run(arguments), 64, &["--endpoint", "EXECUTOR_ENDPOINT", "config file"]);
    }
    refused(&cli.run(&["notices", "--endpoint", "unix:/none"]), 64, &["--owner"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_executor_that_is_not_there_is_125_and_named() {
    let cli = Cli::new();
    let socket = cli.home.path().join("none.sock");
    let endpoint = format!("unix:{}", socket.display());
    for arguments in
        [&["bash", "true"][..], &["output", "bash-1"], &["kill", "bash-1"], &["ps"], &["logs", "bash-1"], &["info"]]
    {
        let ended = cli.run(&[arguments, &["--endpoint", &endpoint]].concat());
        refused(&ended, 125, &[&format!("executor unavailable: {endpoint}: no such file or directory")]);
    }
    let free = std::net::TcpListener::bind("127.0.0.1:0").and_then(|one| one.local_addr()).expect("a free port");
    let ended = cli.run(&["bash", "true", "--endpoint", &format!("http://{free}")]);
    refused(&ended, 125, &[&format!("executor unavailable: http://{free}: connection refused")]);
    let ended = cli.run(&["call", "bash", r#"{"command": "true", "description": "d"}"#, "--endpoint", &endpoint]);
    assert_eq!(
        (ended.code, ended.stderr.as_str(), ended.stdout),
        (Some(1), "", format!("Error: executor unavailable: {endpoint}: no such file or directory"))
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bad_config_names_all_that_is_wrong() {
    let cli = Cli::with_config("endpoint = \"nowhere\"\ntoken_file = true\nownr = \"me\"\n");
    refused(&cli.run(&["info"]), 64, &["config.toml", "nowhere", "token_file must be", "unknown key \"ownr\""]);
    refused(&Cli::with_config("endpoint = ").run(&["info"]), 64, &["config.toml: line 1"]);
    let cli = Cli::with_config("");
    let path = cli.home.path().join(".config/tool-client/config.toml");
    std::fs::remove_file(&path).and_then(|()| std::fs::create_dir(&path)).expect("replaced");
    refused(&cli.run(&["info"]), 64, &["config.toml", "directory"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_config_file_gives_the_endpoint_the_token_and_the_owner() {
    let daemon = Daemon::start(Script {
        starts: [Some(Ok(v1::StartTaskResponse { task_id: "bash-9".into() }))].into(),
        ..Script::default()
    });
    let cli =
        Cli::with_config(&format!("endpoint = \"{}\"\ntoken_file = \"token\"\nowner = \"me\"\n", daemon.endpoint()));
    std::fs::write(cli.home.path().join(".config/tool-client/token"), "s3cret\n").expect("written");
    let ended = cli.run(&["bash", "true", "--background", "--workdir", "/"]);
    assert_eq!((ended.code, ended.stdout.as_str(), ended.stderr.as_str()), (Some(0), "bash-9\n", ""));
    let seen = daemon.seen();
    assert_eq!(seen.owners, [Some("me".to_owned())]);
    assert_eq!(seen.metadata[0].get("authorization").expect("a token"), "Bearer s3cret");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_daemon_refuses_is_125_in_the_models_words() {
    let start = |error: ExecutorError| Some(Err(error.to_status()));
    let daemon = Daemon::start(Script {
        starts: [
            start(ExecutorError::OverLimit { what: "running tasks".into(), used: 3, limit: 3 }),
            start(ExecutorError::Refused { reason: "no token".into() }),
            Some(Err(tonic::Status::unimplemented("what?"))),
        ]
        .into(),
        runs: [Err(ExecutorError::UnknownTask(TaskId("x".into())).to_status())].into(),
        ..Script::default()
    });
    let cli = Cli::new();
    for part in [
        "executor over its limit: running tasks (3 of 3)",
        "executor refused the caller: no token",
        "does not speak this protocol",
    ] {
        refused(&cli.run_at(&daemon, &["bash", "true", "--background"]), 125, &[part]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn whoever_has_no_token_is_told_where_to_name_one() {
    let refusal = ExecutorError::Refused { reason: "no token: send it as `authorization: Bearer TOKEN`".into() };
    let daemon =
        Daemon::start(Script { starts: (0..3).map(|_| Some(Err(refusal.to_status()))).collect(), ..Script::default() });
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a free port");
    let endpoint = format!("http://{}", listener.local_addr().expect("it is bound"));
    let socket = daemon.endpoint().replace("unix:", "");
    tokio::spawn(async move {
        while let Ok((mut client, _)) = listener.accept().await {
            let mut daemon = tokio::net::UnixStream::connect(&socket).await.expect("the daemon listens");
            tokio::spawn(async move { tokio::io::copy_bidirectional(&mut client, &mut daemon).await });
        }
    });
    let cli = Cli::new();
    let arguments = ["bash", "true", "--background", "--endpoint", &endpoint];
    let ways = ["executor refused the caller: no token", "--token-file FILE or EXECUTOR_TOKEN_FILE"];
    refused(&cli.run(&arguments), 125, &ways);
    let call = r#"{"command": "true", "description": "d", "run_in_background": true}"#;
    let ended = cli.run(&["call", "bash", call, "--endpoint", &endpoint]);
    assert!(
        ended.code == Some(1) && ended.stdout.starts_with("Error: executor refused the caller: no token"),
        "{ended:?}"
    );
    assert!(ended.stderr.contains(ways[1]), "{ended:?}");
    let token = cli.home.path().join("token");
    std::fs::write(&token, "s3cret\n").expect("written");
    let ended = cli.run(&[&arguments[..], &["--token-file", token.to_str().expect("a plain path")]].concat());
    refused(&ended, 125, &["executor refused the caller: no token"]);
    assert!(!ended.stderr.contains("--token-file"), "it has named one: {ended:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_workdir_beyond_all_names_is_not_printed_whole() {
    let long = format!("/{}", "x".repeat(100_000));
    let ended = Cli::new().run(&["bash", "true", "--workdir", &long]);
    refused(&ended, 125, &["workdir", "xxx…xxx"]);
    assert!(ended.stderr.len() < 1_100, "{} bytes", ended.stderr.len());
}

#[tokio::test(flavor = "multi_thread")]
async fn stdin_above_the_limit_is_refused_before_anything_runs() {
    let daemon = Daemon::start(Script::default());
    let cli = Cli::new();
    let path: PathBuf = cli.home.path().join("huge");
    std::fs::File::create(&path).and_then(|mut file| file.write_all(&vec![b'x'; (8 << 20) + 1])).expect("written");
    let mut command = cli.command(&["bash", "wc -c", "--stdin", "--endpoint", &daemon.endpoint()]);
    command.stdin(std::fs::File::open(&path).expect("it is there"));
    refused(&ended(command), 125, &["stdin too large", "8388608"]);
    assert!(daemon.seen().calls.is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_is_spoken_of_as_a_run() {
    let outcome = |already_finished| v1::KillOutcome { already_finished, survivors: Vec::new() };
    let daemon =
        Daemon::start(Script { kills: [outcome(false), outcome(true), outcome(true)].into(), ..Script::default() });
    let cli = Cli::new();
    let kill = |id: &str| cli.run(&["kill", id, "--endpoint", &daemon.endpoint()]).stdout;
    assert_eq!(kill("run-7"), "run-7: killed what was running of it\n");
    assert_eq!(kill("run-7"), "run-7: nothing of it is running\n");
    assert_eq!(kill("bash-7"), "task bash-7 had already finished\n");
}
