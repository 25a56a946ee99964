//! The free list and the reference counts of one group's blocks.
use crate::ids::BlockId;
use crate::num::{to_u32, to_usize};

/// Hands out blocks and counts who holds them; allocate, retain and release are O(1).
///
/// Invariant: a block is on the free list exactly when its count is zero.
#[derive(Debug, Clone)]
pub struct BlockPool {
    free: Vec<BlockId>,
    counts: Vec<u32>,
}

impl BlockPool {
    /// A pool of `num_blocks` free blocks, handed out in ascending order at first.
    pub fn new(num_blocks: u32) -> Self {
        Self {
            free: (0..num_blocks).rev().map(BlockId).collect(),
            counts: vec![0; to_usize(num_blocks)],
        }
    }

    /// Takes a free block, held once; `None` when there is none.
    pub fn allocate(&mut self) -> Option<BlockId> {
        let block = self.free.pop()?;
        if let Some(count) = self.counts.get_mut(to_usize(block.0)) {
            *count = 1;
        }
        Some(block)
    }

    /// Adds a holder to a block that is held.
    ///
    /// # Panics
    /// When nobody holds the block: its content may already be another's.
    pub fn retain(&mut self, block: BlockId) {
        let count = self.counts.get_mut(to_usize(block.0)).filter(|count| **count > 0);
        assert!(count.is_some(), "retain of block {block}, which nobody holds");
        if let Some(count) = count {
            *count = count.saturating_add(1);
        }
    }

    /// Takes a holder away; `true` when it was the last and the block is free again.
    ///
    /// # Panics
    /// When nobody holds the block.
    pub fn release(&mut self, block: BlockId) -> bool {
        let count = self.counts.get_mut(to_usize(block.0)).filter(|count| **count > 0);
        assert!(count.is_some(), "release of block {block}, which nobody holds");
        let freed = count.is_some_and(|count| {
            *count = count.saturating_sub(1);
            *count == 0
        });
        if freed {
            self.free.push(block);
        }
        freed
    }

    /// How many hold `block`; 0 for a free or an unknown one.
    pub fn holders(&self, block: BlockId) -> u32 {
        self.counts.get(to_usize(block.0)).copied().unwrap_or(0)
    }
    /// Blocks in the pool.
    pub fn num_blocks(&self) -> u32 {
        to_u32(self.counts.len())
    }
    /// Blocks nobody holds.
    pub fn num_free(&self) -> u32 {
        to_u32(self.free.len())
    }
    /// Blocks somebody holds.
    pub fn num_used(&self) -> u32 {
        self.num_blocks().saturating_sub(self.num_free())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hands_out_each_block_once() {
        let mut pool = BlockPool::new(3);
        let taken: Vec<_> = std::iter::from_fn(|| pool.allocate()).collect();
        assert_eq!(taken, [BlockId(0), BlockId(1), BlockId(2)]);
        assert_eq!((pool.num_free(), pool.num_used()), (0, 3));
    }

    #[test]
    fn frees_only_after_the_last_holder() {
        let mut pool = BlockPool::new(1);
        let block = pool.allocate().unwrap();
        pool.retain(block);
        assert!(!pool.release(block));
        assert_eq!(pool.holders(block), 1);
        assert!(pool.release(block));
        assert_eq!(pool.num_free(), 1);
    }

    #[test]
    #[should_panic(expected = "nobody holds")]
    fn refuses_a_double_release() {
        let mut pool = BlockPool::new(1);
        let block = pool.allocate().unwrap();
        pool.release(block);
        pool.release(block);
    }

    #[test]
    #[should_panic(expected = "nobody holds")]
    fn refuses_to_retain_a_free_block() {
        BlockPool::new(1).retain(BlockId(0));
    }
}
