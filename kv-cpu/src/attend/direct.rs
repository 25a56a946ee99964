//! One query over K and V in memory order: a few tokens of one kv head at a time are scored, weighed
//! and added while the rows behind them are prefetched.
#![expect(
    clippy::arithmetic_side_effects,
    clippy::indexing_slicing,
    reason = "rows and heads are counted by the work item that owns the memory"
)]
use kv_core::plan::PlannedSequence;
use kv_cpu_kernels::{
    Element, Fused, Kernels, KeyRows, Logits, OnlineSoftmax, Prefetch, Pv, Qk, RowLayout,
    SCORE_PAD, Softmax,
};

use super::call::AttendCall;
use super::key_runs::{KeyRun, KeyRuns};
use super::plan::WorkItem;
use crate::layout::RowScale;
use crate::scratch::Scratch;

/// Tokens of a step: a register tile's width of scores.
const STEP: usize = SCORE_PAD;
/// Most query rows of a register tile.
const ROWS_MAX: usize = 8;

/// Query rows of one kv head and what they have come to.
struct HeadState<'s> {
    /// Rows of the register tile, padded with zeros.
    rows: usize,
    q: &'s [f32],
    words: Option<&'s [u32]>,
    bias: &'s [f32],
    states: &'s mut [OnlineSoftmax],
    out: &'s mut [f32],
}

/// Attends with the query rows that are loaded, `rows` a kv head.
pub(super) fn run(
    call: &AttendCall<'_>,
    (item, sequence): (&WorkItem, &PlannedSequence),
    rows: usize,
    has_words: bool,
    scratch: &mut Scratch,
) {
    let kernels = call.cpu.kernels;
    let (stride_k, stride_v) = (rows * call.heads.stride_k, rows * call.heads.stride_v);
    let heads = item.num_heads();
    let q = &*scratch.q.get(heads * stride_k);
    let words: &[u32] = bytemuck::cast_slice(scratch.words.get(heads * stride_k / 2));
    let bias = &*scratch.bias.get(heads * rows);
    let out = scratch.out.get(heads * stride_v);
    let (states, scales) = (&mut scratch.states, &mut scratch.scales);
    let mut runs = KeyRuns::new(call, item, sequence);
    let mut step = Step {
        call,
        logits: call.logits(),
        scores: Scores([0.0; _]),
        k_scales: Scales([1.0; _]),
        v_scales: Scales([1.0; _]),
    };
    let scales_of = |is_wide: bool| {
        (item.kv_heads.0..item.kv_heads.1)
            .map(move |head| [call.k.scale(head, is_wide), call.v.scale(head, is_wide)])
    };
    let mut was_wide = false;
    scales.clear();
    scales.extend(scales_of(was_wide));
    // The run at hand and the two behind it.
    let mut ring = [runs.next(), runs.next(), runs.next()];
    let mut at = 0;
    while let Some(run) = &ring[at] {
        if run.is_wide != was_wide {
            was_wide = run.is_wide;
            scales.clear();
            scales.extend(scales_of(was_wide));
        }
        let later = [ring[(at + 1) % 3].as_ref(), ring[(at + 2) % 3].as_ref()];
        let is_fused = rows == 1 && kernels.is_fused([run.k.layout(), run.v.layout()]);
        let tokens = run.k.len();
        for head in 0..heads {
            let mut state = HeadState {
                rows,
                q: &q[head * stride_k..][..stride_k],
                words: has_words.then(|| &words[head * stride_k / 2..][..stride_k / 2]),
                bias: &bias[head * rows..][..rows],
                states: &mut states[head * rows..][..rows],
                out: &mut out[head * stride_v..][..stride_v],
            };
            let mean = runs.k_mean(run, head);
            for token in (0..tokens).step_by(STEP) {
                let range = token..(token + STEP).min(tokens);
                let keys = Keys {
                    k: run.k.rows(head, range.clone()),
                    v: run.v.rows(head, range),
                    mean,
                    scales: scales[head],
                };
                let mut prefetch = prefetch(kernels, (run, later), (head, token));
                if is_fused {
                    step.fused(&keys, &mut state, &mut prefetch);
                } else {
                    step.tile(&keys, &mut state, &mut prefetch);
                }
            }
        }
        ring[at] = runs.next();
        at = (at + 1) % 3;
    }
}

/// All lines of K and of V of the second step behind the one at a token of a head, be it of the next
/// heads or of later runs: one step is over too soon for what is prefetched with it.
fn prefetch<'a>(
    kernels: Kernels,
    (run, later): (&KeyRun<'a>, [Option<&KeyRun<'a>>; 2]),
    (head, token): (usize, usize),
) -> [Prefetch<'a>; 2] {
    let mut runs = [Some(run), later[0], later[1]].into_iter().flatten();
    let (mut run, mut head, mut token) = (runs.next(), head, token);
    let mut step = || {
        token += STEP;
        if run.is_some_and(|run| token >= run.k.len()) {
            (head, token) = (head + 1, 0);
        }
        if run.is_some_and(|run| head == run.k.heads()) {
            (run, head) = (runs.next(), 0);
        }
        let run = run?;
        let range = token..(token + STEP).min(run.k.len());
        Some([run.k.rows(head, range.clone()), run.v.rows(head, range)])
    };
    let target = kernels.prefetch();
    match step().zip(step()) {
        Some(([k_sooner, v_sooner], [k, v])) => {
            [Prefetch::of_rows(target, &k, &k_sooner), Prefetch::of_rows(target, &v, &v_sooner)]
        }
        None => [Prefetch::none(), Prefetch::none()],
    }
}

