//! Spills that fail, stand still, or are touched by others.

use super::*;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_spill_that_fails_costs_the_spill_and_nothing_else() {
    let full = Opener::Full(TempDir::new().unwrap());
    for opener in [Opener::Refused, full] {
        let (stream, pipe, _files) = start(opener, TAIL, 64 * MIB);
        let writer = flood(pipe, 8 * MIB);
        closed(&stream).await;
        writer.join().unwrap();
        let result = stream.result().await;
        assert_eq!((result.total, result.tail.len() as u64, result.spill), (8 * MIB, TAIL, None));
        assert!(is_pattern(&pattern(), result.dropped, &result.tail));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_spill_that_stands_still_does_not_hold_the_end_of_a_call() {
    let (stream, pipe, _files) = start(Opener::Never, TAIL, 64 * MIB);
    let writer = flood(pipe, 8 * MIB);
    // The ring is full, and all of it is still to be spilled.
    stream.subscribe().wait_for(|progress| progress.total == MIB).await.unwrap();
    let before = Instant::now();
    stream.settle(QUIET, before + QUIET).await;
    let result = stream.result().await;
    assert!(before.elapsed() < 2 * DRAIN, "{:?}", before.elapsed());
    assert!(result.total > MIB && result.spill.is_none());
    assert!(is_pattern(&pattern(), result.dropped, &result.tail));
    closed(&stream).await;
    writer.join().unwrap();
    assert_eq!(stream.total(), 8 * MIB);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_spill_that_somebody_touched_is_not_claimed() {
    let removed = |path: &Path| fs::remove_file(path).unwrap();
    let replaced = |path: &Path| {
        fs::rename(path, path.with_extension("moved")).unwrap();
        fs::copy(path.with_extension("moved"), path).unwrap();
    };
    let linked = |path: &Path| {
        fs::rename(path, path.with_extension("moved")).unwrap();
        std::os::unix::fs::symlink(path.with_extension("moved"), path).unwrap();
    };
    let shortened = |path: &Path| File::options().write(true).open(path).unwrap().set_len(5).unwrap();
    let touches: [&(dyn Fn(&Path) + Sync); 4] = [&removed, &replaced, &linked, &shortened];
    for touch in touches {
        for compacted in [false, true] {
            let (stream, pipe, _files) = start(spill_in_dir(), TAIL, MIB);
            write_pattern(&pipe, 0, TAIL * 2);
            drop(pipe);
            closed(&stream).await;
            let spill = stream.result().await.spill.unwrap();
            if compacted {
                stream.compact();
            }
            assert_eq!(stream.result().await.spill.as_ref(), Some(&spill));
            touch(path_of(&spill));
            assert_eq!(stream.result().await.spill, None);
        }
    }
}
