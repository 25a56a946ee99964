//! Statistics of contents, kept for some time after their eviction.
//!
//! They cost host memory, for five contents per block. So contents have numbered slots, one for
//! each block and then a ring of evicted ones, and each field is an array of the narrowest possible
//! type.
use crate::eviction::reuse_rate::rates::CELLS_MAX;
#[cfg(test)]
use crate::num::list_bytes;
use crate::num::{to_u32, to_u64, to_usize};
use crate::reuse::BlockKey;

/// Evicted contents remembered per block of the pool, and at least.
const GONE_PER_BLOCK: u32 = 4;
const GONE_MIN: u32 = 32_768;

/// No slot, or the end of a chain.
const NONE: u32 = u32::MAX;
/// The next slot of one in no chain.
const UNLINKED: u32 = u32::MAX - 1;

/// Bits of a request's number that are kept: of content older than that, the age is wrong.
const SINCE_BITS: u32 = 20;
pub(super) const SINCE_MASK: u32 = (1 << SINCE_BITS) - 1;

/// What a content is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Status {
    /// It has aged in this cell since this request.
    Idle { cell: u16, since: u32 },
    /// It is used by a request that found `run` blocks unknown up to it, 0 if it is known itself,
    /// and whose last known block had this gap: see [`gap`](super::features::gap).
    Used { run: u8, gap: u8 },
}

/// Statistics of a content, as far as they are told apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Content {
    /// Requests that used it, to 1023.
    pub(super) uses: u16,
    /// Times that a longer prompt continued one that ended here or before, to 7.
    pub(super) turn: u8,
    /// Different contents that followed it, to 3.
    pub(super) continuations: u8,
    pub(super) status: Status,
}

impl Content {
    fn pack(self) -> (u16, u32) {
        let [turn, continuations] = [self.turn.min(7), self.continuations.min(3)].map(u16::from);
        let status = match self.status {
            Status::Idle { cell, since } => u32::from(cell) << SINCE_BITS | (since & SINCE_MASK),
            Status::Used { run, gap } => {
                CELLS_MAX << SINCE_BITS | u32::from_le_bytes([gap, run, 0, 0])
            }
        };
        (self.uses.min(1023) | turn << 10 | continuations << 13, status)
    }

    fn unpack(counts: u16, status: u32) -> Self {
        let small = |shift: u32, mask: u16| u8::try_from(counts >> shift & mask).unwrap_or(0);
        let [gap, run, ..] = status.to_le_bytes();
        let status = match u16::try_from(status >> SINCE_BITS) {
            Ok(cell) if u32::from(cell) < CELLS_MAX => {
                Status::Idle { cell, since: status & SINCE_MASK }
            }
            _ => Status::Used { run, gap },
        };
        Self { uses: counts & 1023, turn: small(10, 7), continuations: small(13, 3), status }
    }
}

/// All contents: a fixed number, so that the one evicted longest ago is forgotten for a new one.
#[derive(Debug, Clone)]
pub(super) struct Contents {
    /// By slot: half of the content's key. A collision makes an estimate worse, nothing else.
    key: Vec<u32>,
    status: Vec<u32>,
    /// Packed counts; 0 for an empty slot.
    counts: Vec<u16>,
    /// The next slot in the chain of a bucket.
    next: Vec<u32>,
    /// First slot of each hash bucket.
    buckets: Vec<u32>,
    /// The place in the ring for what is evicted next.
    hand: u32,
    /// By block: the key of the content before its own, 0 for none, and the cell by which its own
    /// is ranked while idle.
    parent: Vec<u32>,
    rank: Vec<u16>,
}

impl Contents {
    pub(super) fn new(num_blocks: u32) -> Self {
        // Saturating, because a slot has a number below those of `NONE` and `UNLINKED`.
        let gone = num_blocks.saturating_mul(GONE_PER_BLOCK).max(GONE_MIN);
        let num_slots = to_usize(num_blocks.saturating_add(gone).min(UNLINKED - 1));
        Self {
            key: vec![0; num_slots],
            status: vec![0; num_slots],
            counts: vec![0; num_slots],
            next: vec![UNLINKED; num_slots],
            buckets: vec![NONE; num_slots / 10 * 4],
            hand: num_blocks,
            parent: vec![0; to_usize(num_blocks)],
            rank: vec![0; to_usize(num_blocks)],
        }
    }

