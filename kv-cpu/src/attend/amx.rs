//! AMX matrix products: a tile of K and V at a time against all query rows of a kv head.
//!
//! Every row scores every token of a tile, and the weight of a token that it does not see is zero.
//! Zero times infinity is NaN, so sums that are not finite are no results: [`run`] reports them,
//! and the work item runs again on vectors.
use kv_core::num::to_u32;
use kv_core::plan::PlannedSequence;
use kv_cpu_kernels::amx::{
    BLOCK, ColumnOrder, GEMM_TOKENS, Gemm, Memory, NARROW_TOKENS, Narrow, QueryRows, TILE_TOKENS,
};
use kv_cpu_kernels::{OnlineSoftmax, Prefetch, Softmax};

use super::call::AttendCall;
use super::direct::add_mean;
use super::key_runs::{KeyTile, for_tiles};
use super::plan::WorkItem;
use super::scales::TileScales;
use super::strategy::AMX_BLOCK;
use super::tiled::SeenKeys;
use crate::aligned::AlignedFloats;
use crate::scratch::Scratch;

/// Bytes of a tile of K that stay in L1 beside the other operands. For AMX GEMM there is no such
/// limit: K is packed, and leaves L1 anyway.
const NARROW_BYTES: usize = 20 << 10;

const _: () = assert!(AMX_BLOCK == BLOCK, "AMX GEMM runs from a block of query rows on");

/// Query rows that are loaded for `rows` rows per kv head: AMX GEMM takes whole blocks.
pub(super) fn padded_rows(rows: usize) -> usize {
    if rows < BLOCK { rows } else { rows.next_multiple_of(BLOCK) }
}

/// Attends with the query rows that are loaded, [`padded_rows`] per kv head. Returns whether all
/// sums are finite.
pub(super) fn run(
    call: &AttendCall<'_>,
    (item, sequence): (&WorkItem, &PlannedSequence),
    rows: usize,
    scratch: &mut Scratch,
) -> bool {
    let (heads, padded) = (call.heads, padded_rows(rows));
    let all = item.num_heads() * padded;
    let q = &*scratch.q.get(all * heads.stride_k);
    let Some(products) = Products::new(call, (q, padded), &mut scratch.words) else {
        return false;
    };
    let memory = scratch.k.get(Memory::floats(heads.dim_k, heads.dim_v));
    let mut memory = Memory::new(memory, heads.dim_k, heads.dim_v);
    let bias = &*scratch.bias.get(all);
    let tile_bias = scratch.tile_bias.get(padded);
    let out = scratch.out.get(all * heads.stride_v);
    let scores = scratch.scores.get(padded.next_multiple_of(BLOCK) * TILE_TOKENS);
    let states = &mut scratch.states;
    let mut scales = [TileScales::new(), TileScales::new()];
    for_tiles(call, item, sequence, tile_tokens(call, rows), |tile, next| {
        let q = &q[tile.head * padded * heads.stride_k..][..padded * heads.stride_k];
        tile_bias.copy_from_slice(&bias[tile.head * padded..][..padded]);
        if let Some(mean) = tile.k_mean {
            add_mean(call, (q, heads.stride_k), mean, tile_bias);
        }
        let mut head_rows = HeadRows {
            rows,
            bias: tile_bias,
            scores,
            scales: &mut scales,
            states: &mut states[tile.head * padded..][..padded],
            out: &mut out[tile.head * padded * heads.stride_v..][..padded * heads.stride_v],
        };
        let seen = SeenKeys { call, item, sequence, bounds: tile.bounds };
        attend(&products, (tile, next), &seen, &mut memory, &mut head_rows);
    });
    let mut out = out.chunks_exact(padded * heads.stride_v);
    out.all(|out| products.is_finite(&out[..rows * heads.stride_v]))
        && states.iter().all(|state| state.finish().sum.is_finite())
}

/// Returns the tokens of a tile: half of [`TILE_TOKENS`] if narrow K exceeds [`NARROW_BYTES`].
fn tile_tokens(call: &AttendCall<'_>, rows: usize) -> usize {
    let bytes = call.k.rows(false).bytes() * TILE_TOKENS;
    if rows >= BLOCK || bytes <= NARROW_BYTES { TILE_TOKENS } else { TILE_TOKENS / 2 }
}

