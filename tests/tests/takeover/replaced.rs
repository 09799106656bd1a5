//! What lies at the daemon's path when it is told to replace its server: a newer one that takes over, or something else, which
//! changes nothing.

use std::{fs, os::unix::fs::MetadataExt, path::Path, process::Command};

use executor_proto::types::{Exit, StreamName, TaskId, TaskStatus};
use executor_tests::{Backend, Daemon, Setup, World, processes::Found, run, wait_for, wait_until};
use nix::sys::signal::Signal;

use crate::{LIMIT, assert_counts, counting, kill_server, prepare};

/// Puts a program in the place of the daemon's, as a package manager does: the file of before stays what it is for who has it open.
/// `line` makes `$NEW`.
#[expect(clippy::disallowed_methods, reason = "it is replaced from outside")]
fn replace(daemon: &Daemon, line: &str) {
    let path = daemon.program();
    let mut bash = Command::new("bash");
    bash.args(["-ec", &format!("{line}; mv \"$NEW\" \"$OLD\"")]);
    bash.env("OLD", path).env("NEW", path.with_extension("new")).env("IMPOSTOR", env!("CARGO_BIN_EXE_impostor"));
    assert!(bash.status().expect("there is a bash").success(), "{line}");
}

/// The file that a process runs.
fn runs(one: &Found) -> u64 {
    fs::metadata(format!("/proc/{}/exe", one.pid)).expect("it is alive").ino()
}

fn lies_at(path: &Path) -> u64 {
    fs::metadata(path).expect("it is there").ino()
}

/// Sends SIGHUP and waits until the log has this line once more.
async fn ask(daemon: &Daemon, line: &str) {
    let count = || daemon.log().matches(line).count();
    let before = count();
    daemon.signal(Signal::SIGHUP).expect("sent");
    wait_for(format_args!("{line:?} in the log"), LIMIT, || count() > before).await;
}

/// That a task which was started before has noticed nothing.
async fn assert_went_on(world: &World, id: &TaskId) {
    fs::write(world.tmp().join("go"), "").expect("written");
    assert_eq!(world.ended(id, LIMIT).await.expect("it ends"), TaskStatus::Ended(Exit::Code(7)));
    let (bytes, _) = world.stream(id, StreamName::Stdout, true).await.expect("all of it is there");
    assert_counts(id, &String::from_utf8(bytes).expect("text"));
    wait_for("the notice", LIMIT, || !world.mailbox().taken().is_empty()).await;
}

#[test]
fn a_newer_program_takes_over_and_is_the_one_from_then_on() {
    let setup = Setup { own_program: true, ..Setup::default() };
    run(Backend::Unix, setup, async |world| {
        prepare(world).await;
        let id = world.background(&counting(50)).await;
        let daemon = world.daemon().expect("it is a daemon's world");
        let (first, old) = (daemon.server(), lies_at(daemon.program()));
        assert_eq!(runs(&first), old);
        replace(daemon, "cp \"$OLD\" \"$NEW\"; echo newer >> \"$NEW\"");
        let new = lies_at(daemon.program());

        // A death is no reason to try it.
        kill_server(world).await;
        assert_eq!(world.bash("echo after a death").await, "after a death\n");
        let second = daemon.server();
        assert_eq!(runs(&second), old);

        ask(daemon, "the new server is ready").await;
        assert!(!second.is_alive());
        let third = daemon.server();
        assert_eq!(runs(&third), new);
        assert_eq!(world.bash("echo newer").await, "newer\n");

        // It has proven itself, whatever lies there now.
        replace(daemon, "cp \"$IMPOSTOR\" \"$NEW\"");
        kill_server(world).await;
        assert_eq!(world.bash("echo still newer").await, "still newer\n");
        assert_eq!(runs(&daemon.server()), new);
        assert_went_on(world, &id).await;
    });
}

/// Asks for a replacement by an impostor that fails like this: the server of before stays, also after a death, and the log has
/// these lines.
fn assert_stays(how: &str, program: &str, lines: &[&str]) {
    let environment = [("EXECUTOR_IMPOSTOR".to_owned(), how.to_owned())].into();
    let setup = Setup { own_program: true, environment, ..Setup::default() };
    run(Backend::Unix, setup, async |world| {
        prepare(world).await;
        let id = world.background(&counting(50)).await;
        let daemon = world.daemon().expect("it is a daemon's world");
        let old = lies_at(daemon.program());
        replace(daemon, program);
        let (last, before) = (lines.last().expect("a reason"), daemon.server());
        for _ in 0..2 {
            ask(daemon, last).await;
            assert!(before.is_alive(), "{}", daemon.log());
            assert_eq!(world.bash("echo the old one").await, "the old one\n");
        }
        for line in lines {
            assert_eq!(daemon.log().matches(line).count(), 2, "{line}: {}", daemon.log());
        }
        kill_server(world).await;
        assert_eq!(world.bash("echo the old program").await, "the old program\n");
        assert_eq!(runs(&daemon.server()), old);
        assert_went_on(world, &id).await;
    });
}

const IMPOSTOR: &str = "cp \"$IMPOSTOR\" \"$NEW\"";

#[test]
fn one_that_exits_changes_nothing() {
    assert_stays("exits", IMPOSTOR, &["the new server exited with code 3 before it was ready; the old one stays"]);
}

#[test]
fn one_that_is_never_ready_changes_nothing() {
    let lines = [
        "the new server was not ready in 10s and is ended",
        "the new server was ended by signal 9 before it was ready; the old one stays",
    ];
    assert_stays("is never ready", IMPOSTOR, &lines);
}

#[test]
fn one_that_speaks_another_language_changes_nothing() {
    let lines = [
        "the new server does not speak this keeper's language and is ended",
        "the new server was ended by signal 9 before it was ready; the old one stays",
    ];
    assert_stays("speaks another language", IMPOSTOR, &lines);
}

#[test]
fn a_script_that_would_start_it_changes_nothing() {
    let script = "printf '#!/bin/sh\\nexec \"%s\" \"$@\"\\n' \"$IMPOSTOR\" > \"$NEW\"; chmod 755 \"$NEW\"";
    assert_stays("exits", script, &["before it was ready; the old one stays"]);
}

#[test]
fn a_file_that_is_no_program_changes_nothing() {
    assert_stays(
        "",
        "echo text > \"$NEW\"",
        &["the new server cannot be started (Permission denied (os error 13)); the old one stays"],
    );
}

#[test]
fn one_that_ends_when_it_takes_over_is_followed_by_the_one_of_before() {
    let environment = [("EXECUTOR_IMPOSTOR".to_owned(), "ends when it takes over".to_owned())].into();
    let setup = Setup { own_program: true, environment, ..Setup::default() };
    run(Backend::Unix, setup, async |world| {
        prepare(world).await;
        let id = world.background(&counting(50)).await;
        let daemon = world.daemon().expect("it is a daemon's world");
        let (old, before) = (lies_at(daemon.program()), daemon.server());
        replace(daemon, IMPOSTOR);
        ask(daemon, "the server exited with code 4; starting it again").await;
        assert!(!before.is_alive());
        let text = wait_until("calls are answered", LIMIT, async || Some(world.bash("echo the old program").await));
        assert_eq!(text.await, "the old program\n");
        assert_eq!(runs(&daemon.server()), old, "{}", daemon.log());
        assert_went_on(world, &id).await;
    });
}
