//! One unit of attention: some queries of one kv head against one part of a context, tile by tile.
//!
//! Every tile of K and V is brought in once for all query rows of the unit, decoded first where many
//! rows share it and fetched ahead where few do. A query row meets exactly the tokens it sees: nothing
//! is masked by multiplying with zero.
#![expect(
    clippy::arithmetic_side_effects,
    clippy::indexing_slicing,
    reason = "kernel code: indices come from the plan's guarantees and sizes are set in `run`"
)]
use std::marker::PhantomData;

use kv_core::plan::PlannedSequence;

use super::merge::Merge;
use super::{Blank, Heads, Job, ROWS_PER_UNIT};
use crate::encoding::Encoding;
use crate::kernel::{ROWS, Running, Scores, Softmax, Sums, TILE};
use crate::num::{offset, to_usize};
use crate::rows::{PlaneRows, RowAt};
use crate::workspace::AlignedFloats;

/// Query rows from which on a 16-bit tile is decoded once instead of at each use.
const ROWS_STAGED: usize = 16;

/// Some queries of one kv head and one part of a context.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Unit {
    entry: usize,
    kv_head: u32,
    kv_begin: u32,
    kv_end: u32,
    q_begin: u32,
    q_end: u32,
    /// Partial result of the first head of the sequence's first query, where the context is cut.
    partial: Option<usize>,
}

/// Memory of one thread.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    q: AlignedFloats,
    out: AlignedFloats,
    scores: AlignedFloats,
    k: AlignedFloats,
    v: AlignedFloats,
    running: Vec<Running>,
}

impl Scratch {
    /// A row for a merge.
    pub(super) fn merge_row(&mut self, len: usize) -> &mut [f32] {
        self.out.get(len)
    }
}

/// Cuts a call into units and returns how many partial results they leave.
pub(super) fn plan(
    job: &Job<'_>,
    units: &mut Vec<Unit>,
    merges: &mut Vec<Merge>,
    blanks: &mut Vec<Blank>,
) -> usize {
    units.clear();
    merges.clear();
    blanks.clear();
    let per_unit = (ROWS_PER_UNIT / to_usize(job.heads.group)).max(1);
    let per_unit = u32::try_from(per_unit).unwrap_or(1);
    let q_heads = to_usize(job.q.rows().heads());
    let mut partials = 0;
    for (entry, sequence) in job.plan.sequences().iter().enumerate() {
        let splits = job.plan.splits();
        let first = to_usize(sequence.split_start);
        let splits = &splits[first..first + to_usize(sequence.num_splits)];
        let rows = to_usize(sequence.q_len) * q_heads;
        let cut = splits.len() > 1;
        if splits.is_empty() && sequence.q_len > 0 {
            blanks.push(Blank { entry });
        }
        if cut {
            merges.extend((0..sequence.q_len).map(|query| Merge {
                entry,
                query,
                first: partials + to_usize(query) * q_heads,
                stride: rows,
                parts: splits.len(),
            }));
        }
        for split in splits {
            let partial = cut.then_some(partials);
            partials += if cut { rows } else { 0 };
            // Late queries see most keys, so their units come first.
            for tile in (0..sequence.q_len.div_ceil(per_unit)).rev() {
                let q_begin = tile * per_unit;
                let q_end = q_begin.saturating_add(per_unit).min(sequence.q_len);
                units.extend((0..job.k.layout().num_kv_heads()).map(|kv_head| Unit {
                    entry,
                    kv_head,
                    kv_begin: split.kv_begin,
                    kv_end: split.kv_end,
                    q_begin,
                    q_end,
                    partial,
                }));
            }
        }
    }
    partials
}

/// Partial results of all units: a row and its running maximum and sum, each written by one unit.
#[derive(Debug)]
pub(super) struct Partials<'a> {
    rows: (*mut f32, usize),
    running: (*mut Running, usize),
    held: PhantomData<&'a mut [f32]>,
}

// SAFETY: threads reach the results through `put` and `get` alone, whose conditions keep them apart.
unsafe impl Sync for Partials<'_> {}

impl<'a> Partials<'a> {
    pub(super) fn new(rows: &'a mut [f32], running: &'a mut [Running]) -> Self {
        Self {
            rows: (rows.as_mut_ptr(), rows.len()),
            running: (running.as_mut_ptr(), running.len()),
            held: PhantomData,
        }
    }

    /// # Safety
    /// 1. Nobody else uses result `index` meanwhile.
    unsafe fn put(&self, index: usize, heads: Heads, running: Running, row: &[f32]) {
        let begin = index * heads.stride_v;
        assert!(
            index < self.running.1 && begin + heads.dim_v <= self.rows.1,
            "a partial result lies inside its memory"
        );
        let to = self.running.0.wrapping_add(index);
        // SAFETY: inside the slice `new` got, by the assertion, and unshared by condition 1.
        unsafe { to.write(running) };
        let to = self.rows.0.wrapping_add(begin);
        // SAFETY: as above.
        let to = unsafe { std::slice::from_raw_parts_mut(to, heads.dim_v) };
        to.copy_from_slice(&row[..heads.dim_v]);
    }

