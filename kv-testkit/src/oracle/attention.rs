//! Attention as its formula states it.
//!
//! The same code computes the reference in f64 and, in f32, the plain computation that tolerances
//! are derived from.
use std::ops::{Add, Div, Mul};

use super::transforms::{Query, Transforms};

/// f64 for the reference, f32 for the plain computation.
pub trait Real:
    Copy + PartialOrd + Add<Output = Self> + Mul<Output = Self> + Div<Output = Self>
{
    /// Whether this is the reference, which also computes error magnitudes.
    const EXACT: bool;
    /// Converts an input.
    fn of(x: f32) -> Self;
    /// Converts a result.
    fn value(self) -> f64;
    /// Returns the square root of a count.
    fn root(n: usize) -> Self;
    /// Returns the natural exponential.
    #[must_use]
    fn exp(self) -> Self;
    /// Returns the natural logarithm.
    #[must_use]
    fn ln(self) -> Self;
    /// Returns the hyperbolic tangent.
    #[must_use]
    fn tanh(self) -> Self;
}

impl Real for f32 {
    const EXACT: bool = false;
    fn of(x: f32) -> Self {
        x
    }
    fn value(self) -> f64 {
        f64::from(self)
    }
    fn root(n: usize) -> Self {
        (n as Self).sqrt()
    }
    fn exp(self) -> Self {
        self.exp()
    }
    fn ln(self) -> Self {
        self.ln()
    }
    fn tanh(self) -> Self {
        self.tanh()
    }
}

impl Real for f64 {
    const EXACT: bool = true;
    fn of(x: f32) -> Self {
        Self::from(x)
    }
    fn value(self) -> f64 {
        self
    }
    fn root(n: usize) -> Self {
        (n as Self).sqrt()
    }
    fn exp(self) -> Self {
        self.exp()
    }
    fn ln(self) -> Self {
        self.ln()
    }
    fn tanh(self) -> Self {
        self.tanh()
    }
}

/// Attention of one sequence.
#[derive(Debug, Clone)]
pub struct Attention {
    /// Query heads, a multiple of `kv_heads`.
    pub q_heads: usize,
    /// Heads of K and V.
    pub kv_heads: usize,
    /// Head dim of K.
    pub dk: usize,
    /// Head dim of V.
    pub dv: usize,
    /// Factor of the scores.
    pub scale: f32,
    /// Bottom-right causal, or every key.
    pub causal: bool,
    /// Number of keys before its own position that a query sees.
    pub window_left: Option<u32>,
    /// Tokens at the start of the sequence that a query sees besides its window.
    pub sink_tokens: u32,
    /// Soft cap of the scaled scores.
    pub soft_cap: Option<f32>,
    /// The sink logit of every query head, which has no value.
    pub sink_logits: Option<Vec<f32>>,
    /// The transform that K and V are stored with, if any. The query is transformed too, and the
    /// output is transformed back.
    pub transforms: Transforms,
}

/// Results for one sequence: `[nq, q_heads, dv]` and `[nq, q_heads]`.
#[derive(Debug, Clone, Default)]
pub struct AttentionResult {
    /// Weighted sums of values; 0 where a query sees no key.
    pub out: Vec<f64>,
    /// Log-sum-exp of the scores and the sink logit. Where a query sees no key: the sink logit
    /// alone, or negative infinity without one.
    pub lse: Vec<f64>,
    /// Magnitudes that rounding errors in `out` are proportional to: the terms of the sum, and the
    /// effect of rounding each score. Only the reference has them; the same holds for the next
    /// field.
    pub magnitude: Vec<f64>,
    /// The same for `lse`.
    pub lse_magnitude: Vec<f64>,
}

/// Orders of operations in a plain loop, which differ in rounding only.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// Dims and keys in ascending order.
    Forward,
    /// Dims and keys in descending order.
    Backward,
    /// Ascending, with the scale applied to the query instead of the score.
    ScaleFirst,
}

impl Order {
    /// All orders.
    pub const ALL: [Self; 3] = [Self::Forward, Self::Backward, Self::ScaleFirst];
}

impl Attention {
    /// Makes plain attention: causal, `1 / sqrt(dk)`, no options.
    pub fn causal(q_heads: usize, kv_heads: usize, dk: usize, dv: usize) -> Self {
        let scale = (1.0 / (dk as f64).sqrt()) as f32;
        Self {
            q_heads,
            kv_heads,
            dk,
            dv,
            scale,
            causal: true,
            window_left: None,
            sink_tokens: 0,
            soft_cap: None,
            sink_logits: None,
            transforms: Transforms::default(),
        }
    }

    /// Returns whether query `i` of `nq` sees key `j` of `nk`.
    pub fn sees(&self, i: usize, nq: usize, j: usize, nk: usize) -> bool {
        let (position, j) = (i as i64 + nk as i64 - nq as i64, j as i64);
        let is_sink_token = j < i64::from(self.sink_tokens);
        (!self.causal || j <= position)
            && (is_sink_token
                || self.window_left.is_none_or(|left| j >= position - i64::from(left)))
    }

