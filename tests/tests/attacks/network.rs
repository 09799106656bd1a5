//! From the network: credentials that are none, TLS that is none, and calls for what is somebody else's to have.

use bytes::Bytes;
use executor_tests::certificates::{Purpose, init, sign, sign_itself};
use tonic::{Code, Status};

use crate::{
    report::{Outcome, Report},
    rig::Rig,
    script::{
        Control::{Outside, Where},
        Script, from_outside, script,
    },
    wire::{Call, SERVICE},
};

/// Long before now, and long after, in seconds since 1970.
const PAST: i64 = 1_000_000_000;
const FUTURE: i64 = 4_000_000_000;

/// With a token that is good, over TLS as it is spoken today.
const SPEAKS: &str = r#"openssl s_client -connect "localhost:$PORT" -CAfile "$CA" -tls1_2 </dev/null 2>&1 | grep -q '^New, TLSv1.2' && echo works"#;

/// Older ways to speak, with everything a client may offer.
const TLS: &[Script] = &[
    script(
        "tls-1.0",
        "speak TLS 1.0",
        r#"openssl s_client -connect "localhost:$PORT" -tls1 -cipher ALL:@SECLEVEL=0 </dev/null 2>&1 | grep -q '^New, TLS' && echo TAKEN"#,
        Outside(SPEAKS),
    ),
    script(
        "tls-1.1",
        "speak TLS 1.1",
        r#"openssl s_client -connect "localhost:$PORT" -tls1_1 -cipher ALL:@SECLEVEL=0 </dev/null 2>&1 | grep -q '^New, TLS' && echo TAKEN"#,
        Outside(SPEAKS),
    ),
    script(
        "tls-weak-ciphers",
        "agree on a cipher without secrecy or without authentication",
        r#"for c in NULL aNULL 3DES CBC kRSA; do openssl s_client -connect "localhost:$PORT" -tls1_2 -cipher "$c:@SECLEVEL=0" </dev/null 2>&1 | grep -q '^New, TLS' && echo TAKEN; done"#,
        Outside(SPEAKS),
    ),
    script(
        "tls-renegotiation",
        "begin again within TLS 1.2",
        r#"(printf 'R\n'; sleep 0.2) | openssl s_client -connect "localhost:$PORT" -tls1_2 2>&1 | grep -A9 '^RENEGOTIATING' | grep -q '^verify' && echo TAKEN"#,
        Outside(SPEAKS),
    ),
    script(
        "http-1.1",
        "speak HTTP/1.1 within TLS, with a good token",
        r#"curl -s -m 10 --http1.1 --cacert "$CA" -H "authorization: Bearer $(cat "$TLS/a.token")" "https://localhost:$PORT/executor.v1.Executor/GetInfo" && echo TAKEN"#,
        Where("curl --version | grep -q HTTP2 && echo works"),
    ),
    script(
        "plain-http",
        "speak HTTP without TLS, with a good token",
        r#"for v in --http1.1 --http2-prior-knowledge; do curl -s -m 10 $v -H "authorization: Bearer $(cat "$TLS/a.token")" "http://localhost:$PORT/executor.v1.Executor/GetInfo" && echo TAKEN; done"#,
        Where("curl --version | grep -q HTTP2 && echo works"),
    ),
];

fn unauthenticated(answer: &Result<Vec<Bytes>, Status>) -> bool {
    answer.as_ref().is_err_and(|status| status.code() == Code::Unauthenticated)
}

pub(crate) async fn attack(rig: &Rig, report: &mut Report) {
    credentials(rig, report).await;
    from_outside(rig, report, "transport", TLS).await;
    paths(rig, report).await;
    log(rig, report).await;
}

