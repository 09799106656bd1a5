//! Streams over real pipes: floods, slow readers, failing spills, writers that outlive the call.

mod budgets;
mod rings;
mod speed;
mod spills;

use std::{
    fs::{self, File},
    io::{PipeWriter, Write},
    os::unix::ffi::OsStrExt,
    path::Path,
    process::{Child, Command, Stdio},
    sync::Weak,
    thread,
};

use executor_proto::types::{ReadStreamEvent, Spill as SpillFact, StreamChunk};
use proptest::prelude::*;
use tempfile::TempDir;

use super::*;
use crate::{
    ids::{Caller, TenantId},
    limits::SpillBudget,
};

const TAIL: u64 = 64_000;
const MIB: u64 = 1024 * 1024;
const QUIET: Duration = Duration::from_millis(250);
const DRAIN: Duration = Duration::from_secs(1);

/// Length of the pattern's period; coprime to every ring's size, so that bytes of another lap are seen.
const PERIOD: u64 = 89;

/// Printable bytes that tell their offset, up to the period.
fn pattern() -> Vec<u8> {
    (0..4 * MIB + PERIOD).map(|offset| b'!' + u8::try_from(offset % PERIOD).unwrap()).collect()
}

fn is_pattern(pattern: &[u8], offset: u64, data: &[u8]) -> bool {
    pattern[usize::try_from(offset % PERIOD).unwrap()..].starts_with(data)
}

fn write_pattern(mut pipe: &PipeWriter, from: u64, to: u64) {
    let pattern = pattern();
    let mut at = from;
    while at < to {
        let length = (to - at).min(64 * 1024);
        let start = usize::try_from(at % PERIOD).unwrap();
        pipe.write_all(&pattern[start..start + usize::try_from(length).unwrap()]).unwrap();
        at += length;
    }
}

/// Writes on a thread of its own and closes the pipe at the end.
fn flood(pipe: PipeWriter, total: u64) -> thread::JoinHandle<()> {
    thread::spawn(move || write_pattern(&pipe, 0, total))
}

/// What becomes of the spill.
enum Opener {
    In(TempDir),
    /// As that; and the ring is a file beside it.
    Rings(TempDir),
    Refused,
    Full(TempDir),
    Never,
    /// Nobody holds the stream file.
    Unheld,
}

/// Opens what lies at the path.
#[derive(Debug)]
struct ByPath;

impl SpillFiles for ByPath {
    fn reopen(&self, path: PathBuf) -> BoxFuture<'_, io::Result<OwnedFd>> {
        Box::pin(async move { Ok(File::open(path)?.into()) })
    }

    fn remove(&self, path: PathBuf) {
        let _ = std::fs::remove_file(path);
    }
}

impl StreamFiles for Opener {
    fn ring(&self, ring_bytes: u64) -> BoxFuture<'_, Option<File>> {
        Box::pin(async move {
            let Self::Rings(dir) = self else { return None };
            let path = dir.path().join("ring");
            let file = File::options().read(true).write(true).create_new(true).open(path).unwrap();
            prepare_ring_file(&file, ring_bytes).unwrap();
            Some(file)
        })
    }

    fn hold<'a>(&'a self, _file: &'a [BorrowedFd<'a>]) -> BoxFuture<'a, io::Result<()>> {
        Box::pin(
            async move { if matches!(self, Self::Unheld) { Err(io::ErrorKind::NotConnected.into()) } else { Ok(()) } },
        )
    }

    fn spill(&self) -> BoxFuture<'_, io::Result<(OwnedFd, PathBuf)>> {
        Box::pin(async move {
            match self {
                Self::In(dir) | Self::Rings(dir) => {
                    let path = dir.path().join("spill");
                    let file = File::options().read(true).write(true).create_new(true).open(&path)?;
                    Ok((file.into(), path))
                }
                Self::Refused | Self::Unheld => Err(io::ErrorKind::StorageFull.into()),
                Self::Full(dir) => {
                    let path = dir.path().join("spill");
                    File::create(&path)?;
                    Ok((File::options().write(true).open("/dev/full")?.into(), path))
                }
                Self::Never => std::future::pending().await,
            }
        })
    }
}

