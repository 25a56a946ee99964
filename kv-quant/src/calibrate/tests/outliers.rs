//! The benefit of calibration: keys with huge biases and unequal channels are stored as accurately
//! as Gaussian ones.
use kv_core::calibration::PlaneConstants;

use super::*;
use crate::transform;

const DIM: usize = 128;

/// Positive centroids of the 16-level Lloyd-Max code for N(0, 1) (Max 1960, table I).
const CENTROIDS: [f64; 8] = [0.1284, 0.3881, 0.6568, 0.9424, 1.2562, 1.6181, 2.0691, 2.7326];

/// Seeded rows of N(0, 1): `SplitMix64` and Box-Muller.
struct Gaussian(u64);

impl Gaussian {
    fn uniform(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        let bits = u32::try_from((z ^ (z >> 31)) >> 32).unwrap();
        (f64::from(bits) + 0.5) / 4_294_967_296.0
    }
    fn rows(&mut self, rows: usize, channel: &[f32; DIM]) -> Vec<f32> {
        let normal = |this: &mut Self| {
            let (radius, angle) = ((-2.0 * this.uniform().ln()).sqrt(), this.uniform());
            narrow(radius * (angle * std::f64::consts::TAU).cos())
        };
        let channels = channel.iter().cycle().take(DIM * rows);
        channels.map(|scale| normal(self) * scale).collect()
    }
}

fn narrow(x: f64) -> f32 {
    #[expect(clippy::as_conversions, clippy::cast_possible_truncation, reason = "rounds")]
    {
        x as f32
    }
}

/// Quantises to four bits in the simplest way: the nearest centroid times the rms of the row.
fn quantise(row: &mut [f32]) {
    let dim = f64::from(u32::try_from(row.len()).unwrap());
    let rms = (row.iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / dim).sqrt();
    for x in row {
        let magnitude = f64::from(x.abs()) / rms;
        let distance = |c: &f64| (c - magnitude).abs();
        let nearest = CENTROIDS.iter().min_by(|a, b| distance(a).total_cmp(&distance(b))).unwrap();
        *x = narrow(nearest * rms).copysign(*x);
    }
}

/// Folds the constants of one head of keys.
fn fold(given: &PlaneCalibration) -> PlaneConstants {
    let shape = LayerShape { num_kv_heads: 1, head_dim_k: 128, head_dim_v: 128 };
    let [layout, _] = shape.layouts().unwrap();
    PlaneConstants::new(LayerId(0), Plane::Key, &layout, Some(given)).unwrap().unwrap()
}

fn calibrated(k: &[f32], q: &[f32]) -> PlaneCalibration {
    observed(1, [128, 128], [k, k, q], 1).finish().unwrap().layers()[0].k.clone()
}

/// Returns the rows after storing and loading.
fn stored(k: &[f32], given: &PlaneCalibration) -> Vec<f32> {
    let constants = fold(given);
    let mut k = k.to_vec();
    for row in k.chunks_exact_mut(DIM) {
        transform::store(row, &constants.head(0).unwrap());
        quantise(row);
        transform::load(row, &constants.head(0).unwrap());
    }
    k
}

fn squared_error(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(a, b)| (f64::from(*a) - f64::from(*b)).powi(2)).sum()
}

/// Returns the mean squared error of scores of paired rows.
fn score_error(q: &[f32], a: &[f32], b: &[f32]) -> f64 {
    let rows = q.chunks_exact(DIM).zip(a.chunks_exact(DIM)).zip(b.chunks_exact(DIM));
    rows.map(|((q, a), b)| {
        let error: f64 =
            q.iter().zip(a.iter().zip(b)).map(|(q, (a, b))| f64::from(*q) * f64::from(a - b)).sum();
        error.powi(2)
    })
    .sum()
}

