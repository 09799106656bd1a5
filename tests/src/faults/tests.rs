//! The proxy in front of a plain server, over both kinds of socket.

use std::time::{Duration, Instant};

use super::{
    frames::{END_STREAM, HEADERS, PREFACE, SETTINGS, frame},
    *,
};

/// Longest wait for what must happen soon.
const SOON: Duration = Duration::from_secs(20);

/// A server that gives back what it gets, or answers its first bytes with these.
struct House {
    proxy: FaultProxy,
    server: JoinHandle<()>,
    _directory: tempfile::TempDir,
}

impl Drop for House {
    fn drop(&mut self) {
        self.server.abort();
    }
}

impl House {
    async fn new(unix: bool, plan: Plan, answer: Option<Vec<u8>>) -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let far = if unix {
            Address::Unix(directory.path().join("server"))
        } else {
            Address::Tcp(([127, 0, 0, 1], 0).into())
        };
        let (listener, far) = far.listen().await.expect("a free place");
        let server = tokio::spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok(socket) = listener.accept().await {
                let answer = answer.clone();
                connections.spawn(async move {
                    let mut bytes = [0; 4_096];
                    while let Ok(read @ 1..) = socket.read(&mut bytes).await {
                        socket.write_all(answer.as_deref().unwrap_or(&bytes[..read])).await?;
                    }
                    socket.end()
                });
            }
        });
        let proxy = FaultProxy::start(&far.endpoint(), directory.path(), plan).await.expect("it starts");
        Self { proxy, server, _directory: directory }
    }

    async fn connect(&self) -> io::Result<Socket> {
        Address::of_endpoint(self.proxy.endpoint()).expect("its own").connect().await
    }

    async fn open(&self) -> Socket {
        self.connect().await.expect("it listens")
    }

    async fn until(&self, what: &str, holds: impl Fn(Seen) -> bool) {
        crate::wait_for(what, SOON, || holds(self.proxy.seen())).await;
    }
}

/// What comes back until so many bytes have, or the connection is over.
async fn back(socket: &Socket, most: usize) -> Vec<u8> {
    let mut bytes = vec![0; most];
    let mut got = 0;
    while got < most {
        let read = tokio::time::timeout(SOON, socket.read(&mut bytes[got..])).await.expect("it comes or ends");
        match read {
            Ok(read @ 1..) => got += read,
            Ok(0) | Err(_) => break,
        }
    }
    bytes.truncate(got);
    bytes
}

/// Whether the connection is over, and not only silent.
async fn is_over(socket: &Socket) -> bool {
    back(socket, 1).await.is_empty()
}

fn both(body: impl AsyncFn(bool)) {
    crate::block_on(async {
        body(true).await;
        body(false).await;
    });
}

#[test]
fn it_passes_everything_on_and_the_end_too() {
    both(async |unix| {
        let house = House::new(unix, Plan::PASS, None).await;
        let socket = house.open().await;
        let sent: Vec<u8> = (0..100_000_u32).map(|byte| (byte % 251) as u8).collect();
        let (written, got) = tokio::join!(
            async {
                socket.write_all(&sent).await?;
                socket.end()
            },
            back(&socket, sent.len() + 1)
        );
        written.expect("it is taken");
        assert!(got == sent, "{} bytes came back", got.len());
        house.until("the connection is over", |seen| seen.closed == 1).await;
        let seen = house.proxy.seen();
        assert_eq!((seen.connections, seen.cuts, seen.to_daemon, seen.to_client), (1, 0, 100_000, 100_000));
    });
}

#[test]
fn a_cut_comes_after_exactly_so_many_bytes() {
    both(async |unix| {
        for (direction, expected) in [(Direction::ToClient, 5), (Direction::ToDaemon, 5), (Direction::ToClient, 0)] {
            let house = House::new(unix, Plan::cut_after(direction, expected), None).await;
            let socket = house.open().await;
            socket.write_all(b"0123456789").await.expect("it is taken");
            let got = back(&socket, 10).await;
            // What was on its way when the other direction was cut may be lost with it.
            assert!(b"01234".starts_with(&got) && got.len() as u64 <= expected, "{got:?}");
            let seen = house.proxy.seen();
            let counted = if direction == Direction::ToClient { seen.to_client } else { seen.to_daemon };
            assert_eq!((counted, seen.cuts), (expected, 1));
        }
    });
}

#[test]
fn a_cut_of_one_connection_spares_the_next() {
    both(async |unix| {
        let house = House::new(unix, Plan::PASS, None).await;
        house.proxy.cut_once(CutAfter { direction: Direction::ToDaemon, bytes: 3 });
        let socket = house.open().await;
        socket.write_all(b"abcd").await.expect("it is taken");
        back(&socket, 4).await;
        house.until("the first is cut", |seen| seen.cuts == 1).await;
        assert!(!house.proxy.spare(), "it was used up");
        let socket = house.open().await;
        socket.write_all(b"abcd").await.expect("it is taken");
        assert_eq!(back(&socket, 4).await, b"abcd");
    });
}

