//! Values at the edges of the formats, and how near to the rows what is stored must be.
use kv_core::{CacheSpec, Calibration, DType, KvFormat, Plane, QkvFormat, Scaling, Transform};

use super::{LARGE_MEANS, NEUTRAL, constants, lab, quantised};
use crate::case::{At, Case, CaseError, CaseResult, Outcome, ensure};
use crate::device::{Device, Place};
use crate::lab::{Brings, DTYPES, FORMATS, How, Lab, seq};
use crate::model::Rows;
use crate::oracle::gaussian;
use crate::suite::gather::{Form, check};
use crate::suite::{ORDERS, case};
use crate::tokens::Room;

pub(super) fn cases<B: Device>() -> Vec<Case<B>> {
    vec![
        case("quant/every_dtype_and_axis_order", forms),
        case("quant/gather_to_every_dtype", gathers),
        case("quant/nan_and_infinity_stay_in_their_row", poisoned),
        case("quant/zero_and_constant_rows", flat),
        case("quant/extreme_magnitudes", extremes),
        case("quant/error_on_normal_rows", normal),
    ]
}

const TRANSFORMS: [Transform; 2] = [Transform::Off, Transform::On];

fn forms<B: Device>(backend: &B) -> CaseResult {
    for format in quantised() {
        for kv_dtype in DTYPES {
            for (kv_format, inputs) in
                FORMATS.into_iter().zip([Place::Host, Place::Device, Place::Host])
            {
                let room = Room { batch: 1, tokens: 2, gap: 3 };
                let how = How { kv_format, kv_dtype, inputs, room, ..How::default() };
                let spec =
                    CacheSpec::builder().layers(1).kv_heads(3).head_dims(16, 20).format(format);
                let mut lab =
                    lab(backend, spec.full_precision_prefix(1).paged(8, 6), LARGE_MEANS, 1)?;
                super::talk(&mut lab, &how).at(format!("{format} from {kv_dtype}, {kv_format}"))?;
            }
        }
    }
    Ok(Outcome::Holds)
}

fn gathers<B: Device>(backend: &B) -> CaseResult {
    for format in quantised() {
        for order in ORDERS {
            let spec = CacheSpec::builder().layers(1).kv_heads(2).head_dims(36, 20).format(format);
            let spec = spec.block_order(order).full_precision_prefix(2).paged(9, 12);
            let mut lab = lab(backend, spec, LARGE_MEANS, 2)?;
            lab.fill(1, 13)?;
            lab.fill(2, 2)?;
            let ranges = [(seq(1), 0, 13), (seq(2), 1, 1), (seq(1), 1, 5), (seq(1), 7, 3)];
            for axes in FORMATS {
                for dtype in DTYPES {
                    let room = Room { batch: 1, tokens: 1, gap: 2 };
                    let form = Form { format: axes, dtype, room, place: Place::Host };
                    check(&mut lab, 0, &ranges, form).at(format!("{format}"))?;
                }
            }
        }
    }
    Ok(Outcome::Holds)
}

/// A cache of one layer, two heads, 40 values; K and V of one sequence written at once.
fn write<B: Device>(
    backend: &B,
    format: KvFormat,
    transform: Transform,
    rows: &Rows,
) -> Result<Lab<B>, CaseError> {
    let spec = CacheSpec::builder().layers(1).kv_heads(2).head_dim(40).format(format);
    let mut lab =
        lab(backend, spec.transform(transform).full_precision_prefix(1).paged(8, 6), NEUTRAL, 3)?;
    lab.start(1)?;
    let tokens = (rows[0][0].len() / 80) as u32;
    lab.write_only(&[(1, tokens)], std::slice::from_ref(rows), DType::F32)?;
    lab.check()?;
    Ok(lab)
}

fn read<B: Device>(lab: &mut Lab<B>, plane: Plane) -> Result<Vec<f32>, CaseError> {
    Ok(lab.gather(0, plane, &[seq(1)], QkvFormat::Thd)?.concat())
}

/// Normal rows of so many tokens, the same for every format.
fn rows(tokens: usize) -> Rows {
    let mut rng = crate::rng::Rng::new(11);
    vec![[rng.normals(tokens * 80), rng.normals(tokens * 80)]]
}

/// What is not a number stays where it was written: every other row is as without it, and attention
/// that does not see it neither.
fn poisoned<B: Device>(backend: &B) -> CaseResult {
    let clean = rows(9);
    for format in KvFormat::all() {
        for transform in TRANSFORMS {
            for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                // Head 0 of tokens 0, a wide row, and 3; head 1 of token 6.
                let hurt = [0, 6, 13];
                let mut rows = clean.clone();
                for row in hurt {
                    rows[0][0][row * 40 + 7] = bad;
                    rows[0][1][row * 40 + 31] = bad;
                }
                let place = || format!("{format}, {transform:?}, {bad}");
                let mut with = write(backend, format, transform, &rows).at(place())?;
                let mut without = write(backend, format, transform, &clean).at(place())?;
                for plane in [Plane::Key, Plane::Value] {
                    let both = (read(&mut with, plane)?, read(&mut without, plane)?);
                    let pairs = both.0.chunks(40).zip(both.1.chunks(40)).enumerate();
                    for (row, (with, without)) in pairs.filter(|(row, _)| !hurt.contains(row)) {
                        ensure(with == without, || {
                            format!("{}: {plane:?} row {row} is not as it was", place())
                        })?;
                    }
                }
                let how = How { window_left: Some(1), ..How::default() };
                with.step(&[(1, Brings::Query(1))], &how).at(place())?;
            }
        }
    }
    Ok(Outcome::Holds)
}

