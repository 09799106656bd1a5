//! Waiting for conditions, and time bounds that know how busy the machine is.

use std::{
    fmt::Display,
    fs,
    time::{Duration, Instant},
};

/// Between two looks at a condition.
const LOOK: Duration = Duration::from_millis(10);

/// Looks until the condition gives a value, and returns it.
///
/// # Panics
/// When it has not within the limit.
pub async fn wait_until<T>(what: impl Display, limit: Duration, mut look: impl AsyncFnMut() -> Option<T>) -> T {
    let begun = Instant::now();
    loop {
        if let Some(value) = look().await {
            return value;
        }
        assert!(begun.elapsed() < limit, "waited {limit:?} for this, in vain: {what}");
        tokio::time::sleep(LOOK).await;
    }
}

/// Looks until the condition holds.
///
/// # Panics
/// When it does not within the limit.
pub async fn wait_for(what: impl Display, limit: Duration, mut holds: impl FnMut() -> bool) {
    wait_until(what, limit, async || holds().then_some(())).await;
}

/// Measures how long something takes.
#[derive(Debug, Clone, Copy)]
pub struct Stopwatch(Instant);

impl Stopwatch {
    /// Begins now.
    #[must_use]
    pub fn start() -> Self {
        Self(Instant::now())
    }

    /// How long it has been.
    #[must_use]
    pub fn elapsed(&self) -> Duration {
        self.0.elapsed()
    }

    /// That it took at most so long; thrice so long where the machine is busy with other work.
    ///
    /// # Panics
    /// When it took longer.
    pub fn assert_within(&self, what: &str, limit: Duration) {
        let (elapsed, slack) = (self.elapsed(), slack());
        assert!(elapsed <= limit * slack, "{what} took {elapsed:?}, at most {limit:?} times {slack} is right");
    }

    /// That it took `target`, give or take: not sooner than `target - tolerance`, and not later than `target + tolerance`
    /// (thrice the tolerance where the machine is busy with other work).
    ///
    /// # Panics
    /// When it did not.
    pub fn assert_about(&self, what: &str, target: Duration, tolerance: Duration) {
        let elapsed = self.elapsed();
        assert!(elapsed + tolerance >= target, "{what} took only {elapsed:?}, {target:?} is right");
        let slack = slack();
        assert!(
            elapsed <= target + tolerance * slack,
            "{what} took {elapsed:?}, {target:?} + {tolerance:?} times {slack} is right"
        );
    }
}

/// How much longer than on a quiet machine things may take: 3 where processes wait for a processor, else 1.
fn slack() -> u32 {
    /// Share of time in which something was runnable and did not run, in percent.
    const BUSY: f64 = 5.0;
    let waiting = fs::read_to_string("/proc/pressure/cpu").ok().and_then(|pressure| {
        let (_, rest) = pressure.split_once("avg10=")?;
        rest.split_whitespace().next()?.parse::<f64>().ok()
    });
    // Without pressure information the machine counts as busy: a bound that is too wide still ends a hang.
    if waiting.is_some_and(|percent| percent < BUSY) { 1 } else { 3 }
}
