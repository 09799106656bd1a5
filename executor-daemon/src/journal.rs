//! What must survive a kill of the server or the keeper and a restart of the host: starts and their keys, ends, read positions,
//! completions, the kept output of finished tasks, and the files in which the output of running ones lies. All of it lies in the state directory.
//!
//! ```text
//!   begin ─► started ─► asked_to_end ─► ended ─► completed ─► forgotten ─► its key, for a day
//!     └────► failed: nothing ran, the key is free
//! ```
//! Every call here is one record: when it returns, the record is with the kernel and outlives this process, not a loss
//! of power (which takes the latest records and no others). Calls are cheap (some ten microseconds), wait for no disk, and
//! need no await. A record that cannot be written, on a full disk, is logged and costs nothing but itself: a command
//! runs all the same.
//!
//! Not here: rules (the engine's), the ids' counters (`engine/state_dir`), what is done about processes that a dead keeper left
//! (the keeper's, `keeper/left`).

#[cfg(any(test, fuzzing))]
pub(crate) mod fuzzing;
mod keys;
mod record;
mod rings;
mod store;
mod tails;
#[cfg(test)]
mod tests;

use std::{
    fs::{self, File},
    io,
    os::unix::fs::MetadataExt,
    path::Path,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU32, AtomicU64, Ordering},
        mpsc::{Receiver, SyncSender, sync_channel},
    },
};

use executor_proto::types::StreamName;
use nix::unistd::{AccessFlags, access};
use rusqlite::{Error, OptionalExtension};

use crate::output::KeptStream;

pub(crate) use self::record::{
    Account, Completed, EndCause, Ended, ExitFact, KeeperInstance, Kind, Ledger, MAX_READS, Read, ReadRange,
    RecordedStart, Recovered, Start, StartNumber, Started, UsedKey, World,
};
use self::{
    keys::Keys,
    rings::Rings,
    store::{CHECKPOINT_EVERY, MAX_LEFT_LOG_BYTES, MAX_LOG_BYTES, Store, decode, encode, io_error},
    tails::Tails,
};

/// Starts that are known at the same time. Above it those that ended first are no longer written down.
const MAX_STARTS: u64 = 100_000;

/// By how much the numbers of completions go on after the host was started again: more than a loss of power can have taken
/// with the end of the log, so that no number is given out for a second time.
const SEQUENCES_PER_BOOT: u64 = 65_536;

/// Of failures to write, every how many-th is logged.
const FAILURES_PER_LINE: u64 = 1_000;

/// The journal of one state directory. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Journal {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    shared: Arc<Shared>,
    written: AtomicU32,
    /// Wakes who copies the log; that one ends when this is gone.
    copy: SyncSender<()>,
    tails: Tails,
    rings: Rings,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    failures: AtomicU64,
}

#[derive(Debug)]
struct State {
    store: Store,
    world: i64,
    next_number: i64,
    starts: u64,
    keys: Keys,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The kernel's name for this boot of the host.
pub(crate) fn boot_id() -> String {
    fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned()
}

/// What tells one pid namespace from another. 0: not known.
fn pid_namespace() -> u64 {
    fs::metadata("/proc/self/ns/pid").map_or(0, |metadata| metadata.ino())
}

/// Whether this process may read a directory and make files in it.
fn probe_directory(path: &Path) -> io::Result<()> {
    let writable = || Ok(access(path, AccessFlags::W_OK | AccessFlags::X_OK)?);
    fs::read_dir(path)
        .and_then(|_entries| writable())
        .map_err(|error| io::Error::new(error.kind(), format!("{}: {error}", path.display())))
}

impl Journal {
    /// Whether [`Journal::open`] could use a state directory. Another process may be using it; nothing of it is changed.
    ///
    /// # Errors
    /// When the directory is not there, or as [`Journal::open`].
    pub(crate) fn probe(state_dir: &Path) -> io::Result<()> {
        probe_directory(state_dir)?;
        Tails::probe(state_dir)?;
        Store::probe(state_dir)
    }

