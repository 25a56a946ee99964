//! Where the tokens of a sequence lie in its blocks.
//!
//! A token takes one slot of its blocks, but a *sink* row, kept in 16 bits among quantised ones,
//! takes as many as its bytes need. Sinks are the first tokens of a sequence: almost every query
//! attends to them, and their keys are unlike all others. They lie in ordinary blocks, so sharing,
//! copy-on-write and eviction know nothing of them.
use crate::error::SpecError;

/// From positions of tokens to slots of a sequence's blocks.
///
/// With 2 sinks of 3 slots in blocks of 8:
///
/// ```text
/// slot    | 0  1  2 | 3  4  5 | 6 | 7 |  | 8 | 9 | ...
/// token   |    0    |    1    | 2 | 3 |  | 4 | 5 | ...
/// ```
///
/// A sink that would cross the end of a block begins in the next one instead.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SlotMap {
    block_size: u32,
    sinks: u32,
    sink_slots: u32,
    /// Sinks that fit one block.
    per_block: u32,
}

/// Where one token lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Place {
    /// Index in the sequence's block table.
    pub index: u32,
    /// First slot inside the block.
    pub inside: u32,
    /// Whether the row is a sink's, in 16 bits.
    pub is_sink: bool,
}

impl SlotMap {
    /// A slot for every token.
    pub(crate) fn plain(block_size: u32) -> Self {
        Self { block_size, sinks: 0, sink_slots: 1, per_block: block_size }
    }

    /// `sinks` tokens that take `sink_slots` slots each, then one slot a token.
    ///
    /// # Errors
    /// [`SpecError::Conflict`] when a block is too small for one sink.
    pub(crate) fn new(block_size: u32, sinks: u32, sink_slots: u32) -> Result<Self, SpecError> {
        if sinks == 0 {
            return Ok(Self::plain(block_size));
        }
        let sink_slots = sink_slots.max(1);
        let per_block = block_size.checked_div(sink_slots).unwrap_or(0);
        if per_block == 0 {
            let problem = format!(
                "a row in 16 bits takes {sink_slots} slots, a block has {block_size}: \
                 use larger blocks or no sinks"
            );
            return Err(SpecError::Conflict { what: "sinks", problem });
        }
        Ok(Self { block_size, sinks, sink_slots, per_block })
    }

    /// Tokens at the start of a sequence that are kept in 16 bits.
    pub fn sinks(&self) -> u32 {
        self.sinks
    }
    /// Slots of one sink.
    pub fn sink_slots(&self) -> u32 {
        self.sink_slots
    }

    /// Slots from the first of a sequence to behind its token `tokens - 1`; `u32::MAX` if more.
    pub fn slots(&self, tokens: u32) -> u32 {
        let Some(last_sink) = tokens.min(self.sinks).checked_sub(1) else {
            return tokens;
        };
        let place = self.sink(last_sink);
        place
            .index
            .saturating_mul(self.block_size)
            .saturating_add(place.inside)
            .saturating_add(self.sink_slots)
            .saturating_add(tokens.saturating_sub(self.sinks))
    }

    /// Blocks that hold `tokens` tokens.
    pub fn blocks(&self, tokens: u32) -> u32 {
        self.slots(tokens).div_ceil(self.block_size)
    }

    /// Tokens that fit `blocks` blocks.
    pub fn tokens(&self, blocks: u32) -> u32 {
        let slots = blocks.saturating_mul(self.block_size);
        match slots.checked_sub(self.slots(self.sinks)) {
            Some(rest) => self.sinks.saturating_add(rest),
            None => self.per_block.saturating_mul(blocks).min(self.sinks),
        }
    }

    /// Where token `position` of a sequence lies.
    pub fn place(&self, position: u32) -> Place {
        if position < self.sinks {
            return self.sink(position);
        }
        let slot = self.slots(self.sinks).saturating_add(position.saturating_sub(self.sinks));
        // `block_size` is at least 1, by the layout's constructor.
        let index = slot.checked_div(self.block_size).unwrap_or(0);
        let inside = slot.checked_rem(self.block_size).unwrap_or(0);
        Place { index, inside, is_sink: false }
    }

    fn sink(&self, position: u32) -> Place {
        // `per_block` is at least 1 where there are sinks.
        let index = position.checked_div(self.per_block).unwrap_or(0);
        let nth = position.checked_rem(self.per_block).unwrap_or(0);
        Place { index, inside: nth.saturating_mul(self.sink_slots), is_sink: true }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_sinks_a_token_is_a_slot() {
        let map = SlotMap::plain(4);
        assert_eq!((map.slots(9), map.blocks(9), map.tokens(3)), (9, 3, 12));
        assert_eq!(map.place(6), Place { index: 1, inside: 2, is_sink: false });
        assert_eq!(SlotMap::new(4, 0, 9).unwrap(), map);
    }

    #[test]
    fn places_follow_each_other_without_overlap() {
        for (block_size, sinks, sink_slots) in
            [(8, 2, 3), (16, 4, 4), (16, 4, 6), (5, 7, 2), (7, 1, 7), (3, 4, 1), (64, 4, 4)]
        {
            let map = SlotMap::new(block_size, sinks, sink_slots).unwrap();
            let mut end = 0;
            for position in 0..60 {
                let place = map.place(position);
                let wide = if position < sinks { sink_slots } else { 1 };
                assert_eq!(place.is_sink, position < sinks);
                assert!(place.inside + wide <= block_size, "{map:?}: a row crosses a block");
                let begin = place.index * block_size + place.inside;
                assert!(begin >= end, "{map:?}: token {position} overlaps the one before");
                end = begin + wide;
                assert_eq!(map.slots(position + 1), end);
                // As many tokens fit as blocks were asked for, and not one more.
                let blocks = map.blocks(position + 1);
                assert!(map.tokens(blocks) > position, "{map:?}: {position}");
                assert!(map.blocks(map.tokens(blocks)) <= blocks);
                assert!(map.blocks(map.tokens(blocks) + 1) > blocks);
            }
        }
    }

    #[test]
    fn a_block_must_hold_a_sink() {
        let refused = SlotMap::new(3, 4, 4).unwrap_err();
        assert!(refused.to_string().contains("takes 4 slots, a block has 3"), "{refused}");
    }
}
