//! What the engine's process and the keeper say to each other over the `SOCK_SEQPACKET` pair.
//!
//! Every message is one packet: a postcard-encoded enum, descriptors beside it as `SCM_RIGHTS`. What does not fit into
//! a packet (a large environment) travels in a memory file that is passed along. The first packet from the keeper is
//! [`FromKeeper::Hello`]; since a new server may meet an old keeper, it carries the version, and the enums only grow at
//! their end.
//!
//! ```text
//!   keeper: Hello ─► engine: Standby ─► (the engine before is ended) ─► keeper: Go, Carried… ─► engine: Ready
//! ```

use std::path::PathBuf;

use executor_proto::{
    error::SpawnStage,
    types::{SandboxMode, StreamName},
};
use rustix::thread::CapabilitySet;
use serde::{Deserialize, Serialize};

use crate::ids::ProcessHandle;

/// Version of the messages below.
pub const VERSION: u32 = 5;

/// The answer at [`Stage::Chdir`] for a workdir outside of its roots. No kernel gives it there.
pub const OUTSIDE_ROOTS: i32 = libc::EXDEV;

/// Who commands may run as. The keeper knows a fixed list, read at start, and takes no other.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// The name, for `USER`, `LOGNAME` and people.
    pub name: String,
    /// Numeric user; of several the first.
    pub uid: u32,
    /// How many users it has, with numbers one after the other: one for each owner of a tenant. 1: just that one.
    pub uids: u32,
    /// Numeric group.
    pub gid: u32,
    /// All supplementary groups.
    pub groups: Vec<u32>,
    /// The home directory.
    pub home: PathBuf,
    /// Whether the keeper has to change to it; false: commands run as the keeper itself.
    pub change: bool,
    /// The capabilities that commands have, a bit for each. `None`: what the keeper has.
    pub capabilities: Option<u64>,
    /// Whether commands can gain privileges by executing a program that gives them.
    pub allow_setuid: bool,
}

impl Identity {
    /// Whether commands of it may run as this user.
    #[must_use]
    pub fn has_uid(&self, uid: u32) -> bool {
        (u64::from(self.uid)..u64::from(self.uid) + u64::from(self.uids)).contains(&u64::from(uid))
    }

    /// What its commands have, or can come to, beyond what their user may, as the end of a sentence about them. `None`: nothing.
    #[must_use]
    pub fn gains(&self) -> Option<String> {
        let held = self.capabilities.unwrap_or(0);
        let names = CapabilitySet::all().iter_names().filter(|(_, one)| held & one.bits() == one.bits());
        let names: Vec<_> = names.map(|(name, _)| format!("CAP_{name}")).collect();
        let setuid = self.change && self.allow_setuid;
        match (names.is_empty(), setuid) {
            (true, false) => None,
            (true, true) => Some("can gain privileges by programs such as sudo".to_owned()),
            (false, false) => Some(format!("have {}", names.join(", "))),
            (false, true) => {
                Some(format!("have {} and can gain privileges by programs such as sudo", names.join(", ")))
            }
        }
    }
}

/// What the processes of one tenant may have together. `None`: not limited.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct GroupLimits {
    /// Processes and threads.
    pub max_processes: Option<u64>,
    /// Memory, in bytes.
    pub max_memory_bytes: Option<u64>,
}

/// A command as the keeper starts it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SpawnSpec {
    /// Index into [`FromKeeper::Hello`]'s identities.
    pub identity: u32,
    /// One of that identity's users.
    pub uid: u32,
    /// Number of the tenant's [`GroupLimits`]; what is beyond their number is in no group.
    pub group: u32,
    /// Paths to try in order, as `execvp` does with `PATH`: absolute or relative to `workdir`.
    pub programs: Vec<Vec<u8>>,
    /// Arguments, the name of the program first.
    pub arguments: Vec<Vec<u8>>,
    /// `NAME=value`, all of them.
    pub environment: Vec<Vec<u8>>,
    /// Absolute.
    pub workdir: Vec<u8>,
    /// Absolute paths without symbolic links: the workdir must be one of them or lie below one, as the command itself finds it
    /// when it has gone there. Empty: it may be anywhere.
    pub workdir_roots: Vec<Vec<u8>>,
    /// Whether a descriptor for the command's stdin is passed; else it is `/dev/null`.
    pub stdin: bool,
    /// Whether a descriptor is passed that becomes the command's descriptor 3 (a script too long for an argument).
    pub script: bool,
    /// What it is refused.
    pub confinement: Confinement,
    /// The tenant within whose fence it runs: a domain of signals that commands with the same name here share. `None`: it runs
    /// within none.
    pub fence: Option<String>,
}

