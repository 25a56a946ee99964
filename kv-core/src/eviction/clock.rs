//! Clocks, so that tests control the time.
use std::fmt;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// A source of elapsed time.
pub trait Clock: fmt::Debug + Send + Sync {
    /// Returns the time since a fixed moment; never less than an earlier result.
    fn now(&self) -> Duration;
}

/// The machine's monotonic clock, counted from the creation of this value.
#[derive(Debug, Clone, Copy)]
pub struct SystemClock {
    start: Instant,
}

impl SystemClock {
    /// Starts at zero.
    pub fn new() -> Self {
        Self { start: Instant::now() }
    }
}

impl Default for SystemClock {
    fn default() -> Self {
        Self::new()
    }
}

impl Clock for SystemClock {
    fn now(&self) -> Duration {
        self.start.elapsed()
    }
}

/// A clock that advances only by calls.
#[derive(Debug, Default)]
pub struct ManualClock {
    now: Mutex<Duration>,
}

impl ManualClock {
    /// Starts at zero.
    pub fn new() -> Self {
        Self::default()
    }

    /// Advances the time; an overflowing sum stays at the longest duration.
    pub fn advance(&self, by: Duration) {
        let mut now = self.now.lock().unwrap_or_else(PoisonError::into_inner);
        *now = now.saturating_add(by);
    }
}

impl Clock for ManualClock {
    fn now(&self) -> Duration {
        *self.now.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_passes_when_told_to() {
        let clock = ManualClock::new();
        clock.advance(Duration::from_secs(2));
        clock.advance(Duration::from_millis(5));
        assert_eq!(clock.now(), Duration::from_millis(2005));
        clock.advance(Duration::MAX);
        assert_eq!(clock.now(), Duration::MAX);
    }

    #[test]
    fn the_steady_clock_never_goes_back() {
        let clock = SystemClock::new();
        let (first, second) = (clock.now(), clock.now());
        assert!(first <= second);
    }
}