/// Query rows of one kv head and their results so far.
struct HeadRows<'s> {
    /// Rows that exist; others are padding.
    rows: usize,
    bias: &'s [f32],
    /// Scores, then weights, [`TILE_TOKENS`] a row.
    scores: &'s mut [f32],
    /// Of K and of V.
    scales: &'s mut [TileScales; 2],
    states: &'s mut [OnlineSoftmax],
    out: &'s mut [f32],
}

/// Products of a tile with query rows that are packed, those of all kv heads.
enum Products<'s> {
    Gemm(Gemm, &'s [u32]),
    /// With the query rows of each head in one order, or in those of rows of codes and of rows kept
    /// in 16 bits.
    Narrow(Narrow, &'s [u32], usize),
}

impl<'s> Products<'s> {
    /// Packs query rows, `rows` per kv head. `None` without AMX.
    fn new(
        call: &AttendCall<'_>,
        (values, rows): (&[f32], usize),
        words: &'s mut AlignedFloats,
    ) -> Option<Self> {
        let (kernels, heads) = (call.cpu.kernels, call.heads);
        let (stride, dim) = (heads.stride_k, heads.dim_k);
        let queries = QueryRows { values, stride, rows, dim, exact: call.is_exact() };
        let of_heads = values.chunks_exact(rows * stride);
        if rows >= BLOCK {
            let gemm = Gemm::new(kernels, &queries)?;
            let len = gemm.query_words();
            let words: &mut [u32] = bytemuck::cast_slice_mut(words.get(of_heads.len() * len));
            for (rows, words) in of_heads.zip(words.chunks_exact_mut(len)) {
                gemm.pack_queries(rows, words);
            }
            return Some(Self::Gemm(gemm, words));
        }
        let narrow = Narrow::new(kernels, &queries)?;
        let orders = [false, true].map(|wide| ColumnOrder::of(call.k.rows(wide).encoding()));
        let orders = if orders[0] == orders[1] { &orders[..1] } else { &orders };
        let len = narrow.query_words();
        let words = words.get(of_heads.len() * orders.len() * len);
        let words: &mut [u32] = bytemuck::cast_slice_mut(words);
        for (rows, words) in of_heads.zip(words.chunks_exact_mut(orders.len() * len)) {
            for (order, words) in orders.iter().zip(words.chunks_exact_mut(len)) {
                narrow.pack_queries(rows, *order, words);
            }
        }
        Some(Self::Narrow(narrow, words, orders.len()))
    }

    /// Returns the tokens multiplied at a time: weights up to a multiple of this number are read.
    fn tokens(&self) -> usize {
        match self {
            Self::Gemm(..) => GEMM_TOKENS,
            Self::Narrow(..) => NARROW_TOKENS,
        }
    }

    fn is_finite(&self, values: &[f32]) -> bool {
        match self {
            Self::Gemm(gemm, _) => gemm.is_finite(values),
            Self::Narrow(narrow, ..) => narrow.is_finite(values),
        }
    }

    /// Computes the scores of a tile for some rows of its head, the first a multiple of [`BLOCK`].
    fn score(
        &self,
        tile: &KeyTile<'_>,
        (first, end): (usize, usize),
        memory: &mut Memory<'_>,
        scores: &mut [f32],
        prefetch: &mut Prefetch<'_>,
    ) {
        let [k, _] = tile.planes();
        match self {
            Self::Gemm(gemm, words) => {
                let words = &words[tile.head * gemm.query_words()..][..gemm.query_words()];
                gemm.pack_keys(&k, memory, prefetch);
                for row in (first..end).step_by(BLOCK) {
                    gemm.scores(words, row, memory, &mut scores[row * TILE_TOKENS..]);
                }
            }
            Self::Narrow(narrow, words, orders) => {
                let order = usize::from(tile.is_wide).min(orders - 1);
                let at = (tile.head * orders + order) * narrow.query_words();
                let words = &words[at..][..narrow.query_words()];
                narrow.scores(words, (&k, memory), scores, prefetch);
            }
        }
    }

    /// Adds V of a tile, multiplied with weights, to some output rows of its head, the first a
    /// multiple of [`BLOCK`].
    fn add(
        &self,
        tile: &KeyTile<'_>,
        (first, end): (usize, usize),
        memory: &mut Memory<'_>,
        (weights, out): (&[f32], (&mut [f32], usize)),
        prefetch: &mut Prefetch<'_>,
    ) {
        let [_, v] = tile.planes();
        let (out, stride) = out;
        match self {
            Self::Gemm(gemm, _) => {
                gemm.pack_values(&v, memory, prefetch);
                for row in (first..end).step_by(BLOCK) {
                    let weights = &weights[row * TILE_TOKENS..];
                    gemm.sums(memory, weights, (&mut out[row * stride..], stride));
                }
            }
            Self::Narrow(narrow, ..) => {
                narrow.sums((&v, memory), weights, (out, stride), prefetch);
            }
        }
    }
}

/// Attends to a tile with all rows of its kv head.
fn attend(
    products: &Products<'_>,
    (tile, next): (&KeyTile<'_>, &KeyTile<'_>),
    seen: &SeenKeys<'_>,
    memory: &mut Memory<'_>,
    rows: &mut HeadRows<'_>,
) {
    let call = seen.call;
    let [mut with_k, mut with_v] = tile.prefetch(next, call.cpu.kernels.prefetch());
    let seeing = seeing_rows(rows.rows, seen, tile);
    products.score(tile, seeing, memory, rows.scores, &mut with_k);
    softmax(call, (tile, seen), seeing, products.tokens(), rows);
    let out = (&mut *rows.out, call.heads.stride_v);
    products.add(tile, seeing, memory, (rows.scores, out), &mut with_v);
}

/// Returns the rows that see a token of a tile, rounded to [`BLOCK`] rows or to the last row.
fn seeing_rows(rows: usize, seen: &SeenKeys<'_>, tile: &KeyTile<'_>) -> (usize, usize) {
    // Rows that see none of the tile are the first or the last ones.
    let (mut begin, mut end) = (0, rows);
    while begin + BLOCK < end && seen.by(begin + BLOCK - 1).1 == 0 {
        begin += BLOCK;
    }
    while begin + BLOCK < end && seen.by((end - 1) / BLOCK * BLOCK).0 == tile.len() {
        end = (end - 1) / BLOCK * BLOCK;
    }
    (begin, end)
}

/// Turns the scores of some rows into weights of the tokens that each sees, zero for others up to a
/// multiple of `multiple` tokens.
fn softmax(
    call: &AttendCall<'_>,
    (tile, seen): (&KeyTile<'_>, &SeenKeys<'_>),
    (first, end): (usize, usize),
    multiple: usize,
    rows: &mut HeadRows<'_>,
) {
    let (kernels, stride) = (call.cpu.kernels, call.heads.stride_v);
    let kv_head = seen.item.kv_heads.0 + to_u32(tile.head);
    let padded = tile.len().next_multiple_of(multiple);
    let [k, v] = tile.planes();
    let [k_scales, v_scales] = &mut *rows.scales;
    // AMX kernels decode exact values: their factor is 1.
    let k_scales = k_scales.of(kernels, &k, call.k.scale(kv_head, tile.is_wide), 1.0);
    let v_scales = v_scales.of(kernels, &v, call.v.scale(kv_head, tile.is_wide), 1.0);
    let mut row = first;
    while row < end {
        // Rows of one query, and of queries that see the same.
        let range = seen.by(row);
        let alike = (row + 1..end).take_while(|row| seen.by(*row) == range).count() + 1;
        let scores = &mut rows.scores[row * TILE_TOKENS..][..alike * TILE_TOKENS];
        let (low, high) = if range.0 < range.1 { range } else { (0, 0) };
        if low < high {
            kernels.softmax(&mut Softmax {
                scores,
                stride: TILE_TOKENS,
                range: (low, high),
                k_scales,
                v_scales,
                bias: &rows.bias[row..][..alike],
                logits: call.logits(),
                states: &mut rows.states[row..][..alike],
                out: &mut rows.out[row * stride..][..alike * stride],
                out_stride: stride,
            });
        }
        for weights in scores.chunks_exact_mut(TILE_TOKENS) {
            weights[..low].fill(0.0);
            weights[high..padded].fill(0.0);
        }
        row += alike;
    }
}
