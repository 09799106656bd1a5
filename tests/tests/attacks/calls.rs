//! Calls of somebody who is let in, for what is another tenant's or another session's, and with values that are none.

use bytes::Bytes;
use executor_proto::{
    error::ExecutorError,
    types::{OwnerId, TaskId},
    v1,
};
use prost::Message;
use tonic::{Code, Status};
use tool_client::executor::Executor;

use crate::{
    report::{Outcome, Report},
    rig::{OWNER, Rig},
    wire::Call,
};

/// What there is to be had: a task of tenant `a` and owner [`OWNER`] that runs and has written, and a run of theirs.
struct Victim {
    task: String,
    task_key: String,
    run: String,
    run_key: String,
    read_id: String,
}

pub(crate) fn caller(owner: Option<&str>) -> Option<v1::Caller> {
    Some(v1::Caller { owner: owner.map(ToOwned::to_owned) })
}

fn spec(command: &str) -> Option<v1::CommandSpec> {
    Some(v1::CommandSpec { command: command.to_owned().into(), ..Default::default() })
}

/// What is answered where there is nothing to end: a `CancelRunResponse` that says `already_finished`.
const ALREADY_FINISHED: &[u8] = b"\n\x02\x08\x01";

/// What the victim's task writes.
const SECRET: &str = "secret-of-a-7f21";
const COMMAND: &str = "echo secret-of-a-7f21; echo secret-of-a-7f21 >&2; sleep 300";

impl Victim {
    async fn start(rig: &Rig) -> Self {
        let token = rig.token("a");
        let made = async |name: &str, message: &dyn Fn() -> Vec<u8>| {
            let call = Call { message: message().into(), ..Call::info().to(&format!("/executor.v1.Executor/{name}")) };
            call.token(&token).make(rig).await.unwrap_or_else(|status| panic!("{name}: {status:?}"))
        };
        let (task_key, run_key, read_id) = ("key-of-a-task", "key-of-a-run", "read-of-a");
        let start = v1::StartTaskRequest { caller: caller(Some(OWNER)), key: task_key.to_owned(), spec: spec(COMMAND) };
        let started = made("StartTask", &|| start.encode_to_vec()).await;
        let task = v1::StartTaskResponse::decode(started[0].clone()).expect("an answer").task_id;
        let read = v1::ReadOutputRequest {
            caller: caller(Some(OWNER)),
            task_id: task.clone(),
            read_id: read_id.to_owned(),
            wait_ms: None,
        };
        let a = rig.tenant("a");
        let owner = OwnerId(OWNER.to_owned());
        executor_tests::wait_until("the task has written", crate::rig::SOON, async || {
            let info = a.get_task(Some(&owner), &TaskId(task.clone())).await.expect("its own");
            (info.stdout_total > 0).then_some(())
        })
        .await;
        let answer = made("ReadOutput", &|| read.encode_to_vec()).await;
        assert!(holds(&Ok(answer), SECRET), "the owner reads it");
        let run = v1::RunRequest {
            caller: caller(Some(OWNER)),
            key: run_key.to_owned(),
            spec: spec(&format!("echo {SECRET}; (sleep 300 &)")),
            ..Default::default()
        };
        let events = made("Run", &|| run.encode_to_vec()).await;
        let accepted = events.into_iter().find_map(|event| match v1::RunEvent::decode(event).ok()?.event? {
            v1::run_event::Event::Accepted(accepted) => Some(accepted.run_id),
            _ => None,
        });
        let run = accepted.expect("it was accepted");
        Self { task, task_key: task_key.to_owned(), run, run_key: run_key.to_owned(), read_id: read_id.to_owned() }
    }

