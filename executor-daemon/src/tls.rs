//! The daemon's side of TLS: what the server is handed of certificates and keys, and the names in a client's certificate.

use std::{fmt, sync::Arc};

use executor_proto::tls;
use rustls::{ServerConfig, server::WebPkiClientVerifier};
use serde::{Deserialize, Serialize};
use tokio_rustls::TlsAcceptor;
use x509_cert::{
    Certificate,
    der::{Decode as _, asn1::Any},
    ext::pkix::{SubjectAltName, name::GeneralName},
};

/// What the server needs to speak TLS, as PEM texts: the keeper's side has read the files, since the server may not.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServerTls {
    /// The daemon's certificate, and what is between it and its authority.
    pub chain: Vec<u8>,
    /// Its private key.
    pub key: Vec<u8>,
    /// The authorities of clients' certificates. `None`: clients are not asked for one.
    pub client_ca: Option<Vec<u8>>,
    /// Whether a client without a certificate is refused in the handshake. Not where a token can say who it is.
    pub certificate_required: bool,
}

impl fmt::Debug for ServerTls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ServerTls").field("certificate_required", &self.certificate_required).finish_non_exhaustive()
    }
}

/// Which of the texts is wrong, and how, as the end of the sentence that its file begins.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TlsProblem {
    /// The daemon's certificate.
    #[error("the TLS certificate {0}")]
    Chain(String),
    /// Its key, or that it is not the certificate's.
    #[error("the TLS key {0}")]
    Key(String),
    /// The authorities of clients.
    #[error("the client CA {0}")]
    ClientCa(String),
}

impl ServerTls {
    /// What accepts connections.
    ///
    /// # Errors
    /// All that is wrong with the texts.
    pub fn acceptor(&self) -> Result<TlsAcceptor, Vec<TlsProblem>> {
        let mut problems = Vec::new();
        let mut note = |problem| problems.push(problem);
        let chain = tls::certificates(&self.chain).map_err(|problem| note(TlsProblem::Chain(problem))).ok();
        let key = tls::private_key(&self.key).map_err(|problem| note(TlsProblem::Key(problem))).ok();
        let verifier = match &self.client_ca {
            None => Some(WebPkiClientVerifier::no_client_auth()),
            Some(text) => self.verifier(text).map_err(|problem| note(TlsProblem::ClientCa(problem))).ok(),
        };
        let (Some(chain), Some(key), Some(verifier)) = (chain, key, verifier) else { return Err(problems) };
        let config = ServerConfig::builder_with_provider(tls::provider())
            .with_safe_default_protocol_versions()
            .expect("the provider has what the default versions need")
            .with_client_cert_verifier(verifier)
            .with_single_cert(chain, key);
        let mut config = config.map_err(|error| {
            vec![TlsProblem::Key(match error {
                rustls::Error::InconsistentKeys(_) => "is not the certificate's".to_owned(),
                error => format!("and certificate cannot be used: {error}"),
            })]
        })?;
        config.alpn_protocols = vec![tls::ALPN_HTTP2.to_vec()];
        Ok(TlsAcceptor::from(Arc::new(config)))
    }

    fn verifier(&self, client_ca: &[u8]) -> Result<Arc<dyn rustls::server::danger::ClientCertVerifier>, String> {
        let roots = Arc::new(tls::roots(client_ca)?);
        let builder = WebPkiClientVerifier::builder_with_provider(roots, tls::provider());
        let builder = if self.certificate_required { builder } else { builder.allow_unauthenticated() };
        builder.build().map(|verifier| verifier as _).map_err(|error| format!("cannot be used: {error}"))
    }
}

/// A name as it is compared: those of hosts and people in any case, those with a colon (URIs) exactly.
#[must_use]
pub fn comparable(name: &str) -> String {
    if name.contains(':') { name.to_owned() } else { name.to_ascii_lowercase() }
}

