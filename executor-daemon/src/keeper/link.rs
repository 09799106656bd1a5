//! The engine's end of the pair: asks the keeper and hands its answers and events to whoever waits for them.

use std::{io, os::fd::OwnedFd, path::PathBuf, time::Duration};

use executor_proto::{
    error::ExecutorError,
    types::{Process, StreamName},
};
use tokio::sync::mpsc;

use super::protocol::{Identity, SpawnSpec};
use crate::ids::ProcessHandle;

/// A connection to the keeper. Cheap to clone; dropped last, it lets an embedded keeper end.
#[derive(Debug, Clone)]
pub struct KeeperLink {}

/// What the keeper says of one command after it was started.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ProcessEvent {
    /// The shell was reaped: its raw wait status (`None`: it could not be learned), and whether nothing else of the
    /// command is alive either (then no [`ProcessEvent::Empty`] follows).
    Exited {
        /// As `waitpid` gives it.
        status: Option<i32>,
        /// Nothing is left.
        empty: bool,
    },
    /// Nothing of the command is alive any more. Last.
    Empty,
}

/// A started command.
#[derive(Debug)]
pub struct Spawned {
    /// The keeper's name for it.
    pub handle: ProcessHandle,
    /// The shell's pid.
    pub pid: u32,
    /// Read end of stdout's pipe, non-blocking.
    pub stdout: OwnedFd,
    /// Read end of stderr's pipe, non-blocking.
    pub stderr: OwnedFd,
    /// Stdout's stream file: a sealed memory file of one header page and `ring_bytes`.
    pub stdout_file: OwnedFd,
    /// Stderr's stream file.
    pub stderr_file: OwnedFd,
    /// What happens to it. Closed without [`ProcessEvent::Empty`] only when the keeper is lost.
    pub events: mpsc::UnboundedReceiver<ProcessEvent>,
}

impl KeeperLink {
    /// Who commands may run as; index 0 is the default.
    #[must_use]
    pub fn identities(&self) -> &[Identity] {
        unimplemented!()
    }

    /// Starts a command. `stdin` and `script` must be given exactly where the spec says so.
    ///
    /// Not cancel-safe: a future that is dropped may leave a command running; call it from a task of its own.
    ///
    /// # Errors
    /// [`ExecutorError::Spawn`] when it could not be started; nothing ran then. [`ExecutorError::Internal`] when the keeper
    /// is lost.
    pub async fn spawn(
        &self,
        spec: SpawnSpec,
        stdin: Option<OwnedFd>,
        script: Option<OwnedFd>,
    ) -> Result<Spawned, ExecutorError> {
        let _ = (spec, stdin, script);
        unimplemented!()
    }

    /// Ends everything that comes from a command: SIGTERM, after the grace SIGKILL. Returns when nothing is alive (an
    /// empty list) or, at the latest about 1 s after the grace, with what is; the keeper goes on trying. Cancel-safe.
    /// Several may wait for the same end; the shortest grace counts.
    pub async fn end(&self, handle: ProcessHandle, grace: Duration) -> Vec<u32> {
        let _ = (handle, grace);
        unimplemented!()
    }

    /// What is alive of a command, the shell included, ordered by pid. Empty when the keeper does not know it.
    pub async fn processes(&self, handle: ProcessHandle) -> Vec<Process> {
        let _ = handle;
        unimplemented!()
    }

    /// Makes a spill file and returns it, open for writing, with its path in the world of the commands.
    ///
    /// # Errors
    /// What the file system answered.
    pub async fn open_spill(
        &self,
        handle: ProcessHandle,
        stream: StreamName,
        prefix: String,
    ) -> io::Result<(OwnedFd, PathBuf)> {
        let _ = (handle, stream, prefix);
        unimplemented!()
    }

    /// Removes a spill file.
    pub fn remove_spill(&self, path: PathBuf) {
        let _ = path;
    }

    /// Lets the keeper forget a command of which nothing is alive and everything has been read.
    pub fn release(&self, handle: ProcessHandle) {
        let _ = handle;
    }

    /// Resolves when the keeper asks for a drain (or is lost). Cancel-safe.
    pub async fn drain_requested(&self) {
        unimplemented!()
    }

    /// Tells the keeper that calls are taken.
    pub fn ready(&self) {}

    /// Tells the keeper that everything has ended and this process will exit.
    pub fn drained(&self) {}
}
