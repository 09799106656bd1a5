//! Who is calling.
//!
//! A peer on a Unix socket is known by its uid, which the kernel vouches for; one on TCP by a bearer token, or by the names in
//! the certificate that it has shown in TLS. Each of them is of one tenant. A Unix peer that descends from one of the daemon's own commands is refused whatever its
//! uid: where commands run as the daemon's user, the socket's mode would let them in.

use std::{
    fmt, fs,
    net::SocketAddr,
    sync::{Arc, OnceLock},
};

use executor_proto::error::ExecutorError;
use http::{HeaderMap, header::AUTHORIZATION};
use sha2::{Digest, Sha256};
use subtle::{ConditionallySelectable, ConstantTimeEq};

use crate::{
    config::{CertificateNames, KnownTenant},
    ids::TenantId,
};

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

/// The names in the certificate that a peer has shown, once the TLS handshake is over; without a certificate it is never set.
pub(crate) type Certificate = Arc<OnceLock<Vec<String>>>;

/// The other end of a connection, as the kernel and TLS tell it.
#[derive(Debug, Clone)]
pub(crate) enum Peer {
    /// On a Unix socket. `uid` is `None` where the kernel does not say.
    Unix {
        /// Effective user when it connected.
        uid: Option<u32>,
        /// Whether it descends from a command of this daemon.
        origin: Origin,
    },
    /// On TCP.
    Tcp {
        /// From where.
        address: SocketAddr,
        /// What it has shown. Checked: the daemon's client CA has signed it.
        certificate: Certificate,
    },
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix { uid: Some(uid), .. } => write!(f, "unix uid {uid}"),
            Self::Unix { uid: None, .. } => f.write_str("unix"),
            Self::Tcp { address, certificate } => match certificate.get() {
                Some(names) => write!(f, "tcp {address} ({})", Names(names)),
                None => write!(f, "tcp {address}"),
            },
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

/// Names from a certificate, for people: few and short ones, since whoever made it chose them.
struct Names<'a>(&'a [String]);

impl fmt::Display for Names<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const MAX_NAMES: usize = 4;
        const MAX_CHARS: usize = 128;

        let short = |name: &String| name.escape_debug().take(MAX_CHARS).collect::<String>();
        f.write_str(&self.0.iter().take(MAX_NAMES).map(short).collect::<Vec<_>>().join(", "))
    }
}

/// Decides who may call.
#[derive(Debug, Clone)]
pub(crate) struct Gate {
    tenants: Vec<KnownTenant>,
}

/// Whose a certificate is.
enum Holder<'a> {
    /// This tenant's.
    Of(&'a KnownTenant),
    /// None was shown.
    Nobody,
    /// Of no tenant.
    Unknown,
    /// Its names are those of several tenants.
    Several,
}

impl Gate {
    /// No two tenants share a token, a name or a uid.
    pub(crate) fn new(tenants: Vec<KnownTenant>) -> Self {
        Self { tenants }
    }

    /// The tenant that a call is of.
    pub(crate) fn admit(&self, peer: &Peer, headers: &HeaderMap) -> Result<TenantId, ExecutorError> {
        let admitted = match peer {
            Peer::Unix { uid, origin } => self.on_unix(*uid, *origin),
            Peer::Tcp { certificate, .. } => {
                let names = certificate.get().map_or(&[][..], Vec::as_slice);
                bearer(headers).and_then(|token| self.on_tcp(token, names))
            }
        };
        match admitted {
            Ok(tenant) => Ok(TenantId(tenant.name.clone())),
            Err(reason) => Err(ExecutorError::Refused { reason }),
        }
    }

    fn on_unix(&self, uid: Option<u32>, origin: Origin) -> Result<&KnownTenant, String> {
        let Some(uid) = uid else { return Err("the kernel does not say whose connection this is".to_owned()) };
        let Some(tenant) = self.tenants.iter().find(|tenant| tenant.peer_uids.contains(&uid)) else {
            return Err(match &self.tenants[..] {
                [KnownTenant { peer_uids, .. }] if !peer_uids.is_empty() => {
                    format!("this socket serves uid {}, the caller is uid {uid}", peer_uids[0])
                }
                _ => format!("this socket does not serve uid {uid}"),
            });
        };
        match origin {
            Origin::Command => Err("the caller is one of this executor's own commands".to_owned()),
            Origin::Unknown => {
                Err("the process that connected cannot be looked at; connect from a live process".to_owned())
            }
            Origin::Elsewhere => Ok(tenant),
        }
    }