    /// # Safety
    /// 1. Nobody writes result `index` meanwhile.
    pub(super) unsafe fn get(&self, index: usize, heads: Heads) -> (Running, &[f32]) {
        let begin = index * heads.stride_v;
        assert!(
            index < self.running.1 && begin + heads.dim_v <= self.rows.1,
            "a partial result lies inside its memory"
        );
        let from = self.running.0.cast_const().wrapping_add(index);
        // SAFETY: inside the slice `new` got, by the assertion, and not written by condition 1.
        let running = unsafe { from.read() };
        let from = self.rows.0.cast_const().wrapping_add(begin);
        // SAFETY: as above.
        (running, unsafe { std::slice::from_raw_parts(from, heads.dim_v) })
    }
}

/// Encoded rows of the tokens of a tile.
type TileRows<'a> = [&'a [u8]; TILE];

/// The state of a unit between tiles.
struct Tiles<'s> {
    q: &'s [f32],
    out: &'s mut [f32],
    scores: &'s mut [f32],
    running: &'s mut [Running],
    /// Tokens of the tile that each query row sees, from the tile's begin.
    group: usize,
}

/// Runs one unit.
pub(super) fn run(job: &Job<'_>, unit: &Unit, scratch: &mut Scratch, partials: &Partials<'_>) {
    let Some(sequence) = job.sequence(unit.entry).copied() else {
        return;
    };
    let heads = job.heads;
    let group = to_usize(heads.group);
    let rows = to_usize(unit.q_end - unit.q_begin) * group;
    let q = scratch.q.get(rows * heads.stride_k);
    let out = scratch.out.get(rows * heads.stride_v);
    out.fill(0.0);
    load_queries(job, unit, &sequence, q);
    scratch.running.clear();
    scratch.running.resize(rows, Running::EMPTY);
    let staged = rows >= ROWS_STAGED;
    let mut state = Tiles {
        q,
        out,
        scores: scratch.scores.get(rows * TILE),
        running: &mut scratch.running,
        group,
    };
    let staged_tokens = if staged { TILE } else { 0 };
    let k = scratch.k.get(staged_tokens * heads.stride_k);
    let v = scratch.v.get(staged_tokens * heads.stride_v);
    for_tiles(job, unit, &sequence, &mut state, (k, v));
    for row in 0..rows {
        let query = unit.q_begin + u32::try_from(row / group).unwrap_or(0);
        let head = unit.kv_head * heads.group + u32::try_from(row % group).unwrap_or(0);
        let values = &mut state.out[row * heads.stride_v..][..heads.dim_v];
        let running = state.running[row];
        if let Some(first) = unit.partial {
            let q_heads = to_usize(job.q.rows().heads());
            let index = first + to_usize(query) * q_heads + to_usize(head);
            // SAFETY: each query and head of a part belongs to one unit.
            unsafe { partials.put(index, heads, running, values) };
        } else {
            let at = RowAt { entry: unit.entry, start: sequence.q_start, token: query };
            // SAFETY: an uncut context has one unit for each query and head.
            unsafe { job.finish(at, head, running, values) };
        }
    }
}

/// Decodes the unit's query rows: queries one after another, the heads of the group within each.
fn load_queries(job: &Job<'_>, unit: &Unit, sequence: &PlannedSequence, q: &mut [f32]) {
    let (heads, encoding) = (job.heads, job.q.encoding());
    let group = to_usize(heads.group);
    for (index, row) in q.chunks_exact_mut(heads.stride_k).enumerate() {
        let at = RowAt {
            entry: unit.entry,
            start: sequence.q_start,
            token: unit.q_begin + u32::try_from(index / group).unwrap_or(0),
        };
        let head = unit.kv_head * heads.group + u32::try_from(index % group).unwrap_or(0);
        let (values, padding) = row.split_at_mut(heads.dim_k);
        padding.fill(0.0);
        job.cpu.kernels.decode(encoding, job.q.get(at, head, 1), values);
    }
}

