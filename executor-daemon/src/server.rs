//! The server process: registry, engine and gRPC.

use std::{os::fd::OwnedFd, process::ExitCode};

use crate::keeper::link::KeeperLink;

/// Serves until the keeper asks for a drain or is lost. The listening sockets are in the order in which they were
/// configured, non-blocking; the settings are what main handed to the keeper.
pub async fn main(link: KeeperLink, listeners: Vec<OwnedFd>, server_settings: Vec<u8>) -> ExitCode {
    let _ = (listeners, server_settings);
    link.ready();
    link.drain_requested().await;
    link.drained();
    ExitCode::SUCCESS
}
