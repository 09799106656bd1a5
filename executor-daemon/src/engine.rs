//! The domain: runs and tasks, who owns them, what is kept of them. Knows nothing of gRPC and nothing of `fork`.
//!
//! Read in this order: `start` (one command from request to driver), `command` (what bash is given), `entry` (one run or
//! task), `task` (the pure rules of its state), `reads` (those of its read position), `driver` (takes it to its end), `run` (a run as its caller holds it), `registry`
//! (ids, owners, what is forgotten), `keys` (what start keys stand for), `completions`, `recall` and `carry` (what a process
//! before this one has written down, and left running).
//!
//! Locks are the registry's, the completions' and each entry's state; the first may be held while the last is taken, never
//! the other way round, and none across an await.

use std::{
    collections::HashMap,
    io,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use executor_proto::{
    error::ExecutorError,
    types::{
        CommandSpec, ExecutorInfo, KillOutcome, OwnerId, ReadId, ReadStreamEvent, StartKey, StreamName, TaskId,
        TaskInfo, TaskOutput, WatchEvent,
    },
};
use tokio::sync::oneshot;
use tokio_util::task::{AbortOnDropHandle, TaskTracker};

use crate::{
    config::{Settings, TenantRules},
    crash::Point,
    ids::{Caller, TenantId},
    journal::{self, Journal, KeeperInstance, RecordedStart, Recovered},
    keeper::{
        groups,
        link::{Carried, KeeperLink},
    },
    limits::{HostLimits, Limits},
    output::{self, ReadUntil},
    sandbox::Support,
};

mod budgets;
mod carry;
mod command;
mod completions;
mod driver;
mod entry;
#[cfg(any(test, fuzzing))]
mod fuzzing;
mod info;
mod keys;
mod leftovers;
mod reads;
mod recall;
mod registry;
mod run;
#[cfg(test)]
mod schedules;
mod start;
mod state_dir;
mod task;
mod uids;

use completions::Completions;
use entry::Entry;
#[cfg(any(test, fuzzing))]
pub use fuzzing::journals;
use keys::FORGOTTEN;
use keys::Found;
use registry::{Kind, Registry};
pub use run::Run;
use start::{Admitted, Start};
use state_dir::{Counter, StateDir};
use task::Cause;
use uids::Uids;

/// What a drain may take beyond the grace: the keeper's second, the drain of the output, the spill's end.
const DRAIN_MARGIN: Duration = Duration::from_secs(5);

/// Longest time between two looks for what is to be forgotten: results that were taken are held for a few times as long.
const SWEEP_INTERVAL: Duration = Duration::from_secs(10);

/// The executor of one host. Cheap to clone. When the last clone is dropped, so is the keeper, and with it all that runs.
#[derive(Debug, Clone)]
pub struct Engine {
    inner: Arc<Inner>,
}

/// What all clones share.
#[derive(Debug)]
struct Inner {
    settings: Settings,
    /// What commands can be refused.
    support: Support,
    instance_id: String,
    ring_bytes: u64,
    keeper: KeeperLink,
    limits: Limits,
    registry: Mutex<Registry<Entry>>,
    completions: Completions,
    journal: Journal,
    state_dir: StateDir,
    /// Of tenants whose owners have users of their own. Their locks are taken before the registry's.
    uids: HashMap<TenantId, Arc<Uids>>,
    counters: Mutex<HashMap<(TenantId, Kind), Arc<Counter>>>,
    /// Starts under way and drivers.
    drivers: TaskTracker,
    sweeper: Mutex<Option<AbortOnDropHandle<()>>>,
}

/// The engine could not be started: the state directory cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("state directory {path}: {source}")]
pub struct StartError {
    path: String,
    source: io::Error,
}

impl Engine {
    /// Starts the engine over a keeper. Must be called inside a tokio runtime.
    ///
    /// # Errors
    /// When the state directory cannot be made or read.
    pub async fn start(settings: Settings, keeper: KeeperLink) -> Result<Self, StartError> {
        Self::take_over(settings, keeper, Vec::new()).await
    }

    /// Tries what [`Engine::take_over`] needs of the state directory, which is there. Another engine may be using it; nothing of
    /// it is changed.
    pub(crate) fn probe(settings: &Settings) -> Result<(), StartError> {
        let path = &settings.state_dir;
        let kinds = [Kind::Run, Kind::Task].map(prefix);
        Journal::probe(path)
            .and_then(|()| StateDir::probe(path, &TenantId::default_tenant(), &kinds))
            .map_err(|source| StartError { path: path.display().to_string(), source })
    }

    /// As [`Engine::start`], where an engine before has left commands.
    pub(crate) async fn take_over(
        settings: Settings,
        keeper: KeeperLink,
        carried: Vec<Carried>,
    ) -> Result<Self, StartError> {
        let path = settings.state_dir.display().to_string();
        let (opened, starts) = Inner::open(settings, keeper).map_err(|source| StartError { path, source })?;
        let inner = Arc::new(opened);
        let starts = carry::take_over(&inner, starts, carried);
        Point::Adopted.pass();
        recall::recall(&inner, starts).await;
        Point::Recalled.pass();
        inner.sweep_spills();
        let weak = Arc::downgrade(&inner);
        let interval = Duration::from_secs(inner.settings.finished_kept_seconds.max(1)).min(SWEEP_INTERVAL);
        let sweeper = tokio::spawn(async move {
            loop {
                tokio::time::sleep(interval).await;
                let Some(inner) = weak.upgrade() else { return };
                inner.sweep(now_ms());
            }
        });
        *inner.sweeper.lock().unwrap_or_else(PoisonError::into_inner) = Some(AbortOnDropHandle::new(sweeper));
        Ok(Self { inner })
    }

    /// How much each may use.
    pub(crate) fn limits(&self) -> &Limits {
        &self.inner.limits
    }

    /// What this executor is to a tenant. `version` is this crate's; `stated_limits` and `features` say what holds in this mode.
    #[must_use]
    pub fn info(&self, tenant: &TenantId) -> ExecutorInfo {
        let Inner { settings, support, keeper, instance_id, limits, .. } = &*self.inner;
        let rules = settings.rules(tenant);
        let identity = usize::try_from(rules.identity).ok().and_then(|index| keeper.identities().get(index));
        let grouped = groups::are_made(settings.number_of(tenant));
        info::info(settings, (support, grouped), rules, identity, instance_id.clone(), limits.in_force(tenant))
    }

    /// Starts a foreground run, or attaches to the one that this key has started. When the last [`Run`] of it is dropped
    /// before it has finished, it goes on for [`Settings::resume_window_ms`] and is ended then (its caller is gone).
    ///
    /// # Errors
    /// What [`CommandSpec::check`] finds, a spawn failure, a budget, draining; a key that was used for another command, or of
    /// which nobody knows what it has started.
    pub async fn run(&self, caller: &Caller, key: StartKey, spec: CommandSpec) -> Result<Run, ExecutorError> {
        self.run_or_attach(caller, key, spec, false).await
    }

    /// Attaches to the run that this key has started with this command, and starts nothing.
    ///
    /// # Errors
    /// As [`Engine::run`]; [`ExecutorError::OutcomeUnknown`] when the key is not known.
    pub async fn attach(&self, caller: &Caller, key: StartKey, spec: CommandSpec) -> Result<Run, ExecutorError> {
        self.run_or_attach(caller, key, spec, true).await
    }

    async fn run_or_attach(
        &self,
        caller: &Caller,
        key: StartKey,
        spec: CommandSpec,
        only_known: bool,
    ) -> Result<Run, ExecutorError> {
        match Start::admit(&self.inner, Kind::Run, caller, &key, spec, only_known).await? {
            // Known by a process before this one, and what came of it went with that.
            Admitted::Known(entry) if entry.result_lost() => {
                Err(ExecutorError::OutcomeUnknown { reason: FORGOTTEN.to_owned() })
            }
            Admitted::Known(entry) => Ok(Run::attach(self.clone(), entry, key)),
            Admitted::New(start) => self.launch(*start, |engine, entry| Run::attach(engine, entry, key)).await,
        }
    }

    /// The caller's abort: ends the run of this key and returns when nothing of it is alive, or with the survivors. A key that
    /// is not running is `already_finished`. A key whose run is just being started is ended as soon as it is started.
    ///
    /// # Errors
    /// A malformed key.
    pub async fn cancel_run(&self, caller: &Caller, key: &StartKey) -> Result<KillOutcome, ExecutorError> {
        start::check_name("key", &key.0)?;
        // Whether this abort is the one that a start was met with: then it is what has ended the run, however fast that went.
        let mut met_start = false;
        loop {
            let lookup = self.inner.registry().abort_start(caller, key, now_ms());
            match lookup {
                Some(Found::Starting(mut done)) => {
                    while done.changed().await.is_ok() {}
                    met_start |= *done.borrow();
                }
                Some(Found::Known(entry)) if entry.facts.kind == Kind::Run => {
                    let mut outcome = entry.end(Cause::Abort).await;
                    outcome.already_finished &= !met_start;
                    return Ok(outcome);
                }
                Some(Found::Known(_)) | None => {
                    return Ok(KillOutcome { already_finished: !met_start, survivors: Vec::new() });
                }
            }
        }
    }

    /// Starts a background task, or names the one that this key has started.
    ///
    /// # Errors
    /// As [`Engine::run`]. No id is used then.
    pub async fn start_task(&self, caller: &Caller, key: StartKey, spec: CommandSpec) -> Result<TaskId, ExecutorError> {
        match Start::admit(&self.inner, Kind::Task, caller, &key, spec, false).await? {
            Admitted::Known(entry) => Ok(entry.facts.id.clone()),
            Admitted::New(start) => self.launch(*start, |_, entry| entry.facts.id.clone()).await,
        }
    }

    /// Launches in a task of its own, so that a caller who stops waiting leaves no command that nobody drives. What `make`
    /// makes is dropped there then.
    async fn launch<T: Send + 'static>(
        &self,
        start: Start,
        make: impl FnOnce(Self, Arc<Entry>) -> T + Send + 'static,
    ) -> Result<T, ExecutorError> {
        let (reply, answer) = oneshot::channel();
        let engine = self.clone();
        self.inner.drivers.spawn(async move {
            let launched = start.launch(&engine.inner).await;
            // Nobody waits for it any more: dropping what was made is all there is to do.
            let _ = reply.send(launched.map(|entry| make(engine, entry)));
        });
        answer
            .await
            .map_err(|_closed| ExecutorError::Internal { problem: "a start ended without an answer".to_owned() })?
    }

    /// What a task wrote since the previous read, and its status; moves the read position. With `wait`, waits that long for
    /// the task to end first. The caller's latest `read_id` again gives the same answer again. Cancel-safe: a read that is
    /// made again with the same `read_id` misses nothing.
    ///
    /// # Errors
    /// Unknown or foreign task, a malformed read id.
    pub async fn read_output(
        &self,
        caller: &Caller,
        id: &TaskId,
        read_id: &ReadId,
        wait: Option<Duration>,
    ) -> Result<TaskOutput, ExecutorError> {
        start::check_name("read_id", &read_id.0)?;
        let entry = self.inner.registry().access(caller, id)?;
        if entry.facts.kind != Kind::Task {
            return Err(ExecutorError::UnknownTask(id.clone()));
        }
        if let Some(wait) = wait
            && !entry.was_read(caller, read_id).await
        {
            // Its end or the end of the wait: the read says which.
            let _ = tokio::time::timeout(wait, entry.ended()).await;
        }
        Ok(entry.read(caller, read_id, &self.inner.journal).await)
    }

    /// Ends a task, or the leftovers of a finished task or run.
    ///
    /// # Errors
    /// Unknown or foreign task.
    pub async fn kill_task(&self, caller: &Caller, id: &TaskId) -> Result<KillOutcome, ExecutorError> {
        let entry = self.inner.registry().access(caller, id)?;
        Ok(entry.end(Cause::Kill).await)
    }

    /// One task or run that the caller may see.
    ///
    /// # Errors
    /// Unknown or foreign task.
    pub async fn get_task(&self, caller: &Caller, id: &TaskId) -> Result<TaskInfo, ExecutorError> {
        let entry = self.inner.registry().access(caller, id)?;
        Ok(self.inner.describe(&entry).await)
    }

    /// All tasks that the caller may see, and the runs that are running or have leftovers, oldest first.
    pub async fn list_tasks(&self, caller: &Caller) -> Vec<TaskInfo> {
        let mut entries = self.inner.registry().visible_to(caller);
        entries.retain(|entry| entry.facts.kind == Kind::Task || entry.running() || entry.has_leftovers());
        let mut tasks = Vec::with_capacity(entries.len());
        for entry in entries {
            tasks.push(self.inner.describe(&entry).await);
        }
        tasks
    }

    /// The completions of the caller's owner.
    ///
    /// # Errors
    /// A caller without an owner.
    pub fn watch_tasks(&self, caller: &Caller) -> Result<TaskWatch, ExecutorError> {
        let watch = self.inner.completions.watch(&caller.tenant, owner_of(caller)?);
        Ok(TaskWatch { watch })
    }

    /// Forgets the completions of the caller's owner up to and including this one.
    ///
    /// # Errors
    /// A caller without an owner.
    pub fn ack_completions(&self, caller: &Caller, up_to: u64) -> Result<(), ExecutorError> {
        self.inner.completions.acknowledge(&caller.tenant, owner_of(caller)?, up_to);
        Ok(())
    }

    /// Raw bytes of one stream by offset.
    ///
    /// # Errors
    /// Unknown or foreign task.
    pub fn read_stream(
        &self,
        caller: &Caller,
        id: &TaskId,
        stream: StreamName,
        offset: u64,
        follow: bool,
    ) -> Result<StreamReader, ExecutorError> {
        let entry = self.inner.registry().access(caller, id)?;
        let until = if follow { ReadUntil::Closed } else { ReadUntil::Now };
        Ok(StreamReader { reader: entry.streams.get(stream).reader(offset, until) })
    }

    /// Takes no more starts, ends everything (SIGTERM, grace, SIGKILL), lets every run return its result and every task
    /// have its final state, without notices. Returns when nothing is alive or what is had its time.
    pub async fn drain(&self) {
        {
            let mut registry = self.inner.registry();
            for entry in registry.drain() {
                entry.apply(|state| state.request(Cause::Stopping));
            }
        }
        self.inner.drivers.close();
        let longest = Duration::from_millis(self.inner.settings.grace_ms) + DRAIN_MARGIN;
        if tokio::time::timeout(longest, self.inner.drivers.wait()).await.is_err() {
            tracing::error!(commands = self.inner.drivers.len(), "some commands did not end within the drain");
        }
        self.inner.completions.close();
    }
}

