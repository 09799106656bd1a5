//! The spill: the file with the complete stream, made when the tail can no longer hold it.
//!
//! ```text
//! Idle ──tail too small──▶ Writing ──closed, or at the cap──▶ Done
//!   │                         │
//!   └─────────────────────────┴──no file, failed write, disk too slow──▶ Lost
//! ```
//! Done and Lost are final. Done is also a file whose owner, tenant or disk has no room for more: it keeps its head. What the file still needs is not overwritten in the ring (see [`Demand`]), so a slow
//! disk holds the command up, as it does a command that writes to a file itself; a disk that stands still, or that is still
//! behind when a call has to end, loses the spill and never the command. A failure costs the spill and nothing else.
//!
//! The file goes with its task, when it is given up, or when others need its room and its stream is over.

use std::{
    fs::File,
    io,
    os::{
        fd::OwnedFd,
        unix::{
            ffi::OsStrExt,
            fs::{FileExt, MetadataExt as _},
        },
    },
    path::{Path, PathBuf},
    sync::{Arc, Mutex, OnceLock},
    time::Duration,
};

use bytes::Bytes;
use executor_proto::types::Spill as SpillFact;
use tokio::{sync::watch, task, time};

use super::{KeptSpill, Progress, SpillFiles, StreamFiles, StreamOptions, record::identity, ring::Ring};
use crate::limits::{Disk, Grown, SpillRoom};

/// Bytes written by one visit to a thread that may block.
const BATCH_BYTES: u64 = 1024 * 1024;

/// Bytes copied at once; the size of the only buffer.
const COPY_BYTES: usize = 64 * 1024;

/// How long a result waits for the file to catch up. With the drain after an exit it stays within what a call may take.
const CATCH_UP: Duration = Duration::from_millis(900);

/// Where the file stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// The tail holds everything.
    Idle,
    /// The file has been asked for and holds so many bytes from the start of the stream.
    Writing(u64),
    /// It holds so many and will hold no more.
    Done(u64),
    /// There is none that could be shown.
    Lost,
}

/// The file, once it was made.
#[derive(Debug)]
struct Made {
    path: PathBuf,
    /// Device and inode, by which it is known again.
    identity: (u64, u64),
}

/// A stream's spill.
#[derive(Debug)]
pub(super) struct Spill {
    state: watch::Sender<State>,
    max_bytes: u64,
    spills: Arc<dyn SpillFiles>,
    room: Arc<SpillRoom>,
    made: OnceLock<Made>,
    /// Open while it is written and until the stream is compacted.
    file: Mutex<Option<Arc<File>>>,
}

impl Spill {
    pub(super) fn new(options: &StreamOptions) -> Self {
        let (state, made, file) = (watch::Sender::new(State::Idle), OnceLock::new(), Mutex::new(None));
        let (spills, room) = (Arc::clone(&options.spills), Arc::clone(&options.room));
        Self { state, max_bytes: options.max_spill_bytes, spills, room, made, file }
    }

    /// That of a stream that is closed, as a process before this one left it.
    pub(super) fn recalled(options: &StreamOptions, kept: Option<KeptSpill>) -> Self {
        let spill = Self::new(options);
        if let Some(KeptSpill { path, identity, held }) = kept {
            spill.room.there(held);
            spill.made.get_or_init(|| Made { path, identity });
            spill.state.send_replace(State::Done(held));
            spill.may_go();
        }
        spill
    }

    /// The file, if it is as it shall be.
    pub(super) fn finished(&self) -> Option<KeptSpill> {
        let State::Done(held) = *self.state.borrow() else { return None };
        let Made { path, identity } = self.made.get()?;
        Some(KeptSpill { path: path.clone(), identity: *identity, held })
    }

    /// Begins, if it has not begun: true exactly once, to whoever then has to call [`Spill::write`].
    pub(super) fn begin(&self) -> bool {
        let begun = self.state.send_if_modified(|state| {
            let idle = *state == State::Idle;
            if idle {
                *state = if self.max_bytes == 0 { State::Lost } else { State::Writing(0) };
            }
            idle
        });
        begun && self.max_bytes > 0
    }

