//! Attention over the cache.
use kv_core::backend::AnyBackend;
use kv_core::plan::Determinism;
use kv_core::{DType, KvFormat};

use super::{ORDERS, case, small};
use crate::amount::{Rotation, runs};
use crate::case::{At, Case, CaseError, CaseResult, Outcome, ensure};
use crate::device::{Device, Place, dim, limited_erased};
use crate::fixture::{AXES, CacheFixture, DTYPES, StepConfig, StepKind};
use crate::rng::Rng;
use crate::tokens::Padding;

/// Cases that also run on the backend's own type.
pub(super) fn typed_cases<B: Device>() -> Vec<Case<B>> {
    vec![
        case("attend/ragged_gqa", ragged),
        case("attend/every_option_alone", options_alone),
        case("attend/host_outputs", host_outputs),
    ]
}

pub(super) fn cases() -> Vec<Case> {
    vec![
        case("attend/head_groups", head_groups),
        case("attend/head_dims", head_dims),
        case("attend/options_combined", options_combined),
        case("attend/every_dtype_over_every_format", dtypes),
        case("attend/more_queries_than_keys", more_queries),
        case("attend/fully_masked_rows", masked_rows),
        case("attend/prefill_without_visible_keys", without_keys),
        case("attend/padding_rows_become_zero", padding),
        case("attend/sharp_weights", sharp),
        case("attend/stale_nan_never_seen", stale_nan),
        case("attend/long_context_is_split", splits),
        case("attend/batch_invariant_bits", batch_invariant),
        case("attend/repeatable", repeatable),
        case("attend/does_not_change_the_cache", leaves_cache),
        case("attend/cross_attention", cross),
    ]
}

fn tokens(id: u64, n: u32) -> (u64, StepKind) {
    (id, StepKind::Tokens(n))
}

/// Runs prefill, then prefill, decode and speculation in one batch, then decode, all with `config`.
fn mixed_batches<B: Device>(
    fixture: &mut CacheFixture<B>,
    config: &StepConfig,
) -> Result<(), CaseError> {
    for id in 1..=4 {
        fixture.start(id)?;
    }
    fixture.step(&[tokens(1, 9), tokens(2, 1), tokens(3, 4)], config)?;
    fixture.step(&[tokens(4, 6), tokens(2, 1), tokens(1, 3), (3, StepKind::Idle)], config)?;
    fixture.step(&[tokens(1, 1), tokens(3, 1), tokens(2, 1), tokens(4, 1)], config)?;
    for id in 1..=4 {
        fixture.release(id)?;
    }
    Ok(())
}

fn ragged<B: Device>(backend: &B) -> CaseResult {
    for order in ORDERS {
        for axes in AXES {
            let config = StepConfig { q_axes: axes, kv_axes: axes, ..StepConfig::default() };
            let spec = small().block_order(order);
            mixed_batches(
                &mut CacheFixture::new(backend, spec.clone().paged(4, 16).build()?, 1)?,
                &config,
            )?;
            let spec = spec.contiguous(4, 13).build()?;
            mixed_batches(&mut CacheFixture::new(backend, spec, 1)?, &config)?;
        }
    }
    Ok(Outcome::Holds)
}

fn head_groups(backend: &AnyBackend) -> CaseResult {
    for (heads, group) in [(1, 1), (4, 1), (2, 4), (1, 8), (3, 7), (8, 2), (1, 16)] {
        for order in ORDERS {
            let spec = small().layers(1).kv_heads(heads).block_order(order).build()?;
            let config = StepConfig { group, ..StepConfig::default() };
            mixed_batches(&mut CacheFixture::new(backend, spec, 2)?, &config)
                .at(format!("{heads} kv heads, {group} query heads each, {order:?}"))?;
        }
    }
    Ok(Outcome::Holds)
}

