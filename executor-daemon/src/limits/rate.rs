//! How fast the output of one tenant is taken. Each step is paid for by time; a tenant that was silent has a second of it ahead.
//!
//! Whoever has moved bytes waits until they are paid for, in the order in which they were moved. So every stream of a flood gets its
//! turn, and nothing is dropped.

use std::{
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

/// How much time ahead a silent tenant has.
const AHEAD: Duration = Duration::from_secs(1);

/// How far behind a tenant can fall: a command's last bytes are taken whatever the rate is, and others do not wait for longer than
/// this for what they cost. As long as the turns of 80 streams.
const MOST_DEBT: Duration = Duration::from_secs(10);

/// Steps into which a second is cut, so that one stream does not keep the others waiting for long.
const STEPS_PER_SECOND: u64 = 8;

/// The least that is moved at once: a page.
const LEAST_STEP_BYTES: u64 = 4_096;

/// Bytes per second, and until when they are spent.
#[derive(Debug)]
pub(crate) struct Rate {
    bytes_per_second: u64,
    paid_until: Mutex<Option<Instant>>,
}

impl Rate {
    /// At least one byte per second.
    pub(crate) fn new(bytes_per_second: u64) -> Self {
        Self { bytes_per_second: bytes_per_second.max(1), paid_until: Mutex::new(None) }
    }

    /// The most to move at once.
    pub(crate) fn step_bytes(&self) -> u64 {
        (self.bytes_per_second / STEPS_PER_SECOND).max(LEAST_STEP_BYTES)
    }

    /// So many bytes were moved: how long whoever did so has to wait.
    pub(crate) fn spend(&self, bytes: u64, now: Instant) -> Duration {
        let mut paid_until = self.paid_until.lock().unwrap_or_else(PoisonError::into_inner);
        let owed = paid_until.map(|paid| paid.min(now + MOST_DEBT));
        let paid = pay(owed, bytes, self.bytes_per_second, now);
        *paid_until = Some(paid);
        paid.saturating_duration_since(now)
    }
}

/// Until when is paid, after these bytes.
fn pay(paid_until: Option<Instant>, bytes: u64, bytes_per_second: u64, now: Instant) -> Instant {
    let earliest = now.checked_sub(AHEAD).unwrap_or(now);
    let from = paid_until.map_or(earliest, |paid| paid.max(earliest));
    let nanos = u128::from(bytes) * 1_000_000_000 / u128::from(bytes_per_second);
    from + Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX / 2))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_second_is_ahead_and_then_bytes_cost_time() {
        let (rate, now) = (Rate::new(1_000), Instant::now() + 2 * AHEAD);
        assert_eq!(rate.spend(1_000, now), Duration::ZERO);
        assert_eq!(rate.spend(500, now), Duration::from_millis(500));
        assert_eq!(rate.spend(500, now), Duration::from_secs(1));
        assert_eq!(rate.spend(0, now + Duration::from_secs(1)), Duration::ZERO);
        assert_eq!(rate.spend(1, now + Duration::from_secs(60)), Duration::ZERO);
    }

    #[test]
    fn steps_are_parts_of_a_second_and_not_below_a_page() {
        assert_eq!((Rate::new(8 << 20).step_bytes(), Rate::new(1).step_bytes()), (1 << 20, LEAST_STEP_BYTES));
    }

    #[test]
    fn a_debt_that_nobody_waited_for_is_soon_forgotten() {
        let (rate, now) = (Rate::new(1_000), Instant::now() + 2 * AHEAD);
        for _ in 0..100 {
            rate.spend(64_000, now);
        }
        assert_eq!(rate.spend(0, now), MOST_DEBT);
    }

    proptest! {
        #[test]
        fn whoever_waits_as_told_is_never_faster_than_the_rate(
            per_second in 1_u64..10_000_000,
            steps in proptest::collection::vec((0_u64..300_000, 0_u64..3_000), 1..200),
        ) {
            let (rate, begun) = (Rate::new(per_second), Instant::now() + 2 * AHEAD);
            let (mut now, mut moved) = (begun, 0_u128);
            for (bytes, idle_ms) in steps {
                now += rate.spend(bytes, now);
                moved += u128::from(bytes);
                let allowed = u128::from(per_second) * ((now - begun) + AHEAD).as_nanos() / 1_000_000_000;
                // A nanosecond is lost to rounding at each step.
                prop_assert!(moved <= allowed + u128::from(per_second) / 1_000_000 + 200, "{moved} of {allowed}");
                now += Duration::from_millis(idle_ms);
            }
        }
    }
}
