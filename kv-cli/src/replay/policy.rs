//! The policies that can be replayed, by name.
use std::str::FromStr;
use std::sync::Arc;

use kv::BlockId;
use kv::error::UnknownName;
use kv::eviction::{BlockInfo, EvictionPolicy, Lru, Priority};

use super::min::Min;
use super::trace::Trace;

/// What `--policy` names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Policy {
    /// Least recently used first.
    Lru,
    /// Nothing is ever given up: the most that reuse can give.
    Infinite,
    /// The most that a capacity can give.
    Min,
}

impl Policy {
    /// What is replayed unless something is asked for.
    pub(super) const DEFAULT: [Self; 3] = [Self::Lru, Self::Infinite, Self::Min];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Lru => "lru",
            Self::Infinite => "infinite",
            Self::Min => "min",
        }
    }

    /// The policy for a pool of so many blocks.
    pub(super) fn build(self, trace: &Arc<Trace>, num_blocks: u32) -> Box<dyn EvictionPolicy> {
        match self {
            Self::Lru => Box::new(Lru::new(num_blocks)),
            Self::Infinite => Box::new(Keep),
            Self::Min => Box::new(Min::new(Arc::clone(trace), num_blocks)),
        }
    }
}

impl FromStr for Policy {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<Self, UnknownName> {
        match name {
            "lru" => Ok(Self::Lru),
            "infinite" => Ok(Self::Infinite),
            "min" => Ok(Self::Min),
            _ => Err(UnknownName::new("policy", name, "lru, infinite, min")),
        }
    }
}

/// Never gives anything up, for a pool that is large enough.
#[derive(Debug)]
struct Keep;

impl EvictionPolicy for Keep {
    fn stored(&mut self, _: BlockId, _: &BlockInfo) {}
    fn reused(&mut self, _: BlockId) {}
    fn idle(&mut self, _: BlockId) {}
    fn dropped(&mut self, _: BlockId) {}
    fn set_priority(&mut self, _: BlockId, _: Priority) {}
    fn evict(&mut self) -> Option<BlockId> {
        None
    }
}