fn flat<B: Device>(backend: &B) -> CaseResult {
    for format in quantised() {
        for transform in TRANSFORMS {
            for value in [0.0, -0.0, 1.0, -3.5, 0.1] {
                let mut all = rows(6);
                for plane in &mut all[0] {
                    // Tokens 0 and 3 whole, and a head of token 4.
                    for row in [0, 1, 6, 7, 9] {
                        plane[row * 40..(row + 1) * 40].fill(value);
                    }
                }
                let place = || format!("{format}, {transform:?}, rows of {value}");
                let mut lab = write(backend, format, transform, &all).at(place())?;
                for plane in [Plane::Key, Plane::Value] {
                    let got = read(&mut lab, plane)?;
                    let row = &got[7 * 40..8 * 40];
                    let error = gaussian::relative_error(&[value; 40], row);
                    // A row of one value is one large value when it is rotated: beyond what a given
                    // scale holds, and the worst row for a code without a zero.
                    let held = format.given_scales().is_none() || transform == Transform::Off;
                    ensure(!held || value == 0.0 || error < 0.25, || {
                        format!("{}: read as {row:?}", place())
                    })?;
                    ensure(value != 0.0 || row.iter().all(|x| *x == 0.0), || {
                        format!("{}: read as {row:?}", place())
                    })?;
                }
                lab.step(&[(1, Brings::Query(2))], &How::default()).at(place())?;
            }
        }
    }
    Ok(Outcome::Holds)
}

/// Magnitudes beyond what a scale in 16 bits reaches saturate, and small ones vanish; nothing
/// becomes what is no number.
fn extremes<B: Device>(backend: &B) -> CaseResult {
    let normal = rows(6);
    for format in quantised() {
        for transform in TRANSFORMS {
            for factor in [1e-42, 1e-38, 1e-20, 1e-7, 1e-4, 3e4, 1e6, 1e7, 1e9, 1e20, 1e36, 3e38] {
                // As large as f32 holds, at most.
                let times = |x: f32| (x * factor).clamp(f32::MIN, f32::MAX);
                let mut all = normal.clone();
                for plane in &mut all[0] {
                    plane[2 * 80..4 * 80].iter_mut().for_each(|x| *x = times(*x));
                    // One large value among ordinary ones.
                    plane[4 * 80] = times(plane[4 * 80]);
                }
                let place = || format!("{format}, {transform:?}, times {factor:e}");
                let mut lab = write(backend, format, transform, &all).at(place())?;
                for plane in [Plane::Key, Plane::Value] {
                    let got = read(&mut lab, plane)?;
                    ensure(got.iter().all(|x| x.is_finite()), || {
                        format!("{}: {plane:?} holds what is not finite", place())
                    })?;
                }
            }
        }
    }
    Ok(Outcome::Holds)
}

/// The squared error of normal rows, relative to their energy.
fn normal<B: Device>(backend: &B) -> CaseResult {
    for (format, most) in gaussian::ERRORS {
        let spec = CacheSpec::builder().layers(1).kv_heads(4).head_dim(128).format(*format);
        let spec = spec.paged(16, 16);
        let spec = spec.build()?;
        let mut layer = constants(&spec, NEUTRAL, 4).layers()[0].clone();
        let scales = if format.given_scales() == Some(Scaling::Head) { 4 } else { 1 };
        // The error of a float depends a little on where its powers of two lie.
        layer.k.scales = vec![1.0; scales];
        layer.v.scales = vec![1.0; scales];
        let mut lab = Lab::calibrated(backend, spec, Calibration::new(vec![layer]), 4)?;
        lab.start(1)?;
        let mut rng = crate::rng::Rng::new(12);
        let rows = vec![[rng.normals(256 * 512), rng.normals(256 * 512)]];
        lab.write_only(&[(1, 256)], std::slice::from_ref(&rows), DType::F32)?;
        for (plane, written) in [Plane::Key, Plane::Value].into_iter().zip(&rows[0]) {
            let got = read(&mut lab, plane)?;
            let error = gaussian::relative_error(written, &got);
            ensure(error <= *most, || {
                format!(
                    "{format}, {plane:?}: relative squared error {error:.3e}, at most {most:.3e}"
                )
            })?;
        }
    }
    Ok(Outcome::Holds)
}
