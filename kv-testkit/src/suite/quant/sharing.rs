//! Sharing, truncating and rewriting quantised rows, and the tokens per byte of memory.
use kv_core::backend::AnyBackend;
use kv_core::spec::CacheSpecBuilder;
use kv_core::{CacheSpec, KvFormat, ScaleGroup};

use super::{ConstantRanges, LARGE_MEANS, NEUTRAL, calibrated, constants, quantised};
use crate::case::{At, Case, CaseError, CaseResult, Outcome, ensure, same};
use crate::device::dim;
use crate::fixture::{CacheFixture, Finish, StepConfig, StepKind};
use crate::suite::{ORDERS, case};

pub(super) fn cases() -> Vec<Case> {
    vec![
        case("quant/fork_at_every_offset", forks),
        case("quant/fork_inside_the_first_tokens", forks_in_prefix),
        case("quant/truncate_and_rewrite", rewrite),
        case("quant/rolled_back", rolled_back),
        case("quant/wiped_blocks", wiped),
        case("quant/recalibrated", recalibrated),
        case("quant/tokens_in_the_same_bytes", capacity),
    ]
}

/// Rows whose size is not a whole number of words, so that a copy that rounds it is noticed.
fn small(backend: &AnyBackend, format: KvFormat) -> CacheSpecBuilder {
    let dims = [dim(backend, 18), dim(backend, 10)];
    CacheSpec::builder().layers(2).kv_heads(2).head_dims(dims[0], dims[1]).format(format)
}

fn step(fixture: &mut CacheFixture, ids: &[(u64, u32)]) -> Result<(), CaseError> {
    let inputs: Vec<_> = ids.iter().map(|(id, n)| (*id, StepKind::Tokens(*n))).collect();
    fixture.step(&inputs, &StepConfig::default())?;
    fixture.check().at(format!("after step {ids:?}"))
}

/// Forks after every number of tokens; then one side continues, then both.
fn fork_everywhere(fixture: &mut CacheFixture, most: u32) -> Result<(), CaseError> {
    for len in 1..=most {
        fixture.fill(1, len)?;
        fixture.fork(1, 2)?;
        let first = if len % 2 == 0 { 1 } else { 2 };
        step(fixture, &[(first, 1)]).at(format!("forked at {len}"))?;
        step(fixture, &[(2, 2), (1, 1)]).at(format!("forked at {len}"))?;
        fixture.release(1)?;
        fixture.release(2)?;
    }
    Ok(())
}

fn forks(backend: &AnyBackend) -> CaseResult {
    for format in quantised(1) {
        for order in ORDERS {
            let spec = small(backend, format).block_order(order).paged(5, 12);
            fork_everywhere(&mut calibrated(backend, spec, NEUTRAL, 1)?, 6)
                .at(format!("{format}"))?;
        }
        let spec = small(backend, format).contiguous(2, 12);
        fork_everywhere(&mut calibrated(backend, spec, NEUTRAL, 1)?, 3)
            .at(format!("{format}, contiguous"))?;
    }
    Ok(Outcome::Holds)
}

fn forks_in_prefix(backend: &AnyBackend) -> CaseResult {
    for format in quantised(2) {
        for order in ORDERS {
            // 2 wide rows and a token fit into the first block of most formats, and the rest into
            // the next one.
            let spec =
                small(backend, format).block_order(order).full_precision_prefix(3).paged(9, 16);
            fork_everywhere(&mut calibrated(backend, spec, LARGE_MEANS, 2)?, 7)
                .at(format!("{format}"))?;
        }
        let spec = small(backend, format).full_precision_prefix(2).contiguous(2, 9);
        fork_everywhere(&mut calibrated(backend, spec, NEUTRAL, 2)?, 3)
            .at(format!("{format}, contiguous"))?;
    }
    Ok(Outcome::Holds)
}

fn rewrite(backend: &AnyBackend) -> CaseResult {
    for format in quantised(0) {
        for full_precision_prefix in [0, 2] {
            let mut fixture = calibrated(
                backend,
                small(backend, format).full_precision_prefix(full_precision_prefix).paged(8, 8),
                NEUTRAL,
                3,
            )?;
            fixture.fill(1, 13)?;
            for len in [12, 8, 7, 2, 1, 0] {
                fixture.truncate(1, len)?;
                fixture.check().at(format!("{format}, truncated to {len}"))?;
                step(&mut fixture, &[(1, 5)]).at(format!("{format}, truncated to {len}"))?;
                fixture.truncate(1, len + 1)?;
            }
        }
    }
    Ok(Outcome::Holds)
}

