//! One query row against rows that need no decoding: dot products, softmax and weighted sums of a
//! few tokens at a time.
//!
//! One row is bound by memory, which delivers most when K and V are read in small turns and each
//! row from end to end.
#![expect(
    clippy::arithmetic_side_effects,
    clippy::indexing_slicing,
    clippy::inline_always,
    clippy::needless_range_loop,
    reason = "kernel code: bounds are asserted at the entry, and loops must inline into the \
              `#[target_feature]` caller"
)]
use crate::decode::{GROUP, HALF, rest_begin};
use crate::load::{Load, V, place};
use crate::prefetch::Prefetch;
use crate::pv::OUTPUT_PAD;
use crate::qk::QUERY_PAD;
use crate::rows::KeyRows;
use crate::simd::{LANES_MAX, LINE, Simd};
use crate::softmax::{Logits, OnlineSoftmax, rescale};

/// One query row against rows of K and V, none of which is masked.
#[derive(Debug)]
pub struct Fused<'a, 'p> {
    /// The query row, padded with zeros to a multiple of [`QUERY_PAD`](crate::QUERY_PAD).
    pub q: &'a [f32],
    /// Rows of K, and as many of V in the same encoding.
    pub k: KeyRows<'a>,
    /// Rows of V.
    pub v: KeyRows<'a>,
    /// Added to scores before they are scaled.
    pub bias: f32,
    /// How scores become logits.
    pub logits: Logits,
    /// Maximum and sum so far.
    pub state: &'a mut OnlineSoftmax,
    /// Sums of V so far, padded to a multiple of [`OUTPUT_PAD`](crate::OUTPUT_PAD).
    pub out: &'a mut [f32],
    /// Lines of K and of V to prefetch meanwhile.
    pub prefetch: [&'a mut Prefetch<'p>; 2],
}

impl Fused<'_, '_> {
    /// Asserts what the loops rely on.
    #[inline]
    pub(crate) fn check(&self) {
        let (k, v) = (self.k.layout(), self.v.layout());
        assert!(
            k.encoding() == v.encoding() && self.k.len() == self.v.len(),
            "K and V have as many rows of one encoding"
        );
        assert!(
            self.q.len() >= k.dim().next_multiple_of(QUERY_PAD)
                && self.out.len() >= v.dim().next_multiple_of(OUTPUT_PAD)
                && self.out.len().is_multiple_of(LANES_MAX),
            "query and output rows are padded"
        );
    }
}

/// Tokens of a step.
const STEP: usize = 8;

/// Scores, weighs and adds all tokens. The arguments were checked.
#[inline(always)]
pub(crate) fn fused<L: Load>(l: L, x: &mut Fused<'_, '_>) {
    let mut prefetch = [*x.prefetch[0], *x.prefetch[1]];
    let mut token = 0;
    // The scores of a step are one vector.
    while L::S::LANES >= STEP && token + STEP <= x.k.len() {
        step::<L, STEP>(l, x, token, &mut prefetch);
        token += STEP;
    }
    while token < x.k.len() {
        step::<L, 1>(l, x, token, &mut prefetch);
        token += 1;
    }
    for (cursor, mut prefetch) in x.prefetch.iter_mut().zip(prefetch) {
        prefetch.finish(l.simd());
        **cursor = prefetch;
    }
}

