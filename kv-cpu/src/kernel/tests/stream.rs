//! One or two query rows by the loops that score, weigh and sum at once.
use super::*;
use crate::encoding::RowLayout;
use crate::kernel::{Part, Stream};

/// Rows of K or V, with bytes between them, and their values.
struct Plane {
    layout: RowLayout,
    bytes: Vec<u8>,
    stride: usize,
    values: Vec<Vec<f32>>,
}

impl Plane {
    fn new(random: &mut Random, layout: &RowLayout, tokens: usize, gap: usize) -> Self {
        let stride = layout.bytes() + gap;
        let (mut bytes, mut values) = (Vec::new(), Vec::new());
        let plain = RowLayout::plain(element(layout), layout.dim());
        for _ in 0..tokens {
            // As they lie: those of pairs are read in another order than they were written.
            let row = encoded(element(layout), &random.units(layout.dim()));
            let mut decoded = vec![0.0; layout.dim()];
            Kernels::emulated().decode(&plain, &row, &mut decoded);
            if layout.encoding() == Encoding::Bf16Pairs {
                Kernels::emulated().split_pairs(&mut decoded);
            }
            bytes.extend(row);
            bytes.extend(std::iter::repeat_n(0xff, gap));
            values.push(decoded);
        }
        bytes.truncate(bytes.len() - gap);
        Self { layout: *layout, bytes, stride, values }
    }
    fn part(&self) -> Part<'_> {
        Part { rows: &self.bytes, stride: self.stride }
    }
}

fn element(layout: &RowLayout) -> Element {
    match layout.encoding() {
        Encoding::F32 => Element::F32,
        Encoding::F16 => Element::F16,
        _ => Element::Bf16,
    }
}

fn layouts(dim: usize) -> [RowLayout; 3] {
    let [f32, f16, bf16] = ELEMENTS.map(|element| RowLayout::plain(element, dim));
    [f32, f16, bf16.in_pairs()]
}

/// What query rows have come to.
struct State {
    running: Vec<Running>,
    out: Vec<f32>,
}

const SCALE: f32 = 0.3;

fn run(
    (kernels, exact): (Kernels, bool),
    (q, q_stride): (&[f32], usize),
    [k, v]: [&Plane; 2],
    state: &mut State,
) {
    let rows = state.running.len();
    let mut args = Stream {
        q,
        q_stride,
        now: &[k.part(), v.part()],
        next: &[Part::default(); 2],
        layouts: [&k.layout, &v.layout],
        tokens: k.values.len(),
        scale: SCALE,
        exact,
        running: &mut state.running,
        out_stride: state.out.len() / rows,
        out: &mut state.out,
    };
    kernels.stream(&mut args);
}

/// Two parts, one after the other, are near what `f64` comes to; of rows with gaps as well, of any
/// number of tokens.
#[test]
fn parts_come_to_attention() {
    let mut random = Random::new(31);
    let dims = [(32, 32), (64, 64), (96, 160), (128, 128), (256, 64)];
    for (tokens, (dim_k, dim_v)) in (1..=16).flat_map(|n| dims.map(|dims| (n, dims))) {
        for (k_layout, v_layout) in layouts(dim_k).into_iter().zip(layouts(dim_v)) {
            let gap = tokens % 2 * 64;
            let both: [[Plane; 2]; 2] = [tokens, 17 - tokens].map(|tokens| {
                [&k_layout, &v_layout].map(|layout| Plane::new(&mut random, layout, tokens, gap))
            });
            for (name, kernels, exact) in with_both_exponentials() {
                for rows in (1..=2).filter(|n| kernels.has_stream(*n, [&k_layout, &v_layout])) {
                    let (q_stride, out_stride) = (dim_k + 16, dim_v + 32);
                    let q = random.units(rows * q_stride);
                    let out = vec![0.0; rows * out_stride];
                    let mut state = State { running: vec![Running::EMPTY; rows], out };
                    for [k, v] in &both {
                        run((kernels, exact), (&q, q_stride), [k, v], &mut state);
                    }
                    let what = format!("{name} {:?} {tokens} {rows}", k_layout.encoding());
                    for row in 0..rows {
                        let q = &q[row * q_stride..][..dim_k];
                        let sums = &state.out[row * out_stride..][..out_stride];
                        is_attention(&what, q, &both, (state.running[row], sums));
                    }
                }
            }
        }
    }
}

