//! Whether the peer is a server of the kind that can have understood us at all.
//!
//! A client sends its first request without waiting for the peer's first word. If that word is not HTTP/2's (a web server of
//! another age, a login banner), or if it closes in order before any word, the request was read by nobody, and whoever made
//! it can be told so. The same holds where its first word is that it refuses our TLS: a client learns only then whether its
//! certificate was accepted. A reset alone proves nothing: it may have overtaken a word that was lost on the way.

use std::{
    io,
    pin::Pin,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU8, Ordering},
    },
    task::{Context, Poll, ready},
    time::Duration,
};

use executor_proto::tls;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::{Sleep, sleep},
};

/// A frame's header, which is what tells HTTP/2 from others.
const WORD_BYTES: usize = 9;
/// Longest wait for what the peer said before a write failed. It has arrived by then; only its arrival has to be noticed.
const LAST_WORD_WITHIN: Duration = Duration::from_secs(1);

/// What is known of the peer, over all connections: once it has spoken HTTP/2, a later connection's noise says nothing
/// about earlier requests.
#[derive(Debug, Clone, Default)]
pub(in super::super) struct Peer(Arc<Known>);

#[derive(Debug, Default)]
struct Known {
    kind: AtomicU8,
    /// Why the latest connection was refused in place of a first word.
    refusal: Mutex<Option<String>>,
}

const UNKNOWN: u8 = 0;
const MUTE: u8 = 1;
const FOREIGN: u8 = 2;
/// It has answered with a TLS alert: it waits for a handshake.
const TLS: u8 = 3;
const HTTP2: u8 = 4;

impl Peer {
    /// It has spoken, and never HTTP/2.
    pub(in super::super) fn is_foreign(&self) -> bool {
        self.0.kind.load(Ordering::Acquire) == FOREIGN
    }

    /// It has spoken TLS to us, who did not.
    pub(in super::super) fn is_tls(&self) -> bool {
        self.0.kind.load(Ordering::Acquire) == TLS
    }

    /// Why it has refused the latest connection before any other word, if it has.
    pub(in super::super) fn refusal(&self) -> Option<String> {
        self.0.refusal.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set_refusal(&self, refusal: Option<String>) {
        *self.0.refusal.lock().unwrap_or_else(PoisonError::into_inner) = refusal;
    }

    /// It has never spoken, and has closed the latest connection in order.
    pub(in super::super) fn is_mute(&self) -> bool {
        self.0.kind.load(Ordering::Acquire) == MUTE
    }

    /// What it says first; nothing, if it closes instead.
    fn heard(&self, first: &[u8]) {
        let kind = match first {
            [] => MUTE,
            first if could_begin_http2(first) => HTTP2,
            first if first.starts_with(&TLS_ALERT) => TLS,
            _ => FOREIGN,
        };
        self.0.kind.fetch_max(kind, Ordering::AcqRel);
    }

    /// That a connection was closed without a word says nothing about the next one.
    fn connected(&self) {
        self.set_refusal(None);
        let _other = self.0.kind.compare_exchange(MUTE, UNKNOWN, Ordering::AcqRel, Ordering::Acquire);
    }
}

/// How a TLS server begins its answer to what is no handshake: the record of an alert, of any version.
const TLS_ALERT: [u8; 2] = [21, 3];

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
    /// Until it has spoken or closed.
    peer: Option<Peer>,
    /// A write that failed before the peer was heard.
    failed: Option<FailedWrite>,
}

/// Told once the peer's word, which may be why it failed, has been read.
struct FailedWrite {
    error: io::Error,
    limit: Pin<Box<Sleep>>,
}

impl<T> Heard<T> {
    pub(super) fn new(connection: T, peer: Peer) -> Self {
        peer.connected();
        Self { connection, peer: Some(peer), failed: None }
    }
}

impl<T: AsyncRead + Unpin> Heard<T> {
    /// Passes a write on. Its failure is held back until what the peer has said is known: a server that does not understand
    /// us answers and closes, and whether our next write or its answer is seen first is chance.
    fn written(&mut self, cx: &mut Context<'_>, written: Poll<io::Result<usize>>) -> Poll<io::Result<usize>> {
        match written {
            Poll::Ready(Err(error)) if self.peer.is_some() => {
                self.failed = Some(FailedWrite { error, limit: Box::pin(sleep(LAST_WORD_WITHIN)) });
                self.poll_failed(cx)
            }
            written => written,
        }
    }