/// Recalibrates while sequences exist, share blocks, and have rows both in the prefix and in codes.
fn recalibrated(backend: &AnyBackend) -> CaseResult {
    const MEASURED: ConstantRanges = ConstantRanges { mean: 0.5, balance: 1.0 };
    for format in quantised(1) {
        let mut fixture = calibrated(
            backend,
            small(backend, format).full_precision_prefix(2).paged(9, 16),
            NEUTRAL,
            5,
        )?;
        fixture.fill(1, 13)?;
        fixture.fork(1, 2)?;
        step(&mut fixture, &[(2, 3)]).at(format!("{format}"))?;
        let key = fixture.cache.state().encoding_key();
        let given = constants(fixture.cache.state().spec(), MEASURED, 6);
        fixture.recalibrate(given)?;
        ensure(
            key != fixture.cache.state().encoding_key()
                || fixture.layers()[0].stored[0].constants().is_none(),
            || format!("{format}: other constants, the same key"),
        )?;
        fixture.check().at(format!("{format}, re-encoded"))?;
        step(&mut fixture, &[(1, 4), (2, 1)]).at(format!("{format}, with new constants"))?;
    }
    Ok(Outcome::Holds)
}

fn rolled_back(backend: &AnyBackend) -> CaseResult {
    for format in quantised(2) {
        let mut fixture = calibrated(
            backend,
            small(backend, format).full_precision_prefix(1).paged(8, 8),
            NEUTRAL,
            4,
        )?;
        fixture.fill(1, 6)?;
        fixture.fork(1, 2)?;
        let before = fixture.state();
        let dropped = StepConfig { finish: Finish::Drop, ..StepConfig::default() };
        fixture.step(&[(1, StepKind::Tokens(3)), (2, StepKind::Tokens(1))], &dropped)?;
        crate::fixture::unchanged(&mut fixture, &before, "a dropped step")
            .at(format!("{format}"))?;
        step(&mut fixture, &[(2, 2), (1, 1)]).at(format!("{format}"))?;
    }
    Ok(Outcome::Holds)
}

/// Codes of 0 are not always values of 0, but wiped bytes are.
fn wiped(backend: &AnyBackend) -> CaseResult {
    for format in quantised(0) {
        let spec =
            small(backend, format).full_precision_prefix(2).paged(8, 6).wipe_on_release(true);
        let mut fixture = calibrated(backend, spec, NEUTRAL, 5)?;
        let stale = |fixture: &mut CacheFixture| -> Result<usize, CaseError> {
            let all = crate::suite::scale::bytes(&mut fixture.cache, kv_core::GroupId(0))?;
            Ok(all.iter().flatten().filter(|byte| **byte != 0).count())
        };
        same("bytes left by what filled the pool", stale(&mut fixture)?, 0)?;
        fixture.fill(1, 9)?;
        ensure(stale(&mut fixture)? > 0, || format!("{format}: nothing was stored"))?;
        fixture.release(1)?;
        same(format!("{format}: bytes left by a sequence"), stale(&mut fixture)?, 0)?;
    }
    Ok(Outcome::Holds)
}

/// A 4-bit cache holds at least 3.7 times the tokens of a bf16 cache, full-precision prefix and
/// scales included, measured by the device's allocations.
fn capacity(backend: &AnyBackend) -> CaseResult {
    const BYTES: u64 = 8 << 20;
    let tokens = |format, full_precision_prefix| -> Result<u32, CaseError> {
        let spec = CacheSpec::builder().layers(2).kv_heads(2).head_dim(128).format(format);
        let spec =
            spec.full_precision_prefix(full_precision_prefix).paged_within(16, BYTES).build()?;
        let given = constants(&spec, NEUTRAL, 6);
        let mut cache =
            kv_core::KvCache::builder(backend.clone(), spec).calibration(given).build()?;
        let planes = crate::suite::scale::bytes(&mut cache, kv_core::GroupId(0))?;
        let bytes = planes.iter().map(|plane| plane.len() as u64).sum::<u64>();
        ensure(bytes <= BYTES, || format!("{bytes} bytes allocated where {BYTES} were allowed"))?;
        let group = &cache.state().spec().groups()[0];
        Ok(group.slot_map().tokens(group.num_blocks()))
    };
    let (wide, narrow) = (tokens(KvFormat::Bf16, 0)?, tokens(KvFormat::L4(ScaleGroup::Row), 4)?);
    ensure(f64::from(narrow) >= 3.7 * f64::from(wide), || {
        format!("l4 holds {narrow} tokens where bf16 holds {wide}")
    })?;
    Ok(Outcome::Holds)
}
