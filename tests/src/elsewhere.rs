//! A daemon that is already running elsewhere, as the programs beside the tests are told of it.

use std::path::PathBuf;

use tool_client::executor::connect::{Access, ClientFiles, ClientTls, Token};

/// Where it is, and how it is called.
#[derive(Debug, Clone, clap::Args)]
pub struct Elsewhere {
    /// A daemon that is already running: `unix:PATH`, `https://HOST:PORT` or `http://HOST:PORT`.
    #[arg(long)]
    pub endpoint: Option<String>,
    /// The file with the token.
    #[arg(long, value_name = "FILE", requires = "endpoint")]
    token_file: Option<PathBuf>,
    /// For `https://`: the file with the authority of the daemon's certificate.
    #[arg(long, value_name = "FILE", requires_all = ["endpoint", "cert", "key"])]
    ca: Option<PathBuf>,
    /// The file with the certificate to show.
    #[arg(long, value_name = "FILE", requires = "ca")]
    cert: Option<PathBuf>,
    /// The file with that certificate's key.
    #[arg(long, value_name = "FILE", requires = "ca")]
    key: Option<PathBuf>,
}

impl Elsewhere {
    /// What is shown to it.
    ///
    /// # Errors
    /// When a file cannot be used.
    pub fn access(&self) -> anyhow::Result<Access> {
        let token = self.token_file.as_deref().map(Token::read).transpose()?;
        let tls = match (&self.ca, &self.cert, &self.key) {
            (Some(ca), Some(cert), Some(key)) => {
                let identity = Some((cert.clone(), key.clone()));
                Some(ClientTls::read(&ClientFiles { ca: ca.clone(), identity })?)
            }
            _no_tls => None,
        };
        Ok(Access { token, tls })
    }
}
