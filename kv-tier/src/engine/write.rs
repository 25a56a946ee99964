//! From host memory to stores.
use std::sync::Arc;
use std::time::{Duration, Instant};

use kv_core::backend::Backend;
use kv_core::invariant::Invariant;
use kv_core::num::{to_u32, to_u64};

use super::breaker::Permit;
use super::done::{Done, Report};
use super::group::{self, GroupTier, Leaving};
use super::guarded::NotWritten;
use super::host::Entry;
use super::owed::Place;
use super::prefetch::GRACE;
use super::{ChunkOf, STORE, StoreLane, Tiers};
use crate::chain::ChunkAt;
use crate::chunk::Verified;
use crate::policy::{ChunkEvent, ChunkFacts, WriteDecision};
use crate::record::Record;
use crate::store::{Put, after};

/// Chunks that [`TieredCache::flush`](crate::TieredCache::flush) has not written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
#[must_use = "what is left is lost with the process"]
pub struct Unwritten {
    /// Chunks on the device that have not reached host memory.
    pub copies: u64,
    /// Writes that have not ended, or that a store has refused: of a chunk that two stores should
    /// have, there may be two.
    pub writes: u64,
}

impl Unwritten {
    /// Returns whether nothing is left.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// Time that a flush waits for a store that has failed. A store counts as down when its breaker has
/// opened for the second time.
const PATIENCE: Duration = Duration::from_secs(1);

impl<B: Backend> Tiers<B> {
    /// Sends a chunk of host memory to the stores whose rules say so.
    pub(super) fn decide_writes(&mut self, record: &Arc<Record>, event: ChunkEvent) {
        self.owe(record, event);
        self.write_owed();
    }

    /// Notes that the stores whose rules say so have yet to get a chunk of host memory.
    fn owe(&mut self, record: &Record, event: ChunkEvent) {
        let place = Place::of(record);
        let host = &group::of(&self.groups, place.group).host;
        let Some(entry) = host.get(&record.name) else { return };
        let known = (entry.stores, entry.uses);
        for store in 0..self.stores.len() {
            if self.wants(record, known, store, event) {
                self.stores.get_mut(store).invariant(STORE).owed.insert(place);
            }
        }
    }

    /// Notes everything in host memory that stores have yet to get before the end.
    pub(super) fn owe_rest(&mut self) {
        let works = |(at, lane): (usize, &StoreLane)| lane.store.retry_at().map_or(bit(at), |_| 0);
        let working = self.stores.iter().enumerate().map(works).fold(0, |all, one| all | one);
        self.groups.iter_mut().for_each(|group| group.waiting.retry_lost(working));
        for record in self.host_records() {
            self.owe(&record, ChunkEvent::Flush);
        }
        let now = Instant::now();
        self.stores.iter_mut().for_each(|lane| lane.owed.hurry(now));
    }

    /// Returns whether the rule of a store says that it gets a chunk. `stores` have it already.
    fn wants(
        &self,
        record: &Record,
        (stores, uses): (u64, u32),
        store: usize,
        event: ChunkEvent,
    ) -> bool {
        let prompt_tokens = match record.at {
            ChunkAt::Whole(_) => self.prompted.tokens(&record.name),
            ChunkAt::Upto(end) => self.prompted.tokens(&record.parent).filter(|len| end <= *len),
        };
        let facts = ChunkFacts {
            is_present: stores & bit(store) != 0,
            // The publication is the first.
            uses: uses + 1,
            prompt_tokens: prompt_tokens.unwrap_or(record.end),
            is_generated: prompt_tokens.is_none(),
            is_pinned: self.pinned.has(record),
            level: record.priority.level,
        };
        let rule = &self.stores.get(store).invariant(STORE).store.options().write;
        rule.decide(event, &facts) == WriteDecision::Write
    }

