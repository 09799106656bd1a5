//! The bytes that commands write: moved by `splice` into a ring that survives this process, kept as an exact tail,
//! spilled to a file when the tail cannot hold them, and read by offset without ever blocking the command.
//!
//! ```text
//!  pipe ──pump──▶ ring in the stream file ──▶ tail: results and deltas
//!                    │          └───────────▶ readers by offset ◀─┐
//!                    └──spill writer──▶ spill file ───────────────┘
//! ```
//! One task per stream ([`pump`]) moves the bytes, one more writes the spill while there is one. What this module does not do:
//! it neither makes nor removes files, and it knows nothing of the command's life but the end of its pipe.

mod growth;
mod pump;
mod reader;
mod record;
mod ring;
mod spill;
mod tail;
#[cfg(test)]
mod tests;
mod text;

use std::{
    fs::File,
    io,
    ops::Range,
    os::fd::{BorrowedFd, OwnedFd},
    path::PathBuf,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use bytes::Bytes;
use executor_proto::types::{StreamDelta, StreamName, StreamResult};
use futures_core::future::BoxFuture;
use tokio::{sync::watch, time};

#[cfg(fuzzing)]
pub use self::tail::fuzzing::deltas_add_up;
#[cfg(test)]
pub(crate) use self::tail::kept_bytes;
use self::{
    pump::{Pump, PumpControl},
    ring::Ring,
    spill::Spill,
    tail::Window,
};
pub(crate) use self::{
    reader::{ReadUntil, StreamReader},
    record::{prepare as prepare_ring_file, recover as recover_ring_file},
    ring::StreamFile,
};
use crate::limits::{Rate, SpillRoom};

/// The smallest ring: faster than larger ones (it stays in the processor's cache), and room for a spill to be behind.
const MIN_RING_BYTES: u64 = 1024 * 1024;

/// Rings are whole pages.
const RING_UNIT_BYTES: u64 = 4096;

/// How long [`Stream::settle`] waits at least for the pipe to be emptied, and then again (twice) where a spill was in the way.
const EMPTYING: Duration = Duration::from_millis(100);

/// What a stream is made with.
#[derive(Debug, Clone)]
pub(crate) struct StreamOptions {
    /// Which of a command's two streams.
    pub(crate) name: StreamName,
    /// Bytes that the tail keeps; at least 1.
    pub(crate) tail_bytes: u64,
    /// Bytes of the ring in the stream file: [`ring_bytes`] of the tail, or more.
    pub(crate) ring_bytes: u64,
    /// Bytes after which a spill keeps only its head. 0: no spill is made.
    pub(crate) max_spill_bytes: u64,
    /// Opens the spill again once it is closed, and removes it.
    pub(crate) spills: Arc<dyn SpillFiles>,
    /// What the spill may take of the disk.
    pub(crate) room: Arc<SpillRoom>,
    /// How fast bytes are taken. `None`: as they come.
    pub(crate) rate: Option<Arc<Rate>>,
}

/// The ring that a tail of this size needs, in bytes: a whole number of pages, at least twice the tail.
pub(crate) fn ring_bytes(tail_bytes: u64) -> u64 {
    let needed = tail::kept_bytes(tail_bytes).saturating_mul(2).max(MIN_RING_BYTES);
    needed.div_ceil(RING_UNIT_BYTES).saturating_mul(RING_UNIT_BYTES)
}

/// What a stream needs of the process that outlives this one.
pub(crate) trait StreamFiles: Send + Sync {
    /// Makes the file that the ring shall lie in, at most once, at the first byte: empty, made by [`prepare_ring_file`] for so
    /// many bytes. `None`: the ring is in memory, and goes with the keeper.
    fn ring(&self, ring_bytes: u64) -> BoxFuture<'_, Option<File>>;

    /// Has the stream file held, in place of one before. Called before a byte is moved into it.
    fn hold<'a>(&'a self, file: &'a [BorrowedFd<'a>]) -> BoxFuture<'a, io::Result<()>>;

    /// Makes the spill file, at most once: a new file, open for reading and writing, and its path in the world where commands
    /// run.
    fn spill(&self) -> BoxFuture<'_, io::Result<(OwnedFd, PathBuf)>>;
}

/// Spills that were made: they lie where this process may have no way to them.
pub(crate) trait SpillFiles: std::fmt::Debug + Send + Sync {
    /// Opens the spill file at this path for reading.
    fn reopen(&self, path: PathBuf) -> BoxFuture<'_, io::Result<OwnedFd>>;

    /// Removes the spill file at this path, whether or not it is there.
    fn remove(&self, path: PathBuf);
}