impl Inner {
    /// Opens everything, and says what of the starts that the journal holds is to be brought back.
    fn open(settings: Settings, keeper: KeeperLink) -> io::Result<(Self, Vec<RecordedStart>)> {
        let state_dir = StateDir::open(&settings.state_dir)?;
        let instance = KeeperInstance(keeper.keeper());
        let (journal, recovered) = Journal::open(&settings.state_dir, &journal::boot_id(), instance, now_ms())?;
        let Recovered { starts, keys, ledgers, first_sequence, set_aside: _ } = recovered;
        let cap = settings.max_completions_per_owner;
        let completions = Completions::recalled(cap, journal.clone(), ledgers, first_sequence);
        let tenant = TenantId::default_tenant();
        let mut counters = HashMap::new();
        for kind in [Kind::Run, Kind::Task] {
            counters.insert((tenant.clone(), kind), Arc::new(state_dir.counter(&tenant, prefix(kind))?));
        }
        let mut uids = HashMap::new();
        for (name, rules) in &settings.tenants {
            Self::open_uids(&mut uids, &state_dir, &keeper, TenantId(name.clone()), rules)?;
        }
        if !settings.tenants.contains_key(&tenant.0) {
            Self::open_uids(&mut uids, &state_dir, &keeper, tenant, &settings.tenant_defaults)?;
        }
        let limits = Limits::new(budgets::of(&settings), HostLimits::learn(), &settings.state_dir.join("spill"));
        let inner = Self {
            instance_id: state_dir.instance_id()?,
            ring_bytes: start::ring_bytes(settings.max_output_bytes),
            keeper,
            limits,
            registry: Mutex::new(recall::keys(keys)),
            completions,
            journal,
            state_dir,
            uids,
            counters: Mutex::new(counters),
            drivers: TaskTracker::new(),
            sweeper: Mutex::new(None),
            support: Support::of_this_kernel(),
            settings,
        };
        Ok((inner, starts))
    }

