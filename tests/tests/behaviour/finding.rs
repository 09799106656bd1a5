//! What is known of a command is true, whoever looks and whenever: those that come while it writes, those that come after it has
//! ended, and those whose news of the end was lost (kind M).

use std::time::Duration;

use executor_proto::types::{Exit, OwnerId, ReadStreamEvent, StreamName, TaskStatus};
use executor_tests::{SESSION, Stopwatch, World, every_backend, processes, tell, wait_for, wait_until};
use futures_util::{StreamExt as _, future::join_all};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

const SOON: Duration = Duration::from_secs(20);

/// Readers that attach while a task writes; `ATTACHES` gives another number (`just soak`).
const ATTACHES: usize = 20;

fn owner() -> OwnerId {
    OwnerId(SESSION.to_owned())
}

/// All bytes from the beginning to the end, followed while they come.
async fn followed(world: &World, id: &executor_proto::types::TaskId) -> Vec<u8> {
    let (executor, owner) = (world.executor(), owner());
    let mut bytes = Vec::new();
    // A connection that is lost is made again by who reads, from where it had come to.
    loop {
        let stream = executor.read_stream(Some(&owner), id, StreamName::Stdout, bytes.len() as u64, true);
        let Ok(mut events) = stream.await else { continue };
        while let Some(Ok(event)) = events.next().await {
            match event {
                ReadStreamEvent::Chunk(chunk) => {
                    assert_eq!(chunk.offset, bytes.len() as u64, "a gap, or something twice");
                    bytes.extend_from_slice(&chunk.data);
                }
                ReadStreamEvent::End { total, closed } => {
                    assert!(closed && total == bytes.len() as u64, "{total} bytes, {} came", bytes.len());
                    return bytes;
                }
            }
        }
    }
}

every_backend!(m11_whoever_attaches_at_any_time_has_every_line_once);
async fn m11_whoever_attaches_at_any_time_has_every_line_once(world: &World) {
    const LINES: u32 = 100_000;
    let attaches = std::env::var("ATTACHES").map_or(ATTACHES, |text| text.parse().expect("a number"));
    let expected: String = (1..=LINES).map(|line| format!("{line}\n")).collect();
    // Some ten thousand lines at a time, so that there is a while in which to attach.
    let id = world
        .background(&format!(
            "for i in {{0..9}}; do seq $((i * {LINES} / 10 + 1)) $(((i + 1) * {LINES} / 10)); sleep 0.05; done"
        ))
        .await;
    let readers = (0..attaches).map(|_| async {
        let mut random = [0; 2];
        getrandom::fill(&mut random).expect("the kernel has random bytes");
        // No condition: that nothing is waited for is what makes the instant any.
        tokio::time::sleep(Duration::from_millis(u64::from(u16::from_le_bytes(random)) % 1_000)).await;
        followed(world, &id).await
    });
    for bytes in join_all(readers).await {
        assert!(bytes == expected.as_bytes(), "{} of {} bytes", bytes.len(), expected.len());
    }
    tell(format_args!("{attaches} readers attached"));
}

every_backend!(m13_what_has_ended_is_listed_as_ended);
async fn m13_what_has_ended_is_listed_as_ended(world: &World) {
    let id = world.background("true").await;
    let watch = Stopwatch::start();
    let listed = async || world.list().await.into_iter().find(|task| task.id == id).map(|task| task.status);
    wait_until("it is listed as ended", SOON, async || {
        let status = listed().await.expect("it is listed");
        (status != TaskStatus::Running).then_some(())
    })
    .await;
    watch.assert_within("being listed as ended", Duration::from_secs(1));
    // However long nobody asks: nothing happens to it but what others bring about.
    for _ in 0..50 {
        world.bash("true").await;
        assert_eq!(listed().await, Some(TaskStatus::Ended(Exit::Code(0))));
    }
    assert_eq!(world.output(&id).await, "(no new output)\n[status: completed, exit code: 0]");
}

/// Kills the process that would have told how a shell ended: its parent.
#[expect(clippy::disallowed_methods, reason = "what the executor needs to hear of an end is taken from it")]
fn kill_parent_of(shell: u32) {
    let shell = i32::try_from(shell).expect("process ids are small");
    let helper = processes::look(shell).expect("it runs").parent;
    assert!(helper > 1, "{helper} is nobody's helper");
    kill(Pid::from_raw(helper), Signal::SIGKILL).expect("it was alive");
}

every_backend!(m16_an_end_whose_news_are_lost_is_found_out);
async fn m16_an_end_whose_news_are_lost_is_found_out(world: &World) {
    let id = world.background(&format!("echo begun; {} & {}", world.sleep(300), world.sleep(301))).await;
    let task = world.executor().get_task(Some(&owner()), &id).await.expect("it is known");
    let watch = Stopwatch::start();
    kill_parent_of(task.shell_pid.expect("its shell runs"));
    let status = world.ended(&id, SOON).await.expect("it is found out");
    watch.assert_within("finding out", Duration::from_secs(3));
    // What it started has been ended, so how it ended is known, or nobody has seen it.
    let honest = matches!(&status, TaskStatus::Ended(Exit::Signal(9) | Exit::Unknown(_)));
    assert!(honest, "{status:?}");
    world.assert_no_survivors("after its helper died");
    assert_eq!(world.kill(&id).await, format!("task {id} had already finished"));
    let told = || world.mailbox().taken().iter().filter(|notice| notice.task_id == id).count();
    wait_for("its owner is told", SOON, || told() > 0).await;
    assert_eq!((told(), world.background("true").await.0.as_str()), (1, "bash-2"), "nothing is blocked");
}
