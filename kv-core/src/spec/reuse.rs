//! How a cache reuses prompt prefixes.
use crate::eviction::Eviction;

/// What of a cached prompt another one may take over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[expect(clippy::exhaustive_enums, reason = "nothing, blocks, or blocks and a part of one")]
pub enum PrefixReuse {
    /// Nothing: every prompt is computed.
    Off,
    /// Full blocks, which are shared.
    FullBlocks,
    /// Full blocks, and as many tokens as agree in the block behind them: these are copied when the
    /// sequence first writes behind them. Where
    /// [contents](crate::reuse::ContentSpan) lie behind tokens, tokens agree up to the first that
    /// stands for another content, or for another part of it. The last, unfull block of a sequence
    /// is kept too when the sequence ends, unless a kept block goes on behind its tokens; it is
    /// dropped when one comes that does. Groups with a [tail](super::GroupBuilder::tail) share full
    /// blocks alone.
    #[default]
    Partial,
}

/// When the blocks that a step fills can be reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[expect(clippy::exhaustive_enums, reason = "before the step's work or after it")]
pub enum PublishAt {
    /// When the step begins: [`Step::start`](crate::Step::start) finds them for a sequence of the
    /// same step. Taken back when the step is rolled back.
    Begin,
    /// When the step is committed.
    #[default]
    Commit,
}

/// Reuse settings of a cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Reuse {
    pub(crate) prefixes: PrefixReuse,
    pub(crate) publish_at: PublishAt,
    /// Which cached block goes first.
    pub(crate) eviction: Eviction,
    /// Events kept until they are taken.
    pub(crate) events: usize,
}

/// Tokens that a group of layers attends to, and therefore keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Window {
    /// Keys before its own position that a query sees (flash-attention's `window_size_left`).
    pub left: u32,
    /// First tokens of the sequence that every query sees as well.
    pub sink_tokens: u32,
    /// Tokens before the window that are kept although no query sees them, so that a sequence can
    /// be cut back by as many.
    pub slack: u32,
}

impl Window {
    /// First position that a query at `position` still sees, sink tokens aside.
    pub fn begin(&self, position: u32) -> u32 {
        position.saturating_sub(self.left)
    }

    /// The length to which a sequence of `len` tokens must stay able to be cut back.
    pub(crate) fn shortest(&self, len: u32) -> u32 {
        len.saturating_sub(self.slack)
    }
}
