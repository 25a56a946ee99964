//! Masked rows may hold anything: attention never reads them.
use kv_core::KvFormat;
use kv_core::backend::AnyBackend;
use kv_core::plan::Determinism;
use kv_core::spec::{CacheSpecBuilder, KeyMean};

use super::quant::{LARGE_MEANS, NEUTRAL, calibrated, quantised};
use super::{ORDERS, case, small};
use crate::amount::Rotation;
use crate::case::{At, Case, CaseError, CaseResult, Outcome, ensure};
use crate::device::{dim, limited_erased};
use crate::fixture::{CacheFixture, Poisoned, StepConfig, StepKind};
use crate::rng::Rng;

pub(super) fn cases() -> Vec<Case> {
    vec![
        case("attend/masked_slots_are_never_read", plain),
        case("attend/masked_slots_of_long_contexts", long),
        case("quant/masked_slots_are_never_read", coded),
        case("quant/masked_slots_beside_a_tail", beside_tail),
    ]
}

/// Windows with and without sink tokens, some of which end inside blocks and tiles.
fn windows() -> impl Iterator<Item = StepConfig> {
    let base = StepConfig::default();
    [(0, 0), (0, 1), (2, 4), (3, 9), (7, 5), (11, 40)].into_iter().flat_map(move |pair| {
        let config = StepConfig { window_left: Some(pair.0), sink_tokens: pair.1, ..base.clone() };
        [StepConfig { causal: false, ..config.clone() }, config]
    })
}

/// Runs a step of a batch, after poisoning all rows that are masked from it.
fn step(
    fixture: &mut CacheFixture,
    inputs: &[(u64, StepKind)],
    config: &StepConfig,
) -> Result<Poisoned, CaseError> {
    let poisoned = fixture.poison_masked(inputs, config)?;
    fixture.step(inputs, config)?;
    Ok(poisoned)
}

/// Runs three sequences, one longer than a tile: queries alone, decode, then many queries in one
/// batch. Later queries have later positions, so none sees rows that were poisoned before.
fn run_sequences(fixture: &mut CacheFixture, config: &StepConfig) -> Result<(), CaseError> {
    for (id, len) in [(1, 45), (2, 6), (3, 23)] {
        fixture.fill(id, len)?;
    }
    let queries = [(1, StepKind::Query(3)), (2, StepKind::Query(2)), (3, StepKind::Query(1))];
    let poisoned = step(fixture, &queries, config).at("queries")?;
    ensure(poisoned.rows + poisoned.blocks > 0 || config.sink_tokens > 23, || {
        "every row is visible, so nothing was poisoned".to_owned()
    })?;
    step(fixture, &[1, 2, 3].map(|id| (id, StepKind::Tokens(1))), config).at("decode")?;
    let more = [(3, StepKind::Tokens(5)), (1, StepKind::Query(1)), (2, StepKind::Tokens(12))];
    step(fixture, &more, config).at("several queries")?;
    step(fixture, &[(1, StepKind::Tokens(19)), (3, StepKind::Query(1))], config)
        .at("many queries")?;
    [1, 2, 3].into_iter().try_for_each(|id| fixture.release(id))
}

fn plain(backend: &AnyBackend) -> CaseResult {
    let mut rotation = Rotation::new();
    for (format, order) in KvFormat::PLAIN.iter().zip(ORDERS.into_iter().cycle()) {
        for block_size in rotation.of(&[4, 1, 64, 16]) {
            let spec = small().format(*format).block_order(order).paged(block_size, 160);
            let mut fixture = CacheFixture::new(backend, spec.build()?, 1)?;
            for config in windows() {
                run_sequences(&mut fixture, &config)
                    .at(format!("{format}, blocks of {block_size}, {config:?}"))?;
            }
        }
    }
    Ok(Outcome::Holds)
}

