//! Ctrl-C, SIGTERM and SIGHUP (the terminal is gone): the first asks, a later one insists.

use std::{
    future::Future,
    sync::{
        Arc,
        atomic::{AtomicU8, Ordering},
    },
    time::Duration,
};

use tokio::{
    signal::unix::{Signal, SignalKind, signal},
    time::Instant,
};
use tokio_util::sync::CancellationToken;

use super::Failure;

/// Signals so close behind the first are the same wish: `timeout`, a terminal that goes away and a service manager send several at
/// once, to a process and to its group. A person who insists takes longer.
const ONE_WISH: Duration = Duration::from_secs(1);

/// Listens for the signals that people and supervisors end a program with.
#[derive(Debug, Clone)]
pub(super) struct Interrupt {
    token: CancellationToken,
    code: Arc<AtomicU8>,
}

impl Interrupt {
    /// From now on a first signal raises the token, and one that comes later than [`ONE_WISH`] after it ends the process at once.
    /// Those between change nothing: what the first one asked for goes on, within its own limits.
    pub(super) fn listen() -> Result<Self, Failure> {
        let listening =
            |kind| signal(kind).map_err(|error| Failure::Own(format!("cannot listen for signals: {error}")));
        let mut interrupt = listening(SignalKind::interrupt())?;
        let mut terminate = listening(SignalKind::terminate())?;
        // Who starts a program with `nohup` wants it to go on without its terminal.
        let mut hangup = if hangups_are_ignored() { None } else { Some(listening(SignalKind::hangup())?) };
        let this = Self { token: CancellationToken::new(), code: Arc::new(AtomicU8::new(0)) };
        let heard = this.clone();
        tokio::spawn(async move {
            let mut first = None;
            loop {
                let code = tokio::select! {
                    Some(()) = interrupt.recv() => 128 + 2,
                    Some(()) = terminate.recv() => 128 + 15,
                    Some(()) = next(&mut hangup) => 128 + 1,
                    else => return,
                };
                match first {
                    None => {
                        first = Some(Instant::now());
                        heard.code.store(code, Ordering::Release);
                        heard.token.cancel();
                    }
                    Some(first) if first.elapsed() < ONE_WISH => {}
                    Some(_) => leave(code),
                }
            }
        });
        Ok(this)
    }

    /// Raised by the first signal.
    pub(super) fn token(&self) -> &CancellationToken {
        &self.token
    }

    /// The exit code of the first signal, if there was one.
    pub(super) fn code(&self) -> Option<u8> {
        Some(self.code.load(Ordering::Acquire)).filter(|code| *code != 0)
    }

    /// Does something that a signal may simply leave undone.
    pub(super) async fn or<T>(&self, doing: impl Future<Output = Result<T, Failure>>) -> Result<T, Failure> {
        tokio::select! {
            biased;
            () = self.token.cancelled() => Err(Failure::Interrupted(self.code().unwrap_or(128 + 2))),
            done = doing => done,
        }
    }
}

async fn next(signal: &mut Option<Signal>) -> Option<()> {
    match signal {
        Some(signal) => signal.recv().await,
        None => std::future::pending().await,
    }
}

/// Whether this process was started with SIGHUP ignored.
fn hangups_are_ignored() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    ignored.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).is_some_and(|mask| mask & 1 != 0)
}

#[expect(clippy::disallowed_methods, reason = "a later Ctrl-C must work whatever hangs; this is the command line")]
fn leave(code: u8) -> ! {
    std::process::exit(i32::from(code))
}
