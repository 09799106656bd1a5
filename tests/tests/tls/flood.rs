//! Strangers who begin and do not go on take the places of TCP for a while, and nobody else's.

use std::time::Duration;

use executor_proto::{transport::BEGIN_LIMIT, types::CommandSpec};
use executor_tests::{Stopwatch, block_on, wait_until};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    time::timeout,
};
use tokio_util::sync::CancellationToken;
use tool_client::executor::Executor;

use crate::rig::Rig;

/// Descriptors of the daemon, an eighth of which are places for connections on TCP.
const DESCRIPTORS: u64 = 512;
/// More strangers than there are places.
const STRANGERS: usize = 100;
/// How a TLS handshake begins: a record that says that 512 bytes follow.
const HALF_A_HELLO: &[u8] = &[22, 3, 1, 2, 0, 1, 0, 1, 252, 3, 3];

#[test]
fn half_open_handshakes_keep_nobody_on_unix_waiting_and_no_place_for_long() {
    block_on(async {
        let rig = Rig::start(&[], Some(DESCRIPTORS), |_, config| config).await;
        let mut strangers = Vec::new();
        for number in 0..STRANGERS {
            let mut stranger = TcpStream::connect(("127.0.0.1", rig.port())).await.expect("at least queued");
            // Some say nothing at all.
            if number % 2 == 0 {
                stranger.write_all(HALF_A_HELLO).await.expect("sent");
            }
            strangers.push(stranger);
        }
        let watch = Stopwatch::start();
        let unix = rig.unix();
        for _ in 0..20 {
            let spec = CommandSpec { command: "true".into(), ..CommandSpec::default() };
            unix.run(None, spec, &CancellationToken::new(), None).await.expect("it runs");
        }
        watch.assert_within("20 commands over the Unix socket", Duration::from_secs(3));
        // The places come back: every stranger is cut off, those that had one first.
        let watch = Stopwatch::start();
        for stranger in &mut strangers[..10] {
            let mut end = Vec::new();
            let ended = timeout(BEGIN_LIMIT * 3, stranger.read_to_end(&mut end)).await;
            // Cut off in order or not; an alert may come first.
            let _either_way = ended.expect("it is cut off");
        }
        watch.assert_within("the end of the first strangers", BEGIN_LIMIT + Duration::from_secs(2));
        let served = wait_until("a client with a certificate has its place", BEGIN_LIMIT * 3, async || {
            rig.by_certificate("client").info().await.ok()
        });
        served.await;
    });
}