    /// Whether nothing will be written any more to the spill of a stream that is closed at `total`.
    pub(super) fn settled(&self, total: u64, tail_bytes: u64) -> bool {
        match *self.state.borrow() {
            State::Idle => total <= tail_bytes,
            State::Writing(_) => false,
            State::Done(_) | State::Lost => true,
        }
    }

    /// Does without a file that is not finished, and removes what there is of it.
    pub(super) fn give_up(&self) {
        let given_up = self.state.send_if_modified(|state| {
            let unfinished = matches!(state, State::Idle | State::Writing(_));
            if unfinished {
                *state = State::Lost;
            }
            unfinished
        });
        if given_up {
            self.remove();
        }
    }

    /// Removes the file, if there is one, and gives its room back.
    pub(super) fn remove(&self) {
        if let Some(path) = self.path() {
            self.spills.remove(path.to_owned());
        }
        self.room.give_back();
    }

    /// Nothing is written to it any more: it goes when others need its room.
    pub(super) fn may_go(&self) {
        if let Some(path) = self.path() {
            self.room.over(path);
        }
    }

    /// What of the ring is still needed, for the pump.
    pub(super) fn demand(&self) -> Demand {
        Demand(self.state.subscribe())
    }

    /// Goes on with a file that another process has begun; to be continued by [`Spill::write`] from the offset that this
    /// returns, where it holds everything.
    ///
    /// # Errors
    /// When the file cannot be looked at.
    pub(super) fn take_over(&self, file: OwnedFd, path: PathBuf) -> io::Result<u64> {
        let file = self.keep(file, path)?;
        let written = file.metadata()?.len().min(self.max_bytes);
        self.room.there(written);
        self.state.send_replace(State::Writing(written));
        Ok(written)
    }

    /// Makes the file, unless there is one that holds the stream up to `from`, and writes the stream into it, up to the cap or
    /// the end.
    pub(super) async fn write(
        &self,
        ring: Arc<Ring>,
        mut progress: watch::Receiver<Progress>,
        files: &dyn StreamFiles,
        from: u64,
    ) {
        if let Err(error) = self.try_write(ring, &mut progress, files, from).await {
            tracing::warn!(%error, path = ?self.path(), "a spill is not kept");
            self.give_up();
        }
    }

    async fn try_write(
        &self,
        ring: Arc<Ring>,
        progress: &mut watch::Receiver<Progress>,
        files: &dyn StreamFiles,
        from: u64,
    ) -> io::Result<()> {
        let file = match self.file() {
            Some(file) => file,
            None => {
                let (file, path) = files.spill().await?;
                let file = self.keep(file, path)?;
                if let Some(Made { path, identity }) = self.made.get() {
                    ring.spill_made(path, *identity);
                }
                file
            }
        };
        let mut written = from;
        loop {
            let Progress { total, closed } = *progress.borrow_and_update();
            let goal = total.min(self.max_bytes);
            if written == goal && (closed || total > self.max_bytes) {
                self.step(State::Done(written));
                return Ok(());
            }
            if written == goal {
                if progress.changed().await.is_err() {
                    return Err(io::Error::other("the stream was abandoned"));
                }
                continue;
            }
            let wanted = goal.min(written + BATCH_BYTES) - written;
            let granted = self.grow(&file, wanted).await?;
            if granted > 0 {
                let (of_batch, file) = (Arc::clone(&ring), Arc::clone(&file));
                let batch = written..written + granted;
                let copied =
                    task::spawn_blocking(move || copy(&of_batch, &file, batch)).await.map_err(io::Error::other)?;
                if let Err(error) = copied {
                    return self.keep_head(written, granted, error);
                }
                written += granted;
                ring.spilled(written);
            }
            if granted < wanted {
                // A file without a byte shows nobody anything.
                if written == 0 {
                    self.give_up()
                } else {
                    let _ = self.step(State::Done(written));
                }
                return Ok(());
            }
            if !self.step(State::Writing(written)) {
                return Ok(());
            }
        }
    }

