//! Which of several hosts a session's commands run on: rendezvous hashing of its owner.
//!
//! Every host gets a score from the owner and its own name, and the highest wins. Whoever knows the same hosts comes to the same
//! answer, without asking anybody; a host that is added takes its share from all others, and one that goes leaves its share to
//! all others, while everybody else stays.

use executor_proto::types::OwnerId;
use sha2::{Digest, Sha256};

/// The hosts in the order in which this session prefers them: indexes into `hosts`, the best one first. The order of `hosts` does
/// not matter, their names do.
pub(super) fn rank(owner: Option<&OwnerId>, hosts: &[impl AsRef<str>]) -> Vec<usize> {
    let mut ranked: Vec<usize> = (0..hosts.len()).collect();
    // Equal names have equal scores, and then it does not matter.
    ranked.sort_by_cached_key(|&index| std::cmp::Reverse(score(owner, hosts[index].as_ref())));
    ranked
}

/// The same in every version of this client: a session must not move because somebody has upgraded.
fn score(owner: Option<&OwnerId>, host: &str) -> [u8; 32] {
    let mut hash = Sha256::new();
    // No owner is not the empty one; and what belongs to the host cannot be taken for the owner's.
    hash.update([u8::from(owner.is_some())]);
    hash.update((host.len() as u64).to_le_bytes());
    hash.update(host);
    hash.update(owner.map_or("", |OwnerId(owner)| owner));
    hash.finalize().into()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SESSIONS: usize = 300;

    fn hosts(count: u8) -> Vec<String> {
        (0..count).map(|n| format!("10.0.1.{}:7700", n + 2)).collect()
    }

    fn sessions() -> Vec<OwnerId> {
        (0..SESSIONS).map(|n| OwnerId(format!("session-{n}"))).collect()
    }

    fn homes(hosts: &[String]) -> Vec<&str> {
        sessions().iter().map(|owner| hosts[rank(Some(owner), hosts)[0]].as_str()).collect()
    }

    #[test]
    fn three_hosts_share_three_hundred_sessions_almost_equally() {
        let hosts = hosts(3);
        let homes = homes(&hosts);
        for host in &hosts {
            let share = homes.iter().filter(|home| *home == host).count();
            // At most 1.25 times the mean.
            assert!(share * hosts.len() * 4 <= SESSIONS * 5, "{host} has {share} of {SESSIONS}");
        }
    }

    #[test]
    fn a_host_that_is_added_takes_its_share_and_nobody_else_moves() {
        let (three, four) = (hosts(3), hosts(4));
        let (before, after) = (homes(&three), homes(&four));
        let moved: Vec<_> = before.iter().zip(&after).filter(|(before, after)| before != after).collect();
        assert!(moved.len() * 10 <= SESSIONS * 3, "{} of {SESSIONS} have moved", moved.len());
        assert!(moved.iter().all(|(_, after)| **after == four[3]), "somebody moved between those that stayed");
    }

    #[test]
    fn a_score_is_the_same_in_every_version() {
        let hosts = hosts(3);
        let first = |owner: &str| rank(Some(&OwnerId(owner.to_owned())), &hosts);
        assert_eq!([first("a"), first("b"), first("")], GOLDEN);
        assert_ne!(score(None, "h"), score(Some(&OwnerId(String::new())), "h"));
    }

    /// What the first version answered.
    const GOLDEN: [[usize; 3]; 3] = [[2, 1, 0], [2, 1, 0], [2, 0, 1]];

    proptest! {
        #[test]
        fn the_order_of_the_hosts_does_not_matter_and_one_that_goes_moves_only_its_own(
            owner in ".{0,20}", count in 2_u8..9, turn in 0_usize..8, gone in 0_usize..8
        ) {
            let owner = OwnerId(owner);
            let hosts = hosts(count);
            let mut turned = hosts.clone();
            turned.rotate_left(turn % hosts.len());
            let names = |hosts: &[String]| -> Vec<String> {
                rank(Some(&owner), hosts).into_iter().map(|index| hosts[index].clone()).collect()
            };
            let ranked = names(&hosts);
            prop_assert_eq!(&ranked, &names(&turned));
            let mut left = hosts.clone();
            let gone = left.remove(gone % hosts.len());
            let expected: Vec<String> = ranked.into_iter().filter(|host| *host != gone).collect();
            prop_assert_eq!(expected, names(&left));
        }
    }
}