    /// Opens the journal of a state directory, which exists, and says what it holds. `keeper` is the one that is there now.
    ///
    /// # Errors
    /// When it cannot be opened or read, is of a later version, or is another program's file. One that is damaged is set aside
    /// with a line in the log, and a new one begun.
    pub(crate) fn open(
        state_dir: &Path,
        boot_id: &str,
        keeper: KeeperInstance,
        now_ms: u64,
    ) -> io::Result<(Self, Recovered)> {
        let (store, set_aside) = Store::open(state_dir, now_ms)?;
        let tails = Tails::open(state_dir)?;
        let rings = Rings::open(state_dir);
        let copier = store.another()?;
        let (state, mut recovered) =
            State::of(store, boot_id, keeper, now_ms, set_aside.is_some()).map_err(io_error)?;
        recovered.set_aside = set_aside;
        // Those before may all have lived too short to copy their log.
        if copier.log_bytes() > MAX_LEFT_LOG_BYTES
            && let Err(error) = state.store.restart_log()
        {
            tracing::warn!(%error, "the journal's log could not be copied yet");
        }
        let known = recovered
            .starts
            .iter()
            .filter_map(|start| Some((start.start.account.tenant.clone(), start.started.as_ref()?.id.clone())));
        tails.keep_only(&known.collect());
        rings.keep_only(&recovered.starts.iter().map(|start| start.number).collect());
        let shared = Arc::new(Shared { state: Mutex::new(state), failures: AtomicU64::new(0) });
        let (copy, asked) = sync_channel(1);
        let of_thread = Arc::clone(&shared);
        std::thread::Builder::new().name("journal".to_owned()).spawn(move || copy_logs(&of_thread, &copier, &asked))?;
        let inner = Inner { shared, written: AtomicU32::new(0), copy, tails, rings };
        Ok((Self { inner: Arc::new(inner) }, recovered))
    }

    /// Before the spawn. From here on the key is known to whoever comes after.
    pub(crate) fn begin(&self, start: &Start) -> StartNumber {
        let value = encode(start);
        let mut state = self.inner.shared.state();
        let number = StartNumber(state.next_number);
        state.next_number += 1;
        let written = state.begin(number, &value);
        drop(state);
        self.note(written);
        number
    }

    /// It runs.
    pub(crate) fn started(&self, number: StartNumber, started: &Started) {
        self.update("update starts set started = ?2 where number = ?1", number, &encode(started));
    }

    /// Nothing ran: the key is free again.
    pub(crate) fn failed(&self, number: StartNumber) {
        let mut state = self.inner.shared.state();
        let deleted = state.store.execute("delete from starts where number = ?1", (number.0,));
        if let Ok(rows) = &deleted {
            state.starts -= (*rows as u64).min(state.starts);
        }
        drop(state);
        self.note(deleted);
    }

    /// Somebody wants its end.
    pub(crate) fn asked_to_end(&self, number: StartNumber, cause: EndCause) {
        // As many digits as there are causes, so that asking again and again does not overflow.
        const SQL: &str = "update starts set asked = asked * ?2 + ?3 where number = ?1 and asked < 1 << 18";
        let written = self.inner.shared.state().store.execute(SQL, (number.0, record::CAUSE_BASE, cause.digit()));
        self.note(written);
    }

    /// The facts of its end are final.
    pub(crate) fn ended(&self, number: StartNumber, ended: &Ended) {
        self.update("update starts set ended = ?2 where number = ?1", number, &encode(ended));
    }

    /// A read of it was answered. These may have to be repeated, the latest first; those before need not any more.
    pub(crate) fn read(&self, number: StartNumber, reads: &[Read]) {
        self.update("update starts set read = ?2 where number = ?1", number, &encode_reads(reads));
    }

