//! Which leftovers go when an owner has too many. Pure.

/// Of counts from oldest to newest, how many of the oldest must go so that the rest is within the cap.
pub(super) fn oldest_above(counts: &[u64], cap: u64) -> usize {
    let mut sum = 0_u64;
    let stay = counts.iter().rev().take_while(|count| {
        sum = sum.saturating_add(**count);
        sum <= cap
    });
    counts.len() - stay.count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_leftovers_go_until_the_rest_is_within_the_cap() {
        assert_eq!(oldest_above(&[], 64), 0);
        assert_eq!(oldest_above(&[1; 64], 64), 0);
        assert_eq!(oldest_above(&[1; 65], 64), 1);
        assert_eq!(oldest_above(&[10, 60, 3], 64), 1);
        assert_eq!(oldest_above(&[70, 1], 64), 1);
        assert_eq!(oldest_above(&[70], 64), 1);
    }
}
