//! The names of things inside the executor.

use executor_proto::types::OwnerId;

/// The authenticated party that owners live in.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TenantId(pub String);

impl TenantId {
    /// The only tenant of an executor whose configuration names none.
    #[must_use]
    pub fn default_tenant() -> Self {
        Self("default".to_owned())
    }
}

/// Who makes a call: the tenant that the transport authenticated, and the session that the call is made for.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Caller {
    /// Authenticated.
    pub tenant: TenantId,
    /// Claimed by the tenant. `None`: no session.
    pub owner: Option<OwnerId>,
}

/// The keeper's name for one started command and everything that comes from it. Never reused by one keeper.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub struct ProcessHandle(pub u64);
