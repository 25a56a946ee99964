//! Least recently used first.
use crate::eviction::{BlockInfo, EvictionPolicy, Priority};
use crate::ids::BlockId;
use crate::num::{to_u32, to_usize};

/// No block.
const NONE: u32 = u32::MAX;

/// Least recently used first: a doubly linked list through an array, O(1) everywhere.
#[derive(Debug, Clone)]
pub struct Lru {
    /// Neighbours of each block, and of the list's ends behind the last: `[older, newer]`. A block
    /// outside the list is its own neighbour.
    links: Vec<[u32; 2]>,
}

impl Lru {
    /// For blocks `0..num_blocks`.
    pub fn new(num_blocks: u32) -> Self {
        // The last entry is the list itself: its neighbours are the newest and the oldest.
        Self { links: (0..=num_blocks).map(|n| [n, n]).collect() }
    }

    fn head(&self) -> u32 {
        to_u32(self.links.len().saturating_sub(1))
    }

    fn link(&mut self, older: u32, newer: u32) {
        if let Some(link) = self.links.get_mut(to_usize(older)) {
            link[1] = newer;
        }
        if let Some(link) = self.links.get_mut(to_usize(newer)) {
            link[0] = older;
        }
    }

    fn unlink(&mut self, block: u32) {
        let [older, newer] = self.links.get(to_usize(block)).copied().unwrap_or([NONE; 2]);
        if newer != block && newer != NONE {
            self.link(older, newer);
            self.link(block, block);
        }
    }

    fn contains(&self, block: u32) -> bool {
        self.links.get(to_usize(block)).is_some_and(|[_, newer]| *newer != block)
    }
}

impl EvictionPolicy for Lru {
    fn stored(&mut self, _: BlockId, _: &BlockInfo) {}
    fn reused(&mut self, block: BlockId) {
        self.dropped(block);
    }
    fn idle(&mut self, block: BlockId) {
        let head = self.head();
        if block.0 < head && !self.contains(block.0) {
            let [newest, _] = self.links.last().copied().unwrap_or([head; 2]);
            self.link(newest, block.0);
            self.link(block.0, head);
        }
    }
    fn dropped(&mut self, block: BlockId) {
        if block.0 < self.head() {
            self.unlink(block.0);
        }
    }
    fn set_priority(&mut self, _: BlockId, _: Priority) {}
    fn evict(&mut self) -> Option<BlockId> {
        let head = self.head();
        let [_, oldest] = self.links.last().copied()?;
        (oldest != head).then(|| {
            self.unlink(oldest);
            BlockId(oldest)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gives_up_the_oldest_candidate() {
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
    fn strangers_change_nothing() {
        let mut lru = Lru::new(1);
        lru.idle(BlockId(1));
        lru.dropped(BlockId(1));
        lru.reused(BlockId(9));
        assert_eq!(lru.evict(), None);
        lru.idle(BlockId(0));
        assert_eq!(lru.evict(), Some(BlockId(0)));
    }
}
