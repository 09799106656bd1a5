//! Values as JSON, for programs. Keys are only ever added.

use executor_proto::types::{
    Completion, EndedBy, Exit, OwnerId, Process, RunResult, Spill, StreamResult, TaskInfo, TaskStatus,
};
use serde_json::{Map, Value, json};

use crate::text::{decode, number, signal, task};

/// The result of a run.
pub(super) fn run(result: &RunResult) -> Value {
    let RunResult {
        exit,
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
    let mut object = exit_keys(Some(exit));
    object.insert("timed_out_after_ms".into(), timed_out_after_ms.map_or(Value::Null, number::value));
    let ended_by = ended_by.map(|ended_by| match ended_by {
        EndedBy::CallerGone => "caller gone",
        EndedBy::ExecutorStopping => "executor stopping",
    });
    object.insert("ended_by".into(), json!(ended_by));
    object.insert("aborted".into(), json!(aborted));
    for (name, stream) in [("stdout", stdout), ("stderr", stderr)] {
        let StreamResult { total, tail, dropped, spill } = stream;
        object.insert(name.into(), json!(decode(tail)));
        object.insert(format!("{name}_bytes"), json!(total));
        object.insert(format!("{name}_dropped"), json!(dropped));
        let whole = spill.as_ref().map(|Spill { path, cut_at: _ }| decode(path));
        object.insert(format!("{name}_file"), json!(whole));
    }
    object.insert("survivors".into(), json!(survivors));
    object.insert("leftovers".into(), json!(leftovers));
    object.insert("sandbox_denied".into(), json!(sandbox_denied.map(|mode| mode.as_str())));
    object.insert("duration_ms".into(), number::value(*duration_ms));
    object.into()
}

/// A task or run of a list.
pub(super) fn task_info(info: &TaskInfo) -> Value {
    let TaskInfo {
        id,
        owner,
        command,
        workdir,
        status,
        started_at_ms,
        ended_at_ms,
        stdout_total,
        stderr_total,
        shell_pid,
        leftovers,
    } = info;
    let mut object = Map::new();
    object.insert("id".into(), json!(id.0));
    object.insert("owner".into(), json!(owner.as_ref().map(|owner| &owner.0)));
    object.insert("command".into(), json!(decode(command)));
    object.insert("workdir".into(), json!(decode(workdir)));
    object.extend(status_keys(status));
    object.insert("started_at_ms".into(), json!(started_at_ms));
    object.insert("ended_at_ms".into(), json!(ended_at_ms));
    object.insert("stdout_bytes".into(), json!(stdout_total));
    object.insert("stderr_bytes".into(), json!(stderr_total));
    object.insert("shell_pid".into(), json!(shell_pid));
    let leftovers: Vec<Value> = leftovers
        .iter()
        .map(|Process { pid, command_line }| json!({"pid": pid, "command": decode(command_line)}))
        .collect();
    object.insert("leftovers".into(), leftovers.into());
    object.into()
}

/// A notice.
pub(super) fn notice(owner: &OwnerId, completion: &Completion) -> Value {
    let Completion { sequence, task_id, status, ended_at_ms } = completion;
    let mut object = Map::new();
    object.insert("owner".into(), json!(owner.0));
    object.insert("sequence".into(), json!(sequence));
    object.insert("task_id".into(), json!(task_id.0));
    object.insert("text".into(), json!(task::notice(task_id, status)));
    object.extend(status_keys(status));
    object.insert("ended_at_ms".into(), json!(ended_at_ms));
    object.into()
}

fn status_keys(status: &TaskStatus) -> Map<String, Value> {
    let (word, exit) = match status {
        TaskStatus::Running => ("running", None),
        TaskStatus::Ended(exit) => ("ended", Some(exit.clone())),
        TaskStatus::Killed(signal) => ("killed", signal.map(Exit::Signal)),
    };
    let mut object = Map::new();
    object.insert("status".into(), json!(word));
    object.extend(exit_keys(exit.as_ref()));
    object
}

/// `exit_code`, `signal` and `exit_unknown`: one of them at most is not null.
fn exit_keys(exit: Option<&Exit>) -> Map<String, Value> {
    let (code, signal, unknown) = match exit {
        None => (None, None, None),
        Some(Exit::Code(code)) => (Some(*code), None, None),
        Some(Exit::Signal(number)) => (None, Some(signal::name(*number)), None),
        Some(Exit::Unknown(reason)) => (None, None, Some(reason.clone())),
    };
    let mut object = Map::new();
    object.insert("exit_code".into(), json!(code));
    object.insert("signal".into(), json!(signal));
    object.insert("exit_unknown".into(), json!(unknown));
    object
}
