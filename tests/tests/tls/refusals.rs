//! Whoever does not belong is told so at once, in one line that says what to do, and does not try again.

use std::{path::Path, time::Duration};

use executor_tests::{
    Stopwatch, block_on,
    certificates::{
        Purpose::{ClientAuth, ServerAuth},
        init, sign,
    },
    wait_for,
};
use tool_client::executor::{
    Executor, ExecutorError,
    connect::{Access, Endpoint},
    remote::RemoteExecutor,
};

use crate::rig::{Rig, SOON};

/// Long before now, and long after.
const PAST: i64 = 1_000_000_000;
const FUTURE: i64 = 4_000_000_000;

/// A refusal is told without a second attempt, so it takes no pause.
const AT_ONCE: Duration = Duration::from_secs(1);

/// The only tenant has to show a certificate.
fn without_tokens(_: &Path, config: String) -> String {
    config.lines().filter(|line| !line.starts_with("token_file")).collect::<Vec<_>>().join("\n") + "\n"
}

async fn cause(endpoint: &Endpoint, access: Access) -> String {
    let watch = Stopwatch::start();
    let error = RemoteExecutor::new(endpoint, access).info().await.expect_err("it does not belong");
    watch.assert_within("a refusal", AT_ONCE);
    match error {
        ExecutorError::Unavailable { endpoint: named, cause } => {
            assert_eq!(named, endpoint.to_string());
            assert!(!cause.contains('\n'), "{cause}");
            cause
        }
        other => panic!("{other}"),
    }
}

#[test]
fn each_side_says_why_it_does_not_trust_the_other() {
    block_on(async {
        let rig = Rig::start(&[], None, without_tokens).await;
        let other = rig.dir().join("other");
        init(&other, &[]);
        sign(&rig.file(""), &rig.file("late"), "late", ClientAuth, PAST);
        sign(&rig.file(""), &rig.file("host"), "host.example", ServerAuth, FUTURE);
        let good = rig.at("https", "localhost");
        let mut attempts = 0;
        for (endpoint, access, says) in [
            (&good, rig.access(None), "it wants a client certificate; name the files of yours (--cert and --key)"),
            (
                &good,
                rig.access_by(&other.join("ca.crt"), Some(rig.file("client"))),
                "its certificate is not signed by the CA that is trusted here",
            ),
            (
                &good,
                rig.access_by(&rig.file("ca.crt"), Some(other.join("client"))),
                "it does not accept the client certificate: not signed by the CA",
            ),
            (&good, rig.access(Some("late")), "it does not accept the client certificate: it has expired"),
            (&good, rig.access(Some("host")), "it ended the TLS handshake (UnsupportedCertificate)"),
            (&rig.at("http", "localhost"), Access::default(), "it speaks TLS; use https://"),
        ] {
            let cause = cause(endpoint, access).await;
            assert!(cause.starts_with(says), "{says}: {cause}");
            attempts += 1;
            wait_for("the daemon says so", SOON, || rig.said("no TLS handshake") >= attempts).await;
        }
        rig.by_certificate("client").info().await.expect("who belongs is let in");
        assert_eq!(rig.said("no TLS handshake"), attempts, "one attempt for each");
        // Nobody has named an authority: nothing is even tried.
        let none = cause(&good, Access::default()).await;
        assert!(none.starts_with("https:// needs the CA"), "{none}");
        rig.unix().info().await.expect("the Unix socket knows its own user");
    });
}

#[test]
fn a_certificate_of_the_daemon_that_is_not_good_is_named() {
    for (name, until, says) in [
        ("localhost", PAST, "its certificate has expired"),
        ("elsewhere.example", FUTURE, "its certificate is not for localhost, but for elsewhere.example"),
    ] {
        block_on(async {
            let rig = Rig::start(&[], None, |tls, config| {
                sign(tls, &tls.join("other"), name, ServerAuth, until);
                config.replace("server.crt", "other.crt").replace("server.key", "other.key")
            })
            .await;
            let cause = cause(&rig.at("https", "localhost"), rig.access(Some("client"))).await;
            assert!(cause.starts_with(says), "{cause}");
        });
    }
}

#[test]
fn a_daemon_without_tls_is_named() {
    block_on(async {
        let without_tls = |_: &Path, config: String| {
            let kept = config.lines().filter(|line| !line.starts_with("tls_") && !line.starts_with("client_ca"));
            kept.collect::<Vec<_>>().join("\n") + "\n"
        };
        let rig = Rig::start(&[], None, without_tls).await;
        let cause = cause(&rig.at("https", "localhost"), rig.access(Some("client"))).await;
        assert!(cause.starts_with("it does not speak TLS; use http://"), "{cause}");
    });
}

#[test]
fn a_wrong_token_is_refused_over_tls_and_beside_a_good_certificate() {
    block_on(async {
        let rig = Rig::start(&[], None, |_, config| config).await;
        rig.by_token(&rig.token("client")).info().await.expect("its token");
        rig.by_certificate("client").info().await.expect("its certificate");
        let refused = |error| match error {
            ExecutorError::Refused { reason } => reason,
            other => panic!("{other}"),
        };
        let wrong = rig.by_token("0123456789abcdef0123").info().await.expect_err("a token of nobody");
        assert_eq!(refused(wrong), "the token is not known");
        let token = tool_client::executor::connect::Token::new("0123456789abcdef0123").expect("a token");
        let both = Access { token: Some(token), ..rig.access(Some("client")) };
        let both = RemoteExecutor::new(&rig.at("https", "localhost"), both).info().await.expect_err("a wrong token");
        assert_eq!(refused(both), "the token is not known");
        let none = RemoteExecutor::new(&rig.at("https", "localhost"), rig.access(None)).info().await;
        assert!(refused(none.expect_err("nobody")).starts_with("no token"));
    });
}
