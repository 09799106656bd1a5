//! Streams whose ring is a file, and streams that were left with such a file.

use std::sync::PoisonError;

use super::*;

fn rings_in_dir() -> Opener {
    Opener::Rings(TempDir::new().unwrap())
}

fn ring_file(files: &Opener) -> File {
    let Opener::Rings(dir) = files else { panic!("it makes no ring files") };
    File::open(dir.path().join("ring")).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flood_through_a_ring_file_is_exact_and_its_end_is_in_the_file() {
    const TOTAL: u64 = 8 * MIB + 12_345;
    let (stream, pipe, files) = start(rings_in_dir(), TAIL, 64 * MIB);
    let writer = flood(pipe, TOTAL);
    closed(&stream).await;
    writer.join().unwrap();
    let result = stream.result().await;
    assert_eq!((result.total, result.dropped), (TOTAL, TOTAL - TAIL));
    assert!(is_pattern(&pattern(), result.dropped, &result.tail));
    let spill = result.spill.expect("a spill");
    let kept = recover_ring_file(&ring_file(&files), true, 0, TAIL);
    assert_eq!((kept.start, kept.missing), (TOTAL - TAIL - 3, 0));
    assert!(kept.bytes.ends_with(&result.tail));
    let found = kept.spill.expect("it is recorded");
    assert_eq!((found.path.as_path(), found.held), (path_of(&spill), TOTAL));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bytes_are_proven_a_moment_after_they_came() {
    let (stream, mut pipe, files) = start(rings_in_dir(), TAIL, 0);
    pipe.write_all(b"hello").unwrap();
    taken(&stream).await;
    let file = ring_file(&files);
    let deadline = Instant::now() + 20 * DRAIN;
    while recover_ring_file(&file, false, 0, TAIL).bytes != b"hello"[..] {
        assert!(Instant::now() < deadline, "no proof of what has come");
        tokio::task::yield_now().await;
    }
}

/// A file that somebody seals can be read and not written, as one on a disk that fails.
struct Failing(Mutex<Option<File>>, AtomicU64);

impl StreamFiles for Failing {
    fn ring(&self, ring_bytes: u64) -> BoxFuture<'_, Option<File>> {
        Box::pin(async move {
            use nix::sys::memfd::{MFdFlags, memfd_create};
            let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
            let file = File::from(memfd_create("failing", flags).unwrap());
            prepare_ring_file(&file, ring_bytes).unwrap();
            *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(file.try_clone().unwrap());
            Some(file)
        })
    }

    fn hold<'a>(&'a self, file: &'a [BorrowedFd<'a>]) -> BoxFuture<'a, io::Result<()>> {
        self.1.fetch_add(file.len() as u64, Ordering::SeqCst);
        Box::pin(async { Ok(()) })
    }

    fn spill(&self) -> BoxFuture<'_, io::Result<(OwnedFd, PathBuf)>> {
        Box::pin(async { Err(io::ErrorKind::StorageFull.into()) })
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_ring_file_that_fails_costs_nothing_but_itself() {
    use nix::fcntl::{FcntlArg, SealFlag, fcntl};
    for before in [1, 500, 2 * MIB + 100] {
        let (read, write) = io::pipe().unwrap();
        let options = StreamOptions {
            name: StreamName::Stdout,
            tail_bytes: TAIL,
            ring_bytes: ring_bytes(TAIL),
            max_spill_bytes: 0,
            spills: Arc::new(ByPath),
            room: any_room(),
            rate: None,
        };
        let files = Arc::new(Failing(Mutex::default(), AtomicU64::new(0)));
        let stream = Stream::start(read.into(), options, Arc::<Failing>::clone(&files)).unwrap();
        write_pattern(&write, 0, before);
        taken(&stream).await;
        let file = files.0.lock().unwrap_or_else(PoisonError::into_inner).take().expect("made at the first byte");
        fcntl(&file, FcntlArg::F_ADD_SEALS(SealFlag::F_SEAL_WRITE)).expect("nobody has mapped it");
        let total = before + 3 * MIB;
        write_pattern(&write, before, total);
        drop(write);
        closed(&stream).await;
        let result = stream.result().await;
        assert_eq!((result.total, result.dropped), (total, total - TAIL));
        assert!(is_pattern(&pattern(), result.dropped, &result.tail));
        // The page and the file, then the memory that stands for both.
        assert_eq!(files.1.load(Ordering::SeqCst), 3);
        let kept = recover_ring_file(&file, true, before, TAIL);
        assert_eq!(kept.start + kept.bytes.len() as u64, before);
    }
}

