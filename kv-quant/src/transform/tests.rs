//! The transform compared with its definition in f64, and the guarantees for scores and outputs.
use kv_core::backend::{Plane, PlaneLayout, PlaneShape};
use kv_core::calibration::{PlaneCalibration, PlaneConstants, sign};
use kv_core::{BlockOrder, KvFormat, LayerId, Scaling};
use proptest::prelude::*;

use super::*;

/// Returns the constants of one head of a plane, folded as a cache does.
fn constants(plane: Plane, head_dim: usize, given: &PlaneCalibration) -> PlaneConstants {
    let shape = PlaneShape {
        num_blocks: 1,
        block_size: 1,
        num_kv_heads: 1,
        head_dim: u32::try_from(head_dim).unwrap(),
        order: BlockOrder::Hnd,
        format: KvFormat::Int8(Scaling::Row),
    };
    let layout = PlaneLayout::new(shape).unwrap().with_transform(true);
    PlaneConstants::new(LayerId(0), plane, &layout, Some(given)).unwrap().unwrap()
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
}

fn norm2(a: &[f32]) -> f64 {
    dot(a, a).sqrt()
}

/// Rotates by the definition, in f64: entry `(i, j)` of a block's matrix is
/// `(-1)^popcount(i & j) / sqrt(n)`.
fn rotated(values: &[f32]) -> Vec<f64> {
    let mut out = Vec::new();
    let mut rest = values;
    for n in blocks(values.len()) {
        let (block, tail) = rest.split_at(n);
        for i in 0..n {
            let sum: f64 = block
                .iter()
                .enumerate()
                .map(
                    |(j, x)| {
                        if (i & j).count_ones() % 2 == 1 { -f64::from(*x) } else { f64::from(*x) }
                    },
                )
                .sum();
            out.push(sum / f64::from(u32::try_from(n).unwrap()).sqrt());
        }
        rest = tail;
    }
    out
}

/// Applies one stride after another to the whole block, as the contract says.
fn rotated_plainly(values: &[f32]) -> Vec<f32> {
    let mut out = values.to_vec();
    let mut begin = 0;
    for n in blocks(values.len()) {
        let mut h = 1;
        while h < n {
            for i in (0..n).filter(|i| i & h == 0) {
                let (a, b) = (out[begin + i], out[begin + i + h]);
                out[begin + i] = a + b;
                out[begin + i + h] = a - b;
            }
            h *= 2;
        }
        out[begin..begin + n].iter_mut().for_each(|x| *x *= norm(n));
        begin += n;
    }
    out
}

fn rows(len: std::ops::Range<usize>) -> impl Strategy<Value = Vec<f32>> {
    prop::collection::vec(-8.0_f32..8.0, len)
}

#[test]
fn blocks_are_the_binary_digits_of_the_length() {
    for (len, expected) in
        [(0, vec![]), (1, vec![1]), (5, vec![4, 1]), (80, vec![64, 16]), (96, vec![64, 32])]
    {
        assert_eq!(blocks(len).collect::<Vec<_>>(), expected);
    }
    assert_eq!(blocks(256).collect::<Vec<_>>(), [256]);
}

#[test]
fn the_norm_is_the_nearest_to_one_over_the_root() {
    for log2 in 0..20_u32 {
        let n = f64::from(2_u32.pow(log2));
        #[expect(clippy::cast_possible_truncation, clippy::as_conversions, reason = "rounds")]
        let expected = (1.0 / n.sqrt()) as f32;
        assert_eq!(norm(1 << log2).to_bits(), expected.to_bits(), "2^{log2}");
    }
}

#[test]
fn a_nan_stays_in_its_block_of_the_rotation() {
    let mut row = [1.0_f32; 12];
    row[9] = f32::NAN;
    rotate(&mut row);
    assert!(row[..8].iter().all(|x| x.is_finite()) && row[8..].iter().all(|x| x.is_nan()));
}

#[test]
fn stored_rows_saturate_before_rotation() {
    for dim in [1, 12, 128, 4096] {
        let given = PlaneCalibration { mean: vec![-3e38; dim], ..Default::default() };
        let all = constants(Plane::Key, dim, &given);
        for value in [f32::MAX, f32::INFINITY, f32::NEG_INFINITY, 3e38] {
            let mut row = vec![value; dim];
            store(&mut row, &all.head(0).unwrap());
            assert!(row.iter().all(|x| x.is_finite()), "{dim} values of {value}");
        }
        let mut row = vec![1.0; dim];
        row[0] = f32::NAN;
        store(&mut row, &all.head(0).unwrap());
        assert!(row[0].is_nan(), "{dim} values");
    }
}

