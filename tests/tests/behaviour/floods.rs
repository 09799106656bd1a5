//! No amount of output makes the executor large or slow (rows G5, G7, G9).

use std::time::Duration;

use executor_tests::{Setup, Stopwatch, World, every_backend, every_daemon};
use serde_json::json;

every_daemon!(g05_a_gibibyte_leaves_the_memory_as_it_was
    with Setup { timeout_ms: 120_000.0, max_timeout_ms: 120_000.0, ..Setup::default() });
async fn g05_a_gibibyte_leaves_the_memory_as_it_was(world: &World) {
    const MOST_KIB: u64 = 16 * 1024;
    let daemon = world.daemon().expect("there is one");
    assert_eq!(world.bash("true").await, "(no output)");
    let before = daemon.resident_kib();
    assert!(before > 0, "it can be measured");
    let text = world.bash("head -c 1073741824 /dev/zero | tr '\\0' x; echo END").await;
    assert!(text.contains("xEND\n\n[output truncated; full output: /"), "it was cut");
    assert!(text.ends_with(" (first 67108864 bytes)]"), "{}", &text[text.len() - 200..]);
    let after = daemon.resident_kib();
    assert!(after < before + MOST_KIB, "{before} KiB before, {after} KiB after");
}

every_backend!(g07_a_flood_does_not_starve_the_timer);
async fn g07_a_flood_does_not_starve_the_timer(world: &World) {
    let watch = Stopwatch::start();
    let text = world.bash_with("yes", json!({"timeoutMs": 3_000})).await;
    watch.assert_about("the call", Duration::from_secs(3), Duration::from_millis(500));
    assert!(text.ends_with("]\n[timed out after 3000ms]\n[killed by signal: SIGTERM]"));
    world.assert_no_survivors("after the timeout");
}

every_backend!(g09_one_line_of_157_megabytes with Setup { timeout_ms: 60_000.0, max_timeout_ms: 60_000.0, ..Setup::default() });
async fn g09_one_line_of_157_megabytes(world: &World) {
    let text = world.bash("head -c 157000000 /dev/zero | tr '\\0' x").await;
    assert!(text.starts_with(&("x".repeat(64_000) + "\n[output truncated; full output: /")));
    assert!(text.len() < 65_000);
}
