//! What no query sees may be anything: attention never reads it.
use kv_core::{CacheSpecBuilder, Determinism, KeyMean, KvFormat};

use super::quant::{LARGE_MEANS, NEUTRAL, lab, quantised};
use super::{ORDERS, case, small};
use crate::case::{At, Case, CaseError, CaseResult, Outcome, ensure};
use crate::device::{Device, dim, limited};
use crate::lab::{Brings, How, Lab, Spoiled};
use crate::rng::Rng;

pub(super) fn cases<B: Device>() -> Vec<Case<B>> {
    vec![
        case("attend/unseen_slots_are_never_read", plain),
        case("attend/unseen_slots_of_long_contexts", long),
        case("quant/unseen_slots_are_never_read", coded),
        case("quant/unseen_slots_beside_a_tail", beside_tail),
    ]
}

/// Windows with and without sink tokens, those that end inside blocks and tiles among them.
fn windows() -> impl Iterator<Item = How> {
    let base = How::default();
    [(0, 0), (0, 1), (2, 4), (3, 9), (7, 5), (11, 40)].into_iter().flat_map(move |pair| {
        let how = How { window_left: Some(pair.0), sink_tokens: pair.1, ..base.clone() };
        [How { causal: false, ..how.clone() }, how]
    })
}

/// A step of a batch, after all that it does not see was spoiled.
fn step<B: Device>(
    lab: &mut Lab<B>,
    inputs: &[(u64, Brings)],
    how: &How,
) -> Result<Spoiled, CaseError> {
    let spoiled = lab.spoil_unseen(inputs, how)?;
    lab.step(inputs, how)?;
    Ok(spoiled)
}

/// Three sequences, one longer than a tile: queries alone, decode, then many queries in one batch.
/// No query stands before an earlier one, so none sees what was spoiled for that one.
fn lives<B: Device>(lab: &mut Lab<B>, how: &How) -> Result<(), CaseError> {
    for (id, len) in [(1, 45), (2, 6), (3, 23)] {
        lab.fill(id, len)?;
    }
    let queries = [(1, Brings::Query(3)), (2, Brings::Query(2)), (3, Brings::Query(1))];
    let spoiled = step(lab, &queries, how).at("queries")?;
    ensure(spoiled.rows + spoiled.blocks > 0 || how.sink_tokens > 23, || {
        "every row was seen, so nothing was tried".to_owned()
    })?;
    step(lab, &[1, 2, 3].map(|id| (id, Brings::Tokens(1))), how).at("decode")?;
    let more = [(3, Brings::Tokens(5)), (1, Brings::Query(1)), (2, Brings::Tokens(12))];
    step(lab, &more, how).at("several queries")?;
    step(lab, &[(1, Brings::Tokens(19)), (3, Brings::Query(1))], how).at("many queries")?;
    [1, 2, 3].into_iter().try_for_each(|id| lab.release(id))
}

fn plain<B: Device>(backend: &B) -> CaseResult {
    for (format, order) in KvFormat::PLAIN.iter().zip(ORDERS.into_iter().cycle()) {
        for block_size in [1, 4, 16, 64] {
            let spec = small().format(*format).block_order(order).paged(block_size, 160);
            let mut lab = Lab::new(backend, spec.build()?, 1)?;
            for how in windows() {
                lives(&mut lab, &how).at(format!("{format}, blocks of {block_size}, {how:?}"))?;
            }
        }
    }
    Ok(Outcome::Holds)
}

/// Contexts in several parts, of which most are not seen at all.
fn long<B: Device>(backend: &B) -> CaseResult {
    for workers in [1, 3, 16] {
        let device = limited(backend, |capabilities| capabilities.with_workers(workers));
        for determinism in [Determinism::Fast, Determinism::BatchInvariant] {
            for (left, sink_tokens) in [(0, 0), (90, 4), (1100, 270), (40, 1030)] {
                let spec = small().layers(1).format(KvFormat::F16).paged(16, 300);
                let mut lab = Lab::new(&device, spec.determinism(determinism).build()?, 2)?;
                lab.fill(1, 3100)?;
                lab.fill(2, 300)?;
                let how = How { window_left: Some(left), sink_tokens, ..How::default() };
                for queries in [1, 4, 20] {
                    let inputs = [(1, Brings::Tokens(queries)), (2, Brings::Tokens(1))];
                    let spoiled = step(&mut lab, &inputs, &how).at(format!(
                        "{workers} workers, {determinism:?}, window {left}, {sink_tokens} sink \
                         tokens, {queries} queries"
                    ))?;
                    ensure(spoiled.blocks > 80, || format!("too little was spoiled: {spoiled:?}"))?;
                }
            }
        }
    }
    Ok(Outcome::Holds)
}

/// A geometry for a quantised format and another one for V.
fn spec<B: Device>(
    backend: &B,
    rng: &mut Rng,
    format: KvFormat,
    (size, num_blocks): (u32, u32),
) -> CacheSpecBuilder {
    let all: Vec<_> = KvFormat::all().collect();
    let spec = small().layers(1).head_dims(dim(backend, 34), 20).formats(format, rng.pick(&all));
    spec.block_order(rng.pick(&ORDERS)).paged(size, num_blocks)
}

fn coded<B: Device>(backend: &B) -> CaseResult {
    let mut rng = Rng::new(3);
    for format in quantised() {
        for (size, wide) in [(9, 0), (16, 3), (32, 1)] {
            let spec = spec(backend, &mut rng, format, (size, 30)).full_precision_prefix(wide);
            let mut lab = lab(backend, spec, LARGE_MEANS, 3)?;
            for how in windows().step_by(3) {
                let how = How { group: rng.pick(&[1, 3, 8]), sink_logits: rng.one_in(2), ..how };
                lives(&mut lab, &how)
                    .at(format!("{format}, blocks of {size}, {wide} rows in 16 bits, {how:?}"))?;
            }
        }
    }
    Ok(Outcome::Holds)
}

/// Rows that wait in 16 bits, and the means of blocks. Queries alone: a step with new tokens may
/// make codes of a tail, and reads its rows for that.
fn beside_tail<B: Device>(backend: &B) -> CaseResult {
    let mut rng = Rng::new(4);
    for format in quantised() {
        for key_mean in [KeyMean::Calibrated, KeyMean::PerBlock] {
            let spec = spec(backend, &mut rng, format, (9, 40))
                .full_precision_prefix(rng.pick(&[0, 2]))
                .tail(true);
            let mut lab = lab(backend, spec.key_mean(key_mean), NEUTRAL, 4)?;
            for how in windows().step_by(2) {
                for queries in [1, 2, 8] {
                    lab.fill(1, 53)?;
                    lab.fill(2, 16)?;
                    let inputs = [(1, Brings::Query(queries)), (2, Brings::Query(1))];
                    let forms = format!("{format}, {key_mean:?}, {queries} queries, {how:?}");
                    step(&mut lab, &inputs, &how).at(forms)?;
                    lab.release(1)?;
                    lab.release(2)?;
                }
            }
        }
    }
    Ok(Outcome::Holds)
}
