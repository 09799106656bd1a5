//! What behaviour tests stand on: a fresh executor per test, the same body for every backend, and the recorded scenarios.
//!
//! A test is an async function over a [`World`], and one line makes it a test on every backend:
//!
//! ```ignore
//! every_backend!(a_command_runs);
//! async fn a_command_runs(world: &World) {
//!     assert_eq!(world.bash("echo hi").await, "hi\n");
//! }
//! ```
//!
//! `every_backend!(name with Setup { grace_ms: 3_000, ..Setup::default() })` configures the executor; `every_daemon!(name)` and
//! `on_backend!(Backend::Unix, name)` are for what is about the daemon. The executor must have ended well, and
//! nothing of its commands may be alive, when the body is done.
//!
//! - [`World`] has the tools' texts ([`World::bash`], [`World::background`], [`World::output`], [`World::kill`]), the
//!   executor under them, the daemon, and marks: put [`World::tag`] or [`World::sleep`] into a command, and
//!   [`World::survivors`] finds whatever of it is alive.
//! - [`wait_for`] and [`wait_until`] wait for conditions; nothing sleeps in place of one. [`Stopwatch`] checks bounds and
//!   grants thrice the time on a busy machine.
//! - `EXECUTOR_TEST_FAULTS` (`lost-replies`, `delays`, `slow-reader`) puts a proxy before every daemon whose test has none.
//! - [`scenario`] plays recorded cases; the program `scenarios` does it from the command line.

use std::{
    fmt::Display,
    io::{self, Write},
    panic::AssertUnwindSafe,
    time::Duration,
};

use futures_util::FutureExt;

mod backend;
pub mod binaries;
pub mod certificates;
mod daemon;
mod elsewhere;
pub mod faults;
mod mailbox;
pub mod processes;
pub mod scenario;
mod wait;
mod world;

pub use backend::{Backend, Setup};
pub use daemon::{Daemon, Dies};
pub use elsewhere::Elsewhere;
use faults::Plan;
pub use mailbox::Mailbox;
pub use wait::{Stopwatch, wait_for, wait_until};
pub use world::{SESSION, World};

/// No body takes longer: it hangs.
const HANGS: Duration = Duration::from_secs(300);

/// Makes an async function over `&World` a test on every backend.
#[macro_export]
macro_rules! every_backend {
    ($name:ident) => {
        $crate::every_backend!($name with $crate::Setup::default());
    };
    ($name:ident with $setup:expr) => {
        mod $name {
            #[allow(unused_imports)]
            use super::*;

            #[test]
            fn in_process() {
                $crate::run($crate::Backend::InProcess, $setup, super::$name);
            }

            #[test]
            fn unix() {
                $crate::run($crate::Backend::Unix, $setup, super::$name);
            }

            #[test]
            fn tcp() {
                $crate::run($crate::Backend::Tcp, $setup, super::$name);
            }

            #[test]
            fn cut() {
                $crate::run_cut($setup, super::$name);
            }
        }
    };
}

/// Makes an async function over `&World` a test on both kinds of daemon.
#[macro_export]
macro_rules! every_daemon {
    ($name:ident) => {
        $crate::every_daemon!($name with $crate::Setup::default());
    };
    ($name:ident with $setup:expr) => {
        mod $name {
            #[allow(unused_imports)]
            use super::*;

            #[test]
            fn unix() {
                $crate::run($crate::Backend::Unix, $setup, super::$name);
            }

            #[test]
            fn tcp() {
                $crate::run($crate::Backend::Tcp, $setup, super::$name);
            }

            #[test]
            fn cut() {
                $crate::run_cut($setup, super::$name);
            }
        }
    };
}

/// Makes an async function over `&World` a test on one backend.
#[macro_export]
macro_rules! on_backend {
    ($backend:expr, $name:ident) => {
        $crate::on_backend!($backend, $name with $crate::Setup::default());
    };
    ($backend:expr, $name:ident with $setup:expr) => {
        mod $name {
            #[allow(unused_imports)]
            use super::*;

            #[test]
            fn once() {
                $crate::run($backend, $setup, super::$name);
            }
        }
    };
}

/// Runs a body in a fresh world, which is ended whatever happens.
///
/// # Panics
/// When the body does, or hangs, or the executor does not start or end well.
pub fn run(backend: Backend, mut setup: Setup, body: impl AsyncFnOnce(&World)) {
    if backend != Backend::InProcess && setup.faults.is_none() {
        setup.faults = asked_for();
        if let (Some(_), Some(reason)) = (&setup.faults, setup.spared) {
            return tell(format_args!("not with faults: {reason}"));
        }
    }
    block_on(async {
        let world = World::start(backend, setup).await.expect("the executor starts");
        let played = AssertUnwindSafe(tokio::time::timeout(HANGS, body(&world))).catch_unwind().await;
        match played {
            Ok(Ok(())) => world.finish().await.expect("the executor ends well"),
            Ok(Err(_)) => panic!("the body hangs; alive: {:#?}", world.survivors()),
            Err(panic) => std::panic::resume_unwind(panic),
        }
    });
}

/// Runs a body over a Unix socket whose connections are cut every 100 ms: nothing of it shows.
///
/// # Panics
/// As [`run`].
pub fn run_cut(mut setup: Setup, body: impl AsyncFnOnce(&World)) {
    if let Some(reason) = setup.spared.or(setup.faults.as_ref().map(|_| "it has faults of its own")) {
        return tell(format_args!("not over cut connections: {reason}"));
    }
    setup.faults = Some(CUTS);
    run(Backend::Unix, setup, async |world: &World| {
        body(world).await;
        // One that stays open is old enough before long, also where the body was over sooner.
        let seen = || world.faults().seen();
        wait_for("a connection is cut, or all are closed", HANGS, || {
            seen().cuts > 0 || seen().closed == seen().connections
        })
        .await;
        if seen().cuts == 0 {
            tell("not cut: its connections were closed before they were old enough");
        }
    });
}

/// Cuts each connection at this age.
const CUTS: Plan = Plan { cut_every: Some(Duration::from_millis(100)), ..Plan::PASS };

/// The faults that `EXECUTOR_TEST_FAULTS` names for every daemon whose test has none of its own.
fn asked_for() -> Option<Plan> {
    let name = std::env::var("EXECUTOR_TEST_FAULTS").ok()?;
    Some(match name.as_str() {
        "lost-replies" => Plan::lose_every(3),
        "delays" => Plan::delay(Duration::from_millis(5)),
        "slow-reader" => Plan::slow_client(1_000_000),
        _ => panic!("EXECUTOR_TEST_FAULTS={name}: lost-replies, delays or slow-reader"),
    })
}

/// Says something to whoever runs the tests, past what captures the output of tests that pass.
pub fn tell(what: impl Display) {
    // Nobody reads it: there is nobody to tell.
    let _ = writeln!(io::stderr(), "{what}");
}

/// Runs a future on a runtime like the one that a harness has.
///
/// # Panics
/// When there can be no runtime.
pub fn block_on<T>(future: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    runtime.expect("a runtime can be made").block_on(future)
}

/// Bytes that nobody else has.
fn random<const N: usize>() -> anyhow::Result<[u8; N]> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).map_err(|error| anyhow::anyhow!("the kernel gives no random bytes: {error}"))?;
    Ok(bytes)
}