fn head_dims(backend: &AnyBackend) -> CaseResult {
    let dims =
        [(1, 1), (8, 4), (16, 16), (33, 31), (40, 40), (64, 8), (80, 96), (128, 128), (256, 192)];
    let mut rotation = Rotation::new();
    for (k, v) in dims {
        let (k, v) = (dim(backend, k), dim(backend, v));
        for format in rotation.of(KvFormat::PLAIN) {
            let spec = small().layers(1).kv_heads(1).head_dims(k, v).format(format).build()?;
            let config = StepConfig { outputs: Place::Host, ..StepConfig::default() };
            mixed_batches(&mut CacheFixture::new(backend, spec, 3)?, &config)
                .at(format!("dims {k} and {v}, {format}"))?;
        }
    }
    Ok(Outcome::Holds)
}

fn options_alone<B: Device>(backend: &B) -> CaseResult {
    let base = StepConfig::default();
    let mut forms = vec![
        StepConfig { causal: false, ..base.clone() },
        StepConfig { soft_cap: Some(5.0), ..base.clone() },
        StepConfig { soft_cap: Some(0.25), spread: 4.0, ..base.clone() },
        StepConfig { sink_logits: true, ..base.clone() },
        StepConfig { lse: false, ..base.clone() },
        StepConfig { spread: 0.0, ..base.clone() },
    ];
    for left in [0, 1, 3, 8, 12, 1000, u32::MAX] {
        forms.push(StepConfig { window_left: Some(left), ..base.clone() });
        forms.push(StepConfig { window_left: Some(left), causal: false, ..base.clone() });
    }
    for (left, sink_tokens) in [(0, 1), (1, 3), (3, 4), (3, 5), (8, 40), (2, u32::MAX)] {
        let base = StepConfig { window_left: Some(left), sink_tokens, ..base.clone() };
        forms.push(StepConfig { causal: false, ..base.clone() });
        forms.push(base);
    }
    forms.push(StepConfig { sink_tokens: 4, ..base });
    for config in forms {
        let mut fixture = CacheFixture::new(backend, small().build()?, 4)?;
        mixed_batches(&mut fixture, &config)?;
    }
    Ok(Outcome::Holds)
}

fn options_combined(backend: &AnyBackend) -> CaseResult {
    let mut rng = Rng::new(21);
    for round in 0..runs(24).into() {
        let spec = small()
            .kv_heads(rng.pick(&[1, 2, 3]))
            .block_order(rng.pick(&ORDERS))
            .formats(rng.pick(KvFormat::PLAIN), rng.pick(KvFormat::PLAIN))
            .paged(rng.pick(&[1, 4, 5, 16]), 40);
        let config = StepConfig::random(&mut rng);
        let mut fixture = CacheFixture::new(backend, spec.build()?, round)?;
        mixed_batches(&mut fixture, &config).at(format!("round {round}"))?;
    }
    Ok(Outcome::Holds)
}

fn dtypes(backend: &AnyBackend) -> CaseResult {
    for q_dtype in DTYPES {
        for format in KvFormat::PLAIN {
            let spec = small().layers(1).head_dim(32).format(*format).build()?;
            let config = StepConfig { q_dtype, kv_dtype: q_dtype, ..StepConfig::default() };
            mixed_batches(&mut CacheFixture::new(backend, spec, 5)?, &config)
                .at(format!("q {q_dtype}, stored {format}"))?;
        }
    }
    Ok(Outcome::Holds)
}

fn more_queries(backend: &AnyBackend) -> CaseResult {
    let mut fixture = CacheFixture::new(backend, small().build()?, 6)?;
    fixture.fill(1, 3)?;
    fixture.fill(2, 0)?;
    fixture.fill(3, 1)?;
    for causal in [true, false] {
        for (window_left, sink_tokens) in [(None, 0), (Some(0), 0), (Some(2), 0), (Some(0), 2)] {
            for axes in AXES {
                let base = StepConfig { causal, q_axes: axes, ..StepConfig::default() };
                let config = StepConfig { window_left, sink_tokens, ..base };
                let queries = |id, n| (id, StepKind::Query(n));
                fixture.step(&[queries(1, 7), queries(2, 2), queries(3, 1)], &config)?;
                fixture.step(&[queries(2, 1)], &config).at("only a sequence without keys")?;
            }
        }
    }
    Ok(Outcome::Holds)
}

