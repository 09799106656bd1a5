//! One connection through the proxy: two pumps, and what ends them.

use std::{
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use tokio::{
    sync::watch,
    time::{Instant, sleep, sleep_until},
};

use super::{
    Away, Shared,
    frames::{self, Event, Frames},
    plan::Direction,
    socket::Socket,
};

/// What is read at once. A slow client gets it in smaller pieces.
const CHUNK_BYTES: usize = 16 * 1024;

/// Pieces a second for a slow client, so that it is slow all the time and not by turns.
const SLOW_PIECES_PER_SECOND: u32 = 20;

/// How long the reply that a plan loses is waited for: the streams that are opened once and stay have no end.
const LOST_WITHIN: Duration = Duration::from_millis(150);

/// Why a connection is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Over {
    /// One side is gone.
    Gone,
    /// By a fault.
    Cut,
}

/// One connection.
pub(super) struct Line {
    shared: Arc<Shared>,
    number: u64,
    client: Socket,
    daemon: Socket,
    /// The call whose reply is being lost; 0: none.
    losing: AtomicU32,
    /// By when a reply that is being lost must have come.
    lost_by: watch::Sender<Option<Instant>>,
    /// The stream of the newest call; 0: none.
    newest: AtomicU32,
    /// When a call moved last.
    moved: Mutex<Instant>,
}

impl Line {
    pub(super) fn new(shared: Arc<Shared>, number: u64, client: Socket, daemon: Socket) -> Self {
        let (losing, newest, lost_by) = (AtomicU32::new(0), AtomicU32::new(0), watch::Sender::new(None));
        Self { shared, number, client, daemon, losing, lost_by, newest, moved: Mutex::new(Instant::now()) }
    }

    /// Carries bytes until both sides have ended, one is gone, or a fault cuts it.
    pub(super) async fn carry(self) {
        let over = tokio::select! {
            biased;
            () = self.ordered_cut() => Err(Over::Cut),
            () = self.too_old() => Err(Over::Cut),
            () = self.too_idle() => Err(Over::Cut),
            () = self.lost() => Err(Over::Cut),
            both = async { tokio::try_join!(self.pump(Direction::ToDaemon), self.pump(Direction::ToClient)) } => both,
        };
        if over == Err(Over::Cut) {
            self.shared.see(|seen| seen.cuts += 1);
        }
        self.client.reset();
        self.daemon.reset();
    }

    async fn ordered_cut(&self) {
        let mut orders = self.shared.orders.subscribe();
        if orders.wait_for(|orders| self.number < orders.cut_below).await.is_err() {
            // The proxy is gone, and this with it.
        }
    }

    async fn too_old(&self) {
        let opened = Instant::now();
        self.shared.when_due(|plan| plan.cut_every.map(|age| opened + age)).await;
    }

    async fn too_idle(&self) {
        self.shared.when_due(|plan| plan.cut_idle.map(|silence| *self.moved() + silence)).await;
    }

    async fn lost(&self) {
        let mut lost_by = self.lost_by.subscribe();
        let by = lost_by.wait_for(Option::is_some).await.ok().and_then(|by| *by);
        match by {
            Some(by) => sleep_until(by).await,
            // The sender is in `self`.
            None => std::future::pending().await,
        }
        self.shared.see(|seen| seen.lost_replies += 1);
    }

    fn moved(&self) -> std::sync::MutexGuard<'_, Instant> {
        self.moved.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for as long as the connection is half-open: for ever.
    async fn halted(&self) {
        let mut orders = self.shared.orders.subscribe();
        if orders.wait_for(|orders| self.number < orders.halted_below).await.is_err() {
            // As above.
        }
    }

    /// Waits for the order to send the client away; the last stream that is said to have been seen.
    async fn sent_away(&self) -> u32 {
        let mut orders = self.shared.orders.subscribe();
        match orders.wait_for(|orders| self.number < orders.away_below).await.map(|orders| orders.away) {
            Ok(Away::AfterTheseCalls) => self.newest.load(Ordering::Acquire),
            Ok(Away::AsIfNothingWasSeen) => 0,
            // As above.
            Err(_gone) => std::future::pending().await,
        }
    }

