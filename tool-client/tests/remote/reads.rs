//! Reads whose answers are whole, and ones of which something is missing.

use executor_proto::{types::TaskId, v1};
use tool_client::executor::{Executor, ExecutorError};

use super::{
    but_info, chunk, client,
    fake::{Daemon, Script},
};

#[tokio::test]
async fn a_delta_comes_in_chunks() {
    let part = |event| v1::ReadOutputEvent { event: Some(event) };
    let status = |end| {
        let running = v1::task_status::Status::Running(v1::task_status::Running {});
        part(v1::read_output_event::Event::Status(v1::ReadOutputStatus {
            status: Some(v1::TaskStatus { status: Some(running) }),
            stdout: Some(v1::StreamDelta { start: 5, end, dropped: 5, spill: None, missing: 0 }),
            stderr: Some(v1::StreamDelta::default()),
        }))
    };
    let bytes = |offset, data| part(v1::read_output_event::Event::Chunk(chunk(offset, data)));
    let daemon = Daemon::start(Script {
        reads: [
            vec![bytes(5, b"ab"), bytes(7, b"c"), status(8)],
            vec![bytes(5, b"ab"), status(8)],
            vec![bytes(5, b"ab")],
        ]
        .into(),
        ..Script::default()
    });
    let client = client(&daemon);
    let id = TaskId("bash-1".into());
    let output = client.read_output(None, &id, None).await.expect("it reads");
    assert_eq!((&output.stdout.data[..], output.stdout.start, output.stdout.dropped), (&b"abc"[..], 5, 5));
    for what in ["bytes are missing", "the status is missing"] {
        let error = client.read_output(None, &id, None).await.expect_err(what);
        assert!(matches!(error, ExecutorError::Unavailable { .. }), "{error:?}");
    }
    assert_eq!(but_info(&daemon).len(), 3, "a read is not repeated where its name means nothing");
    let names = daemon.seen().keys;
    assert!(names[0] != names[1] && names[1] == names[2], "one without an answer is gone on with: {names:?}");
}