    /// Sends to each store its owed chunks of host memory, while its queue has room and its breaker
    /// is closed.
    pub(super) fn write_owed(&mut self) {
        if self.stores.iter().all(|lane| lane.owed.len() == 0) {
            return;
        }
        let now = Instant::now();
        for store in 0..self.stores.len() {
            loop {
                let lane = self.stores.get_mut(store).invariant(STORE);
                let Some(place) = lane.has_room().then(|| lane.owed.take(now)).flatten() else {
                    break;
                };
                let host = &mut group::of_mut(&mut self.groups, place.group).host;
                let entry = host.get_mut(&place.name).invariant(OWED);
                if entry.stores & bit(store) != 0 {
                    // It was read from there meanwhile.
                    lane.owed.remove(&place);
                    continue;
                }
                let Some(permit) = lane.store.begin_write() else {
                    lane.owed.insert(place);
                    break;
                };
                entry.stores |= bit(store);
                let (record, chunk) = (Arc::clone(&entry.record), entry.chunk.clone());
                self.send(&record, chunk, store, (permit, false));
            }
        }
    }

    /// Sends a chunk that has left host memory to the stores that should have it. Chunks without
    /// room in a queue are lost.
    pub(super) fn write_left(&mut self, entry: &Entry<ChunkOf<B>>) {
        let (record, place) = (&entry.record, Place::of(&entry.record));
        for store in 0..self.stores.len() {
            let is_wanted = self.wants(record, (entry.stores, entry.uses), store, ChunkEvent::Left);
            let lane = self.stores.get_mut(store).invariant(STORE);
            if !(lane.owed.remove(&place) || is_wanted) {
                continue;
            }
            if !lane.has_room() {
                lane.store.note_dropped_by_queue();
            } else if let Some(permit) = lane.store.begin_write() {
                self.send(record, entry.chunk.clone(), store, (permit, true));
                continue;
            } else {
                lane.store.note_dropped(NotWritten::Breaker);
            }
            self.note_lost(record, store);
        }
    }

    /// Notes a write of a chunk that host memory has given up. If its blocks are on the device, the
    /// next flush copies them again.
    fn note_lost(&mut self, record: &Record, store: usize) {
        self.lost += 1;
        let of = group::of_mut(&mut self.groups, record.group());
        // The blocks of a tail are those of no whole chunk.
        let is_whole = matches!(record.at, ChunkAt::Whole(_));
        let last = record.keys.last().filter(|key| is_whole && of.links.is_on_device(**key));
        if let Some(key) = last {
            of.waiting.note_lost(record.last_block(), *key, bit(store));
        }
    }

    /// Returns whether a flush must not let host memory give a chunk up yet: a store that works
    /// has yet to get it.
    pub(super) fn must_stay(stores: &[StoreLane], record: &Record) -> bool {
        let (place, until) = (Place::of(record), after(Instant::now(), PATIENCE));
        let works = |lane: &StoreLane| lane.store.retry_at().is_none_or(|at| at <= until);
        stores.iter().any(|lane| lane.owed.contains(&place) && works(lane))
    }

    /// Sends a chunk to a store; `left` says that host memory has given it up.
    fn send(
        &mut self,
        record: &Arc<Record>,
        chunk: Verified<Arc<ChunkOf<B>>>,
        at: usize,
        (permit, left): (Permit, bool),
    ) {
        let lane = self.stores.get_mut(at).invariant(STORE);
        // Deadlines may be any times.
        let limit = lane.store.options().write_deadline.saturating_add(GRACE);
        let number = lane.begin(Some(Arc::clone(record)));
        if left {
            let of = group::of_mut(&mut self.groups, record.group());
            let until = after(Instant::now(), limit);
            let leaving = of.leaving.entry(record.name);
            let leaving = leaving.or_insert(Leaving { writes: 0, until });
            leaving.writes += 1;
            leaving.until = leaving.until.min(until);
        }
        let written = move |record, put| Done::Written { record, store: at, number, put, left };
        let unsent = written(Arc::clone(record), Err(NotWritten::Breaker));
        let mut report = Report::new(&self.sender, unsent);
        let (store, record) = (Arc::clone(&lane.store), Arc::clone(record));
        lane.lane.push(limit, move || {
            let put = if record.is_forgotten() {
                Err(NotWritten::Forgotten)
            } else {
                store.write(permit, &record.address(), chunk.bytes())
            };
            // Its memory is free before the tiers look for room.
            drop(chunk);
            report.set(written(record, put));
        });
    }

