//! The values that the protocol carries.
//!
//! These are the words of the contract: a *run* is a foreground command, a *task* a background one, an *owner* the
//! session that a call is made for. The daemon's engine returns them, both implementations of the client's executor
//! trait return them, and the text that a model reads is made from them and from nothing else.

use std::fmt;

use bytes::Bytes;

use crate::error::{ExecutorError, NulField, SizedPart};

/// The session that a call is made for. Opaque; the empty string is a real owner.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct OwnerId(pub String);

impl fmt::Display for OwnerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The name of a task, `bash-N`, or of a run, `run-N`. Any text can be asked for; only issued ones are known.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TaskId(pub String);

impl fmt::Display for TaskId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The client's random name for one start, 1 to 128 bytes.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct StartKey(pub String);

/// The client's random name for one read, 1 to 128 bytes.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct ReadId(pub String);

/// One of a command's two output streams.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum StreamName {
    /// Descriptor 1.
    Stdout,
    /// Descriptor 2.
    Stderr,
}

impl StreamName {
    /// Both, in the order in which the model reads them.
    pub const BOTH: [Self; 2] = [Self::Stdout, Self::Stderr];

    /// `stdout` or `stderr`.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Stdout => "stdout",
            Self::Stderr => "stderr",
        }
    }
}

/// How far a command's access to files reaches, from least to most.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum SandboxMode {
    /// May read, may not write.
    ReadOnly,
    /// May write below the session's workdir root, TMPDIR and configured paths.
    WorkspaceWrite,
    /// No limit on files.
    DangerFullAccess,
}

impl SandboxMode {
    /// The word that configuration, texts and command lines use.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::ReadOnly => "read-only",
            Self::WorkspaceWrite => "workspace-write",
            Self::DangerFullAccess => "danger-full-access",
        }
    }
}

/// One variable of an environment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EnvironmentVariable {
    /// Not empty, without `=` and NUL.
    pub name: Bytes,
    /// Without NUL.
    pub value: Bytes,
}

/// A command to start. What it means is the executor's to say; what it may not hold is checked by [`CommandSpec::check`].
#[derive(Debug, Clone, PartialEq, Default)]
pub struct CommandSpec {
    /// The text that `bash -c` gets.
    pub command: Bytes,
    /// Directory to start in: absolute, or relative to the one that the executor was started in. `None`: its default workdir.
    pub workdir: Option<Bytes>,
    /// Set on top of the executor's own environment for commands; a later one wins.
    pub environment: Vec<EnvironmentVariable>,
    /// What the command reads from descriptor 0. `None`: `/dev/null`.
    pub stdin: Option<Bytes>,
    /// Milliseconds, positive. `None`: the executor's default. Ignored for tasks.
    pub timeout_ms: Option<f64>,
    /// `None`: the executor's default.
    pub sandbox_mode: Option<SandboxMode>,
    /// Directory below which [`SandboxMode::WorkspaceWrite`] may write: the session's own. Absolute. `None`: the executor's
    /// default workdir.
    pub workspace: Option<Bytes>,
}

/// How a shell ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Exit {
    /// It exited with this code.
    Code(u8),
    /// It died of this signal, by Linux number.
    Signal(u8),
    /// Its end was not seen, for this reason. Never success.
    Unknown(String),
}

/// Why a command was ended by something that is neither its caller nor its timer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EndedBy {
    /// Its caller did not come back.
    CallerGone,
    /// The executor stops.
    ExecutorStopping,
}

/// A spill file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Spill {
    /// Its path in the world where commands run.
    pub path: Bytes,
    /// Bytes in it when it was cut at its cap. `None`: it holds the whole stream.
    pub cut_at: Option<u64>,
}

