//! `bash` and `call`.

use std::{
    io::Read,
    time::{Duration, Instant},
};

use super::*;

const OUT: v1::StreamName = v1::StreamName::Stdout;
const ERR: v1::StreamName = v1::StreamName::Stderr;

fn output(stream: v1::StreamName, offset: u64, data: &'static [u8]) -> v1::RunEvent {
    event(Event::Output(chunk(stream, offset, data)))
}

fn finished(finished: v1::RunFinished) -> v1::RunEvent {
    event(Event::Finished(finished))
}

fn total(total: u64) -> Option<v1::StreamResult> {
    Some(v1::StreamResult { total, tail_start: 0, spill: None })
}

#[tokio::test(flavor = "multi_thread")]
async fn bytes_go_through_as_they_are_and_nothing_is_said() {
    let daemon = one_run(vec![
        accepted(),
        output(OUT, 0, b"a\0\xff"),
        output(ERR, 0, b"\x1b[31m"),
        output(OUT, 3, b"end"),
        finished(v1::RunFinished { stdout: total(6), stderr: total(5), ..exit(v1::exit::Exit::Code(7)) }),
    ]);
    let cli = Cli::new();
    let mut command = cli.command(&["bash", "x", "--endpoint", &daemon.endpoint(), "--owner", ""]);
    let output = tokio::task::block_in_place(|| command.output()).expect("the binary starts");
    assert_eq!(output.stdout, b"a\0\xffend");
    assert_eq!(output.stderr, b"\x1b[31m");
    assert_eq!(output.status.code(), Some(7));
    assert_eq!(daemon.seen().owners, [Some(String::new())]);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_exit_code_is_the_commands_own() {
    let survivors = vec![41, 42];
    let cases = [
        (exit(v1::exit::Exit::Code(0)), 0, ""),
        (exit(v1::exit::Exit::Code(255)), 255, ""),
        (exit(v1::exit::Exit::Signal(9)), 137, ""),
        (
            exit(v1::exit::Exit::Unknown("executor restarted".into())),
            125,
            "tool-client: exit unknown: executor restarted\n",
        ),
        (
            v1::RunFinished { timed_out_after_ms: Some(150.5), survivors, ..exit(v1::exit::Exit::Signal(15)) },
            124,
            "tool-client: timed out after 150.5ms\ntool-client: could not be ended: 41, 42\n",
        ),
        (v1::RunFinished { leftovers: vec![7], ..exit(v1::exit::Exit::Code(3)) }, 3, "tool-client: left running: 7\n"),
        (
            v1::RunFinished { ended_by: v1::EndedBy::ExecutorStopping.into(), ..exit(v1::exit::Exit::Signal(15)) },
            143,
            "tool-client: ended: executor stopping\n",
        ),
    ];
    for (end, code, said) in cases {
        let daemon = one_run(vec![accepted(), finished(end)]);
        let ended = Cli::new().run_at(&daemon, &["bash", "x"]);
        assert_eq!((ended.code, ended.stderr.as_str()), (Some(code), said));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn lost_bytes_are_named() {
    let daemon = one_run(vec![
        accepted(),
        output(OUT, 0, b"ab"),
        output(OUT, 10, b"cd"),
        finished(v1::RunFinished { stdout: total(15), stderr: total(5), ..exit(v1::exit::Exit::Code(0)) }),
    ]);
    let ended = Cli::new().run_at(&daemon, &["bash", "x"]);
    assert_eq!((ended.stdout.as_str(), ended.code), ("abcd", Some(125)), "a part is no success");
    let expected = "tool-client: 8 bytes of stdout are lost, from byte 2\n\
                    tool-client: 11 bytes of stdout are lost in all, in 2 places\n\
                    tool-client: 5 bytes of stderr are lost, from byte 0\n";
    assert_eq!(ended.stderr, expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn json_has_everything_on_one_line() {
    let tail = |stream, data| event(Event::Tail(chunk(stream, 3, data)));
    let spill = Some(v1::Spill { path: Bytes::from_static(b"/spill/1"), cut_at: None });
    let daemon = one_run(vec![
        accepted(),
        tail(OUT, b"t\xffil"),
        finished(v1::RunFinished {
            stdout: Some(v1::StreamResult { total: 7, tail_start: 3, spill }),
            timed_out_after_ms: Some(150.0),
            duration_ms: 151.5,
            leftovers: vec![5],
            ..exit(v1::exit::Exit::Signal(15))
        }),
    ]);
    let ended = Cli::new().run_at(&daemon, &["bash", "x", "--json"]);
    assert_eq!((ended.code, ended.stderr.as_str()), (Some(124), ""));
    let expected = concat!(
        r#"{"exit_code":null,"signal":"SIGTERM","exit_unknown":null,"timed_out_after_ms":150,"ended_by":null,"aborted":false,"#,
        "\"stdout\":\"t\u{fffd}il\",",
        r#""stdout_bytes":7,"stdout_dropped":3,"stdout_file":"/spill/1","#,
        r#""stderr":"","stderr_bytes":0,"stderr_dropped":0,"stderr_file":null,"#,
        r#""survivors":[],"leftovers":[5],"sandbox_denied":null,"duration_ms":151.5}"#,
        "\n"
    );
    assert_eq!(ended.stdout, expected);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_request_holds_what_was_written_and_no_more() {
    let ends = || Ok(vec![accepted(), finished(exit(v1::exit::Exit::Code(0)))]);
    let daemon = Daemon::start(Script { runs: [ends(), ends()].into(), ..Script::default() });
    let cli = Cli::new();
    let mut command = cli.command(&["bash", "cat", "--stdin", "--timeout", "1.5s", "--workdir", "sub/dir"]);
    command.env("EXECUTOR_ENDPOINT", daemon.endpoint()).stdin(Stdio::piped());
    let mut child = command.spawn().expect("the binary starts");
    child.stdin.take().expect("piped").write_all(b"in\0put").expect("it reads");
    tokio::task::block_in_place(|| child.wait()).expect("it ends");
    cli.run_at(&daemon, &["bash", "true"]);

    let specs = daemon.seen().specs;
    assert_eq!(specs[0].command, "cat");
    assert_eq!(specs[0].stdin.as_deref(), Some(&b"in\0put"[..]));
    assert_eq!(specs[0].timeout_ms, Some(1500.0));
    // The daemon does not say that it is on this host: its own default directory is where relative ones begin.
    assert_eq!(specs[0].workdir.as_deref(), Some(&b"sub/dir"[..]));
    assert_eq!((&specs[1].stdin, specs[1].timeout_ms, &specs[1].workdir), (&None, None, &None));
    assert!(specs.iter().all(|spec| spec.environment.is_empty()));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_callers_directory_goes_to_a_daemon_on_this_host_only() {
    let boot_id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").expect("Linux has one");
    let here = v1::GetInfoResponse {
        boot_id: boot_id.trim().to_owned(),
        hostname: nix::unistd::gethostname().expect("it has a name").into_string().expect("UTF-8"),
        ..v1::GetInfoResponse::default()
    };
    let container = v1::GetInfoResponse { hostname: "c0ffee".into(), ..here.clone() };
    let ends = || Ok(vec![accepted(), finished(exit(v1::exit::Exit::Code(0)))]);
    let daemon = Daemon::start(Script {
        info: [Ok(here.clone()), Ok(here), Ok(container)].into(),
        runs: [ends(), ends(), ends()].into(),
        ..Script::default()
    });
    let cli = Cli::new();
    for arguments in [&["bash", "x"][..], &["bash", "x", "--workdir", "sub"], &["bash", "x"]] {
        assert_eq!(cli.run_at(&daemon, arguments).code, Some(0));
    }
    let home =
        std::fs::canonicalize(cli.home.path()).expect("it is there").into_os_string().into_string().expect("UTF-8");
    let workdirs: Vec<_> = daemon.seen().specs.into_iter().map(|spec| spec.workdir).collect();
    assert_eq!(workdirs, [Some(home.clone().into()), Some(format!("{home}/sub").into()), None]);
}

#[tokio::test(flavor = "multi_thread")]
async fn ctrl_c_aborts_the_run_and_waits_for_its_end() {
    for (signal, code) in [(nix::libc::SIGINT, 130), (nix::libc::SIGTERM, 143), (nix::libc::SIGHUP, 129)] {
        let end = v1::RunFinished { aborted: true, stdout: total(4), ..exit(v1::exit::Exit::Signal(15)) };
        let daemon = Daemon::start(Script {
            runs: [Ok(vec![accepted(), output(OUT, 0, b"so")])].into(),
            on_cancel: vec![output(OUT, 2, b"on"), finished(end)],
            ..Script::default()
        });
        let cli = Cli::new();
        let mut command = cli.command(&["bash", "sleep 9", "--endpoint", &daemon.endpoint()]);
        let mut child = command.spawn().expect("the binary starts");
        let mut so = [0; 2];
        tokio::task::block_in_place(|| child.stdout.as_mut().expect("piped").read_exact(&mut so)).expect("it comes");
        send(&child, signal);
        let ended = of_output(tokio::task::block_in_place(|| child.wait_with_output()).expect("it ends"));
        assert_eq!(ended, Ended { code: Some(code), stdout: "on".into(), stderr: String::new() });
        assert_eq!(daemon.seen().calls.iter().filter(|call| **call == "CancelRun").count(), 1);
    }
}

#[tokio::test(flavor = "multi_thread")]
#[expect(clippy::disallowed_methods, reason = "the test starts the binary that it tests as `nohup` does")]
async fn without_its_terminal_it_goes_on_where_it_is_told_to() {
    let cli = Cli::new();
    let script = "trap '' HUP; exec \"$0\" bash 'echo begun; until [ -e go ]; do sleep 0.02; done; echo end'";
    let mut command = Command::new("bash");
    command.args(["-c", script, env!("CARGO_BIN_EXE_tool-client")]).current_dir(cli.home.path());
    command.env_remove("EXECUTOR_ENDPOINT").env("HOME", cli.home.path());
    let mut child = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().expect("bash starts");
    let mut begun = [0; 6];
    tokio::task::block_in_place(|| child.stdout.as_mut().expect("piped").read_exact(&mut begun)).expect("it comes");
    send(&child, nix::libc::SIGHUP);
    std::fs::write(cli.home.path().join("go"), "").expect("written");
    let ended = of_output(tokio::task::block_in_place(|| child.wait_with_output()).expect("it ends"));
    assert_eq!(ended, Ended { code: Some(0), stdout: "end\n".into(), stderr: String::new() });
}

#[tokio::test(flavor = "multi_thread")]
async fn a_later_ctrl_c_does_not_wait_unless_it_comes_with_the_first() {
    // The cancel is answered, but the run never ends.
    let daemon = one_run(vec![accepted(), output(OUT, 0, b"so")]);
    let cli = Cli::new();
    let mut child = cli.command(&["bash", "x", "--endpoint", &daemon.endpoint()]).spawn().expect("the binary starts");
    let mut so = [0; 2];
    tokio::task::block_in_place(|| child.stdout.as_mut().expect("piped").read_exact(&mut so)).expect("it comes");
    // The first one is passed on in any case, whatever comes with it.
    send(&child, nix::libc::SIGHUP);
    send(&child, nix::libc::SIGTERM);
    send(&child, nix::libc::SIGINT);
    daemon.wait_for_call("CancelRun").await;
    let begun = Instant::now();
    let code = loop {
        send(&child, nix::libc::SIGINT);
        if let Some(status) = child.try_wait().expect("a child") {
            break status.code();
        }
        tokio::task::yield_now().await;
    };
    assert_eq!(code, Some(130));
    assert!(begun.elapsed() < Duration::from_secs(4), "it waited for the run, which never ends: {:?}", begun.elapsed());
}

#[tokio::test(flavor = "multi_thread")]
async fn signals_that_come_together_leave_nothing_running() {
    let end = v1::RunFinished { aborted: true, stdout: total(4), ..exit(v1::exit::Exit::Signal(15)) };
    let daemon = Daemon::start(Script {
        runs: [Ok(vec![accepted(), output(OUT, 0, b"so")])].into(),
        on_cancel: vec![output(OUT, 2, b"on"), finished(end)],
        ..Script::default()
    });
    let cli = Cli::new();
    let mut child =
        cli.command(&["bash", "sleep 9", "--endpoint", &daemon.endpoint()]).spawn().expect("the binary starts");
    let mut so = [0; 2];
    tokio::task::block_in_place(|| child.stdout.as_mut().expect("piped").read_exact(&mut so)).expect("it comes");
    send(&child, nix::libc::SIGHUP);
    send(&child, nix::libc::SIGTERM);
    let ended = of_output(tokio::task::block_in_place(|| child.wait_with_output()).expect("it ends"));
    // Which of two pending signals is heard first is the kernel's and the runtime's choice.
    assert!(matches!(ended.code, Some(129 | 143)), "{ended:?}");
    assert_eq!((&*ended.stdout, &*ended.stderr), ("on", ""));
    assert_eq!(daemon.seen().calls.iter().filter(|call| **call == "CancelRun").count(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reader_that_goes_away_aborts_the_run_without_a_word() {
    let daemon = Daemon::start(Script {
        runs: [Ok(vec![accepted(), output(OUT, 0, b"y\n")])].into(),
        on_cancel: vec![finished(v1::RunFinished { aborted: true, ..exit(v1::exit::Exit::Signal(15)) })],
        ..Script::default()
    });
    let cli = Cli::new();
    let mut child = cli.command(&["bash", "yes", "--endpoint", &daemon.endpoint()]).spawn().expect("the binary starts");
    let mut stdout = child.stdout.take().expect("piped");
    tokio::task::block_in_place(|| stdout.read_exact(&mut [0; 2])).expect("it comes");
    drop(stdout);
    daemon.send_to_run(output(OUT, 2, b"y\n")).await;
    let ended = of_output(tokio::task::block_in_place(|| child.wait_with_output()).expect("it ends"));
    assert_eq!(ended, Ended { code: Some(141), stdout: String::new(), stderr: String::new() });
    assert!(daemon.seen().calls.contains(&"CancelRun"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_disk_is_said() {
    let daemon = Daemon::start(Script {
        runs: [Ok(vec![accepted(), output(OUT, 0, b"y\n")])].into(),
        on_cancel: vec![finished(v1::RunFinished { aborted: true, ..exit(v1::exit::Exit::Signal(15)) })],
        ..Script::default()
    });
    let cli = Cli::new();
    let mut command = cli.command(&["bash", "x", "--endpoint", &daemon.endpoint()]);
    command.stdout(std::fs::File::options().write(true).open("/dev/full").expect("Linux has one"));
    let ended = ended(command);
    assert_eq!(ended.code, Some(125));
    assert_eq!(ended.stderr, "tool-client: cannot write stdout: No space left on device\n");
}

#[tokio::test(flavor = "multi_thread")]
async fn call_prints_what_the_model_would_read_and_nothing_else() {
    let tail = event(Event::Tail(chunk(OUT, 0, b"hello")));
    let daemon = one_run(vec![
        accepted(),
        tail,
        finished(v1::RunFinished { stdout: total(5), ..exit(v1::exit::Exit::Code(3)) }),
    ]);
    let cli = Cli::new();
    let arguments = r#"{"command": "x", "description": "Do it", "env": {"A": "b"}, "stdin": "c"}"#;
    let ended = cli.run_at(&daemon, &["call", "bash", arguments]);
    assert_eq!(ended, Ended { code: Some(0), stdout: "hello\n[exit code: 3]".into(), stderr: String::new() });
    let spec = &daemon.seen().specs[0];
    assert!(spec.environment.is_empty() && spec.stdin.is_none());
    let ended = cli.run_at(&daemon, &["call", "nothing", "{}"]);
    assert_eq!(ended, Ended { code: Some(1), stdout: "Error: unknown tool \"nothing\"".into(), stderr: String::new() });
}

fn send(child: &std::process::Child, signal: i32) {
    let pid = nix::unistd::Pid::from_raw(i32::try_from(child.id()).expect("a pid"));
    let signal = nix::sys::signal::Signal::try_from(signal).expect("a signal");
    #[expect(clippy::disallowed_methods, reason = "the child is the test's own and has not been waited for")]
    nix::sys::signal::kill(pid, signal).expect("it is alive");
}
