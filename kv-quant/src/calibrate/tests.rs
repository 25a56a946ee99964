//! Constants against hand-made rows and a direct f64 computation, and all refusals.
#![expect(clippy::many_single_char_names, reason = "k, v and q have no other names")]
mod outliers;

use kv_core::LayerId;
use kv_core::backend::Plane;
use kv_core::calibration::PlaneCalibration;
use proptest::prelude::*;

use super::layer::BALANCE_MAX;
use super::*;

/// Returns rows between -1 and 1 without a pattern: fractional parts of multiples of an irrational.
fn noise(seed: f32, len: usize) -> Vec<f32> {
    (0_u16..).take(len).map(|i| ((f32::from(i) + seed) * 0.618_034).fract() * 2.0 - 1.0).collect()
}

/// Returns a calibrator of one layer that has observed `tokens` tokens of these rows.
fn observed(heads: u32, dims: [u32; 2], rows: [&[f32]; 3], q_heads: u32) -> Calibrator {
    let mut calibrator = Calibrator::new(1, heads, dims).unwrap().skip_first(0);
    let [k, v, q] = rows;
    calibrator.observe(0, 0, k, v, q, q_heads).unwrap();
    calibrator
}

fn close(got: &[f32], expected: &[f64], tolerance: f64) {
    assert_eq!(got.len(), expected.len());
    for (got, expected) in got.iter().zip(expected) {
        let error = (f64::from(*got) - expected).abs();
        assert!(error <= tolerance * expected.abs().max(1e-3), "{got} for {expected}");
    }
}

#[test]
fn constants_are_those_of_the_documented_formulas() {
    let (tokens, heads, q_heads, dim, dim_v) = (40, 2, 6, 5, 3);
    let mut k = noise(0.0, tokens * heads * dim);
    for token in k.chunks_exact_mut(dim) {
        token.iter_mut().zip([1.0, 2.0, 0.5, 8.0, 1.5]).for_each(|(x, c)| *x = *x * c + c);
    }
    let v = noise(7.0, tokens * heads * dim_v);
    let q = noise(3.0, tokens * q_heads * dim);
    let calibrator = observed(2, [5, 3], [&k, &v, &q], 6);
    assert_eq!(calibrator.num_tokens(), 40);
    let calibration = calibrator.finish().unwrap();
    let layer = &calibration.layers()[0];

    let n = 40.0;
    let mut mean = vec![0.0_f64; heads * dim];
    for token in k.chunks_exact(heads * dim) {
        mean.iter_mut().zip(token).for_each(|(m, x)| *m += f64::from(*x) / n);
    }
    close(&layer.k.mean, &mean, 1e-6);
    for head in 0..heads {
        let s: Vec<f64> = (0..dim)
            .map(|c| {
                let at = head * dim + c;
                let k2: f64 = k
                    .chunks_exact(heads * dim)
                    .map(|token| (f64::from(token[at]) - mean[at]).powi(2) / n)
                    .sum();
                let q2: f64 = q
                    .chunks_exact(q_heads * dim)
                    .flat_map(|token| token.chunks_exact(dim).skip(head * 3).take(3))
                    .map(|row| f64::from(row[c]).powi(2) / (3.0 * n))
                    .sum();
                (k2 / q2).powf(0.25)
            })
            .collect();
        let middle = s.iter().map(|s| s.ln() / 5.0).sum::<f64>().exp();
        let expected: Vec<f64> = s.iter().map(|s| s / middle).collect();
        close(&layer.k.balance[head * dim..][..dim], &expected, 1e-5);

        let amax = |rows: &[f32], dim: usize| {
            let rows = rows.chunks_exact(dim).skip(head).step_by(heads);
            rows.flatten().fold(0.0_f32, |amax, x| amax.max(x.abs()))
        };
        assert_eq!(layer.k.amax[head].to_bits(), amax(&k, dim).to_bits());
        assert_eq!(layer.v.amax[head].to_bits(), amax(&v, dim_v).to_bits());
    }
    assert_eq!((&layer.v.mean, &layer.v.balance), (&vec![], &vec![]));
    assert_eq!((&layer.k.scales, &layer.v.scales), (&vec![], &vec![]));
}