    /// Every call that would have something of it, made for an owner.
    fn calls(&self, owner: Option<&str>) -> Vec<(&'static str, Call)> {
        let (task, run) = (|| self.task.clone(), || self.run.clone());
        let caller = || caller(owner);
        let stdout = v1::StreamName::Stdout.into();
        let read = |task_id, read_id: &str, wait_ms| v1::ReadOutputRequest {
            caller: caller(),
            task_id,
            read_id: read_id.to_owned(),
            wait_ms,
        };
        let stream =
            |task_id, follow| v1::ReadStreamRequest { caller: caller(), task_id, stream: stdout, offset: 0, follow };
        vec![
            ("get-task", Call::method("GetTask", &v1::GetTaskRequest { caller: caller(), task_id: task() })),
            ("get-run", Call::method("GetTask", &v1::GetTaskRequest { caller: caller(), task_id: run() })),
            ("list-tasks", Call::method("ListTasks", &v1::ListTasksRequest { caller: caller() })),
            ("read-output", Call::method("ReadOutput", &read(task(), "another", None))),
            ("read-output-again", Call::method("ReadOutput", &read(task(), &self.read_id, None))),
            ("read-output-of-a-run", Call::method("ReadOutput", &read(run(), "another", None))),
            ("wait-for-output", Call::method("ReadOutput", &read(task(), "waiting", Some(100.0)))),
            ("read-stream", Call::method("ReadStream", &stream(task(), false))),
            ("follow-stream", Call::method("ReadStream", &stream(task(), true))),
            ("read-stream-of-a-run", Call::method("ReadStream", &stream(run(), false))),
            ("kill-task", Call::method("KillTask", &v1::KillTaskRequest { caller: caller(), task_id: task() })),
            ("kill-run", Call::method("KillTask", &v1::KillTaskRequest { caller: caller(), task_id: run() })),
            (
                "cancel-run",
                Call::method("CancelRun", &v1::CancelRunRequest { caller: caller(), key: self.run_key.clone() }),
            ),
            (
                "cancel-task",
                Call::method("CancelRun", &v1::CancelRunRequest { caller: caller(), key: self.task_key.clone() }),
            ),
            (
                "attach",
                Call::method(
                    "Run",
                    &v1::RunRequest {
                        caller: caller(),
                        key: self.run_key.clone(),
                        spec: spec("echo mine"),
                        stream_output: true,
                        stdout_offset: Some(0),
                        stderr_offset: Some(0),
                    },
                ),
            ),
            (
                "same-run-key",
                Call::method(
                    "Run",
                    &v1::RunRequest {
                        caller: caller(),
                        key: self.run_key.clone(),
                        spec: spec("echo mine"),
                        ..Default::default()
                    },
                ),
            ),
            (
                "same-task-key",
                Call::method(
                    "StartTask",
                    &v1::StartTaskRequest { caller: caller(), key: self.task_key.clone(), spec: spec("sleep 300") },
                ),
            ),
            (
                "acknowledge",
                Call::method(
                    "AckCompletions",
                    &v1::AckCompletionsRequest { caller: caller(), up_to_sequence: u64::MAX },
                ),
            ),
        ]
    }
}

fn holds(answer: &Result<Vec<Bytes>, Status>, text: &str) -> bool {
    let has = |bytes: &Bytes| bytes.windows(text.len()).any(|window| window == text.as_bytes());
    answer.as_ref().is_ok_and(|all| all.iter().any(has))
}

pub(crate) async fn attack(rig: &Rig, report: &mut Report) {
    let victim = Victim::start(rig).await;
    let owner = OwnerId(OWNER.to_owned());
    let others = [
        ("other-tenant", "another tenant, for an owner of the same name", "b", Some(OWNER)),
        ("other-tenant-nobody", "another tenant, for no owner", "b", None),
        ("other-owner", "another session of the tenant", "a", Some("another")),
        ("no-owner", "no session of the tenant", "a", None),
        ("empty-owner", "a session of the tenant whose name is empty", "a", Some("")),
        ("owner-in-capitals", "a session whose name differs in case", "a", Some("OWNER-OF-WHAT-IS-ATTACKED")),
    ];
    for (who, tried, tenant, name) in others {
        let token = rig.token(tenant);
        for (what, call) in victim.calls(name) {
            let answer = call.token(&token).make(rig).await;
            // The task's output and command hold the secret; who attaches or starts by another's key has at most their own.
            let alive = rig.tenant("a").get_task(Some(&owner), &TaskId(victim.task.clone())).await;
            let whole = alive.as_ref().is_ok_and(|task| task.ended_at_ms.is_none());
            let run = rig.tenant("a").get_task(Some(&owner), &TaskId(victim.run.clone())).await;
            let leftover = run.as_ref().is_ok_and(|run| !run.leftovers.is_empty());
            let own = match what {
                "same-task-key" => answer.is_ok() && other_task(&answer, &victim.task, tenant == "b"),
                "same-run-key" => answer.is_ok(),
                // A key that is not running is answered so, and so is one that never was.
                "cancel-run" | "cancel-task" => {
                    answer.as_ref().map_or(true, |all| all == &[Bytes::from_static(ALREADY_FINISHED)])
                }
                "list-tasks" | "acknowledge" => true,
                _ => answer.is_err(),
            };
            let refused = own && !holds(&answer, SECRET);
            report.add(
                format_args!("{who}/{what}"),
                format_args!("{tried}: {what}"),
                Outcome::of(
                    true,
                    refused && whole && leftover,
                    format_args!("{answer:?}; the task: {alive:?}; the run: {run:?}"),
                ),
            );
        }
    }
    same_answer(rig, report, &victim).await;
    ids(rig, report).await;

    let a = rig.tenant("a");
    for id in [&victim.task, &victim.run] {
        a.kill_task(Some(&owner), &TaskId(id.clone())).await.expect("its owner can");
    }
    for tenant in ["a", "b"] {
        for name in [Some("another"), None, Some(""), Some("OWNER-OF-WHAT-IS-ATTACKED"), Some(OWNER)] {
            let owner = name.map(|name| OwnerId(name.to_owned()));
            for task in rig.tenant(tenant).list_tasks(owner.as_ref()).await.expect("a list") {
                rig.tenant(tenant).kill_task(owner.as_ref(), &task.id).await.expect("its owner can");
            }
        }
    }
}

