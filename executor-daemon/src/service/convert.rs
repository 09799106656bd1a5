//! Wire messages to values and back.
//!
//! Requests are taken apart exhaustively, so that a field which is added to the protocol cannot be forgotten here; what is
//! missing or malformed is named. Answers are cut where a list has no natural end, so that every message stays within
//! [`executor_proto::MAX_DAEMON_MESSAGE_BYTES`].

#[cfg(fuzzing)]
pub(super) mod fuzzing;

use std::{collections::VecDeque, time::Duration};

use bytes::Bytes;
use executor_proto::{
    MAX_CHUNK_BYTES,
    error::ExecutorError,
    types::{
        Budgets, CommandSpec, Completion, EndedBy, EnvironmentVariable, ExecutorInfo, Exit, KillOutcome, OwnerId,
        Process, ReadId, RunAccepted, RunResult, SandboxMode, Spill, StartKey, StreamChunk, StreamDelta, StreamName,
        StreamResult, TaskId, TaskInfo, TaskStatus,
    },
    v1,
};

use crate::ids::{Caller, TenantId};

/// Longest owner, in bytes. An owner is a session's id; the daemon keeps it with every task, so it has to end somewhere.
pub(super) const MAX_OWNER_BYTES: usize = 1_024;

/// Longest start key or read id, in bytes, as the protocol says.
const MAX_NAME_BYTES: usize = 128;

/// Most pids in one list of an answer. Kernel pids take up to four bytes on the wire, so two full lists fit into a message.
const MAX_PIDS: usize = 16_384;

/// Most leftovers described for one task: each has up to 256 bytes of command line.
const MAX_LEFTOVERS: usize = 256;

/// Longest wait of a read. Longer ones are shortened to it: the answer then says that the task still runs.
const MAX_WAIT: Duration = Duration::from_secs(30 * 24 * 60 * 60);

// ── requests ──

/// For whom a call is made.
pub(super) fn caller(tenant: TenantId, wire: Option<v1::Caller>) -> Result<Caller, ExecutorError> {
    let v1::Caller { owner } = wire.ok_or_else(|| ExecutorError::invalid("caller", "is missing"))?;
    if owner.as_ref().is_some_and(|owner| owner.len() > MAX_OWNER_BYTES) {
        return Err(ExecutorError::invalid("caller.owner", &format!("is longer than {MAX_OWNER_BYTES} bytes")));
    }
    Ok(Caller { tenant, owner: owner.map(OwnerId) })
}

/// The client's name for a start.
pub(super) fn start_key(wire: String) -> Result<StartKey, ExecutorError> {
    client_name("key", wire).map(StartKey)
}

/// The client's name for a read.
pub(super) fn read_id(wire: String) -> Result<ReadId, ExecutorError> {
    client_name("read_id", wire).map(ReadId)
}

fn client_name(field: &str, wire: String) -> Result<String, ExecutorError> {
    if wire.is_empty() {
        return Err(ExecutorError::invalid(field, "is empty"));
    }
    if wire.len() > MAX_NAME_BYTES {
        return Err(ExecutorError::invalid(field, &format!("is longer than {MAX_NAME_BYTES} bytes")));
    }
    Ok(wire)
}

/// Any text can be asked for; only issued ids are known.
pub(super) fn task_id(wire: String) -> TaskId {
    TaskId(wire)
}

/// A command to start. Its values are checked too, so that nothing invalid goes further.
pub(super) fn command_spec(wire: Option<v1::CommandSpec>) -> Result<CommandSpec, ExecutorError> {
    let v1::CommandSpec { command, workdir, environment, stdin, timeout_ms, sandbox_mode, workspace } =
        wire.ok_or_else(|| ExecutorError::invalid("spec", "is missing"))?;
    let spec = CommandSpec {
        command,
        workdir,
        environment: environment
            .into_iter()
            .map(|v1::EnvironmentVariable { name, value }| EnvironmentVariable { name, value })
            .collect(),
        stdin,
        timeout_ms,
        sandbox_mode: asked_sandbox_mode(sandbox_mode)?,
        workspace,
    };
    spec.check()?;
    Ok(spec)
}

fn asked_sandbox_mode(wire: i32) -> Result<Option<SandboxMode>, ExecutorError> {
    match v1::SandboxMode::try_from(wire) {
        Ok(v1::SandboxMode::Unspecified) => Ok(None),
        Ok(v1::SandboxMode::ReadOnly) => Ok(Some(SandboxMode::ReadOnly)),
        Ok(v1::SandboxMode::WorkspaceWrite) => Ok(Some(SandboxMode::WorkspaceWrite)),
        Ok(v1::SandboxMode::DangerFullAccess) => Ok(Some(SandboxMode::DangerFullAccess)),
        Err(prost_unknown) => Err(ExecutorError::invalid("spec.sandbox_mode", &unknown_number(prost_unknown.0))),
    }
}

