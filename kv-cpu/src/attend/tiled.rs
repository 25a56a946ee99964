//! Many query rows over tiles: K and V of a tile are decoded to `f32` once; QK, online softmax and
//! PV then run over register tiles of a few rows. Each row attends to exactly the keys that its
//! query sees.
use kv_core::num::{to_u32, to_usize};
use kv_core::plan::PlannedSequence;
use kv_cpu_kernels::{
    Element, Kernels, KeyRows, OUTPUT_PAD, OnlineSoftmax, Prefetch, Pv, Qk, RowLayout, Softmax,
    TileRows,
};

use super::call::AttendCall;
use super::direct::add_mean;
use super::key_runs::{KeyTile, for_tiles};
use super::plan::WorkItem;
use crate::layout::RowScale;
use crate::scratch::Scratch;

/// Tokens of a tile: one of K and one of V in `f32` stay in L2 beside the query rows.
pub(super) const TOKENS: usize = 64;
/// Query rows of a register tile.
const ROWS: usize = 4;

/// Query rows of one kv head and their results so far.
struct HeadRows<'s> {
    q: &'s [f32],
    bias: &'s [f32],
    scores: &'s mut [f32],
    states: &'s mut [OnlineSoftmax],
    out: &'s mut [f32],
}

/// Attends with the query rows that are loaded, `rows` per kv head.
pub(super) fn run(
    call: &AttendCall<'_>,
    (item, sequence): (&WorkItem, &PlannedSequence),
    rows: usize,
    scratch: &mut Scratch,
) {
    let kernels = call.cpu.kernels;
    let (q_stride, stride_v) = (call.heads.stride_k, call.heads.stride_v);
    let heads = item.num_heads();
    let q = &*scratch.q.get(heads * rows * q_stride);
    let bias = &*scratch.bias.get(heads * rows);
    let tile_bias = scratch.tile_bias.get(rows);
    let out = scratch.out.get(heads * rows * stride_v);
    let scores = scratch.scores.get(rows * TOKENS);
    let states = &mut scratch.states;
    let [k_dim, v_dim] =
        [call.heads.dim_k, call.heads.dim_v].map(|dim| dim.next_multiple_of(OUTPUT_PAD));
    let (k_memory, v_memory) = (scratch.k.get(TOKENS * k_dim), scratch.v.get(TOKENS * v_dim));
    let layouts = [k_dim, v_dim].map(|dim| RowLayout::plain(Element::F32, dim));
    for_tiles(call, item, sequence, TOKENS, |tile, next| {
        let kv_head = item.kv_heads.0 + to_u32(tile.head);
        let [k, v] = tile.planes();
        decode(kernels, &k, call.k.scale(kv_head, tile.is_wide), (k_memory, k_dim));
        decode(kernels, &v, call.v.scale(kv_head, tile.is_wide), (v_memory, v_dim));
        let [k, v] =
            [(&*k_memory, &layouts[0]), (&*v_memory, &layouts[1])].map(|(rows, layout)| {
                KeyRows::new(bytemuck::cast_slice(rows), layout.bytes(), tile.len(), layout)
            });
        let q = &q[tile.head * rows * q_stride..][..rows * q_stride];
        tile_bias.copy_from_slice(&bias[tile.head * rows..][..rows]);
        if let Some(mean) = tile.k_mean {
            add_mean(call, (q, q_stride), mean, tile_bias);
        }
        let mut head_rows = HeadRows {
            q,
            bias: tile_bias,
            scores,
            states: &mut states[tile.head * rows..][..rows],
            out: &mut out[tile.head * rows * stride_v..][..rows * stride_v],
        };
        let seen = SeenKeys { call, item, sequence, bounds: tile.bounds };
        attend(call, (k, v), &seen, (tile, next), &mut head_rows);
    });
}

/// The tokens of a tile that each query row sees.
pub(super) struct SeenKeys<'a> {
    pub(super) call: &'a AttendCall<'a>,
    pub(super) item: &'a WorkItem,
    pub(super) sequence: &'a PlannedSequence,
    /// Positions of the tile.
    pub(super) bounds: (u32, u32),
}

impl SeenKeys<'_> {
    /// First token that a row sees, and one past the last. Neither ever decreases from a row to the
    /// next.
    pub(super) fn by(&self, row: usize) -> (usize, usize) {
        let (begin, end) = self.bounds;
        let options = &self.call.options;
        let query = self.item.queries.0 + to_u32(row / self.call.heads.group);
        let sink_tokens = options.window_left().map_or(0, |_| options.sink_tokens());
        let (low, high) = options.visible(self.sequence, query);
        // A tile with a sink token has no other tokens, and a query sees all of them before its
        // end.
        let low = if begin < sink_tokens { 0 } else { low };
        let (low, high) = (low.clamp(begin, end) - begin, high.clamp(begin, end) - begin);
        (to_usize(low), to_usize(high.max(low)))
    }
}