    fn on_tcp(&self, token: Option<&[u8]>, names: &[String]) -> Result<&KnownTenant, String> {
        let holder = self.holder(names);
        let Some(token) = token else {
            return match holder {
                Holder::Of(tenant) => Ok(tenant),
                Holder::Nobody => Err("no token: send it as `authorization: Bearer TOKEN`".to_owned()),
                Holder::Unknown => Err(format!("no tenant has the name in the certificate ({})", Names(names))),
                Holder::Several => Err("the names in the certificate are those of several tenants".to_owned()),
            };
        };
        let Some(tenant) = self.known_by(token) else { return Err("the token is not known".to_owned()) };
        match holder {
            Holder::Of(other) if other.name != tenant.name => {
                Err("the token and the certificate are of different tenants".to_owned())
            }
            Holder::Several => Err("the names in the certificate are those of several tenants".to_owned()),
            Holder::Of(_) | Holder::Nobody | Holder::Unknown => Ok(tenant),
        }
    }

    fn holder(&self, names: &[String]) -> Holder<'_> {
        if names.is_empty() {
            return Holder::Nobody;
        }
        let has = |tenant: &&KnownTenant| match &tenant.certificates {
            CertificateNames::Any => true,
            CertificateNames::These(known) => names.iter().any(|name| known.contains(name)),
        };
        let mut holders = self.tenants.iter().filter(has);
        match (holders.next(), holders.next()) {
            (None, _) => Holder::Unknown,
            (Some(tenant), None) => Holder::Of(tenant),
            (Some(_), Some(_)) => Holder::Several,
        }
    }

    /// Compares with every token of every tenant, in a time that depends on their number only.
    fn known_by(&self, token: &[u8]) -> Option<&KnownTenant> {
        let presented = digest(token);
        let mut found = 0_u32;
        for (place, tenant) in (1_u32..).zip(&self.tenants) {
            for known in &tenant.tokens {
                found.conditional_assign(&place, presented.ct_eq(known));
            }
        }
        self.tenants.get(usize::try_from(found).ok()?.checked_sub(1)?)
    }
}

