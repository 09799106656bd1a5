//! Everything that we could think of to get past the daemon's fences, each attempt a row in a table, in two modes: a daemon that
//! is root and runs commands as others, and one that is an ordinary user. A row counts when what it is about was there to be had
//! (the file can be read by whoever may, the same system call works on a process of one's own), and was not got.

mod calls;
mod commands;
mod files;
mod frames;
mod network;
mod processes;
mod report;
mod rig;
mod script;
mod sockets;
mod values;
mod wire;

use executor_tests::{block_on, tell};
use nix::unistd::Uid;
use report::Report;
use rig::{Mode, Rig};

/// A uid that nobody has: not in any list of users, and not handed out by anybody.
const ORDINARY: u32 = 64_321;

#[test]
fn on_a_daemon_that_is_root() {
    if !Uid::effective().is_root() {
        return tell("not attacked: a daemon that is root, which only root can start");
    }
    block_on(attack(Mode::Root));
}

#[test]
fn on_a_daemon_that_is_an_ordinary_user() {
    if !Uid::effective().is_root() {
        return tell(
            "not attacked: a daemon that is an ordinary user, whose files only root can put where they can be hidden",
        );
    }
    block_on(attack(Mode::User(ORDINARY)));
}

async fn attack(mode: Mode) {
    let rig = Rig::start(mode).await;
    let mut report = Report::new(mode);
    calls::attack(&rig, &mut report).await;
    values::attack(&rig, &mut report).await;
    rig.assert_whole("the attacks by calls").await;
    network::attack(&rig, &mut report).await;
    rig.assert_whole("the attacks from the network").await;
    processes::attack(&rig, &mut report).await;
    rig.assert_whole("the attacks on its processes").await;
    files::attack(&rig, &mut report).await;
    rig.assert_whole("the attacks on its files").await;
    sockets::attack(&rig, &mut report).await;
    rig.assert_whole("the attacks on its sockets").await;
    commands::attack(&rig, &mut report).await;
    rig.assert_whole("the attacks by commands").await;
    frames::attack(&rig, &mut report).await;
    rig.assert_whole("the attacks by frames").await;
    report.finish();
}
