//! Calls as no client of ours makes them: any headers, any certificate, any bytes.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use bytes::{Buf, BufMut, Bytes};
use executor_proto::tls::{certificates, private_key, provider, roots};
use hyper_util::rt::TokioIo;
use prost::Message;
use rustls::{ClientConfig, pki_types::ServerName};
use tokio::net::TcpStream;
use tokio_rustls::{TlsConnector, client::TlsStream};
use tonic::{
    Request, Status,
    codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder},
    metadata::{AsciiMetadataKey, AsciiMetadataValue},
    transport::{Channel, Endpoint, Uri},
};

use crate::rig::Rig;

/// Longest wait for an answer.
const ANSWER: Duration = Duration::from_secs(10);

/// The methods' paths begin so.
pub(crate) const SERVICE: &str = "/executor.v1.Executor/";

/// Messages as bytes, whatever they hold.
#[derive(Debug, Clone, Copy, Default)]
struct Raw;

impl Codec for Raw {
    type Encode = Bytes;
    type Decode = Bytes;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        Self
    }

    fn decoder(&mut self) -> Self {
        Self
    }
}

impl Encoder for Raw {
    type Item = Bytes;
    type Error = Status;

    fn encode(&mut self, item: Bytes, buf: &mut EncodeBuf<'_>) -> Result<(), Status> {
        buf.put(item);
        Ok(())
    }
}

impl Decoder for Raw {
    type Item = Bytes;
    type Error = Status;

    fn decode(&mut self, buf: &mut DecodeBuf<'_>) -> Result<Option<Bytes>, Status> {
        Ok(Some(buf.copy_to_bytes(buf.remaining())))
    }
}

/// A call.
#[derive(Debug, Clone, Default)]
pub(crate) struct Call {
    /// The certificate that is shown: its path without the ending.
    pub(crate) identity: Option<PathBuf>,
    /// Headers, in this order; the same name may come again.
    pub(crate) headers: Vec<(String, String)>,
    /// The path.
    pub(crate) path: String,
    /// What the client says whom it means to reach.
    pub(crate) authority: Option<String>,
    /// The message.
    pub(crate) message: Bytes,
}

impl Call {
    /// Asks what the daemon is, as whoever has nothing.
    pub(crate) fn info() -> Self {
        Self { path: format!("{SERVICE}GetInfo"), ..Self::default() }
    }

    /// Calls a method with a message.
    pub(crate) fn method(name: &str, message: &impl Message) -> Self {
        Self { path: format!("{SERVICE}{name}"), message: message.encode_to_vec().into(), ..Self::default() }
    }

    /// With another header.
    pub(crate) fn header(mut self, name: &str, value: impl Into<String>) -> Self {
        self.headers.push((name.to_owned(), value.into()));
        self
    }

    /// With a token.
    pub(crate) fn token(self, token: &str) -> Self {
        self.header("authorization", format!("Bearer {token}"))
    }

    /// With a certificate.
    pub(crate) fn certificate(mut self, path: impl Into<PathBuf>) -> Self {
        self.identity = Some(path.into());
        self
    }

    /// To another path.
    pub(crate) fn to(mut self, path: &str) -> Self {
        path.clone_into(&mut self.path);
        self
    }

    /// Makes it over a connection of its own. All messages of the answer; where there are none that end, the first.
    pub(crate) async fn make(self, rig: &Rig) -> Result<Vec<Bytes>, Status> {
        let over = tokio::time::timeout(ANSWER, self.answer(rig)).await;
        over.unwrap_or_else(|_over| Err(Status::deadline_exceeded("no answer")))
    }

    async fn answer(self, rig: &Rig) -> Result<Vec<Bytes>, Status> {
        let Self { identity, headers, path, authority, message } = self;
        let channel = channel(rig, identity.as_deref(), authority.as_deref()).await?;
        let mut client = tonic::client::Grpc::new(channel);
        client.ready().await.map_err(|error| Status::unavailable(error.to_string()))?;
        let mut request = Request::new(message);
        for (name, value) in headers {
            let name = AsciiMetadataKey::from_bytes(name.as_bytes()).expect("a name");
            request.metadata_mut().append(name, AsciiMetadataValue::try_from(value).expect("a value"));
        }
        let path = path.parse().expect("a path");
        let mut events = client.server_streaming(request, path, Raw).await?.into_inner();
        let mut all = Vec::new();
        while let Some(message) = events.message().await? {
            all.push(message);
            // Watches and the like have no end.
            if all.len() == 64 {
                break;
            }
        }
        Ok(all)
    }
}

/// An open connection with TLS, on which nothing was said yet.
pub(crate) async fn connect(rig: &Rig, identity: Option<&Path>) -> std::io::Result<TlsStream<TcpStream>> {
    let read = |path: PathBuf| std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let builder = ClientConfig::builder_with_provider(provider()).with_safe_default_protocol_versions();
    let builder = builder.expect("versions").with_root_certificates(roots(&read(rig.at("tls/ca.crt"))).expect("a CA"));
    let mut config = match identity {
        None => builder.with_no_client_auth(),
        Some(path) => {
            let chain = certificates(&read(path.with_extension("crt"))).expect("a certificate");
            let key = private_key(&read(path.with_extension("key"))).expect("a key");
            builder.with_client_auth_cert(chain, key).expect("they belong together")
        }
    };
    config.alpn_protocols = vec![b"h2".to_vec()];
    let stream = TcpStream::connect(("127.0.0.1", rig.port())).await?;
    stream.set_nodelay(true)?;
    let name = ServerName::try_from("localhost").expect("a name");
    TlsConnector::from(Arc::new(config)).connect(name, stream).await
}

async fn channel(rig: &Rig, identity: Option<&Path>, authority: Option<&str>) -> Result<Channel, Status> {
    let stream = connect(rig, identity).await.map_err(|error| Status::unauthenticated(error.to_string()))?;
    let mut stream = Some(stream);
    let endpoint = Endpoint::from_shared(format!("http://{}", authority.unwrap_or("localhost"))).expect("an authority");
    let connector = tower::service_fn(move |_: Uri| {
        let stream = stream.take();
        async move { stream.map(TokioIo::new).ok_or_else(|| std::io::Error::other("one connection only")) }
    });
    endpoint.connect_with_connector(connector).await.map_err(|error| Status::unauthenticated(format!("{error:?}")))
}
