//! The whole daemon dies under running tasks, as with its container, and another one starts over its state directory: what the
//! model is told of them.

use std::{
    fs,
    os::unix::fs::FileExt,
    path::{Path, PathBuf},
    time::Duration,
};

use executor_proto::types::{CommandSpec, Exit, OwnerId, StreamName, TaskId, TaskStatus};
use executor_tests::{Backend, Dies, SESSION, Setup, World, block_on, wait_for, wait_until};
use tokio_util::sync::CancellationToken;
use tool_client::notices::Notice;

/// For what has to happen at all; nothing waits this long when all is well.
const LIMIT: Duration = Duration::from_secs(60);

/// As [`executor_tests::run`], with a world that can be changed.
fn run(body: impl AsyncFnOnce(&mut World, Setup)) {
    block_on(async {
        let setup = Setup::default();
        let mut world = World::start(Backend::Unix, setup.clone()).await.expect("the executor starts");
        body(&mut world, setup).await;
        world.finish().await.expect("the executor ends well");
    });
}

/// Waits until the executor has taken so many bytes of a stream; the model's position stays.
async fn taken(world: &World, id: &TaskId, stream: StreamName, bytes: u64) {
    wait_until(format!("{bytes} bytes"), LIMIT, async || {
        let owner = OwnerId(SESSION.to_owned());
        let task = world.executor().get_task(Some(&owner), id).await.expect("it is known");
        let total = match stream {
            StreamName::Stdout => task.stdout_total,
            StreamName::Stderr => task.stderr_total,
        };
        (total >= bytes).then_some(())
    })
    .await;
}

fn lines(range: std::ops::Range<u32>) -> String {
    range.map(|number| format!("line {number}\n")).collect()
}

fn files(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).into_iter().flatten();
    let mut names: Vec<_> =
        entries.map(|entry| entry.expect("readable").file_name().to_string_lossy().into_owned()).collect();
    names.sort_unstable();
    names
}

/// Where the server keeps ring files: below the state directory, in a directory of its own where it has a user of its own.
fn rings(state: &Path) -> PathBuf {
    let own = state.join("server");
    if own.is_dir() { own.join("rings") } else { state.join("rings") }
}

/// One notice for each of these tasks, in whatever order, also after a while in which another could have come.
async fn told_once(world: &World, ids: &[&TaskId]) {
    wait_for("the notices are here", LIMIT, || world.mailbox().taken().len() >= ids.len()).await;
    // What comes twice comes with what is delivered after it.
    let last = world.background("true").await;
    let is_last = |notice: &Notice| notice.text.contains(&format!("task {} ", last.0));
    wait_for("a later notice is here", LIMIT, || world.mailbox().taken().iter().any(is_last)).await;
    for id in ids {
        let expected = format!(
            "background bash task {} finished [status: ended, exit unknown]. Read its output with bash_output.",
            id.0
        );
        let notices = world.mailbox().taken();
        let of_task: Vec<_> = notices.iter().filter(|notice| notice.text == expected).collect();
        assert_eq!(of_task.len(), 1, "of {}: {notices:?}", id.0);
    }
}

const LINES: &str = "for ((i = 0; i < 20; i++)); do echo line $i; [ $i = 9 ] && until [ -e go ]; do sleep 0.01; done; done; \
                     echo oops >&2; sleep 300";

/// Starts the task with the twenty lines, and has the model read the first ten.
async fn first_half_read(world: &World) -> TaskId {
    let id = world.background(LINES).await;
    taken(world, &id, StreamName::Stdout, lines(0..10).len() as u64).await;
    assert_eq!(world.output(&id).await, format!("{}\n[status: running]", lines(0..10)));
    id
}

async fn second_half_written(world: &World, id: &TaskId) {
    fs::write(world.tmp().join("go"), "").expect("written");
    taken(world, id, StreamName::Stdout, lines(0..20).len() as u64).await;
    taken(world, id, StreamName::Stderr, 5).await;
}

/// A task that has written twenty lines and one to stderr, of which the model has read the first ten.
async fn half_read(world: &World) -> TaskId {
    let id = first_half_read(world).await;
    second_half_written(world, &id).await;
    id
}

