//! One unit of attention: some queries of one kv head against one part of a context, tile by tile.
//!
//! Every tile of K and V is brought in once for all query rows of the unit, decoded first where
//! many rows share it and fetched ahead where few do. What the rows do with a tile is in `tile.rs`.
#![expect(
    clippy::arithmetic_side_effects,
    clippy::indexing_slicing,
    reason = "kernel code: indices come from the plan's guarantees and sizes are set in `run`"
)]
use std::marker::PhantomData;

use kv_core::plan::PlannedSequence;
use kv_core::{PlaneLayout, SlotMap};
use kv_quant::block::BlockMean;
use kv_quant::transform;

use super::merge::Merge;
use super::tile::{Stored, Tile, Tiles, meet};
use super::{Blank, Heads, Job, ROWS_PER_UNIT};
use crate::encoding::{Element, Encoding, RowLayout};
use crate::kernel::{RowScale, Running, TILE};
use crate::num::{offset, to_usize};
use crate::rows::{PlaneRows, RowAt};
use crate::workspace::AlignedFloats;

/// Query rows from which on a tile is decoded once instead of at each use.
const ROWS_STAGED: usize = 16;

/// Some queries of one kv head and one part of a context.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Unit {
    entry: usize,
    kv_head: u32,
    kv_begin: u32,
    kv_end: u32,
    pub(super) q_begin: u32,
    q_end: u32,
    /// Partial result of the first head of the sequence's first query, where the context is cut.
    partial: Option<usize>,
}

/// Memory of one thread.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    q: AlignedFloats,
    bias: AlignedFloats,
    out: AlignedFloats,
    scores: AlignedFloats,
    k: AlignedFloats,
    v: AlignedFloats,
    running: Vec<Running>,
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

/// Encoded rows of the tokens of a tile.
type TileRows<'a> = [&'a [u8]; TILE];

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
    let bias = scratch.bias.get(rows);
    load_queries(job, unit, &sequence, q, bias);
    scratch.running.clear();
    scratch.running.resize(rows, Running::EMPTY);
    let staged = rows >= ROWS_STAGED;
    let mut state = Tiles {
        q,
        bias,
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
/// Where rows of K are transformed, queries are too, and the mean that their keys lack becomes a
/// bias of their scores.
fn load_queries(
    job: &Job<'_>,
    unit: &Unit,
    sequence: &PlannedSequence,
    q: &mut [f32],
    bias: &mut [f32],
) {
    let heads = job.heads;
    let source = RowLayout::plain(job.q.element(), heads.dim_k);
    let constants = job.k.transform(unit.kv_head);
    let group = to_usize(heads.group);
    let rows = q.chunks_exact_mut(heads.stride_k).zip(bias);
    for (index, (row, bias)) in rows.enumerate() {
        let at = RowAt {
            entry: unit.entry,
            start: sequence.q_start,
            token: unit.q_begin + u32::try_from(index / group).unwrap_or(0),
        };
        let head = unit.kv_head * heads.group + u32::try_from(index % group).unwrap_or(0);
        let (values, padding) = row.split_at_mut(heads.dim_k);
        padding.fill(0.0);
        job.cpu.kernels.decode(&source, job.q.get(at, head, 1), values);
        *bias = 0.0;
        if let Some(constants) = &constants {
            *bias = values.iter().zip(constants.mean).map(|(q, mean)| q * mean).sum();
            transform::query(values, constants);
        }
    }
}

/// Looks up the rows of tokens `begin..end` of a sequence, which are all wide or none.
fn find_rows<'a>(
    job: &Job<'a>,
    plane: &PlaneRows<'a>,
    (sequence, head): (&PlannedSequence, u32),
    (begin, end): (u32, u32),
    rows: &mut TileRows<'a>,
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
}

