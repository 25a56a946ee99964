//! Which cached block is given up when a new one is needed.
//!
//! A block with reusable content that nobody holds is a *candidate*. The pool tells an
//! [`EvictionPolicy`] what happens to each block and asks it for a candidate when no empty block is
//! left.
mod clock;
mod lfu;
mod lists;
mod lru;
mod priority;
mod retention;
mod reuse_rate;
#[cfg(test)]
mod tests;

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

pub use clock::{Clock, ManualClock, SystemClock};
pub use lfu::Lfu;
pub use lru::Lru;
pub use priority::ByPriority;
pub use retention::{Retention, RetentionError, RetentionRange};
pub use reuse_rate::ReuseRate;

use crate::error::UnknownName;
use crate::ids::BlockId;
use crate::reuse::BlockKey;

/// What a policy may know of a block's content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "a literal names each field")]
pub struct BlockInfo {
    /// Names the content: the same prompt has the same keys, after an eviction too.
    pub key: BlockKey,
    /// The content before it, `None` for the first block of a prompt.
    pub parent: Option<BlockKey>,
    /// Index of the block in its prompt.
    pub index: u32,
    /// What the caller asked for it.
    pub priority: Priority,
}

/// How much a block is worth to its owner, and for how long.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[expect(clippy::exhaustive_structs, reason = "a literal names both")]
pub struct Priority {
    /// 0 goes first, 100 last.
    pub level: u8,
    /// How long the level holds from when nobody holds the block; it falls back to
    /// [`Priority::DEFAULT_LEVEL`] then. `None`: for ever.
    pub duration: Option<std::time::Duration>,
}

impl Priority {
    /// The level of blocks nobody said anything about.
    pub const DEFAULT_LEVEL: u8 = 35;
    /// The highest level.
    pub const MAX_LEVEL: u8 = 100;
}

impl Default for Priority {
    fn default() -> Self {
        Self { level: Self::DEFAULT_LEVEL, duration: None }
    }
}

/// Chooses which cached block is given up.
///
/// A block is known to the policy from [`Self::stored`] to [`Self::dropped`] or until
/// [`Self::evict`] names it, and is a candidate from [`Self::idle`] to the next [`Self::reused`].
/// Candidates of one sequence come tail first, so that a policy that breaks ties by arrival gives
/// up tails before heads: a block whose predecessor is gone can no longer be found. Calls that do
/// not fit this order change nothing.
///
/// Every call should take O(1) or O(log n) in the number of blocks.
pub trait EvictionPolicy: fmt::Debug + Send {
    /// A request begins: the unit of time of policies that age.
    fn tick(&mut self) {}
    /// `block`, which somebody holds, got content that others may reuse.
    fn stored(&mut self, block: BlockId, info: &BlockInfo);
    /// A further sequence holds `block` because it asked for the content.
    fn reused(&mut self, block: BlockId);
    /// A sequence has computed the content of `block` again, without having found it or behind a
    /// part of it that it had found; `block` is a candidate no longer. As [`Self::reused`] unless a
    /// policy counts how soon content is asked for.
    fn computed_again(&mut self, block: BlockId) {
        self.reused(block);
    }
    /// Nobody holds `block` any more.
    fn idle(&mut self, block: BlockId);
    /// The content of `block` is gone, or can no longer be found, other than by eviction.
    fn dropped(&mut self, block: BlockId);
    /// The owner changed his mind.
    fn set_priority(&mut self, block: BlockId, priority: Priority);
    /// Names a candidate and forgets it; `None` when there is none.
    fn evict(&mut self) -> Option<BlockId>;
}

/// The policies that come with the crate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Eviction {
    /// [`Lru`].
    Lru,
    /// [`Lfu`].
    Lfu,
    /// [`ByPriority`].
    Priority,
    /// [`ReuseRate`]: lowest priority first, and then what will be missed least.
    #[default]
    Default,
}

impl Eviction {
    /// Every policy.
    pub const ALL: [Self; 4] = [Self::Lru, Self::Lfu, Self::Priority, Self::Default];

    /// Makes the policy for blocks `0..num_blocks`; durations of priorities run by `clock`.
    pub fn policy(self, num_blocks: u32, clock: &Arc<dyn Clock>) -> Box<dyn EvictionPolicy> {
        match self {
            Self::Lru => Box::new(Lru::new(num_blocks)),
            Self::Lfu => Box::new(Lfu::new(num_blocks)),
            Self::Priority => Box::new(ByPriority::new(num_blocks, Arc::clone(clock))),
            Self::Default => Box::new(ReuseRate::new(num_blocks, Arc::clone(clock))),
        }
    }
}

impl fmt::Display for Eviction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Lru => "lru",
            Self::Lfu => "lfu",
            Self::Priority => "priority",
            Self::Default => "default",
        })
    }
}

impl FromStr for Eviction {
    type Err = UnknownName;
    fn from_str(name: &str) -> Result<Self, UnknownName> {
        let known = Self::ALL.into_iter().find(|policy| policy.to_string() == name);
        known
            .ok_or_else(|| UnknownName::new("eviction policy", name, "lru, lfu, priority, default"))
    }
}