#[test]
fn zeros_stay_zeros_and_one_value_is_spread_evenly() {
    let mut row = [0.0_f32; 64];
    rotate(&mut row);
    assert!(row.iter().all(|x| x.to_bits() == 0));
    row[37] = -16.0;
    rotate(&mut row);
    assert!(row.iter().all(|x| x.abs().to_bits() == 2.0_f32.to_bits()));
}

#[test]
#[should_panic(expected = "a row of 3 values, constants for 4")]
fn a_row_of_another_length_is_a_bug() {
    let all = constants(Plane::Key, 4, &PlaneCalibration::default());
    store(&mut [0.0; 3], &all.head(0).unwrap());
}

#[test]
fn without_a_calibration_only_signs_and_rotation_apply() {
    let all = constants(Plane::Key, 8, &PlaneCalibration::default());
    let mut row = [1.0_f32, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0];
    let mut signed: Vec<f32> = row.iter().zip(0..).map(|(x, index)| x * sign(index)).collect();
    rotate(&mut signed);
    store(&mut row, &all.head(0).unwrap());
    assert_eq!(row.as_slice(), signed);
}

proptest! {
    #[test]
    fn rotation_follows_its_definition(row in rows(0..300)) {
        let mut got = row.clone();
        rotate(&mut got);
        let scale = norm2(&row);
        for (got, expected) in got.iter().zip(rotated(&row)) {
            prop_assert!((f64::from(*got) - expected).abs() <= 1e-6 * scale);
        }
        let bits = |row: &[f32]| row.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        prop_assert_eq!(bits(&got), bits(&rotated_plainly(&row)));
        rotate(&mut got);
        for (got, x) in got.iter().zip(&row) {
            prop_assert!(f64::from(got - x).abs() <= 1e-6 * scale);
        }
    }

    #[test]
    fn stored_rows_round_trip_and_scores_lack_only_the_mean(
        triple in (1_usize..200).prop_flat_map(|n| [0; 3].map(|_| rows(n..n + 1))),
        steps in prop::collection::vec(-3_i32..4, 200),
    ) {
        let [k, q, mean] = triple;
        let balance = steps.iter().take(k.len()).map(|step| f32::powi(1.5, *step)).collect();
        let given = PlaneCalibration { mean: mean.clone(), balance, ..Default::default() };
        let all = constants(Plane::Key, k.len(), &given);
        let head = all.head(0).unwrap();

        let (mut stored, mut asked) = (k.clone(), q.clone());
        store(&mut stored, &head);
        query(&mut asked, &head);
        let expected = dot(&q, &k) - dot(&q, &mean);
        let size = norm2(&asked) * norm2(&stored) + norm2(&q) * (norm2(&k) + norm2(&mean));
        prop_assert!((dot(&asked, &stored) - expected).abs() <= 1e-6 * size);

        let mut back = stored.clone();
        load(&mut back, &head);
        for ((back, k), limit) in back.iter().zip(&k).zip(head.back) {
            let limit = 1e-6 * (f64::from(limit.abs()) * norm2(&stored) + 16.0);
            prop_assert!(f64::from(back - k).abs() <= limit);
        }
    }

    #[test]
    fn output_inverts_a_weighted_sum_of_stored_values(
        pair in (1_usize..200).prop_flat_map(|n| [0; 2].map(|_| rows(n..n + 1))),
        weight in 0.0_f32..1.0,
    ) {
        let [mut a, mut b] = pair;
        let sum = |a: &[f32], b: &[f32]| -> Vec<f32> {
            a.iter().zip(b).map(|(a, b)| weight * a + (1.0 - weight) * b).collect()
        };
        let all = constants(Plane::Value, a.len(), &PlaneCalibration::default());
        let head = all.head(0).unwrap();
        let expected = sum(&a, &b);
        let limit = 2e-6 * (norm2(&a) + norm2(&b));
        store(&mut a, &head);
        store(&mut b, &head);
        let mut out = sum(&a, &b);
        output(&mut out, &head);
        for (out, expected) in out.iter().zip(&expected) {
            prop_assert!(f64::from(out - expected).abs() <= limit);
        }
    }
}
