//! The online softmax: running maximum and sum of each query row, and the step that turns scores
//! into weights.
//!
//! Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018); partial results of
//! splits are merged as in Dao et al., "Flash-Decoding for long-context inference" (2023). As in
//! FlashAttention-4, the maximum is raised only when a score exceeds it by more than [`SLACK`], so
//! sums are rescaled rarely.
#![expect(
    clippy::inline_always,
    clippy::needless_range_loop,
    reason = "kernel code: bounds are asserted at the entry, and loops must inline into the \
              `#[target_feature]` caller"
)]
use crate::simd::{LANES_MAX, Simd};

/// Distance by which a score may exceed the running maximum before sums are rescaled. Weights up to
/// `e^8` are as exact as others, and far from overflow.
const SLACK: f32 = 8.0;

/// Running maximum and sum of weights of one query row.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
pub struct OnlineSoftmax {
    /// By lane, so that no step reduces a vector.
    sums: [f32; LANES_MAX],
    /// The running maximum, to which weights are relative. Finite until a score is infinite, so
    /// that a score of minus infinity has the weight 0.
    max: f32,
}

impl OnlineSoftmax {
    /// The state without a score.
    pub const EMPTY: Self = Self { sums: [0.0; LANES_MAX], max: f32::MIN };

    /// Returns the state as a partial result.
    pub fn finish(&self) -> Partial {
        let sum = self.sums.iter().sum();
        // A sum of 0 means that no score was seen.
        if sum == 0.0 { Partial::EMPTY } else { Partial { max: self.max, sum } }
    }
}

/// Maximum and sum of weights of one query row over a part of its context.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Partial {
    /// The maximum, to which weights are relative; minus infinity without scores.
    pub max: f32,
    /// Sum of weights.
    pub sum: f32,
}

impl Partial {
    /// The state without a score.
    pub const EMPTY: Self = Self { max: f32::NEG_INFINITY, sum: 0.0 };

    /// Adds both sums, relative to the greater maximum.
    #[must_use]
    pub fn merge(self, other: Self) -> Self {
        let max = if self.max.is_nan() || other.max.is_nan() {
            f32::NAN
        } else {
            self.max.max(other.max)
        };
        let common = Self { max, sum: 0.0 };
        Self { max, sum: self.sum * self.factor_to(common) + other.sum * other.factor_to(common) }
    }

    /// Returns the factor that rescales values from this maximum to the maximum of `other`.
    #[expect(clippy::float_cmp, reason = "maxima are compared with themselves")]
    pub fn factor_to(self, other: Self) -> f32 {
        if self.max == other.max || other.max == f32::NEG_INFINITY {
            1.0
        } else {
            (self.max - other.max).exp()
        }
    }

    /// Adds a sink logit, which has no value.
    #[must_use]
    pub fn with_sink_logit(self, sink_logit: f32) -> Self {
        self.merge(Self {
            max: sink_logit,
            sum: if sink_logit == f32::NEG_INFINITY { 0.0 } else { 1.0 },
        })
    }

    /// Returns the factor that makes a row of sums, relative to this maximum, a summand of the mean
    /// whose weights sum to `total`.
    pub fn weight_in(self, total: Self) -> f32 {
        self.factor_to(total) / total.sum
    }

    /// Returns the natural logarithm of the sum of exponentials; minus infinity without scores.
    pub fn log_sum_exp(self) -> f32 {
        if self.sum == 0.0 { f32::NEG_INFINITY } else { self.max + self.sum.ln() }
    }
}

/// The conversion of scores: `cap * tanh(scale * (score + bias) / cap)`, or without `cap`.
#[derive(Debug, Clone, Copy)]
pub struct Logits {
    pub(crate) scale: f32,
    /// The soft cap and its inverse.
    pub(crate) cap: Option<(f32, f32)>,
    pub(crate) exact: bool,
}

impl Logits {
    /// Multiplies scores with `scale` and caps them softly at `cap`. `exact`: whether weights need
    /// the precision of `f32`, because outputs or log-sum-exps have it; otherwise exponentials are
    /// exact to `2^-17`.
    pub fn new(scale: f32, cap: Option<f32>, exact: bool) -> Self {
        Self { scale, cap: cap.map(|cap| (cap, 1.0 / cap)), exact }
    }

    /// Scaled scores, capped if there is a cap.
    #[inline(always)]
    pub(crate) fn capped<S: Simd, const CAP: bool>(&self, s: S, scores: S::F) -> S::F {
        match self.cap {
            Some((cap, inverse)) if CAP => {
                s.mul(s.tanh(s.mul(scores, s.splat(inverse))), s.splat(cap))
            }
            _ => scores,
        }
    }
}

