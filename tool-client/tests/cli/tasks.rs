//! `output`, `kill`, `ps`, `logs`, `notices` and `info`.

use super::*;

fn running() -> v1::TaskStatus {
    v1::TaskStatus { status: Some(v1::task_status::Status::Running(v1::task_status::Running {})) }
}

fn ended_with(code: u32) -> v1::TaskStatus {
    let exit = v1::Exit { exit: Some(v1::exit::Exit::Code(code)) };
    v1::TaskStatus { status: Some(v1::task_status::Status::Ended(exit)) }
}

fn read(start: u64, data: &'static [u8], dropped: u64, status: v1::TaskStatus) -> Vec<v1::ReadOutputEvent> {
    let spill = Some(v1::Spill { path: Bytes::from_static(b"/spill/1"), cut_at: None });
    let part = |event| v1::ReadOutputEvent { event: Some(event) };
    vec![
        part(v1::read_output_event::Event::Chunk(chunk(v1::StreamName::Stdout, start, data))),
        part(v1::read_output_event::Event::Status(v1::ReadOutputStatus {
            status: Some(status),
            stdout: Some(v1::StreamDelta { start, end: start + data.len() as u64, dropped, spill, missing: 0 }),
            stderr: Some(v1::StreamDelta::default()),
        })),
    ]
}

