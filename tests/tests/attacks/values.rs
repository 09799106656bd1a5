//! Values that are none: each is answered with what is wrong with it, and nothing is started.

use bytes::Bytes;
use executor_proto::{
    types::{CommandSpec, OwnerId, WatchEvent},
    v1,
};
use futures_util::StreamExt as _;
use tonic::Code;
use tool_client::executor::Executor;

use crate::{
    calls::caller,
    report::{Outcome, Report},
    rig::{Mode, Rig, SOON},
    script::{stated, stated_limit},
    wire::Call,
};

/// Whom the starts are for.
const OWNER: &str = "values";

type Row = (&'static str, Call);

pub(crate) async fn attack(rig: &Rig, report: &mut Report) {
    let a = rig.token("a");
    let rows = [starts(), directories(rig), reads(), messages()].concat();
    let tasks = async || rig.tenant("a").list_tasks(Some(&OwnerId(OWNER.to_owned()))).await.expect("a list").len();
    for (name, call) in rows {
        if stated(rig, name) {
            report.add(format_args!("values/{name}"), "work in a directory of the daemon's", stated_limit());
            continue;
        }
        let before = tasks().await;
        let answer = call.token(&a).make(rig).await;
        let told = |code| code != Code::DeadlineExceeded && code != Code::Unavailable;
        let refused = answer.as_ref().is_err_and(|status| told(status.code()));
        let none = tasks().await == before;
        report.add(
            format_args!("values/{name}"),
            "have a value taken that is none",
            Outcome::refused_if(refused && none, format_args!("{answer:?}")),
        );
    }
    outside_of_roots(rig, report).await;
    let told = after_acknowledging(rig).await;
    let tried = "acknowledge what has not been yet, so that it is never told";
    report.add("values/acknowledge-the-future", tried, Outcome::refused_if(told, "it was swallowed"));
}

fn plain() -> v1::CommandSpec {
    v1::CommandSpec { command: "true".into(), ..Default::default() }
}

fn start(key: &str, spec: v1::CommandSpec) -> Call {
    let request = v1::StartTaskRequest { caller: caller(Some(OWNER)), key: key.to_owned(), spec: Some(spec) };
    Call::method("StartTask", &request)
}

/// A start with one variable.
fn variable(key: &str, name: &[u8], value: &[u8]) -> Call {
    let one = v1::EnvironmentVariable { name: name.to_vec().into(), value: value.to_vec().into() };
    start(key, v1::CommandSpec { environment: vec![one], ..plain() })
}

fn starts() -> Vec<Row> {
    let run = |timeout_ms: f64| {
        let spec = Some(v1::CommandSpec { timeout_ms: Some(timeout_ms), ..plain() });
        let caller = caller(Some(OWNER));
        Call::method("Run", &v1::RunRequest { caller, key: format!("t{timeout_ms}"), spec, ..Default::default() })
    };
    let command = |command: Vec<u8>| v1::CommandSpec { command: command.into(), ..plain() };
    let without = |caller, spec| Call::method("StartTask", &v1::StartTaskRequest { caller, key: "x".to_owned(), spec });
    vec![
        ("timeout-nan", run(f64::NAN)),
        ("timeout-negative", run(-1.0)),
        ("timeout-negative-infinite", run(f64::NEG_INFINITY)),
        ("key-empty", start("", plain())),
        ("key-129", start(&"k".repeat(129), plain())),
        ("nul-command", start("n1", command(b"true\0; id".to_vec()))),
        ("command-too-large", start("n2", command(vec![b'#'; 9 << 20]))),
        ("nul-name", variable("n3", b"A\0B", b"x")),
        ("nul-value", variable("n4", b"A", b"x\0y")),
        ("name-with-equals", variable("n5", b"A=B", b"x")),
        ("name-empty", variable("n6", b"", b"x")),
        ("value-too-large", variable("n7", b"A", &[b'x'; 200_000])),
        ("sandbox-unknown", start("n8", v1::CommandSpec { sandbox_mode: 77, ..plain() })),
        ("no-spec", without(caller(None), None)),
        ("no-caller", without(None, Some(plain()))),
    ]
}

fn directories(rig: &Rig) -> Vec<Row> {
    let path = |name: &str| rig.at(name).display().to_string();
    let (keeper, server) = (rig.keeper(), rig.server());
    let state = if rig.mode == Mode::Root { path("state/server") } else { path("state") };
    let in_it = |name: &'static str, workdir: String| {
        (name, start(name, v1::CommandSpec { workdir: Some(workdir.into()), ..plain() }))
    };
    vec![
        in_it("workdir-nul", "/tmp\0/x".to_owned()),
        in_it("workdir-missing", "/no/such/directory".to_owned()),
        in_it("workdir-is-a-file", "/etc/passwd".to_owned()),
        in_it("workdir-is-a-fifo", path("public/fifo")),
        in_it("workdir-is-a-device", "/dev/null".to_owned()),
        in_it("workdir-too-long", format!("/{}", "x/".repeat(5_000))),
        in_it("workdir-of-root", "/root".to_owned()),
        in_it("workdir-of-state", state),
        in_it("workdir-of-tls", path("tls/.")),
        in_it("workdir-of-tls-by-a-way-round", path("work/../tls")),
        in_it("workdir-of-tls-by-a-link", path("public/link")),
        in_it("workdir-of-keeper", format!("/proc/{keeper}/cwd")),
        in_it("workdir-of-server", format!("/proc/{server}/root")),
        in_it("workdir-descriptors", format!("/proc/{keeper}/fd")),
    ]
}

