//! What happens to reusable blocks, for routers and monitors outside.
use std::collections::VecDeque;

use crate::eviction::Priority;
use crate::ids::GroupId;
use crate::reuse::BlockKey;

/// Where a block's bytes are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Tier {
    /// Memory of the backend.
    #[default]
    Device,
}

/// One change of what can be reused. Numbered from 0 in the order of the changes.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "a number and what it numbers")]
pub struct Event {
    /// Number of the event.
    pub id: u64,
    /// What happened.
    pub kind: EventKind,
}

/// What happened.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum EventKind {
    /// Content can be reused that could not before. Full blocks alone; a second block of the same
    /// content says nothing.
    Stored(StoredBlock),
    /// No block of a group has the content any more.
    Removed {
        /// The group.
        group: GroupId,
        /// The content.
        key: BlockKey,
    },
    /// The owner set another priority, or the block went to another tier.
    Updated {
        /// The group.
        group: GroupId,
        /// The content.
        key: BlockKey,
        /// Where it is now.
        tier: Tier,
        /// Its priority now.
        priority: Priority,
    },
    /// Nothing of any group can be reused any more.
    Cleared,
    /// Events `from..to` were dropped because nobody took them in time: what was known of the cache
    /// is void until [`CacheState::snapshot`](crate::CacheState::snapshot) is applied.
    Lost {
        /// First one dropped.
        from: u64,
        /// The first that is there again.
        to: u64,
    },
}

/// Content that can be reused.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "consumers build them in their own tests")]
pub struct StoredBlock {
    /// The group whose pool has it.
    pub group: GroupId,
    /// Its name.
    pub key: BlockKey,
    /// Name of the block before; the root of its prompt for the first.
    pub parent: BlockKey,
    /// Index of the block in its prompt.
    pub index: u32,
    /// Its tokens.
    pub tokens: Box<[u32]>,
    /// Where it is.
    pub tier: Tier,
    /// What its owner asked for it.
    pub priority: Priority,
}

/// All that can be reused at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "a number and a list")]
pub struct Snapshot {
    /// Events below this number are part of it; those from here on come on top.
    pub next_id: u64,
    /// One entry for every content, parents not necessarily before children.
    pub blocks: Vec<StoredBlock>,
}

/// A bounded queue of events. With no room it costs nothing and says nothing.
#[derive(Debug, Clone, Default)]
pub struct EventLog {
    room: usize,
    next_id: u64,
    queue: VecDeque<Event>,
}

impl EventLog {
    /// Keeps at most `room` events.
    pub fn new(room: usize) -> Self {
        Self { room, next_id: 0, queue: VecDeque::new() }
    }

    /// Whether events are kept.
    pub fn is_on(&self) -> bool {
        self.room > 0
    }

    /// Number of the next event.
    pub fn next_id(&self) -> u64 {
        self.next_id
    }

    /// Notes an event; the oldest goes where there is no room.
    pub fn push(&mut self, kind: EventKind) {
        if !self.is_on() {
            return;
        }
        if self.queue.len() >= self.room {
            self.queue.pop_front();
        }
        self.queue.push_back(Event { id: self.next_id, kind });
        self.next_id = self.next_id.saturating_add(1);
    }

    /// Hands out what is there; `taken` is the number behind the last one handed out before.
    pub fn take(&mut self, taken: &mut u64) -> Vec<Event> {
        let first = self.queue.front().map_or(self.next_id, |event| event.id);
        let lost = (first > *taken)
            .then_some(Event { id: *taken, kind: EventKind::Lost { from: *taken, to: first } });
        *taken = self.next_id;
        lost.into_iter().chain(self.queue.drain(..)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_fit_is_said_to_be_lost() {
        let (mut log, mut taken) = (EventLog::new(2), 0);
        let removed = |n| EventKind::Removed { group: GroupId(0), key: BlockKey(n) };
        log.push(removed(0));
        assert_eq!(log.take(&mut taken), [Event { id: 0, kind: removed(0) }]);
        assert_eq!(log.take(&mut taken), []);
        for n in 1..5 {
            log.push(removed(n));
        }
        let lost = Event { id: 1, kind: EventKind::Lost { from: 1, to: 3 } };
        let kept = [3_u64, 4].map(|id| Event { id, kind: removed(u128::from(id)) });
        assert_eq!(log.take(&mut taken), [lost, kept[0].clone(), kept[1].clone()]);
        assert_eq!((taken, log.next_id()), (5, 5));
    }

    #[test]
    fn without_room_nothing_is_numbered() {
        let (mut log, mut taken) = (EventLog::new(0), 0);
        log.push(EventKind::Cleared);
        assert!(!log.is_on() && log.take(&mut taken).is_empty());
    }
}
