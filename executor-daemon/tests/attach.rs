//! Start keys, runs that are attached to again and reads that are repeated, as a stranger meets them: the real daemon over its
//! Unix socket, each connection one that can be closed under a call.

#[path = "service/daemon.rs"]
#[allow(dead_code, reason = "the tests of the service use the rest")]
mod daemon;

use executor_proto::{
    error::ExecutorError,
    v1::{self, executor_client::ExecutorClient, run_event::Event},
};
use tonic::{Status, Streaming, transport::Channel};

use daemon::{Daemon, client, key, nobody, run, wait_until};

fn error(status: Status) -> ExecutorError {
    ExecutorError::from_status(&status).unwrap_or_else(|| panic!("no reason: {status:?}"))
}

fn request(key: &str, command: &str) -> v1::RunRequest {
    v1::RunRequest { caller: nobody(), key: key.to_owned(), spec: run(command), ..v1::RunRequest::default() }
}

fn task(key: &str, command: &str) -> v1::StartTaskRequest {
    v1::StartTaskRequest { caller: nobody(), key: key.to_owned(), spec: run(command) }
}

/// A client on a connection of its own: dropped, it cuts whatever it is at.
async fn connection(daemon: &Daemon) -> ExecutorClient<Channel> {
    client(daemon.unix().await)
}

/// All that a run still sends: output and tails joined, and how it ended.
async fn rest(stream: &mut Streaming<v1::RunEvent>) -> (Vec<u8>, v1::RunFinished) {
    let mut bytes = Vec::new();
    loop {
        let event = stream.message().await.expect("no error").expect("it ends with its result");
        match event.event.expect("an event") {
            Event::Accepted(_) | Event::Heartbeat(_) => {}
            Event::Output(chunk) | Event::Tail(chunk) => bytes.extend_from_slice(&chunk.data),
            Event::Finished(finished) => return (bytes, finished),
        }
    }
}

fn code(finished: &v1::RunFinished) -> Option<u32> {
    match finished.exit.as_ref()?.exit.as_ref()? {
        v1::exit::Exit::Code(code) => Some(*code),
        v1::exit::Exit::Signal(_) | v1::exit::Exit::Unknown(_) => None,
    }
}

fn lines(daemon: &Daemon, name: &str) -> usize {
    std::fs::read_to_string(daemon.dir().join(name)).unwrap_or_default().lines().count()
}

#[tokio::test]
async fn a_key_starts_one_process_and_another_command_under_it_is_a_conflict() {
    let daemon = Daemon::start(&[]);
    let key = key();
    let first = connection(&daemon).await.start_task(task(&key, "echo x >> f; sleep 60")).await.expect("a task");
    let again = connection(&daemon).await.start_task(task(&key, "echo x >> f; sleep 60")).await.expect("the same");
    assert_eq!(first.into_inner().task_id, again.into_inner().task_id);
    wait_until("it has begun", || (lines(&daemon, "f") > 0).then_some(())).await;
    assert_eq!(lines(&daemon, "f"), 1);

    let mut client = connection(&daemon).await;
    let other = client.start_task(task(&key, "echo y >> f")).await.expect_err("another command");
    assert_eq!(error(other), ExecutorError::KeyConflict);
    let kind = client.run(request(&key, "echo x >> f; sleep 60")).await.expect_err("another kind");
    assert_eq!(error(kind), ExecutorError::KeyConflict);
    // Another owner's key of the same name is another key.
    let caller = Some(v1::Caller { owner: Some("s".into()) });
    let theirs = client.start_task(v1::StartTaskRequest { caller, ..task(&key, "true") }).await.expect("a task");
    assert_eq!(theirs.into_inner().task_id, "bash-2");
}

