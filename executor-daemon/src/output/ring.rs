//! The ring in a stream file: one writer (`splice`, under [`Ring::advance`]), any number of readers.
//!
//! Byte `p` of the stream lies at `p % capacity`. The position is in the shared header page and stored by the kernel itself,
//! so that a successor of this process finds it where the bytes end. Wrapping takes several stores; the flag `pending` goes
//! first, and whoever maps the file redoes a wrap that was cut short ([`recovered`]).
//!
//! The position's page is always memory that the keeper holds, too: no disk can be in the way of the kernel's store, and no
//! stranger can take the page from under the mapping. The ring itself may lie in a file under the state directory, which
//! outlives the keeper; its first page then says how far it goes ([`Record`]). Where that file fails (a full disk), the ring
//! moves into memory ([`Ring::in_memory`], [`Ring::move_to`]).
//!
//! Readers copy without a lock and then look whether what they copied may have been overwritten meanwhile: the writer
//! publishes `oldest` before it overwrites. An exact tail is read under the gate instead, so that no flood can outrun it.

use std::{
    fs::File,
    io,
    ops::Range,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::fs::FileExt,
    },
    path::Path,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, RwLock,
        atomic::{AtomicBool, AtomicU64, Ordering, fence},
    },
};

use bytes::{Bytes, BytesMut};

use super::record::Record;
use crate::keeper::page::{PAGE_BYTES, SharedPage, create_stream_file};

/// Where the writer stands: `base` bytes of the stream lie before the ring's first byte, `filled` bytes are in this lap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Position {
    base: u64,
    filled: u64,
}

impl Position {
    fn total(self) -> u64 {
        self.base + self.filled
    }
}

/// The position that a header page describes, also when a wrap was cut short at any of its stores.
fn recovered(base: u64, filled: u64, pending: u64) -> Position {
    if pending == 0 { Position { base, filled } } else { Position { base: pending, filled: 0 } }
}

/// Bytes that may be written at once: up to the ring's end, and over nothing from `keep_from` on.
fn room(position: Position, capacity: u64, keep_from: u64) -> u64 {
    let kept = position.total() - keep_from;
    capacity.saturating_sub(kept).min(capacity - position.filled)
}

/// The two parts of the ring (position, length) that hold these bytes of the stream, in order; the second may be empty.
fn parts(range: &Range<u64>, capacity: u64) -> [Range<u64>; 2] {
    let first = range.start % capacity;
    let length = range.end - range.start;
    let before_end = length.min(capacity - first);
    [first..first + before_end, 0..length - before_end]
}

/// The descriptors of a stream file.
#[derive(Debug)]
pub(crate) struct StreamFile {
    /// Memory: the position, and the ring behind it where `ring` is `None`.
    pub(crate) page: OwnedFd,
    /// The file with the ring.
    pub(crate) ring: Option<OwnedFd>,
}

impl StreamFile {
    /// All in memory.
    ///
    /// # Errors
    /// What the kernel answers.
    pub(super) fn in_memory(capacity: u64) -> io::Result<Self> {
        Ok(Self { page: create_stream_file(capacity)?, ring: None })
    }

    /// With its ring in this file.
    ///
    /// # Errors
    /// What the kernel answers.
    pub(super) fn with_ring(file: File) -> io::Result<Self> {
        Ok(Self { page: create_stream_file(0)?, ring: Some(file.into()) })
    }

    /// For whoever is to hold it.
    pub(super) fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        std::iter::once(&self.page).chain(&self.ring).map(AsFd::as_fd).collect()
    }
}

/// A ring, mapped and open.
#[derive(Debug)]
pub(super) struct Ring {
    /// Replaced by [`Ring::move_to`] only.
    file: RwLock<Arc<File>>,
    /// Of a file that outlives the keeper.
    record: Mutex<Option<Record>>,
    /// The record could not be written.
    unwritable: AtomicBool,
    capacity: u64,
    /// Every byte of the stream from here to `total` is in the ring and is not being overwritten.
    oldest: AtomicU64,
    total: AtomicU64,
    /// Held while bytes are moved, and by those who want the end of the stream exactly.
    gate: Mutex<SharedPage>,
}

