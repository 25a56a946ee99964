//! Sharing, taking back and rewriting quantised rows, and how many of them memory holds.
use kv_core::{CacheSpec, CacheSpecBuilder, KvFormat, ScaleGroup};

use super::{LARGE_MEANS, Likeness, NEUTRAL, constants, lab, quantised};
use crate::case::{At, Case, CaseError, CaseResult, Outcome, ensure, same};
use crate::device::{Device, dim};
use crate::lab::{Brings, Finish, How, Lab};
use crate::suite::{ORDERS, case};

pub(super) fn cases<B: Device>() -> Vec<Case<B>> {
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

/// Rows that are no whole number of words, so that a copy that rounds is seen.
fn small<B: Device>(backend: &B, format: KvFormat) -> CacheSpecBuilder {
    let dims = [dim(backend, 18), dim(backend, 10)];
    CacheSpec::builder().layers(2).kv_heads(2).head_dims(dims[0], dims[1]).format(format)
}

fn step<B: Device>(lab: &mut Lab<B>, ids: &[(u64, u32)]) -> Result<(), CaseError> {
    let inputs: Vec<_> = ids.iter().map(|(id, n)| (*id, Brings::Tokens(*n))).collect();
    lab.step(&inputs, &How::default())?;
    lab.check().at(format!("after step {ids:?}"))
}

/// A fork after every number of tokens; then one side, then both go on.
fn fork_everywhere<B: Device>(lab: &mut Lab<B>, most: u32) -> Result<(), CaseError> {
    for len in 1..=most {
        lab.fill(1, len)?;
        lab.fork(1, 2)?;
        let first = if len % 2 == 0 { 1 } else { 2 };
        step(lab, &[(first, 1)]).at(format!("forked at {len}"))?;
        step(lab, &[(2, 2), (1, 1)]).at(format!("forked at {len}"))?;
        lab.release(1)?;
        lab.release(2)?;
    }
    Ok(())
}

fn forks<B: Device>(backend: &B) -> CaseResult {
    for format in quantised() {
        for order in ORDERS {
            let spec = small(backend, format).block_order(order).paged(5, 12);
            fork_everywhere(&mut lab(backend, spec, NEUTRAL, 1)?, 6).at(format!("{format}"))?;
        }
        let spec = small(backend, format).contiguous(2, 12);
        fork_everywhere(&mut lab(backend, spec, NEUTRAL, 1)?, 3)
            .at(format!("{format}, contiguous"))?;
    }
    Ok(Outcome::Holds)
}

fn forks_in_prefix<B: Device>(backend: &B) -> CaseResult {
    for format in quantised() {
        for order in ORDERS {
            // 2 wide rows and a token fit the first block of most formats, and the rest the next
            // one.
            let spec =
                small(backend, format).block_order(order).full_precision_prefix(3).paged(9, 16);
            fork_everywhere(&mut lab(backend, spec, LARGE_MEANS, 2)?, 7).at(format!("{format}"))?;
        }
        let spec = small(backend, format).full_precision_prefix(2).contiguous(2, 9);
        fork_everywhere(&mut lab(backend, spec, NEUTRAL, 2)?, 3)
            .at(format!("{format}, contiguous"))?;
    }
    Ok(Outcome::Holds)
}

fn rewrite<B: Device>(backend: &B) -> CaseResult {
    for format in quantised() {
        for full_precision_prefix in [0, 2] {
            let mut lab = lab(
                backend,
                small(backend, format).full_precision_prefix(full_precision_prefix).paged(8, 8),
                NEUTRAL,
                3,
            )?;
            lab.fill(1, 13)?;
            for len in [12, 8, 7, 2, 1, 0] {
                lab.truncate(1, len)?;
                lab.check().at(format!("{format}, truncated to {len}"))?;
                step(&mut lab, &[(1, 5)]).at(format!("{format}, truncated to {len}"))?;
                lab.truncate(1, len + 1)?;
            }
        }
    }
    Ok(Outcome::Holds)
}

/// Constants come when sequences live already, share blocks and lie in wide rows and codes.
fn recalibrated<B: Device>(backend: &B) -> CaseResult {
    const MEASURED: Likeness = Likeness { mean: 0.5, balance: 1.0 };
    for format in quantised() {
        let mut lab =
            lab(backend, small(backend, format).full_precision_prefix(2).paged(9, 16), NEUTRAL, 5)?;
        lab.fill(1, 13)?;
        lab.fork(1, 2)?;
        step(&mut lab, &[(2, 3)]).at(format!("{format}"))?;
        let key = lab.cache.encoding_key();
        let given = constants(lab.cache.spec(), MEASURED, 6);
        lab.recalibrate(given)?;
        ensure(
            key != lab.cache.encoding_key() || lab.layers()[0].stored[0].turned().is_none(),
            || format!("{format}: other constants, the same key"),
        )?;
        lab.check().at(format!("{format}, stored anew"))?;
        step(&mut lab, &[(1, 4), (2, 1)]).at(format!("{format}, with new constants"))?;
    }
    Ok(Outcome::Holds)
}

fn rolled_back<B: Device>(backend: &B) -> CaseResult {
    for format in quantised() {
        let mut lab =
            lab(backend, small(backend, format).full_precision_prefix(1).paged(8, 8), NEUTRAL, 4)?;
        lab.fill(1, 6)?;
        lab.fork(1, 2)?;
        let before = lab.state();
        let dropped = How { finish: Finish::Drop, ..How::default() };
        lab.step(&[(1, Brings::Tokens(3)), (2, Brings::Tokens(1))], &dropped)?;
        crate::lab::unchanged(&mut lab, &before, "a dropped step").at(format!("{format}"))?;
        step(&mut lab, &[(2, 2), (1, 1)]).at(format!("{format}"))?;
    }
    Ok(Outcome::Holds)
}

/// Codes of 0 are not always values of 0, but wiped bytes are.
fn wiped<B: Device>(backend: &B) -> CaseResult {
    for format in quantised() {
        let spec =
            small(backend, format).full_precision_prefix(2).paged(8, 6).wipe_on_release(true);
        let mut lab = lab(backend, spec, NEUTRAL, 5)?;
        let stale = |lab: &mut Lab<B>| -> Result<usize, CaseError> {
            let all = crate::suite::life::bytes(&mut lab.cache, kv_core::GroupId(0))?;
            Ok(all.iter().flatten().filter(|byte| **byte != 0).count())
        };
        same("bytes left by what filled the pool", stale(&mut lab)?, 0)?;
        lab.fill(1, 9)?;
        ensure(stale(&mut lab)? > 0, || format!("{format}: nothing was stored"))?;
        lab.release(1)?;
        same(format!("{format}: bytes left by a sequence"), stale(&mut lab)?, 0)?;
    }
    Ok(Outcome::Holds)
}

/// A 4-bit cache holds at least 3.7 times the tokens of a bf16 one, wide rows and scales included,
/// by what the device really gave.
fn capacity<B: Device>(backend: &B) -> CaseResult {
    const BYTES: u64 = 8 << 20;
    let tokens = |format, full_precision_prefix| -> Result<u32, CaseError> {
        let spec = CacheSpec::builder().layers(2).kv_heads(2).head_dim(128).format(format);
        let spec =
            spec.full_precision_prefix(full_precision_prefix).paged_within(16, BYTES).build()?;
        let given = constants(&spec, NEUTRAL, 6);
        let mut cache = kv_core::KvCache::with_calibration(backend.clone(), spec, given)?;
        let planes = crate::suite::life::bytes(&mut cache, kv_core::GroupId(0))?;
        let bytes = planes.iter().map(|plane| plane.len() as u64).sum::<u64>();
        ensure(bytes <= BYTES, || format!("{bytes} bytes allocated where {BYTES} were allowed"))?;
        let group = &cache.spec().groups()[0];
        Ok(group.slot_map().tokens(group.num_blocks()))
    };
    let (wide, narrow) = (tokens(KvFormat::Bf16, 0)?, tokens(KvFormat::L4(ScaleGroup::Row), 4)?);
    ensure(f64::from(narrow) >= 3.7 * f64::from(wide), || {
        format!("l4 holds {narrow} tokens where bf16 holds {wide}")
    })?;
    Ok(Outcome::Holds)
}