#[test]
fn transformed_magnitudes_are_those_of_stored_rows() {
    let (k, v, q) = (noise(0.0, 20 * 16), noise(1.0, 20 * 8), noise(2.0, 20 * 32));
    let calibration = observed(2, [8, 4], [&k, &v, &q], 4).finish().unwrap();
    let layer = &calibration.layers()[0];
    for (plane, given, rows, dim) in
        [(Plane::Key, &layer.k, &k, 8), (Plane::Value, &layer.v, &v, 4)]
    {
        let shape = kv_core::backend::PlaneShape {
            num_blocks: 9,
            block_size: 16,
            num_kv_heads: 2,
            head_dim: dim,
            order: kv_core::BlockOrder::Hnd,
            format: kv_core::KvFormat::Nvfp4,
        };
        let layout = kv_core::backend::PlaneLayout::new(shape).unwrap().with_transform(true);
        let constants =
            kv_core::calibration::PlaneConstants::new(LayerId(0), plane, &layout, Some(given));
        let constants = constants.unwrap().unwrap();
        let mut amax = [0.0_f32; 2];
        for (index, row) in rows.chunks_exact(usize::try_from(dim).unwrap()).enumerate() {
            let mut row = row.to_vec();
            crate::transform::store(&mut row, &constants.head(index % 2).unwrap());
            amax[index % 2] = row.iter().fold(amax[index % 2], |amax, x| amax.max(x.abs()));
        }
        assert_eq!(given.amax_transformed, amax);
    }
}

#[test]
fn chunks_sequences_and_layers_may_come_in_any_order() {
    let (k, v, q) = (noise(0.0, 24 * 4), noise(1.0, 24 * 4), noise(2.0, 24 * 8));
    let whole = observed(1, [4, 4], [&k, &v, &q], 2).finish().unwrap();
    let mut parts = Calibrator::new(2, 1, [4, 4]).unwrap().skip_first(3);
    for layer in [1_u16, 0] {
        // Two sequences of 3 skipped and 12 counted tokens, in chunks.
        for sequence in 0..2 {
            let begin = sequence * 12;
            let junk = [1e6_f32; 16];
            let with_junk = |rows: &[f32], width: usize, to: usize| {
                [&junk[..2 * width], &rows[begin * width..to * width]].concat()
            };
            parts.observe(layer, 0, &junk[..4], &junk[..4], &junk[..8], 2).unwrap();
            let (a, b) = (begin + 5, begin + 12);
            let (ka, va, qa) = (with_junk(&k, 4, a), with_junk(&v, 4, a), with_junk(&q, 8, a));
            parts.observe(layer, 1, &ka, &va, &qa, 2).unwrap();
            let (kb, vb, qb) = (&k[a * 4..b * 4], &v[a * 4..b * 4], &q[a * 8..b * 8]);
            parts.observe(layer, 8, kb, vb, qb, 2).unwrap();
            parts.observe(layer, 15, &[], &[], &[], 2).unwrap();
        }
        assert_eq!(parts.num_tokens(), if layer == 1 { 0 } else { 24 });
    }
    let parts = parts.finish().unwrap();
    assert_eq!(parts.layers()[0], whole.layers()[0]);
    assert_eq!(parts.layers()[1], whole.layers()[0]);
}

#[test]
fn dead_channels_are_neutral_and_balances_are_bounded() {
    let (tokens, dim) = (32_usize, 8_usize);
    let mut k = noise(0.0, tokens * dim);
    let mut q = noise(9.0, tokens * dim);
    for (k, q) in k.chunks_exact_mut(dim).zip(q.chunks_exact_mut(dim)) {
        k[0] = 3.0; // constant: zero after the mean is subtracted
        q[1] = 0.0; // no query reads it
        (k[2], q[2]) = (0.0, 0.0);
        k[3] *= 1e-5; // almost dead
        q[4] *= 1e-5;
    }
    let calibration = observed(1, [8, 8], [&k, &k, &q], 1).finish().unwrap();
    let balance = &calibration.layers()[0].k.balance;
    assert_eq!(balance[..3], [1.0; 3]);
    assert_eq!(balance[3..5], [1.0 / BALANCE_MAX, BALANCE_MAX]);
    assert!(balance[5..].iter().all(|s| (0.5..2.0).contains(s)), "{balance:?}");
    assert_eq!(calibration.layers()[0].k.mean[0].to_bits(), 3.0_f32.to_bits());
}

