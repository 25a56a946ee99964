//! Offload: from the device to host memory, and from there to stores.
use std::collections::{HashSet, VecDeque};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use kv_core::backend::{Backend, HostPool, PendingChunk, Queue};
use kv_core::block::{BlockChange, BlockChangeKind};
use kv_core::events::Tier;
use kv_core::invariant::Invariant;
use kv_core::reuse::{BlockHold, BlockKey, IndexedBlock};
use kv_core::{BlockId, CacheError, GroupId, KvCache};

use super::guarded::after;
use super::host::Entry;
use super::links::{Complete, Linked};
use super::onboard::GRACE;
use super::record::Record;
use super::{ChunkOf, Copying, Done, Leaving, Report, StoreLane, TierError, Tiers};
use crate::chunk::{Verified, encode_header, verify};
use crate::policy::{ChunkEvent, ChunkFacts, WriteDecision};
use crate::store::Put;

const GROUP: &str = "groups are those of the cache that the tiers were made for";
const STORE: &str = "stores are numbered as in the options";

/// Chunks of a group that may wait for their copy; older ones are given up.
const WAITING_MAX: usize = 4096;

impl<B: Backend> Tiers<B> {
    /// Follows the blocks that became reusable and those that are gone.
    pub(super) fn follow_changes(&mut self, cache: &mut KvCache<B>) {
        let mut changes = std::mem::take(&mut self.changes);
        if !cache.drain_changes(&mut changes) {
            self.follow_all(cache);
        }
        for change in changes.drain(..) {
            self.follow(cache, change);
        }
        self.changes = changes;
    }

    /// Sends chunks that were pinned since the last call to the stores that get pinned ones at
    /// once.
    pub(super) fn follow_pins(&mut self, cache: &KvCache<B>) {
        if pinned_blocks(cache).eq(self.pinned.blocks.iter().copied()) {
            return;
        }
        let before = std::mem::replace(&mut self.pinned, Pinned::of(cache));
        let is_new = |key: &_| self.pinned.keys.contains(key) && !before.keys.contains(key);
        let mut records = self.host_records();
        records.retain(|record| record.keys.iter().any(|key| is_new(&(record.group(), *key))));
        // Those that host memory has given up are copied again.
        let contents = self.pinned.blocks.iter().filter_map(|(group, block)| {
            let content = cache.pool(*group)?.content(*block)?;
            (!content.is_partial && is_new(&(*group, content.key))).then_some((*group, content))
        });
        let contents: Vec<_> = contents.collect();
        for record in records {
            self.decide_writes(&record, ChunkEvent::Reused);
        }
        for (group, block) in contents {
            let group = usize::from(group.0);
            if let Linked::Complete(complete) = self.link(cache, group, &block) {
                self.wait_for_copy(group, complete);
            }
        }
    }

    /// Follows what is on the device, after changes were lost. Blocks that were followed before are
    /// not copied again.
    fn follow_all(&mut self, cache: &KvCache<B>) {
        for group in 0..self.groups.len() {
            let id = self.groups.get(group).invariant(GROUP).spec.group();
            let links = &mut self.groups.get_mut(group).invariant(GROUP).links;
            links.retain(&cache.stored_blocks(id).map(|block| (block.block, block.key)).collect());
            let is_new = |block: &IndexedBlock<'_>| !links.is_stored(block.block, block.key);
            let mut blocks: Vec<_> = cache.stored_blocks(id).filter(is_new).collect();
            // A block before those that follow it.
            blocks.sort_by_key(|block| block.index);
            for block in blocks {
                self.follow_stored(cache, group, &block);
            }
        }
    }

    fn follow(&mut self, cache: &KvCache<B>, change: BlockChange) {
        let group = usize::from(change.group.0);
        match change.kind {
            BlockChangeKind::Removed => {
                let links = &mut self.groups.get_mut(group).invariant(GROUP).links;
                links.removed(change.block, change.key);
            }
            BlockChangeKind::Stored => {
                let block = cache.pool(change.group).and_then(|pool| pool.content(change.block));
                // Of a block that has other content by now, that is a change of its own.
                let block = block.filter(|block| block.key == change.key && !block.is_partial);
                if let Some(block) = block {
                    self.follow_stored(cache, group, &block);
                }
            }
        }
    }

    /// Gives a block its name; returns the chunk that it completes.
    fn link(&mut self, cache: &KvCache<B>, group: usize, block: &IndexedBlock<'_>) -> Linked {
        let space = cache.namespace(block.namespace);
        let root = space.and_then(|space| self.root(cache.encoding_key(), group, space));
        let of = self.groups.get_mut(group).invariant(GROUP);
        let pool = cache.pool(of.spec.group()).invariant(GROUP);
        root.map_or(Linked::Unnamed, |root| of.links.stored(block, &root, pool))
    }

