//! Every kernel of every instruction set this CPU has, and of the emulated one, against plain code.
#![expect(
    clippy::as_conversions,
    clippy::arithmetic_side_effects,
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    clippy::float_cmp,
    reason = "tests: numbers are small, and what is compared is exact"
)]
use half::{bf16, f16};

use super::*;
use crate::tests::Random;

mod ahead;
mod formats;
mod matrix;
mod piece;
mod stream;

const ELEMENTS: [Element; 3] = [Element::F32, Element::F16, Element::Bf16];

fn all() -> Vec<(String, Kernels)> {
    let read_ahead = ReadAhead::from_setting(None).unwrap();
    let of = |isa: Isa| (isa.to_string(), Kernels::of(isa, read_ahead).unwrap());
    let real = Isa::available().map(of);
    let emulated = [
        ("emulated".to_owned(), Kernels::emulated()),
        ("emulated matrices".to_owned(), Kernels::emulated_matrix()),
    ];
    real.chain(emulated).collect()
}

/// Exact ones, and shorter ones.
fn with_both_exponentials() -> impl Iterator<Item = (String, Kernels, bool)> {
    let both = |(name, kernels): (String, Kernels)| {
        [true, false].map(|exact| (format!("{name}, exact {exact}"), kernels, exact))
    };
    all().into_iter().flat_map(both)
}

fn encoded(element: Element, values: &[f32]) -> Vec<u8> {
    match element {
        Element::F32 => values.iter().flat_map(|x| x.to_ne_bytes()).collect(),
        Element::F16 => {
            let bits = values.iter().map(|x| f16::from_f32(*x).to_bits());
            bits.flat_map(u16::to_ne_bytes).collect()
        }
        Element::Bf16 => {
            let bits = values.iter().map(|x| bf16::from_f32(*x).to_bits());
            bits.flat_map(u16::to_ne_bytes).collect()
        }
    }
}

/// Values around every rounding boundary and special.
fn awkward(random: &mut Random) -> Vec<f32> {
    let mut values = vec![
        0.0,
        -0.0,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::MAX,
        f32::MIN_POSITIVE,
        1e-45,
        65504.0,
        65519.9,
        65520.0,
        -65520.0,
        5.96e-8,
        2.98e-8,
        2.99e-8,
        6.1e-5,
        1.0 + 1.0 / 256.0,
        1.0 + 3.0 / 256.0,
        1.0 + 1.0 / 2048.0,
        1.0 + 3.0 / 2048.0,
        f32::from_bits(0x7f7f_8000),
        f32::from_bits(0x3f80_8000),
        f32::from_bits(0x3f80_8001),
        f32::from_bits(0x3f81_8000),
    ];
    values.extend((0..500).map(|_| f32::from_bits(random.bits() as u32)));
    values.retain(|x| !x.is_nan());
    values
}

#[test]
fn encoding_rounds_to_nearest_even_and_decodes_back() {
    let values = awkward(&mut Random::new(1));
    for (name, kernels) in all() {
        for element in ELEMENTS {
            let expected = encoded(element, &values);
            let mut bytes = vec![0xab; expected.len() + 3];
            kernels.encode(element, &values, &mut bytes[..expected.len()]);
            assert_eq!(bytes[..expected.len()], expected, "{name} {element:?}");
            assert_eq!(bytes[expected.len()..], [0xab; 3], "{name} {element:?}");
            let mut back = vec![0.0; values.len()];
            kernels.decode(&RowLayout::plain(element, back.len()), &expected, &mut back);
            assert_eq!(encoded(element, &back), expected, "{name} {element:?}");
        }
    }
}

#[test]
fn nan_stays_nan_in_every_encoding() {
    let values = [0x7f80_0001, 0xffff_ffff, 0x7fc0_0000, 0x7fff_8000].map(f32::from_bits);
    let values: Vec<_> = values.iter().copied().cycle().take(23).collect();
    for (name, kernels) in all() {
        for element in ELEMENTS {
            let mut bytes = vec![0; values.len() * element.size()];
            kernels.encode(element, &values, &mut bytes);
            let mut back = vec![0.0; values.len()];
            kernels.decode(&RowLayout::plain(element, back.len()), &bytes, &mut back);
            assert!(back.iter().all(|x| x.is_nan()), "{name} {element:?}");
        }
    }
}

