//! What can be configured, with the reason beside each default.
//!
//! [`Settings`] is what the engine and the server live by: plain values that are already checked, which main hands to
//! the keeper and the keeper to the server as bytes.

mod allowed;
mod credentials;
mod fence;
mod flags;
mod hidden;
mod identity;
mod keys;
mod listen;
mod load;
mod problem;
mod rules;
mod secrets;
mod state_dir;
mod tenants;
mod values;

use std::{collections::BTreeMap, ffi::OsString, path::PathBuf};

use serde::{Deserialize, Serialize};

pub use self::{
    credentials::{CredentialFiles, Credentials},
    flags::{Asked, ServeFlags, command, one_line, parse},
    listen::ListenAddress,
    load::{Daemon, Surroundings, load},
    problem::Problem,
    rules::{SandboxTool, TenantRules},
    state_dir::{StateDir, StateDirError},
};
use crate::{ids::TenantId, keeper::protocol::GroupLimits, telemetry::LogSettings, tls::ServerTls};

/// Everything that the engine is told at start.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Settings {
    /// What holds for a tenant that is not named below.
    pub tenant_defaults: TenantRules,
    /// What holds for those with rules of their own, by their names.
    pub tenants: BTreeMap<String, TenantRules>,
    /// Directory that a relative workdir is resolved against: the one that the executor was started in. Absolute.
    pub start_dir: PathBuf,
    /// Timeout of a run that gives none, in milliseconds.
    pub timeout_ms: f64,
    /// Longest timeout, in milliseconds.
    pub max_timeout_ms: f64,
    /// Tail kept of each stream, in bytes; 1 to 16 MiB.
    pub max_output_bytes: u64,
    /// Cap of each spill, in bytes; above it the head is kept.
    pub max_spill_bytes: u64,
    /// SIGTERM to SIGKILL, in milliseconds.
    pub grace_ms: u64,
    /// Quiet after the shell's exit that ends the drain, in milliseconds.
    pub drain_quiet_ms: u64,
    /// Longest drain after the shell's exit, in milliseconds.
    pub drain_total_ms: u64,
    /// Longest silence of a stream to a client, in milliseconds.
    pub heartbeat_ms: u64,
    /// How long a run goes on whose client has vanished, in milliseconds. 0: it is ended at once, and nothing of it is held.
    pub resume_window_ms: u64,
    /// Whether what lives on after a shell is ended at once instead of becoming leftovers.
    pub reap_descendants: bool,
    /// Tasks and runs that may run at the same time in all; the engine lowers it to what the limits of the host allow.
    pub max_tasks: u64,
    /// Leftovers per owner, before the oldest are ended.
    pub max_leftovers_per_owner: u64,
    /// Finished tasks kept per owner.
    pub max_finished_per_owner: u64,
    /// How long a finished task is kept, in seconds.
    pub finished_kept_seconds: u64,
    /// Completions that wait unacknowledged per owner, before the oldest go.
    pub max_completions_per_owner: u64,
    /// Whether the fence around commands hides the state directory and the daemon's credentials from them, where they run as its
    /// own user.
    pub files_are_hidden: bool,
    /// The state directory: `spill/`, the task counter and whatever outlives the server.
    pub state_dir: PathBuf,
}

impl Settings {
    /// The defaults, for a state directory and a default workdir, which is taken for the start directory too.
    #[must_use]
    pub fn new(state_dir: PathBuf, default_workdir: PathBuf, environment: Vec<(OsString, OsString)>) -> Self {
        Self {
            start_dir: default_workdir.clone(),
            tenant_defaults: TenantRules::new(default_workdir, environment),
            tenants: BTreeMap::new(),
            timeout_ms: 120_000.0,
            max_timeout_ms: 600_000.0,
            max_output_bytes: 64_000,
            max_spill_bytes: 64 * 1024 * 1024,
            grace_ms: 3_000,
            drain_quiet_ms: 250,
            drain_total_ms: 1_000,
            heartbeat_ms: executor_proto::transport::HEARTBEAT.as_secs() * 1_000,
            resume_window_ms: executor_proto::transport::RESUME_WINDOW.as_secs() * 1_000,
            reap_descendants: false,
            max_tasks: 16_384,
            max_leftovers_per_owner: 64,
            max_finished_per_owner: 1_000,
            finished_kept_seconds: 24 * 60 * 60,
            max_completions_per_owner: 4_096,
            files_are_hidden: false,
            state_dir,
        }
    }

    /// What holds for all tenants, with what holds for those that are not named.
    pub(crate) fn all_rules(&self) -> impl Iterator<Item = &TenantRules> {
        self.tenants.values().chain([&self.tenant_defaults])
    }

