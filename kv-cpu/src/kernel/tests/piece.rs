//! A few query rows by the loops over pieces, beside plain sums in `f64`.
use kv_core::KvFormat;

mod words;

use super::*;
use crate::encoding::RowLayout;
use crate::kernel::{HeadRows, Lanes, Meeting, PIECE, Strip, Weights};

const SCALE: f32 = 0.3;
/// Numbers of query rows that there are loops for.
const COUNTS: [usize; 5] = [1, 2, 3, 4, 8];

/// Rows of K or V, head by head, with bytes between them, and their values in the order in which
/// kernels take them.
#[derive(Clone)]
struct Plane {
    layout: RowLayout,
    bytes: Vec<u8>,
    stride: usize,
    values: Vec<Vec<f32>>,
    scale: RowScale<'static>,
}

impl Plane {
    fn new(
        random: &mut Random,
        (format, in_pairs): (KvFormat, bool),
        (dim, tokens, gap): (usize, usize, usize),
    ) -> Self {
        let rows = (0..tokens).map(|_| random.units(dim)).collect();
        Self::of(rows, (format, in_pairs), gap)
    }

    fn of(rows: Vec<Vec<f32>>, (format, in_pairs): (KvFormat, bool), gap: usize) -> Self {
        let dim = rows[0].len();
        let plain = RowLayout::of(format, dim as u32).unwrap();
        let layout = if in_pairs { plain.in_pairs() } else { plain };
        let given = if format.given_scales().is_some() { 0.37 } else { 1.0 };
        let (mut bytes, mut values) = (Vec::new(), Vec::new());
        for row in rows {
            let (mut encoded, mut decoded) = (vec![0; layout.bytes()], vec![0.0; dim]);
            kv_quant::row::encode_row(format, f32::recip(given), &row, &mut encoded);
            kv_quant::row::decode_row(format, given, &encoded, &mut decoded);
            if layout.encoding() == Encoding::Bf16Pairs {
                Kernels::emulated().split_pairs(&mut decoded);
            }
            bytes.extend(encoded);
            bytes.extend(std::iter::repeat_n(0xff, gap));
            values.push(decoded);
        }
        bytes.truncate(bytes.len() - gap);
        let scale = if layout.has_scale() { RowScale::Stored } else { RowScale::Given(given) };
        Self { layout, stride: layout.bytes() + gap, bytes, values, scale }
    }

    /// The rows as those of so many heads.
    fn of_heads(&self, heads: usize) -> HeadRows<'_> {
        let per_head = self.values.len() / heads * self.stride;
        HeadRows { rows: &self.bytes, stride: self.stride, per_head, bytes: self.layout.bytes() }
    }
}

/// Some query rows of each head, and what they have come to.
struct Rows {
    heads: usize,
    count: usize,
    q: Vec<f32>,
    q_stride: usize,
    bias: Vec<f32>,
    scales: [RowScale<'static>; 2],
    lanes: Vec<Lanes>,
    out: Vec<f32>,
    out_stride: usize,
}

impl Rows {
    fn new(random: &mut Random, (heads, count): (usize, usize), [k, v]: [&Plane; 2]) -> Self {
        let (q_stride, out_stride) = (k.layout.dim() + 16, v.layout.dim() + 16);
        let bias = random.units(heads * count);
        let q = random.units(heads * count * q_stride);
        let out = vec![0.0; heads * count * out_stride];
        let scales = [k.scale, v.scale];
        Self { heads, count, q, q_stride, bias, scales, lanes: vec![], out, out_stride }
    }

