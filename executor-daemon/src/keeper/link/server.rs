//! The server's process: takes its end of the pair and runs the gRPC server over it.

use std::{ffi::OsString, io, io::Write, os::fd::OwnedFd, process::ExitCode, time::Duration};

use nix::sys::signal::{SigSet, SigmaskHow, Signal};

use super::{KeeperLink, Watcher, take_from_stdin};
use crate::keeper::privileges;

/// The exit code for our own failures.
const FAILED: u8 = 125;
/// How long a server may go on after its keeper is lost.
const ORPHAN_LIMIT: Duration = Duration::from_secs(5);

/// Becomes the server; returns its exit code.
///
/// `user` is empty, or the uid and the gid that it becomes first.
pub(in crate::keeper) fn server_main(user: Vec<OsString>) -> i32 {
    match start_server_main(&user) {
        Ok(code) if code == ExitCode::SUCCESS => 0,
        Ok(_) => 1,
        Err(error) => {
            // In one write: the keeper's lines go the same way. Whoever started the daemon may have closed it.
            let line = format!("executor-daemon: the server cannot start: {error}\n");
            let _ = io::stderr().write_all(line.as_bytes());
            i32::from(FAILED)
        }
    }
}

fn start_server_main(user: &[OsString]) -> io::Result<ExitCode> {
    let link = take_from_stdin()?;
    privileges::become_user(user)?;
    nix::sys::prctl::set_dumpable(false)?;
    // It was started from a descriptor, whose number would be its name.
    nix::sys::prctl::set_name(c"executor-server")?;
    // What a terminal or an operator sends to the whole group is for the keeper to act on.
    let for_the_keeper =
        [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP, Signal::SIGQUIT].into_iter().collect::<SigSet>();
    for_the_keeper.thread_swap_mask(SigmaskHow::SIG_SETMASK)?;
    // Half of the processors at most: they are for the commands, and each thread that is woken for one step costs more than
    // the step.
    let threads = std::thread::available_parallelism().map_or(1, |count| (count.get() / 2).clamp(1, 4));
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(threads).enable_all().build()?;
    let code = runtime.block_on(serve_link(link));
    runtime.shutdown_timeout(Duration::from_secs(1));
    code
}

async fn serve_link(socket: OwnedFd) -> io::Result<ExitCode> {
    Ok(crate::server::main(KeeperLink::greeted(socket).await?).await)
}

/// Ends this process a while after its keeper is lost: without it a server can do nothing, and must not hold the listening
/// sockets of the next daemon.
pub(crate) fn end_with_keeper(link: &KeeperLink) {
    tokio::spawn(exit_without_keeper(link.watcher()));
}

#[expect(clippy::disallowed_methods, reason = "ends a server that cannot go on and did not end by itself")]
async fn exit_without_keeper(watcher: Watcher) {
    watcher.lost().await;
    tokio::time::sleep(ORPHAN_LIMIT).await;
    std::process::exit(i32::from(FAILED));
}
