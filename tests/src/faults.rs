//! A proxy between a client and a daemon that does to their connections what networks do.
//!
//! What happens to every connection is a [`Plan`]; what happens once is an order to the proxy. A test gives orders when its
//! conditions hold and looks at what the proxy has [`Seen`]; only a plan has times of its own.
//!
//! ```text
//!             accept                 either side ends, or is gone
//!   client ──────────► carried ──────────────────────────────────► closed
//!                       │   │ cut: a byte count, an age, idleness, an order, a reply that is lost
//!                       │   └────────────────────────────────────► reset, both sides
//!                       └ half-open: nothing moves any more, in either direction, until it is cut
//! ```

use std::{
    fmt, io,
    path::Path,
    sync::{Arc, Mutex, PoisonError},
};

use anyhow::Context;
use tokio::{
    sync::watch,
    task::{JoinHandle, JoinSet},
};

mod frames;
mod line;
mod plan;
mod socket;
#[cfg(test)]
mod tests;

pub use plan::{CutAfter, Direction, Plan};

use line::Line;
use socket::{Address, Listener, Socket};

/// A proxy. Everything that it carries ends when it is dropped.
pub struct FaultProxy {
    endpoint: String,
    shared: Arc<Shared>,
    task: JoinHandle<io::Result<()>>,
}

/// What a proxy has seen so far, over all connections.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Seen {
    /// Connections that were carried.
    pub connections: u64,
    /// Connections that are over.
    pub closed: u64,
    /// Connections that a fault has ended.
    pub cuts: u64,
    /// Calls that clients have begun.
    pub calls: u64,
    /// Calls whose reply was made and did not arrive.
    pub lost_replies: u64,
    /// Pings of clients, without their answers to pings.
    pub client_pings: u64,
    /// Times that a client was told that no more calls are taken on its connection, by the daemon or by an order.
    pub goaways: u64,
    /// Bytes that were passed on to the daemon.
    pub to_daemon: u64,
    /// Bytes that were passed on to clients.
    pub to_client: u64,
    /// Messages from the daemon.
    pub messages: u64,
    /// The largest of them, in bytes.
    pub largest_message: u32,
    /// The largest frame from the daemon that belongs to a call, in bytes.
    pub largest_frame: u32,
}

/// What a client is told that is to call elsewhere (GOAWAY, without an error).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Away {
    /// The calls that there are go on.
    #[default]
    AfterTheseCalls,
    /// None of them has been seen, which is not true: the daemon is at them.
    AsIfNothingWasSeen,
}

/// What is to be done. Connections are numbered from 0.
#[derive(Debug, Clone, Copy, Default)]
struct Orders {
    plan: Plan,
    /// One connection is cut so.
    cut_once: Option<CutAfter>,
    cut_below: u64,
    halted_below: u64,
    away_below: u64,
    away: Away,
    refuse: bool,
    lose_reply: bool,
}

struct Shared {
    orders: watch::Sender<Orders>,
    listening: watch::Sender<bool>,
    seen: Mutex<Seen>,
}

impl FaultProxy {
    /// Listens in `directory`, or on a port of its own, as the daemon at `endpoint` does on a Unix socket or on TCP, and
    /// passes on to it.
    ///
    /// # Errors
    /// When it cannot listen, or the endpoint is not understood.
    pub async fn start(endpoint: &str, directory: &Path, plan: Plan) -> anyhow::Result<Self> {
        let far = Address::of_endpoint(endpoint)?;
        let near = match &far {
            Address::Unix(_) => Address::Unix(directory.join("proxy")),
            Address::Tcp(_) => Address::Tcp(([127, 0, 0, 1], 0).into()),
        };
        let (listener, near) = near.listen().await.context("the proxy cannot listen")?;
        let orders = watch::Sender::new(Orders { plan, ..Orders::default() });
        let shared = Arc::new(Shared { orders, listening: watch::Sender::new(true), seen: Mutex::default() });
        let endpoint = near.endpoint();
        let task = tokio::spawn(serve(Arc::clone(&shared), listener, near, far));
        Ok(Self { endpoint, shared, task })
    }

    /// As clients name it.
    #[must_use]
    pub fn endpoint(&self) -> &str {
        &self.endpoint
    }

    /// What it has seen so far.
    #[must_use]
    pub fn seen(&self) -> Seen {
        *self.shared.seen()
    }

    /// Another plan, for the connections that are open too.
    pub fn set(&self, plan: Plan) {
        self.shared.order(|orders| orders.plan = plan);
    }

    /// Cuts every connection that is open.
    pub fn cut(&self) {
        self.shared.order_below(|orders, all| orders.cut_below = all);
    }

    /// Cuts one connection after so many bytes, the first that has carried them; connections after it are spared.
    pub fn cut_once(&self, after: CutAfter) {
        self.shared.order(|orders| orders.cut_once = Some(after));
    }