#[tokio::test]
async fn o04_a_start_whose_reply_is_lost_is_found_again_by_its_key() {
    let daemon = Daemon::start(&[]);
    let key = key();
    let mut one = connection(&daemon).await;
    let lost = one.start_task(task(&key, "echo x >> f; sleep 60"));
    // Whoever polls no further takes no reply.
    tokio::select! {
        biased;
        () = async { while lines(&daemon, "f") == 0 { tokio::task::yield_now().await } } => {}
        reply = lost => drop(reply),
    }
    drop(one);
    let mut client = connection(&daemon).await;
    let again = client.start_task(task(&key, "echo x >> f; sleep 60")).await.expect("the same task");
    assert_eq!(again.into_inner().task_id, "bash-1");
    let other = client.start_task(task(&key, "echo y >> f")).await.expect_err("another command");
    assert_eq!(error(other), ExecutorError::KeyConflict);
    wait_until("it has begun", || (lines(&daemon, "f") > 0).then_some(())).await;
    assert_eq!(lines(&daemon, "f"), 1);
}

#[tokio::test]
async fn retries_that_meet_their_start_wait_for_it() {
    let daemon = Daemon::start(&[]);
    let key = key();
    let client = connection(&daemon).await;
    let starts = (0..20).map(|_| {
        let mut client = client.clone();
        let request = task(&key, "echo x >> f");
        async move { client.start_task(request).await.expect("a task").into_inner().task_id }
    });
    let ids = futures_util::future::join_all(starts).await;
    assert!(ids.iter().all(|id| id == "bash-1"), "{ids:?}");
    wait_until("it has run", || (lines(&daemon, "f") > 0).then_some(())).await;
    assert_eq!(lines(&daemon, "f"), 1);
}

#[tokio::test]
async fn a_start_that_failed_for_sure_frees_its_key() {
    let daemon = Daemon::start(&[]);
    let key = key();
    let mut client = connection(&daemon).await;
    let spec = |workdir: &str| {
        let workdir = Some(workdir.to_owned().into());
        Some(v1::CommandSpec { workdir, ..run("true").expect("a command") })
    };
    let missing = v1::RunRequest { spec: spec("/does/not/exist"), ..request(&key, "true") };
    let failed = client.run(missing.clone()).await.expect_err("no such directory");
    assert!(matches!(error(failed), ExecutorError::Spawn { .. }));
    let mut stream = client.run(request(&key, "true")).await.expect("the key is free").into_inner();
    assert_eq!(code(&rest(&mut stream).await.1), Some(0));
    assert_eq!(error(client.run(missing).await.expect_err("another command")), ExecutorError::KeyConflict);
}

#[tokio::test]
async fn a_run_goes_on_without_its_client_and_is_attached_to_at_an_offset() {
    let daemon = Daemon::start(&[]);
    let key = key();
    let command = "echo x >> starts; printf abc; while [ ! -e go ]; do sleep 0.05; done; printf def; exit 4";
    let first = v1::RunRequest { stream_output: true, ..request(&key, command) };
    let mut one = connection(&daemon).await;
    let mut stream = one.run(first.clone()).await.expect("a run").into_inner();
    let mut got = Vec::new();
    while got != b"abc" {
        if let Some(Event::Output(chunk)) = stream.message().await.expect("no error").expect("an event").event {
            got.extend_from_slice(&chunk.data);
        }
    }
    // The connection is closed under the stream.
    drop((stream, one));
    let mut two = connection(&daemon).await;
    let again = v1::RunRequest { stdout_offset: Some(3), stderr_offset: Some(0), ..first.clone() };
    let mut stream = two.run(again).await.expect("it is attached to").into_inner();
    // Somebody else attaches without the output, and has the tail.
    let mut watching = two.run(request(&key, command)).await.expect("it is attached to").into_inner();
    std::fs::write(daemon.dir().join("go"), "").expect("a file");
    let (bytes, finished) = rest(&mut stream).await;
    assert_eq!((&bytes[..], code(&finished)), (&b"def"[..], Some(4)));
    assert_eq!(finished.stdout.as_ref().map(|stdout| stdout.total), Some(6));
    let (bytes, finished) = rest(&mut watching).await;
    assert_eq!((&bytes[..], code(&finished)), (&b"abcdef"[..], Some(4)));
    assert_eq!(lines(&daemon, "starts"), 1);
}

