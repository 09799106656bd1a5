//! As root: the server has a user of its own, and all the same does what it did. Each test says why where it cannot run.

use std::{
    fs,
    os::unix::fs::{MetadataExt, PermissionsExt},
    path::Path,
    rc::Rc,
};

use executor_proto::v1::{self, read_stream_event};
use futures_util::StreamExt as _;
use nix::sys::signal::Signal;

use super::{Daemon, KILL, TERM, alive, caller, children, eventually, root, send};

/// As whom commands run here.
const NOBODY: u32 = 65_534;

const PROGRAM: &[&str] = &[env!("CARGO_BIN_EXE_executor-daemon")];

fn status(pid: u32, field: &str) -> String {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("it lives");
    let line = status.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
    line.expect("a known field").split_whitespace().collect::<Vec<_>>().join(" ")
}

/// That this process is the server, of a user of its own and without any privilege.
fn assert_unprivileged(server: u32) -> u32 {
    let uid = fs::metadata(format!("/proc/{server}/task")).map(|_| status(server, "Uid")).expect("it lives");
    let (first, _) = uid.split_once(' ').expect("four of them");
    let number: u32 = first.parse().expect("a uid");
    assert!(number != 0 && number != NOBODY, "{uid}");
    assert_eq!(uid, [first; 4].join(" "));
    assert!(!status(server, "Gid").split(' ').any(|gid| gid == "0" || gid == NOBODY.to_string()));
    assert_eq!(status(server, "Groups"), "");
    for set in ["CapInh", "CapPrm", "CapEff", "CapAmb"] {
        assert_eq!(status(server, set), "0000000000000000", "{set}");
    }
    assert_eq!(status(server, "NoNewPrivs"), "1");
    // The kernel gives the entries of a process that is not dumpable to root.
    assert_eq!(fs::metadata(format!("/proc/{server}/environ")).expect("it lives").uid(), 0);
    number
}

#[tokio::test]
async fn the_server_has_a_user_of_its_own_and_no_privileges() {
    if !root() {
        return;
    }
    let daemon = Daemon::start_by(PROGRAM, "nobody").await;
    let uid = assert_unprivileged(daemon.server().expect("one lives"));
    assert!(daemon.ready.contains(&format!(", the server as uid {uid}")), "{}", daemon.ready);
    assert_eq!(status(daemon.keeper, "Uid"), "0 0 0 0");
    let state = daemon.directory.path().join("state");
    let of = |path: &Path| fs::metadata(path).map(|found| (found.uid(), found.mode() & 0o7777)).expect("it is there");
    assert_eq!(of(&state), (0, 0o711));
    assert_eq!(of(&state.join("spill")), (0, 0o711));
    assert_eq!(of(&state.join("server")), (uid, 0o700));
    assert_eq!(of(&state.join("server/journal.sqlite")), (uid, 0o600));
    assert_eq!(of(&daemon.socket()), (0, 0o600));
}

#[tokio::test]
async fn commands_reach_nothing_of_the_server_or_the_keeper() {
    if !root() {
        return;
    }
    let daemon = Daemon::start_by(PROGRAM, "nobody").await;
    let (server, keeper) = (daemon.server().expect("one lives"), daemon.keeper);
    let state = daemon.directory.path().join("state");
    let state = state.display();
    let token = daemon.directory.path().join("token");
    fs::write(&token, "0123456789abcdef").expect("written");
    fs::set_permissions(&token, fs::Permissions::from_mode(0o600)).expect("ours");
    // Each of them works for root, so a refusal is the user's.
    let tries = [
        format!("kill -0 {server}"),
        format!("kill -0 {keeper}"),
        format!("cat /proc/{server}/environ"),
        format!("head -c 1 /proc/{server}/maps"),
        format!("ls /proc/{server}/fd"),
        format!("cat /proc/{keeper}/environ"),
        format!("ls {state}"),
        format!("ls {state}/server"),
        format!("cat {state}/server/journal.sqlite"),
        format!("cat {}", token.display()),
        // The open file of the journal, by the server's descriptor.
        format!("cat /proc/{server}/fd/0"),
    ];
    for one in &tries {
        let (text, _) = daemon.run(&format!("{one} >/dev/null 2>&1 && echo done || echo refused")).await;
        assert_eq!(text, "refused\n", "{one}");
        let by_root = std::path::Path::new("/bin/sh");
        assert!(run_as_root(by_root, one), "root cannot either, so nothing is shown: {one}");
    }
    // Tracing: the memory of neither can be opened.
    let memory =
        format!("for pid in {server} {keeper}; do : < /proc/$pid/mem && echo open; done 2>/dev/null; echo over");
    assert_eq!(daemon.run(&memory).await.0, "over\n");
    assert_eq!(daemon.run("echo still here").await.0, "still here\n");
}

#[expect(clippy::disallowed_methods, reason = "what is refused to a command is tried by root")]
fn run_as_root(shell: &Path, line: &str) -> bool {
    let quiet = format!("{line} >/dev/null 2>&1");
    std::process::Command::new(shell).args(["-c", &quiet]).status().expect("a shell").success()
}

