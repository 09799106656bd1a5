//! What a proxy does to the connections that pass through it, as a value.

use std::time::Duration;

/// A way through the proxy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// What the client sends.
    ToDaemon,
    /// What the daemon sends.
    ToClient,
}

/// After so many bytes in one direction, a connection is cut. The bytes before have passed, none after.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CutAfter {
    /// Where they are counted.
    pub direction: Direction,
    /// How many; 0 cuts as soon as there is one.
    pub bytes: u64,
}

/// What happens to every connection. The default passes everything on.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Plan {
    /// Cut a connection after so many bytes.
    pub cut_after: Option<CutAfter>,
    /// Cut a connection that has been open for so long.
    pub cut_every: Option<Duration>,
    /// Cut a connection on which no call has moved for so long, as a proxy does that understands HTTP/2: headers and data
    /// count, pings do not.
    pub cut_idle: Option<Duration>,
    /// Of so many calls, over all connections, let one reach the daemon and lose its reply: its connection is cut when the reply is
    /// there, or has not come for a while. Each third of these is spared, so that no call is lost as often as it is made.
    pub lose_every: Option<u32>,
    /// Hold every chunk, in both directions, for so long.
    pub delay: Option<Duration>,
    /// Let the client read no faster.
    pub client_bytes_per_second: Option<u32>,
}

impl Plan {
    /// Pass everything on.
    pub const PASS: Self = Self {
        cut_after: None,
        cut_every: None,
        cut_idle: None,
        lose_every: None,
        delay: None,
        client_bytes_per_second: None,
    };

    /// Cut every connection after so many bytes in a direction.
    #[must_use]
    pub fn cut_after(direction: Direction, bytes: u64) -> Self {
        Self { cut_after: Some(CutAfter { direction, bytes }), ..Self::PASS }
    }

    /// Cut every connection when it is so old.
    #[must_use]
    pub fn cut_every(age: Duration) -> Self {
        Self { cut_every: Some(age), ..Self::PASS }
    }

    /// Cut every connection on which no call moves for so long.
    #[must_use]
    pub fn cut_idle(silence: Duration) -> Self {
        Self { cut_idle: Some(silence), ..Self::PASS }
    }

    /// Lose the reply of one in so many calls.
    #[must_use]
    pub fn lose_every(calls: u32) -> Self {
        Self { lose_every: Some(calls), ..Self::PASS }
    }

    /// Whether the reply of this call, counted from 1, is lost.
    pub(super) fn loses(self, call: u64) -> bool {
        let every = self.lose_every.map_or(0, u64::from);
        every > 0 && call.is_multiple_of(every) && !(call / every).is_multiple_of(3)
    }

    /// Delay every chunk.
    #[must_use]
    pub fn delay(by: Duration) -> Self {
        Self { delay: Some(by), ..Self::PASS }
    }

    /// A client that reads slowly.
    #[must_use]
    pub fn slow_client(bytes_per_second: u32) -> Self {
        Self { client_bytes_per_second: Some(bytes_per_second), ..Self::PASS }
    }
}
