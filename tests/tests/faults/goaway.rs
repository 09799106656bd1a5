//! A peer that takes no more calls on a connection (GOAWAY, as proxies and servers send it before they go): no call is lost, and
//! nothing runs twice.

use std::{fs, sync::Arc, time::Duration};

use async_trait::async_trait;
use bytes::Bytes;
use executor_proto::types::{CommandSpec, Exit, OwnerId, StreamChunk};
use executor_tests::{
    SESSION, Setup, Stopwatch, World, every_daemon,
    faults::{Away, Plan},
    wait_for,
};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tool_client::executor::{Executor, OutputSink};

use crate::SOON;

/// What connecting again takes at most: nobody has to notice anything by silence.
const AT_ONCE: Duration = Duration::from_secs(3);

fn owner() -> OwnerId {
    OwnerId(SESSION.to_owned())
}

fn command(world: &World, text: &str) -> CommandSpec {
    let workdir = Some(Bytes::from(world.tmp().to_string_lossy().into_owned()));
    CommandSpec { command: Bytes::from(text.to_owned()), workdir, ..CommandSpec::default() }
}

fn marks(world: &World) -> Vec<String> {
    let marks = fs::read_to_string(world.tmp().join("marks")).unwrap_or_default();
    marks.lines().map(ToOwned::to_owned).collect()
}

/// Sends the clients of all connections away; returns when they were told.
async fn send_away(world: &World, away: Away) {
    let before = world.faults().seen();
    let open = before.connections - before.closed;
    assert!(open > 0, "nobody is there to be told");
    world.faults().send_away(away);
    wait_for("it is told", SOON, || world.faults().seen().goaways > before.goaways).await;
}

every_daemon!(calls_go_on_elsewhere_when_a_connection_takes_no_more with Setup::through(Plan::PASS));
async fn calls_go_on_elsewhere_when_a_connection_takes_no_more(world: &World) {
    const ROUNDS: usize = 10;
    for away in [Away::AfterTheseCalls, Away::AsIfNothingWasSeen] {
        let _ = fs::remove_file(world.tmp().join("marks"));
        for round in 0..ROUNDS {
            let run = world.run(command(world, &format!("echo {round} >> marks; exit 3"))).await.expect("it runs");
            assert_eq!(run.exit, Exit::Code(3), "{away:?}, round {round}");
            send_away(world, away).await;
        }
        let expected: Vec<_> = (0..ROUNDS).map(|round| round.to_string()).collect();
        assert_eq!(marks(world), expected, "{away:?}");
    }
    let seen = world.faults().seen();
    assert!(seen.connections >= 2 * ROUNDS as u64, "{seen:?}");
}

/// Takes output, and lets it be waited for.
#[derive(Default)]
struct Heard(watch::Sender<Vec<u8>>);

#[async_trait]
impl OutputSink for Heard {
    async fn output(&mut self, chunk: StreamChunk) {
        self.0.send_modify(|heard| {
            assert_eq!(chunk.offset, heard.len() as u64, "a gap, or something twice");
            heard.extend_from_slice(&chunk.data);
        });
    }
}

every_daemon!(a_run_a_read_and_a_watch_outlive_a_connection_that_takes_no_more with Setup::through(Plan::PASS));
async fn a_run_a_read_and_a_watch_outlive_a_connection_that_takes_no_more(world: &World) {
    let owner = owner();
    for (round, away) in [Away::AfterTheseCalls, Away::AsIfNothingWasSeen, Away::AfterTheseCalls].iter().enumerate() {
        let go = world.tmp().join(format!("go{round}"));
        let (mut sink, abort) = (Heard::default(), CancellationToken::new());
        let mut heard = sink.0.subscribe();
        // The session is watched for from its first task on.
        let task = world.background(&format!("until [ -e go{round} ]; do sleep 0.02; done; echo of the task")).await;
        let text = format!("echo {round} >> marks; echo out; until [ -e go{round} ]; do sleep 0.02; done; echo last");
        let run = world.executor().run(Some(&owner), command(world, &text), &abort, Some(&mut sink));
        let reader: Arc<dyn Executor> = Arc::clone(world.executor());
        let read = reader.read_output(Some(&owner), &task, Some(SOON));
        let send = async {
            heard.wait_for(|heard| heard == b"out\n").await.expect("the sink is there until it has ended");
            let watch = Stopwatch::start();
            send_away(world, *away).await;
            // Over another connection, while the three go on.
            world.executor().info().await.expect("it answers");
            fs::write(&go, "").expect("written");
            watch
        };
        let (run, read, watch) = tokio::join!(run, read, send);
        watch.assert_within("going on", AT_ONCE);
        assert_eq!(run.expect("it was started").exit, Exit::Code(0), "{away:?}");
        assert_eq!(*heard.borrow(), b"out\nlast\n", "{away:?}");
        assert_eq!(read.expect("it is answered").stdout.data, "of the task\n", "{away:?}");
        wait_for("the notice", SOON, || world.mailbox().taken().len() > round).await;
    }
    // What would have come twice has come with what is told after it.
    let last = world.background("true").await;
    wait_for("a later notice", SOON, || world.mailbox().taken().iter().any(|notice| notice.task_id == last)).await;
    let told: Vec<_> = world.mailbox().taken().into_iter().map(|notice| notice.task_id.0).collect();
    assert_eq!(told, ["bash-1", "bash-2", "bash-3", "bash-4"]);
    assert_eq!(marks(world), ["0", "1", "2"]);
}