/// Looks up the rows of tokens `begin..end` of a sequence.
fn find_rows<'a>(
    job: &Job<'a>,
    plane: &PlaneRows<'a>,
    (table_row, head): (u32, u32),
    (begin, end): (u32, u32),
    rows: &mut TileRows<'a>,
) {
    let table = job.plan.tables().row(table_row);
    let layout = plane.layout();
    let block_size = layout.block_size();
    let (bytes, stride) = (offset(layout.row_bytes()), offset(layout.token_stride()));
    let mut position = begin;
    while position < end {
        // `block_size` is at least 1, by the layout's constructor.
        let (index, inside) = (position / block_size, position % block_size);
        let tokens = (block_size - inside).min(end - position);
        // One bounds check a block: from the first token's row to the end of the last one's.
        let reach = to_usize(tokens - 1) * stride + bytes;
        let run = plane.get(table[to_usize(index)].0, plane.row_begin(inside, head), reach);
        let to = &mut rows[to_usize(position - begin)..][..to_usize(tokens)];
        for (row, from) in to.iter_mut().zip(run.chunks(stride)) {
            *row = &from[..bytes];
        }
        position += tokens;
    }
}

/// Meets every tile of the unit's keys that any of its queries sees.
fn for_tiles(
    job: &Job<'_>,
    unit: &Unit,
    sequence: &PlannedSequence,
    state: &mut Tiles<'_>,
    (k_stage, v_stage): (&mut [f32], &mut [f32]),
) {
    // Bounds never fall from one query to the next, so the first and the last tell the union.
    let (begin, _) = job.options.visible(sequence, unit.q_begin);
    let (_, end) = job.options.visible(sequence, unit.q_end - 1);
    let (begin, end) = (begin.max(unit.kv_begin), end.min(unit.kv_end));
    if begin >= end {
        return;
    }
    let tile = u32::try_from(TILE).unwrap_or(1);
    let at = (sequence.row, unit.kv_head);
    // Tiles lie at multiples of their length, so that a sum's order does not depend on the queries.
    let next_bounds = |from: u32| (from, (from / tile * tile).saturating_add(tile).min(end));
    let (mut k_rows, mut k_next, mut v_rows): (TileRows<'_>, TileRows<'_>, TileRows<'_>) =
        ([&[]; TILE], [&[]; TILE], [&[]; TILE]);
    let mut bounds = next_bounds(begin);
    find_rows(job, &job.k, at, bounds, &mut k_rows);
    while bounds.0 < bounds.1 {
        let len = to_usize(bounds.1 - bounds.0);
        find_rows(job, &job.v, at, bounds, &mut v_rows);
        let next = next_bounds(bounds.1);
        let next = (next.0.min(end), next.1);
        find_rows(job, &job.k, at, next, &mut k_next);
        let next_len = to_usize(next.1.saturating_sub(next.0));
        let mut tile = Tile {
            bounds,
            k: (job.k.encoding(), &k_rows[..len]),
            v: (job.v.encoding(), &v_rows[..len]),
            v_ahead: &v_rows[..len],
            k_ahead: &k_next[..next_len],
        };
        let (mut k_staged, mut v_staged): (TileRows<'_>, TileRows<'_>) = ([&[]; TILE], [&[]; TILE]);
        if !k_stage.is_empty() {
            (tile.v_ahead, tile.k_ahead) = (&[], &[]);
            let heads = job.heads;
            tile.k = stage(job, tile.k, (heads.dim_k, heads.stride_k), k_stage, &mut k_staged);
            tile.v = stage(job, tile.v, (heads.dim_v, heads.stride_v), v_stage, &mut v_staged);
        }
        meet(job, unit, sequence, state, &tile);
        std::mem::swap(&mut k_rows, &mut k_next);
        bounds = next;
    }
}

/// Decodes the rows of a tile, unless they are `f32` already.
fn stage<'s, 't>(
    job: &Job<'_>,
    (encoding, rows): (Encoding, &'t [&'s [u8]]),
    (dim, stride): (usize, usize),
    memory: &'s mut [f32],
    staged: &'t mut TileRows<'s>,
) -> (Encoding, &'t [&'s [u8]]) {
    if encoding == Encoding::F32 {
        return (encoding, rows);
    }
    for ((from, memory), to) in
        rows.iter().zip(memory.chunks_exact_mut(stride)).zip(staged.iter_mut())
    {
        let (values, _) = memory.split_at_mut(dim);
        job.cpu.kernels.decode(encoding, from, values);
        *to = bytemuck::cast_slice(values);
    }
    (Encoding::F32, &staged[..rows.len()])
}

/// One tile of K and V.
struct Tile<'t> {
    /// Positions of its tokens.
    bounds: (u32, u32),
    k: (Encoding, &'t [&'t [u8]]),
    v: (Encoding, &'t [&'t [u8]]),
    /// What to fetch while scoring, and while summing.
    v_ahead: &'t [&'t [u8]],
    k_ahead: &'t [&'t [u8]],
}

