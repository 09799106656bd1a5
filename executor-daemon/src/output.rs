//! The bytes that commands write: moved by `splice` into a ring that survives this process, kept as an exact tail,
//! spilled to a file when the tail cannot hold them, and read by offset without ever blocking the command.

use std::{
    io,
    os::fd::OwnedFd,
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

use executor_proto::types::{ReadStreamEvent, StreamDelta, StreamName, StreamResult};
use futures_core::future::BoxFuture;
use tokio::sync::watch;

/// What a stream is made with.
#[derive(Debug, Clone)]
pub(crate) struct StreamOptions {
    /// Which of a command's two streams.
    pub(crate) name: StreamName,
    /// Bytes that the tail keeps; at least 1.
    pub(crate) tail_bytes: u64,
    /// Bytes of the ring in the stream file, as [`ring_bytes`] gave them to the keeper.
    pub(crate) ring_bytes: u64,
    /// Bytes after which a spill keeps only its head.
    pub(crate) max_spill_bytes: u64,
}

/// The ring that a tail of this size needs, in bytes: a whole number of pages, at least twice the tail.
pub(crate) fn ring_bytes(tail_bytes: u64) -> u64 {
    let _ = tail_bytes;
    unimplemented!()
}

/// Makes the spill file of one stream, at most once.
pub(crate) trait SpillOpener: Send + Sync {
    /// A new file, open for reading and writing, and its path in the world where commands run.
    fn open(&self) -> BoxFuture<'_, io::Result<(OwnedFd, PathBuf)>>;
}

/// Where a stream stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Progress {
    /// Bytes taken so far.
    pub(crate) total: u64,
    /// The end of the pipe was read: no more will come.
    pub(crate) closed: bool,
}

/// Where a reader ends.
#[derive(Debug, Clone)]
pub(crate) enum ReadUntil {
    /// With what is there when the reader is made.
    Now,
    /// When the stream is closed.
    Closed,
    /// At this offset, once it is known (or when the stream is closed). A sender that is dropped before it knew ends the reader
    /// with what is there.
    Offset(watch::Receiver<Option<u64>>),
}

/// One stream of one command.
#[derive(Debug)]
pub(crate) struct Stream {}

impl Stream {
    /// Takes over the read end of the pipe and the stream file and begins to move bytes. Inside a tokio runtime.
    pub(crate) fn start(
        pipe: OwnedFd,
        file: OwnedFd,
        options: StreamOptions,
        opener: Arc<dyn SpillOpener>,
    ) -> io::Result<Arc<Self>> {
        let _ = (pipe, file, options, opener);
        unimplemented!()
    }

    /// Bytes taken so far.
    pub(crate) fn total(&self) -> u64 {
        unimplemented!()
    }

    /// Whether the end of the pipe was read.
    pub(crate) fn closed(&self) -> bool {
        unimplemented!()
    }

    /// Where the stream stands, as it goes on.
    pub(crate) fn subscribe(&self) -> watch::Receiver<Progress> {
        unimplemented!()
    }

    /// Returns when the stream is closed, after `quiet` without a byte, or at `until`; what was in the pipe when it was called has
    /// been taken then. Cancel-safe.
    pub(crate) async fn settle(&self, quiet: Duration, until: Instant) {
        let _ = (quiet, until);
        unimplemented!()
    }

    /// The stream as it is now. Waits a bounded time (below 1 s) for the spill to be as far. Await both streams at the same time.
    pub(crate) async fn result(&self) -> StreamResult {
        unimplemented!()
    }

    /// What is kept of the bytes from `cursor` on, whole characters, and where the next delta begins. Waits as
    /// [`Stream::result`] does.
    pub(crate) async fn delta(&self, cursor: u64) -> (StreamDelta, u64) {
        let _ = cursor;
        unimplemented!()
    }

    /// Reads from an offset on, without ever holding the command up.
    pub(crate) fn reader(self: &Arc<Self>, offset: u64, end: ReadUntil) -> StreamReader {
        let _ = (offset, end);
        unimplemented!()
    }

    /// Keeps nothing but the tail and the spill's path, as soon as the stream is closed and the spill is written.
    pub(crate) fn compact(&self) {
        unimplemented!()
    }

    /// The spill file if one was ever made, complete or not: to be removed with the task.
    pub(crate) fn spill_path(&self) -> Option<PathBuf> {
        unimplemented!()
    }
}

/// Reads one stream by offset: chunks, then [`ReadStreamEvent::End`], then `None`.
#[derive(Debug)]
pub(crate) struct StreamReader {}

impl StreamReader {
    /// The next event. A chunk that begins after the end of the one before marks a gap. Cancel-safe.
    pub(crate) async fn next(&mut self) -> Option<ReadStreamEvent> {
        unimplemented!()
    }
}
