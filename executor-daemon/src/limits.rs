//! How much is allowed: budgets as permits that are given back when they are dropped.
//!
//! Of what there is in all, tenants have shares (`shares`): a flood of one leaves the others working. Within a tenant no owner
//! has more than its own part. What the host allows is found out once, at start (`HostLimits`), and is a cap on what the
//! configuration wants.

mod disk;
mod host;
mod rate;
mod shares;
mod spills;
mod tally;

use std::{
    collections::HashMap,
    path::Path,
    sync::{Arc, Mutex, PoisonError},
};

use executor_proto::{error::ExecutorError, types::OwnerId};

pub(crate) use self::{
    disk::Disk,
    host::HostLimits,
    rate::Rate,
    spills::{Grown, SpillBudget, SpillRoom},
};
use self::{
    shares::Shares,
    tally::{Permit, Tally},
};
use crate::ids::{Caller, TenantId};

/// Requests that may be under way at the same time in all. A connection carries 4,096 at most; what each takes is small but for
/// the command that it may bring.
const MAX_REQUESTS: u64 = 8_192;

/// The same of those that end something or say that it was seen: they free what others wait for, and are never refused for want
/// of it.
const MAX_ENDINGS: u64 = 4_096;

/// Streams that may wait for completions or read output at the same time in all.
const MAX_WATCHERS: u64 = 4_096;

/// What one owner may have of spills where nothing else is said, in bytes.
const SPILL_BYTES_PER_OWNER: u64 = 1024 * 1024 * 1024;

/// An owner within its tenant; those without a session share one budget.
type Account = (TenantId, Option<OwnerId>);

/// What one tenant may use. `None`: what there is in all.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Budget {
    /// Commands that may be alive at the same time.
    pub(crate) max_tasks: Option<u64>,
    /// Tasks of one owner that may run at the same time. `None`: as many as the tenant's.
    pub(crate) max_tasks_per_owner: Option<u64>,
    /// Spills, in bytes.
    pub(crate) max_spill_bytes_in_all: Option<u64>,
    /// Of one owner, in bytes. `None`: 1 GiB.
    pub(crate) max_spill_bytes_per_owner: Option<u64>,
    /// Output that is taken in a second. `None` or 0: as fast as it comes.
    pub(crate) max_output_bytes_per_second: Option<u64>,
    /// Streams that wait for completions or read output.
    pub(crate) max_watchers: Option<u64>,
    /// Requests under way.
    pub(crate) max_requests: Option<u64>,
}

/// What all tenants may use.
#[derive(Debug, Clone, Default)]
pub(crate) struct Budgets {
    /// Commands that may be alive at the same time in all, before the host's limits.
    pub(crate) max_tasks: u64,
    /// Of tenants that are not among the known: those of a caller that names its tenant itself.
    pub(crate) others: Budget,
    /// Of those that are.
    pub(crate) known: Vec<(TenantId, Budget)>,
}

impl Budgets {
    fn of(&self, tenant: &TenantId) -> &Budget {
        self.known.iter().find(|(known, _)| known == tenant).map_or(&self.others, |(_, budget)| budget)
    }

    /// Shares of so much, or of what was asked for by name where that is more.
    fn shares_as_asked(&self, total: u64, cap: impl Fn(&Budget) -> Option<u64>) -> Shares {
        let asked = self.known.iter().map(|(_, budget)| budget).chain([&self.others]).filter_map(&cap);
        self.shares(asked.fold(total, u64::max), cap)
    }

    fn shares(&self, total: u64, cap: impl Fn(&Budget) -> Option<u64>) -> Shares {
        Shares::new(total, self.known.iter().map(|(tenant, budget)| (tenant.clone(), cap(budget).unwrap_or(u64::MAX))))
    }
}

/// What is in force for one tenant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct InForce {
    /// Commands of the tenant that may be alive at the same time: runs, tasks and what is left over of them.
    pub(crate) max_tasks: u64,
    /// Tasks of one owner.
    pub(crate) max_tasks_per_owner: u64,
    /// Spills of the tenant, in bytes.
    pub(crate) max_spill_bytes_in_all: u64,
    /// Of one owner, in bytes.
    pub(crate) max_spill_bytes_per_owner: u64,
    /// 0: as fast as it comes.
    pub(crate) max_output_bytes_per_second: u64,
    /// Streams that wait for completions or read output.
    pub(crate) max_watchers: u64,
    /// Requests under way.
    pub(crate) max_requests: u64,
}