/// Lets all query rows meet a tile, a few rows at a time.
fn meet(
    job: &Job<'_>,
    unit: &Unit,
    sequence: &PlannedSequence,
    state: &mut Tiles<'_>,
    tile: &Tile<'_>,
) {
    let rows = state.running.len();
    let (begin, end) = tile.bounds;
    let group = state.group;
    let seen = |row: usize| {
        let query = unit.q_begin + u32::try_from(row / group).unwrap_or(0);
        let (low, high) = job.options.visible(sequence, query);
        let (low, high) = (low.clamp(begin, end) - begin, high.clamp(begin, end) - begin);
        (to_usize(low), to_usize(high.max(low)))
    };
    let mut row = 0;
    while row < rows {
        let count = match rows - row {
            1 => 1,
            2 | 3 => 2,
            _ => ROWS,
        };
        let mut ranges = [(0, 0); ROWS];
        for (i, range) in ranges[..count].iter_mut().enumerate() {
            *range = seen(row + i);
        }
        meet_rows(job, state, tile, row, &ranges[..count]);
        row += count;
    }
}

/// Lets a few neighbouring query rows meet a tile: the tokens that all of them see together, the
/// others row by row, in the order of positions.
fn meet_rows(
    job: &Job<'_>,
    state: &mut Tiles<'_>,
    tile: &Tile<'_>,
    first: usize,
    ranges: &[(usize, usize)],
) {
    let low = ranges.iter().map(|r| r.0).max().unwrap_or(0);
    let high = ranges.iter().map(|r| r.1).min().unwrap_or(0);
    // Empty, and then at a place where it cuts no row's own range in the middle of an order.
    let common = if low < high { (low, high) } else { (TILE, TILE) };
    let count = ranges.len();
    // What the first rows fetch ahead serves all.
    let (v_ahead, k_ahead): (&[_], &[_]) =
        if first == 0 { (tile.v_ahead, tile.k_ahead) } else { (&[], &[]) };
    if common.0 < common.1 {
        score(job, state, tile, (first, count), common, v_ahead);
    }
    for (i, range) in ranges.iter().enumerate() {
        let (left, right) = around(*range, common);
        for part in [left, right] {
            if part.0 < part.1 {
                score(job, state, tile, (first + i, 1), part, &[]);
            }
        }
        if range.0 < range.1 {
            weigh(job, state, first + i, *range);
        }
    }
    for (i, range) in ranges.iter().enumerate() {
        let (left, _) = around(*range, common);
        if left.0 < left.1 {
            sum(job, state, tile, (first + i, 1), left, &[]);
        }
    }
    if common.0 < common.1 {
        sum(job, state, tile, (first, count), common, k_ahead);
    }
    for (i, range) in ranges.iter().enumerate() {
        let (_, right) = around(*range, common);
        if right.0 < right.1 {
            sum(job, state, tile, (first + i, 1), right, &[]);
        }
    }
}

/// What of a range lies before and what behind another inside it.
fn around(
    (low, high): (usize, usize),
    (common_low, common_high): (usize, usize),
) -> ((usize, usize), (usize, usize)) {
    let left = (low, high.min(common_low));
    let right = (low.max(common_high), high);
    (left, right)
}

fn score(
    job: &Job<'_>,
    state: &mut Tiles<'_>,
    tile: &Tile<'_>,
    (row, rows): (usize, usize),
    range: (usize, usize),
    ahead: &[&[u8]],
) {
    let (encoding, k) = tile.k;
    let stride = job.heads.stride_k;
    let mut args = Scores {
        rows,
        q: &state.q[row * stride..],
        stride,
        dim: job.heads.dim_k,
        k,
        range,
        out: &mut state.scores[row * TILE..],
        ahead,
    };
    job.cpu.kernels.scores(encoding, &mut args);
}

fn weigh(job: &Job<'_>, state: &mut Tiles<'_>, row: usize, range: (usize, usize)) {
    let factor = job.cpu.kernels.softmax(&mut Softmax {
        scores: &mut state.scores[row * TILE..][..TILE],
        range,
        scale: job.options.scale(),
        cap: job.options.cap(),
        running: &mut state.running[row],
    });
    // The maximum seldom moves after the first tiles.
    if factor.to_bits() != 1.0_f32.to_bits() {
        let stride = job.heads.stride_v;
        let out = &mut state.out[row * stride..][..stride];
        job.cpu.kernels.scale(out, factor);
    }
}

fn sum(
    job: &Job<'_>,
    state: &mut Tiles<'_>,
    tile: &Tile<'_>,
    (row, rows): (usize, usize),
    range: (usize, usize),
    ahead: &[&[u8]],
) {
    let (encoding, v) = tile.v;
    let stride = job.heads.stride_v;
    let mut args = Sums {
        rows,
        weights: &state.scores[row * TILE..],
        v,
        range,
        dim: job.heads.dim_v,
        out: &mut state.out[row * stride..],
        stride,
        ahead,
    };
    job.cpu.kernels.sums(encoding, &mut args);
}