#[test]
fn what_a_task_had_written_is_read_once_after_the_daemon_died() {
    run(async |world, setup| {
        let id = half_read(world).await;
        let quiet = world.background("sleep 300").await;
        world
            .restart(&setup, |state| assert_eq!(files(&rings(state)), ["1.stderr", "1.stdout"]))
            .await
            .expect("it comes back");
        let rest = format!("{}[stderr]\noops\n\n[status: ended, exit unknown]", lines(10..20));
        assert_eq!(world.output(&id).await, rest);
        assert_eq!(world.output(&id).await, "(no new output)\n[status: ended, exit unknown]");
        assert_eq!(world.output(&quiet).await, "(no new output)\n[status: ended, exit unknown]");
        assert_eq!(
            world.stream(&id, StreamName::Stdout, true).await.expect("all is there"),
            (lines(0..20).into(), true)
        );
        told_once(world, &[&id, &quiet]).await;
        // And again after another one, in which it has long ended.
        world
            .restart(&setup, |state| assert_eq!(files(&rings(state)), Vec::<String>::new()))
            .await
            .expect("it comes back");
        assert_eq!(world.output(&id).await, "(no new output)\n[status: ended, exit unknown]");
        assert_eq!(
            world.stream(&id, StreamName::Stderr, true).await.expect("all is there"),
            (b"oops\n".to_vec(), true)
        );
        told_once(world, &[&id, &quiet]).await;
        assert_eq!(world.kill(&id).await, format!("task {} had already finished", id.0));
    });
}

#[test]
fn what_ran_when_the_keeper_alone_died_has_an_unknown_exit_and_one_notice() {
    run(async |world, setup| {
        for round in 0..3 {
            let read = half_read(world).await;
            let quiet = world.background("sleep 300").await;
            let ended = world.background("true").await;
            let of_ended = |notice: &Notice| notice.text.contains(&format!("task {} ", ended.0));
            wait_for("it is told", LIMIT, || world.mailbox().taken().iter().any(of_ended)).await;
            fs::remove_file(world.tmp().join("go")).expect("it was written");
            world.restart_after(Dies::Keeper, &setup, |_| {}).await.expect("it comes back");
            let rest = format!("{}[stderr]\noops\n\n[status: ended, exit unknown]", lines(10..20));
            assert_eq!(world.output(&read).await, rest, "round {round}");
            assert_eq!(world.output(&quiet).await, "(no new output)\n[status: ended, exit unknown]", "round {round}");
            told_once(world, &[&read, &quiet]).await;
        }
    });
}

#[test]
fn a_run_whose_keeper_alone_died_has_an_unknown_exit() {
    run(async |world, setup| {
        let begun = world.tmp().join("begun");
        let client = world.executor().clone();
        let spec = CommandSpec {
            command: format!("echo out; echo > {}; exec sleep 300", begun.display()).into(),
            ..CommandSpec::default()
        };
        let running = tokio::spawn(async move { client.run(None, spec, &CancellationToken::new(), None).await });
        wait_for("it runs", LIMIT, || begun.exists()).await;
        world.restart_after(Dies::Keeper, &setup, |_| {}).await.expect("it comes back");
        let result = running.await.expect("no panic").expect("it was accepted");
        assert_eq!(result.exit, Exit::Unknown("executor restarted".to_owned()));
        assert_eq!((result.ended_by, result.survivors), (None, Vec::new()));
    });
}

#[test]
fn a_server_that_took_over_goes_on_with_what_outlives_the_daemon() {
    run(async |world, setup| {
        let id = first_half_read(world).await;
        let server = world.daemon().expect("there is one").server();
        #[expect(clippy::disallowed_methods, reason = "the server under test is killed as a crash would kill it")]
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(server.pid), nix::sys::signal::Signal::SIGKILL)
            .expect("it was alive");
        wait_for("it is dead", LIMIT, || !server.is_alive()).await;
        second_half_written(world, &id).await;
        world.restart(&setup, |_state| {}).await.expect("it comes back");
        let rest = format!("{}[stderr]\noops\n\n[status: ended, exit unknown]", lines(10..20));
        assert_eq!(world.output(&id).await, rest);
        told_once(world, &[&id]).await;
    });
}

