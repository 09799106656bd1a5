//! Starting a command: reserved, spawned, named, registered, driven, in this order. A number is used only for what runs.

use std::{
    fs::File,
    io,
    os::fd::{BorrowedFd, OwnedFd},
    path::PathBuf,
    sync::{Arc, Weak},
    time::{Duration, Instant},
};

use executor_proto::{
    error::ExecutorError,
    types::{CommandSpec, StartKey, StreamName, TaskId},
};
use futures_core::future::BoxFuture;
use tokio::sync::mpsc;

use super::{
    Inner,
    command::{Prepared, digest},
    driver::Driver,
    entry::{Entry, Facts, shown},
    keys::Found,
    now_ms,
    reads::Both,
    registry::{Kind, Reservation, Reserved},
    task::Cause,
    uids::UidLease,
};
use crate::{
    crash::Point,
    ids::{Caller, ProcessHandle},
    journal::{self, StartNumber},
    keeper::{
        left,
        link::{ProcessEvent, Spawned, WeakLink},
    },
    limits::{CommandPermit, OwnerPermit},
    output::{self, SpillFiles, Stream, StreamFile, StreamFiles, StreamOptions},
};

/// Longest start key and read id, in bytes.
const MAX_KEY_BYTES: usize = 128;

/// A command that may be started: checked, within its budgets, its key taken.
pub(super) struct Start {
    kind: Kind,
    key: StartKey,
    digest: [u8; 32],
    prepared: Prepared,
    reservation: Reservation,
    permits: (CommandPermit, OwnerPermit),
    /// Held until the command is registered, or nothing of it is there.
    _lease: Option<UidLease>,
}

/// What a start comes to.
pub(super) enum Admitted {
    /// It may happen.
    New(Box<Start>),
    /// It has happened before, with the same key.
    Known(Arc<Entry>),
}

/// Whether a client's random name has the right size.
pub(super) fn check_name(field: &str, name: &str) -> Result<(), ExecutorError> {
    match name.len() {
        0 => Err(ExecutorError::invalid(field, "is empty")),
        1..=MAX_KEY_BYTES => Ok(()),
        _ => Err(ExecutorError::invalid(field, "is longer than 128 bytes")),
    }
}

impl Start {
    /// Decides whether it may happen. One with this key that is under way is waited for. With `only_known` nothing is started
    /// that was not started before. Cancel-safe.
    pub(super) async fn admit(
        engine: &Inner,
        kind: Kind,
        caller: &Caller,
        key: &StartKey,
        spec: CommandSpec,
        only_known: bool,
    ) -> Result<Admitted, ExecutorError> {
        check_name("key", &key.0)?;
        // Before anything is taken, and again when it is made ready.
        spec.check()?;
        let command = digest(kind, &spec);
        let reservation = loop {
            let reserved = engine.registry().reserve(caller, key, &command, only_known, now_ms())?;
            match reserved {
                Reserved::New(reservation) => break reservation,
                Reserved::Found(Found::Known(entry)) => return Ok(Admitted::Known(entry)),
                Reserved::Found(Found::Starting(mut done)) => while done.changed().await.is_ok() {},
            }
        };
        // The key comes first, so that a retry needs no room beside the start that it attaches to.
        let ready = Self::permits(engine, kind, caller).and_then(|permits| {
            let (prepared, lease) = Self::prepare(engine, caller, spec)?;
            Ok((permits, prepared, lease))
        });
        match ready {
            Ok((permits, prepared, lease)) => {
                let start =
                    Self { kind, key: key.clone(), digest: command, prepared, reservation, permits, _lease: lease };
                Ok(Admitted::New(Box::new(start)))
            }
            Err(error) => {
                engine.registry().give_back(reservation);
                Err(error)
            }
        }
    }

    fn permits(engine: &Inner, kind: Kind, caller: &Caller) -> Result<(CommandPermit, OwnerPermit), ExecutorError> {
        let of_owner = match kind {
            Kind::Run => engine.limits.run(caller)?,
            Kind::Task => engine.limits.task(caller)?,
        };
        Ok((engine.limits.command(caller)?, of_owner))
    }