/// What one attempt to move bytes did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Moved {
    /// So many bytes, at least 1.
    Bytes(u64),
    /// The pipe was empty.
    Nothing,
    /// There was no room: everything in the ring is still needed.
    NoRoom,
    /// No writer is left and the pipe is empty.
    End,
}

impl Ring {
    /// Maps a stream file whose ring has this many bytes, and finishes a wrap that was cut short.
    ///
    /// # Errors
    /// When the file is not a sealed stream file of that size with a position inside it.
    pub(super) fn open(file: StreamFile, capacity: u64) -> io::Result<Self> {
        let StreamFile { page: memory, ring } = file;
        let page = SharedPage::map(memory.as_fd())?;
        let invalid = |what| io::Error::new(io::ErrorKind::InvalidData, what);
        // What somebody else has made of a file on a disk costs its bytes, and not the command.
        let on_disk = ring.is_some();
        let file = File::from(ring.unwrap_or(memory));
        if capacity == 0 || (!on_disk && file.metadata()?.len() != PAGE_BYTES + capacity) {
            return Err(invalid("the stream file has another size"));
        }
        let record = if on_disk { Record::open(&file, capacity) } else { None };
        let filled = u64::try_from(page.offset()).ok().and_then(|offset| offset.checked_sub(PAGE_BYTES));
        let filled =
            filled.filter(|filled| *filled <= capacity).ok_or_else(|| invalid("the position is outside the ring"))?;
        let position = recovered(page.base(), filled, page.pending());
        if page.pending() != 0 {
            finish_wrap(&page, position.base);
        }
        Ok(Self {
            file: RwLock::new(Arc::new(file)),
            record: Mutex::new(record),
            unwritable: AtomicBool::new(false),
            capacity,
            oldest: AtomicU64::new(position.total().saturating_sub(capacity)),
            total: AtomicU64::new(position.total()),
            gate: Mutex::new(page),
        })
    }

    fn file(&self) -> Arc<File> {
        Arc::clone(&self.file.read().unwrap_or_else(PoisonError::into_inner))
    }