/// What is kept of one stream at the end of a run.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct StreamResult {
    /// Bytes that the command wrote.
    pub total: u64,
    /// The last bytes of the stream. `total - tail.len()` were dropped before it. A cut never leaves a part of a valid
    /// character at the start. Empty where the caller took the output as it came.
    pub tail: Bytes,
    /// Bytes before the tail.
    pub dropped: u64,
    /// `None`: there is no spill, because the tail held everything or because none could be kept.
    pub spill: Option<Spill>,
}

/// How a run ended and what it wrote.
#[derive(Debug, Clone, PartialEq)]
pub struct RunResult {
    /// How the shell ended.
    pub exit: Exit,
    /// The timeout that fired, in milliseconds.
    pub timed_out_after_ms: Option<f64>,
    /// Why it was ended, when that was neither the timer nor the caller's abort.
    pub ended_by: Option<EndedBy>,
    /// The caller aborted it.
    pub aborted: bool,
    /// Stdout.
    pub stdout: StreamResult,
    /// Stderr.
    pub stderr: StreamResult,
    /// Processes that should be gone and are not, by pid, ascending.
    pub survivors: Vec<u32>,
    /// Processes that live on after the shell, by pid, ascending.
    pub leftovers: Vec<u32>,
    /// The command failed under a sandbox mode in a way that looks like a denial.
    pub sandbox_denied: Option<SandboxMode>,
    /// Milliseconds from spawn to the shell's exit.
    pub duration_ms: f64,
}

/// What was agreed when a run was started.
#[derive(Debug, Clone, PartialEq)]
pub struct RunAccepted {
    /// `run-N`.
    pub run_id: TaskId,
    /// The timeout in force, in milliseconds.
    pub timeout_ms: f64,
    /// The directory in force.
    pub workdir: Bytes,
    /// The sandbox mode in force.
    pub sandbox_mode: SandboxMode,
}

/// Bytes of one stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StreamChunk {
    /// Which stream.
    pub stream: StreamName,
    /// Offset of the first byte. Above the end of the chunk before: the bytes between are a gap.
    pub offset: u64,
    /// At most [`crate::MAX_CHUNK_BYTES`].
    pub data: Bytes,
}

/// The status of a task.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TaskStatus {
    /// It runs.
    Running,
    /// It ended by itself.
    Ended(Exit),
    /// It was ended by a kill, by the executor, or with its caller. The signal that its shell died of; `None`: it exited by
    /// itself after the request.
    Killed(Option<u8>),
}

/// What a read took from one stream.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct StreamDelta {
    /// Offset of the first byte of `data`.
    pub start: u64,
    /// The new bytes. Whole characters: an incomplete one at the end waits for its rest or the stream's end.
    pub data: Bytes,
    /// Unread bytes before `start` that are no longer kept.
    pub dropped: u64,
    /// `None`: there is no spill, because the tail held everything or because none could be kept.
    pub spill: Option<Spill>,
    /// Unread bytes after `data` that were lost with the host or the executor: the stream ends with them. At least 1 where
    /// something is missing and nobody knows how much.
    pub missing: u64,
}

/// The answer of one read of a task.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TaskOutput {
    /// The status that belongs to this delta.
    pub status: TaskStatus,
    /// Stdout.
    pub stdout: StreamDelta,
    /// Stderr.
    pub stderr: StreamDelta,
}

/// What a kill found and did.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct KillOutcome {
    /// Nothing was alive and nothing was signalled.
    pub already_finished: bool,
    /// Processes that could not be ended yet, by pid, ascending. Empty: none is alive.
    pub survivors: Vec<u32>,
}

/// A process of a task or run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Process {
    /// As the executor sees it.
    pub pid: u32,
    /// Arguments joined by spaces, cut to 256 bytes; may be empty.
    pub command_line: Bytes,
}

