//! Asks a daemon how it is, as `executor-daemon health` does for containers.

use std::{
    io,
    path::{Path, PathBuf},
    time::Duration,
};

use executor_proto::tls::{self, ClientFiles, ClientTls};
use hyper_util::rt::TokioIo;
use rustls::pki_types::ServerName;
use tokio::net::{TcpStream, UnixStream};
use tokio_rustls::TlsConnector;
use tonic::{
    Code, Request,
    transport::{Channel, Endpoint, Uri},
};
use tonic_health::pb::{HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient};
use tower::service_fn;

/// Longest wait for the answer. Container engines give up after 30 s by default.
const ANSWER: Duration = Duration::from_secs(5);

/// What is asked, and how.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HealthOptions {
    /// `unix:PATH`, `https://HOST:PORT` or `http://HOST:PORT`.
    pub endpoint: String,
    /// A token to send along; the check needs none.
    pub token_file: Option<PathBuf>,
    /// For `https://`: the authority of the daemon's certificate.
    pub ca: Option<PathBuf>,
    /// For `https://`: a certificate to show.
    pub cert: Option<PathBuf>,
    /// Its private key.
    pub key: Option<PathBuf>,
}

/// Why a daemon is not known to serve.
#[derive(Debug, thiserror::Error)]
pub enum HealthError {
    /// The endpoint is none.
    #[error("endpoint {endpoint}: {problem}")]
    Endpoint {
        /// As it was given.
        endpoint: String,
        /// What is wrong with it.
        problem: String,
    },
    /// What TLS needs is missing or cannot be used.
    #[error("{0}")]
    Tls(String),
    /// The token cannot be read or sent.
    #[error("--token-file {path}: {problem}")]
    Token {
        /// As it was given.
        path: String,
        /// What is wrong with it.
        problem: String,
    },
    /// Nobody answers.
    #[error("{endpoint}: cannot be reached: {problem}")]
    Unreachable {
        /// As it was given.
        endpoint: String,
        /// Why not.
        problem: String,
    },
    /// It answers that it does not serve.
    #[error("{endpoint}: not serving{}", if *.stopping { ": it is stopping" } else { "" })]
    NotServing {
        /// As it was given.
        endpoint: String,
        /// It said so; else it said something that is no health.
        stopping: bool,
    },
}

impl HealthError {
    /// Whether the mistake is in what was asked, and not in the daemon that was asked about.
    #[must_use]
    pub fn is_usage(&self) -> bool {
        match self {
            Self::Endpoint { .. } | Self::Tls(_) | Self::Token { .. } => true,
            Self::Unreachable { .. } | Self::NotServing { .. } => false,
        }
    }
}

/// Asks once, within 5 s.
///
/// # Errors
/// Whenever the daemon did not answer that it serves.
pub async fn check(options: &HealthOptions) -> Result<(), HealthError> {
    let endpoint = options.endpoint.as_str();
    let token = options.token_file.as_deref().map(token).transpose()?;
    let unreachable = |problem: String| HealthError::Unreachable { endpoint: endpoint.to_owned(), problem };
    let answer = async {
        let channel = connect(options).await?;
        let mut request = Request::new(HealthCheckRequest { service: String::new() });
        if let Some(token) = token {
            request.metadata_mut().insert("authorization", token);
        }
        HealthClient::new(channel).check(request).await.map_err(|status| match status.code() {
            Code::Unimplemented | Code::NotFound => {
                HealthError::NotServing { endpoint: endpoint.to_owned(), stopping: false }
            }
            _other => unreachable(cause(&status)),
        })
    };
    let answer = tokio::time::timeout(ANSWER, answer)
        .await
        .map_err(|_elapsed| unreachable(format!("no answer within {} s", ANSWER.as_secs())))??;
    match answer.into_inner().status() {
        ServingStatus::Serving => Ok(()),
        ServingStatus::Unknown | ServingStatus::NotServing | ServingStatus::ServiceUnknown => {
            Err(HealthError::NotServing { endpoint: endpoint.to_owned(), stopping: true })
        }
    }
}