    fn meet(&mut self, (kernels, exact): (Kernels, bool), [k, v]: [&Plane; 2]) {
        let (heads, tokens) = (self.heads, k.values.len() / self.heads);
        let strip = Strip { heads, tokens, planes: [k.of_heads(heads), v.of_heads(heads)] };
        let mut words = vec![0; self.q.len() / 2];
        if self.lanes.is_empty() {
            let biases = self.bias.chunks(self.count);
            self.lanes.extend(biases.map(|bias| Lanes::new(bias, self.scales)));
        }
        if let Some(kind) = kernels.words(&k.layout, exact) {
            let in_pairs = k.layout.encoding() == Encoding::Bf16Pairs;
            let heads = self.q.chunks(self.count * self.q_stride);
            let words = words.chunks_mut(self.count * self.q_stride / 2);
            for (lanes, (q, words)) in self.lanes.iter_mut().zip(heads.zip(words)) {
                lanes.put_words(kind, (q, self.count, in_pairs), words);
            }
        }
        kernels.meet_strip(&mut Meeting {
            strip: &strip,
            next: [&Strip::EMPTY, &strip],
            layouts: [&k.layout, &v.layout],
            rows: self.count,
            q: &self.q,
            q_stride: self.q_stride,
            words: &words,
            scale: SCALE,
            exact,
            lanes: &mut self.lanes,
            weights: &mut [f32::NAN; size_of::<Weights>() / 4],
            out: &mut self.out,
            out_stride: self.out_stride,
        });
    }

    /// Whether all of them are near attention over the pieces.
    fn are_attention(&self, what: &str, exact: bool, pieces: &[[Plane; 2]]) {
        // Queries in fixed point are rounded to a 32,767th of the greatest of a row.
        let is_fixed = !exact && pieces[0][0].layout.encoding() == Encoding::Int8;
        self.are_within(what, if is_fixed { 1e-4 } else { 3e-5 }, pieces);
    }

