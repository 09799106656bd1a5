use executor_proto::MAX_DAEMON_MESSAGE_BYTES;
use prost::Message as _;

use super::*;
use crate::service::streams::batches;

fn field<T: std::fmt::Debug>(result: Result<T, ExecutorError>) -> String {
    match result {
        Err(ExecutorError::InvalidRequest { field, problem }) => format!("{field} {problem}"),
        other => panic!("not refused as malformed: {other:?}"),
    }
}

fn wire_spec() -> v1::CommandSpec {
    v1::CommandSpec { command: Bytes::from_static(b"true"), ..v1::CommandSpec::default() }
}

#[test]
fn a_request_s_values_arrive_as_they_were_sent() {
    let wire = v1::CommandSpec {
        command: Bytes::from_static(b"printf '\xff'"),
        workdir: Some(Bytes::from_static(b"/\xfe")),
        environment: vec![v1::EnvironmentVariable { name: "A".into(), value: Bytes::from_static(b"\xfd") }],
        stdin: Some(Bytes::new()),
        timeout_ms: Some(0.5),
        sandbox_mode: v1::SandboxMode::WorkspaceWrite.into(),
        workspace: Some("/w".into()),
    };
    let spec = command_spec(Some(wire)).expect("a spec");
    assert_eq!(
        spec,
        CommandSpec {
            command: Bytes::from_static(b"printf '\xff'"),
            workdir: Some(Bytes::from_static(b"/\xfe")),
            environment: vec![EnvironmentVariable { name: "A".into(), value: Bytes::from_static(b"\xfd") }],
            stdin: Some(Bytes::new()),
            timeout_ms: Some(0.5),
            sandbox_mode: Some(SandboxMode::WorkspaceWrite),
            workspace: Some("/w".into()),
        }
    );
    let plain = command_spec(Some(wire_spec())).expect("a spec");
    assert_eq!((plain.workdir, plain.stdin, plain.timeout_ms, plain.sandbox_mode), (None, None, None, None));
}

#[test]
fn absent_and_empty_owners_differ() {
    let tenant = TenantId::default_tenant;
    let owner = |owner: Option<&str>| {
        let wire = v1::Caller { owner: owner.map(str::to_owned) };
        caller(tenant(), Some(wire)).expect("a caller").owner
    };
    assert_eq!(owner(None), None);
    assert_eq!(owner(Some("")), Some(OwnerId(String::new())));
    assert_eq!(field(caller(tenant(), None)), "caller is missing");
    let long = Some(v1::Caller { owner: Some("x".repeat(1_025)) });
    assert_eq!(field(caller(tenant(), long)), "caller.owner is longer than 1024 bytes");
}

#[test]
fn what_is_malformed_is_named() {
    assert_eq!(field(start_key(String::new())), "key is empty");
    assert_eq!(field(start_key("x".repeat(129))), "key is longer than 128 bytes");
    assert!(start_key("x".repeat(128)).is_ok());
    assert_eq!(field(read_id(String::new())), "read_id is empty");
    assert_eq!(field(command_spec(None)), "spec is missing");
    assert_eq!(field(command_spec(Some(v1::CommandSpec::default()))), "command is empty");
    for workspace in ["", "w", "/w\0"] {
        let spec = v1::CommandSpec { workspace: Some(workspace.into()), ..wire_spec() };
        assert_eq!(field(command_spec(Some(spec))), "workspace is not an absolute path");
    }
    let sandbox = v1::CommandSpec { sandbox_mode: 9, ..wire_spec() };
    assert_eq!(field(command_spec(Some(sandbox))), "spec.sandbox_mode is 9, which this daemon does not know");
    let timeout = v1::CommandSpec { timeout_ms: Some(f64::NAN), ..wire_spec() };
    assert_eq!(field(command_spec(Some(timeout))), "timeout_ms is not a positive number");
    assert_eq!(field(stream_name(0)), "stream is missing");
    assert_eq!(field(stream_name(3)), "stream is 3, which this daemon does not know");
    for bad in [f64::NAN, -1.0, f64::NEG_INFINITY] {
        assert_eq!(field(wait(Some(bad))), "wait_ms is not a number of milliseconds from 0");
    }
    assert_eq!(wait(Some(f64::INFINITY)), Ok(Some(MAX_WAIT)));
    assert_eq!(wait(Some(1.5)), Ok(Some(Duration::from_micros(1_500))));
}

