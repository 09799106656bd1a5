//! Bytes are exact and characters whole, in order, to the last one (kind E).

use std::time::Duration;

use executor_proto::types::CommandSpec;
use executor_tests::{Setup, World, every_backend, wait_until};
use futures_util::{StreamExt, stream};

const SOON: Duration = Duration::from_secs(10);

/// Commands at the same time, where there are a thousand.
const AT_ONCE: usize = 8;

every_backend!(e01_a_character_in_two_writes_stays_whole);
async fn e01_a_character_in_two_writes_stays_whole(world: &World) {
    assert_eq!(world.bash("printf '\\xe2'; sleep .2; printf '\\x80\\x94'").await, "\u{2014}");
    // A reader in between gets nothing of it yet.
    let id = world.background("printf 'a\\xe2'; until [ -e go ]; do sleep .01; done; printf '\\x80\\x94'").await;
    written(world, &id, 2).await;
    assert_eq!(world.output(&id).await, "a\n[status: running]");
    std::fs::write(world.tmp().join("go"), "").expect("the directory can be written");
    world.ended(&id, SOON).await.expect("it ends");
    assert_eq!(world.output(&id).await, "\u{2014}\n[status: completed, exit code: 0]");
}

every_backend!(e02_characters_across_fixed_reads_stay_whole);
async fn e02_characters_across_fixed_reads_stay_whole(world: &World) {
    let text = world.bash("python3 -c \"import sys; sys.stdout.write('x'*4095+'é'*5000)\"").await;
    assert!(text == "x".repeat(4095) + &"é".repeat(5000), "{text:.100}");
}

every_backend!(e04_invalid_bytes_are_neither_held_back_nor_swallowed);
async fn e04_invalid_bytes_are_neither_held_back_nor_swallowed(world: &World) {
    let id = world.background(&format!("printf 'a\\xffb'; {}", world.sleep(300))).await;
    written(world, &id, 3).await;
    assert_eq!(world.output(&id).await, "a\u{fffd}b\n[status: running]");
    assert_eq!(world.kill(&id).await, format!("killed background task {id}"));
}

every_backend!(e05_random_bytes_become_valid_text);
async fn e05_random_bytes_become_valid_text(world: &World) {
    let text = world.bash("head -c 4096 /dev/urandom | tee raw").await;
    let raw = std::fs::read(world.tmp().join("raw")).expect("it was written");
    assert_eq!(raw.len(), 4096);
    assert_eq!(text, String::from_utf8_lossy(&raw));
}

every_backend!(e05_raw_bytes_are_in_the_spill with Setup { max_output_bytes: 1_000, ..Setup::default() });
async fn e05_raw_bytes_are_in_the_spill(world: &World) {
    let text = world.bash("head -c 4096 /dev/urandom | tee raw").await;
    let (_, path) = text.rsplit_once("[output truncated; full output: ").expect("it says so");
    let spill = std::fs::read(path.trim_end_matches(']')).expect("the spill can be read");
    assert!(spill == std::fs::read(world.tmp().join("raw")).expect("it was written"), "the spill differs");
}

every_backend!(e10_a_last_line_without_newline_is_kept);
async fn e10_a_last_line_without_newline_is_kept(world: &World) {
    assert_eq!(world.bash("echo hello; printf world").await, "hello\nworld");
}

every_backend!(e12_the_last_bytes_come_a_thousand_times);
async fn e12_the_last_bytes_come_a_thousand_times(world: &World) {
    let mut texts = stream::iter(0..1000).map(|_| world.bash("printf END")).buffer_unordered(AT_ONCE);
    while let Some(text) = texts.next().await {
        assert_eq!(text, "END");
    }
}

every_backend!(e13_the_exit_never_overtakes_the_output with Setup { timeout_ms: 20_000.0, ..Setup::default() });
async fn e13_the_exit_never_overtakes_the_output(world: &World) {
    let numbers: String = (1..=20_000).map(|number| format!("{number}\n")).collect();
    let tail = &numbers[numbers.len() - 64_000..];
    let spec = CommandSpec { command: "seq 1 20000".into(), ..CommandSpec::default() };
    let mut results = stream::iter(0..1000).map(|_| world.run(spec.clone())).buffer_unordered(AT_ONCE);
    while let Some(result) = results.next().await {
        let result = result.expect("it runs");
        assert_eq!(result.stdout.total, numbers.len() as u64);
        assert!(result.stdout.tail == tail.as_bytes(), "the tail differs");
    }
}

/// Waits until a task has written so much.
async fn written(world: &World, id: &executor_proto::types::TaskId, bytes: u64) {
    wait_until("it writes", SOON, async || {
        let tasks = world.list().await;
        tasks.into_iter().find(|task| task.id == *id).filter(|task| task.stdout_total >= bytes)
    })
    .await;
}
