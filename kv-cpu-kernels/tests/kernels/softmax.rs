//! The online softmax, step by step, against one softmax in `f64`.
use super::*;
use kv_cpu_kernels::{Logits, OnlineSoftmax, Partial, Softmax};

const OUT: usize = 32;

/// The input of one row, and how its scores become logits.
#[derive(Clone)]
struct Row {
    scores: Vec<f32>,
    range: (usize, usize),
    k_scales: Option<Vec<f32>>,
    v_scales: Option<Vec<f32>>,
    bias: f32,
    scale: f32,
    cap: Option<f32>,
    exact: bool,
}

impl Row {
    fn new(scores: Vec<f32>, range: (usize, usize), exact: bool) -> Self {
        let (k_scales, v_scales) = (None, None);
        Self { scores, range, k_scales, v_scales, bias: 0.0, scale: 1.0, cap: None, exact }
    }

    /// A step of one row, whose sums of V are `out`. Returns the weights of the range.
    fn step(&self, kernels: Kernels, state: &mut OnlineSoftmax, out: &mut [f32; OUT]) -> Vec<f32> {
        let mut scores = self.scores.clone();
        kernels.softmax(&mut Softmax {
            stride: scores.len(),
            scores: &mut scores,
            range: self.range,
            k_scales: self.k_scales.as_deref(),
            v_scales: self.v_scales.as_deref(),
            bias: &[self.bias],
            logits: Logits::new(self.scale, self.cap, self.exact),
            states: std::slice::from_mut(state),
            out,
            out_stride: OUT,
        });
        let (begin, end) = self.range;
        for (i, (before, score)) in self.scores.iter().zip(&scores).enumerate() {
            let is_kept = before.to_bits() == score.to_bits();
            let is_near = i + 16 > begin && i < end.next_multiple_of(16);
            let masked = (is_kept || is_near && *score == 0.0) || (begin..end).contains(&i);
            assert!(masked, "{kernels:?} {:?}: score {i} is {score}", self.range);
        }
        scores[begin..end].to_vec()
    }

    /// Logits of the range.
    fn logits(&self) -> Vec<f64> {
        let logit = |i: usize| {
            let scale = self.k_scales.as_ref().map_or(1.0, |scales| scales[i]);
            let score = f64::from(self.scores[i]) * f64::from(scale) + f64::from(self.bias);
            let score = score * f64::from(self.scale);
            self.cap.map(f64::from).map_or(score, |cap| cap * (score / cap).tanh())
        };
        (self.range.0..self.range.1).map(logit).collect()
    }
    /// Relative error that a weight may have, where logits are no greater than `size`.
    fn allowed(&self, size: f64) -> f64 {
        f64::from(f32::EPSILON) * (4.0 + 4.0 * size) + if self.exact { 0.0 } else { 1e-5 }
    }
}

/// Greatest magnitude.
fn size(logits: &[f64]) -> f64 {
    logits.iter().fold(1.0, |size, x| x.abs().max(size))
}

/// Rows of random scores in every combination of what a step may have; scores outside of ranges are
/// NaN, and so are scales.
fn random_rows() -> Vec<Row> {
    let mut random = Random::new(5);
    let mut rows = Vec::new();
    let ranges = [
        (0, 1),
        (0, 16),
        (3, 13),
        (15, 17),
        (7, 64),
        (5, 90),
        (16, 48),
        (63, 64),
        (0, 128),
        (1, 127),
    ];
    for (index, range) in (0..64).flat_map(|i| ranges.map(|range| (i, range))) {
        let mut masked = |magnitude: f32, least: f32| {
            let mut values = vec![f32::NAN; 128];
            values[range.0..range.1].fill_with(|| random.unit() * magnitude + least);
            values
        };
        let mut row = Row::new(masked([1.0, 40.0][index & 1], 0.0), range, index & 2 == 0);
        row.k_scales = (index & 4 == 0).then(|| masked(0.5, 1.0));
        row.v_scales = (index & 8 == 0).then(|| masked(0.5, 1.0));
        row.cap = (index & 16 == 0).then_some(5.0);
        (row.bias, row.scale) = if index & 32 == 0 { (0.0, 1.0) } else { (-1.5, 0.7) };
        rows.push(row);
    }
    rows
}

