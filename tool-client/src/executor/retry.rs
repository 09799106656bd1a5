//! What may be sent again after a failure: one table, for every call of the protocol.
//!
//! The rule behind the table: a call is sent again only where that cannot do anything twice. Whether a request can have
//! reached the executor is known, not guessed (see `connect`): a request whose body was never handed to a connection has
//! done nothing, so any call may be repeated then. After that only calls that change nothing, or the same thing, may.

use std::time::Duration;

/// The calls of `executor.v1`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Rpc {
    GetInfo,
    Run,
    CancelRun,
    StartTask,
    ReadOutput,
    KillTask,
    GetTask,
    ListTasks,
    WatchTasks,
    AckCompletions,
    ReadStream,
}

/// What a call does, as far as repeating it goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Effect {
    /// Nothing, or the same however often it is made.
    None,
    /// It starts a command: lost after it was sent, the outcome is unknown.
    Starts,
    /// It changes what a second one would answer: a read moves the position, a second kill finds nothing.
    Once,
}

impl Rpc {
    /// The table.
    pub(super) const fn effect(self) -> Effect {
        match self {
            Self::GetInfo | Self::GetTask | Self::ListTasks | Self::WatchTasks | Self::ReadStream => Effect::None,
            // "Up to and including": the second one finds nothing left to forget.
            Self::AckCompletions => Effect::None,
            Self::Run | Self::StartTask => Effect::Starts,
            Self::ReadOutput | Self::KillTask | Self::CancelRun => Effect::Once,
        }
    }

    /// Whether the call may be made again after its connection failed.
    pub(super) const fn may_repeat(self, sent: bool) -> bool {
        !sent || matches!(self.effect(), Effect::None)
    }
}

/// Pauses between attempts, before the jitter. Together they outlast the moment in which a daemon is being replaced, and
/// still let a person who mistyped an endpoint know within half a second.
const PAUSES: [Duration; 3] = [Duration::from_millis(40), Duration::from_millis(100), Duration::from_millis(220)];

/// How long to wait before attempt number `failed + 1`; `None`: give up. `jitter` is 0 to 1 and spreads clients that lost
/// the same executor at the same moment.
pub(super) fn pause(failed: usize, jitter: f64) -> Option<Duration> {
    PAUSES.get(failed.checked_sub(1)?).map(|pause| pause.mul_f64(0.5 + jitter.clamp(0.0, 1.0)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_may_be_made_again_is_this_table() {
        let table = [
            // call, repeated when it was never sent, repeated when it may have arrived
            (Rpc::GetInfo, true, true),
            (Rpc::Run, true, false),
            (Rpc::CancelRun, true, false),
            (Rpc::StartTask, true, false),
            (Rpc::ReadOutput, true, false),
            (Rpc::KillTask, true, false),
            (Rpc::GetTask, true, true),
            (Rpc::ListTasks, true, true),
            (Rpc::WatchTasks, true, true),
            (Rpc::AckCompletions, true, true),
            (Rpc::ReadStream, true, true),
        ];
        for (rpc, unsent, sent) in table {
            assert_eq!((rpc.may_repeat(false), rpc.may_repeat(true)), (unsent, sent), "{rpc:?}");
        }
    }

    #[test]
    fn pauses_grow_are_few_and_spread() {
        let all: Vec<_> = (1..).map_while(|failed| pause(failed, 0.5)).collect();
        assert_eq!(all.len(), PAUSES.len());
        assert!(all.is_sorted());
        assert_eq!(pause(0, 0.5), None);
        assert!(pause(1, 0.0) < pause(1, 1.0));
        let longest: Duration = (1..).map_while(|failed| pause(failed, 1.0)).sum();
        assert!(longest < Duration::from_secs(1), "{longest:?}");
    }
}