/// What people see of a task or run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TaskInfo {
    /// `bash-N` or `run-N`.
    pub id: TaskId,
    /// The session that started it.
    pub owner: Option<OwnerId>,
    /// The command, cut to 4 096 bytes.
    pub command: Bytes,
    /// The directory it was started in.
    pub workdir: Bytes,
    /// What it does.
    pub status: TaskStatus,
    /// Milliseconds since the Unix epoch when it was started.
    pub started_at_ms: u64,
    /// Milliseconds since the Unix epoch when its shell exited.
    pub ended_at_ms: Option<u64>,
    /// Bytes of stdout so far.
    pub stdout_total: u64,
    /// Bytes of stderr so far.
    pub stderr_total: u64,
    /// The pid of its shell while it is not reaped.
    pub shell_pid: Option<u32>,
    /// Processes that are alive after the shell has exited.
    pub leftovers: Vec<Process>,
}

/// The record that a task ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Completion {
    /// Its number within its owner, from 1, growing.
    pub sequence: u64,
    /// The task.
    pub task_id: TaskId,
    /// How it ended; never [`TaskStatus::Running`].
    pub status: TaskStatus,
    /// Milliseconds since the Unix epoch.
    pub ended_at_ms: u64,
}

/// One event of an owner's completion stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WatchEvent {
    /// A task has ended.
    Completion(Completion),
    /// Everything that was waiting has been delivered; what follows is live. Once per stream.
    CaughtUp,
}

/// One event of a stream that is read by offset.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ReadStreamEvent {
    /// The next bytes.
    Chunk(StreamChunk),
    /// Last: where the stream stands.
    End {
        /// Bytes in the whole stream.
        total: u64,
        /// No more will come.
        closed: bool,
    },
}

/// What an executor is, for people and for clients that adapt.
#[derive(Debug, Clone, PartialEq)]
pub struct ExecutorInfo {
    /// Version of the program.
    pub version: String,
    /// Revision of the protocol.
    pub protocol_revision: u32,
    /// Random name of the world of task ids.
    pub instance_id: String,
    /// Name of the host as commands see it.
    pub hostname: String,
    /// The kernel's boot id.
    pub boot_id: String,
    /// Directory that commands start in when none is given.
    pub default_workdir: Bytes,
    /// In milliseconds.
    pub default_timeout_ms: f64,
    /// In milliseconds.
    pub max_timeout_ms: f64,
    /// In bytes, per stream.
    pub max_output_bytes: u64,
    /// In bytes, per stream.
    pub max_spill_bytes: u64,
    /// Between SIGTERM and SIGKILL, in milliseconds.
    pub grace_ms: u64,
    /// In bytes.
    pub max_command_bytes: u64,
    /// In bytes.
    pub max_stdin_bytes: u64,
    /// Running at the same time, for one owner.
    pub max_tasks_per_owner: u64,
    /// Running at the same time, of this tenant.
    pub max_tasks: u64,
    /// Per owner, before the oldest are ended.
    pub max_leftovers_per_owner: u64,
    /// In milliseconds; 0: a run ends with the stream of its client.
    pub resume_window_ms: u64,
    /// In milliseconds.
    pub heartbeat_ms: u64,
    /// The user that commands run as.
    pub run_as_user: String,
    /// Its numeric id.
    pub run_as_uid: u32,
    /// Modes that can be enforced here.
    pub sandbox_modes: Vec<SandboxMode>,
    /// The mode of a command that asks for none, and the widest that may be asked for. `None`: an older executor does not say.
    pub sandbox_mode: Option<SandboxMode>,
    /// Commands cannot use the network.
    pub network_off: bool,
    /// Names of optional behaviour.
    pub features: Vec<String>,
    /// What is not protected in the way this executor runs, one sentence each.
    pub stated_limits: Vec<String>,
    /// What else may be used. `None`: the executor does not say.
    pub budgets: Option<Budgets>,
}

/// How much one tenant may use at most.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Budgets {
    /// All spills together, in bytes.
    pub max_spill_bytes_in_all: u64,
    /// Spills of one owner, in bytes.
    pub max_spill_bytes_per_owner: u64,
    /// Output that is taken in a second, in bytes. 0: as it comes.
    pub max_output_bytes_per_second: u64,
    /// Streams for completions and output, at the same time.
    pub max_watchers: u64,
    /// Other calls under way, but for those that end something.
    pub max_requests: u64,
    /// Processes of all commands at the same time. 0: not limited by the executor.
    pub max_processes: u64,
    /// Memory of all commands at the same time, in bytes. 0: not limited by the executor.
    pub max_memory_bytes: u64,
}

