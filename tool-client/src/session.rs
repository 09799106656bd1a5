//! The session that a tool call is made for.

use std::path::PathBuf;

use executor_proto::types::OwnerId;

/// A calling agent's session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Session {
    /// Its id: the owner of what it starts. The empty string is a real id.
    pub id: OwnerId,
    /// Its workspace: commands start there unless they say otherwise, and relative workdirs resolve against it. `None`: the
    /// session has no directory.
    pub cwd: Option<PathBuf>,
}
