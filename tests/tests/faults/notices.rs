//! Every completion becomes one notice, however often the stream that brings it is cut (rows M1, M2, M4).

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use bytes::Bytes;
use executor_proto::types::{CommandSpec, OwnerId, TaskId, TaskStatus};
use executor_tests::{
    Backend, Mailbox, SESSION, Setup, World, every_daemon,
    faults::{FaultProxy, Plan},
    on_backend, wait_for, wait_until,
};
use futures_util::future::join_all;
use tool_client::{
    executor::{Executor, connect::Keepalive, remote::Deadlines},
    notices::Notices,
};

use crate::SOON;

fn owner() -> OwnerId {
    OwnerId(SESSION.to_owned())
}

fn spec(world: &World, command: &str) -> CommandSpec {
    let workdir = Some(Bytes::from(world.tmp().to_string_lossy().into_owned()));
    CommandSpec { command: Bytes::from(command.to_owned()), workdir, ..CommandSpec::default() }
}

/// How often each task was told of.
fn told(mailbox: &Mailbox) -> BTreeMap<TaskId, usize> {
    let mut told = BTreeMap::new();
    for notice in mailbox.taken() {
        *told.entry(notice.task_id).or_default() += 1;
    }
    told
}

/// Waits until one more task has been told of. Completions come in order, so whatever was to be told before it has been.
async fn fence(world: &World, direct: &Arc<dyn Executor>, owner: &OwnerId, mailbox: &Mailbox) -> TaskId {
    let id = direct.start_task(Some(owner), spec(world, "true")).await.expect("it starts");
    wait_for("the last notice", SOON, || told(mailbox).contains_key(&id)).await;
    id
}

async fn ended(executor: &Arc<dyn Executor>, owner: &OwnerId, id: &TaskId) {
    wait_until(format_args!("{id} has ended"), SOON, async || {
        let task = executor.get_task(Some(owner), id).await.expect("it is known");
        (task.status != TaskStatus::Running).then_some(())
    })
    .await;
}

every_daemon!(m01_a_task_that_ends_while_nobody_listens_is_told_once with Setup::through(Plan::PASS));
async fn m01_a_task_that_ends_while_nobody_listens_is_told_once(world: &World) {
    let direct = world.direct();
    let id = world.background("until [ -e go ]; do sleep 0.02; done; echo R").await;
    world.faults().refuse().await;
    world.faults().cut();
    std::fs::write(world.tmp().join("go"), "").expect("it can be made");
    ended(&direct, &owner(), &id).await;
    assert_eq!(world.mailbox().taken(), [], "nobody can have been told");
    world.faults().accept().await;
    wait_for("the notice", SOON, || !world.mailbox().taken().is_empty()).await;
    let last = fence(world, &direct, &owner(), world.mailbox()).await;
    assert_eq!(told(world.mailbox()), BTreeMap::from([(id.clone(), 1), (last, 1)]));
    let text = format!(
        "background bash task {id} finished [status: completed, exit code: 0]. Read its output with bash_output."
    );
    assert_eq!(world.mailbox().taken()[0].text, text);
    assert_eq!(world.output(&id).await, "R\n\n[status: completed, exit code: 0]");
}

every_daemon!(m02_two_hundred_tasks_over_a_stream_that_is_cut_all_the_time
    with Setup::through(Plan::cut_every(Duration::from_millis(50))));
async fn m02_two_hundred_tasks_over_a_stream_that_is_cut_all_the_time(world: &World) {
    const TASKS: usize = 200;
    /// Started at the same time.
    const ABREAST: usize = 4;
    let direct = world.direct();
    world.attach(&owner());
    let mut started = Vec::new();
    while started.len() < TASKS {
        let owner = owner();
        let some = join_all((0..ABREAST).map(|_| direct.start_task(Some(&owner), spec(world, "true")))).await;
        started.extend(some.into_iter().map(|id| id.expect("it starts")));
    }
    wait_for("all notices", SOON * 2, || told(world.mailbox()).len() >= TASKS).await;
    let last = fence(world, &direct, &owner(), world.mailbox()).await;
    let expected: BTreeMap<_, _> = started.into_iter().chain([last]).map(|id| (id, 1)).collect();
    assert_eq!(told(world.mailbox()), expected);
    let seen = world.faults().seen();
    assert!(seen.cuts > 3, "it was hardly ever cut: {seen:?}");
}

on_backend!(Backend::Unix, m04_only_the_owner_is_told with Setup::through(Plan::PASS));
async fn m04_only_the_owner_is_told(world: &World) {
    const EACH: usize = 20;
    let (here, away) = (owner(), OwnerId("away".to_owned()));
    let direct = world.direct();
    let daemon = world.daemon().expect("there is one");
    let directory = tempfile::tempdir().expect("a directory");
    let proxy = FaultProxy::start(daemon.endpoint(), directory.path(), Plan::PASS).await.expect("it starts");
    let mailbox = Arc::new(Mailbox::default());
    mailbox.join(&away);
    let client = world.client(proxy.endpoint(), Deadlines::default(), Keepalive::default());
    let notices = Notices::new(client, Arc::clone(&mailbox) as _);
    notices.attach(away.clone());
    world.attach(&here);
    wait_for("both are connected", SOON, || proxy.seen().calls > 0 && world.faults().seen().calls > 0).await;

    proxy.refuse().await;
    proxy.cut();
    let mut tasks = BTreeMap::from([(here.clone(), Vec::new()), (away.clone(), Vec::new())]);
    for _ in 0..EACH {
        for (owner, tasks) in &mut tasks {
            tasks.push(direct.start_task(Some(owner), spec(world, "true")).await.expect("it starts"));
        }
    }
    for (owner, tasks) in &tasks {
        for id in tasks {
            ended(&direct, owner, id).await;
        }
    }
    let expected =
        |owner, last| tasks[owner].iter().cloned().chain([last]).map(|id| (id, 1)).collect::<BTreeMap<_, _>>();
    let last = fence(world, &direct, &here, world.mailbox()).await;
    assert_eq!(told(world.mailbox()), expected(&here, last));
    assert_eq!(mailbox.taken(), [], "it was cut off");

    proxy.accept().await;
    let last = fence(world, &direct, &away, &mailbox).await;
    assert_eq!(told(&mailbox), expected(&away, last));
    assert!(mailbox.taken().iter().all(|notice| notice.owner == away));
    let here_again = fence(world, &direct, &here, world.mailbox()).await;
    assert_eq!(told(world.mailbox()).len(), EACH + 2, "{here_again} and what was before it");
    assert!(world.mailbox().taken().iter().all(|notice| notice.owner == here));
}

on_backend!(Backend::Unix, a_stream_that_stands_still_is_opened_again with Setup {
    // The daemon is silent for much longer than this client allows.
    deadlines: Deadlines { silence: Duration::from_millis(300), ..Deadlines::default() },
    ..Setup::through(Plan::PASS)
});
async fn a_stream_that_stands_still_is_opened_again(world: &World) {
    world.attach(&owner());
    wait_for("several streams one after the other", SOON, || world.faults().seen().calls >= 4).await;
    let last = fence(world, &world.direct(), &owner(), world.mailbox()).await;
    assert_eq!(told(world.mailbox()), BTreeMap::from([(last, 1)]));
    assert_eq!(world.faults().seen().connections, 1, "the connection itself was in order");
}
