//! What is read out of ring files that were left: whole, torn, shortened, of another boot, or of nobody.

use std::{fs, io::Write, os::fd::AsFd};

use proptest::prelude::*;
use tempfile::TempDir;

use super::{
    super::ring::{Moved, Ring, StreamFile},
    *,
};

const CAPACITY: u64 = 512 * 1024;
const TAIL: u64 = 1000;

/// The byte at this offset of the test's stream.
fn byte(offset: u64) -> u8 {
    u8::try_from(offset % 251).unwrap()
}

fn bytes(range: Range<u64>) -> Vec<u8> {
    range.map(byte).collect()
}

/// A stream whose ring is a file.
struct Written {
    dir: TempDir,
    ring: Ring,
}

impl Written {
    fn new() -> Self {
        let dir = TempDir::new().unwrap();
        let file = File::options().read(true).write(true).create_new(true).open(dir.path().join("ring")).unwrap();
        prepare(&file, CAPACITY).unwrap();
        let ring = Ring::open(StreamFile::with_ring(file).unwrap(), CAPACITY).unwrap();
        Self { dir, ring }
    }

    /// With the stream up to here, as a pump moves it.
    fn up_to(total: u64) -> Self {
        let written = Self::new();
        written.write(total);
        written
    }

    fn write(&self, total: u64) {
        while self.ring.total() < total {
            let at = self.ring.total();
            // A pipe of its own, since not all of it may fit before the ring's end.
            let (read, mut write) = io::pipe().unwrap();
            write.write_all(&bytes(at..total.min(at + 10_000))).unwrap();
            let keep_from = at.saturating_sub(TAIL + 3);
            assert!(matches!(self.ring.advance(read.as_fd(), keep_from, 10_000).unwrap(), Moved::Bytes(_)));
        }
    }

    fn prove(&self) {
        self.ring.prove(TAIL + 3).unwrap();
    }

    fn path(&self) -> PathBuf {
        self.dir.path().join("ring")
    }

    fn image(&self) -> Vec<u8> {
        fs::read(self.path()).unwrap()
    }

    fn recover(&self, same_boot: bool, read_to: u64) -> KeptStream {
        recover(&File::open(self.path()).unwrap(), same_boot, read_to, TAIL)
    }
}

/// As a file with these bytes is read.
fn recover_image(image: &[u8], same_boot: bool, read_to: u64) -> KeptStream {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(image).unwrap();
    recover(&file, same_boot, read_to, TAIL)
}

fn kept(range: Range<u64>, missing: u64) -> KeptStream {
    KeptStream { start: range.start, bytes: bytes(range).into(), missing, spill: None }
}

/// What must hold of anything that is recovered: right bytes, and an end that is marked where it is not the stream's.
fn assert_honest(found: &KeptStream, total: u64, read_to: u64) {
    let end = found.start + found.bytes.len() as u64;
    assert_eq!(&found.bytes[..], &bytes(found.start..end)[..], "other bytes");
    assert!(end <= total);
    let marked = end + found.missing > read_to.max(end);
    assert!(end == total || marked, "{end} of {total} bytes, {} missing, read to {read_to}", found.missing);
}

#[test]
fn under_the_same_boot_every_byte_of_the_tail_is_there() {
    for total in [1, 999, 1003, 1004, CAPACITY - 1, CAPACITY, CAPACITY + 1, 3 * CAPACITY + 77] {
        let written = Written::up_to(total);
        let start = total.saturating_sub(TAIL + 3);
        for read_to in [0, total / 2, total] {
            assert_eq!(written.recover(true, read_to), kept(start..total, 0), "{total}, read to {read_to}");
        }
        // Whoever was shown more than the file has seen knows that there was more.
        assert_eq!(written.recover(true, total + 5), kept(start..total, 6));
    }
}

#[test]
fn a_file_without_a_byte_says_that_there_was_output() {
    assert_eq!(Written::new().recover(true, 0), kept(0..0, 1));
    assert_eq!(recover_image(b"", true, 0), kept(0..0, 1));
    assert_eq!(recover_image(b"", false, 7), kept(0..0, 8));
    assert_eq!(recover_image(&[0; 100_000], false, 0), kept(0..0, 1));
}

