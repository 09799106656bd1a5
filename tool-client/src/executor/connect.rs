//! Reaching an executor: endpoints, tokens, TLS, and the connection that tells whether a request can have arrived.
//!
//! A connection is made when the first call needs it and again when it was lost. What matters to the rest of the client is
//! one fact about each request: was its message handed to a connection? A command of a request that was not cannot have
//! been started. `Wire` knows it, because it wraps each request's body and sees the transport take it.

use std::{
    fmt,
    net::SocketAddr,
    path::{Path, PathBuf},
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU8, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
pub use executor_proto::tls::{ClientFiles, ClientTls, ClientTlsError};
use executor_proto::transport;
use http::{HeaderValue, Uri, header::AUTHORIZATION};
use http_body::{Body as HttpBody, Frame, SizeHint};
use tonic::{
    Status,
    body::Body,
    transport::{Channel, channel::ResponseFuture},
};
use tower::Service;

mod connector;
mod peer;

pub(super) use connector::ConnectFailure;
use connector::Connector;
pub(super) use peer::Peer;

/// What the executor may send on one stream before it is read.
const STREAM_WINDOW_BYTES: u32 = 512 * 1024;
/// The same for the connection. So large that streams whose readers stand still never keep the others waiting.
const CONNECTION_WINDOW_BYTES: u32 = 256 * 1024 * 1024;
/// A token is one line of a file; what is longer is not a token.
const MAX_TOKEN_FILE_BYTES: u64 = 64 * 1024;

/// How a connection is watched while nothing comes over it. One that is half-open is found to be lost after both times
/// together, and the next call connects again. The daemon takes pings however often they come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Keepalive {
    /// A ping after so long without a byte from the executor. Default 10 s.
    pub interval: Duration,
    /// Longest wait for its answer. Default 10 s.
    pub timeout: Duration,
}

impl Default for Keepalive {
    fn default() -> Self {
        Self { interval: transport::CLIENT_PING_INTERVAL, timeout: transport::CLIENT_PING_TIMEOUT }
    }
}

/// Where an executor is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Endpoint {
    /// A Unix socket, by its absolute path: `unix:/path` or `unix:///path`.
    Unix(PathBuf),
    /// Over TCP with TLS: `https://host:port`. The executor's certificate must have that name.
    Tls {
        /// A name, an IPv4 address, or an IPv6 address without brackets.
        host: String,
        /// 1 to 65 535.
        port: u16,
    },
    /// Without encryption, over TCP: `http://host:port`.
    Tcp {
        /// A name, an IPv4 address, or an IPv6 address without brackets.
        host: String,
        /// 1 to 65 535.
        port: u16,
    },
}

/// A text that is not an endpoint. Says what to write instead.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EndpointError {
    /// It is of no kind that is known.
    #[error("endpoint {0:?}: {1}; use unix:/path, https://host:port or, on a private network, http://host:port")]
    Malformed(String, &'static str),
    /// Hosts of one executor that are reached in different ways.
    #[error("endpoints {0:?}: several endpoints are all https:// or all http://; of Unix sockets name one")]
    Mixed(String),
}

impl Endpoint {
    /// Reads an endpoint.
    ///
    /// # Errors
    /// The text is no endpoint of a kind that is supported.
    pub fn parse(text: &str) -> Result<Self, EndpointError> {
        let malformed = |problem| Err(EndpointError::Malformed(text.to_owned(), problem));
        if let Some(path) = text.strip_prefix("unix:") {
            let path = path.strip_prefix("//").unwrap_or(path);
            return match path {
                _ if !path.starts_with('/') => malformed("the path of a Unix socket must be absolute"),
                _ if path.contains('\0') => malformed("the path holds a NUL byte"),
                _ => Ok(Self::Unix(PathBuf::from(path))),
            };
        }
        let Ok(uri) = text.parse::<Uri>() else { return malformed("it is neither a Unix socket nor a URL") };
        let (Some(scheme @ ("http" | "https")), Some(authority)) = (uri.scheme_str(), uri.authority()) else {
            return malformed("it is neither a Unix socket nor an https:// or http:// URL");
        };
        if authority.as_str().contains('@') {
            return malformed("a user name has no meaning here, the token is in a file");
        }
        if uri.path_and_query().is_some_and(|rest| rest.as_str() != "/") {
            return malformed("nothing may follow the port");
        }
        let host = authority.host().trim_start_matches('[').trim_end_matches(']').to_owned();
        match authority.port_u16() {
            _ if host.is_empty() => malformed("the host is missing"),
            None | Some(0) => malformed("the port is missing"),
            Some(port) if scheme == "https" => Ok(Self::Tls { host, port }),
            Some(port) => Ok(Self::Tcp { host, port }),
        }
    }

