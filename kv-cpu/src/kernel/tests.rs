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

const ENCODINGS: [Encoding; 3] = [Encoding::F32, Encoding::F16, Encoding::Bf16];

fn all() -> Vec<(String, Kernels)> {
    let real = Isa::available().map(|isa| (isa.to_string(), Kernels::of(isa).unwrap()));
    real.chain([("emulated".to_owned(), Kernels::emulated())]).collect()
}

fn encoded(encoding: Encoding, values: &[f32]) -> Vec<u8> {
    match encoding {
        Encoding::F32 => values.iter().flat_map(|x| x.to_ne_bytes()).collect(),
        Encoding::F16 => {
            let bits = values.iter().map(|x| f16::from_f32(*x).to_bits());
            bits.flat_map(u16::to_ne_bytes).collect()
        }
        Encoding::Bf16 => {
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
        for encoding in ENCODINGS {
            let expected = encoded(encoding, &values);
            let mut bytes = vec![0xab; expected.len() + 3];
            kernels.encode(encoding, &values, &mut bytes[..expected.len()]);
            assert_eq!(bytes[..expected.len()], expected, "{name} {encoding:?}");
            assert_eq!(bytes[expected.len()..], [0xab; 3], "{name} {encoding:?}");
            let mut back = vec![0.0; values.len()];
            kernels.decode(encoding, &expected, &mut back);
            assert_eq!(encoded(encoding, &back), expected, "{name} {encoding:?}");
        }
    }
}

#[test]
fn nan_stays_nan_in_every_encoding() {
    let values = [0x7f80_0001, 0xffff_ffff, 0x7fc0_0000, 0x7fff_8000].map(f32::from_bits);
    let values: Vec<_> = values.iter().copied().cycle().take(23).collect();
    for (name, kernels) in all() {
        for encoding in ENCODINGS {
            let mut bytes = vec![0; values.len() * encoding.size()];
            kernels.encode(encoding, &values, &mut bytes);
            let mut back = vec![0.0; values.len()];
            kernels.decode(encoding, &bytes, &mut back);
            assert!(back.iter().all(|x| x.is_nan()), "{name} {encoding:?}");
        }
    }
}

#[test]
fn exponentials_are_exact_to_two_ulp() {
    let mut random = Random::new(2);
    for (name, kernels) in all() {
        for _ in 0..500 {
            let mut scores: Vec<_> = (0..TILE).map(|_| -random.unit().abs() * 88.0).collect();
            (scores[0], scores[1], scores[2], scores[3]) = (0.0, f32::NEG_INFINITY, -1e-8, -200.0);
            let before = scores.clone();
            let mut running = Running::EMPTY;
            let factor = kernels.softmax(&mut Softmax {
                scores: &mut scores,
                range: (0, TILE),
                scale: 1.0,
                cap: None,
                running: &mut running,
            });
            assert_eq!((factor, running.max), (0.0, 0.0), "{name}");
            assert_eq!((scores[0], scores[1], scores[3]), (1.0, 0.0, 0.0), "{name}");
            for (x, y) in before.iter().zip(&scores) {
                let exact = f64::from(*x).exp();
                let error = (f64::from(*y) - exact).abs();
                let allowed = exact * f64::from(f32::EPSILON) + f64::from(f32::MIN_POSITIVE);
                assert!(error <= 2.0 * allowed, "{name}: exp({x}) = {y}, not {exact}");
            }
        }
    }
}

#[test]
fn softmax_keeps_to_its_range_and_passes_nan_on() {
    for (name, kernels) in all() {
        for range in [(0, 1), (3, 17), (5, 5), (TILE - 1, TILE), (16, TILE)] {
            let mut scores = vec![1000.0; TILE];
            scores[range.0..range.1].fill(1.0);
            let mut running = Running { max: 3.0, sum: 2.0 };
            let mut args = Softmax {
                scores: &mut scores,
                range,
                scale: 2.0,
                cap: None,
                running: &mut running,
            };
            assert_eq!(kernels.softmax(&mut args), 1.0, "{name}");
            let seen = (range.1 - range.0) as f32;
            assert!((running.sum - 2.0 - seen * (-1.0_f32).exp()).abs() < 1e-4);
            assert_eq!(running.max, 3.0, "{name}");
        }
        let mut scores = vec![0.5; TILE];
        scores[7] = f32::NAN;
        let mut running = Running::EMPTY;
        kernels.softmax(&mut Softmax {
            scores: &mut scores,
            range: (4, 9),
            scale: 1.0,
            cap: None,
            running: &mut running,
        });
        assert!(running.sum.is_nan(), "{name}");
        let mut scores = vec![f32::NEG_INFINITY; TILE];
        let mut running = Running::EMPTY;
        kernels.softmax(&mut Softmax {
            scores: &mut scores,
            range: (0, 9),
            scale: 1.0,
            cap: None,
            running: &mut running,
        });
        assert_eq!((running.max, running.sum), (f32::NEG_INFINITY, 0.0), "{name}");
    }
}

/// Sums have the same bits for any number of rows at a time, and are near those of `f64`.
#[test]
fn scores_and_sums_of_all_row_counts_agree() {
    let mut random = Random::new(3);
    for dim in [1_usize, 7, 8, 15, 16, 17, 40, 64, 80, 96, 100, 128, 192] {
        for encoding in ENCODINGS {
            let stride = dim.next_multiple_of(LANES_MAX);
            let q: Vec<_> = (0..ROWS * stride)
                .map(|i| if i % stride < dim { random.unit() } else { 0.0 })
                .collect();
            let rows: Vec<Vec<f32>> = (0..TILE).map(|_| random.units(dim)).collect();
            // Poison right behind each row's values.
            let bytes: Vec<_> =
                rows.iter().map(|row| [encoded(encoding, row), vec![0xff; 64]].concat()).collect();
            let k: Vec<&[u8]> = bytes.iter().map(|b| &b[..dim * encoding.size()]).collect();
            for (name, kernels) in all() {
                check_tile(&name, kernels, encoding, (&q, dim, stride), &k);
            }
        }
    }
}

fn check_tile(
    name: &str,
    kernels: Kernels,
    encoding: Encoding,
    (q, dim, stride): (&[f32], usize, usize),
    k: &[&[u8]],
) {
    let range = (3, TILE - 4);
    let run = |rows: usize| {
        let mut scores = vec![f32::NAN; ROWS * TILE];
        let mut out = vec![0.25; ROWS * stride];
        for first in (0..ROWS).step_by(rows) {
            let mut args = Scores {
                rows,
                q: &q[first * stride..],
                stride,
                dim,
                k,
                range,
                out: &mut scores[first * TILE..],
                ahead: k,
            };
            kernels.scores(encoding, &mut args);
            let mut args = Sums {
                rows,
                weights: &scores[first * TILE..],
                v: k,
                range,
                dim,
                out: &mut out[first * stride..],
                stride,
                ahead: &[],
            };
            kernels.sums(encoding, &mut args);
        }
        (scores, out)
    };
    let (scores, out) = run(1);
    for rows in [2, ROWS] {
        let (again, out_again) = run(rows);
        let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&again), bits(&scores), "{name} {encoding:?} {dim} {rows}");
        assert_eq!(bits(&out_again), bits(&out), "{name} {encoding:?} {dim} {rows}");
    }
    let mut key = vec![0.0; dim];
    let mut expected_out = vec![0.25_f64; dim];
    for token in range.0..range.1 {
        Kernels::of(Isa::Scalar).unwrap().decode(encoding, k[token], &mut key);
        let exact: f64 = q.iter().zip(&key).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
        let error = (f64::from(scores[token]) - exact).abs();
        assert!(error < 1e-5 * (dim as f64).sqrt(), "{name} {encoding:?} {dim}");
        for (out, key) in expected_out.iter_mut().zip(&key) {
            *out += f64::from(scores[token]) * f64::from(*key);
        }
    }
    for (a, b) in out.iter().zip(&expected_out) {
        assert!((f64::from(*a) - b).abs() < 1e-3, "{name} {encoding:?} {dim}: {a} {b}");
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