impl<'a> Alike<'a> {
    fn new(layout: &'a PlaneLayout, sequence: &'a PlannedSequence) -> Self {
        let map = layout.slot_map();
        let tail = map.tail_begin(sequence.kv_len, sequence.coded);
        Self { map, sequence, tail, by_block: layout.has_block_means() }
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
    let at = (sequence, unit.kv_head);
    let alike = Alike::new(job.k.layout(), sequence);
    // Tiles lie at multiples of their length, so that a sum's order does not depend on the queries.
    let next_bounds = |from: u32| {
        let limit = alike.end(from).min(end);
        (from, (from / tile * tile).saturating_add(tile).min(limit))
    };
    let (mut some, mut others, mut v_rows): (TileRows<'_>, TileRows<'_>, TileRows<'_>) =
        ([&[]; TILE], [&[]; TILE], [&[]; TILE]);
    let (mut k_rows, mut k_next) = (&mut some, &mut others);
    let mut bounds = next_bounds(begin);
    find_rows(job, &job.k, at, bounds, k_rows);
    while bounds.0 < bounds.1 {
        let len = to_usize(bounds.1 - bounds.0);
        find_rows(job, &job.v, at, bounds, &mut v_rows);
        let next = next_bounds(bounds.1);
        let next = (next.0.min(end), next.1);
        find_rows(job, &job.k, at, next, k_next);
        let next_len = to_usize(next.1.saturating_sub(next.0));
        let is_wide = alike.is_wide(bounds.0);
        let stored = |plane: &'_ PlaneRows<'_>| plane.scale(unit.kv_head, is_wide);
        let tile = Tile {
            bounds,
            k: Stored { rows: &k_rows[..len], layout: job.k.rows(is_wide), scale: stored(&job.k) },
            v: Stored { rows: &v_rows[..len], layout: job.v.rows(is_wide), scale: stored(&job.v) },
            k_mean: alike.mean(job, bounds.0, unit.kv_head),
            v_ahead: &v_rows[..len],
            k_ahead: &k_next[..next_len],
        };
        if k_stage.is_empty() {
            meet(job, unit, sequence, state, &tile);
        } else {
            meet_staged(job, unit, sequence, state, &tile, (k_stage, v_stage));
        }
        std::mem::swap(&mut k_rows, &mut k_next);
        bounds = next;
    }
}

/// Lets all query rows meet a tile that is decoded first.
fn meet_staged(
    job: &Job<'_>,
    unit: &Unit,
    sequence: &PlannedSequence,
    state: &mut Tiles<'_>,
    tile: &Tile<'_>,
    (k_stage, v_stage): (&mut [f32], &mut [f32]),
) {
    let heads = job.heads;
    let (mut k, mut v): (TileRows<'_>, TileRows<'_>) = ([&[]; TILE], [&[]; TILE]);
    let layouts = [heads.dim_k, heads.dim_v].map(|dim| RowLayout::plain(Element::F32, dim));
    let [k_layout, v_layout] = &layouts;
    let (mut k_scales, mut v_scales) = ([1.0; TILE], [1.0; TILE]);
    let k_memory = (k_layout, heads.stride_k, k_stage, &mut k, &mut k_scales);
    let v_memory = (v_layout, heads.stride_v, v_stage, &mut v, &mut v_scales);
    let staged = Tile {
        bounds: tile.bounds,
        k: stage(job, tile.k, k_memory),
        v: stage(job, tile.v, v_memory),
        k_mean: tile.k_mean,
        v_ahead: &[],
        k_ahead: &[],
    };
    meet(job, unit, sequence, state, &staged);
}

/// Where a tile is staged: how its rows lie there, floats from one to the next, the floats, the
/// rows, and their scales.
type Stage<'s, 't> =
    (&'t RowLayout, usize, &'s mut [f32], &'t mut TileRows<'s>, &'t mut [f32; TILE]);

/// Decodes the rows of a tile, unless they are `f32` already. Scales of rows stay apart, so that
/// results have the bits of a tile that is not staged.
fn stage<'s: 't, 't>(job: &Job<'_>, from: Stored<'t>, to: Stage<'s, 't>) -> Stored<'t> {
    if from.layout.encoding() == Encoding::F32 {
        return from;
    }
    let (layout, stride, memory, staged, scales) = to;
    for ((row, memory), to) in
        from.rows.iter().zip(memory.chunks_exact_mut(stride)).zip(staged.iter_mut())
    {
        let (values, _) = memory.split_at_mut(layout.dim());
        job.cpu.kernels.decode(from.layout, row, values);
        *to = bytemuck::cast_slice(values);
    }
    let scale = match from.scale {
        RowScale::Stored => {
            *scales = job.cpu.kernels.row_scales(from.rows, from.layout);
            RowScale::Each(scales)
        }
        other => other,
    };
    Stored { rows: &staged[..from.rows.len()], layout, scale }
}
