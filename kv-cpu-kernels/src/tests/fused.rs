//! One query row, all at once, against the three kernels one after another.
use super::*;
use crate::{
    Fused, Logits, OUTPUT_PAD, OnlineSoftmax, Partial, Prefetch, Pv, QUERY_PAD, Qk, Softmax,
};

/// One query row over some tokens.
struct Case<'a> {
    q: &'a [f32],
    planes: [KeyRows<'a>; 2],
    bias: f32,
    logits: Logits,
}

/// What a row has come to.
struct Sums {
    state: OnlineSoftmax,
    out: Vec<f32>,
}

impl Sums {
    fn new(v: &Stored) -> Self {
        let out = vec![0.0; v.layout.dim().next_multiple_of(OUTPUT_PAD) + OUTPUT_PAD];
        Self { state: OnlineSoftmax::EMPTY, out }
    }
    /// Log-sum-exp, then the weighted mean.
    fn finish(&self) -> Vec<f32> {
        let partial = self.state.finish();
        let mean = self.out.iter().map(|sum| sum / partial.sum);
        [partial.log_sum_exp()].into_iter().chain(mean).collect()
    }
}

impl Case<'_> {
    fn at_once(&self, kernels: Kernels, sums: &mut Sums) {
        let [k, v] = self.planes;
        kernels.fused(&mut Fused {
            q: self.q,
            k,
            v,
            bias: self.bias,
            logits: self.logits,
            state: &mut sums.state,
            out: &mut sums.out,
            prefetch: [&k, &v]
                .map(|rows| Prefetch::of_rows(kernels.prefetch(), rows, rows))
                .each_mut(),
        });
    }

    fn in_turn(&self, kernels: Kernels, sums: &mut Sums) {
        let ([k, v], mut scores) = (self.planes, [f32::NAN; 32]);
        kernels.qk(&mut Qk {
            rows: 1,
            q: self.q,
            words: None,
            q_stride: self.q.len(),
            k,
            scores: &mut scores,
            score_stride: 32,
            prefetch: &mut Prefetch::none(),
        });
        let out_stride = sums.out.len();
        kernels.softmax(&mut Softmax {
            scores: &mut scores,
            stride: 32,
            range: (0, k.len()),
            k_scales: None,
            v_scales: None,
            bias: &[self.bias],
            logits: self.logits,
            states: std::slice::from_mut(&mut sums.state),
            out: &mut sums.out,
            out_stride,
        });
        kernels.pv(&mut Pv {
            rows: 1,
            weights: &scores,
            weight_stride: 32,
            v,
            out: &mut sums.out,
            out_stride,
            prefetch: &mut Prefetch::none(),
        });
    }
}

const KINDS: [Kind; 4] = [
    (KvFormat::F32, false),
    (KvFormat::F16, false),
    (KvFormat::Bf16, false),
    (KvFormat::Bf16, true),
];

/// A query row of `dim` values, padded.
fn query(random: &mut Random, dim: usize) -> Vec<f32> {
    let mut q = random.units(dim);
    q.resize(dim.next_multiple_of(QUERY_PAD), 0.0);
    q
}

#[test]
fn all_at_once_is_one_after_another() {
    let mut random = Random::new(8);
    let rotated = DIMS.iter().cycle().skip(5);
    for (kind, (dim_k, dim_v)) in
        KINDS.into_iter().flat_map(|kind| DIMS.iter().zip(rotated.clone()).map(move |d| (kind, d)))
    {
        let [k, v] = [dim_k, dim_v].map(|dim| Stored::new(&mut random, kind, *dim, 17));
        let q = query(&mut random, *dim_k);
        for kernels in all_kernels().filter(|kernels| kernels.is_fused([&k.layout, &v.layout])) {
            for (tokens, cap) in (1..=17).flat_map(|n| [(n, None), (n, Some(1.5))]) {
                let logits = Logits::new(0.7, cap, tokens % 2 == 0);
                let planes = [k.last(tokens), v.last(tokens)];
                let case = Case { q: &q, planes, bias: random.unit(), logits };
                let [mut fused, mut apart] = [Sums::new(&v), Sums::new(&v)];
                // Twice, so that a later step meets what an earlier one came to.
                for _ in 0..2 {
                    case.at_once(kernels, &mut fused);
                    case.in_turn(kernels, &mut apart);
                }
                let allowed = if tokens % 2 == 0 { 1e-5 } else { 4e-5 };
                for (i, (a, b)) in fused.finish().iter().zip(apart.finish()).enumerate() {
                    let near = (a - b).abs() <= allowed * (1.0 + b.abs());
                    assert!(near, "{kernels:?} {kind:?} {dim_k} {dim_v} {tokens} {i}: {a} {b}");
                }
            }
        }
    }
}

#[test]
fn rows_without_codes_are_fused() {
    for kernels in all_kernels() {
        for (kind, is_fused) in KINDS.into_iter().zip([true, true, false, true]) {
            let rows = Stored::new(&mut Random::new(9), kind, 32, 1);
            assert_eq!(kernels.is_fused([&rows.layout; 2]), is_fused, "{kernels:?} {kind:?}");
        }
        let [f32, f16] = [0, 1].map(|i| Stored::new(&mut Random::new(9), KINDS[i], 32, 1).layout);
        assert!(!kernels.is_fused([&f32, &f16]), "{kernels:?}");
    }
}

#[test]
fn what_is_not_finite_is_passed_on() {
    const DIM: usize = 40;
    for (kernels, kind) in all_kernels().flat_map(|k| [(k, KINDS[0]), (k, KINDS[1]), (k, KINDS[3])])
    {
        let v = Stored::new(&mut Random::new(10), kind, DIM, 7);
        let sums = |first: f32, others: f32| {
            let k = (0..7).map(|token| vec![if token == 0 { first } else { others }; DIM]);
            let k = Stored::of(k.collect(), kind, 0);
            let q = [vec![1.0; DIM], vec![0.0; QUERY_PAD - DIM]].concat();
            let mut sums = Sums::new(&v);
            let logits = Logits::new(0.5, None, true);
            let planes = [k.last(7), v.last(7)];
            Case { q: &q, planes, bias: 0.0, logits }.at_once(kernels, &mut sums);
            sums
        };
        let nothing = sums(f32::NEG_INFINITY, f32::NEG_INFINITY);
        assert_eq!(nothing.state.finish(), Partial::EMPTY, "{kernels:?} {kind:?}");
        assert!(nothing.out.iter().all(|x| *x == 0.0), "{kernels:?} {kind:?}");
        let but_one = sums(f32::NEG_INFINITY, 0.0);
        assert_eq!(but_one.state.finish(), Partial { max: 0.0, sum: 6.0 }, "{kernels:?} {kind:?}");
        assert!(but_one.out.iter().all(|x| x.is_finite()), "{kernels:?} {kind:?}");
        for first in [f32::NAN, f32::INFINITY] {
            assert!(sums(first, 0.0).state.finish().sum.is_nan(), "{kernels:?} {kind:?} {first}");
        }
    }
}