    /// Computes the reference: `q` (`[nq, q_heads, dk]`) attends to `k` (`[nk, kv_heads, dk]`) and
    /// `v`.
    pub fn exact(&self, q: &[f32], k: &[f32], v: &[f32]) -> AttentionResult {
        self.run::<f64>([q, k, v], Order::Forward)
    }

    /// Runs the plain computation in f32, in every order.
    pub fn plain(&self, q: &[f32], k: &[f32], v: &[f32]) -> [AttentionResult; 3] {
        Order::ALL.map(|order| self.run::<f32>([q, k, v], order))
    }

    /// Computes attention in the arithmetic of `R`.
    pub fn run<R: Real>(&self, [q, k, v]: [&[f32]; 3], order: Order) -> AttentionResult {
        let Self { q_heads, kv_heads, dk, dv, .. } = *self;
        let (nq, nk) = (q.len() / (q_heads * dk), k.len() / (kv_heads * dk));
        let mut result = AttentionResult::default();
        for i in 0..nq {
            for head in 0..q_heads {
                let kv_head = head / (q_heads / kv_heads);
                let q_row = &q[(i * q_heads + head) * dk..][..dk];
                let mut seen: Vec<_> = (0..nk).filter(|&j| self.sees(i, nq, j, nk)).collect();
                if order == Order::Backward {
                    seen.reverse();
                }
                let row = |x: usize, j: usize, dim: usize| (j * kv_heads + kv_head) * dim + x;
                let k_rows: Vec<_> =
                    seen.iter().map(|&j| &k[row(0, j, dk)..row(dk, j, dk)]).collect();
                let v_rows: Vec<_> =
                    seen.iter().map(|&j| &v[row(0, j, dv)..row(dv, j, dv)]).collect();
                let query = self.transforms.query::<R>(q_row, kv_head);
                let scores: Vec<R> =
                    k_rows.iter().map(|k_row| self.score(&query, k_row, order)).collect();
                let (weights, lse) = self.softmax(&scores, head);
                let mut sum = vec![R::of(0.0); dv];
                for (v_row, &weight) in v_rows.iter().zip(&weights) {
                    for d in 0..dv {
                        sum[d] = sum[d] + weight * R::of(v_row[d]);
                    }
                }
                let mut magnitude = Vec::new();
                if R::EXACT {
                    let rows = [k_rows.as_slice(), &v_rows];
                    let lse_magnitude;
                    (magnitude, lse_magnitude) =
                        self.magnitudes(&query, rows, &weights, (&sum, lse));
                    result.lse_magnitude.push(lse_magnitude);
                }
                self.transforms.output(&mut sum, &mut magnitude, kv_head);
                result.out.extend(sum.into_iter().map(R::value));
                result.magnitude.extend(magnitude);
                result.lse.push(lse);
            }
        }
        result
    }

    /// First-order error analysis of one row, before it is transformed back. The error of a score
    /// is proportional to the absolute terms of its dot product and to the rounding of the
    /// transformed query; the error of an output to the change of the weights times the distance of
    /// each value.
    fn magnitudes<R: Real>(
        &self,
        query: &Query<R>,
        [k_rows, v_rows]: [&[&[f32]]; 2],
        weights: &[R],
        (out, lse): (&[R], f64),
    ) -> (Vec<f64>, f64) {
        let scale = f64::from(self.scale).abs();
        let terms = |k_row: &&[f32]| {
            let query = query.transformed.iter().zip(&query.sizes).zip(*k_row);
            let dot = query.map(|((q, size), k)| (q.value().abs() + size) * f64::from(k.abs()));
            dot.sum::<f64>()
        };
        let sizes: Vec<f64> =
            k_rows.iter().map(|k_row| (terms(k_row) + query.bias_size) * scale).collect();
        let parts = || weights.iter().map(|weight| weight.value()).zip(v_rows).zip(&sizes);
        let of_out = |(d, out): (usize, &R)| {
            let term = |((weight, v_row), size): ((f64, &&[f32]), &f64)| {
                let value = f64::from(v_row[d]);
                weight * (value.abs() + (value - out.value()).abs() * size)
            };
            parts().map(term).sum()
        };
        let spread: f64 = parts().map(|((weight, _), size)| weight * size).sum();
        let lse_magnitude = if lse.is_finite() { 1.0 + lse.abs() + spread } else { 0.0 };
        (out.iter().enumerate().map(of_out).collect(), lse_magnitude)
    }

    fn score<R: Real>(&self, query: &Query<R>, k_row: &[f32], order: Order) -> R {
        let scale_first = order == Order::ScaleFirst;
        let first = |x: R| if scale_first { x * R::of(self.scale) } else { x };
        let mut dot = R::of(0.0);
        for n in 0..k_row.len() {
            let d = if order == Order::Backward { k_row.len() - 1 - n } else { n };
            dot = dot + first(query.transformed[d]) * R::of(k_row[d]);
        }
        let dot = dot + first(query.bias);
        let scaled = if scale_first { dot } else { dot * R::of(self.scale) };
        match self.soft_cap {
            Some(cap) => R::of(cap) * (scaled / R::of(cap)).tanh(),
            None => scaled,
        }
    }