#[test]
fn weights_are_exponentials_of_logits() {
    for row in random_rows() {
        let logits = row.logits();
        let allowed = row.allowed(size(&logits));
        for kernels in all_kernels() {
            let (mut state, mut out) = (OnlineSoftmax::EMPTY, [0.0; OUT]);
            let weights = row.step(kernels, &mut state, &mut out);
            let Partial { max, sum } = state.finish();
            let exact: Vec<_> = logits.iter().map(|x| (x - f64::from(max)).exp()).collect();
            let total: f64 = exact.iter().sum();
            let off = (f64::from(sum) - total).abs() / total;
            assert!(off < 2.0 * allowed, "{kernels:?} {:?}: sum off by {off}", row.range);
            for (i, (weight, exact)) in weights.iter().zip(&exact).enumerate() {
                let scale = row.v_scales.as_ref().map_or(1.0, |scales| scales[row.range.0 + i]);
                let expected = exact * f64::from(scale);
                let near = (f64::from(*weight) - expected).abs() < allowed * expected + 1e-37;
                assert!(near, "{kernels:?} {:?}: {i} is {weight}, not {expected}", row.range);
            }
        }
    }
}

/// Steps of any length, with scores that rise and fall, give the result of one step over all
/// scores.
#[test]
fn steps_join() {
    const TOKENS: usize = 400;
    let mut random = Random::new(6);
    for (tile, slope) in
        [16, 32, 128].into_iter().flat_map(|t| [-30.0, 0.0, 0.5, 30.0].map(|s| (t, s)))
    {
        let rise = |i: usize| (i as f32 / TOKENS as f32) * slope;
        let mut scores: Vec<_> = (0..TOKENS).map(|i| rise(i) + random.unit()).collect();
        scores[17] = f32::NEG_INFINITY;
        let values = random.units(TOKENS);
        let exact: Vec<_> = scores.iter().map(|x| f64::from(x - slope.max(0.0)).exp()).collect();
        let total: f64 = exact.iter().sum();
        let mean = exact.iter().zip(&values).map(|(w, v)| w * f64::from(*v)).sum::<f64>() / total;
        for (kernels, exact) in all_kernels().flat_map(|k| [(k, true), (k, false)]) {
            let (mut state, mut out) = (OnlineSoftmax::EMPTY, [0.0; OUT]);
            for (scores, values) in scores.chunks(tile).zip(values.chunks(tile)) {
                let mut tile = vec![f32::NAN; tile];
                tile[..scores.len()].copy_from_slice(scores);
                let row = Row::new(tile, (0, scores.len()), exact);
                let weights = row.step(kernels, &mut state, &mut out);
                out[3] += weights.iter().zip(values).map(|(w, v)| w * v).sum::<f32>();
            }
            let partial = state.finish();
            let allowed = if exact { 5e-6 } else { 4e-5 };
            let lse = total.ln() + f64::from(slope.max(0.0));
            assert!((f64::from(partial.log_sum_exp()) - lse).abs() < allowed * 10.0, "{kernels:?}");
            let got = f64::from(out[3] / partial.sum);
            assert!((got - mean).abs() < allowed, "{kernels:?} {tile} {slope}: {got}, not {mean}");
        }
    }
}

/// A step that raises the maximum rescales sums of V and the weights of its earlier tokens.
#[test]
fn a_raised_maximum_rescales_earlier_tokens() {
    for (kernels, exact) in all_kernels().flat_map(|k| [(k, true), (k, false)]) {
        let (mut state, mut out) = (OnlineSoftmax::EMPTY, [0.0; OUT]);
        Row::new(vec![1.0; 16], (0, 1), exact).step(kernels, &mut state, &mut out);
        assert_eq!(state.finish(), Partial { max: 1.0, sum: 1.0 }, "{kernels:?}");
        out.fill(1.0);
        let mut row = Row::new(vec![1.0; 256], (2, 250), exact);
        row.scores[200..].fill(12.0);
        let weights = row.step(kernels, &mut state, &mut out);
        let factor = (-11.0_f32).exp();
        let near = |x: f32, expected: f32| (x - expected).abs() < 1e-5 * expected;
        assert!(out.iter().all(|x| near(*x, factor)), "{kernels:?}: {out:?}");
        assert!(weights[..198].iter().all(|x| near(*x, factor)), "{kernels:?}");
        assert!(weights[198..].iter().all(|x| near(*x, 1.0)), "{kernels:?}");
        let Partial { max, sum } = state.finish();
        assert!(max == 12.0 && near(sum, 50.0 + 199.0 * factor), "{kernels:?}: {max} {sum}");
        // A little more does not.
        let before = out;
        Row::new(vec![15.0; 16], (0, 16), exact).step(kernels, &mut state, &mut out);
        assert_eq!((out, state.finish().max), (before, 12.0), "{kernels:?}");
    }
}