/// Largest workdir that is passed on, in bytes: what the kernel takes as one variable, since bash keeps it in `PWD`.
/// (A path above 4 095 bytes is passed on too, and answered with the kernel's ENAMETOOLONG.)
pub const MAX_WORKDIR_BYTES: usize = 131_071;

impl CommandSpec {
    /// Whether this can be started at all, as far as that can be told without an executor. Both sides call it: a client
    /// before it sends, the executor before it believes.
    ///
    /// # Errors
    /// [`ExecutorError::InvalidRequest`], [`ExecutorError::NulByte`] or [`ExecutorError::TooLarge`], in the order of the
    /// fields.
    pub fn check(&self) -> Result<(), ExecutorError> {
        let Self { command, workdir, environment, stdin, timeout_ms, sandbox_mode: _, workspace } = self;
        if command.is_empty() {
            return Err(ExecutorError::invalid("command", "is empty"));
        }
        at_most(SizedPart::Command, command.len(), crate::MAX_COMMAND_BYTES)?;
        without_nul(NulField::Command, command)?;
        if let Some(workdir) = workdir {
            if workdir.is_empty() {
                return Err(ExecutorError::invalid("workdir", "is empty"));
            }
            at_most(SizedPart::Workdir, workdir.len(), MAX_WORKDIR_BYTES)?;
            without_nul(NulField::Workdir, workdir)?;
        }
        for EnvironmentVariable { name, value } in environment {
            if name.is_empty() || name.contains(&b'=') {
                return Err(ExecutorError::invalid("environment", "holds a name that is empty or contains ="));
            }
            without_nul(NulField::Environment, name)?;
            without_nul(NulField::Environment, value)?;
            let bytes = name.len() + 1 + value.len();
            if bytes > crate::MAX_ENVIRONMENT_VARIABLE_BYTES {
                return Err(ExecutorError::TooLarge {
                    part: SizedPart::Environment,
                    name: Some(String::from_utf8_lossy(&name[..name.len().min(MAX_NAME_IN_ERROR_BYTES)]).into_owned()),
                    bytes: bytes as u64,
                    limit: crate::MAX_ENVIRONMENT_VARIABLE_BYTES as u64,
                });
            }
        }
        if let Some(stdin) = stdin {
            at_most(SizedPart::Stdin, stdin.len(), crate::MAX_COMMAND_BYTES)?;
        }
        if let Some(timeout_ms) = timeout_ms
            && (timeout_ms.is_nan() || *timeout_ms <= 0.0)
        {
            return Err(ExecutorError::invalid("timeout_ms", "is not a positive number"));
        }
        if let Some(workspace) = workspace {
            if !workspace.starts_with(b"/") || workspace.contains(&0) {
                return Err(ExecutorError::invalid("workspace", "is not an absolute path"));
            }
            at_most(SizedPart::Workdir, workspace.len(), MAX_WORKDIR_BYTES)?;
        }
        Ok(())
    }
}

/// A variable's name is cut to this many bytes in an error, so that the error fits into a reply's headers.
const MAX_NAME_IN_ERROR_BYTES: usize = 256;

fn at_most(part: SizedPart, bytes: usize, limit: usize) -> Result<(), ExecutorError> {
    if bytes > limit {
        return Err(ExecutorError::TooLarge { part, name: None, bytes: bytes as u64, limit: limit as u64 });
    }
    Ok(())
}

fn without_nul(field: NulField, bytes: &[u8]) -> Result<(), ExecutorError> {
    if bytes.contains(&0) { Err(ExecutorError::NulByte { field }) } else { Ok(()) }
}
