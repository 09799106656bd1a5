//! Between tenants stands the operating system: each runs its commands as users that no other has, unless both say otherwise.

use super::problem::{Problem, Source};
use crate::keeper::protocol::Identity;

/// A tenant, as far as its commands and those of others can reach each other.
#[derive(Debug)]
pub(super) struct Fenced<'a> {
    pub(super) name: &'a str,
    pub(super) identity: &'a Identity,
    pub(super) shares_user: bool,
    /// Where it is written.
    pub(super) source: &'a Source,
}

/// What is wrong between two tenants, noted at the later one. The order is that of the file.
pub(super) fn problems(tenants: &[Fenced<'_>]) -> Vec<Problem> {
    let mut problems = Vec::new();
    for (index, one) in tenants.iter().enumerate() {
        let met = tenants[..index].iter().filter(|other| !(one.shares_user && other.shares_user)).find_map(|other| {
            let what = shared(one.identity, other.identity)?;
            Some(format!(
                "{what}, as those of tenant {}, and the one's could read or end the other's: give each a run_as or uid_range of \
                 its own, or say shares_user = true for both",
                other.name
            ))
        });
        problems.extend(met.map(|problem| Problem::new(one.source.clone(), problem)));
    }
    problems
}

/// What two identities have in common, of what opens one to the other.
fn shared(one: &Identity, other: &Identity) -> Option<String> {
    let ends = |identity: &Identity| (u64::from(identity.uid), u64::from(identity.uid) + u64::from(identity.uids));
    let ((from, to), (other_from, other_to)) = (ends(one), ends(other));
    if from < other_to && other_from < to {
        return Some(format!("its commands would run as uid {}", from.max(other_from)));
    }
    // Spill files are their group's.
    let gid = [(one, other), (other, one)]
        .into_iter()
        .find_map(|(one, other)| (one.gid == other.gid || other.groups.contains(&one.gid)).then_some(one.gid));
    gid.map(|gid| format!("its commands would run with group {gid}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identity(uid: u32, uids: u32, gid: u32, groups: &[u32]) -> Identity {
        Identity {
            name: uid.to_string(),
            uid,
            uids,
            gid,
            groups: groups.to_vec(),
            home: "/".into(),
            change: true,
            capabilities: Some(0),
            allow_setuid: false,
        }
    }

    fn met(one: Identity, other: Identity, shared: [bool; 2]) -> usize {
        let source = Source::Missing("run-as");
        let fenced = |name, identity, shares_user| Fenced { name, identity, shares_user, source: &source };
        problems(&[fenced("a", &one, shared[0]), fenced("b", &other, shared[1])]).len()
    }

    #[test]
    fn no_user_and_no_group_is_two_tenants_unless_both_say_so() {
        let range = || identity(100, 10, 100, &[]);
        assert_eq!(met(range(), identity(110, 10, 110, &[]), [false; 2]), 0);
        assert_eq!(met(range(), identity(109, 10, 200, &[]), [false; 2]), 1);
        assert_eq!(met(range(), identity(105, 1, 200, &[]), [false; 2]), 1);
        assert_eq!(met(range(), identity(105, 1, 200, &[]), [true, false]), 1);
        assert_eq!(met(range(), identity(105, 1, 200, &[]), [true; 2]), 0);
        assert_eq!(met(range(), identity(7, 1, 100, &[]), [false; 2]), 1, "the same group");
        assert_eq!(met(range(), identity(7, 1, 7, &[7, 100]), [false; 2]), 1, "the other's group too");
        assert_eq!(met(identity(7, 1, 7, &[7, 100]), range(), [false; 2]), 1);
    }
}
