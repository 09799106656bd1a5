//! Readers by offset: from the ring, else from the spill, else with a gap.

use std::{ops::Range, sync::Arc};

use bytes::Bytes;
use executor_proto::{
    MAX_CHUNK_BYTES,
    types::{ReadStreamEvent, StreamChunk},
};
use tokio::sync::watch;

use super::{Progress, Stream};

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

/// Reads one stream by offset: chunks, then [`ReadStreamEvent::End`], then `None`.
#[derive(Debug)]
pub(crate) struct StreamReader {
    stream: Arc<Stream>,
    progress: watch::Receiver<Progress>,
    until: Until,
    position: u64,
    ended: bool,
}

#[derive(Debug)]
enum Until {
    Known(u64),
    Closed,
    Offset(watch::Receiver<Option<u64>>),
}

impl StreamReader {
    pub(super) fn new(stream: Arc<Stream>, offset: u64, end: ReadUntil) -> Self {
        let until = match end {
            ReadUntil::Now => Until::Known(stream.total()),
            ReadUntil::Closed => Until::Closed,
            ReadUntil::Offset(receiver) => Until::Offset(receiver),
        };
        Self { progress: stream.subscribe(), stream, until, position: offset, ended: false }
    }

    /// The next event. A chunk that begins after the end of the one before marks a gap; so does an end whose total is above it.
    /// Cancel-safe.
    pub(crate) async fn next(&mut self) -> Option<ReadStreamEvent> {
        while !self.ended {
            let progress = *self.progress.borrow_and_update();
            let limit = self.limit(progress);
            let available = limit.map_or(progress.total, |limit| limit.min(progress.total));
            if let Some((offset, data)) = self.read(available).await {
                self.position = offset + data.len() as u64;
                let stream = self.stream.options.name;
                return Some(ReadStreamEvent::Chunk(StreamChunk { stream, offset, data }));
            }
            if let Some(total) = limit {
                self.ended = true;
                let closed = progress.closed && progress.total == total;
                return Some(ReadStreamEvent::End { total, closed });
            }
            self.wait().await;
        }
        None
    }

    /// The end, where it is known.
    fn limit(&mut self, progress: Progress) -> Option<u64> {
        let known = match &mut self.until {
            Until::Known(end) => return Some(*end),
            Until::Closed => None,
            Until::Offset(receiver) => {
                // Asked first: what the sender said before it was dropped is still there.
                let dropped = receiver.has_changed().is_err();
                receiver.borrow_and_update().or(dropped.then_some(progress.total))
            }
        };
        let end = known.or(progress.closed.then_some(progress.total))?;
        self.until = Until::Known(end);
        Some(end)
    }

    async fn wait(&mut self) {
        // A sender that is gone is seen by whoever looks next.
        if let Until::Offset(receiver) = &mut self.until {
            tokio::select! {
                _ = receiver.changed() => {}
                _ = self.progress.changed() => {}
            }
        } else {
            let _ = self.progress.changed().await;
        }
    }

    /// The next bytes below `available`, from the position on or, where nothing keeps those any more, from a later one.
    async fn read(&self, available: u64) -> Option<(u64, Bytes)> {
        let mut position = self.position;
        let mut outrun = false;
        while position < available {
            let kept_to = self.stream.missing_from().filter(|missing| position < *missing);
            let end = kept_to.map_or(available, |kept| kept.min(available)).min(position + MAX_CHUNK_BYTES as u64);
            if let Some(bytes) = self.stream.in_memory(position..end) {
                return Some((position, bytes));
            }
            if let Some(bytes) = self.stream.spill.read(position, MAX_CHUNK_BYTES).await {
                let most = usize::try_from(available - position).unwrap_or(usize::MAX).min(bytes.len());
                return Some((position, bytes.slice(..most)));
            }
            // A gap, as small as can be. Only where even that was overwritten while it was copied, the command is so much
            // faster that the reader needs a start.
            let Range { start: oldest, end: total } = self.stream.in_memory_range();
            if self.stream.missing_from().is_some() && total <= position {
                return None;
            }
            let next = if outrun { oldest + (total - oldest) / 2 } else { oldest };
            position = position.max(next);
            outrun = true;
        }
        None
    }
}
