//! One unit of attention: some queries of some kv heads against a part of a context, by tiles.
//!
//! Here a call is cut into units and a unit runs; which tiles it meets is in `walk.rs`, what its
//! rows do with a tile in `tile.rs`.
#![expect(
    clippy::arithmetic_side_effects,
    clippy::indexing_slicing,
    reason = "kernel code: indices come from the plan's guarantees and sizes are set in `run`"
)]
use std::marker::PhantomData;

use kv_core::plan::PlannedSequence;
use kv_quant::block::BlockMean;
use kv_quant::transform;

use super::matrix::{self, OnMatrix, is_worth_it};
use super::merge::Merge;
use super::pieces;
use super::reach::Reach;
use super::stage::meet_staged;
use super::stream;
use super::tile::{Seen, Tiles, meet};
use super::walk::for_tiles;
use super::{Blank, Heads, Job, ROWS_BY_MATRIX, ROWS_PER_UNIT};
use crate::encoding::RowLayout;
use crate::kernel::{Ahead, BLOCK, LANES_MAX, Lanes, Running, TILE};
use crate::num::{to_u32, to_usize};
use crate::rows::RowAt;
use crate::workspace::AlignedFloats;

/// Query rows from which on a tile is decoded once instead of at each use, or multiplied as a
/// matrix.
const ROWS_STAGED: usize = 16;
/// Query rows of all heads of a unit that has several: what stays in the second cache.
const ROWS_OF_HEADS: usize = 64;
/// Units a thread, at least, before a unit has several heads: then threads end about together.
const UNITS_PER_THREAD: usize = 2;

/// Some queries of some kv heads and one part of a context.
///
/// Heads of a block lie one behind the other, so a unit that meets a tile of all of them reads
/// longer runs of memory than one after another would; where many queries share a tile, that does
/// not count, and the tile is staged.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Unit {
    entry: usize,
    /// First kv head, and one past the last.
    pub(super) kv_heads: (u32, u32),
    pub(super) kv_begin: u32,
    pub(super) kv_end: u32,
    pub(super) q_begin: u32,
    pub(super) q_end: u32,
    /// Partial result of the first head of the sequence's first query, where the context is cut.
    partial: Option<usize>,
}

/// Memory of one thread.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    pub(super) q: AlignedFloats,
    pub(super) bias: AlignedFloats,
    pub(super) tile_bias: AlignedFloats,
    pub(super) out: AlignedFloats,
    scores: AlignedFloats,
    pub(super) k: AlignedFloats,
    pub(super) v: AlignedFloats,
    pub(super) queries: AlignedFloats,
    blocks: AlignedFloats,
    pub(super) running: Vec<Running>,
    pub(super) lanes: Vec<Lanes>,
    mean: BlockMean,
}

impl Scratch {
    /// One row, for what is no unit of attention.
    pub(crate) fn row(&mut self, len: usize) -> &mut [f32] {
        self.out.get(len)
    }
    /// Two rows.
    pub(crate) fn rows(&mut self, len: usize) -> (&mut [f32], &mut [f32]) {
        (self.out.get(len), self.k.get(len))
    }
    /// One row, and the mean of a block.
    pub(crate) fn row_and_mean(&mut self, len: usize) -> (&mut [f32], &mut BlockMean) {
        (self.out.get(len), &mut self.mean)
    }
}

