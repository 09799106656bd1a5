//! The server's process is killed while commands run: nothing that they write, how they end, and that their owner is told of
//! it once, depends on it.
//!
//! `TAKEOVER_TASKS` and `TAKEOVER_KILLS` make it longer (`just soak`).

mod replaced;

use std::{collections::BTreeMap, fmt::Display, fs, time::Duration};

use executor_proto::types::{Exit, StreamName, TaskId, TaskStatus};
use executor_tests::{Backend, Setup, Stopwatch, World, processes::Found, run, tell, wait_for, wait_until};
use futures_util::{StreamExt as _, stream};
use nix::sys::signal::Signal;

/// For what has to happen at all; nothing waits this long when all is well.
const LIMIT: Duration = Duration::from_secs(60);

/// From the kill of the server to an answer.
const ANSWERS_AGAIN: Duration = Duration::from_secs(1);

/// Tasks, unless it is to take longer.
const TASKS: usize = 60;

/// Tasks are asked for this many at a time.
const AT_ONCE: usize = 16;

fn number(variable: &str, default: usize) -> usize {
    std::env::var(variable).ok().map_or(default, |text| text.parse().expect("a number"))
}

fn setup() -> Setup {
    let tasks = u64::try_from(number("TAKEOVER_TASKS", TASKS)).expect("a number");
    Setup { max_spill_bytes: Some(1 << 20), max_tasks_per_owner: Some(tasks.max(16)), ..Setup::default() }
}

/// Kills the process that serves, as a crash would.
async fn kill_server(world: &World) -> Found {
    world.daemon().expect("it is a daemon's world").kill_server().await.expect("it is killed")
}

/// Kills the process that serves and waits until another one answers; how long that took.
async fn replace_server(world: &World) -> Duration {
    let watch = Stopwatch::start();
    let before = kill_server(world).await;
    world.executor().info().await.expect("the executor answers");
    let answered = watch.elapsed();
    watch.assert_within("calls answer again", ANSWERS_AGAIN);
    assert_ne!(world.daemon().expect("it is a daemon's world").server().pid, before.pid);
    answered
}

/// Does so again and again, each time at some instant; how long each took.
async fn replace_servers(world: &World, times: usize) -> Vec<Duration> {
    let mut answers = Vec::new();
    for _ in 0..times {
        let mut random = [0];
        getrandom::fill(&mut random).expect("the kernel has random bytes");
        // No condition: that nothing is waited for is what makes the instant any.
        tokio::time::sleep(Duration::from_millis(random[0].into())).await;
        answers.push(replace_server(world).await);
    }
    answers
}

/// A task that writes numbered lines, without starting a process for it, until the file `go` is there; then the last one.
fn counting(lines_per_second: u32) -> String {
    let pause = 1.0 / f64::from(lines_per_second);
    format!(
        "exec 3<>fifo; i=0; until [ -e go ]; do echo \"line $i\"; i=$((i+1)); read -t {pause:.3} -u 3; done; \
         echo \"end $i\"; exit 7"
    )
}

/// That these are the lines 0, 1, 2 … and the end.
fn assert_counts(id: impl Display, text: &str) {
    let lines: Vec<_> = text.lines().collect();
    let (end, lines) = lines.split_last().unwrap_or_else(|| panic!("{id} wrote nothing"));
    for (index, line) in lines.iter().enumerate() {
        assert_eq!(*line, format!("line {index}"), "of {id}");
    }
    assert_eq!(*end, format!("end {}", lines.len()), "of {id}");
    assert!(text.ends_with('\n'));
}

async fn prepare(world: &World) {
    let fifo = world.tmp().join("fifo");
    nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).expect("a fifo");
    assert_eq!(world.bash("pwd").await, format!("{}\n", world.tmp().display()));
}

