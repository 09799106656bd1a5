//! What this executor is, for people and for clients that adapt.

use std::{fs, os::unix::ffi::OsStrExt};

use bytes::Bytes;
use executor_proto::types::{Budgets, ExecutorInfo};

use crate::{
    config::{Settings, TenantRules},
    keeper::protocol::{GroupLimits, Identity},
    limits::InForce,
    sandbox::Support,
};

/// Optional behaviour that this executor has.
const FEATURES: [&str; 4] = ["spill", "follow", "resume", "read-id"];

/// Commands signal nobody but commands of their tenant.
const SIGNAL_FENCE: &str = "signal-fence";

/// Everything that [`ExecutorInfo`] says to one tenant.
pub(super) fn info(
    settings: &Settings,
    (support, grouped): (&Support, bool),
    rules: &TenantRules,
    identity: Option<&Identity>,
    instance_id: String,
    of: InForce,
) -> ExecutorInfo {
    let held = held(rules, identity, grouped);
    let hostname = nix::unistd::gethostname().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    let boot_id = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let fence = support.has_fence(rules.allow_setuid).then_some(SIGNAL_FENCE);
    let fences = Fences { signals: fence.is_some(), files: settings.files_are_hidden };
    let mut limits = stated_limits(identity, &Own::of_this_process(), fences);
    limits.extend(support.gaps());
    limits.extend(not_held(rules, held));
    ExecutorInfo {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        protocol_revision: executor_proto::PROTOCOL_REVISION,
        instance_id,
        hostname,
        boot_id: boot_id.trim().to_owned(),
        default_workdir: Bytes::copy_from_slice(rules.default_workdir.as_os_str().as_bytes()),
        default_timeout_ms: settings.timeout_ms,
        max_timeout_ms: settings.max_timeout_ms,
        max_output_bytes: settings.max_output_bytes,
        max_spill_bytes: settings.max_spill_bytes,
        grace_ms: settings.grace_ms,
        max_command_bytes: executor_proto::MAX_COMMAND_BYTES as u64,
        max_stdin_bytes: executor_proto::MAX_COMMAND_BYTES as u64,
        max_tasks_per_owner: of.max_tasks_per_owner,
        max_tasks: of.max_tasks,
        max_leftovers_per_owner: settings.max_leftovers_per_owner,
        resume_window_ms: settings.resume_window_ms,
        heartbeat_ms: settings.heartbeat_ms,
        run_as_user: identity.map(|identity| identity.name.clone()).unwrap_or_default(),
        run_as_uid: identity.map_or(u32::MAX, |identity| identity.uid),
        sandbox_modes: support.modes(rules),
        sandbox_mode: Some(rules.sandbox),
        network_off: !rules.network,
        features: FEATURES.into_iter().chain(fence).map(str::to_owned).collect(),
        stated_limits: limits,
        budgets: Some(Budgets {
            max_spill_bytes_in_all: of.max_spill_bytes_in_all,
            max_spill_bytes_per_owner: of.max_spill_bytes_per_owner,
            max_output_bytes_per_second: of.max_output_bytes_per_second,
            max_watchers: of.max_watchers,
            max_requests: of.max_requests,
            max_processes: held.max_processes.unwrap_or(0),
            max_memory_bytes: held.max_memory_bytes.unwrap_or(0),
        }),
    }
}

/// Which of the limits on a tenant's processes hold here: all in a control group of its own; without one that on their number,
/// as that of a user who is not the keeper's nor root.
fn held(rules: &TenantRules, identity: Option<&Identity>, grouped: bool) -> GroupLimits {
    let of_user = identity.is_some_and(|identity| identity.change && identity.uid != 0);
    GroupLimits {
        max_processes: rules.max_processes.filter(|_| grouped || of_user),
        max_memory_bytes: rules.max_memory_bytes.filter(|_| grouped),
    }
}

/// What was asked for and does not hold, or not quite.
fn not_held(rules: &TenantRules, held: GroupLimits) -> Vec<String> {
    let mut limits = Vec::new();
    if rules.max_memory_bytes.is_some() && held.max_memory_bytes.is_none() {
        limits.push(
            "max_memory_bytes is not enforced: there is no control group (version 2) that this executor may divide",
        );
    }
    match (rules.max_processes, held.max_processes) {
        (Some(_), None) => limits.push("max_processes is not enforced: there is no control group (version 2) that this executor may divide, and commands have no user of their own"),
        (Some(_), Some(_)) if held.max_memory_bytes.is_none() => limits.push("max_processes counts the processes of each user, whichever tenant they are of, unless there is a control group for each tenant"),
        (Some(_), Some(_)) | (None, _) => {}
    }
    limits.into_iter().map(str::to_owned).collect()
}

