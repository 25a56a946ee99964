//! Several queries after long contexts, which a device may split and merge, beside short ones that
//! end around the tiles of kernels.
use kv_core::backend::AnyBackend;
use kv_core::plan::Determinism;
use kv_core::{DType, KvFormat};

use super::quant::{NEUTRAL, calibrated, quantised};
use super::{case, small};
use crate::amount::{Rotation, pairs};
use crate::case::{At, Case, CaseError, CaseResult, Outcome, ensure};
use crate::fixture::{CacheFixture, StepConfig, StepKind};
use crate::rng::Rng;

pub(super) fn cases() -> Vec<Case> {
    vec![
        case("attend/queries_after_long_contexts", plain),
        case("quant/queries_after_long_contexts", coded),
        case("attend/batch_invariant_suffixes", invariant),
    ]
}

/// Values of `head_dim` for which devices have separate kernels.
const DIMS: [u32; 6] = [64, 80, 96, 128, 192, 256];
/// Element types of queries and of rows that are stored as they are.
const NARROW: [(DType, KvFormat); 2] = [(DType::F16, KvFormat::F16), (DType::Bf16, KvFormat::Bf16)];
/// Lengths of the contexts of a batch: long ones, the ends of tiles, and none.
const CONTEXTS: [u32; 9] = [2700, 700, 15, 16, 17, 127, 128, 129, 0];
/// Options of a step in [`run`].
const FORMS: [usize; 4] = [0, 1, 2, 3];

/// Runs queries over all contexts with some of the options, last with windows that mask most rows.
fn run(fixture: &mut CacheFixture, base: &StepConfig, forms: &[usize]) -> Result<(), CaseError> {
    for (id, len) in (1..).zip(CONTEXTS) {
        fixture.fill(id, len)?;
    }
    let inputs = |queries: u32| -> Vec<_> {
        (1..).zip(CONTEXTS).map(|(id, _)| (id, StepKind::Query(queries))).collect()
    };
    let base = StepConfig { group: 3, ..base.clone() };
    let all = [
        (9, base.clone()),
        (12, StepConfig { causal: false, sink_logits: true, soft_cap: Some(5.0), ..base.clone() }),
        (50, StepConfig { spread: 4.0, ..base.clone() }),
        (9, StepConfig { window_left: Some(1500), sink_tokens: 300, ..base.clone() }),
    ];
    for (queries, config) in forms.iter().map(|form| &all[*form]) {
        fixture.step(&inputs(*queries), config).at(format!("{queries} queries, {config:?}"))?;
    }
    let config = StepConfig { window_left: Some(1100), sink_tokens: 70, ..base };
    let poisoned = fixture.poison_masked(&inputs(10), &config)?;
    ensure(poisoned.blocks > 80, || format!("too few rows were poisoned: {poisoned:?}"))?;
    fixture.step(&inputs(10), &config).at("most rows are masked").map(drop)
}

fn plain(backend: &AnyBackend) -> CaseResult {
    let mut rotation = Rotation::new();
    for (q_dtype, format) in NARROW {
        for (dim, determinism) in
            rotation.of(&pairs(&DIMS, &[Determinism::Fast, Determinism::BatchInvariant]))
        {
            let spec = small().layers(1).kv_heads(1).head_dim(dim).format(format).paged(16, 260);
            let mut fixture =
                CacheFixture::new(backend, spec.determinism(determinism).build()?, 1)?;
            run(&mut fixture, &StepConfig { q_dtype, ..StepConfig::default() }, &FORMS)
                .at(format!("{format}, head_dim {dim}, {determinism:?}"))?;
        }
    }
    Ok(Outcome::Holds)
}

fn coded(backend: &AnyBackend) -> CaseResult {
    let (mut rng, mut dims, mut forms) = (Rng::new(2), Rotation::new(), Rotation::new());
    for format in quantised(2) {
        for dim in dims.of(&[64, rng.pick(&DIMS)]) {
            let spec = small().layers(1).kv_heads(1).head_dim(dim).format(format).paged(16, 260);
            let mut fixture = calibrated(backend, spec, NEUTRAL, 2)?;
            let config = StepConfig { q_dtype: DType::Bf16, lse: false, ..StepConfig::default() };
            run(&mut fixture, &config, &forms.of(&FORMS))
                .at(format!("{format}, head_dim {dim}"))?;
        }
    }
    Ok(Outcome::Holds)
}

/// The bits of a sequence do not depend on the rest of the batch.
fn invariant(backend: &AnyBackend) -> CaseResult {
    let mut rotation = Rotation::new();
    let formats = [KvFormat::F16, KvFormat::Int8(kv_core::Scaling::Row)];
    // The first context has two splits of 4096 tokens, and fewer under a window.
    for ((context, queries), window_left) in
        [((4300, 12), None), ((4300, 12), Some(4200)), ((300, 40), None)]
    {
        for format in rotation.of(&formats) {
            let run = |neighbours: &[(u32, u32)]| -> Result<_, CaseError> {
                let spec = small().layers(1).kv_heads(1).head_dim(64).format(format);
                let spec = spec.determinism(Determinism::BatchInvariant).paged(16, 900);
                let mut fixture = CacheFixture::new(backend, spec.build()?, 3)?;
                let mut inputs = vec![(100, StepKind::Tokens(queries))];
                for (id, (len, queries)) in (1..).zip(neighbours) {
                    fixture.fill(id, *len)?;
                    inputs.push((id, StepKind::Tokens(*queries)));
                }
                fixture.rng = Rng::new(55);
                fixture.fill(100, context)?;
                let config =
                    StepConfig { window_left, q_dtype: DType::F16, ..StepConfig::default() };
                let mut rows = fixture.random_rows(&[queries as usize], &config);
                let others: Vec<_> = neighbours.iter().map(|(_, n)| *n as usize).collect();
                rows.extend(fixture.random_rows(&others, &config));
                fixture.rng = Rng::new(77);
                fixture.step_with(&inputs, &rows, &config)
            };
            let alone = run(&[])?;
            for neighbours in rotation.of(&[&[(5, 9)][..], &[(8000, 1)], &[(1000, 30); 4]]) {
                let crowd = run(neighbours)?;
                let bits = |rows: &[f32]| rows.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                let equal = bits(&alone.out[0][0]) == bits(&crowd.out[0][0])
                    && bits(&alone.lse[0][0]) == bits(&crowd.lse[0][0]);
                ensure(equal, || {
                    format!(
                        "{format}, {queries} queries after {context} tokens: other bits beside \
                         {neighbours:?} than alone"
                    )
                })?;
            }
        }
    }
    Ok(Outcome::Holds)
}