/// What a request does with what there is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RequestKind {
    /// It starts, asks or reads.
    Work,
    /// It ends something, or says that something was seen.
    Ending,
    /// It is a stream that may be open for long.
    Watcher,
}

/// Requests of one kind.
#[derive(Debug)]
struct Requests {
    what: &'static str,
    what_of_owner: &'static str,
    shares: Shares,
    tenants: Tally<TenantId>,
    owners: Tally<Account>,
}

impl Requests {
    fn new(what: &'static str, what_of_owner: &'static str, shares: Shares) -> Self {
        Self { what, what_of_owner, shares, tenants: Tally::default(), owners: Tally::default() }
    }
}

#[derive(Debug)]
struct Inner {
    budgets: Budgets,
    command_shares: Shares,
    commands: Tally<TenantId>,
    tasks: Tally<Account>,
    runs: Tally<Account>,
    work: Requests,
    endings: Requests,
    watchers: Requests,
    spill_shares: Shares,
    spills: SpillBudget,
    rates: Mutex<HashMap<TenantId, Arc<Rate>>>,
}

/// The budgets of one executor. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Limits(Arc<Inner>);

impl Limits {
    /// Budgets as wanted, within what the host allows. Spills lie in this directory.
    pub(crate) fn new(budgets: Budgets, host: HostLimits, spill_dir: &Path) -> Self {
        let max_commands = host.cap(budgets.max_tasks);
        let spill_shares = budgets
            .shares_as_asked(disk::for_spills(spill_dir).unwrap_or(u64::MAX), |budget| budget.max_spill_bytes_in_all);
        let per_owner = |budget: &Budget| budget.max_spill_bytes_per_owner.unwrap_or(SPILL_BYTES_PER_OWNER);
        let of_known = budgets.known.iter().map(|(tenant, budget)| (tenant.clone(), per_owner(budget))).collect();
        let spills = SpillBudget::new(spill_shares.clone(), (of_known, per_owner(&budgets.others)));
        Self(Arc::new(Inner {
            command_shares: budgets.shares(max_commands, |budget| budget.max_tasks),
            commands: Tally::default(),
            tasks: Tally::default(),
            runs: Tally::default(),
            work: Requests::new(
                "requests",
                "requests of the owner",
                budgets.shares_as_asked(MAX_REQUESTS, |budget| budget.max_requests),
            ),
            endings: Requests::new(
                "requests to end",
                "requests of the owner to end",
                budgets.shares_as_asked(MAX_ENDINGS, |budget| budget.max_requests),
            ),
            watchers: Requests::new(
                "watchers",
                "watchers of the owner",
                budgets.shares_as_asked(MAX_WATCHERS, |budget| budget.max_watchers),
            ),
            spill_shares,
            spills,
            rates: Mutex::default(),
            budgets,
        }))
    }

    /// What is in force for this tenant: the most that it can have.
    pub(crate) fn in_force(&self, tenant: &TenantId) -> InForce {
        let Inner { budgets, command_shares, work, watchers, spill_shares, .. } = &*self.0;
        let budget = budgets.of(tenant);
        let max_tasks = command_shares.most(tenant);
        InForce {
            max_tasks,
            max_tasks_per_owner: budget.max_tasks_per_owner.unwrap_or(max_tasks),
            max_spill_bytes_in_all: spill_shares.most(tenant),
            max_spill_bytes_per_owner: budget.max_spill_bytes_per_owner.unwrap_or(SPILL_BYTES_PER_OWNER),
            max_output_bytes_per_second: budget.max_output_bytes_per_second.unwrap_or(0),
            max_watchers: watchers.shares.most(tenant),
            max_requests: work.shares.most(tenant),
        }
    }

    /// Room for one more command.
    pub(crate) fn command(&self, caller: &Caller) -> Result<CommandPermit, ExecutorError> {
        let limit = |used: &HashMap<_, _>| self.0.command_shares.limit(used, &caller.tenant);
        self.0.commands.take(&caller.tenant, "running commands", limit).map(|permit| CommandPermit { _permit: permit })
    }

