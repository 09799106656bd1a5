//! The engine over a real keeper: every behaviour that needs real processes.

use std::{
    fs,
    path::Path,
    time::{Duration, Instant},
};

use bytes::Bytes;
use executor_daemon::{
    config::Settings,
    engine::{Engine, StreamReader},
    ids::{Caller, TenantId},
    keeper::embedded::{self, EmbeddedOptions},
};
use executor_proto::{
    error::{ExecutorError, SizedPart, SpawnStage},
    types::{
        CommandSpec, EndedBy, EnvironmentVariable, Exit, KillOutcome, OwnerId, ReadId, ReadStreamEvent, RunResult,
        SandboxMode, StartKey, StreamName, TaskId, TaskOutput, TaskStatus, WatchEvent,
    },
};

/// An engine under test, with its directory.
struct World {
    engine: Engine,
    directory: tempfile::TempDir,
}

impl World {
    async fn new() -> Self {
        Self::with(|_| {}).await
    }

    async fn with(adjust: impl FnOnce(&mut Settings)) -> Self {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let engine = start_engine(directory.path(), adjust).await;
        Self { engine, directory }
    }

    /// Stops in order and leaves nothing behind.
    async fn close(self) {
        self.engine.drain().await;
    }

    async fn run(&self, command: impl Into<Bytes>) -> RunResult {
        self.run_spec(spec(command)).await.expect("the command starts")
    }

    async fn run_spec(&self, spec: CommandSpec) -> Result<RunResult, ExecutorError> {
        Ok(self.engine.run(&owner("a"), key(), spec).await?.finished().await)
    }

    async fn task(&self, command: &'static str) -> TaskId {
        self.engine.start_task(&owner("a"), key(), spec(command)).await.expect("the task starts")
    }

    /// Reads, waiting for the end.
    async fn end(&self, id: &TaskId) -> TaskOutput {
        let wait = Some(Duration::from_secs(20));
        self.engine.read_output(&owner("a"), id, &ReadId(key().0), wait).await.expect("it may be read")
    }

    async fn read(&self, id: &TaskId) -> TaskOutput {
        self.engine.read_output(&owner("a"), id, &ReadId(key().0), None).await.expect("it may be read")
    }

    async fn kill(&self, id: &TaskId) -> KillOutcome {
        self.engine.kill_task(&owner("a"), id).await.expect("it may be killed")
    }

    /// Waits until a file of the directory holds a line.
    async fn wrote(&self, name: &str) -> String {
        let path = self.directory.path().join(name);
        let mut text = String::new();
        until(|| {
            text = fs::read_to_string(&path).unwrap_or_default();
            text.ends_with('\n')
        })
        .await;
        text.trim().to_owned()
    }

