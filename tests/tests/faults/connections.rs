//! Connections that are dead without having ended, and those that only look dead (rows M9, N2, N3).

use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use executor_proto::types::{CommandSpec, Exit, OwnerId, StreamChunk, TaskStatus};
use executor_tests::{
    Backend, SESSION, Setup, Stopwatch, World, every_daemon, faults::Plan, on_backend, wait_for, wait_until,
};
use futures_util::future::join_all;
use tokio::{
    net::{TcpSocket, TcpStream},
    sync::watch,
};
use tokio_util::sync::CancellationToken;
use tool_client::executor::{
    Executor, ExecutorError, OutputSink,
    connect::{Endpoint, Keepalive},
    remote::{Deadlines, RemoteExecutor},
};

use crate::SOON;

/// Pings so close that a test can wait for them, and the time within which a half-open connection is noticed by them.
const PINGS: Keepalive = Keepalive { interval: Duration::from_millis(300), timeout: Duration::from_millis(700) };
const NOTICED: Duration = Duration::from_secs(1);

/// What connecting again needs on top, with the pauses before it.
const SPARE: Duration = Duration::from_secs(2);

fn owner() -> OwnerId {
    OwnerId(SESSION.to_owned())
}

fn command(world: &World, text: &str) -> CommandSpec {
    let workdir = Some(Bytes::from(world.tmp().to_string_lossy().into_owned()));
    CommandSpec { command: Bytes::from(text.to_owned()), workdir, ..CommandSpec::default() }
}

fn pinging() -> Setup {
    Setup { keepalive: PINGS, ..Setup::through(Plan::PASS) }
}

fn go(world: &World) {
    std::fs::write(world.tmp().join("go"), "").expect("it can be made");
}

every_daemon!(m09_a_half_open_connection_is_noticed_and_replaced with pinging());
async fn m09_a_half_open_connection_is_noticed_and_replaced(world: &World) {
    let id = world.background("until [ -e go ]; do sleep 0.02; done").await;
    let owner = owner();
    let calls = world.faults().seen().calls;
    let read = world.executor().read_output(Some(&owner), &id, Some(SOON));
    let break_it = async {
        wait_for("the read waits", SOON, || world.faults().seen().calls > calls).await;
        let connections = world.faults().seen().connections;
        world.faults().halt();
        let watch = Stopwatch::start();
        wait_for("another connection", SOON, || world.faults().seen().connections > connections).await;
        watch.assert_within("noticing", NOTICED + SPARE);
        let task = world.executor().get_task(Some(&owner), &id).await.expect("it is asked by its id");
        assert_eq!(task.status, TaskStatus::Running);
        go(world);
        wait_for("the notice", SOON, || world.mailbox().taken().iter().any(|notice| notice.task_id == id)).await;
    };
    // The read that was under way is answered over the new connection.
    let read = tokio::join!(read, break_it).0.expect("it is made again");
    assert_eq!(read.status, TaskStatus::Ended(Exit::Code(0)));
}

every_daemon!(m05_a_run_over_a_half_open_connection_brings_everything with pinging());
async fn m05_a_run_over_a_half_open_connection_brings_everything(world: &World) {
    assert_eq!(run_half_open(world).await, (Exit::Code(0), b"out\nlast\n".to_vec()));
}

/// Takes output, and lets it be waited for.
#[derive(Default)]
struct Heard(watch::Sender<Vec<u8>>);

#[async_trait]
impl OutputSink for Heard {
    async fn output(&mut self, chunk: StreamChunk) {
        self.0.send_modify(|heard| heard.extend_from_slice(&chunk.data));
    }
}

/// A run whose connection becomes half-open after its first output, and that ends once there is another connection: how it
/// ended, and what was heard of it.
async fn run_half_open(world: &World) -> (Exit, Vec<u8>) {
    let mut sink = Heard::default();
    let mut heard = sink.0.subscribe();
    let (owner, abort) = (owner(), CancellationToken::new());
    let spec = command(world, "echo out; until [ -e go ]; do sleep 0.02; done; echo last");
    let run = world.executor().run(Some(&owner), spec, &abort, Some(&mut sink));
    let break_it = async {
        heard.wait_for(|heard| heard == b"out\n").await.expect("the sink is there until it has ended");
        let connections = world.faults().seen().connections;
        world.faults().halt();
        wait_for("another connection", SOON, || world.faults().seen().connections > connections).await;
        go(world);
    };
    let (result, ()) = tokio::join!(run, break_it);
    let heard = heard.borrow().clone();
    (result.expect("it was started, so there is a result").exit, heard)
}

