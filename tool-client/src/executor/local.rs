//! Commands run on this host, by an engine in this process over a keeper of its own.
//!
//! The keeper is a child process: the program itself, started again through the first line of its `main`
//! ([`executor_daemon::keeper::enter_if_asked`]), or `executor-daemon`. It ends everything that was started when this process
//! goes away, however that happens.

use std::{
    ffi::OsString,
    fmt,
    fs::{self, DirBuilder, File, OpenOptions},
    io,
    os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use async_trait::async_trait;
use executor_daemon::{
    config::Settings,
    engine::{Engine, Run, StartError, StreamReader},
    ids::{Caller, TenantId},
    keeper::embedded::{self, EmbeddedOptions},
};
use executor_proto::types::{
    CommandSpec, ExecutorInfo, KillOutcome, OwnerId, ReadId, ReadStreamEvent, RunResult, StartKey, StreamName, TaskId,
    TaskInfo, TaskOutput, WatchEvent,
};
use futures_core::stream::BoxStream;
use futures_util::{StreamExt, stream};
use nix::{
    errno::Errno,
    fcntl::{Flock, FlockArg},
};
use tokio_util::sync::CancellationToken;

use super::{Executor, ExecutorError, OutputSink};

/// What private state directories are called, before something random.
const STATE_PREFIX: &str = "tool-client-embedded-";

/// The file in a private state directory that its process holds locked.
const LOCK_NAME: &str = "lock";

/// How long a directory that was kept for its spills stays.
const KEPT: Duration = Duration::from_secs(24 * 60 * 60);

/// How an embedded executor is made.
#[derive(Default)]
pub struct LocalOptions {
    /// The program that becomes the keeper; its `main` must begin with [`executor_daemon::keeper::enter_if_asked`]. `None`:
    /// this program.
    pub program: Option<PathBuf>,
    /// What stands for this process's own environment. Either is scrubbed by [`Settings::command_environment`].
    pub environment: Option<Vec<(OsString, OsString)>>,
    /// Directory that commands start in when none is given; absolute. `None`: this process's.
    pub default_workdir: Option<PathBuf>,
    /// Where ids, counters and spills are kept; stays. `None`: a private temporary one, removed when the executor is closed.
    pub state_dir: Option<PathBuf>,
    /// A private temporary state directory stays if it holds a spill, so that a path which was printed can be read. It is
    /// removed by a later start, after 24 h.
    pub keep_spills: bool,
    /// The last word on the settings.
    pub adjust: Option<Adjust>,
}

/// Changes settings.
pub type Adjust = Box<dyn FnOnce(&mut Settings) + Send>;

impl fmt::Debug for LocalOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The environment may hold secrets.
        f.debug_struct("LocalOptions")
            .field("program", &self.program)
            .field("default_workdir", &self.default_workdir)
            .field("state_dir", &self.state_dir)
            .field("keep_spills", &self.keep_spills)
            .finish_non_exhaustive()
    }
}