/// Rows whose keys are all masked give zeros in out and negative infinity in lse, never NaN.
fn masked_rows(backend: &AnyBackend) -> CaseResult {
    let mut fixture = CacheFixture::new(backend, small().build()?, 7)?;
    fixture.fill(1, 5)?;
    for q_dtype in DTYPES {
        let config = StepConfig { q_dtype, ..StepConfig::default() };
        let outputs = fixture.step(&[(1, StepKind::Query(9))], &config)?;
        let heads = 2 * config.group;
        let (out, lse) = (&outputs.out[0][0][..4 * heads * 8], &outputs.lse[0][0][..4 * heads]);
        ensure(out.iter().all(|x| *x == 0.0), || format!("masked rows of out hold {out:?}"))?;
        ensure(lse.iter().all(|x| *x == f32::NEG_INFINITY), || {
            format!("masked rows of lse hold {lse:?}")
        })?;
        // With sink logits, the softmax has only them.
        fixture.step(&[(1, StepKind::Query(9))], &StepConfig { sink_logits: true, ..config })?;
    }
    Ok(Outcome::Holds)
}

/// Prefill whose tiles of query rows see few keys, or none at all: devices have kernels for these
/// shapes that stage results where the queries were.
fn without_keys(backend: &AnyBackend) -> CaseResult {
    const QUERIES: u32 = 40;
    for dim in [64, 80, 96, 128, 192, 256] {
        for (format, q_dtype) in [(KvFormat::F16, DType::F16), (KvFormat::Bf16, DType::Bf16)] {
            let spec = small().layers(1).head_dim(dim).format(format).build()?;
            let mut fixture = CacheFixture::new(backend, spec, 17)?;
            let keys = [0_u32, 5];
            let ids = [1, 2];
            for (id, keys) in ids.into_iter().zip(keys) {
                fixture.fill(id, keys)?;
            }
            let config = StepConfig { q_dtype, group: 4, ..StepConfig::default() };
            let inputs = ids.map(|id| (id, StepKind::Query(QUERIES)));
            let outputs = fixture.step(&inputs, &config).at(format!("head_dim {dim}, {format}"))?;
            let width = 2 * config.group * dim as usize;
            for (out, keys) in outputs.out[0].iter().zip(keys) {
                let masked = &out[..(QUERIES - keys) as usize * width];
                ensure(masked.iter().all(|x| *x == 0.0), || {
                    format!("head_dim {dim}, {format}, {keys} keys: masked rows are not zero")
                })?;
            }
        }
    }
    Ok(Outcome::Holds)
}

fn padding(backend: &AnyBackend) -> CaseResult {
    let paddings = [(2, 0, 0), (0, 3, 0), (3, 2, 0), (0, 0, 4), (1, 1, 2)];
    for (batch, tokens, gap) in paddings {
        for axes in AXES {
            for outputs in [Place::Host, Place::Device] {
                let padding = Padding { batch, tokens, gap };
                let config = StepConfig {
                    padding,
                    outputs,
                    q_axes: axes,
                    kv_axes: axes,
                    inputs: outputs,
                    ..StepConfig::default()
                };
                mixed_batches(
                    &mut CacheFixture::new(backend, small().layers(1).build()?, 8)?,
                    &config,
                )?;
            }
        }
    }
    Ok(Outcome::Holds)
}

/// Scores in the hundreds: no overflow, and the largest one gets all the weight.
fn sharp(backend: &AnyBackend) -> CaseResult {
    for sink_logits in [false, true] {
        for spread in [30.0, 300.0] {
            let config = StepConfig { sink_logits, spread, ..StepConfig::default() };
            let spec = small().layers(1).head_dim(16).build()?;
            mixed_batches(&mut CacheFixture::new(backend, spec, 9)?, &config)?;
        }
    }
    Ok(Outcome::Holds)
}