    fn follow_stored(&mut self, cache: &KvCache<B>, group: usize, block: &IndexedBlock<'_>) {
        match self.link(cache, group, block) {
            Linked::Inside => {}
            Linked::Unnamed => {
                self.stats.unnamed_blocks = self.stats.unnamed_blocks.saturating_add(1);
            }
            Linked::Incomplete => {
                self.stats.offload_missed = self.stats.offload_missed.saturating_add(1);
            }
            Linked::Complete(complete) => self.wait_for_copy(group, complete),
        }
    }

    /// Lets a chunk wait for its copy to host memory, unless it is there or not worth it.
    fn wait_for_copy(&mut self, group: usize, complete: Complete) {
        let of = self.groups.get_mut(group).invariant(GROUP);
        if of.host.contains(&complete.record.name) {
            of.host.touch(&complete.record.name);
            return;
        }
        // The caller wants these evicted first: they are not worth a copy.
        if complete.record.priority.level == 0 {
            return;
        }
        of.waiting.push_back(complete);
        if of.waiting.len() > WAITING_MAX {
            of.waiting.pop_front();
            self.stats.offload_missed = self.stats.offload_missed.saturating_add(1);
        }
    }

    /// Begins to copy complete chunks from the device, as far as host memory has room.
    pub(super) fn begin_copies(&mut self, cache: &mut KvCache<B>) -> Result<(), TierError> {
        let mut fence = None;
        for group in 0..self.groups.len() {
            loop {
                let of = self.groups.get_mut(group).invariant(GROUP);
                let Some(next) = of.waiting.front() else { break };
                let name = next.record.name;
                if of.host.contains(&name) || of.encoding.contains(&name) {
                    of.waiting.pop_front();
                    continue;
                }
                if of.copying.len() >= of.copying_max {
                    break;
                }
                let Some(chunk) = self.take_chunk(group) else { break };
                let of = self.groups.get_mut(group).invariant(GROUP);
                let Some(complete) = of.waiting.pop_front() else { break };
                let Some(holds) = hold(cache, &complete)? else {
                    self.stats.offload_missed = self.stats.offload_missed.saturating_add(1);
                    continue;
                };
                let after = match &fence {
                    Some(fence) => fence,
                    None => match cache.queue_mut().submit() {
                        Ok(submitted) => fence.insert(submitted),
                        Err(error) => {
                            release(cache, holds)?;
                            return Err(error.into());
                        }
                    },
                };
                let storage = cache.storage(of.spec.group()).invariant(GROUP).view();
                let copied = of.pool.copy_out(after, storage, &complete.blocks, chunk, 0);
                let pending = match copied {
                    Ok(pending) => pending,
                    Err(error) => {
                        release(cache, holds)?;
                        return Err(error.into());
                    }
                };
                let record = Arc::new(complete.record);
                of.encoding.insert(record.name);
                of.copying.push(Copying { pending, record, holds });
            }
        }
        Ok(())
    }

    /// Releases the blocks that were copied, and lets the encoder complete their chunks.
    pub(super) fn finish_copies(&mut self, cache: &mut KvCache<B>) -> Result<(), TierError> {
        let mut context = Context::from_waker(Waker::noop());
        let mut failure = None;
        for group in &mut self.groups {
            let mut at = 0;
            while let Some(copying) = group.copying.get_mut(at) {
                let Poll::Ready(copied) = copying.pending.poll(&mut context) else {
                    at = at.saturating_add(1);
                    continue;
                };
                let Copying { record, holds, .. } = group.copying.swap_remove(at);
                let released = release(cache, holds);
                match copied {
                    Ok(chunk) => {
                        let none = Done::Encoded { record: Arc::clone(&record), chunk: None };
                        let mut report = Report::new(&self.sender, none);
                        self.encoder.push_urgent(Duration::MAX, move || {
                            let chunk = encode::<B>(&record, chunk);
                            report.set(Done::Encoded { record, chunk });
                        });
                    }
                    Err(error) => {
                        group.encoding.remove(&record.name);
                        failure = failure.or(Some(error));
                    }
                }
                released?;
            }
        }
        failure.map_or(Ok(()), |error| Err(error.into()))
    }

