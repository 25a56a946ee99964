//! The chunks in host memory: by name, least recently used leaves first.
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use crate::chunk::Verified;
use crate::name::ChunkName;
use crate::record::Record;

/// The chunks of one group in host memory.
///
/// A chunk is useless without the chunks before it, so that only leaves are evicted: chunks after
/// which no chunk follows here. A recurrent state needs no state before it: each is a leaf. The
/// order of use decides between leaves.
#[derive(Debug)]
pub(super) struct HostIndex<C> {
    entries: HashMap<ChunkName, Entry<C>>,
    /// Chunks here by the name of the chunk before.
    children: HashMap<ChunkName, HashSet<ChunkName>>,
    /// Leaves, least recently used first.
    leaves: BTreeMap<u64, ChunkName>,
    now: u64,
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
    used_at: u64,
}

impl<C> Default for HostIndex<C> {
    fn default() -> Self {
        Self { entries: HashMap::new(), children: HashMap::new(), leaves: BTreeMap::new(), now: 0 }
    }
}

impl<C> HostIndex<C> {
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

    /// Makes a chunk the most recently used one.
    pub(super) fn touch(&mut self, name: &ChunkName) {
        let Some(entry) = self.entries.get_mut(name) else { return };
        self.now += 1;
        let was_leaf = self.leaves.remove(&entry.used_at).is_some();
        entry.used_at = self.now;
        if was_leaf {
            self.leaves.insert(self.now, *name);
        }
    }

    /// Adds a chunk; `false` if one is there already under its name, which stays.
    pub(super) fn insert(
        &mut self,
        chunk: Verified<Arc<C>>,
        record: Arc<Record>,
        stores: u64,
    ) -> bool {
        let (name, parent) = (record.name, record.parent);
        let is_alone = record.root.spec().is_of_states();
        if let Some(known) = self.entries.get_mut(&name) {
            known.stores |= stores;
            return false;
        }
        self.now += 1;
        let entry = Entry { chunk, record, stores, uses: 0, used_at: self.now };
        self.entries.insert(name, entry);
        if is_alone || !self.children.contains_key(&name) {
            self.leaves.insert(self.now, name);
        }
        self.children.entry(parent).or_default().insert(name);
        if let Some(parent) = self.entries.get(&parent).filter(|_| !is_alone) {
            self.leaves.remove(&parent.used_at);
        }
        true
    }

    /// Removes the least recently used leaf of those that `may_go`.
    pub(super) fn evict(&mut self, may_go: impl Fn(&Entry<C>) -> bool) -> Option<Entry<C>> {
        let name = self.leaves.values().find(|name| self.entries.get(name).is_some_and(&may_go));
        let name = *name?;
        self.remove(&name)
    }

    pub(super) fn remove(&mut self, name: &ChunkName) -> Option<Entry<C>> {
        let entry = self.entries.remove(name)?;
        self.leaves.remove(&entry.used_at);
        let parent = &entry.record.parent;
        if let Some(children) = self.children.get_mut(parent) {
            children.remove(name);
            if children.is_empty() {
                self.children.remove(parent);
                if let Some(known) = self.entries.get(parent) {
                    self.leaves.insert(known.used_at, *parent);
                }
            }
        }
        Some(entry)
    }
}
