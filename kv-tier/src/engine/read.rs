//! Reads from stores to host memory.
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Instant;

use kv_core::backend::Backend;
use kv_core::events::Tier;
use kv_core::invariant::Invariant;

use super::announce::HOST;
use super::done::{Done, Report};
use super::group::{self, GroupTier, Reading};
use super::guarded::Read;
use super::prefetch::{GRACE, Stage};
use super::write::bit;
use super::{ChunkOf, GROUP, STORE, Tiers};
use crate::chain::ChunkAt;
use crate::chunk::Verified;
use crate::record::Record;
use crate::store::after;

impl<B: Backend> Tiers<B> {
    /// Begins as many of a prefetch's reads as host memory has room for.
    pub(super) fn begin_reads(&mut self, id: u64) {
        let Some(mut of) = self.prefetches.remove(&id) else { return };
        if let Stage::Reading { mut queue, mut outstanding, until } =
            std::mem::replace(&mut of.stage, Stage::Done)
        {
            while let Some(&(group, chunk)) = queue.front() {
                let chain = of.chains.get(group).invariant(GROUP);
                let name = chain.name(&of.probe, chunk);
                let tier = self.groups.get_mut(group).invariant(GROUP);
                if let Some(entry) = tier.host.get(&name) {
                    of.held.insert((group, chunk), (entry.chunk.clone(), Tier::Host));
                } else if let Some(reading) = tier.reading.get_mut(&name) {
                    reading.waiters.push(id);
                    outstanding += 1;
                } else {
                    let Some(into) = self.take_chunk(group) else { break };
                    let store = of.found.get(&(group, chunk)).map_or(0, |stores| first(*stores));
                    let record = Arc::new(chain.record(&of.probe, chunk));
                    let tier = self.groups.get_mut(group).invariant(GROUP);
                    let given_up = after(until, GRACE);
                    let waiters = vec![id];
                    let of_read = Arc::clone(&record);
                    let reading = Reading { store, record: of_read, until: given_up, waiters };
                    tier.reading.insert(name, reading);
                    outstanding += 1;
                    let of_store = self.stores.get(store).invariant(STORE);
                    let asked = Arc::clone(&of_store.store);
                    // A chunk that is refused is removed too.
                    let limit = given_up.saturating_duration_since(Instant::now());
                    // Deadlines may be any times.
                    let limit = limit.saturating_add(asked.options().lookup_deadline);
                    let failed = Read::Failed;
                    let done = Done::Read { record: Arc::clone(&record), store, read: failed };
                    let mut report = Report::new(&self.sender, done);
                    of_store.lane.push_urgent(limit, move || {
                        let read = asked.read(&record, into, until);
                        report.set(Done::Read { record, store, read });
                    });
                }
                queue.pop_front();
            }
            let is_leaving = self.groups.iter().any(GroupTier::is_leaving);
            // Without anything on its way, no room comes before the prompt starts.
            if outstanding > 0 || (!queue.is_empty() && is_leaving) {
                of.stage = Stage::Reading { queue, outstanding, until };
            }
        }
        self.prefetches.insert(id, of);
    }

    pub(super) fn note_read(&mut self, record: &Arc<Record>, store: usize, read: Read<ChunkOf<B>>) {
        let group = group::place_of(&self.groups, record.group()).invariant(GROUP);
        let tier = self.groups.get_mut(group).invariant(GROUP);
        let waiters = match tier.reading.get(&record.name) {
            Some(reading) if Arc::ptr_eq(&reading.record, record) => {
                tier.reading.remove(&record.name).map_or_else(Vec::new, |reading| reading.waiters)
            }
            // An expired read, of a chunk that may be read a second time.
            _ => {
                tier.late.retain(|late| !Arc::ptr_eq(late, record));
                Vec::new()
            }
        };
        let of_store = self.stores.get(store).invariant(STORE).store.tier();
        let chunk = match read {
            Read::Verified(_) if record.is_forgotten() => None,
            Read::Verified(chunk) => {
                self.announcements.has(of_store, record, bit(store).into());
                Some(chunk)
            }
            Read::Missing => {
                self.announcements.lacks(of_store, &record.name, bit(store).into());
                None
            }
            Read::Failed => None,
        };
        if let Some(chunk) = &chunk
            && tier.host.insert(
                chunk.clone(),
                Arc::clone(record),
                (bit(store), self.prompted.hint(&record.name)),
            )
        {
            self.announcements.has(Tier::Host, record, HOST);
        }
        self.resolve((group, record.at), store, waiters, chunk.as_ref());
    }

    /// Gives a chunk that was read, or none, to the prefetches that wait for it.
    fn resolve(
        &mut self,
        at: (usize, ChunkAt),
        store: usize,
        waiters: Vec<u64>,
        chunk: Option<&Verified<Arc<ChunkOf<B>>>>,
    ) {
        let from = self.stores.get(store).invariant(STORE).store.tier();
        let mut again = BTreeSet::new();
        for id in waiters {
            let Some(of) = self.prefetches.get_mut(&id) else { continue };
            let Stage::Reading { queue, outstanding, .. } = &mut of.stage else { continue };
            *outstanding -= 1;
            let others = of.found.remove(&at).map_or(0, |stores| stores & !bit(store));
            if others != 0 {
                of.found.insert(at, others);
            }
            match chunk {
                Some(chunk) => {
                    of.held.insert(at, (chunk.clone(), from));
                }
                // Another store has it.
                None if others != 0 => queue.push_front(at),
                // A state needs all of its chunks: a shorter one may have them.
                None if of.search.is_some() => {
                    queue.clear();
                    again.insert(id);
                }
                // Of this group, nothing after the gap is of use.
                None => queue.retain(|(of, chunk)| *of != at.0 || *chunk < at.1),
            }
            if *outstanding == 0 && queue.is_empty() {
                of.stage = Stage::Done;
            } else {
                again.remove(&id);
            }
        }
        for id in again {
            self.plan(id);
        }
    }

    /// Expires reads that have not returned, so that the same chunks can be read again.
    pub(super) fn expire_reads(&mut self) {
        if self.groups.iter().all(|group| group.reading.is_empty()) {
            return;
        }
        let now = Instant::now();
        let mut expired = Vec::new();
        for (group, tier) in self.groups.iter_mut().enumerate() {
            let late = tier.reading.extract_if(|_, reading| now >= reading.until);
            let late = late.map(|(_, reading)| (group, reading)).collect::<Vec<_>>();
            tier.late.extend(late.iter().map(|(_, reading)| Arc::clone(&reading.record)));
            expired.extend(late);
        }
        for (group, Reading { store, record, waiters, .. }) in expired {
            self.resolve((group, record.at), store, waiters, None);
        }
    }
}

/// Returns the first of some stores, which is preferred.
pub(super) fn first(stores: u64) -> usize {
    kv_core::num::to_usize(stores.trailing_zeros())
}