fn stale_nan(backend: &AnyBackend) -> CaseResult {
    for order in ORDERS {
        for (block_size, num_blocks) in [(1, 30), (8, 6), (32, 4)] {
            let spec = small().block_order(order).paged(block_size, num_blocks).build()?;
            // The fixture filled every slot with NaN; every length now ends inside a block.
            let mut fixture = CacheFixture::new(backend, spec, 10)?;
            mixed_batches(&mut fixture, &StepConfig { causal: false, ..StepConfig::default() })?;
            mixed_batches(&mut fixture, &StepConfig { kv_axes: AXES[0], ..StepConfig::default() })?;
        }
    }
    Ok(Outcome::Holds)
}

fn splits(backend: &AnyBackend) -> CaseResult {
    for workers in [1, 3, 16] {
        let device = limited_erased(backend, |capabilities| capabilities.with_workers(workers));
        for determinism in [Determinism::Fast, Determinism::BatchInvariant] {
            let spec = small().layers(1).paged(16, 260).determinism(determinism).build()?;
            let mut fixture = CacheFixture::new(&device, spec, 11)?;
            fixture.fill(1, 2300)?;
            fixture.fill(2, 17)?;
            fixture.fill(3, 1024)?;
            let base = StepConfig::default();
            for config in [
                base.clone(),
                StepConfig {
                    q_dtype: DTYPES[2],
                    sink_logits: true,
                    soft_cap: Some(5.0),
                    ..base.clone()
                },
                // Whole splits are outside the window.
                StepConfig { window_left: Some(100), spread: 4.0, ..base.clone() },
                StepConfig { window_left: Some(100), sink_tokens: 4, ..base.clone() },
                StepConfig { window_left: Some(1100), sink_tokens: 300, group: 3, ..base.clone() },
                StepConfig { causal: false, group: 1, ..base.clone() },
            ] {
                let inputs = [tokens(1, 1), tokens(2, 3), tokens(3, 1)];
                fixture.step(&inputs, &config).at(format!("{workers} workers, {determinism:?}"))?;
            }
        }
    }
    Ok(Outcome::Holds)
}

fn batch_invariant(backend: &AnyBackend) -> CaseResult {
    let device = limited_erased(backend, |capabilities| capabilities.with_workers(7));
    let all = [(2300, 1), (1023, 1), (1022, 4), (40, 1), (300, 12)].map(|form| (form, None));
    let mut rotation = Rotation::new();
    // Splits under a window, and with sink tokens, depend on the sequence alone too.
    let some = [(2300, 1), (1100, 4)].map(|form| (form, Some(200)));
    for ((context, queries), window_left) in all.into_iter().chain(some) {
        let run = |neighbours: &[u32]| -> Result<_, CaseError> {
            let spec = small().layers(1).paged(16, 700).determinism(Determinism::BatchInvariant);
            let mut fixture = CacheFixture::new(&device, spec.build()?, 12)?;
            let mut inputs = vec![tokens(100, queries)];
            for (id, len) in (1..).zip(neighbours) {
                fixture.fill(id, *len)?;
                inputs.push(tokens(id, 1));
            }
            fixture.rng = Rng::new(55);
            fixture.fill(100, context)?;
            let config = StepConfig { window_left, sink_tokens: 4, ..StepConfig::default() };
            let mut rows = fixture.random_rows(&[queries as usize], &config);
            let others = fixture.random_rows(&vec![1; neighbours.len()], &config);
            rows.extend(others);
            fixture.rng = Rng::new(77);
            fixture.step_with(&inputs, &rows, &config)
        };
        let alone = run(&[])?;
        for neighbours in rotation.of(&[&[5][..], &[4000, 1], &[100; 20]]) {
            let crowd = run(neighbours)?;
            let bits = |rows: &[f32]| rows.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            let equal = bits(&alone.out[0][0]) == bits(&crowd.out[0][0])
                && bits(&alone.lse[0][0]) == bits(&crowd.lse[0][0]);
            ensure(equal, || {
                format!(
                    "{queries} queries over {context} tokens: other bits beside {neighbours:?} \
                     than alone"
                )
            })?;
        }
    }
    Ok(Outcome::Holds)
}

