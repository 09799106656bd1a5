//! What the configuration gives to each tenant, as budgets.

use crate::{
    config::{Settings, TenantRules},
    ids::TenantId,
    limits::{Budget, Budgets},
};

/// What the tenants may use.
pub(super) fn of(settings: &Settings) -> Budgets {
    let budget = |rules: &TenantRules| Budget {
        max_tasks: Some(rules.max_tasks),
        max_tasks_per_owner: Some(rules.max_tasks_per_owner),
        max_spill_bytes_in_all: rules.max_spill_bytes_in_all,
        max_spill_bytes_per_owner: rules.max_spill_bytes_per_owner,
        max_output_bytes_per_second: rules.max_output_bytes_per_second,
        max_watchers: rules.max_watchers,
        max_requests: rules.max_requests,
    };
    let others = budget(&settings.tenant_defaults);
    let mut known: Vec<_> =
        settings.tenants.iter().map(|(name, rules)| (TenantId(name.clone()), budget(rules))).collect();
    // Whoever is named by no table is its.
    if !settings.tenants.contains_key(&TenantId::default_tenant().0) {
        known.push((TenantId::default_tenant(), others.clone()));
    }
    Budgets { max_tasks: settings.max_tasks, others, known }
}