/// The whole stdout of a task, to its end.
async fn stream(daemon: &Daemon, task_id: &str) -> Vec<u8> {
    let request = v1::ReadStreamRequest {
        caller: caller(),
        task_id: task_id.to_owned(),
        stream: v1::StreamName::Stdout.into(),
        follow: true,
        ..Default::default()
    };
    let mut events = daemon.client().await.read_stream(request).await.expect("it may be read").into_inner();
    let mut bytes = Vec::new();
    while let Some(event) = events.next().await {
        if let Some(read_stream_event::Event::Chunk(chunk)) = event.expect("an event").event {
            assert_eq!(chunk.offset, bytes.len() as u64, "a gap in {task_id}: {}", daemon.log());
            bytes.extend_from_slice(&chunk.data);
        }
    }
    bytes
}

#[tokio::test]
async fn another_server_of_that_user_takes_over_what_runs_and_what_ended() {
    if !root() {
        return;
    }
    let mut daemon = Daemon::start_by(PROGRAM, "nobody").await;
    let go = daemon.directory.path().join("go");
    let seq: Vec<u8> = (1..=5_000).flat_map(|number| format!("{number}\n").into_bytes()).collect();
    // Beyond the tail of 1,000 bytes, so both have a spill, in a directory that the server has no way into.
    let ended = daemon.start_task("seq 1 5000").await;
    let running = daemon
        .start_task(&format!("seq 1 2500; until [ -e {} ]; do sleep 0.01; done; seq 2501 5000", go.display()))
        .await;
    let first = daemon.server().expect("one lives");
    let uid = assert_unprivileged(first);
    let log_of_end = stream(&daemon, &ended).await;
    assert_eq!(log_of_end, seq);

    send(first, KILL);
    let second = eventually("another server", || daemon.server().filter(|pid| *pid != first)).await;
    assert_eq!(stream(&daemon, &ended).await, seq, "{}", daemon.log());
    assert_eq!(assert_unprivileged(second), uid);
    daemon.signal(Signal::SIGHUP);
    eventually("SIGHUP brings a new one", || daemon.log().contains("the new server is ready").then_some(())).await;
    let third = eventually("it is the only one", || daemon.server().filter(|pid| *pid != second)).await;
    assert_eq!(assert_unprivileged(third), uid);

    fs::write(&go, "").expect("written");
    assert_eq!(stream(&daemon, &running).await, seq, "{}", daemon.log());
    assert_eq!(stream(&daemon, &ended).await, seq);
    let spills = daemon.directory.path().join("state/spill/65534");
    for spill in fs::read_dir(&spills).expect("made at the start") {
        let found = spill.and_then(|spill| spill.metadata()).expect("it is there");
        assert_eq!((found.uid(), found.gid(), found.mode() & 0o7777), (0, NOBODY, 0o640));
    }
    daemon.signal(TERM);
    assert!(daemon.wait().await.success(), "{}", daemon.log());
    assert!(!alive(third));

    // What was kept is there for the next daemon.
    let daemon = Daemon::start_in(Rc::clone(&daemon.directory), PROGRAM, "nobody").await;
    assert_eq!(stream(&daemon, &ended).await, seq, "{}", daemon.log());
}

#[tokio::test]
async fn what_a_dead_keeper_left_is_ended_by_the_next_one() {
    if !root() {
        return;
    }
    let mut daemon = Daemon::start_by(PROGRAM, "nobody").await;
    let pids = Rc::clone(&daemon.directory);
    fs::set_permissions(pids.path(), fs::Permissions::from_mode(0o777)).expect("ours");
    let file = pids.path().join("pids");
    daemon.start_task(&format!("sleep 300 & echo $$ $! $PPID > {}; wait", file.display())).await;
    let text = eventually("it runs", || fs::read_to_string(&file).ok().filter(|text| text.ends_with('\n'))).await;
    let numbers: Vec<u32> = text.split_whitespace().map(|pid| pid.parse().expect("a pid")).collect();
    let [shell, child, helper] = numbers[..] else { panic!("{text}") };
    let server = daemon.server().expect("one lives");
    assert!(children(helper).contains(&shell));
    // The helper cannot end it any more, and the keeper does not come to it.
    send(daemon.keeper, Signal::SIGSTOP);
    send(helper, KILL);
    eventually("the helper is gone", || (!alive(helper)).then_some(())).await;
    send(daemon.keeper, KILL);
    daemon.wait().await;
    eventually("the server without a keeper is gone", || (!alive(server)).then_some(())).await;
    assert!(alive(shell) && alive(child), "nothing is left to be ended");

    let next = Daemon::start_in(pids, PROGRAM, "nobody").await;
    assert_unprivileged(next.server().expect("one lives"));
    eventually("it is ended", || (!alive(shell) && !alive(child)).then_some(())).await;
    // Lines are written by a thread of their own.
    let said = "what a keeper that is gone had left was ended";
    eventually("it is said", || next.log().contains(said).then_some(())).await;
}