    fn gate(&self) -> MutexGuard<'_, SharedPage> {
        self.gate.lock().expect("nobody panics while holding the gate")
    }

    /// Writes into the file's record, where there is one. What cannot be written is no use to anybody later: the next step
    /// fails then.
    fn note(&self, write: impl FnOnce(&Record, &File) -> io::Result<()>) {
        let record = self.record.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(record) = &*record
            && let Err(error) = write(record, &self.file())
        {
            tracing::debug!(%error, "a ring file's record cannot be written");
            self.unwritable.store(true, Ordering::SeqCst);
        }
    }

    /// Whether the ring lies in a file that outlives the keeper.
    pub(super) fn outlives_keeper(&self) -> bool {
        self.record.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }

    /// A copy in memory of what a ring file holds, to be held by the keeper and then moved to. Nothing is to be moved between.
    ///
    /// # Errors
    /// When there is no memory, or the file cannot be read.
    pub(super) fn in_memory(&self) -> io::Result<StreamFile> {
        let page = self.gate();
        let position = position(&page, self.capacity);
        let copy = StreamFile::in_memory(self.capacity)?;
        let of_copy = SharedPage::map(copy.page.as_fd())?;
        of_copy.set_base(position.base);
        of_copy.set_offset(page.offset());
        let range = self.oldest()..self.total();
        let mut bytes = vec![0; usize::try_from(range.end - range.start).expect("a part of a ring")];
        read_at(&self.file(), self.capacity, &range, &mut bytes)?;
        let file = File::from(copy.page.try_clone()?);
        let [first, second] = parts(&range, self.capacity);
        let (a, b) = bytes.split_at(usize::try_from(first.end - first.start).expect("a part of a ring"));
        file.write_all_at(a, PAGE_BYTES + first.start)?;
        file.write_all_at(b, PAGE_BYTES + second.start)?;
        Ok(copy)
    }

    /// Goes on in the copy that [`Ring::in_memory`] made. The file is left as one whose end is elsewhere.
    ///
    /// # Errors
    /// When it cannot be mapped.
    pub(super) fn move_to(&self, copy: StreamFile) -> io::Result<()> {
        let mut page = self.gate();
        *page = SharedPage::map(copy.page.as_fd())?;
        self.note(Record::goes_on_elsewhere);
        self.unwritable.store(false, Ordering::SeqCst);
        *self.record.lock().unwrap_or_else(PoisonError::into_inner) = None;
        *self.file.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(File::from(copy.page));
        Ok(())
    }

    /// Proves the stream's last bytes, at most so many, to whoever finds the file after another boot.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub(super) fn prove(&self, most: u64) -> io::Result<()> {
        let (start, bytes) = self.end(0, most)?;
        self.note(|record, file| record.prove(file, start + bytes.len() as u64, &bytes));
        Ok(())
    }

    /// The stream has a spill file.
    pub(super) fn spill_made(&self, path: &Path, identity: (u64, u64)) {
        self.note(|record, file| record.spill_made(file, path, identity));
    }

    /// The spill holds so many bytes.
    pub(super) fn spilled(&self, bytes: u64) {
        self.note(|record, file| record.spilled(file, bytes));
    }

    /// Bytes that the stream has had so far.
    pub(super) fn total(&self) -> u64 {
        self.total.load(Ordering::Acquire)
    }

    /// The first byte of the stream that can still be read.
    pub(super) fn oldest(&self) -> u64 {
        self.oldest.load(Ordering::Acquire)
    }

    /// Moves up to `max` bytes (at least 1) from the pipe, over nothing from `keep_from` on. Never waits.
    ///
    /// # Errors
    /// What `splice` answers, other than that the pipe is empty.
    pub(super) fn advance(&self, pipe: BorrowedFd<'_>, keep_from: u64, max: u64) -> io::Result<Moved> {
        let page = self.gate();
        if self.unwritable.load(Ordering::SeqCst) {
            return Err(io::Error::other("the record of the ring file cannot be written"));
        }
        let file = self.file();
        let mut position = position(&page, self.capacity);
        if position.filled == self.capacity {
            position = Position { base: position.total(), filled: 0 };
            page.set_pending(position.base);
            finish_wrap(&page, position.base);
        }
        let length = room(position, self.capacity, keep_from).min(max);
        if length == 0 {
            return Ok(Moved::NoRoom);
        }
        let total = position.total();
        self.oldest.store((total + length).saturating_sub(self.capacity), Ordering::SeqCst);
        fence(Ordering::SeqCst);
        let result = loop {
            let length = usize::try_from(length).expect("a ring is in memory");
            match page.splice_into(pipe, file.as_fd(), length) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                result => break result,
            }
        };
        // What the kernel stored, also when it reported an error after some bytes.
        let now = self::position(&page, self.capacity).total();
        // Before anybody is shown them.
        if now > total {
            self.note(|record, file| record.moved(file, now));
        }
        self.oldest.store(now.saturating_sub(self.capacity), Ordering::SeqCst);
        self.total.store(now, Ordering::Release);
        match result {
            _ if now > total => Ok(Moved::Bytes(now - total)),
            Ok(_) => Ok(Moved::End),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(Moved::Nothing),
            Err(error) => Err(error),
        }
    }

    /// These bytes, or `None` when they are not all in the ring any more.
    ///
    /// # Errors
    /// When the memory cannot be read.
    pub(super) fn read(&self, range: Range<u64>) -> io::Result<Option<Bytes>> {
        let mut copy = BytesMut::zeroed(usize::try_from(range.end - range.start).expect("a part of a ring"));
        Ok(self.read_into(range.start, &mut copy)?.then(|| copy.freeze()))
    }

    /// Fills `copy` with the bytes from `start` on; false when they are not all in the ring any more.
    ///
    /// # Errors
    /// When the memory cannot be read.
    pub(super) fn read_into(&self, start: u64, copy: &mut [u8]) -> io::Result<bool> {
        let range = start..start + copy.len() as u64;
        if range.start < self.oldest() || range.end > self.total() {
            return Ok(false);
        }
        self.copy(&range, copy)?;
        fence(Ordering::SeqCst);
        Ok(self.oldest.load(Ordering::SeqCst) <= range.start)
    }

    /// The bytes from `from` to the end, but at most the last `most`, and the offset of the first. Nothing is moved meanwhile.
    ///
    /// # Errors
    /// When the memory cannot be read.
    pub(super) fn end(&self, from: u64, most: u64) -> io::Result<(u64, Bytes)> {
        let _gate = self.gate();
        let total = self.total();
        let start = from.min(total).max(total.saturating_sub(most)).max(self.oldest());
        let mut copy = BytesMut::zeroed(usize::try_from(total - start).expect("a part of a ring"));
        self.copy(&(start..total), &mut copy)?;
        Ok((start, copy.freeze()))
    }

    fn copy(&self, range: &Range<u64>, to: &mut [u8]) -> io::Result<()> {
        read_at(&self.file(), self.capacity, range, to)
    }
}