fn spill_in_dir() -> Opener {
    Opener::In(TempDir::new().unwrap())
}

/// Room without a limit.
fn any_room() -> Arc<SpillRoom> {
    room(&SpillBudget::of(u64::MAX, u64::MAX))
}

fn room(budget: &SpillBudget) -> Arc<SpillRoom> {
    Arc::new(budget.room(&Caller { tenant: TenantId::default_tenant(), owner: None }))
}

fn start(opener: Opener, tail_bytes: u64, max_spill_bytes: u64) -> (Arc<Stream>, PipeWriter, Arc<Opener>) {
    start_with(opener, (any_room(), None), tail_bytes, max_spill_bytes)
}

fn start_with(
    opener: Opener,
    (room, rate): (Arc<SpillRoom>, Option<Arc<Rate>>),
    tail_bytes: u64,
    max_spill_bytes: u64,
) -> (Arc<Stream>, PipeWriter, Arc<Opener>) {
    let (read, write) = io::pipe().unwrap();
    let ring_bytes = ring_bytes(tail_bytes);
    let spills = Arc::new(ByPath);
    let options =
        StreamOptions { name: StreamName::Stdout, tail_bytes, ring_bytes, max_spill_bytes, spills, room, rate };
    let opener = Arc::new(opener);
    let stream = Stream::start(read.into(), options, Arc::<Opener>::clone(&opener)).unwrap();
    (stream, write, opener)
}

async fn closed(stream: &Stream) {
    stream.subscribe().wait_for(|progress| progress.closed).await.unwrap();
}

/// Everything that is in the pipe, taken.
async fn taken(stream: &Stream) {
    stream.settle(Duration::ZERO, Instant::now()).await;
}

/// All chunks of a reader, its total, and whether it said that the stream is closed.
async fn read_all(mut reader: StreamReader) -> (Vec<StreamChunk>, u64, bool) {
    let mut chunks = Vec::new();
    loop {
        match reader.next().await.expect("an end comes before nothing") {
            ReadStreamEvent::Chunk(chunk) => {
                assert!(!chunk.data.is_empty() && chunk.data.len() <= executor_proto::MAX_CHUNK_BYTES);
                chunks.push(chunk);
            }
            ReadStreamEvent::End { total, closed } => {
                assert_eq!(reader.next().await, None);
                return (chunks, total, closed);
            }
        }
    }
}

/// The gaps between chunks that begin at `from`; checks that every byte is the one that was written there.
fn gaps(chunks: &[StreamChunk], from: u64, to: u64) -> Vec<(u64, u64)> {
    let pattern = pattern();
    let (mut at, mut gaps) = (from, Vec::new());
    for chunk in chunks {
        assert!(chunk.offset >= at, "a byte was read twice");
        assert!(is_pattern(&pattern, chunk.offset, &chunk.data), "other bytes at {}", chunk.offset);
        if chunk.offset > at {
            gaps.push((at, chunk.offset));
        }
        at = chunk.offset + chunk.data.len() as u64;
    }
    if at < to {
        gaps.push((at, to));
    }
    gaps
}

fn path_of(fact: &SpillFact) -> &Path {
    Path::new(std::ffi::OsStr::from_bytes(&fact.path))
}