    /// What was to follow so many bytes cannot be had: the disk is full, or the ring holds it no longer, as where a process before
    /// this one had no room for more. The head stays, which is told.
    fn keep_head(&self, written: u64, granted: u64, error: io::Error) -> io::Result<()> {
        let file =
            self.file().filter(|_| written > 0).ok_or_else(|| io::Error::new(error.kind(), error.to_string()))?;
        // A part of what failed may have been written.
        file.set_len(written)?;
        self.room.shrink(granted);
        tracing::warn!(%error, path = ?self.path(), "a spill keeps its head");
        self.step(State::Done(written));
        Ok(())
    }

    /// Of so many bytes more, how many the budgets and the disk allow. Less than that is the end of the file, and is told.
    async fn grow(&self, file: &Arc<File>, wanted: u64) -> io::Result<u64> {
        let (tenant, owner) = self.room.account();
        let path = self.path();
        let Grown { granted, gone, over } = self.room.grow(wanted);
        for gone in gone {
            tracing::info!(tenant, owner, path = ?gone, "a spill of what has ended goes: its room is needed");
            self.spills.remove(gone);
        }
        if let Some(reason) = over {
            tracing::warn!(tenant, owner, ?path, %reason, "a spill keeps its head");
        }
        // The file system may be one that waits for a disk.
        let of_disk = Arc::clone(file);
        let disk = task::spawn_blocking(move || Disk::under(&*of_disk)).await.map_err(io::Error::other)??;
        let room = disk.room(granted);
        if room < granted {
            self.room.shrink(granted - room);
            tracing::warn!(tenant, owner, ?path, reason = "the disk is nearly full", "a spill keeps its head");
        }
        Ok(room)
    }

    fn keep(&self, file: OwnedFd, path: PathBuf) -> io::Result<Arc<File>> {
        let file = File::from(file);
        let identity = identity(&file.metadata()?);
        // The file is asked for once, so this is the first.
        self.made.get_or_init(|| Made { path, identity });
        let file = Arc::new(file);
        *self.file.lock().expect("nobody panics while holding the file") = Some(Arc::clone(&file));
        self.state.send_modify(|_state| {});
        Ok(file)
    }

    /// Waits until nothing more will be written to a file that was begun; while the stream is not `closed`, only until the file
    /// has been made, or never will be. Cancel-safe.
    pub(super) async fn decided(&self, closed: impl Fn() -> bool) {
        let mut state = self.state.subscribe();
        let made_and_open = || self.made.get().is_some() && !closed();
        // The sender lives as long as `self`.
        let _ = state.wait_for(|state| !matches!(state, State::Writing(_)) || made_and_open()).await;
    }

    /// Goes on to this state; false when it was given up meanwhile.
    fn step(&self, to: State) -> bool {
        self.state.send_if_modified(|state| {
            let writing = matches!(state, State::Writing(_));
            if writing {
                *state = to;
            }
            writing
        })
    }

    /// The file's path if one was ever made, whatever became of it.
    pub(super) fn path(&self) -> Option<&Path> {
        self.made.get().map(|made| made.path.as_path())
    }

    /// What can be said of the file to a reader for whom the stream ends at `total`: waits a bounded time until it holds that
    /// much, and looks whether it is still there. `None`: it is missing or has a hole. Cancel-safe.
    pub(super) async fn fact(&self, total: u64) -> Option<SpillFact> {
        let max_bytes = self.max_bytes;
        let mut state = self.state.subscribe();
        let enough = state.wait_for(|state| match *state {
            State::Idle => false,
            State::Writing(written) => written >= total.min(max_bytes),
            State::Done(_) | State::Lost => true,
        });
        let held = match *time::timeout(CATCH_UP, enough).await.ok()?.ok()? {
            State::Writing(held) | State::Done(held) => held,
            State::Idle | State::Lost => return None,
        };
        let made = self.made.get()?;
        let (path, known) = (made.path.clone(), made.identity);
        let file = self.open().await.ok()?;
        let there = task::spawn_blocking(move || is_there(&path, known, &file, held)).await;
        let cut_at = (total > held).then_some(held);
        there
            .is_ok_and(|there| there)
            .then(|| SpillFact { path: Bytes::copy_from_slice(made.path.as_os_str().as_bytes()), cut_at })
    }

