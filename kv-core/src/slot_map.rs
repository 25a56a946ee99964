//! The map from the tokens of a sequence to the slots of its blocks.
//!
//! A token takes one slot of its blocks. A *wide* row, kept in 16 bits among quantised rows, takes
//! the slots that its bytes need. Two kinds of tokens are wide:
//! - the *full-precision prefix*, the first tokens of a sequence: almost every query attends to
//!   them, and their keys are unlike all others;
//! - the *tail*, if enabled: the tokens of the block that a sequence is filling. They become
//!   codes when the block is full.
//!
//! Both lie in ordinary blocks, so sharing, copy-on-write and eviction know nothing of them.
use crate::error::{SpecConflict, SpecError};

/// A map from positions of tokens to slots of a sequence's blocks.
///
/// With a full-precision prefix of 2 tokens of 3 slots in blocks of 8:
///
/// ```text
/// slot    | 0  1  2 | 3  4  5 | 6 | 7 |  | 8 | 9 | ...
/// token   |    0    |    1    | 2 | 3 |  | 4 | 5 | ...
/// ```
///
/// A wide row that would cross the end of a block begins in the next one instead.
///
/// With a tail, a sequence's table lists the blocks of full-precision prefix and codes, then the
/// blocks of the tail. `coded` is the number of leading tokens that are codes: whole blocks, or
/// more after a truncation, because codes do not become 16-bit rows again; the block that was cut
/// is filled with codes.
///
/// A length may be any number of the caller's: slots and blocks past `u32::MAX` count as
/// `u32::MAX`, more than any pool has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SlotMap {
    block_size: u32,
    full_precision_prefix: u32,
    wide_slots: u32,
    /// Wide rows that fit one block.
    per_block: u32,
    tail: bool,
    /// Logarithm of a block size that is a power of two, [`NO_SHIFT`] for any other: divisions
    /// would take most of the time of a step.
    shift: u8,
}

const NO_SHIFT: u8 = u8::MAX;

fn shift_of(block_size: u32) -> u8 {
    let log = u8::try_from(block_size.trailing_zeros()).unwrap_or(NO_SHIFT);
    if block_size.is_power_of_two() { log } else { NO_SHIFT }
}

/// The place of one token.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Place {
    /// Index in the sequence's block table.
    pub index: u32,
    /// First slot inside the block.
    pub inside: u32,
    /// Whether the row is kept in 16 bits among codes.
    pub is_wide: bool,
}

impl SlotMap {
    /// A slot for every token.
    pub(crate) fn plain(block_size: u32) -> Self {
        let shift = shift_of(block_size);
        Self {
            block_size,
            full_precision_prefix: 0,
            wide_slots: 1,
            per_block: block_size,
            tail: false,
            shift,
        }
    }

    /// `wide_slots` slots for each of the first `full_precision_prefix` tokens and for each token
    /// of the tail, if there is one; one slot for any other token.
    ///
    /// # Errors
    /// [`SpecError::Conflict`] when a block is too small for one wide row.
    pub(crate) fn new(
        block_size: u32,
        wide_slots: u32,
        full_precision_prefix: u32,
        tail: bool,
    ) -> Result<Self, SpecError> {
        if full_precision_prefix == 0 && !tail {
            return Ok(Self::plain(block_size));
        }
        let wide_slots = wide_slots.max(1);
        let per_block = block_size / wide_slots;
        if per_block == 0 {
            let problem = SpecConflict::BlockTooSmall { slots: wide_slots, block_size };
            return Err(SpecError::Conflict { what: "full_precision_prefix", problem });
        }
        let shift = shift_of(block_size);
        Ok(Self { block_size, full_precision_prefix, wide_slots, per_block, tail, shift })
    }

