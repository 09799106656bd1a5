//! Who is calling.
//!
//! A peer on a Unix socket is known by its uid, which the kernel vouches for; one on TCP by a bearer token. Both are the
//! one tenant `default` so far. A Unix peer that descends from one of the daemon's own commands is refused whatever its
//! uid: where commands run as the daemon's user, the socket's mode would let them in.

use std::{fmt, fs, net::SocketAddr};

use executor_proto::error::ExecutorError;
use http::{HeaderMap, header::AUTHORIZATION};
use sha2::{Digest, Sha256};
use subtle::{Choice, ConstantTimeEq};

use crate::ids::TenantId;

/// A token as the server keeps it: its SHA-256, so that tokens of any length compare in the same time and none can be
/// read from memory.
pub(crate) type TokenDigest = [u8; 32];

/// Longest chain of parents that is followed. Process trees are not that deep; one that is, is refused.
const MAX_ANCESTORS: usize = 4_096;

/// The digest of a token.
#[must_use]
pub(crate) fn digest(token: &[u8]) -> TokenDigest {
    Sha256::digest(token).into()
}

/// The other end of a connection, as the kernel tells it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Peer {
    /// On a Unix socket. `uid` is `None` where the kernel does not say.
    Unix {
        /// Effective user when it connected.
        uid: Option<u32>,
        /// Whether it descends from a command of this daemon.
        origin: Origin,
    },
    /// On TCP.
    Tcp(Option<SocketAddr>),
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix { uid: Some(uid), .. } => write!(f, "unix uid {uid}"),
            Self::Unix { uid: None, .. } => f.write_str("unix"),
            Self::Tcp(Some(address)) => write!(f, "tcp {address}"),
            Self::Tcp(None) => f.write_str("tcp"),
        }
    }
}

/// Where a Unix peer's process comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Origin {
    /// Not from one of the daemon's commands.
    Elsewhere,
    /// From one of the daemon's commands.
    Command,
    /// Its parents could not be followed: it has exited, or its entry in /proc cannot be read.
    Unknown,
}

impl Origin {
    /// Follows a process's parents up to the keeper, which every command descends from, or past it to the root.
    ///
    /// `pid` is what the kernel recorded at connect; `None` or 0 is a process of another pid namespace, which no command of
    /// ours can be in without being visible in this one.
    pub(crate) fn of(pid: Option<u32>, keeper: u32) -> Self {
        Self::walk(pid, keeper, parent_of)
    }

    fn walk(pid: Option<u32>, keeper: u32, parent: impl Fn(u32) -> Option<u32>) -> Self {
        let mut pid = match pid {
            None | Some(0) => return Self::Elsewhere,
            Some(pid) => pid,
        };
        for _ in 0..MAX_ANCESTORS {
            match parent(pid) {
                None => return Self::Unknown,
                Some(0) => return Self::Elsewhere,
                Some(parent) if parent == keeper => return Self::Command,
                Some(parent) => pid = parent,
            }
        }
        Self::Unknown
    }
}

/// The parent of a process, 0 for the root of the namespace.
fn parent_of(pid: u32) -> Option<u32> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // `pid (name) state parent …`: the name may hold anything, so what follows is looked for from the end.
    let (_, after_name) = stat.rsplit_once(')')?;
    after_name.split_ascii_whitespace().nth(1)?.parse().ok()
}

/// Decides who may call.
#[derive(Debug, Clone)]
pub(crate) struct Gate {
    daemon_uid: u32,
    tokens: Vec<TokenDigest>,
}

impl Gate {
    pub(crate) fn new(daemon_uid: u32, tokens: Vec<TokenDigest>) -> Self {
        Self { daemon_uid, tokens }
    }

    /// The tenant that a call is of.
    pub(crate) fn admit(&self, peer: &Peer, headers: &HeaderMap) -> Result<TenantId, ExecutorError> {
        let refused = |reason: String| Err(ExecutorError::Refused { reason });
        match peer {
            Peer::Unix { uid, origin } => match (uid, origin) {
                (None, _) => refused("the kernel does not say whose connection this is".to_owned()),
                (Some(uid), _) if *uid != self.daemon_uid && *uid != 0 => {
                    refused(format!("this socket serves uid {}, the caller is uid {uid}", self.daemon_uid))
                }
                (Some(_), Origin::Command) => refused("the caller is one of this executor's own commands".to_owned()),
                (Some(_), Origin::Unknown) => {
                    refused("the process that connected cannot be looked at; connect from a live process".to_owned())
                }
                (Some(_), Origin::Elsewhere) => Ok(TenantId::default_tenant()),
            },
            Peer::Tcp(_) => match bearer(headers) {
                None => refused("no token: send it as `authorization: Bearer TOKEN`".to_owned()),
                Some(token) if self.knows(token) => Ok(TenantId::default_tenant()),
                Some(_) => refused("the token is not known".to_owned()),
            },
        }
    }