/// Where a stream stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Progress {
    /// Bytes taken so far.
    pub(crate) total: u64,
    /// The end of the pipe was read: no more will come.
    pub(crate) closed: bool,
}

/// What is kept of a stream beyond this process.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct KeptStream {
    /// Offset of the first byte that is kept.
    pub(crate) start: u64,
    /// Up to the stream's end, or to what is missing there.
    pub(crate) bytes: Bytes,
    /// Bytes after them that were lost with the host or the keeper: the stream ends with them.
    pub(crate) missing: u64,
    /// The spill, if it can be shown.
    pub(crate) spill: Option<KeptSpill>,
}

impl KeptStream {
    /// Nothing of a stream that had bytes; so many were shown to its reader.
    pub(crate) fn lost(read_to: u64) -> Self {
        Self { missing: read_to.saturating_add(1), ..Self::default() }
    }
}

/// A spill file that gets no more bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct KeptSpill {
    /// In the world where commands run.
    pub(crate) path: PathBuf,
    /// Device and inode, by which it is known again.
    pub(crate) identity: (u64, u64),
    /// Bytes in it, from the start of the stream.
    pub(crate) held: u64,
}

/// One stream of one command.
#[derive(Debug)]
pub(crate) struct Stream {
    options: StreamOptions,
    storage: Mutex<Storage>,
    progress: watch::Sender<Progress>,
    spill: Spill,
    control: PumpControl,
    compact: AtomicBool,
    /// The last bytes of the stream, which were lost under a process before this one.
    missing: u64,
    /// Bytes that are in the pipe and cannot be taken: 0 unless the kernel refuses to move them (no descriptor or memory for
    /// the ring).
    refused: AtomicU64,
}

/// What is in memory.
#[derive(Debug, Clone)]
enum Storage {
    /// From the first byte on.
    Ring(Arc<Ring>),
    /// The last bytes, and the offset of their first: none before the first byte, all that is kept after
    /// [`Stream::compact`].
    Tail(u64, Bytes),
}

impl Stream {
    /// Takes over the read end of the pipe and moves what comes. The stream file is made when the first byte is there: most
    /// commands leave one of their streams silent. Inside a tokio runtime.
    ///
    /// # Errors
    /// When the ring would be too small for the tail, or the runtime cannot watch the pipe.
    pub(crate) fn start(pipe: OwnedFd, options: StreamOptions, files: Arc<dyn StreamFiles>) -> io::Result<Arc<Self>> {
        let stream = Arc::new(Self::new(options)?);
        Pump::spawn(Arc::clone(&stream), pipe, files, None, None)?;
        Ok(stream)
    }

    /// Goes on with a stream that another process has moved before: from where its file says that it ends, if bytes had come;
    /// its spill from where that ends.
    ///
    /// # Errors
    /// As [`Stream::start`]; and when the file is not a stream file with a ring of `ring_bytes`.
    pub(crate) fn take_over(
        pipe: OwnedFd,
        file: Option<StreamFile>,
        spill: Option<(OwnedFd, PathBuf)>,
        options: StreamOptions,
        files: Arc<dyn StreamFiles>,
    ) -> io::Result<Arc<Self>> {
        let ring = file.map(|file| Ring::open(file, options.ring_bytes)).transpose()?.map(Arc::new);
        let stream = Arc::new(Self::new(options)?);
        if let Some(ring) = &ring {
            *stream.storage() = Storage::Ring(Arc::clone(ring));
            stream.progress.send_replace(Progress { total: ring.total(), closed: false });
        }
        let written = spill.map(|(file, path)| stream.spill.take_over(file, path)).transpose()?;
        Pump::spawn(Arc::clone(&stream), pipe, files, ring, written)?;
        Ok(stream)
    }