    /// It is no longer known, but for its key. Its kept output goes.
    pub(crate) fn forgotten(&self, number: StartNumber, now_ms: u64) {
        let mut state = self.inner.shared.state();
        let forgotten = state.forget(number, now_ms);
        drop(state);
        self.inner.rings.remove(number);
        if let Ok(Some(used)) = &forgotten
            && let Some(id) = &used.id
        {
            self.inner.tails.remove(&used.account.tenant, id);
        }
        self.note(forgotten);
    }

    /// The completion of an owner's task; `first_kept`: those with smaller numbers are dropped.
    pub(crate) fn completed(
        &self,
        account: &Account,
        completed: &Completed,
        first_kept: u64,
        number: Option<StartNumber>,
    ) {
        const LATEST: &str =
            "insert into ledgers values(?1, ?2) on conflict(account) do update set latest = excluded.latest";
        let (account, value) = (encode(account), encode(completed));
        let (sequence, first_kept) = (stored(completed.sequence), stored(first_kept));
        let written = self.inner.shared.state().store.together(|store| {
            store.execute("insert or replace into completions values(?1, ?2, ?3)", (&account, sequence, &value))?;
            store.execute(LATEST, (&account, sequence))?;
            store.execute("delete from completions where account = ?1 and sequence < ?2", (&account, first_kept))?;
            if let Some(number) = number {
                store.execute("update starts set told = 1 where number = ?1", (number.0,))?;
            }
            Ok(())
        });
        self.note(written);
    }

    /// The owner has taken its completions up to and including this one.
    pub(crate) fn acknowledged(&self, account: &Account, up_to: u64) {
        const SQL: &str = "delete from completions where account = ?1 and sequence <= ?2";
        let written = self.inner.shared.state().store.execute(SQL, (encode(account), stored(up_to)));
        self.note(written);
    }

    /// Keeps the end of a stream that is closed, until its task is forgotten. False: it could not be written.
    pub(crate) fn keep_tail(&self, tenant: &str, id: &str, stream: StreamName, tail: &KeptStream) -> bool {
        let kept = self.inner.tails.keep(tenant, id, stream, tail);
        if let Err(error) = &kept {
            self.failed_to_write(error);
        }
        kept.is_ok()
    }

    /// Makes the file for a stream's ring, until it is removed or its task is forgotten. `None`: it cannot be had, which is
    /// logged. May wait for a disk.
    pub(crate) fn make_ring(&self, number: StartNumber, stream: StreamName, ring_bytes: u64) -> Option<File> {
        self.inner.rings.make(number, stream, ring_bytes)
    }

    /// The ring file that was left of a stream, open for reading; `None`: there is none.
    pub(crate) fn ring(&self, number: StartNumber, stream: StreamName) -> Option<io::Result<File>> {
        self.inner.rings.left(number, stream)
    }

    /// Removes the ring files of a task.
    pub(crate) fn remove_rings(&self, number: StartNumber) {
        self.inner.rings.remove(number);
    }

    /// What is kept of a stream; `None`: nothing, or nothing that can be read.
    pub(crate) fn tail(&self, tenant: &str, id: &str, stream: StreamName) -> Option<KeptStream> {
        self.inner.tails.read(tenant, id, stream)
    }

    fn update(&self, sql: &'static str, number: StartNumber, value: &[u8]) {
        let written = self.inner.shared.state().store.execute(sql, (number.0, value));
        self.note(written);
    }

    /// Counts a record; has the log copied when there are enough; logs what could not be written.
    fn note<T>(&self, written: Result<T, Error>) {
        match written {
            Ok(_) => {
                if (self.inner.written.fetch_add(1, Ordering::Relaxed) + 1).is_multiple_of(CHECKPOINT_EVERY) {
                    // One that is asked for already does for this, too.
                    let _ = self.inner.copy.try_send(());
                }
            }
            Err(error) => self.failed_to_write(&io_error(error)),
        }
    }