    pub(super) fn note_encoded(
        &mut self,
        record: &Arc<Record>,
        chunk: Option<Verified<Arc<ChunkOf<B>>>>,
    ) {
        let group = usize::from(record.group().0);
        let of = self.groups.get_mut(group).invariant(GROUP);
        of.encoding.remove(&record.name);
        let Some(chunk) = chunk else {
            self.stats.unnamed_blocks = self.stats.unnamed_blocks.saturating_add(1);
            return;
        };
        self.stats.offloaded = self.stats.offloaded.saturating_add(1);
        if of.host.insert(chunk, Arc::clone(record), 0) {
            self.announcements.extend(record.stored(Tier::Host));
        }
        self.decide_writes(record, ChunkEvent::Published);
        if !self.keeps_host {
            self.decide_writes(record, ChunkEvent::Left);
        }
    }

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
    fn send(
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
        let written = move |record: Arc<Record>, put: Option<Put>| {
            let (is_there, is_new) = (put.is_some(), put == Some(Put::New));
            Done::Written { record, store: at, is_there, is_new, left }
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
        (is_there, is_new): (bool, bool),
        left: bool,
    ) {
        let lane = self.stores.get_mut(store).invariant(STORE);
        lane.writes_waiting = lane.writes_waiting.saturating_sub(1);
        if is_new {
            self.announcements.extend(record.stored(lane.store.tier()));
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

    /// Takes an unused chunk of host memory, or makes room for one. `None` if there is none now: it
    /// may have to be written first.
    pub(super) fn take_chunk(&mut self, group: usize) -> Option<ChunkOf<B>> {
        let of = self.groups.get_mut(group).invariant(GROUP);
        if let Some(chunk) = of.pool.take() {
            return Some(chunk);
        }
        // Room is on its way.
        if of.is_leaving() {
            return None;
        }
        let is_unused = |entry: &Entry<_>| Arc::strong_count(entry.chunk.get_ref()) == 1;
        let Entry { chunk, record, stores, uses, .. } = of.host.evict(is_unused)?;
        self.stats.host_evictions = self.stats.host_evictions.saturating_add(1);
        self.announcements.extend(record.removed(Tier::Host));
        for store in 0..self.stores.len() {
            self.send(&record, &chunk, (stores, uses), store, ChunkEvent::Left);
        }
        drop(chunk);
        self.groups.get_mut(group).invariant(GROUP).pool.take()
    }
}

/// Returns the bit of a store.
pub(super) fn bit(store: usize) -> u64 {
    let store = u32::try_from(store).unwrap_or(u32::MAX);
    1_u64.checked_shl(store).invariant("there are at most 64 stores")
}

/// What the caller has pinned.
#[derive(Debug, Default)]
pub(super) struct Pinned {
    /// As the cache lists them, to see that pins have changed.
    blocks: Vec<(GroupId, BlockId)>,
    keys: HashSet<(GroupId, BlockKey)>,
}

impl Pinned {
    fn of<B: Backend>(cache: &KvCache<B>) -> Self {
        let blocks: Vec<_> = pinned_blocks(cache).collect();
        let key = |(group, block): &(GroupId, BlockId)| {
            Some((*group, cache.pool(*group)?.content(*block)?.key))
        };
        let keys = blocks.iter().filter_map(key).collect();
        Self { blocks, keys }
    }

    /// Returns whether a prefix with some block of a chunk is pinned.
    fn has(&self, record: &Record) -> bool {
        let is_pinned = |key: &BlockKey| self.keys.contains(&(record.group(), *key));
        !self.keys.is_empty() && record.keys.iter().any(is_pinned)
    }
}

fn pinned_blocks<B: Backend>(cache: &KvCache<B>) -> impl Iterator<Item = (GroupId, BlockId)> + '_ {
    let groups = (0..=u8::MAX).map(GroupId).take(cache.spec().groups().len());
    groups.flat_map(|id| cache.pinned_blocks(id).map(move |block| (id, block)))
}

/// Holds the blocks of a chunk; `None` if one has left the device.
fn hold<B: Backend>(
    cache: &mut KvCache<B>,
    complete: &Complete,
) -> Result<Option<Vec<BlockHold>>, CacheError> {
    let group = complete.record.group();
    let mut holds = Vec::with_capacity(complete.blocks.len());
    for (block, key) in complete.blocks.iter().zip(&complete.record.keys) {
        let Some(hold) = cache.hold_block(group, *block, *key)? else {
            release(cache, holds)?;
            return Ok(None);
        };
        holds.push(hold);
    }
    Ok(Some(holds))
}

/// Releases all holds, also after a failure.
fn release<B: Backend>(cache: &mut KvCache<B>, holds: Vec<BlockHold>) -> Result<(), CacheError> {
    let mut result = Ok(());
    for hold in holds {
        result = result.and(cache.release_hold(hold));
    }
    result
}

/// Completes a chunk that was copied; `None` if it has more contents of placeholder tokens than a
/// header has room for.
fn encode<B: Backend>(record: &Record, mut chunk: ChunkOf<B>) -> Option<Verified<Arc<ChunkOf<B>>>> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
    encode_header(chunk.as_mut(), &record.expectation(), now).ok()?;
    verify(Arc::new(chunk), &record.expectation()).ok()
}
