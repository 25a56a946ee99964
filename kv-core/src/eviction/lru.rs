//! Least recently used first.
use crate::eviction::lists::Lists;
use crate::eviction::{BlockInfo, EvictionPolicy, Priority};
use crate::ids::BlockId;

/// Evicts the least recently used block: a doubly linked list in an array, O(1) everywhere.
#[derive(Debug, Clone)]
pub struct Lru {
    lists: Lists,
}

impl Lru {
    /// Creates the policy for blocks `0..num_blocks`.
    pub fn new(num_blocks: u32) -> Self {
        Self { lists: Lists::new(num_blocks, 1) }
    }

    /// Returns the bytes of host memory.
    #[cfg(test)]
    pub(crate) fn host_bytes(&self) -> usize {
        self.lists.host_bytes()
    }
}

impl EvictionPolicy for Lru {
    fn stored(&mut self, block: BlockId, _: &BlockInfo) {
        self.lists.remove(block.0);
    }
    fn reused(&mut self, block: BlockId) {
        self.lists.remove(block.0);
    }
    fn held(&mut self, block: BlockId) {
        self.lists.hide(block.0);
    }
    fn idle(&mut self, block: BlockId) {
        self.lists.show(block.0);
        if !self.lists.contains(block.0) {
            self.lists.push_back(0, block.0);
        }
    }
    fn dropped(&mut self, block: BlockId) {
        self.lists.remove(block.0);
    }
    fn set_priority(&mut self, _: BlockId, _: Priority) {}
    fn evict(&mut self) -> Option<BlockId> {
        self.lists.pop_front(0).map(BlockId)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn evicts_the_oldest_candidate() {
        let mut lru = Lru::new(4);
        for block in [2, 0, 3] {
            lru.idle(BlockId(block));
        }
        lru.idle(BlockId(2)); // is in already and keeps its place
        lru.reused(BlockId(0));
        assert_eq!(lru.evict(), Some(BlockId(2)));
        lru.idle(BlockId(2));
        assert_eq!(
            [lru.evict(), lru.evict(), lru.evict()],
            [Some(BlockId(3)), Some(BlockId(2)), None]
        );
    }

    #[test]
    fn what_is_no_candidate_can_be_removed() {
        let mut lru = Lru::new(1);
        lru.dropped(BlockId(0));
        lru.reused(BlockId(0));
        assert_eq!(lru.evict(), None);
        lru.idle(BlockId(0));
        assert_eq!(lru.evict(), Some(BlockId(0)));
    }

    #[test]
    #[should_panic(expected = "index out of bounds")]
    fn a_block_past_the_pool_is_a_bug() {
        Lru::new(1).idle(BlockId(1));
    }
}
