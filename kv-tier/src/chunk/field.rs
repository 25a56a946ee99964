//! Definitions that several parts of a chunk share: the version, checksums, sizes of fields.
// Reads bytes that may be anything.
#![warn(clippy::arithmetic_side_effects, clippy::indexing_slicing)]
use kv_core::num::to_usize;

/// The newest version of the format, that of chunks of recurrent states.
pub const VERSION: u16 = 2;
/// The version of chunks of rows, and of the page in front of sealed chunks.
pub(crate) const OF_ROWS: u16 = 1;
/// The version of chunks of recurrent states: a table of planes follows the fields.
pub(super) const OF_STATES: u16 = VERSION;

/// Returns the CRC-64/NVME of bytes.
pub(crate) fn crc(bytes: &[u8]) -> u64 {
    crc_fast::checksum(crc_fast::CrcAlgorithm::Crc64Nvme, bytes)
}

/// Returns the place of a header's CRC: the last bytes of its pages.
pub(super) fn crc_at(header_bytes: usize) -> usize {
    header_bytes.saturating_sub(size_of::<u64>())
}

/// Returns the bytes that `num_tokens` tokens take in a header.
pub(super) fn token_bytes(num_tokens: u32) -> usize {
    to_usize(num_tokens).saturating_mul(size_of::<u32>())
}
