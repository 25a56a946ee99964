//! The page in front of a sealed chunk, which marks the chunk as sealed.
// Reads bytes that may be anything.
#![warn(clippy::arithmetic_side_effects, clippy::indexing_slicing)]
use kv_core::invariant::Invariant;

use super::ChunkError;
use super::field::{OF_ROWS, crc, crc_at};
use super::header::{self, Header, PAGE};

/// Bytes in front of a sealed chunk.
pub(crate) const SEALED_PAGE_BYTES: usize = PAGE;

/// The fields of the page: nonce and tag, which decrypt the bytes after it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SealedPage {
    pub(crate) nonce: [u8; 12],
    pub(crate) tag: [u8; 16],
}

impl SealedPage {
    /// Reads a page.
    ///
    /// # Errors
    /// Those of the checks of length, magic, version, CRC and flags.
    pub(crate) fn read(bytes: &[u8]) -> Result<Self, ChunkError> {
        match super::read_header(bytes) {
            Err(ChunkError::Sealed { flags: header::SEALED }) => {}
            Err(error) => return Err(error),
            // In the clear.
            Ok(_) => return Err(ChunkError::Flags { flags: 0 }),
        }
        let page = Header::view(bytes);
        Ok(Self { nonce: page.array(NONCE), tag: page.array(TAG) })
    }

    /// Fills a page.
    pub(crate) fn write(&self, page: &mut [u8]) {
        page.fill(0);
        let mut put = |at: usize, bytes: &[u8]| {
            let place = page.get_mut(at..).and_then(|rest| rest.get_mut(..bytes.len()));
            place.invariant("a field lies in its page").copy_from_slice(bytes);
        };
        put(0, &header::MAGIC);
        put(header::VERSION_AT, &OF_ROWS.to_le_bytes());
        put(header::PAGES, &1_u16.to_le_bytes());
        put(header::FLAGS, &header::SEALED.to_le_bytes());
        put(NONCE, &self.nonce);
        put(TAG, &self.tag);
        let at = crc_at(page.len());
        let (covered, last) = page.split_at_mut_checked(at).invariant("a page has its length");
        last.copy_from_slice(&crc(covered).to_le_bytes());
    }
}

const NONCE: usize = 16;
const TAG: usize = 28;