    async fn pump(&self, direction: Direction) -> Result<(), Over> {
        let (from, to, mut frames) = match direction {
            Direction::ToDaemon => (&self.client, &self.daemon, Frames::of_client()),
            Direction::ToClient => (&self.daemon, &self.client, Frames::of_server()),
        };
        let mut buffer = vec![0; CHUNK_BYTES];
        let mut passed = 0_u64;
        let mut away = false;
        loop {
            let rate = self.shared.plan().client_bytes_per_second.filter(|_| direction == Direction::ToClient);
            let most = rate.map_or(CHUNK_BYTES, |rate| {
                let piece = (rate / SLOW_PIECES_PER_SECOND).max(1);
                usize::try_from(piece).unwrap_or(CHUNK_BYTES).min(CHUNK_BYTES)
            });
            let read = tokio::select! {
                biased;
                () = self.halted() => std::future::pending().await,
                last = self.sent_away(), if direction == Direction::ToClient && !away && frames.between() => {
                    away = true;
                    to.write_all(&frames::go_away(last)).await.map_err(|_gone| Over::Gone)?;
                    self.shared.see(|seen| seen.goaways += 1);
                    continue;
                }
                read = from.read(&mut buffer[..most]) => read.map_err(|_gone| Over::Gone)?,
            };
            if read == 0 {
                return to.end().map_err(|_gone| Over::Gone);
            }
            if let Some(delay) = self.shared.plan().delay {
                tokio::select! {
                    biased;
                    () = self.halted() => std::future::pending().await,
                    () = sleep(delay) => {}
                }
            }
            let last = self.shared.cut_within(direction, passed, read);
            let chunk = &buffer[..last.unwrap_or(read)];
            let mut lost = false;
            frames.look(chunk, |event| lost |= self.note(direction, event));
            // From the call on whose reply is lost nothing comes back: the daemon's word that it is over ends the connection.
            let swallowed = direction == Direction::ToClient && self.losing.load(Ordering::Acquire) != 0;
            if !swallowed {
                to.write_all(chunk).await.map_err(|_gone| Over::Gone)?;
                passed += chunk.len() as u64;
                self.shared.see(|seen| seen.pass(direction, chunk.len()));
            }
            if lost || last.is_some() {
                return Err(Over::Cut);
            }
            if let Some(rate) = rate {
                sleep(Duration::from_secs(1).mul_f64(read as f64 / f64::from(rate))).await;
            }
        }
    }

    /// Notes what has begun in the bytes; whether it was the end of a reply that is lost.
    fn note(&self, direction: Direction, event: Event) -> bool {
        let Event::Call { stream, begins, ends, length } = event else {
            self.shared.see(|seen| match event {
                Event::Message(bytes) if direction == Direction::ToClient => {
                    seen.largest_message = seen.largest_message.max(bytes);
                    seen.messages += 1;
                }
                Event::Ping if direction == Direction::ToDaemon => seen.client_pings += 1,
                Event::GoAway if direction == Direction::ToClient => seen.goaways += 1,
                Event::Message(_) | Event::Ping | Event::GoAway | Event::Call { .. } => {}
            });
            return false;
        };
        *self.moved() = Instant::now();
        match direction {
            Direction::ToDaemon => {
                if begins {
                    self.newest.fetch_max(stream, Ordering::AcqRel);
                    let mut calls = 0;
                    self.shared.see(|seen| {
                        seen.calls += 1;
                        calls = seen.calls;
                    });
                    let planned = self.shared.plan().loses(calls);
                    if self.shared.takes_loss() || planned {
                        self.losing.store(stream, Ordering::Release);
                    }
                    if planned {
                        self.lost_by.send_replace(Some(Instant::now() + LOST_WITHIN));
                    }
                }
                false
            }
            Direction::ToClient => {
                self.shared.see(|seen| seen.largest_frame = seen.largest_frame.max(length));
                let lost = ends && self.losing.load(Ordering::Acquire) == stream;
                if lost {
                    self.shared.see(|seen| seen.lost_replies += 1);
                }
                lost
            }
        }
    }
}

impl Shared {
    /// Returns when the time that the plan gives has come. The plan may change, and the time move, meanwhile.
    async fn when_due(&self, due: impl Fn(super::Plan) -> Option<Instant>) {
        let mut orders = self.orders.subscribe();
        loop {
            let plan = orders.borrow_and_update().plan;
            let due = due(plan);
            if due.is_some_and(|due| due <= Instant::now()) {
                return;
            }
            let wait = async {
                match due {
                    Some(due) => sleep_until(due).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = wait => {}
                changed = orders.changed() => if changed.is_err() { return },
            }
        }
    }
}