#[test]
fn scores_that_are_not_finite_count_as_they_should() {
    let of = |kernels: Kernels, special: f32, others: f32, cap: Option<f32>, exact: bool| {
        let mut row = Row::new(vec![others; 64], (3, 60), exact);
        (row.scores[20], row.cap) = (special, cap);
        let (mut state, mut out) = (OnlineSoftmax::EMPTY, [0.0; OUT]);
        let weights = row.step(kernels, &mut state, &mut out);
        (state.finish(), weights, out)
    };
    for (kernels, exact) in all_kernels().flat_map(|k| [(k, true), (k, false)]) {
        let (partial, weights, out) = of(kernels, f32::NEG_INFINITY, 1.0, None, exact);
        assert_eq!((partial, weights[17]), (Partial { max: 1.0, sum: 56.0 }, 0.0), "{kernels:?}");
        assert!(out.iter().all(|x| *x == 0.0), "{kernels:?}");
        let (partial, weights, out) =
            of(kernels, f32::NEG_INFINITY, f32::NEG_INFINITY, None, exact);
        assert_eq!(partial, Partial::EMPTY, "{kernels:?}: all masked");
        assert!(weights.iter().chain(&out).all(|x| *x == 0.0), "{kernels:?}: all masked");
        assert!(of(kernels, f32::INFINITY, 1.0, None, exact).0.sum.is_nan(), "{kernels:?}");
        for cap in [None, Some(2.0)] {
            assert!(of(kernels, f32::NAN, 1.0, cap, exact).0.sum.is_nan(), "{kernels:?}");
        }
        // Capped, infinite scores are finite logits.
        let (partial, ..) = of(kernels, f32::INFINITY, f32::NEG_INFINITY, Some(2.0), exact);
        let expected = (2.0_f32.exp() + 56.0 * (-2.0_f32).exp()).ln();
        assert!((partial.log_sum_exp() - expected).abs() < 1e-5, "{kernels:?} {partial:?}");
        let mut state = OnlineSoftmax::EMPTY;
        Row::new(vec![f32::NAN; 16], (5, 5), exact).step(kernels, &mut state, &mut [0.0; OUT]);
        assert_eq!(state.finish(), Partial::EMPTY, "{kernels:?}: no tokens");
    }
}

/// Rows of a step have their own bias, state and sums.
#[test]
fn rows_of_a_step_are_independent() {
    const STRIDE: usize = 48;
    let mut random = Random::new(7);
    let scores = random.units(5 * STRIDE);
    let bias = random.units(5);
    for kernels in all_kernels() {
        let run = |first: usize, count: usize| {
            let mut scores = scores[first * STRIDE..][..count * STRIDE].to_vec();
            let mut states = vec![OnlineSoftmax::EMPTY; count];
            kernels.softmax(&mut Softmax {
                scores: &mut scores,
                stride: STRIDE,
                range: (1, 40),
                k_scales: None,
                v_scales: None,
                bias: &bias[first..][..count],
                logits: Logits::new(3.0, None, true),
                states: &mut states,
                out: &mut vec![0.0; count * OUT],
                out_stride: OUT,
            });
            (scores, states.iter().map(OnlineSoftmax::finish).collect::<Vec<_>>())
        };
        let (together, states) = run(0, 5);
        for row in 0..5 {
            let (alone, state) = run(row, 1);
            assert_eq!(together[row * STRIDE..][1..40], alone[1..40], "{kernels:?} {row}");
            assert_eq!(states[row], state[0], "{kernels:?} {row}");
        }
    }
}
