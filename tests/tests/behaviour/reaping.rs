//! What has ended is reaped, by whoever it came to (kind D).

use std::time::Duration;

use executor_proto::types::{CommandSpec, OwnerId};
use executor_tests::{Backend, SESSION, Setup, World, every_backend, on_backend, processes, wait_until};
use nix::unistd::Uid;
use tokio_util::sync::CancellationToken;

/// The daemon as process 1 of a world of its own, as in a container.
fn as_process_1() -> Setup {
    let user: &[&str] = if Uid::effective().is_root() { &[] } else { &["--user", "--map-root-user"] };
    let pid = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"];
    Setup { launcher: pid.iter().chain(user).map(|&word| word.to_owned()).collect(), ..Setup::default() }
}

// D6 is the same for other programs: a process 1 that does not reap what it adopted.
on_backend!(Backend::Unix, d01_process_1_leaves_no_zombies with as_process_1());
async fn d01_process_1_leaves_no_zombies(world: &World) {
    let daemon = world.daemon().expect("there is one");
    assert_eq!(world.bash("cat /proc/1/comm").await.get(..8), Some("executor"), "it is process 1");
    for _ in 0..50 {
        assert_eq!(world.bash(&format!("({} &) ; true", world.sleep(1))).await, "(no output)");
    }
    wait_until("everything ends and is reaped", Duration::from_secs(6), async || {
        let tree = processes::tree(daemon.pid());
        let waits = tree.iter().any(|one| one.is_dead() || one.command_line.contains(world.tag()));
        (!waits).then_some(())
    })
    .await;
    let id = world.background(&world.sleep(300)).await;
    assert_eq!(world.kill(&id).await, format!("killed background task {id}"));
    world.assert_no_survivors("after the kill");
}

every_backend!(d03_an_abandoned_run_is_ended_and_reaped);
async fn d03_an_abandoned_run_is_ended_and_reaped(world: &World) {
    let owner = OwnerId(SESSION.to_owned());
    let command = format!("echo $$ > pid; {}", world.sleep(300));
    let spec = CommandSpec {
        command: command.into(),
        workdir: Some(world.tmp().to_string_lossy().into_owned().into()),
        ..CommandSpec::default()
    };
    let abort = CancellationToken::new();
    let run = world.executor().run(Some(&owner), spec, &abort, None);
    let started = wait_until("it says its id", Duration::from_secs(10), async || {
        let pid = std::fs::read_to_string(world.tmp().join("pid")).ok()?.trim().parse().ok()?;
        processes::look(pid)
    });
    let shell = tokio::select! {
        ended = run => panic!("it ended by itself: {ended:?}"),
        shell = started => shell,
    };
    // Dropped now; nothing else is asked of the executor, which must see to it by itself.
    wait_until("it is gone, and no zombie", Duration::from_secs(5), async || {
        processes::look(shell.pid).is_none_or(|now| now.started != shell.started).then_some(())
    })
    .await;
    world.assert_no_survivors("after its caller was gone");
}