    fn new(options: StreamOptions) -> io::Result<Self> {
        if options.ring_bytes <= tail::kept_bytes(options.tail_bytes) {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "the ring is too small for the tail"));
        }
        Ok(Self {
            storage: Mutex::new(Storage::Tail(0, Bytes::new())),
            progress: watch::Sender::new(Progress::default()),
            spill: Spill::new(&options),
            control: PumpControl::default(),
            compact: AtomicBool::new(false),
            missing: 0,
            refused: AtomicU64::new(0),
            options,
        })
    }

    /// A stream whose command ended under a process before this one: closed, with what was kept of it.
    pub(crate) fn recalled(options: StreamOptions, kept: KeptStream) -> Arc<Self> {
        let KeptStream { start, bytes, missing, spill } = kept;
        let total = start + bytes.len() as u64 + missing;
        let stream = Self {
            storage: Mutex::new(Storage::Tail(start, bytes)),
            progress: watch::Sender::new(Progress { total, closed: true }),
            spill: Spill::recalled(&options, spill),
            control: PumpControl::default(),
            compact: AtomicBool::new(true),
            missing,
            refused: AtomicU64::new(0),
            options,
        };
        if total > stream.options.tail_bytes {
            stream.spill.give_up();
        }
        Arc::new(stream)
    }

    /// What is to be kept of a stream that gets no more bytes.
    pub(crate) fn to_keep(&self) -> KeptStream {
        let (start, bytes) = self.last_bytes(0);
        KeptStream { start, bytes, missing: self.missing, spill: self.spill.finished() }
    }

    /// Where the end of the stream is missing, from which byte on.
    fn missing_from(&self) -> Option<u64> {
        (self.missing > 0).then(|| self.total() - self.missing)
    }

    /// Bytes taken so far.
    pub(crate) fn total(&self) -> u64 {
        self.progress.borrow().total
    }

    /// Whether the end of the pipe was read.
    pub(crate) fn closed(&self) -> bool {
        self.progress.borrow().closed
    }

    /// Where the stream stands, as it goes on. Whoever waits on it is woken at every step of a flood.
    pub(crate) fn subscribe(&self) -> watch::Receiver<Progress> {
        self.progress.subscribe()
    }

    /// Returns when the stream is closed, after `quiet` without a byte, or at `until`; what was in the pipe when it was called
    /// has been taken then, for which a spill that is still behind at `until` is given up (at the latest 300 ms after it).
    /// Cancel-safe.
    pub(crate) async fn settle(&self, quiet: Duration, until: Instant) {
        let until = time::Instant::from_std(until);
        self.empty_pipe(until).await;
        let mut progress = self.subscribe();
        while !progress.borrow_and_update().closed {
            let quiet_until = (time::Instant::now() + quiet).min(until);
            if !matches!(time::timeout_at(quiet_until, progress.changed()).await, Ok(Ok(()))) {
                return;
            }
        }
    }

    async fn empty_pipe(&self, until: time::Instant) {
        let mut emptied = std::pin::pin!(self.control.empty());
        let mut deadline = until.max(time::Instant::now() + EMPTYING);
        for _attempt in 0..3 {
            if time::timeout_at(deadline, &mut emptied).await.is_ok() {
                return;
            }
            if self.control.blocked() {
                tracing::warn!(path = ?self.spill.path(), "a spill is behind at the end of a call and is given up");
                self.spill.give_up();
            }
            deadline = time::Instant::now() + EMPTYING;
        }
    }

    /// The stream as it is now. Waits a bounded time (below 1 s) for the spill to be as far. Await both streams at the same
    /// time. Cancel-safe.
    ///
    /// Bytes that cannot be taken out of the pipe count as dropped, and everything with them, since the end is what is shown.
    pub(crate) async fn result(&self) -> StreamResult {
        let refused = self.refused.load(Ordering::Acquire);
        if refused > 0 {
            let total = self.total() + refused;
            return StreamResult { total, tail: Bytes::new(), dropped: total, spill: None };
        }
        let (start, bytes) = self.last_bytes(0);
        let window = Window { start, bytes: &bytes };
        let tail = window.tail(self.options.tail_bytes);
        let (total, dropped) = (tail.end, tail.start);
        StreamResult { total, tail: part(start, &bytes, tail), dropped, spill: self.spill_fact(total).await }
    }

    /// What is kept of the bytes from `cursor` on, in whole characters, and where the next delta begins. Waits as
    /// [`Stream::result`] does. Cancel-safe.
    pub(crate) async fn delta(&self, cursor: u64) -> (StreamDelta, u64) {
        // Asked before the bytes are read: a stream that is closed gets no more.
        let closed = self.closed();
        let (start, bytes) = self.last_bytes(needed_from(cursor));
        // What an incomplete character at the end waits for is missing, and with it the character.
        let closed = closed && self.missing == 0;
        let (delta, next) = delta_of(start, &bytes, cursor, self.options.tail_bytes, closed);
        let end = start + bytes.len() as u64 + self.missing;
        let spill = self.spill_fact(end).await;
        if self.missing == 0 {
            return (StreamDelta { spill, ..delta }, next);
        }
        // All that is missing is told at once.
        let missing = end.saturating_sub(next.max(cursor));
        let start = delta.start.max(cursor.min(end));
        (StreamDelta { start, spill, missing, ..delta }, end.max(cursor))
    }

    async fn spill_fact(&self, total: u64) -> Option<executor_proto::types::Spill> {
        if total > self.options.tail_bytes { self.spill.fact(total).await } else { None }
    }

    /// Reads from an offset on, without ever holding the command up.
    pub(crate) fn reader(self: &Arc<Self>, offset: u64, end: ReadUntil) -> StreamReader {
        StreamReader::new(Arc::clone(self), offset, end)
    }

    /// Keeps nothing but the tail and the spill's path, as soon as the stream is closed and the spill is written.
    pub(crate) fn compact(&self) {
        self.compact.store(true, Ordering::SeqCst);
        self.compact_if_asked();
    }

    /// Called by everybody who brings one of the conditions about; whoever comes last finds them all.
    fn compact_if_asked(&self) {
        let Progress { total, closed } = *self.progress.borrow();
        let due = self.compact.load(Ordering::SeqCst) && closed && self.spill.settled(total, self.options.tail_bytes);
        if due && matches!(*self.storage(), Storage::Ring(_)) {
            let (start, bytes) = self.last_bytes(0);
            *self.storage() = Storage::Tail(start, bytes);
            self.spill.close();
            self.spill.may_go();
        }
    }

    /// Waits until the spill file, if it was asked for, is finished or given up; while the stream is open, only until it was made
    /// or refused. Cancel-safe.
    pub(crate) async fn spill_decided(&self) {
        self.spill.decided(|| self.closed()).await;
    }

    /// Removes the spill file, if one was ever made: nobody is told of it any more.
    pub(crate) fn remove_spill(&self) {
        self.spill.remove();
    }

    /// The spill file if one was ever made, complete or not.
    pub(crate) fn spill_path(&self) -> Option<PathBuf> {
        self.spill.path().map(PathBuf::from)
    }

    fn storage(&self) -> std::sync::MutexGuard<'_, Storage> {
        self.storage.lock().expect("nobody panics while holding the storage")
    }

    /// What the tail needs of the bytes from `from` to the end of the stream, and the offset of the first.
    fn last_bytes(&self, from: u64) -> (u64, Bytes) {
        let storage = self.storage().clone();
        match storage {
            Storage::Ring(ring) => ring.end(from, tail::kept_bytes(self.options.tail_bytes)).unwrap_or_else(|error| {
                tracing::error!(%error, stream = self.options.name.as_str(), "output cannot be read");
                (ring.total(), Bytes::new())
            }),
            Storage::Tail(start, bytes) => {
                let end = start + bytes.len() as u64;
                let from = from.clamp(start, end);
                (from, part(start, &bytes, from..end))
            }
        }
    }

    /// These bytes, where they are in memory.
    fn in_memory(&self, range: Range<u64>) -> Option<Bytes> {
        let storage = self.storage().clone();
        match storage {
            Storage::Ring(ring) => ring.read(range).ok().flatten(),
            Storage::Tail(start, bytes) => {
                let held = start <= range.start && range.end <= start + bytes.len() as u64;
                held.then(|| part(start, &bytes, range))
            }
        }
    }

    /// The part of the stream that is in memory.
    fn in_memory_range(&self) -> Range<u64> {
        match &*self.storage() {
            // The end is read last: it is never before the oldest.
            Storage::Ring(ring) => {
                let oldest = ring.oldest();
                oldest..ring.total().max(oldest)
            }
            Storage::Tail(start, bytes) => *start..start + bytes.len() as u64,
        }
    }
}

/// The first byte that a delta from `cursor` on has to look at.
pub(crate) fn needed_from(cursor: u64) -> u64 {
    cursor.saturating_sub(text::MAX_PART as u64)
}

/// The delta from `cursor` on, out of the stream's last bytes, which begin at `start`; and where the next one begins. Its spill
/// is the caller's to add.
pub(crate) fn delta_of(start: u64, bytes: &Bytes, cursor: u64, tail_bytes: u64, closed: bool) -> (StreamDelta, u64) {
    let new = Window { start, bytes }.delta(cursor, tail_bytes, closed);
    let (next, dropped) = (new.end, new.start.saturating_sub(cursor));
    (StreamDelta { start: new.start, dropped, data: part(start, bytes, new), spill: None, missing: 0 }, next)
}

/// A range of the stream out of bytes that begin at `start` and hold it.
fn part(start: u64, bytes: &Bytes, range: Range<u64>) -> Bytes {
    let index = |offset: u64| usize::try_from(offset - start).expect("bytes in memory");
    bytes.slice(index(range.start)..index(range.end))
}