    fn failed_to_write(&self, error: &io::Error) {
        let before = self.inner.shared.failures.fetch_add(1, Ordering::Relaxed);
        if before.is_multiple_of(FAILURES_PER_LINE) {
            tracing::error!(
                %error, failures = before + 1,
                "the journal cannot be written: what is started or ends now may be unknown after a restart"
            );
        }
    }
}

/// For tests of the rules over it: no file, no thread, no kept output.
#[cfg(any(test, fuzzing))]
impl Journal {
    /// One that holds nothing yet.
    pub(crate) fn in_memory(boot_id: &str, keeper: KeeperInstance, now_ms: u64) -> Self {
        let store = Store::in_memory().expect("memory is there");
        let (state, _nothing) = State::of(store, boot_id, keeper, now_ms, false).expect("a new one can be read");
        let shared = Arc::new(Shared { state: Mutex::new(state), failures: AtomicU64::new(0) });
        let (copy, _nobody) = sync_channel(1);
        let inner =
            Inner { shared, written: AtomicU32::new(0), copy, tails: Tails::nowhere(), rings: Rings::nowhere() };
        Self { inner: Arc::new(inner) }
    }

    /// What a process finds that opens it now; from then on it is that one's.
    pub(crate) fn reopened(&self, boot_id: &str, keeper: KeeperInstance, now_ms: u64) -> Recovered {
        let mut state = self.inner.shared.state();
        let opened = recover(&state.store, boot_id, keeper, now_ms, false).expect("it can be read");
        state.starts = opened.recovered.starts.len() as u64;
        (state.world, state.next_number, state.keys) = (opened.world, opened.next_number, opened.keys);
        opened.recovered
    }

    /// Forgets everything.
    pub(crate) fn empty(&self) {
        self.inner.shared.state().store.empty().expect("memory can be written");
    }

    /// Records that could not be written.
    #[cfg(test)]
    pub(crate) fn failures(&self) -> u64 {
        self.inner.shared.failures.load(Ordering::Relaxed)
    }
}

impl State {
    /// Enters this world with what the store holds, and says what that is.
    fn of(
        store: Store,
        boot_id: &str,
        keeper: KeeperInstance,
        now_ms: u64,
        lost: bool,
    ) -> Result<(Self, Recovered), Error> {
        let OpenedRows { world, next_number, keys, recovered } = recover(&store, boot_id, keeper, now_ms, lost)?;
        let starts = recovered.starts.len() as u64;
        Ok((Self { store, world, next_number, starts, keys }, recovered))
    }

    fn begin(&mut self, number: StartNumber, start: &[u8]) -> Result<(), Error> {
        if self.starts >= MAX_STARTS {
            const OLDEST: &str =
                "delete from starts where number = (select min(number) from starts where ended is not null)";
            self.starts -= self.store.execute(OLDEST, ())? as u64;
        }
        self.store
            .execute("insert into starts(number, world, start) values(?1, ?2, ?3)", (number.0, self.world, start))?;
        self.starts += 1;
        Ok(())
    }

