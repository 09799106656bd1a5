//! Ending all that a command has started, with proof.

use std::{
    fs,
    time::{Duration, Instant},
};

use executor_daemon::keeper::link::{Over, ProcessEvent};
use executor_proto::types::Process;

use super::{GRACE, Keeper, LIMIT, NONE, alive, eventually, exited, numbers, spec};

#[tokio::test]
async fn a_leftover_is_listed_and_then_ended() {
    let keeper = Keeper::start().await;
    let mut command = keeper.spawn("sleep 987 & echo $!").await;
    let pid = numbers(&command.line().await)[0];
    assert_eq!(command.event().await, ProcessEvent::Exited { status: exited(0), empty: false });
    // The child may not have become the program yet.
    let until = Instant::now() + LIMIT;
    loop {
        let listed = keeper.link.processes(command.handle()).await;
        assert_eq!(listed.iter().map(|one| one.pid).collect::<Vec<_>>(), [pid]);
        if listed[0].command_line == b"sleep 987"[..] {
            break;
        }
        assert!(Instant::now() < until, "{listed:?}");
    }
    assert_eq!(command.end(GRACE).await, NONE);
    assert!(!alive(pid));
    assert_eq!(command.event().await, ProcessEvent::Empty);
    assert_eq!(keeper.link.processes(command.handle()).await, [] as [Process; 0]);
    assert_eq!(command.end(GRACE).await, NONE, "nothing left, nothing signalled");
}

