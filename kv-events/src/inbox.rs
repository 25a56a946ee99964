//! What the publisher's thread is asked to do, by the thread of the cache and by peers.
use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use kv_core::GroupId;
use kv_core::events::{Event, EventKind, Snapshot};

/// Bounded work for one thread, which waits for it.
#[derive(Debug)]
pub(crate) struct Inbox {
    state: Mutex<State>,
    arrived: Condvar,
    room: usize,
}

/// All that waits.
#[derive(Debug, Default)]
pub(crate) struct Work {
    /// A new beginning, before the events.
    pub(crate) reset: Option<Snapshot>,
    pub(crate) events: VecDeque<Event>,
    /// A live snapshot is due.
    pub(crate) wants_snapshot: bool,
    pub(crate) is_over: bool,
}

#[derive(Debug, Default)]
struct State {
    work: Work,
    needs_snapshot: bool,
    dropped: u64,
}

impl Inbox {
    /// Holds at most `room` events.
    pub(crate) fn new(room: usize) -> Self {
        Self { state: Mutex::default(), arrived: Condvar::new(), room }
    }

    /// Copies the events that matter for the blocks of a group. Beyond the room nothing of the call
    /// is taken.
    pub(crate) fn publish(&self, events: &[Event], group: GroupId) {
        let matters = |event: &&Event| match &event.kind {
            EventKind::Stored(block) => block.group == group,
            EventKind::Removed { group: of, .. } => *of == group,
            EventKind::Cleared { .. } => true,
            _ => false,
        };
        let is_lost = events.iter().any(|event| matches!(event.kind, EventKind::Lost { .. }));
        let copies: Vec<_> = events.iter().filter(matters).cloned().collect();
        let mut state = self.lock();
        let has_room = state.work.events.len() + copies.len() <= self.room;
        state.needs_snapshot |= is_lost || !has_room;
        if has_room {
            let is_first = state.work.events.is_empty() && !copies.is_empty();
            state.work.events.extend(copies);
            drop(state);
            if is_first {
                self.arrived.notify_one();
            }
        } else {
            state.dropped += u64::try_from(copies.len()).unwrap_or(u64::MAX);
        }
    }

    /// Begins anew. Events that wait are of no use any more: the snapshot has what they say, or is
    /// of another cache.
    pub(crate) fn reset(&self, snapshot: &Snapshot, group: GroupId) {
        let blocks = snapshot.blocks.iter().filter(|block| block.group == group).cloned();
        let snapshot = Snapshot { next_id: snapshot.next_id, blocks: blocks.collect() };
        let mut state = self.lock();
        state.needs_snapshot = false;
        state.work.events.clear();
        state.work.reset = Some(snapshot);
        self.arrived.notify_one();
    }

    /// Asks for a live snapshot.
    pub(crate) fn want_snapshot(&self) {
        self.lock().work.wants_snapshot = true;
        self.arrived.notify_one();
    }

    /// Ends the thread.
    pub(crate) fn end(&self) {
        self.lock().work.is_over = true;
        self.arrived.notify_one();
    }

    pub(crate) fn needs_snapshot(&self) -> bool {
        self.lock().needs_snapshot
    }

    pub(crate) fn dropped(&self) -> u64 {
        self.lock().dropped
    }

    /// Takes what waits, or waits for the first of it until `deadline`.
    pub(crate) fn take(&self, deadline: Instant) -> Work {
        let mut state = self.lock();
        loop {
            let work = &state.work;
            let is_idle = work.reset.is_none()
                && work.events.is_empty()
                && !work.wants_snapshot
                && !work.is_over;
            let left = deadline.saturating_duration_since(Instant::now());
            if !is_idle || left.is_zero() {
                return std::mem::take(&mut state.work);
            }
            let waited = self.arrived.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use kv_core::events::Tier;

    use super::*;

    fn cleared(ids: std::ops::Range<u64>) -> Vec<Event> {
        ids.map(|id| Event { id, kind: EventKind::Cleared { tier: Tier::Device } }).collect()
    }

    #[test]
    fn events_beyond_the_room_are_dropped_until_a_snapshot() {
        let inbox = Inbox::new(3);
        inbox.publish(&cleared(0..2), GroupId(0));
        assert!(!inbox.needs_snapshot());
        inbox.publish(&cleared(2..4), GroupId(0));
        assert!(inbox.needs_snapshot());
        assert_eq!(inbox.dropped(), 2);
        inbox.reset(&Snapshot { next_id: 4, blocks: Vec::new() }, GroupId(0));
        assert!(!inbox.needs_snapshot());
        inbox.publish(&cleared(4..5), GroupId(0));
        let work = inbox.take(Instant::now());
        assert_eq!(work.events, cleared(4..5), "what the snapshot has is not applied again");
        assert_eq!(work.reset.map(|snapshot| snapshot.next_id), Some(4));
        assert!(!work.wants_snapshot && !work.is_over);
    }

    #[test]
    fn events_of_a_cache_before_are_not_those_of_the_next() {
        let inbox = Inbox::new(8);
        inbox.publish(&cleared(100..103), GroupId(0));
        inbox.reset(&Snapshot { next_id: 0, blocks: Vec::new() }, GroupId(0));
        inbox.publish(&cleared(0..1), GroupId(0));
        assert_eq!(inbox.take(Instant::now()).events, cleared(0..1));
    }

    #[test]
    fn lost_events_need_a_snapshot() {
        let inbox = Inbox::new(3);
        inbox.publish(&[Event { id: 4, kind: EventKind::Lost { from: 4, to: 9 } }], GroupId(0));
        assert!(inbox.needs_snapshot());
        assert_eq!(inbox.dropped(), 0);
    }
}
