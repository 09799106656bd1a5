//! Asks a daemon how it is, as `executor-daemon health` does for containers.

use std::{path::Path, time::Duration};

use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tonic::{
    Code, Request,
    transport::{Channel, Endpoint, Uri},
};
use tonic_health::pb::{HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient};
use tower::service_fn;

/// Longest wait for the answer. Container engines give up after 30 s by default.
const ANSWER: Duration = Duration::from_secs(5);

/// Why a daemon is not known to serve.
#[derive(Debug, thiserror::Error)]
pub enum HealthError {
    /// The endpoint is none.
    #[error("--endpoint {endpoint}: {problem}")]
    Endpoint {
        /// As it was given.
        endpoint: String,
        /// What is wrong with it.
        problem: String,
    },
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
            Self::Endpoint { .. } | Self::Token { .. } => true,
            Self::Unreachable { .. } | Self::NotServing { .. } => false,
        }
    }
}

/// Asks once, within 5 s.
///
/// # Errors
/// Whenever the daemon did not answer that it serves.
pub async fn check(endpoint: &str, token_file: Option<&Path>) -> Result<(), HealthError> {
    let token = token_file.map(token).transpose()?;
    let unreachable = |problem: String| HealthError::Unreachable { endpoint: endpoint.to_owned(), problem };
    let answer = async {
        let channel = connect(endpoint).await?;
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

async fn connect(endpoint: &str) -> Result<Channel, HealthError> {
    let mistake = |problem: &str| HealthError::Endpoint { endpoint: endpoint.to_owned(), problem: problem.to_owned() };
    let unreachable = |error: tonic::transport::Error| HealthError::Unreachable {
        endpoint: endpoint.to_owned(),
        problem: cause(&error),
    };
    if let Some(path) = endpoint.strip_prefix("unix:") {
        let path = path.strip_prefix("//").filter(|rest| rest.starts_with('/')).unwrap_or(path).to_owned();
        if path.is_empty() {
            return Err(mistake("must be unix:PATH or http://HOST:PORT"));
        }
        let connector = service_fn(move |_: Uri| {
            let path = path.clone();
            async move { UnixStream::connect(path).await.map(TokioIo::new) }
        });
        // The address is not used on a Unix socket, but every request has one.
        return Endpoint::from_static("http://localhost").connect_with_connector(connector).await.map_err(unreachable);
    }
    if endpoint.starts_with("https://") {
        return Err(mistake("TLS is not supported yet; use http://HOST:PORT or unix:PATH"));
    }
    if !endpoint.starts_with("http://") {
        return Err(mistake("must be unix:PATH or http://HOST:PORT"));
    }
    let address = Endpoint::from_shared(endpoint.to_owned()).map_err(|error| mistake(&cause(&error)))?;
    address.connect().await.map_err(unreachable)
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
        for (endpoint, says) in [
            ("/run/x.sock", "must be unix:PATH or http://HOST:PORT"),
            ("unix:", "must be unix:PATH or http://HOST:PORT"),
            ("https://localhost:1", "TLS is not supported yet"),
        ] {
            let error = check(endpoint, None).await.expect_err(endpoint);
            assert!(error.is_usage(), "{endpoint}");
            assert!(error.to_string().contains(says), "{error}");
        }
        let dead = check("unix:/nowhere/x.sock", None).await.expect_err("nobody is there");
        assert!(!dead.is_usage());
        assert_eq!(dead.to_string(), "unix:/nowhere/x.sock: cannot be reached: No such file or directory (os error 2)");
    }
}