    /// Returns the weights of the visible keys, and the log-sum-exp.
    fn softmax<R: Real>(&self, scores: &[R], head: usize) -> (Vec<R>, f64) {
        let sink_logit = self.sink_logits.as_ref().map(|sink_logits| R::of(sink_logits[head]));
        let sink_logit = sink_logit.filter(|logit| logit.value() > f64::NEG_INFINITY);
        if scores.is_empty() && sink_logit.is_none() {
            return (Vec::new(), f64::NEG_INFINITY);
        }
        let larger = |a: R, b: R| if b > a { b } else { a };
        let max = scores.iter().copied().chain(sink_logit).reduce(larger).unwrap_or(R::of(0.0));
        let minus = |x: R| x + max * R::of(-1.0);
        let exps: Vec<R> = scores.iter().map(|&score| minus(score).exp()).collect();
        let sink_logit = sink_logit.map(|logit| minus(logit).exp());
        let total = exps.iter().copied().chain(sink_logit).fold(R::of(0.0), |sum, e| sum + e);
        let weights = exps.into_iter().map(|e| e / total).collect();
        (weights, (max + total.ln()).value())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn near(a: &[f64], b: &[f64]) {
        assert_eq!(a.len(), b.len());
        assert!(a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-12 || a == b), "{a:?} {b:?}");
    }

    /// Scores 0 and ln 3: weights 1/4 and 3/4.
    fn two_keys() -> (Attention, [f32; 1], [f32; 2], [f32; 2]) {
        let attention = Attention { scale: 1.0, ..Attention::causal(1, 1, 1, 1) };
        (attention, [1.0], [0.0, 3_f32.ln()], [4.0, 8.0])
    }

    #[test]
    fn weights_by_hand() {
        let (attention, q, k, v) = two_keys();
        let got = attention.exact(&q, &k, &v);
        let exact = f64::from(3_f32.ln()).exp();
        near(&got.out, &[(4.0 + 8.0 * exact) / (1.0 + exact)]);
        near(&got.lse, &[(1.0 + exact).ln()]);
        assert!((got.out[0] - 7.0).abs() < 1e-6);
    }

    #[test]
    fn a_sink_logit_takes_weight_and_no_value() {
        let (attention, q, k, v) = two_keys();
        let attention = Attention { sink_logits: Some(vec![0.0]), ..attention };
        let got = attention.exact(&q, &k, &v);
        // Weights 1/5, 3/5, and 1/5 for the sink logit.
        assert!((got.out[0] - 28.0 / 5.0).abs() < 1e-6, "{got:?}");
        assert!((got.lse[0] - 5_f64.ln()).abs() < 1e-6);
        let alone = Attention { sink_logits: Some(vec![0.5]), ..attention }.exact(&q, &[], &[]);
        assert_eq!((alone.out, alone.lse), (vec![0.0], vec![0.5]));
    }

    #[test]
    fn window_causality_and_more_queries_than_keys() {
        let (attention, ..) = two_keys();
        // Three queries over two keys: the first query is before every key.
        let got = attention.exact(&[1.0; 3], &[0.0, 0.0], &[4.0, 8.0]);
        near(&got.out, &[0.0, 4.0, 6.0]);
        assert_eq!(got.lse[0], f64::NEG_INFINITY);
        let windowed = Attention { window_left: Some(0), ..attention.clone() };
        near(&windowed.exact(&[1.0; 2], &[0.0; 2], &[4.0, 8.0]).out, &[4.0, 8.0]);
        let with_sink_token = Attention { sink_tokens: 1, ..windowed };
        near(&with_sink_token.exact(&[1.0; 3], &[0.0; 3], &[4.0, 8.0, 6.0]).out, &[4.0, 6.0, 5.0]);
        let all = Attention { window_left: None, ..with_sink_token };
        near(&all.exact(&[1.0], &[0.0; 3], &[4.0, 8.0, 6.0]).out, &[6.0]);
        let full = Attention { causal: false, ..attention };
        near(&full.exact(&[1.0; 3], &[0.0; 2], &[4.0, 8.0]).out, &[6.0; 3]);
    }

    #[test]
    fn groups_share_a_kv_head_and_the_cap_bounds_scores() {
        let attention = Attention { scale: 1.0, ..Attention::causal(4, 2, 1, 1) };
        let got = attention.exact(&[1.0; 4], &[0.0, 0.0], &[4.0, 8.0]);
        near(&got.out, &[4.0, 4.0, 8.0, 8.0]);
        let capped = Attention { scale: 1.0, soft_cap: Some(2.0), ..Attention::causal(1, 1, 1, 1) };
        near(&capped.exact(&[1.0], &[1000.0], &[1.0]).lse, &[2.0]);
    }
}