async fn connect(options: &HealthOptions) -> Result<Channel, HealthError> {
    const KINDS: &str = "must be unix:PATH, https://HOST:PORT or http://HOST:PORT";

    let endpoint = options.endpoint.as_str();
    let mistake = |problem: &str| HealthError::Endpoint { endpoint: endpoint.to_owned(), problem: problem.to_owned() };
    let unreachable = |error: tonic::transport::Error| HealthError::Unreachable {
        endpoint: endpoint.to_owned(),
        problem: cause(&error),
    };
    if let Some(path) = endpoint.strip_prefix("unix:") {
        let path = path.strip_prefix("//").filter(|rest| rest.starts_with('/')).unwrap_or(path).to_owned();
        if path.is_empty() {
            return Err(mistake(KINDS));
        }
        let connector = service_fn(move |_: Uri| {
            let path = path.clone();
            async move { UnixStream::connect(path).await.map(TokioIo::new) }
        });
        // The address is not used on a Unix socket, but every request has one.
        return Endpoint::from_static("http://localhost").connect_with_connector(connector).await.map_err(unreachable);
    }
    if endpoint.starts_with("https://") {
        let uri: Uri = endpoint.parse().map_err(|error| mistake(&cause(&error)))?;
        let (Some(host), Some(port)) = (uri.host(), uri.port_u16()) else { return Err(mistake(KINDS)) };
        let host = host.trim_start_matches('[').trim_end_matches(']').to_owned();
        let name = ServerName::try_from(host.clone()).map_err(|_error| mistake("no certificate can have this name"))?;
        let tls = TlsConnector::from(client_tls(options)?.config());
        let connector = service_fn(move |_: Uri| {
            let (tls, name, host) = (tls.clone(), name.clone(), host.clone());
            async move {
                let stream = TcpStream::connect((host, port)).await?;
                let opened = tls.connect(name, stream).await;
                opened.map(TokioIo::new).map_err(|error| tls::refusal(&error).map_or(error, io::Error::other))
            }
        });
        // The connector speaks TLS, the library knows only of the connection inside.
        return Endpoint::from_static("http://localhost").connect_with_connector(connector).await.map_err(unreachable);
    }
    if !endpoint.starts_with("http://") {
        return Err(mistake(KINDS));
    }
    let address = Endpoint::from_shared(endpoint.to_owned()).map_err(|error| mistake(&cause(&error)))?;
    address.connect().await.map_err(unreachable)
}

fn client_tls(options: &HealthOptions) -> Result<ClientTls, HealthError> {
    let missing = |what: &str| HealthError::Tls(format!("{what} must be given"));
    let ca = options.ca.clone().ok_or_else(|| missing("--ca, the authority of the daemon's certificate,"))?;
    let identity = match (options.cert.clone(), options.key.clone()) {
        (Some(cert), Some(key)) => Some((cert, key)),
        (None, None) => None,
        (Some(_), None) => return Err(missing("--key, the key of that certificate,")),
        (None, Some(_)) => return Err(missing("--cert, the certificate of that key,")),
    };
    ClientTls::read(&ClientFiles { ca, identity }).map_err(|error| HealthError::Tls(error.to_string()))
}

/// The innermost cause: the outer ones only say that the transport failed.
fn cause(error: &dyn std::error::Error) -> String {
    let mut error = error;
    while let Some(source) = error.source() {
        error = source;
    }
    error.to_string()
}

fn token(path: &Path) -> Result<tonic::metadata::MetadataValue<tonic::metadata::Ascii>, HealthError> {
    let mistake = |problem: String| HealthError::Token { path: path.display().to_string(), problem };
    let text = std::fs::read_to_string(path).map_err(|error| mistake(format!("cannot be read: {error}")))?;
    let token = text.lines().map(str::trim).find(|line| !line.is_empty());
    let token = token.ok_or_else(|| mistake("holds no token".to_owned()))?;
    format!("Bearer {token}").parse().map_err(|_error| mistake("holds no token that can be sent".to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn what_is_no_endpoint_is_a_usage_error_and_a_dead_one_is_not() {
        let at = |endpoint: &str| HealthOptions { endpoint: endpoint.to_owned(), ..HealthOptions::default() };
        for (endpoint, says) in [
            ("/run/x.sock", "must be unix:PATH, https://HOST:PORT or http://HOST:PORT"),
            ("unix:", "must be unix:PATH, https://HOST:PORT or http://HOST:PORT"),
            ("https://localhost", "must be unix:PATH, https://HOST:PORT or http://HOST:PORT"),
            ("https://localhost:1", "--ca, the authority of the daemon's certificate, must be given"),
        ] {
            let error = check(&at(endpoint)).await.expect_err(endpoint);
            assert!(error.is_usage(), "{endpoint}");
            assert!(error.to_string().contains(says), "{error}");
        }
        let dead = check(&at("unix:/nowhere/x.sock")).await.expect_err("nobody is there");
        assert!(!dead.is_usage());
        assert_eq!(dead.to_string(), "unix:/nowhere/x.sock: cannot be reached: No such file or directory (os error 2)");
    }
}