#[test]
fn tasks_bytes_and_notices_survive_the_server() {
    let (tasks, kills) = (number("TAKEOVER_TASKS", TASKS), number("TAKEOVER_KILLS", 6));
    run(Backend::Unix, setup(), async |world| {
        prepare(world).await;
        let lines_per_second = u32::try_from(2_000 / tasks).unwrap_or(1).clamp(1, 50);
        let command = counting(lines_per_second);
        let of_kills = |part: usize| kills.div_ceil(4) * part;

        // A quarter of the kills while they are started, whose replies are lost at times and asked for again.
        let starts = stream::iter(0..tasks).map(|_| world.background(&command)).buffer_unordered(AT_ONCE);
        let (ids, mut answers) = tokio::join!(starts.collect::<Vec<TaskId>>(), replace_servers(world, of_kills(1)));

        // Half of them while all run: every stream goes on, and what came before is there.
        for kill in 0..of_kills(2) {
            answers.extend(replace_servers(world, 1).await);
            let listed = world.list().await;
            let running = listed.iter().filter(|task| task.status == TaskStatus::Running).count();
            assert_eq!((running, listed.len()), (tasks, tasks), "{listed:?}");
            let id = &ids[kill % ids.len()];
            let before = world.stream(id, StreamName::Stdout, false).await.expect("it can be read").0.len();
            wait_until("the task writes on", LIMIT, async || {
                let bytes = world.stream(id, StreamName::Stdout, false).await.expect("it can be read").0;
                (bytes.len() > before).then_some(())
            })
            .await;
        }

        // The others while they end and their owner is told.
        fs::write(world.tmp().join("go"), "").expect("written");
        answers.extend(replace_servers(world, of_kills(1)).await);
        for id in &ids {
            let status = world.ended(id, LIMIT).await.expect("it ends");
            assert_eq!(status, TaskStatus::Ended(Exit::Code(7)), "{id}");
            let (bytes, closed) = world.stream(id, StreamName::Stdout, true).await.expect("all of it is there");
            assert!(closed);
            assert_counts(id, &String::from_utf8(bytes).expect("text"));
        }
        wait_for("all notices are here", LIMIT, || world.mailbox().taken().len() >= tasks).await;
        // Once more, so that what was delivered and not acknowledged would come again.
        answers.push(replace_server(world).await);
        assert_eq!(world.bash("echo and on").await, "and on\n");
        let mut notices: BTreeMap<String, usize> = BTreeMap::new();
        for notice in world.mailbox().taken() {
            *notices.entry(format!("{:?}", notice.task_id)).or_default() += 1;
        }
        assert_eq!(notices.len(), tasks);
        assert!(notices.values().all(|count| *count == 1), "{notices:?}");
        let slowest = answers.iter().max().expect("one at least");
        tell(format_args!("{tasks} tasks, {} kills: the slowest answer after {slowest:?}", answers.len()));
    });
}

#[test]
fn a_run_brings_everything_over_three_servers() {
    const LINES: usize = 100;
    run(Backend::Unix, setup(), async |world| {
        prepare(world).await;
        let command = format!(
            "exec 3<>fifo; for ((i = 0; i < {LINES}; i++)); do echo \"line $i\"; [ $i = 5 ] && echo > begun; \
             read -t 0.02 -u 3; done; until [ -e go ]; do read -t 0.02 -u 3; done; echo \"end $i\"; exit 7"
        );
        let kills = async {
            wait_for("it runs", LIMIT, || world.tmp().join("begun").exists()).await;
            for _ in 0..3 {
                replace_server(world).await;
            }
            fs::write(world.tmp().join("go"), "").expect("written");
        };
        let (text, ()) = tokio::join!(world.bash(&command), kills);
        let text = text.strip_suffix("[exit code: 7]").unwrap_or_else(|| panic!("another end: {text}"));
        assert_counts("the run", text);
        assert_eq!(text.lines().count(), LINES + 1);
        world.assert_no_survivors("after a run over three servers");
    });
}

#[test]
fn a_flood_is_whole_after_kills() {
    run(Backend::Unix, setup(), async |world| {
        prepare(world).await;
        // More than the tail and less than the spill: the whole of it can be read afterwards.
        let id = world.background("exec 3<>fifo; for i in $(seq 20000); do echo \"number $i of many\"; [ $((i % 50)) = 0 ] && read -t 0.005 -u 3; done; true").await;
        for _ in 0..8 {
            replace_server(world).await;
        }
        let status = world.ended(&id, LIMIT).await.expect("it ends");
        assert_eq!(status, TaskStatus::Ended(Exit::Code(0)));
        let (bytes, closed) = world.stream(&id, StreamName::Stdout, true).await.expect("all of it is there");
        let expected: String = (1..=20_000).map(|number| format!("number {number} of many\n")).collect();
        assert!(closed && bytes == expected.as_bytes(), "{} of {} bytes", bytes.len(), expected.len());
    });
}

