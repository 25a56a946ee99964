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
use crate::kernel::{Ahead, Runs, StoredRows, TILE};
use crate::num::{offset, to_u32, to_usize};
use crate::rows::PlaneRows;

/// Encoded rows of the tokens of a tile.
pub(super) type TileRows<'a> = [&'a [u8]; TILE];

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
    let alike = Alike::new(job, sequence);
    let (mut some, mut others) = ([[&[][..]; TILE]; 2], [[&[][..]; TILE]; 2]);
    let (mut rows, mut later) = (&mut some, &mut others);
    let mut runs = Runs::new();
    let (first, end) = unit.kv_heads;
    let (mut bounds, mut head) = (alike.tile(reach, unit.kv_begin), first);
    find_rows(job, (sequence, head), bounds, rows, &mut runs);
    while bounds.0 < bounds.1 {
        let (next, next_head) =
            if head + 1 < end { (bounds, head + 1) } else { (alike.tile(reach, bounds.1), first) };
        find_rows(job, (sequence, next_head), next, later, &mut runs);
        let [k, v] = &*rows;
        let len = to_usize(bounds.1 - bounds.0);
        let is_wide = alike.is_wide(bounds.0);
        let stored = |plane: &'_ PlaneRows<'_>| plane.scale(head, is_wide);
        let tile = Tile {
            bounds,
            k: StoredRows { rows: &k[..len], layout: job.k.rows(is_wide), scale: stored(&job.k) },
            v: StoredRows { rows: &v[..len], layout: job.v.rows(is_wide), scale: stored(&job.v) },
            k_mean: alike.mean(job, bounds.0, head),
        };
        meet(&mut state.of_head(to_usize(head - first), Ahead::of(&runs)), &tile);
        std::mem::swap(&mut rows, &mut later);
        (bounds, head) = (next, next_head);
    }
}

/// Looks up the rows of K and V of tokens `begin..end` of a sequence, which are all wide or none,
/// and the runs of memory that they lie in.
fn find_rows<'a>(
    job: &Job<'a>,
    at: (&PlannedSequence, u32),
    bounds: (u32, u32),
    [k, v]: &mut [TileRows<'a>; 2],
    runs: &mut Runs<'a>,
) {
    runs.clear();
    find_plane(job, &job.k, at, bounds, (k, runs));
    find_plane(job, &job.v, at, bounds, (v, runs));
}

fn find_plane<'a>(
    job: &Job<'a>,
    plane: &PlaneRows<'a>,
    (sequence, head): (&PlannedSequence, u32),
    (begin, end): (u32, u32),
    (rows, runs): (&mut TileRows<'a>, &mut Runs<'a>),
) {
    let table = job.plan.tables().row(sequence.row);
    let layout = plane.layout();
    let block_size = layout.block_size();
    let mut position = begin;
    while position < end {
        let found = layout.slot_map().place_in(position, sequence.coded);
        let bytes = plane.rows(found.is_wide).bytes();
        // Wide rows are few and leave gaps; the others follow each other to the end of a block.
        let (tokens, stride) = if found.is_wide {
            (1, bytes)
        } else {
            ((block_size - found.inside).min(end - position), offset(layout.token_stride()))
        };
        // One bounds check a block: from the first token's row to the end of the last one's.
        let reach = to_usize(tokens - 1) * stride + bytes;
        let run = plane.get(table[to_usize(found.index)].0, layout.row_begin(found, head), reach);
        let to = &mut rows[to_usize(position - begin)..][..to_usize(tokens)];
        for (row, from) in to.iter_mut().zip(run.chunks(stride)) {
            *row = &from[..bytes];
        }
        if stride == bytes {
            runs.push(run);
        } else {
            for row in to {
                runs.push(row);
            }
        }
        position += tokens;
    }
}

/// Which rows of a sequence are stored alike, and may share a tile: sinks, codes, the tail; codes
/// of one block where blocks have means.
struct Alike<'a> {
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
}

impl<'a> Alike<'a> {
    fn new(job: &'a Job<'_>, sequence: &'a PlannedSequence) -> Self {
        let layout: &PlaneLayout = job.k.layout();
        let map = layout.slot_map();
        let tail = map.tail_begin(sequence.kv_len, sequence.coded);
        let sink_tokens = job.options.window().map_or(0, |_| job.options.num_sink_tokens());
        let tokens = to_u32(job.cpu.kernels.tokens());
        Self { map, sequence, tail, by_block: layout.has_block_means(), sink_tokens, tokens }
    }

    /// The tile at `from` or, where nothing is seen there, the next one; empty behind the last.
    /// Tiles lie at multiples of their length, so that a sum's order does not depend on the
    /// queries.
    fn tile(&self, reach: Reach, from: u32) -> (u32, u32) {
        let (from, end) = reach.seen_from(from);
        if from >= end {
            return (end, end);
        }
        let tile = self.tokens;
        let cut = if from < self.sink_tokens { self.sink_tokens } else { u32::MAX };
        let limit = self.end(from).min(cut).min(end);
        (from, (from / tile * tile).saturating_add(tile).min(limit))
    }

    fn is_wide(&self, position: u32) -> bool {
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