    /// Compares with every token, in a time that depends on their number only.
    fn knows(&self, token: &[u8]) -> bool {
        let presented = digest(token);
        let found = self.tokens.iter().fold(Choice::from(0), |found, known| found | presented.ct_eq(known));
        found.into()
    }
}

fn bearer(headers: &HeaderMap) -> Option<&[u8]> {
    let value = headers.get(AUTHORIZATION)?.as_bytes();
    let (scheme, token) = value.split_at_checked("Bearer ".len())?;
    scheme.eq_ignore_ascii_case(b"Bearer ").then(|| token.trim_ascii())
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    fn gate() -> Gate {
        Gate::new(1000, vec![digest(b"first-token-of-two"), digest(b"second-token-of-two")])
    }

    fn authorization(value: &'static str) -> HeaderMap {
        HeaderMap::from_iter([(AUTHORIZATION, HeaderValue::from_static(value))])
    }

    fn reason(peer: Peer, headers: &HeaderMap) -> String {
        match gate().admit(&peer, headers) {
            Err(ExecutorError::Refused { reason }) => reason,
            other => panic!("admitted or failed otherwise: {other:?}"),
        }
    }

    #[test]
    fn on_tcp_only_a_known_token_opens() {
        for good in ["Bearer first-token-of-two", "bearer second-token-of-two", "Bearer  second-token-of-two "] {
            assert_eq!(gate().admit(&Peer::Tcp(None), &authorization(good)), Ok(TenantId::default_tenant()), "{good}");
        }
        for bad in ["Bearer first-token-of-tw", "Bearer ", "Bearer first-token-of-two!"] {
            assert_eq!(reason(Peer::Tcp(None), &authorization(bad)), "the token is not known", "{bad}");
        }
        for none in ["", "Basic first-token-of-two", "Bearer", "first-token-of-two"] {
            assert!(reason(Peer::Tcp(None), &authorization(none)).starts_with("no token"), "{none}");
        }
        assert!(reason(Peer::Tcp(None), &HeaderMap::new()).starts_with("no token"));
    }

    #[test]
    fn without_tokens_nothing_opens_tcp() {
        let gate = Gate::new(1000, Vec::new());
        assert!(gate.admit(&Peer::Tcp(None), &authorization("Bearer first-token-of-two")).is_err());
    }

    #[test]
    fn a_unix_socket_serves_its_own_user_and_root() {
        let unix = |uid, origin| Peer::Unix { uid, origin };
        let none = HeaderMap::new();
        for uid in [0, 1000] {
            assert!(gate().admit(&unix(Some(uid), Origin::Elsewhere), &none).is_ok(), "{uid}");
        }
        assert_eq!(
            reason(unix(Some(1001), Origin::Elsewhere), &authorization("Bearer first-token-of-two")),
            "this socket serves uid 1000, the caller is uid 1001"
        );
        assert!(reason(unix(None, Origin::Elsewhere), &none).contains("does not say"));
        assert!(reason(unix(Some(1000), Origin::Command), &none).contains("own commands"));
        assert!(reason(unix(Some(1000), Origin::Unknown), &none).contains("live process"));
    }

    #[test]
    fn a_process_below_the_keeper_is_a_command() {
        let tree = |pid| match pid {
            40 => Some(30),
            30 => Some(20),
            20 => Some(7),
            7 => Some(1),
            1 => Some(0),
            66 => Some(66),
            _ => None,
        };
        let origin = |pid| Origin::walk(pid, 7, tree);
        assert_eq!(origin(Some(40)), Origin::Command);
        assert_eq!(origin(Some(7)), Origin::Elsewhere);
        assert_eq!(origin(Some(1)), Origin::Elsewhere);
        assert_eq!(origin(Some(99)), Origin::Unknown);
        assert_eq!(origin(Some(66)), Origin::Unknown, "a chain that never ends is followed for a while only");
        assert_eq!(origin(Some(0)), Origin::Elsewhere);
        assert_eq!(origin(None), Origin::Elsewhere);
    }

    #[test]
    fn the_kernel_tells_this_process_s_parent() {
        assert_eq!(parent_of(std::process::id()), Some(std::os::unix::process::parent_id()));
    }
}
