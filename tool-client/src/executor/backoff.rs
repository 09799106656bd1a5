//! How long to wait before something that failed is tried again: twice as long after each failure, up to a bound, and a
//! random part of that ("full jitter"), so that clients which lost the same executor at the same moment do not come back
//! at the same moment.

use std::time::Duration;

/// A series of pauses. A value without state: the failures are counted by who has them.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Backoff {
    /// Longest pause after the first failure.
    pub(crate) first: Duration,
    /// Longest pause at all.
    pub(crate) longest: Duration,
}

impl Backoff {
    /// Longest pause after so many failures in a row, from 1.
    pub(crate) fn ceiling(self, failures: u32) -> Duration {
        let doubled = 1_u32.checked_shl(failures.saturating_sub(1)).unwrap_or(u32::MAX);
        self.first.saturating_mul(doubled).min(self.longest)
    }

    /// The pause after so many failures in a row, from 1; `fraction` is 0 to 1.
    pub(crate) fn pause(self, failures: u32, fraction: f64) -> Duration {
        self.ceiling(failures).mul_f64(fraction.clamp(0.0, 1.0))
    }
}

/// A random number from 0 to 1. Without randomness it is 1: all pauses are then the longest of their kind.
pub(crate) fn jitter() -> f64 {
    f64::from(getrandom::u32().unwrap_or(u32::MAX)) / f64::from(u32::MAX)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const BACKOFF: Backoff = Backoff { first: Duration::from_millis(100), longest: Duration::from_secs(30) };

    #[test]
    fn pauses_double_up_to_the_longest() {
        let ceilings = [1, 2, 3, 9, 10, 33, 40, u32::MAX].map(|failures| BACKOFF.ceiling(failures).as_millis());
        assert_eq!(ceilings, [100, 200, 400, 25_600, 30_000, 30_000, 30_000, 30_000]);
    }

    #[test]
    fn the_jitter_is_spread() {
        let drawn: Vec<_> = (0..100).map(|_| jitter()).collect();
        assert!(drawn.iter().all(|fraction| (0.0..=1.0).contains(fraction)));
        assert!(drawn.iter().any(|fraction| *fraction < 0.3) && drawn.iter().any(|fraction| *fraction > 0.7));
    }

    proptest! {
        #[test]
        fn a_pause_is_bounded_whatever_is_asked(first in 0..10_000_u64, longest in 0..100_000_u64, failures: u32, fraction: f64) {
            prop_assume!(!fraction.is_nan());
            let backoff = Backoff { first: Duration::from_millis(first), longest: Duration::from_millis(longest) };
            let pause = backoff.pause(failures, fraction);
            prop_assert!(pause <= backoff.longest && pause <= backoff.ceiling(failures));
            prop_assert_eq!(backoff.pause(failures, 1.0), backoff.ceiling(failures));
            prop_assert_eq!(backoff.pause(failures, 0.0), Duration::ZERO);
        }
    }
}
