//! The cache of an instance: blocks in the order of their last use.
use std::collections::HashMap;

use super::workload::Block;
use crate::num::{to_u32, to_usize};

/// The place of the list's ends: its next place is the oldest block, the one before the newest.
const ENDS: u32 = 0;

/// The blocks that an instance has, of which the least recently used one is evicted. Of a prompt,
/// the last block is used first: it is evicted before those that it follows.
#[derive(Debug)]
pub(super) struct Instance {
    capacity: usize,
    places: HashMap<Block, u32>,
    /// A ring from the oldest block to the newest; [`ENDS`] has no block.
    ring: Vec<Place>,
    /// Places of the ring without a block.
    free: Vec<u32>,
}

#[derive(Debug, Clone, Copy)]
struct Place {
    block: Block,
    older: u32,
    newer: u32,
}

impl Instance {
    /// Makes an empty cache of this many blocks.
    pub(super) fn new(capacity: usize) -> Self {
        let ends = Place { block: 0, older: ENDS, newer: ENDS };
        Self { capacity, places: HashMap::new(), ring: vec![ends], free: Vec::new() }
    }

    /// Serves a prompt of at most as many blocks as the cache has. Returns how many blocks at its
    /// beginning were cached, and appends what is evicted for the others. A prompt that is cached
    /// whole takes a block for a copy of its last one until it ends, if the cache has one more.
    pub(super) fn serve(&mut self, blocks: &[Block], evicted: &mut Vec<Block>) -> usize {
        let cached = blocks.iter().take_while(|block| self.places.contains_key(block)).count();
        // What is found is held: others are evicted.
        for block in blocks.iter().take(cached) {
            self.use_block(*block);
        }
        let taken = (blocks.len() - cached).max(usize::from(cached < self.capacity));
        while self.places.len() + taken > self.capacity {
            let Some(block) = self.evict() else { break };
            evicted.push(block);
        }
        for block in blocks.iter().rev() {
            self.use_block(*block);
        }
        cached
    }

    /// Empties the cache, and returns what it had, in no order.
    pub(super) fn restart(&mut self) -> Vec<Block> {
        let empty = Self::new(self.capacity);
        std::mem::replace(self, empty).places.into_keys().collect()
    }

    /// Makes a block the newest, whether it was cached or not.
    fn use_block(&mut self, block: Block) {
        let known = self.places.get(&block).copied();
        let place = known.or_else(|| self.free.pop()).unwrap_or_else(|| {
            self.ring.push(Place { block, older: ENDS, newer: ENDS });
            to_u32(self.ring.len() - 1)
        });
        match known {
            Some(place) => self.unlink(place),
            None => _ = self.places.insert(block, place),
        }
        let newest = self.ring[to_usize(ENDS)].older;
        self.ring[to_usize(place)] = Place { block, older: newest, newer: ENDS };
        self.ring[to_usize(newest)].newer = place;
        self.ring[to_usize(ENDS)].older = place;
    }

    /// Removes the oldest block; `None` if there is no block.
    fn evict(&mut self) -> Option<Block> {
        let place = self.ring[to_usize(ENDS)].newer;
        if place == ENDS {
            return None;
        }
        self.unlink(place);
        self.free.push(place);
        let block = self.ring[to_usize(place)].block;
        self.places.remove(&block);
        Some(block)
    }

    fn unlink(&mut self, place: u32) {
        let Place { older, newer, .. } = self.ring[to_usize(place)];
        self.ring[to_usize(older)].newer = newer;
        self.ring[to_usize(newer)].older = older;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn serve(instance: &mut Instance, blocks: &[Block]) -> (usize, Vec<Block>) {
        let mut evicted = Vec::new();
        let cached = instance.serve(blocks, &mut evicted);
        (cached, evicted)
    }

    #[test]
    fn the_end_of_the_oldest_prompt_is_evicted_first() {
        let mut instance = Instance::new(4);
        assert_eq!(serve(&mut instance, &[1, 2, 3]), (0, vec![]));
        assert_eq!(serve(&mut instance, &[1, 4]), (1, vec![]));
        assert_eq!(serve(&mut instance, &[5, 6]), (0, vec![3, 2]));
        assert_eq!(serve(&mut instance, &[1, 4, 7]), (2, vec![6]));
        assert_eq!(serve(&mut instance, &[5, 8, 9]), (1, vec![7, 4]));
    }

    #[test]
    fn a_prompt_that_is_cached_whole_takes_a_block_for_its_copy() {
        let mut instance = Instance::new(2);
        assert_eq!(serve(&mut instance, &[1]), (0, vec![]));
        assert_eq!(serve(&mut instance, &[2]), (0, vec![]));
        assert_eq!(serve(&mut instance, &[2]), (1, vec![1]));
        assert_eq!(serve(&mut instance, &[2, 3]), (1, vec![]));
        assert_eq!(serve(&mut instance, &[2, 3]), (2, vec![]), "no block is left for a copy");
    }

    #[test]
    fn a_restart_loses_everything() {
        let mut instance = Instance::new(3);
        serve(&mut instance, &[1, 2, 3]);
        let mut lost = instance.restart();
        lost.sort_unstable();
        assert_eq!(lost, [1, 2, 3]);
        assert_eq!(serve(&mut instance, &[1, 2, 3]), (0, vec![]));
        assert!(Instance::new(3).restart().is_empty());
    }
}