    /// Completes it with what holds for the tenant, and with who it runs as.
    fn prepare(
        engine: &Inner,
        caller: &Caller,
        spec: CommandSpec,
    ) -> Result<(Prepared, Option<UidLease>), ExecutorError> {
        let rules = engine.settings.rules(&caller.tenant);
        let identity = usize::try_from(rules.identity).ok().and_then(|index| engine.keeper.identities().get(index));
        let identity =
            identity.ok_or_else(|| ExecutorError::Internal { problem: "the keeper names no identity".to_owned() })?;
        let lease = match engine.uids.get(&caller.tenant) {
            None => None,
            Some(uids) => {
                let lease = uids.take(caller.owner.as_ref(), || engine.registry().owners(&caller.tenant));
                let lease = lease.map_err(|error| ExecutorError::Internal {
                    problem: format!("who has which user could not be written down: {error}"),
                })?;
                let (what, limit) = ("users of this tenant".to_owned(), u64::from(identity.uids));
                Some(lease.ok_or(ExecutorError::OverLimit { what, used: limit, limit })?)
            }
        };
        let uid = lease.as_ref().map_or(identity.uid, UidLease::uid);
        let (settings, support) = (&engine.settings, &engine.support);
        let mut prepared = Prepared::new(settings, &caller.tenant, rules, support, (identity, uid), spec)?;
        prepared.spawn.group = settings.number_of(&caller.tenant);
        Ok((prepared, lease))
    }

    /// Does it. Must not be dropped before it is done.
    pub(super) async fn launch(self, engine: &Arc<Inner>) -> Result<Arc<Entry>, ExecutorError> {
        let handle = engine.keeper.new_handle();
        let number = self.begin(engine, handle);
        Point::StartBegun.pass();
        let spawned = match self.spawn(engine, handle).await {
            Ok(spawned) => spawned,
            Err(error) => {
                let mut registry = engine.registry();
                match &error {
                    // Nothing ran.
                    ExecutorError::Spawn { .. } => {
                        engine.journal.failed(number);
                        registry.give_back(self.reservation);
                    }
                    // Anything else happened after the keeper was asked.
                    lost => {
                        engine.journal.forgotten(number, now_ms());
                        registry.lose(self.reservation, &lost.to_string(), now_ms());
                    }
                }
                drop(registry);
                return Err(self.prepared.explain(error));
            }
        };
        Point::StartAnswered.pass();
        let started = Instant::now();
        let Spawned { handle: _, pid, stdout, stderr, events } = spawned;
        let named = engine.next_id(&self.reservation.caller().tenant, self.kind).and_then(|id| {
            let files = |name| Files::new(engine, &id, handle, name, self.kind, number);
            let open =
                |name, pipe| Stream::start(pipe, stream_options(engine, self.reservation.caller(), name), files(name));
            let (stdout, stderr) = (open(StreamName::Stdout, stdout)?, open(StreamName::Stderr, stderr)?);
            Ok((id, Both { stdout, stderr }))
        });
        let (id, streams) = match named {
            Ok(named) => named,
            Err(error) => {
                // It runs and nobody can name it: it must not go on. Until it was ended it may have done something, so the key
                // does not become free.
                let reason = format!("it could not be kept: {error}");
                engine.registry().lose(self.reservation, &reason, now_ms());
                // Written down before the keeper lets go: one that only the keeper knows is ended by the next server, and one
                // that nobody knows would be taken for never started.
                engine.journal.forgotten(number, now_ms());
                discard(engine, handle, events).await;
                return Err(ExecutorError::OutcomeUnknown { reason });
            }
        };
        let started_at_ms = now_ms();
        let record = journal::Started {
            id: id.0.clone(),
            handle: handle.0,
            pid,
            pid_started: left::start_time(pid),
            at_ms: started_at_ms,
        };
        engine.journal.started(number, &record);
        Point::StartRecorded.pass();
        let facts = Facts {
            id: id.clone(),
            kind: self.kind,
            caller: self.reservation.caller().clone(),
            command: self.prepared.command.clone(),
            workdir: self.prepared.workdir.clone(),
            timeout_ms: self.prepared.timeout_ms,
            sandbox_mode: self.prepared.sandbox_mode,
            handle,
            pid,
            started,
            started_at_ms,
            number,
        };
        let entry = Arc::new(Entry::new(facts, streams));
        {
            let mut registry = engine.registry();
            let taken_back = registry.register(self.reservation, number, id, Arc::clone(&entry));
            if taken_back && self.kind == Kind::Run {
                entry.apply(|state| state.request(Cause::Abort));
            }
            if registry.draining() {
                entry.apply(|state| state.request(Cause::Stopping));
            }
        }
        drive(engine, &entry, events, self.permits);
        Ok(entry)
    }

