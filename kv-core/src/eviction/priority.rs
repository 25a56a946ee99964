//! Lowest priority first, and how long a priority lasts.
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use crate::eviction::lists::Buckets;
use crate::eviction::{BlockInfo, Clock, EvictionPolicy, Priority};
use crate::ids::BlockId;
use crate::num::to_usize;

/// Lowest level first, least recently used first inside a level.
///
/// O(1) for blocks whose priority has no duration, O(log n) for the others. A level that ran out
/// makes the block the youngest of the default level.
#[derive(Debug)]
pub struct ByPriority {
    levels: Levels,
}

impl ByPriority {
    /// For blocks `0..num_blocks`.
    pub fn new(num_blocks: u32, clock: Arc<dyn Clock>) -> Self {
        Self { levels: Levels::new(num_blocks, clock) }
    }
}

impl EvictionPolicy for ByPriority {
    fn stored(&mut self, block: BlockId, info: &BlockInfo) {
        self.levels.remove(block.0);
        self.levels.set(block.0, info.priority);
    }
    fn reused(&mut self, block: BlockId) {
        self.levels.remove(block.0);
    }
    fn idle(&mut self, block: BlockId) {
        self.levels.push(block.0);
    }
    fn dropped(&mut self, block: BlockId) {
        self.levels.remove(block.0);
    }
    fn set_priority(&mut self, block: BlockId, priority: Priority) {
        self.levels.set(block.0, priority);
        if self.levels.remove(block.0) {
            self.levels.push(block.0);
        }
    }
    fn evict(&mut self) -> Option<BlockId> {
        while let Some(block) = self.levels.expired() {
            self.levels.push(block);
        }
        let (_, block) = self.levels.first()?;
        self.levels.remove(block);
        Some(BlockId(block))
    }
}

/// Idle blocks by level, and when their levels run out.
#[derive(Debug)]
pub(super) struct Levels {
    idle: Buckets,
    priority: Vec<Priority>,
    /// When the level of an idle block ends; holds idle blocks only, each at most once.
    ends: BTreeSet<(Duration, u32)>,
    /// The end of each block that is in `ends`.
    end: Vec<Duration>,
    clock: Arc<dyn Clock>,
}

impl Levels {
    pub(super) fn new(num_blocks: u32, clock: Arc<dyn Clock>) -> Self {
        Self {
            idle: Buckets::new(num_blocks),
            priority: vec![Priority::default(); to_usize(num_blocks)],
            ends: BTreeSet::new(),
            end: vec![Duration::MAX; to_usize(num_blocks)],
            clock,
        }
    }

    /// The priority a block has, or had until it expired.
    pub(super) fn priority(&self, block: u32) -> Priority {
        self.priority.get(to_usize(block)).copied().unwrap_or_default()
    }

    /// Notes a priority; it counts from the next [`Self::push`].
    pub(super) fn set(&mut self, block: u32, priority: Priority) {
        if let Some(slot) = self.priority.get_mut(to_usize(block)) {
            *slot = Priority { level: priority.level.min(Priority::MAX_LEVEL), ..priority };
        }
    }

    /// Puts a block into its level, from now on for as long as its priority lasts.
    pub(super) fn push(&mut self, block: u32) {
        let Priority { level, duration } = self.priority(block);
        if self.idle.contains(block) {
            return;
        }
        self.idle.push_back(level, block);
        // To fall from the default level to the default level changes nothing.
        let lasting = duration.filter(|_| level != Priority::DEFAULT_LEVEL);
        let until = lasting.and_then(|duration| self.clock.now().checked_add(duration));
        if let Some((until, end)) = until.zip(self.end.get_mut(to_usize(block)))
            && until != Duration::MAX
        {
            *end = until;
            self.ends.insert((until, block));
        }
    }

    /// Takes a block out; says whether it was in.
    pub(super) fn remove(&mut self, block: u32) -> bool {
        let was_in = self.idle.contains(block);
        self.idle.remove(block);
        if let Some(end) = self.end.get_mut(to_usize(block))
            && *end != Duration::MAX
        {
            self.ends.remove(&(*end, block));
            *end = Duration::MAX;
        }
        was_in
    }

    /// Takes out a block whose level has run out and gives it the default priority.
    pub(super) fn expired(&mut self) -> Option<u32> {
        let &(end, block) = self.ends.first()?;
        (end <= self.clock.now()).then(|| {
            self.remove(block);
            self.set(block, Priority::default());
            block
        })
    }

    /// The block that goes first and its level.
    pub(super) fn first(&self) -> Option<(u8, u32)> {
        self.idle.first()
    }
}
