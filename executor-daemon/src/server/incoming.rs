//! Connections of all listening sockets as one stream.
//!
//! ```text
//!   accepted ── TLS handshake (TCP, where there is TLS) ──▶ preface ──▶ begun ── a call is admitted ──▶ stays
//!      └────────────── 10 s ──────────────────────────────────┴───────────── 60 s ───▶ closed
//! ```
//! A handshake is made by the task that serves the connection, so that a slow one keeps nobody else waiting. Where all places are
//! taken, the oldest connection over which no call was admitted goes for the next one ([`places`]): nobody keeps a place who
//! may not call.

mod places;

use std::{
    io,
    os::fd::{AsFd, OwnedFd},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use executor_proto::transport::{BEGIN_LIMIT, FIRST_CALL_LIMIT};
use futures_util::{Stream, StreamExt, stream, stream::SelectAll};
use nix::sys::socket::{AddressFamily, SockaddrLike, SockaddrStorage, getsockname};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpListener, TcpStream, UnixListener, UnixStream},
    time::{Instant, Sleep, sleep},
};
use tokio_rustls::{Accept, TlsAcceptor, server::TlsStream};
use tokio_util::sync::WaitForCancellationFutureOwned;
use tonic::transport::server::Connected;

use self::places::{Place, Places};
use crate::{
    service::{
        auth::{Certificate, Origin, Peer},
        edge::{Calls, Latest, Line},
    },
    tls,
};

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

    async fn accept(&self, keeper: u32, tls: Option<&TlsAcceptor>) -> io::Result<(Transport, Peer)> {
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
                let certificate = Certificate::default();
                let peer = Peer::Tcp { address, certificate: Arc::clone(&certificate) };
                let transport = match tls {
                    Some(acceptor) => {
                        let handshake = Box::new(acceptor.accept(stream));
                        Transport::Tls(Tls::Handshake { handshake, certificate, peer: peer.clone() })
                    }
                    None => Transport::Tcp(stream),
                };
                Ok((transport, peer))
            }
        }
    }
}

/// The connections of one socket.
type Connections = Pin<Box<dyn Stream<Item = io::Result<Connection>> + Send>>;

