//! The chunks in host memory: by name, and in the order of an eviction policy.
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use kv_core::BlockId;
use kv_core::eviction::{BlockInfo, EvictionPolicy, Return};
use kv_core::invariant::Invariant;
use kv_core::num::to_usize;
use kv_core::reuse::BlockKey;

use crate::chunk::Verified;
use crate::name::ChunkName;
use crate::record::Record;

/// Chunks by the name of the chunk before.
type Children = HashMap<ChunkName, HashSet<ChunkName>>;

/// The chunks of one group in host memory.
///
/// The policy knows each by its place, as it knows blocks of a pool. A chunk is useless without the
/// chunks before it, so that only leaves are evicted: chunks after which no chunk follows here. A
/// recurrent state needs no state before it: each is a leaf.
///
/// Uses of a request are reported when the next one begins, each chain from its end, which is how
/// sequences release their blocks.
#[derive(Debug)]
pub(super) struct HostIndex<C> {
    entries: HashMap<ChunkName, Entry<C>>,
    children: Children,
    policy: Box<dyn EvictionPolicy>,
    /// The chunk of each place, and the places without one.
    places: Vec<Option<ChunkName>>,
    free: Vec<u32>,
    /// Chunks that the request has used, in the order of their first use.
    used: Vec<ChunkName>,
}

/// A chunk in host memory.
#[derive(Debug)]
pub(super) struct Entry<C> {
    pub(super) chunk: Verified<Arc<C>>,
    pub(super) record: Arc<Record>,
    /// One bit for each store that has the chunk or is being sent it.
    pub(super) stores: u64,
    /// Prompts that reused it.
    pub(super) uses: u32,
    /// What the last request that used it said of its return.
    hint: Option<Return>,
    place: u32,
    /// Whether it waits in the list of used chunks, and is no candidate meanwhile.
    is_used: bool,
}

impl<C> Entry<C> {
    fn block(&self) -> BlockId {
        BlockId(self.place)
    }
}

