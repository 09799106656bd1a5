//! The engine over a real keeper: every behaviour that needs real processes.

mod restarts;
mod runs;
mod tasks;

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
    error::ExecutorError,
    types::{
        CommandSpec, KillOutcome, OwnerId, ReadId, ReadStreamEvent, RunResult, StartKey, TaskId, TaskOutput, TaskStatus,
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