/// What the kernel refuses a command beyond what it refuses its user.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Confinement {
    /// The mode that this is made of: only to be told again to the next engine.
    pub mode: Mode,
    /// The directories and files that it may write, absolute and without a symbolic link on the way. What is missing counts as
    /// not named. `None`: whatever its user may.
    pub writable: Option<Vec<Vec<u8>>>,
    /// Whether it gets no sockets but Unix ones.
    pub network_off: bool,
}

impl Default for Confinement {
    /// Nothing.
    fn default() -> Self {
        Self { mode: Mode::DangerFullAccess, writable: None, network_off: false }
    }
}

/// [`SandboxMode`] as it travels here.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub enum Mode {
    ReadOnly,
    WorkspaceWrite,
    DangerFullAccess,
}

impl From<SandboxMode> for Mode {
    fn from(mode: SandboxMode) -> Self {
        match mode {
            SandboxMode::ReadOnly => Self::ReadOnly,
            SandboxMode::WorkspaceWrite => Self::WorkspaceWrite,
            SandboxMode::DangerFullAccess => Self::DangerFullAccess,
        }
    }
}

impl From<Mode> for SandboxMode {
    fn from(mode: Mode) -> Self {
        match mode {
            Mode::ReadOnly => Self::ReadOnly,
            Mode::WorkspaceWrite => Self::WorkspaceWrite,
            Mode::DangerFullAccess => Self::DangerFullAccess,
        }
    }
}

/// A stream, as the keeper names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[allow(missing_docs)]
pub enum Stream {
    Stdout,
    Stderr,
}

impl From<StreamName> for Stream {
    fn from(name: StreamName) -> Self {
        match name {
            StreamName::Stdout => Self::Stdout,
            StreamName::Stderr => Self::Stderr,
        }
    }
}

/// A process of a command, for people.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessEntry {
    /// As the keeper sees it.
    pub pid: u32,
    /// Arguments joined by spaces, at most 256 bytes.
    pub command_line: Vec<u8>,
}

/// A shell that a keeper before this one started, as an engine has recorded it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeftShell {
    /// The engine's name for it.
    pub number: i64,
    /// Its pid, which is also the number of the session that it led.
    pub pid: u32,
    /// Field 22 of its `/proc/PID/stat`: ticks since the boot. `None`: not recorded, so nothing can be proven.
    pub started: Option<u64>,
}

/// What became of the processes of such a shell's session.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Verdict {
    /// None was alive.
    Gone,
    /// These were killed, and none is alive.
    Ended(Vec<u32>),
    /// These were killed and are not gone yet.
    Survive(Vec<u32>),
    /// Something may be alive that could not be proven ours, or not be signalled: nothing is claimed.
    Unverified {
        /// What may be ours.
        pids: Vec<u32>,
        /// Why it was left alone.
        why: String,
    },
}

