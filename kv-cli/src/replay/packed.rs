//! A store in memory whose chunks take little of it.
//!
//! Replayed chunks have rows of zeros and tokens of which all in a block are equal, in pages of
//! 4 KiB: some hundred bytes say what is in them.
use std::sync::Arc;
use std::time::Instant;

use kv::events::Tier;
use kv::tier::{BlockStore, ChunkAddress, MemoryStore, Put, StoreError, StoreErrorKind};

/// Keeps chunks as runs of equal words.
#[derive(Debug, Clone)]
pub(super) struct PackedStore {
    tier: Tier,
    chunks: Arc<MemoryStore>,
}

impl PackedStore {
    /// Makes an empty store of a tier, for this many chunks.
    pub(super) fn new(tier: Tier, chunks: usize) -> Self {
        Self { tier, chunks: Arc::new(MemoryStore::new(usize::MAX).with_chunks_max(chunks)) }
    }

    /// Returns how many chunks were evicted so far.
    pub(super) fn evictions(&self) -> u64 {
        self.chunks.evictions()
    }
}

impl BlockStore for PackedStore {
    fn tier(&self) -> Tier {
        self.tier
    }

    fn contains(
        &self,
        chunks: &[ChunkAddress],
        deadline: Instant,
    ) -> Result<Vec<bool>, StoreError> {
        self.chunks.contains(chunks, deadline)
    }

    fn get(
        &self,
        chunk: &ChunkAddress,
        into: &mut [u8],
        deadline: Instant,
    ) -> Result<Option<usize>, StoreError> {
        let mut packed = vec![0; into.len().div_ceil(WORD) * RUN];
        let Some(length) = self.chunks.get(chunk, &mut packed, deadline)? else { return Ok(None) };
        let unpacked = unpack(&packed[..length], into);
        let corrupt =
            || StoreError::new(StoreErrorKind::Corrupt, format!("read of {}", chunk.name));
        unpacked.ok_or_else(corrupt).map(Some)
    }

    fn put(
        &self,
        chunk: &ChunkAddress,
        bytes: &[u8],
        deadline: Instant,
    ) -> Result<Put, StoreError> {
        self.chunks.put(chunk, &pack(bytes), deadline)
    }

    fn remove(&self, chunks: &[ChunkAddress], deadline: Instant) -> Result<(), StoreError> {
        self.chunks.remove(chunks, deadline)
    }
}

/// Bytes of a word, and of a run: its length in 16 bits, and its word.
const WORD: usize = 8;
const RUN: usize = 2 + WORD;

/// Packs whole words; chunks have pages of them.
fn pack(bytes: &[u8]) -> Vec<u8> {
    let (words, rest) = bytes.as_chunks::<WORD>();
    assert!(rest.is_empty(), "a chunk has whole pages");
    let mut packed = Vec::new();
    for run in words.chunk_by(|a, b| a == b) {
        for part in run.chunks(u16::MAX.into()) {
            let length = u16::try_from(part.len()).unwrap_or(u16::MAX);
            packed.extend_from_slice(&length.to_le_bytes());
            packed.extend_from_slice(&part[0]);
        }
    }
    packed
}

/// Unpacks to the beginning of `into` and returns the number of bytes; `None` if they do not fit.
fn unpack(packed: &[u8], into: &mut [u8]) -> Option<usize> {
    let (words, _) = into.as_chunks_mut::<WORD>();
    let mut filled = 0;
    for run in packed.as_chunks::<RUN>().0 {
        let [low, high, word @ ..] = *run;
        let end = filled + usize::from(u16::from_le_bytes([low, high]));
        words.get_mut(filled..end)?.fill(word);
        filled = end;
    }
    Some(filled * WORD)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_packed_is_unpacked() {
        let mut mixed = vec![7; 4096];
        mixed[100..300].iter_mut().zip(0_u8..).for_each(|(byte, n)| *byte = n);
        for bytes in [mixed, vec![0; 8 * 70_000], (0..=255).collect(), Vec::new()] {
            let packed = pack(&bytes);
            let mut into = vec![9; bytes.len() + 16];
            assert_eq!(unpack(&packed, &mut into), Some(bytes.len()));
            assert_eq!((&into[..bytes.len()], &into[bytes.len()..]), (&bytes[..], &[9; 16][..]));
            let short = bytes.len().saturating_sub(8);
            assert_eq!(unpack(&packed, &mut into[..short]).is_some(), bytes.is_empty());
        }
        assert_eq!(pack(&[0; 8192]).len(), RUN);
    }
}
