//! How tenants share what there is of something in all. Pure.
//!
//! Half of it is promised: every tenant that is known has the same part of that half, which nobody else gets, whoever floods.
//! The other half is for whoever comes first. A tenant that is alone can have everything; a cap of its own holds it below.

use std::collections::HashMap;

use crate::ids::TenantId;

/// What there is in all, and whom it is for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Shares {
    total: u64,
    /// Of each tenant that is known: the most that it may have.
    caps: HashMap<TenantId, u64>,
}

impl Shares {
    /// So much in all, for tenants with these caps. One that is not among them has no cap, and nothing is promised to it.
    pub(super) fn new(total: u64, caps: impl IntoIterator<Item = (TenantId, u64)>) -> Self {
        Self { total, caps: caps.into_iter().collect() }
    }

    /// The most that this tenant can have, whoever else has what.
    pub(super) fn most(&self, tenant: &TenantId) -> u64 {
        let others: u64 = self.caps.keys().filter(|other| *other != tenant).map(|other| self.promised(other)).sum();
        self.cap(tenant).min(self.total.saturating_sub(others))
    }

    /// The most that this tenant may have while everybody has this much. At least what is promised to it.
    pub(super) fn limit(&self, used: &HashMap<TenantId, u64>, tenant: &TenantId) -> u64 {
        let of = |other: &TenantId| used.get(other).copied().unwrap_or(0);
        let known = self.caps.keys().filter(|other| *other != tenant).map(|other| of(other).max(self.promised(other)));
        let unknown = used.keys().filter(|other| *other != tenant && !self.caps.contains_key(other)).map(of);
        let others = known.chain(unknown).fold(0, u64::saturating_add);
        self.cap(tenant).min(self.total.saturating_sub(others).max(self.promised(tenant)))
    }

    fn cap(&self, tenant: &TenantId) -> u64 {
        self.caps.get(tenant).copied().unwrap_or(u64::MAX)
    }

    fn promised(&self, tenant: &TenantId) -> u64 {
        let parts = 2 * self.caps.len() as u64;
        self.caps.get(tenant).map_or(0, |cap| (*cap).min(self.total / parts))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn tenant(number: usize) -> TenantId {
        TenantId(number.to_string())
    }

    fn shares(total: u64, caps: &[u64]) -> Shares {
        Shares::new(total, caps.iter().enumerate().map(|(number, cap)| (tenant(number), *cap)))
    }

    #[test]
    fn who_is_alone_has_everything_and_of_several_each_keeps_a_part_of_half() {
        let nothing = HashMap::new();
        assert_eq!(shares(100, &[u64::MAX]).limit(&nothing, &tenant(0)), 100);
        assert_eq!(shares(100, &[30]).limit(&nothing, &tenant(0)), 30);
        assert_eq!(shares(100, &[]).limit(&nothing, &tenant(0)), 100);
        let two = shares(100, &[u64::MAX, u64::MAX]);
        assert_eq!((two.limit(&nothing, &tenant(0)), two.most(&tenant(0))), (75, 75));
        let flooded = HashMap::from([(tenant(0), 75)]);
        assert_eq!((two.limit(&flooded, &tenant(0)), two.limit(&flooded, &tenant(1))), (75, 25));
        // What a tenant may not have anyway is not kept for it.
        assert_eq!(shares(100, &[u64::MAX, 5]).limit(&nothing, &tenant(0)), 95);
    }

    #[test]
    fn what_is_there_already_takes_no_promise_back() {
        let two = shares(100, &[u64::MAX, u64::MAX]);
        let taken_over = HashMap::from([(tenant(0), 150)]);
        assert_eq!((two.limit(&taken_over, &tenant(0)), two.limit(&taken_over, &tenant(1))), (75, 25));
    }

    proptest! {
        #[test]
        fn whatever_the_others_do_a_promise_is_kept_and_the_total_too(
            total in 0_u64..1_000,
            caps in proptest::collection::vec(prop_oneof![Just(u64::MAX), 0_u64..1_000], 1..6),
            order in proptest::collection::vec(0_usize..6, 0..3_000),
        ) {
            let shares = shares(total, &caps);
            let mut used = HashMap::new();
            for number in order {
                let tenant = tenant(number % caps.len());
                let limit = shares.limit(&used, &tenant);
                let has = used.entry(tenant.clone()).or_insert(0);
                if *has < limit {
                    *has += 1;
                }
                prop_assert!(*has <= shares.most(&tenant));
            }
            prop_assert!(used.values().sum::<u64>() <= total);
            for (number, cap) in caps.iter().enumerate() {
                let promised = (total / (2 * caps.len() as u64)).min(*cap);
                prop_assert!(shares.limit(&used, &tenant(number)) >= promised);
            }
        }
    }
}
