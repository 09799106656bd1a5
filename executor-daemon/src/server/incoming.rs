//! Connections of all listening sockets as one stream.

use std::{
    io,
    os::fd::{AsFd, OwnedFd},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use futures_util::{Stream, StreamExt, stream, stream::SelectAll};
use nix::sys::socket::{AddressFamily, SockaddrLike, SockaddrStorage, getsockname};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpListener, TcpStream, UnixListener, UnixStream},
    sync::{OwnedSemaphorePermit, Semaphore},
    time::{Sleep, sleep},
};
use tonic::transport::server::Connected;

use crate::service::auth::{Origin, Peer};

/// Time that a client has to begin: a connection that has not sent the whole HTTP/2 preface by then is closed, so that
/// idle ones do not use up the sockets' budgets.
const PREFACE_LIMIT: Duration = Duration::from_secs(10);

/// Length of the HTTP/2 preface.
const PREFACE_BYTES: usize = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".len();

/// Wait after a failed accept: out of descriptors, say, which passes.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// A listening socket of either kind.
enum Listener {
    Unix(UnixListener),
    Tcp(TcpListener),
}

impl Listener {
    fn new(socket: OwnedFd) -> io::Result<Self> {
        let address: SockaddrStorage = getsockname(std::os::fd::AsRawFd::as_raw_fd(&socket.as_fd()))?;
        match address.family() {
            Some(AddressFamily::Unix) => {
                let socket = std::os::unix::net::UnixListener::from(socket);
                socket.set_nonblocking(true)?;
                Ok(Self::Unix(UnixListener::from_std(socket)?))
            }
            Some(AddressFamily::Inet | AddressFamily::Inet6) => {
                let socket = std::net::TcpListener::from(socket);
                socket.set_nonblocking(true)?;
                Ok(Self::Tcp(TcpListener::from_std(socket)?))
            }
            other => Err(io::Error::new(io::ErrorKind::Unsupported, format!("a listening socket of family {other:?}"))),
        }
    }

    async fn accept(&self, keeper: u32) -> io::Result<(Transport, Peer)> {
        match self {
            Self::Unix(listener) => {
                let (stream, _) = listener.accept().await?;
                let credentials = stream.peer_cred().ok();
                let pid = credentials.and_then(|known| known.pid()).and_then(|pid| u32::try_from(pid).ok());
                let uid = credentials.map(|known| known.uid());
                Ok((Transport::Unix(stream), Peer::Unix { uid, origin: Origin::of(pid, keeper) }))
            }
            Self::Tcp(listener) => {
                let (stream, address) = listener.accept().await?;
                // Replies are small and each is waited for. It fails on a connection that is gone already, which then
                // reads as one that is closed.
                let _ = stream.set_nodelay(true);
                Ok((Transport::Tcp(stream), Peer::Tcp(Some(address))))
            }
        }
    }
}

/// The connections of one socket.
type Connections = Pin<Box<dyn Stream<Item = io::Result<Connection>> + Send>>;

/// The connections of all sockets, as they come. `keeper` is the process that every command descends from.
///
/// At most `per_kind` are open at the same time on the Unix sockets and as many on the TCP sockets, in equal parts for each
/// socket and at least one; more wait in the kernel's queue. One that does not begin within 10 s is closed.
///
/// # Errors
/// When a socket is neither Unix nor TCP, or cannot be registered with the runtime.
pub(super) fn incoming(sockets: Vec<OwnedFd>, keeper: u32, per_kind: usize) -> io::Result<SelectAll<Connections>> {
    let mut all = SelectAll::new();
    let listeners = sockets.into_iter().map(Listener::new).collect::<io::Result<Vec<_>>>()?;
    let unix = listeners.iter().filter(|listener| matches!(listener, Listener::Unix(_))).count();
    let tcp = listeners.len() - unix;
    for listener in listeners {
        let same_kind = match listener {
            Listener::Unix(_) => unix,
            Listener::Tcp(_) => tcp,
        };
        let permits = Arc::new(Semaphore::new((per_kind / same_kind).max(1)));
        let connections = stream::unfold((listener, permits), move |(listener, permits)| async move {
            // The semaphore is never closed.
            let permit = permits.clone().acquire_owned().await.ok()?;
            loop {
                match listener.accept(keeper).await {
                    Ok((transport, peer)) => {
                        let awaited = Awaited { bytes: PREFACE_BYTES, until: Box::pin(sleep(PREFACE_LIMIT)) };
                        let connection = Connection { transport, peer, awaited: Some(awaited), _permit: permit };
                        return Some((Ok(connection), (listener, permits)));
                    }
                    Err(error) => {
                        tracing::warn!(%error, "a connection could not be accepted");
                        sleep(ACCEPT_PAUSE).await;
                    }
                }
            }
        });
        all.push(connections.boxed());
    }
    Ok(all)
}

#[derive(Debug)]
enum Transport {
    Unix(UnixStream),
    Tcp(TcpStream),
}

