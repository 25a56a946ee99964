//! Reference of `kernels/plan.cu`: query tile by query tile, in the most obvious way.
use super::Work;
use crate::params::{Sequence, WorkItem};
use kv_core::invariant::Invariant;
use kv_core::num::{to_offset, to_u32, to_usize};

/// Tokens of a tile.
const TILE: u32 = 64;
/// Cost of a work item besides its tiles, in tiles.
pub(super) const OVERHEAD: u64 = 2;
/// Minimum tiles of a split: a shorter end of a query tile goes to its neighbour.
pub(super) const END_MIN: u64 = 3;
/// Minimum cost of a slot: merging shorter work items costs more than it gains.
pub(super) const SHARE_MIN: u64 = 4;
/// Tiles of a split if splits may not depend on the batch.
pub(super) const INVARIANT: u32 = 16;
/// The work items of a batch.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct DecodePlan {
    /// Ordered by slot.
    pub(super) items: Vec<WorkItem>,
    /// The first work item of every slot, followed by the number of work items.
    pub(super) starts: Vec<u32>,
    /// Number of partial results of query tiles that are split.
    pub(super) num_partials: u32,
}

impl DecodePlan {
    /// Plans a batch.
    pub(super) fn fill(&mut self, sequences: &[Sequence], work: &Work) {
        self.items.clear();
        self.starts.clear();
        self.num_partials = 0;
        let costs =
            sequences.iter().map(|sequence| work.cost(sequence, work.query_tiles(sequence)));
        let total = costs.sum::<u64>() * u64::from(work.kv_heads);
        let share = total.div_ceil(work.slots.max(1).into()).max(SHARE_MIN);
        let mut at = 0;
        for (sequence, index) in sequences.iter().zip(0..) {
            for head in 0..work.kv_heads {
                for query_tile in 0..work.query_tiles(sequence) {
                    let tiles = work.tiles(sequence, query_tile);
                    let item = WorkItem {
                        sequence: index,
                        head,
                        row: query_tile * 16,
                        kv_len: sequence.kv_len,
                        q_len: sequence.q_len,
                        q_start: sequence.q_start,
                        table: sequence.table,
                        ..WorkItem::default()
                    };
                    self.push(item, &SplitPlan::new(at, share, tiles, work.invariant));
                    at += cost(tiles, work.invariant);
                }
            }
        }
        let slots = to_usize(work.slots);
        self.starts.resize(slots + 1, to_u32(self.items.len()));
    }

    /// Adds the splits of one query tile.
    fn push(&mut self, item: WorkItem, splits: &SplitPlan) {
        let partial = if splits.num_splits > 1 { self.num_partials } else { 0 };
        for split in 0..splits.num_splits {
            let (slot, tile_begin, tile_end) = splits.split(split);
            let slot = to_offset(slot);
            if self.starts.len() <= slot {
                self.starts.resize(slot + 1, to_u32(self.items.len()));
            }
            let num_splits = splits.num_splits;
            self.items.push(WorkItem { tile_begin, tile_end, split, num_splits, partial, ..item });
        }
        self.num_partials += if splits.num_splits > 1 { splits.num_splits } else { 0 };
    }
}

impl Work {
    /// Returns the number of query tiles of one kv head: 16 rows each, queries one
    /// after another, heads within a query.
    pub(super) fn query_tiles(&self, sequence: &Sequence) -> u32 {
        if sequence.q_len > self.q_len_max {
            return 0;
        }
        let rows = u64::from(sequence.q_len) * u64::from(self.group);
        u32::try_from(rows.div_ceil(16)).invariant("query rows are counted in 32 bits")
    }

    /// Returns the cost of the first query tiles of one kv head.
    fn cost(&self, sequence: &Sequence, query_tiles: u32) -> u64 {
        (0..query_tiles).map(|i| cost(self.tiles(sequence, i), self.invariant)).sum()
    }

    /// Counts the tiles in which 16 rows see a key. Those of sink tokens come first; a tile that
    /// has both a sink token and the window's begin counts once.
    pub(super) fn tiles(&self, sequence: &Sequence, query_tile: u32) -> u32 {
        let row = u64::from(query_tile) * 16;
        let group = u64::from(self.group.max(1));
        // A query past `u32` is past the last one.
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

/// Returns the cost of a query tile.
pub(super) fn cost(tiles: u32, invariant: bool) -> u64 {
    let num_splits = if invariant { tiles.div_ceil(INVARIANT).max(1) } else { 1 };
    u64::from(tiles) + u64::from(num_splits) * OVERHEAD
}

/// The splits of one query tile.
#[derive(Debug)]
struct SplitPlan {
    /// Position of its first tile; of the query tile if splits are invariant or it has no tile.
    first: u64,
    share: u64,
    /// Slot of the first split.
    begin: u64,
    tiles: u32,
    num_splits: u32,
    invariant: bool,
}

impl SplitPlan {
    /// Splits the query tile that begins at `at`.
    fn new(at: u64, share: u64, tiles: u32, invariant: bool) -> Self {
        let whole = Self { first: at, share, begin: at / share, tiles, num_splits: 1, invariant };
        if tiles == 0 {
            return whole;
        }
        if invariant {
            return Self { num_splits: tiles.div_ceil(INVARIANT), ..whole };
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
        let num_splits = u32::try_from(end - begin + 1).invariant("slots are counted in 32 bits");
        Self { first, begin, num_splits, ..whole }
    }

    /// Returns the slot of a split, and its tiles.
    fn split(&self, split: u32) -> (u64, u32, u32) {
        let is_last = split + 1 == self.num_splits;
        let narrow = |tile: u64| u32::try_from(tile).invariant("tiles are counted in 32 bits");
        if self.invariant {
            let begin = split * INVARIANT;
            let place = self.first + u64::from(split) * (u64::from(INVARIANT) + OVERHEAD);
            let end = if is_last { self.tiles } else { begin + INVARIANT };
            return (place / self.share, begin, end);
        }
        let slot = self.begin + u64::from(split);
        let begin = if split == 0 { 0 } else { narrow(slot * self.share - self.first) };
        let end = if is_last { self.tiles } else { narrow((slot + 1) * self.share - self.first) };
        (slot, begin, end)
    }
}
