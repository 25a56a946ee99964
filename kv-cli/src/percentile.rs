//! Percentiles of times.
use std::time::Duration;

/// Returns a percentile of sorted times: the smallest one that this share does not exceed.
pub(crate) fn percentile(sorted: &[Duration], percent: usize) -> Option<Duration> {
    let rank = sorted.len().checked_mul(percent)?.div_ceil(100);
    sorted.get(rank.saturating_sub(1)).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_percentile_is_one_of_the_times() {
        let times: Vec<_> = (1..=200).map(Duration::from_millis).collect();
        let at = |percent| percentile(&times, percent).map(|time| time.as_millis());
        assert_eq!((at(50), at(99), at(100), at(0)), (Some(100), Some(198), Some(200), Some(1)));
        assert_eq!(percentile(&times[..1], 99), Some(times[0]));
        assert_eq!(percentile(&[], 50), None);
    }
}
