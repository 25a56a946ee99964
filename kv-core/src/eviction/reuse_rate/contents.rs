//! What is remembered of contents, for some time after their eviction too.
use hashbrown::HashTable;

use crate::eviction::lists::Lists;
use crate::num::to_usize;
use crate::reuse::BlockKey;

/// No block, no content, no cohort.
pub(super) const NONE: u32 = u32::MAX;

/// Contents remembered for each block of the pool, besides those that are in blocks.
const GONE_PER_BLOCK: u32 = 4;

/// Lists of contents: those that are in no block, the longest gone first; numbers not in use; and
/// behind them the candidates of each cohort.
const GONE: u32 = 0;
const FREE: u32 = 1;
const CANDIDATES: u32 = 2;

/// What is known of one content.
#[derive(Debug, Clone, Copy)]
pub(super) struct Content {
    /// Names of the content and of the one before it; a collision spoils a guess, nothing else.
    pub(super) key: u64,
    pub(super) parent: u64,
    /// The block that holds it.
    pub(super) block: u32,
    /// The cohort it ages with while nobody holds it.
    pub(super) cohort: u32,
    pub(super) uses: u8,
    /// How often a longer prompt followed on one that ended here or before.
    pub(super) turn: u8,
    /// Is it found by its key? Not so a copy of what another block holds.
    pub(super) is_found: bool,
    pub(super) is_idle: bool,
}

const UNKNOWN: Content = Content {
    key: 0,
    parent: 0,
    block: NONE,
    cohort: NONE,
    uses: 0,
    turn: 0,
    is_found: false,
    is_idle: false,
};

/// All contents: a fixed number, so that the longest gone is forgotten for a new one.
#[derive(Debug, Clone)]
pub(super) struct Contents {
    all: Vec<Content>,
    lists: Lists,
    by_key: HashTable<u32>,
    /// What each block holds.
    of_block: Vec<u32>,
}

impl Contents {
    pub(super) fn new(num_blocks: u32) -> Self {
        let len = num_blocks.saturating_add(num_blocks.saturating_mul(GONE_PER_BLOCK));
        let mut lists = Lists::new(len, CANDIDATES.saturating_add(len));
        (0..len).for_each(|content| lists.push_back(FREE, content));
        Self {
            all: vec![UNKNOWN; to_usize(len)],
            lists,
            // Twice what is ever in it: what was removed is then cleared away in place.
            by_key: HashTable::with_capacity(to_usize(len).saturating_mul(2)),
            of_block: vec![NONE; to_usize(num_blocks)],
        }
    }

    pub(super) fn len(&self) -> u32 {
        self.lists.num_nodes()
    }

    pub(super) fn get(&self, content: u32) -> Content {
        self.all.get(to_usize(content)).copied().unwrap_or(UNKNOWN)
    }

    pub(super) fn get_mut(&mut self, content: u32) -> Option<&mut Content> {
        self.all.get_mut(to_usize(content))
    }

    /// What a block holds.
    pub(super) fn of_block(&self, block: u32) -> Option<u32> {
        self.of_block.get(to_usize(block)).copied().filter(|content| *content != NONE)
    }

    pub(super) fn find(&self, key: u64) -> Option<u32> {
        self.by_key.find(key, |content| self.get(*content).key == key).copied()
    }

    /// A number for new content, and the cohort that the content forgotten for it was in.
    pub(super) fn allocate(&mut self) -> Option<(u32, Option<u32>)> {
        if let Some(free) = self.lists.pop_front(FREE) {
            return Some((free, None));
        }
        let oldest = self.lists.pop_front(GONE)?;
        let Content { key, cohort, .. } = self.get(oldest);
        if let Ok(entry) = self.by_key.find_entry(key, |content| *content == oldest) {
            entry.remove();
        }
        Some((oldest, (cohort != NONE).then_some(cohort)))
    }

    /// Writes down new content and where it is; under its key unless it is a copy.
    pub(super) fn insert(&mut self, content: u32, new: Content) {
        let Self { all, by_key, of_block, .. } = self;
        if let Some(slot) = all.get_mut(to_usize(content)) {
            *slot = new;
        }
        if let Some(slot) = of_block.get_mut(to_usize(new.block)) {
            *slot = content;
        }
        if new.is_found {
            let key = |content: &u32| all.get(to_usize(*content)).map_or(0, |c| c.key);
            by_key.insert_unique(new.key, content, key);
        }
    }

    /// Content that was gone is in a block again.
    pub(super) fn bring_back(&mut self, content: u32, block: u32) {
        self.lists.remove(content);
        if let Some(slot) = self.get_mut(content) {
            slot.block = block;
            slot.is_idle = false;
        }
        if let Some(slot) = self.of_block.get_mut(to_usize(block)) {
            *slot = content;
        }
    }

    /// The block of a content, no candidate, holds it no longer. A copy is forgotten: the cohort it
    /// leaves is the answer.
    pub(super) fn remove_from_block(&mut self, content: u32) -> Option<u32> {
        let Content { block, is_found, cohort, .. } = self.get(content);
        if let Some(slot) = self.of_block.get_mut(to_usize(block)) {
            *slot = NONE;
        }
        if let Some(slot) = self.get_mut(content) {
            slot.block = NONE;
            slot.is_idle = false;
        }
        self.lists.push_back(if is_found { GONE } else { FREE }, content);
        (!is_found && cohort != NONE).then_some(cohort)
    }

    pub(super) fn is_candidate(&self, content: u32) -> bool {
        self.get(content).is_idle && self.lists.contains(content)
    }

    /// Puts a content behind the candidates of its cohort.
    pub(super) fn push_candidate(&mut self, cohort: u32, content: u32) {
        self.lists.push_back(CANDIDATES.saturating_add(cohort), content);
    }

    /// Takes a candidate from its cohort; says whether it was the last.
    pub(super) fn remove_candidate(&mut self, cohort: u32, content: u32) -> bool {
        self.lists.remove(content);
        self.first_candidate(cohort).is_none()
    }

    pub(super) fn first_candidate(&self, cohort: u32) -> Option<u32> {
        self.lists.front(CANDIDATES.saturating_add(cohort))
    }
}

/// A key cut to what the table stores, never 0; tests have keys that are no hashes.
pub(super) fn short_key(key: BlockKey) -> u64 {
    let [low, high] = [key.0, key.0 >> 64].map(|half| u64::try_from(half & MASK).unwrap_or(0));
    (low ^ high.rotate_left(32)).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1
}

const MASK: u128 = 0xffff_ffff_ffff_ffff;