    fn forget(&mut self, number: StartNumber, now_ms: u64) -> Result<Option<UsedKey>, Error> {
        const SQL: &str = "select start, started, ended is not null from starts where number = ?1";
        let row = self.store.row(SQL, (number.0,), |row| {
            let (start, started): (Vec<u8>, Option<Vec<u8>>) = (row.get(0)?, row.get(1)?);
            Ok((start, started, row.get::<_, bool>(2)?))
        });
        // Not there: its beginning could not be written.
        let Some((start, started, end_known)) = row.optional()? else { return Ok(None) };
        let started: Option<Started> = started.and_then(|bytes| decode(&bytes));
        let used = decode(&start).map(|start: Start| UsedKey {
            account: start.account,
            key: start.key,
            kind: start.kind,
            digest: start.digest,
            id: started.map(|started| started.id),
            end_known,
            forgotten_at_ms: now_ms,
        });
        let State { store, keys, .. } = self;
        // A number of its own, after all others': keys go in the order in which they were forgotten.
        let key_number = self.next_number;
        let gone = used.as_ref().map_or_else(Vec::new, |used| keys.make_room(&used.account, now_ms));
        store.together(|store| {
            store.execute("delete from starts where number = ?1", (number.0,))?;
            if let Some(used) = &used {
                store.execute("insert into keys values(?1, ?2)", (key_number, encode(used)))?;
            }
            for number in &gone {
                store.execute("delete from keys where number = ?1", (*number,))?;
            }
            Ok(())
        })?;
        self.next_number += 1;
        self.starts = self.starts.saturating_sub(1);
        keys.forget(&gone);
        if let Some(used) = &used {
            keys.add(key_number, used);
        }
        Ok(used)
    }
}

/// A number as SQLite keeps it.
fn stored(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

/// Copies the log into the database whenever it is asked to, until nobody can ask any more.
fn copy_logs(shared: &Shared, copier: &Store, asked: &Receiver<()>) {
    while asked.recv().is_ok() {
        let copied = copier.copy_log().and_then(|()| {
            // Without a pause between records the log is never begun anew; then they wait for it, once.
            if copier.log_bytes() > MAX_LOG_BYTES { shared.state().store.restart_log() } else { Ok(()) }
        });
        if let Err(error) = copied {
            tracing::warn!(%error, "the journal's log could not be copied yet");
        }
    }
}

/// What the rows of a journal come to.
struct OpenedRows {
    world: i64,
    next_number: i64,
    keys: Keys,
    recovered: Recovered,
}

/// Reads everything, removes what is over or cannot be read, and enters this world.
fn recover(store: &Store, boot_id: &str, keeper: KeeperInstance, now_ms: u64, lost: bool) -> Result<OpenedRows, Error> {
    let pids = stored(pid_namespace());
    let (mut worlds, _) = store.all("select world, keeper, boot, pids from worlds", |row| {
        Ok(Some((row.get::<_, i64>(0)?, row.get::<_, Vec<u8>>(1)?, row.get::<_, String>(2)?, row.get::<_, i64>(3)?)))
    })?;
    let this = worlds.iter().find(|(_, of, boot, ns)| *of == keeper.0 && *boot == boot_id && *ns == pids);
    let known_boot = worlds.is_empty() || worlds.iter().any(|(_, _, boot, _)| boot == boot_id);
    let world = match this {
        Some((world, ..)) => *world,
        None => worlds.iter().map(|(world, ..)| *world).max().unwrap_or(0) + 1,
    };
    worlds.push((world, keeper.0.to_vec(), boot_id.to_owned(), pids));
    let place = |of: i64| match worlds.iter().find(|(world, ..)| *world == of) {
        Some(_) if of == world => World::ThisKeeper,
        Some((_, _, boot, ns)) if boot == boot_id && *ns == pids => World::SamePids,
        Some((_, _, boot, _)) if boot == boot_id => World::OtherPids,
        Some(_) | None => World::OtherBoot,
    };
    let (starts, unread_starts) = read_starts(store, place)?;
    let (keys, unread_keys) = store.all("select number, key from keys order by number", |row| {
        let (number, key): (i64, Vec<u8>) = (row.get(0)?, row.get(1)?);
        Ok(decode::<UsedKey>(&key).map(|key| (number, key)))
    })?;
    let (ledgers, unread_ledgers) = read_ledgers(store)?;
    let unread = unread_starts + unread_keys + unread_ledgers;
    if unread > 0 {
        tracing::error!(records = unread, "some records of the journal cannot be read and are left out");
    }
    let mut recovered = Recovered { starts, ledgers, ..Recovered::default() };
    let last = |sql| store.one::<i64>(sql, ());
    let next_number = 1 + last("select coalesce(max(number), 0) from starts")?
        .max(last("select coalesce(max(number), 0) from keys")?);
    let first: Option<i64> = store.one("select value from meta where name = 'first_sequence'", ()).optional()?;
    recovered.first_sequence =
        if lost { now_ms } else { first.and_then(|first| u64::try_from(first).ok()).unwrap_or(0) };
    if !known_boot {
        recovered.first_sequence += SEQUENCES_PER_BOOT;
        for ledger in &mut recovered.ledgers {
            ledger.latest += SEQUENCES_PER_BOOT;
        }
    }
    let (of_keys, over) = Keys::recovered(&keys, now_ms);
    recovered.keys = keys.into_iter().filter(|(number, _)| !over.contains(number)).map(|(_, key)| key).collect();
    store.together(|store| {
        for number in &over {
            store.execute("delete from keys where number = ?1", (*number,))?;
        }
        store.execute("delete from worlds where world not in (select world from starts)", ())?;
        store.execute(
            "insert or replace into worlds values(?1, ?2, ?3, ?4)",
            (world, keeper.0.to_vec(), boot_id, pids),
        )?;
        if lost || !known_boot {
            let first = stored(recovered.first_sequence);
            store.execute("insert or replace into meta values('first_sequence', ?1)", (first,))?;
        }
        if !known_boot {
            store.execute("update ledgers set latest = latest + ?1", (stored(SEQUENCES_PER_BOOT),))?;
        }
        Ok(())
    })?;
    Ok(OpenedRows { world, next_number, keys: of_keys, recovered })
}

fn read_starts(store: &Store, place: impl Fn(i64) -> World) -> Result<(Vec<RecordedStart>, usize), Error> {
    const SQL: &str = "select number, world, start, started, asked, ended, told, read from starts order by number";
    store.all(SQL, |row| {
        let blob = |column| row.get::<_, Option<Vec<u8>>>(column);
        let Some(start) = blob(2)?.and_then(|bytes| decode(&bytes)) else { return Ok(None) };
        Ok(Some(RecordedStart {
            number: StartNumber(row.get(0)?),
            world: place(row.get(1)?),
            start,
            started: blob(3)?.and_then(|bytes| decode(&bytes)),
            asked_to_end: EndCause::listed(row.get(4)?),
            ended: blob(5)?.and_then(|bytes| decode(&bytes)),
            told: row.get(6)?,
            reads: blob(7)?.map_or_else(Vec::new, |bytes| decode_reads(&bytes)),
        }))
    })
}

/// One behind the other: a program that knows of one only takes the first, the latest.
fn encode_reads(reads: &[Read]) -> Vec<u8> {
    reads.iter().take(MAX_READS).flat_map(encode).collect()
}

fn decode_reads(mut bytes: &[u8]) -> Vec<Read> {
    let mut reads = Vec::new();
    while reads.len() < MAX_READS
        && let Ok((read, rest)) = postcard::take_from_bytes(bytes)
    {
        reads.push(read);
        bytes = rest;
    }
    reads
}

fn read_ledgers(store: &Store) -> Result<(Vec<Ledger>, usize), Error> {
    let (mut ledgers, mut unread) = store.all("select account, latest from ledgers order by account", |row| {
        let (account, latest): (Vec<u8>, i64) = (row.get(0)?, row.get(1)?);
        let latest = u64::try_from(latest).unwrap_or(0);
        Ok(decode(&account).map(|account| Ledger { account, latest, waiting: Vec::new() }))
    })?;
    let sql = "select account, completion from completions order by account, sequence";
    let (waiting, unread_completions) = store.all(sql, |row| {
        let (account, completion): (Vec<u8>, Vec<u8>) = (row.get(0)?, row.get(1)?);
        Ok(decode::<Account>(&account).zip(decode::<Completed>(&completion)))
    })?;
    unread += unread_completions;
    let places: std::collections::HashMap<_, _> =
        ledgers.iter().enumerate().map(|(place, ledger)| (ledger.account.clone(), place)).collect();
    for (account, completed) in waiting {
        match places.get(&account) {
            Some(place) => ledgers[*place].waiting.push(completed),
            None => unread += 1,
        }
    }
    Ok((ledgers, unread))
}
