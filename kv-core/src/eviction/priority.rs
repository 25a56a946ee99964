//! Eviction by priority, and the expiry of priorities.
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use hashbrown::HashMap;

use crate::eviction::lists::Buckets;
use crate::eviction::{BlockInfo, Clock, EvictionPolicy, Priority};
use crate::ids::BlockId;
use crate::num::to_usize;

/// Evicts the lowest level first, the least recently used block inside a level.
///
/// O(1) for blocks whose priority has no duration, O(log n) for the others. A block whose level
/// expires becomes the most recent one of the default level.
#[derive(Debug)]
pub struct ByPriority {
    levels: Levels,
    idle: Buckets,
}

impl ByPriority {
    /// Creates the policy for blocks `0..num_blocks`.
    pub fn new(num_blocks: u32, clock: Arc<dyn Clock>) -> Self {
        Self { levels: Levels::new(num_blocks, clock), idle: Buckets::new(num_blocks) }
    }

    fn push(&mut self, block: u32) {
        self.idle.push_back(self.levels.level(block), block);
        self.levels.begin(block);
    }

    fn remove(&mut self, block: u32) {
        self.idle.remove(block);
        self.levels.end(block);
    }
}

impl EvictionPolicy for ByPriority {
    fn stored(&mut self, block: BlockId, info: &BlockInfo) {
        self.remove(block.0);
        self.levels.set(block.0, info.priority);
    }
    fn reused(&mut self, block: BlockId) {
        self.remove(block.0);
    }
    /// Keeps the duration of the level running.
    fn held(&mut self, block: BlockId) {
        self.idle.hide(block.0);
    }
    fn idle(&mut self, block: BlockId) {
        self.idle.show(self.levels.level(block.0), block.0);
        if !self.idle.contains(block.0) {
            self.push(block.0);
        }
    }
    fn dropped(&mut self, block: BlockId) {
        self.remove(block.0);
    }
    fn set_priority(&mut self, block: BlockId, priority: Priority) {
        let is_idle = self.idle.contains(block.0);
        self.remove(block.0);
        self.levels.set(block.0, priority);
        if is_idle {
            self.push(block.0);
        }
    }
    fn evict(&mut self) -> Option<BlockId> {
        while let Some(block) = self.levels.expired() {
            self.idle.remove(block);
            self.push(block);
        }
        let (_, block) = self.idle.first()?;
        self.remove(block);
        Some(BlockId(block))
    }
}

/// The level of each block, and the expiry of idle blocks' levels.
#[derive(Debug)]
pub(super) struct Levels {
    of_block: Vec<u8>,
    /// Duration of a block's level, if it has one.
    durations: HashMap<u32, Duration>,
    /// Expiry of the level of an idle block; each such block once.
    ends: BTreeSet<(Duration, u32)>,
    /// Expiry of each block in `ends`.
    end: HashMap<u32, Duration>,
    clock: Arc<dyn Clock>,
}

impl Levels {
    pub(super) fn new(num_blocks: u32, clock: Arc<dyn Clock>) -> Self {
        Self {
            of_block: vec![Priority::DEFAULT_LEVEL; to_usize(num_blocks)],
            durations: HashMap::new(),
            ends: BTreeSet::new(),
            end: HashMap::new(),
            clock,
        }
    }

    /// Returns the bytes of host memory, for blocks whose levels do not expire.
    #[cfg(test)]
    pub(super) fn host_bytes(&self) -> usize {
        assert!(self.durations.is_empty(), "these are not counted");
        self.of_block.capacity()
    }

    /// Returns the level of a block, the default one after expiry.
    pub(super) fn level(&self, block: u32) -> u8 {
        self.of_block[to_usize(block)]
    }

    /// Sets a priority; its duration begins with the next [`Self::begin`].
    pub(super) fn set(&mut self, block: u32, priority: Priority) {
        let slot = &mut self.of_block[to_usize(block)];
        *slot = priority.level.min(Priority::MAX_LEVEL);
        // Falling back from the default level to itself changes nothing.
        match priority.duration.filter(|_| *slot != Priority::DEFAULT_LEVEL) {
            Some(duration) => drop(self.durations.insert(block, duration)),
            None if self.durations.is_empty() => {}
            None => drop(self.durations.remove(&block)),
        }
    }

    /// Starts the duration of an idle block's level, if it has one.
    pub(super) fn begin(&mut self, block: u32) {
        self.end(block);
        if self.durations.is_empty() {
            return;
        }
        let lasting = self.durations.get(&block);
        if let Some(until) = lasting.and_then(|lasting| self.clock.now().checked_add(*lasting)) {
            self.end.insert(block, until);
            self.ends.insert((until, block));
        }
    }

    /// Stops it, because the block is no longer idle.
    pub(super) fn end(&mut self, block: u32) {
        if self.ends.is_empty() {
            return;
        }
        if let Some(until) = self.end.remove(&block) {
            self.ends.remove(&(until, block));
        }
    }

    /// Returns a block whose level has expired, and resets it to the default level.
    pub(super) fn expired(&mut self) -> Option<u32> {
        let &(until, block) = self.ends.first()?;
        (until <= self.clock.now()).then(|| {
            self.end(block);
            self.set(block, Priority::default());
            block
        })
    }
}
