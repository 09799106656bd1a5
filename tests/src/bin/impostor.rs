//! A program that lies at the daemon's path and is no server that could take over. What is wrong with it is in its environment.

use std::{io, os::fd::AsFd, os::fd::AsRawFd, process::ExitCode};

use executor_daemon::keeper::protocol::ToKeeper;
use nix::sys::socket::{MsgFlags, recv, send};

/// The variable that says how it fails.
const HOW: &str = "EXECUTOR_IMPOSTOR";

/// The first byte of a packet whose message follows. What a message is says its first byte; there is none that is 99.
const INLINE: u8 = 0;

fn main() -> ExitCode {
    match std::env::var(HOW).as_deref() {
        Ok("exits") => ExitCode::from(3),
        Ok("is never ready") => match hear_everything() {
            Ok(()) => ExitCode::SUCCESS,
            Err(_) => ExitCode::FAILURE,
        },
        Ok("speaks another language") => match say(&[INLINE, 99]) {
            // However it is told that nobody listens, it stays until it is killed.
            Ok(()) => loop {
                std::thread::park();
            },
            Err(_) => ExitCode::FAILURE,
        },
        // Its turn has come with the keeper's second message.
        Ok("ends when it takes over") => match say_standby().and_then(|()| hear()).and_then(|_hello| hear()) {
            Ok(_go) => ExitCode::from(4),
            Err(_) => ExitCode::FAILURE,
        },
        _ => ExitCode::from(64),
    }
}

fn say_standby() -> io::Result<()> {
    say(&postcard::to_extend(&ToKeeper::Standby, vec![INLINE]).map_err(io::Error::other)?)
}

/// Sends a packet to the keeper, whose link is where other programs have their stdin.
fn say(packet: &[u8]) -> io::Result<()> {
    let link = io::stdin().as_fd().try_clone_to_owned()?;
    send(link.as_raw_fd(), packet, MsgFlags::empty())?;
    Ok(())
}

/// Receives a packet; how long it is, 0 at the end.
fn hear() -> io::Result<usize> {
    let link = io::stdin().as_fd().try_clone_to_owned()?;
    Ok(recv(link.as_raw_fd(), &mut [0; 1024], MsgFlags::empty())?)
}

fn hear_everything() -> io::Result<()> {
    while hear()? > 0 {}
    Ok(())
}