fn repeatable(backend: &AnyBackend) -> CaseResult {
    let run = || -> Result<_, CaseError> {
        let spec = small().layers(1).head_dim(32).paged(16, 120).build()?;
        let mut fixture = CacheFixture::new(backend, spec, 13)?;
        fixture.fill(1, 900)?;
        fixture.fill(2, 33)?;
        let decode = fixture.step(&[tokens(1, 1), tokens(2, 1)], &StepConfig::default())?;
        let prefill = fixture.step(&[tokens(2, 20), tokens(1, 9)], &StepConfig::default())?;
        Ok((decode, prefill))
    };
    let first = run()?;
    for round in 0..3 {
        ensure(run()? == first, || format!("round {round} gave other bits than the first"))?;
    }
    Ok(Outcome::Holds)
}

fn leaves_cache(backend: &AnyBackend) -> CaseResult {
    let mut fixture = CacheFixture::new(backend, small().build()?, 14)?;
    fixture.fill(1, 10)?;
    fixture.fill(2, 3)?;
    for _ in 0..3 {
        fixture
            .step(&[(1, StepKind::Query(2)), (2, StepKind::Query(5))], &StepConfig::default())?;
        fixture.check()?;
    }
    Ok(Outcome::Holds)
}

/// Cross attention: K and V of an encoder, written once, read by every step of a decoder and by its
/// forks.
fn cross(backend: &AnyBackend) -> CaseResult {
    let mut fixture = CacheFixture::new(backend, small().build()?, 15)?;
    fixture.fill(1, 11)?;
    fixture.fill(2, 6)?;
    let config = StepConfig { causal: false, ..StepConfig::default() };
    let usage = fixture.cache.state().usage();
    for queries in [1, 4, 1] {
        fixture.step(&[(1, StepKind::Query(queries)), (2, StepKind::Query(1))], &config)?;
    }
    for child in 10..14 {
        fixture.fork(1, child)?;
    }
    let inputs: Vec<_> = (10..14).map(|id| (id, StepKind::Query(2))).collect();
    fixture.step(&inputs, &config)?;
    let used = fixture.cache.state().usage().blocks_used;
    ensure(used == usage.blocks_used, || {
        format!("queries and forks took blocks: {} used before, {used} after", usage.blocks_used)
    })?;
    fixture.release(1)?;
    fixture.step(&inputs, &config)?;
    fixture.check()?;
    Ok(Outcome::Holds)
}

/// Outputs in host memory equal, to the bit, those that the same call writes to device memory. Gaps
/// between their rows stay unchanged, which unpacking checks.
fn host_outputs<B: Device>(backend: &B) -> CaseResult {
    for q_axes in AXES {
        for q_dtype in DTYPES {
            for lse in [true, false] {
                let run = |outputs| -> Result<_, CaseError> {
                    let padding = Padding { batch: 1, tokens: 2, gap: 2 };
                    let config = StepConfig {
                        q_axes,
                        q_dtype,
                        outputs,
                        padding,
                        lse,
                        ..StepConfig::default()
                    };
                    let mut fixture = CacheFixture::new(backend, small().build()?, 16)?;
                    fixture.fill(1, 9)?;
                    fixture.start(2)?;
                    let prefill = fixture.step(&[tokens(1, 12), tokens(2, 3)], &config)?;
                    Ok([prefill, fixture.step(&[tokens(2, 1), tokens(1, 1)], &config)?])
                };
                let [host, device] = [run(Place::Host)?, run(Place::Device)?];
                ensure(host == device, || {
                    format!("{q_axes:?}, {q_dtype}, lse {lse}: {host:?}, on the device {device:?}")
                })?;
            }
        }
    }
    Ok(Outcome::Holds)
}