/// What has to come before a connection counts as begun.
#[derive(Debug)]
struct Awaited {
    bytes: usize,
    until: Pin<Box<Sleep>>,
}

/// A connection and who is at its other end.
#[derive(Debug)]
pub(super) struct Connection {
    transport: Transport,
    peer: Peer,
    /// Until the preface is there.
    awaited: Option<Awaited>,
    _permit: OwnedSemaphorePermit,
}

impl Connected for Connection {
    type ConnectInfo = Peer;

    fn connect_info(&self) -> Peer {
        self.peer.clone()
    }
}

impl AsyncRead for Connection {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let read = match &mut self.transport {
            Transport::Unix(stream) => Pin::new(stream).poll_read(cx, buf),
            Transport::Tcp(stream) => Pin::new(stream).poll_read(cx, buf),
        };
        let Some(awaited) = &mut self.awaited else { return read };
        if read.is_pending() {
            return awaited.until.as_mut().poll(cx).map(|()| Err(io::ErrorKind::TimedOut.into()));
        }
        awaited.bytes = awaited.bytes.saturating_sub(buf.filled().len() - before);
        if awaited.bytes == 0 {
            self.awaited = None;
        }
        read
    }
}

impl AsyncWrite for Connection {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        match &mut self.transport {
            Transport::Unix(stream) => Pin::new(stream).poll_write(cx, buf),
            Transport::Tcp(stream) => Pin::new(stream).poll_write(cx, buf),
        }
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match &mut self.transport {
            Transport::Unix(stream) => Pin::new(stream).poll_write_vectored(cx, bufs),
            Transport::Tcp(stream) => Pin::new(stream).poll_write_vectored(cx, bufs),
        }
    }

    fn is_write_vectored(&self) -> bool {
        match &self.transport {
            Transport::Unix(stream) => stream.is_write_vectored(),
            Transport::Tcp(stream) => stream.is_write_vectored(),
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.transport {
            Transport::Unix(stream) => Pin::new(stream).poll_flush(cx),
            Transport::Tcp(stream) => Pin::new(stream).poll_flush(cx),
        }
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.transport {
            Transport::Unix(stream) => Pin::new(stream).poll_shutdown(cx),
            Transport::Tcp(stream) => Pin::new(stream).poll_shutdown(cx),
        }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    const PREFACE: &[u8; PREFACE_BYTES] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

    fn listen(per_kind: usize) -> (SelectAll<Connections>, tempfile::TempDir, std::net::SocketAddr) {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let unix = std::os::unix::net::UnixListener::bind(dir.path().join("sock")).expect("a socket");
        let tcp = std::net::TcpListener::bind("127.0.0.1:0").expect("a socket");
        let address = tcp.local_addr().expect("an address");
        (incoming(vec![unix.into(), tcp.into()], 1, per_kind).expect("both kinds"), dir, address)
    }

    async fn next(connections: &mut SelectAll<Connections>) -> Connection {
        connections.next().await.expect("they never end").expect("accepted")
    }

    #[tokio::test]
    async fn tcp_has_its_share_and_unix_has_its_own() {
        let (mut connections, dir, address) = listen(2);
        let _strangers: Vec<_> =
            (0..5).map(|_| std::net::TcpStream::connect(address).expect("at least queued")).collect();
        let (first, second) = (next(&mut connections).await, next(&mut connections).await);
        let _user = UnixStream::connect(dir.path().join("sock")).await.expect("connected");
        assert!(matches!(next(&mut connections).await.peer, Peer::Unix { .. }));
        assert!(connections.next().now_or_never().is_none(), "a third stranger was let in");
        drop(first);
        assert!(matches!(next(&mut connections).await.peer, Peer::Tcp(_)));
        drop(second);
    }

    #[tokio::test]
    async fn who_does_not_begin_in_time_is_cut_off_and_who_does_is_not() {
        for (sent, kept) in [(0, false), (PREFACE_BYTES - 1, false), (PREFACE_BYTES, true)] {
            let (mut connections, _dir, address) = listen(2);
            let mut stranger = TcpStream::connect(address).await.expect("connected");
            let mut connection = next(&mut connections).await;
            stranger.write_all(&PREFACE[..sent]).await.expect("sent");
            let mut bytes = [0; PREFACE_BYTES];
            connection.read_exact(&mut bytes[..sent]).await.expect("arrives");
            assert_eq!(bytes[..sent], PREFACE[..sent]);
            let Some(awaited) = &mut connection.awaited else {
                assert!(kept, "{sent} bytes were enough");
                continue;
            };
            assert!(!kept, "the whole preface was not enough");
            assert!(awaited.until.deadline() <= tokio::time::Instant::now() + PREFACE_LIMIT);
            // From here on nothing comes, and the time is over.
            awaited.until.as_mut().reset(tokio::time::Instant::now());
            let error = connection.read_u8().await.expect_err("nothing came");
            assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        }
    }
}
