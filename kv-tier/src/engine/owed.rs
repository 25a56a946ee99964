//! The chunks of host memory that a store has yet to get.
use std::collections::{BTreeSet, HashMap};
use std::time::{Duration, Instant};

use kv_core::GroupId;

use crate::name::ChunkName;
use crate::record::Record;
use crate::store::after;

/// Pause before a failed write is repeated: the first time, and at most. Every failure doubles it.
const PAUSE_MIN: Duration = Duration::from_millis(50);
const PAUSE_MAX: Duration = Duration::from_mins(1);

/// A chunk by its last block in its prompt first: without the chunks before it, it is of no use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Place {
    index: u32,
    pub(super) group: GroupId,
    pub(super) name: ChunkName,
}

impl Place {
    pub(super) fn of(record: &Record) -> Self {
        Self { index: record.last_block(), group: record.group(), name: record.name }
    }
}

/// The chunks of host memory that a store has yet to get, beginnings of prompts first. A write that
/// the queue has no room for, or that the store has refused, is owed until it is done or host
/// memory evicts the chunk.
#[derive(Debug, Default)]
pub(super) struct Owed {
    /// To be sent as soon as there is room.
    ready: BTreeSet<Place>,
    /// To be sent at a time, because a write has failed.
    later: BTreeSet<(Instant, Place)>,
    failed: HashMap<Place, Failed>,
}

#[derive(Debug, Clone, Copy, Default)]
struct Failed {
    /// Writes that have failed in a row.
    times: u32,
    /// The time of the next attempt, while the write waits for it.
    due: Option<Instant>,
}

impl Owed {
    pub(super) fn len(&self) -> usize {
        self.ready.len() + self.later.len()
    }

    pub(super) fn contains(&self, place: &Place) -> bool {
        self.ready.contains(place) || self.failed.get(place).is_some_and(|at| at.due.is_some())
    }

    /// Adds a chunk that waits for room. One that waits for a time goes on to.
    pub(super) fn insert(&mut self, place: Place) {
        if !self.contains(&place) {
            self.ready.insert(place);
        }
    }

    /// Adds a chunk whose write has failed.
    pub(super) fn insert_failed(&mut self, place: Place, now: Instant) {
        let times = self.failed.get(&place).map_or(0, |failed| failed.times);
        // Doubled after each failure, at most to `PAUSE_MAX`.
        let pause = PAUSE_MIN.saturating_mul(1_u32.checked_shl(times).unwrap_or(u32::MAX));
        self.insert_until(place, after(now, pause.min(PAUSE_MAX)));
        let failed = self.failed.entry(place).or_default();
        failed.times += 1;
    }

    /// Adds a chunk that the store takes from a time on.
    pub(super) fn insert_until(&mut self, place: Place, due: Instant) {
        self.ready.remove(&place);
        let failed = self.failed.entry(place).or_default();
        if let Some(before) = failed.due.replace(due) {
            self.later.remove(&(before, place));
        }
        self.later.insert((due, place));
    }

    /// Takes the first chunk that may be sent now.
    pub(super) fn take(&mut self, now: Instant) -> Option<Place> {
        self.wake(now);
        self.ready.pop_first()
    }

    /// Takes a chunk out; returns whether it was owed.
    pub(super) fn remove(&mut self, place: &Place) -> bool {
        let due = self.failed.remove(place).and_then(|failed| failed.due);
        let was_later = due.is_some_and(|due| self.later.remove(&(due, *place)));
        self.ready.remove(place) || was_later
    }

    /// Lets every chunk be sent now whose pause is not longer than that of a failure.
    pub(super) fn hurry(&mut self, now: Instant) {
        self.wake(after(now, PAUSE_MAX));
        self.failed.retain(|_, failed| failed.due.is_some());
    }

    /// Returns when the next chunk may be sent: a time that has passed if one waits for room.
    pub(super) fn due(&self, now: Instant) -> Option<Instant> {
        if !self.ready.is_empty() {
            return Some(now);
        }
        self.later.first().map(|(due, _)| *due)
    }

    fn wake(&mut self, now: Instant) {
        while let Some((due, place)) = self.later.first().copied()
            && due <= now
        {
            self.later.pop_first();
            self.ready.insert(place);
            if let Some(failed) = self.failed.get_mut(&place) {
                failed.due = None;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(index: u32) -> Place {
        Place { index, group: GroupId(0), name: ChunkName::new([1; 32]) }
    }

    #[test]
    fn beginnings_come_first() {
        let (mut owed, now) = (Owed::default(), Instant::now());
        for index in [3, 1, 2, 1] {
            owed.insert(place(index));
        }
        assert_eq!(owed.len(), 3);
        assert!(owed.remove(&place(2)) && !owed.remove(&place(2)));
        assert_eq!([(); 3].map(|()| owed.take(now)), [Some(place(1)), Some(place(3)), None]);
    }

    #[test]
    fn failures_pause_for_twice_as_long_each_time_and_a_minute_at_most() {
        let (mut owed, mut now) = (Owed::default(), Instant::now());
        for number in 0..40_u32 {
            owed.insert_failed(place(1), now);
            owed.insert(place(1));
            assert_eq!(owed.len(), 1);
            let due = owed.due(now).unwrap();
            let pause = Duration::from_millis(50 << number.min(20)).min(Duration::from_mins(1));
            assert_eq!(due - now, pause);
            assert_eq!(owed.take(due.checked_sub(Duration::from_millis(1)).unwrap()), None);
            now = due;
            assert_eq!(owed.take(now), Some(place(1)));
        }
        // A write that succeeds is forgotten with its failures.
        assert!(!owed.remove(&place(1)));
        owed.insert_failed(place(1), now);
        assert_eq!(owed.due(now), Some(now + Duration::from_millis(50)));
    }

    #[test]
    fn a_flush_hurries_what_has_failed_and_not_what_the_day_has_no_bytes_for() {
        let (mut owed, now) = (Owed::default(), Instant::now());
        (0..9).for_each(|_| owed.insert_failed(place(1), now));
        owed.insert_until(place(2), now + Duration::from_hours(9));
        owed.hurry(now);
        assert_eq!([(); 2].map(|()| owed.take(now)), [Some(place(1)), None]);
        owed.insert_failed(place(1), now);
        assert_eq!(owed.due(now), Some(now + Duration::from_millis(50)));
        assert_eq!(owed.len(), 2);
    }
}