/// The token that is shown. Of two headers a proxy before the daemon may have looked at the other one, so neither is taken.
fn bearer(headers: &HeaderMap) -> Result<Option<&[u8]>, String> {
    let mut values = headers.get_all(AUTHORIZATION).iter();
    let (first, second) = (values.next(), values.next());
    if second.is_some() {
        return Err("more than one `authorization` header".to_owned());
    }
    Ok(first.and_then(|value| {
        let (scheme, token) = value.as_bytes().split_at_checked("Bearer ".len())?;
        scheme.eq_ignore_ascii_case(b"Bearer ").then(|| token.trim_ascii())
    }))
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    fn tenant(name: &str, tokens: &[&str], certificates: CertificateNames, peer_uids: &[u32]) -> KnownTenant {
        let tokens = tokens.iter().map(|token| digest(token.as_bytes())).collect();
        KnownTenant { name: name.to_owned(), tokens, certificates, peer_uids: peer_uids.to_vec() }
    }

    /// Without tenants in the configuration.
    fn gate() -> Gate {
        let tokens = ["first-token-of-two", "second-token-of-two"];
        Gate::new(vec![tenant("default", &tokens, CertificateNames::Any, &[1000, 0])])
    }

    /// With two.
    fn two() -> Gate {
        let these = |name: &str| CertificateNames::These(vec![name.to_owned(), format!("other.{name}")]);
        Gate::new(vec![
            tenant("default", &["the-operator-s-token"], CertificateNames::These(vec![]), &[0]),
            tenant("a", &["token-of-tenant-a", "next-token-of-tenant-a"], these("a.x"), &[1000]),
            tenant("b", &["token-of-tenant-b"], these("b.x"), &[1001, 1002]),
        ])
    }

    fn authorization(value: &'static str) -> HeaderMap {
        HeaderMap::from_iter([(AUTHORIZATION, HeaderValue::from_static(value))])
    }

    fn tcp(names: Option<&[&str]>) -> Peer {
        let certificate = Certificate::default();
        if let Some(names) = names {
            certificate.set(names.iter().map(|name| (*name).to_owned()).collect()).expect("it is new");
        }
        Peer::Tcp { address: ([127, 0, 0, 1], 1).into(), certificate }
    }

    fn reason_of(gate: &Gate, peer: &Peer, headers: &HeaderMap) -> String {
        match gate.admit(peer, headers) {
            Err(ExecutorError::Refused { reason }) => reason,
            other => panic!("admitted or failed otherwise: {other:?}"),
        }
    }

    fn reason(peer: &Peer, headers: &HeaderMap) -> String {
        reason_of(&gate(), peer, headers)
    }

    #[test]
    fn on_tcp_only_a_known_token_opens() {
        for good in ["Bearer first-token-of-two", "bearer second-token-of-two", "Bearer  second-token-of-two "] {
            assert_eq!(gate().admit(&tcp(None), &authorization(good)), Ok(TenantId::default_tenant()), "{good}");
        }
        for bad in ["Bearer first-token-of-tw", "Bearer ", "Bearer first-token-of-two!"] {
            assert_eq!(reason(&tcp(None), &authorization(bad)), "the token is not known", "{bad}");
        }
        for none in ["", "Basic first-token-of-two", "Bearer", "first-token-of-two"] {
            assert!(reason(&tcp(None), &authorization(none)).starts_with("no token"), "{none}");
        }
        assert!(reason(&tcp(None), &HeaderMap::new()).starts_with("no token"));
    }

    #[test]
    fn of_two_tokens_neither_is_taken() {
        for other in ["Bearer first-token-of-two", "Bearer third-token-of-two", ""] {
            let mut both = authorization("Bearer first-token-of-two");
            both.append(AUTHORIZATION, HeaderValue::from_static(other));
            assert_eq!(reason(&tcp(None), &both), "more than one `authorization` header");
            assert!(gate().admit(&tcp(Some(&["x"])), &both).is_err(), "beside a certificate");
        }
    }

    #[test]
    fn without_tokens_nothing_opens_tcp() {
        let gate = Gate::new(vec![tenant("default", &[], CertificateNames::Any, &[1000])]);
        assert!(gate.admit(&tcp(None), &authorization("Bearer first-token-of-two")).is_err());
    }

    #[test]
    fn a_certificate_opens_where_there_is_one_tenant_and_a_wrong_token_beside_it_does_not() {
        assert_eq!(gate().admit(&tcp(Some(&["x"])), &HeaderMap::new()), Ok(TenantId::default_tenant()));
        let wrong = authorization("Bearer third-token-of-two");
        assert_eq!(reason(&tcp(Some(&["x"])), &wrong), "the token is not known");
        // One in which nothing can be read names nobody.
        assert!(reason(&tcp(Some(&[])), &HeaderMap::new()).starts_with("no token"));
    }

    #[test]
    fn tokens_names_and_users_are_each_of_one_tenant() {
        let admitted = |peer: &Peer, token: Option<&'static str>| {
            let headers = token.map(authorization).unwrap_or_default();
            two().admit(peer, &headers).map(|tenant| tenant.0).map_err(|_refused| ())
        };
        let of = |name: &str| Ok(name.to_owned());
        for (token, tenant) in [
            ("Bearer the-operator-s-token", "default"),
            ("Bearer token-of-tenant-a", "a"),
            ("Bearer next-token-of-tenant-a", "a"),
            ("Bearer token-of-tenant-b", "b"),
        ] {
            assert_eq!(admitted(&tcp(None), Some(token)), of(tenant));
            assert_eq!(admitted(&tcp(Some(&["nobody.x"])), Some(token)), of(tenant), "a name that says nothing");
        }
        assert_eq!(admitted(&tcp(Some(&["z", "b.x"])), None), of("b"));
        assert_eq!(admitted(&tcp(Some(&["a.x"])), Some("Bearer token-of-tenant-a")), of("a"));
        let unix = |uid| Peer::Unix { uid: Some(uid), origin: Origin::Elsewhere };
        for (uid, tenant) in [(0, "default"), (1000, "a"), (1001, "b"), (1002, "b")] {
            assert_eq!(admitted(&unix(uid), None), of(tenant));
        }
        for (peer, token, says) in [
            (tcp(Some(&["nobody.x"])), None, "no tenant has the name in the certificate (nobody.x)"),
            (tcp(Some(&["a.x", "b.x"])), None, "the names in the certificate are those of several tenants"),
            (tcp(Some(&["a.x", "b.x"])), Some("Bearer token-of-tenant-a"), "the names in the certificate are"),
            (tcp(Some(&["a.x"])), Some("Bearer token-of-tenant-b"), "the token and the certificate are of different"),
            (unix(1003), None, "this socket does not serve uid 1003"),
        ] {
            let reason = reason_of(&two(), &peer, &token.map(authorization).unwrap_or_default());
            assert!(reason.starts_with(says), "{reason}");
        }
    }

    #[test]
    fn a_unix_socket_serves_its_own_user_and_root() {
        let unix = |uid, origin| Peer::Unix { uid, origin };
        let none = HeaderMap::new();
        for uid in [0, 1000] {
            assert!(gate().admit(&unix(Some(uid), Origin::Elsewhere), &none).is_ok(), "{uid}");
        }
        assert_eq!(
            reason(&unix(Some(1001), Origin::Elsewhere), &authorization("Bearer first-token-of-two")),
            "this socket serves uid 1000, the caller is uid 1001"
        );
        assert!(reason(&unix(None, Origin::Elsewhere), &none).contains("does not say"));
        assert!(reason(&unix(Some(1000), Origin::Command), &none).contains("own commands"));
        assert!(reason(&unix(Some(1000), Origin::Unknown), &none).contains("live process"));
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