/// Which stream a request names.
pub(super) fn stream_name(wire: i32) -> Result<StreamName, ExecutorError> {
    match v1::StreamName::try_from(wire) {
        Ok(v1::StreamName::Stdout) => Ok(StreamName::Stdout),
        Ok(v1::StreamName::Stderr) => Ok(StreamName::Stderr),
        Ok(v1::StreamName::Unspecified) => Err(ExecutorError::invalid("stream", "is missing")),
        Err(prost_unknown) => Err(ExecutorError::invalid("stream", &unknown_number(prost_unknown.0))),
    }
}

fn unknown_number(number: i32) -> String {
    format!("is {number}, which this daemon does not know")
}

/// How long a read waits for the task's end.
pub(super) fn wait(wire: Option<f64>) -> Result<Option<Duration>, ExecutorError> {
    let Some(wait_ms) = wire else { return Ok(None) };
    if wait_ms.is_nan() || wait_ms < 0.0 {
        return Err(ExecutorError::invalid("wait_ms", "is not a number of milliseconds from 0"));
    }
    Ok(Some(Duration::try_from_secs_f64(wait_ms / 1_000.0).map_or(MAX_WAIT, |wait| wait.min(MAX_WAIT))))
}

// ── answers ──

pub(super) fn info(info: ExecutorInfo) -> v1::GetInfoResponse {
    let ExecutorInfo {
        version,
        protocol_revision,
        instance_id,
        hostname,
        boot_id,
        default_workdir,
        default_timeout_ms,
        max_timeout_ms,
        max_output_bytes,
        max_spill_bytes,
        grace_ms,
        max_command_bytes,
        max_stdin_bytes,
        max_tasks_per_owner,
        max_tasks,
        max_leftovers_per_owner,
        resume_window_ms,
        heartbeat_ms,
        run_as_user,
        run_as_uid,
        sandbox_modes,
        sandbox_mode: mode_in_force,
        network_off,
        features,
        stated_limits,
        budgets,
    } = info;
    v1::GetInfoResponse {
        version,
        protocol_revision,
        instance_id,
        hostname,
        boot_id,
        default_workdir,
        default_timeout_ms,
        max_timeout_ms,
        max_output_bytes,
        max_spill_bytes,
        grace_ms,
        max_command_bytes,
        max_stdin_bytes,
        max_tasks_per_owner,
        max_tasks,
        max_leftovers_per_owner,
        resume_window_ms,
        heartbeat_ms,
        run_as_user,
        run_as_uid,
        sandbox_modes: sandbox_modes.into_iter().map(|mode| sandbox_mode(mode).into()).collect(),
        sandbox_mode: mode_in_force.map_or(v1::SandboxMode::Unspecified, sandbox_mode).into(),
        network_off,
        features,
        stated_limits,
        budgets: budgets.map(of_tenant),
    }
}

fn of_tenant(budgets: Budgets) -> v1::Budgets {
    let Budgets {
        max_spill_bytes_in_all,
        max_spill_bytes_per_owner,
        max_output_bytes_per_second,
        max_watchers,
        max_requests,
        max_processes,
        max_memory_bytes,
    } = budgets;
    v1::Budgets {
        max_spill_bytes_in_all,
        max_spill_bytes_per_owner,
        max_output_bytes_per_second,
        max_watchers,
        max_requests,
        max_processes,
        max_memory_bytes,
    }
}

pub(super) fn sandbox_mode(mode: SandboxMode) -> v1::SandboxMode {
    match mode {
        SandboxMode::ReadOnly => v1::SandboxMode::ReadOnly,
        SandboxMode::WorkspaceWrite => v1::SandboxMode::WorkspaceWrite,
        SandboxMode::DangerFullAccess => v1::SandboxMode::DangerFullAccess,
    }
}

fn stream(name: StreamName) -> v1::StreamName {
    match name {
        StreamName::Stdout => v1::StreamName::Stdout,
        StreamName::Stderr => v1::StreamName::Stderr,
    }
}

pub(super) fn accepted(accepted: RunAccepted) -> v1::RunAccepted {
    let RunAccepted { run_id: TaskId(run_id), timeout_ms, workdir, sandbox_mode: mode } = accepted;
    v1::RunAccepted { run_id, timeout_ms, workdir, sandbox_mode: sandbox_mode(mode).into() }
}

pub(super) fn chunk(chunk: StreamChunk) -> v1::StreamChunk {
    let StreamChunk { stream: name, offset, data } = chunk;
    v1::StreamChunk { stream: stream(name).into(), offset, data }
}

