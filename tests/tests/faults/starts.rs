//! A start over a connection that fails at any instant: what the client says of it is true, and nothing runs twice (row N7).

use std::{collections::BTreeMap, fs, sync::Arc, time::Duration};

use bytes::Bytes;
use executor_proto::types::{CommandSpec, Exit, OwnerId, TaskId, TaskStatus};
use executor_tests::{
    Backend, Setup, World, every_daemon,
    faults::{CutAfter, Direction, FaultProxy, Plan},
    on_backend, run, wait_for, wait_until,
};
use futures_util::future::join_all;
use tool_client::executor::{Executor, ExecutorError, connect::Keepalive, remote::Deadlines};

use crate::SOON;

/// A command that leaves one line each time that it runs.
fn mark(world: &World, name: &str) -> CommandSpec {
    let workdir = Some(Bytes::from(world.tmp().to_string_lossy().into_owned()));
    CommandSpec { command: Bytes::from(format!("echo {name} >> marks")), workdir, ..CommandSpec::default() }
}

/// How often each has run.
fn marks(world: &World) -> BTreeMap<String, usize> {
    let mut marks = BTreeMap::new();
    for name in fs::read_to_string(world.tmp().join("marks")).unwrap_or_default().lines() {
        *marks.entry(name.to_owned()).or_default() += 1;
    }
    marks
}

/// Waits until no task of this owner runs, so that what has run is known.
async fn all_ended(direct: &Arc<dyn Executor>, owner: &OwnerId) -> usize {
    wait_until("everything has ended", SOON, async || {
        let tasks = direct.list_tasks(Some(owner)).await.expect("it answers");
        tasks.iter().all(|task| task.status != TaskStatus::Running).then_some(tasks.len())
    })
    .await
}

on_backend!(Backend::Tcp, n07_a_start_that_was_refused_is_made_when_somebody_listens_again with Setup::through(Plan::PASS));
async fn n07_a_start_that_was_refused_is_made_when_somebody_listens_again(world: &World) {
    let owner = OwnerId("n7".to_owned());
    world.faults().refuse().await;
    let refused = world.executor().start_task(Some(&owner), mark(world, "never")).await.expect_err("nobody listens");
    assert!(matches!(refused, ExecutorError::Unavailable { .. }), "{refused}");
    let (started, ()) =
        tokio::join!(world.executor().start_task(Some(&owner), mark(world, "once")), world.faults().accept());
    started.expect("it was made again");
    assert_eq!(all_ended(&world.direct(), &owner).await, 1);
    assert_eq!(marks(world), BTreeMap::from([("once".to_owned(), 1)]));
}

every_daemon!(n07_a_start_that_is_cut_at_any_byte_runs_once with Setup::through(Plan::PASS));
async fn n07_a_start_that_is_cut_at_any_byte_runs_once(world: &World) {
    /// Between two cuts; a start is a few hundred bytes in each direction.
    const STEP: usize = 11;
    let direct = world.direct();
    let owner = OwnerId("n7".to_owned());
    let mut said = BTreeMap::new();
    for direction in [Direction::ToDaemon, Direction::ToClient] {
        for bytes in (0_u64..).step_by(STEP) {
            let name = format!("{direction:?}-{bytes}");
            // Connections are cut after their first bytes, so each start has a connection of its own.
            let client = world.client(world.faults().endpoint(), Deadlines::default(), Keepalive::default());
            world.faults().cut_once(CutAfter { direction, bytes });
            let started = client.start_task(Some(&owner), mark(world, &name)).await;
            let over = world.faults().spare();
            said.insert(name, started);
            if over {
                break;
            }
        }
    }
    let known = all_ended(&direct, &owner).await;
    let marks = marks(world);
    assert!(said.len() > 40, "only {} cuts", said.len());
    for (name, started) in &said {
        assert!(started.is_ok(), "{name}: {started:?}");
    }
    let once: BTreeMap<_, _> = said.into_keys().map(|name| (name, 1)).collect();
    assert_eq!(marks, once);
    assert_eq!(known, once.len());
}