#[tokio::test]
async fn a_result_that_nobody_took_is_there_for_who_comes_back() {
    let daemon = Daemon::start(&[]);
    let key = key();
    let command = "echo x >> starts; seq 1 40000; touch done";
    let mut one = connection(&daemon).await;
    let stream = one.run(request(&key, command)).await.expect("a run").into_inner();
    drop((stream, one));
    wait_until("it has ended", || daemon.dir().join("done").exists().then_some(())).await;
    let mut two = connection(&daemon).await;
    // From the start although the tail has lost that: the file has it.
    let attach = v1::RunRequest {
        stream_output: true,
        stdout_offset: Some(2),
        stderr_offset: Some(0),
        ..request(&key, command)
    };
    let mut stream = two.run(attach).await.expect("it is attached to").into_inner();
    let (bytes, finished) = rest(&mut stream).await;
    let whole: String = (1..=40_000).map(|n| format!("{n}\n")).collect();
    assert!(bytes == whole.as_bytes()[2..], "{} bytes of {}", bytes.len(), whole.len() - 2);
    assert_eq!((code(&finished), lines(&daemon, "starts")), (Some(0), 1));
}

#[tokio::test]
async fn results_that_wait_hold_no_descriptors() {
    let daemon = Daemon::start(&[]);
    let mut one = connection(&daemon).await;
    let keys: Vec<String> = (0..40).map(|_| key()).collect();
    let mut streams = Vec::new();
    for key in &keys {
        // Half of them spill.
        let command = format!("seq 1 {}; echo >> done", if streams.len() % 2 == 0 { 10 } else { 20_000 });
        streams.push((one.run(request(key, &command)).await.expect("a run").into_inner(), command));
    }
    let commands: Vec<String> = streams.into_iter().map(|(_stream, command)| command).collect();
    wait_until("all have ended", || (lines(&daemon, "done") == keys.len()).then_some(())).await;
    // The keeper's own children: its server holds what the results hold.
    let keeper = daemon.pid();
    let descriptors = || {
        let children = std::fs::read_to_string(format!("/proc/{keeper}/task/{keeper}/children")).unwrap_or_default();
        let pids = children.split_whitespace().map(str::to_owned).chain([keeper.to_string()]);
        pids.filter_map(|pid| std::fs::read_dir(format!("/proc/{pid}/fd")).ok())
            .flat_map(|all| all.flatten())
            .filter_map(|fd| std::fs::read_link(fd.path()).ok())
            .map(|path| path.to_string_lossy().into_owned())
            .filter(|path| path.starts_with("pipe:") || path.contains("stream") || path.contains("/spill/"))
            .count()
    };
    wait_until("nothing of them is open", || (descriptors() < keys.len() / 2).then_some(())).await;
    for (key, command) in keys.iter().zip(&commands) {
        let mut stream = one.run(request(key, command)).await.expect("it is attached to").into_inner();
        assert_eq!(code(&rest(&mut stream).await.1), Some(0));
    }
    assert_eq!(lines(&daemon, "done"), keys.len(), "nothing ran twice");
}

