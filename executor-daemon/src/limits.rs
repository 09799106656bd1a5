//! How much is allowed: budgets as permits that are given back when they are dropped.
//!
//! What the host allows is found out once, at start (`HostLimits`), and is a cap on what the configuration wants.

use std::{
    collections::HashMap,
    fs,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use executor_proto::{error::ExecutorError, types::OwnerId};
use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit};

use crate::ids::{Caller, TenantId};

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
    fn cap(self, wanted: u64) -> u64 {
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

/// An owner within its tenant; those without a session share one budget.
type Account = (TenantId, Option<OwnerId>);

#[derive(Debug, Default)]
struct Counts {
    commands: u64,
    tasks: HashMap<Account, u64>,
}

/// The budgets of one executor. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Limits {
    counts: Arc<Mutex<Counts>>,
    max_commands: u64,
    max_tasks_per_owner: u64,
}

impl Limits {
    /// Budgets as wanted, within what the host allows.
    pub(crate) fn new(max_commands: u64, max_tasks_per_owner: u64, host: HostLimits) -> Self {
        Self { counts: Arc::default(), max_commands: host.cap(max_commands), max_tasks_per_owner }
    }

    /// Commands that may be alive at the same time, runs, tasks and what is left over of them.
    pub(crate) fn max_commands(&self) -> u64 {
        self.max_commands
    }

    fn lock(&self) -> MutexGuard<'_, Counts> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Room for one more command.
    pub(crate) fn command(&self) -> Result<CommandPermit, ExecutorError> {
        let mut counts = self.lock();
        if counts.commands >= self.max_commands {
            return Err(over("running commands", counts.commands, self.max_commands));
        }
        counts.commands += 1;
        Ok(CommandPermit { limits: self.clone() })
    }

    /// The room of a command that is alive already: it cannot be refused, and counts.
    pub(crate) fn command_there(&self) -> CommandPermit {
        self.lock().commands += 1;
        CommandPermit { limits: self.clone() }
    }

    /// The room of a task that runs already.
    pub(crate) fn task_there(&self, caller: &Caller) -> TaskPermit {
        let account = (caller.tenant.clone(), caller.owner.clone());
        *self.lock().tasks.entry(account.clone()).or_default() += 1;
        TaskPermit { limits: self.clone(), account }
    }

    /// Room for one more running task of this caller's owner.
    pub(crate) fn task(&self, caller: &Caller) -> Result<TaskPermit, ExecutorError> {
        let account = (caller.tenant.clone(), caller.owner.clone());
        let mut counts = self.lock();
        let used = counts.tasks.get(&account).copied().unwrap_or(0);
        if used >= self.max_tasks_per_owner {
            return Err(over("running tasks", used, self.max_tasks_per_owner));
        }
        counts.tasks.insert(account.clone(), used + 1);
        Ok(TaskPermit { limits: self.clone(), account })
    }
}

fn over(what: &str, used: u64, limit: u64) -> ExecutorError {
    ExecutorError::OverLimit { what: what.to_owned(), used, limit }
}

/// One command that may be alive.
#[derive(Debug)]
pub(crate) struct CommandPermit {
    limits: Limits,
}

impl Drop for CommandPermit {
    fn drop(&mut self) {
        self.limits.lock().commands -= 1;
    }
}

/// One task that may run.
#[derive(Debug)]
pub(crate) struct TaskPermit {
    limits: Limits,
    account: Account,
}

impl Drop for TaskPermit {
    fn drop(&mut self) {
        let mut counts = self.limits.lock();
        if let Some(used) = counts.tasks.get_mut(&self.account) {
            *used -= 1;
            if *used == 0 {
                counts.tasks.remove(&self.account);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn caller(owner: &str) -> Caller {
        Caller { tenant: TenantId::default_tenant(), owner: Some(OwnerId(owner.into())) }
    }

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

    #[test]
    fn permits_come_back_when_they_are_dropped_and_nothing_is_kept_of_an_idle_owner() {
        let limits = Limits::new(3, 2, HostLimits::default());
        let held = [limits.task(&caller("a")).unwrap(), limits.task(&caller("a")).unwrap()];
        let error = limits.task(&caller("a")).unwrap_err();
        assert_eq!(error, over("running tasks", 2, 2));
        drop(limits.task(&caller("b")).unwrap());
        drop(held);
        assert!(limits.lock().tasks.is_empty());
        let commands: Vec<_> = (0..3).map(|_| limits.command().unwrap()).collect();
        assert_eq!(limits.command().unwrap_err(), over("running commands", 3, 3));
        drop(commands);
        assert!(limits.command().is_ok());
    }
}
