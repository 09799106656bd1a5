//! Addresses to listen on.

use std::{
    net::{IpAddr, SocketAddr, ToSocketAddrs},
    path::{Path, PathBuf},
};

/// Longest path that fits into a Unix socket's address, with its closing NUL.
const MAX_UNIX_PATH_BYTES: usize = 107;

/// Where the daemon listens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ListenAddress {
    /// A Unix socket, by absolute path.
    Unix(PathBuf),
    /// A TCP address. Port 0 takes a free one.
    Tcp(SocketAddr),
}

impl ListenAddress {
    /// Parses `unix:PATH` or `tcp:HOST:PORT`; a relative path is one below `start_dir`. The error ends the sentence that the
    /// address begins.
    pub(super) fn parse(text: &str, start_dir: &Path) -> Result<Self, String> {
        match text.split_once(':') {
            Some(("unix", path)) => unix(path, start_dir),
            Some(("tcp", address)) => tcp(address),
            Some(("https" | "tls" | "tcps", _)) => {
                Err("must be unix:PATH or tcp:HOST:PORT, which speaks TLS when --tls-cert-file is given".to_owned())
            }
            Some(("http", rest)) => {
                Err(format!("must be unix:PATH or tcp:HOST:PORT; did you mean tcp:{}?", rest.trim_matches('/')))
            }
            Some(_) | None => Err("must be unix:PATH or tcp:HOST:PORT".to_owned()),
        }
    }

    /// Whether other hosts can reach it.
    pub(super) fn is_beyond_loopback(&self) -> bool {
        match self {
            Self::Unix(_) => false,
            Self::Tcp(address) => match address.ip() {
                IpAddr::V4(ip) => !ip.is_loopback(),
                IpAddr::V6(ip) => !(ip.is_loopback() || ip.to_ipv4_mapped().is_some_and(|ip| ip.is_loopback())),
            },
        }
    }

    /// Whether it is TCP.
    pub(super) fn is_tcp(&self) -> bool {
        matches!(self, Self::Tcp(_))
    }
}

fn unix(path: &str, start_dir: &Path) -> Result<ListenAddress, String> {
    let path = path.strip_prefix("//").filter(|rest| rest.starts_with('/')).unwrap_or(path);
    if path.is_empty() {
        return Err("must name a path: unix:PATH".to_owned());
    }
    if path.contains('\0') {
        return Err("the path holds a NUL byte".to_owned());
    }
    let path = start_dir.join(path);
    let bytes = path.as_os_str().len();
    if bytes > MAX_UNIX_PATH_BYTES {
        return Err(format!("the socket's path has {bytes} bytes, at most {MAX_UNIX_PATH_BYTES} are possible"));
    }
    Ok(ListenAddress::Unix(path))
}

fn tcp(address: &str) -> Result<ListenAddress, String> {
    let address = address.strip_prefix("//").unwrap_or(address);
    if !address.rsplit_once(':').is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok()) {
        return Err("must be tcp:HOST:PORT with a port from 0 to 65535".to_owned());
    }
    let mut found = address.to_socket_addrs().map_err(|error| format!("the host cannot be resolved: {error}"))?;
    found.next().map(ListenAddress::Tcp).ok_or_else(|| "the host has no address".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<ListenAddress, String> {
        ListenAddress::parse(text, Path::new("/start"))
    }

    #[test]
    fn addresses_are_parsed_or_say_what_is_wrong() {
        let unix = |path: &str| Ok(ListenAddress::Unix(path.into()));
        assert_eq!(parse("unix:/run/x.sock"), unix("/run/x.sock"));
        assert_eq!(parse("unix:///run/x.sock"), unix("/run/x.sock"));
        assert_eq!(parse("unix:x.sock"), unix("/start/x.sock"));
        assert_eq!(parse("tcp:127.0.0.1:0"), Ok(ListenAddress::Tcp(([127, 0, 0, 1], 0).into())));
        assert_eq!(parse("tcp:[::1]:7").map(|address| address.is_beyond_loopback()), Ok(false));
        assert_eq!(parse("tcp:0.0.0.0:7").map(|address| address.is_beyond_loopback()), Ok(true));
        assert_eq!(parse("tcp:[::]:7").map(|address| address.is_beyond_loopback()), Ok(true));
        for (bad, says) in [
            ("", "must be unix:PATH or tcp:HOST:PORT"),
            ("/run/x.sock", "must be unix:PATH or tcp:HOST:PORT"),
            ("unix:", "must name a path"),
            ("tcp:127.0.0.1", "with a port"),
            ("tcp::80", "with a port"),
            ("tcp:127.0.0.1:65536", "with a port"),
            ("https://0.0.0.0:443", "which speaks TLS when"),
            ("http://0.0.0.0:80", "did you mean tcp:0.0.0.0:80?"),
        ] {
            let error = parse(bad).expect_err(bad);
            assert!(error.contains(says), "{bad}: {error}");
        }
        let long = parse(&format!("unix:/{}", "x".repeat(200))).expect_err("a long path");
        assert!(long.contains("201 bytes, at most 107"), "{long}");
    }
}