#[test]
fn a_head_of_zeros_gets_the_identity() {
    let zeros = [0.0_f32; 16 * 4];
    let calibration = observed(1, [4, 4], [&zeros, &zeros, &zeros], 1).finish().unwrap();
    let zero = vec![0.0_f32];
    let expected = PlaneCalibration {
        amax: zero.clone(),
        amax_transformed: zero,
        mean: vec![0.0; 4],
        balance: vec![1.0; 4],
        ..PlaneCalibration::default()
    };
    assert_eq!(calibration.layers()[0].k, expected);
}

#[test]
fn rows_may_be_added_after_finish() {
    let (k, v, q) = (noise(0.0, 32 * 4), noise(1.0, 32 * 4), noise(2.0, 32 * 4));
    let mut online = observed(1, [4, 4], [&k[..64], &v[..64], &q[..64]], 1);
    let first = online.finish().unwrap();
    assert_eq!(first, online.clone().finish().unwrap());
    online.observe(0, 16, &k[64..], &v[64..], &q[64..], 1).unwrap();
    assert_eq!(online.finish().unwrap(), observed(1, [4, 4], [&k, &v, &q], 1).finish().unwrap());
}

#[test]
fn too_few_tokens_name_the_layer() {
    let rows = [1.0_f32; 40];
    let mut calibrator = Calibrator::new(2, 1, [2, 2]).unwrap();
    calibrator.observe(0, 0, &rows, &rows, &rows, 1).unwrap();
    calibrator.observe(1, 0, &rows[..38], &rows[..38], &rows[..38], 1).unwrap();
    // Four are skipped, which leaves 16 and 15.
    let refused = calibrator.finish().unwrap_err();
    assert_eq!(refused, CalibrateError::TooFewTokens { layer: LayerId(1), tokens: 15 });
    assert_eq!(refused.to_string(), "layer 1 saw 15 tokens that count, 16 are needed");
    assert_eq!(calibrator.num_tokens(), 15);
}

#[test]
fn layers_may_differ() {
    let shapes = [(1, 2, 2), (2, 4, 3)].map(|(num_kv_heads, head_dim_k, head_dim_v)| LayerShape {
        num_kv_heads,
        head_dim_k,
        head_dim_v,
    });
    let mut calibrator = Calibrator::with_layers(shapes).unwrap().skip_first(0);
    let rows = noise(0.0, 16 * 8);
    calibrator.observe(0, 0, &rows[..32], &rows[..32], &rows[..32], 1).unwrap();
    calibrator.observe(1, 0, &rows, &rows[..96], &rows, 2).unwrap();
    assert_eq!(calibrator.shapes().collect::<Vec<_>>(), shapes);
    let calibration = calibrator.finish().unwrap();
    let lengths = calibration.layers().iter().map(|it| (it.k.mean.len(), it.v.amax.len()));
    assert_eq!(lengths.collect::<Vec<_>>(), [(2, 1), (8, 2)]);
}

#[test]
fn impossible_shapes_are_refused() {
    for (heads, dims) in [(0, [4, 4]), (1, [0, 4]), (1, [4, 0]), (1 << 20, [1 << 12, 4])] {
        let refused = Calibrator::new(1, heads, dims).unwrap_err();
        assert!(matches!(refused, CalibrateError::Shape { layer: LayerId(0), .. }), "{refused}");
    }
    let shape = LayerShape { num_kv_heads: 1, head_dim_k: 1, head_dim_v: 1 };
    let many = Calibrator::with_layers(std::iter::repeat_n(shape, 65537)).unwrap_err();
    assert_eq!(many, CalibrateError::TooManyLayers);
    // Nothing is allocated for a shape before a row of it was observed.
    let mut wide = Calibrator::new(9, u32::MAX, [1, 1]).unwrap();
    wide.observe(0, 0, &[], &[], &[], u32::MAX).unwrap();
    assert_eq!(
        wide.finish().unwrap_err().to_string(),
        "layer 0 saw 0 tokens that count, 16 are needed"
    );
}

