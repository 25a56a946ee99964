//! Values at the limits of the formats, and the error of stored rows.
use kv_core::backend::{AnyBackend, Plane};
use kv_core::calibration::Calibration;
use kv_core::spec::Transform;
use kv_core::{Axes, CacheSpec, DType, KvFormat, Scaling};

use super::{LARGE_MEANS, NEUTRAL, calibrated, constants, quantised};
use crate::case::{At, Case, CaseError, CaseResult, Outcome, ensure};
use crate::device::Place;
use crate::fixture::{AXES, CacheFixture, DTYPES, StepConfig, StepKind, seq};
use crate::model::Rows;
use crate::oracle::gaussian;
use crate::suite::gather::{Form, check};
use crate::suite::{ORDERS, case};
use crate::tokens::Padding;

pub(super) fn cases() -> Vec<Case> {
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

fn forms(backend: &AnyBackend) -> CaseResult {
    for format in quantised(2) {
        for kv_dtype in DTYPES {
            for (kv_axes, inputs) in AXES.into_iter().zip([Place::Host, Place::Device, Place::Host])
            {
                let padding = Padding { batch: 1, tokens: 2, gap: 3 };
                let config =
                    StepConfig { kv_axes, kv_dtype, inputs, padding, ..StepConfig::default() };
                let spec =
                    CacheSpec::builder().layers(1).kv_heads(3).head_dims(16, 20).format(format);
                let mut fixture =
                    calibrated(backend, spec.full_precision_prefix(1).paged(8, 6), LARGE_MEANS, 1)?;
                super::two_sequences(&mut fixture, &config)
                    .at(format!("{format} from {kv_dtype}, {kv_axes}"))?;
            }
        }
    }
    Ok(Outcome::Holds)
}

fn gathers(backend: &AnyBackend) -> CaseResult {
    for format in quantised(0) {
        for order in ORDERS {
            let spec = CacheSpec::builder().layers(1).kv_heads(2).head_dims(36, 20).format(format);
            let spec = spec.block_order(order).full_precision_prefix(2).paged(9, 12);
            let mut fixture = calibrated(backend, spec, LARGE_MEANS, 2)?;
            fixture.fill(1, 13)?;
            fixture.fill(2, 2)?;
            let ranges = [(seq(1), 0, 13), (seq(2), 1, 1), (seq(1), 1, 5), (seq(1), 7, 3)];
            for axes in AXES {
                for dtype in DTYPES {
                    let padding = Padding { batch: 1, tokens: 1, gap: 2 };
                    let form = Form { axes, dtype, padding, place: Place::Host };
                    check(&mut fixture, 0, &ranges, form).at(format!("{format}"))?;
                }
            }
        }
    }
    Ok(Outcome::Holds)
}

/// Makes a cache of one layer, two heads, 40 values, and writes K and V of one sequence at once.
fn write(
    backend: &AnyBackend,
    format: KvFormat,
    transform: Transform,
    rows: &Rows,
) -> Result<CacheFixture, CaseError> {
    let spec = CacheSpec::builder().layers(1).kv_heads(2).head_dim(40).format(format);
    let mut fixture = calibrated(
        backend,
        spec.transform(transform).full_precision_prefix(1).paged(8, 6),
        NEUTRAL,
        3,
    )?;
    fixture.start(1)?;
    let tokens = (rows[0][0].len() / 80) as u32;
    fixture.write_only(&[(1, tokens)], std::slice::from_ref(rows), DType::F32)?;
    fixture.check()?;
    Ok(fixture)
}

fn read(fixture: &mut CacheFixture, plane: Plane) -> Result<Vec<f32>, CaseError> {
    Ok(fixture.gather(0, plane, &[seq(1)], Axes::Thd)?.concat())
}

/// Makes normal rows of `tokens` tokens, the same for every format.
fn rows(tokens: usize) -> Rows {
    let mut rng = crate::rng::Rng::new(11);
    vec![[rng.normals(tokens * 80), rng.normals(tokens * 80)]]
}

/// NaN and infinity stay in the rows they were written to: every other row is as without them, and
/// so is attention that does not see them.
fn poisoned(backend: &AnyBackend) -> CaseResult {
    let clean = rows(9);
    for format in KvFormat::all() {
        for transform in TRANSFORMS {
            for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                // Head 0 of token 0, in the prefix, and of token 3; head 1 of token 6.
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
                let config = StepConfig { window_left: Some(1), ..StepConfig::default() };
                with.step(&[(1, StepKind::Query(1))], &config).at(place())?;
            }
        }
    }
    Ok(Outcome::Holds)
}

