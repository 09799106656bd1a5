//! SIGHUP takes new tokens and certificates without ending anything; a file that is not good changes nothing.

use std::fs;

use executor_proto::types::{CommandSpec, TaskStatus};
use executor_tests::{
    block_on,
    certificates::{init, private},
    wait_until,
};
use tool_client::executor::{Executor, ExecutorError, connect::Token, remote::RemoteExecutor};

use crate::rig::{Rig, SOON, owner};

const NEW: &str = "a-new-token-0123456789abcdef";

fn is_refused<T: std::fmt::Debug>(answer: Result<T, ExecutorError>) -> bool {
    matches!(answer, Err(ExecutorError::Refused { .. }))
}

#[test]
fn tokens_and_certificates_are_renewed_while_tasks_go_on() {
    block_on(async {
        let rig = Rig::start(&["--tenant", "a", "--tenant", "b"], None, |_, config| config).await;
        let owner = owner();
        let old = rig.token("a");
        let task = CommandSpec { command: "echo before; sleep 300".into(), ..CommandSpec::default() };
        let task = rig.by_token(&old).start_task(Some(&owner), task).await.expect("started");

        // Both are good at the same time, then the old one goes.
        private(&rig.file("a.token"), &format!("{old}{NEW}\n"));
        rig.hang_up().await;
        for token in [old.as_str(), NEW] {
            rig.by_token(token).info().await.expect("both are good");
        }
        private(&rig.file("a.token"), &format!("{NEW}\n"));
        // And the daemon has another authority altogether.
        let renewed = rig.dir().join("renewed");
        init(&renewed, &["--tenant", "a"]);
        for name in ["server.crt", "server.key", "ca.crt"] {
            fs::rename(renewed.join(name), rig.file(name)).expect("it is put in its place");
        }
        rig.hang_up().await;
        assert!(is_refused(rig.by_token(&old).info().await), "the old token is gone");
        let new = rig.by_token(NEW);
        rig.by_token(&rig.token("b")).info().await.expect("another tenant's token has not changed");
        let access = rig.access_by(&rig.file("ca.crt"), Some(renewed.join("a")));
        let by_certificate = RemoteExecutor::new(&rig.at("https", "localhost"), access);
        let info = by_certificate.get_task(Some(&owner), &task).await.expect("the same tenant, and the same task");
        assert_eq!(info.status, TaskStatus::Running);
        let output = wait_until("it has written", SOON, async || {
            let output = new.read_output(Some(&owner), &task, None).await.expect("its own");
            (!output.stdout.data.is_empty()).then_some(output)
        });
        assert_eq!(output.await.stdout.data, "before\n");
        new.kill_task(Some(&owner), &task).await.expect("it is killed");
    });
}

#[test]
fn a_file_that_is_not_good_keeps_all_of_them_as_they_were() {
    block_on(async {
        let rig = Rig::start(&["--tenant", "a", "--tenant", "b"], None, |_, config| config).await;
        let old = rig.token("a");
        private(&rig.file("a.token"), &format!("{NEW}\n"));
        private(&rig.file("server.key"), "no key\n");
        rig.hang_up().await;
        assert_eq!(rig.said("server.key\": holds no private key"), 1, "{}", rig.log());
        assert_eq!(rig.said("tokens and certificates stay as they were"), 1);
        rig.by_token(&old).info().await.expect("it is still known, and so is the daemon's certificate");
        assert!(is_refused(rig.by_token(NEW).info().await));

        // What two tenants would be known by is not good either, and no secret is told.
        let key = fs::read_to_string(rig.file("b.key")).expect("a key");
        private(&rig.file("server.key"), &key);
        private(&rig.file("a.token"), &rig.token("b"));
        rig.hang_up().await;
        assert_eq!(rig.said("server.key\": is not the certificate's"), 1, "{}", rig.log());
        assert_eq!(rig.said("a token in it is also one of tenant a's"), 1, "{}", rig.log());
        assert_eq!(rig.said("stay as they were"), 2);
        let of_a = Token::new(old.trim()).expect("a token");
        let access = tool_client::executor::connect::Access { token: Some(of_a), ..rig.access(Some("a")) };
        RemoteExecutor::new(&rig.at("https", "localhost"), access).info().await.expect("as at the start");
        assert!(!rig.log().contains(rig.token("b").trim()));
    });
}