    fn poll_failed(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<usize>> {
        let mut word = [0; WORD_BYTES];
        if self.peer.is_some()
            && Pin::new(&mut *self).poll_read(cx, &mut ReadBuf::new(&mut word)).is_pending()
            && let Some(failed) = &mut self.failed
        {
            ready!(failed.limit.as_mut().poll(cx));
        }
        let error = self.failed.take().map_or_else(|| io::ErrorKind::BrokenPipe.into(), |failed| failed.error);
        Poll::Ready(Err(error))
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for Heard<T> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let has_room = buf.remaining() > 0;
        let read = Pin::new(&mut self.connection).poll_read(cx, buf);
        if let Poll::Ready(Err(error)) = &read
            && let Some(peer) = &self.peer
            && let Some(refusal) = tls::refusal(error)
        {
            peer.set_refusal(Some(refusal));
            self.peer = None;
        }
        let new = &buf.filled()[before..];
        if has_room
            && matches!(read, Poll::Ready(Ok(())))
            && let Some(peer) = self.peer.take()
        {
            peer.heard(&new[..new.len().min(WORD_BYTES)]);
        }
        read
    }
}

impl<T: AsyncRead + AsyncWrite + Unpin> AsyncWrite for Heard<T> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        if self.failed.is_some() {
            return self.poll_failed(cx);
        }
        let written = Pin::new(&mut self.connection).poll_write(cx, buf);
        self.written(cx, written)
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
        if self.failed.is_some() {
            return self.poll_failed(cx);
        }
        let written = Pin::new(&mut self.connection).poll_write_vectored(cx, bufs);
        self.written(cx, written)
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
        for first in [&b"HTTP/1.1 "[..], b"SSH-2.0-O", b"H"] {
            assert!(!could_begin_http2(first), "{first:?}");
            let peer = Peer::default();
            peer.heard(first);
            assert!(peer.is_foreign() && !peer.is_tls());
        }
        let peer = Peer::default();
        peer.heard(b"\x15\x03\x01\0\x02\x02\x46");
        assert!(peer.is_tls() && !peer.is_foreign());
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

    #[test]
    fn a_peer_is_mute_until_the_next_connection_or_word() {
        let peer = Peer::default();
        peer.heard(b"");
        assert!(peer.is_mute() && !peer.is_foreign());
        peer.connected();
        assert!(!peer.is_mute());
        peer.heard(b"");
        peer.heard(b"HTTP/1.1 ");
        peer.connected();
        assert!(peer.is_foreign() && !peer.is_mute());
    }

    /// A connection whose writes fail and whose word comes with the second look.
    struct Closing {
        looks: usize,
        word: &'static [u8],
    }

    impl AsyncRead for Closing {
        fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
            self.looks += 1;
            if self.looks == 1 {
                cx.waker().wake_by_ref();
                return Poll::Pending;
            }
            buf.put_slice(self.word);
            Poll::Ready(Ok(()))
        }
    }

    impl AsyncWrite for Closing {
        fn poll_write(self: Pin<&mut Self>, _: &mut Context<'_>, _: &[u8]) -> Poll<io::Result<usize>> {
            Poll::Ready(Err(io::ErrorKind::ConnectionReset.into()))
        }

        fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }

        fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }
    }

    #[tokio::test]
    async fn a_write_that_fails_is_told_after_the_peer_was_heard() {
        use tokio::io::AsyncWriteExt as _;
        for (word, foreign, mute) in [(&b"HTTP/1.1 "[..], true, false), (b"", false, true)] {
            let peer = Peer::default();
            let mut heard = Heard::new(Closing { looks: 0, word }, peer.clone());
            let error = heard.write_all(b"PRI").await.expect_err("it has closed");
            assert_eq!(error.kind(), io::ErrorKind::ConnectionReset);
            assert_eq!((peer.is_foreign(), peer.is_mute()), (foreign, mute), "{word:?}");
        }
    }
}
