//! One query over K and V where they lie: QK, online softmax and PV of a tile of one kv head, while
//! the next tile is prefetched. Codes are decoded in registers.
use kv_core::num::to_u32;
use kv_core::plan::PlannedSequence;
use kv_cpu_kernels::{
    Element, KeyRows, OnlineSoftmax, Prefetch, Pv, Qk, RowLayout, SCORE_PAD, Softmax, TileRows,
};

use super::call::AttendCall;
use super::key_runs::{KeyTile, for_tiles};
use super::plan::WorkItem;
use super::scales::TileScales;
use crate::scratch::Scratch;

/// Tokens of a tile: enough to amortise the overhead of a tile, and few enough that the next tile
/// stays in L2 until it is read.
const TOKENS: usize = 64;
/// Floats from a row of scores to the next: the last tokens of a tile may be a separate run, which
/// is padded.
const SCORE_STRIDE: usize = TOKENS + SCORE_PAD;

/// Query rows of one kv head and their results so far.
struct HeadRows<'s> {
    /// Rows of the register tile, padding included.
    rows: usize,
    q: &'s [f32],
    words: Option<&'s [u32]>,
    bias: &'s [f32],
    scores: &'s mut [f32],
    /// Memory for rows that are not decoded in registers.
    decoded: &'s mut [f32],
    /// Of K and of V.
    scales: &'s mut [TileScales; 2],
    states: &'s mut [OnlineSoftmax],
    out: &'s mut [f32],
}

/// Attends with the query rows that are loaded, `rows` per kv head.
pub(super) fn run(
    call: &AttendCall<'_>,
    (item, sequence): (&WorkItem, &PlannedSequence),
    rows: usize,
    has_words: bool,
    scratch: &mut Scratch,
) {
    let (stride_k, stride_v) = (rows * call.heads.stride_k, rows * call.heads.stride_v);
    let heads = item.num_heads();
    let q = &*scratch.q.get(heads * stride_k);
    let words: &[u32] = bytemuck::cast_slice(scratch.words.get(heads * stride_k / 2));
    let bias = &*scratch.bias.get(heads * rows);
    let tile_bias = scratch.tile_bias.get(rows);
    let out = scratch.out.get(heads * stride_v);
    let scores = scratch.scores.get(rows * SCORE_STRIDE);
    let layouts = [false, true].map(|is_wide| [call.k.rows(is_wide), call.v.rows(is_wide)]);
    let lens = layouts.as_flattened().iter().map(|layout| call.cpu.kernels.decoded_len(layout));
    let decoded = scratch.k.get(lens.max().unwrap_or(0));
    let states = &mut scratch.states;
    let mut scales = [TileScales::new(), TileScales::new()];
    for_tiles(call, item, sequence, TOKENS, |tile, next| {
        let head = tile.head;
        let q = &q[head * stride_k..][..stride_k];
        let mut bias = &bias[head * rows..][..rows];
        if let Some(mean) = tile.k_mean {
            tile_bias.copy_from_slice(bias);
            add_mean(call, (q, call.heads.stride_k), mean, tile_bias);
            bias = tile_bias;
        }
        let mut head_rows = HeadRows {
            rows,
            q,
            words: has_words.then(|| &words[head * stride_k / 2..][..stride_k / 2]),
            bias,
            scores,
            decoded,
            scales: &mut scales,
            states: &mut states[head * rows..][..rows],
            out: &mut out[head * stride_v..][..stride_v],
        };
        attend(call, (tile, next), item.kv_heads.0 + to_u32(head), &mut head_rows);
    });
}

/// Attends to a tile with all rows of its kv head.
fn attend(
    call: &AttendCall<'_>,
    (tile, next): (&KeyTile<'_>, &KeyTile<'_>),
    kv_head: u32,
    rows: &mut HeadRows<'_>,
) {
    let (heads, kernels) = (call.heads, call.cpu.kernels);
    let [k, v] = tile.planes();
    let [mut with_k, mut with_v] = tile.prefetch(next, kernels.prefetch());
    kernels.qk(&mut Qk {
        rows: rows.rows,
        q: rows.q,
        words: rows.words,
        q_stride: heads.stride_k,
        k,
        scores: rows.scores,
        score_stride: SCORE_STRIDE,
        decoded: rows.decoded,
        prefetch: &mut with_k,
    });
    let [k_scales, v_scales] = rows.scales;
    let (k_scale, v_scale) =
        (call.k.scale(kv_head, tile.is_wide), call.v.scale(kv_head, tile.is_wide));
    kernels.softmax(&mut Softmax {
        scores: rows.scores,
        stride: SCORE_STRIDE,
        range: (0, tile.len()),
        k_scales: k_scales.of(kernels, &k, k_scale, kernels.factor(k.layout().encoding())),
        v_scales: v_scales.of(kernels, &v, v_scale, kernels.factor(v.layout().encoding())),
        bias: rows.bias,
        logits: call.logits(),
        states: rows.states,
        out: rows.out,
        out_stride: heads.stride_v,
    });
    kernels.pv(&mut Pv {
        rows: rows.rows,
        weights: rows.scores,
        weight_stride: SCORE_STRIDE,
        v,
        out: rows.out,
        out_stride: heads.stride_v,
        decoded: rows.decoded,
        prefetch: &mut with_v,
    });
}

/// Adds the products of query rows with the mean of a block, in f16, to their biases.
pub(super) fn add_mean(
    call: &AttendCall<'_>,
    (q, q_stride): (&[f32], usize),
    mean: &[u8],
    bias: &mut [f32],
) {
    /// Query rows that are multiplied at a time.
    const ROWS: usize = 8;
    let layout = RowLayout::plain(Element::F16, call.heads.dim_k);
    let mean = KeyRows::new(mean, layout.bytes(), 1, &layout);
    let mut scores = [0.0; ROWS * SCORE_PAD];
    for (bias, q) in bias.chunks_mut(ROWS).zip(q.chunks(ROWS * q_stride)) {
        call.cpu.kernels.qk(&mut Qk {
            rows: bias.len(),
            q,
            words: None,
            q_stride,
            k: TileRows::of_run(&mean),
            scores: &mut scores,
            score_stride: SCORE_PAD,
            decoded: &mut [],
            prefetch: &mut Prefetch::none(),
        });
        for (bias, scores) in bias.iter_mut().zip(scores.chunks(SCORE_PAD)) {
            *bias += scores[0];
        }
    }
}