/// From the engine's process to the keeper.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToKeeper {
    /// Start a command. Descriptors: stdin and script, where the spec says so, in this order.
    Spawn {
        /// The engine's new, unused name for it.
        handle: ProcessHandle,
        /// What.
        spec: SpawnSpec,
    },
    /// End everything that comes from a command: SIGTERM, after the grace SIGKILL, until none is left. Answered by
    /// [`FromKeeper::Ended`] when that is proven, or when what is left had its time; then it goes on all the same.
    End {
        /// Which.
        handle: ProcessHandle,
        /// Milliseconds between SIGTERM and SIGKILL. 0: SIGKILL at once.
        grace_ms: u64,
    },
    /// What is alive of a command. Answered by [`FromKeeper::Processes`].
    List {
        /// Which.
        handle: ProcessHandle,
    },
    /// Hold this stream file (the descriptors: its page, and the file of its ring where that is another) with the command: the
    /// bytes of this stream go into it from now on, and shall outlive the engine's process. It takes the place of one before.
    KeepFile {
        /// Of which command.
        handle: ProcessHandle,
        /// Of which stream.
        stream: Stream,
    },
    /// Make a spill file, owned and readable as the identity of the command demands. Answered by
    /// [`FromKeeper::SpillOpened`] or [`FromKeeper::SpillFailed`].
    OpenSpill {
        /// Of which command.
        handle: ProcessHandle,
        /// Of which stream.
        stream: Stream,
        /// What its name begins with, e.g. `bash-3.stdout`; the keeper appends something random.
        prefix: String,
    },
    /// Everything that can be wrong with this engine's process has been tried: it could take over now. Answered by
    /// [`FromKeeper::Go`] when nobody else is the engine any more.
    Standby,
    /// Remove all spill files but these: nobody knows any more whose the others are.
    SweepSpills {
        /// As [`FromKeeper::SpillOpened`] or [`FromKeeper::Carried`] named them.
        keep: Vec<PathBuf>,
    },
    /// Remove a spill file that [`FromKeeper::SpillOpened`] named.
    RemoveSpill {
        /// Its path.
        path: PathBuf,
    },
    /// The engine hears this helper's news itself from now on. The keeper need not pass on what the helper has told.
    Listening {
        /// Which, as [`FromKeeper::Spawned`] named it.
        helper: u64,
    },
    /// Everything of this command has been taken; the keeper may close its pipes and stream files. Only sent after the news
    /// that nothing of it is alive, which may reach the engine before the keeper.
    Release {
        /// Which.
        handle: ProcessHandle,
    },
    /// The server takes calls. The keeper prints the ready line.
    Ready,
    /// The server has drained and will exit.
    Drained,
    /// End what is alive of the sessions of these shells, of processes that are proven theirs and run as an identity that
    /// commands may have. Answered by [`FromKeeper::LeftEnded`]; a question that comes before the answer takes its place.
    EndLeft {
        /// Which. None of them was started by this keeper.
        shells: Vec<LeftShell>,
        /// About how many milliseconds it may take.
        limit_ms: u64,
    },
    /// Open a spill file for reading that [`FromKeeper::SpillOpened`] once named: its directory may be closed to the engine's
    /// process. Answered by [`FromKeeper::SpillReopened`], in the order of the questions.
    ReopenSpill {
        /// Its path.
        path: PathBuf,
    },
}

