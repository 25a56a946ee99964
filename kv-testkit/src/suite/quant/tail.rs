//! Tails, whose rows stay in 16 bits until their block is full, and block means.
use kv_core::backend::{AnyBackend, Plane};
use kv_core::spec::{CacheSpecBuilder, KeyMean, Transform};
use kv_core::{Axes, BlockOrder, CacheSpec, DType, KvFormat, ScaleGroup, Scaling};

use super::{LARGE_MEANS, NEUTRAL, calibrated, quantised};
use crate::amount::{Rotation, pairs};
use crate::case::{At, Case, CaseError, CaseResult, Outcome, same};
use crate::device::dim;
use crate::fixture::{CacheFixture, Finish, StepConfig, StepKind, seq, unchanged};
use crate::rng::Rng;
use crate::suite::{ORDERS, case};

pub(super) fn cases() -> Vec<Case> {
    vec![
        case("quant/tail_becomes_codes", grows),
        case("quant/tail_codes_depend_on_tokens_alone", alone),
        case("quant/tail_truncated_and_rewritten", truncated),
        case("quant/tail_forked_at_every_offset", forked),
        case("quant/tail_rolled_back", rolled_back),
        case("quant/tail_with_every_option", options),
        case("quant/tail_with_nan", poisoned),
    ]
}

const MEANS: [KeyMean; 2] = [KeyMean::Calibrated, KeyMean::PerBlock];

/// Two layers of two heads, a tail, blocks of 9 slots.
fn spec(
    backend: &AnyBackend,
    format: KvFormat,
    key_mean: KeyMean,
    order: BlockOrder,
) -> CacheSpecBuilder {
    let spec = CacheSpec::builder().layers(2).kv_heads(2).head_dims(dim(backend, 34), 20);
    let spec = spec.format(format);
    spec.block_order(order).tail(true).key_mean(key_mean).paged(9, 40)
}

fn step(fixture: &mut CacheFixture, ids: &[(u64, u32)]) -> Result<(), CaseError> {
    let inputs: Vec<_> = ids.iter().map(|(id, n)| (*id, StepKind::Tokens(*n))).collect();
    fixture.step(&inputs, &StepConfig::default())?;
    fixture.check().at(format!("after step {ids:?}"))
}

/// Steps end before, at and after the ends of blocks, and one spans several blocks.
fn grows(backend: &AnyBackend) -> CaseResult {
    let mut rotation = Rotation::new();
    let forms = pairs(&[(MEANS[0], ORDERS[0]), (MEANS[1], ORDERS[1])], &[0, 2]);
    for format in quantised(1) {
        for ((key_mean, order), full_precision_prefix) in rotation.of(&forms) {
            let spec =
                spec(backend, format, key_mean, order).full_precision_prefix(full_precision_prefix);
            let mut fixture = calibrated(backend, spec, LARGE_MEANS, 1)?;
            fixture.start(1)?;
            fixture.start(2)?;
            for (a, b) in [(1, 9), (1, 1), (6, 8), (1, 3), (1, 25), (7, 1), (14, 1)] {
                step(&mut fixture, &[(1, a), (2, b)])
                    .at(format!("{format}, {key_mean:?}, {full_precision_prefix} wide rows"))?;
            }
        }
    }
    Ok(Outcome::Holds)
}

/// The same tokens in one step and one by one give the same rows.
fn alone(backend: &AnyBackend) -> CaseResult {
    let (mut rng, mut rotation) = (Rng::new(2), Rotation::new());
    for format in quantised(2) {
        for key_mean in rotation.of(&MEANS) {
            let spec = spec(backend, format, key_mean, rng.pick(&ORDERS)).full_precision_prefix(1);
            let mut fixture = calibrated(backend, spec, NEUTRAL, 2)?;
            let rows = fixture.random_rows(&[24], &StepConfig::default()).remove(0);
            fixture.start(1)?;
            fixture.start(2)?;
            fixture.write_only(&[(1, 24)], std::slice::from_ref(&rows), DType::F32)?;
            let shapes = fixture.layers().to_vec();
            for token in 0..24 {
                let part = |(layer, rows): (usize, &[Vec<f32>; 2])| {
                    [0, 1].map(|plane| {
                        let width = shapes[layer].width(plane);
                        rows[plane][token * width..][..width].to_vec()
                    })
                };
                let one = rows.iter().enumerate().map(part).collect();
                fixture.write_only(&[(2, 1)], &[one], DType::F32)?;
            }
            fixture.check().at(format!("{format}, {key_mean:?}"))?;
            for layer in 0..2 {
                for plane in [Plane::Key, Plane::Value] {
                    let both = fixture.gather(layer, plane, &[seq(1), seq(2)], Axes::Thd)?;
                    same(format!("{format}, {plane:?} one by one"), &both[1], &both[0])?;
                }
            }
        }
    }
    Ok(Outcome::Holds)
}

/// Truncates to every length, inside codes, at the ends of blocks and inside the tail; then
/// continues.
fn truncated(backend: &AnyBackend) -> CaseResult {
    let (mut rotation, forms) = (Rotation::new(), pairs(&MEANS, &[0, 3]));
    for format in [
        KvFormat::L4(ScaleGroup::Row),
        KvFormat::L3(ScaleGroup::Group32),
        KvFormat::Int8(Scaling::Row),
        KvFormat::Fp8E4m3(Scaling::Head),
        KvFormat::Q8_0,
    ] {
        for (key_mean, full_precision_prefix) in rotation.of(&forms) {
            let spec = spec(backend, format, key_mean, BlockOrder::Hnd)
                .full_precision_prefix(full_precision_prefix);
            let mut fixture = calibrated(backend, spec, LARGE_MEANS, 33)?;
            for len in 0..24 {
                fixture.fill(1, 23)?;
                fixture.truncate(1, len)?;
                fixture.check().at(format!("{format}, {key_mean:?}, truncated to {len}"))?;
                for more in [1, 4, 9] {
                    step(&mut fixture, &[(1, more)]).at(format!(
                        "{format}, {key_mean:?}, {full_precision_prefix} wide rows, from {len}"
                    ))?;
                }
                fixture.release(1)?;
            }
        }
    }
    Ok(Outcome::Holds)
}