on_backend!(Backend::Unix, n07_a_start_whose_reply_is_lost_ran_once with Setup::through(Plan::PASS));
async fn n07_a_start_whose_reply_is_lost_ran_once(world: &World) {
    let owner = OwnerId("n7".to_owned());
    world.faults().lose_next_reply();
    let id = world.executor().start_task(Some(&owner), mark(world, "once")).await.expect("it is made again");
    assert_eq!(id, TaskId("bash-1".to_owned()));
    assert_eq!(world.faults().seen().lost_replies, 1);
    assert_eq!(all_ended(&world.direct(), &owner).await, 1);
    assert_eq!(marks(world), BTreeMap::from([("once".to_owned(), 1)]));
}

#[test]
fn five_hundred_starts_with_a_lost_reply_are_five_hundred_processes() {
    const CLIENTS: usize = 20;
    const EACH: usize = 25;
    let setup = Setup { max_tasks_per_owner: Some(1_000), ..Setup::through(Plan::PASS) };
    run(Backend::Unix, setup, async |world: &World| {
        let direct = world.direct();
        let owner = OwnerId("many".to_owned());
        let endpoint = world.daemon().expect("there is one").endpoint();
        let started = join_all((0..CLIENTS).map(async |client| {
            let directory = tempfile::tempdir().expect("a directory");
            let proxy = FaultProxy::start(endpoint, directory.path(), Plan::PASS).await.expect("it starts");
            let executor = world.client(proxy.endpoint(), Deadlines::default(), Keepalive::default());
            let mut started = Vec::new();
            for start in 0..EACH {
                proxy.lose_next_reply();
                let spec = mark(world, &format!("{client}-{start}"));
                started.push(executor.start_task(Some(&owner), spec).await.expect("it is made again"));
            }
            assert_eq!(proxy.seen().lost_replies, EACH as u64);
            started
        }))
        .await;
        let mut ids: Vec<_> = started.into_iter().flatten().map(|id| id.0).collect();
        ids.sort_unstable();
        ids.dedup();
        assert_eq!(ids.len(), CLIENTS * EACH, "each start has an id of its own");
        assert_eq!(all_ended(&direct, &owner).await, CLIENTS * EACH);
        let marks = marks(world);
        assert_eq!((marks.len(), marks.values().sum::<usize>()), (CLIENTS * EACH, CLIENTS * EACH));
    });
}

on_backend!(Backend::Unix, a_reply_that_is_lost_on_a_call_that_changes_nothing_is_asked_for_again with Setup::through(Plan::PASS));
async fn a_reply_that_is_lost_on_a_call_that_changes_nothing_is_asked_for_again(world: &World) {
    let owner = OwnerId("n7".to_owned());
    let executor = world.executor();
    let id = executor.start_task(Some(&owner), mark(world, "once")).await.expect("it starts");
    wait_for("it has run", SOON, || !marks(world).is_empty()).await;
    for lost in 1..=10 {
        world.faults().lose_next_reply();
        match lost % 3 {
            0 => executor.info().await.map(drop),
            1 => executor.get_task(Some(&owner), &id).await.map(|task| assert_eq!(task.id, id)),
            _ => executor.list_tasks(Some(&owner)).await.map(|tasks| assert_eq!(tasks.len(), 1)),
        }
        .unwrap_or_else(|error| panic!("loss {lost}: {error}"));
        assert_eq!(world.faults().seen().lost_replies, lost);
    }
}

on_backend!(Backend::Tcp, calls_go_on_over_a_slow_and_broken_wire
    with Setup::through(Plan { cut_every: Some(Duration::from_millis(150)), ..Plan::delay(Duration::from_millis(2)) }));
async fn calls_go_on_over_a_slow_and_broken_wire(world: &World) {
    let owner = OwnerId("n7".to_owned());
    let id = world.direct().start_task(Some(&owner), mark(world, "once")).await.expect("it starts");
    while world.faults().seen().cuts < 10 {
        let task = world.executor().get_task(Some(&owner), &id).await.expect("what changes nothing is asked again");
        assert!(matches!(task.status, TaskStatus::Running | TaskStatus::Ended(Exit::Code(0))), "{:?}", task.status);
    }
}
