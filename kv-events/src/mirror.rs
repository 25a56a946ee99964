//! The publisher's own copy of what can be reused, kept from events: what snapshots are made of.
use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use kv_core::GroupId;
use kv_core::events::{EventKind, Snapshot, StoredBlock};
use kv_core::reuse::BlockKey;

use crate::wire::{Batches, Medium, Namespace, Run, SALT_BYTES_MAX, tier_bit};

/// Which blocks are published: the one place that decides it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Published {
    /// The one group; `None` publishes nothing.
    pub(crate) group: Option<GroupId>,
    /// Tokens of its blocks.
    pub(crate) block_size: u32,
    pub(crate) salted: bool,
    pub(crate) adapters: bool,
}

impl Published {
    /// Returns whether a reader that compares tokens, salts and adapters finds the right block.
    fn takes(self, block: &StoredBlock) -> bool {
        let is_whole = u32::try_from(block.tokens.len()) == Ok(self.block_size);
        Some(block.group) == self.group
            && is_whole
            && (block.salt.is_empty() || self.salted && block.salt.len() <= SALT_BYTES_MAX)
            && (block.adapter.is_none() || self.adapters)
            // An image in a block changes its key, and readers know nothing of it.
            && block.parent.child(&block.tokens, &[]) == block.key
    }
}

/// Contents by key, each with the tiers that have it.
#[derive(Debug)]
pub(crate) struct Mirror {
    published: Published,
    blocks: HashMap<BlockKey, Entry>,
    /// Blocks by the block before, whether that is there or not.
    children: HashMap<BlockKey, Vec<BlockKey>>,
    namespaces: HashSet<Arc<Namespace>>,
    /// Blocks that readers were told of.
    told: usize,
}

#[derive(Debug)]
struct Entry {
    /// `None` begins a prompt.
    parent: Option<BlockKey>,
    tokens: Box<[u32]>,
    namespace: Option<Arc<Namespace>>,
    /// Bits of the tiers that have it.
    tiers: u8,
    /// Bits of the tiers of those media on which readers know it. They take no block whose parent
    /// they do not know.
    told: u8,
}

impl Entry {
    /// Returns the tiers of all media that have it.
    fn all_of_media(&self) -> u8 {
        media_of(self.tiers).fold(0, |tiers, medium| tiers | medium.tiers())
    }

    fn run(&self, key: BlockKey, medium: Medium) -> Run {
        Run {
            medium,
            namespace: self.namespace.clone(),
            parent: self.parent,
            keys: vec![key],
            tokens: self.tokens.to_vec(),
        }
    }
}

/// Returns the media of a set of tiers.
fn media_of(tiers: u8) -> impl Iterator<Item = Medium> {
    Medium::ALL.into_iter().filter(move |medium| medium.tiers() & tiers != 0)
}

impl Mirror {
    pub(crate) fn new(published: Published) -> Self {
        Self {
            published,
            blocks: HashMap::new(),
            children: HashMap::new(),
            namespaces: HashSet::new(),
            told: 0,
        }
    }

    /// Returns the blocks that readers were told of.
    pub(crate) fn told(&self) -> usize {
        self.told
    }

    /// Applies an event, and appends what readers must be told.
    pub(crate) fn apply(&mut self, kind: EventKind, out: &mut Batches) {
        match kind {
            EventKind::Stored(block) => self.store(block, Some(out)),
            EventKind::Removed { group, key, tier } => {
                if Some(group) == self.published.group
                    && let Some(bit) = tier_bit(tier)
                {
                    self.remove(key, bit, out);
                }
            }
            EventKind::Cleared { tier } => {
                if let Some(bit) = tier_bit(tier) {
                    self.clear(bit, out);
                }
            }
            // Priorities are nothing that readers know; `Lost` is for the queue.
            _ => {}
        }
    }

    /// Forgets everything for what a snapshot has. Nobody is told: [`Self::snapshot`] does it.
    pub(crate) fn reset(&mut self, snapshot: Snapshot) {
        *self = Self::new(self.published);
        for block in snapshot.blocks {
            self.store(block, None);
        }
    }

    /// Appends everything, parents before children, after the event that clears readers.
    pub(crate) fn snapshot(&mut self, out: &mut Batches) {
        out.cleared();
        self.told = 0;
        for entry in self.blocks.values_mut() {
            entry.told = 0;
        }
        let mut first: Vec<BlockKey> = self
            .blocks
            .iter()
            .filter(|(_, entry)| entry.parent.is_none())
            .map(|(key, _)| *key)
            .collect();
        // Any order is right; one that depends on the contents alone is easier to compare.
        first.sort_unstable();
        for key in first {
            self.tell(key, out);
        }
    }

