//! Where commands run as the daemon's own user, and as root: what they can do to the daemon and to what ran before them.

use std::time::Duration;

use executor_proto::types::TaskId;
use executor_tests::{Backend, Daemon, Setup, World, on_backend, tell, wait_for};
use futures_util::future::join_all;
use nix::{
    sys::signal::Signal,
    unistd::{Pid, Uid},
};

const SOON: Duration = Duration::from_secs(15);

/// A user without an account and without rights.
const NOBODY_SPECIAL: u32 = 45_678;

/// A daemon that is not root, so that its commands share its user.
fn own_user() -> Setup {
    Setup { uid: Uid::effective().is_root().then_some(NOBODY_SPECIAL), ..Setup::default() }
}

/// Whether the daemon says that the fence stands; else there is nothing to be shown on this kernel.
async fn fenced(world: &World) -> bool {
    let fenced = world.executor().info().await.expect("it answers").features.iter().any(|one| one == "signal-fence");
    if !fenced {
        tell("this kernel has no Landlock that refuses signals (version 6, Linux 6.12): nothing shown");
    }
    fenced
}

/// The keeper, the server, and whatever else of the daemon runs while this command does.
fn own_processes(daemon: &Daemon) -> Vec<i32> {
    daemon.processes().iter().filter(|one| one.is_alive()).map(|one| one.pid).collect()
}

async fn signals_stay_within(world: &World) {
    if !fenced(world).await {
        return;
    }
    let daemon = world.daemon().expect("there is one");
    let (keeper, server) = (daemon.pid(), daemon.server().pid);
    for victim in [keeper, server] {
        for signal in ["0", "STOP", "TERM", "KILL"] {
            let text = world.bash(&format!("kill -{signal} {victim}")).await;
            assert!(text.contains("Operation not permitted"), "{signal} to {victim}: {text}");
        }
    }
    if world.executor().info().await.expect("it answers").run_as_uid == NOBODY_SPECIAL {
        // To all at once. Not as a user who has anything else running: this is only a test.
        world.bash("trap '' TERM; kill -TERM -1; kill -KILL -- -1").await;
    }
    assert_eq!(world.bash("echo alive").await, "alive\n");
    assert_eq!((daemon.pid(), daemon.server().pid), (keeper, server));
}

async fn earlier_tasks_can_be_signalled(world: &World) {
    if !fenced(world).await {
        return;
    }
    let id = world.background("echo $$ > pid; exec sleep 300").await;
    wait_for("it runs", SOON, || {
        std::fs::read_to_string(world.tmp().join("pid")).is_ok_and(|text| text.ends_with('\n'))
    })
    .await;
    assert_eq!(world.bash("kill -0 $(cat pid) && echo there; kill $(cat pid)").await, "there\n");
    world.ended(&id, SOON).await.expect("it ends");
    // What is confined further is within the fence too, and can be ended from outside of its confinement.
    let mut session = world.session("limited");
    session.sandbox = Some(executor_proto::types::SandboxMode::WorkspaceWrite);
    let arguments =
        r#"{"command": "echo $$ > limited; exec sleep 300", "description": "d", "run_in_background": true}"#;
    let started = world.call(Some(&session), "bash", arguments, &tool_client::tools::Abort::default()).await.text;
    let id = TaskId(started.strip_prefix("started background task ").expect(&started).to_owned());
    let ended = world.bash("until [ -s limited ]; do sleep 0.01; done; kill $(cat limited) && echo ended").await;
    assert_eq!(ended, "ended\n");
    world.ended(&id, SOON).await.expect("it ends");
}

/// Sends a signal, as a command of the same user can that is not fenced in.
#[expect(clippy::disallowed_methods, reason = "what a stranger does to the daemon's own processes")]
fn signal(pid: i32, signal: Signal) {
    nix::sys::signal::kill(Pid::from_raw(pid), signal).expect("it is there");
}

fn zygotes(daemon: &Daemon) -> Vec<i32> {
    let is_one =
        |pid: &i32| std::fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name == "command-zygote\n");
    own_processes(daemon).into_iter().filter(is_one).collect()
}

async fn without_its_zygote_a_tenant_goes_on(world: &World) {
    if !fenced(world).await {
        return;
    }
    let daemon = world.daemon().expect("there is one");
    assert_eq!(world.bash("echo first").await, "first\n");
    let first = zygotes(daemon);
    assert_eq!(first.len(), 1, "{first:?}");
    let task = world.background(&world.sleep(300)).await;
    signal(first[0], Signal::SIGKILL);
    // More than there are helpers waiting.
    let tasks = join_all((0..20).map(|_| world.background("true"))).await;
    assert_eq!(tasks.len(), 20);
    assert_eq!(world.kill(&task).await, format!("killed background task {task}"));
    let second = zygotes(daemon);
    assert!(second.len() == 1 && second != first, "{second:?}");
    // One that is stopped goes on.
    signal(second[0], Signal::SIGSTOP);
    let tasks = join_all((0..20).map(|_| world.background("true"))).await;
    assert_eq!(tasks.len(), 20);
    assert_eq!(zygotes(daemon), second);
}

async fn the_daemons_memory_is_closed(world: &World) {
    let daemon = world.daemon().expect("there is one");
    assert_eq!(world.bash("true").await, "(no output)");
    let own = own_processes(daemon);
    assert!(own.len() >= 3, "a keeper, a server and a helper: {own:?}");
    for pid in own {
        for file in ["environ", "mem", "maps"] {
            let text = world.bash(&format!("head -c 1 /proc/{pid}/{file} | wc -c")).await;
            assert!(text.starts_with("0\n"), "/proc/{pid}/{file}: {text}");
        }
        for list in ["fd", "cwd", "root"] {
            let text = world.bash(&format!("ls /proc/{pid}/{list}/ 2> /dev/null | wc -l")).await;
            assert_eq!(text, "0\n", "/proc/{pid}/{list}");
        }
    }
}

on_backend!(Backend::Unix, no_signal_reaches_a_daemon_of_the_same_user with own_user());
async fn no_signal_reaches_a_daemon_of_the_same_user(world: &World) {
    signals_stay_within(world).await;
}

on_backend!(Backend::Unix, no_signal_of_roots_commands_reaches_the_daemon);
async fn no_signal_of_roots_commands_reaches_the_daemon(world: &World) {
    signals_stay_within(world).await;
}

on_backend!(Backend::Unix, a_session_can_signal_what_it_started_before with own_user());
async fn a_session_can_signal_what_it_started_before(world: &World) {
    earlier_tasks_can_be_signalled(world).await;
}

on_backend!(Backend::Unix, a_session_of_root_can_signal_what_it_started_before);
async fn a_session_of_root_can_signal_what_it_started_before(world: &World) {
    earlier_tasks_can_be_signalled(world).await;
}

on_backend!(Backend::Unix, a_zygote_that_is_killed_or_stopped_costs_no_command with own_user());
async fn a_zygote_that_is_killed_or_stopped_costs_no_command(world: &World) {
    without_its_zygote_a_tenant_goes_on(world).await;
}

on_backend!(Backend::Unix, a_command_of_the_same_user_cannot_look_into_the_daemon with own_user());
async fn a_command_of_the_same_user_cannot_look_into_the_daemon(world: &World) {
    the_daemons_memory_is_closed(world).await;
}