/// What the engine's process is to commands of its own user.
struct Own {
    uid: u32,
    /// Whether they can read its memory and environment. The daemon's server makes itself closed to them; a program that
    /// embeds the engine does as it likes.
    readable: bool,
}

impl Own {
    fn of_this_process() -> Self {
        Self {
            uid: nix::unistd::geteuid().as_raw(),
            // What cannot be told is not claimed to be protected.
            readable: nix::sys::prctl::get_dumpable().unwrap_or(true),
        }
    }
}

/// What a fence keeps commands from.
#[derive(Debug, Clone, Copy)]
struct Fences {
    /// To signal what is not their tenant's.
    signals: bool,
    /// To read and change what is the daemon's.
    files: bool,
}

/// What is not protected when commands run as this identity.
fn stated_limits(identity: Option<&Identity>, own: &Own, fences: Fences) -> Vec<String> {
    let command_uid = identity.map(|identity| identity.uid);
    let gains = identity.filter(|identity| identity.uid != 0).and_then(Identity::gains);
    let gains = gains.map(|gains| format!("commands {gains}"));
    let mut limits = Vec::new();
    if command_uid == Some(0) {
        limits.push("commands run as root: they can read the executor's memory, token and state, end it, and change anything on this host");
    } else if command_uid == Some(own.uid) {
        limits.extend(match (own.readable, fences) {
            (true, _) => Some("commands run as the executor's own user: they can signal it, read its memory and change its state directory"),
            (false, Fences { signals: false, .. }) => Some(
                "commands run as the executor's own user: they can signal it, read its token file and change its state directory",
            ),
            (false, Fences { files: false, .. }) => Some(
                "commands run as the executor's own user: they can read its token file and change its state directory; put both \
                 below directories that are not that user's",
            ),
            (false, Fences { files: true, .. }) => None,
        });
    }
    limits.push("files are not fenced: a command in full access can read and write whatever its user can");
    if identity.is_none_or(|identity| identity.uids == 1) {
        limits.push(
            "sessions of one tenant share a user: their commands can signal each other and read each other's files",
        );
    }
    limits.push("commands that run end with the executor; what a loss of power cuts short, the latest records and output, is lost");
    limits.into_iter().map(str::to_owned).chain(gains).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const OPEN: Fences = Fences { signals: false, files: false };

    fn someone(uid: u32) -> Identity {
        Identity {
            name: String::new(),
            uid,
            uids: 1,
            gid: uid,
            groups: Vec::new(),
            home: "/".into(),
            change: true,
            capabilities: Some(0),
            allow_setuid: false,
        }
    }

    #[test]
    fn what_commands_were_given_is_said() {
        let own = Own { uid: 0, readable: false };
        let said = |identity: Identity| stated_limits(Some(&identity), &own, OPEN).concat();
        let bind = Some(rustix::thread::CapabilitySet::NET_BIND_SERVICE.bits());
        assert!(said(Identity { capabilities: bind, ..someone(7) }).contains("commands have CAP_NET_BIND_SERVICE"));
        assert!(said(Identity { allow_setuid: true, ..someone(7) }).contains("commands can gain privileges"));
        let plain = said(someone(7));
        assert!(!plain.contains("CAP_") && !plain.contains("gain") && plain.contains("share a user"), "{plain}");
        assert!(!said(Identity { uids: 2, ..someone(7) }).contains("share a user"));
    }

    #[test]
    fn a_fence_leaves_less_to_be_said() {
        let own = Own { uid: 7, readable: false };
        let said = |signals, files| stated_limits(Some(&someone(7)), &own, Fences { signals, files }).concat();
        assert!(said(false, false).contains("can signal it"));
        assert!(!said(true, false).contains("can signal it") && said(true, false).contains("read its token file"));
        assert!(!said(true, true).contains("own user"));
    }

    #[test]
    fn running_as_root_or_as_oneself_is_said() {
        let said = |command, uid, word: &str| {
            stated_limits(Some(&someone(command)), &Own { uid, readable: false }, OPEN)
                .iter()
                .any(|one| one.contains(word))
        };
        assert!(said(0, 0, "run as root") && said(0, 7, "run as root"));
        assert!(said(7, 7, "own user") && !said(7, 7, "root"));
        assert!(!said(7, 0, "own user") && !said(7, 0, "as root"));
    }

    #[test]
    fn only_memory_that_can_be_read_is_said_to_be() {
        let said = |readable| {
            stated_limits(Some(&someone(7)), &Own { uid: 7, readable }, OPEN).concat().contains("read its memory")
        };
        assert!(said(true) && !said(false));
    }
}
