//! Runs: their result, their timeout, their abort, and what they leave over.

use std::{
    fs,
    time::{Duration, Instant},
};

use bytes::Bytes;
use executor_proto::{
    error::{ExecutorError, SizedPart, SpawnStage},
    types::{EnvironmentVariable, Exit, KillOutcome, ReadStreamEvent, RunResult, SandboxMode, StreamName, TaskStatus},
};

use super::{World, alive, all, key, owner, spec, text, until};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_run_returns_its_output_and_its_exit() {
    let world = World::new().await;
    let result = world.run("echo out; echo err >&2; exit 7").await;
    assert_eq!((text(&result.stdout.tail), text(&result.stderr.tail)), ("out\n", "err\n"));
    assert_eq!(result.exit, Exit::Code(7));
    assert_eq!((result.timed_out_after_ms, result.ended_by, result.aborted), (None, None, false));
    assert!(result.leftovers.is_empty() && result.survivors.is_empty());
    assert_eq!(world.run("kill -9 $$").await.exit, Exit::Signal(9));
    assert_eq!(world.run("kill -35 $$").await.exit, Exit::Signal(35));
    assert_eq!(text(&world.run("echo $0 $- $#; cat; echo $?").await.stdout.tail), "bash hBc 0\n0\n");
    world.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_environment_and_the_workdir_are_the_commands_own() {
    let world = World::new().await;
    fs::create_dir(world.directory.path().join("sub")).expect("a directory");
    let mut given = spec("pwd; echo $X $TERM; cat");
    given.workdir = Some("./x/../sub".into());
    given.environment.push(EnvironmentVariable { name: "X".into(), value: "1".into() });
    given.environment.push(EnvironmentVariable { name: "X".into(), value: "2".into() });
    given.stdin = Some("from stdin".into());
    let result = world.run_spec(given).await.expect("it starts");
    let workdir = world.directory.path().join("sub");
    assert_eq!(text(&result.stdout.tail), format!("{}\n2 dumb\nfrom stdin", workdir.display()));
    world.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_cannot_start_says_why_and_uses_no_id() {
    let world = World::new().await;
    let mut gone = spec("pwd");
    gone.workdir = Some("/nowhere/at/all".into());
    let path = Some(Bytes::from_static(b"/nowhere/at/all"));
    let expected = ExecutorError::Spawn { stage: SpawnStage::Chdir, errno: 2, path };
    assert_eq!(world.run_spec(gone.clone()).await, Err(expected.clone()));
    let again = key();
    assert_eq!(world.engine.start_task(&owner("a"), again.clone(), gone).await, Err(expected));

    let mut no_bash = spec("pwd");
    no_bash.environment.push(EnvironmentVariable { name: "PATH".into(), value: "/nowhere".into() });
    let expected = ExecutorError::Spawn { stage: SpawnStage::Exec, errno: 2, path: None };
    assert_eq!(world.run_spec(no_bash).await, Err(expected));

    let mut large = spec("true");
    large.environment = (0..70)
        .map(|n| EnvironmentVariable { name: format!("X{n}").into(), value: vec![b'x'; 131_000].into() })
        .collect();
    let error = world.run_spec(large).await.expect_err("the kernel does not take that much");
    let ExecutorError::TooLarge { part: SizedPart::Environment, name: None, bytes, limit } = error else {
        panic!("{error:?}")
    };
    assert!(bytes > limit, "{bytes} {limit}");

    let mut limited = spec("true");
    limited.sandbox_mode = Some(SandboxMode::WorkspaceWrite);
    limited.workspace = Some("/".into());
    assert!(matches!(world.run_spec(limited).await, Err(ExecutorError::SandboxUnavailable { .. })));

    // The key of the start that failed is free, and the number that it did not get comes now.
    let id = world.engine.start_task(&owner("a"), again, spec("true")).await.expect("it starts");
    assert_eq!(id.0, "bash-1");
    world.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_timeout_ends_everything_and_keeps_what_was_written() {
    let world = World::new().await;
    let mut given = spec(
        "setsid sh -c 'trap \"\" TERM; echo $$ > escaped; while :; do sleep 1; done' & \
         echo progress; sleep 60",
    );
    given.timeout_ms = Some(700.5);
    let started = Instant::now();
    let result = world.run_spec(given).await.expect("it starts");
    assert!(started.elapsed() < Duration::from_secs(4), "{:?}", started.elapsed());
    assert_eq!(result.timed_out_after_ms, Some(700.5));
    assert_eq!((result.exit, text(&result.stdout.tail)), (Exit::Signal(15), "progress\n"));
    assert!(result.survivors.is_empty() && result.leftovers.is_empty());
    assert!(!alive(&world.wrote("escaped").await));
    world.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_capped_timeout_says_the_effective_value() {
    let world = World::with(|settings| settings.max_timeout_ms = 150.0).await;
    let mut given = spec("sleep 60");
    given.timeout_ms = Some(1e300);
    let mut run = world.engine.run(&owner("a"), key(), given).await.expect("it starts");
    assert_eq!((run.accepted().timeout_ms, run.accepted().run_id.0.as_str()), (150.0, "run-1"));
    assert_eq!(run.finished().await.timed_out_after_ms, Some(150.0));
    world.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_abort_ends_the_run_and_its_reply_is_evidence() {
    let world = World::new().await;
    let name = key();
    let command = spec("echo $$ > pid; sleep 60");
    let mut run = world.engine.run(&owner("a"), name.clone(), command).await.expect("it starts");
    let second = world.engine.run(&owner("a"), name.clone(), spec("true")).await;
    assert_eq!(second.expect_err("the key is in use"), ExecutorError::KeyConflict);
    let pid = world.wrote("pid").await;
    let stranger = world.engine.cancel_run(&owner("b"), &name).await.expect("a well-formed key");
    assert!(stranger.already_finished && alive(&pid));
    let outcome = world.engine.cancel_run(&owner("a"), &name).await.expect("a well-formed key");
    assert_eq!(outcome, KillOutcome::default());
    assert!(!alive(&pid));
    assert!(run.finished().await.aborted);
    assert!(world.engine.cancel_run(&owner("a"), &name).await.expect("a well-formed key").already_finished);
    world.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_abort_that_meets_the_start_ends_it_all_the_same() {
    let world = World::new().await;
    for _ in 0..20 {
        let name = key();
        let caller = owner("a");
        let start = world.engine.run(&caller, name.clone(), spec("sleep 60"));
        let abort = async {
            while world.engine.cancel_run(&caller, &name).await.expect("a well-formed key").already_finished {
                tokio::task::yield_now().await;
            }
        };
        let (run, ()) = tokio::join!(start, abort);
        assert!(run.expect("it starts").finished().await.aborted);
    }
    world.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_dropped_run_is_ended_and_so_is_a_dropped_start() {
    let world = World::new().await;
    let run = world.engine.run(&owner("a"), key(), spec("echo $$ > pid; sleep 60")).await.expect("it starts");
    let pid = world.wrote("pid").await;
    drop(run);
    until(|| !alive(&pid)).await;
    // A finished run without a spill is forgotten.
    world.nothing_lives().await;

    // More at a time than the keeper keeps helpers for.
    for _ in 0..30 {
        let caller = owner("a");
        let start = world.engine.run(&caller, key(), spec("sleep 60"));
        // Polled once, then dropped: the keeper is at it.
        let _ = tokio::time::timeout(Duration::ZERO, start).await;
    }
    // The keeper starts one after the other, so all of them have been started when this one has.
    world.run("true").await;
    world.nothing_lives().await;
    world.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leftovers_do_not_hold_a_run_up_and_are_listed_and_killable() {
    let world = World::new().await;
    let started = Instant::now();
    let mut run = world
        .engine
        .run(&owner("a"), key(), spec("(while :; do echo x; sleep 0.02; done) & echo started"))
        .await
        .expect("it starts");
    let output = run.output(StreamName::Stdout);
    let result = run.finished().await;
    assert!(started.elapsed() < Duration::from_millis(2_500), "{:?}", started.elapsed());
    assert_eq!(result.exit, Exit::Code(0));
    assert!(!result.leftovers.is_empty());
    // The run's own output ends where its result does.
    let (bytes, total) = all(output).await;
    assert_eq!((bytes.len() as u64, total), (result.stdout.total, result.stdout.total));

    let id = run.accepted().run_id.clone();
    let listed = world.engine.list_tasks(&owner("a")).await;
    assert_eq!((listed.len(), &listed[0].id, &listed[0].status), (1, &id, &TaskStatus::Ended(Exit::Code(0))));
    assert!(!listed[0].leftovers.is_empty());
    // What it writes goes on to its stream.
    let mut follow = world.engine.read_stream(&owner("a"), &id, StreamName::Stdout, total, true).expect("it is known");
    assert!(matches!(follow.next().await, Some(ReadStreamEvent::Chunk(chunk)) if chunk.offset == total));
    assert_eq!(world.kill(&id).await, KillOutcome::default());
    assert!(result.leftovers.iter().all(|pid| !alive(&pid.to_string())));
    world.nothing_lives().await;
    world.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leftovers_can_be_unwanted() {
    let world = World::with(|settings| settings.reap_descendants = true).await;
    let result = world.run("setsid sleep 60 & echo $! > pid").await;
    assert_eq!((result.exit, result.leftovers, result.survivors), (Exit::Code(0), vec![], vec![]));
    assert!(!alive(&world.wrote("pid").await));
    world.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_oldest_leftovers_go_above_the_cap() {
    let world = World::with(|settings| settings.max_leftovers_per_owner = 2).await;
    let mut pids = Vec::new();
    for n in 0..4 {
        let result = world.run(format!("sleep 60 >/dev/null 2>&1 & echo $! > pid{n}")).await;
        assert_eq!(result.exit, Exit::Code(0));
        pids.push(world.wrote(&format!("pid{n}")).await);
    }
    until(|| pids.iter().filter(|pid| alive(pid)).count() == 2).await;
    assert!(alive(&pids[2]) && alive(&pids[3]));
    world.close().await;
}

/// Small scripts as an argument and, behind a long comment, as one that is too long for an argument.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_long_command_runs_as_a_short_one_does() {
    let world = World::new().await;
    let scripts: [&[u8]; 19] = [
        b"echo $0 $- $# $? $LINENO; cat; echo rc=$?",
        b"exit 3",
        b"set -e; false; echo no",
        b"kill -9 $$",
        b"nosuchcommand",
        b"cat <<E\nhello\nE",
        b"cat <<E\nhello\nE\n",
        b"cat <<E\nopen",
        b"ls /proc/self/fd",
        b"printf '%s' '\xff\xfe\xe2'",
        b"return 4\necho after",
        b"echo a\\\n",
        b"echo a\\",
        b"trap 'echo bye' EXIT; trap 'echo no' RETURN; exit 7",
        b"exec 3>&1; echo three >&3",
        b"shopt -s extglob expand_aliases\nalias x='echo y'\nx; echo ${__command-unset}",
        b"# nothing",
        b"sleep 0.01 & wait $!; echo $?",
        b"x=$(cat <<E\nfoo\nE\n); echo $x\n\n",
    ];
    for script in scripts {
        let short = world.run([b"# x\n", script].concat()).await;
        let comment = vec![b'x'; 140_000];
        let long = world.run([b"# ", comment.as_slice(), b"\n", script].concat()).await;
        let told = |result: &RunResult| (result.exit.clone(), result.stdout.tail.clone(), result.stderr.tail.clone());
        assert_eq!(told(&short), told(&long), "{}", String::from_utf8_lossy(script));
    }
    // A syntax error has the same code and other words.
    let long = [vec![b' '; 140_000].as_slice(), b"echo 'open"].concat();
    let result = world.run(long).await;
    assert_eq!(result.exit, Exit::Code(2));
    assert!(text(&result.stderr.tail).contains("unexpected EOF"));

    let mut heredoc = b"cat > f <<'E'\n".to_vec();
    heredoc.extend(vec![b'y'; 8 * 1024 * 1024 - 100]);
    heredoc.extend(b"\nE\nwc -c < f");
    let result = world.run(heredoc).await;
    assert_eq!(text(&result.stdout.tail).trim(), (8 * 1024 * 1024 - 99).to_string());
    world.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn starts_and_ends_in_great_number_leave_nothing() {
    let world = World::new().await;
    let descriptors = || fs::read_dir("/proc/self/fd").expect("proc").count();
    world.run("true").await;
    world.nothing_lives().await;
    let before = descriptors();
    let engine = &world.engine;
    let runs = (0..300).map(|n| async move {
        let command = format!("printf END{n}");
        let mut run = engine.run(&owner("a"), key(), spec(command)).await.expect("it starts");
        let result = run.finished().await;
        assert_eq!((result.exit, text(&result.stdout.tail)), (Exit::Code(0), format!("END{n}").as_str()));
    });
    futures_util::future::join_all(runs).await;
    world.nothing_lives().await;
    // Other tests of this process open and close descriptors too; what grows with the number of runs would show.
    until(|| descriptors() < before + 150).await;
    world.close().await;
}
