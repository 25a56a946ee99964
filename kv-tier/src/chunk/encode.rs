//! Writing the header of a chunk.
use kv_core::invariant::Invariant;
use kv_core::num::{to_u32, to_usize};

use super::Expectation;
use super::field::{crc, crc_at};
use super::header::{self, CONTENT_BYTES, PAGE};
use super::plane;
use super::spec::ChunkSpec;
use super::unused::zero_unused;

/// Stands in the header of a chunk for each token that its blocks have room for and lack.
pub const NO_TOKEN: u32 = u32::MAX;

/// Completes a chunk whose blocks lie at their [pieces](ChunkSpec::piece): writes the header in
/// front, zeroes the bytes that belong to no piece and the slots that hold no token, and computes
/// the checksums. `written_at` is in seconds since 1970 and for listings only.
///
/// # Errors
/// [`EncodeError`], and nothing is written.
pub fn encode_header(
    chunk: &mut [u8],
    says: &Expectation<'_>,
    written_at: u64,
) -> Result<(), EncodeError> {
    let spec = says.root.spec();
    check(chunk, says)?;
    zero_gaps(chunk, spec);
    for block in 0..spec.blocks() {
        zero_unused(spec, chunk, block, spec.block_span(says.index, block).end);
    }
    let (header, payload) =
        chunk.split_at_mut_checked(spec.header_bytes()).invariant("the length was checked");
    header.fill(0);
    let pages = spec.header_bytes().div_euclid(PAGE);
    let pages = u16::try_from(pages).invariant("a specification has checked its header");
    let mut put = |at: usize, bytes: &[u8]| {
        let place = header.get_mut(at..).and_then(|rest| rest.get_mut(..bytes.len()));
        place.invariant("a field lies in its header").copy_from_slice(bytes);
    };
    put(0, &header::MAGIC);
    put(header::VERSION_AT, &spec.version().to_le_bytes());
    put(header::PAGES, &pages.to_le_bytes());
    put(header::NAME, says.name.as_bytes());
    put(header::PARENT, says.parent.as_bytes());
    put(header::MODEL, says.root.model().as_bytes());
    put(header::ROOT, says.root.name().as_bytes());
    put(header::ENCODING_KEY, &says.root.encoding_key().to_le_bytes());
    put(header::LAST_KEY, &says.last_key.0.to_le_bytes());
    for (_, at, number) in header::numbers(spec, says.index) {
        put(at, &number.to_le_bytes());
    }
    // All heads: shards are reserved.
    put(header::HEADS_END, &spec.num_kv_heads().to_le_bytes());
    for (_, at, length) in header::lengths(spec) {
        put(at, &length.to_le_bytes());
    }
    for (_, at, name) in header::formats(spec) {
        put(at, &header::format_field(&name));
    }
    for (at, bytes) in plane::table(spec) {
        put(at, &bytes);
    }
    put(header::PAYLOAD_CRC, &crc(payload).to_le_bytes());
    put(header::WRITTEN_AT, &written_at.to_le_bytes());
    put(header::NUM_TOKENS, &to_u32(says.tokens.len()).to_le_bytes());
    put(header::NUM_CONTENTS, &to_u32(says.contents.len()).to_le_bytes());
    let mut at = spec.tokens_at();
    for token in says.tokens {
        put(at, &token.to_le_bytes());
        at += size_of::<u32>();
    }
    for content in says.contents {
        put(at, &content.to_bytes());
        at += CONTENT_BYTES;
    }
    let at = crc_at(header.len());
    let (covered, last) = header.split_at_mut_checked(at).invariant("a header has a page");
    last.copy_from_slice(&crc(covered).to_le_bytes());
    Ok(())
}

fn check(chunk: &[u8], says: &Expectation<'_>) -> Result<(), EncodeError> {
    let spec = says.root.spec();
    let (expected, got) = (spec.chunk_bytes(), chunk.len());
    if expected != got {
        return Err(EncodeError::Length { expected, got });
    }
    let span = spec.span(says.index);
    let num_tokens = span.end - span.start;
    let (expected, got) = (to_usize(num_tokens), says.tokens.len());
    if expected != got {
        return Err(EncodeError::Tokens { expected, got });
    }
    let (max, got) = (spec.contents_max(num_tokens), says.contents.len());
    if got > max {
        return Err(EncodeError::Contents { max, got });
    }
    let blocks = || says.contents.iter().map(|content| content.block);
    let (is_sorted, last) = (blocks().is_sorted(), blocks().next_back());
    if is_sorted && last.is_none_or(|block| block < spec.blocks()) {
        return Ok(());
    }
    Err(EncodeError::ContentOrder { blocks: spec.blocks() })
}

/// Zeroes the gaps between pieces: earlier content of the memory is not for others to read.
fn zero_gaps(chunk: &mut [u8], spec: &ChunkSpec) {
    let mut end = spec.header_bytes();
    let mut zero = |gap: std::ops::Range<usize>| {
        chunk.get_mut(gap).invariant("pieces follow each other in the chunk").fill(0);
    };
    for block in 0..spec.blocks() {
        for layer in 0..spec.num_layers() {
            for (role, _) in spec.layout().planes().as_slice() {
                let piece = spec.piece(block, layer, *role);
                zero(end..piece.start);
                end = piece.end;
            }
        }
    }
    zero(end..spec.chunk_bytes());
}

/// A chunk that cannot be described.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum EncodeError {
    /// The bytes are not as long as a chunk.
    #[error("{got} bytes, a chunk has {expected}")]
    Length {
        /// Bytes of a chunk.
        expected: usize,
        /// Bytes given.
        got: usize,
    },
    /// The tokens are not those of all blocks.
    #[error("{got} tokens, the blocks have {expected}")]
    Tokens {
        /// Tokens of the blocks.
        expected: usize,
        /// Tokens given.
        got: usize,
    },
    /// More contents of placeholder tokens than the header has room for: the chunk cannot be kept
    /// outside the device.
    #[error("{got} contents of placeholder tokens, the header has room for {max}")]
    Contents {
        /// Contents that fit.
        max: usize,
        /// Contents given.
        got: usize,
    },
    /// Contents in another order than that of blocks, or of a block that the chunk has not.
    #[error("contents are not in the order of the chunk's {blocks} blocks")]
    ContentOrder {
        /// Blocks of the chunk.
        blocks: u32,
    },
}
