//! What the fuzz target `wire` does with bytes that claim to be an answer. Built under `--cfg fuzzing` only.

use bytes::Bytes;
use executor_proto::{
    types::{CommandSpec, Exit, SandboxMode},
    v1,
};
use prost::Message;

/// Reads every answer that these bytes can be.
///
/// # Panics
/// When an answer is taken that cannot be true.
pub fn answers(bytes: &[u8]) {
    if let Some(info) = read::<v1::GetInfoResponse>(bytes) {
        let _ = super::info(info);
    }
    if let Some(accepted) = read::<v1::RunAccepted>(bytes) {
        let _ = super::accepted(accepted);
    }
    if let Some(Ok(chunk)) = read::<v1::StreamChunk>(bytes).map(super::chunk) {
        assert!(chunk.offset.checked_add(chunk.data.len() as u64).is_some(), "a chunk reaches over the end");
    }
    if let Some(finished) = read::<v1::RunFinished>(bytes) {
        let code = finished.exit.as_ref().and_then(|exit| exit.exit.clone());
        if let Ok(result) = super::finished(finished, SandboxMode::DangerFullAccess, [Bytes::new(), Bytes::new()])
            && result.exit == Exit::Code(0)
        {
            assert_eq!(code, Some(v1::exit::Exit::Code(0)), "something else became a success");
        }
    }
    if let Some(status) = read::<v1::ReadOutputStatus>(bytes)
        && let Ok(output) = super::task_output(status, [Bytes::new(), Bytes::from_static(b"x")])
    {
        let ends = [&output.stdout, &output.stderr].map(|delta| delta.start.checked_add(delta.data.len() as u64));
        assert!(ends.iter().all(Option::is_some), "a read reaches over the end");
    }
    if let Some(task) = read::<v1::TaskInfo>(bytes) {
        let _ = super::task_info(task);
    }
    if let Some(completion) = read::<v1::Completion>(bytes) {
        let _ = super::completion(completion);
    }
    if let Some(outcome) = read::<v1::KillTaskResponse>(bytes) {
        let _ = super::kill_outcome(outcome.outcome);
    }
}

fn read<M: Message + Default>(bytes: &[u8]) -> Option<M> {
    M::decode(bytes).ok()
}

/// A start of this command, as it travels.
#[must_use]
pub fn start(spec: CommandSpec) -> Vec<u8> {
    v1::StartTaskRequest { caller: super::caller(None), key: "key".to_owned(), spec: Some(super::spec(spec)) }
        .encode_to_vec()
}
