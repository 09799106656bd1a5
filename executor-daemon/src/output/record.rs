//! What a ring file under the state directory says of itself, for whoever comes when nobody has its pages in memory any more.
//!
//! The first page of the file, in front of the ring; numbers are big-endian, and every part ends in a CRC-32 of itself:
//! ```text
//!      0  magic and version (8) │ bytes of the ring (8) │ CRC
//!     64  slot ┐ written in turn: number (8) │ total (8) │ spilled (8) │ proof: end (8), bytes (8), CRC of them (4) │
//!    128  slot ┘                  goes on elsewhere (1) │ CRC
//!    512  spill: device (8) │ inode (8) │ length of its path (2) │ path │ CRC
//! ```
//! Under the same boot the file is as it was written, whoever was killed: the newest slot's `total` is where the stream ended,
//! and no reader was ever shown more. After another boot a page may be newer or older than the next, so no position counts by
//! itself: what is there is what a *proof* (a checksum over the stream's last bytes, renewed while it goes on) proves, and
//! whatever a slot, the spill or the reader's own position shows to have been there beyond that is missing. Where something is
//! missing and nobody knows how much, it counts as one byte, so that it is marked.

use std::{
    fs::{File, Metadata},
    io,
    ops::Range,
    os::unix::{
        ffi::OsStrExt,
        fs::{FileExt, MetadataExt},
    },
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, PoisonError},
};

use bytes::Bytes;

use super::{KeptSpill, KeptStream, pump::STEP_BYTES, ring, tail};
use crate::keeper::page::PAGE_BYTES;

/// Begins every file; its last byte counts the versions.
const MAGIC: [u8; 8] = *b"exering\x01";

const HEAD_BYTES: usize = 20;

/// Where the slots lie: each within one sector of any disk.
const SLOTS: [usize; 2] = [64, 128];
const SLOT_BYTES: usize = 49;

const SPILL_AT: usize = 512;
/// Bytes of its part without the path.
const SPILL_BYTES: usize = 22;

/// [`PAGE_BYTES`] as a length of memory.
const PAGE: usize = 4096;

/// Most bytes that are kept of a ring for a spill's sake, beyond the tail: no finished task's output is much larger.
const MAX_KEPT_BYTES: u64 = 1024 * 1024;

/// No ring is larger: twice the largest tail there can be, and what is added to it.
const MAX_RING_BYTES: u64 = 64 * 1024 * 1024;

/// The last bytes of the stream up to `end`, as they were.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Proof {
    end: u64,
    bytes: u64,
    checksum: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Slot {
    number: u64,
    /// Bytes of the stream that went into the file.
    total: u64,
    /// Bytes of it that the spill holds.
    spilled: u64,
    proof: Proof,
    /// More came, and went into memory.
    elsewhere: bool,
}

/// A part of the page, read front to back.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn bytes<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (first, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*first)
    }

    fn number(&mut self) -> Option<u64> {
        self.bytes().map(u64::from_be_bytes)
    }
}

/// Adds the checksum of a part at its end.
fn sealed(mut part: Vec<u8>) -> Vec<u8> {
    part.extend(crc32fast::hash(&part).to_be_bytes());
    part
}

/// What is in a part of this size at this place, if it is whole.
fn opened(page: &[u8], at: usize, bytes: usize) -> Option<Fields<'_>> {
    let (part, sum) = page.get(at..at.checked_add(bytes)?)?.split_last_chunk::<4>()?;
    (crc32fast::hash(part) == u32::from_be_bytes(*sum)).then_some(Fields(part))
}

fn encode_head(capacity: u64) -> Vec<u8> {
    sealed([&MAGIC[..], &capacity.to_be_bytes()].concat())
}

/// The bytes of the ring.
fn decode_head(page: &[u8]) -> Option<u64> {
    let mut head = opened(page, 0, HEAD_BYTES)?;
    let magic = head.bytes()? == MAGIC;
    head.number().filter(|capacity| magic && (1..=MAX_RING_BYTES).contains(capacity))
}

fn encode_slot(slot: &Slot) -> Vec<u8> {
    let Slot { number, total, spilled, proof, elsewhere } = *slot;
    let mut part: Vec<u8> =
        [number, total, spilled, proof.end, proof.bytes].iter().flat_map(|n| n.to_be_bytes()).collect();
    part.extend(proof.checksum.to_be_bytes());
    part.push(u8::from(elsewhere));
    sealed(part)
}

fn decode_slot(page: &[u8], at: usize, capacity: u64) -> Option<Slot> {
    let mut part = opened(page, at, SLOT_BYTES)?;
    let (number, total, spilled) = (part.number()?, part.number()?, part.number()?);
    let (end, bytes) = (part.number()?, part.number()?);
    let proof = Proof { end, bytes, checksum: part.bytes().map(u32::from_be_bytes)? };
    let [elsewhere] = part.bytes()?;
    let whole = end <= total && spilled <= total && bytes <= end.min(capacity) && total < u64::MAX / 2;
    whole.then_some(Slot { number, total, spilled, proof, elsewhere: elsewhere != 0 })
}

