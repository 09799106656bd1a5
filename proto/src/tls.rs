//! TLS as both sides use it: certificates and keys from PEM files, the client's configuration, and what a failed handshake
//! means in words. The cryptography is ring's, which needs nothing but a C compiler to build.

use std::{
    fmt, io,
    path::{Path, PathBuf},
    sync::Arc,
};

use rustls::{
    AlertDescription, CertificateError, ClientConfig, Error, RootCertStore,
    crypto::CryptoProvider,
    pki_types::{CertificateDer, PrivateKeyDer, pem, pem::PemObject},
};

/// What both sides speak inside of TLS.
pub const ALPN_HTTP2: &[u8] = b"h2";

/// Largest file that is read as certificates or a key, in bytes.
pub const MAX_PEM_BYTES: u64 = 1024 * 1024;

/// The cryptography.
#[must_use]
pub fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

/// The certificates in a PEM text, in their order; at least one. The error ends the sentence that the file begins.
///
/// # Errors
/// When the text holds no certificate, or something that is none.
pub fn certificates(text: &[u8]) -> Result<Vec<CertificateDer<'static>>, String> {
    let found: Vec<_> = CertificateDer::pem_slice_iter(text)
        .collect::<Result<_, pem::Error>>()
        .map_err(|error| format!("is not PEM: {error}"))?;
    if found.is_empty() {
        Err("holds no certificate (PEM, `-----BEGIN CERTIFICATE-----`)".to_owned())
    } else {
        Ok(found)
    }
}

/// The private key in a PEM text. The error ends the sentence that the file begins, and never holds a part of the key.
///
/// # Errors
/// When the text holds no private key that is not encrypted.
pub fn private_key(text: &[u8]) -> Result<PrivateKeyDer<'static>, String> {
    PrivateKeyDer::from_pem_slice(text).map_err(|error| match error {
        pem::Error::NoItemsFound => "holds no private key (PEM, not encrypted)".to_owned(),
        _ => "holds no private key that can be read (PEM, not encrypted)".to_owned(),
    })
}

/// Certificates that others are checked against. The error ends the sentence that the file begins.
///
/// # Errors
/// When one of them cannot be used for that.
pub fn roots(text: &[u8]) -> Result<RootCertStore, String> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(text)? {
        roots.add(certificate).map_err(|error| format!("holds a certificate that cannot be used: {error}"))?;
    }
    Ok(roots)
}

/// Where a client finds what it needs for TLS.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClientFiles {
    /// The certificates of the authorities that may have signed the executor's, PEM. Nothing else is trusted.
    pub ca: PathBuf,
    /// This client's certificate, with what is between it and its authority behind it, and its private key, PEM. `None`:
    /// the client shows none.
    pub identity: Option<(PathBuf, PathBuf)>,
}

/// What a client trusts and who it is, read and checked.
#[derive(Clone)]
pub struct ClientTls(Arc<ClientConfig>);

impl fmt::Debug for ClientTls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ClientTls(…)")
    }
}

/// Files that cannot be used for TLS.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ClientTlsError {
    /// One of them.
    #[error("{what} file {}: {problem}", .path.display())]
    File {
        /// What it should hold: `CA`, `certificate` or `key`.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// What is wrong with it, as the end of a sentence.
        problem: String,
    },
    /// The certificate and the key do not belong together, or cannot be used.
    #[error("certificate file {} and key file {}: {problem}", .certificate.display(), .key.display())]
    Identity {
        /// The certificate's file.
        certificate: PathBuf,
        /// The key's file.
        key: PathBuf,
        /// What is wrong with them.
        problem: String,
    },
}

impl ClientTls {
    /// Reads the files.
    ///
    /// # Errors
    /// A file cannot be read or does not hold what it should, or the key is not the certificate's.
    pub fn read(files: &ClientFiles) -> Result<Self, ClientTlsError> {
        let of = |what, path: &Path, problem| ClientTlsError::File { what, path: path.to_owned(), problem };
        let text = |what, path: &Path| read(path).map_err(|problem| of(what, path, problem));
        let roots = roots(&text("CA", &files.ca)?).map_err(|problem| of("CA", &files.ca, problem))?;
        let builder = ClientConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()
            .expect("the provider has what the default versions need")
            .with_root_certificates(roots);
        let mut config = match &files.identity {
            None => builder.with_no_client_auth(),
            Some((certificate, key)) => {
                let chain = certificates(&text("certificate", certificate)?)
                    .map_err(|problem| of("certificate", certificate, problem))?;
                let private = private_key(&text("key", key)?).map_err(|problem| of("key", key, problem))?;
                builder.with_client_auth_cert(chain, private).map_err(|error| ClientTlsError::Identity {
                    certificate: certificate.clone(),
                    key: key.clone(),
                    problem: pair_problem(&error),
                })?
            }
        };
        config.alpn_protocols = vec![ALPN_HTTP2.to_vec()];
        Ok(Self(Arc::new(config)))
    }

    /// For the TLS library.
    #[must_use]
    pub fn config(&self) -> Arc<ClientConfig> {
        Arc::clone(&self.0)
    }
}

/// Why a certificate and a key cannot be used together, as people read it.
#[must_use]
pub fn pair_problem(error: &Error) -> String {
    match error {
        Error::InconsistentKeys(_) => "the key is not the certificate's".to_owned(),
        error => format!("cannot be used: {error}"),
    }
}

