//! Bytes from the wire, at both ends: never a panic, nothing invalid is taken, and a command that the daemon takes is the
//! same after the client has sent it.
#![no_main]

use executor_proto::error::ExecutorError;
use tonic::{Code, Status};

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    tool_client::fuzzing::answers(bytes);
    if let Some(spec) = executor_daemon::fuzzing::requests(bytes) {
        let again = executor_daemon::fuzzing::requests(&tool_client::fuzzing::start(spec.clone()));
        // A number that is none is not equal to itself; printed it is.
        assert_eq!(format!("{again:?}"), format!("{:?}", Some(spec)));
    }
    let status = Status::with_details(Code::Unavailable, "words", bytes.to_vec().into());
    if let Some(error) = ExecutorError::from_status(&status) {
        assert_eq!(ExecutorError::from_status(&error.to_status()), Some(error));
    }
});
