//! Changes of a sequence's blocks in one group during a step.
use crate::slot_map::SlotMap;

/// Blocks and quantised tokens of a sequence before and after it grows.
///
/// With a tail, a step may fill the block that the tail belongs to. The blocks of the tail then
/// move after all others while the step is open, because a backend reads and quantises them, and
/// return to the pool at commit:
///
/// ```text
/// before   | codes | tail |
/// during   | codes, more than before | new tail | old tail |
/// ```
#[derive(Debug, Clone, Copy)]
pub(crate) struct Growth {
    /// Leading tokens that are codes, before and after.
    pub(crate) coded_before: u32,
    pub(crate) coded: u32,
    /// First token of the tail before; the length before where there was none.
    pub(crate) tail_begin: u32,
    /// Blocks of full-precision prefix and codes before; says nothing without a tail.
    pub(crate) code_blocks_before: u32,
    /// Blocks of the tail before.
    pub(crate) tail_blocks_before: u32,
    /// Blocks of full-precision prefix and codes after.
    pub(crate) code_blocks: u32,
    /// Blocks of the tail after.
    pub(crate) tail_blocks: u32,
}

impl Growth {
    /// Computes growth from `cached` tokens, of which the tables list `coded` as quantised, to
    /// `kv_len`.
    #[inline]
    pub(crate) fn new(map: &SlotMap, coded: u32, cached: u32, kv_len: u32) -> Self {
        if map.has_tail() {
            Self::with_tail(map, coded, cached, kv_len)
        } else {
            Self::without_tail(map, cached, kv_len)
        }
    }

    /// Does the same for a map without a tail, for which the tables list nothing.
    #[inline]
    pub(crate) fn without_tail(map: &SlotMap, cached: u32, kv_len: u32) -> Self {
        Self {
            coded_before: cached,
            coded: kv_len,
            tail_begin: cached,
            code_blocks_before: 0,
            tail_blocks_before: 0,
            code_blocks: map.blocks(kv_len),
            tail_blocks: 0,
        }
    }

    fn with_tail(map: &SlotMap, coded: u32, cached: u32, kv_len: u32) -> Self {
        let coded_before = coded.min(cached);
        let coded = map.coded_after(coded_before, kv_len);
        Self {
            coded_before,
            coded,
            tail_begin: map.tail_begin(cached, coded_before),
            code_blocks_before: map.code_blocks(cached, coded_before),
            tail_blocks_before: map.tail_blocks(cached, coded_before),
            code_blocks: map.code_blocks(kv_len, coded),
            tail_blocks: map.tail_blocks(kv_len, coded),
        }
    }

    /// Returns whether the old tail is quantised.
    pub(crate) fn seals(&self) -> bool {
        self.tail_blocks_before > 0 && self.coded > self.coded_before
    }

    /// Returns the blocks that the sequence holds while the step is open.
    pub(crate) fn blocks(&self) -> u32 {
        let sealed = if self.seals() { self.tail_blocks_before } else { 0 };
        // Lengths are the caller's until these blocks are compared with a table.
        self.code_blocks.saturating_add(self.tail_blocks).saturating_add(sealed)
    }
}
