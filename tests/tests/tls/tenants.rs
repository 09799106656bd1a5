//! Two tenants of one daemon do not exist for each other, whatever one knows of the other.

use executor_proto::types::{CommandSpec, TaskId, WatchEvent};
use executor_tests::{block_on, wait_until};
use futures_util::StreamExt as _;
use tool_client::executor::{
    Executor, ExecutorError,
    connect::{Access, Token},
    remote::RemoteExecutor,
};

use crate::rig::{Rig, SOON, owner};

const TENANTS: [&str; 4] = ["--tenant", "a", "--tenant", "b"];

fn command(text: &str) -> CommandSpec {
    CommandSpec { command: text.to_owned().into(), ..CommandSpec::default() }
}

#[test]
fn what_one_tenant_has_is_to_the_other_as_if_it_had_never_been() {
    block_on(async {
        let rig = Rig::start(&TENANTS, None, |_, config| config).await;
        let owner = owner();
        let owner = Some(&owner);
        let (a, b) = (rig.by_certificate("a"), rig.by_token(&rig.token("b")));
        // Ids count for each from 1, so what is one's first is not the other's second.
        let [first, second] =
            [a.start_task(owner, command("echo of a; sleep 300")).await, a.start_task(owner, command("true")).await]
                .map(|started| started.expect("started"));
        assert_eq!((first.0.as_str(), second.0.as_str()), ("bash-1", "bash-2"));
        assert_eq!(b.list_tasks(owner).await.expect("a list"), []);
        for id in [&first, &second, &TaskId("bash-99".to_owned()), &TaskId("run-1".to_owned())] {
            let unknown = ExecutorError::UnknownTask(id.clone());
            assert_eq!(b.get_task(owner, id).await.expect_err("unknown"), unknown);
            assert_eq!(b.read_output(owner, id, None).await.expect_err("unknown"), unknown);
            assert_eq!(b.kill_task(owner, id).await.expect_err("unknown"), unknown);
            assert_eq!(b.get_task(None, id).await.expect_err("unknown"), unknown);
        }
        let own = b.start_task(owner, command("echo of b")).await.expect("started");
        assert_eq!(own, first, "its own first");
        let output = wait_until("it has ended", SOON, async || {
            let output = b.read_output(owner, &own, Some(SOON)).await.expect("its own");
            (!output.stdout.data.is_empty()).then_some(output)
        });
        assert_eq!(output.await.stdout.data, "of b\n");
        // The same tenant by another way in.
        let also_a = rig.by_token(&rig.token("a"));
        assert_eq!(also_a.list_tasks(owner).await.expect("a list").len(), 2);
        also_a.kill_task(owner, &first).await.expect("its own");
    });
}

#[test]
fn completions_go_to_the_tenant_whose_task_ended() {
    block_on(async {
        let rig = Rig::start(&TENANTS, None, |_, config| config).await;
        let (a, b) = (rig.by_certificate("a"), rig.by_certificate("b"));
        let owner = owner();
        a.start_task(Some(&owner), command("true")).await.expect("started");
        let mut of_a = a.watch_tasks(&owner).await.expect("a watch");
        loop {
            match of_a.next().await.expect("it goes on").expect("an event") {
                WatchEvent::Completion(completion) => break assert_eq!(completion.task_id.0, "bash-1"),
                _ => continue,
            }
        }
        // The other's owner has the same name, and nothing waits for it, nor can it acknowledge what is not its own.
        b.ack_completions(&owner, u64::MAX).await.expect("nothing to acknowledge");
        let mut of_b = b.watch_tasks(&owner).await.expect("a watch");
        assert!(matches!(of_b.next().await, Some(Ok(WatchEvent::CaughtUp))), "nothing waits");
        let mut again = a.watch_tasks(&owner).await.expect("a watch");
        assert!(matches!(again.next().await, Some(Ok(WatchEvent::Completion(_)))), "it still waits for its own");
    });
}

#[test]
fn nobody_is_two_tenants_nor_one_that_is_not_named() {
    block_on(async {
        let rig = Rig::start(&TENANTS, None, |_, config| config.replace("[\"b\"]", "[\"other\"]")).await;
        let reason = |error| match error {
            ExecutorError::Refused { reason } => reason,
            other => panic!("{other}"),
        };
        let of_b = Token::new(rig.token("b").trim()).expect("a token");
        let both = Access { token: Some(of_b), ..rig.access(Some("a")) };
        let both = RemoteExecutor::new(&rig.at("https", "localhost"), both).info().await.expect_err("two tenants");
        assert_eq!(reason(both), "the token and the certificate are of different tenants");
        let unnamed = rig.by_certificate("b").info().await.expect_err("its name is nobody's");
        assert_eq!(reason(unnamed), "no tenant has the name in the certificate (b)");
        rig.by_token(&rig.token("b")).info().await.expect("its token is");
    });
}
