//! Constants and geometries that must be refused.
use kv_core::backend::{AnyBackend, Plane};
use kv_core::calibration::{Calibration, CalibrationError, LayerCalibration, PlaneCalibration};
use kv_core::error::SpecError;
use kv_core::spec::{CacheSpecBuilder, KeyMean};
use kv_core::{CacheError, CacheSpec, KvCache, KvFormat, LayerId, ScaleGroup, Scaling};

use crate::case::{Case, CaseError, CaseResult, Outcome, refused};
use crate::suite::case;

pub(super) fn cases() -> Vec<Case> {
    vec![
        case("quant/refuses_missing_scales", missing),
        case("quant/refuses_impossible_numbers", numbers),
        case("quant/refuses_another_models_calibration", another),
        case("quant/refuses_blocks_too_small_for_a_wide_row", too_small),
        case("quant/refuses_a_tail_that_cannot_be", tails),
    ]
}

fn spec(format: KvFormat) -> CacheSpecBuilder {
    CacheSpec::builder().layers(2).kv_heads(2).head_dim(8).format(format).paged(8, 4)
}

/// Makes constants that fit, except for the changes of `change` to the second layer's K.
fn given(change: impl FnOnce(&mut PlaneCalibration)) -> Calibration {
    let plane = PlaneCalibration { scales: vec![0.5], ..Default::default() };
    let mut layer = LayerCalibration { k: plane.clone(), v: plane };
    let first = layer.clone();
    change(&mut layer.k);
    Calibration::new(vec![first, layer])
}

fn open(
    backend: &AnyBackend,
    format: KvFormat,
    calibration: Calibration,
) -> Result<KvCache, CaseError> {
    Ok(KvCache::builder(backend.clone(), spec(format).build()?).calibration(calibration).build()?)
}

/// Matches calibration errors that `fits` accepts.
fn calibration_error(fits: impl Fn(&CalibrationError) -> bool) -> impl Fn(&CacheError) -> bool {
    move |error| matches!(error, CacheError::Calibration(error) if fits(error))
}

fn expect_refusal(
    what: &str,
    made: Result<KvCache, CaseError>,
    fits: impl Fn(&CacheError) -> bool,
) -> Result<(), CaseError> {
    match made {
        Err(CaseError::Cache(error)) => refused(what, Err::<(), _>(error), fits),
        Err(other) => Err(other),
        Ok(_) => refused(what, Ok::<(), CacheError>(()), fits),
    }
}

const TENSOR: KvFormat = KvFormat::Fp8E4m3(Scaling::Tensor);

fn missing(backend: &AnyBackend) -> CaseResult {
    for format in KvFormat::all() {
        let made = KvCache::new(backend.clone(), spec(format).build()?);
        if format.given_scales().is_none() {
            made?;
            continue;
        }
        let first = |e: &CalibrationError| {
            let (layer, plane) = (LayerId(0), Plane::Key);
            *e == CalibrationError::MissingScale { layer, plane, format }
        };
        refused(format!("{format} without constants"), made, calibration_error(first))?;
        let spoilt = given(|k| k.scales.clear());
        let second = |e: &CalibrationError| {
            matches!(e, CalibrationError::MissingScale { layer: LayerId(1), .. })
        };
        if format.given_scales() == Some(Scaling::Tensor) {
            let made = open(backend, format, spoilt);
            expect_refusal("a layer without a scale", made, calibration_error(second))?;
        }
    }
    Ok(Outcome::Holds)
}

fn numbers(backend: &AnyBackend) -> CaseResult {
    let value = |which: &'static str| {
        calibration_error(move |e| {
            matches!(e, CalibrationError::Value { what, layer, .. }
            if *what == which && layer.0 == 1)
        })
    };
    // The reciprocal of the last one is infinite.
    for bad in [0.0, -0.0, -1.0, f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1e-40] {
        let made = open(backend, TENSOR, given(|k| k.scales = vec![bad]));
        expect_refusal(&format!("a scale of {bad}"), made, value("scales"))?;
        let made = open(
            backend,
            KvFormat::L4(ScaleGroup::Row),
            given(|k| {
                k.balance = vec![1.0; 16];
                k.balance[9] = bad;
            }),
        );
        expect_refusal(&format!("a balance of {bad}"), made, value("balance"))?;
    }
    for bad in [-1.0, f32::NAN, f32::INFINITY] {
        let made = open(backend, TENSOR, given(|k| k.amax = vec![1.0, bad]));
        expect_refusal(&format!("a largest magnitude of {bad}"), made, value("amax"))?;
    }
    for bad in [f32::NAN, f32::NEG_INFINITY] {
        let made = open(backend, KvFormat::Int8(Scaling::Row), given(|k| k.mean = vec![bad; 16]));
        expect_refusal(&format!("a mean of {bad}"), made, value("mean"))?;
    }
    open(backend, TENSOR, given(|k| k.amax = vec![0.0, 3.0]))?;
    Ok(Outcome::Holds)
}