fn read(path: &Path) -> Result<Vec<u8>, String> {
    use io::Read as _;
    let mut text = Vec::new();
    std::fs::File::open(path)
        .and_then(|file| file.take(MAX_PEM_BYTES + 1).read_to_end(&mut text))
        .map_err(|error| error.to_string())?;
    if text.len() as u64 > MAX_PEM_BYTES { Err(format!("is larger than {MAX_PEM_BYTES} bytes")) } else { Ok(text) }
}

/// What a failed connection says to a client where TLS was why: what is wrong and what to do, as the end of the sentence
/// that the endpoint begins. To try again changes nothing of it. `None`: it failed below TLS.
#[must_use]
pub fn refusal(error: &io::Error) -> Option<String> {
    let error = error.get_ref()?.downcast_ref::<Error>()?;
    Some(match error {
        Error::InvalidCertificate(problem) => certificate_problem(problem),
        Error::AlertReceived(alert) => alert_received(*alert),
        Error::InvalidMessage(_) => {
            "it does not speak TLS; use http:// if that is meant, on a network that is private".to_owned()
        }
        Error::PeerIncompatible(_) => format!("its TLS and ours have nothing in common ({error})"),
        error => format!("TLS failed: {error}").replace('\n', " "),
    })
}

fn certificate_problem(problem: &CertificateError) -> String {
    use CertificateError as E;
    match problem {
        E::Expired | E::ExpiredContext { .. } => {
            "its certificate has expired; whoever runs it has to renew it (or the clock of this host is wrong)"
                .to_owned()
        }
        E::NotValidYet | E::NotValidYetContext { .. } => {
            "its certificate is not valid yet; look at the clocks of both hosts".to_owned()
        }
        E::UnknownIssuer | E::BadSignature => {
            "its certificate is not signed by the CA that is trusted here; name its own CA's file (--ca)".to_owned()
        }
        E::NotValidForName => "its certificate is for another name; connect by a name that it has".to_owned(),
        E::NotValidForNameContext { expected, presented } => format!(
            "its certificate is not for {}, but for {}; connect by a name that it has",
            expected.to_str(),
            if presented.is_empty() { "no name".to_owned() } else { bare(presented) }
        ),
        problem => format!("its certificate is not good: {problem}"),
    }
}

/// Names without the kind that the library puts around them: `DnsName("localhost")`.
fn bare(names: &[String]) -> String {
    let bare = |name: &String| {
        let inner = name.split_once('(').map_or(name.as_str(), |(_kind, inner)| inner.trim_end_matches(')'));
        inner.trim_matches('"').to_owned()
    };
    names.iter().map(bare).collect::<Vec<_>>().join(", ")
}

fn alert_received(alert: AlertDescription) -> String {
    match alert {
        AlertDescription::CertificateRequired => {
            "it wants a client certificate; name the files of yours (--cert and --key)".to_owned()
        }
        AlertDescription::UnknownCA | AlertDescription::BadCertificate | AlertDescription::DecryptError => {
            "it does not accept the client certificate: not signed by the CA that it trusts for clients".to_owned()
        }
        AlertDescription::CertificateExpired => "it does not accept the client certificate: it has expired".to_owned(),
        alert => format!("it ended the TLS handshake ({alert:?})"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal_of(error: Error) -> Option<String> {
        refusal(&io::Error::new(io::ErrorKind::InvalidData, error))
    }

    #[test]
    fn only_what_tls_itself_says_is_a_refusal() {
        assert_eq!(refusal(&io::ErrorKind::ConnectionReset.into()), None);
        assert_eq!(refusal(&io::Error::other("no TLS")), None);
        let certificate = |problem| refusal_of(Error::InvalidCertificate(problem)).expect("a refusal");
        for (problem, says) in [
            (CertificateError::Expired, "has expired"),
            (CertificateError::UnknownIssuer, "not signed by the CA"),
            (CertificateError::NotValidYet, "clocks"),
            (CertificateError::Revoked, "is not good"),
        ] {
            let line = certificate(problem);
            assert!(line.contains(says) && !line.contains('\n'), "{line}");
        }
        let named = CertificateError::NotValidForNameContext {
            expected: "daemon".try_into().expect("a name"),
            presented: vec!["DnsName(\"localhost\")".to_owned(), "IpAddress(127.0.0.1)".to_owned()],
        };
        let line = certificate(named);
        assert_eq!(
            line,
            "its certificate is not for daemon, but for localhost, 127.0.0.1; connect by a name that it has"
        );
        let alert = refusal_of(Error::AlertReceived(AlertDescription::CertificateRequired)).expect("a refusal");
        assert!(alert.contains("--cert and --key"), "{alert}");
    }

    #[test]
    fn files_that_hold_something_else_say_so_without_showing_it() {
        for text in [&b""[..], b"secret", b"-----BEGIN PRIVATE KEY-----\nsecret"] {
            let problems = [private_key(text).map(|_| ()), certificates(text).map(|_| ()), roots(text).map(|_| ())];
            for problem in problems {
                let problem = problem.expect_err("nothing is in it");
                assert!(!problem.contains("secret"), "{problem}");
            }
        }
        let files = ClientFiles { ca: "/none".into(), identity: None };
        let error = ClientTls::read(&files).expect_err("no file").to_string();
        assert!(error.starts_with("CA file /none: No such file"), "{error}");
    }
}