fn flat(backend: &AnyBackend) -> CaseResult {
    for format in quantised(1) {
        for transform in TRANSFORMS {
            for value in [0.0, -0.0, 1.0, -3.5, 0.1] {
                let mut all = rows(6);
                for plane in &mut all[0] {
                    // Tokens 0 and 3 whole, and one head of token 4.
                    for row in [0, 1, 6, 7, 9] {
                        plane[row * 40..(row + 1) * 40].fill(value);
                    }
                }
                let place = || format!("{format}, {transform:?}, rows of {value}");
                let mut fixture = write(backend, format, transform, &all).at(place())?;
                for plane in [Plane::Key, Plane::Value] {
                    let got = read(&mut fixture, plane)?;
                    let row = &got[7 * 40..8 * 40];
                    let error = gaussian::relative_error(&[value; 40], row);
                    // A rotation turns a row of equal values into one large value: too large for a
                    // given scale, and the worst row for a code without a zero.
                    let held = format.given_scales().is_none() || transform == Transform::Off;
                    ensure(!held || value == 0.0 || error < 0.25, || {
                        format!("{}: read as {row:?}", place())
                    })?;
                    ensure(value != 0.0 || row.iter().all(|x| *x == 0.0), || {
                        format!("{}: read as {row:?}", place())
                    })?;
                }
                fixture.step(&[(1, StepKind::Query(2))], &StepConfig::default()).at(place())?;
            }
        }
    }
    Ok(Outcome::Holds)
}

/// Magnitudes beyond a scale in 16 bits saturate, and small ones become zero; none becomes NaN or
/// infinite.
fn extremes(backend: &AnyBackend) -> CaseResult {
    let normal = rows(6);
    for format in quantised(2) {
        for transform in TRANSFORMS {
            for factor in [1e-42, 1e-38, 1e-20, 1e-7, 1e-4, 3e4, 1e6, 1e7, 1e9, 1e20, 1e36, 3e38] {
                // At most the largest f32.
                let times = |x: f32| (x * factor).clamp(f32::MIN, f32::MAX);
                let mut all = normal.clone();
                for plane in &mut all[0] {
                    plane[2 * 80..4 * 80].iter_mut().for_each(|x| *x = times(*x));
                    // One large value among ordinary ones.
                    plane[4 * 80] = times(plane[4 * 80]);
                }
                let place = || format!("{format}, {transform:?}, times {factor:e}");
                let mut fixture = write(backend, format, transform, &all).at(place())?;
                for plane in [Plane::Key, Plane::Value] {
                    let got = read(&mut fixture, plane)?;
                    ensure(got.iter().all(|x| x.is_finite()), || {
                        format!("{}: {plane:?} holds NaN or infinity", place())
                    })?;
                }
            }
        }
    }
    Ok(Outcome::Holds)
}

/// Measures the squared error of normal rows, relative to their energy.
fn normal(backend: &AnyBackend) -> CaseResult {
    for (format, most) in gaussian::ERRORS {
        let spec = CacheSpec::builder().layers(1).kv_heads(4).head_dim(128).format(*format);
        let spec = spec.paged(16, 16);
        let spec = spec.build()?;
        let mut layer = constants(&spec, NEUTRAL, 4).layers()[0].clone();
        let scales = if format.given_scales() == Some(Scaling::Head) { 4 } else { 1 };
        // The error of a floating-point format depends a little on the position of its powers of
        // two.
        layer.k.scales = vec![1.0; scales];
        layer.v.scales = vec![1.0; scales];
        let mut fixture =
            CacheFixture::calibrated(backend, spec, Calibration::new(vec![layer]), 4)?;
        fixture.start(1)?;
        let mut rng = crate::rng::Rng::new(12);
        let rows = vec![[rng.normals(256 * 512), rng.normals(256 * 512)]];
        fixture.write_only(&[(1, 256)], std::slice::from_ref(&rows), DType::F32)?;
        for (plane, written) in [Plane::Key, Plane::Value].into_iter().zip(&rows[0]) {
            let got = read(&mut fixture, plane)?;
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
