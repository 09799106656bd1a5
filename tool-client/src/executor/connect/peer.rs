//! Whether the peer is a server of the kind that can have understood us at all.
//!
//! A client sends its first request without waiting for the peer's first word. If that word is not HTTP/2's (a web server of
//! another age, a login banner), the request was read by nobody, and whoever made it can be told so.

use std::{
    io,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU8, Ordering},
    },
    task::{Context, Poll},
};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// What is known of the peer, over all connections: once it has spoken HTTP/2, a later connection's noise says nothing
/// about earlier requests.
#[derive(Debug, Clone, Default)]
pub(in super::super) struct Peer(Arc<AtomicU8>);

const FOREIGN: u8 = 1;
const HTTP2: u8 = 2;

impl Peer {
    /// It has spoken, and never HTTP/2.
    pub(in super::super) fn is_foreign(&self) -> bool {
        self.0.load(Ordering::Acquire) == FOREIGN
    }

    fn heard(&self, first: &[u8]) {
        self.0.fetch_max(if could_begin_http2(first) { HTTP2 } else { FOREIGN }, Ordering::AcqRel);
    }
}

/// A server's first frame is SETTINGS: a length of 24 bits, which is small, the type 4, no flag but ACK, stream 0.
fn could_begin_http2(first: &[u8]) -> bool {
    let mut rest = first.iter().enumerate();
    rest.all(|(index, byte)| match index {
        0 | 5..=8 => *byte == 0,
        3 => *byte == 4,
        4 => *byte <= 1,
        _ => true,
    })
}

/// A connection whose peer's first word is listened to.
pub(super) struct Heard<T> {
    connection: T,
    peer: Option<Peer>,
}

impl<T> Heard<T> {
    pub(super) fn new(connection: T, peer: Peer) -> Self {
        Self { connection, peer: Some(peer) }
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for Heard<T> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let read = Pin::new(&mut self.connection).poll_read(cx, buf);
        let new = &buf.filled()[before..];
        if !new.is_empty()
            && let Some(peer) = self.peer.take()
        {
            peer.heard(&new[..new.len().min(9)]);
        }
        read
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for Heard<T> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.connection).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.connection).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.connection).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.connection).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.connection.is_write_vectored()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_word_tells_http2_from_others() {
        for first in [&b"\0\0\x06\x04\0\0\0\0\0"[..], b"\0\0\0\x04\x01\0\0\0\0", b"\0\0"] {
            assert!(could_begin_http2(first), "{first:?}");
        }
        for first in [&b"HTTP/1.1 "[..], b"SSH-2.0-O", b"\x15\x03\x01\0\x02\x02\x46", b"H"] {
            assert!(!could_begin_http2(first), "{first:?}");
        }
    }

    #[test]
    fn a_peer_that_has_spoken_http2_is_not_foreign_for_a_later_noise() {
        let peer = Peer::default();
        assert!(!peer.is_foreign());
        peer.heard(b"HTTP/1.1 ");
        assert!(peer.is_foreign());
        peer.heard(b"\0\0\x06\x04\0\0\0\0\0");
        peer.heard(b"HTTP/1.1 ");
        assert!(!peer.is_foreign());
    }
}