#[test]
fn a_result_travels_as_chunks_and_a_description_of_them() {
    let tail: Vec<u8> = (0..150_000_u32).map(|byte| byte.to_le_bytes()[0]).collect();
    let result = RunResult {
        exit: Exit::Signal(9),
        timed_out_after_ms: Some(7.5),
        ended_by: Some(EndedBy::CallerGone),
        aborted: true,
        stdout: StreamResult {
            total: 150_010,
            tail: tail.clone().into(),
            dropped: 10,
            spill: Some(Spill { path: Bytes::from_static(b"/s"), cut_at: Some(3) }),
        },
        stderr: StreamResult { total: 2, tail: Bytes::from_static(b"xy"), dropped: 0, spill: None },
        survivors: vec![5],
        leftovers: vec![6, 7],
        sandbox_denied: None,
        duration_ms: 1.25,
    };
    let (tails, finished) = finished(result);
    let mut next = 10;
    let mut joined = Vec::new();
    for chunk in tails.iter().filter(|chunk| chunk.stream() == v1::StreamName::Stdout) {
        assert_eq!(chunk.offset, next);
        assert!(chunk.data.len() <= MAX_CHUNK_BYTES);
        next += chunk.data.len() as u64;
        joined.extend_from_slice(&chunk.data);
    }
    assert_eq!(joined, tail);
    let last = tails.back().expect("stderr comes last");
    assert_eq!((last.stream(), last.offset, &last.data[..]), (v1::StreamName::Stderr, 0, &b"xy"[..]));
    assert_eq!(
        finished,
        v1::RunFinished {
            exit: Some(v1::Exit { exit: Some(v1::exit::Exit::Signal(9)) }),
            timed_out_after_ms: Some(7.5),
            ended_by: v1::EndedBy::CallerGone.into(),
            aborted: true,
            stdout: Some(v1::StreamResult {
                total: 150_010,
                tail_start: 10,
                spill: Some(v1::Spill { path: Bytes::from_static(b"/s"), cut_at: Some(3) }),
            }),
            stderr: Some(v1::StreamResult { total: 2, tail_start: 0, spill: None }),
            survivors: vec![5],
            leftovers: vec![6, 7],
            sandbox_denied: false,
            duration_ms: 1.25,
        }
    );
}

#[test]
fn an_empty_delta_still_says_where_it_stands() {
    let (chunks, delta) =
        delta(StreamName::Stderr, StreamDelta { start: 40, dropped: 3, missing: 2, ..StreamDelta::default() });
    assert!(chunks.is_empty());
    assert_eq!(delta, v1::StreamDelta { start: 40, end: 40, dropped: 3, spill: None, missing: 2 });
}

#[test]
fn every_status_has_its_own_form() {
    use v1::task_status::{Killed, Running, Status as Wire};
    let wire = |one| status(one).status.expect("a status");
    assert_eq!(wire(TaskStatus::Running), Wire::Running(Running {}));
    assert_eq!(wire(TaskStatus::Killed(None)), Wire::Killed(Killed { signal: None }));
    assert_eq!(wire(TaskStatus::Killed(Some(15))), Wire::Killed(Killed { signal: Some(15) }));
    let unknown = v1::Exit { exit: Some(v1::exit::Exit::Unknown("x".into())) };
    assert_eq!(wire(TaskStatus::Ended(Exit::Unknown("x".into()))), Wire::Ended(unknown));
}

/// The largest task that there can be.
fn largest_task() -> TaskInfo {
    TaskInfo {
        id: TaskId("bash-18446744073709551615".into()),
        owner: Some(OwnerId("x".repeat(MAX_OWNER_BYTES))),
        command: Bytes::from(vec![b'x'; 4_096]),
        workdir: Bytes::from(vec![b'x'; executor_proto::types::MAX_WORKDIR_BYTES]),
        status: TaskStatus::Ended(Exit::Unknown("x".repeat(100))),
        started_at_ms: u64::MAX,
        ended_at_ms: Some(u64::MAX),
        stdout_total: u64::MAX,
        stderr_total: u64::MAX,
        shell_pid: Some(u32::MAX),
        leftovers: vec![Process { pid: u32::MAX, command_line: Bytes::from(vec![b'x'; 256]) }; 10_000],
    }
}

#[test]
fn the_largest_answers_stay_within_a_message() {
    let task = task_info(largest_task());
    let get = v1::GetTaskResponse { task: Some(task.clone()) };
    assert!(get.encoded_len() <= MAX_DAEMON_MESSAGE_BYTES, "{}", get.encoded_len());

    let (_, finished) = finished(RunResult {
        exit: Exit::Code(255),
        timed_out_after_ms: None,
        ended_by: None,
        aborted: false,
        stdout: StreamResult::default(),
        stderr: StreamResult::default(),
        survivors: vec![4_194_303; 100_000],
        leftovers: vec![4_194_303; 100_000],
        sandbox_denied: None,
        duration_ms: 0.0,
    });
    assert!(finished.encoded_len() <= MAX_DAEMON_MESSAGE_BYTES, "{}", finished.encoded_len());

    let mut small = task.clone();
    small.workdir = Bytes::new();
    small.leftovers.clear();
    let tasks: Vec<_> = (0..500).map(|n| if n % 7 == 0 { task.clone() } else { small.clone() }).collect();
    let batches = batches(tasks.iter().cloned());
    for batch in &batches {
        assert!(batch.encoded_len() <= MAX_DAEMON_MESSAGE_BYTES, "{}", batch.encoded_len());
    }
    assert_eq!(batches.into_iter().flat_map(|batch| batch.tasks).collect::<Vec<_>>(), tasks);
    assert_eq!(super::super::streams::batches(std::iter::empty()).len(), 1);
}
