//! Long commands and heredocs run as short ones do (kind H).

use std::time::Duration;

use executor_proto::types::{CommandSpec, EnvironmentVariable};
use executor_tests::{World, every_backend};
use serde_json::json;

const SOON: Duration = Duration::from_secs(10);

/// A command that writes 200 000 bytes and a newline to `f` by a heredoc, and says how many.
fn heredoc() -> String {
    format!("cat > f <<'E'\n{}\nE\nwc -c < f", "x".repeat(200_000))
}

/// A comment that makes any command longer than the kernel's limit of one argument.
fn padding() -> String {
    format!(": '{}'\n", "p".repeat(140_000))
}

every_backend!(h01_a_command_above_the_argument_limit_runs);
async fn h01_a_command_above_the_argument_limit_runs(world: &World) {
    assert_eq!(world.bash(&heredoc()).await, "200001\n");
}

every_backend!(h01_a_long_command_has_the_rules_of_a_short_one);
async fn h01_a_long_command_has_the_rules_of_a_short_one(world: &World) {
    let command =
        "echo \"$0|$#|$-|$BASH_SUBSHELL|$(readlink /proc/self/fd/0)\"; echo /proc/$$/fd/*; (exit 4); echo $?; exit 7";
    let short = world.bash(command).await;
    assert!(short.starts_with("bash|0|hBc|0|/dev/null\n"), "{short}");
    let fds = |text: &str| {
        let line = text.lines().nth(1).unwrap_or_default();
        line.split(' ').filter_map(|fd| fd.rsplit('/').next().map(ToOwned::to_owned)).collect::<Vec<_>>()
    };
    // The directory itself is open while the shell looks.
    assert_eq!(fds(&short), ["0", "1", "2", "3"]);
    let long = world.bash(&(padding() + command)).await;
    assert_eq!(fds(&long), fds(&short));
    let without_fds = |text: &str| text.lines().filter(|line| !line.contains("/fd/")).collect::<Vec<_>>().join("\n");
    assert_eq!(without_fds(&long), without_fds(&short));
    assert!(long.ends_with("\n4\n[exit code: 7]"), "{long}");
    let died = world.bash(&(padding() + "printf before; kill -9 $$")).await;
    assert_eq!(died, "before\n[killed by signal: SIGKILL]");
}

every_backend!(h01_eight_mebibytes_run_and_one_byte_more_does_not);
async fn h01_eight_mebibytes_run_and_one_byte_more_does_not(world: &World) {
    let most = 8 * 1024 * 1024;
    let command = "echo ran #".to_owned();
    let longest = command.clone() + &"x".repeat(most - command.len());
    assert_eq!(world.bash(&longest).await, "ran\n");
    let too_long = longest + "x";
    assert_eq!(world.bash(&too_long).await, "Error: command too large: 8388609 bytes, at most 8388608");
}

every_backend!(h02_one_variable_too_large_is_named);
async fn h02_one_variable_too_large_is_named(world: &World) {
    let with = |bytes: usize| CommandSpec {
        command: "echo ${#X}".into(),
        environment: vec![EnvironmentVariable { name: "X".into(), value: "v".repeat(bytes).into() }],
        ..CommandSpec::default()
    };
    let error = world.run(with(131_072)).await.expect_err("the kernel would not take it");
    assert_eq!(error.to_string(), "environment too large: X: 131074 bytes, at most 131071");
    let result = world.run(with(131_069)).await.expect("the kernel takes it");
    assert_eq!(result.stdout.tail, "131069\n");
    // A model's own `env` has no effect at all.
    let text = world.bash_with("echo ${#X}", json!({"env": {"X": "v".repeat(131_072)}})).await;
    assert_eq!(text, "0\n");
}

every_backend!(h03_in_the_background_it_runs_and_a_failed_start_is_a_failure);
async fn h03_in_the_background_it_runs_and_a_failed_start_is_a_failure(world: &World) {
    let text = world.bash_with("true", json!({"run_in_background": true, "workdir": "/nonexistent-dir"})).await;
    assert_eq!(text, "Error: spawn bash ENOENT: workdir \"/nonexistent-dir\" does not exist");
    let id = world.background(&heredoc()).await;
    assert_eq!(id.0, "bash-1", "a start that failed uses no id");
    world.ended(&id, SOON).await.expect("it ends");
    assert_eq!(world.output(&id).await, "200001\n\n[status: completed, exit code: 0]");
}

every_backend!(h04_nothing_is_put_behind_a_heredoc);
async fn h04_nothing_is_put_behind_a_heredoc(world: &World) {
    assert_eq!(world.bash("cat <<'EOF'\nhello\nEOF").await, "hello\n");
    assert_eq!(world.bash("echo next").await, "next\n");
    let unterminated = world.bash("cat <<EOF\ncontent").await;
    assert!(unterminated.starts_with("content\n[stderr]\nbash: line "), "{unterminated}");
    assert!(unterminated.contains("here-document"), "{unterminated}");
}

every_backend!(h09_no_reader_eats_the_script);
async fn h09_no_reader_eats_the_script(world: &World) {
    for command in ["cat\necho after", "bash -c 'cat >/dev/null'\necho after"] {
        assert_eq!(world.bash(command).await, "after\n");
        assert_eq!(world.bash(&(padding() + command)).await, "after\n");
    }
}