#[test]
fn after_another_boot_what_is_proven_is_there_and_the_rest_is_missing() {
    let written = Written::up_to(1_500);
    // Nothing proves it.
    assert_eq!(written.recover(false, 0), kept(0..0, 1_500));
    assert_eq!(written.recover(false, 1_500), kept(0..0, 1_501));
    written.prove();
    assert_eq!(written.recover(false, 0), kept(497..1_500, 0));
    assert_eq!(written.recover(false, 1_500), kept(497..1_500, 0));
    let before = written.image();
    written.write(1_600);
    // More came, and is on the disk or is not.
    assert_eq!(written.recover(false, 0), kept(497..1_500, 100));
    assert_eq!(written.recover(false, 1_550), kept(497..1_500, 100));
    assert_eq!(written.recover(false, 1_600), kept(497..1_500, 101));
    written.prove();
    let after = written.image();
    assert_eq!(written.recover(false, 0), kept(597..1_600, 0));
    // The page is newer than what lies behind it: the proof before is in the other slot.
    let torn = [&after[..PAGE], &before[PAGE..]].concat();
    assert_eq!(recover_image(&torn, false, 0), kept(497..1_500, 100));
    // The page is older.
    let torn = [&before[..PAGE], &after[PAGE..]].concat();
    assert_eq!(recover_image(&torn, false, 0), kept(497..1_500, 0));
    assert_eq!(recover_image(&torn, false, 1_550), kept(497..1_500, 51));
}

#[test]
fn what_was_moved_over_proves_nothing() {
    let written = Written::up_to(1_500);
    written.prove();
    written.write(3 * CAPACITY);
    assert_eq!(written.recover(false, 0), kept(0..0, 3 * CAPACITY));
    assert_eq!(written.recover(true, 0), kept(3 * CAPACITY - TAIL - 3..3 * CAPACITY, 0));
}

#[test]
fn bytes_that_somebody_changed_or_cut_off_are_not_shown() {
    let written = Written::up_to(1_500);
    written.prove();
    let image = written.image();
    let dropped = KeptStream { start: 1_500, ..KeptStream::default() };
    for at in [497, 1_000, 1_499] {
        let mut changed = image.clone();
        changed[PAGE + at] ^= 1;
        assert_eq!(recover_image(&changed, true, 0), dropped, "{at}");
        assert_eq!(recover_image(&changed, false, 0), kept(0..0, 1_500), "{at}");
        assert_eq!(recover_image(&image[..PAGE + at], true, 0), dropped, "{at}");
        assert_eq!(recover_image(&image[..PAGE + at], false, 0), kept(0..0, 1_500), "{at}");
    }
    assert_eq!(recover_image(&image[..PAGE - 1], true, 0), dropped);
}

#[test]
fn a_ring_that_went_on_in_memory_has_no_end() {
    let written = Written::up_to(1_500);
    let copy = written.ring.in_memory().unwrap();
    written.ring.move_to(copy).unwrap();
    written.write(1_700);
    assert_eq!(written.ring.end(0, 5_000).unwrap(), (0, Bytes::from(bytes(0..1_700))));
    assert_eq!(written.recover(true, 0), kept(497..1_500, 1));
    assert_eq!(written.recover(true, 1_600), kept(497..1_500, 101));
    assert!(!written.ring.outlives_keeper());
}

#[test]
fn a_successor_goes_on_with_the_record() {
    let dir = TempDir::new().unwrap();
    let file = File::options().read(true).write(true).create_new(true).open(dir.path().join("ring")).unwrap();
    prepare(&file, CAPACITY).unwrap();
    let made = StreamFile::with_ring(file).unwrap();
    let again = StreamFile {
        page: made.page.try_clone().unwrap(),
        ring: Some(made.ring.as_ref().unwrap().try_clone().unwrap()),
    };
    let first = Written { dir, ring: Ring::open(made, CAPACITY).unwrap() };
    first.write(1_500);
    let second = Written { dir: first.dir, ring: Ring::open(again, CAPACITY).unwrap() };
    assert_eq!(second.ring.total(), 1_500);
    second.write(1_501);
    assert_eq!(second.recover(true, 0), kept(498..1_501, 0));
    let slots = decode_slots(&second.image(), CAPACITY);
    assert!(slots[0].number > slots[1].number && slots[0].total == 1_501);
}

#[test]
fn a_spill_is_known_again_while_it_is_the_same_file() {
    let written = Written::up_to(1_500);
    let path = written.dir.path().join("spill");
    fs::write(&path, bytes(0..1_400)).unwrap();
    let identity = identity(&fs::metadata(&path).unwrap());
    written.ring.spill_made(&path, identity);
    written.ring.spilled(1_200);
    written.prove();
    let spill = |held| Some(KeptSpill { path: path.clone(), identity, held });
    // Under the same boot the file says how long it is; and what it does not have is kept.
    assert_eq!(written.recover(true, 0), KeptStream { spill: spill(1_400), ..kept(497..1_500, 0) });
    assert_eq!(written.recover(false, 0), KeptStream { spill: spill(1_200), ..kept(497..1_500, 0) });
    File::options().write(true).open(&path).unwrap().set_len(100).unwrap();
    assert_eq!(written.recover(true, 0), KeptStream { spill: spill(100), ..kept(100..1_500, 0) });
    assert_eq!(written.recover(false, 0), KeptStream { spill: spill(100), ..kept(497..1_500, 0) });
    fs::copy(&path, written.dir.path().join("other")).unwrap();
    fs::rename(written.dir.path().join("other"), &path).unwrap();
    assert_eq!(written.recover(true, 0), kept(497..1_500, 0));
    fs::remove_file(&path).unwrap();
    assert_eq!(written.recover(true, 0), kept(497..1_500, 0));
}