/// One step of the online softmax.
#[derive(Debug)]
pub struct Softmax<'a> {
    /// Scores, `stride` per query row; those of `range` become weights. Others in the vectors that
    /// hold the ends of the range become zero.
    pub scores: &'a mut [f32],
    /// Floats from a row of scores to the next, a multiple of [`SCORE_PAD`](crate::SCORE_PAD).
    pub stride: usize,
    /// Tokens whose scores count, the same for every row.
    pub range: (usize, usize),
    /// Factor of the scores of each token, applied first.
    pub k_scales: Option<&'a [f32]>,
    /// Factor of the weights of each token, applied after they are summed.
    pub v_scales: Option<&'a [f32]>,
    /// Bias of each row, added to scores before they are scaled.
    pub bias: &'a [f32],
    /// The conversion of scores to logits.
    pub logits: Logits,
    /// State of each row.
    pub states: &'a mut [OnlineSoftmax],
    /// Sums of V so far, `out_stride` per row: rescaled where the maximum is raised.
    pub out: &'a mut [f32],
    /// Floats from an output row to the next, a multiple of [`OUTPUT_PAD`](crate::OUTPUT_PAD).
    pub out_stride: usize,
}

impl Softmax<'_> {
    /// Asserts the bounds that the loops rely on.
    #[inline]
    pub(crate) fn check(&self) {
        let ((begin, end), rows) = (self.range, self.states.len());
        let padded = end.next_multiple_of(LANES_MAX);
        let scales = [self.k_scales, self.v_scales];
        assert!(
            begin <= end
                && padded <= self.stride
                && self.stride.is_multiple_of(LANES_MAX)
                && self.bias.len() == rows
                && self.scores.len() >= rows * self.stride
                && scales.iter().flatten().all(|scales| scales.len() >= padded),
            "a token range lies inside its row of scores"
        );
        assert!(
            self.out_stride.is_multiple_of(LANES_MAX) && self.out.len() >= rows * self.out_stride,
            "output rows lie inside their slice"
        );
    }
}

/// Turns the scores of a range into weights. The arguments were checked.
#[inline(always)]
pub(crate) fn softmax<S: Simd, const CAP: bool>(s: S, x: &mut Softmax<'_>) {
    let (begin, end) = x.range;
    // Whole vectors around the range.
    let (first, last) = (begin / S::LANES * S::LANES, end.next_multiple_of(S::LANES));
    for row in 0..x.states.len() {
        let mut i = first;
        while i + 4 * S::LANES <= last {
            vectors::<S, CAP, 4>(s, x, row, (first, i));
            i += 4 * S::LANES;
        }
        while i < last {
            vectors::<S, CAP, 1>(s, x, row, (first, i));
            i += S::LANES;
        }
    }
}

/// Lanes to mask: zeros, then minus infinities, and the other way round.
static LATE: [f32; 2 * LANES_MAX] = mask(0.0, f32::NEG_INFINITY);
static EARLY: [f32; 2 * LANES_MAX] = mask(f32::NEG_INFINITY, 0.0);

const fn mask(first: f32, second: f32) -> [f32; 2 * LANES_MAX] {
    let (mut lanes, mut i) = ([first; 2 * LANES_MAX], LANES_MAX);
    while i < 2 * LANES_MAX {
        lanes[i] = second;
        i += 1;
    }
    lanes
}

