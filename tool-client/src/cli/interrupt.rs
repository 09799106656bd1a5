//! Ctrl-C and SIGTERM: the first asks, the second insists.

use std::{
    future::Future,
    sync::{
        Arc,
        atomic::{AtomicU8, Ordering},
    },
};

use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use super::Failure;

/// Listens for the signals that people and supervisors end a program with.
#[derive(Debug, Clone)]
pub(super) struct Interrupt {
    token: CancellationToken,
    code: Arc<AtomicU8>,
}

impl Interrupt {
    /// From now on a first signal raises the token, and a second one ends the process at once.
    pub(super) fn listen() -> Result<Self, Failure> {
        let listening =
            |kind| signal(kind).map_err(|error| Failure::Own(format!("cannot listen for signals: {error}")));
        let mut interrupt = listening(SignalKind::interrupt())?;
        let mut terminate = listening(SignalKind::terminate())?;
        let this = Self { token: CancellationToken::new(), code: Arc::new(AtomicU8::new(0)) };
        let heard = this.clone();
        tokio::spawn(async move {
            loop {
                let code = tokio::select! {
                    Some(()) = interrupt.recv() => 128 + 2,
                    Some(()) = terminate.recv() => 128 + 15,
                    else => return,
                };
                if heard.token.is_cancelled() {
                    leave(code);
                }
                heard.code.store(code, Ordering::Release);
                heard.token.cancel();
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

#[expect(clippy::disallowed_methods, reason = "the second Ctrl-C must work whatever hangs; this is the command line")]
fn leave(code: u8) -> ! {
    std::process::exit(i32::from(code))
}