    fn store(&mut self, block: StoredBlock, out: Option<&mut Batches>) {
        let Some(bit) = tier_bit(block.tier).filter(|_| self.published.takes(&block)) else {
            return;
        };
        let key = block.key;
        let parent = (block.index > 0).then_some(block.parent);
        let is_anchored =
            parent.is_none_or(|parent| self.blocks.get(&parent).is_some_and(|of| of.told != 0));
        let out = out.filter(|_| is_anchored);
        if let Some(entry) = self.blocks.get_mut(&key) {
            entry.tiers |= bit;
            let Some(out) = out else { return };
            if entry.told == 0 {
                self.tell(key, out);
                return;
            }
            for medium in media_of(bit & !entry.told) {
                entry.told |= medium.tiers();
                out.stored(entry.run(key, medium));
            }
            return;
        }
        let namespace = self.namespace(block.salt, block.adapter);
        if let Some(parent) = parent {
            self.children.entry(parent).or_default().push(key);
        }
        let entry = Entry { parent, tokens: block.tokens, namespace, tiers: bit, told: 0 };
        self.blocks.insert(key, entry);
        if let Some(out) = out {
            self.tell(key, out);
        }
    }

    /// Returns the shared form of a salt and an adapter; `None` without either.
    fn namespace(&mut self, salt: Box<[u8]>, adapter: Option<u64>) -> Option<Arc<Namespace>> {
        if salt.is_empty() && adapter.is_none() {
            return None;
        }
        let namespace = Namespace { salt, adapter };
        if let Some(known) = self.namespaces.get(&namespace) {
            return Some(Arc::clone(known));
        }
        // Those of prompts that are gone go when the set would grow.
        if self.namespaces.len() == self.namespaces.capacity() {
            self.namespaces.retain(|known| Arc::strong_count(known) > 1);
        }
        let namespace = Arc::new(namespace);
        self.namespaces.insert(Arc::clone(&namespace));
        Some(namespace)
    }

    /// Tells readers of a block and of all blocks after it: a reader that lost a parent may have
    /// lost its children too.
    fn tell(&mut self, key: BlockKey, out: &mut Batches) {
        let mut rest = vec![key];
        // Consecutive blocks on the same tiers.
        let mut chain = Vec::new();
        let mut chain_tiers = 0;
        while let Some(key) = rest.pop() {
            let Some(entry) = self.blocks.get_mut(&key) else { continue };
            self.told += usize::from(entry.told == 0);
            entry.told = entry.all_of_media();
            let goes_on = entry.parent.as_ref() == chain.last() && entry.tiers == chain_tiers;
            chain_tiers = entry.tiers;
            if !goes_on {
                self.tell_chain(&chain, out);
                chain.clear();
            }
            chain.push(key);
            rest.extend(self.children.get(&key).into_iter().flatten());
        }
        self.tell_chain(&chain, out);
    }

    /// Appends blocks of the same tiers, medium by medium.
    fn tell_chain(&self, chain: &[BlockKey], out: &mut Batches) {
        for medium in Medium::ALL {
            let entries = chain.iter().filter_map(|key| Some((*key, self.blocks.get(key)?)));
            for (key, entry) in entries.filter(|(_, entry)| medium.tiers() & entry.tiers != 0) {
                out.stored(entry.run(key, medium));
            }
        }
    }

    fn remove(&mut self, key: BlockKey, bit: u8, out: &mut Batches) {
        let Some(entry) = self.blocks.get_mut(&key) else { return };
        entry.tiers &= !bit;
        for medium in media_of(entry.told & !entry.all_of_media()) {
            entry.told &= !medium.tiers();
            out.removed(medium, key);
            self.told -= usize::from(entry.told == 0);
        }
        if entry.tiers == 0 {
            self.forget(key);
        }
    }

    fn forget(&mut self, key: BlockKey) {
        let Some(entry) = self.blocks.remove(&key) else { return };
        let Some(parent) = entry.parent else { return };
        if let Some(children) = self.children.get_mut(&parent) {
            children.retain(|child| *child != key);
            if children.is_empty() {
                self.children.remove(&parent);
            }
        }
    }

    fn clear(&mut self, bit: u8, out: &mut Batches) {
        let keeps = self.blocks.values().any(|entry| entry.told & (entry.tiers & !bit) != 0);
        let here = self.blocks.iter().filter(|(_, entry)| entry.tiers & bit != 0);
        let keys: Vec<_> = here.map(|(key, _)| *key).collect();
        if keeps {
            for key in keys {
                self.remove(key, bit, out);
            }
        } else {
            // Of what readers know nothing remains.
            let mut unsaid = Batches::default();
            for key in keys {
                self.remove(key, bit, &mut unsaid);
            }
            out.cleared();
        }
    }
}