#[test]
fn a_ring_is_whole_pages_and_holds_the_tail_twice() {
    assert_eq!(ring_bytes(TAIL), MIB);
    for tail in [1, 500_000, MIB, 3 * MIB + 1] {
        let ring = ring_bytes(tail);
        assert!(ring.is_multiple_of(4096) && ring >= 2 * tail + 6 && ring >= MIB && ring <= MIB.max(2 * tail + 8192));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_written_before_the_exit_is_in_the_result() {
    for _ in 0..1000 {
        let (stream, mut pipe, _files) = start(Opener::Refused, TAIL, MIB);
        pipe.write_all(b"END").unwrap();
        drop(pipe);
        stream.settle(QUIET, Instant::now() + DRAIN).await;
        let result = stream.result().await;
        assert_eq!((result.total, result.dropped, &result.tail[..], result.spill), (3, 0, &b"END"[..], None));
        assert!(stream.closed());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn settling_takes_what_is_in_the_pipe_even_without_time_and_while_somebody_holds_it() {
    let (stream, mut pipe, _files) = start(Opener::Refused, TAIL, MIB);
    for n in 1..=1000 {
        pipe.write_all(b"0123456789").unwrap();
        taken(&stream).await;
        assert_eq!(stream.total(), n * 10);
    }
    assert!(!stream.closed());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_writer_that_outlives_the_call_goes_on_into_the_same_stream() {
    let (stream, mut pipe, _files) = start(Opener::Refused, TAIL, MIB);
    pipe.write_all(b"first").unwrap();
    let before = Instant::now();
    stream.settle(QUIET, before + DRAIN).await;
    assert!(before.elapsed() >= QUIET && before.elapsed() < DRAIN, "{:?}", before.elapsed());
    assert_eq!(&stream.result().await.tail[..], b"first");

    let (delta, cursor) = stream.delta(0).await;
    assert_eq!((&delta.data[..], cursor), (&b"first"[..], 5));
    pipe.write_all(b" second").unwrap();
    drop(pipe);
    closed(&stream).await;
    let (delta, cursor) = stream.delta(cursor).await;
    assert_eq!((&delta.data[..], delta.start, delta.dropped, cursor), (&b" second"[..], 5, 0, 12));
    assert_eq!(stream.delta(cursor).await, (StreamDelta { start: 12, ..StreamDelta::default() }, 12));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn settling_ends_while_a_leftover_writes_without_pause() {
    let (stream, pipe, _files) = start(Opener::Refused, TAIL, 0);
    let stop = Arc::new(AtomicBool::new(false));
    let writer = thread::spawn({
        let stop = Arc::clone(&stop);
        move || {
            while !stop.load(Ordering::SeqCst) {
                (&pipe).write_all(&[b'y'; 4096]).unwrap();
            }
        }
    });
    let before = Instant::now();
    stream.settle(QUIET, before + Duration::from_millis(400)).await;
    let took = before.elapsed();
    assert!(took >= Duration::from_millis(400) && took < DRAIN, "{took:?}");
    assert_eq!(stream.result().await.tail.len() as u64, TAIL);
    stop.store(true, Ordering::SeqCst);
    writer.join().unwrap();
    closed(&stream).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_character_waits_for_its_rest_and_an_invalid_byte_does_not() {
    let (stream, mut pipe, _files) = start(Opener::Refused, TAIL, MIB);
    pipe.write_all(b"a\xe2").unwrap();
    taken(&stream).await;
    let (delta, cursor) = stream.delta(0).await;
    assert_eq!((&delta.data[..], cursor), (&b"a"[..], 1));
    pipe.write_all(b"\x89\xa4\xff").unwrap();
    taken(&stream).await;
    let (delta, cursor) = stream.delta(cursor).await;
    assert_eq!((&delta.data[..], cursor), (&b"\xe2\x89\xa4\xff"[..], 5));
    pipe.write_all(b"\xf0\x9f").unwrap();
    drop(pipe);
    closed(&stream).await;
    assert_eq!(&stream.delta(cursor).await.0.data[..], b"\xf0\x9f");
}

fn resident_bytes() -> u64 {
    let statm = fs::read_to_string("/proc/self/statm").unwrap();
    statm.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4096
}

/// In a process of its own, since all tests of this one share its memory.
#[test]
fn a_flood_takes_no_memory() {
    #[expect(clippy::disallowed_methods, reason = "the test itself, once more")]
    let test = Command::new(std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", "output::tests::a_gibibyte_leaves_the_exact_tail_a_capped_spill_and_no_memory"])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&test.stdout);
    assert!(test.status.success() && said.contains("1 passed"), "{said}");
}

#[ignore = "measures the whole process: run by a_flood_takes_no_memory"]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gibibyte_leaves_the_exact_tail_a_capped_spill_and_no_memory() {
    let (stream, pipe, _files) = start(spill_in_dir(), TAIL, 4 * MIB);
    let before = resident_bytes();
    let total = 1024 * MIB;
    let writer = flood(pipe, total);
    closed(&stream).await;
    writer.join().unwrap();
    assert!(resident_bytes() < before + 16 * MIB, "{before} bytes before, {} after", resident_bytes());

    let result = stream.result().await;
    assert_eq!((result.total, result.dropped, result.tail.len() as u64), (total, total - TAIL, TAIL));
    assert!(is_pattern(&pattern(), result.dropped, &result.tail));
    let spill = result.spill.unwrap();
    assert_eq!(spill.cut_at, Some(4 * MIB));
    assert!(fs::read(path_of(&spill)).unwrap() == pattern()[..usize::try_from(4 * MIB).unwrap()]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_byte_above_the_tail_makes_a_spill_of_the_whole_stream() {
    let (stream, pipe, _files) = start(spill_in_dir(), TAIL, MIB);
    write_pattern(&pipe, 0, TAIL);
    taken(&stream).await;
    let result = stream.result().await;
    assert_eq!((result.total, result.dropped, result.spill), (TAIL, 0, None));
    write_pattern(&pipe, TAIL, TAIL + 1);
    taken(&stream).await;
    let result = stream.result().await;
    assert_eq!((result.total, result.dropped, result.tail.len() as u64), (TAIL + 1, 1, TAIL));
    let spill = result.spill.unwrap();
    assert_eq!(spill.cut_at, None);
    assert_eq!(fs::read(path_of(&spill)).unwrap().len() as u64, TAIL + 1);
    assert_eq!(stream.spill_path().as_deref(), Some(path_of(&spill)));
    assert_eq!(stream.delta(0).await.0.spill, Some(spill));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_that_ends_at_the_cap_of_its_spill_is_whole() {
    let (stream, pipe, _files) = start(spill_in_dir(), TAIL, 2 * MIB);
    write_pattern(&pipe, 0, 2 * MIB);
    taken(&stream).await;
    assert_eq!(stream.result().await.spill.unwrap().cut_at, None);
    write_pattern(&pipe, 2 * MIB, 2 * MIB + 1);
    drop(pipe);
    closed(&stream).await;
    assert_eq!(stream.result().await.spill.unwrap().cut_at, Some(2 * MIB));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slow_reader_is_served_from_the_spill() {
    let (stream, pipe, _files) = start(spill_in_dir(), TAIL, 64 * MIB);
    let reader = stream.reader(0, ReadUntil::Closed);
    let writer = flood(pipe, 8 * MIB);
    closed(&stream).await;
    writer.join().unwrap();
    let (chunks, total, end) = read_all(reader).await;
    assert_eq!((gaps(&chunks, 0, total), total, end), (vec![], 8 * MIB, true));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_nothing_keeps_any_more_is_one_gap() {
    let (stream, pipe, _files) = start(spill_in_dir(), TAIL, 2 * MIB);
    let reader = stream.reader(5, ReadUntil::Closed);
    let writer = flood(pipe, 8 * MIB);
    closed(&stream).await;
    writer.join().unwrap();
    let (chunks, total, end) = read_all(reader).await;
    assert_eq!((gaps(&chunks, 5, total), total, end), (vec![(2 * MIB, 7 * MIB)], 8 * MIB, true));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn readers_and_results_in_the_middle_of_a_flood_are_exact() {
    let (stream, pipe, _files) = start(Opener::Refused, TAIL, 0);
    let total = 128 * MIB;
    let readers: Vec<_> = (0..3).map(|_| tokio::spawn(read_all(stream.reader(0, ReadUntil::Closed)))).collect();
    let writer = flood(pipe, total);
    let pattern = pattern();
    let mut cursor = 0;
    while !stream.closed() {
        let result = stream.result().await;
        assert_eq!(result.tail.len() as u64, result.total.min(TAIL));
        assert!(is_pattern(&pattern, result.dropped, &result.tail));
        let (delta, next) = stream.delta(cursor).await;
        assert_eq!(cursor + delta.dropped, delta.start);
        assert_eq!(delta.start + delta.data.len() as u64, next);
        assert!(is_pattern(&pattern, delta.start, &delta.data));
        cursor = next;
        tokio::task::yield_now().await;
    }
    writer.join().unwrap();
    for reader in readers {
        let (chunks, end, _) = reader.await.unwrap();
        gaps(&chunks, 0, end);
        let last = chunks.last().unwrap();
        assert_eq!((last.offset + last.data.len() as u64, end), (total, total));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reader_ends_where_it_is_told() {
    let (stream, mut pipe, _files) = start(Opener::Refused, TAIL, 0);
    pipe.write_all(b"result").unwrap();
    taken(&stream).await;
    let (known, end) = watch::channel(None);
    let run = tokio::spawn(read_all(stream.reader(0, ReadUntil::Offset(end.clone()))));
    let late = stream.reader(0, ReadUntil::Offset(end));
    let now = stream.reader(0, ReadUntil::Now);
    known.send_replace(Some(6));
    pipe.write_all(b" leftover").unwrap();
    taken(&stream).await;

    let text = |chunks: Vec<StreamChunk>| chunks.iter().flat_map(|chunk| chunk.data.to_vec()).collect::<Vec<_>>();
    for (chunks, total, end) in [run.await.unwrap(), read_all(late).await, read_all(now).await] {
        assert_eq!((text(chunks), total, end), (b"result".to_vec(), 6, false));
    }
    // A caller that vanished before the end was known.
    let (known, end) = watch::channel(None);
    drop(known);
    let (chunks, total, _) = read_all(stream.reader(7, ReadUntil::Offset(end))).await;
    assert_eq!((text(chunks), total), (b"leftover".to_vec(), 15));
    // Beyond the end.
    assert_eq!(read_all(stream.reader(99, ReadUntil::Now)).await, (vec![], 15, false));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reader_that_is_cancelled_loses_nothing() {
    let (stream, pipe, _files) = start(spill_in_dir(), TAIL, 64 * MIB);
    let writer = flood(pipe, 4 * MIB);
    let mut reader = stream.reader(0, ReadUntil::Closed);
    let mut chunks = Vec::new();
    loop {
        // Polled once, then dropped, until it is ready at once.
        let event = tokio::select! {
            biased;
            event = reader.next() => event,
            () = tokio::task::yield_now() => continue,
        };
        match event {
            Some(ReadStreamEvent::Chunk(chunk)) => chunks.push(chunk),
            Some(ReadStreamEvent::End { .. }) => break,
            None => panic!("an end comes before nothing"),
        }
        // What lies in the spill takes a thread, and so more than one poll.
        if stream.in_memory_range().start > chunks.last().map_or(0, |chunk| chunk.offset + chunk.data.len() as u64)
            && let Some(ReadStreamEvent::Chunk(chunk)) = reader.next().await
        {
            chunks.push(chunk);
        }
    }
    writer.join().unwrap();
    assert_eq!(gaps(&chunks, 0, 4 * MIB), vec![]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bytes_that_cannot_be_taken_are_counted_as_dropped() {
    let (stream, mut pipe, _files) = start(Opener::Unheld, TAIL, 0);
    pipe.write_all(b"hello").unwrap();
    drop(pipe);
    taken(&stream).await;
    let result = stream.result().await;
    assert_eq!((result.total, result.tail.as_ref(), result.dropped, result.spill), (5, &b""[..], 5, None));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_compacted_stream_keeps_its_tail_and_nothing_else() {
    let (stream, pipe, _files) = start(spill_in_dir(), TAIL, 64 * MIB);
    let writer = flood(pipe, 3 * MIB);
    stream.subscribe().wait_for(|progress| progress.total > 0).await.unwrap();
    let ring: Weak<Ring> = match &*stream.storage() {
        Storage::Ring(ring) => Arc::downgrade(ring),
        Storage::Tail(..) => panic!("nobody has asked for less"),
    };
    // Asked for before the end, it happens at the end.
    stream.compact();
    closed(&stream).await;
    writer.join().unwrap();
    let before = stream.result().await;
    let deadline = Instant::now() + DRAIN;
    while ring.strong_count() > 0 {
        assert!(Instant::now() < deadline, "the ring is still held");
        tokio::task::yield_now().await;
    }
    assert!(stream.spill.path().is_some());
    assert_eq!(stream.result().await, before);
    assert_eq!(before.spill.as_ref().unwrap().cut_at, None);
    let (chunks, total, end) = read_all(stream.reader(0, ReadUntil::Closed)).await;
    assert_eq!((gaps(&chunks, 0, total), total, end), (vec![], 3 * MIB, true));
    // Without the file only the tail is left.
    fs::remove_file(stream.spill_path().unwrap()).unwrap();
    let (chunks, total, _) = read_all(stream.reader(0, ReadUntil::Now)).await;
    let kept = tail::kept_bytes(TAIL);
    assert_eq!(gaps(&chunks, 0, total), vec![(0, total - kept)]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Any bytes, in any pieces, at any cap, read at any moments.
    #[test]
    fn a_stream_reads_like_the_whole(
        pieces in prop::collection::vec((text::tests::awkward_bytes(), any::<bool>()), 1..12),
        tail_bytes in 1u64..200,
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let (stream, mut pipe, _files) = start(spill_in_dir(), tail_bytes, MIB);
            let (mut whole, mut shown, mut dropped, mut cursor) = (Vec::new(), Vec::new(), 0, 0);
            let mut text = String::new();
            for (piece, read) in pieces {
                pipe.write_all(&piece).unwrap();
                whole.extend(piece);
                taken(&stream).await;
                if read {
                    let (delta, next) = stream.delta(cursor).await;
                    cursor = next;
                    dropped += delta.dropped;
                    text.push_str(&String::from_utf8_lossy(&delta.data));
                    shown.extend(delta.data);
                }
            }
            drop(pipe);
            closed(&stream).await;
            let (delta, next) = stream.delta(cursor).await;
            let total = whole.len() as u64;
            assert_eq!(next, total);
            dropped += delta.dropped;
            text.push_str(&String::from_utf8_lossy(&delta.data));
            shown.extend(delta.data);
            assert_eq!(shown.len() as u64 + dropped, total);
            if dropped == 0 {
                assert_eq!(shown, whole);
                assert_eq!(text, String::from_utf8_lossy(&whole));
            }

            let result = stream.result().await;
            assert_eq!((result.total, result.dropped + result.tail.len() as u64), (total, total));
            assert!(whole.ends_with(&result.tail));
            assert!(result.tail.len() as u64 <= tail_bytes && result.tail.len() as u64 + 3 >= tail_bytes.min(total));
            match result.spill {
                Some(spill) => assert_eq!(fs::read(path_of(&spill)).unwrap(), whole),
                None => assert!(total <= tail_bytes),
            }
        });
    }
}