    /// The tenant's number among all of them: 0 for those without rules of their own.
    #[must_use]
    pub fn number_of(&self, tenant: &TenantId) -> u32 {
        let among = self.tenants.keys().position(|name| *name == tenant.0);
        // There are fewer tenants than bytes in a file that is read.
        among.and_then(|index| u32::try_from(index + 1).ok()).unwrap_or(0)
    }

    /// What the processes of each tenant may have together, by [`Settings::number_of`].
    #[must_use]
    pub fn group_limits(&self) -> Vec<GroupLimits> {
        let limits = |rules: &TenantRules| GroupLimits {
            max_processes: rules.max_processes,
            max_memory_bytes: rules.max_memory_bytes,
        };
        std::iter::once(&self.tenant_defaults).chain(self.tenants.values()).map(limits).collect()
    }

    /// What holds for a tenant.
    #[must_use]
    pub fn rules(&self, tenant: &TenantId) -> &TenantRules {
        self.tenants.get(&tenant.0).unwrap_or(&self.tenant_defaults)
    }

    /// The environment for commands made from this process's own: without credential-shaped names, with the variables
    /// that keep pagers and colours away.
    #[must_use]
    pub fn command_environment(own: impl IntoIterator<Item = (OsString, OsString)>) -> Vec<(OsString, OsString)> {
        /// Parts of a name, in any case, that mark a variable as a credential.
        const CREDENTIAL_SHAPED: [&str; 6] = ["KEY", "SECRET", "TOKEN", "PASSWORD", "PASSPHRASE", "CREDENTIAL"];
        /// Set for every command, so that nothing waits in a pager and no escape codes reach a model.
        const PLAIN_OUTPUT: [(&str, &str); 4] =
            [("NO_COLOR", "1"), ("TERM", "dumb"), ("PAGER", "cat"), ("GIT_PAGER", "cat")];

        let mut kept: Vec<(OsString, OsString)> = own
            .into_iter()
            .filter(|(name, _)| {
                let upper = name.to_string_lossy().to_ascii_uppercase();
                !CREDENTIAL_SHAPED.iter().any(|part| upper.contains(part))
                    && !PLAIN_OUTPUT.iter().any(|(set, _)| name.as_os_str() == *set)
            })
            .collect();
        kept.extend(PLAIN_OUTPUT.map(|(name, value)| (name.into(), value.into())));
        kept
    }
}

/// Whether the daemon, started by whoever runs this, could run commands as the users of a range.
#[must_use]
pub fn can_run_as(range: &str) -> bool {
    identity::range(range, nix::unistd::geteuid()).is_ok()
}

/// Whether the daemon, started by whoever runs this, has somebody to run commands as when nothing is said of that.
#[must_use]
pub fn has_default_user() -> bool {
    identity::resolve(None, nix::unistd::geteuid()).is_ok()
}

/// A tenant, and whom it is known by.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KnownTenant {
    /// Its name.
    pub name: String,
    /// The SHA-256 of each of its tokens.
    pub tokens: Vec<[u8; 32]>,
    /// Whose certificates are its.
    pub certificates: CertificateNames,
    /// The users whose connections to a Unix socket are its.
    pub peer_uids: Vec<u32>,
}

/// Which of the certificates that the client CA has signed are a tenant's.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum CertificateNames {
    /// All of them: it is the only tenant.
    Any,
    /// Those with one of these names, as [`crate::tls::comparable`] makes them.
    These(Vec<String>),
}

/// Everything that the server process is told. It never sees a token, only digests.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ServerSettings {
    /// What the engine lives by.
    pub engine: Settings,
    /// Who may call.
    pub tenants: Vec<KnownTenant>,
    /// TCP speaks TLS with this. `None`: it speaks it plain.
    pub tls: Option<ServerTls>,
    /// How to log.
    pub log: LogSettings,
}

impl ServerSettings {
    /// The bytes that the keeper hands to the server.
    ///
    /// # Errors
    /// When a path is not UTF-8.
    pub fn encode(&self) -> Result<Vec<u8>, postcard::Error> {
        postcard::to_stdvec(self)
    }

    /// What [`ServerSettings::encode`] made.
    ///
    /// # Errors
    /// When the bytes are of another version of this program.
    pub fn decode(bytes: &[u8]) -> Result<Self, postcard::Error> {
        postcard::from_bytes(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn credential_shaped_names_do_not_reach_commands() {
        let own = ["ZZ_API_KEY", "zz_ToKeN", "MONKEY", "ZZ_PASSPHRASE", "ZZ_PASS", "PATH", "TERM"];
        let kept = Settings::command_environment(own.map(|name| (name.into(), "x".into())));
        let names: Vec<_> = kept.iter().map(|(name, _)| name.to_string_lossy().into_owned()).collect();
        assert_eq!(names, ["ZZ_PASS", "PATH", "NO_COLOR", "TERM", "PAGER", "GIT_PAGER"]);
    }
}