/// A change that makes constants those of another model.
type Change = fn(&mut PlaneCalibration);

fn another(backend: &AnyBackend) -> CaseResult {
    let layers = |e: &CalibrationError| matches!(e, CalibrationError::Layers { expected: 2, .. });
    for count in [0, 1, 3] {
        let all = Calibration::new(vec![given(|_| ()).layers()[0].clone(); count]);
        expect_refusal(
            &format!("{count} layers"),
            open(backend, TENSOR, all),
            calibration_error(layers),
        )?;
    }
    let lists: [(&str, Change); 6] = [
        ("scales", |k| k.scales = vec![1.0; 3]),
        ("amax", |k| k.amax = vec![1.0; 3]),
        ("amax_transformed", |k| k.amax_transformed = vec![1.0]),
        ("mean", |k| k.mean = vec![0.0; 8]),
        ("mean", |k| k.mean = vec![0.0; 17]),
        ("balance", |k| k.balance = vec![1.0; 32]),
    ];
    for (list, change) in lists {
        let shape = calibration_error(move |e| {
            matches!(e, CalibrationError::Shape { what, layer, plane, .. }
                if *what == list && layer.0 == 1 && *plane == Plane::Key)
        });
        for format in [TENSOR, KvFormat::L4(ScaleGroup::Row)] {
            expect_refusal(list, open(backend, format, given(change)), &shape)?;
        }
    }
    // A scale per head does not serve a whole tensor, and a scale per tensor does not serve heads.
    let shape = calibration_error(|e| matches!(e, CalibrationError::Shape { what: "scales", .. }));
    let by_head = given(|k| k.scales = vec![1.0; 2]);
    expect_refusal("scales of heads", open(backend, TENSOR, by_head), &shape)?;
    let head = KvFormat::Int8(Scaling::Head);
    expect_refusal("a scale of the tensor", open(backend, head, given(|_| ())), &shape)?;
    let mut with_mean = given(|_| ()).layers().to_vec();
    with_mean[0].v.mean = vec![0.0; 16];
    let values =
        calibration_error(|e| matches!(e, CalibrationError::NotForValues { what: "mean", .. }));
    expect_refusal("a mean of V", open(backend, TENSOR, Calibration::new(with_mean)), values)?;
    Ok(Outcome::Holds)
}

fn too_small(_backend: &AnyBackend) -> CaseResult {
    for format in KvFormat::all().filter(|format| format.is_quantised()) {
        let wide = CacheSpec::builder()
            .layers(1)
            .kv_heads(1)
            .head_dim(64)
            .format(format)
            .full_precision_prefix(1);
        let slots = wide.clone().paged(64, 1).build()?.groups()[0].slot_map().wide_slots();
        wide.clone().paged(slots, 1).build()?;
        if let Some(few) = slots.checked_sub(1).filter(|few| *few > 0) {
            let conflict = |error: &CacheError| {
                matches!(
                    error,
                    CacheError::Spec(SpecError::Conflict { what: "full_precision_prefix", .. })
                )
            };
            refused(format!("{format} in blocks of {few}"), wide.paged(few, 1).build(), conflict)?;
        }
    }
    Ok(Outcome::Holds)
}

/// A tail needs blocks that fill up and a pool that holds it, and a block mean needs a tail.
fn tails(_backend: &AnyBackend) -> CaseResult {
    let spec = || spec(KvFormat::L4(ScaleGroup::Row));
    let calibration_error = |which: &'static str| {
        move |error: &CacheError| match error {
            CacheError::Spec(SpecError::Conflict { what, .. }) => *what == which,
            _ => false,
        }
    };
    let contiguous = spec().tail(true).contiguous(2, 9).build();
    refused("a tail of a contiguous cache", contiguous, calibration_error("tail"))?;
    let mean = spec().key_mean(KeyMean::PerBlock).build();
    refused("a mean of blocks without a tail", mean, calibration_error("key_mean"))?;
    let narrow = spec().tail(true).paged(1, 64).build();
    refused("a tail in blocks of one slot", narrow, calibration_error("full_precision_prefix"))?;
    let small = spec().tail(true).paged(8, 2).build();
    refused("a tail larger than the pool", small, calibration_error("tail"))?;
    spec().tail(true).key_mean(KeyMean::PerBlock).paged(8, 16).build()?;
    Ok(Outcome::Holds)
}
