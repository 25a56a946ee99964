//! The circuit breaker of a store.
use std::time::{Duration, Instant};

use crate::store::after;

/// Failures in a row that open a breaker.
const FAILURES_MAX: u32 = 5;
/// Time that a breaker stays open at first, and at most. Every failed trial doubles it.
const OPEN_MIN: Duration = Duration::from_secs(1);
const OPEN_MAX: Duration = Duration::from_mins(1);

/// Stops calls of a store that fails, and lets one through from time to time.
///
/// Closed, every call passes. Five failures in a row open it: no call passes for a second. Then one
/// call is the trial: success closes the breaker, failure opens it for twice as long, up to a
/// minute.
#[derive(Debug)]
pub(super) struct Breaker {
    state: State,
    /// Times that it opened.
    opened: u64,
}

/// A call that a breaker admitted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Permit {
    /// A call like any other.
    Call,
    /// The call that finds out whether the store works again.
    Trial,
}

/// The state of a store's circuit breaker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[expect(clippy::exhaustive_enums, reason = "the states of every circuit breaker")]
pub enum BreakerState {
    /// Calls pass.
    #[default]
    Closed,
    /// The store failed: no call passes.
    Open,
    /// One call finds out whether the store works again.
    Trial,
}

#[derive(Debug, Clone, Copy)]
enum State {
    Closed { failures: u32 },
    Open { until: Instant, length: Duration },
    Trial { until: Instant, length: Duration },
}

impl Default for Breaker {
    fn default() -> Self {
        Self { state: State::Closed { failures: 0 }, opened: 0 }
    }
}

impl Breaker {
    /// Returns whether a call may begin now; the one that ends an open period is the trial. A
    /// trial that reports nothing for as long as the breaker was open is given up for another.
    pub(super) fn admits(&mut self, now: Instant) -> Option<Permit> {
        match self.state {
            State::Closed { .. } => Some(Permit::Call),
            State::Open { until, length } | State::Trial { until, length } if now >= until => {
                let until = after(now, length);
                self.state = State::Trial { until, length };
                Some(Permit::Trial)
            }
            State::Open { .. } | State::Trial { .. } => None,
        }
    }

    /// Returns whether a call that was admitted may still begin: any but a trial waits in vain if
    /// the breaker has opened meanwhile.
    pub(super) fn is_valid(&self, permit: Permit) -> bool {
        permit == Permit::Trial || matches!(self.state, State::Closed { .. })
    }

    /// Opens, or stays open: the store answers nothing at all.
    pub(super) fn trip(&mut self, now: Instant) {
        match self.state {
            State::Closed { .. } => self.open(now, OPEN_MIN),
            State::Trial { length, .. } => self.open(now, (length * 2).min(OPEN_MAX)),
            State::Open { .. } => {}
        }
    }

    pub(super) fn succeeded(&mut self) {
        self.state = State::Closed { failures: 0 };
    }

    /// Counts a failure; returns whether the breaker opened after it had been closed.
    pub(super) fn failed(&mut self, now: Instant) -> bool {
        match self.state {
            State::Closed { failures } if failures + 1 < FAILURES_MAX => {
                self.state = State::Closed { failures: failures + 1 };
                false
            }
            State::Closed { .. } => {
                self.open(now, OPEN_MIN);
                true
            }
            State::Trial { length, .. } => {
                self.open(now, (length * 2).min(OPEN_MAX));
                false
            }
            // A call that began before the breaker opened.
            State::Open { .. } => false,
        }
    }

    /// Returns when the next trial may begin; `None` while the breaker is closed.
    pub(super) fn retry_at(&self) -> Option<Instant> {
        match self.state {
            State::Closed { .. } => None,
            State::Open { until, .. } | State::Trial { until, .. } => Some(until),
        }
    }
    pub(super) fn state(&self) -> BreakerState {
        match self.state {
            State::Closed { .. } => BreakerState::Closed,
            State::Open { .. } => BreakerState::Open,
            State::Trial { .. } => BreakerState::Trial,
        }
    }
    pub(super) fn opened(&self) -> u64 {
        self.opened
    }

    fn open(&mut self, now: Instant, length: Duration) {
        self.opened += 1;
        let until = after(now, length);
        self.state = State::Open { until, length };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open_at(start: Instant) -> Breaker {
        let mut breaker = Breaker::default();
        let opened: Vec<bool> = (0..5).map(|_| breaker.failed(start)).collect();
        assert_eq!(opened, [false, false, false, false, true]);
        breaker
    }

    #[test]
    fn only_failures_in_a_row_open_it() {
        let (now, mut breaker) = (Instant::now(), Breaker::default());
        for _ in 0..20 {
            (0..4).for_each(|_| assert!(!breaker.failed(now)));
            breaker.succeeded();
        }
        assert_eq!((breaker.state(), breaker.opened()), (BreakerState::Closed, 0));
        assert_eq!(breaker.admits(now), Some(Permit::Call));
    }

    #[test]
    fn one_trial_passes_after_each_period_and_periods_double() {
        let mut now = Instant::now();
        let mut breaker = open_at(now);
        for seconds in [1, 2, 4, 8, 16, 32, 60, 60] {
            let period = Duration::from_secs(seconds);
            assert_eq!(breaker.admits(now + period.mul_f64(0.999)), None, "{seconds} s");
            now += period;
            assert_eq!(breaker.admits(now), Some(Permit::Trial));
            assert_eq!(breaker.state(), BreakerState::Trial);
            assert!(breaker.is_valid(Permit::Trial) && !breaker.is_valid(Permit::Call));
            assert_eq!(breaker.admits(now), None, "one trial at a time");
            assert!(!breaker.failed(now));
        }
        assert_eq!(breaker.opened(), 9);
        now += Duration::from_mins(1);
        assert_eq!(breaker.admits(now), Some(Permit::Trial));
        breaker.succeeded();
        assert_eq!([(); 2].map(|()| breaker.admits(now)), [Some(Permit::Call); 2]);
    }

    #[test]
    fn a_trial_that_never_ends_is_followed_by_another() {
        let start = Instant::now();
        let mut breaker = open_at(start);
        assert_eq!(breaker.admits(start + Duration::from_secs(1)), Some(Permit::Trial));
        assert_eq!(breaker.admits(start + Duration::from_millis(1900)), None);
        assert_eq!(breaker.admits(start + Duration::from_secs(2)), Some(Permit::Trial));
    }

    #[test]
    fn a_late_failure_does_not_prolong_the_period() {
        let start = Instant::now();
        let mut breaker = open_at(start);
        assert!(!breaker.failed(start + Duration::from_millis(900)));
        assert_eq!(breaker.admits(start + Duration::from_secs(1)), Some(Permit::Trial));
    }

    #[test]
    fn a_store_that_hangs_opens_it_at_once() {
        let start = Instant::now();
        let mut breaker = Breaker::default();
        (0..3).for_each(|_| breaker.trip(start));
        assert_eq!((breaker.state(), breaker.opened()), (BreakerState::Open, 1));
        let later = start + Duration::from_secs(1);
        assert_eq!(breaker.admits(later), Some(Permit::Trial));
        breaker.trip(later);
        assert_eq!(breaker.admits(later + Duration::from_secs(1)), None);
        assert_eq!(breaker.admits(later + Duration::from_secs(2)), Some(Permit::Trial));
    }
}
