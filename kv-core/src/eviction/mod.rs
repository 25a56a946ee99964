//! Which cached block is given up when a new one is needed.
//!
//! A block with reusable content that nobody holds is a *candidate*. The pool tells an
//! [`EvictionPolicy`] what happens to each block and asks it for a candidate when no empty block is
//! left.
mod lru;

use std::fmt;

pub use lru::Lru;

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
    /// Nobody holds `block` any more.
    fn idle(&mut self, block: BlockId);
    /// The content of `block` is gone, or can no longer be found, other than by eviction.
    fn dropped(&mut self, block: BlockId);
    /// The owner changed his mind.
    fn set_priority(&mut self, block: BlockId, priority: Priority);
    /// Names a candidate and forgets it; `None` when there is none.
    fn evict(&mut self) -> Option<BlockId>;
}
