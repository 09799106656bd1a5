//! Making a connection, each within its time, with TLS where the endpoint says so.
//!
//! The calls that wait for a connection wait in a line: when an attempt fails, the first of them is told, and the next one
//! would begin an attempt of its own. Behind a host that swallows packets the tenth call would learn of it after ten times
//! the limit. So an attempt that took its whole time answers for those that were waiting meanwhile.

use std::{
    io,
    net::SocketAddr,
    pin::Pin,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use executor_proto::tls;
use hyper_util::rt::TokioIo;
use rustls::pki_types::ServerName;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpStream, UnixStream},
    time::{Instant, timeout},
};
use tokio_rustls::TlsConnector;

use super::{ClientTls, Endpoint, Peer, peer::Heard};

/// After an attempt that took its whole time, those that begin so soon are of calls that were waiting: the line moves on
/// within microseconds, and a busy machine gets a thousand times that.
const WAITED_MEANWHILE: Duration = Duration::from_millis(20);

pub(super) trait Io: AsyncRead + AsyncWrite + Send {}
impl<T: AsyncRead + AsyncWrite + Send> Io for T {}
pub(super) type Connection = Pin<Box<dyn Io>>;

/// The connection could not be established. Found in the source chain of a status, it proves that nothing was sent.
#[derive(Debug, thiserror::Error)]
pub(in super::super) enum ConnectFailure {
    /// It may go better the next time.
    #[error("{0}")]
    Passing(String),
    /// One side does not trust the other, and will not the next time either.
    #[error("{0}")]
    Untrusted(String),
}

/// Makes the connections to one executor.
#[derive(Debug, Clone)]
pub(super) struct Connector {
    target: Endpoint,
    /// Of those that the target's name has.
    address: Option<SocketAddr>,
    tls: Option<ClientTls>,
    limit: Duration,
    heard: Peer,
    /// When an attempt last took its whole time.
    stuck: Arc<Mutex<Option<Instant>>>,
}

impl Connector {
    pub(super) fn new(
        target: Endpoint,
        address: Option<SocketAddr>,
        tls: Option<ClientTls>,
        limit: Duration,
        heard: Peer,
    ) -> Self {
        Self { target, address, tls, limit, heard, stuck: Arc::default() }
    }

    /// A connection, within the limit.
    pub(super) async fn connect(self) -> Result<TokioIo<Heard<Connection>>, ConnectFailure> {
        let failure = || ConnectFailure::Passing(format!("no connection within {}ms", self.limit.as_millis()));
        if self.stuck().is_some_and(|stuck| stuck.elapsed() < WAITED_MEANWHILE) {
            return Err(failure());
        }
        match timeout(self.limit, open(&self.target, self.address, self.tls.as_ref())).await {
            Ok(Ok(stream)) => Ok(TokioIo::new(Heard::new(stream, self.heard.clone()))),
            Ok(Err(failure)) => Err(failure),
            Err(_elapsed) => {
                *self.stuck() = Some(Instant::now());
                Err(failure())
            }
        }
    }

    fn stuck(&self) -> std::sync::MutexGuard<'_, Option<Instant>> {
        // A time is put there whole.
        self.stuck.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

async fn open(
    endpoint: &Endpoint,
    address: Option<SocketAddr>,
    tls: Option<&ClientTls>,
) -> Result<Connection, ConnectFailure> {
    let opened = match endpoint {
        Endpoint::Unix(path) => UnixStream::connect(path).await.map(|stream| Box::pin(stream) as Connection),
        Endpoint::Tcp { host, port } => tcp(host, *port, address).await.map(|stream| Box::pin(stream) as Connection),
        Endpoint::Tls { host, port } => {
            let Some(tls) = tls else {
                return Err(ConnectFailure::Untrusted(NO_CA.to_owned()));
            };
            let name = ServerName::try_from(host.clone())
                .map_err(|_no_name| ConnectFailure::Untrusted("no certificate can have this name".to_owned()))?;
            match tcp(host, *port, address).await {
                Ok(stream) => {
                    let handshake = TlsConnector::from(tls.config()).connect(name, stream).await;
                    handshake.map(|stream| Box::pin(stream) as Connection)
                }
                Err(error) => Err(error),
            }
        }
    };
    opened.map_err(|error| match tls::refusal(&error) {
        Some(refusal) => ConnectFailure::Untrusted(refusal),
        None if error.kind() == io::ErrorKind::UnexpectedEof => {
            ConnectFailure::Passing("it closed the connection in the TLS handshake".to_owned())
        }
        None => ConnectFailure::Passing(in_words(&error)),
    })
}

async fn tcp(host: &str, port: u16, address: Option<SocketAddr>) -> io::Result<TcpStream> {
    let stream = match address {
        Some(address) => TcpStream::connect(address).await?,
        None => TcpStream::connect((host, port)).await?,
    };
    stream.set_nodelay(true)?;
    Ok(stream)
}

/// What somebody is told who has named no authority.
const NO_CA: &str = "https:// needs the CA that the executor's certificate is signed by; name its file (--ca)";

/// An error of the operating system without its number, as people know it: `connection refused`.
fn in_words(error: &io::Error) -> String {
    let text = error.to_string();
    let words = text.split(" (os error").next().unwrap_or_default();
    let mut chars = words.chars();
    chars.next().map(|first| first.to_lowercase().chain(chars).collect()).unwrap_or_default()
}
