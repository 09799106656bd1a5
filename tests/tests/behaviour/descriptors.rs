//! A command gets three descriptors and clean signals, and nothing else of the executor (rows P8, P10, P17).

use std::{
    net::{Ipv4Addr, TcpListener},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
};

use executor_tests::{Backend, Setup, World, every_backend, run};
use futures_util::{StreamExt, stream};
use nix::{fcntl::OFlag, sys::stat::Mode};

/// What the shell sees when it looks: its three, and the directory that it looks through.
const THREE: &str = "/proc/self/fd/0 /proc/self/fd/1 /proc/self/fd/2 /proc/self/fd/3\n";

every_backend!(p08_only_the_three_are_open);
async fn p08_only_the_three_are_open(world: &World) {
    assert_eq!(world.bash("ls /proc/self/fd").await, "0\n1\n2\n3\n");
    assert_eq!(world.bash("echo /proc/self/fd/*").await, THREE);
    let id = world.background(&format!("ls /proc/self/fd; exec {}", world.sleep(300))).await;
    let text = executor_tests::wait_until("it prints", std::time::Duration::from_secs(10), async || {
        let text = world.output(&id).await;
        (!text.starts_with("(no new output)")).then_some(text)
    })
    .await;
    assert_eq!(text, "0\n1\n2\n3\n\n[status: running]");
    assert_eq!(world.kill(&id).await, format!("killed background task {id}"));
}

#[test]
fn p08_a_task_does_not_hold_the_daemons_port() {
    let free = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).and_then(|listener| listener.local_addr());
    let port = free.expect("there are free ports").port();
    let setup = Setup { listen: Some(format!("tcp:127.0.0.1:{port}")), ..Setup::default() };
    for _ in 0..2 {
        run(Backend::Tcp, setup.clone(), async |world: &World| {
            let id = world.background(&format!("setsid {} & {}", world.sleep(600), world.sleep(600))).await;
            assert_eq!(world.output(&id).await, "(no new output)\n[status: running]");
        });
    }
}

/// Spawns, and how many of them at the same time.
const SPAWNS: usize = 5_000;
const AT_ONCE: usize = 8;

every_backend!(p10_no_descriptor_leaks_into_racing_spawns
    with Setup { max_output_bytes: 1_000, ..Setup::default() });
async fn p10_no_descriptor_leaks_into_racing_spawns(world: &World) {
    // Where the engine is in this process, this is a host program that opens files without a care.
    let opener = Opener::start();
    // And these make the executor open spill files meanwhile.
    let spilling = "for i in {1..3}; do head -c 2000 /dev/zero; head -c 2000 /dev/zero >&2; done; echo /proc/self/fd/*";
    let mut spawns = stream::iter(0..SPAWNS)
        .map(|index| async move {
            let spills = index % 20 == 0;
            (spills, world.bash(if spills { spilling } else { "echo /proc/self/fd/*" }).await)
        })
        .buffer_unordered(AT_ONCE);
    while let Some((spills, text)) = spawns.next().await {
        let clean = if spills { text.contains(THREE) } else { text == THREE };
        assert!(clean, "{}", text.replace('\0', ""));
    }
    assert!(opener.opened() > 0, "nothing raced");
}

/// A thread that opens files which children inherit, until it is dropped.
struct Opener {
    shared: Arc<(AtomicBool, AtomicU64)>,
    thread: Option<thread::JoinHandle<()>>,
}

impl Opener {
    fn start() -> Self {
        let shared = Arc::new((AtomicBool::new(false), AtomicU64::new(0)));
        let (ends, opened) = (Arc::clone(&shared), Arc::clone(&shared));
        let thread = thread::spawn(move || {
            while !ends.0.load(Ordering::Relaxed) {
                let file = nix::fcntl::open("/dev/null", OFlag::O_RDONLY, Mode::empty());
                drop(file.expect("it can be opened"));
                opened.1.fetch_add(1, Ordering::Relaxed);
            }
        });
        Self { shared, thread: Some(thread) }
    }

    fn opened(&self) -> u64 {
        self.shared.1.load(Ordering::Relaxed)
    }
}

impl Drop for Opener {
    fn drop(&mut self) {
        self.shared.0.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ended = thread.join();
        }
    }
}

every_backend!(p17_signals_are_at_their_defaults_and_none_is_blocked);
async fn p17_signals_are_at_their_defaults_and_none_is_blocked(world: &World) {
    let status = world.bash("exec cat /proc/self/status").await;
    let mask = |name| status.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
    for name in ["SigBlk:", "SigIgn:", "SigCgt:"] {
        assert_eq!(mask(name), Some("0000000000000000"), "{name}");
    }
    assert_eq!(world.bash("trap; kill -INT $$").await, "(no output)\n[killed by signal: SIGINT]");
    assert_eq!(world.bash("yes | head -1; echo ${PIPESTATUS[@]}").await, "y\n141 0\n");
    let restored = "python3 -c 'import signal; signal.signal(signal.SIGPIPE, signal.SIG_DFL); print(signal.getsignal(signal.SIGINT))'";
    assert!(world.bash(restored).await.contains("default_int_handler"), "python found SIGINT ignored");
}
