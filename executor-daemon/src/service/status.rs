//! Statuses: the domain's errors on their way out, and those of the gRPC library put into the protocol's words.
//!
//! The library answers some requests by itself (too long a message, a method that nobody has, bytes that are no message).
//! Its answers carry no reason that a client could match; [`in_our_words`] gives them one.

use executor_proto::{
    MAX_REQUEST_BYTES, PROTOCOL_REVISION,
    error::{ExecutorError, SizedPart},
};
use http::HeaderMap;
use tonic::{Code, Status};

/// What this daemon speaks, as the end of a sentence.
pub(super) fn unsupported_version() -> ExecutorError {
    ExecutorError::UnsupportedVersion { speaks: format!("it speaks executor.v1, revision {PROTOCOL_REVISION}") }
}

/// The error that stands for an answer which the library has given by itself: one whose status is already in the headers
/// and carries no details. `None`: the answer is somebody's who knew what they said.
pub(super) fn in_our_words(headers: &HeaderMap) -> Option<ExecutorError> {
    if !headers.contains_key(Status::GRPC_STATUS) {
        return None;
    }
    let status = Status::from_header_map(headers).filter(|status| status.details().is_empty())?;
    match status.code() {
        Code::OutOfRange => Some(ExecutorError::TooLarge {
            part: SizedPart::Request,
            name: None,
            bytes: first_number(status.message()),
            limit: MAX_REQUEST_BYTES as u64,
        }),
        // With a message it is about something else: a compression that is not supported.
        Code::Unimplemented if status.message().is_empty() => Some(unsupported_version()),
        Code::Internal if status.message().contains("decode") => {
            Some(ExecutorError::invalid("request", "is not a message of this method"))
        }
        Code::Ok
        | Code::Cancelled
        | Code::Unknown
        | Code::InvalidArgument
        | Code::DeadlineExceeded
        | Code::NotFound
        | Code::AlreadyExists
        | Code::PermissionDenied
        | Code::ResourceExhausted
        | Code::FailedPrecondition
        | Code::Aborted
        | Code::Unimplemented
        | Code::Internal
        | Code::Unavailable
        | Code::DataLoss
        | Code::Unauthenticated => None,
    }
}

/// The library says how long the message is only in its text. 0: it does not any more.
fn first_number(text: &str) -> u64 {
    let digits = text.chars().skip_while(|c| !c.is_ascii_digit()).take_while(char::is_ascii_digit);
    digits.collect::<String>().parse().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(status: Status) -> HeaderMap {
        let mut headers = HeaderMap::new();
        status.add_header(&mut headers).expect("a status fits into headers");
        headers
    }

    #[test]
    fn a_request_that_is_too_long_names_its_size() {
        let text = "Error, decoded message length too large: found 30000000 bytes, the limit is: 25165824 bytes";
        assert_eq!(
            in_our_words(&headers(Status::out_of_range(text))),
            Some(ExecutorError::TooLarge {
                part: SizedPart::Request,
                name: None,
                bytes: 30_000_000,
                limit: MAX_REQUEST_BYTES as u64
            })
        );
    }

    #[test]
    fn what_the_service_itself_said_is_left_alone() {
        for error in [ExecutorError::Stopping, ExecutorError::KeyConflict, unsupported_version()] {
            assert_eq!(in_our_words(&headers(error.to_status())), None);
        }
        assert_eq!(in_our_words(&headers(Status::not_found("service not registered"))), None);
        assert_eq!(in_our_words(&HeaderMap::new()), None);
    }
}