/// A start by another's key has started a task of the caller's own. Ids count in a tenant, so another's may be the same.
fn other_task(answer: &Result<Vec<Bytes>, Status>, task: &str, other_tenant: bool) -> bool {
    let Ok(all) = answer else { return false };
    let Ok(started) = v1::StartTaskResponse::decode(all[0].clone()) else { return false };
    other_tenant || started.task_id != task
}

/// To another tenant a task that exists answers as one that does not.
async fn same_answer(rig: &Rig, report: &mut Report, victim: &Victim) {
    let b = rig.token("b");
    let ask = async |id: &str| {
        let request = v1::GetTaskRequest { caller: caller(Some(OWNER)), task_id: id.to_owned() };
        let status = Call::method("GetTask", &request).token(&b).make(rig).await.err();
        status.map(|status| {
            (status.code(), status.message().replace(id, "ID"), ExecutorError::from_status(&status).is_some())
        })
    };
    let (taken, never) = (ask(&victim.run).await, ask("run-99999").await);
    report.add(
        "other-tenant/same-answer",
        "tell a task of another tenant from one that never was, by the answer",
        Outcome::of(never.is_some(), taken == never, format_args!("{taken:?} and {never:?}")),
    );
}

/// Ids that could be read as something else.
async fn ids(rig: &Rig, report: &mut Report) {
    let a = rig.token("a");
    let long = "bash-1".repeat(20_000);
    for (name, id) in [
        ("up", "../../bash-1"),
        ("up-encoded", "%2e%2e/bash-1"),
        ("absolute", "/etc/passwd"),
        ("leading-zero", "bash-01"),
        ("sign", "bash-+1"),
        ("minus", "bash--1"),
        ("zero", "bash-0"),
        ("space", "bash-1 "),
        ("nul", "bash-1\0"),
        ("newline", "bash-1\n"),
        ("capitals", "BASH-1"),
        ("other-digits", "bash-\u{661}"),
        ("largest", "bash-18446744073709551615"),
        ("above-the-largest", "bash-18446744073709551616"),
        ("far", "bash-99999999999999999999999999"),
        ("empty", ""),
        ("all", "*"),
        ("sql", "bash-1' OR '1'='1"),
        ("long", &long),
    ] {
        for (method, call) in [
            (
                "get",
                Call::method("GetTask", &v1::GetTaskRequest { caller: caller(Some(OWNER)), task_id: id.to_owned() }),
            ),
            (
                "kill",
                Call::method("KillTask", &v1::KillTaskRequest { caller: caller(Some(OWNER)), task_id: id.to_owned() }),
            ),
        ] {
            let answer = call.token(&a).make(rig).await;
            let unknown = answer.as_ref().is_err_and(|status| status.code() == Code::NotFound);
            report.add(
                format_args!("ids/{name}-{method}"),
                "have an id that was never issued taken for one that was",
                Outcome::refused_if(unknown, format_args!("{answer:?}")),
            );
        }
    }
}
