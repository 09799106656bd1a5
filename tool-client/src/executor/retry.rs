//! What may be made again after a failure: one table, for every call of the protocol.
//!
//! The rule behind the table: a call is made again only where that cannot do anything twice. Whether a request can have
//! reached the executor is known, not guessed (see `connect`): a request whose body was never handed to a connection has
//! done nothing, so any call may be repeated then. After that only calls that change nothing or the same thing may, and those
//! whose name the executor remembers (a start key, a read's id), where it announces that it does.

#[cfg(test)]
mod schedules;

use std::time::Duration;

use super::backoff::Backoff;

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

/// What is known of a call that has failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Reached {
    /// Its request was never handed to a connection.
    NotSent,
    /// It may have arrived, and no answer came.
    NoAnswer,
    /// One side does not trust the other's certificate, or only one of them speaks TLS: nothing arrived, nor would it the
    /// next time.
    Untrusted,
    /// The executor has said no.
    Answered,
}

/// What the executor announces of what it remembers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Features {
    /// A start is made once for each key, and a run can be attached to.
    pub(super) resume: bool,
    /// The latest read is answered the same again.
    pub(super) read_id: bool,
}

impl Features {
    /// Reads the names that the executor announces.
    pub(super) fn of(names: &[String]) -> Self {
        let has = |name: &str| names.iter().any(|one| one == name);
        Self { resume: has("resume"), read_id: has("read-id") }
    }
}

impl Rpc {
    /// What the call does.
    pub(super) const fn effect(self) -> Effect {
        match self {
            Self::GetInfo | Self::GetTask | Self::ListTasks | Self::WatchTasks | Self::ReadStream => Effect::None,
            // "Up to and including": the second one finds nothing left to forget.
            Self::AckCompletions => Effect::None,
            Self::Run | Self::StartTask => Effect::Starts,
            Self::ReadOutput | Self::KillTask | Self::CancelRun => Effect::Once,
        }
    }

    /// The table.
    pub(super) const fn may_repeat(self, reached: Reached, features: Features) -> bool {
        match (reached, self) {
            (Reached::Answered | Reached::Untrusted, _) => false,
            (Reached::NotSent, _) => true,
            (Reached::NoAnswer, Self::Run | Self::StartTask) => features.resume,
            // Its run is known by the key, so a second one ends nothing else.
            (Reached::NoAnswer, Self::CancelRun) => features.resume,
            (Reached::NoAnswer, Self::ReadOutput) => features.read_id,
            // Ids are not used again, so a second one ends nothing else. An executor that keeps no runs over a cut may have
            // been replaced by one that does not know the task.
            (Reached::NoAnswer, Self::KillTask) => features.resume,
            (
                Reached::NoAnswer,
                Self::GetInfo
                | Self::GetTask
                | Self::ListTasks
                | Self::WatchTasks
                | Self::ReadStream
                | Self::AckCompletions,
            ) => true,
        }
    }
}

/// How often a call is made again to an executor that is not there. The pauses together outlast the moment in which a daemon
/// is being replaced, and a person who mistyped an endpoint still knows within a second.
const RETRIES: u32 = 4;

/// The pauses before another attempt. The longest is for those who have something of theirs on the executor.
const PACE: Backoff = Backoff { first: Duration::from_millis(50), longest: Duration::from_secs(2) };
/// The least of them: less only makes work for a host that is starting something.
const LEAST: Duration = Duration::from_millis(20);

/// How long to wait before a call is made again that has failed so often, from 1; `None`: give up. `fraction` is 0 to 1.
pub(super) fn pause(failures: u32, fraction: f64) -> Option<Duration> {
    (failures <= RETRIES).then(|| wait(failures, fraction))
}

/// The same for an executor that was lost with something of ours on it, which is looked for until its time is over.
pub(super) fn wait(failures: u32, fraction: f64) -> Duration {
    PACE.pause(failures, fraction).max(LEAST)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_may_be_made_again_is_this_table() {
        let none = Features::default();
        let all = Features { resume: true, read_id: true };
        let table = [
            // call, repeated when it may have arrived: without the features, with them
            (Rpc::GetInfo, true, true),
            (Rpc::Run, false, true),
            (Rpc::CancelRun, false, true),
            (Rpc::StartTask, false, true),
            (Rpc::ReadOutput, false, true),
            (Rpc::KillTask, false, true),
            (Rpc::GetTask, true, true),
            (Rpc::ListTasks, true, true),
            (Rpc::WatchTasks, true, true),
            (Rpc::AckCompletions, true, true),
            (Rpc::ReadStream, true, true),
        ];
        for (rpc, without, with) in table {
            let repeated = |features| rpc.may_repeat(Reached::NoAnswer, features);
            assert_eq!((repeated(none), repeated(all)), (without, with), "{rpc:?}");
            for features in [none, all] {
                assert!(rpc.may_repeat(Reached::NotSent, features), "{rpc:?}");
                assert!(!rpc.may_repeat(Reached::Answered, features), "{rpc:?}");
                assert!(!rpc.may_repeat(Reached::Untrusted, features), "{rpc:?}");
            }
        }
        // Each feature is about its own calls.
        assert!(!Rpc::ReadOutput.may_repeat(Reached::NoAnswer, Features { resume: true, read_id: false }));
        assert!(!Rpc::StartTask.may_repeat(Reached::NoAnswer, Features { resume: false, read_id: true }));
    }

    #[test]
    fn features_are_read_by_name() {
        let of = |names: &[&str]| Features::of(&names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>());
        assert_eq!(of(&["spill", "resumed"]), Features::default());
        assert_eq!(of(&["resume", "follow"]), Features { resume: true, read_id: false });
        assert_eq!(of(&["read-id"]), Features { resume: false, read_id: true });
    }

    #[test]
    fn pauses_are_few_and_soon_over() {
        let all = |fraction| (1..).map_while(move |failures| pause(failures, fraction));
        assert_eq!(all(1.0).map(|pause| pause.as_millis()).collect::<Vec<_>>(), [50, 100, 200, 400]);
        assert_eq!(all(0.0).collect::<Vec<_>>(), [LEAST; 4]);
        assert!(all(1.0).sum::<Duration>() < Duration::from_secs(1));
    }

    #[test]
    fn waits_grow_to_their_bound_and_never_end() {
        assert_eq!((wait(9, 0.0), wait(9, 1.0), wait(u32::MAX, 1.0)), (LEAST, PACE.longest, PACE.longest));
        assert_eq!(wait(6, 0.5), Duration::from_millis(800));
    }
}
