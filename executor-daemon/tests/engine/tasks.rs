//! Tasks: reading, killing, owners, budgets, spills.

use std::{
    fs,
    path::Path,
    time::{Duration, Instant},
};

use executor_daemon::ids::{Caller, TenantId};
use executor_proto::{
    error::ExecutorError,
    types::{Exit, KillOutcome, ReadId, StreamName, TaskId, TaskStatus, WatchEvent},
};

use super::{World, alive, all, key, owner, spec, text, until};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_task_is_read_by_deltas_and_ends_with_one_completion() {
    let world = World::new().await;
    let mut watch = world.engine.watch_tasks(&owner("a")).expect("an owner");
    assert_eq!(watch.next().await, Some(WatchEvent::CaughtUp));
    let id = world.task("echo one; until [ -e go ]; do sleep 0.01; done; echo two; echo oops >&2; exit 3").await;
    assert_eq!(id.0, "bash-1");
    let mut first = world.read(&id).await;
    while first.stdout.data.is_empty() {
        first = world.read(&id).await;
    }
    assert_eq!((text(&first.stdout.data), &first.status), ("one\n", &TaskStatus::Running));
    fs::write(world.directory.path().join("go"), "").expect("a file");
    let last = world.end(&id).await;
    assert_eq!((text(&last.stdout.data), text(&last.stderr.data), last.stdout.start), ("two\n", "oops\n", 4));
    assert_eq!(last.status, TaskStatus::Ended(Exit::Code(3)));
    let after = world.read(&id).await;
    assert!(after.stdout.data.is_empty() && after.status == last.status);

    let Some(WatchEvent::Completion(completion)) = watch.next().await else { panic!("a completion") };
    assert_eq!((completion.sequence, &completion.task_id, &completion.status), (1, &id, &last.status));
    world.engine.ack_completions(&owner("a"), 1).expect("an owner");
    let mut again = world.engine.watch_tasks(&owner("a")).expect("an owner");
    assert_eq!(again.next().await, Some(WatchEvent::CaughtUp));
    assert!(world.kill(&id).await.already_finished);
    world.close().await;
    assert_eq!((watch.next().await, again.next().await), (None, None));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_final_status_comes_with_all_the_output() {
    let world = World::new().await;
    for _ in 0..50 {
        let id = world.task("seq 1 5000").await;
        let mut bytes = Vec::new();
        loop {
            let output = world.read(&id).await;
            assert_eq!(output.stdout.start, bytes.len() as u64);
            bytes.extend_from_slice(&output.stdout.data);
            if output.status != TaskStatus::Running {
                break;
            }
            tokio::task::yield_now().await;
        }
        assert!(bytes.ends_with(b"\n5000\n"), "{} bytes", bytes.len());
    }
    world.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_kill_is_evidence_also_for_who_asks_second() {
    let world = World::new().await;
    let id = world
        .task("trap 'echo bye; echo > asked; exit 0' TERM; setsid sh -c 'trap \"\" TERM; echo $$ > pid; while :; do sleep 0.1; done' & wait")
        .await;
    let pid = world.wrote("pid").await;
    let (first, second) = tokio::join!(world.kill(&id), async {
        // Comes during the grace, which the escaped one makes the first wait for.
        world.wrote("asked").await;
        world.kill(&id).await
    });
    assert_eq!(first, KillOutcome::default());
    assert_eq!(second, KillOutcome { already_finished: true, survivors: vec![] });
    assert!(!alive(&pid));
    let output = world.read(&id).await;
    assert_eq!((text(&output.stdout.data), output.status), ("bye\n", TaskStatus::Killed(None)));
    world.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killing_a_finished_task_ends_its_leftovers_and_keeps_its_status() {
    let world = World::new().await;
    let id = world.task("setsid sleep 60 >/dev/null 2>&1 & echo $! > pid; exit 4").await;
    let status = TaskStatus::Ended(Exit::Code(4));
    assert_eq!(world.end(&id).await.status, status);
    let pid = world.wrote("pid").await;
    assert!(alive(&pid));
    assert_eq!(world.kill(&id).await, KillOutcome::default());
    assert!(!alive(&pid));
    assert!(world.kill(&id).await.already_finished);
    assert_eq!(world.read(&id).await.status, status);
    world.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stopped_task_is_killed_after_the_grace() {
    let world = World::new().await;
    let id = world.task("echo $$ > pid; kill -STOP $$").await;
    let pid = world.wrote("pid").await;
    until(|| fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| stat.contains(") T "))).await;
    assert_eq!(world.kill(&id).await, KillOutcome::default());
    assert_eq!(world.read(&id).await.status, TaskStatus::Killed(Some(9)));
    world.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn owners_are_fenced_and_ownerless_tasks_are_open() {
    let world = World::new().await;
    let nobody = Caller { owner: None, ..owner("a") };
    let other_tenant = Caller { tenant: TenantId("other".into()), ..owner("a") };
    let fenced = world.task("sleep 60").await;
    let open = world.engine.start_task(&nobody, key(), spec("true")).await.expect("it starts");
    let read = |caller: Caller, id: TaskId| {
        let engine = world.engine.clone();
        async move { engine.read_output(&caller, &id, &ReadId(key().0), None).await.map(|_| ()) }
    };
    assert_eq!(read(owner("b"), fenced.clone()).await, Err(ExecutorError::ForeignTask(fenced.clone())));
    assert_eq!(read(nobody.clone(), fenced.clone()).await, Err(ExecutorError::ForeignTask(fenced.clone())));
    assert_eq!(read(other_tenant, fenced.clone()).await, Err(ExecutorError::UnknownTask(fenced.clone())));
    assert_eq!(read(owner("b"), open).await, Ok(()));
    let killed = world.engine.kill_task(&owner("b"), &fenced).await;
    assert_eq!(killed, Err(ExecutorError::ForeignTask(fenced.clone())));
    assert_eq!(world.engine.list_tasks(&nobody).await.len(), 1);
    assert_eq!(world.engine.list_tasks(&owner("a")).await.len(), 2);
    assert!(world.engine.watch_tasks(&nobody).is_err());
    assert_eq!(world.read(&fenced).await.status, TaskStatus::Running);
    world.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn budgets_come_back_when_tasks_end() {
    let world = World::with(|settings| settings.tenant_defaults.max_tasks_per_owner = 1).await;
    let id = world.task("sleep 60").await;
    let over = ExecutorError::OverLimit { what: "running tasks".into(), used: 1, limit: 1 };
    assert_eq!(world.engine.start_task(&owner("a"), key(), spec("true")).await, Err(over));
    assert!(world.engine.start_task(&owner("b"), key(), spec("true")).await.is_ok());
    assert_eq!(world.run("echo ok").await.exit, Exit::Code(0));
    world.kill(&id).await;
    assert_eq!(world.task("true").await.0, "bash-3");
    world.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_spill_lives_as_long_as_its_task_or_run_is_known() {
    let world = World::with(|settings| {
        settings.max_output_bytes = 1_000;
        settings.max_finished_per_owner = 2;
    })
    .await;
    let mut run = world.engine.run(&owner("a"), key(), spec("seq 1 1000; echo end")).await.expect("it starts");
    let output = run.output(StreamName::Stdout);
    let result = run.finished().await;
    let path = result.stdout.spill.expect("a spill").path;
    let path = Path::new(text(&path)).to_owned();
    let file = fs::read(&path).expect("the spill");
    assert_eq!(file.len() as u64, result.stdout.total);
    assert_eq!(result.stdout.dropped + result.stdout.tail.len() as u64, result.stdout.total);
    assert_eq!(all(output).await.0, file);
    // Kept like a finished task, so that people can read it by name.
    let id = run.accepted().run_id.clone();
    let reader = world.engine.read_stream(&owner("a"), &id, StreamName::Stdout, 0, false).expect("it is known");
    assert_eq!(all(reader).await.0, file);
    for _ in 0..2 {
        let task = world.task("true").await;
        world.end(&task).await;
    }
    until(|| !path.exists()).await;
    world.close().await;
}

/// Commands that have ended before their spill file is asked for, many at once so that the asking comes late.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_command_that_has_already_ended_gets_its_spill_all_the_same() {
    let world = World::with(|settings| settings.max_output_bytes = 1).await;
    let tasks = (0..200).map(|_| async {
        let id = world.task("printf 150").await;
        world.end(&id).await.stdout
    });
    for stdout in futures_util::future::join_all(tasks).await {
        assert_eq!((stdout.dropped, &stdout.data[..]), (2, &b"0"[..]));
        let path = stdout.spill.expect("a spill").path;
        assert_eq!(fs::read(text(&path)).expect("the spill"), b"150");
    }
    world.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn finished_tasks_are_forgotten_after_their_time() {
    let world = World::with(|settings| settings.finished_kept_seconds = 1).await;
    let id = world.task("true").await;
    world.end(&id).await;
    let deadline = Instant::now() + Duration::from_secs(10);
    while world.engine.get_task(&owner("a"), &id).await.is_ok() {
        assert!(Instant::now() < deadline);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(world.engine.kill_task(&owner("a"), &id).await, Err(ExecutorError::UnknownTask(id)));
    world.close().await;
}
