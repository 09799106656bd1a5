//! What breaks between and around the containers, and what is read afterwards.

use std::{
    fmt::Write as _,
    time::{Duration, Instant},
};

use crate::{
    client::Client,
    deployment::Deployment,
    engine::{docker, must, run, unique, wait_for},
};

/// Longest that a stop may take: the grace, what is made of it, and the engine's own work.
const STOP: Duration = Duration::from_secs(15);

/// A command that writes so many lines, one each 50 ms, and notes in a file how far it is.
fn counting(lines: u32, notes: &str) -> String {
    format!("for n in $(seq {lines}); do echo line $n; echo >>/workspace/{notes}; sleep 0.05; done")
}

/// What it writes.
fn counted(lines: u32) -> String {
    (1..=lines).fold(String::new(), |mut text, n| {
        let _infallible = writeln!(text, "line {n}");
        text
    })
}

/// Waits until the command has noted so many lines.
fn wait_for_lines(deployment: &Deployment, notes: &str, lines: usize) {
    wait_for(&format!("{lines} lines in {notes}"), || {
        let count = deployment.inside(&format!("wc -l </workspace/{notes}"));
        (count.parse::<usize>().expect("a count") >= lines).then_some(())
    });
}

over_containers!(a_network_that_goes_away_in_the_middle_costs_no_byte);
fn a_network_that_goes_away_in_the_middle_costs_no_byte() {
    const LINES: u32 = 160;

    let deployment = Deployment::up();
    let client = deployment.client();
    assert_eq!(
        client.must(&format!("tool-client --owner s bash --background '{}'", counting(LINES, "task"))),
        "bash-1"
    );
    let stream = client.begin("tool-client --owner s logs -f bash-1");
    let foreground = client.begin(&format!("tool-client --owner s bash '{}'", counting(LINES, "run")));
    let (daemon, network) = (deployment.daemon(), deployment.network());
    wait_for_lines(&deployment, "run", 20);
    must(&mut docker(["network", "disconnect", &network, &daemon]), "");
    // Nothing of this gets through; whoever would buffer it in the daemon's container must keep it.
    wait_for_lines(&deployment, "run", 100);
    must(&mut docker(["network", "connect", "--alias", "daemon", &network, &daemon]), "");

    for (what, script) in [("the run", foreground), ("the stream", stream)] {
        let told = script.finish();
        assert_eq!((told.code, told.stdout.as_str()), (Some(0), counted(LINES).as_str()), "{what}: {}", told.stderr);
    }
    let whole = client.must("tool-client --owner s output bash-1 --wait");
    assert_eq!(format!("{whole}\n"), counted(LINES));
    notice_comes_once(&client, "[status: completed, exit code: 0]");
}

over_containers!(a_server_that_is_killed_in_its_container_is_not_noticed);
fn a_server_that_is_killed_in_its_container_is_not_noticed() {
    const LINES: u32 = 60;

    let deployment = Deployment::up();
    let client = deployment.client();
    assert_eq!(
        client.must(&format!("tool-client --owner s bash --background '{}'", counting(LINES, "task"))),
        "bash-1"
    );
    let foreground = client.begin(&format!("tool-client --owner s bash '{}'", counting(LINES, "run")));
    for lines in [10, 30] {
        wait_for_lines(&deployment, "run", lines);
        let before = server(&deployment);
        deployment.inside(&format!("kill -9 {before}"));
        wait_for("another server", || {
            let now = run(&mut docker(["exec", &deployment.daemon(), "sh", "-c", SERVER]), "").stdout;
            (!now.trim().is_empty() && now.trim() != before).then_some(())
        });
    }
    let told = foreground.finish();
    assert_eq!((told.code, told.stdout.as_str()), (Some(0), counted(LINES).as_str()), "{}", told.stderr);
    let whole = client.must("tool-client --owner s output bash-1 --wait");
    assert_eq!(format!("{whole}\n"), counted(LINES));
    notice_comes_once(&client, "[status: completed, exit code: 0]");
    assert_eq!(must(&mut docker(["inspect", "--format={{.RestartCount}}", &deployment.daemon()]), ""), "0");
}

/// Prints the server's process id.
const SERVER: &str = "for p in /proc/[0-9]*; do tr '\\0' ' ' <$p/cmdline 2>/dev/null | grep -q '^executor-daemon __server' \
                      && echo ${p#/proc/}; done";

fn server(deployment: &Deployment) -> String {
    deployment.inside(&format!("{SERVER}; :"))
}

