//! The router's index: which instances have a block, as far as events have told it.
use std::collections::HashMap;

use super::events::Event;
use super::workload::Block;
use crate::num::{to_u32, to_usize};

/// The instances that have a block, in ascending order. Nearly every block has one.
#[derive(Debug, PartialEq, Eq)]
enum Holders {
    One(u32),
    /// Two or more.
    Many(Vec<u32>),
}

impl Holders {
    fn as_slice(&self) -> &[u32] {
        match self {
            Self::One(instance) => std::slice::from_ref(instance),
            Self::Many(instances) => instances,
        }
    }

    fn insert(&mut self, instance: u32) {
        match self {
            Self::One(one) if *one == instance => {}
            Self::One(one) => {
                let (low, high) = (instance.min(*one), instance.max(*one));
                *self = Self::Many(vec![low, high]);
            }
            Self::Many(instances) => {
                if let Err(place) = instances.binary_search(&instance) {
                    instances.insert(place, instance);
                }
            }
        }
    }

    /// Removes an instance; returns whether none is left.
    fn remove(&mut self, instance: u32) -> bool {
        match self {
            Self::One(one) => *one == instance,
            Self::Many(instances) => {
                if let Ok(place) = instances.binary_search(&instance) {
                    instances.remove(place);
                }
                if let [one] = instances.as_slice() {
                    *self = Self::One(*one);
                }
                false
            }
        }
    }
}

/// Which instances have a block. A block without one takes no memory.
#[derive(Debug, Default)]
pub(super) struct Index {
    holders: HashMap<Block, Holders>,
}

impl Index {
    /// Takes over what happened to an instance.
    pub(super) fn read(&mut self, instance: usize, event: &Event) {
        let instance = to_u32(instance);
        let (stored, gone) = match event {
            Event::Changed { stored, evicted } => (stored.as_slice(), evicted),
            Event::Cleared { lost } => (&[][..], lost),
        };
        for block in gone {
            self.remove(instance, *block);
        }
        for block in stored {
            let new = Holders::One(instance);
            self.holders.entry(*block).or_insert(new).insert(instance);
        }
    }

    fn remove(&mut self, instance: u32, block: Block) {
        if self.holders.get_mut(&block).is_some_and(|holders| holders.remove(instance)) {
            self.holders.remove(&block);
        }
    }

    /// Counts the blocks at the beginning of a prompt that every instance has.
    pub(super) fn find(&self, blocks: &[Block], found: &mut Found) {
        found.clear();
        let mut have = std::mem::take(&mut found.have);
        for (depth, block) in (0..).zip(blocks) {
            let holders = self.holders.get(block).map_or(&[][..], Holders::as_slice);
            if depth == 0 {
                have.extend(holders);
                found.touched.extend(holders);
            } else {
                have.retain(|instance| {
                    let has_it = holders.binary_search(instance).is_ok();
                    if !has_it {
                        found.blocks[to_usize(*instance)] = depth;
                    }
                    has_it
                });
            }
            if have.is_empty() {
                break;
            }
        }
        for instance in have.drain(..) {
            found.blocks[to_usize(instance)] = to_u32(blocks.len());
        }
        found.have = have;
    }
}

/// How many blocks at the beginning of a prompt each instance has.
#[derive(Debug)]
pub(super) struct Found {
    blocks: Vec<u32>,
    /// Instances with a count that may not be 0.
    touched: Vec<u32>,
    /// Instances that have all blocks up to the one that is looked up.
    have: Vec<u32>,
}

impl Found {
    pub(super) fn new(instances: usize) -> Self {
        Self { blocks: vec![0; instances], touched: Vec::new(), have: Vec::new() }
    }

    /// Returns the counts by instance.
    pub(super) fn blocks(&self) -> &[u32] {
        &self.blocks
    }

    fn clear(&mut self) {
        for instance in self.touched.drain(..) {
            self.blocks[to_usize(instance)] = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stored(blocks: &[Block]) -> Event {
        Event::Changed { stored: blocks.to_vec(), evicted: vec![] }
    }

    fn found(index: &Index, blocks: &[Block]) -> Vec<u32> {
        let mut found = Found::new(4);
        index.find(&[90, 91], &mut found);
        index.find(blocks, &mut found);
        found.blocks().to_vec()
    }

    #[test]
    fn every_instance_has_a_count_of_its_own() {
        let mut index = Index::default();
        for (instance, blocks) in [(2, &[1, 2, 3][..]), (0, &[1, 2, 4]), (3, &[1, 9]), (2, &[90])] {
            index.read(instance, &stored(blocks));
        }
        assert_eq!(found(&index, &[1, 2, 3, 5]), [2, 0, 3, 1]);
        assert_eq!(found(&index, &[1, 2, 3]), [2, 0, 3, 1]);
        assert_eq!(found(&index, &[1, 9, 2]), [1, 0, 1, 2]);
        assert_eq!(found(&index, &[5, 1]), [0; 4]);
        assert_eq!(found(&index, &[]), [0; 4]);
    }

    #[test]
    fn what_is_gone_takes_no_memory() {
        let mut index = Index::default();
        for instance in [3, 1, 1, 2] {
            index.read(instance, &stored(&[1, 2]));
        }
        index.read(1, &Event::Changed { stored: vec![5], evicted: vec![2, 7] });
        assert_eq!(found(&index, &[1, 2]), [0, 1, 2, 2]);
        index.read(3, &Event::Cleared { lost: vec![2, 1, 8] });
        index.read(3, &Event::Cleared { lost: vec![1] });
        assert_eq!(found(&index, &[1, 2]), [0, 1, 2, 0]);
        index.read(2, &Event::Cleared { lost: vec![1, 2] });
        assert_eq!(found(&index, &[1, 2]), [0, 1, 0, 0]);
        index.read(1, &Event::Changed { stored: vec![], evicted: vec![1, 5] });
        assert_eq!(index.holders.len(), 0);
    }
}
