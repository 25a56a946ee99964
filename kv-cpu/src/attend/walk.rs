//! The tiles that a unit meets: where a tile begins and ends, and where its rows are.
//!
//! Every tile of K and V is brought in once for all query rows of the unit, fetched while the one
//! before is at work, and decoded first where many rows share it. Only keys that a query of the
//! unit sees are looked up: table entries of others may name blocks of another owner. What the rows
//! do with a tile is in `tile.rs`.
#![expect(
    clippy::arithmetic_side_effects,
    clippy::indexing_slicing,
    reason = "kernel code: indices come from the plan's guarantees and the unit's own bounds"
)]
use kv_core::plan::PlannedSequence;
use kv_core::{PlaneLayout, SlotMap};

use super::Job;
use super::reach::Reach;
use super::tile::{Tile, Tiles};
use super::unit::Unit;
use crate::kernel::{Ahead, BLOCK, HeadRows, Runs, StoredRows, TILE, TileRows};
use crate::num::{offset, to_u32, to_usize};
use crate::rows::PlaneRows;

/// Lets the rows of each head meet every tile of the unit's keys that any of its queries sees.
pub(super) fn for_tiles(
    job: &Job<'_>,
    unit: &Unit,
    sequence: &PlannedSequence,
    state: &mut Tiles<'_>,
    mut meet: impl FnMut(&mut Tiles<'_>, &Tile<'_>),
) {
    let reach = Reach::of(&job.options, sequence, (unit.q_begin, unit.q_end))
        .within(unit.kv_begin, unit.kv_end);
    let alike = Alike::new(job, sequence, state.tokens);
    let [mut some, mut others] = [const { [const { TileRows::new() }; 2] }; 2];
    let (mut rows, mut later) = (&mut some, &mut others);
    let mut found = [const { Found::new() }; 2];
    let mut runs = Runs::new();
    let (first, end) = unit.kv_heads;
    let (mut bounds, mut head) = (alike.tile(reach, unit.kv_begin), first);
    find(job, sequence, bounds, &mut found);
    of_head(&found, head, rows, &mut runs);
    while bounds.0 < bounds.1 {
        let (next, next_head) =
            if head + 1 < end { (bounds, head + 1) } else { (alike.tile(reach, bounds.1), first) };
        if next != bounds {
            find(job, sequence, next, &mut found);
        }
        of_head(&found, next_head, later, &mut runs);
        let [k, v] = &*rows;
        let is_wide = alike.is_wide(bounds.0);
        let stored = |plane: &'_ PlaneRows<'_>| plane.scale(head, is_wide);
        let tile = Tile {
            bounds,
            k: StoredRows { rows: k, layout: job.k.rows(is_wide), scale: stored(&job.k) },
            v: StoredRows { rows: v, layout: job.v.rows(is_wide), scale: stored(&job.v) },
            k_mean: alike.mean(job, bounds.0, head),
        };
        let mut ahead = Ahead::of(&runs);
        meet(&mut state.of_head(to_usize(head - first), &mut ahead), &tile);
        std::mem::swap(&mut rows, &mut later);
        (bounds, head) = (next, next_head);
    }
}

/// Looks up the rows of K and V of a tile.
pub(super) fn find<'a>(
    job: &Job<'a>,
    sequence: &PlannedSequence,
    bounds: (u32, u32),
    [k, v]: &mut [Found<'a>; 2],
) {
    k.find(job, &job.k, sequence, bounds);
    v.find(job, &job.v, sequence, bounds);
}