#[tokio::test]
async fn m08_a_run_whose_client_does_not_come_back_is_ended_and_says_why() {
    for window in ["0", "200"] {
        let daemon = Daemon::start(&["--grace-ms", "100", "--resume-window-ms", window]);
        let key = key();
        let command = "echo $$ > pid; sleep 1000";
        let mut one = connection(&daemon).await;
        let stream = one.run(request(&key, command)).await.expect("a run").into_inner();
        let pid = wait_until("the command has begun", || {
            std::fs::read_to_string(daemon.dir().join("pid")).ok().filter(|text| text.ends_with('\n'))
        })
        .await;
        drop((stream, one));
        let process = format!("/proc/{}", pid.trim());
        wait_until("it has been ended", || (!std::path::Path::new(&process).exists()).then_some(())).await;
        assert!(daemon.log().contains("its caller is gone"), "{}", daemon.log());
        let attached = connection(&daemon).await.run(request(&key, command)).await;
        if window == "0" {
            // Nothing is held, and nothing is started again.
            match attached {
                Ok(stream) => assert_eq!(rest(&mut stream.into_inner()).await.1.ended_by(), v1::EndedBy::CallerGone),
                Err(status) => assert!(matches!(error(status), ExecutorError::OutcomeUnknown { .. })),
            }
            continue;
        }
        let (_, finished) = rest(&mut attached.expect("its outcome can be asked for").into_inner()).await;
        assert_eq!(finished.ended_by(), v1::EndedBy::CallerGone);
        assert_eq!(finished.exit, Some(v1::Exit { exit: Some(v1::exit::Exit::Signal(15)) }));
    }
}

#[tokio::test]
async fn a_run_whose_client_comes_back_in_time_is_not_ended_later() {
    let daemon = Daemon::start(&["--resume-window-ms", "700"]);
    let key = key();
    let command = "touch begun; while [ ! -e go ]; do sleep 0.05; done; exit 3";
    for _ in 0..5 {
        let mut one = connection(&daemon).await;
        let stream = one.run(request(&key, command)).await.expect("a run").into_inner();
        wait_until("it has begun", || daemon.dir().join("begun").exists().then_some(())).await;
        drop((stream, one));
        let waited = tokio::time::Instant::now() + std::time::Duration::from_millis(200);
        tokio::time::sleep_until(waited).await;
    }
    let mut stream = connection(&daemon).await.run(request(&key, command)).await.expect("attached").into_inner();
    std::fs::write(daemon.dir().join("go"), "").expect("a file");
    assert_eq!(code(&rest(&mut stream).await.1), Some(3));
}

#[tokio::test]
async fn a_run_without_a_client_can_be_cancelled() {
    let daemon = Daemon::start(&["--grace-ms", "100"]);
    let key = key();
    let command = "trap 'exit 9' TERM; touch begun; while :; do sleep 0.05; done";
    let mut one = connection(&daemon).await;
    let stream = one.run(request(&key, command)).await.expect("a run").into_inner();
    wait_until("it has begun", || daemon.dir().join("begun").exists().then_some(())).await;
    drop((stream, one));
    let mut two = connection(&daemon).await;
    let cancel = v1::CancelRunRequest { caller: nobody(), key: key.clone() };
    let outcome = two.cancel_run(cancel).await.expect("it is ended").into_inner().outcome.expect("an outcome");
    assert_eq!(outcome, v1::KillOutcome::default());
    let mut stream = two.run(request(&key, command)).await.expect("its outcome can be asked for").into_inner();
    assert!(rest(&mut stream).await.1.aborted);
}

#[tokio::test]
async fn an_attach_to_a_key_that_is_not_known_starts_nothing() {
    let daemon = Daemon::start(&[]);
    let mut client = connection(&daemon).await;
    let attach = v1::RunRequest { stdout_offset: Some(0), ..request(&key(), "touch ran") };
    let refused = error(client.run(attach).await.expect_err("nothing to attach to"));
    assert!(matches!(refused, ExecutorError::OutcomeUnknown { .. }), "{refused:?}");
    // Whatever was started before this has been started.
    let mut stream = client.run(request(&key(), "true")).await.expect("a run").into_inner();
    rest(&mut stream).await;
    assert!(!daemon.dir().join("ran").exists());
}

#[tokio::test]
async fn what_resumes_is_announced() {
    let daemon = Daemon::start(&["--resume-window-ms", "1234"]);
    let info = connection(&daemon).await.get_info(v1::GetInfoRequest {}).await.expect("info").into_inner();
    assert_eq!(info.resume_window_ms, 1234);
    assert!(["resume", "read-id"].iter().all(|feature| info.features.iter().any(|one| one == feature)));
}

