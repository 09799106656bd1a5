//! As PID 1: a tiny init that reaps what nobody else does and forwards signals to the keeper, which is its child. So the
//! keeper never sees strangers (what `docker exec` left behind) among its own orphans.
#![expect(unsafe_code, reason = "forks the keeper")]

use std::{io, os::fd::AsFd, process::ExitCode};

use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::{
        signal::SigSet,
        signalfd::{SfdFlags, SignalFd},
    },
    unistd::{ForkResult, fork, getpid},
};

use super::{
    helper::MAX_REAPED_AT_ONCE,
    tree::{self, Reaped},
};

/// What this process is after [`split`].
#[derive(Debug)]
pub(super) enum Part {
    /// The keeper, which goes on.
    Keeper,
    /// The init, after the keeper has ended: the exit code of the whole.
    Init(ExitCode),
}

/// As PID 1, forks the keeper and stays behind as init until the keeper ends. As any other process does nothing.
pub(super) fn split() -> io::Result<Part> {
    if getpid().as_raw() != 1 {
        return Ok(Part::Keeper);
    }
    SigSet::all().thread_block()?;
    // SAFETY: this process has one thread (it has only parsed its configuration), so the child may go on normally.
    match unsafe { fork() }? {
        ForkResult::Child => Ok(Part::Keeper),
        ForkResult::Parent { child } => Ok(Part::Init(keep_house(child.as_raw())?)),
    }
}

fn keep_house(keeper: i32) -> io::Result<ExitCode> {
    let signals = SignalFd::with_flags(&SigSet::all(), SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC)?;
    let mut more = false;
    loop {
        let timeout = if more { PollTimeout::ZERO } else { PollTimeout::NONE };
        // An interruption is as good as an event.
        let _ = poll(&mut [PollFd::new(signals.as_fd(), PollFlags::POLLIN)], timeout);
        while let Ok(Some(info)) = signals.read_signal() {
            match i32::try_from(info.ssi_signo) {
                Ok(libc::SIGCHLD) | Err(_) => more = true,
                Ok(other) => tree::signal_child(keeper, other),
            }
        }
        for _ in 0..MAX_REAPED_AT_ONCE {
            match tree::reap() {
                Reaped::Child(pid, status) if pid == keeper => return Ok(code_of(status)),
                Reaped::Child(..) => {}
                Reaped::NoneEnded | Reaped::NoChildren => {
                    more = false;
                    break;
                }
            }
        }
    }
}

fn code_of(status: i32) -> ExitCode {
    let code = if libc::WIFEXITED(status) { libc::WEXITSTATUS(status) } else { 128 + libc::WTERMSIG(status) };
    ExitCode::from(u8::try_from(code).unwrap_or(u8::MAX))
}