fn position(page: &SharedPage, capacity: u64) -> Position {
    let filled = u64::try_from(page.offset()).map_or(0, |offset| offset.saturating_sub(PAGE_BYTES));
    Position { base: page.base(), filled: filled.min(capacity) }
}

/// The stores of a wrap after its flag; each may be repeated.
fn finish_wrap(page: &SharedPage, base: u64) {
    page.set_base(base);
    page.set_offset(i64::try_from(PAGE_BYTES).expect("a page is small"));
    page.set_pending(0);
}

/// Reads these bytes of the stream from a file with a ring of `capacity`: no more of them than that.
pub(super) fn read_at(file: &File, capacity: u64, range: &Range<u64>, to: &mut [u8]) -> io::Result<()> {
    let [first, second] = parts(range, capacity);
    let (a, b) = to.split_at_mut(usize::try_from(first.end - first.start).expect("a part of a ring"));
    file.read_exact_at(a, PAGE_BYTES + first.start)?;
    file.read_exact_at(b, PAGE_BYTES + second.start)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use proptest::prelude::*;

    use super::*;

    const CAPACITY: u64 = 4096;

    fn memory(page: OwnedFd) -> StreamFile {
        StreamFile { page, ring: None }
    }

    fn ring() -> (Ring, OwnedFd) {
        let file = create_stream_file(CAPACITY).unwrap();
        let second = file.try_clone().unwrap();
        (Ring::open(memory(file), CAPACITY).unwrap(), second)
    }

    /// The byte at this offset of the test's stream.
    fn byte(offset: u64) -> u8 {
        u8::try_from(offset % 251).unwrap()
    }

    fn bytes(range: Range<u64>) -> Vec<u8> {
        range.map(byte).collect()
    }

    #[test]
    fn a_wrap_cut_short_anywhere_is_redone() {
        let (end, start) = (Position { base: 8192, filled: CAPACITY }, Position { base: 8192 + CAPACITY, filled: 0 });
        let flag = start.base;
        // Before the flag, after it, after the base, after the offset, after the flag was taken away.
        assert_eq!(recovered(end.base, end.filled, 0), end);
        assert_eq!(recovered(end.base, end.filled, flag), start);
        assert_eq!(recovered(start.base, end.filled, flag), start);
        assert_eq!(recovered(start.base, 0, flag), start);
        assert_eq!(recovered(start.base, 0, 0), start);
    }

    #[test]
    fn a_successor_goes_on_where_the_kernel_left_off() {
        let (ring, file) = ring();
        let (read, write) = std::io::pipe().unwrap();
        (&write).write_all(&bytes(0..CAPACITY)).unwrap();
        assert_eq!(ring.advance(read.as_fd(), 0, u64::MAX).unwrap(), Moved::Bytes(CAPACITY));
        // The first of the stores of a wrap.
        ring.gate().set_pending(CAPACITY);
        drop(ring);

        let ring = Ring::open(memory(file), CAPACITY).unwrap();
        assert_eq!((ring.total(), ring.oldest()), (CAPACITY, 0));
        (&write).write_all(&bytes(CAPACITY..CAPACITY + 10)).unwrap();
        assert_eq!(ring.advance(read.as_fd(), CAPACITY - 5, u64::MAX).unwrap(), Moved::Bytes(10));
        assert_eq!(ring.end(CAPACITY - 5, u64::MAX).unwrap().1, bytes(CAPACITY - 5..CAPACITY + 10));
    }

    #[test]
    fn nothing_that_is_needed_is_overwritten() {
        let (ring, _file) = ring();
        let (read, write) = std::io::pipe().unwrap();
        (&write).write_all(&bytes(0..CAPACITY + 100)).unwrap();
        assert_eq!(ring.advance(read.as_fd(), 0, u64::MAX).unwrap(), Moved::Bytes(CAPACITY));
        assert_eq!(ring.advance(read.as_fd(), 0, u64::MAX).unwrap(), Moved::NoRoom);
        assert_eq!(ring.read(0..CAPACITY).unwrap().unwrap(), bytes(0..CAPACITY));
        assert_eq!(ring.advance(read.as_fd(), 40, u64::MAX).unwrap(), Moved::Bytes(40));
        assert_eq!(ring.read(39..CAPACITY).unwrap(), None);
        assert_eq!(ring.read(40..CAPACITY + 40).unwrap().unwrap(), bytes(40..CAPACITY + 40));
        assert_eq!(ring.read(40..CAPACITY + 41).unwrap(), None);
        assert_eq!(ring.advance(read.as_fd(), CAPACITY, u64::MAX).unwrap(), Moved::Bytes(60));
        assert_eq!(ring.advance(read.as_fd(), CAPACITY, u64::MAX).unwrap(), Moved::Nothing);
        drop(write);
        assert_eq!(ring.advance(read.as_fd(), CAPACITY, u64::MAX).unwrap(), Moved::End);
    }

    #[test]
    fn another_size_or_position_is_refused() {
        let file = create_stream_file(CAPACITY).unwrap();
        let refused = Ring::open(memory(file.try_clone().unwrap()), CAPACITY * 2).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::InvalidData);
        SharedPage::map(file.as_fd()).unwrap().set_offset(7);
        assert_eq!(Ring::open(memory(file), CAPACITY).unwrap_err().kind(), io::ErrorKind::InvalidData);
    }

    proptest! {
        #[test]
        fn room_never_reaches_what_is_kept(base_laps in 0u64..9, filled in 0u64..=64, kept in 0u64..=64) {
            let position = Position { base: base_laps * 64, filled };
            let keep_from = position.total().saturating_sub(kept);
            let room = room(position, 64, keep_from);
            prop_assert!(position.filled + room <= 64);
            prop_assert!((position.total() + room).saturating_sub(64) <= keep_from);
            // And is not smaller than it must be.
            prop_assert!(position.filled + room == 64 || position.total() + room - 64 == keep_from);
        }

        #[test]
        fn parts_hold_every_byte_once(start in 0u64..1000, length in 0u64..=64) {
            let places: Vec<u64> = parts(&(start..start + length), 64).into_iter().flatten().collect();
            let expected: Vec<u64> = (start..start + length).map(|offset| offset % 64).collect();
            prop_assert_eq!(places, expected);
        }

        #[test]
        fn any_chunking_leaves_the_exact_end(chunks in prop::collection::vec(1u64..3000, 1..12)) {
            let (ring, _file) = ring();
            let (read, write) = std::io::pipe().unwrap();
            let mut total = 0;
            for chunk in chunks {
                (&write).write_all(&bytes(total..total + chunk)).unwrap();
                let end = total + chunk;
                while total < end {
                    let Moved::Bytes(moved) = ring.advance(read.as_fd(), total.saturating_sub(1000), 1700).unwrap() else {
                        panic!("the bytes are in the pipe");
                    };
                    total += moved;
                    let (start, tail) = ring.end(0, 1000).unwrap();
                    prop_assert_eq!(start, total.saturating_sub(1000));
                    prop_assert_eq!(&tail, &bytes(start..total));
                }
            }
        }
    }
}
