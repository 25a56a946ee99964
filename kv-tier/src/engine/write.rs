//! From host memory to stores.
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use kv_core::backend::Backend;
use kv_core::invariant::Invariant;

use super::done::{Done, Report};
use super::group::Leaving;
use super::guarded::after;
use super::prefetch::GRACE;
use super::{ChunkOf, GROUP, STORE, StoreLane, Tiers};
use crate::chunk::Verified;
use crate::policy::{ChunkEvent, ChunkFacts, WriteDecision};
use crate::record::Record;
use crate::store::Put;

impl<B: Backend> Tiers<B> {
    /// Sends a chunk of host memory to the stores whose rules say so.
    pub(super) fn decide_writes(&mut self, record: &Arc<Record>, event: ChunkEvent) {
        (0..self.stores.len()).for_each(|store| self.decide_write(record, store, event));
    }

    /// Sends a chunk of host memory to one store if its rule says so.
    fn decide_write(&mut self, record: &Arc<Record>, store: usize, event: ChunkEvent) {
        let group = usize::from(record.group().0);
        let host = &self.groups.get(group).invariant(GROUP).host;
        let Some(entry) = host.get(&record.name) else { return };
        let (chunk, stores, uses) = (entry.chunk.clone(), entry.stores, entry.uses);
        if self.send(record, &chunk, (stores, uses), store, event) {
            let host = &mut self.groups.get_mut(group).invariant(GROUP).host;
            if let Some(entry) = host.get_mut(&record.name) {
                entry.stores |= bit(store);
            }
        }
    }

    /// Sends a chunk to a store if its rule says so; returns whether it was sent. `stores` have it
    /// already.
    pub(super) fn send(
        &mut self,
        record: &Arc<Record>,
        chunk: &Verified<Arc<ChunkOf<B>>>,
        (stores, uses): (u64, u32),
        at: usize,
        event: ChunkEvent,
    ) -> bool {
        let prompt_tokens = self.prompted.get(&record.name);
        let is_pinned = self.pinned.has(record);
        let lane = self.stores.get_mut(at).invariant(STORE);
        let facts = ChunkFacts {
            is_present: stores & bit(at) != 0,
            // The publication is the first.
            uses: uses.saturating_add(1),
            prompt_tokens: prompt_tokens.unwrap_or_else(|| record.end()),
            is_generated: prompt_tokens.is_none(),
            is_pinned,
            level: record.priority.level,
        };
        let options = lane.store.options();
        if options.write.decide(event, &facts) != WriteDecision::Write {
            return false;
        }
        if lane.writes_waiting >= options.writes_max {
            lane.store.note_queue_full();
            return false;
        }
        let Some(permit) = lane.store.begin_write() else {
            lane.store.note_refused_write();
            return false;
        };
        let limit = options.write_deadline.saturating_add(GRACE);
        lane.writes_waiting = lane.writes_waiting.saturating_add(1);
        let left = event == ChunkEvent::Left && self.keeps_host;
        if left {
            let of = self.groups.get_mut(usize::from(record.group().0)).invariant(GROUP);
            let until = after(Instant::now(), limit);
            let leaving = of.leaving.entry(record.name);
            let leaving = leaving.or_insert(Leaving { writes: 0, until });
            leaving.writes = leaving.writes.saturating_add(1);
            leaving.until = leaving.until.min(until);
        }
        let written = move |record: Arc<Record>, put: Option<Put>| Done::Written {
            record,
            store: at,
            is_there: put.is_some(),
            left,
        };
        let mut report = Report::new(&self.sender, written(Arc::clone(record), None));
        let store = Arc::clone(&lane.store);
        let (record, chunk) = (Arc::clone(record), chunk.clone());
        lane.lane.push(limit, move || {
            let put = store.write(permit, &record.address(), chunk.bytes());
            // Its memory is free before the tiers look for room.
            drop(chunk);
            report.set(written(record, put));
        });
        true
    }

    pub(super) fn note_written(
        &mut self,
        record: &Arc<Record>,
        store: usize,
        is_there: bool,
        left: bool,
    ) {
        let lane = self.stores.get_mut(store).invariant(STORE);
        lane.writes_waiting = lane.writes_waiting.saturating_sub(1);
        if is_there {
            self.announcements.has(lane.store.tier(), record, bit(store).into());
        }
        let of = self.groups.get_mut(usize::from(record.group().0)).invariant(GROUP);
        if left && let Some(leaving) = of.leaving.get_mut(&record.name) {
            leaving.writes = leaving.writes.saturating_sub(1);
            if leaving.writes == 0 {
                of.leaving.remove(&record.name);
            }
        }
        if !is_there && let Some(entry) = of.host.get_mut(&record.name) {
            entry.stores &= !bit(store);
        }
    }

    pub(super) fn host_records(&self) -> VecDeque<Arc<Record>> {
        let entries = self.groups.iter().flat_map(|group| group.host.iter());
        entries.map(|entry| Arc::clone(&entry.record)).collect()
    }

    /// Sends chunks of host memory to the stores that want them before the end, to each as many as
    /// may wait there.
    pub(super) fn write_rest(&mut self, unwritten: &mut [VecDeque<Arc<Record>>]) {
        let has_room =
            |lane: &StoreLane| lane.writes_waiting < lane.store.options().writes_max.max(1);
        for (store, records) in unwritten.iter_mut().enumerate() {
            while self.stores.get(store).is_some_and(has_room) {
                let Some(record) = records.pop_front() else { break };
                self.decide_write(&record, store, ChunkEvent::Flush);
            }
        }
    }
}

/// Returns the bit of a store.
pub(super) fn bit(store: usize) -> u64 {
    let store = u32::try_from(store).unwrap_or(u32::MAX);
    1_u64.checked_shl(store).invariant("there are at most 64 stores")
}