fn recalled(start: u64, bytes: &'static [u8], missing: u64, spill: Option<KeptSpill>) -> Arc<Stream> {
    let options = StreamOptions {
        name: StreamName::Stdout,
        tail_bytes: 10,
        ring_bytes: MIB,
        max_spill_bytes: 64 * MIB,
        spills: Arc::new(ByPath),
        room: any_room(),
        rate: None,
    };
    Stream::recalled(options, KeptStream { start, bytes: Bytes::from_static(bytes), missing, spill })
}

#[tokio::test]
async fn a_missing_end_is_told_once() {
    let stream = recalled(100, b"hello", 7, None);
    assert_eq!((stream.total(), stream.closed()), (112, true));
    let delta = |start, data: &'static [u8], dropped, missing| StreamDelta {
        start,
        data: Bytes::from_static(data),
        dropped,
        spill: None,
        missing,
    };
    for (cursor, expected) in [
        (0, delta(100, b"hello", 100, 7)),
        (100, delta(100, b"hello", 0, 7)),
        (103, delta(103, b"lo", 0, 7)),
        (105, delta(105, b"", 0, 7)),
        (110, delta(110, b"", 0, 2)),
        (112, delta(112, b"", 0, 0)),
    ] {
        assert_eq!(stream.delta(cursor).await, (expected, 112), "{cursor}");
    }
    // A character whose rest is missing is missing too.
    let stream = recalled(0, b"a\xe2\x89", 1, None);
    assert_eq!(stream.delta(0).await, (delta(0, b"a", 0, 3), 4));
    // Nothing is left at all.
    assert_eq!(recalled(0, b"", 9, None).delta(4).await, (delta(4, b"", 0, 5), 9));
}

#[tokio::test]
async fn readers_end_before_what_is_missing() {
    for (stream, from, bytes, total) in [
        (recalled(100, b"hello", 7, None), 0, &b"hello"[..], 112),
        (recalled(100, b"hello", 7, None), 103, b"lo", 112),
        (recalled(100, b"hello", 7, None), 107, b"", 112),
        (recalled(0, b"", 9, None), 0, b"", 9),
    ] {
        let (chunks, end, closed) = read_all(stream.reader(from, ReadUntil::Closed)).await;
        let read: Vec<u8> = chunks.iter().flat_map(|chunk| chunk.data.to_vec()).collect();
        assert_eq!((&read[..], end, closed), (bytes, total, true), "from {from}");
    }
    // What the ring has lost and the spill has.
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("spill");
    fs::write(&path, b"0123456789abc").unwrap();
    let identity = record::identity(&fs::metadata(&path).unwrap());
    let spill = || Some(KeptSpill { path: path.clone(), identity, held: 13 });
    for (stream, total) in [(recalled(0, b"", 20, spill()), 20), (recalled(10, b"abc", 7, spill()), 20)] {
        let (chunks, end, _) = read_all(stream.reader(0, ReadUntil::Now)).await;
        let read: Vec<u8> = chunks.iter().flat_map(|chunk| chunk.data.to_vec()).collect();
        assert_eq!((&read[..], end), (&b"0123456789abc"[..], total));
        let fact = stream.delta(0).await.0.spill.expect("it is there");
        assert_eq!(fact.cut_at, Some(13));
    }
}