    pub(crate) fn block_size(&self) -> u32 {
        self.block_size
    }
    /// Returns the tokens at the start of a sequence that are kept in 16 bits.
    pub fn full_precision_prefix(&self) -> u32 {
        self.full_precision_prefix
    }
    /// Returns the slots of one wide row.
    pub fn wide_slots(&self) -> u32 {
        self.wide_slots
    }
    /// Returns whether the block that a sequence is filling is kept in 16 bits.
    pub fn has_tail(&self) -> bool {
        self.tail
    }

    /// Returns whether every token is one slot, in the order of the tokens.
    #[inline]
    pub(crate) fn is_plain(&self) -> bool {
        self.full_precision_prefix == 0 && !self.tail
    }

    /// Returns the slots of the first `tokens` tokens of a sequence, without a tail; `u32::MAX` if
    /// more.
    #[inline]
    pub fn slots(&self, tokens: u32) -> u32 {
        if self.full_precision_prefix == 0 {
            return tokens;
        }
        let Some(last_prefix) = tokens.min(self.full_precision_prefix).checked_sub(1) else {
            return tokens;
        };
        let place = self.wide(last_prefix);
        place
            .index
            .saturating_mul(self.block_size)
            .saturating_add(place.inside)
            .saturating_add(self.wide_slots)
            .saturating_add(tokens.saturating_sub(self.full_precision_prefix))
    }

    /// Returns the blocks that hold `tokens` tokens without a tail.
    #[inline]
    pub fn blocks(&self, tokens: u32) -> u32 {
        let slots = self.slots(tokens);
        let whole = self.whole_blocks(slots);
        whole + u32::from(whole * self.block_size < slots)
    }

    /// Returns the most blocks of one tail.
    pub fn tail_blocks_max(&self) -> u32 {
        if self.tail { self.block_size.div_ceil(self.per_block) } else { 0 }
    }

    /// Returns the blocks with which a sequence grows to `tokens` tokens one by one: when a block
    /// is full, its tail is held until it is encoded.
    pub fn blocks_to_grow(&self, tokens: u32) -> u32 {
        self.blocks(tokens).saturating_add(self.tail_blocks_max())
    }

    /// Returns the blocks with which a sequence can grow to `tokens` tokens in any steps: a step
    /// that fills a block and begins the next one holds two tails.
    pub fn blocks_reserved(&self, tokens: u32) -> u32 {
        if tokens == 0 {
            return 0;
        }
        self.blocks(tokens).saturating_add(self.tail_blocks_max() * 2)
    }

    /// Returns the tokens that fit `blocks` blocks without a tail.
    #[inline]
    pub fn tokens(&self, blocks: u32) -> u32 {
        let slots = blocks.saturating_mul(self.block_size);
        if self.full_precision_prefix == 0 {
            return slots;
        }
        match slots.checked_sub(self.slots(self.full_precision_prefix)) {
            Some(rest) => self.full_precision_prefix + rest,
            None => (self.per_block * blocks).min(self.full_precision_prefix),
        }
    }

    /// Returns the blocks that the first `tokens` tokens fill.
    #[inline]
    pub fn full_blocks(&self, tokens: u32) -> u32 {
        if tokens < self.full_precision_prefix {
            // A block of wide rows is full when no further one fits, whatever is left of it.
            return tokens / self.per_block;
        }
        self.whole_blocks(self.slots(tokens))
    }

    /// Returns the number of whole blocks in `slots`.
    #[inline]
    fn whole_blocks(&self, slots: u32) -> u32 {
        let slow = || slots / self.block_size;
        slots.checked_shr(self.shift.into()).unwrap_or_else(slow)
    }

    /// Returns the place of token `position` as a code, or in the full-precision prefix.
    #[inline]
    pub fn place(&self, position: u32) -> Place {
        if position < self.full_precision_prefix {
            return self.wide(position);
        }
        let slot = self
            .slots(self.full_precision_prefix)
            .saturating_add(position - self.full_precision_prefix);
        // `block_size` is at least 1, by the layout's constructor.
        let (index, inside) = (slot / self.block_size, slot % self.block_size);
        Place { index, inside, is_wide: false }
    }

