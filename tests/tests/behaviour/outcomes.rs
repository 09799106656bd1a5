//! Outcomes that only executors elsewhere have, and budgets: each has one text (the contract's table of new outcomes).

use std::{fs, time::Duration};

use executor_proto::types::{CommandSpec, EnvironmentVariable};
use executor_tests::{Backend, Daemon, Setup, Stopwatch, World, every_backend, every_daemon, on_backend, wait_for};
use nix::sys::signal::Signal;
use serde_json::json;
use tool_client::executor::connect::Token;

const SOON: Duration = Duration::from_secs(15);

/// One call to an executor that is reached by an endpoint and a token file.
async fn call_at(world: &World, endpoint: &str, token: Option<&str>) -> String {
    let file = world.tmp().join("another-token");
    let token = token.map(|token| {
        fs::write(&file, token).expect("it can be written");
        Token::read(&file).expect("it is one")
    });
    let there = World::connect(endpoint, token.into(), world.tmp()).await.expect("it is an endpoint");
    there.bash("echo > ran").await
}

on_backend!(Backend::Unix, an_executor_that_is_not_there_is_unavailable);
async fn an_executor_that_is_not_there_is_unavailable(world: &World) {
    let watch = Stopwatch::start();
    for endpoint in [format!("unix:{}/no-socket", world.tmp().display()), "http://127.0.0.1:1".to_owned()] {
        let text = call_at(world, &endpoint, Some("0123456789abcdef")).await;
        let rest = text.strip_prefix(&format!("Error: executor unavailable: {endpoint}: "));
        assert!(rest.is_some_and(|cause| !cause.is_empty() && !cause.contains('\n')), "{text}");
    }
    watch.assert_within("two refusals", SOON);
}

on_backend!(Backend::Tcp, a_caller_without_the_token_is_refused);
async fn a_caller_without_the_token_is_refused(world: &World) {
    let endpoint = world.daemon().map(Daemon::endpoint).expect("there is one");
    for token in [Some("not-the-token-of-this-daemon"), None] {
        let text = call_at(world, endpoint, token).await;
        let rest = text.strip_prefix("Error: executor refused the caller: ");
        assert!(rest.is_some_and(|reason| !reason.is_empty() && !reason.contains('\n')), "{text}");
    }
    assert_eq!(world.bash("[ -e ran ]").await, "(no output)\n[exit code: 1]");
}

every_backend!(a_budget_that_is_used_up_says_what_to_do
    with Setup { max_tasks_per_owner: Some(2), ..Setup::default() });
async fn a_budget_that_is_used_up_says_what_to_do(world: &World) {
    let first = world.background(&world.sleep(300)).await;
    let second = world.background(&world.sleep(300)).await;
    let text = world.bash_with("true", json!({"run_in_background": true})).await;
    let rest = text.strip_prefix("Error: executor over its limit: ").unwrap_or_else(|| panic!("{text}"));
    assert!(rest.ends_with(" (2 of 2); finish or kill a background task, or try again later"), "{text}");
    assert_eq!(world.bash("echo runs are not tasks").await, "runs are not tasks\n");
    for id in [first, second] {
        assert_eq!(world.kill(&id).await, format!("killed background task {id}"));
    }
    assert_eq!(world.background("true").await.0, "bash-3", "a start that is refused uses no id");
}

every_backend!(what_is_too_large_is_named_with_its_size);
async fn what_is_too_large_is_named_with_its_size(world: &World) {
    let spec = CommandSpec { command: "cat | wc -c".into(), ..CommandSpec::default() };
    let stdin = |bytes: usize| CommandSpec { stdin: Some("i".repeat(bytes).into()), ..spec.clone() };
    let error = world.run(stdin(8_388_609)).await.expect_err("it is too large");
    assert_eq!(error.to_string(), "stdin too large: 8388609 bytes, at most 8388608");
    assert_eq!(world.run(stdin(8_388_608)).await.expect("it is not").stdout.tail, "8388608\n");
    let text = world.bash_with("pwd", json!({"workdir": "/".repeat(131_072)})).await;
    assert_eq!(text, "Error: workdir too large: 131072 bytes, at most 131071");
    // Each is small enough, all together are not: the kernel takes a quarter of the stack's limit.
    let variable = |n: usize| EnvironmentVariable { name: format!("V{n}").into(), value: "v".repeat(100_000).into() };
    let many = CommandSpec { environment: (0..100).map(variable).collect(), ..spec };
    let error = world.run(many).await.expect_err("it is too large");
    assert!(error.to_string().starts_with("environment too large: "), "{error}");
}

every_daemon!(a_run_that_the_stopping_executor_ends_says_so);
async fn a_run_that_the_stopping_executor_ends_says_so(world: &World) {
    let daemon = world.daemon().expect("there is one");
    let task = world.background(&world.sleep(300)).await;
    let command = format!("echo out; echo > ready; {}", world.sleep(300));
    let stop = async {
        wait_for("it runs", SOON, || world.tmp().join("ready").exists()).await;
        daemon.signal(Signal::SIGTERM).expect("it runs");
    };
    let (text, ()) = futures_util::future::join(world.bash(&command), stop).await;
    assert_eq!(text, "out\n[ended: executor stopping]\n[killed by signal: SIGTERM]");
    wait_for("the daemon has ended", SOON, || daemon.processes().iter().all(|one| one.is_dead())).await;
    world.assert_no_survivors("after the daemon stopped");
    // The owner listened all the time: a task that the stop ended gives no notice.
    assert_eq!(world.mailbox().taken(), [], "of {task}");
}

every_daemon!(a_server_that_dies_is_replaced_and_its_run_goes_on);
async fn a_server_that_dies_is_replaced_and_its_run_goes_on(world: &World) {
    let daemon = world.daemon().expect("there is one");
    let server = daemon.server();
    assert_ne!(server.pid, daemon.pid(), "the keeper does not serve");
    let command = "echo out; echo > ready; until [ -e go ]; do sleep 0.01; done; echo more; exit 3";
    let die = async {
        wait_for("it runs", SOON, || world.tmp().join("ready").exists()).await;
        daemon.kill_server().await.expect("it is killed");
        assert_eq!(world.bash("echo ok").await, "ok\n");
        assert_ne!(daemon.server().pid, server.pid);
        std::fs::write(world.tmp().join("go"), "").expect("written");
    };
    let (text, ()) = futures_util::future::join(world.bash(command), die).await;
    assert_eq!(text, "out\nmore\n[exit code: 3]");
    world.assert_no_survivors("after the run");
}
