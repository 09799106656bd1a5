//! What a server streams: each message within the longest silence that is allowed, or the stream is lost.

use std::{pin::Pin, time::Duration};

use bytes::{Bytes, BytesMut};
use executor_proto::{
    error::ExecutorError,
    types::{StreamChunk, StreamName},
};
use futures_core::stream::BoxStream;
use tonic::Streaming;

use super::super::{connect::Sent, convert::Malformed, error::Fault, retry::Rpc};

/// Most bytes of one stream that one answer may bring: the largest tail that a daemon can be told to keep.
const MAX_TAIL_BYTES: usize = 16 * 1024 * 1024;

/// The messages of a server's stream, each within the longest silence that is allowed.
pub(super) struct Incoming<T> {
    pub(super) rpc: Rpc,
    pub(super) stream: Streaming<T>,
    pub(super) endpoint: String,
    pub(super) silence: Duration,
}

impl<T> Incoming<T> {
    pub(super) async fn next(&mut self) -> Result<T, Fault> {
        // Messages come, so the request has arrived.
        let sent = Sent::already();
        match tokio::time::timeout(self.silence, self.stream.message()).await {
            Ok(Ok(Some(message))) => Ok(message),
            Ok(Ok(None)) => Err(Fault::Lost { cause: "the stream ended early".to_owned(), sent: true }),
            Ok(Err(status)) => Err(Fault::of(&status, &sent)),
            Err(_elapsed) => Err(Fault::Silence { after: self.silence, sent: true }),
        }
    }

    pub(super) fn error(&self, fault: Fault) -> ExecutorError {
        fault.into_error(self.rpc, &self.endpoint)
    }

    pub(super) fn malformed(&self, malformed: Malformed) -> ExecutorError {
        self.error(Fault::Lost { cause: malformed.to_string(), sent: true })
    }
}

/// Bytes that arrive in chunks, stdout's and stderr's.
#[derive(Debug, Default)]
pub(super) struct Gathered([BytesMut; 2]);

impl Gathered {
    pub(super) fn add(&mut self, chunk: &StreamChunk) -> Result<(), Malformed> {
        let gathered = &mut self.0[index(chunk.stream)];
        if gathered.len() + chunk.data.len() > MAX_TAIL_BYTES {
            return Err(Malformed("more bytes than any tail holds"));
        }
        gathered.extend_from_slice(&chunk.data);
        Ok(())
    }

    pub(super) fn take(&mut self) -> [Bytes; 2] {
        std::mem::take(&mut self.0).map(BytesMut::freeze)
    }
}

pub(super) fn index(stream: StreamName) -> usize {
    match stream {
        StreamName::Stdout => 0,
        StreamName::Stderr => 1,
    }
}

/// Whether a stream goes on after an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum More {
    Follows,
    Ends,
}

/// Reads a message; `None`: it is no event.
type Read<T, E> = fn(T) -> Result<Option<(E, More)>, Malformed>;

/// The events of a server's stream. Ends after the last event, or after an error.
pub(super) fn events<T: Send + 'static, E: Send + 'static>(
    incoming: Incoming<T>,
    read: Read<T, E>,
) -> BoxStream<'static, Result<E, ExecutorError>> {
    let step = move |state: Option<Incoming<T>>| async move {
        let mut incoming = state?;
        loop {
            match incoming.next().await.map(read) {
                Ok(Ok(None)) => {}
                Ok(Ok(Some((event, More::Follows)))) => return Some((Ok(event), Some(incoming))),
                Ok(Ok(Some((event, More::Ends)))) => return Some((Ok(event), None)),
                Ok(Err(malformed)) => return Some((Err(incoming.malformed(malformed)), None)),
                Err(fault) => return Some((Err(incoming.error(fault)), None)),
            }
        }
    };
    Pin::from(Box::new(futures_util::stream::unfold(Some(incoming), step)))
}
