//! Events: announcements of content that becomes reusable or is gone, for external routers and
//! monitors.
//!
//! [`CacheSpecBuilder::events`](crate::spec::CacheSpecBuilder::events) enables them,
//! [`KvCache::take_events`](crate::KvCache::take_events) returns them.
//!
//! A subscriber keeps a set of contents for each [`Tier`]: content that one tier evicts may remain
//! in another.
use std::collections::VecDeque;

use crate::eviction::Priority;
use crate::ids::GroupId;
use crate::reuse::BlockKey;

/// The memory tier of a block's bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Tier {
    /// Memory of the backend.
    #[default]
    Device,
    /// Host memory of this process.
    Host,
    /// A folder on disk, of this machine or shared.
    Disk,
    /// A store that other machines read too: Redis, S3, a caller's own.
    Store,
}

/// One change of the reusable content. Events are numbered from 0, in order.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "a number and what it numbers")]
pub struct Event {
    /// Number of the event.
    pub id: u64,
    /// Kind of the event.
    pub kind: EventKind,
}

/// The kind of an event.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum EventKind {
    /// A tier has content that can be reused. Only for full blocks and for snapshots of recurrent
    /// states, and once a content and tier until the tier has it no more: a second block with the
    /// same content has no event.
    Stored(StoredBlock),
    /// A tier of a group does not have the content any more.
    Removed {
        /// The group.
        group: GroupId,
        /// The content.
        key: BlockKey,
        /// The tier; others may still have the content.
        tier: Tier,
    },
    /// The priority of content in a tier changed, and nothing else: content that moves between
    /// tiers is stored in one and removed from the other.
    Updated {
        /// The group.
        group: GroupId,
        /// The content.
        key: BlockKey,
        /// The tier.
        tier: Tier,
        /// Its priority now.
        priority: Priority,
    },
    /// Nothing that a tier had of any group can be reused any more. Other tiers keep theirs: after
    /// [`KvCache::reset_prefixes`](crate::KvCache::reset_prefixes), host memory brings it back.
    Cleared {
        /// The tier.
        tier: Tier,
    },
    /// Events `from..to` were dropped because they were not taken in time. A subscriber's state is
    /// invalid until [`CacheState::snapshot`](crate::scheduling::CacheState::snapshot) is applied.
    Lost {
        /// First dropped event.
        from: u64,
        /// First event after them.
        to: u64,
    },
}

/// Reusable content.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "consumers build them in their own tests")]
pub struct StoredBlock {
    /// The group whose pool has it. Snapshots of recurrent states are groups after those of rows
    /// ([`CacheSpec::snapshot_groups`](crate::CacheSpec::snapshot_groups)).
    pub group: GroupId,
    /// Its key.
    pub key: BlockKey,
    /// Key of the block before; the root of its prompt for the first.
    pub parent: BlockKey,
    /// Index of the block in its prompt.
    pub index: u32,
    /// Its tokens: those of a full block, of a snapshot the tokens behind the last block before.
    pub tokens: Box<[u32]>,
    /// Its tier.
    pub tier: Tier,
    /// Its priority.
    pub priority: Priority,
    /// The salt of its prompt; empty without one. Other salts do not reuse it, and a reader that
    /// compares tokens alone must leave it out.
    pub salt: Box<[u8]>,
    /// The adapter of its prompt, which other adapters and the model itself do not reuse.
    pub adapter: Option<u64>,
}

/// Everything that can be reused in memory of the device at one moment.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "a number and a list")]
pub struct Snapshot {
    /// Number of the first event that the snapshot does not include.
    pub next_id: u64,
    /// One entry for every content, parents not necessarily before children.
    pub blocks: Vec<StoredBlock>,
}

/// A bounded queue of events. With a bound of 0 it costs nothing and records nothing.
#[derive(Debug, Clone, Default)]
pub struct EventLog {
    room: usize,
    next_id: u64,
    queue: VecDeque<Event>,
}

impl EventLog {
    /// Creates a queue that keeps at most `room` events.
    pub fn new(room: usize) -> Self {
        Self { room, next_id: 0, queue: VecDeque::new() }
    }

    /// Returns whether events are kept.
    pub fn is_on(&self) -> bool {
        self.room > 0
    }

    /// Returns the number of the next event.
    pub fn next_id(&self) -> u64 {
        self.next_id
    }

    /// Appends an event; drops the oldest if the queue is full.
    pub fn push(&mut self, kind: EventKind) {
        if !self.is_on() {
            return;
        }
        if self.queue.len() >= self.room {
            self.queue.pop_front();
        }
        self.queue.push_back(Event { id: self.next_id, kind });
        self.next_id += 1;
    }

    /// Returns the kept events; `taken` is the number after the last one returned before.
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
    fn dropped_events_are_reported_as_lost() {
        let (mut log, mut taken) = (EventLog::new(2), 0);
        let removed =
            |n| EventKind::Removed { group: GroupId(0), key: BlockKey(n), tier: Tier::Device };
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
        log.push(EventKind::Cleared { tier: Tier::Device });
        assert!(!log.is_on() && log.take(&mut taken).is_empty());
    }
}