#[tokio::test]
async fn escapees_are_ended_with_proof() {
    let keeper = Keeper::start().await;
    let escapes = [
        "(setsid env -i sleep 100 & echo $!); sleep 100",
        "(setsid env -i /bin/bash -c 'trap \"\" TERM HUP; echo $$; while :; do sleep 1; done' &); sleep 100",
        "python3 -c '
import os, signal
if os.fork(): os._exit(0)
os.setsid()
if os.fork(): os._exit(0)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(os.getpid(), flush=True)
for fd in (0, 1, 2): os.close(fd)
os.execvpe(\"sleep\", [\"sleep\", \"100\"], {})
'; sleep 100",
        "sleep 100 & kill -STOP $!; echo $!; wait",
        "trap '' TERM; sleep 100 & echo $!; while :; do wait; done",
    ];
    for escape in escapes {
        for grace in [Duration::ZERO, Duration::from_millis(200)] {
            let mut command = keeper.spawn(escape).await;
            let pid = numbers(&command.line().await)[0];
            assert!(alive(pid), "{escape}");
            let started = Instant::now();
            assert_eq!(command.end(grace).await, NONE, "{escape}");
            assert!(!alive(pid) && !alive(command.spawned.pid), "{escape}");
            assert!(started.elapsed() < grace + Duration::from_secs(1), "{escape}: {:?}", started.elapsed());
            let status = command.status().await.expect("seen");
            assert!([15, 9].contains(&(status & 0x7f)), "{escape}: {status}");
        }
    }
}

#[tokio::test]
async fn the_grace_ends_as_soon_as_everything_has() {
    let keeper = Keeper::start().await;
    let mut command = keeper.spawn("trap 'echo bye; exit 3' TERM; echo up; while :; do sleep 0.05; done").await;
    command.line().await;
    assert_eq!(command.end(GRACE).await, NONE);
    assert_eq!(command.status().await, exited(3));
    assert_eq!(command.stdout(), "bye\n");
}

#[tokio::test]
async fn a_stopped_process_is_killed_after_the_grace() {
    let keeper = Keeper::start().await;
    let mut command = keeper.spawn("trap 'echo bye; exit 4' TERM; echo up; kill -STOP $$; sleep 100 & wait").await;
    command.line().await;
    let stat = format!("/proc/{}/stat", command.spawned.pid);
    eventually("it stops", || fs::read_to_string(&stat).is_ok_and(|stat| stat.contains(") T "))).await;
    assert_eq!(command.end(Duration::from_millis(200)).await, NONE);
    assert_eq!((command.status().await, command.stdout().as_str()), (Some(libc::SIGKILL), ""));
}

#[tokio::test]
async fn every_process_gets_one_term_in_whatever_session() {
    let keeper = Keeper::start().await;
    let mut command = keeper
        .spawn(
            "count() { n=0; trap 'n=$((n+1)); echo $1 $n' TERM; echo up $1; for i in $(seq 30); do sleep 0.02 || :; done; }
             export -f count; setsid bash -c 'count outer' & (count inner) & trap : TERM; wait; wait; wait",
        )
        .await;
    let mut text = String::new();
    while !(text.contains("up outer") && text.contains("up inner")) {
        text.push_str(&command.line().await);
    }
    assert_eq!(command.end(GRACE).await, NONE);
    command.status().await;
    let text = command.stdout();
    let mut lines: Vec<_> = text.lines().collect();
    lines.sort_unstable();
    assert_eq!(lines, ["inner 1", "outer 1"]);
}

#[tokio::test]
async fn several_ends_wait_for_the_same_and_the_shortest_grace_counts() {
    let keeper = Keeper::start().await;
    let command = keeper.spawn("trap '' TERM; echo up; while :; do sleep 1; done").await;
    command.line().await;
    let started = Instant::now();
    let ended = tokio::join!(command.end(GRACE), command.end(Duration::from_millis(100)));
    assert_eq!(ended, (vec![], vec![]));
    assert!(started.elapsed() < Duration::from_secs(2), "{:?}", started.elapsed());
}

#[tokio::test]
async fn hoppers_and_loops_of_escapees_are_ended() {
    let keeper = Keeper::start().await;
    let hopper = "python3 -c '
import os
print(\"up\", flush=True)
while True:
    if os.fork(): os._exit(0)
    os.setsid()
'";
    let many = "echo up; while :; do (setsid env -i sleep 100 &); sleep 0.001; done";
    for text in [hopper, many] {
        for _ in 0..5 {
            let command = keeper.spawn(text).await;
            command.line().await;
            assert_eq!(command.end(Duration::ZERO).await, NONE, "{text}");
        }
    }
    assert_eq!(keeper.run("echo ok").await.0, "ok\n");
}

#[tokio::test]
async fn fifty_orphans_leave_no_zombies() {
    let keeper = Keeper::start().await;
    let mut commands = Vec::new();
    for _ in 0..50 {
        commands.push(keeper.spawn("(sleep 0.2 &); echo $PPID").await);
    }
    let mut helpers = Vec::new();
    for command in &mut commands {
        assert_eq!(command.status().await, exited(0));
        command.empty().await;
        helpers.extend(numbers(&command.stdout()));
    }
    let children = |helper: &u32| fs::read_to_string(format!("/proc/{helper}/task/{helper}/children"));
    for helper in helpers {
        eventually("it has no children", || children(&helper).unwrap_or_default().is_empty()).await;
    }
}

#[tokio::test]
async fn nothing_survives_a_dropped_link() {
    let keeper = Keeper::start().await;
    let command = keeper.spawn("trap '' TERM; (setsid env -i sleep 100 & echo $!); sleep 100").await;
    let (shell, pid) = (command.spawned.pid, numbers(&command.line().await)[0]);
    let (text, _) = keeper.run("echo $PPID; awk '/^PPid/ {print $2}' /proc/$PPID/status").await;
    let ours = numbers(&text);
    drop((command, keeper));
    let gone = [shell, pid, ours[0], ours[1]];
    eventually("everything is gone", || !gone.iter().any(|pid| alive(*pid))).await;
}

#[tokio::test]
async fn nothing_survives_a_killed_keeper() {
    let keeper = Keeper::start().await;
    let mut command = keeper.spawn("trap '' TERM; (setsid env -i sleep 100 & echo $!); sleep 100").await;
    let (shell, pid) = (command.spawned.pid, numbers(&command.line().await)[0]);
    let told = keeper.directory.path().join("told");
    let killer = "until [ -e \"$0\" ]; do sleep 0.01; done; kill -9 $(awk '/^PPid/ {print $2}' /proc/$PPID/status)";
    let mut killer = spec(&format!("{killer}; sleep 100"));
    killer.arguments.push(told.as_os_str().as_encoded_bytes().to_vec());
    let killer = keeper.link.spawn(keeper.link.new_handle(), killer, None, None).await.expect("starts").pid;
    fs::write(&told, "").expect("written");
    // Neither a lost keeper nor its helpers say anything: how they end what ran is no outcome of it.
    assert_eq!(tokio::time::timeout(LIMIT, command.spawned.events.recv()).await.expect("told in time"), None);
    assert_eq!(keeper.link.over().await, Over::KeeperLost);
    // There is no proof any more.
    assert_eq!(command.end(GRACE).await, [shell]);
    keeper.link.spawn(keeper.link.new_handle(), spec("true"), None, None).await.expect_err("nobody can start it");
    let gone = [shell, pid, killer];
    eventually("everything is gone", || !gone.iter().any(|pid| alive(*pid))).await;
}
