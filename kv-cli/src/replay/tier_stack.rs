//! Bounded tiers below a device: which blocks each one has, gets and evicts.
//!
//! A block is a number here, and stands for a chunk. Nothing is known of traces, bytes or time.
use kv::BlockId;
use kv::eviction::{BlockInfo, EvictionPolicy};
use kv::tier::policy::{ChunkEvent, ChunkFacts, WriteDecision, WriteRule};

use crate::num::{to_u32, to_usize};

/// No slot.
const NONE: u32 = u32::MAX;

/// A block of a request.
#[derive(Debug, Clone, Copy)]
pub(super) struct StackBlock {
    pub(super) number: u32,
    pub(super) info: BlockInfo,
    /// Whether the device had it when the request came.
    pub(super) is_on_device: bool,
}

/// Tiers from the fastest to the slowest, each with a policy for its slots.
///
/// A request holds its blocks in every tier, so that none is evicted for another one of it, and
/// releases them tail first: the last blocks of a prompt are evicted before its first ones, as in
/// the pool of a device. A use counts in every tier that has the block.
pub(super) struct TierStack {
    tiers: Vec<BoundedTier>,
    /// For every block number.
    seen: Vec<Seen>,
}

/// What is known of a block, whether a tier has it or not.
#[derive(Debug, Clone, Copy, Default)]
struct Seen {
    uses: u32,
    /// Tokens of the longest prompt with it.
    prompt_tokens: u32,
}

/// One tier.
pub(super) struct BoundedTier {
    rule: WriteRule,
    capacity: u32,
    /// The slot of every block number.
    slots: Vec<u32>,
    /// The block in every slot that was filled so far.
    blocks: Vec<(u32, BlockInfo)>,
    policy: Box<dyn EvictionPolicy>,
    written: u64,
    evictions: u64,
}

impl TierStack {
    /// Makes empty tiers for blocks `0..num_blocks`.
    pub(super) fn new(tiers: Vec<BoundedTier>, num_blocks: u32) -> Self {
        let mut stack = Self { tiers, seen: vec![Seen::default(); to_usize(num_blocks)] };
        for tier in &mut stack.tiers {
            tier.slots = vec![NONE; to_usize(num_blocks)];
        }
        stack
    }

    pub(super) fn tiers(&self) -> &[BoundedTier] {
        &self.tiers
    }

    /// Returns the fastest tier that has a block.
    pub(super) fn find(&self, number: u32) -> Option<usize> {
        self.tiers.iter().position(|tier| tier.contains(number))
    }

    /// Uses the blocks of a prompt, which are all on the device afterwards, and offers each to
    /// every tier.
    pub(super) fn request(&mut self, blocks: &[StackBlock], prompt_tokens: u32) {
        for tier in &mut self.tiers {
            tier.policy.tick();
            for block in blocks {
                tier.hold(block.number);
            }
        }
        for block in blocks {
            let seen = &mut self.seen[to_usize(block.number)];
            seen.uses += 1;
            seen.prompt_tokens = seen.prompt_tokens.max(prompt_tokens);
            let event = if block.is_on_device { ChunkEvent::Reused } else { ChunkEvent::Published };
            for tier in 0..self.tiers.len() {
                self.offer(tier, event, block.number, block.info);
            }
        }
        for tier in &mut self.tiers {
            for block in blocks.iter().rev() {
                tier.release(block.number);
            }
        }
    }

    /// Offers a block to a tier, and what the tier evicts for it to the tier below.
    fn offer(&mut self, tier: usize, event: ChunkEvent, number: u32, info: BlockInfo) {
        let mut offered = Some((event, number, info));
        for tier in self.tiers.iter_mut().skip(tier) {
            let Some((event, number, info)) = offered else { return };
            let seen = self.seen[to_usize(number)];
            let facts = ChunkFacts {
                is_present: tier.contains(number),
                uses: seen.uses,
                prompt_tokens: seen.prompt_tokens,
                ..ChunkFacts::default()
            };
            if tier.rule.decide(event, &facts) != WriteDecision::Write {
                return;
            }
            let evicted = tier.insert(number, info);
            if event == ChunkEvent::Left {
                tier.release(number);
            }
            offered = evicted.map(|(number, info)| (ChunkEvent::Left, number, info));
        }
    }
}

impl BoundedTier {
    /// Makes a tier of `capacity` blocks; `policy` must be made for this number of slots.
    pub(super) fn new(capacity: u32, rule: WriteRule, policy: Box<dyn EvictionPolicy>) -> Self {
        let (slots, blocks) = (Vec::new(), Vec::new());
        Self { rule, capacity, slots, blocks, policy, written: 0, evictions: 0 }
    }

    /// Returns the number of blocks written so far.
    pub(super) fn written(&self) -> u64 {
        self.written
    }

    /// Returns the number of blocks evicted so far.
    pub(super) fn evictions(&self) -> u64 {
        self.evictions
    }

    fn slot(&self, number: u32) -> Option<BlockId> {
        self.slots.get(to_usize(number)).filter(|slot| **slot != NONE).map(|slot| BlockId(*slot))
    }

    fn contains(&self, number: u32) -> bool {
        self.slot(number).is_some()
    }

    fn hold(&mut self, number: u32) {
        if let Some(slot) = self.slot(number) {
            self.policy.reused(slot);
        }
    }

    fn release(&mut self, number: u32) {
        if let Some(slot) = self.slot(number) {
            self.policy.idle(slot);
        }
    }

    /// Writes a block, which is held then, and returns the block that was evicted for it. Does
    /// nothing if the request holds every slot.
    fn insert(&mut self, number: u32, info: BlockInfo) -> Option<(u32, BlockInfo)> {
        let (slot, evicted) = if to_u32(self.blocks.len()) < self.capacity {
            self.blocks.push((number, info));
            (BlockId(to_u32(self.blocks.len()) - 1), None)
        } else {
            let slot = self.policy.evict()?;
            let block = &mut self.blocks[to_usize(slot.0)];
            (slot, Some(std::mem::replace(block, (number, info))))
        };
        if let Some((old, _)) = evicted {
            self.evictions += 1;
            self.set_slot(old, NONE);
        }
        self.set_slot(number, slot.0);
        self.policy.stored(slot, &info);
        self.written += 1;
        evicted
    }

    fn set_slot(&mut self, number: u32, slot: u32) {
        self.slots[to_usize(number)] = slot;
    }
}

#[cfg(test)]
mod tests;