    /// Reads one endpoint, or several with commas between them: the hosts of one executor.
    ///
    /// # Errors
    /// One of them is none, or they are not all of one kind.
    pub fn parse_list(text: &str) -> Result<Vec<Self>, EndpointError> {
        // A path may hold a comma.
        if text.starts_with("unix:") {
            let begins_another =
                |rest: &str| ["unix:", "http://", "https://"].iter().any(|kind| rest.starts_with(kind));
            if text.split(',').skip(1).any(|rest| begins_another(rest.trim_start())) {
                return Err(EndpointError::Mixed(text.to_owned()));
            }
            return Ok(vec![Self::parse(text)?]);
        }
        let all: Vec<Self> = text.split(',').map(str::trim).map(Self::parse).collect::<Result<_, _>>()?;
        let same_kind = all.iter().all(|one| std::mem::discriminant(one) == std::mem::discriminant(&all[0]));
        if same_kind { Ok(all) } else { Err(EndpointError::Mixed(text.to_owned())) }
    }

    /// What requests name as their authority. A Unix socket has none; every server takes `localhost`.
    fn authority(&self) -> String {
        let (scheme, host, port) = match self {
            Self::Unix(_) => return "http://localhost".to_owned(),
            Self::Tls { host, port } => ("https", host, port),
            Self::Tcp { host, port } => ("http", host, port),
        };
        if host.contains(':') { format!("{scheme}://[{host}]:{port}") } else { format!("{scheme}://{host}:{port}") }
    }

    /// Whether it is reached with TLS.
    #[must_use]
    pub fn is_tls(&self) -> bool {
        matches!(self, Self::Tls { .. })
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Tls { .. } | Self::Tcp { .. } => f.write_str(&self.authority()),
        }
    }
}

/// How a client shows who it is, and whom it trusts. The default is neither, which is enough for a Unix socket.
#[derive(Debug, Clone, Default)]
pub struct Access {
    /// Sent with every call.
    pub token: Option<Token>,
    /// For `https://`, which cannot be connected to without: what the executor's certificate is checked against, and this
    /// client's own certificate, if it has one.
    pub tls: Option<ClientTls>,
}

impl From<Option<Token>> for Access {
    fn from(token: Option<Token>) -> Self {
        Self { token, tls: None }
    }
}

/// The bearer token that identifies this client.
#[derive(Clone)]
pub struct Token(HeaderValue);

/// A token file that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TokenError {
    /// It cannot be read.
    #[error("token file {}: {source}", .path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// Its first line is no token.
    #[error("token file {}: {problem}", .path.display())]
    NoToken {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        problem: &'static str,
    },
}

/// A text that cannot be sent as a token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the token holds a control character")]
pub struct NotAToken;

