//! What a failed call means: a status becomes an [`ExecutorError`], by its reason where it carries one, else by whether the
//! request can have reached the executor. Never by its text.

use std::{error::Error, time::Duration};

use executor_proto::error::ExecutorError;
use tonic::{Code, Status};

use super::{
    connect::{ConnectFailure, Peer, Sent},
    retry::{Effect, Reached, Rpc},
};

/// Why a call has no answer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Fault {
    /// It has one: the executor, or something before it, said no.
    Answer(ExecutorError),
    /// One side does not trust the other: no request was read, and none would be the next time.
    Untrusted {
        /// Why, as people read it.
        cause: String,
    },
    /// The connection failed.
    Lost {
        /// Why, as people read it.
        cause: String,
        /// Whether the request can have arrived.
        sent: bool,
    },
    /// Nothing came for so long.
    Silence {
        /// How long.
        after: Duration,
        /// Whether the request can have arrived.
        sent: bool,
    },
}

impl Fault {
    /// Reads the status of a call whose request was handed out as `sent` says.
    pub(super) fn of(status: &Status, sent: &Sent) -> Self {
        if let Some(error) = ExecutorError::from_status(status) {
            return Self::Answer(error);
        }
        match find::<ConnectFailure>(status) {
            Some(ConnectFailure::Untrusted(cause)) => return Self::Untrusted { cause: cause.clone() },
            Some(ConnectFailure::Passing(cause)) => return Self::Lost { cause: cause.clone(), sent: false },
            None => {}
        }
        match status.code() {
            Code::Unimplemented => Self::Answer(ExecutorError::UnsupportedVersion {
                speaks: "it does not know this call of executor.v1".to_owned(),
            }),
            // Without a reason of ours it comes from something between here and the executor.
            Code::Unauthenticated | Code::PermissionDenied => {
                Self::Answer(ExecutorError::Refused { reason: cause(status) })
            }
            Code::Ok
            | Code::Cancelled
            | Code::Unknown
            | Code::InvalidArgument
            | Code::DeadlineExceeded
            | Code::NotFound
            | Code::AlreadyExists
            | Code::ResourceExhausted
            | Code::FailedPrecondition
            | Code::Aborted
            | Code::OutOfRange
            | Code::Internal
            | Code::Unavailable
            | Code::DataLoss => Self::Lost { cause: cause(status), sent: sent.get() && !refused_unprocessed(status) },
        }
    }

    /// A peer that does not even speak HTTP/2 has read no request, nor has one that has closed without a word.
    pub(super) fn on_behalf_of(self, peer: &Peer) -> Self {
        match self {
            Self::Lost { .. } if peer.is_tls() => {
                Self::Untrusted { cause: "it speaks TLS; use https:// (and --ca)".to_owned() }
            }
            Self::Lost { cause, sent } => match peer.refusal() {
                Some(cause) => Self::Untrusted { cause },
                None => Self::Lost { cause, sent }.of_a_stranger(peer),
            },
            Self::Answer(_) | Self::Untrusted { .. } | Self::Silence { .. } => self,
        }
    }

    fn of_a_stranger(self, peer: &Peer) -> Self {
        match self {
            Self::Lost { .. } if peer.is_foreign() => {
                Self::Answer(ExecutorError::UnsupportedVersion { speaks: "it does not speak HTTP/2".to_owned() })
            }
            Self::Lost { .. } if peer.is_mute() => {
                Self::Lost { cause: "it closed the connection without a word".to_owned(), sent: false }
            }
            Self::Answer(_) | Self::Untrusted { .. } | Self::Lost { .. } | Self::Silence { .. } => self,
        }
    }

    /// What is known of a call that failed with this. `None`: it was silent for its whole deadline and has had its time.
    pub(super) fn reached(&self) -> Option<Reached> {
        match self {
            Self::Answer(_) => Some(Reached::Answered),
            Self::Untrusted { .. } => Some(Reached::Untrusted),
            Self::Lost { sent: true, .. } => Some(Reached::NoAnswer),
            Self::Lost { sent: false, .. } => Some(Reached::NotSent),
            Self::Silence { .. } => None,
        }
    }

    /// The same as the failure of a call whose earlier attempt may have arrived: that one may have done something, whatever
    /// became of this one, unless the executor's answer is about the key that both have.
    pub(super) fn after_lost_attempt(self, rpc: Rpc, earlier: &str) -> Self {
        match self {
            Self::Lost { cause, .. } => Self::Lost { cause, sent: true },
            Self::Silence { after, .. } => Self::Silence { after, sent: true },
            Self::Untrusted { .. } if rpc.effect() == Effect::Starts => {
                Self::Answer(ExecutorError::OutcomeUnknown { reason: earlier.to_owned() })
            }
            Self::Untrusted { cause } => Self::Untrusted { cause },
            // There is no room to look what became of that one.
            Self::Answer(error @ ExecutorError::OverLimit { .. }) if rpc.effect() != Effect::None => {
                Self::Lost { cause: error.to_string(), sent: true }
            }
            Self::Answer(
                ExecutorError::Stopping
                | ExecutorError::Refused { .. }
                | ExecutorError::UnsupportedVersion { .. }
                | ExecutorError::Internal { .. },
            ) if rpc.effect() == Effect::Starts => {
                Self::Answer(ExecutorError::OutcomeUnknown { reason: earlier.to_owned() })
            }
            Self::Answer(error) => Self::Answer(error),
        }
    }