#[test]
fn a_calibrated_bias_of_seventeen_times_the_signal_costs_nothing() {
    let mut source = Gaussian(1);
    let (seen, plain) = (source.rows(512, &[1.0; DIM]), source.rows(1024, &[1.0; DIM]));
    let q = source.rows(512, &[1.0; DIM]);
    // Four channels with a bias, together 17.7 times as long as a centred row (sqrt(128)).
    let biased = |rows: &[f32]| {
        let mut rows = rows.to_vec();
        for row in rows.chunks_exact_mut(DIM) {
            for (channel, sign) in [(3, 1.0), (40, -1.0), (41, 1.0), (127, 1.0)] {
                row[channel] += sign * 17.7 * 128_f32.sqrt() / 2.0;
            }
        }
        rows
    };
    let keys = biased(&plain);
    let energy = squared_error(&plain, &vec![0.0; plain.len()]);
    let none = PlaneCalibration::default();
    let ideal = squared_error(&stored(&plain, &none), &plain) / energy;
    let unknown = squared_error(&stored(&keys, &none), &keys) / energy;
    let given = calibrated(&biased(&seen), &q);
    let known = squared_error(&stored(&keys, &given), &keys) / energy;
    println!("bias-free {ideal:.3e}, calibrated {known:.3e}, uncalibrated {unknown:.3}");
    // The code's own error, 0.0095, reduced by the use of each row's own rms.
    assert!((0.0085..0.0097).contains(&ideal), "{ideal}");
    assert!(unknown > 1.0, "without the mean it must be worse than storing nothing: {unknown}");
    assert!(known <= 1.05 * ideal, "{known} for {ideal}");
}

#[test]
fn rows_are_gaussian_after_store() {
    let mut source = Gaussian(2);
    let mut scales = [1.0_f32; DIM];
    scales.iter_mut().step_by(9).for_each(|scale| *scale = 20.0);
    let mut rows = source.rows(1024, &scales);
    rows.chunks_exact_mut(DIM).for_each(|row| row[5] += 300.0);
    let q = source.rows(1024, &[1.0; DIM]);
    let constants = fold(&calibrated(&rows, &q));
    let kurtosis = |rows: &[f32]| {
        let [two, four] = rows.chunks_exact(DIM).fold([0.0; 2], |[two, four], row| {
            let squares = row.iter().map(|x| f64::from(*x).powi(2));
            let rms2 = squares.clone().sum::<f64>() / 128.0;
            squares.fold([two, four], |[two, four], x| [two + x / rms2, four + (x / rms2).powi(2)])
        });
        four / two - 3.0
    };
    let raw = kurtosis(&rows);
    for row in rows.chunks_exact_mut(DIM) {
        transform::store(row, &constants.head(0).unwrap());
    }
    let stored = kurtosis(&rows);
    println!("excess kurtosis {raw:.2} raw, {stored:.3} stored");
    assert!(raw > 5.0 && stored.abs() < 0.2, "{raw} -> {stored}");
}

#[test]
fn the_balance_gains_what_its_formula_predicts() {
    let mut source = Gaussian(3);
    // Channels of K and of Q differ by up to a factor of 8, with different periods.
    let scales = |period: u8| {
        let mut scales = [0.0; DIM];
        scales.iter_mut().zip(0_u8..).for_each(|(s, i)| *s = 2_f32.powi(i32::from(i % period)));
        scales
    };
    let (scales_k, scales_q) = (scales(4), scales(3));
    let (k, q) = (source.rows(2048, &scales_k), source.rows(2048, &scales_q));
    let given = calibrated(&k, &q);
    let mean_only = PlaneCalibration { balance: Vec::new(), ..given.clone() };
    let gain =
        score_error(&q, &stored(&k, &given), &k) / score_error(&q, &stored(&k, &mean_only), &k);
    let sum = |of: fn(f64, f64) -> f64| -> f64 {
        scales_k.iter().zip(&scales_q).map(|(k, q)| of(f64::from(*k), f64::from(*q))).sum()
    };
    let expected = sum(|k, q| k * q).powi(2) / (sum(|k, _| k * k) * sum(|_, q| q * q));
    println!("error of a score: {gain:.3} of the unbalanced, {expected:.3} expected");
    assert!(expected < 0.8 && (gain / expected - 1.0).abs() < 0.1, "{gain}, {expected}");
}