/// Contexts in several splits, most of which are masked.
fn long(backend: &AnyBackend) -> CaseResult {
    let mut rotation = Rotation::new();
    for workers in [1, 3, 16] {
        let device = limited_erased(backend, |capabilities| capabilities.with_workers(workers));
        for determinism in [Determinism::Fast, Determinism::BatchInvariant] {
            for (left, sink_tokens) in rotation.of(&[(0, 0), (90, 4), (1100, 270), (40, 1030)]) {
                let spec = small().layers(1).format(KvFormat::F16).paged(16, 300);
                let mut fixture =
                    CacheFixture::new(&device, spec.determinism(determinism).build()?, 2)?;
                fixture.fill(1, 3100)?;
                fixture.fill(2, 300)?;
                let config =
                    StepConfig { window_left: Some(left), sink_tokens, ..StepConfig::default() };
                for queries in [1, 4, 20] {
                    let inputs = [(1, StepKind::Tokens(queries)), (2, StepKind::Tokens(1))];
                    let poisoned = step(&mut fixture, &inputs, &config).at(format!(
                        "{workers} workers, {determinism:?}, window {left}, {sink_tokens} sink \
                         tokens, {queries} queries"
                    ))?;
                    ensure(poisoned.blocks > 80, || {
                        format!("too few rows were poisoned: {poisoned:?}")
                    })?;
                }
            }
        }
    }
    Ok(Outcome::Holds)
}

/// Makes a geometry for a quantised format with another one for V.
fn spec(
    backend: &AnyBackend,
    rng: &mut Rng,
    format: KvFormat,
    (size, num_blocks): (u32, u32),
) -> CacheSpecBuilder {
    let all: Vec<_> = KvFormat::all().collect();
    let spec = small().layers(1).head_dims(dim(backend, 34), 20).formats(format, rng.pick(&all));
    spec.block_order(rng.pick(&ORDERS)).paged(size, num_blocks)
}

fn coded(backend: &AnyBackend) -> CaseResult {
    let (mut rng, mut rotation) = (Rng::new(3), Rotation::new());
    for format in quantised(0) {
        for (size, wide) in rotation.of(&[(9, 0), (16, 3), (32, 1)]) {
            let spec = spec(backend, &mut rng, format, (size, 30)).full_precision_prefix(wide);
            let mut fixture = calibrated(backend, spec, LARGE_MEANS, 3)?;
            for config in windows().step_by(3) {
                let config = StepConfig {
                    group: rng.pick(&[1, 3, 8]),
                    sink_logits: rng.one_in(2),
                    ..config
                };
                run_sequences(&mut fixture, &config).at(format!(
                    "{format}, blocks of {size}, {wide} rows in 16 bits, {config:?}"
                ))?;
            }
        }
    }
    Ok(Outcome::Holds)
}

/// Tails and block means, with queries alone: a step with new tokens may encode a tail, and reads
/// its rows for that.
fn beside_tail(backend: &AnyBackend) -> CaseResult {
    let (mut rng, mut rotation) = (Rng::new(4), Rotation::new());
    for format in quantised(1) {
        for key_mean in rotation.of(&[KeyMean::Calibrated, KeyMean::PerBlock]) {
            let spec = spec(backend, &mut rng, format, (9, 40))
                .full_precision_prefix(rng.pick(&[0, 2]))
                .tail(true);
            let mut fixture = calibrated(backend, spec.key_mean(key_mean), NEUTRAL, 4)?;
            for config in windows().step_by(2) {
                for queries in [1, 2, 8] {
                    fixture.fill(1, 53)?;
                    fixture.fill(2, 16)?;
                    let inputs = [(1, StepKind::Query(queries)), (2, StepKind::Query(1))];
                    let forms = format!("{format}, {key_mean:?}, {queries} queries, {config:?}");
                    step(&mut fixture, &inputs, &config).at(forms)?;
                    fixture.release(1)?;
                    fixture.release(2)?;
                }
            }
        }
    }
    Ok(Outcome::Holds)
}