/// What [`super::remote::RemoteExecutor::connect`] cannot work with.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ConnectError {
    /// The endpoint.
    #[error(transparent)]
    Endpoint(#[from] EndpointError),
    /// The token.
    #[error(transparent)]
    Token(#[from] NotAToken),
}

impl Token {
    /// Takes the first line of a file, without the blanks around it.
    ///
    /// # Errors
    /// The file cannot be read, or its first line is empty or not printable ASCII.
    pub fn read(path: &Path) -> Result<Self, TokenError> {
        use std::io::Read;
        let mut text = Vec::new();
        std::fs::File::open(path)
            .and_then(|file| file.take(MAX_TOKEN_FILE_BYTES).read_to_end(&mut text))
            .map_err(|source| TokenError::Unreadable { path: path.to_owned(), source })?;
        let line = text.split(|byte| *byte == b'\n').next().unwrap_or_default().trim_ascii();
        let no_token = |problem| TokenError::NoToken { path: path.to_owned(), problem };
        if line.is_empty() {
            return Err(no_token("its first line is empty"));
        }
        if !line.iter().all(u8::is_ascii_graphic) {
            return Err(no_token("its first line holds something that is not printable ASCII"));
        }
        Self::new(&String::from_utf8_lossy(line)).map_err(|NotAToken| no_token("its first line cannot be sent"))
    }

    /// A token as it is.
    ///
    /// # Errors
    /// It holds a control character and cannot be sent.
    pub fn new(token: &str) -> Result<Self, NotAToken> {
        let mut value = HeaderValue::try_from(format!("Bearer {token}")).map_err(|_control_character| NotAToken)?;
        value.set_sensitive(true);
        Ok(Self(value))
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(…)")
    }
}

/// Whether a request's message was handed to a connection. Put into the extensions of the request.
#[derive(Debug, Clone, Default)]
pub(super) struct Sent(Arc<AtomicU8>);

const UNSENT: u8 = 0;
const SENT: u8 = 1;
/// It will never be handed out.
const WITHDRAWN: u8 = 2;

impl Sent {
    /// Of a request that is known to have arrived.
    pub(super) fn already() -> Self {
        Self(Arc::new(AtomicU8::new(SENT)))
    }

    /// Before the next attempt at a call.
    pub(super) fn reset(&self) {
        self.0.store(UNSENT, Ordering::Release);
    }

    pub(super) fn get(&self) -> bool {
        self.0.load(Ordering::Acquire) == SENT
    }

    /// Keeps the request from ever being handed out. `false`: it was already.
    pub(super) fn withdraw(&self) -> bool {
        self.decide(WITHDRAWN)
    }

    /// The request is handed out now. `false`: it was withdrawn, and must not be.
    fn hand_out(&self) -> bool {
        self.decide(SENT)
    }

    /// Decides what was undecided; whether the decision is this one.
    fn decide(&self, decided: u8) -> bool {
        let before = self.0.compare_exchange(UNSENT, decided, Ordering::AcqRel, Ordering::Acquire);
        before.map_or_else(|before| before == decided, |_unsent| true)
    }
}

/// The channel to one executor, with this client's identity on every call.
#[derive(Debug, Clone)]
pub(super) struct Wire {
    channel: Channel,
    token: Option<Token>,
    peer: Peer,
}

impl Wire {
    /// Nothing is connected before the first call. Must be called inside a tokio runtime.
    /// `address`: of those that the endpoint's name has, the one to connect to.
    pub(super) fn new(
        endpoint: &Endpoint,
        address: Option<SocketAddr>,
        access: Access,
        connect_limit: Duration,
        keepalive: Keepalive,
    ) -> Self {
        let Access { token, tls } = access;
        let peer = Peer::default();
        let connector = Connector::new(endpoint.clone(), address, tls, connect_limit, peer.clone());
        let connector = tower::service_fn(move |_: Uri| connector.clone().connect());
        // The connector speaks TLS where that is spoken, the library knows only of the connection inside.
        let plain = endpoint.authority().replacen("https://", "http://", 1);
        let channel = tonic::transport::Endpoint::from_shared(plain)
            .and_then(|builder| builder.user_agent(concat!("tool-client/", env!("CARGO_PKG_VERSION"))))
            .expect("a parsed endpoint and a constant name make a valid channel")
            .http2_keep_alive_interval(keepalive.interval)
            .keep_alive_timeout(keepalive.timeout)
            .keep_alive_while_idle(true)
            .initial_stream_window_size(STREAM_WINDOW_BYTES)
            .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
            .connect_with_connector_lazy(connector);
        Self { channel, token, peer }
    }

    pub(super) fn peer(&self) -> &Peer {
        &self.peer
    }
}

impl Service<http::Request<Body>> for Wire {
    type Response = http::Response<Body>;
    type Error = tonic::transport::Error;
    type Future = ResponseFuture;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.channel.poll_ready(cx)
    }

    fn call(&mut self, mut request: http::Request<Body>) -> Self::Future {
        if let Some(Token(value)) = &self.token {
            request.headers_mut().insert(AUTHORIZATION, value.clone());
        }
        let version = HeaderValue::from_static(env!("CARGO_PKG_VERSION"));
        request.headers_mut().insert(CLIENT_VERSION, version);
        let sent = request.extensions().get::<Sent>().cloned().unwrap_or_default();
        self.channel.call(request.map(|body| Body::new(WatchedBody { body, sent })))
    }
}

/// Metadata with the version of this client, for the daemon's log.
const CLIENT_VERSION: &str = "executor-client-version";

