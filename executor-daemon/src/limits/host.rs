//! What the host allows this process, found out once, at start: a cap on what the configuration wants.

use std::fs;

use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit};

/// Descriptors that one command takes while it is alive: in the engine's process two pipes, two stream files, two spills and
/// its helper's news; in the keeper, which has the same limit, the pages of two stream files more.
const DESCRIPTORS_PER_COMMAND: u64 = 9;

/// Most connections that the listening sockets of one kind (Unix or TCP) share.
const MAX_CONNECTIONS_PER_KIND: u64 = 1_024;

/// Kinds of listening sockets.
const CONNECTION_KINDS: u64 = 2;

/// Of this many descriptors, connections of one kind may take one: both kinds take a quarter, whoever connects.
const DESCRIPTORS_PER_CONNECTION_OF_A_KIND: u64 = 8;

/// Descriptors that are left to everything else: the runtime, readers of spills, starts under way.
const DESCRIPTORS_RESERVED: u64 = 128;

/// Processes that one command takes at least: its helper and its shell.
const PROCESSES_PER_COMMAND: u64 = 2;

/// What this host allows this process, where it can be learned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct HostLimits {
    /// Soft `RLIMIT_NOFILE`.
    descriptors: Option<u64>,
    /// The least of soft `RLIMIT_NPROC`, the control group's `pids.max` and the kernel's `pid_max`.
    processes: Option<u64>,
}

impl HostLimits {
    /// Asks the host. What cannot be learned does not limit.
    pub(crate) fn learn() -> Self {
        let soft = |resource| getrlimit(resource).ok().map(|(soft, _)| soft).filter(|soft| *soft != RLIM_INFINITY);
        let number = |path: &str| fs::read_to_string(path).ok().and_then(|text| text.trim().parse::<u64>().ok());
        let processes = [
            soft(Resource::RLIMIT_NPROC),
            // The group's own directory is at the mount's root inside a container; elsewhere the line names it.
            number("/sys/fs/cgroup/pids.max"),
            number("/sys/fs/cgroup/pids/pids.max"),
            own_control_group().and_then(|group| number(&format!("/sys/fs/cgroup{group}/pids.max"))),
            number("/proc/sys/kernel/pid_max"),
        ];
        Self { descriptors: soft(Resource::RLIMIT_NOFILE), processes: processes.into_iter().flatten().min() }
    }

    /// Connections that the listening sockets of one kind (Unix or TCP) may have at the same time: 1 to 1,024. Each kind
    /// has its own, so that strangers on TCP cannot keep the Unix socket from its user, nor commands from starting.
    pub(crate) fn connections_per_kind(self) -> u64 {
        let share = self.descriptors.map(|all| all / DESCRIPTORS_PER_CONNECTION_OF_A_KIND);
        share.unwrap_or(MAX_CONNECTIONS_PER_KIND).clamp(1, MAX_CONNECTIONS_PER_KIND)
    }

    /// Of the commands that are wanted at the same time, how many can be had. At least one.
    pub(super) fn cap(self, wanted: u64) -> u64 {
        let others = DESCRIPTORS_RESERVED + CONNECTION_KINDS * self.connections_per_kind();
        let descriptors = self.descriptors.map(|all| all.saturating_sub(others) / DESCRIPTORS_PER_COMMAND);
        let processes = self.processes.map(|all| all / PROCESSES_PER_COMMAND);
        [descriptors, processes].into_iter().flatten().fold(wanted, u64::min).max(1)
    }
}

/// The path of this process's version 2 control group.
fn own_control_group() -> Option<String> {
    let groups = fs::read_to_string("/proc/self/cgroup").ok()?;
    groups.lines().find_map(|line| line.strip_prefix("0::")).map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_scarcest_thing_of_the_host_decides() {
        let host = |descriptors, processes| HostLimits { descriptors, processes };
        assert_eq!(host(None, None).cap(16_384), 16_384);
        // 1,024 without 128 for everything else and 128 connections of either kind.
        assert_eq!(host(Some(1_024), None).cap(16_384), 71);
        assert_eq!(host(Some(1 << 20), Some(256)).cap(16_384), 128);
        assert_eq!(host(Some(1 << 20), Some(1 << 20)).cap(10), 10);
        assert_eq!(host(Some(3), Some(1)).cap(10), 1);
        assert!(HostLimits::learn().cap(16_384) >= 1);
    }

    #[test]
    fn connections_take_a_quarter_of_the_descriptors_at_most() {
        let connections = |descriptors| HostLimits { descriptors, processes: None }.connections_per_kind();
        assert_eq!(connections(Some(1_024)), 128);
        assert_eq!(connections(Some(1 << 20)), 1_024);
        assert_eq!(connections(None), 1_024);
        assert_eq!(connections(Some(3)), 1);
    }
}
