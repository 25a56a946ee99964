//! Prefill over quantised rows with queries in 16 bits, for which devices have separate kernels.
use kv_core::backend::AnyBackend;
use kv_core::spec::Transform;
use kv_core::{CacheSpec, DType, KvFormat};

use super::{ConstantRanges, LARGE_MEANS, NEUTRAL, calibrated, quantised};
use crate::amount::{Rotation, pairs};
use crate::case::{At, Case, CaseError, CaseResult, Outcome};
use crate::fixture::{CacheFixture, StepConfig, StepKind};
use crate::rng::Rng;
use crate::suite::{ORDERS, case};

pub(super) fn cases() -> Vec<Case> {
    vec![
        case("quant/prefill_over_every_format", formats),
        case("quant/prefill_of_every_head_dim", head_dims),
        case("quant/prefill_with_any_option", options),
        case("quant/prefill_over_a_tail", tails),
        case("quant/prefill_over_magnitudes", magnitudes),
    ]
}

/// Element types of queries.
const NARROW: [DType; 2] = [DType::F16, DType::Bf16];
const BALANCED: ConstantRanges = ConstantRanges { mean: 3.0, balance: 1.0 };

/// Runs a prompt, then a chunk after it in one batch with a decode step, over tiles of any size.
fn prompts(fixture: &mut CacheFixture, config: &StepConfig) -> Result<(), CaseError> {
    fixture.start(1)?;
    fixture.start(2)?;
    fixture.step(&[(1, StepKind::Tokens(70)), (2, StepKind::Tokens(10))], config).at("prompts")?;
    fixture.step(&[(2, StepKind::Tokens(1)), (1, StepKind::Tokens(13))], config).at("a chunk")?;
    fixture.release(1)?;
    fixture.release(2)
}

fn formats(backend: &AnyBackend) -> CaseResult {
    let (mut rng, mut rotation) = (Rng::new(31), Rotation::new());
    let forms = pairs(&NARROW, &[Transform::Off, Transform::On]);
    let forms = pairs(&forms, &[false, true]);
    for format in KvFormat::all() {
        for ((q_dtype, transform), lse) in rotation.of(&forms) {
            let spec = CacheSpec::builder().layers(1).kv_heads(2).head_dim(64).format(format);
            let spec = spec.block_order(rng.pick(&ORDERS)).transform(transform);
            let config = StepConfig { q_dtype, lse, ..StepConfig::default() };
            let mut fixture = calibrated(backend, spec.paged(16, 8), BALANCED, 1)?;
            prompts(&mut fixture, &config)
                .at(format!("{format}, q {q_dtype}, {transform:?}, lse: {lse}"))?;
        }
    }
    Ok(Outcome::Holds)
}

/// Rows that end after whole groups of codes, and inside one.
fn head_dims(backend: &AnyBackend) -> CaseResult {
    let mut rng = Rng::new(32);
    for format in quantised(2) {
        for dim in [80, rng.pick(&[96, 128, 192, 256])] {
            let spec = CacheSpec::builder().layers(1).kv_heads(1).head_dim(dim).format(format);
            let spec = spec.block_order(rng.pick(&ORDERS)).paged(rng.pick(&[7, 32]), 15);
            let config = StepConfig {
                q_dtype: rng.pick(&NARROW),
                group: 3,
                lse: false,
                ..StepConfig::default()
            };
            let mut fixture = calibrated(backend, spec, NEUTRAL, 2)?;
            fixture.fill(1, 40)?;
            fixture
                .step(&[(1, StepKind::Tokens(11))], &config)
                .at(format!("{format}, head_dim {dim}"))?;
        }
    }
    Ok(Outcome::Holds)
}

/// K and V of different formats, with random options.
fn options(backend: &AnyBackend) -> CaseResult {
    let mut rng = Rng::new(33);
    let all: Vec<_> = KvFormat::all().collect();
    for k in KvFormat::all() {
        let v = rng.pick(&all);
        let spec = CacheSpec::builder().layers(1).kv_heads(rng.pick(&[1, 2])).head_dim(64);
        let spec =
            spec.formats(k, v).block_order(rng.pick(&ORDERS)).full_precision_prefix(rng.below(6));
        let spec = spec.transform(rng.pick(&[Transform::Off, Transform::On]));
        let config = StepConfig { q_dtype: rng.pick(&NARROW), ..StepConfig::random(&mut rng) };
        let mut fixture = calibrated(backend, spec.paged(rng.pick(&[9, 16]), 40), LARGE_MEANS, 3)?;
        prompts(&mut fixture, &config).at(format!("K {k}, V {v}"))?;
        // Fewer keys than queries, and none.
        fixture.fill(3, 7)?;
        fixture.fill(4, 0)?;
        let queries = [(3, StepKind::Query(20)), (4, StepKind::Query(9))];
        fixture.step(&queries, &config).at(format!("K {k}, V {v}, queries"))?;
    }
    Ok(Outcome::Holds)
}

fn tails(backend: &AnyBackend) -> CaseResult {
    let mut rng = Rng::new(34);
    for format in quantised(0) {
        let spec = CacheSpec::builder().layers(1).kv_heads(2).head_dim(64).format(format);
        let spec =
            spec.tail(true).full_precision_prefix(rng.pick(&[0, 3])).block_order(rng.pick(&ORDERS));
        let config = StepConfig { q_dtype: rng.pick(&NARROW), lse: false, ..StepConfig::default() };
        let mut fixture = calibrated(backend, spec.paged(16, 40), LARGE_MEANS, 4)?;
        prompts(&mut fixture, &config).at(format!("{format}"))?;
    }
    Ok(Outcome::Holds)
}

/// Rows of very different magnitude next to each other.
fn magnitudes(backend: &AnyBackend) -> CaseResult {
    let scaled = |format: &KvFormat| format.given_scales().is_none();
    let factors = [[1e-3, 1.0, 30.0], [1.0, 1e-4, 1e-2], [300.0, 1e-3, 1.0]];
    let (mut rotation, forms) = (Rotation::new(), pairs(&NARROW, &factors));
    for format in quantised(1).filter(scaled) {
        for (q_dtype, factors) in rotation.of(&forms) {
            let config = StepConfig { q_dtype, spread: 1e-2, lse: false, ..StepConfig::default() };
            let spec = CacheSpec::builder().layers(1).kv_heads(1).head_dim(64).format(format);
            let spec = spec.full_precision_prefix(2).transform(Transform::Off).paged(16, 16);
            let mut fixture = calibrated(backend, spec, NEUTRAL, 5)?;
            fixture.start(1)?;
            let mut rows = fixture.random_rows(&[90], &config).remove(0);
            for plane in &mut rows[0] {
                for (token, row) in plane.chunks_mut(64).enumerate() {
                    for x in row {
                        *x *= factors[token / 7 % 3];
                    }
                }
            }
            fixture.write_only(&[(1, 90)], std::slice::from_ref(&rows), DType::F32)?;
            for queries in [30, 90] {
                fixture
                    .step(&[(1, StepKind::Query(queries))], &config)
                    .at(format!("{format}, q {q_dtype}, {factors:?}"))?;
            }
        }
    }
    Ok(Outcome::Holds)
}
