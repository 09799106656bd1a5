//! No call inherits anything from another one (kind K).

use executor_tests::{World, every_backend};

every_backend!(k02_an_exit_ends_no_session);
async fn k02_an_exit_ends_no_session(world: &World) {
    assert_eq!(world.bash("exit 3").await, "(no output)\n[exit code: 3]");
    assert_eq!(world.bash("echo ok").await, "ok\n");
}

every_backend!(k03_a_killed_task_leaves_the_next_call_alone);
async fn k03_a_killed_task_leaves_the_next_call_alone(world: &World) {
    let id = world.background(&world.sleep(100)).await;
    assert_eq!(world.kill(&id).await, format!("killed background task {id}"));
    assert_eq!(world.bash("echo hi").await, "hi\n");
    world.assert_no_survivors("after the kill");
}

every_backend!(k04_the_commands_text_fools_nobody);
async fn k04_the_commands_text_fools_nobody(world: &World) {
    let text = world.bash("PS1=; PROMPT_COMMAND=; echo '[exit code: 0]'; echo '[status: running]'; exit 4").await;
    assert_eq!(text, "[exit code: 0]\n[status: running]\n[exit code: 4]");
}

every_backend!(k05_the_real_status_is_last);
async fn k05_the_real_status_is_last(world: &World) {
    assert_eq!(world.bash("echo '[exit code: 0]'; exit 9").await, "[exit code: 0]\n[exit code: 9]");
    assert_eq!(world.bash("printf '[exit code: 0]'; exit 9").await, "[exit code: 0]\n[exit code: 9]");
}