/// All of one read: its bytes, and its status.
async fn read(client: &mut ExecutorClient<Channel>, task_id: &str, read_id: &str) -> (Vec<u8>, v1::ReadOutputStatus) {
    use v1::read_output_event::Event;
    let (task_id, read_id) = (task_id.to_owned(), read_id.to_owned());
    let request = v1::ReadOutputRequest { caller: nobody(), task_id, read_id, wait_ms: None };
    let mut stream = client.read_output(request).await.expect("a read").into_inner();
    let mut bytes = Vec::new();
    while let Some(event) = stream.message().await.expect("no error") {
        match event.event.expect("an event") {
            Event::Chunk(chunk) => bytes.extend_from_slice(&chunk.data),
            Event::Heartbeat(_) => {}
            Event::Status(status) => return (bytes, status),
        }
    }
    panic!("no status")
}

#[tokio::test]
async fn a_read_is_repeated_with_its_id_and_goes_on_with_another() {
    let daemon = Daemon::start(&[]);
    let mut client = connection(&daemon).await;
    let command = "printf one; touch begun; while [ ! -e go ]; do sleep 0.05; done; printf two; exit 5";
    let id = client.start_task(task(&key(), command)).await.expect("a task").into_inner().task_id;
    wait_until("it has begun", || daemon.dir().join("begun").exists().then_some(())).await;
    let first = loop {
        let read_id = key();
        let answer = read(&mut client, &id, &read_id).await;
        if !answer.0.is_empty() {
            assert_eq!(read(&mut client, &id, &read_id).await, answer, "the same again");
            break (read_id, answer);
        }
    };
    assert_eq!(first.1.0, b"one");
    std::fs::write(daemon.dir().join("go"), "").expect("a file");
    let wait = v1::ReadOutputRequest {
        caller: nobody(),
        task_id: id.clone(),
        read_id: first.0.clone(),
        wait_ms: Some(600_000.0),
    };
    // A repeated read does not wait for the end of the task: it has its answer.
    let mut again = client.read_output(wait).await.expect("a read").into_inner();
    while again.message().await.expect("no error").is_some() {}
    wait_until("it has ended", || daemon.log().contains("bash-1").then_some(())).await;
    assert_eq!(read(&mut client, &id, &first.0).await, first.1, "the same again after its end");
    let (mut rest, mut status) = read(&mut client, &id, &key()).await;
    while matches!(
        status.status.as_ref().and_then(|status| status.status.as_ref()),
        Some(v1::task_status::Status::Running(_))
    ) {
        let (more, next) = read(&mut client, &id, &key()).await;
        rest.extend(more);
        status = next;
    }
    assert_eq!(rest, b"two");
}

/// Ends the server as a crash would, and waits until another one answers.
#[expect(clippy::disallowed_methods, reason = "the server under test is killed as a crash would kill it")]
async fn kill_server(daemon: &Daemon) {
    let keeper = daemon.pid();
    let children = std::fs::read_to_string(format!("/proc/{keeper}/task/{keeper}/children")).expect("it runs");
    let is_server = |pid: &&str| {
        let words = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        words.split(|byte| *byte == 0).any(|word| word == b"__server")
    };
    let server: i32 = children.split_whitespace().find(is_server).expect("it has a server").parse().expect("a pid");
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(server), nix::sys::signal::Signal::SIGKILL).expect("it lives");
    wait_until("another server is ready", || daemon.log().contains("the new server is ready").then_some(())).await;
}