    /// Takes back a [`FaultProxy::cut_once`]; whether it was still to come.
    #[must_use]
    pub fn spare(&self) -> bool {
        let mut still = false;
        self.shared.order(|orders| still = orders.cut_once.take().is_some());
        still
    }

    /// Makes every connection that is open half-open: it stays, and nothing moves on it. New ones work.
    pub fn halt(&self) {
        self.shared.order_below(|orders, all| orders.halted_below = all);
    }

    /// Tells the client of every connection that is open to make its next calls over another one.
    pub fn send_away(&self, away: Away) {
        self.shared.order_below(|orders, all| (orders.away_below, orders.away) = (all, away));
    }

    /// Lets the next call reach the daemon and be done, and cuts its connection when the reply is there.
    pub fn lose_next_reply(&self) {
        self.shared.order(|orders| orders.lose_reply = true);
    }

    /// Refuses new connections, until [`FaultProxy::accept`]. Returns when it does.
    pub async fn refuse(&self) {
        self.listen(false).await;
    }

    /// Accepts connections again. Returns when it does.
    pub async fn accept(&self) {
        self.listen(true).await;
    }

    async fn listen(&self, wanted: bool) {
        self.shared.order(|orders| orders.refuse = !wanted);
        let mut listening = self.shared.listening.subscribe();
        if listening.wait_for(|listening| *listening == wanted).await.is_err() {
            // The sender is in `self`.
        }
    }
}

impl Drop for FaultProxy {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl fmt::Debug for FaultProxy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FaultProxy")
            .field("endpoint", &self.endpoint)
            .field("seen", &self.seen())
            .finish_non_exhaustive()
    }
}

impl Shared {
    fn seen(&self) -> std::sync::MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn see(&self, note: impl FnOnce(&mut Seen)) {
        note(&mut self.seen());
    }

    fn plan(&self) -> Plan {
        self.orders.borrow().plan
    }

    fn order(&self, change: impl FnOnce(&mut Orders)) {
        self.orders.send_modify(change);
    }

    /// An order about all connections that there are.
    fn order_below(&self, change: impl FnOnce(&mut Orders, u64)) {
        let all = self.seen().connections;
        self.order(|orders| change(orders, all));
    }

    /// Whether a connection that has carried `passed` bytes is cut within the next `more`, and after how many of them.
    fn cut_within(&self, direction: Direction, passed: u64, more: usize) -> Option<usize> {
        let within = |cut: CutAfter| {
            let left = cut.bytes.saturating_sub(passed);
            (cut.direction == direction)
                .then(|| usize::try_from(left).unwrap_or(usize::MAX))
                .filter(|left| *left < more)
        };
        let mut once = None;
        self.orders.send_if_modified(|orders| {
            once = orders.cut_once.and_then(within);
            if once.is_some() {
                orders.cut_once = None;
            }
            once.is_some()
        });
        once.into_iter().chain(self.plan().cut_after.and_then(within)).min()
    }

    /// Whether the call that begins now is the one whose reply is to be lost.
    fn takes_loss(&self) -> bool {
        self.orders.send_if_modified(|orders| std::mem::take(&mut orders.lose_reply))
    }
}

impl Seen {
    fn pass(&mut self, direction: Direction, bytes: usize) {
        match direction {
            Direction::ToDaemon => self.to_daemon += bytes as u64,
            Direction::ToClient => self.to_client += bytes as u64,
        }
    }
}

/// Accepts, refuses, and has every connection carried.
async fn serve(shared: Arc<Shared>, mut listener: Listener, near: Address, far: Address) -> io::Result<()> {
    let mut orders = shared.orders.subscribe();
    let mut lines = JoinSet::new();
    loop {
        tokio::select! {
            biased;
            refused = orders.wait_for(|orders| orders.refuse) => if refused.is_err() { return Ok(()) },
            Some(_over) = lines.join_next() => {
                shared.see(|seen| seen.closed += 1);
                continue;
            }
            client = listener.accept() => {
                let client = client?;
                let number = shared.seen().connections;
                shared.see(|seen| seen.connections += 1);
                lines.spawn(connect(Arc::clone(&shared), number, client, far.clone()));
                continue;
            }
        }
        drop(listener);
        near.forget()?;
        shared.listening.send_replace(false);
        if orders.wait_for(|orders| !orders.refuse).await.is_err() {
            return Ok(());
        }
        (listener, _) = near.listen().await?;
        shared.listening.send_replace(true);
    }
}

async fn connect(shared: Arc<Shared>, number: u64, client: Socket, far: Address) {
    match far.connect().await {
        Ok(daemon) => Line::new(shared, number, client, daemon).carry().await,
        Err(_nobody_there) => client.reset(),
    }
}
