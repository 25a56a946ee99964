//! Least frequently used first.
use crate::eviction::lists::Buckets;
use crate::eviction::{BlockInfo, EvictionPolicy, Priority};
use crate::ids::BlockId;
use crate::num::to_usize;

/// Evicts the least frequently used block, the longest idle of equals; O(1) everywhere.
///
/// Uses are counted while the content stays, up to 255. Content that was popular once is kept
/// before anything new: this is the textbook policy, for comparisons.
#[derive(Debug, Clone)]
pub struct Lfu {
    candidates: Buckets,
    uses: Vec<u8>,
}

impl Lfu {
    /// Creates the policy for blocks `0..num_blocks`.
    pub fn new(num_blocks: u32) -> Self {
        Self { candidates: Buckets::new(num_blocks), uses: vec![0; to_usize(num_blocks)] }
    }
}

impl EvictionPolicy for Lfu {
    fn stored(&mut self, block: BlockId, _: &BlockInfo) {
        self.candidates.remove(block.0);
        self.uses[to_usize(block.0)] = 1;
    }
    fn reused(&mut self, block: BlockId) {
        self.candidates.remove(block.0);
        let uses = &mut self.uses[to_usize(block.0)];
        *uses = uses.saturating_add(1);
    }
    fn held(&mut self, block: BlockId) {
        self.candidates.hide(block.0);
    }
    fn idle(&mut self, block: BlockId) {
        let uses = self.uses[to_usize(block.0)];
        self.candidates.show(uses, block.0);
        self.candidates.push_back(uses, block.0);
    }
    fn dropped(&mut self, block: BlockId) {
        self.candidates.remove(block.0);
    }
    fn set_priority(&mut self, _: BlockId, _: Priority) {}
    fn evict(&mut self) -> Option<BlockId> {
        let (_, block) = self.candidates.first()?;
        self.candidates.remove(block);
        Some(BlockId(block))
    }
}