/// `T` tokens from one on.
#[inline(always)]
fn step<L: Load, const T: usize>(
    l: L,
    x: &mut Fused<'_, '_>,
    token: usize,
    prefetch: &mut [Prefetch<'_>; 2],
) {
    let s = l.simd();
    let mut sums = [s.splat(0.0); STEP];
    let lines = x.k.layout().bytes().div_ceil(LINE);
    for t in 0..T {
        prefetch[0].step(s, lines);
        sums[t] = dot(l, x, token + t);
    }
    let all = s.reduce_add8(sums);
    let mut logits = [f32::NEG_INFINITY; LANES_MAX];
    for t in 0..T {
        logits[t] = all[t] * L::FACTOR + x.bias;
    }
    // SAFETY: an array of `LANES_MAX`.
    let mut scores = s.mul(unsafe { s.load(logits.as_ptr(), 0) }, s.splat(x.logits.scale));
    if x.logits.cap.is_some() {
        scores = x.logits.capped::<_, true>(s, scores);
        // SAFETY: as above.
        unsafe { s.store(logits.as_mut_ptr(), 0, scores) };
        logits[T..].fill(f32::NEG_INFINITY);
        // SAFETY: as above.
        scores = unsafe { s.load(logits.as_ptr(), 0) };
    }
    let (weights, factor) = x.state.step(s, scores, x.logits.exact);
    if let Some(factor) = factor {
        rescale(s, x.out, factor);
    }
    let mut all = [0.0; LANES_MAX];
    // SAFETY: as above.
    unsafe { s.store(all.as_mut_ptr(), 0, weights) };
    let mut weights = [s.splat(0.0); T];
    for t in 0..T {
        weights[t] = s.splat(all[t] * L::FACTOR);
    }
    let lines = x.v.layout().bytes().div_ceil(LINE);
    for _ in 0..T {
        prefetch[1].step(s, lines);
    }
    add::<L, T>(l, x, token, weights);
}

/// Products of a row of K with the query row.
#[inline(always)]
fn dot<L: Load>(l: L, x: &Fused<'_, '_>, token: usize) -> V<L> {
    let (s, row, layout) = (l.simd(), x.k.at(token), x.k.layout());
    let rest = rest_begin(layout.dim());
    let q = x.q.as_ptr();
    let mut sums = [s.splat(0.0); 2];
    for pair in 0..rest / (2 * L::S::LANES) {
        // SAFETY: a row of K, and a pair of its whole groups.
        let [keys] = unsafe { l.pairs::<1>(row, layout, pair) };
        let (group, offset) = place::<L::S>(pair);
        for half in 0..2 {
            // SAFETY: the query row is as long as a row of K.
            let query = unsafe { s.load(q, group + offset + half * HALF) };
            sums[half] = s.fma(query, keys[half], sums[half]);
        }
    }
    if rest < layout.dim() {
        // SAFETY: a row of K, which has a rest.
        let values = unsafe { l.rest(row, layout) };
        for i in (0..GROUP).step_by(L::S::LANES) {
            // SAFETY: a group of floats.
            let keys = unsafe { s.load(values.as_ptr(), i) };
            // SAFETY: the query row is padded.
            let query = unsafe { s.load(q, rest + i) };
            sums[0] = s.fma(query, keys, sums[0]);
        }
    }
    s.add(sums[0], sums[1])
}

/// Adds the values of `T` tokens by their weights.
#[inline(always)]
fn add<L: Load, const T: usize>(l: L, x: &mut Fused<'_, '_>, token: usize, weights: [V<L>; T]) {
    let (s, layout) = (l.simd(), x.v.layout());
    let rest = rest_begin(layout.dim());
    let pairs = rest / (2 * L::S::LANES);
    // As many pairs as stay in registers for a step.
    let mut pair = 0;
    while pair + 4 <= pairs {
        add_pairs::<L, T, 4>(l, x, (token, pair), weights);
        pair += 4;
    }
    while pair < pairs {
        add_pairs::<L, T, 1>(l, x, (token, pair), weights);
        pair += 1;
    }
    if rest < layout.dim() {
        let out = x.out.as_mut_ptr();
        for t in 0..T {
            // SAFETY: a row of V, which has a rest.
            let values = unsafe { l.rest(x.v.at(token + t), layout) };
            for i in (0..GROUP).step_by(L::S::LANES) {
                // SAFETY: a group of floats.
                let values = unsafe { s.load(values.as_ptr(), i) };
                // SAFETY: the output row is padded.
                let sum = s.fma(weights[t], values, unsafe { s.load(out, rest + i) });
                // SAFETY: as above.
                unsafe { s.store(out, rest + i, sum) };
            }
        }
    }
}

#[inline(always)]
fn add_pairs<L: Load, const T: usize, const P: usize>(
    l: L,
    x: &mut Fused<'_, '_>,
    (token, first): (usize, usize),
    weights: [V<L>; T],
) {
    let (s, out) = (l.simd(), x.out.as_mut_ptr());
    let mut sums = [[s.splat(0.0); 2]; P];
    for p in 0..P {
        let (group, offset) = place::<L::S>(first + p);
        for half in 0..2 {
            // SAFETY: the output row is as long as a row of V.
            sums[p][half] = unsafe { s.load(out, group + offset + half * HALF) };
        }
    }
    for t in 0..T {
        // SAFETY: a row of V, and pairs of its whole groups.
        let values = unsafe { l.pairs::<P>(x.v.at(token + t), x.v.layout(), first) };
        for p in 0..P {
            for half in 0..2 {
                sums[p][half] = s.fma(weights[t], values[p][half], sums[p][half]);
            }
        }
    }
    for p in 0..P {
        let (group, offset) = place::<L::S>(first + p);
        for half in 0..2 {
            // SAFETY: as for the loads.
            unsafe { s.store(out, group + offset + half * HALF, sums[p][half]) };
        }
    }
}
