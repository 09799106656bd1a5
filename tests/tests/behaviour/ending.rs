//! A kill and a timeout end the work, all of it and nothing else (kind B).

use std::{
    net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream},
    time::Duration,
};

use executor_proto::types::{TaskId, TaskStatus};
use executor_tests::{Setup, Stopwatch, World, every_backend, wait_for, wait_until};
use futures_util::future::join_all;
use serde_json::json;

/// The tolerance of a timeout.
const TOLERANCE: Duration = Duration::from_millis(500);

/// For what must happen, and does so at once.
const SOON: Duration = Duration::from_secs(15);

const TIMED_OUT: &str = "(no output)\n[timed out after 2000ms]\n[killed by signal: SIGTERM]";

/// Runs a command that a timeout of 2 s must end in time.
async fn times_out_at_two_seconds(world: &World, command: &str) -> String {
    let watch = Stopwatch::start();
    let text = world.bash_with(command, json!({"timeoutMs": 2_000})).await;
    watch.assert_about("the call", Duration::from_secs(2), TOLERANCE);
    world.assert_no_survivors("after the timeout");
    text
}

/// A port that is free now.
fn free_port() -> u16 {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("there are free ports");
    listener.local_addr().expect("it is bound").port()
}

fn answers(port: u16) -> bool {
    TcpStream::connect_timeout(&SocketAddr::from((Ipv4Addr::LOCALHOST, port)), Duration::from_secs(1)).is_ok()
}

/// Load that lives in children of the shell.
const SPINNERS: &str = "for i in 1 2; do (while :; do :; done) & done; sleep 60";

every_backend!(b01_a_kill_takes_the_port_with_it);
async fn b01_a_kill_takes_the_port_with_it(world: &World) {
    let port = free_port();
    let id = world.background(&format!("sh -c 'python3 -m http.server {port} --bind 127.0.0.1; true'")).await;
    wait_for("the port answers", SOON, || answers(port)).await;
    assert_eq!(world.kill(&id).await, format!("killed background task {id}"));
    assert!(!answers(port), "the port still answers");
    world.assert_no_survivors("after the kill");
}

every_backend!(b03_a_timeout_does_not_wait_for_the_command);
async fn b03_a_timeout_does_not_wait_for_the_command(world: &World) {
    assert_eq!(times_out_at_two_seconds(world, "sleep 5; echo hi").await, TIMED_OUT);
}

every_backend!(b06_a_timeout_ends_a_pipeline);
async fn b06_a_timeout_ends_a_pipeline(world: &World) {
    assert_eq!(times_out_at_two_seconds(world, &format!("{} | cat", world.sleep(60))).await, TIMED_OUT);
}

every_backend!(b07_a_timeout_ends_spinning_children);
async fn b07_a_timeout_ends_spinning_children(world: &World) {
    assert_eq!(times_out_at_two_seconds(world, SPINNERS).await, TIMED_OUT);
}

every_backend!(b09_a_timeout_does_not_end_the_executor);
async fn b09_a_timeout_does_not_end_the_executor(world: &World) {
    let before = world.daemon().map(executor_tests::Daemon::server);
    assert_eq!(times_out_at_two_seconds(world, "sleep 5; echo hi").await, TIMED_OUT);
    assert_eq!(world.bash("echo on").await, "on\n");
    if let Some(server) = before {
        assert!(server.is_alive(), "the server was replaced");
    }
}

every_backend!(b10_configured_timeouts_have_effect
    with Setup { timeout_ms: 5_000.0, max_timeout_ms: 10_000.0, ..Setup::default() });
async fn b10_configured_timeouts_have_effect(world: &World) {
    let default = async {
        let watch = Stopwatch::start();
        let text = world.bash("sleep 7").await;
        watch.assert_about("the default", Duration::from_secs(5), TOLERANCE);
        assert_eq!(text, "(no output)\n[timed out after 5000ms]\n[killed by signal: SIGTERM]");
    };
    let cap = async {
        let watch = Stopwatch::start();
        let text = world.bash_with("sleep 20", json!({"timeoutMs": 60_000})).await;
        watch.assert_about("the cap", Duration::from_secs(10), TOLERANCE);
        assert_eq!(text, "(no output)\n[timed out after 10000ms]\n[killed by signal: SIGTERM]");
    };
    futures_util::future::join(default, cap).await;
}

