//! Permits of every kind, and that they come back whatever becomes of who holds them.

use proptest::prelude::*;

use super::*;

fn caller(tenant: &str, owner: &str) -> Caller {
    Caller { tenant: TenantId(tenant.into()), owner: Some(OwnerId(owner.into())) }
}

fn tenant(name: &str) -> TenantId {
    TenantId(name.into())
}

fn limits(max_tasks: u64, known: &[(&str, Budget)]) -> Limits {
    let known = known.iter().map(|(name, budget)| (tenant(name), budget.clone())).collect();
    let budgets = Budgets { max_tasks, others: Budget::default(), known };
    Limits::new(budgets, HostLimits::default(), Path::new("/"))
}

fn over(what: &str, used: u64, limit: u64) -> ExecutorError {
    ExecutorError::OverLimit { what: what.to_owned(), used, limit }
}

impl Limits {
    /// Nothing is held of anything.
    fn is_idle(&self) -> bool {
        let Inner { commands, tasks, runs, work, endings, watchers, .. } = &*self.0;
        let requests = [work, endings, watchers];
        commands.is_empty()
            && [tasks, runs].into_iter().chain(requests.map(|one| &one.owners)).all(Tally::is_empty)
            && requests.iter().all(|one| one.tenants.is_empty())
    }
}

#[test]
fn permits_come_back_when_they_are_dropped_and_nothing_is_kept_of_who_is_idle() {
    let budget = Budget { max_tasks_per_owner: Some(2), ..Budget::default() };
    let limits = limits(3, &[("t", budget)]);
    let (a, b) = (caller("t", "a"), caller("t", "b"));
    let held = [limits.task(&a).unwrap(), limits.task(&a).unwrap()];
    assert_eq!(limits.task(&a).unwrap_err(), over("running tasks", 2, 2));
    drop(limits.task(&b).unwrap());
    let runs = [limits.run(&a).unwrap(), limits.run(&a).unwrap()];
    assert_eq!(limits.run(&a).unwrap_err(), over("running commands of the owner", 2, 2));
    drop((held, runs));
    let commands: Vec<_> = (0..3).map(|_| limits.command(&a).unwrap()).collect();
    assert_eq!(limits.command(&b).unwrap_err(), over("running commands", 3, 3));
    drop(commands);
    assert!(limits.is_idle());
}

#[test]
fn a_tenant_that_floods_leaves_the_others_room() {
    let limits = limits(8, &[("t", Budget::default()), ("u", Budget { max_tasks: Some(1), ..Budget::default() })]);
    let flood: Vec<_> = std::iter::from_fn(|| limits.command(&caller("t", "a")).ok()).collect();
    assert_eq!(flood.len(), 7);
    assert_eq!(limits.in_force(&tenant("t")).max_tasks, 7);
    assert!(limits.command(&caller("u", "a")).is_ok());
    assert_eq!(limits.in_force(&tenant("u")).max_tasks, 1);
}

#[test]
fn what_runs_already_counts_and_is_not_refused() {
    let budget = Budget { max_tasks_per_owner: Some(1), ..Budget::default() };
    let limits = limits(1, &[("t", budget)]);
    let caller = caller("t", "a");
    let there = [limits.command_there(&caller), limits.command_there(&caller)];
    let tasks = [limits.task_there(&caller), limits.task_there(&caller), limits.run_there(&caller)];
    assert_eq!(limits.command(&caller).unwrap_err(), over("running commands", 2, 1));
    assert_eq!(limits.task(&caller).unwrap_err(), over("running tasks", 2, 1));
    assert_eq!(limits.run(&caller).unwrap_err(), over("running commands of the owner", 1, 1));
    drop((there, tasks));
    assert!(limits.is_idle());
}

#[test]
fn requests_are_counted_by_what_they_do_and_one_owner_has_half() {
    let budget = Budget { max_requests: Some(4), max_watchers: Some(2), ..Budget::default() };
    let limits = limits(1, &[("t", budget)]);
    let request = |kind, owner| {
        let permit = limits.request(&tenant("t"), kind)?;
        let of_owner = permit.made_for(&caller("t", owner))?;
        Ok::<_, ExecutorError>((permit, of_owner))
    };
    let _first = [request(RequestKind::Work, "a").unwrap(), request(RequestKind::Work, "a").unwrap()];
    assert_eq!(request(RequestKind::Work, "a").unwrap_err(), over("requests of the owner", 2, 2));
    let second = [request(RequestKind::Work, "b").unwrap(), request(RequestKind::Work, "b").unwrap()];
    assert_eq!(request(RequestKind::Work, "c").unwrap_err(), over("requests", 4, 4));
    // None of them keeps anybody from ending what runs.
    let _end = request(RequestKind::Ending, "c").unwrap();
    let _watch = request(RequestKind::Watcher, "a").unwrap();
    assert_eq!(request(RequestKind::Watcher, "a").unwrap_err(), over("watchers of the owner", 1, 1));
    drop(second);
    request(RequestKind::Work, "c").unwrap();
}