    /// Up to `most` bytes from `offset` on, from the file; `None` when it does not hold that byte or cannot be read.
    pub(super) async fn read(&self, offset: u64, most: usize) -> Option<Bytes> {
        let held = match *self.state.borrow() {
            State::Writing(held) | State::Done(held) => held,
            State::Idle | State::Lost => 0,
        };
        let length = usize::try_from(held.saturating_sub(offset)).unwrap_or(usize::MAX).min(most);
        if length == 0 {
            return None;
        }
        let file = self.open().await.ok()?;
        let read = task::spawn_blocking(move || {
            let mut bytes = vec![0; length];
            file.read_exact_at(&mut bytes, offset)?;
            io::Result::Ok(Bytes::from(bytes))
        });
        read.await.ok()?.ok()
    }

    /// The file: open still, or opened again. Cancel-safe.
    async fn open(&self) -> io::Result<Arc<File>> {
        if let Some(file) = self.file() {
            return Ok(file);
        }
        let made = self.made.get().ok_or(io::ErrorKind::NotFound)?;
        let file = File::from(self.spills.reopen(made.path.clone()).await?);
        if identity(&file.metadata()?) != made.identity {
            return Err(io::Error::new(io::ErrorKind::NotFound, "another file has its path"));
        }
        Ok(Arc::new(file))
    }

    fn file(&self) -> Option<Arc<File>> {
        self.file.lock().expect("nobody panics while holding the file").clone()
    }

    /// Closes the file; later readers open it again.
    pub(super) fn close(&self) {
        self.file.lock().expect("nobody panics while holding the file").take();
    }
}

/// What the spill still needs of the ring.
#[derive(Debug)]
pub(super) struct Demand(watch::Receiver<State>);

impl Demand {
    /// The first byte of the stream that must not be overwritten yet; `None`: none is needed.
    pub(super) fn needed_from(&mut self) -> Option<u64> {
        match *self.0.borrow_and_update() {
            State::Idle => Some(0),
            State::Writing(written) => Some(written),
            State::Done(_) | State::Lost => None,
        }
    }

    /// Resolves when that may have changed since it was asked last. Cancel-safe.
    pub(super) async fn changed(&mut self) {
        // The sender lives in the stream, and so does whoever waits here.
        let _ = self.0.changed().await;
    }
}

fn copy(ring: &Ring, file: &File, range: std::ops::Range<u64>) -> io::Result<()> {
    let mut buffer = vec![0; COPY_BYTES.min(usize::try_from(range.end - range.start).unwrap_or(COPY_BYTES))];
    let mut at = range.start;
    while at < range.end {
        let length = buffer.len().min(usize::try_from(range.end - at).unwrap_or(usize::MAX));
        let part = &mut buffer[..length];
        if !ring.read_into(at, part)? {
            return Err(io::Error::other("it was given up while it was written"));
        }
        file.write_all_at(part, at)?;
        at += length as u64;
    }
    Ok(())
}

/// Whether the path still leads to the file that was written, with all of it.
fn is_there(path: &Path, known: (u64, u64), file: &File, held: u64) -> bool {
    let metadata = match path.symlink_metadata() {
        // Its directory is closed to this process: the open file says whether it is linked at all.
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => match file.metadata() {
            Ok(metadata) => metadata,
            Err(_) => return false,
        },
        Err(_) => return false,
        Ok(metadata) => metadata,
    };
    metadata.nlink() > 0 && identity(&metadata) == known && metadata.len() >= held
}