over_containers!(a_container_that_is_killed_comes_back_with_all_that_was_written);
fn a_container_that_is_killed_comes_back_with_all_that_was_written() {
    let deployment = Deployment::up();
    let client = deployment.client();
    assert_eq!(client.must("tool-client --owner s bash --background 'echo done'"), "bash-1");
    client.must("tool-client --owner s output bash-1 --wait && tool-client --owner s notices");
    assert_eq!(client.must(&format!("tool-client --owner s bash --background '{}'", counting(2000, "task"))), "bash-2");
    wait_for_lines(&deployment, "task", 20);
    let daemon = deployment.daemon();
    must(&mut docker(["kill", &daemon]), "");
    must(&mut docker(["start", &daemon]), "");
    deployment.wait_until_healthy();

    let read = client.must(r#"tool-client --owner s call bash_output '{"task_id": "bash-2"}'"#);
    assert!(read.starts_with(counted(20).as_str()), "what was written is read: {read}");
    assert!(read.ends_with("\n[status: ended, exit unknown]"), "{read}");
    notice_comes_once(&client, "exit unknown");
    assert_eq!(client.must("tool-client --owner s logs bash-1"), "done", "what had ended before is there as well");
    assert_eq!(client.must("tool-client --owner s bash --background true"), "bash-3", "no id is used twice");
}

over_containers!(another_image_takes_over_the_volume);
fn another_image_takes_over_the_volume() {
    let deployment = Deployment::up();
    let client = deployment.client();
    assert_eq!(client.must("tool-client --owner s bash --background 'echo before'"), "bash-1");
    assert_eq!(client.must("tool-client --owner s output bash-1 --wait"), "before");
    let before = deployment.daemon();

    let next = unique();
    let dockerfile = format!("FROM {}\nLABEL next=yes\n", crate::engine::image());
    must(&mut docker(["build", "--quiet", "--tag", &next, "-"]), &dockerfile);
    let mut up = deployment.compose();
    must(up.env("EXECUTOR_IMAGE", &next).args(["up", "--detach", "--no-build", "daemon"]), "");
    deployment.wait_until_healthy();
    let now = deployment.daemon();
    let replaced = must(&mut docker(["inspect", "--format={{.Config.Labels.next}}", &now]), "");
    let read = client.must("tool-client --owner s logs bash-1");
    let started = client.must("tool-client --owner s bash --background true");
    drop(client);
    drop(deployment);
    must(&mut docker(["image", "rm", &next]), "");

    assert_ne!(before, now);
    assert_eq!((replaced.as_str(), read.as_str(), started.as_str()), ("yes", "before", "bash-2"));
}

over_containers!(stopping_with_fifty_tasks_ends_them_all_in_time);
fn stopping_with_fifty_tasks_ends_them_all_in_time() {
    let deployment = Deployment::up();
    let client = deployment.client();
    // Half of them do as they are told, half have to be killed.
    client.must(
        r#"for n in $(seq 25); do
            tool-client --owner s bash --background 'sleep 1000'
            tool-client --owner s bash --background 'trap : TERM; while :; do sleep 1000 & wait; done'
        done"#,
    );
    assert_eq!(running(&client), 50);
    let daemon = deployment.daemon();
    let begun = Instant::now();
    must(deployment.compose().args(["stop", "daemon"]), "");
    let took = begun.elapsed();
    let state = must(&mut docker(["inspect", "--format={{.State.ExitCode}} {{.State.OOMKilled}}", &daemon]), "");
    assert_eq!(state, "0 false", "the daemon ends by itself: {}", deployment.logs());
    assert!(took < STOP, "within the grace period, took {took:?}");

    must(&mut docker(["start", &daemon]), "");
    deployment.wait_until_healthy();
    let tasks = client.must("tool-client --owner s ps | tail -n +2");
    assert_eq!((tasks.lines().count(), running(&client)), (50, 0), "each has a final state: {tasks}");
    assert_eq!(client.must("tool-client --owner s notices"), "", "nobody is told of what was ended on purpose");
}

fn running(client: &Client) -> usize {
    client.must("tool-client --owner s ps | grep -c ' running ' || :").parse().expect("a count")
}

/// The only notice that is left, and that there is no other.
fn notice_comes_once(client: &Client, holds: &str) {
    let notices = wait_for("a notice", || {
        let notices = client.must("tool-client --owner s notices");
        (!notices.is_empty()).then_some(notices)
    });
    assert!(notices.lines().count() == 1 && notices.contains(holds), "{notices}");
    assert_eq!(client.must("tool-client --owner s notices"), "", "it comes once");
}
