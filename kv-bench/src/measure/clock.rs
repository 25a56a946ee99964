//! Samples of the time of one operation, round by round.
use super::error::Error;
use crate::num::to_f64;

/// Minimum seconds of one sample: its runs are submitted together, and waited for once.
const SAMPLE: f64 = 0.005;
/// Most runs per sample.
const RUNS_MAX: u32 = 100;
/// An operation that takes this number of seconds is warmed up by one run and measured in few
/// rounds.
const LONG: f64 = 1.0;
const ROUNDS_OF_LONG: u32 = 3;

/// Seconds of one run, by round.
#[derive(Debug, Default)]
pub(super) struct Samples {
    /// Runs per sample; `None` before the first round.
    runs: Option<u32>,
    is_long: bool,
    seconds: Vec<f64>,
}

impl Samples {
    /// Times one round. `time` returns the seconds of a number of runs. The first round warms up
    /// and chooses the number of runs per sample.
    pub(super) fn take(
        &mut self,
        mut time: impl FnMut(u32) -> Result<f64, Error>,
    ) -> Result<(), Error> {
        let Some(runs) = self.runs else {
            // The first run compiles shaders and reserves memory; the second takes as long as later
            // ones.
            let first = time(1)?;
            self.is_long = first >= LONG;
            let one = if self.is_long { first } else { time(1)? };
            let is_enough = |runs: &u32| f64::from(*runs) * one >= SAMPLE;
            self.runs = Some((1..RUNS_MAX).find(is_enough).unwrap_or(RUNS_MAX));
            return Ok(());
        };
        self.seconds.push(time(runs)? / f64::from(runs));
        Ok(())
    }

    /// Adds a round that was timed separately.
    pub(super) fn push(&mut self, seconds: f64) {
        self.seconds.push(seconds);
    }

    /// Returns the number of rounds to run, given the `requested` number; valid after the first round.
    pub(super) fn rounds(&self, requested: u32) -> u32 {
        if self.is_long { requested.min(ROUNDS_OF_LONG) } else { requested }
    }

    /// Returns the median seconds of one run; 0 without rounds.
    pub(super) fn median(&self) -> f64 {
        let mut seconds = self.seconds.clone();
        seconds.sort_by(f64::total_cmp);
        let half = |count: usize| count.checked_div(2).unwrap_or(0);
        let upper = half(seconds.len());
        let lower = half(seconds.len().saturating_sub(1));
        match (seconds.get(lower), seconds.get(upper)) {
            (Some(lower), Some(upper)) => f64::midpoint(*lower, *upper),
            _ => 0.0,
        }
    }
}

/// Returns 10^9 bytes per second; 0 if no time passed.
pub(super) fn gb_per_s(bytes: u64, seconds: f64) -> f64 {
    if seconds > 0.0 { to_f64(bytes) / seconds / 1e9 } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Samples of an operation that takes these seconds in its rounds.
    fn samples(warm_up: f64, rounds: &[f64]) -> (Samples, Vec<u32>) {
        let (mut samples, mut requested) = (Samples::default(), Vec::new());
        for seconds in std::iter::once(&warm_up).chain(rounds) {
            let time = |runs| {
                requested.push(runs);
                Ok(seconds * f64::from(runs))
            };
            samples.take(time).expect("nothing fails");
        }
        (samples, requested)
    }

    #[test]
    fn the_median_counts_and_the_first_round_does_not() {
        for (rounds, median) in
            [(&[3.0][..], 3.0), (&[5.0, 1.0, 2.0], 2.0), (&[8.0, 2.0, 1.0, 4.0], 3.0), (&[], 0.0)]
        {
            let (samples, _) = samples(100.0, rounds);
            assert_eq!(samples.median().to_bits(), f64::to_bits(median), "{rounds:?}");
        }
    }

    #[test]
    fn short_runs_are_timed_together() {
        for (seconds, runs) in [(0.5, 1), (SAMPLE, 1), (SAMPLE / 8.0, 8), (0.0, RUNS_MAX)] {
            let (samples, requested) = samples(seconds, &[seconds, seconds]);
            assert_eq!(requested, [1, 1, runs, runs]);
            assert!((samples.median() - seconds).abs() <= seconds * 1e-12);
        }
    }

    #[test]
    fn long_operations_run_in_fewer_rounds() {
        let (long, requested) = samples(LONG, &[LONG]);
        assert_eq!((requested, long.rounds(7), long.rounds(2)), (vec![1, 1], 3, 2));
        assert_eq!(samples(LONG / 2.0, &[]).0.rounds(7), 7);
    }

    #[test]
    fn a_failure_ends_the_round() {
        let fails = |_| Err(Error::NoCase);
        assert!(matches!(Samples::default().take(fails), Err(Error::NoCase)));
    }
}
