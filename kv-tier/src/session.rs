//! Session files: one sequence's text, its blocks, and a note of the caller.
//!
//! `docs/formats.md` draws the file: a [`SessionHeader`], then one [chunk](crate::chunk) for each
//! block that a sequence needs to go on after the text. [`dump`] writes a file and [`load`] reads
//! one; neither needs [`TieredCache`](crate::TieredCache).
//!
//! Chunks have one block each, whatever chunks tiers use. A window may begin at any block, so
//! longer chunks would need blocks that no sequence holds any more; and the last block, which may
//! be partial, would need a second size. The price is a header of 4 KiB a block.
mod blocks;
mod bring;
mod dump;
mod error;
mod file;
mod header;
mod load;
mod of_cache;
#[cfg(test)]
mod tests;

pub use crate::chunk::NO_TOKEN;
pub use dump::dump;
pub use error::SessionError;
pub use header::{SessionGroup, SessionHeader};
pub use load::load;

pub(crate) use header::{PREFIX_BYTES, Prefix};

use kv_core::reuse::ContentSpan;

/// The newest version of the format, that of files with recurrent states. Others have version 1.
pub const VERSION: u16 = 2;

/// A session that [`load`] has restored.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Session {
    /// The text whose rows were in the file.
    pub tokens: Vec<u32>,
    /// Contents of the placeholder tokens of the text, with which a sequence that continues the
    /// session is started.
    pub contents: Vec<ContentSpan>,
    /// The note of the file's writer.
    pub note: Vec<u8>,
    /// Tokens that a sequence reuses now which starts on the text and at least one more token.
    pub cached: u32,
}

/// Counts of a session that [`dump`] has written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct SessionInfo {
    /// Tokens of the text.
    pub tokens: u32,
    /// Blocks of all groups, and states.
    pub blocks: u32,
    /// Bytes of the file.
    pub bytes: u64,
    /// Whether the file has all blocks of the text that a sequence can reuse. `false` if a window
    /// needs a block that has left the device: a loaded session is then reused up to an earlier
    /// token, or computed. One block of
    /// [`GroupBuilder::window_slack`](kv_core::spec::GroupBuilder::window_slack) keeps such blocks.
    /// With recurrent states, `false` also if none is kept behind the last token of the text.
    pub is_whole: bool,
}