every_daemon!(n02_no_number_of_pings_is_too_many with Setup {
    keepalive: Keepalive { interval: Duration::from_millis(10), timeout: Duration::from_secs(20) },
    ..Setup::through(Plan::PASS)
});
async fn n02_no_number_of_pings_is_too_many(world: &World) {
    /// Servers that count send GOAWAY after the third.
    const PINGS: u64 = 60;
    let more_pings = async |when: &str| {
        let before = world.faults().seen().client_pings;
        wait_for(format_args!("pings while {when}"), SOON, || world.faults().seen().client_pings >= before + PINGS)
            .await;
    };
    world.executor().info().await.expect("it answers");
    more_pings("nothing is under way").await;
    let silent = async {
        more_pings("a call is silent").await;
        go(world);
    };
    let (result, ()) = tokio::join!(world.run(command(world, "until [ -e go ]; do sleep 0.02; done")), silent);
    assert_eq!(result.expect("it runs").exit, Exit::Code(0));
    let seen = world.faults().seen();
    assert_eq!((seen.connections, seen.goaways), (1, 0), "{seen:?}");
}

/// A proxy that cuts what is idle for a second.
fn idle_cutting(heartbeat_ms: Option<u64>) -> Setup {
    Setup { heartbeat_ms, ..Setup::through(Plan::cut_idle(Duration::from_secs(1))) }
}

every_daemon!(n03_heartbeats_keep_a_silent_run_through_an_idle_cutting_proxy with idle_cutting(Some(100)));
async fn n03_heartbeats_keep_a_silent_run_through_an_idle_cutting_proxy(world: &World) {
    let result = world.run(command(world, "sleep 3; echo ok")).await.expect("it runs");
    assert_eq!((result.exit, &result.stdout.tail[..]), (Exit::Code(0), &b"ok\n"[..]));
    let seen = world.faults().seen();
    assert_eq!((seen.connections, seen.cuts), (1, 0), "{seen:?}");
}

on_backend!(Backend::Unix, n03_a_run_outlives_every_cut_of_an_idle_cutting_proxy with idle_cutting(None));
async fn n03_a_run_outlives_every_cut_of_an_idle_cutting_proxy(world: &World) {
    let result = world.run(command(world, "sleep 3; echo ok")).await.expect("it runs");
    assert!(world.faults().seen().cuts > 0, "{:?}", world.faults().seen());
    assert_eq!((result.exit, &result.stdout.tail[..]), (Exit::Code(0), &b"ok\n"[..]));
}

every_daemon!(a_connection_that_is_cut_between_two_calls_is_made_again with Setup::through(Plan::PASS));
async fn a_connection_that_is_cut_between_two_calls_is_made_again(world: &World) {
    for round in 1..=20 {
        world.executor().info().await.unwrap_or_else(|error| panic!("round {round}: {error}"));
        world.faults().cut();
    }
    assert_eq!(world.faults().seen().connections, 20);
}

on_backend!(Backend::Tcp, a_daemon_that_is_away_for_a_moment_is_not_missed with Setup::through(Plan::PASS));
async fn a_daemon_that_is_away_for_a_moment_is_not_missed(world: &World) {
    world.faults().refuse().await;
    let refused = world.executor().info().await.expect_err("nobody listens");
    assert!(matches!(&refused, ExecutorError::Unavailable { cause, .. } if cause == "connection refused"), "{refused}");
    let (answer, ()) = tokio::join!(world.executor().info(), world.faults().accept());
    answer.expect("it was tried again");
}

/// A port at which connections neither come about nor are refused: its queue is full and nobody takes from it.
async fn black_hole() -> (u16, Vec<TcpStream>, tokio::net::TcpListener) {
    /// A connection over the loopback interface comes about at once, or the queue is full.
    const AT_ONCE: Duration = Duration::from_millis(200);
    let socket = TcpSocket::new_v4().expect("a socket");
    socket.bind(([127, 0, 0, 1], 0).into()).expect("a free port");
    let listener = socket.listen(1).expect("it listens");
    let address = listener.local_addr().expect("it has an address");
    let mut queued = Vec::new();
    while let Ok(stream) = tokio::time::timeout(AT_ONCE, TcpStream::connect(address)).await {
        queued.push(stream.expect("it is queued"));
    }
    (address.port(), queued, listener)
}

#[tokio::test]
async fn calls_that_wait_for_a_connection_that_is_stuck_wait_together() {
    const LIMIT: Duration = Duration::from_millis(500);
    const CALLS: u32 = 20;
    let (port, _queued, listener) = black_hole().await;
    let endpoint = Endpoint::Tcp { host: "127.0.0.1".to_owned(), port };
    let deadlines = Deadlines { connect: LIMIT, ..Deadlines::default() };
    let executor = RemoteExecutor::with_deadlines(&endpoint, None, deadlines);
    let watch = Stopwatch::start();
    for answer in join_all((0..CALLS).map(|_| executor.info())).await {
        let error = answer.expect_err("nobody is there");
        assert!(
            matches!(&error, ExecutorError::Unavailable { cause, .. } if cause == "no connection within 500ms"),
            "{error}"
        );
    }
    // One after the other it would be 10 s.
    watch.assert_within("all calls", LIMIT * 3);
    // A call that comes later learns how things are then.
    drop(listener);
    wait_until("another answer", SOON, async || match executor.info().await {
        Err(ExecutorError::Unavailable { cause, .. }) if cause == "connection refused" => Some(()),
        _ => None,
    })
    .await;
}