#[tokio::test(flavor = "multi_thread")]
async fn output_is_what_is_new_and_the_status_is_beside_it() {
    let daemon = Daemon::start(Script {
        reads: [
            read(0, b"one\n", 0, running()),
            read(9, b"two\n", 5, running()),
            // With --wait: the daemon's longest wait ends before the task does.
            read(13, b"three", 0, running()),
            read(18, b"!", 0, ended_with(4)),
        ]
        .into(),
        ..Script::default()
    });
    let cli = Cli::new();
    let ended =
        |code, stdout: &str, stderr: &str| Ended { code: Some(code), stdout: stdout.into(), stderr: stderr.into() };
    assert_eq!(cli.run_at(&daemon, &["output", "bash-1"]), ended(0, "one\n", "tool-client: bash-1 running\n"));
    assert_eq!(
        cli.run_at(&daemon, &["output", "bash-1"]),
        ended(
            0,
            "two\n",
            "tool-client: bytes 4 to 9 of stdout are no longer kept; the whole is in /spill/1\ntool-client: bash-1 running\n"
        )
    );
    assert_eq!(
        cli.run_at(&daemon, &["output", "bash-1", "--wait"]),
        ended(4, "three!", "tool-client: bash-1 exit code 4\n")
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_kill_tells_what_it_found() {
    let daemon = Daemon::start(Script {
        kills: [
            v1::KillOutcome { already_finished: false, survivors: vec![] },
            v1::KillOutcome { already_finished: true, survivors: vec![] },
            v1::KillOutcome { already_finished: false, survivors: vec![3, 4] },
        ]
        .into(),
        ..Script::default()
    });
    let cli = Cli::new();
    let told = [
        (0, "killed background task bash-1\n", ""),
        (0, "task bash-1 had already finished\n", ""),
        (125, "", "tool-client: could not end task bash-1: still running: 3, 4\n"),
    ];
    for (code, stdout, stderr) in told {
        let expected = Ended { code: Some(code), stdout: stdout.into(), stderr: stderr.into() };
        assert_eq!(cli.run_at(&daemon, &["kill", "bash-1"]), expected);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_list_is_for_people_or_for_programs() {
    let task = v1::TaskInfo {
        task_id: "bash-1".into(),
        owner: Some("me".into()),
        command: Bytes::from_static(b"printf '\x1b[2J'"),
        workdir: Bytes::from_static(b"/work"),
        status: Some(running()),
        started_at_ms: 1,
        shell_pid: Some(77),
        leftovers: vec![v1::Process { pid: 78, command_line: Bytes::from_static(b"\x07") }],
        ..v1::TaskInfo::default()
    };
    let daemon = Daemon::start(Script { lists: [vec![task.clone()], vec![task], vec![]].into(), ..Script::default() });
    let cli = Cli::new();
    let table = cli.run_at(&daemon, &["ps"]);
    assert_eq!(table.code, Some(0));
    assert!(
        table.stdout.contains("printf '^[[2J'") && !table.stdout.contains('\x1b') && !table.stdout.contains('\x07'),
        "{table:?}"
    );
    let json = cli.run_at(&daemon, &["ps", "--json"]);
    let expected = concat!(
        r#"[{"id":"bash-1","owner":"me","command":"printf '\u001b[2J'","workdir":"/work","status":"running","#,
        r#""exit_code":null,"signal":null,"exit_unknown":null,"started_at_ms":1,"ended_at_ms":null,"stdout_bytes":0,"#,
        r#""stderr_bytes":0,"shell_pid":77,"leftovers":[{"pid":78,"command":"\u0007"}]}]"#,
        "\n"
    );
    assert_eq!(json.stdout, expected);
    assert_eq!(cli.run_at(&daemon, &["ps", "--json"]).stdout, "[]\n");
}

#[tokio::test(flavor = "multi_thread")]
async fn logs_are_raw_where_no_terminal_reads_them() {
    let part = |event| v1::ReadStreamEvent { event: Some(event) };
    let bytes = |stream, offset, data| part(v1::read_stream_event::Event::Chunk(chunk(stream, offset, data)));
    let end = |total| part(v1::read_stream_event::Event::End(v1::StreamEnd { total, closed: true }));
    let daemon = Daemon::start(Script {
        streams: Some([
            vec![bytes(v1::StreamName::Stdout, 0, b"\x1b[1mo\n"), bytes(v1::StreamName::Stdout, 10, b"p\n"), end(12)],
            vec![bytes(v1::StreamName::Stderr, 0, b"e\n"), end(2)],
        ]),
        ..Script::default()
    });
    let ended = Cli::new().run_at(&daemon, &["logs", "bash-1"]);
    assert_eq!(ended.stdout, "\x1b[1mo\np\n");
    let mut said: Vec<_> = ended.stderr.lines().collect();
    said.sort_unstable();
    assert_eq!(said, ["e", "tool-client: bytes 6 to 10 of stdout are no longer kept"]);
    assert_eq!(ended.code, Some(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn notices_are_printed_once_and_acknowledged() {
    let event = |event| v1::WatchTasksEvent { event: Some(event) };
    let completion = |sequence, code| {
        event(v1::watch_tasks_event::Event::Completion(v1::Completion {
            sequence,
            task_id: format!("bash-{sequence}"),
            status: Some(ended_with(code)),
            ended_at_ms: 5,
        }))
    };
    let caught_up = || event(v1::watch_tasks_event::Event::CaughtUp(v1::watch_tasks_event::CaughtUp {}));
    let daemon = Daemon::start(Script {
        watches: [vec![completion(1, 0), completion(2, 3), caught_up(), completion(3, 0)]].into(),
        ..Script::default()
    });
    let cli = Cli::new();
    let ended = cli.run_at(&daemon, &["notices", "--owner", "me"]);
    let expected = "background bash task bash-1 finished [status: completed, exit code: 0]. Read its output with bash_output.\n\
                    background bash task bash-2 finished [status: completed, exit code: 3]. Read its output with bash_output.\n";
    assert_eq!(ended, Ended { code: Some(0), stdout: expected.into(), stderr: String::new() });
    assert_eq!(daemon.seen().acknowledged, [1, 2]);

    // Followed, a stream that ends is opened again, and what comes twice is printed once.
    let killed = v1::task_status::Status::Killed(v1::task_status::Killed { signal: Some(15) });
    let last = event(v1::watch_tasks_event::Event::Completion(v1::Completion {
        sequence: 4,
        task_id: "bash-4".into(),
        status: Some(v1::TaskStatus { status: Some(killed) }),
        ended_at_ms: 6,
    }));
    daemon.rewrite(|script| {
        script.watches = [vec![completion(3, 0), caught_up()], vec![completion(3, 0), last, caught_up()]].into();
    });
    let mut command =
        cli.command(&["notices", "--owner", "me", "--follow", "--json", "--endpoint", &daemon.endpoint()]);
    let mut child = command.spawn().expect("the binary starts");
    let mut lines = std::io::BufRead::lines(std::io::BufReader::new(child.stdout.take().expect("piped")));
    let mut next = || tokio::task::block_in_place(|| lines.next()).expect("a line").expect("it reads");
    assert!(
        next().starts_with(r#"{"owner":"me","sequence":3,"task_id":"bash-3","text":"background bash task bash-3 "#)
    );
    let killed = next();
    assert!(
        killed.contains(r#""sequence":4"#)
            && killed.contains(r#""status":"killed","exit_code":null,"signal":"SIGTERM""#),
        "{killed}"
    );
    child.kill().expect("it follows");
    child.wait().expect("it ends");
}

#[tokio::test(flavor = "multi_thread")]
async fn info_is_a_list() {
    let info = v1::GetInfoResponse {
        version: "9.9.9".into(),
        hostname: "h\x1b[2J".into(),
        stated_limits: vec!["Commands run as root.".into()],
        budgets: Some(v1::Budgets {
            max_spill_bytes_in_all: 20_000,
            max_spill_bytes_per_owner: 10_000,
            max_watchers: 40,
            max_requests: 80,
            max_memory_bytes: 1_000,
            ..v1::Budgets::default()
        }),
        ..v1::GetInfoResponse::default()
    };
    let daemon = Daemon::start(Script { info: [Ok(info)].into(), ..Script::default() });
    let ended = Cli::new().run_at(&daemon, &["info"]);
    assert_eq!(ended.code, Some(0));
    for part in [
        "version          9.9.9\n",
        "not protected    Commands run as root.\n",
        "h^[[2J",
        "spill files      at most 10000 bytes per owner, 20000 in all\n",
        "output rate      not limited\n",
        &daemon.endpoint(),
    ] {
        assert!(ended.stdout.contains(part), "{part:?} is not in {}", ended.stdout);
    }
}