/// Each asks what the daemon is, which is the least that one can ask.
async fn credentials(rig: &Rig, report: &mut Report) {
    let (a, b) = (rig.token("a"), rig.token("b"));
    let tls = |name: &str| rig.at("tls").join(name);
    let work = rig.at("public");
    let file = |name: &str| work.join(name);
    init(&file("other"), &["--tenant", "a"]);
    sign(&tls(""), &file("late"), "a", Purpose::ClientAuth, PAST);
    sign(&tls(""), &file("host"), "a", Purpose::ServerAuth, FUTURE);
    sign(&tls(""), &file("nobody"), "nobody", Purpose::ClientAuth, FUTURE);
    sign(&tls(""), &file("longer"), "a.example", Purpose::ClientAuth, FUTURE);
    sign_itself(&file("self"), "a", Purpose::ClientAuth, FUTURE);
    let call = Call::info;
    let rows = [
        ("nothing", "call with neither token nor certificate", call()),
        ("wrong-token", "call with a token of nobody", call().token("0123456789abcdef0123")),
        ("prefix", "call with all but the last letter of a token", call().token(&a[..a.len() - 1])),
        ("suffix", "call with a token and a letter more", call().token(&format!("{a}0"))),
        ("case", "call with a token in capitals", call().token(&a.to_uppercase())),
        ("two-in-one", "call with two tokens in one header", call().token(&format!("{a} {b}"))),
        ("comma", "call with two tokens as a list", call().token(&format!("{a},{b}"))),
        ("empty", "call with an empty token", call().header("authorization", "Bearer ")),
        ("scheme-alone", "call with the scheme and nothing else", call().header("authorization", "Bearer")),
        ("basic", "call with a token under another scheme", call().header("authorization", format!("Basic {a}"))),
        ("bare", "call with a token without a scheme", call().header("authorization", a.clone())),
        (
            "other-header",
            "call with a token in other headers",
            call()
                .header("x-token", a.clone())
                .header("cookie", format!("authorization=Bearer {a}"))
                .header("proxy-authorization", format!("Bearer {a}")),
        ),
        (
            "tenant-header",
            "call with a header that names a tenant",
            call().header("x-tenant", "a").header("tenant", "a").header("x-forwarded-client-cert", "Subject=\"CN=a\""),
        ),
        ("two-wrong-first", "call with a wrong token and a good one", call().token("0123456789abcdef0123").token(&a)),
        ("two-good-first", "call with a good token and a wrong one", call().token(&a).token("0123456789abcdef0123")),
        ("two-tenants", "call with the tokens of two tenants", call().token(&a).token(&b)),
        (
            "token-of-another",
            "call with the token of another tenant beside one's own certificate",
            call().certificate(tls("a")).token(&b),
        ),
        (
            "wrong-beside",
            "call with a wrong token beside a good certificate",
            call().certificate(tls("a")).token("0123456789abcdef0123"),
        ),
        ("late", "show a certificate that has expired", call().certificate(file("late"))),
        (
            "other-authority",
            "show a certificate for the same name by another authority",
            call().certificate(file("other/a")),
        ),
        ("itself", "show a certificate that has signed itself", call().certificate(file("self"))),
        ("of-a-host", "show a host's certificate as a client's", call().certificate(file("host"))),
        ("nobodys-name", "show a good certificate with a name of no tenant", call().certificate(file("nobody"))),
        ("longer-name", "show a certificate whose name begins with a tenant's", call().certificate(file("longer"))),
        (
            "authority",
            "name another host, as a confused proxy does",
            Call { authority: Some("unix".to_owned()), ..call() },
        ),
    ];
    for (name, tried, call) in rows {
        let control = Call::info().token(&a).make(rig).await;
        let answer = call.make(rig).await;
        let seen = format!("a good call: {:?}; this one: {answer:?}", control.as_ref().map(Vec::len));
        // A certificate that is none ends the handshake: the connection is closed, which each layer says in its own words.
        let refused = answer.as_ref().is_err_and(|status| status.code() != Code::DeadlineExceeded);
        report.add(format_args!("credentials/{name}"), tried, Outcome::of(control.is_ok(), refused, seen));
    }
}

