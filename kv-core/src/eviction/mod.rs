//! Eviction: the choice of the cached block that gives way to a new one. Policies, priorities,
//! clocks, and the trait for a caller's policy.
//!
//! A block with reusable content and no holder is a *candidate*. The pool reports all changes of
//! blocks to an [`EvictionPolicy`] and requests a candidate when no empty block is left.
mod clock;
mod hint;
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

pub use crate::priority::Priority;
pub use clock::{Clock, ManualClock, SystemClock};
pub use hint::Return;
pub use lfu::Lfu;
pub use lru::Lru;
pub use priority::ByPriority;
pub use retention::{Retention, RetentionError, RetentionRange};
pub use reuse_rate::ReuseRate;

use kv_format::UnknownName;

use crate::ids::BlockId;
use crate::reuse::BlockKey;

/// Facts about a block's content that a policy may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "a literal names each field")]
pub struct BlockInfo {
    /// Identifies the content: equal prompts have equal keys, also after an eviction.
    pub key: BlockKey,
    /// Key of the content before it, `None` for the first block of a prompt.
    pub parent: Option<BlockKey>,
    /// Index of the block in its prompt.
    pub index: u32,
    /// Its priority, set by the caller.
    pub priority: Priority,
}

/// Chooses which cached block is evicted.
///
/// The policy knows a block from [`Self::stored`] to [`Self::dropped`] or until [`Self::evict`]
/// returns it. The block is a candidate from [`Self::idle`] to the next [`Self::reused`],
/// [`Self::computed_again`] or [`Self::held`].
/// Candidates of one sequence arrive tail first, so that a policy that breaks ties by arrival
/// evicts tails before heads: a block whose predecessor is gone can no longer be found. Calls out
/// of this order have no effect, but a block that the policy was not made for is a bug, for which
/// those of this crate panic.
///
/// Every call should take O(1) or O(log n) in the number of blocks.
pub trait EvictionPolicy: fmt::Debug + Send {
    /// Signals the beginning of a request, the time unit of policies that age.
    fn tick(&mut self) {}
    /// Reports that held block `block` got content that others may reuse.
    fn stored(&mut self, block: BlockId, info: &BlockInfo);
    /// Reports that a further sequence holds `block` for its content.
    fn reused(&mut self, block: BlockId);
    /// Reports that a sequence has computed the content of `block` again, without finding it or
    /// after finding a part of it; `block` is no longer a candidate. By default the same as
    /// [`Self::reused`]; policies that measure the time to reuse may differ.
    fn computed_again(&mut self, block: BlockId) {
        self.reused(block);
    }
    /// Reports that candidate `block` is held while its bytes are read, which is no use of its
    /// content: it is not evicted before the next [`Self::idle`], and then has its former place if
    /// the policy can tell. By default the same as [`Self::reused`].
    fn held(&mut self, block: BlockId) {
        self.reused(block);
    }
    /// Reports, just before [`Self::idle`], what the sequence that releases `block` said of its
    /// return: `None` for nothing, which takes back what an earlier release said. At the end of a
    /// [hold](Self::held) there is no such report: the last one stands, unless the block was
    /// [reused](Self::reused) or [computed again](Self::computed_again) since. By default without
    /// effect.
    ///
    /// A hint is about the tokens that only this sequence's conversation continues. A policy ranks
    /// content that several conversations continue, such as a system prompt, without it.
    fn hinted(&mut self, _block: BlockId, _hint: Option<Return>) {}
    /// Reports that `block` lost its last holder.
    fn idle(&mut self, block: BlockId);
    /// Reports that the content of `block` is gone, or can no longer be found, other than by
    /// eviction.
    fn dropped(&mut self, block: BlockId);
    /// Reports a changed priority.
    fn set_priority(&mut self, block: BlockId, priority: Priority);
    /// Returns a candidate and forgets it; `None` without candidates.
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
    /// [`ReuseRate`]: lowest priority first, then the lowest expected benefit.
    #[default]
    ReuseRate,
}

impl Eviction {
    /// Every policy.
    pub const ALL: [Self; 4] = [Self::Lru, Self::Lfu, Self::Priority, Self::ReuseRate];

    /// Returns the policy of snapshots of recurrent states beside blocks with this one.
    #[must_use]
    pub fn of_snapshots(self) -> Self {
        match self {
            // A text has few snapshots, of which rates say little: a public trace of chats hits
            // .224 with rates, and .287 with the least recent first.
            Self::ReuseRate => Self::Priority,
            Self::Lru | Self::Lfu | Self::Priority => self,
        }
    }

    /// Creates the policy for blocks `0..num_blocks`; durations of priorities use `clock`.
    pub fn policy(self, num_blocks: u32, clock: &Arc<dyn Clock>) -> Box<dyn EvictionPolicy> {
        match self {
            Self::Lru => Box::new(Lru::new(num_blocks)),
            Self::Lfu => Box::new(Lfu::new(num_blocks)),
            Self::Priority => Box::new(ByPriority::new(num_blocks, Arc::clone(clock))),
            Self::ReuseRate => Box::new(ReuseRate::new(num_blocks, Arc::clone(clock))),
        }
    }
}

impl fmt::Display for Eviction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Lru => "lru",
            Self::Lfu => "lfu",
            Self::Priority => "priority",
            Self::ReuseRate => "reuse-rate",
        })
    }
}

impl FromStr for Eviction {
    type Err = UnknownName;
    fn from_str(name: &str) -> Result<Self, UnknownName> {
        if name == "default" {
            return Ok(Self::default());
        }
        let known = Self::ALL.into_iter().find(|policy| policy.to_string() == name);
        let names = "lru, lfu, priority, reuse-rate, default";
        known.ok_or_else(|| UnknownName::new("eviction policy", name, names))
    }
}