#[test]
fn wrong_rows_are_refused_and_change_nothing() {
    let good = noise(0.0, 16 * 4);
    let mut calibrator = observed(2, [2, 2], [&good, &good, &good], 2);
    let before = calibrator.finish().unwrap();
    let layer = LayerId(0);
    let mut refuse = |layer: u16, rows: [&[f32]; 3], q_heads, expected: &CalibrateError| {
        let [k, v, q] = rows;
        assert_eq!(&calibrator.observe(layer, 9, k, v, q, q_heads).unwrap_err(), expected);
        assert_eq!((calibrator.finish().unwrap(), calibrator.num_tokens()), (before.clone(), 16));
    };
    let eight = &good[..8];
    let unknown = CalibrateError::UnknownLayer { layer: LayerId(1), num_layers: 1 };
    refuse(1, [eight, eight, eight], 2, &unknown);
    for q_heads in [0, 1, 3] {
        let heads = CalibrateError::QueryHeads { layer, q_heads, num_kv_heads: 2 };
        refuse(0, [eight, eight, eight], q_heads, &heads);
    }
    let part = CalibrateError::PartOfToken { layer, token: 4, got: 7 };
    refuse(0, [&good[..7], eight, eight], 2, &part);
    let length = |tensor, expected, got| CalibrateError::Length { layer, tensor, expected, got };
    refuse(0, [eight, &good[..4], eight], 2, &length(Tensor::V, 8, 4));
    refuse(0, [eight, eight, eight], 4, &length(Tensor::Q, 16, 8));
    for value in [f32::INFINITY, f32::NEG_INFINITY] {
        let mut bad = eight.to_vec();
        bad[7] = value;
        for (tensor, rows) in [
            (Tensor::K, [&bad, eight, eight]),
            (Tensor::V, [eight, &bad, eight]),
            (Tensor::Q, [eight, eight, &bad]),
        ] {
            let (position, head, channel) = (10, 1, 1);
            let place = CalibrateError::NotFinite { layer, tensor, position, head, channel, value };
            refuse(0, rows, 2, &place);
        }
    }
    let mut bad = eight.to_vec();
    bad[4] = f32::NAN;
    let refused = calibrator.observe(0, 2, eight, &bad, eight, 2).unwrap_err();
    assert_eq!(refused.to_string(), "layer 0, V: NaN at position 3, head 0, channel 0");
}

#[test]
fn rows_whose_rotation_overflows_are_refused() {
    let large = [3e38_f32; 16 * 4];
    let signed: Vec<f32> = large.iter().zip(noise(0.0, 64)).map(|(x, s)| x * s.signum()).collect();
    let small = noise(0.0, 64);
    for (k, v, plane) in [(&small, &signed, Plane::Value), (&signed, &small, Plane::Key)] {
        let refused = observed(1, [4, 4], [k, v, &small], 1).finish().unwrap_err();
        let expected = CalibrateError::Overflow { layer: LayerId(0), plane, head: 0 };
        assert_eq!(refused, expected);
    }
}

proptest! {
    #[test]
    fn a_cache_takes_what_a_calibrator_makes(
        values in prop::collection::vec(-1e4_f32..1e4, 16 * 4),
        exponents in prop::collection::vec(-40_i32..30, 4),
    ) {
        let mut k = values;
        for token in k.chunks_exact_mut(4) {
            token.iter_mut().zip(&exponents).for_each(|(x, e)| *x *= 2_f32.powi(*e));
        }
        let q: Vec<f32> = k.iter().rev().copied().collect();
        let calibration = observed(1, [4, 4], [&k, &q, &q], 1).finish().unwrap();
        let k = &calibration.layers()[0].k;
        prop_assert!(k.mean.iter().all(|x| x.is_finite()));
        let bounds = BALANCE_MAX.recip()..=BALANCE_MAX;
        prop_assert!(k.balance.iter().all(|s| bounds.contains(s)));
        prop_assert!(k.amax_transformed.iter().all(|x| x.is_finite() && *x >= 0.0));
    }
}