/// Cuts a call into units and returns how many partial results they leave. Parts of a context in
/// which no query sees a key have no unit.
pub(super) fn plan(
    job: &Job<'_>,
    units: &mut Vec<Unit>,
    merges: &mut Vec<Merge>,
    blanks: &mut Vec<Blank>,
) -> usize {
    units.clear();
    merges.clear();
    blanks.clear();
    let rows = if job.by_matrix { ROWS_BY_MATRIX } else { ROWS_PER_UNIT };
    let per_unit = to_u32((rows / to_usize(job.heads.group)).max(1));
    let q_heads = to_usize(job.q.rows().heads());
    let kv_heads = job.k.layout().num_kv_heads();
    let mut partials = 0;
    for (entry, sequence) in job.plan.sequences().iter().enumerate() {
        let splits = job.plan.splits();
        let first = to_usize(sequence.split_start);
        let splits = &splits[first..first + to_usize(sequence.num_splits)];
        let rows = to_usize(sequence.q_len) * q_heads;
        let heads_per_unit = heads_per_unit(job, sequence.q_len.min(per_unit));
        let reach = Reach::of(&job.options, sequence, (0, sequence.q_len));
        let splits = splits.iter().filter(|split| reach.meets(split.kv_begin, split.kv_end));
        let parts = splits.clone().count();
        let cut = parts > 1;
        if parts == 0 && sequence.q_len > 0 {
            blanks.push(Blank { entry });
        }
        if cut {
            merges.extend((0..sequence.q_len).map(|query| Merge {
                entry,
                query,
                first: partials + to_usize(query) * q_heads,
                stride: rows,
                parts,
            }));
        }
        for split in splits {
            let partial = cut.then_some(partials);
            partials += if cut { rows } else { 0 };
            // Late queries see most keys, so their units come first.
            for tile in (0..sequence.q_len.div_ceil(per_unit)).rev() {
                let q_begin = tile * per_unit;
                let q_end = q_begin.saturating_add(per_unit).min(sequence.q_len);
                units.extend((0..kv_heads).step_by(heads_per_unit).map(|head| Unit {
                    entry,
                    kv_heads: (head, head.saturating_add(to_u32(heads_per_unit)).min(kv_heads)),
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

/// How many kv heads a unit of so many queries has. Changes no bit.
fn heads_per_unit(job: &Job<'_>, queries: u32) -> usize {
    let kv_heads = to_usize(job.k.layout().num_kv_heads());
    let rows = to_usize(queries.max(1)) * to_usize(job.heads.group);
    if rows >= ROWS_STAGED {
        return 1;
    }
    // As many as leave enough units, counted as if no sequence had more queries than one unit.
    let parts = job.plan.splits().len();
    let enough = job.cpu.threads.count().saturating_sub(1) * UNITS_PER_THREAD;
    let most = parts * kv_heads / enough.max(1);
    (ROWS_OF_HEADS / rows).min(most).clamp(1, kv_heads.max(1))
}

/// Partial results of all units: a row and its running maximum and sum, each written by one unit.
#[derive(Debug)]
pub(super) struct Partials<'a> {
    rows: (*mut f32, usize),
    running: (*mut Running, usize),
    held: PhantomData<&'a mut [f32]>,
}

// SAFETY: threads reach the results through `put` and `get` alone, whose conditions keep them
// apart.
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

/// Runs one unit.
pub(super) fn run(job: &Job<'_>, unit: &Unit, scratch: &mut Scratch, partials: &Partials<'_>) {
    let Some(sequence) = job.sequence(unit.entry).copied() else {
        return;
    };
    let heads = job.heads;
    let group = to_usize(heads.group);
    let rows = to_usize(unit.q_end - unit.q_begin) * group;
    let all = rows * to_usize(unit.kv_heads.1 - unit.kv_heads.0);
    let q = scratch.q.get(all * heads.stride_k);
    load_queries(job, unit, &sequence, q, scratch.bias.get(all));
    let by_matrix = is_worth_it(job, rows);
    if !(by_matrix && meet_tiles(job, unit, &sequence, scratch, (rows, all), true)) {
        if by_matrix && all > rows {
            // Whether a head runs again is not to depend on those that share a unit with it.
            for head in unit.kv_heads.0..unit.kv_heads.1 {
                run(job, &Unit { kv_heads: (head, head + 1), ..*unit }, scratch, partials);
            }
            return;
        }
        meet_tiles(job, unit, &sequence, scratch, (rows, all), false);
    }
    let out = scratch.out.get(all * heads.stride_v);
    for index in 0..all {
        let (head, query) = unit.place(index, group);
        let values = &mut out[index * heads.stride_v..][..heads.dim_v];
        let running = scratch.running[index];
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

/// Lets the query rows that are loaded, `rows` a kv head and `all` of them, meet all tiles of a
/// unit, as matrices or not. Whether the results may be taken.
fn meet_tiles(
    job: &Job<'_>,
    unit: &Unit,
    sequence: &PlannedSequence,
    scratch: &mut Scratch,
    (rows, all): (usize, usize),
    by_matrix: bool,
) -> bool {
    let heads = job.heads;
    let matrix = if by_matrix { job.cpu.kernels.matrix() } else { None };
    // Many output rows go by blocks there, and the last block is whole.
    let by_blocks = matrix.is_some() && rows >= BLOCK;
    let whole = if by_blocks { all.next_multiple_of(BLOCK) } else { all };
    let q = &*scratch.q.get(all * heads.stride_k);
    let out = scratch.out.get(whole * heads.stride_v);
    out.fill(0.0);
    scratch.running.clear();
    scratch.running.resize(all, Running::EMPTY);
    if matrix.is_none() && stream::is_worth_it(job, unit, rows) {
        stream::meet(job, (unit, sequence), rows, (q, out, &mut scratch.running));
        return true;
    }
    let as_rows = pieces::rows(job, unit, rows).filter(|_| matrix.is_none());
    if let Some(as_rows) = as_rows {
        pieces::meet(job, (unit, sequence), scratch, (rows, as_rows, all));
        return true;
    }
    let matrix = matrix.map(|matrix| {
        OnMatrix::new(matrix, (q, rows), job, (&mut scratch.queries, &mut scratch.blocks))
    });
    let vectors = job.cpu.kernels.tokens();
    let tokens = if matrix.is_some() { matrix::tokens(job, rows) } else { vectors };
    let mut state = Tiles {
        tokens,
        head: 0,
        q,
        bias: scratch.bias.get(all),
        tile_bias: scratch.tile_bias.get(rows),
        out,
        scores: scratch.scores.get(rows.next_multiple_of(BLOCK) * TILE),
        running: &mut scratch.running,
        ahead: &mut Ahead::default(),
    };
    if let Some(mut matrix) = matrix {
        for_tiles(job, unit, sequence, &mut state, |state, tile| {
            matrix.meet(job, state, tile, &Seen::new(job, unit, sequence, tile));
        });
        return matrix.is_finite(&state);
    }
    let staged_tokens = if rows >= ROWS_STAGED { tokens } else { 0 };
    let k = scratch.k.get(staged_tokens * heads.stride_k);
    let v = scratch.v.get(staged_tokens * heads.stride_v);
    for_tiles(job, unit, sequence, &mut state, |state, tile| {
        let seen = Seen::new(job, unit, sequence, tile);
        if staged_tokens == 0 {
            meet(job, state, tile, &seen);
        } else {
            meet_staged(job, state, tile, &seen, (k, v));
        }
    });
    true
}

impl Unit {
    /// Query head and query of a row: queries of a kv head one after another, the heads of the
    /// group within each.
    fn place(&self, index: usize, group: usize) -> (u32, u32) {
        let rows = to_usize(self.q_end - self.q_begin) * group;
        let (kv_head, row) = (to_usize(self.kv_heads.0) + index / rows, index % rows);
        (to_u32(kv_head * group + row % group), self.q_begin + to_u32(row / group))
    }
}

/// Decodes the unit's query rows. Where rows of K are transformed, queries are too, and the mean
/// that their keys lack becomes a bias of their scores.
fn load_queries(
    job: &Job<'_>,
    unit: &Unit,
    sequence: &PlannedSequence,
    q: &mut [f32],
    bias: &mut [f32],
) {
    let heads = job.heads;
    let source = RowLayout::plain(job.q.element(), heads.dim_k);
    let rows = q.chunks_exact_mut(heads.stride_k).zip(bias);
    for (index, (row, bias)) in rows.enumerate() {
        let (head, token) = unit.place(index, to_usize(heads.group));
        let at = RowAt { entry: unit.entry, start: sequence.q_start, token };
        let (values, padding) = row.split_at_mut(heads.dim_k);
        padding.fill(0.0);
        job.cpu.kernels.decode(&source, job.q.get(at, head, 1), values);
        *bias = 0.0;
        if let Some(constants) = job.k.transform(head / heads.group) {
            *bias = dot(values, constants.mean);
            transform::query(values, &constants);
        }
        if job.k.is_in_pairs() {
            job.cpu.kernels.split_pairs(values);
        }
    }
}

/// The product of two rows, by sums of their own for each lane of a vector.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0.0; LANES_MAX];
    for (a, b) in a.chunks(LANES_MAX).zip(b.chunks(LANES_MAX)) {
        for (sum, (a, b)) in sums.iter_mut().zip(a.iter().zip(b)) {
            *sum += a * b;
        }
    }
    sums.iter().sum()
}