#[test]
fn a_cut_on_command_ends_what_is_open_only() {
    both(async |unix| {
        let house = House::new(unix, Plan::PASS, None).await;
        let first = house.open().await;
        first.write_all(b"a").await.expect("it is taken");
        assert_eq!(back(&first, 1).await, b"a");
        house.proxy.cut();
        assert!(is_over(&first).await);
        let second = house.open().await;
        second.write_all(b"b").await.expect("it is taken");
        assert_eq!(back(&second, 1).await, b"b");
        assert_eq!(house.proxy.seen().cuts, 1);
    });
}

#[test]
fn connections_are_cut_when_they_are_old_or_idle() {
    both(async |unix| {
        for plan in [Plan::cut_every(Duration::from_millis(30)), Plan::cut_idle(Duration::from_millis(30))] {
            let house = House::new(unix, Plan::PASS, None).await;
            let socket = house.open().await;
            socket.write_all(b"a").await.expect("it is taken");
            assert_eq!(back(&socket, 1).await, b"a");
            house.proxy.set(plan);
            assert!(is_over(&socket).await, "{plan:?}");
            assert_eq!(house.proxy.seen().cuts, 1);
        }
    });
}

#[test]
fn what_is_halted_stays_open_and_silent_and_new_connections_work() {
    both(async |unix| {
        let house = House::new(unix, Plan::PASS, None).await;
        let first = house.open().await;
        first.write_all(b"a").await.expect("it is taken");
        assert_eq!(back(&first, 1).await, b"a");
        house.proxy.halt();
        first.write_all(b"b").await.expect("it is taken");
        let second = house.open().await;
        second.write_all(b"c").await.expect("it is taken");
        assert_eq!(back(&second, 1).await, b"c");
        // The second had its answer; the first has neither answer nor end.
        let mut nothing = [0; 1];
        let silent = futures_util::FutureExt::now_or_never(first.read(&mut nothing));
        assert!(silent.is_none(), "{silent:?}");
        assert_eq!(house.proxy.seen().to_daemon, 2, "the byte after the halt was passed on");
        house.proxy.cut();
        assert!(is_over(&first).await);
    });
}

#[test]
fn new_connections_are_refused_for_a_while() {
    both(async |unix| {
        let house = House::new(unix, Plan::PASS, None).await;
        let before = house.open().await;
        house.until("it is carried", |seen| seen.connections == 1).await;
        house.proxy.refuse().await;
        house.connect().await.expect_err("nobody listens");
        before.write_all(b"a").await.expect("it is taken");
        assert_eq!(back(&before, 1).await, b"a");
        house.proxy.accept().await;
        let after = house.open().await;
        after.write_all(b"b").await.expect("it is taken");
        assert_eq!(back(&after, 1).await, b"b");
    });
}

#[test]
fn delay_and_slowness_take_their_time() {
    both(async |unix| {
        for (plan, bytes, least) in [
            (Plan::delay(Duration::from_millis(50)), 1, Duration::from_millis(100)),
            (Plan::slow_client(10_000), 4_000, Duration::from_millis(300)),
        ] {
            let house = House::new(unix, plan, None).await;
            let socket = house.open().await;
            let begun = Instant::now();
            socket.write_all(&vec![7; bytes]).await.expect("it is taken");
            assert_eq!(back(&socket, bytes).await, vec![7; bytes]);
            assert!(begun.elapsed() >= least, "{plan:?} took only {:?}", begun.elapsed());
        }
    });
}

#[test]
fn a_reply_is_lost_after_it_was_made() {
    both(async |unix| {
        let mut reply = frame(SETTINGS, 0, 0, &[]);
        reply.extend(frame(HEADERS, 4 | END_STREAM, 1, b"made"));
        let mut request = PREFACE.to_vec();
        request.extend(frame(SETTINGS, 0, 0, &[]));
        request.extend(frame(HEADERS, 4 | END_STREAM, 1, b"asked"));
        let house = House::new(unix, Plan::PASS, Some(reply.clone())).await;
        house.proxy.lose_next_reply();
        let socket = house.open().await;
        socket.write_all(&request).await.expect("it is taken");
        assert!(is_over(&socket).await, "something came back");
        let seen = house.proxy.seen();
        assert_eq!((seen.calls, seen.lost_replies, seen.to_client), (1, 1, 0));
        assert_eq!(seen.to_daemon, request.len() as u64, "the request was done");
        // The next one is not lost.
        let socket = house.open().await;
        socket.write_all(&request).await.expect("it is taken");
        assert_eq!(back(&socket, reply.len()).await, reply);
    });
}
