//! A call returns when its shell has exited, whatever still holds the pipes (kind A).

use std::time::Duration;

use executor_proto::types::{StreamName, TaskId};
use executor_tests::{Stopwatch, World, every_backend, wait_for, wait_until};
use serde_json::json;

/// After the shell's exit: the drain of at most 1 s, and what a call costs.
const AFTER_EXIT: Duration = Duration::from_millis(1_500);

/// For what must happen, and does so at once.
const SOON: Duration = Duration::from_secs(10);

/// The one run that has leftovers.
async fn run_with_leftovers(world: &World) -> TaskId {
    let mut runs: Vec<_> = world.list().await.into_iter().filter(|task| !task.leftovers.is_empty()).collect();
    assert_eq!(runs.len(), 1, "{runs:?}");
    let run = runs.remove(0);
    assert!(run.id.0.starts_with("run-"), "{run:?}");
    let leftovers = run.leftovers.iter().map(|process| String::from_utf8_lossy(&process.command_line).into_owned());
    assert!(leftovers.into_iter().any(|line| line.contains(world.tag())), "{run:?}");
    run.id
}

every_backend!(a01_a_background_holder_does_not_hold_the_call);
async fn a01_a_background_holder_does_not_hold_the_call(world: &World) {
    let watch = Stopwatch::start();
    let text = world.bash_with(&format!("{} & echo started", world.sleep(300)), json!({"timeoutMs": 10_000})).await;
    watch.assert_within("the call", AFTER_EXIT);
    assert_eq!(text, "started\n");
    let run = run_with_leftovers(world).await;
    let outcome = world.executor().kill_task(Some(&world.session("s1").id), &run).await.expect("the owner may");
    assert!(!outcome.already_finished && outcome.survivors.is_empty(), "{outcome:?}");
    world.assert_no_survivors("after the run's leftovers were killed");
}

every_backend!(a02_a_holder_of_stderr_alone_does_not_hold_the_call);
async fn a02_a_holder_of_stderr_alone_does_not_hold_the_call(world: &World) {
    let watch = Stopwatch::start();
    let text = world.bash(&format!("{} >/dev/null & echo ok", world.sleep(300))).await;
    watch.assert_within("the call", AFTER_EXIT);
    assert_eq!(text, "ok\n");
    run_with_leftovers(world).await;
}

every_backend!(a03_a_noisy_holder_does_not_hold_the_call);
async fn a03_a_noisy_holder_does_not_hold_the_call(world: &World) {
    let watch = Stopwatch::start();
    let text = world.bash(&format!("(while :; do echo x; {}; done) & echo started", world.sleep(0))).await;
    watch.assert_within("the call", AFTER_EXIT);
    let without = text.replace("x\n", "");
    assert_eq!(without, "started\n", "only what came until the drain ended: {text:?}");
    let seen = text.len();
    // What comes later belongs to the run's own stream, and to nothing else.
    let run = run_with_leftovers(world).await;
    wait_until("the run's stream goes on", SOON, async || {
        let (bytes, closed) = world.stream(&run, StreamName::Stdout, false).await.expect("it can be read");
        assert!(!closed, "something still writes");
        (bytes.len() > seen + 20).then_some(())
    })
    .await;
    assert_eq!(world.bash("echo next").await, "next\n");
}

every_backend!(a03_what_comes_after_the_exit_is_kept_for_people);
async fn a03_what_comes_after_the_exit_is_kept_for_people(world: &World) {
    let watch = Stopwatch::start();
    let text = world.bash(&format!("({}; echo late; {}) & exit 3", world.sleep(2), world.sleep(300))).await;
    watch.assert_within("the call", AFTER_EXIT);
    assert_eq!(text, "(no output)\n[exit code: 3]");
    let run = run_with_leftovers(world).await;
    wait_until("the late line", SOON, async || {
        let (bytes, _) = world.stream(&run, StreamName::Stdout, false).await.expect("it can be read");
        (bytes == b"late\n").then_some(())
    })
    .await;
}

every_backend!(a10_a_task_whose_holder_lives_has_ended_and_can_be_released);
async fn a10_a_task_whose_holder_lives_has_ended_and_can_be_released(world: &World) {
    let watch = Stopwatch::start();
    let id = world.background(&format!("sh -c '{} & echo ok'", world.sleep(300))).await;
    world.ended(&id, SOON).await.expect("its exit is there at once");
    watch.assert_within("the end", AFTER_EXIT);
    assert_eq!(world.output(&id).await, "ok\n\n[status: completed, exit code: 0]");
    let watch = Stopwatch::start();
    assert_eq!(world.kill(&id).await, format!("killed background task {id}"));
    watch.assert_within("the release", Duration::from_millis(1_500));
    world.assert_no_survivors("after the kill");
    assert_eq!(world.output(&id).await, "(no new output)\n[status: completed, exit code: 0]");
}

every_backend!(a12_a_leftover_neither_blocks_nor_dies_of_its_pipe);
async fn a12_a_leftover_neither_blocks_nor_dies_of_its_pipe(world: &World) {
    // More than any pipe holds: it can only be written when somebody goes on reading.
    let flood = "head -c 3000000 /dev/zero | tr '\\0' x; echo $? > flooded";
    let beat = format!("for i in {{1..60}}; do echo beat; echo $i > beats; {}; done", world.sleep("0"));
    let command = format!("(sleep .3; {flood}; {beat}; {}) & echo started", world.sleep(300));
    assert_eq!(world.bash(&command).await, "started\n");
    let file = |name: &str| std::fs::read_to_string(world.tmp().join(name)).unwrap_or_default();
    wait_for("it writes more than a pipe holds", SOON, || file("flooded") == "0\n").await;
    wait_for("it goes on", SOON * 2, || file("beats") == "60\n").await;
    run_with_leftovers(world).await;
}
