//! How large and how slow what travels may be (rows N4, N6, F9).

use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use executor_proto::{
    MAX_DAEMON_MESSAGE_BYTES,
    types::{CommandSpec, Exit, OwnerId, StreamChunk, StreamName},
};
use executor_tests::{Backend, SESSION, Setup, World, every_daemon, faults::Plan, on_backend};
use tokio_util::sync::CancellationToken;
use tool_client::executor::OutputSink;

use crate::SOON;

const MUCH: usize = 8_000_000;

/// A tail that holds all of it.
fn large_tails() -> Setup {
    Setup {
        max_output_bytes: 8 * 1024 * 1024,
        timeout_ms: 60_000.0,
        max_timeout_ms: 60_000.0,
        ..Setup::through(Plan::PASS)
    }
}

every_daemon!(n04_n06_eight_megabytes_travel_in_small_messages with large_tails());
async fn n04_n06_eight_megabytes_travel_in_small_messages(world: &World) {
    let flood = format!("head -c {MUCH} /dev/zero | tr '\\0' x");
    let expected = "x".repeat(MUCH);
    assert!(world.bash(&flood).await == expected, "the run brought something else");
    let id = world.background(&flood).await;
    world.ended(&id, SOON).await.expect("it ends");
    let (bytes, closed) = world.stream(&id, StreamName::Stdout, false).await.expect("it can be read");
    assert!(closed && bytes == expected.as_bytes(), "the stream brought something else");
    assert!(
        world.output(&id).await == expected + "\n[status: completed, exit code: 0]",
        "the read brought something else"
    );
    let seen = world.faults().seen();
    let largest = usize::try_from(seen.largest_message).expect("it fits");
    assert!(
        seen.to_client > 3 * MUCH as u64 && seen.messages > 3 * (MUCH / MAX_DAEMON_MESSAGE_BYTES) as u64,
        "{seen:?}"
    );
    assert!((1..=MAX_DAEMON_MESSAGE_BYTES).contains(&largest), "{seen:?}");
    assert!((1..=MAX_DAEMON_MESSAGE_BYTES).contains(&(seen.largest_frame as usize)), "{seen:?}");
}

every_daemon!(f09_a_slow_reader_gets_the_end with Setup::through(Plan::slow_client(100_000)));
async fn f09_a_slow_reader_gets_the_end(world: &World) {
    let text = world.bash("seq 1 2000000").await;
    let (tail, mark) = text.rsplit_once("\n[output truncated; full output: ").expect("it was cut, and says so");
    assert!(tail.ends_with("\n1999999\n2000000\n"), "{}", &tail[tail.len() - 100..]);
    assert!(mark.ends_with(']') && !mark.contains('\n'), "{mark}");
}

/// Takes output and checks that it goes on where it stood.
#[derive(Default)]
struct Counting {
    bytes: Vec<u8>,
    gaps: Vec<u64>,
}

#[async_trait]
impl OutputSink for Counting {
    async fn output(&mut self, chunk: StreamChunk) {
        let end = self.bytes.len() as u64 + self.gaps.iter().sum::<u64>();
        if chunk.offset > end {
            self.gaps.push(chunk.offset - end);
        }
        self.bytes.extend_from_slice(&chunk.data);
    }
}

on_backend!(Backend::Tcp, f09_a_slow_listener_gets_everything_or_is_told_of_the_gap with Setup {
    timeout_ms: 60_000.0, max_timeout_ms: 60_000.0,
    ..Setup::through(Plan::slow_client(400_000))
});
async fn f09_a_slow_listener_gets_everything_or_is_told_of_the_gap(world: &World) {
    const LAST: u32 = 200_000;
    let mut sink = Counting::default();
    let spec = CommandSpec { command: Bytes::from(format!("seq 1 {LAST}")), ..CommandSpec::default() };
    let owner = OwnerId(SESSION.to_owned());
    let begun = std::time::Instant::now();
    let result = world.executor().run(Some(&owner), spec, &CancellationToken::new(), Some(&mut sink)).await;
    let result = result.expect("it runs");
    let whole: String = (1..=LAST).map(|line| format!("{line}\n")).collect();
    assert_eq!((result.exit, result.stdout.total), (Exit::Code(0), whole.len() as u64));
    assert!(begun.elapsed() > Duration::from_secs(2), "the reader was not slow");
    assert_eq!(sink.bytes.len() as u64 + sink.gaps.iter().sum::<u64>(), result.stdout.total, "a gap was not told");
    assert!(sink.bytes.ends_with(b"\n199999\n200000\n"));
    if sink.gaps.is_empty() {
        assert!(sink.bytes == whole.as_bytes(), "something else came");
    }
}