/// The causes that the journal has for the end of the first start, in the order in which they came.
fn causes(daemon: &Daemon) -> Vec<i64> {
    let own = daemon.dir().join("state/server");
    let state = if own.is_dir() { own } else { daemon.dir().join("state") };
    let journal = rusqlite::Connection::open(state.join("journal.sqlite")).expect("it opens");
    let asked: i64 = journal.query_row("select asked from starts", (), |row| row.get(0)).expect("one start");
    let digits = format!("{asked:o}");
    digits.bytes().map(|digit| i64::from(digit - b'0')).filter(|digit| *digit > 0).collect()
}

#[tokio::test]
async fn an_abort_during_a_timeouts_grace_is_told_by_the_next_server() {
    const TIMEOUT: i64 = 1;
    const ABORT: i64 = 2;
    let daemon = Daemon::start(&["--grace-ms", "5000"]);
    let key = key();
    let spec = |command: &str| v1::CommandSpec { timeout_ms: Some(200.0), ..run(command).expect("a command") };
    let request = v1::RunRequest {
        spec: Some(spec("trap '' TERM; touch begun; while [ ! -e go ]; do sleep 0.05; done; exit 3")),
        ..request(&key, "")
    };
    let mut one = connection(&daemon).await;
    let stream = one.run(request.clone()).await.expect("a run").into_inner();
    wait_until("its time is out", || (causes(&daemon) == [TIMEOUT]).then_some(())).await;
    let mut two = connection(&daemon).await;
    let cancel = v1::CancelRunRequest { caller: nobody(), key: key.clone() };
    let cancelling = tokio::spawn(async move { two.cancel_run(cancel).await });
    wait_until("the abort is written down", || (causes(&daemon) == [TIMEOUT, ABORT]).then_some(())).await;
    kill_server(&daemon).await;
    drop((stream, one));
    assert!(cancelling.await.expect("no panic").is_err(), "its reply is lost");
    let mut stream = connection(&daemon).await.run(request).await.expect("attached").into_inner();
    assert_eq!(causes(&daemon), [TIMEOUT, ABORT], "once each");
    std::fs::write(daemon.dir().join("go"), "").expect("a file");
    let finished = rest(&mut stream).await.1;
    assert_eq!((finished.aborted, finished.timed_out_after_ms), (true, Some(200.0)));
}

#[tokio::test]
async fn each_reader_of_an_ownerless_task_has_its_read_repeated_by_the_next_server() {
    /// As many reads as are kept.
    const PARTS: u64 = 8;
    let daemon = Daemon::start(&[]);
    let mut client = connection(&daemon).await;
    let command = "for i in {1..8}; do printf \"part $i\"; touch wrote$i; while [ ! -e go$i ]; do sleep 0.05; done; done; \
                   exit 5";
    let id = client.start_task(task(&key(), command)).await.expect("a task").into_inner().task_id;
    let mut answers = Vec::new();
    for part in 1..=PARTS {
        wait_until("it has written", || daemon.dir().join(format!("wrote{part}")).exists().then_some(())).await;
        let known = v1::GetTaskRequest { caller: nobody(), task_id: id.clone() };
        // The server takes the bytes a moment later.
        loop {
            let task = client.get_task(known.clone()).await.expect("it is known").into_inner().task.expect("a task");
            if task.stdout_total == 6 * part {
                break;
            }
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
        let read_id = key();
        let answer = read(&mut client, &id, &read_id).await;
        assert_eq!(answer.0, format!("part {part}").into_bytes());
        answers.push((read_id, answer));
        if part < PARTS {
            std::fs::write(daemon.dir().join(format!("go{part}")), "").expect("a file");
        }
    }
    for (read_id, answer) in &answers {
        assert_eq!(read(&mut client, &id, read_id).await.0, answer.0, "the same server");
    }
    kill_server(&daemon).await;
    let mut client = connection(&daemon).await;
    for (read_id, answer) in answers.iter().rev() {
        assert_eq!(read(&mut client, &id, read_id).await.0, answer.0, "the next server");
    }
    // And none of it moves what comes next.
    assert_eq!(read(&mut client, &id, &key()).await.0, b"");
}