/// From the keeper to the engine's process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum FromKeeper {
    /// First. Descriptors: the listening sockets, in the order of `listeners`.
    Hello {
        /// [`VERSION`] of the keeper.
        version: u32,
        /// The random name of this keeper's life: handles mean something within it only.
        keeper: [u8; 16],
        /// Who commands may run as; index 0 is the default.
        identities: Vec<Identity>,
        /// Addresses of the listening sockets, as people write them: `unix:/path`, `tcp:127.0.0.1:80`.
        listeners: Vec<String>,
        /// What main handed over for the server, postcard-encoded.
        server_settings: Vec<u8>,
    },
    /// Started. Descriptors: stdout's read end, stderr's read end and, the first time that the engine meets this helper, the
    /// socket of its news: the ends of its commands, as they would come from the keeper.
    Spawned {
        /// Which.
        handle: ProcessHandle,
        /// The shell's pid.
        pid: u32,
        /// The helper that is its parent. 0: none any more.
        helper: u64,
    },
    /// The engine's process is the engine now. As many [`FromKeeper::Carried`] follow at once.
    Go {
        /// Handles at or above this one are unused.
        first_handle: u64,
        /// Commands of the engine before that were not released.
        carried: u32,
    },
    /// A command that an engine before has started. What happens to it from now on comes as for any other. Descriptors:
    /// stdout's read end, stderr's read end, then those of the stream files and of the spill files that there are, and the
    /// socket of its helper's news if it has one.
    Carried {
        /// Which.
        handle: ProcessHandle,
        /// What is known of its life.
        life: Life,
        /// The shell's pid. 0: not known, or not started yet.
        pid: u32,
        /// The helper that is its parent. 0: none.
        helper: u64,
        /// How many descriptors the stream files of stdout and stderr have: 0 to 2.
        files: [u8; 2],
        /// The paths of the spill files of stdout and stderr.
        spills: [Option<PathBuf>; 2],
        /// The sandbox mode that it was started in.
        mode: Mode,
    },
    /// Not started; nothing ran.
    SpawnFailed {
        /// Which.
        handle: ProcessHandle,
        /// Where it failed.
        stage: Stage,
        /// The kernel's answer.
        errno: i32,
    },
    /// The shell was reaped.
    Exited {
        /// Which.
        handle: ProcessHandle,
        /// The raw wait status. `None`: it could not be learned.
        status: Option<i32>,
        /// Nothing else of the command is alive either; no [`FromKeeper::Empty`] follows.
        empty: bool,
        /// The helper has said it to the engine, too.
        told: bool,
    },
    /// Nothing of the command is alive.
    Empty {
        /// Which.
        handle: ProcessHandle,
        /// The helper has said it to the engine, too.
        told: bool,
    },
    /// The answer to [`ToKeeper::End`].
    Ended {
        /// Which.
        handle: ProcessHandle,
        /// What could not be ended yet, by pid.
        survivors: Vec<u32>,
    },
    /// The answer to [`ToKeeper::List`].
    Processes {
        /// Which.
        handle: ProcessHandle,
        /// Everything alive, the shell included while it is; at most 256 entries.
        processes: Vec<ProcessEntry>,
    },
    /// The file is the descriptor, opened for writing.
    SpillOpened {
        /// Which.
        handle: ProcessHandle,
        /// Which stream.
        stream: Stream,
        /// Its path in the world of the commands.
        path: PathBuf,
    },
    /// There is no spill file.
    SpillFailed {
        /// Which.
        handle: ProcessHandle,
        /// Which stream.
        stream: Stream,
        /// The kernel's answer.
        errno: i32,
    },
    /// The daemon was told to stop: take no more, end everything, then say [`ToKeeper::Drained`].
    Drain,
    /// The answer to [`ToKeeper::EndLeft`].
    LeftEnded {
        /// What became of each, by the engine's number.
        verdicts: Vec<(i64, Verdict)>,
    },
    /// The answer to [`ToKeeper::ReopenSpill`]. Descriptor: the file, where there is no error.
    SpillReopened {
        /// The kernel's answer, when it could not be opened.
        errno: Option<i32>,
    },
}

/// How far a command has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Life {
    /// Its shell has not been reaped, or has not even been started.
    Running,
    /// Its shell was reaped, with this raw wait status (`None`: it could not be learned), and something else lives.
    Leftovers(Option<i32>),
    /// Nothing of it lives; its shell had this status.
    Empty(Option<i32>),
}

/// [`SpawnStage`] as it travels here.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub enum Stage {
    Prepare,
    Clone,
    Setsid,
    Limits,
    Descriptors,
    Identity,
    Chdir,
    Sandbox,
    Exec,
}

impl From<Stage> for SpawnStage {
    fn from(stage: Stage) -> Self {
        match stage {
            Stage::Prepare => Self::Prepare,
            Stage::Clone => Self::Clone,
            Stage::Setsid => Self::Setsid,
            Stage::Limits => Self::Limits,
            Stage::Descriptors => Self::Descriptors,
            Stage::Identity => Self::Identity,
            Stage::Chdir => Self::Chdir,
            Stage::Sandbox => Self::Sandbox,
            Stage::Exec => Self::Exec,
        }
    }
}
