//! A keeper of one's own, for a program that runs the engine in its own process.

use std::{io, path::PathBuf};

use super::link::KeeperLink;

/// What an embedded keeper is told.
#[derive(Debug, Clone)]
pub struct EmbeddedOptions {
    /// The program that becomes the keeper: one whose `main` begins with [`super::enter_if_asked`]. `None`: this program.
    pub program: Option<PathBuf>,
    /// Where spill files go; made with mode 0700 if missing.
    pub spill_dir: PathBuf,
}

/// Starts a keeper as a child process. Commands run as the caller. The keeper ends everything and itself when the link is
/// dropped or this process dies.
///
/// # Errors
/// When the program cannot be started or does not answer as a keeper within 10 s.
pub async fn start(options: EmbeddedOptions) -> io::Result<KeeperLink> {
    let _ = options;
    unimplemented!()
}