/// The newest first.
fn decode_slots(page: &[u8], capacity: u64) -> Vec<Slot> {
    let mut slots: Vec<_> = SLOTS.iter().filter_map(|at| decode_slot(page, *at, capacity)).collect();
    slots.sort_unstable_by_key(|slot| std::cmp::Reverse(slot.number));
    slots
}

/// `None`: the path is too long for the page.
fn encode_spill(path: &Path, (device, inode): (u64, u64)) -> Option<Vec<u8>> {
    let path = path.as_os_str().as_bytes();
    let length =
        u16::try_from(path.len()).ok().filter(|length| SPILL_AT + SPILL_BYTES + usize::from(*length) <= PAGE)?;
    Some(sealed([&device.to_be_bytes()[..], &inode.to_be_bytes(), &length.to_be_bytes(), path].concat()))
}

fn decode_spill(page: &[u8]) -> Option<(PathBuf, (u64, u64))> {
    let length = page.get(SPILL_AT + 16..SPILL_AT + 18)?.try_into().ok().map(u16::from_be_bytes)?;
    let mut part = opened(page, SPILL_AT, SPILL_BYTES + usize::from(length))?;
    let identity = (part.number()?, part.number()?);
    let _length: [u8; 2] = part.bytes()?;
    (!part.0.is_empty()).then(|| (PathBuf::from(std::ffi::OsStr::from_bytes(part.0)), identity))
}

/// Makes an empty file a ring file: as long as it will ever be, without taking room on the disk for what is not written.
///
/// # Errors
/// What the file system answers; `InvalidInput` when the ring is larger than any.
pub(crate) fn prepare(file: &File, capacity: u64) -> io::Result<()> {
    if !(1..=MAX_RING_BYTES).contains(&capacity) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    file.set_len(PAGE_BYTES + capacity)?;
    file.write_all_at(&encode_slot(&Slot::default()), SLOTS[0] as u64)?;
    file.write_all_at(&encode_head(capacity), 0)
}

/// What is written of a ring while it goes on.
#[derive(Debug)]
pub(super) struct Record {
    slot: Mutex<Slot>,
}

impl Record {
    /// Goes on with what a file says; `None`: it is no ring file, or none of this size.
    pub(super) fn open(file: &File, capacity: u64) -> Option<Self> {
        let page = read_page(file);
        (decode_head(&page)? == capacity).then(|| {
            let slot = decode_slots(&page, capacity).first().copied().unwrap_or_default();
            Self { slot: Mutex::new(slot) }
        })
    }

    fn slot(&self) -> MutexGuard<'_, Slot> {
        self.slot.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self, file: &File, change: impl FnOnce(&mut Slot)) -> io::Result<()> {
        let mut slot = self.slot();
        change(&mut slot);
        slot.number += 1;
        let at = if slot.number.is_multiple_of(2) { SLOTS[0] } else { SLOTS[1] };
        file.write_all_at(&encode_slot(&slot), at as u64)
    }

    /// The stream's bytes up to `total` are in the ring. Written before anybody is shown them.
    pub(super) fn moved(&self, file: &File, total: u64) -> io::Result<()> {
        self.write(file, |slot| slot.total = total)
    }

    /// These are the stream's last bytes up to `end`.
    pub(super) fn prove(&self, file: &File, end: u64, bytes: &[u8]) -> io::Result<()> {
        let proof = Proof { end, bytes: bytes.len() as u64, checksum: crc32fast::hash(bytes) };
        self.write(file, |slot| slot.proof = proof)
    }

    /// Where the spill is, so that it is known again.
    pub(super) fn spill_made(&self, file: &File, path: &Path, identity: (u64, u64)) -> io::Result<()> {
        encode_spill(path, identity).map_or(Ok(()), |part| file.write_all_at(&part, SPILL_AT as u64))
    }

    /// The spill holds the stream up to here.
    pub(super) fn spilled(&self, file: &File, bytes: u64) -> io::Result<()> {
        self.write(file, |slot| slot.spilled = bytes.min(slot.total))
    }

    /// What comes from now on goes elsewhere.
    pub(super) fn goes_on_elsewhere(&self, file: &File) -> io::Result<()> {
        self.write(file, |slot| slot.elsewhere = true)
    }
}

/// The first page; zeroes where the file is shorter or cannot be read.
fn read_page(file: &File) -> [u8; PAGE] {
    let (mut page, mut filled) = ([0; PAGE], 0);
    while filled < PAGE {
        match file.read_at(&mut page[filled..], filled as u64) {
            Ok(bytes @ 1..) => filled += bytes,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Ok(0) | Err(_) => break,
        }
    }
    page
}

