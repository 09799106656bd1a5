//! What survives the end of an engine, and what does not.

use std::{fs, time::Duration};

use executor_daemon::{engine::Engine, ids::TenantId};
use executor_proto::{
    error::ExecutorError,
    types::{EndedBy, Exit, KillOutcome, StreamName, TaskId, TaskStatus, WatchEvent},
};

use super::{World, alive, all, key, owner, spec, start_engine, text, until};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ids_go_on_after_a_restart_of_everything() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let mut instance = None;
    for expected in ["bash-1", "bash-2", "bash-3"] {
        let engine = start_engine(directory.path(), |_| {}).await;
        let id = engine.start_task(&owner("a"), key(), spec("true")).await.expect("it starts");
        assert_eq!(id.0, expected);
        let id = engine.info(&TenantId::default_tenant()).instance_id;
        assert_eq!(*instance.get_or_insert_with(|| id.clone()), id);
        engine.drain().await;
    }
}

/// What an owner's watch has for it, up to the moment where it has caught up.
async fn waiting(engine: &Engine) -> Vec<(u64, TaskId, TaskStatus)> {
    let mut watch = engine.watch_tasks(&owner("a")).expect("an owner");
    let mut waiting = Vec::new();
    while let Some(WatchEvent::Completion(completion)) = watch.next().await {
        waiting.push((completion.sequence, completion.task_id, completion.status));
    }
    waiting
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn finished_tasks_their_output_and_their_completions_survive_a_restart() {
    let world = World::with(|settings| settings.max_output_bytes = 1_000).await;
    let directory = world.directory.path();
    let loud = world.task("seq 1 1000; echo err >&2; exit 3").await;
    let before = world.end(&loud).await;
    let quiet = world.task("printf one; until [ -e go ]; do sleep 0.01; done; printf two").await;
    until(|| directory.join("state/streams").read_dir().is_ok_and(|files| files.count() == 2)).await;
    loop {
        // The first part is read before the restart.
        let output = world.read(&quiet).await;
        if text(&output.stdout.data) == "one" {
            break;
        }
        assert_eq!(output.status, TaskStatus::Running);
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    fs::write(directory.join("go"), "").expect("it can be written");
    until(|| directory.join("state/streams").read_dir().is_ok_and(|files| files.count() == 3)).await;
    let told = waiting(&world.engine).await;
    assert_eq!(told.len(), 2);
    world.engine.ack_completions(&owner("a"), 1).expect("an owner");
    let World { engine, directory } = world;
    let listed = engine.list_tasks(&owner("a")).await;
    engine.drain().await;
    drop(engine);

    let engine = start_engine(directory.path(), |settings| settings.max_output_bytes = 1_000).await;
    let world = World { engine, directory };
    assert_eq!(world.engine.list_tasks(&owner("a")).await, listed);
    assert_eq!(waiting(&world.engine).await, told[1..]);
    // Everything of the first was read, nothing of the second's rest.
    let after = world.read(&loud).await;
    assert_eq!((&after.status, after.stdout.data.len(), after.stderr.data.len()), (&before.status, 0, 0));
    let rest = world.read(&quiet).await;
    assert_eq!((rest.stdout.start, text(&rest.stdout.data), rest.stdout.dropped), (3, "two", 0));
    // By offset the whole is there: from the spill and from the kept tail.
    let reader = world.engine.read_stream(&owner("a"), &loud, StreamName::Stdout, 0, true).expect("it is known");
    let whole: String = (1..=1_000).map(|number| format!("{number}\n")).collect();
    assert_eq!(all(reader).await, (whole.clone().into_bytes(), whole.len() as u64));
    assert_eq!(world.kill(&loud).await, KillOutcome { already_finished: true, survivors: Vec::new() });
    assert!(world.engine.get_task(&owner("b"), &loud).await.is_err());
    assert_eq!(world.task("true").await.0, "bash-3");
    world.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_ran_under_another_keeper_or_boot_has_ended_with_an_unknown_exit_and_one_notice() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let mut told = Vec::new();
    for (round, reason) in [(1, "executor restarted"), (2, "executor host restarted")] {
        let engine = start_engine(directory.path(), |_| {}).await;
        let name = format!("pid{round}");
        let command = format!("echo $$ > {name}; exec sleep 60");
        let id = engine.start_task(&owner("a"), key(), spec(command)).await.expect("it starts");
        let run = engine.run(&owner("a"), key(), spec("exec sleep 60")).await.expect("it starts");
        let path = directory.path().join(&name);
        until(|| fs::read_to_string(&path).is_ok_and(|text| text.ends_with('\n'))).await;
        let pid = fs::read_to_string(&path).expect("it is there").trim().to_owned();
        // Without a drain nothing more is written down, as after a kill.
        drop((run, engine));
        until(|| !alive(&pid)).await;
        if round == 2 {
            let journal = rusqlite::Connection::open(directory.path().join("state/journal.sqlite")).expect("it opens");
            journal.execute("update worlds set boot = 'an earlier one'", ()).expect("it can be written");
        }
        let engine = start_engine(directory.path(), |_| {}).await;
        let status = TaskStatus::Ended(Exit::Unknown(reason.to_owned()));
        let info = engine.get_task(&owner("a"), &id).await.expect("it is known");
        assert_eq!((info.status, info.shell_pid), (status.clone(), None));
        assert!(engine.get_task(&owner("a"), &TaskId(format!("run-{round}"))).await.is_err());
        let now = waiting(&engine).await;
        assert_eq!(now.len(), round);
        assert_eq!(now[..round - 1], told);
        assert_eq!((&now[round - 1].1, &now[round - 1].2), (&id, &status));
        told = now;
        engine.drain().await;
    }
    // Told once, also by the next.
    let engine = start_engine(directory.path(), |_| {}).await;
    assert_eq!(waiting(&engine).await, told);
    engine.drain().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_drain_ends_everything_with_a_final_state_and_no_notice() {
    let world = World::new().await;
    let task = world.task("setsid sleep 60 & echo $! > pid1; wait").await;
    let leftover = world.task("setsid sleep 60 >/dev/null 2>&1 & echo $! > pid2").await;
    assert_eq!(world.end(&leftover).await.status, TaskStatus::Ended(Exit::Code(0)));
    let mut run =
        world.engine.run(&owner("a"), key(), spec("echo so far; echo > pid3; sleep 60")).await.expect("it starts");
    let pids = [world.wrote("pid1").await, world.wrote("pid2").await];
    world.wrote("pid3").await;
    let mut watch = world.engine.watch_tasks(&owner("a")).expect("an owner");

    world.engine.drain().await;
    assert!(pids.iter().all(|pid| !alive(pid)));
    let result = run.finished().await;
    assert_eq!((result.exit, result.ended_by), (Exit::Signal(15), Some(EndedBy::ExecutorStopping)));
    assert_eq!(text(&result.stdout.tail), "so far\n");
    assert_eq!(world.read(&task).await.status, TaskStatus::Killed(Some(15)));
    let mut told = Vec::new();
    while let Some(event) = watch.next().await {
        if let WatchEvent::Completion(completion) = event {
            told.push(completion.task_id);
        }
    }
    assert_eq!(told, [leftover]);
    let refused = world.engine.start_task(&owner("a"), key(), spec("true")).await;
    assert_eq!(refused, Err(ExecutorError::Stopping));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_that_is_dropped_takes_everything_with_it() {
    let world = World::new().await;
    world.task("setsid sh -c 'echo $$ > pid; sleep 60' & wait").await;
    let pid = world.wrote("pid").await;
    drop(world.engine);
    until(|| !alive(&pid)).await;
}

#[tokio::test]
async fn a_command_that_cannot_be_kept_after_its_start_has_an_unknown_outcome() {
    let world = World::new().await;
    // The file with the latest number of a tenant's runs cannot be opened.
    let mut caller = owner("a");
    caller.tenant = TenantId("other".into());
    let name: String = "other".bytes().map(|byte| format!("{byte:02x}")).collect();
    fs::create_dir(world.directory.path().join("state").join(format!("run-counter-{name}"))).expect("made");
    let error = world.engine.run(&caller, key(), spec("sleep 60")).await.err();
    assert!(
        matches!(&error, Some(ExecutorError::OutcomeUnknown { reason }) if reason.starts_with("it could not be kept: ")),
        "{error:?}"
    );
    world.close().await;
}