    /// Opens what is known of who has which user of a tenant's range, where it has one.
    fn open_uids(
        all: &mut HashMap<TenantId, Arc<Uids>>,
        state_dir: &StateDir,
        keeper: &KeeperLink,
        tenant: TenantId,
        rules: &TenantRules,
    ) -> io::Result<()> {
        let identity = usize::try_from(rules.identity).ok().and_then(|index| keeper.identities().get(index));
        if let Some(identity) = identity.filter(|identity| identity.uids > 1) {
            let uids = state_dir.uids(&tenant, identity.uid, identity.uids)?;
            all.insert(tenant, Arc::new(uids));
        }
        Ok(())
    }

    fn registry(&self) -> MutexGuard<'_, Registry<Entry>> {
        self.registry.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The next id of one kind. It is written down when this returns.
    fn next_id(&self, tenant: &TenantId, kind: Kind) -> io::Result<TaskId> {
        let counter = {
            let mut counters = self.counters.lock().unwrap_or_else(PoisonError::into_inner);
            match counters.get(&(tenant.clone(), kind)) {
                Some(counter) => Arc::clone(counter),
                None => {
                    let counter = Arc::new(self.state_dir.counter(tenant, prefix(kind))?);
                    counters.insert((tenant.clone(), kind), Arc::clone(&counter));
                    counter
                }
            }
        };
        Ok(TaskId(format!("{}-{}", prefix(kind), counter.next()?)))
    }