#[test]
fn what_a_server_has_read_is_there_however_far_behind_the_keeper_was() {
    /// More than the keeper takes in one turn.
    const MANY: usize = 100;
    let setup = Setup { max_tasks_per_owner: Some(MANY as u64), ..Setup::default() };
    run(Backend::Unix, setup, async |world| {
        prepare(world).await;
        let command = "exec 3<>fifo; until [ -e go ]; do read -t 0.05 -u 3; done; echo first; \
                       until [ -e end ]; do read -t 0.05 -u 3; done; echo last";
        let starts = stream::iter(0..MANY).map(|_| world.background(command)).buffer_unordered(AT_ONCE);
        let ids: Vec<TaskId> = starts.collect().await;
        let daemon = world.daemon().expect("it is a daemon's world");
        daemon.signal(Signal::SIGSTOP).expect("sent");
        fs::write(world.tmp().join("go"), "").expect("written");
        for id in &ids {
            wait_until(format_args!("the server has read from {id}"), LIMIT, async || {
                let bytes = world.stream(id, StreamName::Stdout, false).await.expect("it can be read").0;
                (bytes == b"first\n").then_some(())
            })
            .await;
        }
        kill_server(world).await;
        daemon.signal(Signal::SIGCONT).expect("sent");
        fs::write(world.tmp().join("end"), "").expect("written");
        for id in &ids {
            assert_eq!(world.ended(id, LIMIT).await.expect("it ends"), TaskStatus::Ended(Exit::Code(0)), "{id}");
            let (bytes, _) = world.stream(id, StreamName::Stdout, true).await.expect("all of it is there");
            assert_eq!(String::from_utf8_lossy(&bytes), "first\nlast\n", "of {id}");
        }
    });
}

#[test]
fn what_was_taken_over_can_be_killed_and_read_on() {
    run(Backend::Unix, setup(), async |world| {
        prepare(world).await;
        let id = world
            .background(&format!("echo first; (setsid env -i {} &); {}", world.sleep(300), world.sleep(301)))
            .await;
        let mut seen = String::new();
        wait_until("it has begun", LIMIT, async || {
            seen.push_str(&world.output(&id).await);
            seen.contains("first").then_some(())
        })
        .await;
        replace_server(world).await;
        let after = world.output(&id).await;
        assert!(!after.contains("first"), "what was read is not shown again: {after}");
        let killed = world.kill(&id).await;
        assert_eq!(killed, format!("killed background task {}", id.0));
        world.assert_no_survivors("after the kill of a task that was taken over");
    });
}

#[test]
fn a_server_is_replaced_on_request_with_tasks_running() {
    run(Backend::Unix, setup(), async |world| {
        prepare(world).await;
        let id = world.background(&counting(50)).await;
        let daemon = world.daemon().expect("it is a daemon's world");
        let before = daemon.server();
        daemon.signal(Signal::SIGHUP).expect("sent");
        wait_for("the old server is gone", LIMIT, || !before.is_alive()).await;
        assert_eq!(world.bash("echo new").await, "new\n");
        fs::write(world.tmp().join("go"), "").expect("written");
        assert_eq!(world.ended(&id, LIMIT).await.expect("it ends"), TaskStatus::Ended(Exit::Code(7)));
        let (bytes, _) = world.stream(&id, StreamName::Stdout, true).await.expect("all of it is there");
        assert_counts(&id, &String::from_utf8(bytes).expect("text"));
    });
}

#[test]
fn o07_seven_of_seven_are_taken_over() {
    const TASKS: usize = 7;
    run(Backend::Unix, setup(), async |world| {
        let mut ids = Vec::new();
        for number in 0..TASKS {
            ids.push(world.background(&world.sleep(1_000 + number)).await);
        }
        let before = world.list().await;
        replace_server(world).await;
        assert_eq!(world.list().await, before, "the same tasks, with the same shells");
        assert!(before.iter().all(|task| task.status == TaskStatus::Running && task.shell_pid.is_some()), "{before:?}");
        let log = world.daemon().expect("it is a daemon's world").log();
        assert!(log.contains("what runs is taken over") && log.contains(&format!("commands={TASKS}")), "{log}");
        for id in &ids {
            assert_eq!(world.kill(id).await, format!("killed background task {id}"));
        }
        world.assert_no_survivors("after all that were taken over have been killed");
    });
}
