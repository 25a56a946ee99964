//! Announcements of chunks in the tiers below the device, for readers of events.
use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;

use kv_core::backend::Backend;
use kv_core::events::{EventKind, Snapshot, StoredBlock, Tier};
use kv_core::invariant::Invariant;
use kv_core::reuse::BlockKey;
use kv_core::{GroupId, KvCache};

use super::Tiers;
use crate::name::ChunkName;
use crate::record::Record;

/// The chunks that are announced, and the events that are due.
///
/// A reader is told once that a tier has a block, and once that it has it no more, however many
/// chunks have the block and however many stores of the tier have the chunk. Nothing is kept unless
/// the cache has events.
#[derive(Debug)]
pub(super) struct Announcements {
    is_on: bool,
    /// Chunks of another encoding cannot be reused.
    encoding_key: u128,
    chunks: HashMap<(Tier, ChunkName), Known>,
    /// Number of these chunks with a block.
    blocks: HashMap<(Tier, GroupId, BlockKey), u32>,
    /// Chunks of stores, first announced first.
    in_stores: VecDeque<(Tier, ChunkName)>,
    due: Vec<EventKind>,
}

/// A chunk that a tier has.
#[derive(Debug)]
struct Known {
    record: Arc<Record>,
    /// One bit for each place of the tier that has it.
    places: u128,
}

/// The place of chunks in host memory: stores have the bits before, and may be of its tier.
pub(super) const HOST: u128 = 1 << 64;

/// Most chunks of stores that are announced. A store may have any number, and does not report
/// evictions.
const IN_STORES_MAX: usize = 1 << 16;

impl Announcements {
    /// Begins with nothing known of `tiers`, whatever others have announced for the cache before.
    pub(super) fn new(is_on: bool, encoding_key: u128, tiers: impl Iterator<Item = Tier>) -> Self {
        let (chunks, blocks) = (HashMap::new(), HashMap::new());
        let due = if is_on { cleared(tiers) } else { Vec::new() };
        Self { is_on, encoding_key, chunks, blocks, in_stores: VecDeque::new(), due }
    }

    /// Notes that a place of a tier has a chunk.
    pub(super) fn has(&mut self, tier: Tier, record: &Arc<Record>, place: u128) {
        if !self.is_on || record.root.encoding_key() != self.encoding_key {
            return;
        }
        match self.chunks.entry((tier, record.name)) {
            Entry::Occupied(known) => {
                known.into_mut().places |= place;
                return;
            }
            Entry::Vacant(new) => new.insert(Known { record: Arc::clone(record), places: place }),
        };
        for kind in record.stored(tier) {
            let EventKind::Stored(block) = &kind else { continue };
            let chunks = self.blocks.entry((tier, block.group, block.key)).or_default();
            *chunks += 1;
            if *chunks == 1 {
                self.due.push(kind);
            }
        }
        if tier != Tier::Host {
            self.in_stores.push_back((tier, record.name));
            self.forget_oldest();
        }
    }

    /// Notes that a place of a tier does not have a chunk.
    pub(super) fn lacks(&mut self, tier: Tier, name: &ChunkName, place: u128) {
        let Entry::Occupied(mut known) = self.chunks.entry((tier, *name)) else { return };
        known.get_mut().places &= !place;
        if known.get().places == 0 {
            let record = known.remove().record;
            self.removed(tier, &record);
        }
    }

    /// Does what [`Self::lacks`] does, without a name where nothing is announced.
    pub(super) fn lacks_if_known(
        &mut self,
        tier: Tier,
        name: impl FnOnce() -> ChunkName,
        place: u128,
    ) {
        if !self.chunks.is_empty() {
            self.lacks(tier, &name(), place);
        }
    }

    /// Notes that a place of a tier has none of the chunks that are gone.
    pub(super) fn lacks_all(&mut self, tier: Tier, place: u128, is_gone: impl Fn(&Record) -> bool) {
        let of_tier =
            self.chunks.iter().filter(|((at, _), known)| *at == tier && is_gone(&known.record));
        let gone: Vec<_> = of_tier.map(|((_, name), _)| *name).collect();
        for name in gone {
            self.lacks(tier, &name, place);
        }
    }

    fn removed(&mut self, tier: Tier, record: &Record) {
        for kind in record.removed(tier) {
            let EventKind::Removed { group, key, .. } = kind else { continue };
            let Entry::Occupied(mut chunks) = self.blocks.entry((tier, group, key)) else {
                continue;
            };
            let left = chunks.get().checked_sub(1);
            *chunks.get_mut() = left.invariant("a block is announced while a chunk has it");
            if *chunks.get() == 0 {
                chunks.remove();
                self.due.push(kind);
            }
        }
    }

    /// Forgets chunks of stores when there are too many. Those that were given up meanwhile are in
    /// the list too.
    fn forget_oldest(&mut self) {
        if self.in_stores.len() > IN_STORES_MAX * 2 {
            let chunks = &self.chunks;
            let mut seen = HashSet::new();
            self.in_stores.retain(|chunk| chunks.contains_key(chunk) && seen.insert(*chunk));
        }
        while self.in_stores.len() > IN_STORES_MAX
            && let Some((tier, name)) = self.in_stores.pop_front()
        {
            self.lacks(tier, &name, u128::MAX);
        }
    }

    /// Notes that nothing announced can be reused any more, because the cache has another encoding.
    /// `false` if it has not.
    pub(super) fn encoding(&mut self, encoding_key: u128) -> bool {
        if self.encoding_key == encoding_key {
            return false;
        }
        self.encoding_key = encoding_key;
        self.due.extend(cleared(self.chunks.drain().map(|((tier, _), _)| tier)));
        self.blocks.clear();
        self.in_stores.clear();
        true
    }

    /// Returns the blocks that a reader knows after all events.
    fn stored(&self) -> Vec<StoredBlock> {
        let mut seen = HashSet::new();
        let all = self.chunks.iter().flat_map(|((tier, _), known)| known.record.stored(*tier));
        let blocks = all.filter_map(|kind| match kind {
            EventKind::Stored(block) => Some(block),
            _ => None,
        });
        blocks.filter(|block| seen.insert((block.tier, block.group, block.key))).collect()
    }
}

/// Returns one event for each of some tiers.
fn cleared(tiers: impl Iterator<Item = Tier>) -> Vec<EventKind> {
    let tiers: HashSet<_> = tiers.collect();
    tiers.into_iter().map(|tier| EventKind::Cleared { tier }).collect()
}

impl<B: Backend> Tiers<B> {
    /// Does what [`TieredCache::snapshot`](crate::TieredCache::snapshot) does.
    pub(crate) fn snapshot(&mut self, cache: &mut KvCache<B>) -> Snapshot {
        self.announce(cache);
        let mut snapshot = cache.state().snapshot();
        snapshot.blocks.extend(self.announcements.stored());
        snapshot
    }

    /// Gives the events that are due to the cache.
    pub(super) fn announce(&mut self, cache: &mut KvCache<B>) {
        self.note_encoding(cache.state().encoding_key());
        for event in self.announcements.due.drain(..) {
            cache.announce(event);
        }
    }

    /// Notes the encoding of the cache. With other constants no named chunk can be reused, except
    /// chunks that were named under the same constants before.
    pub(super) fn note_encoding(&mut self, encoding_key: u128) {
        if !self.announcements.encoding(encoding_key) {
            return;
        }
        self.roots.clear();
        self.snapshots.clear();
        for group in &mut self.groups {
            group.links.clear();
            for entry in group.host.iter() {
                self.announcements.has(Tier::Host, &entry.record, HOST);
            }
        }
    }
}