    /// The room of a command that is alive already: it cannot be refused, and counts.
    pub(crate) fn command_there(&self, caller: &Caller) -> CommandPermit {
        CommandPermit { _permit: self.0.commands.there(&caller.tenant) }
    }

    /// Room for one more running task of this caller's owner.
    pub(crate) fn task(&self, caller: &Caller) -> Result<OwnerPermit, ExecutorError> {
        let limit = self.in_force(&caller.tenant).max_tasks_per_owner;
        of_owner(&self.0.tasks, "running tasks", caller, limit)
    }

    /// The room of a task that runs already.
    pub(crate) fn task_there(&self, caller: &Caller) -> OwnerPermit {
        OwnerPermit { _permit: self.0.tasks.there(&account(caller)) }
    }

    /// Room for one more run of this caller's owner: as many as tasks, or half of what its tenant can have, whichever is more.
    pub(crate) fn run(&self, caller: &Caller) -> Result<OwnerPermit, ExecutorError> {
        let InForce { max_tasks, max_tasks_per_owner, .. } = self.in_force(&caller.tenant);
        let limit = max_tasks_per_owner.max(max_tasks.div_ceil(2));
        of_owner(&self.0.runs, "running commands of the owner", caller, limit)
    }

    /// The room of a run that runs already.
    pub(crate) fn run_there(&self, caller: &Caller) -> OwnerPermit {
        OwnerPermit { _permit: self.0.runs.there(&account(caller)) }
    }

    /// Room for one more request of this tenant.
    pub(crate) fn request(&self, tenant: &TenantId, kind: RequestKind) -> Result<RequestPermit, ExecutorError> {
        let of = self.requests(kind);
        let of_tenant = of.tenants.take(tenant, of.what, |used| of.shares.limit(used, tenant))?;
        Ok(RequestPermit { limits: self.clone(), kind, _of_tenant: of_tenant })
    }

    fn requests(&self, kind: RequestKind) -> &Requests {
        match kind {
            RequestKind::Work => &self.0.work,
            RequestKind::Ending => &self.0.endings,
            RequestKind::Watcher => &self.0.watchers,
        }
    }

    /// The room for a spill of this caller's.
    pub(crate) fn spill(&self, caller: &Caller) -> SpillRoom {
        self.0.spills.room(caller)
    }

    /// How fast this tenant's output is taken. `None`: as it comes.
    pub(crate) fn rate(&self, tenant: &TenantId) -> Option<Arc<Rate>> {
        let per_second = self.0.budgets.of(tenant).max_output_bytes_per_second.filter(|bytes| *bytes > 0)?;
        let mut rates = self.0.rates.lock().unwrap_or_else(PoisonError::into_inner);
        Some(Arc::clone(rates.entry(tenant.clone()).or_insert_with(|| Arc::new(Rate::new(per_second)))))
    }
}

fn of_owner(
    tally: &Tally<Account>,
    what: &'static str,
    caller: &Caller,
    limit: u64,
) -> Result<OwnerPermit, ExecutorError> {
    tally.take(&account(caller), what, |_| limit).map(|permit| OwnerPermit { _permit: permit })
}

fn account(caller: &Caller) -> Account {
    (caller.tenant.clone(), caller.owner.clone())
}

/// One command that may be alive.
#[derive(Debug)]
pub(crate) struct CommandPermit {
    _permit: Permit<TenantId>,
}

/// One task or run that may run, or a request under way, as its owner's.
#[derive(Debug)]
pub(crate) struct OwnerPermit {
    _permit: Permit<Account>,
}

/// One request under way.
#[derive(Debug)]
pub(crate) struct RequestPermit {
    limits: Limits,
    kind: RequestKind,
    _of_tenant: Permit<TenantId>,
}

impl RequestPermit {
    /// It is made for this owner, who may have half of what its tenant can have.
    ///
    /// # Errors
    /// [`ExecutorError::OverLimit`].
    pub(crate) fn made_for(&self, caller: &Caller) -> Result<OwnerPermit, ExecutorError> {
        let of = self.limits.requests(self.kind);
        of_owner(&of.owners, of.what_of_owner, caller, of.shares.most(&caller.tenant).div_ceil(2))
    }
}

#[cfg(test)]
mod tests;
