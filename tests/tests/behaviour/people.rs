//! What people see is safe to look at (row E7).

use std::process::{Command, Output, Stdio};

use executor_tests::{SESSION, World, binaries, every_daemon, wait_until};

/// Runs the client's command line against the world's daemon.
#[expect(clippy::disallowed_methods, reason = "tests start the programs that they test")]
fn client(world: &World, arguments: &[&str]) -> Output {
    let daemon = world.daemon().expect("there is one");
    let mut command = Command::new(binaries::tool_client());
    command.args(arguments).args(["--endpoint", daemon.endpoint(), "--owner", SESSION]);
    command.arg("--token-file").arg(daemon.token_file());
    command.env_clear().env("HOME", world.tmp()).env("PATH", "/usr/bin:/bin").stdin(Stdio::null());
    command.output().expect("it can be started")
}

every_daemon!(e07_escape_codes_do_not_reach_a_viewer);
async fn e07_escape_codes_do_not_reach_a_viewer(world: &World) {
    // In the command's own text, and in what it prints.
    let id = world
        .background(&format!("printf '\x1b]0;owned\x07'; printf '\\e[2J\\e]0;owned\\a'; {}", world.sleep(300)))
        .await;
    wait_until("it prints", std::time::Duration::from_secs(10), async || {
        world.list().await.into_iter().find(|task| task.id == id && task.stdout_total > 0)
    })
    .await;
    let listed = tokio::task::block_in_place(|| client(world, &["ps"]));
    let shown = String::from_utf8_lossy(&listed.stdout).into_owned();
    assert!(listed.status.success() && shown.contains(&id.0), "{listed:?}");
    for (what, text) in [("ps", shown.as_str()), ("the log", &world.daemon().expect("there is one").log())] {
        let control = text.chars().find(|letter| letter.is_control() && !matches!(letter, '\n' | '\t'));
        assert_eq!(control, None, "{what}: {text:?}");
    }
    // The model and the spill get it as it is.
    let text = world.output(&id).await;
    assert_eq!(text, "\x1b]0;owned\x07\x1b[2J\x1b]0;owned\x07\n[status: running]");
    assert_eq!(world.kill(&id).await, format!("killed background task {id}"));
}