fn forked(backend: &AnyBackend) -> CaseResult {
    let mut rotation = Rotation::new();
    for (format, order) in quantised(0).zip(ORDERS.into_iter().cycle()) {
        for key_mean in rotation.of(&MEANS) {
            let mut fixture = calibrated(
                backend,
                spec(backend, format, key_mean, order).full_precision_prefix(1),
                NEUTRAL,
                4,
            )?;
            for len in [1, 2, 6, 7, 9, 10, 13] {
                let place = || format!("{format}, {key_mean:?}, forked at {len}");
                fixture.fill(1, len)?;
                fixture.fork(1, 2)?;
                step(&mut fixture, &[(2, 1)]).at(place())?;
                step(&mut fixture, &[(1, 3), (2, 8)]).at(place())?;
                // Codes that both share, truncated inside and rewritten by both.
                fixture.fork(2, 3)?;
                fixture.truncate(3, len / 2 + 1)?;
                fixture.truncate(2, len / 2 + 1)?;
                step(&mut fixture, &[(3, 2), (2, 1)]).at(place())?;
                [1, 2, 3].into_iter().try_for_each(|id| fixture.release(id))?;
            }
        }
    }
    Ok(Outcome::Holds)
}

/// A step that fills a block and is rolled back leaves the tail as it was.
fn rolled_back(backend: &AnyBackend) -> CaseResult {
    let dropped = StepConfig { finish: Finish::Drop, ..StepConfig::default() };
    let mut rotation = Rotation::new();
    for format in quantised(1) {
        for key_mean in rotation.of(&MEANS) {
            let spec = spec(backend, format, key_mean, BlockOrder::Nhd).full_precision_prefix(1);
            let mut fixture = calibrated(backend, spec, NEUTRAL, 5)?;
            fixture.fill(1, 8)?;
            fixture.fork(1, 2)?;
            let before = fixture.state();
            for n in [1, 2, 12] {
                fixture.step(&[(1, StepKind::Tokens(n)), (2, StepKind::Tokens(1))], &dropped)?;
                unchanged(&mut fixture, &before, "a dropped step")
                    .at(format!("{format}, {key_mean:?}, {n} tokens"))?;
            }
            step(&mut fixture, &[(2, 2), (1, 12)]).at(format!("{format}, {key_mean:?}"))?;
        }
    }
    Ok(Outcome::Holds)
}

fn options(backend: &AnyBackend) -> CaseResult {
    let (mut rng, mut rotation) = (Rng::new(6), Rotation::new());
    let forms = pairs(&[Transform::Off, Transform::On], &MEANS);
    for format in quantised(2) {
        for (transform, key_mean) in rotation.of(&forms) {
            let v = rng.pick(&[format, KvFormat::Bf16, KvFormat::L4(ScaleGroup::Row)]);
            let spec = spec(backend, format, key_mean, rng.pick(&ORDERS)).formats(format, v);
            let spec = spec.transform(transform).full_precision_prefix(rng.pick(&[0, 1, 4, 7]));
            let spec = spec.paged(rng.pick(&[8, 11, 16]), 30);
            let mut fixture = calibrated(backend, spec, LARGE_MEANS, 6)?;
            let config = StepConfig { group: 3, ..StepConfig::random(&mut rng) };
            super::two_sequences(&mut fixture, &config)
                .at(format!("{format} and {v}, {transform:?}, {key_mean:?}"))?;
        }
    }
    Ok(Outcome::Holds)
}

/// A row of NaN does not count in the mean of its block.
fn poisoned(backend: &AnyBackend) -> CaseResult {
    let mut rotation = Rotation::new();
    for format in quantised(0) {
        for bad in rotation.of(&[f32::NAN, f32::INFINITY]) {
            let spec =
                spec(backend, format, KeyMean::PerBlock, BlockOrder::Hnd).transform(Transform::Off);
            let mut fixture = calibrated(backend, spec, NEUTRAL, 7)?;
            let mut rows = fixture.random_rows(&[12], &StepConfig::default()).remove(0);
            for (planes, shape) in rows.iter_mut().zip(fixture.layers()) {
                let [k, v] = [0, 1].map(|plane| shape.width(plane));
                planes[0][5 * k + 3] = bad;
                planes[0][11 * k + 40] = bad;
                planes[1][2 * v] = bad;
            }
            fixture.start(1)?;
            fixture.write_only(&[(1, 12)], &[rows], DType::F32)?;
            fixture.check().at(format!("{format}, {bad}"))?;
            // The blocks of the NaN rows become codes.
            let more = fixture.random_rows(&[8], &StepConfig::default());
            fixture.write_only(&[(1, 8)], &more, DType::F32)?;
            fixture.check().at(format!("{format}, {bad}, full"))?;
            let config = StepConfig { window_left: Some(2), ..StepConfig::default() };
            fixture.step(&[(1, StepKind::Query(1))], &config).at(format!("{format}, {bad}"))?;
        }
    }
    Ok(Outcome::Holds)
}