    /// Writes down that it is about to be started.
    fn begin(&self, engine: &Inner, handle: ProcessHandle) -> StartNumber {
        engine.journal.begin(&journal::Start {
            account: self.reservation.caller().into(),
            key: self.key.0.clone(),
            kind: self.kind.into(),
            digest: self.digest,
            command: shown(&self.prepared.command).to_vec(),
            workdir: self.prepared.workdir.to_vec(),
            timeout_ms: self.prepared.timeout_ms,
            begun_at_ms: now_ms(),
            handle: Some(handle.0),
        })
    }

    async fn spawn(&self, engine: &Inner, handle: ProcessHandle) -> Result<Spawned, ExecutorError> {
        let stdin = self.prepared.stdin_file()?;
        let script = self.prepared.script_file()?;
        engine.keeper.spawn(handle, self.prepared.spawn.clone(), stdin, script).await
    }
}

/// Takes a command to its end.
pub(super) fn drive(
    engine: &Arc<Inner>,
    entry: &Arc<Entry>,
    events: mpsc::UnboundedReceiver<ProcessEvent>,
    permits: (CommandPermit, OwnerPermit),
) {
    let timeout = (entry.facts.kind == Kind::Run).then(|| duration_of_ms(entry.facts.timeout_ms));
    let driver = Driver::new(Arc::downgrade(engine), Arc::clone(entry), events, timeout, permits);
    engine.drivers.spawn(async move {
        if let Some(rest) = driver.drive().await {
            // A drain has waited long enough for it.
            tokio::spawn(rest.linger());
        }
    });
}

/// Ends what was started and cannot be kept.
pub(super) async fn discard(engine: &Inner, handle: ProcessHandle, mut events: mpsc::UnboundedReceiver<ProcessEvent>) {
    let survivors = engine.keeper.end(handle, Duration::ZERO).await;
    if !survivors.is_empty() {
        tracing::error!(?survivors, "a command that could not be taken on could not be ended either");
    }
    while let Some(event) = events.recv().await {
        match event {
            ProcessEvent::Exited { empty: false, .. } => {}
            ProcessEvent::Exited { empty: true, .. } | ProcessEvent::Empty => break,
        }
    }
    engine.keeper.release(handle);
}

/// Goes on with a stream of an engine before this one.
pub(super) fn take_over_stream(
    engine: &Arc<Inner>,
    caller: &Caller,
    files: Arc<Files>,
    pipe: OwnedFd,
    (file, spill): (Vec<OwnedFd>, Option<(OwnedFd, PathBuf)>),
) -> io::Result<Arc<Stream>> {
    let mut file = file.into_iter();
    let file = file.next().map(|page| StreamFile { page, ring: file.next() });
    Stream::take_over(pipe, file, spill, stream_options(engine, caller, files.name), files)
}

/// What the streams of this caller's commands are made with.
pub(super) fn stream_options(engine: &Inner, caller: &Caller, name: StreamName) -> StreamOptions {
    StreamOptions {
        name,
        tail_bytes: engine.settings.max_output_bytes,
        ring_bytes: engine.ring_bytes,
        max_spill_bytes: engine.settings.max_spill_bytes,
        spills: Arc::new(engine.keeper.downgrade()),
        room: Arc::new(engine.limits.spill(caller)),
        rate: engine.limits.rate(&caller.tenant),
    }
}

