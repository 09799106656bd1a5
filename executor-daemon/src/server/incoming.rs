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
};
use tonic::transport::server::Connected;

use crate::service::auth::{Origin, Peer};

/// Connections that one listening socket serves at the same time. More wait in the kernel's queue; the sockets have a
/// budget each, so that strangers on TCP cannot keep the Unix socket from its user.
const MAX_CONNECTIONS: usize = 1_024;

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
/// # Errors
/// When a socket is neither Unix nor TCP, or cannot be registered with the runtime.
pub(super) fn incoming(sockets: Vec<OwnedFd>, keeper: u32) -> io::Result<SelectAll<Connections>> {
    let mut all = SelectAll::new();
    for socket in sockets {
        let listener = Listener::new(socket)?;
        let permits = Arc::new(Semaphore::new(MAX_CONNECTIONS));
        let connections = stream::unfold((listener, permits), move |(listener, permits)| async move {
            // The semaphore is never closed.
            let permit = permits.clone().acquire_owned().await.ok()?;
            loop {
                match listener.accept(keeper).await {
                    Ok((transport, peer)) => {
                        let connection = Connection { transport, peer, _permit: permit };
                        return Some((Ok(connection), (listener, permits)));
                    }
                    Err(error) => {
                        tracing::warn!(%error, "a connection could not be accepted");
                        tokio::time::sleep(ACCEPT_PAUSE).await;
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

/// A connection and who is at its other end.
#[derive(Debug)]
pub(super) struct Connection {
    transport: Transport,
    peer: Peer,
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
        match &mut self.transport {
            Transport::Unix(stream) => Pin::new(stream).poll_read(cx, buf),
            Transport::Tcp(stream) => Pin::new(stream).poll_read(cx, buf),
        }
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