/// Tenant `b` may work below one directory only.
async fn outside_of_roots(rig: &Rig, report: &mut Report) {
    let b = rig.token("b");
    let path = |name: &str| rig.at(name).display().to_string();
    let ask = async |workdir: String| {
        let key = format!("{:.100}", workdir.replace('/', "-"));
        start(&key, v1::CommandSpec { workdir: Some(workdir.into()), ..plain() }).token(&b).make(rig).await
    };
    let allowed = ask(path("work/of-b")).await.is_ok();
    for (name, workdir) in [
        ("above", path("work")),
        ("elsewhere", "/tmp".to_owned()),
        ("dot-dot", path("work/of-b/..")),
        ("dot-dot-through", path("work/of-b/../of-b/../..")),
        ("beginning", path("work/of-b-too")),
        ("link", path("work/of-b/out")),
        ("link-and-back", path("work/of-b/out/of-b/..")),
        ("proc", "/proc/self/root/tmp".to_owned()),
        ("relative", "../..".to_owned()),
        ("slashes", format!("//{}/../", path("work/of-b"))),
    ] {
        let answer = ask(workdir).await;
        let refused = answer.as_ref().is_err_and(|status| status.code() != Code::DeadlineExceeded);
        let tried = "work outside of the directories that a tenant is allowed";
        report.add(
            format_args!("roots/{name}"),
            tried,
            Outcome::of(allowed, refused, format_args!("{allowed}, {answer:?}")),
        );
    }
}

fn reads() -> Vec<Row> {
    let read = |read_id: String, wait_ms| {
        let task_id = "bash-1".to_owned();
        Call::method("ReadOutput", &v1::ReadOutputRequest { caller: caller(None), task_id, read_id, wait_ms })
    };
    let stream = |task_id: &str, stream, offset| {
        let task_id = task_id.to_owned();
        let request = v1::ReadStreamRequest { caller: caller(None), task_id, stream, offset, follow: true };
        Call::method("ReadStream", &request)
    };
    let acknowledge = v1::AckCompletionsRequest { caller: caller(None), up_to_sequence: 1 };
    vec![
        ("wait-nan", read("r".to_owned(), Some(f64::NAN))),
        ("wait-negative", read("r".to_owned(), Some(-1.0))),
        ("read-id-empty", read(String::new(), None)),
        ("read-id-129", read("r".repeat(129), None)),
        ("stream-unknown", stream("bash-1", 9, 0)),
        ("stream-negative", stream("bash-1", -1, 0)),
        ("offset-beyond", stream("bash-77777", 1, u64::MAX)),
        ("acknowledge-no-owner", Call::method("AckCompletions", &acknowledge)),
        ("watch-no-owner", Call::method("WatchTasks", &v1::WatchTasksRequest { caller: caller(None) })),
    ]
}

/// Messages that no encoder makes.
fn messages() -> Vec<Row> {
    let list =
        |message: Vec<u8>| Call { message: message.into(), ..Call::info().to("/executor.v1.Executor/ListTasks") };
    // `caller { owner }` with an owner of these bytes.
    let owner = |owner: &[u8]| {
        let inner = field(owner);
        list(field(&inner))
    };
    vec![
        ("owner-too-long", owner(&[b'o'; 1_025])),
        ("owner-of-a-mebibyte", owner(&vec![b'o'; 1 << 20])),
        ("owner-not-utf-8", owner(&[0xff, 0xfe, 0xc0, 0x80])),
        ("owner-overlong", owner(&[0xc0, 0xaf])),
        ("owner-surrogate", owner(&[0xed, 0xa0, 0x80])),
        ("truncated", list(b"\x0a\xff\xff\xff\xff\x0f".to_vec())),
        ("group", list(vec![0x0b; 4_096])),
        ("varint-without-end", list(vec![0xff; 64])),
        ("tag-zero", list(vec![0; 16])),
    ]
}

/// Field 1 of a message, with these bytes.
fn field(bytes: &[u8]) -> Vec<u8> {
    let mut message = vec![0x0a];
    let mut length = bytes.len();
    while length > 127 {
        message.push(u8::try_from(length & 127).expect("seven bits") | 128);
        length >>= 7;
    }
    message.push(u8::try_from(length).expect("seven bits"));
    message.extend(bytes);
    message
}

/// Whether a completion is told that was acknowledged before it was.
async fn after_acknowledging(rig: &Rig) -> bool {
    let (client, owner) = (rig.tenant("a"), OwnerId("future".to_owned()));
    client.ack_completions(&owner, u64::MAX).await.expect("it may be asked");
    let spec = CommandSpec { command: Bytes::from_static(b"true"), ..CommandSpec::default() };
    client.start_task(Some(&owner), spec).await.expect("started");
    let mut watch = client.watch_tasks(&owner).await.expect("a watch");
    let told = tokio::time::timeout(SOON, async {
        loop {
            match watch.next().await {
                Some(Ok(WatchEvent::Completion(_))) => return true,
                Some(Ok(_)) => {}
                Some(Err(_)) | None => return false,
            }
        }
    });
    told.await.unwrap_or(false)
}
