//! What a tenant asks of another's is answered as what never was, in every word and in about the same time.

use std::time::{Duration, Instant};

use executor_proto::v1;
use tonic::Status;

use super::{Client, Daemon, caller};

/// Calls of each kind, of either id in turn.
const ROUNDS: usize = 300;

/// The medians of two answers that cost the same differ by less.
const FACTOR: u32 = 3;

#[derive(Debug, Clone, Copy)]
enum Ask {
    ReadOutput,
    KillTask,
    GetTask,
    ReadStream,
    CancelRun,
}

/// Everything of an answer that the asker sees, and how long it took. `subject` stands for the id in it.
async fn ask(client: &mut Client, what: Ask, owner: Option<&str>, subject: &str) -> (String, Duration) {
    let (caller, task_id) = (caller(owner), subject.to_owned());
    let client = &mut client.inner;
    let begun = Instant::now();
    let answer: Result<String, Status> = match what {
        Ask::ReadOutput => {
            let request = v1::ReadOutputRequest { caller, task_id, read_id: "r".to_owned(), ..Default::default() };
            first(client.read_output(request).await).await
        }
        Ask::KillTask => {
            client.kill_task(v1::KillTaskRequest { caller, task_id }).await.map(|reply| format!("{reply:?}"))
        }
        Ask::GetTask => client.get_task(v1::GetTaskRequest { caller, task_id }).await.map(|reply| format!("{reply:?}")),
        Ask::ReadStream => {
            let stream = v1::StreamName::Stdout.into();
            let request = v1::ReadStreamRequest { caller, task_id, stream, ..Default::default() };
            first(client.read_stream(request).await).await
        }
        Ask::CancelRun => {
            let request = v1::CancelRunRequest { caller, key: subject.to_owned() };
            client.cancel_run(request).await.map(|reply| format!("{:?}", reply.into_inner()))
        }
    };
    let took = begun.elapsed();
    let text = match answer {
        Ok(text) => text,
        Err(status) => {
            format!("{:?} {:?} {:?}", status.code(), status.message(), String::from_utf8_lossy(status.details()))
        }
    };
    (text.replace(subject, "SUBJECT"), took)
}

/// A stream's first event, or why there is none.
async fn first<T: std::fmt::Debug>(
    answer: Result<tonic::Response<tonic::Streaming<T>>, Status>,
) -> Result<String, Status> {
    answer?.into_inner().message().await.map(|event| format!("{event:?}"))
}

fn median(mut all: Vec<Duration>) -> Duration {
    all.sort_unstable();
    all[all.len() / 2]
}

#[tokio::test]
async fn anothers_id_is_answered_as_one_that_never_was() {
    let tables = if super::root() {
        [("a", "uid_range = '70000-70003'"), ("b", "uid_range = '70004-70007'")]
    } else {
        [("a", ""), ("b", "")]
    };
    let daemon = Daemon::start(&tables).await;
    let (mut a, mut b) = (daemon.client("a").await, daemon.client("b").await);
    let theirs = a.start_task(Some("s"), "echo theirs; sleep 300").await;
    let key = super::key();
    let spec = Some(v1::CommandSpec { command: "true".into(), ..Default::default() });
    let run = v1::RunRequest { caller: caller(Some("s")), key: key.clone(), spec, ..Default::default() };
    a.inner.run(run).await.expect("it starts").into_inner().message().await.expect("it is told of");
    for what in [Ask::ReadOutput, Ask::KillTask, Ask::GetTask, Ask::ReadStream, Ask::CancelRun] {
        let (foreign, never) = match what {
            Ask::CancelRun => (key.as_str(), "a-key-of-nobody"),
            _ => (theirs.as_str(), "bash-7"),
        };
        for owner in [Some("s"), None] {
            let (mut of_foreign, mut of_never) = (Vec::new(), Vec::new());
            for round in 0..ROUNDS {
                // In turn, so that whatever else happens here meets both.
                let mut pair = [(foreign, &mut of_foreign), (never, &mut of_never)];
                if round % 2 == 1 {
                    pair.reverse();
                }
                let mut texts = Vec::new();
                for (subject, times) in pair {
                    let (text, took) = ask(&mut b, what, owner, subject).await;
                    times.push(took);
                    texts.push(text);
                }
                assert_eq!(texts[0], texts[1], "{what:?} for {owner:?}");
            }
            let (foreign, never) = (median(of_foreign), median(of_never));
            assert!(
                foreign < never * FACTOR && never < foreign * FACTOR,
                "{what:?} for {owner:?}: {foreign:?} of another's, {never:?} of nobody's"
            );
        }
    }
    // It is there, and untouched.
    let (own, _) = ask(&mut a, Ask::GetTask, Some("s"), &theirs).await;
    assert!(own.contains("echo theirs"), "{own}");
}
