//! Bombs and churn: commands that fork faster than anybody looks. Each is bounded in number and in time, also where it is not ended.

use std::time::{Duration, Instant};

use super::{Keeper, LIMIT, NONE, spec};

/// Most processes of a bomb; `BOMB_PROCESSES` says otherwise for a measurement.
fn processes_of_a_bomb() -> u32 {
    std::env::var("BOMB_PROCESSES").ok().and_then(|number| number.parse().ok()).unwrap_or(2_000)
}

/// A fork bomb of at most so many processes, which forks no more after 20 s: as a user that has no others where this is root, whom
/// no limit on processes binds.
fn bomb(processes: u32) -> String {
    let limited = if nix::unistd::geteuid().is_root() {
        format!("exec setpriv --reuid 65533 --regid 65533 --clear-groups prlimit --nproc={processes} bash -c")
    } else {
        format!("ulimit -u {processes}; exec bash -c")
    };
    format!("{limited} 'b() {{ [ $SECONDS -lt 20 ] && {{ b | b & }}; }}; b; sleep 20' 2>/dev/null")
}

/// Loops that leave sessions behind as fast as they can, for 20 s.
const CHURN: &str =
    "for i in 1 2 3 4; do (while [ $SECONDS -lt 20 ]; do (setsid env -i sleep 5 &); done) & done; sleep 20";

/// Processes that spin, each in a session of its own and so with a share of the processor like anybody's.
fn spinners(processes: u32) -> String {
    let one = "while [ $SECONDS -lt 20 ]; do :; done";
    format!("i=0; while [ $((i++)) -lt {processes} ]; do setsid bash -c '{one}' & done; sleep 20")
}

/// Processes that fork without a pause, whether they may or not: one that is killed is replaced at once.
fn forkers(processes: u32) -> String {
    let fork = "import os,time\nend=time.time()+20\nwhile time.time()<end:\n try: os.fork()\n except OSError: pass";
    let limited = if nix::unistd::geteuid().is_root() {
        format!("exec setpriv --reuid 65533 --regid 65533 --clear-groups prlimit --nproc={processes}")
    } else {
        format!("ulimit -u {processes}; exec")
    };
    format!("{limited} python3 -c \"$(printf '{fork}')\"")
}

/// A tree of 2,047 processes that all wait, in as many groups and deep below each other.
const TREE: &str = "set -m; f() { [ $1 = 0 ] && exec sleep 20; f $(($1-1)) & f $(($1-1)) & wait; }; f 10";

/// What a command does to others, and how long its end takes.
#[derive(Debug, Default)]
struct Figures {
    processes: usize,
    /// Of `true`, while it runs.
    others: Vec<Duration>,
    /// From the kill to its answer.
    end: Duration,
    survivors: usize,
    /// Until nothing is left.
    gone: Duration,
    /// Of `true`, while it is ended.
    meanwhile: Duration,
}

fn processes() -> usize {
    std::fs::read_dir("/proc")
        .expect("mounted")
        .flatten()
        .filter(|one| one.file_name().to_string_lossy().parse::<u32>().is_ok())
        .count()
}

async fn measure(command: &str) -> Figures {
    let keeper = Keeper::start().await;
    let before = processes();
    let mut figures = Figures::default();
    let bomb = keeper.link.spawn(keeper.link.new_handle(), spec(command), None, None).await.expect("starts");
    let until = Instant::now() + Duration::from_secs(4);
    while Instant::now() < until && processes() < before + processes_of_a_bomb() as usize * 3 / 4 {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    for _ in 0..5 {
        let asked = Instant::now();
        keeper.run("true").await;
        figures.others.push(asked.elapsed());
    }
    figures.processes = processes().saturating_sub(before);
    let asked = Instant::now();
    let ended = async {
        let survivors = keeper.link.end(bomb.handle, Duration::ZERO).await;
        (survivors.len(), asked.elapsed())
    };
    let other = async {
        keeper.run("true").await;
        asked.elapsed()
    };
    ((figures.survivors, figures.end), figures.meanwhile) = tokio::join!(ended, other);
    while keeper.link.end(bomb.handle, Duration::ZERO).await != NONE {
        assert!(asked.elapsed() < Duration::from_secs(60), "it never ends");
    }
    figures.gone = asked.elapsed();
    figures
}

/// Three times what a kill may take, for a busy machine: the grace, which is none here, and two seconds.
const ANSWER_LIMIT: Duration = Duration::from_secs(6);

#[tokio::test]
async fn bombs_churn_and_deep_trees_are_ended_in_time_while_others_go_on() {
    for command in [bomb(600), CHURN.to_owned(), TREE.replace("f 10", "f 8")] {
        let keeper = Keeper::start().await;
        let running = keeper.link.spawn(keeper.link.new_handle(), spec(&command), None, None).await.expect("starts");
        // A list has at most 256.
        let until = Instant::now() + LIMIT;
        while keeper.link.processes(running.handle).await.len() < 200 {
            assert!(Instant::now() < until, "it never grew: {command}");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        assert_eq!(keeper.run("echo ok").await.0, "ok\n");
        let asked = Instant::now();
        keeper.link.end(running.handle, Duration::ZERO).await;
        assert!(asked.elapsed() < ANSWER_LIMIT, "answered after {:?}: {command}", asked.elapsed());
        // What was named as alive, if anything, is gone before long.
        while keeper.link.end(running.handle, Duration::ZERO).await != NONE {
            assert!(asked.elapsed() < LIMIT, "it never ends: {command}");
        }
        assert_eq!(keeper.link.processes(running.handle).await, [], "{command}");
        assert_eq!(keeper.run("echo ok").await.0, "ok\n");
    }
}

#[ignore = "a measurement: run it alone, on a quiet machine, in release mode"]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_bombs_and_churn_cost() {
    let wanted = std::env::var("BOMB").unwrap_or_default();
    let processes = processes_of_a_bomb();
    for (name, command) in [
        ("spinners", spinners(processes)),
        ("forkers", forkers(processes)),
        ("bomb", bomb(processes)),
        ("churn", CHURN.to_owned()),
        ("tree", TREE.to_owned()),
    ] {
        for _ in 0..if name.contains(&wanted) { 3 } else { 0 } {
            println!("{name}: {:?}", measure(&command).await);
        }
    }
}