#[test]
fn exponentials_are_exact_to_two_ulp_or_17_bits() {
    let mut random = Random::new(2);
    let precise = f64::from(f32::EPSILON);
    for (name, kernels, exact) in with_both_exponentials() {
        let error_of_one = if exact { 2.0 * precise } else { 6e-6 };
        for _ in 0..500 {
            let mut scores: Vec<_> = (0..TILE).map(|_| -random.unit().abs() * 88.0).collect();
            (scores[0], scores[1], scores[2], scores[3]) = (0.0, f32::NEG_INFINITY, -1e-8, -200.0);
            let before = scores.clone();
            let mut running = Running::EMPTY;
            let tile = (&mut scores[..], (0, TILE));
            let out = softmax_of_one((kernels, exact), tile, (0.0, 1.0, None), &mut running);
            assert_eq!((out, running.max), ([0.0; LANES_MAX], 0.0), "{name}");
            assert_eq!((scores[0], scores[1], scores[3]), (1.0, 0.0, 0.0), "{name}");
            for (x, y) in before.iter().zip(&scores) {
                let wanted = f64::from(*x).exp();
                let error = (f64::from(*y) - wanted).abs();
                let allowed = wanted * error_of_one + 2.0 * f64::from(f32::MIN_POSITIVE);
                assert!(error <= allowed, "{name}: exp({x}) = {y}, not {wanted}");
            }
        }
    }
}

fn softmax(kernels: Kernels, args: &mut Softmax<'_>) {
    kernels.softmax(args, &mut Ahead::default());
}

/// One row, whose sums were 1 in every lane. Returns them.
fn softmax_of_one(
    (kernels, exact): (Kernels, bool),
    (scores, range): (&mut [f32], (usize, usize)),
    (bias, scale, cap): (f32, f32, Option<f32>),
    running: &mut Running,
) -> [f32; LANES_MAX] {
    let mut out = [1.0; LANES_MAX];
    let args = &mut Softmax {
        scores,
        range,
        bias: &[bias],
        scale,
        cap,
        exact,
        running: std::slice::from_mut(running),
        out: &mut out,
        stride: LANES_MAX,
    };
    softmax(kernels, args);
    out
}

#[test]
fn softmax_of_many_rows_has_the_bits_of_one() {
    const STRIDE: usize = LANES_MAX;
    let mut random = Random::new(8);
    for rows in [1, 4, 7, 8, 11, 16] {
        let mut scores: Vec<_> = (0..rows * TILE).map(|_| 9.0 * random.unit()).collect();
        scores[TILE - 1] = f32::NEG_INFINITY;
        let bias: Vec<_> = (0..rows).map(|_| random.unit()).collect();
        let sums: Vec<_> = (0..rows * STRIDE).map(|_| random.unit()).collect();
        let before = Running { max: 1.5, sum: 2.0 };
        for (name, kernels) in all() {
            let run = |together: usize, tokens: usize| {
                let (mut scores, mut out) = (scores.clone(), sums.clone());
                let mut running = vec![before; rows];
                for row in (0..rows).step_by(together) {
                    let args = &mut Softmax {
                        scores: &mut scores[row * TILE..],
                        range: (0, tokens),
                        bias: &bias[row..][..together],
                        scale: 0.7,
                        cap: None,
                        exact: true,
                        running: &mut running[row..][..together],
                        out: &mut out[row * STRIDE..],
                        stride: STRIDE,
                    };
                    softmax(kernels, args);
                }
                let running: Vec<_> = running.iter().map(|row| (row.max, row.sum)).collect();
                (scores, out, running)
            };
            for tokens in [TILE / 2, TILE] {
                assert_eq!(run(rows, tokens), run(1, tokens), "{name} {rows} {tokens}");
            }
        }
    }
}

#[test]
fn whole_tiles_pass_nan_on_and_may_see_nothing() {
    for (name, kernels, exact) in with_both_exponentials() {
        let mut scores = vec![f32::NEG_INFINITY; 2 * TILE];
        scores[7] = f32::NAN;
        let mut running = [Running::EMPTY; 2];
        let args = &mut Softmax {
            scores: &mut scores,
            range: (0, TILE),
            bias: &[0.0; 2],
            scale: 1.0,
            cap: None,
            exact,
            running: &mut running,
            out: &mut [0.0; 2 * LANES_MAX],
            stride: LANES_MAX,
        };
        softmax(kernels, args);
        assert!(running[0].sum.is_nan(), "{name}");
        assert_eq!((running[1].max, running[1].sum), (f32::NEG_INFINITY, 0.0), "{name}");
        assert_eq!(scores[TILE..], [0.0; TILE], "{name}");
    }
}