    /// Returns the bytes of host memory.
    #[cfg(test)]
    pub(super) fn host_bytes(&self) -> usize {
        let wide = [&self.key, &self.status, &self.next, &self.buckets, &self.parent];
        let narrow = [&self.counts, &self.rank];
        wide.map(list_bytes).iter().chain(&narrow.map(list_bytes)).sum()
    }

    /// Returns the content of a slot.
    pub(super) fn get(&self, slot: u32) -> Option<Content> {
        let counts = self.counts[to_usize(slot)];
        (counts > 0).then(|| Content::unpack(counts, self.status[to_usize(slot)]))
    }
    /// Changes the content of a slot that has one.
    pub(super) fn set(&mut self, slot: u32, content: Content) {
        (self.counts[to_usize(slot)], self.status[to_usize(slot)]) = content.pack();
    }
    /// Returns whether a slot is that of a block.
    pub(super) fn is_held(&self, slot: u32) -> bool {
        slot < to_u32(self.rank.len())
    }
    /// Returns the key of a block's content, and of the content before it.
    pub(super) fn keys(&self, block: u32) -> [u32; 2] {
        [self.key[to_usize(block)], self.parent[to_usize(block)]]
    }
    /// Returns the cell by which a block's content is ranked while idle.
    pub(super) fn rank_mut(&mut self, block: u32) -> &mut u16 {
        &mut self.rank[to_usize(block)]
    }

    /// Finds the content of this key.
    pub(super) fn find(&self, key: u32) -> Option<u32> {
        let mut slot = self.buckets[self.bucket(key)];
        while slot != NONE && self.key[to_usize(slot)] != key {
            slot = self.next[to_usize(slot)];
        }
        (slot != NONE).then_some(slot)
    }

    /// Gives an empty block content, which can be found unless other content has its key.
    pub(super) fn insert(&mut self, block: u32, [key, parent]: [u32; 2], content: Content) {
        let is_known = self.find(key).is_some();
        self.key[to_usize(block)] = key;
        self.parent[to_usize(block)] = parent;
        self.set(block, content);
        if !is_known {
            self.link(block);
        }
    }

    /// Removes the content of a block and remembers it. Returns the content that is forgotten: the
    /// one evicted longest ago, or the removed one if another has its key.
    pub(super) fn lose(&mut self, block: u32) -> Option<Content> {
        let lost = self.get(block)?;
        if !self.remove(block) {
            return Some(lost);
        }
        let to = self.hand;
        let forgotten = self.get(to);
        self.remove(to);
        self.key[to_usize(to)] = self.key[to_usize(block)];
        self.set(to, lost);
        self.link(to);
        let end = to_usize(to) + 1 == self.key.len();
        self.hand = if end { to_u32(self.rank.len()) } else { to + 1 };
        forgotten
    }

    /// Empties a slot; returns whether its content could be found.
    pub(super) fn remove(&mut self, slot: u32) -> bool {
        self.counts[to_usize(slot)] = 0;
        let after = std::mem::replace(&mut self.next[to_usize(slot)], UNLINKED);
        if after == UNLINKED {
            return false;
        }
        let bucket = self.bucket(self.key[to_usize(slot)]);
        let mut before = self.buckets[bucket];
        if before == slot {
            self.buckets[bucket] = after;
            return true;
        }
        while self.next[to_usize(before)] != slot {
            before = self.next[to_usize(before)];
        }
        self.next[to_usize(before)] = after;
        true
    }

    fn link(&mut self, slot: u32) {
        let bucket = self.bucket(self.key[to_usize(slot)]);
        self.next[to_usize(slot)] = std::mem::replace(&mut self.buckets[bucket], slot);
    }

    fn bucket(&self, key: u32) -> usize {
        usize::try_from((u64::from(key) * to_u64(self.buckets.len())) >> 32).unwrap_or(0)
    }
}

/// Shortens a key to 32 bits, never 0; tests use keys that are not hashes.
pub(super) fn short_key(key: BlockKey) -> u32 {
    let folded = u64::try_from((key.0 ^ key.0 >> 64) & u128::from(u64::MAX)).unwrap_or(0);
    let mixed = folded.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
    u32::try_from(mixed).unwrap_or(0) | 1
}