/// The names that a certificate gives its holder, as they are compared: the DNS names and URIs among its alternative names;
/// where there are none of either kind, the common names of its subject. What cannot be read names nobody.
#[must_use]
pub fn names(certificate: &[u8]) -> Vec<String> {
    let Ok(certificate) = Certificate::from_der(certificate) else { return Vec::new() };
    let alternative = certificate.tbs_certificate.get::<SubjectAltName>().ok().flatten();
    let alternative = alternative.iter().flat_map(|(_critical, names)| &names.0).filter_map(|name| match name {
        GeneralName::DnsName(name) => Some(comparable(name.as_str())),
        GeneralName::UniformResourceIdentifier(name) => Some(comparable(name.as_str())),
        _ => None,
    });
    let alternative: Vec<String> = alternative.collect();
    if !alternative.is_empty() {
        return alternative;
    }
    let parts = certificate.tbs_certificate.subject.0.iter().flat_map(|part| part.0.iter());
    parts.filter(|part| part.oid == COMMON_NAME).filter_map(|part| text(&part.value)).collect()
}

/// `id-at-commonName`.
const COMMON_NAME: x509_cert::der::oid::ObjectIdentifier = x509_cert::der::oid::ObjectIdentifier::new_unwrap("2.5.4.3");

/// The text of a UTF8String or PrintableString, the two that certificates are made with.
fn text(value: &Any) -> Option<String> {
    use x509_cert::der::{Tag, Tagged as _};
    match value.tag() {
        Tag::Utf8String | Tag::PrintableString => std::str::from_utf8(value.value()).ok().map(comparable),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use rcgen::{CertificateParams, DnType, KeyPair, SanType, string::Ia5String};

    use super::*;

    fn certificate(alternative: Vec<SanType>, common: &str) -> Vec<u8> {
        let mut params = CertificateParams::default();
        params.subject_alt_names = alternative;
        params.distinguished_name.push(DnType::CommonName, common);
        params.self_signed(&KeyPair::generate().expect("a key")).expect("signed").der().to_vec()
    }

    #[test]
    fn alternative_names_of_two_kinds_name_the_holder_and_else_the_common_name() {
        let dns = |name: &str| SanType::DnsName(name.try_into().expect("a name"));
        let uri = |name: &str| SanType::URI(Ia5String::try_from(name).expect("a name"));
        let ip = SanType::IpAddress([127, 0, 0, 1].into());
        assert_eq!(names(&certificate(vec![], "Team-A")), ["team-a"]);
        assert_eq!(
            names(&certificate(vec![ip.clone()], "Team-A")),
            ["team-a"],
            "an address names a host, not a holder"
        );
        assert_eq!(
            names(&certificate(vec![dns("A.example"), ip, uri("spiffe://x/Y")], "Team-A")),
            ["a.example", "spiffe://x/Y"],
            "the common name does not count beside them"
        );
        assert_eq!(names(b"nothing"), Vec::<String>::new());
    }

    #[test]
    fn every_text_that_is_wrong_is_named_at_once() {
        let [one, other] = [KeyPair::generate().expect("a key"), KeyPair::generate().expect("a key")];
        let chain = CertificateParams::default().self_signed(&one).expect("signed").pem().into_bytes();
        let tls = |chain: &[u8], key: &[u8], client_ca: Option<&[u8]>| ServerTls {
            chain: chain.to_vec(),
            key: key.to_vec(),
            client_ca: client_ca.map(<[u8]>::to_vec),
            certificate_required: true,
        };
        let problems = |tls: ServerTls| tls.acceptor().map(|_| ()).expect_err("it is wrong");
        assert!(tls(&chain, one.serialize_pem().as_bytes(), Some(&chain)).acceptor().is_ok());
        let all = problems(tls(b"x", b"x", Some(b"x")));
        assert!(matches!(&all[..], [TlsProblem::Chain(_), TlsProblem::Key(_), TlsProblem::ClientCa(_)]), "{all:?}");
        let swapped = problems(tls(&chain, other.serialize_pem().as_bytes(), None));
        assert_eq!(swapped, [TlsProblem::Key("is not the certificate's".to_owned())]);
        assert!(!format!("{:?}", tls(b"x", b"secret", None)).contains("secret"));
    }
}
