//! Settings of prefix reuse.
use crate::eviction::Eviction;

/// The part of a cached prompt that another prompt may reuse.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[expect(clippy::exhaustive_enums, reason = "nothing, blocks, or blocks and a part of one")]
pub enum PrefixReuse {
    /// Nothing: every prompt is computed.
    Off,
    /// Full blocks, which are shared.
    FullBlocks,
    /// Full blocks, and the leading tokens that agree in the block after them, which is copied when
    /// the sequence first writes to it. Placeholder tokens with
    /// [contents](crate::reuse::ContentSpan) agree only if they stand for the same part of the same
    /// content. The last, partial block of a sequence is kept too when the sequence ends, unless a
    /// cached block continues its tokens; it is dropped when such a block is cached later. Groups
    /// with a [tail](super::GroupBuilder::tail) share full blocks only.
    #[default]
    Partial,
}

/// The time at which blocks that a step fills become reusable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[expect(clippy::exhaustive_enums, reason = "before the step's work or after it")]
pub enum PublishAt {
    /// At the beginning of the step: [`Step::start`](crate::Step::start) finds the blocks for a
    /// sequence of the same step. Undone when the step is rolled back. Blocks with drafts that the
    /// step accepts are published when the next step begins; with [`PrefixReuse::Partial`] also
    /// when the sequence ends.
    Begin,
    /// At the commit of the step.
    #[default]
    Commit,
}

/// Reuse settings of a cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Reuse {
    pub(crate) prefixes: PrefixReuse,
    pub(crate) publish_at: PublishAt,
    /// The eviction policy of cached blocks.
    pub(crate) eviction: Eviction,
    /// Events kept until they are taken.
    pub(crate) events: usize,
    /// Changes of blocks kept until they are taken.
    pub(crate) changes: usize,
}

/// The tokens that a group of layers attends to, and therefore keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Window {
    /// Keys before its own position that a query sees (flash-attention's `window_size_left`).
    pub left: u32,
    /// First tokens of the sequence that every query sees as well.
    pub sink_tokens: u32,
    /// Tokens before the window that are kept although no query sees them, so that a sequence can
    /// be truncated by up to that many.
    pub slack: u32,
}

impl Window {
    /// Returns the first position that a query at `position` sees, sink tokens aside.
    pub fn begin(&self, position: u32) -> u32 {
        position.saturating_sub(self.left)
    }

    /// Returns the length to which a sequence of `len` tokens must remain truncatable.
    pub(crate) fn shortest(&self, len: u32) -> u32 {
        len.saturating_sub(self.slack)
    }
}
