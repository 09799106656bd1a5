//! Limits on the daemon's container: what reaches them is a command, and the daemon lives.

use crate::{
    deployment::Deployment,
    engine::{docker, must, wait_for},
};

/// Small limits on memory and processes.
const LIMITS: Option<&str> = Some("tests/compose/overrides/limits.yml");
/// Prints the ids and scores of the keeper, its helpers and the server, and of nothing that runs for a client.
const OWN: &str = "for p in /proc/[0-9]*; do tr '\\0' ' ' <$p/cmdline 2>/dev/null | grep -q '^executor-daemon ' && \
                   echo ${p#/proc/} $(cat $p/oom_score_adj); done; :";

over_containers!(memory_that_a_command_takes_is_that_command_s_end_and_not_the_daemon_s);
fn memory_that_a_command_takes_is_that_command_s_end_and_not_the_daemon_s() {
    let deployment = Deployment::with(LIMITS, Vec::new());
    let client = deployment.client();
    assert_eq!(client.must("tool-client --owner s bash --background 'echo kept; sleep 1000'"), "bash-1");
    let (server_before, own) = (server(&deployment), deployment.inside(OWN));
    let commands = client.must("tool-client bash 'cat /proc/self/oom_score_adj'");
    let highest = own.lines().filter_map(|line| line.split_once(' ')?.1.parse::<i32>().ok()).max();
    assert!(highest < Some(commands.parse().expect("a number")), "{commands} is not above {own}");

    // One that is large, and many of which none is.
    let large = client.run("tool-client bash 'exec perl -e \"\\$x = q(x) x (1 << 30)\"'");
    assert_eq!(large.code, Some(128 + 9), "{large}");
    let many = "for n in $(seq 100); do perl -e '$x = q(x) x (6 << 20); sleep 1000' & done; wait; echo all have ended";
    let told = client.run(&format!("tool-client bash --timeout 6000 {}", quoted(many)));
    assert!(told.code.is_some_and(|code| code != 0 && code != 125) || told.stdout.contains("all"), "{told}");

    assert_eq!(server(&deployment), server_before, "the server lives: {}", deployment.logs());
    let daemon = deployment.daemon();
    let state = must(&mut docker(["inspect", "--format={{.State.Status}} {{.RestartCount}}", &daemon]), "");
    assert_eq!(state, "running 0");
    let kills =
        deployment.inside("cat /sys/fs/cgroup/memory.events /sys/fs/cgroup/memory/memory.oom_control 2>/dev/null; :");
    let counted = kills.lines().filter_map(|line| line.strip_prefix("oom_kill ")).any(|count| count != "0");
    assert!(counted, "the limit was reached: {kills}");
    assert_eq!(client.must("tool-client --owner s logs bash-1"), "kept");
}

over_containers!(a_bomb_of_processes_is_ended_and_the_daemon_lives);
fn a_bomb_of_processes_is_ended_and_the_daemon_lives() {
    let deployment = Deployment::with(LIMITS, Vec::new());
    let client = deployment.client();
    let bomb = "while :; do sleep 1000 & done 2>/dev/null";
    let started = client.must(&format!("tool-client --owner s bash --background {}", quoted(bomb)));
    assert_eq!(started, "bash-1");
    wait_for("the limit is reached", || {
        let daemon = deployment.daemon();
        // What stands for the container's group on the host: a command inside would need a process.
        let pids = must(&mut docker(["stats", "--no-stream", "--format={{.PIDs}}", &daemon]), "");
        (pids.parse::<u32>().expect("a count") >= 195).then_some(())
    });
    assert!(client.must("tool-client --owner s ps").contains("bash-1"));
    let killed = client.must(r#"tool-client --owner s call bash_kill '{"task_id": "bash-1"}'"#);
    assert!(killed.contains("killed"), "{killed}");
    assert_eq!(client.must("tool-client bash 'echo again'"), "again");
}

fn server(deployment: &Deployment) -> String {
    deployment.inside(
        "for p in /proc/[0-9]*; do tr '\\0' ' ' <$p/cmdline | grep -q '^executor-daemon __server' && echo ${p#/proc/}; done; :",
    )
}

/// A word of the shell that is this text.
fn quoted(text: &str) -> String {
    format!("'{}'", text.replace('\'', "'\\''"))
}