#[test]
fn a_rate_is_the_tenants_and_0_is_none() {
    let limited = Budget { max_output_bytes_per_second: Some(1_000), ..Budget::default() };
    let zero = Budget { max_output_bytes_per_second: Some(0), ..Budget::default() };
    let limits = limits(1, &[("t", limited), ("u", zero)]);
    assert!(Arc::ptr_eq(&limits.rate(&tenant("t")).unwrap(), &limits.rate(&tenant("t")).unwrap()));
    assert!(limits.rate(&tenant("u")).is_none() && limits.rate(&tenant("v")).is_none());
}

#[test]
fn what_is_in_force_is_what_is_asked_for_or_what_there_is() {
    let limits = limits(100, &[("t", Budget::default())]);
    let of = limits.in_force(&tenant("t"));
    assert_eq!((of.max_tasks, of.max_tasks_per_owner), (100, 100));
    assert_eq!((of.max_requests, of.max_watchers), (MAX_REQUESTS, MAX_WATCHERS));
    assert_eq!((of.max_spill_bytes_per_owner, of.max_output_bytes_per_second), (SPILL_BYTES_PER_OWNER, 0));
    assert_eq!(Some(of.max_spill_bytes_in_all), disk::for_spills(Path::new("/")));
}

#[test]
fn what_is_asked_for_by_name_may_be_more_than_the_default_in_all() {
    let more = 2 * MAX_REQUESTS;
    let limits = limits(100, &[("t", Budget { max_requests: Some(more), ..Budget::default() })]);
    assert_eq!(limits.in_force(&tenant("t")).max_requests, more);
}

/// What one of several threads does: takes a permit of some kind for somebody, or drops one of those that it holds.
fn live(limits: &Limits, steps: &[(u8, u8, u8)]) -> u64 {
    let mut held: Vec<Box<dyn std::any::Any>> = Vec::new();
    let mut refused = 0;
    for (act, tenant, owner) in steps {
        let caller = caller(&(tenant % 3).to_string(), &(owner % 3).to_string());
        let kind = [RequestKind::Work, RequestKind::Ending, RequestKind::Watcher][usize::from(owner % 3)];
        let taken: Result<Box<dyn std::any::Any>, ExecutorError> = match act % 6 {
            0 => limits.command(&caller).map(|permit| Box::new(permit) as _),
            1 => limits.task(&caller).map(|permit| Box::new(permit) as _),
            2 => limits.run(&caller).map(|permit| Box::new(permit) as _),
            3 => limits.request(&caller.tenant, kind).map(|permit| Box::new(permit) as _),
            4 => limits.request(&caller.tenant, kind).and_then(|permit| {
                let of_owner = permit.made_for(&caller)?;
                Ok(Box::new((permit, of_owner)) as _)
            }),
            _ => {
                if !held.is_empty() {
                    drop(held.swap_remove(usize::from(*owner) % held.len()));
                }
                continue;
            }
        };
        match taken {
            Ok(permit) => held.push(permit),
            Err(_over) => refused += 1,
        }
        let used = limits.0.commands.used();
        assert!(used.values().sum::<u64>() <= 6, "{used:?}");
    }
    refused
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn under_any_schedule_nothing_is_exceeded_and_everything_comes_back(
        schedules in proptest::collection::vec(proptest::collection::vec(any::<(u8, u8, u8)>(), 0..200), 1..4),
    ) {
        let budget = Budget {
            max_tasks_per_owner: Some(2),
            max_requests: Some(5),
            max_watchers: Some(3),
            ..Budget::default()
        };
        let limits = limits(6, &["0", "1"].map(|name| (name, budget.clone())));
        std::thread::scope(|scope| {
            for steps in &schedules {
                scope.spawn(|| live(&limits, steps));
            }
        });
        prop_assert!(limits.is_idle());
    }
}
