//! The session that a tool call is made for.

use std::path::PathBuf;

use executor_proto::types::{OwnerId, SandboxMode};

/// A calling agent's session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Session {
    /// Its id: the owner of what it starts. The empty string is a real id.
    pub id: OwnerId,
    /// Its workspace: commands start there unless they say otherwise, relative workdirs resolve against it, and in
    /// [`SandboxMode::WorkspaceWrite`] it is what they may write, wherever they start. `None`: the session has no directory.
    pub cwd: Option<PathBuf>,
    /// The sandbox mode of its commands. `None`: the executor's default.
    pub sandbox: Option<SandboxMode>,
}
