//! What holds for one tenant: who its commands run as, where, with what, and how much of everything it may have.

mod read;

use std::{ffi::OsString, path::PathBuf};

use executor_proto::types::SandboxMode;
use serde::{Deserialize, Serialize};

pub(super) use self::read::Who;

/// What holds for one tenant. All of it is checked; what a number is compared with is said beside it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TenantRules {
    /// Who its commands run as: an index into the keeper's fixed list. 0: as everybody's who is given nobody else.
    pub identity: u32,
    /// Whether commands may gain privileges by programs that give them (setuid, file capabilities). It is also what the keeper
    /// knows of the identity.
    pub allow_setuid: bool,
    /// Directories that commands may start in or below; each absolute and, when the daemon was started, there. Empty: everywhere.
    pub workdir_roots: Vec<PathBuf>,
    /// Directory that commands start in when none is given. Absolute, and within the roots.
    pub default_workdir: PathBuf,
    /// The environment that commands get, before what the caller sets: already scrubbed, completed by
    /// [`Settings::command_environment`](super::Settings::command_environment), and without what an allow-list leaves out.
    pub environment: Vec<(OsString, OsString)>,
    /// The widest mode that a call may ask for, and that of a call that asks for none.
    #[serde(with = "mode_word")]
    pub sandbox: SandboxMode,
    /// What commands in [`SandboxMode::WorkspaceWrite`] may write besides their workdir and TMPDIR; each absolute and, when the
    /// daemon was started, there.
    pub writable_paths: Vec<PathBuf>,
    /// Whether commands reach the network.
    pub network: bool,
    /// What enforces the mode.
    pub sandbox_tool: SandboxTool,
    /// Tasks and runs of this tenant that may run at the same time. The limit on those of all tenants is
    /// [`Settings::max_tasks`](super::Settings::max_tasks).
    pub max_tasks: u64,
    /// Tasks that may run at the same time for one owner.
    pub max_tasks_per_owner: u64,
    /// Processes that all commands of this tenant may have at the same time. `None`: not limited by this.
    pub max_processes: Option<u64>,
    /// Memory that all commands of this tenant may have at the same time, in bytes. `None`: not limited by this.
    pub max_memory_bytes: Option<u64>,
    /// Size of all spill files of this tenant together, in bytes. `None`: what holds by default.
    pub max_spill_bytes_in_all: Option<u64>,
    /// Size of all spill files of one owner together, in bytes. `None`: what holds by default.
    pub max_spill_bytes_per_owner: Option<u64>,
    /// Output of all commands of this tenant that is taken in a second, in bytes. `None`: not limited by this.
    pub max_output_bytes_per_second: Option<u64>,
    /// Streams that this tenant may have open at the same time to wait for completions or follow output. `None`: not limited by
    /// this.
    pub max_watchers: Option<u64>,
    /// Requests of this tenant that may be under way at the same time. `None`: not limited by this.
    pub max_requests: Option<u64>,
}

/// What enforces a sandbox mode.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum SandboxTool {
    /// The kernel's Landlock.
    Landlock,
    /// The program `bwrap`.
    Bubblewrap,
}

impl SandboxTool {
    /// The words of the configuration.
    pub(super) const WORDS: [(&str, Self); 2] = [("landlock", Self::Landlock), ("bubblewrap", Self::Bubblewrap)];
}

impl TenantRules {
    /// The defaults, for a default workdir and the environment of commands.
    #[must_use]
    pub fn new(default_workdir: PathBuf, environment: Vec<(OsString, OsString)>) -> Self {
        Self {
            identity: 0,
            allow_setuid: false,
            workdir_roots: Vec::new(),
            default_workdir,
            environment,
            sandbox: SandboxMode::DangerFullAccess,
            writable_paths: Vec::new(),
            network: true,
            sandbox_tool: SandboxTool::Landlock,
            max_tasks: 16_384,
            max_tasks_per_owner: 256,
            max_processes: None,
            max_memory_bytes: None,
            max_spill_bytes_in_all: None,
            max_spill_bytes_per_owner: None,
            max_output_bytes_per_second: None,
            max_watchers: None,
            max_requests: None,
        }
    }
}

/// A mode travels as its word.
mod mode_word {
    use executor_proto::types::SandboxMode;
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    #[expect(clippy::trivially_copy_pass_by_ref, reason = "the shape that serde asks for")]
    pub(super) fn serialize<S: Serializer>(mode: &SandboxMode, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(mode.as_str())
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<SandboxMode, D::Error> {
        let word = String::deserialize(deserializer)?;
        SandboxMode::parse(&word).ok_or_else(|| D::Error::custom("no sandbox mode"))
    }
}