/// The ring of each stream, in bytes.
pub(super) fn ring_bytes(max_output_bytes: u64) -> u64 {
    output::ring_bytes(max_output_bytes)
}

/// Makes a stream's files, and has the keeper hold them. Holds the engine weakly: a stream must not keep a keeper alive that
/// nobody uses.
pub(super) struct Files {
    engine: Weak<Inner>,
    handle: ProcessHandle,
    name: StreamName,
    prefix: String,
    /// Of a task: its ring is a file that outlives the keeper. What a run has written is with the client that waits for it; once
    /// its keeper is gone, nobody can ask for it.
    ring_of: Option<StartNumber>,
}

impl Files {
    pub(super) fn new(
        engine: &Arc<Inner>,
        id: &TaskId,
        handle: ProcessHandle,
        name: StreamName,
        kind: Kind,
        number: StartNumber,
    ) -> Arc<Self> {
        let prefix = format!("{id}.{}", name.as_str());
        let ring_of = (kind == Kind::Task).then_some(number);
        Arc::new(Self { engine: Arc::downgrade(engine), handle, name, prefix, ring_of })
    }
}

impl StreamFiles for Files {
    fn ring(&self, ring_bytes: u64) -> BoxFuture<'_, Option<File>> {
        Box::pin(async move {
            let (number, engine) = self.ring_of.zip(self.engine.upgrade())?;
            let (journal, name) = (engine.journal.clone(), self.name);
            // By a thread that may wait for a disk. Only a panic there is an error here, and costs the file.
            let made = tokio::task::spawn_blocking(move || journal.make_ring(number, name, ring_bytes));
            made.await.ok().flatten()
        })
    }

    fn hold<'a>(&'a self, file: &'a [BorrowedFd<'a>]) -> BoxFuture<'a, io::Result<()>> {
        Box::pin(async move {
            let engine = self.engine.upgrade().ok_or(io::ErrorKind::NotConnected)?;
            engine.keeper.keep_file(self.handle, self.name, file).await
        })
    }

    fn spill(&self) -> BoxFuture<'_, io::Result<(OwnedFd, PathBuf)>> {
        Box::pin(async move {
            let engine = self.engine.upgrade().ok_or(io::ErrorKind::NotConnected)?;
            engine.keeper.open_spill(self.handle, self.name, self.prefix.clone()).await
        })
    }
}

impl SpillFiles for WeakLink {
    fn reopen(&self, path: PathBuf) -> BoxFuture<'_, io::Result<OwnedFd>> {
        Box::pin(async move {
            let keeper = self.upgrade().ok_or(io::ErrorKind::NotConnected)?;
            keeper.reopen_spill(path).await
        })
    }

    fn remove(&self, path: PathBuf) {
        if let Some(keeper) = self.upgrade() {
            keeper.remove_spill(path);
        }
    }
}

/// Milliseconds as they are given: not negative, and whatever is longer than a duration can be is the longest one.
fn duration_of_ms(ms: f64) -> Duration {
    Duration::try_from_secs_f64(ms / 1e3).unwrap_or(Duration::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timeouts_of_any_size_are_durations() {
        assert_eq!(duration_of_ms(150.5), Duration::from_micros(150_500));
        assert_eq!(duration_of_ms(1e-7), Duration::ZERO);
        assert_eq!(duration_of_ms(2_147_483_648.0), Duration::from_millis(2_147_483_648));
        assert_eq!(duration_of_ms(f64::INFINITY), Duration::MAX);
    }

    #[test]
    fn names_have_1_to_128_bytes() {
        assert!(check_name("key", "").is_err());
        assert!(check_name("key", &"k".repeat(128)).is_ok());
        assert!(check_name("key", &"k".repeat(129)).is_err());
    }
}