    /// What the caller of this call is told.
    pub(super) fn into_error(self, rpc: Rpc, endpoint: &str) -> ExecutorError {
        let (cause, sent) = match self {
            Self::Answer(error) => return error,
            Self::Untrusted { cause } => (cause, false),
            Self::Lost { cause, sent } => (cause, sent),
            Self::Silence { after, sent } => (format!("no answer within {}ms", after.as_millis()), sent),
        };
        match (rpc.effect(), sent) {
            (Effect::Starts, true) => ExecutorError::OutcomeUnknown { reason: cause },
            (Effect::Starts, false) | (Effect::None | Effect::Once, _) => {
                ExecutorError::Unavailable { endpoint: endpoint.to_owned(), cause }
            }
        }
    }
}

/// Whether the peer has said in HTTP/2's own words that it did not look at this request: it refused the stream, or it is
/// going away in order and the stream came after the last one that it takes.
fn refused_unprocessed(status: &Status) -> bool {
    find::<h2::Error>(status).is_some_and(|error| {
        error.is_remote()
            && ((error.is_reset() && error.reason() == Some(h2::Reason::REFUSED_STREAM))
                || (error.is_go_away() && error.reason() == Some(h2::Reason::NO_ERROR)))
    })
}

fn find<T: Error + 'static>(status: &Status) -> Option<&T> {
    sources(status).find_map(|error| error.downcast_ref::<T>())
}

fn sources(status: &Status) -> impl Iterator<Item = &(dyn Error + 'static)> {
    std::iter::successors(status.source(), |error| <dyn Error>::source(*error))
}

/// The innermost cause says what happened; the outer ones say only that something did.
fn cause(status: &Status) -> String {
    let innermost = sources(status).last().map(ToString::to_string);
    let text = innermost.unwrap_or_else(|| status.message().to_owned());
    let words = text.split(" (os error").next().unwrap_or_default().replace('\n', " ");
    if words.is_empty() { status.code().description().to_owned() } else { words }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lost(cause: &str, sent: bool) -> Fault {
        Fault::Lost { cause: cause.to_owned(), sent }
    }

    #[test]
    fn a_reason_of_the_executor_wins_over_the_code() {
        let sent = Sent::default();
        for error in [ExecutorError::Stopping, ExecutorError::KeyConflict, ExecutorError::invalid("key", "is empty")] {
            assert_eq!(Fault::of(&error.to_status(), &sent), Fault::Answer(error.clone()));
            assert_eq!(Fault::Answer(error.clone()).into_error(Rpc::Run, "e"), error);
        }
    }

    #[test]
    fn a_status_without_a_reason_is_read_by_its_code() {
        let sent = Sent::default();
        for code in (1..=16).map(Code::from) {
            let fault = Fault::of(&Status::new(code, "words"), &sent);
            match code {
                Code::Unimplemented => {
                    assert!(matches!(fault, Fault::Answer(ExecutorError::UnsupportedVersion { .. })));
                }
                Code::Unauthenticated | Code::PermissionDenied => {
                    assert_eq!(fault, Fault::Answer(ExecutorError::Refused { reason: "words".into() }));
                }
                _ => assert_eq!(fault, lost("words", false), "{code:?}"),
            }
        }
    }

    #[test]
    fn no_room_for_another_attempt_says_nothing_about_the_one_before() {
        let over = || Fault::Answer(ExecutorError::OverLimit { what: "requests".into(), used: 1, limit: 1 });
        for rpc in [Rpc::Run, Rpc::StartTask, Rpc::ReadOutput, Rpc::KillTask, Rpc::CancelRun] {
            assert_eq!(over().after_lost_attempt(rpc, "reset").reached(), Some(Reached::NoAnswer), "{rpc:?}");
        }
        assert_eq!(over().after_lost_attempt(Rpc::ListTasks, "reset"), over());
        assert_eq!(over().reached(), Some(Reached::Answered), "nothing was lost");
    }

    #[test]
    fn what_the_caller_is_told_depends_on_what_may_have_arrived() {
        let unavailable = ExecutorError::Unavailable { endpoint: "unix:/x".into(), cause: "reset".into() };
        for rpc in [Rpc::Run, Rpc::StartTask] {
            let unknown = ExecutorError::OutcomeUnknown { reason: "reset".into() };
            assert_eq!(lost("reset", true).into_error(rpc, "unix:/x"), unknown);
            assert_eq!(lost("reset", false).into_error(rpc, "unix:/x"), unavailable);
        }
        for rpc in [Rpc::GetInfo, Rpc::ReadOutput, Rpc::KillTask, Rpc::CancelRun, Rpc::ListTasks, Rpc::AckCompletions] {
            for sent in [true, false] {
                assert_eq!(lost("reset", sent).into_error(rpc, "unix:/x"), unavailable, "{rpc:?}");
            }
        }
    }
}