/// Why an embedded executor could not be made.
#[derive(Debug, thiserror::Error)]
pub enum LocalError {
    /// Its working directory is gone or cannot be read.
    #[error("current directory: {0}")]
    Workdir(#[source] io::Error),
    /// Its private state directory could not be made.
    #[error("temporary state directory in {}: {source}", .parent.display())]
    StateDir {
        /// Where it was to be.
        parent: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// The keeper could not be started.
    #[error("keeper process: {0}")]
    Keeper(#[source] io::Error),
    /// The engine could not be started.
    #[error(transparent)]
    Engine(#[from] StartError),
}

/// An executor in this process. Dropping it ends everything at once; [`LocalExecutor::close`] lets it end in order.
#[derive(Debug)]
pub struct LocalExecutor {
    // In this order: the engine lets go of the keeper before the directory is removed.
    engine: Engine,
    _state: Option<PrivateState>,
}

impl LocalExecutor {
    /// Starts a keeper and an engine. Must be called inside a tokio runtime.
    ///
    /// # Errors
    /// When the state directory, the keeper or the engine cannot be made.
    pub async fn start(options: LocalOptions) -> Result<Self, LocalError> {
        let LocalOptions { program, environment, default_workdir, state_dir, keep_spills, adjust } = options;
        let default_workdir = match default_workdir {
            Some(workdir) => workdir,
            None => std::env::current_dir().map_err(LocalError::Workdir)?,
        };
        let (state_dir, private) = match state_dir {
            Some(directory) => (directory, None),
            None => {
                let parent = std::env::temp_dir();
                let made = PrivateState::make(&parent, keep_spills);
                let private = made.map_err(|source| LocalError::StateDir { parent, source })?;
                (private.path.clone(), Some(private))
            }
        };
        let own = environment.unwrap_or_else(|| std::env::vars_os().collect());
        let mut settings = Settings::new(state_dir, default_workdir, Settings::command_environment(own));
        // Commands are the caller's own, who needs no fence around them.
        settings.tenant_defaults.allow_setuid = true;
        if let Ok(start_dir) = std::env::current_dir() {
            settings.start_dir = start_dir;
        }
        if let Some(adjust) = adjust {
            adjust(&mut settings);
        }
        // A caller in this process that is gone does not come back.
        settings.resume_window_ms = 0;
        let spill_dir = settings.state_dir.join(SPILL_NAME);
        let keeper = embedded::start(EmbeddedOptions { program, spill_dir }).await.map_err(LocalError::Keeper)?;
        let engine = Engine::start(settings, keeper).await?;
        Ok(Self { engine, _state: private })
    }

    /// Ends everything that runs (SIGTERM, grace, SIGKILL) and removes a private state directory, unless it holds spills that
    /// are to be kept.
    pub async fn close(self) {
        self.engine.drain().await;
    }

    /// The engine itself.
    #[must_use]
    pub fn engine(&self) -> &Engine {
        &self.engine
    }
}

/// Where spills are, in the state directory.
const SPILL_NAME: &str = "spill";

fn caller(owner: Option<&OwnerId>) -> Caller {
    Caller { tenant: TenantId::default_tenant(), owner: owner.cloned() }
}

/// A name that nobody else uses.
fn random_name() -> Result<String, ExecutorError> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes)
        .map_err(|error| ExecutorError::Internal { problem: format!("no random numbers: {error}") })?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

#[async_trait]
impl Executor for LocalExecutor {
    fn endpoint(&self) -> &str {
        "embedded"
    }

    async fn info(&self) -> Result<ExecutorInfo, ExecutorError> {
        Ok(self.engine.info(&TenantId::default_tenant()))
    }

    async fn run(
        &self,
        owner: Option<&OwnerId>,
        spec: CommandSpec,
        abort: &CancellationToken,
        sink: Option<&mut dyn OutputSink>,
    ) -> Result<RunResult, ExecutorError> {
        let caller = caller(owner);
        let key = StartKey(random_name()?);
        let mut run = self.engine.run(&caller, key.clone(), spec).await?;
        let result = async {
            match sink {
                Some(sink) => {
                    forward(&run, sink).await;
                    let mut result = run.finished().await;
                    result.stdout.tail.clear();
                    result.stderr.tail.clear();
                    result
                }
                None => run.finished().await,
            }
        };
        let cancel = async {
            abort.cancelled().await;
            self.engine.cancel_run(&caller, &key).await
        };
        // The result comes in any case; after an abort all the sooner.
        let (mut result, mut cancel) = (std::pin::pin!(result), std::pin::pin!(cancel));
        tokio::select! {
            result = &mut result => Ok(result),
            cancelled = &mut cancel => {
                cancelled?;
                Ok(result.await)
            }
        }
    }

    async fn start_task(&self, owner: Option<&OwnerId>, spec: CommandSpec) -> Result<TaskId, ExecutorError> {
        self.engine.start_task(&caller(owner), StartKey(random_name()?), spec).await
    }

    async fn read_output(
        &self,
        owner: Option<&OwnerId>,
        id: &TaskId,
        wait: Option<Duration>,
    ) -> Result<TaskOutput, ExecutorError> {
        self.engine.read_output(&caller(owner), id, &ReadId(random_name()?), wait).await
    }

    async fn kill_task(&self, owner: Option<&OwnerId>, id: &TaskId) -> Result<KillOutcome, ExecutorError> {
        self.engine.kill_task(&caller(owner), id).await
    }

    async fn get_task(&self, owner: Option<&OwnerId>, id: &TaskId) -> Result<TaskInfo, ExecutorError> {
        self.engine.get_task(&caller(owner), id).await
    }

    async fn list_tasks(&self, owner: Option<&OwnerId>) -> Result<Vec<TaskInfo>, ExecutorError> {
        Ok(self.engine.list_tasks(&caller(owner)).await)
    }

    async fn watch_tasks(
        &self,
        owner: &OwnerId,
    ) -> Result<BoxStream<'static, Result<WatchEvent, ExecutorError>>, ExecutorError> {
        let watch = self.engine.watch_tasks(&caller(Some(owner)))?;
        Ok(stream::unfold(Some(watch), |watch| async move {
            let mut watch = watch?;
            match watch.next().await {
                Some(event) => Some((Ok(event), Some(watch))),
                None => Some((Err(ExecutorError::Stopping), None)),
            }
        })
        .boxed())
    }

    async fn ack_completions(&self, owner: &OwnerId, up_to: u64) -> Result<(), ExecutorError> {
        self.engine.ack_completions(&caller(Some(owner)), up_to)
    }

    async fn read_stream(
        &self,
        owner: Option<&OwnerId>,
        id: &TaskId,
        stream: StreamName,
        offset: u64,
        follow: bool,
    ) -> Result<BoxStream<'static, Result<ReadStreamEvent, ExecutorError>>, ExecutorError> {
        let reader = self.engine.read_stream(&caller(owner), id, stream, offset, follow)?;
        Ok(stream::unfold(reader, |mut reader| async move {
            let event = reader.next().await?;
            Some((Ok(event), reader))
        })
        .boxed())
    }
}

/// Hands a run's output on as it comes, until its result ends.
async fn forward(run: &Run, sink: &mut dyn OutputSink) {
    sink.accepted(&run.accepted()).await;
    let chunks = stream::select(chunks(run.output(StreamName::Stdout)), chunks(run.output(StreamName::Stderr)));
    let mut chunks = std::pin::pin!(chunks);
    while let Some(event) = chunks.next().await {
        match event {
            ReadStreamEvent::Chunk(chunk) => sink.output(chunk).await,
            ReadStreamEvent::End { .. } => {}
        }
    }
}

fn chunks(reader: StreamReader) -> impl futures_core::Stream<Item = ReadStreamEvent> {
    stream::unfold(reader, |mut reader| async move {
        let event = reader.next().await?;
        Some((event, reader))
    })
}

/// A state directory of this process alone. Its lock is held as long as it is in use.
#[derive(Debug)]
struct PrivateState {
    path: PathBuf,
    keep_spills: bool,
    _lock: Flock<File>,
}

impl PrivateState {
    fn make(parent: &Path, keep_spills: bool) -> io::Result<Self> {
        sweep(parent, SystemTime::now());
        let mut bytes = [0; 8];
        getrandom::fill(&mut bytes).map_err(|error| io::Error::other(error.to_string()))?;
        let random: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        let path = parent.join(format!("{STATE_PREFIX}{random}"));
        DirBuilder::new().mode(0o700).create(&path)?;
        let lock = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path.join(LOCK_NAME))?;
        let lock = Flock::lock(lock, FlockArg::LockExclusiveNonblock).map_err(|(_, errno)| errno)?;
        Ok(Self { path, keep_spills, _lock: lock })
    }
}