/// A request's body that notes when the transport takes from it.
struct WatchedBody {
    body: Body,
    sent: Sent,
}

impl HttpBody for WatchedBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = self.get_mut();
        let frame = Pin::new(&mut this.body).poll_frame(cx);
        match frame {
            Poll::Ready(Some(Ok(_))) if !this.sent.hand_out() => {
                Poll::Ready(Some(Err(Status::cancelled("the call was aborted before it was sent"))))
            }
            frame => frame,
        }
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_that_are_understood() {
        let unix = Endpoint::Unix("/run/x.sock".into());
        let tcp = |host: &str, port| Endpoint::Tcp { host: host.to_owned(), port };
        let tls = |host: &str, port| Endpoint::Tls { host: host.to_owned(), port };
        for (text, expected, shown) in [
            ("unix:/run/x.sock", unix.clone(), "unix:/run/x.sock"),
            ("unix:///run/x.sock", unix, "unix:/run/x.sock"),
            ("http://127.0.0.1:7070", tcp("127.0.0.1", 7070), "http://127.0.0.1:7070"),
            ("http://daemon:7070/", tcp("daemon", 7070), "http://daemon:7070"),
            ("http://[::1]:7070", tcp("::1", 7070), "http://[::1]:7070"),
            ("https://daemon:7070", tls("daemon", 7070), "https://daemon:7070"),
            ("HTTPS://[::1]:7070/", tls("::1", 7070), "https://[::1]:7070"),
        ] {
            let endpoint = Endpoint::parse(text).expect(text);
            assert_eq!(endpoint, expected, "{text}");
            assert_eq!(endpoint.to_string(), shown);
        }
    }

    #[test]
    fn endpoints_that_are_not_get_one_line_that_says_what_to_write() {
        for text in [
            "",
            "unix:",
            "unix:x.sock",
            "unix://x.sock",
            "tcp:127.0.0.1:1",
            "127.0.0.1:7070",
            "http://",
            "http://daemon",
            "http://daemon:0",
            "http://daemon:99999",
            "http://:7070",
            "http://u:p@daemon:1",
            "http://daemon:1/path",
            "http://daemon:1/?q",
            "ftp://daemon:1",
            "http://a b:1",
            "https://daemon",
            "https://daemon:1/path",
        ] {
            let error = Endpoint::parse(text).expect_err(text).to_string();
            assert!(error.contains("use unix:/path, https://host:port or") && !error.contains('\n'), "{error}");
            assert!(error.contains(&format!("{text:?}")), "{error}");
        }
    }

    #[test]
    fn several_endpoints_are_of_one_kind() {
        let parsed =
            |text| Endpoint::parse_list(text).map(|all| all.iter().map(ToString::to_string).collect::<Vec<_>>());
        assert_eq!(parsed("https://a:1, https://b:2"), Ok(vec!["https://a:1".to_owned(), "https://b:2".to_owned()]));
        assert_eq!(parsed("unix:/a,b"), Ok(vec!["unix:/a,b".to_owned()]));
        for bad in
            ["https://a:1,http://b:2", "https://a:1,", "https://a:1,unix:/x", "unix:/a,unix:/b", "unix:/a, https://b:1"]
        {
            assert!(parsed(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_request_is_handed_out_or_withdrawn_but_never_both() {
        let sent = Sent::default();
        assert!(!sent.get());
        assert!(sent.hand_out() && sent.hand_out() && sent.get());
        assert!(!sent.withdraw() && sent.get());
        sent.reset();
        assert!(sent.withdraw() && sent.withdraw());
        assert!(!sent.hand_out() && !sent.get());
    }

    #[test]
    fn a_token_is_the_first_line_of_its_file() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("token");
        let read = |content: &str| {
            std::fs::write(&path, content).expect("written");
            Token::read(&path)
        };
        let token = read(" s3cret \nsecond line\n").expect("a token");
        assert_eq!(token.0, "Bearer s3cret");
        assert!(!format!("{token:?}").contains("s3cret"));
        for bad in ["", "\n", "  \nsecond", "a b", "gr\u{fc}n"] {
            assert!(matches!(read(bad), Err(TokenError::NoToken { .. })), "{bad:?}");
        }
        let missing = Token::read(&dir.path().join("none")).expect_err("it is missing").to_string();
        assert!(missing.contains("none: No such file"), "{missing}");
    }
}