#[test]
fn softmax_keeps_to_its_range_and_passes_nan_on() {
    for (name, kernels, exact) in with_both_exponentials() {
        for range in [(0, 1), (3, 17), (5, 5), (TILE - 1, TILE), (16, TILE)] {
            let mut scores = vec![1000.0; TILE];
            scores[range.0..range.1].fill(1.0);
            let mut running = Running { max: 3.0, sum: 2.0 };
            let out = softmax_of_one(
                (kernels, exact),
                (&mut scores, range),
                (0.0, 2.0, None),
                &mut running,
            );
            assert_eq!(out, [1.0; LANES_MAX], "{name}");
            let seen = (range.1 - range.0) as f32;
            assert!((running.sum - 2.0 - seen * (-1.0_f32).exp()).abs() < 1e-4 + 6e-6 * seen);
            assert_eq!(running.max, 3.0, "{name}");
        }
        let mut scores = vec![0.5; TILE];
        scores[7] = f32::NAN;
        let mut running = Running::EMPTY;
        softmax_of_one((kernels, exact), (&mut scores, (4, 9)), (0.0, 1.0, None), &mut running);
        assert!(running.sum.is_nan(), "{name}");
        let mut scores = vec![f32::NEG_INFINITY; TILE];
        let mut running = Running::EMPTY;
        softmax_of_one((kernels, exact), (&mut scores, (0, 9)), (0.0, 1.0, None), &mut running);
        assert_eq!((running.max, running.sum), (f32::NEG_INFINITY, 0.0), "{name}");
    }
}

#[test]
fn a_bias_is_part_of_the_score() {
    for (name, kernels) in all() {
        for cap in [None, Some(2.0)] {
            let weigh = |scores: &mut [f32], bias| {
                let mut running = Running::EMPTY;
                softmax_of_one((kernels, true), (scores, (1, 3)), (bias, 0.5, cap), &mut running);
                (running.max, running.sum)
            };
            let (mut plain, mut biased) = ([0.0; TILE], [0.0; TILE]);
            (plain[1], plain[2], biased[1], biased[2]) = (3.0, 5.5, 1.0, 3.5);
            assert_eq!(weigh(&mut plain, 0.0), weigh(&mut biased, 2.0), "{name}");
            assert_eq!(plain[1..3], biased[1..3], "{name}");
        }
    }
}

#[test]
fn rows_are_scaled_and_combined() {
    for (name, kernels) in all() {
        for len in [1, 8, 13, 40] {
            let (mut a, b) = (vec![2.0; len], vec![3.0; len]);
            kernels.combine(&mut a, 0.5, &b, 2.0);
            assert_eq!(a, vec![7.0; len], "{name}");
            kernels.scale(&mut a, 3.0);
            assert_eq!(a, vec![21.0; len], "{name}");
        }
    }
}

#[test]
fn what_goes_past_the_caches_is_what_is_converted() {
    #[repr(align(64))]
    struct Lines([u8; 4096]);
    let values: Vec<_> = awkward(&mut Random::new(3)).into_iter().take(500).collect();
    for (name, kernels) in all() {
        for (from, to) in ELEMENTS.into_iter().flat_map(|from| ELEMENTS.map(|to| (from, to))) {
            for (len, begin) in [(0, 0), (1, 0), (64, 0), (64, 4), (96, 64), (256, 0), (500, 128)] {
                let source = encoded(from, &values[..len]);
                let (bytes, mut lines) = (len * to.size(), Lines([0xab; 4096]));
                let past = kernels.past_caches();
                past.convert((from, &source), (to, &mut lines.0[begin..][..bytes]), &source);
                drop(past);
                let mut expected = vec![0; bytes];
                kernels.convert((from, &source), (to, &mut expected));
                let mut plain = vec![0.0; len];
                kernels.decode(&RowLayout::plain(from, len), &source, &mut plain);
                assert_eq!(expected, encoded(to, &plain), "{name} {from:?} {to:?} {len}");
                let (before, written) = lines.0.split_at(begin);
                let (written, behind) = written.split_at(bytes);
                assert_eq!(written, expected, "{name} {from:?} {to:?} {len}");
                let kept = before.iter().chain(behind).all(|byte| *byte == 0xab);
                assert!(kept, "{name} {from:?} {to:?} {len}: bytes beside the row");
            }
        }
    }
}
