//! What is written down, in the words of the engine. Plain values: the journal neither applies a rule nor asks a clock.
//!
//! The values are stored as postcard, so a field that is added, removed or moved is another format: `store::VERSION` counts
//! them, and a test holds the bytes.

use std::path::PathBuf;

use executor_proto::types::{Exit, TaskStatus};
use serde::{Deserialize, Serialize};

use crate::ids::{Caller, TenantId};

/// The journal's name for one start. Never used twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct StartNumber(pub(crate) i64);

/// The random name that one keeper gives itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(crate) struct KeeperInstance(pub(crate) [u8; 16]);

/// A tenant and one of its owners, or nobody in particular of that tenant.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) struct Account {
    pub(crate) tenant: String,
    pub(crate) owner: Option<String>,
}

impl From<&Caller> for Account {
    fn from(caller: &Caller) -> Self {
        Self { tenant: caller.tenant.0.clone(), owner: caller.owner.as_ref().map(|owner| owner.0.clone()) }
    }
}

impl From<&Account> for Caller {
    fn from(account: &Account) -> Self {
        let owner = account.owner.clone().map(executor_proto::types::OwnerId);
        Self { tenant: TenantId(account.tenant.clone()), owner }
    }
}

/// Foreground or background.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Kind {
    /// `run-N`.
    Run,
    /// `bash-N`.
    Task,
}

/// What is known before the spawn.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Start {
    pub(crate) account: Account,
    pub(crate) key: String,
    pub(crate) kind: Kind,
    /// By which the same command is known again.
    pub(crate) digest: [u8; 32],
    /// As people are shown it: cut.
    pub(crate) command: Vec<u8>,
    pub(crate) workdir: Vec<u8>,
    pub(crate) timeout_ms: f64,
    /// Milliseconds since the Unix epoch.
    pub(crate) begun_at_ms: u64,
    /// The keeper's name for it, where that is known before the spawn.
    pub(crate) handle: Option<u64>,
}

/// What is known after the spawn.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Started {
    /// `bash-N` or `run-N`.
    pub(crate) id: String,
    /// The keeper's name for it.
    pub(crate) handle: u64,
    /// The shell's. 0: not known.
    pub(crate) pid: u32,
    /// Field 22 of the shell's `/proc/PID/stat`: ticks since the boot. `None`: it had ended before it could be looked at.
    pub(crate) pid_started: Option<u64>,
    /// Milliseconds since the Unix epoch.
    pub(crate) at_ms: u64,
}

/// Why something was asked to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub(crate) enum EndCause {
    Timeout,
    Abort,
    Kill,
    CallerGone,
    Stopping,
    Leftovers,
}

impl EndCause {
    const ALL: [Self; 6] = [Self::Timeout, Self::Abort, Self::Kill, Self::CallerGone, Self::Stopping, Self::Leftovers];

    /// The cause as one digit of the stored number.
    pub(super) fn digit(self) -> i64 {
        self as i64 + 1
    }

    /// The causes that a stored number lists, in the order in which they came.
    pub(super) fn listed(mut number: i64) -> Vec<Self> {
        let mut causes = Vec::new();
        while number > 0 {
            let digit = usize::try_from(number % CAUSE_BASE).unwrap_or(0);
            causes.extend(digit.checked_sub(1).and_then(|index| Self::ALL.get(index)));
            number /= CAUSE_BASE;
        }
        causes.reverse();
        causes
    }
}

/// Causes are digits to this base.
pub(super) const CAUSE_BASE: i64 = 8;

/// How a shell ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum ExitFact {
    /// It exited with this code.
    Code(u8),
    /// It died of this signal.
    Signal(u8),
    /// Its end was not seen, for this reason.
    Unknown(String),
}

impl From<&Exit> for ExitFact {
    fn from(exit: &Exit) -> Self {
        match exit {
            Exit::Code(code) => Self::Code(*code),
            Exit::Signal(signal) => Self::Signal(*signal),
            Exit::Unknown(reason) => Self::Unknown(reason.clone()),
        }
    }
}

impl From<ExitFact> for Exit {
    fn from(exit: ExitFact) -> Self {
        match exit {
            ExitFact::Code(code) => Self::Code(code),
            ExitFact::Signal(signal) => Self::Signal(signal),
            ExitFact::Unknown(reason) => Self::Unknown(reason),
        }
    }
}