    /// The drain after a shell's exit: the quiet that ends it, and the longest it may take.
    fn drain_times(&self) -> (Duration, Duration) {
        let quiet = Duration::from_millis(self.settings.drain_quiet_ms);
        (quiet, Duration::from_millis(self.settings.drain_total_ms))
    }

    /// How long a run goes on whose caller has vanished.
    fn resume_window(&self) -> Duration {
        Duration::from_millis(self.settings.resume_window_ms)
    }

    /// The bytes of a run's result that is to be held for its client, if somebody may come for it.
    fn bytes_to_hold(&self, entry: &Entry) -> Option<u64> {
        let result = entry.result().filter(|_| !self.resume_window().is_zero())?;
        Some(result.stdout.tail.len() as u64 + result.stderr.tail.len() as u64)
    }

    async fn describe(&self, entry: &Entry) -> TaskInfo {
        let leftovers = match entry.has_leftovers() {
            true => self.keeper.processes(entry.facts.handle).await,
            false => Vec::new(),
        };
        entry.info(leftovers)
    }

    /// Records for its owner that a task has ended.
    fn tell(&self, entry: &Entry) {
        let caller = &entry.facts.caller;
        let Some(owner) = &caller.owner else { return };
        let (status, told, at) = entry.look(|state| (state.status(), state.to_be_told(), state.exited_at_ms()));
        if told {
            let (number, id) = (entry.facts.number, entry.facts.id.clone());
            self.completions.add((&caller.tenant, owner), number, id, status, at.unwrap_or_else(now_ms));
        }
    }