/// Without a token there is nothing but health, and that says nothing but its word.
async fn paths(rig: &Rig, report: &mut Report) {
    let token = rig.token("a");
    let health = "/grpc.health.v1.Health/Check";
    let answer = Call::default().to(health).make(rig).await;
    let says_its_word = answer.as_ref().is_ok_and(|answer| answer == &[Bytes::from_static(&[8, 1])]);
    report.add(
        "paths/health",
        "have health say more than that it serves",
        Outcome::refused_if(says_its_word, format!("{answer:?}")),
    );
    let of_service = Call { message: Bytes::from_static(b"\x0a\x0cno.such.name"), ..Call::default() };
    let answer = of_service.to(health).make(rig).await;
    let not_found = answer.as_ref().is_err_and(|status| status.code() == Code::NotFound);
    report.add(
        "paths/health-of-others",
        "ask health for names of services",
        Outcome::refused_if(not_found, format!("{answer:?}")),
    );
    for (name, tried, path) in [
        ("reflection", "ask for the protocol", "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"),
        (
            "reflection-alpha",
            "ask for the protocol by the older name",
            "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
        ),
        (
            "health-prefix",
            "reach a method by the path of health",
            "/grpc.health.v1.Health/../../executor.v1.Executor/GetInfo",
        ),
        ("health-encoded", "the same, encoded", "/grpc.health.v1.Health/%2e%2e/%2e%2e/executor.v1.Executor/GetInfo"),
        ("double-slash", "reach a method by an odd path", "//executor.v1.Executor/GetInfo"),
        ("case", "reach a method in capitals", "/EXECUTOR.V1.EXECUTOR/GETINFO"),
        ("query", "reach a method with a query", "/executor.v1.Executor/GetInfo?token=1"),
        ("unknown", "find out which methods there are", "/executor.v1.Executor/Shutdown"),
        ("root", "ask for the root", "/"),
    ] {
        let answer = Call::default().to(path).make(rig).await;
        let got = answer.as_ref().is_ok_and(|answer| !answer.is_empty());
        // What begins as health does is let through the gate, and there is no such method of health.
        let refused =
            unauthenticated(&answer) || answer.as_ref().is_err_and(|status| status.code() == Code::Unimplemented);
        let control = Call::info().token(&token).make(rig).await.is_ok();
        report.add(format_args!("paths/{name}"), tried, Outcome::of(control, refused && !got, format!("{answer:?}")));
    }
    let watch = Call::default().to("/grpc.health.v1.Health/Watch");
    let stays = tokio::time::timeout(std::time::Duration::from_millis(300), watch.make(rig)).await;
    let control = Call::info().token(&token).make(rig).await.is_ok();
    report.add(
        "paths/health-watch",
        "hold the daemon up by watching health",
        Outcome::of(control, true, format!("{stays:?}")),
    );
}

/// Texts of a caller's that would be lines or colours of their own in the log.
async fn log(rig: &Rig, report: &mut Report) {
    use executor_proto::v1;
    let forged = "\n2026-01-01T00:00:00.000000Z  INFO forged\r\u{1b}[2J\u{9b}31m\u{202e}";
    let token = rig.token("a");
    let caller = |owner: &str| Some(v1::Caller { owner: Some(owner.to_owned()) });
    let spec = |workdir: &[u8]| {
        Some(v1::CommandSpec { command: "true".into(), workdir: Some(workdir.to_vec().into()), ..Default::default() })
    };
    let task = || forged.to_owned();
    let rows = [
        ("owner", Call::method("ListTasks", &v1::ListTasksRequest { caller: caller(forged) })),
        ("task", Call::method("GetTask", &v1::GetTaskRequest { caller: caller("o"), task_id: task() })),
        ("killed-task", Call::method("KillTask", &v1::KillTaskRequest { caller: caller("o"), task_id: task() })),
        ("key", Call::method("CancelRun", &v1::CancelRunRequest { caller: caller("o"), key: forged.to_owned() })),
        (
            "workdir",
            Call::method(
                "StartTask",
                &v1::StartTaskRequest { caller: caller("o"), key: "w".to_owned(), spec: spec(forged.as_bytes()) },
            ),
        ),
        (
            "owner-and-key",
            Call::method(
                "StartTask",
                &v1::StartTaskRequest { caller: caller(forged), key: forged.to_owned(), spec: spec(b"/") },
            ),
        ),
        ("path", Call::info().to(&format!("{SERVICE}Get%0aInfo%1b[2J"))),
    ];
    for (name, call) in rows {
        let before = rig.log().len();
        let answer = call.token(&token).make(rig).await;
        let log = executor_tests::wait_until("the call is logged", crate::rig::SOON, async || {
            let log = rig.log();
            (log.len() > before || name == "path").then_some(log)
        });
        let log = log.await;
        let clean = !log.lines().any(|line| line.starts_with("2026-01-01"))
            && !log.contains(['\u{1b}', '\r', '\u{9b}', '\u{202e}']);
        report.add(
            format_args!("log/{name}"),
            "write a line of its own into the log by a text that is logged",
            Outcome::refused_if(clean, format_args!("{answer:?}\n{}", &log[before..])),
        );
    }
}
