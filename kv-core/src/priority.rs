//! The priority of a cached block, set by the caller.
use std::time::Duration;

/// The priority of a block, and its duration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[expect(clippy::exhaustive_structs, reason = "a literal names both")]
pub struct Priority {
    /// 0 is evicted first, 100 last.
    pub level: u8,
    /// Time after the last holder's release of the block until the level falls back to
    /// [`Priority::DEFAULT_LEVEL`]. `None`: for ever.
    pub duration: Option<Duration>,
}

impl Priority {
    /// The level of blocks without a priority.
    pub const DEFAULT_LEVEL: u8 = 35;
    /// The highest level.
    pub const MAX_LEVEL: u8 = 100;
}

impl Default for Priority {
    fn default() -> Self {
        Self { level: Self::DEFAULT_LEVEL, duration: None }
    }
}