    /// Ends an owner's oldest leftovers while there are more than it may have.
    fn limit_leftovers(&self, caller: &Caller) {
        let mut entries = self.registry().of_owner(&caller.tenant, caller.owner.as_ref());
        entries.retain(|entry| entry.has_leftovers() && entry.look(|state| !state.ending()));
        let counts: Vec<u64> = entries.iter().map(|entry| entry.leftovers()).collect();
        let too_many = leftovers::oldest_above(&counts, self.settings.max_leftovers_per_owner);
        for entry in &entries[..too_many] {
            tracing::warn!(
                tenant = caller.tenant.0,
                owner = caller.owner.as_ref().map(|owner| &*owner.0),
                task = entry.facts.id.0,
                processes = entry.leftovers(),
                cap = self.settings.max_leftovers_per_owner,
                "leftovers are ended: their owner has too many"
            );
            entry.apply(|state| state.request(Cause::Leftovers));
        }
    }

    /// Removes what is on disk of entries that the registry has forgotten.
    fn forget(&self, entries: &[Arc<Entry>]) {
        for entry in entries {
            self.journal.forgotten(entry.facts.number, now_ms());
            for stream in StreamName::BOTH {
                entry.streams.get(stream).remove_spill();
            }
        }
    }

    /// Removes the spill files of nobody that is known.
    fn sweep_spills(&self) {
        let entries = self.registry().all();
        let paths = entries.iter().flat_map(|entry| StreamName::BOTH.map(|name| entry.streams.get(name).spill_path()));
        self.keeper.sweep_spills(paths.flatten().collect());
    }

