//! Wire messages to values and back, with every field named, so that a field which is added to the protocol cannot be
//! forgotten here.

#[cfg(fuzzing)]
pub(super) mod fuzzing;

use bytes::Bytes;
use executor_proto::{
    types::{
        Budgets, CommandSpec, Completion, EndedBy, EnvironmentVariable, ExecutorInfo, Exit, KillOutcome, OwnerId,
        Process, RunAccepted, RunResult, SandboxMode, Spill, StreamChunk, StreamDelta, StreamName, StreamResult,
        TaskId, TaskInfo, TaskOutput, TaskStatus,
    },
    v1,
};

/// The executor sent something that this protocol does not allow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("malformed answer: {0}")]
pub(super) struct Malformed(pub(super) &'static str);

pub(super) fn caller(owner: Option<&OwnerId>) -> Option<v1::Caller> {
    Some(v1::Caller { owner: owner.map(|OwnerId(owner)| owner.clone()) })
}

pub(super) fn spec(spec: CommandSpec) -> v1::CommandSpec {
    let CommandSpec { command, workdir, environment, stdin, timeout_ms, sandbox_mode, workspace } = spec;
    v1::CommandSpec {
        command,
        workdir,
        environment: environment
            .into_iter()
            .map(|EnvironmentVariable { name, value }| v1::EnvironmentVariable { name, value })
            .collect(),
        stdin,
        timeout_ms,
        sandbox_mode: match sandbox_mode {
            None => v1::SandboxMode::Unspecified,
            Some(SandboxMode::ReadOnly) => v1::SandboxMode::ReadOnly,
            Some(SandboxMode::WorkspaceWrite) => v1::SandboxMode::WorkspaceWrite,
            Some(SandboxMode::DangerFullAccess) => v1::SandboxMode::DangerFullAccess,
        }
        .into(),
        workspace,
    }
}

pub(super) fn stream_name(name: StreamName) -> v1::StreamName {
    match name {
        StreamName::Stdout => v1::StreamName::Stdout,
        StreamName::Stderr => v1::StreamName::Stderr,
    }
}

/// `None`: unspecified, or a mode that this client does not know.
fn sandbox_mode(mode: i32) -> Option<SandboxMode> {
    match v1::SandboxMode::try_from(mode) {
        Ok(v1::SandboxMode::ReadOnly) => Some(SandboxMode::ReadOnly),
        Ok(v1::SandboxMode::WorkspaceWrite) => Some(SandboxMode::WorkspaceWrite),
        Ok(v1::SandboxMode::DangerFullAccess) => Some(SandboxMode::DangerFullAccess),
        Ok(v1::SandboxMode::Unspecified) | Err(_) => None,
    }
}

pub(super) fn info(message: v1::GetInfoResponse) -> ExecutorInfo {
    let v1::GetInfoResponse {
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
    } = message;
    ExecutorInfo {
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
        sandbox_modes: sandbox_modes.into_iter().filter_map(sandbox_mode).collect(),
        sandbox_mode: sandbox_mode(mode_in_force),
        network_off,
        features,
        stated_limits,
        budgets: budgets.map(of_tenant),
    }
}

fn of_tenant(message: v1::Budgets) -> Budgets {
    let v1::Budgets {
        max_spill_bytes_in_all,
        max_spill_bytes_per_owner,
        max_output_bytes_per_second,
        max_watchers,
        max_requests,
        max_processes,
        max_memory_bytes,
    } = message;
    Budgets {
        max_spill_bytes_in_all,
        max_spill_bytes_per_owner,
        max_output_bytes_per_second,
        max_watchers,
        max_requests,
        max_processes,
        max_memory_bytes,
    }
}

pub(super) fn accepted(message: v1::RunAccepted) -> Result<RunAccepted, Malformed> {
    let v1::RunAccepted { run_id, timeout_ms, workdir, sandbox_mode: mode } = message;
    let sandbox_mode = sandbox_mode(mode).ok_or(Malformed("a run without a sandbox mode"))?;
    Ok(RunAccepted { run_id: TaskId(run_id), timeout_ms, workdir, sandbox_mode })
}

pub(super) fn chunk(message: v1::StreamChunk) -> Result<StreamChunk, Malformed> {
    let v1::StreamChunk { stream, offset, data } = message;
    let stream = match v1::StreamName::try_from(stream) {
        Ok(v1::StreamName::Stdout) => StreamName::Stdout,
        Ok(v1::StreamName::Stderr) => StreamName::Stderr,
        Ok(v1::StreamName::Unspecified) | Err(_) => return Err(Malformed("bytes of no stream")),
    };
    if offset.checked_add(data.len() as u64).is_none() {
        return Err(Malformed("bytes beyond the end of all streams"));
    }
    Ok(StreamChunk { stream, offset, data })
}

/// An exit that is missing or out of range is unknown, never success.
fn exit(message: Option<v1::Exit>) -> Exit {
    let not_understood = || Exit::Unknown("the executor's answer is not understood".to_owned());
    match message.and_then(|message| message.exit) {
        Some(v1::exit::Exit::Code(code)) => u8::try_from(code).map_or_else(|_| not_understood(), Exit::Code),
        Some(v1::exit::Exit::Signal(signal)) => match u8::try_from(signal) {
            Ok(signal) if signal != 0 => Exit::Signal(signal),
            Ok(_) | Err(_) => not_understood(),
        },
        Some(v1::exit::Exit::Unknown(reason)) => Exit::Unknown(reason),
        None => not_understood(),
    }
}

fn spill(message: v1::Spill) -> Spill {
    let v1::Spill { path, cut_at } = message;
    Spill { path, cut_at }
}

fn stream_result(message: Option<v1::StreamResult>, tail: Bytes) -> Result<StreamResult, Malformed> {
    let v1::StreamResult { total, tail_start, spill: spilled } =
        message.ok_or(Malformed("a result without its streams"))?;
    Ok(StreamResult { total, tail, dropped: tail_start, spill: spilled.map(spill) })
}

/// The result of a run whose tails have arrived before, and whose mode was agreed in `accepted`.
pub(super) fn finished(
    message: v1::RunFinished,
    mode: SandboxMode,
    [stdout_tail, stderr_tail]: [Bytes; 2],
) -> Result<RunResult, Malformed> {
    let v1::RunFinished {
        exit: ended,
        timed_out_after_ms,
        ended_by,
        aborted,
        stdout,
        stderr,
        survivors,
        leftovers,
        sandbox_denied,
        duration_ms,
    } = message;
    Ok(RunResult {
        exit: exit(ended),
        timed_out_after_ms,
        ended_by: match v1::EndedBy::try_from(ended_by) {
            Ok(v1::EndedBy::CallerGone) => Some(EndedBy::CallerGone),
            Ok(v1::EndedBy::ExecutorStopping) => Some(EndedBy::ExecutorStopping),
            Ok(v1::EndedBy::Unspecified) | Err(_) => None,
        },
        aborted,
        stdout: stream_result(stdout, stdout_tail)?,
        stderr: stream_result(stderr, stderr_tail)?,
        survivors,
        leftovers,
        sandbox_denied: sandbox_denied.then_some(mode),
        duration_ms,
    })
}

pub(super) fn status(message: Option<v1::TaskStatus>) -> Result<TaskStatus, Malformed> {
    match message.and_then(|message| message.status).ok_or(Malformed("a task without a status"))? {
        v1::task_status::Status::Running(v1::task_status::Running {}) => Ok(TaskStatus::Running),
        v1::task_status::Status::Ended(ended) => Ok(TaskStatus::Ended(exit(Some(ended)))),
        v1::task_status::Status::Killed(v1::task_status::Killed { signal }) => {
            Ok(TaskStatus::Killed(signal.and_then(|signal| u8::try_from(signal).ok())))
        }
    }
}

fn delta(message: Option<v1::StreamDelta>, data: Bytes) -> Result<StreamDelta, Malformed> {
    let v1::StreamDelta { start, end, dropped, spill: spilled, missing } =
        message.ok_or(Malformed("a read without its streams"))?;
    if end.checked_sub(start) != Some(data.len() as u64) {
        return Err(Malformed("a read whose bytes do not fill its range"));
    }
    Ok(StreamDelta { start, data, dropped, spill: spilled.map(spill), missing })
}

/// The answer of a read whose bytes have arrived before.
pub(super) fn task_output(
    message: v1::ReadOutputStatus,
    [stdout_data, stderr_data]: [Bytes; 2],
) -> Result<TaskOutput, Malformed> {
    let v1::ReadOutputStatus { status: state, stdout, stderr } = message;
    Ok(TaskOutput { status: status(state)?, stdout: delta(stdout, stdout_data)?, stderr: delta(stderr, stderr_data)? })
}

pub(super) fn kill_outcome(message: Option<v1::KillOutcome>) -> Result<KillOutcome, Malformed> {
    let v1::KillOutcome { already_finished, survivors } = message.ok_or(Malformed("a kill without its outcome"))?;
    Ok(KillOutcome { already_finished, survivors })
}

pub(super) fn task_info(message: v1::TaskInfo) -> Result<TaskInfo, Malformed> {
    let v1::TaskInfo {
        task_id,
        owner,
        command,
        workdir,
        status: state,
        started_at_ms,
        ended_at_ms,
        stdout_total,
        stderr_total,
        shell_pid,
        leftovers,
    } = message;
    Ok(TaskInfo {
        id: TaskId(task_id),
        owner: owner.map(OwnerId),
        command,
        workdir,
        status: status(state)?,
        started_at_ms,
        ended_at_ms,
        stdout_total,
        stderr_total,
        shell_pid,
        leftovers: leftovers
            .into_iter()
            .map(|v1::Process { pid, command_line }| Process { pid, command_line })
            .collect(),
    })
}

pub(super) fn completion(message: v1::Completion) -> Result<Completion, Malformed> {
    let v1::Completion { sequence, task_id, status: state, ended_at_ms } = message;
    let status = status(state)?;
    if status == TaskStatus::Running {
        return Err(Malformed("a completion of a task that runs"));
    }
    Ok(Completion { sequence, task_id: TaskId(task_id), status, ended_at_ms })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_exit_is_never_taken_for_success_by_default() {
        let unknown = |message| matches!(exit(message), Exit::Unknown(_));
        assert!(unknown(None));
        assert!(unknown(Some(v1::Exit { exit: None })));
        for odd in [v1::exit::Exit::Code(256), v1::exit::Exit::Signal(0), v1::exit::Exit::Signal(300)] {
            assert!(unknown(Some(v1::Exit { exit: Some(odd) })));
        }
        assert_eq!(exit(Some(v1::Exit { exit: Some(v1::exit::Exit::Code(0)) })), Exit::Code(0));
        assert_eq!(exit(Some(v1::Exit { exit: Some(v1::exit::Exit::Signal(9)) })), Exit::Signal(9));
    }

    #[test]
    fn a_read_must_bring_the_bytes_of_its_range() {
        let message = v1::StreamDelta { start: 3, end: 6, dropped: 0, spill: None, missing: 4 };
        assert!(delta(Some(message.clone()), Bytes::from_static(b"abc")).is_ok());
        assert!(delta(Some(message), Bytes::from_static(b"ab")).is_err());
        assert!(delta(None, Bytes::new()).is_err());
    }

    #[test]
    fn what_names_no_stream_mode_or_status_is_malformed() {
        assert!(chunk(v1::StreamChunk { stream: 0, offset: 0, data: Bytes::new() }).is_err());
        assert!(chunk(v1::StreamChunk { stream: 1, offset: u64::MAX, data: Bytes::from_static(b"a") }).is_err());
        assert!(accepted(v1::RunAccepted::default()).is_err());
        assert!(status(None).is_err());
        assert!(status(Some(v1::TaskStatus { status: None })).is_err());
        let running = v1::task_status::Status::Running(v1::task_status::Running {});
        let of_running =
            v1::Completion { status: Some(v1::TaskStatus { status: Some(running) }), ..Default::default() };
        assert!(completion(of_running).is_err());
    }
}