/// Decodes runs of rows into a tile, with their scales, and zeros after each row's last value.
fn decode(kernels: Kernels, rows: &TileRows<'_>, scale: RowScale, (to, dim): (&mut [f32], usize)) {
    let given = match scale {
        RowScale::Given(scale) => scale,
        RowScale::Stored => 1.0,
    };
    let mut decoded = to.chunks_exact_mut(dim);
    for run in rows.runs() {
        for (index, to) in (0..run.len()).zip(&mut decoded) {
            let (values, padding) = to.split_at_mut(run.layout().dim());
            kernels.decode_scaled(run.layout(), given, run.row(index), values);
            padding.fill(0.0);
        }
    }
}

/// Attends to a decoded tile with all rows of a kv head. QK of all rows comes before PV of any, so
/// that V does not push K out of L1.
fn attend(
    call: &AttendCall<'_>,
    (k, v): (KeyRows<'_>, KeyRows<'_>),
    seen: &SeenKeys<'_>,
    (tile, next): (&KeyTile<'_>, &KeyTile<'_>),
    rows: &mut HeadRows<'_>,
) {
    let kernels = call.cpu.kernels;
    let count = rows.states.len();
    let [mut with_k, mut with_v] = tile.prefetch(next, kernels.prefetch());
    // Rows that see none of the tile are the first or the last ones.
    let first = (0..count).find(|row| seen.by(*row).1 > 0).unwrap_or(count);
    let last =
        (first..count).rev().find(|row| seen.by(*row).0 < k.len()).map_or(first, |row| row + 1);
    let (mut begin, end) = (seen.by(first.min(count - 1)).0, seen.by(last.max(1) - 1).1);
    begin = begin.min(end);
    if first >= last || begin >= end {
        return;
    }
    let seen_k = k.slice(0..end);
    kernels.qk(&mut Qk {
        rows: last - first,
        q: &rows.q[first * call.heads.stride_k..],
        words: None,
        q_stride: call.heads.stride_k,
        k: TileRows::of_run(&seen_k),
        scores: &mut rows.scores[first * TOKENS..],
        score_stride: TOKENS,
        decoded: &mut [],
        prefetch: &mut with_k,
    });
    // One softmax call for the rows of one query, and of queries that see the same keys.
    let mut row = first;
    while row < last {
        let range = seen.by(row);
        let alike = (row + 1..last).take_while(|row| seen.by(*row) == range).count() + 1;
        softmax(call, rows, (row, alike), range);
        row += alike;
    }
    if seen.by(first) == seen.by(last - 1) {
        add(call, rows, &v, (first, last - first), (seen.by(first), &mut with_v));
        return;
    }
    for row in (first..last).step_by(ROWS) {
        let count = (last - row).min(ROWS);
        add_apart(call, rows, &v, (row, count), (seen, &mut with_v));
    }
}

/// Turns the scores of some rows that see the same tokens into weights.
fn softmax(
    call: &AttendCall<'_>,
    rows: &mut HeadRows<'_>,
    (first, count): (usize, usize),
    range: (usize, usize),
) {
    let stride = call.heads.stride_v;
    call.cpu.kernels.softmax(&mut Softmax {
        scores: &mut rows.scores[first * TOKENS..][..count * TOKENS],
        stride: TOKENS,
        range,
        k_scales: None,
        v_scales: None,
        bias: &rows.bias[first..][..count],
        logits: call.logits(),
        states: &mut rows.states[first..][..count],
        out: &mut rows.out[first * stride..][..count * stride],
        out_stride: stride,
    });
}

/// Adds the tokens of a range to some rows.
fn add(
    call: &AttendCall<'_>,
    rows: &mut HeadRows<'_>,
    v: &KeyRows<'_>,
    (first, count): (usize, usize),
    ((begin, end), prefetch): ((usize, usize), &mut Prefetch<'_>),
) {
    if begin >= end {
        return;
    }
    let (stride, v) = (call.heads.stride_v, v.slice(begin..end));
    call.cpu.kernels.pv(&mut Pv {
        rows: count,
        weights: &rows.scores[first * TOKENS + begin..],
        weight_stride: TOKENS,
        v: TileRows::of_run(&v),
        out: &mut rows.out[first * stride..][..count * stride],
        out_stride: stride,
        decoded: &mut [],
        prefetch,
    });
}

/// Does the same for a few rows that see different tokens: tokens that all rows see together, other
/// tokens row by row, in the order of positions. A weight of zero would not do: zero times infinity
/// is NaN.
fn add_apart(
    call: &AttendCall<'_>,
    rows: &mut HeadRows<'_>,
    v: &KeyRows<'_>,
    (first, count): (usize, usize),
    (seen, prefetch): (&SeenKeys<'_>, &mut Prefetch<'_>),
) {
    let all = first..first + count;
    let low = all.clone().map(|row| seen.by(row).0).max().unwrap_or(0);
    let high = all.clone().map(|row| seen.by(row).1).min().unwrap_or(0);
    // An empty range, after all tokens.
    let (low, high) = if low < high { (low, high) } else { (TOKENS, TOKENS) };
    for row in all.clone() {
        let (begin, end) = seen.by(row);
        add(call, rows, v, (row, 1), ((begin, end.min(low)), prefetch));
    }
    add(call, rows, v, (first, count), ((low, high.min(v.len())), prefetch));
    for row in all {
        let (begin, end) = seen.by(row);
        add(call, rows, v, (row, 1), ((begin.max(high), end), prefetch));
    }
}