    fn sweep(&self, now_ms: u64) {
        let kept_ms = self.settings.finished_kept_seconds.saturating_mul(1_000);
        let forgotten = self.registry().forget_older(now_ms.saturating_sub(kept_ms), now_ms);
        self.forget(&forgotten);
        self.completions.sweep();
    }
}

/// What ids of this kind begin with.
fn prefix(kind: Kind) -> &'static str {
    match kind {
        Kind::Run => "run",
        Kind::Task => "bash",
    }
}

fn owner_of(caller: &Caller) -> Result<&OwnerId, ExecutorError> {
    caller.owner.as_ref().ok_or_else(|| ExecutorError::invalid("caller.owner", "is missing"))
}

/// Milliseconds since the Unix epoch.
fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

/// Reads one stream by offset. A reader that is slower than the command is served from the spill, and where there is none
/// any more its next chunk begins later: a gap.
#[derive(Debug)]
pub struct StreamReader {
    reader: output::StreamReader,
}

impl StreamReader {
    /// The next chunk (at most [`executor_proto::MAX_CHUNK_BYTES`]), or the end; `None` after the end. Cancel-safe.
    pub async fn next(&mut self) -> Option<ReadStreamEvent> {
        self.reader.next().await
    }
}

/// An owner's completions: those that wait, then [`WatchEvent::CaughtUp`], then live.
#[derive(Debug)]
pub struct TaskWatch {
    watch: completions::Watch,
}

impl TaskWatch {
    /// The next event; `None` when the engine has drained. Cancel-safe.
    pub async fn next(&mut self) -> Option<WatchEvent> {
        self.watch.next().await
    }
}
