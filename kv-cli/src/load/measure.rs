//! Percentiles of times.
use std::time::Duration;

use serde::Serialize;

use crate::percentile::percentile;

/// Some percentiles of a set of times, in milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(super) struct Percentiles {
    pub(super) p50: f64,
    pub(super) p90: f64,
    pub(super) p99: f64,
    pub(super) max: f64,
}

impl Percentiles {
    /// Computes them; `None` without any time.
    pub(super) fn of(mut times: Vec<Duration>) -> Option<Self> {
        times.sort_unstable();
        let max = milliseconds(*times.last()?);
        let at = |percent| percentile(&times, percent).map_or(max, milliseconds);
        Some(Self { p50: at(50), p90: at(90), p99: at(99), max })
    }
}

/// Converts a time for a report.
pub(super) fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(times: impl IntoIterator<Item = u64>) -> Option<[f64; 4]> {
        let percentiles = Percentiles::of(times.into_iter().map(Duration::from_millis).collect())?;
        let Percentiles { p50, p90, p99, max } = percentiles;
        Some([p50, p90, p99, max])
    }

    #[test]
    fn a_percentile_is_one_of_the_times() {
        assert_eq!(of((1..=100).rev()), Some([50.0, 90.0, 99.0, 100.0]));
        assert_eq!(of(1..=1000), Some([500.0, 900.0, 990.0, 1000.0]));
        assert_eq!(of([3, 1, 2]), Some([2.0, 3.0, 3.0, 3.0]));
        assert_eq!(of([1, 2, 3, 4]), Some([2.0, 4.0, 4.0, 4.0]));
        assert_eq!(of([7]), Some([7.0; 4]));
        assert_eq!(of([]), None);
    }

    #[test]
    fn one_slow_request_of_a_hundred_is_the_maximum_alone() {
        let times = std::iter::repeat_n(1, 99).chain([500]);
        assert_eq!(of(times), Some([1.0, 1.0, 1.0, 500.0]));
    }
}