#[test]
fn o06_after_a_kill_of_the_daemon_what_ran_is_listed_and_nobody_is_left_to_stop() {
    run(async |world, setup| {
        let id = world.background(&world.sleep(1_000)).await;
        world.restart(&setup, |_state| {}).await.expect("it comes back");
        world.assert_no_survivors("after the daemon was killed and came back");
        let listed = world.list().await;
        let [task] = &listed[..] else { panic!("{listed:?}") };
        let unknown = TaskStatus::Ended(Exit::Unknown("executor restarted".to_owned()));
        assert_eq!((&task.id, &task.status, task.shell_pid), (&id, &unknown, None));
        assert_eq!(world.kill(&id).await, format!("task {} had already finished", id.0));
        told_once(world, &[&id]).await;
    });
}

#[test]
fn a_long_output_is_cut_where_it_was_and_its_spill_is_named() {
    run(async |world, setup| {
        let id = world.background("seq 1 20000; sleep 300").await;
        let whole: String = (1..=20_000).map(|number| format!("{number}\n")).collect();
        taken(world, &id, StreamName::Stdout, whole.len() as u64).await;
        let spill = wait_until("the spill is whole", LIMIT, async || {
            let name = files(&world.spill_dir()).pop()?;
            let path = world.spill_dir().join(name);
            (fs::read(&path).ok()? == whole.as_bytes()).then_some(path)
        })
        .await;
        world.restart(&setup, |_state| {}).await.expect("it comes back");
        let tail = &whole[whole.len() - 64_000..];
        let path = spill.display();
        assert_eq!(
            world.output(&id).await,
            format!(
                "{tail}\n[some output was dropped from memory; full output: {path}]\n[status: ended, exit unknown]"
            )
        );
        assert_eq!(world.output(&id).await, "(no new output)\n[status: ended, exit unknown]");
        assert_eq!(world.bash(&format!("wc -c < {path}; tail -n 1 {path}")).await, "108894\n20000\n");
        assert_eq!(world.stream(&id, StreamName::Stdout, true).await.expect("all is there"), (whole.into(), true));
        told_once(world, &[&id]).await;
    });
}

#[test]
fn a_flood_that_the_daemon_died_under_is_kept_to_one_moment() {
    run(async |world, setup| {
        let id = world.background("i=0; while :; do echo $((i++)) of a flood; done").await;
        taken(world, &id, StreamName::Stdout, 1 << 20).await;
        world.restart(&setup, |_state| {}).await.expect("it comes back");
        let text = world.output(&id).await;
        let (tail, rest) = text.split_once("\n[some output was dropped from memory; full output: ").expect("it is cut");
        assert!(rest.ends_with("]\n[status: ended, exit unknown]"), "{rest}");
        assert!(tail.len() <= 64_000 && tail.len() >= 63_900, "{}", tail.len());
        // The first and the last line may be parts of one; between them every number follows the one before.
        let numbers: Vec<u64> =
            tail.lines().skip(1).filter_map(|line| line.strip_suffix(" of a flood")?.parse().ok()).collect();
        assert!(
            numbers.len() > 2_000 && numbers.windows(2).all(|pair| pair[1] == pair[0] + 1),
            "{} lines",
            numbers.len()
        );
        told_once(world, &[&id]).await;
    });
}

#[test]
fn a_ring_file_that_is_torn_is_missing_output_and_nothing_worse() {
    const MISSING: &str =
        "\n[some output was dropped from memory; full output: (unavailable)]\n[status: ended, exit unknown]";
    let shortened =
        |path: &Path| fs::File::options().write(true).open(path).expect("it is there").set_len(4_100).expect("cut");
    let overwritten = |path: &Path| {
        let file = fs::File::options().write(true).open(path).expect("it is there");
        file.write_all_at(&[0xa5; 300], 0).expect("written");
    };
    let emptied = |path: &Path| fs::write(path, "").expect("written");
    let damages: [fn(&Path); 3] = [shortened, overwritten, emptied];
    for damage in damages {
        run(async |world, setup| {
            let id = half_read(world).await;
            world.restart(&setup, |state| damage(&rings(state).join("1.stdout"))).await.expect("it comes back");
            assert_eq!(world.output(&id).await, format!("[stderr]\noops\n{MISSING}"));
            assert_eq!(world.output(&id).await, "(no new output)\n[status: ended, exit unknown]");
            told_once(world, &[&id]).await;
        });
    }
}