/// The status of a task.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum StatusFact {
    /// It runs.
    Running,
    /// It ended by itself.
    Ended(ExitFact),
    /// It was ended; the signal that its shell died of.
    Killed(Option<u8>),
}

impl From<&TaskStatus> for StatusFact {
    fn from(status: &TaskStatus) -> Self {
        match status {
            TaskStatus::Running => Self::Running,
            TaskStatus::Ended(exit) => Self::Ended(exit.into()),
            TaskStatus::Killed(signal) => Self::Killed(*signal),
        }
    }
}

impl From<StatusFact> for TaskStatus {
    fn from(status: StatusFact) -> Self {
        match status {
            StatusFact::Running => Self::Running,
            StatusFact::Ended(exit) => Self::Ended(exit.into()),
            StatusFact::Killed(signal) => Self::Killed(signal),
        }
    }
}

/// The facts of an end, when they are final.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Ended {
    pub(crate) exit: ExitFact,
    /// What first asked for it while the shell ran.
    pub(crate) ended_for: Option<EndCause>,
    /// Milliseconds since the Unix epoch when the shell ended.
    pub(crate) at_ms: u64,
    /// Whether the owner is to be told of it.
    pub(crate) to_be_told: bool,
}

/// Answered reads that are kept of a task.
pub(crate) const MAX_READS: usize = 8;

/// One answered read of a task.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Read {
    /// The client's name for it.
    pub(crate) read_id: String,
    /// The status that it was answered with.
    pub(crate) status: StatusFact,
    pub(crate) stdout: ReadRange,
    pub(crate) stderr: ReadRange,
}

/// What one read moved the position of one stream over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ReadRange {
    /// Where the read before it ended.
    pub(crate) from: u64,
    /// The first byte that was shown: above `from` when some were no longer kept.
    pub(crate) shown_from: u64,
    /// Where the next read begins.
    pub(crate) to: u64,
}

/// A start key whose run or task is forgotten.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct UsedKey {
    pub(crate) account: Account,
    pub(crate) key: String,
    pub(crate) kind: Kind,
    pub(crate) digest: [u8; 32],
    /// `None`: whether anything ran is not known.
    pub(crate) id: Option<String>,
    /// Whether its end is known.
    pub(crate) end_known: bool,
    /// Milliseconds since the Unix epoch.
    pub(crate) forgotten_at_ms: u64,
}

/// A completion that waits.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Completed {
    pub(crate) sequence: u64,
    pub(crate) task: String,
    pub(crate) status: StatusFact,
    pub(crate) ended_at_ms: u64,
}

/// One owner's completions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Ledger {
    pub(crate) account: Account,
    /// The number of the latest, acknowledged or not.
    pub(crate) latest: u64,
    /// Those that are not acknowledged, oldest first.
    pub(crate) waiting: Vec<Completed>,
}

/// Where and under whom something was started, seen from here and now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum World {
    /// By the keeper that is there now.
    ThisKeeper,
    /// By another keeper, while the pids meant the same as now.
    SamePids,
    /// By another keeper, under the same kernel but in another pid namespace: a container that was started again.
    OtherPids,
    /// Before the host was started again.
    OtherBoot,
}

/// Everything that is known of one start.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct RecordedStart {
    pub(crate) number: StartNumber,
    pub(crate) world: World,
    pub(crate) start: Start,
    /// `None`: it is not known whether it was started.
    pub(crate) started: Option<Started>,
    /// In the order in which they came.
    pub(crate) asked_to_end: Vec<EndCause>,
    /// `None`: its end is not known.
    pub(crate) ended: Option<Ended>,
    /// Its completion was written.
    pub(crate) told: bool,
    /// The latest reads, the latest first; at most [`MAX_READS`].
    pub(crate) reads: Vec<Read>,
}

/// What a journal held when it was opened.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Recovered {
    /// Oldest first.
    pub(crate) starts: Vec<RecordedStart>,
    /// Oldest first.
    pub(crate) keys: Vec<UsedKey>,
    pub(crate) ledgers: Vec<Ledger>,
    /// Owners without a ledger count their completions from the one after this. 0, but where a journal was lost: then above
    /// all that was ever told, so that no client takes a new one for one that it has had.
    pub(crate) first_sequence: u64,
    /// Where a journal that could not be used was put.
    pub(crate) set_aside: Option<PathBuf>,
}