    /// Waits until nothing of the caller's runs or is left over.
    async fn nothing_lives(&self) {
        let deadline = Instant::now() + Duration::from_secs(10);
        loop {
            let tasks = self.engine.list_tasks(&owner("a")).await;
            if tasks.iter().all(|task| task.status != TaskStatus::Running && task.leftovers.is_empty()) {
                return;
            }
            assert!(Instant::now() < deadline, "{tasks:?}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

async fn start_engine(directory: &Path, adjust: impl FnOnce(&mut Settings)) -> Engine {
    let environment = [("PATH", "/usr/local/bin:/usr/bin:/bin"), ("HOME", "/"), ("LANG", "C.UTF-8")];
    let environment = environment.map(|(name, value)| (name.into(), value.into()));
    let mut settings =
        Settings::new(directory.join("state"), directory.to_owned(), Settings::command_environment(environment));
    settings.grace_ms = 300;
    settings.resume_window_ms = 0;
    adjust(&mut settings);
    let program = Some(env!("CARGO_BIN_EXE_executor-daemon").into());
    let spill_dir = settings.state_dir.join("spill");
    fs::create_dir_all(&settings.state_dir).expect("the state directory");
    let keeper = embedded::start(EmbeddedOptions { program, spill_dir }).await.expect("the keeper starts");
    Engine::start(settings, keeper).await.expect("the engine starts")
}

fn spec(command: impl Into<Bytes>) -> CommandSpec {
    CommandSpec { command: command.into(), ..CommandSpec::default() }
}

fn owner(name: &str) -> Caller {
    Caller { tenant: TenantId::default_tenant(), owner: Some(OwnerId(name.into())) }
}

fn key() -> StartKey {
    static NEXT: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
    StartKey(format!("key-{}", NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed)))
}

/// Waits for a condition, and fails after ten seconds.
async fn until(mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(10);
    while !condition() {
        assert!(Instant::now() < deadline, "the condition did not come true");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

fn alive(pid: &str) -> bool {
    // A zombie is dead.
    fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| !stat.contains(") Z "))
}

fn text(bytes: &Bytes) -> &str {
    std::str::from_utf8(bytes).expect("text")
}

/// Reads to the end; the bytes, and the total that the end names.
async fn all(mut reader: StreamReader) -> (Vec<u8>, u64) {
    let mut bytes = Vec::new();
    let mut told = None;
    while let Some(event) = reader.next().await {
        match event {
            ReadStreamEvent::Chunk(chunk) => {
                assert_eq!(chunk.offset, bytes.len() as u64, "a gap");
                bytes.extend_from_slice(&chunk.data);
            }
            ReadStreamEvent::End { total, .. } => told = Some(total),
        }
    }
    (bytes, told.expect("an end"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_run_returns_its_output_and_its_exit() {
    let world = World::new().await;
    let result = world.run("echo out; echo err >&2; exit 7").await;
    assert_eq!((text(&result.stdout.tail), text(&result.stderr.tail)), ("out\n", "err\n"));
    assert_eq!(result.exit, Exit::Code(7));
    assert_eq!((result.timed_out_after_ms, result.ended_by, result.aborted), (None, None, false));
    assert!(result.leftovers.is_empty() && result.survivors.is_empty());
    assert_eq!(world.run("kill -9 $$").await.exit, Exit::Signal(9));
    assert_eq!(world.run("kill -35 $$").await.exit, Exit::Signal(35));
    assert_eq!(text(&world.run("echo $0 $- $#; cat; echo $?").await.stdout.tail), "bash hBc 0\n0\n");
    world.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_environment_and_the_workdir_are_the_commands_own() {
    let world = World::new().await;
    fs::create_dir(world.directory.path().join("sub")).expect("a directory");
    let mut given = spec("pwd; echo $X $TERM; cat");
    given.workdir = Some("./x/../sub".into());
    given.environment.push(EnvironmentVariable { name: "X".into(), value: "1".into() });
    given.environment.push(EnvironmentVariable { name: "X".into(), value: "2".into() });
    given.stdin = Some("from stdin".into());
    let result = world.run_spec(given).await.expect("it starts");
    let workdir = world.directory.path().join("sub");
    assert_eq!(text(&result.stdout.tail), format!("{}\n2 dumb\nfrom stdin", workdir.display()));
    world.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_cannot_start_says_why_and_uses_no_id() {
    let world = World::new().await;
    let mut gone = spec("pwd");
    gone.workdir = Some("/nowhere/at/all".into());
    let path = Some(Bytes::from_static(b"/nowhere/at/all"));
    let expected = ExecutorError::Spawn { stage: SpawnStage::Chdir, errno: 2, path };
    assert_eq!(world.run_spec(gone.clone()).await, Err(expected.clone()));
    let again = key();
    assert_eq!(world.engine.start_task(&owner("a"), again.clone(), gone).await, Err(expected));

    let mut no_bash = spec("pwd");
    no_bash.environment.push(EnvironmentVariable { name: "PATH".into(), value: "/nowhere".into() });
    let expected = ExecutorError::Spawn { stage: SpawnStage::Exec, errno: 2, path: None };
    assert_eq!(world.run_spec(no_bash).await, Err(expected));

    let mut large = spec("true");
    large.environment = (0..70)
        .map(|n| EnvironmentVariable { name: format!("X{n}").into(), value: vec![b'x'; 131_000].into() })
        .collect();
    let error = world.run_spec(large).await.expect_err("the kernel does not take that much");
    let ExecutorError::TooLarge { part: SizedPart::Environment, name: None, bytes, limit } = error else {
        panic!("{error:?}")
    };
    assert!(bytes > limit, "{bytes} {limit}");

    let mut limited = spec("true");
    limited.sandbox_mode = Some(SandboxMode::WorkspaceWrite);
    assert!(matches!(world.run_spec(limited).await, Err(ExecutorError::SandboxUnavailable { .. })));

    // The key of the start that failed is free, and the number that it did not get comes now.
    let id = world.engine.start_task(&owner("a"), again, spec("true")).await.expect("it starts");
    assert_eq!(id.0, "bash-1");
    world.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_timeout_ends_everything_and_keeps_what_was_written() {
    let world = World::new().await;
    let mut given = spec(
        "setsid sh -c 'trap \"\" TERM; echo $$ > escaped; while :; do sleep 1; done' & \
         echo progress; sleep 60",
    );
    given.timeout_ms = Some(700.5);
    let started = Instant::now();
    let result = world.run_spec(given).await.expect("it starts");
    assert!(started.elapsed() < Duration::from_secs(4), "{:?}", started.elapsed());
    assert_eq!(result.timed_out_after_ms, Some(700.5));
    assert_eq!((result.exit, text(&result.stdout.tail)), (Exit::Signal(15), "progress\n"));
    assert!(result.survivors.is_empty() && result.leftovers.is_empty());
    assert!(!alive(&world.wrote("escaped").await));
    world.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_capped_timeout_says_the_effective_value() {
    let world = World::with(|settings| settings.max_timeout_ms = 150.0).await;
    let mut given = spec("sleep 60");
    given.timeout_ms = Some(1e300);
    let mut run = world.engine.run(&owner("a"), key(), given).await.expect("it starts");
    assert_eq!((run.accepted().timeout_ms, run.accepted().run_id.0.as_str()), (150.0, "run-1"));
    assert_eq!(run.finished().await.timed_out_after_ms, Some(150.0));
    world.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_abort_ends_the_run_and_its_reply_is_evidence() {
    let world = World::new().await;
    let name = key();
    let command = spec("echo $$ > pid; sleep 60");
    let mut run = world.engine.run(&owner("a"), name.clone(), command).await.expect("it starts");
    let second = world.engine.run(&owner("a"), name.clone(), spec("true")).await;
    assert_eq!(second.expect_err("the key is in use"), ExecutorError::KeyConflict);
    let pid = world.wrote("pid").await;
    let stranger = world.engine.cancel_run(&owner("b"), &name).await.expect("a well-formed key");
    assert!(stranger.already_finished && alive(&pid));
    let outcome = world.engine.cancel_run(&owner("a"), &name).await.expect("a well-formed key");
    assert_eq!(outcome, KillOutcome::default());
    assert!(!alive(&pid));
    assert!(run.finished().await.aborted);
    assert!(world.engine.cancel_run(&owner("a"), &name).await.expect("a well-formed key").already_finished);
    world.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_abort_that_meets_the_start_ends_it_all_the_same() {
    let world = World::new().await;
    for _ in 0..20 {
        let name = key();
        let caller = owner("a");
        let start = world.engine.run(&caller, name.clone(), spec("sleep 60"));
        let abort = async {
            while world.engine.cancel_run(&caller, &name).await.expect("a well-formed key").already_finished {
                tokio::task::yield_now().await;
            }
        };
        let (run, ()) = tokio::join!(start, abort);
        assert!(run.expect("it starts").finished().await.aborted);
    }
    world.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dropped_run_is_ended_and_so_is_a_dropped_start() {
    let world = World::new().await;
    let run = world.engine.run(&owner("a"), key(), spec("echo $$ > pid; sleep 60")).await.expect("it starts");
    let pid = world.wrote("pid").await;
    drop(run);
    until(|| !alive(&pid)).await;
    // A finished run without a spill is forgotten.
    world.nothing_lives().await;

    // More at a time than the keeper keeps helpers for.
    for _ in 0..30 {
        let caller = owner("a");
        let start = world.engine.run(&caller, key(), spec("sleep 60"));
        // Polled once, then dropped: the keeper is at it.
        let _ = tokio::time::timeout(Duration::ZERO, start).await;
    }
    // The keeper starts one after the other, so all of them have been started when this one has.
    world.run("true").await;
    world.nothing_lives().await;
    world.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leftovers_do_not_hold_a_run_up_and_are_listed_and_killable() {
    let world = World::new().await;
    let started = Instant::now();
    let mut run = world
        .engine
        .run(&owner("a"), key(), spec("(while :; do echo x; sleep 0.02; done) & echo started"))
        .await
        .expect("it starts");
    let output = run.output(StreamName::Stdout);
    let result = run.finished().await;
    assert!(started.elapsed() < Duration::from_millis(2_500), "{:?}", started.elapsed());
    assert_eq!(result.exit, Exit::Code(0));
    assert!(!result.leftovers.is_empty());
    // The run's own output ends where its result does.
    let (bytes, total) = all(output).await;
    assert_eq!((bytes.len() as u64, total), (result.stdout.total, result.stdout.total));

    let id = run.accepted().run_id.clone();
    let listed = world.engine.list_tasks(&owner("a")).await;
    assert_eq!((listed.len(), &listed[0].id, &listed[0].status), (1, &id, &TaskStatus::Ended(Exit::Code(0))));
    assert!(!listed[0].leftovers.is_empty());
    // What it writes goes on to its stream.
    let mut follow = world.engine.read_stream(&owner("a"), &id, StreamName::Stdout, total, true).expect("it is known");
    assert!(matches!(follow.next().await, Some(ReadStreamEvent::Chunk(chunk)) if chunk.offset == total));
    assert_eq!(world.kill(&id).await, KillOutcome::default());
    assert!(result.leftovers.iter().all(|pid| !alive(&pid.to_string())));
    world.nothing_lives().await;
    world.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leftovers_can_be_unwanted() {
    let world = World::with(|settings| settings.reap_descendants = true).await;
    let result = world.run("setsid sleep 60 & echo $! > pid").await;
    assert_eq!((result.exit, result.leftovers, result.survivors), (Exit::Code(0), vec![], vec![]));
    assert!(!alive(&world.wrote("pid").await));
    world.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_oldest_leftovers_go_above_the_cap() {
    let world = World::with(|settings| settings.max_leftovers_per_owner = 2).await;
    let mut pids = Vec::new();
    for n in 0..4 {
        let result = world.run(format!("sleep 60 >/dev/null 2>&1 & echo $! > pid{n}")).await;
        assert_eq!(result.exit, Exit::Code(0));
        pids.push(world.wrote(&format!("pid{n}")).await);
    }
    until(|| pids.iter().filter(|pid| alive(pid)).count() == 2).await;
    assert!(alive(&pids[2]) && alive(&pids[3]));
    world.close().await;
}

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
        .task("trap 'echo bye; exit 0' TERM; setsid sh -c 'trap \"\" TERM; echo $$ > pid; while :; do sleep 0.1; done' & wait")
        .await;
    let pid = world.wrote("pid").await;
    let (first, second) = tokio::join!(world.kill(&id), async {
        // Comes during the grace, which the escaped one makes the first wait for.
        tokio::time::sleep(Duration::from_millis(50)).await;
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
    let world = World::with(|settings| settings.max_tasks_per_owner = 1).await;
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
async fn ids_go_on_after_a_restart_of_everything() {
    let directory = tempfile::tempdir().expect("a temporary directory");
    let mut instance = None;
    for expected in ["bash-1", "bash-2", "bash-3"] {
        let engine = start_engine(directory.path(), |_| {}).await;
        let id = engine.start_task(&owner("a"), key(), spec("true")).await.expect("it starts");
        assert_eq!(id.0, expected);
        assert_eq!(instance.get_or_insert_with(|| engine.info().instance_id), &engine.info().instance_id);
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

/// Small scripts as an argument and, behind a long comment, as one that is too long for an argument.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_long_command_runs_as_a_short_one_does() {
    let world = World::new().await;
    let scripts: [&[u8]; 19] = [
        b"echo $0 $- $# $? $LINENO; cat; echo rc=$?",
        b"exit 3",
        b"set -e; false; echo no",
        b"kill -9 $$",
        b"nosuchcommand",
        b"cat <<E\nhello\nE",
        b"cat <<E\nhello\nE\n",
        b"cat <<E\nopen",
        b"ls /proc/self/fd",
        b"printf '%s' '\xff\xfe\xe2'",
        b"return 4\necho after",
        b"echo a\\\n",
        b"echo a\\",
        b"trap 'echo bye' EXIT; trap 'echo no' RETURN; exit 7",
        b"exec 3>&1; echo three >&3",
        b"shopt -s extglob expand_aliases\nalias x='echo y'\nx; echo ${__command-unset}",
        b"# nothing",
        b"sleep 0.01 & wait $!; echo $?",
        b"x=$(cat <<E\nfoo\nE\n); echo $x\n\n",
    ];
    for script in scripts {
        let short = world.run([b"# x\n", script].concat()).await;
        let comment = vec![b'x'; 140_000];
        let long = world.run([b"# ", comment.as_slice(), b"\n", script].concat()).await;
        let told = |result: &RunResult| (result.exit.clone(), result.stdout.tail.clone(), result.stderr.tail.clone());
        assert_eq!(told(&short), told(&long), "{}", String::from_utf8_lossy(script));
    }
    // A syntax error has the same code and other words.
    let long = [vec![b' '; 140_000].as_slice(), b"echo 'open"].concat();
    let result = world.run(long).await;
    assert_eq!(result.exit, Exit::Code(2));
    assert!(text(&result.stderr.tail).contains("unexpected EOF"));

    let mut heredoc = b"cat > f <<'E'\n".to_vec();
    heredoc.extend(vec![b'y'; 8 * 1024 * 1024 - 100]);
    heredoc.extend(b"\nE\nwc -c < f");
    let result = world.run(heredoc).await;
    assert_eq!(text(&result.stdout.tail).trim(), (8 * 1024 * 1024 - 99).to_string());
    world.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn starts_and_ends_in_great_number_leave_nothing() {
    let world = World::new().await;
    let descriptors = || fs::read_dir("/proc/self/fd").expect("proc").count();
    world.run("true").await;
    world.nothing_lives().await;
    let before = descriptors();
    let engine = &world.engine;
    let runs = (0..300).map(|n| async move {
        let command = format!("printf END{n}");
        let mut run = engine.run(&owner("a"), key(), spec(command)).await.expect("it starts");
        let result = run.finished().await;
        assert_eq!((result.exit, text(&result.stdout.tail)), (Exit::Code(0), format!("END{n}").as_str()));
    });
    futures_util::future::join_all(runs).await;
    world.nothing_lives().await;
    // Other tests of this process open and close descriptors too; what grows with the number of runs would show.
    until(|| descriptors() < before + 150).await;
    world.close().await;
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