/// The connections of all sockets, as they come. `keeper` is the process that every command descends from. With `tls` those on
/// TCP speak TLS.
///
/// At most `per_kind` are open at the same time on the Unix sockets and as many on the TCP sockets, in equal parts for each
/// socket and at least one; one more takes the place of the oldest over which no call was admitted, or waits. One that does not begin within [`BEGIN_LIMIT`], or makes no call that is admitted within
/// [`FIRST_CALL_LIMIT`] after that, is closed.
///
/// # Errors
/// When a socket is neither Unix nor TCP, or cannot be registered with the runtime.
pub(super) fn incoming(
    sockets: Vec<OwnedFd>,
    tls: Option<TlsAcceptor>,
    keeper: u32,
    per_kind: usize,
) -> io::Result<SelectAll<Connections>> {
    let mut all = SelectAll::new();
    let listeners = sockets.into_iter().map(Listener::new).collect::<io::Result<Vec<_>>>()?;
    let unix = listeners.iter().filter(|listener| matches!(listener, Listener::Unix(_))).count();
    let tcp = listeners.len() - unix;
    for listener in listeners {
        let same_kind = match listener {
            Listener::Unix(_) => unix,
            Listener::Tcp(_) => tcp,
        };
        let places = Places::new((per_kind / same_kind).max(1));
        let tls = tls.clone();
        let connections = stream::unfold((listener, places, tls), move |(listener, places, tls)| async move {
            loop {
                match listener.accept(keeper, tls.as_ref()).await {
                    Ok((transport, peer)) => {
                        let line = Line { peer, calls: Calls::default() };
                        let place = places.take(&line).await;
                        let awaited = Some(Awaited::preface(&place));
                        let connection = Connection { transport, line, awaited, _place: place };
                        return Some((Ok(connection), (listener, places, tls)));
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
    Tls(Tls),
}

/// A connection with TLS.
enum Tls {
    Handshake {
        handshake: Box<Accept<TcpStream>>,
        /// Where the names go that the peer shows.
        certificate: Certificate,
        peer: Peer,
    },
    Open(Box<TlsStream<TcpStream>>),
    /// The handshake has failed, which was told once.
    Failed,
}

impl std::fmt::Debug for Tls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Handshake { .. } => "Handshake",
            Self::Open(_) => "Open",
            Self::Failed => "Failed",
        })
    }
}

impl Tls {
    /// The open connection, once the handshake is over.
    fn poll_open(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<Pin<&mut TlsStream<TcpStream>>>> {
        if let Self::Handshake { handshake, certificate, peer } = self {
            match ready!(Pin::new(handshake.as_mut()).poll(cx)) {
                Ok(stream) => {
                    let (_, session) = stream.get_ref();
                    if let Some(shown) = session.peer_certificates().and_then(<[_]>::first) {
                        // It is set here only, and once.
                        let _ = certificate.set(tls::names(shown));
                    }
                    *self = Self::Open(Box::new(stream));
                }
                Err(error) => {
                    tracing::info!(%peer, %error, "no TLS handshake");
                    *self = Self::Failed;
                    return Poll::Ready(Err(error));
                }
            }
        }
        match self {
            Self::Open(stream) => Poll::Ready(Ok(Pin::new(stream.as_mut()))),
            Self::Handshake { .. } | Self::Failed => Poll::Ready(Err(io::ErrorKind::NotConnected.into())),
        }
    }
}

/// What has to come before a connection may stay.
#[derive(Debug)]
struct Awaited {
    /// So much of the preface. 0: it is there, and a call is awaited.
    bytes: usize,
    until: Pin<Box<Sleep>>,
    /// Its place is given to another.
    displaced: Pin<Box<WaitForCancellationFutureOwned>>,
}

impl Awaited {
    fn preface(place: &Place) -> Self {
        Self { bytes: PREFACE_BYTES, until: Box::pin(sleep(BEGIN_LIMIT)), displaced: Box::pin(place.displaced()) }
    }

    /// So many bytes have come.
    fn arrived(&mut self, bytes: usize) {
        if self.bytes > 0 {
            self.bytes = self.bytes.saturating_sub(bytes);
            if self.bytes == 0 {
                self.until.as_mut().reset(Instant::now() + FIRST_CALL_LIMIT);
            }
        }
    }

    /// Ready when the time is over, or the place is another's: whether it was waited in vain.
    fn poll_over(&mut self, calls: &Calls, cx: &mut Context<'_>) -> Poll<bool> {
        if self.displaced.as_mut().poll(cx).is_ready() {
            return Poll::Ready(calls.latest() != Latest::Admitted);
        }
        loop {
            ready!(self.until.as_mut().poll(cx));
            match calls.latest() {
                Latest::Admitted => return Poll::Ready(false),
                Latest::Health(at) if at.elapsed() < FIRST_CALL_LIMIT => {
                    self.until.as_mut().reset(Instant::from_std(at) + FIRST_CALL_LIMIT);
                }
                Latest::Health(_) | Latest::Nothing => return Poll::Ready(true),
            }
        }
    }
}

/// A connection and who is at its other end.
#[derive(Debug)]
pub(super) struct Connection {
    transport: Transport,
    line: Line,
    /// Until it may stay.
    awaited: Option<Awaited>,
    _place: Place,
}

impl Connection {
    /// What was done, or that the peer's time is over. Asked wherever the serving task may come to wait: before the handshake
    /// is over it wants to write.
    fn unless_overdue<T>(&mut self, cx: &mut Context<'_>, done: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if done.is_pending()
            && let Some(awaited) = &mut self.awaited
        {
            if ready!(awaited.poll_over(&self.line.calls, cx)) {
                return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
            }
            self.awaited = None;
        }
        done
    }
}

impl Connected for Connection {
    type ConnectInfo = Line;

    fn connect_info(&self) -> Line {
        self.line.clone()
    }
}

impl AsyncRead for Connection {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let read = match &mut self.transport {
            Transport::Unix(stream) => Pin::new(stream).poll_read(cx, buf),
            Transport::Tcp(stream) => Pin::new(stream).poll_read(cx, buf),
            Transport::Tls(tls) => match tls.poll_open(cx) {
                Poll::Ready(Ok(stream)) => stream.poll_read(cx, buf),
                Poll::Ready(Err(error)) => Poll::Ready(Err(error)),
                Poll::Pending => Poll::Pending,
            },
        };
        if let Some(awaited) = &mut self.awaited {
            awaited.arrived(buf.filled().len() - before);
        }
        self.unless_overdue(cx, read)
    }
}

impl AsyncWrite for Connection {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let written = match &mut self.transport {
            Transport::Unix(stream) => Pin::new(stream).poll_write(cx, buf),
            Transport::Tcp(stream) => Pin::new(stream).poll_write(cx, buf),
            Transport::Tls(tls) => match tls.poll_open(cx) {
                Poll::Ready(Ok(stream)) => stream.poll_write(cx, buf),
                Poll::Ready(Err(error)) => Poll::Ready(Err(error)),
                Poll::Pending => Poll::Pending,
            },
        };
        self.unless_overdue(cx, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = match &mut self.transport {
            Transport::Unix(stream) => Pin::new(stream).poll_write_vectored(cx, bufs),
            Transport::Tcp(stream) => Pin::new(stream).poll_write_vectored(cx, bufs),
            Transport::Tls(tls) => match tls.poll_open(cx) {
                Poll::Ready(Ok(stream)) => stream.poll_write_vectored(cx, bufs),
                Poll::Ready(Err(error)) => Poll::Ready(Err(error)),
                Poll::Pending => Poll::Pending,
            },
        };
        self.unless_overdue(cx, written)
    }

    fn is_write_vectored(&self) -> bool {
        match &self.transport {
            Transport::Unix(stream) => stream.is_write_vectored(),
            Transport::Tcp(stream) => stream.is_write_vectored(),
            // As every TLS stream.
            Transport::Tls(_) => true,
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = match &mut self.transport {
            Transport::Unix(stream) => Pin::new(stream).poll_flush(cx),
            Transport::Tcp(stream) => Pin::new(stream).poll_flush(cx),
            Transport::Tls(tls) => match tls.poll_open(cx) {
                Poll::Ready(Ok(stream)) => stream.poll_flush(cx),
                Poll::Ready(Err(error)) => Poll::Ready(Err(error)),
                Poll::Pending => Poll::Pending,
            },
        };
        self.unless_overdue(cx, flushed)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match &mut self.transport {
            Transport::Unix(stream) => Pin::new(stream).poll_shutdown(cx),
            Transport::Tcp(stream) => Pin::new(stream).poll_shutdown(cx),
            // Who has not begun is not told goodbye.
            Transport::Tls(Tls::Open(stream)) => Pin::new(stream.as_mut()).poll_shutdown(cx),
            Transport::Tls(Tls::Handshake { .. } | Tls::Failed) => Poll::Ready(Ok(())),
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
        (incoming(vec![unix.into(), tcp.into()], None, 1, per_kind).expect("both kinds"), dir, address)
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
        assert!(matches!(next(&mut connections).await.line.peer, Peer::Unix { .. }));
        for connection in [&first, &second] {
            connection.line.calls.note(Latest::Admitted);
        }
        assert!(connections.next().now_or_never().is_none(), "a third was let in beside two that may call");
        drop(first);
        assert!(matches!(next(&mut connections).await.line.peer, Peer::Tcp { .. }));
        drop(second);
    }

    #[tokio::test]
    async fn the_oldest_that_may_not_call_goes_for_the_next() {
        let (mut connections, _dir, address) = listen(3);
        let connect = || std::net::TcpStream::connect(address).expect("at least queued");
        let _others = [connect(), connect(), connect()];
        let mut old = Vec::new();
        for _ in 0..3 {
            old.push(next(&mut connections).await);
        }
        old[0].line.calls.note(Latest::Admitted);
        let _user = connect();
        let new = {
            let mut new = std::pin::pin!(next(&mut connections));
            assert!((&mut new).now_or_never().is_none(), "nobody has gone yet");
            // The library notices when it reads or writes.
            let displaced = old[1].read_u8().await.expect_err("its place is another's");
            assert_eq!(displaced.kind(), io::ErrorKind::TimedOut);
            for other in [0, 2] {
                assert!(old[other].read_u8().now_or_never().is_none(), "{other} has to stay");
            }
            drop(old.remove(1));
            new.await
        };
        new.line.calls.note(Latest::Admitted);
        // It goes next, though a check of health was made over it.
        old[1].line.calls.note(Latest::Health(std::time::Instant::now()));
        let _another = connect();
        assert!(connections.next().now_or_never().is_none());
        assert!(old[1].read_u8().await.is_err());
    }

    /// A connection over which so many bytes of the preface have come.
    async fn begun(sent: usize) -> (Connection, (TcpStream, SelectAll<Connections>, tempfile::TempDir)) {
        let (mut connections, dir, address) = listen(2);
        let mut stranger = TcpStream::connect(address).await.expect("connected");
        let mut connection = next(&mut connections).await;
        stranger.write_all(&PREFACE[..sent]).await.expect("sent");
        let mut bytes = [0; PREFACE_BYTES];
        connection.read_exact(&mut bytes[..sent]).await.expect("arrives");
        assert_eq!(bytes[..sent], PREFACE[..sent]);
        (connection, (stranger, connections, dir))
    }

    #[tokio::test]
    async fn who_does_not_begin_or_call_in_time_is_cut_off() {
        for (sent, limit) in [(0, BEGIN_LIMIT), (PREFACE_BYTES - 1, BEGIN_LIMIT), (PREFACE_BYTES, FIRST_CALL_LIMIT)] {
            let before = Instant::now();
            let (mut connection, _kept) = begun(sent).await;
            let awaited = connection.awaited.as_mut().expect("no call was made");
            let until = awaited.until.deadline();
            assert!(until > before + limit / 2 && until <= Instant::now() + limit, "{sent} bytes");
            // From here on nothing comes, and the time is over.
            awaited.until.as_mut().reset(Instant::now());
            let error = connection.read_u8().await.expect_err("nothing came");
            assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        }
    }

    /// The library writes first, so a handshake that stands still is noticed there too.
    #[tokio::test]
    async fn a_handshake_that_stands_still_is_over_in_time_for_who_writes_too() {
        let key = rcgen::KeyPair::generate().expect("a key");
        let chain = rcgen::CertificateParams::default().self_signed(&key).expect("signed").pem();
        let tls = tls::ServerTls {
            chain: chain.into_bytes(),
            key: key.serialize_pem().into_bytes(),
            client_ca: None,
            certificate_required: false,
        };
        let socket = std::net::TcpListener::bind("127.0.0.1:0").expect("a socket");
        let address = socket.local_addr().expect("an address");
        let acceptor = tls.acceptor().expect("it is good");
        let mut connections = incoming(vec![socket.into()], Some(acceptor), 1, 2).expect("listening");
        let _stranger = TcpStream::connect(address).await.expect("connected");
        let mut connection = next(&mut connections).await;
        assert!(connection.write_u8(0).now_or_never().is_none(), "there is no handshake yet");
        assert!(connection.flush().now_or_never().is_none(), "there is no handshake yet");
        connection.awaited.as_mut().expect("waited for").until.as_mut().reset(Instant::now());
        let error = connection.write_u8(0).await.expect_err("its time is over");
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        let error = connection.flush().await.expect_err("its time is over");
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }

    #[tokio::test]
    async fn who_has_made_a_call_stays_and_who_asks_for_health_stays_a_while() {
        let over = |connection: &mut Connection| {
            // Before this process began: the timer need not turn to see it.
            let long_over = Instant::now() - FIRST_CALL_LIMIT;
            connection.awaited.as_mut().expect("waited for").until.as_mut().reset(long_over);
        };
        let (mut connection, _kept) = begun(PREFACE_BYTES).await;
        connection.line.calls.note(Latest::Health(std::time::Instant::now()));
        over(&mut connection);
        assert!(connection.read_u8().now_or_never().is_none(), "it was cut off");
        let until = connection.awaited.as_ref().expect("waited for").until.deadline();
        assert!(until > Instant::now() + FIRST_CALL_LIMIT / 2, "a check of health gives it its time again");

        connection.line.calls.note(Latest::Admitted);
        connection.line.calls.note(Latest::Health(std::time::Instant::now()));
        over(&mut connection);
        assert!(connection.read_u8().now_or_never().is_none(), "it was cut off");
        assert!(connection.awaited.is_none(), "nothing is waited for any more");
    }
}
