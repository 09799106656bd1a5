//! What is cut is the beginning; the cut is marked, and the rest is where the mark says (kind F).

use std::time::Duration;

use executor_proto::types::CommandSpec;
use executor_tests::{Stopwatch, World, every_backend};
use serde_json::json;

/// The path that a cut text names, and the text before the mark.
fn cut(text: &str) -> (&str, &str) {
    let (before, rest) = text.split_once("\n[output truncated; full output: ").unwrap_or_else(|| {
        panic!(
            "it is not marked as cut: …{}",
            text.chars().rev().take(200).collect::<Vec<_>>().iter().rev().collect::<String>()
        )
    });
    let (path, _) = rest.split_once(']').expect("the mark has an end");
    assert!(path.starts_with('/'), "{path}");
    (before, path)
}

const WITH_ERROR_AT_END: &str = "seq 1 500000; echo ERR-AT-END";

every_backend!(f01_the_end_after_a_long_line_is_seen);
async fn f01_the_end_after_a_long_line_is_seen(world: &World) {
    let text = world.bash("python3 -c \"print('a'*3000000)\"; echo FATAL; exit 2").await;
    let (before, path) = cut(&text);
    assert!(before.ends_with("a\nFATAL\n"), "…{}", &before[before.len() - 20..]);
    assert!(text.ends_with(&format!("{path}]\n[exit code: 2]")));
}

every_backend!(f02_the_tail_is_kept);
async fn f02_the_tail_is_kept(world: &World) {
    let text = world.bash(WITH_ERROR_AT_END).await;
    let (before, _) = cut(&text);
    assert!(before.ends_with("499999\n500000\nERR-AT-END\n"));
    assert_eq!(before.len(), 64_000);
}

every_backend!(f03_counts_add_up_and_the_spill_holds_all);
async fn f03_counts_add_up_and_the_spill_holds_all(world: &World) {
    let spec = CommandSpec { command: WITH_ERROR_AT_END.into(), ..CommandSpec::default() };
    let stdout = world.run(spec).await.expect("it runs").stdout;
    let all: String = (1..=500_000).map(|number| format!("{number}\n")).collect::<String>() + "ERR-AT-END\n";
    assert_eq!(stdout.total, all.len() as u64);
    assert_eq!(stdout.dropped + stdout.tail.len() as u64, stdout.total);
    assert!(all.as_bytes().ends_with(&stdout.tail), "the tail is the end");
    let spill = stdout.spill.expect("there is one");
    assert_eq!(spill.cut_at, None);
    let path = std::str::from_utf8(&spill.path).expect("it is text");
    assert!(std::fs::read(path).expect("it can be read") == all.as_bytes(), "the spill is the whole");
}

every_backend!(f04_the_spill_has_the_lines_of_the_output);
async fn f04_the_spill_has_the_lines_of_the_output(world: &World) {
    let text = world.bash("seq 1 200000").await;
    let (_, path) = cut(&text);
    let lines = world.bash(&format!("sed -n 150000,150005p '{path}'")).await;
    assert_eq!(lines, "150000\n150001\n150002\n150003\n150004\n150005\n");
}

every_backend!(f05_the_path_is_true_where_commands_run);
async fn f05_the_path_is_true_where_commands_run(world: &World) {
    let text = world.bash(WITH_ERROR_AT_END).await;
    let (_, path) = cut(&text);
    assert_eq!(world.bash(&format!("sed -n 1p '{path}'; tail -n 1 '{path}'")).await, "1\nERR-AT-END\n");
}

every_backend!(f07_a_timeout_keeps_what_was_written);
async fn f07_a_timeout_keeps_what_was_written(world: &World) {
    let watch = Stopwatch::start();
    let text = world.bash_with("echo PROGRESS; sleep 30", json!({"timeoutMs": 2_000})).await;
    watch.assert_about("the call", Duration::from_secs(2), Duration::from_millis(500));
    assert!(text.starts_with("PROGRESS\n"), "{text}");
}

every_backend!(f13_a_timeout_is_stated);
async fn f13_a_timeout_is_stated(world: &World) {
    let text = world.bash_with("echo PROGRESS; exec sleep 30", json!({"timeoutMs": 500})).await;
    assert_eq!(text, "PROGRESS\n[timed out after 500ms]\n[killed by signal: SIGTERM]");
}