fn is_attention(what: &str, q: &[f32], parts: &[[Plane; 2]; 2], (running, out): (Running, &[f32])) {
    let rows = |plane: usize| parts.iter().flat_map(move |part| &part[plane].values);
    let dot =
        |k: &Vec<f32>| -> f64 { k.iter().zip(q).map(|(k, q)| f64::from(*k) * f64::from(*q)).sum() };
    let scores: Vec<_> = rows(0).map(|k| dot(k) * f64::from(SCALE)).collect();
    let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<_> = scores.iter().map(|score| (score - top).exp()).collect();
    assert!((f64::from(running.max) - top).abs() < 1e-5, "{what}: maximum");
    let sum: f64 = weights.iter().sum();
    assert!((f64::from(running.sum) - sum).abs() < 2e-5 * sum, "{what}: sum of weights");
    let dim = parts[0][1].layout.dim();
    for (d, came) in out[..dim].iter().enumerate() {
        let wanted: f64 = rows(1).zip(&weights).map(|(v, w)| f64::from(v[d]) * w).sum();
        assert!((f64::from(*came) - wanted).abs() < 2e-5 * sum, "{what}: {d} {came} {wanted}");
    }
    assert!(out[dim..].iter().all(|x| *x == 0.0), "{what}: values beside the row");
}

/// Infinite scores and NaN come to what softmax by tiles makes of them.
#[test]
fn what_is_not_finite_is_passed_on() {
    const DIM: usize = 64;
    let mut random = Random::new(32);
    for (layout, (name, kernels, exact)) in layouts(DIM)
        .into_iter()
        .flat_map(|layout| with_both_exponentials().map(move |k| (layout, k)))
    {
        if !kernels.has_stream(1, [&layout; 2]) {
            continue;
        }
        let v = Plane::new(&mut random, &layout, 7, 0);
        let mut weigh = |first: f32, others: f32, before: Running| {
            let mut k = Plane::new(&mut random, &layout, 7, 0);
            for (token, row) in k.bytes.chunks_mut(k.stride).enumerate() {
                let value = if token == 0 { first } else { others };
                row.copy_from_slice(&encoded(element(&layout), &[value; DIM]));
            }
            let mut state = State { running: vec![before], out: vec![0.0; DIM] };
            run((kernels, exact), (&[1.0; DIM], DIM), [&k, &v], &mut state);
            (state.running[0], state.out)
        };
        let (running, out) = weigh(f32::NEG_INFINITY, f32::NEG_INFINITY, Running::EMPTY);
        assert_eq!((running.max, running.sum), (f32::NEG_INFINITY, 0.0), "{name}: nothing seen");
        assert_eq!(out, [0.0; DIM], "{name}: nothing seen");
        let seen = Running { max: 2.0, sum: 1.0 };
        let (running, _) = weigh(f32::NEG_INFINITY, f32::NEG_INFINITY, seen);
        assert_eq!((running.max, running.sum), (2.0, 1.0), "{name}: nothing new");
        let (running, out) = weigh(f32::NEG_INFINITY, 0.0, Running::EMPTY);
        assert_eq!((running.max, running.sum), (0.0, 6.0), "{name}: all but one");
        assert!(out.iter().all(|x| x.is_finite()), "{name}: all but one");
        for first in [f32::NAN, f32::INFINITY] {
            let (running, _) = weigh(first, 0.0, Running::EMPTY);
            assert!(running.sum.is_nan(), "{name}: {first}");
        }
    }
}