    /// Returns the place of token `position` of a sequence whose first `coded` tokens are codes.
    #[inline]
    pub fn place_in(&self, position: u32, coded: u32) -> Place {
        let begin = coded.max(self.full_precision_prefix);
        if !self.tail || position < begin {
            return self.place(position);
        }
        let row = self.wide(position - begin);
        Place { index: row.index + self.blocks(begin), ..row }
    }

    /// Returns the place of token `position` of the tail before an open step, once the step has
    /// made codes of that tail. The first `coded_before` tokens were codes, and `sealed_index` is
    /// the first block of that tail, both as in [`PlannedSequence`](crate::plan::PlannedSequence).
    pub fn place_sealed(&self, position: u32, coded_before: u32, sealed_index: u32) -> Place {
        let row = self.wide(position - coded_before.max(self.full_precision_prefix));
        Place { index: row.index + sealed_index, ..row }
    }

    /// Returns the first position in the tail of a sequence of `len` tokens whose first `coded` are
    /// codes; `len` without a tail.
    #[inline]
    pub fn tail_begin(&self, len: u32, coded: u32) -> u32 {
        if self.tail { coded.max(self.full_precision_prefix).min(len) } else { len }
    }

    /// Returns the blocks of full-precision prefix and codes of a sequence of `len` tokens whose
    /// first `coded` are codes.
    pub(crate) fn code_blocks(&self, len: u32, coded: u32) -> u32 {
        self.blocks(self.tail_begin(len, coded))
    }

    /// Returns the blocks of the tail of such a sequence.
    pub(crate) fn tail_blocks(&self, len: u32, coded: u32) -> u32 {
        let rows = len - self.tail_begin(len, coded);
        rows.div_ceil(self.per_block)
    }

    /// Returns the blocks that such a sequence holds.
    pub fn blocks_in(&self, len: u32, coded: u32) -> u32 {
        self.code_blocks(len, coded).saturating_add(self.tail_blocks(len, coded))
    }

    /// Returns the number of leading tokens that are codes in a sequence that has grown to `len`.
    pub fn coded_after(&self, coded: u32, len: u32) -> u32 {
        if !self.tail {
            return len;
        }
        let full = self.tokens(self.full_blocks(len)).min(len);
        let index = self.place(coded).index;
        let cut = coded > self.tokens(index).max(self.full_precision_prefix);
        // A block that holds codes already is filled with codes.
        let rest = if cut { self.tokens(index.saturating_add(1)).min(len) } else { 0 };
        coded.max(full).max(rest)
    }

    /// Returns the number of leading tokens that are codes in a sequence that is cut to `len`.
    pub fn coded_truncated(&self, coded: u32, len: u32) -> u32 {
        if !self.tail || coded <= len {
            return coded.min(len);
        }
        let whole = self.tokens(self.place(len).index);
        // The prefix alone leaves the block free for a tail.
        if len > whole.max(self.full_precision_prefix) { len } else { whole.min(len) }
    }

    /// Slots in use of entry `index` of the table of a sequence of `len` tokens.
    pub(crate) fn filled(&self, index: u32, len: u32, coded: u32) -> u32 {
        let begin = self.tail_begin(len, coded);
        let before_tail = self.blocks(begin);
        if index < before_tail {
            let before = index * self.block_size;
            return (self.slots(begin) - before).min(self.block_size);
        }
        let before = (index - before_tail) * self.per_block;
        let rows = (len - begin).saturating_sub(before).min(self.per_block);
        rows * self.wide_slots
    }

    /// Returns the place of the `nth` of adjacent wide rows.
    #[inline]
    fn wide(&self, nth: u32) -> Place {
        // `per_block` is at least 1.
        let (index, inside) = (nth / self.per_block, nth % self.per_block);
        Place { index, inside: inside * self.wide_slots, is_wide: true }
    }
}

#[cfg(test)]
mod tests;