    pub(super) fn note_written(
        &mut self,
        record: &Arc<Record>,
        (store, number): (usize, u64),
        put: Result<Put, NotWritten>,
        left: bool,
    ) {
        let lane = self.stores.get_mut(store).invariant(STORE);
        lane.end(number);
        let place = Place::of(record);
        let of = group::of_mut(&mut self.groups, place.group);
        if left && let Some(leaving) = of.leaving.get_mut(&record.name) {
            leaving.writes -= 1;
            if leaving.writes == 0 {
                of.leaving.remove(&record.name);
            }
        }
        if record.is_forgotten() {
            // If it was written, it is removed.
            return;
        }
        let Err(why) = put else {
            lane.owed.remove(&place);
            self.announcements.has(lane.store.tier(), record, bit(store).into());
            return;
        };
        let Some(entry) = of.host.get_mut(&record.name) else {
            lane.store.note_dropped(why);
            self.note_lost(record, store);
            return;
        };
        entry.stores &= !bit(store);
        match why {
            NotWritten::Breaker => lane.owed.insert(place),
            NotWritten::Failed => lane.owed.insert_failed(place, Instant::now()),
            NotWritten::Forgotten => {}
            NotWritten::Budget { until } => {
                lane.store.note_dropped(why);
                lane.owed.insert_until(place, until);
            }
        }
    }

    pub(super) fn host_records(&self) -> Vec<Arc<Record>> {
        let entries = self.groups.iter().flat_map(|group| group.host.iter());
        entries.map(|entry| Arc::clone(&entry.record)).collect()
    }

    /// Returns the remaining work of a flush.
    pub(super) fn unwritten(&self) -> Unwritten {
        let of_group = |group: &GroupTier<B::HostPool>| group.to_copy();
        let copies: usize = self.groups.iter().map(of_group).sum();
        let of_store = |lane: &StoreLane| lane.writing.len() + lane.owed.len();
        let writes: usize = self.stores.iter().map(of_store).sum();
        Unwritten { copies: to_u64(copies), writes: to_u64(writes) + self.lost }
    }

    /// Returns whether some store takes or ends a write before long.
    pub(super) fn can_write(&self, now: Instant) -> bool {
        let until = after(now, PATIENCE);
        self.stores.iter().any(|lane| {
            let due = lane.owed.due(now);
            let due = due.map(|due| lane.store.retry_at().map_or(due, |open| open.max(due)));
            !lane.writing.is_empty() || due.is_some_and(|due| due <= until)
        })
    }
}

impl StoreLane {
    /// Returns whether one more write may wait.
    pub(super) fn has_room(&self) -> bool {
        self.writing.len() < self.store.options().writes_max.max(1)
    }

    /// Notes a write that begins to wait, with its chunk; returns its number.
    pub(super) fn begin(&mut self, record: Option<Arc<Record>>) -> u64 {
        let number = self.next_write;
        self.next_write = number + 1;
        self.writing.insert(number, record);
        number
    }
    /// Notes that a write has ended.
    pub(super) fn end(&mut self, number: u64) {
        self.writing.remove(&number).invariant("a write ends once");
    }
}

const OWED: &str = "what a store is owed is in host memory";

/// Returns the bit of a store.
pub(super) fn bit(store: usize) -> u64 {
    1_u64.checked_shl(to_u32(store)).invariant("there are at most 64 stores")
}