/// Bytes that begin at `offset`, in chunks that fit into messages.
pub(super) fn chunks(name: StreamName, mut offset: u64, mut data: Bytes) -> VecDeque<v1::StreamChunk> {
    let mut chunks = VecDeque::with_capacity(data.len().div_ceil(MAX_CHUNK_BYTES));
    while !data.is_empty() {
        let first = data.split_to(data.len().min(MAX_CHUNK_BYTES));
        let bytes = first.len() as u64;
        chunks.push_back(chunk(StreamChunk { stream: name, offset, data: first }));
        offset += bytes;
    }
    chunks
}

/// The last event of a run, and the chunks of the tails that it describes.
pub(super) fn finished(result: RunResult) -> (VecDeque<v1::StreamChunk>, v1::RunFinished) {
    let RunResult {
        exit: how,
        timed_out_after_ms,
        ended_by,
        aborted,
        stdout,
        stderr,
        survivors,
        leftovers,
        sandbox_denied,
        duration_ms,
    } = result;
    let (mut tails, stdout) = stream_result(StreamName::Stdout, stdout);
    let (stderr_tail, stderr) = stream_result(StreamName::Stderr, stderr);
    tails.extend(stderr_tail);
    let finished = v1::RunFinished {
        exit: Some(exit(how)),
        timed_out_after_ms,
        ended_by: match ended_by {
            None => v1::EndedBy::Unspecified,
            Some(EndedBy::CallerGone) => v1::EndedBy::CallerGone,
            Some(EndedBy::ExecutorStopping) => v1::EndedBy::ExecutorStopping,
        }
        .into(),
        aborted,
        stdout: Some(stdout),
        stderr: Some(stderr),
        survivors: pids(survivors),
        leftovers: pids(leftovers),
        sandbox_denied: sandbox_denied.is_some(),
        duration_ms,
    };
    (tails, finished)
}

fn stream_result(name: StreamName, result: StreamResult) -> (VecDeque<v1::StreamChunk>, v1::StreamResult) {
    let StreamResult { total, tail, dropped, spill: file } = result;
    (chunks(name, dropped, tail), v1::StreamResult { total, tail_start: dropped, spill: file.map(spill) })
}

/// What a read took from one stream, and the chunks of it.
pub(super) fn delta(name: StreamName, delta: StreamDelta) -> (VecDeque<v1::StreamChunk>, v1::StreamDelta) {
    let StreamDelta { start, data, dropped, spill: file, missing } = delta;
    let end = start + data.len() as u64;
    (chunks(name, start, data), v1::StreamDelta { start, end, dropped, spill: file.map(spill), missing })
}

fn spill(spill: Spill) -> v1::Spill {
    let Spill { path, cut_at } = spill;
    v1::Spill { path, cut_at }
}

fn exit(how: Exit) -> v1::Exit {
    use v1::exit::Exit as Wire;
    let exit = match how {
        Exit::Code(code) => Wire::Code(code.into()),
        Exit::Signal(signal) => Wire::Signal(signal.into()),
        Exit::Unknown(reason) => Wire::Unknown(reason),
    };
    v1::Exit { exit: Some(exit) }
}

pub(super) fn status(status: TaskStatus) -> v1::TaskStatus {
    use v1::task_status::{Killed, Running, Status as Wire};
    let status = match status {
        TaskStatus::Running => Wire::Running(Running {}),
        TaskStatus::Ended(how) => Wire::Ended(exit(how)),
        TaskStatus::Killed(signal) => Wire::Killed(Killed { signal: signal.map(u32::from) }),
    };
    v1::TaskStatus { status: Some(status) }
}

pub(super) fn kill_outcome(outcome: KillOutcome) -> v1::KillOutcome {
    let KillOutcome { already_finished, survivors } = outcome;
    v1::KillOutcome { already_finished, survivors: pids(survivors) }
}

fn pids(mut pids: Vec<u32>) -> Vec<u32> {
    pids.truncate(MAX_PIDS);
    pids
}

pub(super) fn task_info(info: TaskInfo) -> v1::TaskInfo {
    let TaskInfo {
        id: TaskId(task_id),
        owner,
        command,
        workdir,
        status: now,
        started_at_ms,
        ended_at_ms,
        stdout_total,
        stderr_total,
        shell_pid,
        leftovers,
    } = info;
    v1::TaskInfo {
        task_id,
        owner: owner.map(|OwnerId(owner)| owner),
        command,
        workdir,
        status: Some(status(now)),
        started_at_ms,
        ended_at_ms,
        stdout_total,
        stderr_total,
        shell_pid,
        leftovers: leftovers
            .into_iter()
            .take(MAX_LEFTOVERS)
            .map(|Process { pid, command_line }| v1::Process { pid, command_line })
            .collect(),
    }
}

pub(super) fn completion(completion: Completion) -> v1::Completion {
    let Completion { sequence, task_id: TaskId(task_id), status: how, ended_at_ms } = completion;
    v1::Completion { sequence, task_id, status: Some(status(how)), ended_at_ms }
}

#[cfg(test)]
mod tests;