impl Drop for PrivateState {
    fn drop(&mut self) {
        let spills = fs::read_dir(self.path.join(SPILL_NAME)).is_ok_and(|mut spills| spills.next().is_some());
        if !(self.keep_spills && spills) {
            remove(&self.path);
        }
    }
}

fn remove(path: &Path) {
    if let Err(error) = fs::remove_dir_all(path) {
        tracing::warn!(path = %path.display(), %error, "a private state directory could not be removed");
    }
}

/// Removes directories of this user that processes left behind: those that were kept for their spills when their time is over, and
/// those of processes that were killed, which look the same.
fn sweep(parent: &Path, now: SystemTime) {
    let own = nix::unistd::geteuid().as_raw();
    for entry in fs::read_dir(parent).into_iter().flatten().flatten() {
        let path = entry.path();
        if !entry.file_name().to_string_lossy().starts_with(STATE_PREFIX) {
            continue;
        }
        // Not followed: a link with such a name is somebody else's.
        let Ok(metadata) = fs::symlink_metadata(&path) else { continue };
        let age = metadata.modified().ok().and_then(|modified| now.duration_since(modified).ok());
        if !metadata.is_dir() || metadata.uid() != own || age.is_none_or(|age| age < KEPT) {
            continue;
        }
        // Without a lock file it was being made or removed when its process died.
        let used = File::open(path.join(LOCK_NAME)).is_ok_and(|lock| {
            Flock::lock(lock, FlockArg::LockExclusiveNonblock).is_err_and(|(_, errno)| errno == Errno::EWOULDBLOCK)
        });
        if !used {
            remove(&path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_private_state_directory_goes_unless_it_holds_a_spill_to_be_kept() {
        let parent = tempfile::tempdir().expect("a temporary directory");
        for (keep, spill, stays) in [(false, true, false), (true, false, false), (true, true, true)] {
            let state = PrivateState::make(parent.path(), keep).expect("a private state directory");
            let path = state.path.clone();
            fs::create_dir(path.join(SPILL_NAME)).expect("a spill directory");
            if spill {
                fs::write(path.join(SPILL_NAME).join("bash-1.stdout.x"), "x").expect("a spill");
            }
            drop(state);
            assert_eq!(path.exists(), stays, "keep {keep} spill {spill}");
        }
    }

    #[test]
    fn what_was_kept_is_removed_after_a_day_but_not_what_is_in_use() {
        let parent = tempfile::tempdir().expect("a temporary directory");
        let used = PrivateState::make(parent.path(), true).expect("a private state directory");
        let dead = PrivateState::make(parent.path(), true).expect("a private state directory");
        let kept = dead.path.clone();
        fs::create_dir(kept.join(SPILL_NAME)).expect("a spill directory");
        fs::write(kept.join(SPILL_NAME).join("x"), "x").expect("a spill");
        drop(dead);
        let strange = parent.path().join("somebody-elses");
        fs::create_dir(&strange).expect("a directory");

        sweep(parent.path(), SystemTime::now());
        assert!(kept.exists());
        sweep(parent.path(), SystemTime::now() + KEPT + Duration::from_secs(1));
        assert!(!kept.exists());
        assert!(used.path.exists() && strange.exists());
    }
}