impl<C> HostIndex<C> {
    /// Creates one for at most `capacity` chunks, which are the blocks of the policy.
    pub(super) fn new(capacity: u32, policy: Box<dyn EvictionPolicy>) -> Self {
        Self {
            entries: HashMap::new(),
            children: HashMap::new(),
            policy,
            places: vec![None; to_usize(capacity)],
            free: (0..capacity).rev().collect(),
            used: Vec::new(),
        }
    }

    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }
    pub(super) fn get(&self, name: &ChunkName) -> Option<&Entry<C>> {
        self.entries.get(name)
    }
    pub(super) fn get_mut(&mut self, name: &ChunkName) -> Option<&mut Entry<C>> {
        self.entries.get_mut(name)
    }
    pub(super) fn contains(&self, name: &ChunkName) -> bool {
        self.entries.contains_key(name)
    }
    /// Iterates over the chunks here that follow a chunk, which may not be here.
    pub(super) fn children(&self, name: &ChunkName) -> impl Iterator<Item = &Entry<C>> {
        let names = self.children.get(name).into_iter().flatten();
        names.filter_map(|name| self.entries.get(name))
    }
    /// Returns whether a chunk here follows a chunk, which may not be here.
    pub(super) fn has_children(&self, name: &ChunkName) -> bool {
        self.children.contains_key(name)
    }
    pub(super) fn iter(&self) -> impl Iterator<Item = &Entry<C>> {
        self.entries.values()
    }

    /// Begins a request, the time unit of the policy.
    pub(super) fn begin_request(&mut self) {
        self.report_uses();
        self.policy.tick();
    }

    /// Counts a use of a chunk, once in a request, which has said this of its return.
    pub(super) fn touch(&mut self, name: &ChunkName, hint: Option<Return>) {
        let Some(entry) = self.entries.get_mut(name) else { return };
        entry.hint = hint;
        if !std::mem::replace(&mut entry.is_used, true) {
            self.policy.reused(entry.block());
            self.used.push(*name);
        }
    }

    /// Adds a chunk that a request uses, with what it has said of its return; `false` if one is
    /// there already under its name, which stays.
    ///
    /// # Panics
    /// If all places are taken.
    pub(super) fn insert(
        &mut self,
        chunk: Verified<Arc<C>>,
        record: Arc<Record>,
        (stores, hint): (u64, Option<Return>),
    ) -> bool {
        let (name, parent) = (record.name, record.parent);
        if let Some(known) = self.entries.get_mut(&name) {
            known.stores |= stores;
            return false;
        }
        let place = self.free.pop().invariant("a chunk has memory of the pool, as each here has");
        self.policy.stored(BlockId(place), &info_of(&record));
        let parent_here = self.entries.get(&parent).filter(|of| !is_alone(&of.record));
        if let Some(of) = parent_here.filter(|of| !of.is_used && !is_inner(of, &self.children)) {
            self.policy.held(of.block());
        }
        // Of text that the request has generated, nothing else is known.
        let hint = hint.or_else(|| parent_here.filter(|of| of.is_used)?.hint);
        *self.places.get_mut(to_usize(place)).invariant(PLACE) = Some(name);
        self.children.entry(parent).or_default().insert(name);
        let entry = Entry { chunk, record, stores, uses: 0, hint, place, is_used: true };
        self.entries.insert(name, entry);
        self.used.push(name);
        true
    }

    /// Removes the leaf that the policy gives up first, of those that `may_go`: nearly all, as the
    /// policy takes the others for used once more.
    pub(super) fn evict(&mut self, may_go: impl Fn(&Entry<C>) -> bool) -> Option<Entry<C>> {
        let found = self.first(&may_go).or_else(|| {
            self.report_uses();
            self.first(&may_go)
        })?;
        self.take(&found)
    }

    /// Removes any leaf that `may_go`, whatever the policy says.
    pub(super) fn remove_any(&mut self, may_go: impl Fn(&Entry<C>) -> bool) -> Option<Entry<C>> {
        let is_leaf = |entry: &&Entry<C>| !is_inner(entry, &self.children);
        let mut there = self.places.iter().flatten().filter_map(|name| self.entries.get(name));
        let name = there.find(|entry| is_leaf(entry) && may_go(entry))?.record.name;
        self.remove(&name)
    }

    pub(super) fn remove(&mut self, name: &ChunkName) -> Option<Entry<C>> {
        self.policy.dropped(self.entries.get(name)?.block());
        self.take(name)
    }

    /// Takes from the policy until a chunk may go, and gives back the others.
    fn first(&mut self, may_go: impl Fn(&Entry<C>) -> bool) -> Option<ChunkName> {
        let mut stay = Vec::new();
        let mut found = None;
        while let Some(block) = self.policy.evict() {
            let name = self.places.get(to_usize(block.0)).copied().flatten().invariant(PLACE);
            let entry = self.entries.get(&name).invariant(PLACE);
            if may_go(entry) {
                found = Some(name);
                break;
            }
            stay.push((block, info_of(&entry.record)));
        }
        for (block, info) in stay {
            self.policy.stored(block, &info);
            self.policy.idle(block);
        }
        found
    }

    /// Removes a chunk that the policy has forgotten.
    fn take(&mut self, name: &ChunkName) -> Option<Entry<C>> {
        let entry = self.entries.remove(name)?;
        *self.places.get_mut(to_usize(entry.place)).invariant(PLACE) = None;
        self.free.push(entry.place);
        let parent = &entry.record.parent;
        let children = self.children.get_mut(parent).invariant("a chunk is a child of its parent");
        children.remove(name);
        if children.is_empty() {
            self.children.remove(parent);
            if let Some(parent) = self.entries.get(parent)
                && !parent.is_used
                && !is_alone(&parent.record)
            {
                self.policy.idle(parent.block());
            }
        }
        Some(entry)
    }

    /// Makes the chunks that the request has used candidates, each chain from its end.
    fn report_uses(&mut self) {
        let used = std::mem::take(&mut self.used);
        let is_used = |name: &ChunkName| self.entries.get(name).is_some_and(|of| of.is_used);
        let ends_here = |name: &ChunkName| {
            let mut after = self.children.get(name).into_iter().flatten();
            is_used(name) && !after.any(is_used)
        };
        let ends: Vec<_> = used.iter().filter(|name| ends_here(name)).copied().collect();
        for end in ends {
            let mut name = end;
            while let Some(entry) = self.entries.get_mut(&name).filter(|of| of.is_used) {
                entry.is_used = false;
                let block = entry.block();
                name = entry.record.parent;
                self.policy.hinted(block, entry.hint);
                self.policy.idle(block);
                if is_inner(entry, &self.children) {
                    self.policy.held(block);
                }
            }
        }
    }
}

const PLACE: &str = "each chunk in host memory has a place, which names it";

/// Returns whether a chunk is evicted without regard to the chunks after it.
fn is_alone(record: &Record) -> bool {
    record.root.spec().is_of_states()
}

/// Returns whether a chunk is hidden from the policy because chunks follow it.
fn is_inner<C>(entry: &Entry<C>, children: &Children) -> bool {
    !is_alone(&entry.record) && children.contains_key(&entry.record.name)
}

/// Returns what a policy learns of a chunk.
fn info_of(record: &Record) -> BlockInfo {
    BlockInfo {
        key: key_of(&record.name),
        parent: (record.index > 0).then(|| key_of(&record.parent)),
        index: record.index,
        priority: record.priority,
    }
}

/// Returns a key that differs where names do.
fn key_of(name: &ChunkName) -> BlockKey {
    let (half, _) = name.as_bytes().split_first_chunk().invariant("a name has 32 bytes");
    BlockKey(u128::from_le_bytes(*half))
}