#[test]
fn a_path_that_does_not_fit_is_not_recorded() {
    let fits = PathBuf::from("x".repeat(PAGE - SPILL_AT - SPILL_BYTES));
    let part = encode_spill(&fits, (1, 2)).unwrap();
    let page = [vec![0; SPILL_AT], part].concat();
    assert_eq!((page.len(), decode_spill(&page)), (PAGE, Some((fits.clone(), (1, 2)))));
    assert_eq!(encode_spill(&fits.join("y"), (1, 2)), None);
}

#[test]
fn a_file_keeps_its_format() {
    let slot =
        Slot { number: 1, total: 2, spilled: 3, proof: Proof { end: 4, bytes: 5, checksum: 6 }, elsewhere: true };
    let hex = |bytes: Vec<u8>| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    assert_eq!(&hex(encode_head(0x10_0000))[..32], "65786572696e67010000000000100000");
    let numbers: String = (1..=5).map(|number| format!("{number:016x}")).collect();
    assert_eq!(&hex(encode_slot(&slot))[..90], format!("{numbers}0000000601"));
    assert_eq!((encode_head(1).len(), encode_slot(&slot).len()), (HEAD_BYTES, SLOT_BYTES));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// Any file at all: never a panic, and the end is marked.
    #[test]
    fn garbage_is_missing_output(
        image in prop::collection::vec(any::<u8>(), 0..10_000),
        same_boot in any::<bool>(),
        read_to in prop_oneof![Just(0), any::<u64>()],
        headed in any::<bool>(),
    ) {
        let mut image = image;
        if headed && image.len() > HEAD_BYTES {
            image[..HEAD_BYTES].copy_from_slice(&encode_head(CAPACITY));
        }
        let found = recover_image(&image, same_boot, read_to);
        prop_assert_eq!((found.start, found.bytes.len(), found.missing), (0, 0, read_to.saturating_add(1)));
    }

    /// Slots that are whole and say anything.
    #[test]
    fn no_slot_leads_outside(
        numbers in prop::collection::vec(prop_oneof![0..900_000u64, any::<u64>()], 10),
        elsewhere in any::<bool>(),
        same_boot in any::<bool>(),
    ) {
        let mut image = vec![7; PAGE + 5_000];
        image[..HEAD_BYTES].copy_from_slice(&encode_head(CAPACITY));
        for (slot, at) in numbers.chunks(5).zip(SLOTS) {
            let [number, total, spilled, end, bytes] = slot else { unreachable!("chunks of five out of ten") };
            let proof = Proof { end: *end, bytes: *bytes, checksum: 0 };
            let slot = Slot { number: *number, total: *total, spilled: *spilled, proof, elsewhere };
            image[at..at + SLOT_BYTES].copy_from_slice(&encode_slot(&slot));
        }
        let found = recover_image(&image, same_boot, 0);
        prop_assert!(found.start.checked_add(found.bytes.len() as u64 + found.missing).is_some_and(|end| end > 0));
    }

    /// A file that was cut, or changed anywhere, or of which some pages are older than the others.
    #[test]
    fn what_is_damaged_is_left_out_and_marked(
        first in 1u64..700_000,
        more in 0u64..3_000,
        cut in prop::option::of(0usize..PAGE + 600_000),
        flips in prop::collection::vec((0usize..PAGE + 600_000, 1u8..), 0..3),
        old_pages in any::<u32>(),
        read_part in 0.0..1.0f64,
    ) {
        let written = Written::up_to(first);
        written.prove();
        let before = written.image();
        written.write(first + more);
        written.prove();
        let mut image = written.image();
        for (page, chunk) in image.chunks_mut(PAGE).enumerate() {
            if old_pages >> (page % 32) & 1 == 1 {
                let length = chunk.len();
                chunk.copy_from_slice(&before[page * PAGE..page * PAGE + length]);
            }
        }
        for (at, bits) in flips {
            if let Some(byte) = image.get_mut(at) {
                *byte ^= bits;
            }
        }
        image.truncate(cut.unwrap_or(usize::MAX));
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::cast_precision_loss, reason = "a part of it")]
        let read_to = ((first + more) as f64 * read_part) as u64;
        let found = recover_image(&image, false, read_to);
        let end = found.start + found.bytes.len() as u64;
        // An older page says nothing of what came later: the stream may seem to end where it was proven before.
        let total = if end == first && found.missing == 0 { first } else { first + more };
        assert_honest(&found, total, read_to);
    }
}