/// These bytes of the stream, as the ring in a file has them; `None`: the file does not reach so far.
fn read_ring(file: &File, capacity: u64, range: &Range<u64>) -> Option<Bytes> {
    let mut bytes = vec![0; usize::try_from(range.end - range.start).ok()?];
    ring::read_at(file, capacity, range, &mut bytes).ok()?;
    Some(Bytes::from(bytes))
}

/// What a ring file that nobody writes any more keeps of its stream. `same_boot`: the kernel is the one under which it was
/// written. `read_to`: how far the stream was shown to its reader. `tail_bytes`: as the stream is to have them.
///
/// There was output, or there would be no file: what cannot be read is missing, never nothing.
pub(crate) fn recover(file: &File, same_boot: bool, read_to: u64, tail_bytes: u64) -> KeptStream {
    let page = read_page(file);
    let read = decode_head(&page).map(|capacity| (capacity, decode_slots(&page, capacity)));
    let Some((capacity, newest, slots)) = read.as_ref().and_then(|(c, slots)| Some((*c, slots.first()?, slots))) else {
        return KeptStream::lost(read_to);
    };
    let spill = decode_spill(&page).and_then(|(path, identity)| {
        let length = spill_length(&path, identity, newest.spilled)?;
        // Written a moment before it is recorded; and what reaches the disk first is not known.
        let held = length.min(if same_boot { newest.total } else { newest.spilled });
        Some(KeptSpill { path, identity, held })
    });
    let mut kept = match same_boot {
        true => as_written(file, capacity, newest, spill.as_ref().map(|spill| spill.held), tail_bytes),
        false => as_proven(file, capacity, slots),
    };
    kept.spill = spill;
    with_missing_end(kept, newest.total, newest.elsewhere || newest.total == 0, read_to)
}

/// What nothing had been moved over when the file was left: the tail, and what the spill did not have yet.
fn as_written(file: &File, capacity: u64, slot: &Slot, spilled: Option<u64>, tail_bytes: u64) -> KeptStream {
    let total = slot.total;
    // A ring is at least twice the tail that it was made for.
    let tail = total.saturating_sub(tail::kept_bytes(tail_bytes).min(capacity / 2));
    // A last step may have begun to move over what lies before this.
    let sound_from = (total + STEP_BYTES).saturating_sub(capacity).max(total.saturating_sub(MAX_KEPT_BYTES));
    let start = spilled.map_or(tail, |held| held.min(tail)).max(sound_from.min(tail));
    // Somebody else may have been at the file.
    let proof = slot.proof;
    let checkable = proof.end - proof.bytes + capacity >= total + STEP_BYTES;
    let sound = !checkable || proven(file, capacity, proof).is_some();
    let bytes = read_ring(file, capacity, &(start..total)).filter(|_| sound);
    match bytes {
        Some(bytes) => KeptStream { start, bytes, ..KeptStream::default() },
        None => KeptStream { start: total, ..KeptStream::default() },
    }
}

/// What the latest proof proves that holds.
fn as_proven(file: &File, capacity: u64, slots: &[Slot]) -> KeptStream {
    let mut proofs: Vec<_> = slots.iter().map(|slot| slot.proof).filter(|proof| proof.bytes > 0).collect();
    proofs.sort_unstable_by_key(|proof| std::cmp::Reverse(proof.end));
    proofs.into_iter().find_map(|proof| proven(file, capacity, proof)).unwrap_or_default()
}

/// What a proof proves, if it holds.
fn proven(file: &File, capacity: u64, proof: Proof) -> Option<KeptStream> {
    let start = proof.end - proof.bytes;
    let bytes = read_ring(file, capacity, &(start..proof.end))?;
    (crc32fast::hash(&bytes) == proof.checksum).then(|| KeptStream { start, bytes, ..KeptStream::default() })
}

/// Marks what is missing after what is kept: up to `known`, and a byte more where that does not show it (`more`, or the reader
/// has had more than is kept).
fn with_missing_end(mut kept: KeptStream, known: u64, more: bool, read_to: u64) -> KeptStream {
    let kept_to = kept.start + kept.bytes.len() as u64;
    let mut end = known.max(kept_to).max(read_to);
    if (more || end > kept_to) && end <= kept_to.max(read_to) {
        end = end.saturating_add(1);
    }
    kept.missing = end - kept_to;
    kept
}

/// Bytes of a spill; `None`: it is not there any more.
fn spill_length(path: &Path, known: (u64, u64), recorded: u64) -> Option<u64> {
    match path.symlink_metadata() {
        Ok(metadata) => (identity(&metadata) == known).then_some(metadata.len()),
        // Its directory is closed to this process.
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Some(recorded),
        Err(_) => None,
    }
}

/// By which a file is known again.
pub(super) fn identity(metadata: &Metadata) -> (u64, u64) {
    (metadata.dev(), metadata.ino())
}

#[cfg(test)]
mod tests;
