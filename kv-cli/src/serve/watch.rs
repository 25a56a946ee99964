//! Failures of tiers, which change no text: counters for Prometheus, and lines on standard error.
use std::collections::HashMap;
use std::time::{Duration, Instant};

use kv::tier::TiersStats;
use metrics::counter;

use crate::tiers::{CONSEQUENCE, causes};

/// Shortest time between two lines about one cause at one store.
const SILENCE: Duration = Duration::from_mins(1);
/// Shortest time between two looks.
const PAUSE: Duration = Duration::from_millis(100);

/// Watches the failures of a server's stores.
#[derive(Debug)]
pub(super) struct TierWatch {
    names: Vec<String>,
    looked: Option<Instant>,
    /// By store and cause: the count of the last line, and when that was.
    told: HashMap<(usize, &'static str), (u64, Instant)>,
}

impl TierWatch {
    /// Watches stores with these names, in the order of their statistics.
    pub(super) fn new(names: Vec<String>) -> Self {
        Self { names, looked: None, told: HashMap::new() }
    }

    pub(super) fn names(&self) -> &[String] {
        &self.names
    }

    /// Returns whether it is time for another look.
    pub(super) fn is_due(&mut self, now: Instant) -> bool {
        let is_due =
            self.looked.is_none_or(|looked| now.saturating_duration_since(looked) >= PAUSE);
        if is_due {
            self.looked = Some(now);
        }
        is_due
    }

    /// Publishes the counts, and returns the lines that are due: one for each store and cause, if
    /// something has happened since the last one and that is a minute ago.
    pub(super) fn look(&mut self, stats: &TiersStats, now: Instant) -> Vec<String> {
        let mut lines = Vec::new();
        for (at, (name, stats)) in self.names.iter().zip(&stats.stores).enumerate() {
            for cause in causes(stats) {
                let labels = [("store", name.clone()), ("cause", cause.label.to_owned())];
                counter!(FAILURES, &labels).absolute(cause.count);
                let told = self.told.get(&(at, cause.label)).copied();
                let (before, is_silent) = told.map_or((0, false), |(count, since)| {
                    (count, now.saturating_duration_since(since) < SILENCE)
                });
                if cause.count > before && !is_silent {
                    self.told.insert((at, cause.label), (cause.count, now));
                    let what = cause.describe_since(before);
                    lines.push(format!("{name}: {what}; {CONSEQUENCE}"));
                }
            }
        }
        lines
    }
}

/// The counter of failures, with the labels `store` and `cause`.
pub(super) const FAILURES: &str = "kv_tier_failures_total";

#[cfg(test)]
mod tests {
    use kv::tier::{ChunkErrorKind, StoreStats};

    use super::*;

    fn stats(stores: &[&StoreStats]) -> TiersStats {
        let mut stats = TiersStats::default();
        stats.stores = stores.iter().map(|store| (*store).clone()).collect();
        stats
    }

    #[test]
    fn a_cause_is_told_once_a_minute_with_the_count_since() {
        let names = ["disk=a:1", "redis://b"].map(str::to_owned).to_vec();
        let (mut watch, start) = (TierWatch::new(names), Instant::now());
        let (mut disk, redis) = (StoreStats::default(), StoreStats::default());
        assert_eq!(watch.look(&stats(&[&disk, &redis]), start), [""; 0]);
        disk.refused.insert(ChunkErrorKind::PayloadCrc, 1);
        let damaged = "disk=a:1: 1 chunk was damaged; what was missing was computed";
        assert_eq!(watch.look(&stats(&[&disk, &redis]), start), [damaged]);
        // The same kind is silent for a minute, whatever happens; another kind is not.
        disk.refused.insert(ChunkErrorKind::Length, 3);
        disk.refused.insert(ChunkErrorKind::Model, 1);
        let later = start + Duration::from_secs(59);
        let foreign =
            "disk=a:1: 1 chunk was of another version or model; what was missing was computed";
        assert_eq!(watch.look(&stats(&[&disk, &redis]), later), [foreign]);
        assert_eq!(watch.look(&stats(&[&disk, &redis]), later), [""; 0]);
        let minute = start + Duration::from_mins(1);
        let three = "disk=a:1: 3 chunks were damaged; what was missing was computed";
        assert_eq!(watch.look(&stats(&[&disk, &redis]), minute), [three]);
        // Nothing more has happened.
        let hour = start + Duration::from_hours(1);
        assert_eq!(watch.look(&stats(&[&disk, &redis]), hour), [""; 0]);
        // Another store has silences of its own.
        let mut redis = redis;
        redis.dropped_by_queue = 2;
        disk.refused.insert(ChunkErrorKind::Length, 4);
        let lines = watch.look(&stats(&[&disk, &redis]), hour);
        assert_eq!(lines.len(), 2, "{lines:?}");
        assert!(lines[0].contains("1 chunk was damaged"), "{lines:?}");
        assert!(lines[1].starts_with("redis://b: 2 writes were dropped"), "{lines:?}");
    }

    #[test]
    fn looks_have_pauses() {
        let (mut watch, start) = (TierWatch::new(Vec::new()), Instant::now());
        assert!(watch.is_due(start) && !watch.is_due(start));
        assert!(!watch.is_due(start + Duration::from_millis(99)));
        assert!(watch.is_due(start + Duration::from_millis(100)));
    }
}
