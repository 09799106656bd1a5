//! Helpers that are killed or stopped by what they run.

use std::{
    fs,
    time::{Duration, Instant},
};

use executor_daemon::keeper::link::ProcessEvent;

use super::{Command, GRACE, Keeper, LIMIT, NONE, alive, eventually, exited, numbers, spec};

#[tokio::test]
async fn a_killed_helper_takes_its_command_along_and_nothing_else() {
    let keeper = Keeper::start().await;
    let bystander = keeper.spawn("echo up; sleep 100").await;
    bystander.line().await;
    let mut victim = keeper.spawn("(setsid env -i sleep 100 & echo $!); kill -9 $PPID; sleep 100").await;
    let pid = numbers(&victim.line().await)[0];
    assert_eq!(victim.event().await, ProcessEvent::Exited { status: Some(9), empty: true });
    assert!(!alive(pid) && !alive(victim.spawned.pid));
    assert_eq!(victim.end(GRACE).await, NONE);

    // A shell that had ended before keeps its status; what it left ends with the helper.
    let mut leftover =
        keeper.spawn("(while kill -0 $$ 2>/dev/null; do sleep 0.01; done; kill -9 $PPID; sleep 100) & exit 3").await;
    assert_eq!(leftover.event().await, ProcessEvent::Exited { status: exited(3), empty: false });
    assert_eq!(leftover.event().await, ProcessEvent::Empty);

    assert!(alive(bystander.spawned.pid));
    assert_eq!(keeper.run("echo ok").await.0, "ok\n");
    assert_eq!(bystander.end(GRACE).await, NONE);
}

#[tokio::test]
async fn a_shell_that_kills_its_helper_keeps_its_status() {
    let keeper = Keeper::start().await;
    for _ in 0..30 {
        // At once, before the helper may have told of it.
        let mut command = keeper.spawn("kill -9 $PPID").await;
        match command.event().await {
            // Whichever was faster: the shell, or the end of all that the helper had.
            ProcessEvent::Exited { status, empty: true } => {
                assert!([exited(0), Some(libc::SIGKILL)].contains(&status), "{status:?}");
            }
            other => panic!("unexpected {other:?}"),
        }
    }
}

/// Stops its helper once; and again and again, so that it hardly runs.
const STOPPERS: [&str; 2] = [
    "(setsid env -i sleep 100 & echo $!); kill -STOP $PPID; exec sleep 100",
    "(setsid env -i sleep 100 & echo $!); for i in 1 2 3; do while :; do kill -STOP $PPID; done & done; wait",
];

#[tokio::test]
async fn a_command_that_stops_its_helper_is_listed_and_ended_in_time() {
    let keeper = Keeper::start().await;
    for stopper in STOPPERS {
        for grace in [Duration::ZERO, Duration::from_millis(200)] {
            let command = keeper.spawn(stopper).await;
            let pid = numbers(&command.line().await)[0];
            let started = Instant::now();
            assert_eq!(command.end(grace).await, NONE, "{stopper}");
            assert!(started.elapsed() < grace + Duration::from_secs(2), "{stopper}: {:?}", started.elapsed());
            assert!(!alive(pid) && !alive(command.spawned.pid), "{stopper}");
        }
        let command = keeper.spawn(stopper).await;
        command.line().await;
        let listed = tokio::time::timeout(LIMIT, keeper.link.processes(command.handle())).await;
        listed.expect("an answer in time");
        assert_eq!(command.end(Duration::ZERO).await, NONE, "{stopper}");
    }
    assert_eq!(keeper.run("echo ok").await.0, "ok\n");
}

#[tokio::test]
async fn a_stopped_idle_helper_does_not_hold_up_the_next_command() {
    let keeper = Keeper::start().await;
    let file = keeper.directory.path().join("pid");
    let script = "until [ -s \"$0\" ]; do sleep 0.01; done; kill -STOP $(cat \"$0\"); echo stopped; sleep 100";
    let mut stopper = spec(script);
    stopper.arguments.push(file.as_os_str().as_encoded_bytes().to_vec());
    let spawned = keeper.link.spawn(keeper.link.new_handle(), stopper, None, None).await.expect("starts");
    let stopper = Command { spawned, keeper: keeper.link.clone() };
    let (helper, _) = keeper.run("echo $PPID").await;
    fs::write(&file, &helper).expect("written");
    assert_eq!(stopper.line().await, "stopped");
    let started = Instant::now();
    assert_eq!(keeper.run("echo $PPID").await, (helper, exited(0)), "the same helper");
    assert!(started.elapsed() < Duration::from_secs(1), "{:?}", started.elapsed());
    assert_eq!(stopper.end(Duration::ZERO).await, NONE);
}

#[tokio::test]
async fn stopped_helpers_do_not_survive_the_keeper() {
    for stopper in STOPPERS {
        let keeper = Keeper::start().await;
        let command = keeper.spawn(stopper).await;
        let (shell, pid) = (command.spawned.pid, numbers(&command.line().await)[0]);
        drop((command, keeper));
        eventually("everything is gone", || ![shell, pid].iter().any(|pid| alive(*pid))).await;
    }
    // Stopped while the keeper is, too, so that it cannot help.
    let keeper = Keeper::start().await;
    let killer = "keeper=$(awk '/^PPid/ {print $2}' /proc/$PPID/status); kill -STOP $keeper; kill -STOP $PPID
        (setsid env -i sleep 100 & echo $!) > $0.new; mv $0.new $0; kill -9 $keeper; sleep 100";
    let file = keeper.directory.path().join("pid");
    let mut killer = spec(killer);
    killer.arguments[2].splice(0..0, *b"sleep 0.1; ");
    killer.arguments.push(file.as_os_str().as_encoded_bytes().to_vec());
    let shell = keeper.link.spawn(keeper.link.new_handle(), killer, None, None).await.expect("starts").pid;
    eventually("it kills the keeper", || file.exists()).await;
    let pid = numbers(&fs::read_to_string(&file).expect("read"))[0];
    eventually("everything is gone", || ![shell, pid].iter().any(|pid| alive(*pid))).await;
}

#[tokio::test]
async fn a_commands_signals_do_not_end_the_keeper() {
    let keeper = Keeper::start().await;
    for command in ["kill -TERM 0", "kill -9 0", "for s in INT TERM HUP QUIT USR1 PIPE; do kill -$s $PPID; done"] {
        keeper.run(command).await;
    }
    assert_eq!(keeper.run("echo ok").await.0, "ok\n");
}
