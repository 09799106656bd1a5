//! Directories that go away (kind L).

use std::{fs, time::Duration};

use executor_tests::{Backend, Stopwatch, World, every_backend, on_backend};
use nix::unistd::Uid;
use serde_json::json;

const AT_ONCE: Duration = Duration::from_millis(1_500);

every_backend!(l01_a_directory_that_is_gone_is_named_and_spoils_nothing);
async fn l01_a_directory_that_is_gone_is_named_and_spoils_nothing(world: &World) {
    let directory = world.tmp().join("gone");
    let there = json!({"workdir": directory});
    fs::create_dir(&directory).expect("it can be made");
    assert_eq!(world.bash_with("pwd", there.clone()).await, format!("{}\n", directory.display()));
    fs::remove_dir(&directory).expect("it can be removed");
    let watch = Stopwatch::start();
    let gone = format!("Error: spawn bash ENOENT: workdir \"{}\" does not exist", directory.display());
    assert_eq!(world.bash_with("pwd", there.clone()).await, gone);
    watch.assert_within("the refusal", AT_ONCE);
    assert_eq!(world.bash_with("pwd", json!({"workdir": "/usr"})).await, "/usr\n");
    assert_eq!(world.bash_with("pwd", there.clone()).await, gone);
    fs::create_dir(&directory).expect("it can be made");
    assert_eq!(world.bash_with("pwd", there).await, format!("{}\n", directory.display()));
}

every_backend!(l01_a_command_may_remove_its_own_directory);
async fn l01_a_command_may_remove_its_own_directory(world: &World) {
    let text = world.bash("d=$(mktemp -d -p .); cd $d; rmdir ../$d; ls; echo on; git status; echo rc=$?").await;
    assert!(text.starts_with("on\nrc=128\n[stderr]\n"), "{text}");
}

on_backend!(Backend::Unix, l04_the_daemon_does_not_need_the_directory_it_was_started_in);
async fn l04_the_daemon_does_not_need_the_directory_it_was_started_in(world: &World) {
    let daemon = world.daemon().expect("there is one");
    let own = daemon.processes();
    assert!(own.len() >= 2, "a keeper and a server: {own:?}");
    for process in own {
        match fs::read_link(format!("/proc/{}/cwd", process.pid)) {
            Ok(cwd) => assert_eq!(cwd.to_str(), Some("/"), "{process:?}"),
            Err(hidden) => assert!(!Uid::effective().is_root(), "root may see it: {hidden}"),
        }
    }
    fs::remove_dir_all(world.tmp()).expect("it can be removed");
    assert_eq!(world.bash_with("pwd", json!({"workdir": "/usr"})).await, "/usr\n");
    let gone = format!("Error: spawn bash ENOENT: workdir \"{}\" does not exist", world.tmp().display());
    assert_eq!(world.bash("pwd").await, gone);
    fs::create_dir(world.tmp()).expect("it can be made");
    assert_eq!(world.bash("pwd").await, format!("{}\n", world.tmp().display()));
}
