//! The pump: one task per stream that moves what the command writes from its pipe into the ring.
//!
//! It waits for the pipe, where everything in the ring is still needed for the spill, and where the tenant has a rate until what
//! was moved is paid for. It never waits for a reader. It
//! ends when no writer is left: a process that outlives the shell goes on writing to the same stream.

use std::{
    io,
    os::fd::{AsFd, OwnedFd},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use tokio::{
    io::unix::{AsyncFd, AsyncFdReadyGuard},
    sync::{Notify, watch},
    task, time,
};

use super::{
    Progress, Storage, Stream, StreamFiles,
    growth::Growth,
    ring::{Moved, Ring, StreamFile},
    spill::Demand,
    tail,
};
use crate::keeper::page::bytes_waiting;

/// Bytes moved by one call, so that whoever waits for the ring's gate waits for some 20 µs.
pub(super) const STEP_BYTES: u64 = 256 * 1024;

/// Bytes after which other tasks get their turn on this thread.
const TURN_BYTES: u64 = 1024 * 1024;

/// How long a spill may stand still while a command waits for it.
const STALL: Duration = Duration::from_secs(5);

/// How long a pipe that was grown for a flood stays so without a byte.
const CALM: Duration = Duration::from_secs(1);

/// How long bytes in a ring file that outlives the keeper wait for a proof of them.
const PROVE_AFTER: Duration = Duration::from_millis(500);

/// Pause after an error of the kernel (no memory for the ring's pages, say) before bytes are moved again.
const AFTER_ERROR: Duration = Duration::from_millis(100);

/// The number that meets every request: the end.
const ALL_REQUESTS: u64 = u64::MAX;

/// What others ask of a pump.
#[derive(Debug, Default)]
pub(super) struct PumpControl {
    /// Number of the latest request to empty the pipe.
    asked: AtomicU64,
    wake: Notify,
    /// Number of the latest such request that has been met.
    emptied: watch::Sender<u64>,
    /// The pump waits for the spill.
    blocked: AtomicBool,
}

impl PumpControl {
    /// Resolves when everything that was in the pipe at the call has been moved. Cancel-safe.
    pub(super) fn empty(&self) -> impl Future<Output = ()> + Send + use<> {
        let request = self.asked.fetch_add(1, Ordering::SeqCst) + 1;
        self.wake.notify_one();
        let mut emptied = self.emptied.subscribe();
        async move {
            // The sender lives in the stream, and so does whoever waits here.
            let _ = emptied.wait_for(|done| *done >= request).await;
        }
    }

    /// Whether the pump waits for the spill just now.
    pub(super) fn blocked(&self) -> bool {
        self.blocked.load(Ordering::SeqCst)
    }
}

/// The task's own state.
pub(super) struct Pump {
    stream: Arc<Stream>,
    /// From the first byte on.
    ring: Option<Arc<Ring>>,
    /// Most bytes that the pipe can have held since it was made.
    pipe_bytes: u64,
    growth: Growth,
    demand: Demand,
    files: Arc<dyn StreamFiles>,
    /// The request that is being met, and the bytes moved since it was seen.
    request: (u64, u64),
    /// When bytes that have come are to be proven.
    prove_at: Option<time::Instant>,
}

impl Pump {
    /// Starts the task. Inside a tokio runtime. With a ring it goes on there, and with the bytes that a spill holds already
    /// the spill does, too.
    ///
    /// # Errors
    /// When the runtime cannot watch the pipe.
    pub(super) fn spawn(
        stream: Arc<Stream>,
        pipe: OwnedFd,
        files: Arc<dyn StreamFiles>,
        ring: Option<Arc<Ring>>,
        spilled: Option<u64>,
    ) -> io::Result<()> {
        let growth = Growth::of(&pipe)?;
        #[expect(deprecated, reason = "its fault concerns types that do not own their descriptor; an OwnedFd does")]
        let pipe = AsyncFd::new(pipe)?;
        let demand = stream.spill.demand();
        let pipe_bytes = growth.pipe_bytes();
        let pump = Self { stream, ring, pipe_bytes, growth, demand, files, request: (0, 0), prove_at: None };
        match spilled {
            Some(from) => pump.spill(from),
            None => pump.spill_if_needed(),
        }
        task::spawn(pump.run(pipe));
        Ok(())
    }

    /// Moves bytes until no writer is left.
    async fn run(mut self, pipe: AsyncFd<OwnedFd>) {
        // Only an empty pipe is waited for: the kernel reports each filling once, and forgets it where somebody has taken the
        // bytes before it was asked.
        let mut readiness: Option<AsyncFdReadyGuard<'_, OwnedFd>> = None;
        let mut turn = 0;
        loop {
            let asked = self.stream.control.asked.load(Ordering::SeqCst);
            if asked > self.request.0 {
                self.request = (asked, 0);
            }
            match self.step(&pipe).await {
                Ok(Moved::Bytes(moved)) => {
                    self.stream.refused.store(0, Ordering::Release);
                    self.moved(moved);
                    self.grow_while_flooded(&pipe, moved);
                    turn += moved;
                    self.pace(moved).await;
                }
                Ok(Moved::Nothing) => {
                    if let Some(mut readiness) = readiness.take() {
                        readiness.clear_ready();
                    }
                    self.met();
                    // An error: the runtime ends, and everything with it.
                    let Ok(now) = self.wait(&pipe).await else { return };
                    readiness = now;
                    turn = 0;
                }
                Ok(Moved::NoRoom) => self.wait_for_spill().await,
                Ok(Moved::End) => break,
                Err(error) => {
                    tracing::error!(%error, stream = self.stream.options.name.as_str(), "output cannot be moved");
                    // Some at least, or nothing would have been tried.
                    let waiting = bytes_waiting(pipe.as_fd()).unwrap_or(1).max(1);
                    self.stream.refused.store(waiting, Ordering::Release);
                    time::sleep(AFTER_ERROR).await;
                }
            }
            if turn >= TURN_BYTES {
                turn = 0;
                task::yield_now().await;
            }
        }
        self.stream.progress.send_modify(|progress| progress.closed = true);
        self.stream.compact_if_asked();
        self.stream.control.emptied.send_replace(ALL_REQUESTS);
    }

    async fn step(&mut self, pipe: &AsyncFd<OwnedFd>) -> io::Result<Moved> {
        let ring = match &self.ring {
            Some(ring) => Arc::clone(ring),
            None => match look(pipe)? {
                Waiting::Bytes => self.make_ring().await?,
                Waiting::Nothing => return Ok(Moved::Nothing),
                Waiting::End => return Ok(Moved::End),
            },
        };
        let tail_from = ring.total().saturating_sub(tail::kept_bytes(self.stream.options.tail_bytes));
        let keep_from = self.demand.needed_from().map_or(tail_from, |from| from.min(tail_from));
        let step_bytes = self.stream.options.rate.as_ref().map_or(STEP_BYTES, |rate| rate.step_bytes().min(STEP_BYTES));
        match ring.advance(pipe.as_fd(), keep_from, step_bytes) {
            Err(error) if ring.outlives_keeper() => {
                let copy = ring.in_memory()?;
                self.files.hold(&copy.descriptors()).await?;
                ring.move_to(copy)?;
                let stream = self.stream.options.name.as_str();
                tracing::warn!(%error, stream, "a ring file fails: output goes on in memory");
                ring.advance(pipe.as_fd(), keep_from, step_bytes)
            }
            moved => moved,
        }
    }

    async fn make_ring(&mut self) -> io::Result<Arc<Ring>> {
        let ring_bytes = self.stream.options.ring_bytes;
        let file = match self.files.ring(ring_bytes).await {
            Some(file) => StreamFile::with_ring(file)?,
            None => StreamFile::in_memory(ring_bytes)?,
        };
        // Held elsewhere before a byte is in it, so that no byte is only here.
        self.files.hold(&file.descriptors()).await?;
        let ring = Arc::new(Ring::open(file, ring_bytes)?);
        *self.stream.storage() = Storage::Ring(Arc::clone(&ring));
        Ok(Arc::clone(self.ring.insert(ring)))
    }

    fn moved(&mut self, moved: u64) {
        let total = self.ring.as_ref().map_or(0, |ring| ring.total());
        self.spill_if_needed();
        self.stream.progress.send_replace(Progress { total, closed: false });
        self.request.1 += moved;
        self.prove_if_due();
        // All that the pipe can have held at the request has come through, though it is full again.
        if self.request.1 >= self.pipe_bytes {
            self.met();
        }
    }

    fn spill_if_needed(&self) {
        let total = self.ring.as_ref().map_or(0, |ring| ring.total());
        if total > self.stream.options.tail_bytes && self.stream.spill.begin() {
            self.spill(0);
        }
    }

    fn spill(&self, from: u64) {
        let Some(ring) = self.ring.clone() else { return };
        let (stream, files) = (Arc::clone(&self.stream), Arc::clone(&self.files));
        task::spawn(async move {
            stream.spill.write(ring, stream.subscribe(), &*files, from).await;
            stream.compact_if_asked();
        });
    }

    /// Bytes have come, or have waited for their proof.
    fn prove_if_due(&mut self) {
        let Some(ring) = self.ring.as_ref().filter(|ring| ring.outlives_keeper()) else {
            self.prove_at = None;
            return;
        };
        let now = time::Instant::now();
        if *self.prove_at.get_or_insert(now + PROVE_AFTER) > now {
            return;
        }
        self.prove_at = None;
        if let Err(error) = ring.prove(tail::kept_bytes(self.stream.options.tail_bytes)) {
            tracing::debug!(%error, "a ring file cannot be read");
        }
    }

    /// Waits until what was moved is paid for, where the tenant has a rate: the command waits in its pipe then, as for a slow
    /// terminal, and nothing is dropped. Whoever wants the pipe to be empty does not wait.
    async fn pace(&mut self, moved: u64) {
        let Some(rate) = self.stream.options.rate.clone() else { return };
        let until = time::Instant::now() + rate.spend(moved, Instant::now());
        while !self.asked() && time::Instant::now() < until {
            let step = self.prove_at.map_or(until, |prove_at| prove_at.min(until));
            tokio::select! {
                () = time::sleep_until(step) => self.prove_if_due(),
                () = self.stream.control.wake.notified() => {}
            }
        }
    }

    /// Whether somebody waits for the pipe to be empty.
    fn asked(&self) -> bool {
        *self.stream.control.emptied.borrow() < self.stream.control.asked.load(Ordering::SeqCst)
    }

    fn met(&self) {
        let request = self.request.0;
        self.stream.control.emptied.send_if_modified(|done| {
            let new = *done < request;
            *done = request.max(*done);
            new
        });
    }

    /// Returns when the spill has moved on, or has been given up.
    async fn wait_for_spill(&mut self) {
        self.stream.control.blocked.store(true, Ordering::SeqCst);
        if time::timeout(STALL, self.demand.changed()).await.is_err() {
            tracing::warn!(path = ?self.stream.spill.path(), "a spill stands still and is given up");
            self.stream.spill.give_up();
        }
        self.stream.control.blocked.store(false, Ordering::SeqCst);
    }

    /// Waits until the pipe may hold something, or somebody wants to know that it does not.
    async fn wait<'p>(&mut self, pipe: &'p AsyncFd<OwnedFd>) -> io::Result<Option<AsyncFdReadyGuard<'p, OwnedFd>>> {
        loop {
            let calm = self.growth.is_grown().then(|| time::Instant::now() + CALM);
            let Some(until) = calm.into_iter().chain(self.prove_at).min() else {
                return ready(pipe, &self.stream.control).await;
            };
            if let Ok(ready) = time::timeout_at(until, ready(pipe, &self.stream.control)).await {
                return ready;
            }
            if calm == Some(until) {
                self.growth.undo(pipe);
            }
            if self.prove_at == Some(until) {
                self.prove_if_due();
            }
        }
    }

    fn grow_while_flooded(&mut self, pipe: &AsyncFd<OwnedFd>, moved: u64) {
        if let Some(bytes) = self.growth.seen(pipe, moved) {
            // Not less after it has shrunk again: more bytes than needed then meet a request, never fewer.
            self.pipe_bytes = self.pipe_bytes.max(bytes);
        }
    }
}

/// What a pipe holds.
enum Waiting {
    Bytes,
    Nothing,
    /// And no writer is left.
    End,
}

/// Looks without taking anything.
fn look(pipe: &AsyncFd<OwnedFd>) -> io::Result<Waiting> {
    let mut polled = [PollFd::new(pipe.as_fd(), PollFlags::POLLIN)];
    poll(&mut polled, PollTimeout::ZERO)?;
    let [pipe] = polled;
    let events = pipe.revents().unwrap_or(PollFlags::empty());
    Ok(if events.contains(PollFlags::POLLIN) {
        Waiting::Bytes
    } else if events.contains(PollFlags::POLLHUP) {
        Waiting::End
    } else {
        Waiting::Nothing
    })
}

async fn ready<'p>(
    pipe: &'p AsyncFd<OwnedFd>,
    control: &PumpControl,
) -> io::Result<Option<AsyncFdReadyGuard<'p, OwnedFd>>> {
    tokio::select! {
        guard = pipe.readable() => guard.map(Some),
        () = control.wake.notified() => Ok(None),
    }
}