    /// The same, by a part of the sum of all weights.
    fn are_within(&self, what: &str, allowed: f64, pieces: &[[Plane; 2]]) {
        for row in 0..self.heads * self.count {
            let head = row / self.count;
            let values = |plane: usize| {
                pieces.iter().flat_map(move |piece| {
                    let values = &piece[plane].values;
                    values.chunks(values.len() / self.heads).nth(head).unwrap()
                })
            };
            let q = &self.q[row * self.q_stride..];
            let dot = |k: &Vec<f32>| -> f64 {
                k.iter().zip(q).map(|(k, q)| f64::from(*k) * f64::from(*q)).sum()
            };
            let bias = f64::from(self.bias[row]);
            let scores: Vec<_> = values(0).map(|k| (dot(k) + bias) * f64::from(SCALE)).collect();
            let running = self.lanes[head].running(row % self.count, self.count);
            let weigh = |score: &f64| (score - f64::from(running.max)).exp();
            let weights: Vec<_> = scores.iter().map(weigh).collect();
            let sum: f64 = weights.iter().sum();
            assert!((f64::from(running.sum) - sum).abs() < allowed * sum, "{what} {row}: weights");
            let out = &self.out[row * self.out_stride..][..self.out_stride];
            let dim = pieces[0][1].layout.dim();
            for (d, came) in out[..dim].iter().enumerate() {
                let wanted: f64 = values(1).zip(&weights).map(|(v, w)| f64::from(v[d]) * w).sum();
                let off = (f64::from(*came) - wanted).abs();
                assert!(off < allowed * sum, "{what} {row}: {d} {came} {wanted}");
            }
            assert!(out[dim..].iter().all(|x| *x == 0.0), "{what}: values beside the row");
        }
    }
}

fn formats() -> impl Iterator<Item = (KvFormat, bool)> {
    KvFormat::all().map(|format| (format, false)).chain([(KvFormat::Bf16, true)])
}

fn has_pieces(kernels: Kernels, [k, v]: [&Plane; 2]) -> bool {
    let layouts = [&k.layout, &k.layout, &v.layout, &v.layout];
    COUNTS.iter().all(|count| kernels.piece_rows(*count, layouts) == Some(*count))
}

/// Pieces of any length, one after the other, of rows with gaps as well, are near what `f64` comes
/// to, for every number of rows and in every format.
#[test]
fn pieces_come_to_attention() {
    let mut random = Random::new(41);
    let dims = [[32, 96], [64, 64], [96, 32], [128, 128], [160, 256]];
    for ((index, format), dims) in formats().enumerate().flat_map(|f| dims.map(|dims| (f, dims))) {
        let mut pieces = Vec::new();
        for tokens in [1 + (index + dims[0]) % PIECE, PIECE, 4 + index % 3] {
            let mut plane = |dim| Plane::new(&mut random, format, (dim, tokens, tokens % 2 * 64));
            pieces.push(dims.map(&mut plane));
        }
        for (name, kernels, exact) in with_both_exponentials() {
            if !has_pieces(kernels, [&pieces[0][0], &pieces[0][1]]) {
                assert!(!name.contains("avx512") && !name.contains("emulated"), "{name}");
                continue;
            }
            for count in COUNTS {
                let mut rows = Rows::new(&mut random, (1, count), [&pieces[0][0], &pieces[0][1]]);
                for [k, v] in &pieces {
                    rows.meet((kernels, exact), [k, v]);
                }
                let what = format!("{name} {} {} {dims:?} {count}", format.0, format.1);
                rows.are_attention(&what, exact, &pieces);
            }
        }
    }
}

/// Heads of a strip meet their own rows, as many pieces as there are, with their own scales.
#[test]
fn heads_meet_their_own_rows() {
    const HEADS: usize = 3;
    let mut random = Random::new(47);
    for (format, dim) in formats().flat_map(|format| [(format, 64), (format, 128)]) {
        let mut strips = Vec::new();
        for tokens in [2 * PIECE + 5, PIECE] {
            let mut plane = |()| Plane::new(&mut random, format, (dim, HEADS * tokens, 0));
            strips.push([(); 2].map(&mut plane));
        }
        for (name, kernels, exact) in with_both_exponentials() {
            let first = [&strips[0][0], &strips[0][1]];
            for count in COUNTS.into_iter().filter(|_| has_pieces(kernels, first)) {
                let mut rows = Rows::new(&mut random, (HEADS, count), first);
                for [k, v] in &strips {
                    rows.meet((kernels, exact), [k, v]);
                }
                let what = format!("{name} {} {dim} {count}", format.0);
                rows.are_attention(&what, exact, &strips);
            }
        }
    }
}

/// Scores that rise from piece to piece, by little and by much, and fall again.
#[test]
fn weights_are_relative_to_what_is_great_enough() {
    const DIM: usize = 64;
    let mut random = Random::new(42);
    let mut plane = |size: f32| {
        let k = (0..PIECE).map(|_| vec![size + random.unit() / 64.0; DIM]).collect();
        let v = (0..PIECE).map(|_| random.units(DIM)).collect();
        [k, v].map(|rows| Plane::of(rows, (KvFormat::F32, false), 0))
    };
    let pieces: Vec<_> = [-4.0, -3.9, 0.0, 0.2, 0.7, 3.0, -2.0, 3.1].map(&mut plane).into();
    for (name, kernels, exact) in with_both_exponentials() {
        for count in
            COUNTS.into_iter().filter(|_| has_pieces(kernels, [&pieces[0][0], &pieces[0][1]]))
        {
            let first = [&pieces[0][0], &pieces[0][1]];
            let mut rows = Rows::new(&mut Random::new(43), (1, count), first);
            rows.q.fill(1.0);
            for [k, v] in &pieces {
                rows.meet((kernels, exact), [k, v]);
                assert!(rows.out.iter().all(|x| x.is_finite()), "{name} {count}");
            }
            rows.are_attention(&format!("{name} {count}"), exact, &pieces);
        }
    }
}

/// Infinite scores and NaN come to what softmax by tiles makes of them.
#[test]
fn what_is_not_finite_is_passed_on() {
    const DIM: usize = 32;
    let mut random = Random::new(44);
    let plain = [KvFormat::F32, KvFormat::F16, KvFormat::Bf16].map(|format| (format, false));
    for format in plain.into_iter().chain([(KvFormat::Bf16, true)]) {
        let v = Plane::new(&mut random, format, (DIM, 7, 0));
        for (name, kernels, exact) in with_both_exponentials() {
            if !has_pieces(kernels, [&v, &v]) {
                continue;
            }
            for count in COUNTS {
                let weigh = |first: f32, others: f32| {
                    let k = (0..7).map(|token| vec![if token == 0 { first } else { others }; DIM]);
                    let k = Plane::of(k.collect(), format, 0);
                    let mut rows = Rows::new(&mut Random::new(45), (1, count), [&k, &v]);
                    rows.q.fill(1.0);
                    rows.bias.fill(0.0);
                    rows.meet((kernels, exact), [&k, &v]);
                    (rows.lanes[0].running(count - 1, count), rows.out)
                };
                let what = format!("{name} {format:?} {count}");
                let (running, out) = weigh(f32::NEG_INFINITY, f32::NEG_INFINITY);
                assert_eq!((running.max, running.sum), (f32::NEG_INFINITY, 0.0), "{what}: nothing");
                assert!(out.iter().all(|x| *x == 0.0), "{what}: nothing seen");
                let (running, out) = weigh(f32::NEG_INFINITY, 0.0);
                assert_eq!((running.max, running.sum), (0.0, 6.0), "{what}: all but one");
                assert!(out.iter().all(|x| x.is_finite()), "{what}: all but one");
                for first in [f32::NAN, f32::INFINITY] {
                    assert!(weigh(first, 0.0).0.sum.is_nan(), "{what}: {first}");
                }
            }
        }
    }
}

/// A last token that weighs nothing, as its score overflows, leaves the others what they weigh.
#[test]
fn a_last_token_may_weigh_nothing() {
    const DIM: usize = 64;
    let mut random = Random::new(48);
    for (format, tokens) in formats().flat_map(|format| [(format, 5), (format, PIECE)]) {
        let k = (1..=tokens).map(|token| vec![if token == tokens { -1e3 } else { 0.0 }; DIM]);
        let k = Plane::of(k.collect(), format, 0);
        let v = Plane::new(&mut random, format, (DIM, tokens, 0));
        for (name, kernels, exact) in with_both_exponentials() {
            for count in COUNTS.into_iter().filter(|_| has_pieces(kernels, [&k, &v])) {
                let mut rows = Rows::new(&mut random, (1, count), [&k, &v]);
                rows.q.fill(1e36);
                rows.bias.fill(0.0);
                rows.meet((kernels, exact), [&k, &v]);
                let (what, others) = (format!("{name} {format:?} {count}"), (tokens - 1) as f32);
                for row in 0..count {
                    let running = rows.lanes[0].running(row, count);
                    assert_eq!((running.max, running.sum), (0.0, others), "{what}");
                }
                assert!(rows.out.iter().all(|x| x.is_finite()), "{what}");
            }
        }
    }
}

/// A NaN of E4M3 reaches what meets it, and values of the same piece beside it do not suffer.
#[test]
fn a_nan_of_e4m3_is_one() {
    const DIM: usize = 64;
    let format: KvFormat = "fp8-e4m3".parse().unwrap();
    let mut random = Random::new(46);
    let [k, mut v] = [(); 2].map(|()| Plane::new(&mut random, (format, false), (DIM, PIECE, 0)));
    v.bytes[3 * v.stride + 5] = 0x7f;
    for (name, kernels, exact) in with_both_exponentials() {
        for count in COUNTS.into_iter().filter(|_| has_pieces(kernels, [&k, &v])) {
            let mut rows = Rows::new(&mut random, (1, count), [&k, &v]);
            rows.meet((kernels, exact), [&k, &v]);
            for out in rows.out.chunks(rows.out_stride) {
                for (d, x) in out.iter().enumerate() {
                    assert_eq!(x.is_nan(), d == 5, "{name} {count}: {d}");
                }
            }
        }
    }
}
