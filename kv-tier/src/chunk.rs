//! Chunks: consecutive full blocks of one group after a header that describes them.
//!
//! A chunk is the unit in host memory, in a file, in a store and on the wire, without any other
//! encoding. `docs/formats.md` draws it. This module does no I/O and copies no blocks:
//! [`ChunkSpec`] says where the bytes of each block belong, [`encode_header`] describes bytes that
//! are there, and [`verify()`] is the only way to a [`Verified`] chunk.
mod encode;
mod error;
mod field;
mod header;
mod plane;
#[cfg(feature = "seal")]
mod sealed;
mod spec;
#[cfg(test)]
mod tests;
mod unused;
mod verify;

pub use encode::{EncodeError, NO_TOKEN, encode_header};
pub use error::{ChunkError, ChunkErrorKind};
pub use field::VERSION;
pub use header::{Header, HeaderPlane, read_header};
pub use spec::{ChunkSpec, ChunkSpecError};
pub use verify::{Verified, verify};

pub(crate) use field::crc;
#[cfg(feature = "seal")]
pub(crate) use sealed::{SEALED_PAGE_BYTES, SealedPage};
pub(crate) use unused::{zero_after, zero_unused};

use kv_core::reuse::{BlockContent, BlockKey, ContentSpan};

use crate::identity::ChunkRoot;
use crate::name::ChunkName;

/// The expected content of a chunk's header: [`encode_header`] writes it and [`verify()`] compares
/// with it. A reader derives it from the prompt, never from the chunk.
#[derive(Debug, Clone, Copy)]
#[expect(clippy::exhaustive_structs, reason = "a literal names each field")]
pub struct Expectation<'a> {
    /// Model, format, group, tenant and adapter.
    pub root: &'a ChunkRoot,
    /// Index of the chunk in its prompt.
    pub index: u32,
    /// Name of the chunk before; the root's for the first.
    pub parent: ChunkName,
    /// Name of the chunk.
    pub name: ChunkName,
    /// Key of the chunk's last block in the prefix index.
    pub last_key: BlockKey,
    /// Tokens of all blocks of the chunk.
    pub tokens: &'a [u32],
    /// Contents of placeholder tokens, in ascending order of blocks.
    pub contents: &'a [ChunkContent],
}

/// Content of placeholder tokens in one block of a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[expect(clippy::exhaustive_structs, reason = "a literal names each field")]
pub struct ChunkContent {
    /// Index of the block in the chunk.
    pub block: u32,
    /// The part of the content that lies in the block.
    pub content: BlockContent,
}

impl ChunkContent {
    /// Writes the parts of a prompt's contents that lie in chunk `index` to `out`, block by block.
    pub fn cut(spec: &ChunkSpec, spans: &[ContentSpan], index: u32, out: &mut Vec<Self>) {
        out.clear();
        if spans.is_empty() {
            return;
        }
        let mut parts = Vec::new();
        for block in 0..spec.blocks() {
            let span = spec.block_span(index, block);
            BlockContent::cut(spans, (span.start, span.end), &mut parts);
            out.extend(parts.iter().map(|content| Self { block, content: *content }));
        }
    }

    fn to_bytes(self) -> [u8; header::CONTENT_BYTES] {
        let mut bytes = [0; header::CONTENT_BYTES];
        let (block, content) = bytes.split_at_mut(size_of::<u32>());
        block.copy_from_slice(&self.block.to_le_bytes());
        content.copy_from_slice(&self.content.to_bytes());
        bytes
    }
}