/// Those of a kv head, and the runs of memory that they lie in.
fn of_head<'a>(
    [k, v]: &[Found<'a>; 2],
    head: u32,
    [k_rows, v_rows]: &mut [TileRows<'a>; 2],
    runs: &mut Runs<'a>,
) {
    runs.clear();
    k.of_head(head, k_rows, runs);
    v.of_head(head, v_rows, runs);
}

/// Where the rows of a tile lie in the blocks of a plane, for all kv heads.
pub(super) struct Found<'a> {
    /// Memory of a block from the first head's first row on, and how many tokens follow there.
    runs: [(&'a [u8], usize); TILE],
    len: usize,
    /// Of a row.
    bytes: usize,
    /// Bytes from a token to the next one of a run, and from a head to the next.
    strides: (usize, usize),
}

impl<'a> Found<'a> {
    pub(super) const fn new() -> Self {
        Self { runs: [(&[], 0); TILE], len: 0, bytes: 0, strides: (0, 0) }
    }

    /// Looks up tokens `begin..end` of a sequence, which are all wide or none.
    fn find(
        &mut self,
        job: &Job<'a>,
        plane: &PlaneRows<'a>,
        sequence: &PlannedSequence,
        (begin, end): (u32, u32),
    ) {
        let table = job.plan.tables().row(sequence.row);
        let layout = plane.layout();
        self.len = 0;
        let mut position = begin;
        while position < end {
            let found = layout.slot_map().place_in(position, sequence.coded);
            self.bytes = plane.rows(found.is_wide).bytes();
            let at = layout.row_begin(found, 0);
            let per_head = offset(layout.row_begin(found, 1)) - offset(at);
            // Wide rows are few and leave gaps; the others follow each other to the end of a block.
            let (tokens, stride) = if found.is_wide {
                (1, self.bytes)
            } else {
                let left = layout.block_size() - found.inside;
                (left.min(end - position), offset(layout.token_stride()))
            };
            self.strides = (stride, per_head);
            let rest = offset(layout.block_bytes()) - offset(at);
            let block = plane.get(table[to_usize(found.index)].0, at, rest);
            self.runs[self.len] = (block, to_usize(tokens));
            self.len += 1;
            position += tokens;
        }
    }

    /// How many runs there are, and tokens of one.
    pub(super) fn len(&self) -> usize {
        self.len
    }
    pub(super) fn tokens(&self, run: usize) -> usize {
        self.runs[run].1
    }

    /// The rows of a run, of so many heads from one on.
    pub(super) fn of_heads(&self, run: usize, (first, heads): (u32, usize)) -> HeadRows<'a> {
        let (stride, per_head) = self.strides;
        let (block, tokens) = self.runs[run];
        let len = (heads - 1) * per_head + (tokens - 1) * stride + self.bytes;
        let rows = &block[to_usize(first) * per_head..][..len];
        HeadRows { rows, stride, per_head, bytes: self.bytes }
    }

    /// The rows of a head, and the runs of memory that they lie in.
    fn of_head(&self, head: u32, rows: &mut TileRows<'a>, runs: &mut Runs<'a>) {
        let (stride, per_head) = self.strides;
        rows.clear(self.bytes);
        for (block, tokens) in &self.runs[..self.len] {
            let begin = to_usize(head) * per_head;
            // One bounds check a block: from the first token's row to the end of the last one's.
            let run = &block[begin..][..(tokens - 1) * stride + self.bytes];
            rows.push(run, stride, *tokens);
            if stride == self.bytes {
                runs.push(run);
            } else {
                run.chunks(stride).for_each(|row| runs.push(&row[..self.bytes]));
            }
        }
    }
}

/// Which rows of a sequence are stored alike, and may share a tile: sinks, codes, the tail; codes
/// of one block where blocks have means.
pub(super) struct Alike<'a> {
    map: &'a SlotMap,
    sequence: &'a PlannedSequence,
    /// First position of the tail.
    tail: u32,
    by_block: bool,
    /// First position behind sink tokens that are seen besides a window. A tile ends there, so that
    /// every query sees one range of it.
    sink_tokens: u32,
    /// Tokens of a tile.
    tokens: u32,
    /// How far the first code lies behind a multiple of [`BLOCK`] slots.
    odd_slots: u32,
}

impl<'a> Alike<'a> {
    pub(super) fn new(job: &'a Job<'_>, sequence: &'a PlannedSequence, tokens: usize) -> Self {
        let layout: &PlaneLayout = job.k.layout();
        let map = layout.slot_map();
        let tail = map.tail_begin(sequence.kv_len, sequence.coded);
        let sink_tokens = job.options.window().map_or(0, |_| job.options.num_sink_tokens());
        let by_block = layout.has_block_means();
        let odd_slots = map.sinks().wrapping_mul(map.wide_slots()) % to_u32(BLOCK);
        Self { map, sequence, tail, by_block, sink_tokens, tokens: to_u32(tokens), odd_slots }
    }

    /// The tile at `from` or, where nothing is seen there, the next one; empty behind the last.
    /// Tiles lie at multiples of their length, so that a sum's order does not depend on the
    /// queries; those of codes behind sinks are moved to where blocks of [`BLOCK`] slots begin.
    /// Sinks count as if no block ended between them, so that the order does not depend on blocks
    /// either.
    pub(super) fn tile(&self, reach: Reach, from: u32) -> (u32, u32) {
        let (from, end) = reach.seen_from(from);
        if from >= end {
            return (end, end);
        }
        let cut = if from < self.sink_tokens { self.sink_tokens } else { u32::MAX };
        let limit = self.end(from).min(cut).min(end);
        let inside = match from.checked_sub(self.map.sinks()) {
            Some(behind) => behind % self.tokens + self.odd_slots,
            None => from,
        };
        (from, from.saturating_add(self.tokens - inside % self.tokens).min(limit))
    }

    pub(super) fn is_wide(&self, position: u32) -> bool {
        position < self.map.sinks() || position >= self.tail
    }

    /// One past the last row that is stored like that of `position`.
    fn end(&self, position: u32) -> u32 {
        if position < self.map.sinks() {
            self.map.sinks()
        } else if position >= self.tail {
            u32::MAX
        } else if self.by_block {
            self.tail.min(self.map.tokens(self.map.place(position).index.saturating_add(1)))
        } else {
            self.tail
        }
    }

    /// The mean that is off the row of `position`, as stored.
    fn mean<'k>(&self, job: &Job<'k>, position: u32, head: u32) -> Option<&'k [u8]> {
        if !self.by_block || self.is_wide(position) {
            return None;
        }
        let index = to_usize(self.map.place(position).index);
        let block = job.plan.tables().row(self.sequence.row)[index];
        Some(job.k.mean(block.0, head))
    }
}