/// Some tokens of one kv head.
struct Keys<'a> {
    k: KeyRows<'a>,
    v: KeyRows<'a>,
    /// The mean that is subtracted from the rows of K, in f16.
    mean: Option<&'a [u8]>,
    scales: [RowScale; 2],
}

/// What steps need besides their keys and query rows.
struct Step<'c, 'a> {
    call: &'c AttendCall<'a>,
    logits: Logits,
    scores: Scores,
    k_scales: Scales,
    v_scales: Scales,
}

impl Step<'_, '_> {
    /// One query row over rows that need no decoding.
    fn fused(&self, keys: &Keys<'_>, rows: &mut HeadState<'_>, lines: &mut [Prefetch<'_>; 2]) {
        let mut bias = [0.0; ROWS_MAX];
        let bias = self.bias(keys, rows, &mut bias);
        let [k_lines, v_lines] = lines;
        self.call.cpu.kernels.fused(&mut Fused {
            q: rows.q,
            k: keys.k,
            v: keys.v,
            bias: bias[0],
            logits: self.logits,
            state: &mut rows.states[0],
            out: rows.out,
            prefetch: [k_lines, v_lines],
        });
    }

    /// The rows of a register tile over at most [`STEP`] tokens.
    fn tile(&mut self, keys: &Keys<'_>, rows: &mut HeadState<'_>, lines: &mut [Prefetch<'_>; 2]) {
        let (heads, kernels) = (self.call.heads, self.call.cpu.kernels);
        let [k_lines, v_lines] = lines;
        kernels.qk(&mut Qk {
            rows: rows.rows,
            q: rows.q,
            words: rows.words,
            q_stride: heads.stride_k,
            k: keys.k,
            scores: &mut self.scores.0,
            score_stride: STEP,
            prefetch: k_lines,
        });
        let mut bias = [0.0; ROWS_MAX];
        let bias = self.bias(keys, rows, &mut bias);
        let [k_scale, v_scale] = keys.scales;
        kernels.softmax(&mut Softmax {
            scores: &mut self.scores.0[..rows.rows * STEP],
            stride: STEP,
            range: (0, keys.k.len()),
            k_scales: scales(kernels, &keys.k, k_scale, &mut self.k_scales.0),
            v_scales: scales(kernels, &keys.v, v_scale, &mut self.v_scales.0),
            bias,
            logits: self.logits,
            states: rows.states,
            out: rows.out,
            out_stride: heads.stride_v,
        });
        kernels.pv(&mut Pv {
            rows: rows.rows,
            weights: &self.scores.0,
            weight_stride: STEP,
            v: keys.v,
            out: rows.out,
            out_stride: heads.stride_v,
            prefetch: v_lines,
        });
    }

    /// What is added to the scores of each row: its bias, and its product with the mean of the
    /// block.
    fn bias<'b>(&self, keys: &Keys<'_>, rows: &HeadState<'b>, to: &'b mut [f32]) -> &'b [f32] {
        let Some(mean) = keys.mean else {
            return rows.bias;
        };
        let to = &mut to[..rows.rows];
        to.copy_from_slice(rows.bias);
        add_mean(self.call, (rows.q, self.call.heads.stride_k), mean, to);
        to
    }
}

/// Scores of a register tile.
#[repr(align(64))]
struct Scores([f32; ROWS_MAX * STEP]);

/// What rows of a step are multiplied with.
#[repr(align(64))]
struct Scales([f32; STEP]);

/// What decoded rows are multiplied with, by token; `None` where that is 1.
pub(super) fn scales<'s>(
    kernels: Kernels,
    rows: &KeyRows<'_>,
    scale: RowScale,
    to: &'s mut [f32],
) -> Option<&'s [f32]> {
    let factor = kernels.factor(rows.layout().encoding());
    match scale {
        RowScale::Given(scale) if (scale * factor).to_bits() == 1.0_f32.to_bits() => return None,
        RowScale::Given(scale) => to.fill(scale * factor),
        RowScale::Stored => {
            kernels.row_scales(rows, to);
            if factor.to_bits() != 1.0_f32.to_bits() {
                to.iter_mut().for_each(|scale| *scale *= factor);
            }
        }
    }
    Some(to)
}

/// Adds the products of query rows with the mean of a block, in f16, to their biases.
pub(super) fn add_mean(
    call: &AttendCall<'_>,
    (q, q_stride): (&[f32], usize),
    mean: &[u8],
    bias: &mut [f32],
) {
    let layout = RowLayout::plain(Element::F16, call.heads.dim_k);
    let mut scores = Scores([0.0; ROWS_MAX * STEP]);
    for (bias, q) in bias.chunks_mut(ROWS_MAX).zip(q.chunks(ROWS_MAX * q_stride)) {
        call.cpu.kernels.qk(&mut Qk {
            rows: bias.len(),
            q,
            words: None,
            q_stride,
            k: KeyRows::new(mean, layout.bytes(), 1, &layout),
            scores: &mut scores.0,
            score_stride: STEP,
            prefetch: &mut Prefetch::none(),
        });
        for (bias, scores) in bias.iter_mut().zip(scores.0.chunks(STEP)) {
            *bias += scores[0];
        }
    }
}