every_backend!(b16_timeouts_leave_no_load_behind);
async fn b16_timeouts_leave_no_load_behind(world: &World) {
    /// Long enough for one process that spins to be far above what an idle executor takes.
    const IDLE: Duration = Duration::from_millis(500);
    /// A tenth of what one that spins takes: some ticks of the kernel's clock.
    const AT_REST: Duration = Duration::from_millis(50);

    for _ in 0..3 {
        assert_eq!(times_out_at_two_seconds(world, SPINNERS).await, TIMED_OUT);
    }
    let load = world.idle_load(IDLE).await;
    assert!(load < AT_REST, "{load:?} in {IDLE:?} of idleness, by {:#?}", world.processes());
    let watch = Stopwatch::start();
    assert_eq!(world.bash("true").await, "(no output)");
    watch.assert_within("the next call", Duration::from_millis(100));
    // That a load would have been seen.
    let spins = world.background("while :; do :; done").await;
    wait_until("the load is seen", SOON, async || (world.idle_load(IDLE).await > AT_REST).then_some(())).await;
    assert_eq!(world.kill(&spins).await, format!("killed background task {spins}"));
}

every_backend!(b17_a_child_that_ignores_sigterm_in_its_own_session_is_ended);
async fn b17_a_child_that_ignores_sigterm_in_its_own_session_is_ended(world: &World) {
    let (escapee, shell) = (world.sleep(300), world.sleep(60));
    let command = format!("setsid sh -c 'trap \"\" TERM; {escapee}' & {shell}");
    assert_eq!(times_out_at_two_seconds(world, &command).await, TIMED_OUT);
}

every_backend!(b19_the_next_server_gets_the_port);
async fn b19_the_next_server_gets_the_port(world: &World) {
    let port = free_port();
    // Without SO_REUSEADDR: it binds only when the one before is really gone.
    let serve = format!(
        "exec python3 -c 'import socket,time; s=socket.socket(); s.bind((\"127.0.0.1\",{port})); s.listen(); time.sleep(300)'"
    );
    let first = world.background(&serve).await;
    wait_for("the port answers", SOON, || answers(port)).await;
    assert_eq!(world.kill(&first).await, format!("killed background task {first}"));
    let second = world.background(&serve).await;
    wait_for("the port answers again", SOON, || answers(port)).await;
    assert_eq!(world.output(&second).await, "(no new output)\n[status: running]");
    assert_eq!(world.kill(&second).await, format!("killed background task {second}"));
}

every_backend!(b22_other_calls_of_the_same_owner_leave_a_task_alone);
async fn b22_other_calls_of_the_same_owner_leave_a_task_alone(world: &World) {
    let id = world.background(&world.sleep(60)).await;
    let session = world.session("s1").id;
    let calls = (0..20).map(|round| {
        let (id, session) = (&id, &session);
        async move {
            let other = world.background("true").await;
            let unknown = TaskId(format!("bash-{}", 1_000 + round));
            assert_eq!(world.output(id).await, "(no new output)\n[status: running]");
            assert_eq!(world.kill(&unknown).await, format!("Error: unknown bash task \"{unknown}\""));
            assert_eq!(world.bash("echo hi").await, "hi\n");
            world.kill(&other).await;
            world.executor().list_tasks(Some(session)).await.expect("the executor answers");
        }
    });
    join_all(calls).await;
    let task = world.executor().get_task(Some(&session), &id).await.expect("it is there");
    assert_eq!(task.status, TaskStatus::Running);
    assert_eq!(world.kill(&id).await, format!("killed background task {id}"));
    world.assert_no_survivors("after the kill");
}

every_backend!(many_that_end_at_once_are_all_answered);
async fn many_that_end_at_once_are_all_answered(world: &World) {
    // More than the keeper keeps helpers for: some are let go as soon as their command has ended.
    let ids = join_all((0..24).map(|_| async { world.background(&world.sleep(300)).await })).await;
    let killed = join_all(ids.iter().map(|id| world.kill(id))).await;
    for (id, text) in ids.iter().zip(killed) {
        assert_eq!(text, format!("killed background task {id}"));
    }
    world.assert_no_survivors("after the kills");
}
