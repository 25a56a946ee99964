//! Reference of `kernels/plan.cu`: item by item, in the most obvious transfer.
#![expect(
    clippy::arithmetic_side_effects,
    reason = "costs are bounded by the tokens of a batch, u32 each, so sums fit u64; divisors are \
              constants or at least 1"
)]
use super::Work;
use crate::params::{Piece, Sequence};
use kv_core::num::to_u32;

/// Tokens of a tile.
const TILE: u32 = 64;
/// Cost of a work item besides its tiles, in tiles.
pub(super) const OVERHEAD: u64 = 2;
/// Minimum tiles of a split: a shorter end of an item goes to its neighbour.
pub(super) const END_MIN: u64 = 3;
/// Minimum cost of a slot: merging shorter work items costs more than it gains.
pub(super) const SHARE_MIN: u64 = 4;
/// Tiles of a split if splits may not depend on the batch.
pub(super) const INVARIANT: u32 = 16;
/// The work items of a batch.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct DecodePlan {
    /// Ordered by slot.
    pub(super) pieces: Vec<Piece>,
    /// The first work item of every slot, followed by the number of work items.
    pub(super) starts: Vec<u32>,
    /// Number of partial results of items that are split.
    pub(super) num_partials: u32,
}

impl DecodePlan {
    /// Plans a batch.
    pub(super) fn fill(&mut self, sequences: &[Sequence], work: &Work) {
        self.pieces.clear();
        self.starts.clear();
        self.num_partials = 0;
        let costs = sequences.iter().map(|sequence| work.cost(sequence, work.row_tiles(sequence)));
        let total = costs.sum::<u64>() * u64::from(work.kv_heads);
        let share = total.div_ceil(work.slots.max(1).into()).max(SHARE_MIN);
        let mut at = 0;
        for (sequence, index) in sequences.iter().zip(0..) {
            for head in 0..work.kv_heads {
                for row_tile in 0..work.row_tiles(sequence) {
                    let tiles = work.tiles(sequence, row_tile);
                    let piece =
                        Piece { sequence: index, head, row: row_tile * 16, ..Piece::default() };
                    self.cut(piece, &Cut::new(at, share, tiles, work.invariant));
                    at += cost(tiles, work.invariant);
                }
            }
        }
        let slots = usize::try_from(work.slots).unwrap_or(usize::MAX);
        self.starts.resize(slots.saturating_add(1), to_u32(self.pieces.len()));
    }

    /// Adds the splits of one item.
    fn cut(&mut self, piece: Piece, cut: &Cut) {
        let partial = if cut.parts > 1 { self.num_partials } else { 0 };
        for part in 0..cut.parts {
            let (slot, tile_begin, tile_end) = cut.part(part);
            let slot = usize::try_from(slot).unwrap_or(usize::MAX);
            if self.starts.len() <= slot {
                self.starts.resize(slot.saturating_add(1), to_u32(self.pieces.len()));
            }
            let parts = cut.parts;
            self.pieces.push(Piece { tile_begin, tile_end, part, parts, partial, ..piece });
        }
        self.num_partials += if cut.parts > 1 { cut.parts } else { 0 };
    }
}

impl Work {
    /// Returns the items of one kv head: 16 rows each, queries one after another, heads within a
    /// query.
    pub(super) fn row_tiles(&self, sequence: &Sequence) -> u32 {
        if sequence.q_len > self.q_len_max {
            return 0;
        }
        let rows = u64::from(sequence.q_len) * u64::from(self.group);
        u32::try_from(rows.div_ceil(16)).unwrap_or(u32::MAX)
    }

    /// Returns the cost of the first items of one kv head.
    fn cost(&self, sequence: &Sequence, row_tiles: u32) -> u64 {
        (0..row_tiles).map(|i| cost(self.tiles(sequence, i), self.invariant)).sum()
    }

    /// Counts the tiles in which 16 rows see a key. Those of sink tokens come first; a tile that
    /// has both a sink token and the window's begin counts once.
    pub(super) fn tiles(&self, sequence: &Sequence, row_tile: u32) -> u32 {
        let row = u64::from(row_tile) * 16;
        let group = u64::from(self.group.max(1));
        let query = |row: u64| u32::try_from(row / group).unwrap_or(u32::MAX);
        let last = query(row + 15).min(sequence.q_len.saturating_sub(1));
        let (begin, _) = self.visible(sequence, query(row));
        let (_, end) = self.visible(sequence, last);
        let first = begin / TILE;
        let sink_tiles = self.sink_tokens.min(begin).div_ceil(TILE).min(first);
        sink_tiles + if end > begin { end.div_ceil(TILE) - first } else { 0 }
    }

    /// Computes `AttentionOptions::visible`.
    fn visible(&self, sequence: &Sequence, query: u32) -> (u32, u32) {
        let len = i64::from(sequence.kv_len);
        let position = len - i64::from(sequence.q_len) + i64::from(query);
        let end = if self.full { len } else { (position + 1).clamp(0, len) };
        let begin = match self.window_left {
            u32::MAX => 0,
            left => (position - i64::from(left)).clamp(0, end),
        };
        (u32::try_from(begin).unwrap_or(0), u32::try_from(end).unwrap_or(0))
    }
}

/// Returns the cost of an item.
pub(super) fn cost(tiles: u32, invariant: bool) -> u64 {
    let parts = if invariant { tiles.div_ceil(INVARIANT).max(1) } else { 1 };
    u64::from(tiles) + u64::from(parts) * OVERHEAD
}

/// The splits of one item.
#[derive(Debug)]
struct Cut {
    /// Position of its first tile; of the item if splits are invariant or it has no tile.
    first: u64,
    share: u64,
    /// Slot of the first split.
    begin: u64,
    tiles: u32,
    parts: u32,
    invariant: bool,
}

impl Cut {
    /// Splits the item that begins at `at`.
    fn new(at: u64, share: u64, tiles: u32, invariant: bool) -> Self {
        let whole = Self { first: at, share, begin: at / share, tiles, parts: 1, invariant };
        if tiles == 0 {
            return whole;
        }
        if invariant {
            return Self { parts: tiles.div_ceil(INVARIANT), ..whole };
        }
        let first = at + OVERHEAD;
        let stop = first + u64::from(tiles);
        let (mut begin, mut end) = (first / share, (stop - 1) / share);
        if begin < end && (begin + 1) * share - first < END_MIN {
            begin += 1;
        }
        if begin < end && stop - end * share < END_MIN {
            end -= 1;
        }
        let parts = u32::try_from(end - begin + 1).unwrap_or(u32::MAX);
        Self { first, begin, parts, ..whole }
    }

    /// Returns the slot of a split, and its tiles.
    fn part(&self, part: u32) -> (u64, u32, u32) {
        let is_last = part + 1 == self.parts;
        let narrow = |tile: u64| u32::try_from(tile).unwrap_or(u32::MAX);
        if self.invariant {
            let begin = part * INVARIANT;
            let place = self.first + u64::from(part) * (u64::from(INVARIANT) + OVERHEAD);
            let end = if is_last { self.tiles } else { begin + INVARIANT };
            return (place / self.share, begin, end);
        }
        let slot = self.begin + u64::from(part);
        let begin = if part == 0 { 0 } else { narrow(slot * self.share - self.first) };
        let end = if is_last { self.tiles } else { narrow((slot + 1) * self.share - self.first) };
        (slot, begin, end)
    }
}
