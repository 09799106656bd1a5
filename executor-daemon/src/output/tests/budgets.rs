//! Streams whose spill has little room, and streams that are paced.

use std::os::fd::AsFd;

use super::*;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_spill_without_room_for_more_keeps_its_head_and_the_command_goes_on() {
    const ROOM: u64 = 2 * MIB + 77;
    let budget = SpillBudget::of(10 * MIB, ROOM);
    let (stream, pipe, _files) = start_with(spill_in_dir(), (room(&budget), None), TAIL, 64 * MIB);
    flood(pipe, 8 * MIB).join().unwrap();
    closed(&stream).await;
    let result = stream.result().await;
    assert_eq!((result.total, result.dropped), (8 * MIB, 8 * MIB - TAIL));
    assert!(is_pattern(&pattern(), result.dropped, &result.tail));
    let spill = result.spill.expect("its head is there");
    assert_eq!(spill.cut_at, Some(ROOM));
    let head = fs::read(path_of(&spill)).unwrap();
    assert!(head.len() as u64 == ROOM && is_pattern(&pattern(), 0, &head));

    // Another one has no byte, and no file.
    let (late, pipe, files) = start_with(spill_in_dir(), (room(&budget), None), TAIL, 64 * MIB);
    flood(pipe, MIB).join().unwrap();
    closed(&late).await;
    let result = late.result().await;
    assert_eq!((result.total, result.spill), (MIB, None));
    let Opener::In(dir) = &*files else { unreachable!() };
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_spill_of_what_is_over_goes_for_one_that_is_written_and_its_bytes_are_a_gap() {
    let budget = SpillBudget::of(10 * MIB, 3 * MIB);
    let (old, pipe, _of_old) = start_with(spill_in_dir(), (room(&budget), None), TAIL, 64 * MIB);
    flood(pipe, 2 * MIB).join().unwrap();
    closed(&old).await;
    let path = old.result().await.spill.expect("it has room");
    old.compact();
    let (new, pipe, _of_new) = start_with(spill_in_dir(), (room(&budget), None), TAIL, 64 * MIB);
    flood(pipe, 2 * MIB).join().unwrap();
    closed(&new).await;
    assert_eq!(new.result().await.spill.expect("it has room").cut_at, None);
    assert!(!path_of(&path).exists());
    let result = old.result().await;
    assert_eq!((result.total, result.spill), (2 * MIB, None));
    let (chunks, total, is_closed) = read_all(old.reader(0, ReadUntil::Closed)).await;
    assert!(chunks[0].offset > MIB && total == 2 * MIB && is_closed, "{}", chunks[0].offset);
    // The new one is still there for its reader, until it is given back.
    new.compact();
    new.remove_spill();
    assert_eq!(new.result().await.spill, None);
    drop(old);
    assert_eq!(room(&budget).grow(3 * MIB).granted, 3 * MIB);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_paced_stream_is_exact_and_no_faster_than_its_rate() {
    const PER_SECOND: u64 = 4 * MIB;
    let rate = Arc::new(Rate::new(PER_SECOND));
    let begun = Instant::now();
    // The second that is ahead goes to one, and then both share.
    let streams = [(); 2].map(|()| start_with(spill_in_dir(), (any_room(), Some(Arc::clone(&rate))), TAIL, 64 * MIB));
    let (streams, writers): (Vec<_>, Vec<_>) =
        streams.into_iter().map(|(stream, pipe, files)| ((stream, files), flood(pipe, 3 * MIB))).unzip();
    for (stream, _files) in &streams {
        closed(stream).await;
        let result = stream.result().await;
        assert_eq!((result.total, result.dropped), (3 * MIB, 3 * MIB - TAIL));
        assert!(is_pattern(&pattern(), result.dropped, &result.tail));
        let spilled = fs::read(path_of(&result.spill.expect("all of it"))).unwrap();
        assert!(spilled.len() as u64 == 3 * MIB && is_pattern(&pattern(), 0, &spilled));
    }
    writers.into_iter().for_each(|writer| writer.join().unwrap());
    assert!(begun.elapsed() >= Duration::from_millis(450), "{:?}", begun.elapsed());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_end_of_a_call_does_not_wait_for_a_rate() {
    let rate = Arc::new(Rate::new(1));
    let (stream, pipe, _files) = start_with(spill_in_dir(), (any_room(), Some(rate)), TAIL, 64 * MIB);
    // Less than the pipe holds, and hours of what the rate allows.
    write_pattern(&pipe, 0, 40_000);
    let begun = Instant::now();
    stream.settle(QUIET, Instant::now() + DRAIN).await;
    assert!(begun.elapsed() < 10 * DRAIN, "{:?}", begun.elapsed());
    let result = stream.result().await;
    assert_eq!((result.total, result.dropped), (40_000, 0));
    assert!(is_pattern(&pattern(), 0, &result.tail));
    drop(pipe);
    closed(&stream).await;
}

/// A server that had no room for more is replaced when there is room again, and what would come next is not in the ring any more.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_head_that_a_process_before_this_one_has_kept_stays() {
    const HEAD: u64 = 100_000;
    let capacity = ring_bytes(TAIL);
    let total = 3 * capacity;
    let file = ring::StreamFile::in_memory(capacity).unwrap();
    let handed_over = ring::StreamFile { page: file.page.try_clone().unwrap(), ring: None };
    let ring = Ring::open(file, capacity).unwrap();
    let (read, write) = io::pipe().unwrap();
    let flood = flood(write, total);
    while ring.total() < total {
        ring.advance(AsFd::as_fd(&read), ring.total(), u64::MAX).unwrap();
    }
    flood.join().unwrap();
    drop(ring);

    let dir = TempDir::new().unwrap();
    let path = dir.path().join("spill");
    let start = pattern();
    let bytes: Vec<u8> = start.iter().copied().take(usize::try_from(HEAD).unwrap()).collect();
    fs::write(&path, &bytes).unwrap();
    let spill = File::options().read(true).write(true).open(&path).unwrap();
    let budget = SpillBudget::of(u64::MAX, u64::MAX);
    let options = StreamOptions {
        name: StreamName::Stdout,
        tail_bytes: TAIL,
        ring_bytes: capacity,
        max_spill_bytes: 64 * MIB,
        spills: Arc::new(ByPath),
        room: room(&budget),
        rate: None,
    };
    let spill = Some((spill.into(), path.clone()));
    let stream = Stream::take_over(read.into(), Some(handed_over), spill, options, Arc::new(spill_in_dir())).unwrap();
    closed(&stream).await;
    let result = stream.result().await;
    assert_eq!(result.total, total);
    let kept = result.spill.expect("its head is there");
    assert_eq!((path_of(&kept), kept.cut_at), (&*path, Some(HEAD)));
    assert_eq!(fs::read(&path).unwrap(), bytes);
}