/// Turns `N` vectors of a row's scores into weights, from `i` on. Scores from `first` up to `i` are
/// weights already, and are rescaled when the maximum is raised.
#[inline(always)]
fn vectors<S: Simd, const CAP: bool, const N: usize>(
    s: S,
    x: &mut Softmax<'_>,
    row: usize,
    (first, i): (usize, usize),
) {
    let (begin, end) = x.range;
    let at = x.scores.as_mut_ptr().wrapping_add(row * x.stride);
    let (bias, scale) = (s.splat(x.bias[row]), s.splat(x.logits.scale));
    let mut logits = [s.splat(f32::NEG_INFINITY); N];
    let mut top = s.splat(f32::NEG_INFINITY);
    for n in 0..N {
        let i = i + n * S::LANES;
        // SAFETY: a vector of a row of scores: the range was checked, padded.
        let mut score = unsafe { s.load(at, i) };
        if let Some(scales) = x.k_scales {
            // SAFETY: and of the scales.
            score = s.mul(score, unsafe { s.load(scales.as_ptr(), i) });
        }
        score = s.mul(s.add(score, bias), scale);
        score = x.logits.capped::<S, CAP>(s, score);
        if i < begin || i + S::LANES > end {
            // Scores outside of the range become minus infinity, even NaN.
            let late = LANES_MAX - (end - i).min(S::LANES);
            let early = LANES_MAX - begin.saturating_sub(i).min(S::LANES);
            // SAFETY: as many lanes of twice as many.
            let late = unsafe { s.load(LATE.as_ptr(), late) };
            // SAFETY: as above.
            let off = s.add(late, unsafe { s.load(EARLY.as_ptr(), early) });
            score = s.add(s.zero_below(off, 0.0, score), off);
        }
        logits[n] = score;
        top = s.max(score, top);
    }
    let state = &mut x.states[row];
    if let Some(factor) = raise(s, state, top, x.logits.exact) {
        rescale(s, &mut x.out[row * x.out_stride..][..x.out_stride], factor);
        rescale(s, &mut x.scores[row * x.stride..][first..i], factor);
    }
    let minus_max = s.splat(-state.max);
    // SAFETY: an array of `LANES_MAX`.
    let mut sums = unsafe { s.load(state.sums.as_ptr(), 0) };
    let at = x.scores.as_mut_ptr().wrapping_add(row * x.stride);
    for n in 0..N {
        let i = i + n * S::LANES;
        let mut weight = exp(s, s.add(logits[n], minus_max), x.logits.exact);
        sums = s.add(sums, weight);
        if let Some(scales) = x.v_scales {
            // SAFETY: as above.
            weight = s.mul(weight, unsafe { s.load(scales.as_ptr(), i) });
        }
        // SAFETY: as above.
        unsafe { s.store(at, i, weight) };
    }
    // SAFETY: an array of `LANES_MAX`.
    unsafe { s.store(state.sums.as_mut_ptr(), 0, sums) };
}

/// Raises the running maximum if a logit of `top` exceeds it by more than [`SLACK`]. Returns the
/// factor that rescales sums from the old maximum to the new one.
#[inline(always)]
pub(crate) fn raise<S: Simd>(
    s: S,
    state: &mut OnlineSoftmax,
    top: S::F,
    exact: bool,
) -> Option<S::F> {
    if !s.any_greater(top, s.splat(state.max + SLACK)) {
        return None;
    }
    let max = s.reduce_max(top).max(state.max);
    let factor = exp(s, s.splat(state.max - max), exact);
    state.max = max;
    // SAFETY: an array of `LANES_MAX`.
    let sums = s.mul(unsafe { s.load(state.sums.as_ptr(), 0) }, factor);
    // SAFETY: as above.
    unsafe { s.store(state.sums.as_mut_ptr(), 0, sums) };
    Some(factor)
}

/// Multiplies an output row, whole vectors.
#[inline(always)]
pub(crate) fn rescale<S: Simd>(s: S, out: &mut [f32], factor: S::F) {
    for i in (0..out.len()).step_by(S::LANES) {
        // SAFETY: output rows are padded to whole vectors.
        let sum = unsafe { s.load(out.as_ptr(), i) };
        // SAFETY: as above.
        unsafe { s.store(out.as_mut_ptr(), i, s.mul(sum, factor)) };
    }
}

#[inline(always)]
pub(crate) fn exp<S: Simd>(s: S, x: S::F, exact: bool) -> S::F {
    if exact { s.exp(x) } else { s.exp_short(x) }
}

#[cfg(test)]
#[expect(clippy::float_cmp, reason = "tests: what is compared is exact")]
mod tests {
    use super::*;

    #[test]
    fn merges_are_relative_to_the_greater_maximum() {
        let a = Partial { max: 2.0, sum: 3.0 };
        let b = Partial { max: 5.0, sum: 1.5 };
        let merged = a.merge(b);
        assert!((merged.sum - (3.0 * (-3.0_f32).exp() + 1.5)).abs() < 1e-6);
        assert_eq!((merged.max, a.factor_to(merged)), (5.0, (-3.0_f32).exp()));
        assert_eq!(Partial::EMPTY.merge(Partial::EMPTY), Partial::EMPTY);
        assert_eq!(Partial::EMPTY.merge(b), b);
    }

    #[test]
    fn sink_logits_join_the_sum_alone() {
        let seen = Partial { max: 0.0, sum: 1.0 };
        let total = seen.with_sink_logit(0.0);
        assert_eq!((total.sum, seen.weight_in(total)), (2.0, 0.5));
        assert_eq!(Partial::EMPTY.with_sink_logit(3.0).log_sum_exp(), 3.0);
        assert_eq!(
            Partial::EMPTY.with_sink_logit(f32::NEG_INFINITY).log_sum_exp(),
            f32::NEG_INFINITY
        );
    }
}
