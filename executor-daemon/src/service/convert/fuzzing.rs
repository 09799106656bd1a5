//! What the fuzz target `wire` does with bytes that claim to be a request. Built under `--cfg fuzzing` only.

use executor_proto::{types::CommandSpec, v1};
use prost::Message as _;

use super::{MAX_NAME_BYTES, MAX_OWNER_BYTES, MAX_WAIT, caller, command_spec, read_id, start_key, stream_name, wait};
use crate::ids::TenantId;

/// Reads every request that these bytes can be; the command of a start, if it is a valid one.
///
/// # Panics
/// When something was taken that is not within its bounds.
#[must_use]
pub fn requests(bytes: &[u8]) -> Option<CommandSpec> {
    if let Ok(v1::ReadOutputRequest { caller, task_id: _, read_id: read, wait_ms }) =
        v1::ReadOutputRequest::decode(bytes)
    {
        check_caller(caller);
        let read = read_id(read);
        assert!(read.is_err() || read.is_ok_and(|read| (1..=MAX_NAME_BYTES).contains(&read.0.len())));
        let wait = wait(wait_ms);
        assert!(wait.is_err() || wait.is_ok_and(|wait| wait.is_none_or(|wait| wait <= MAX_WAIT)));
    }
    if let Ok(v1::ReadStreamRequest { stream, .. }) = v1::ReadStreamRequest::decode(bytes) {
        assert_eq!(stream_name(stream).is_ok(), stream == 1 || stream == 2);
    }
    let v1::StartTaskRequest { caller, key, spec } = v1::StartTaskRequest::decode(bytes).ok()?;
    check_caller(caller);
    let key = start_key(key);
    assert!(key.is_err() || key.is_ok_and(|key| (1..=MAX_NAME_BYTES).contains(&key.0.len())));
    let spec = command_spec(spec).ok()?;
    assert!(spec.check().is_ok(), "an invalid command was taken: {spec:?}");
    Some(spec)
}

fn check_caller(wire: Option<v1::Caller>) {
    if let Ok(caller) = caller(TenantId::default_tenant(), wire) {
        assert!(caller.owner.is_none_or(|owner| owner.0.len() <= MAX_OWNER_BYTES));
    }
}
