//! Attention over the cache.
use kv_core::{Determinism, KvFormat};

use super::{ORDERS, case, small};
use crate::case::{At, Case, CaseError, CaseResult, Outcome, ensure};
use crate::device::{Device, Place, dim, limited};
use crate::lab::{Brings, DTYPES, FORMATS, How, Lab};
use crate::rng::Rng;
use crate::tokens::Room;

pub(super) fn cases<B: Device>() -> Vec<Case<B>> {
    vec![
        case("attend/ragged_gqa", ragged),
        case("attend/head_groups", head_groups),
        case("attend/head_dims", head_dims),
        case("attend/every_option_alone", options_alone),
        case("attend/options_combined", options_combined),
        case("attend/every_dtype_over_every_format", dtypes),
        case("attend/more_queries_than_keys", more_queries),
        case("attend/fully_masked_rows", masked_rows),
        case("attend/padding_rows_become_zero", padding),
        case("attend/sharp_weights", sharp),
        case("attend/stale_nan_never_seen", stale_nan),
        case("attend/long_context_is_split", splits),
        case("attend/batch_invariant_bits", batch_invariant),
        case("attend/repeatable", repeatable),
        case("attend/does_not_change_the_cache", leaves_cache),
        case("attend/cross_attention", cross),
        case("attend/host_outputs", host_outputs),
    ]
}

fn tokens(id: u64, n: u32) -> (u64, Brings) {
    (id, Brings::Tokens(n))
}

/// Prefill, then prefill, decode and speculation in one batch, then decode, all in the form `how`.
fn conversation<B: Device>(lab: &mut Lab<B>, how: &How) -> Result<(), CaseError> {
    for id in 1..=4 {
        lab.start(id)?;
    }
    lab.step(&[tokens(1, 9), tokens(2, 1), tokens(3, 4)], how)?;
    lab.step(&[tokens(4, 6), tokens(2, 1), tokens(1, 3), (3, Brings::Idle)], how)?;
    lab.step(&[tokens(1, 1), tokens(3, 1), tokens(2, 1), tokens(4, 1)], how)?;
    for id in 1..=4 {
        lab.release(id)?;
    }
    Ok(())
}

fn ragged<B: Device>(backend: &B) -> CaseResult {
    for order in ORDERS {
        for format in FORMATS {
            let how = How { q_format: format, kv_format: format, ..How::default() };
            let spec = small().block_order(order);
            conversation(&mut Lab::new(backend, spec.clone().paged(4, 16).build()?, 1)?, &how)?;
            let spec = spec.contiguous(4, 13).build()?;
            conversation(&mut Lab::new(backend, spec, 1)?, &how)?;
        }
    }
    Ok(Outcome::Holds)
}

fn head_groups<B: Device>(backend: &B) -> CaseResult {
    for (heads, group) in [(1, 1), (4, 1), (2, 4), (1, 8), (3, 7), (8, 2), (1, 16)] {
        for order in ORDERS {
            let spec = small().layers(1).kv_heads(heads).block_order(order).build()?;
            let how = How { group, ..How::default() };
            conversation(&mut Lab::new(backend, spec, 2)?, &how)
                .at(format!("{heads} kv heads, {group} query heads each, {order:?}"))?;
        }
    }
    Ok(Outcome::Holds)
}

fn head_dims<B: Device>(backend: &B) -> CaseResult {
    let dims =
        [(1, 1), (8, 4), (16, 16), (33, 31), (40, 40), (64, 8), (80, 96), (128, 128), (256, 192)];
    for (k, v) in dims {
        let (k, v) = (dim(backend, k), dim(backend, v));
        for format in KvFormat::PLAIN {
            let spec = small().layers(1).kv_heads(1).head_dims(k, v).format(*format).build()?;
            let how = How { outputs: Place::Host, ..How::default() };
            conversation(&mut Lab::new(backend, spec, 3)?, &how)
                .at(format!("dims {k} and {v}, {format}"))?;
        }
    }
    Ok(Outcome::Holds)
}

fn options_alone<B: Device>(backend: &B) -> CaseResult {
    let base = How::default();
    let mut forms = vec![
        How { causal: false, ..base.clone() },
        How { soft_cap: Some(5.0), ..base.clone() },
        How { soft_cap: Some(0.25), spread: 4.0, ..base.clone() },
        How { sink_logits: true, ..base.clone() },
        How { lse: false, ..base.clone() },
        How { spread: 0.0, ..base.clone() },
    ];
    for left in [0, 1, 3, 8, 12, 1000, u32::MAX] {
        forms.push(How { window_left: Some(left), ..base.clone() });
        forms.push(How { window_left: Some(left), causal: false, ..base.clone() });
    }
    for (left, sink_tokens) in [(0, 1), (1, 3), (3, 4), (3, 5), (8, 40), (2, u32::MAX)] {
        let base = How { window_left: Some(left), sink_tokens, ..base.clone() };
        forms.push(How { causal: false, ..base.clone() });
        forms.push(base);
    }
    forms.push(How { sink_tokens: 4, ..base });
    for how in forms {
        let mut lab = Lab::new(backend, small().build()?, 4)?;
        conversation(&mut lab, &how)?;
    }
    Ok(Outcome::Holds)
}

fn options_combined<B: Device>(backend: &B) -> CaseResult {
    let mut rng = Rng::new(21);
    for round in 0..24 {
        let spec = small()
            .kv_heads(rng.pick(&[1, 2, 3]))
            .block_order(rng.pick(&ORDERS))
            .formats(rng.pick(KvFormat::PLAIN), rng.pick(KvFormat::PLAIN))
            .paged(rng.pick(&[1, 4, 5, 16]), 40);
        let how = How::random(&mut rng);
        let mut lab = Lab::new(backend, spec.build()?, round)?;
        conversation(&mut lab, &how).at(format!("round {round}"))?;
    }
    Ok(Outcome::Holds)
}

fn dtypes<B: Device>(backend: &B) -> CaseResult {
    for q_dtype in DTYPES {
        for format in KvFormat::PLAIN {
            let spec = small().layers(1).head_dim(32).format(*format).build()?;
            let how = How { q_dtype, kv_dtype: q_dtype, ..How::default() };
            conversation(&mut Lab::new(backend, spec, 5)?, &how)
                .at(format!("q {q_dtype}, stored {format}"))?;
        }
    }
    Ok(Outcome::Holds)
}

fn more_queries<B: Device>(backend: &B) -> CaseResult {
    let mut lab = Lab::new(backend, small().build()?, 6)?;
    lab.fill(1, 3)?;
    lab.fill(2, 0)?;
    lab.fill(3, 1)?;
    for causal in [true, false] {
        for (window_left, sink_tokens) in [(None, 0), (Some(0), 0), (Some(2), 0), (Some(0), 2)] {
            for format in FORMATS {
                let base = How { causal, q_format: format, ..How::default() };
                let how = How { window_left, sink_tokens, ..base };
                let queries = |id, n| (id, Brings::Query(n));
                lab.step(&[queries(1, 7), queries(2, 2), queries(3, 1)], &how)?;
                lab.step(&[queries(2, 1)], &how).at("only a sequence without keys")?;
            }
        }
    }
    Ok(Outcome::Holds)
}

/// Rows whose every key is masked: zeros out, negative infinity as log-sum-exp, no NaN.
fn masked_rows<B: Device>(backend: &B) -> CaseResult {
    let mut lab = Lab::new(backend, small().build()?, 7)?;
    lab.fill(1, 5)?;
    for q_dtype in DTYPES {
        let how = How { q_dtype, ..How::default() };
        let outputs = lab.step(&[(1, Brings::Query(9))], &how)?;
        let heads = 2 * how.group;
        let (out, lse) = (&outputs.out[0][0][..4 * heads * 8], &outputs.lse[0][0][..4 * heads]);
        ensure(out.iter().all(|x| *x == 0.0), || format!("masked rows of out hold {out:?}"))?;
        ensure(lse.iter().all(|x| *x == f32::NEG_INFINITY), || {
            format!("masked rows of lse hold {lse:?}")
        })?;
        // With sink logits, theirs is all there is.
        lab.step(&[(1, Brings::Query(9))], &How { sink_logits: true, ..how })?;
    }
    Ok(Outcome::Holds)
}

fn padding<B: Device>(backend: &B) -> CaseResult {
    let rooms = [(2, 0, 0), (0, 3, 0), (3, 2, 0), (0, 0, 4), (1, 1, 2)];
    for (batch, tokens, gap) in rooms {
        for format in FORMATS {
            for outputs in [Place::Host, Place::Device] {
                let room = Room { batch, tokens, gap };
                let how = How {
                    room,
                    outputs,
                    q_format: format,
                    kv_format: format,
                    inputs: outputs,
                    ..How::default()
                };
                conversation(&mut Lab::new(backend, small().layers(1).build()?, 8)?, &how)?;
            }
        }
    }
    Ok(Outcome::Holds)
}

/// Scores in the hundreds: no overflow, and the largest one takes all.
fn sharp<B: Device>(backend: &B) -> CaseResult {
    for sink_logits in [false, true] {
        for spread in [30.0, 300.0] {
            let how = How { sink_logits, spread, ..How::default() };
            let spec = small().layers(1).head_dim(16).build()?;
            conversation(&mut Lab::new(backend, spec, 9)?, &how)?;
        }
    }
    Ok(Outcome::Holds)
}

fn stale_nan<B: Device>(backend: &B) -> CaseResult {
    for order in ORDERS {
        for (block_size, num_blocks) in [(1, 30), (8, 6), (32, 4)] {
            let spec = small().block_order(order).paged(block_size, num_blocks).build()?;
            // The lab has filled every slot with NaN; every length now ends inside a block.
            let mut lab = Lab::new(backend, spec, 10)?;
            conversation(&mut lab, &How { causal: false, ..How::default() })?;
            conversation(&mut lab, &How { kv_format: FORMATS[0], ..How::default() })?;
        }
    }
    Ok(Outcome::Holds)
}

fn splits<B: Device>(backend: &B) -> CaseResult {
    for workers in [1, 3, 16] {
        let device = limited(backend, |capabilities| capabilities.with_workers(workers));
        for determinism in [Determinism::Fast, Determinism::BatchInvariant] {
            let spec = small().layers(1).paged(16, 260).determinism(determinism).build()?;
            let mut lab = Lab::new(&device, spec, 11)?;
            lab.fill(1, 2300)?;
            lab.fill(2, 17)?;
            lab.fill(3, 1024)?;
            let base = How::default();
            for how in [
                base.clone(),
                How { q_dtype: DTYPES[2], sink_logits: true, soft_cap: Some(5.0), ..base.clone() },
                // Whole splits lie outside the window.
                How { window_left: Some(100), spread: 4.0, ..base.clone() },
                How { window_left: Some(100), sink_tokens: 4, ..base.clone() },
                How { window_left: Some(1100), sink_tokens: 300, group: 3, ..base.clone() },
                How { causal: false, group: 1, ..base.clone() },
            ] {
                let inputs = [tokens(1, 1), tokens(2, 3), tokens(3, 1)];
                lab.step(&inputs, &how).at(format!("{workers} workers, {determinism:?}"))?;
            }
        }
    }
    Ok(Outcome::Holds)
}

fn batch_invariant<B: Device>(backend: &B) -> CaseResult {
    let device = limited(backend, |capabilities| capabilities.with_workers(7));
    let all = [(2300, 1), (1023, 1), (1022, 4), (40, 1), (300, 12)].map(|form| (form, None));
    // Parts that a window leaves out, and those of sink tokens, depend on the sequence alone too.
    let some = [(2300, 1), (1100, 4)].map(|form| (form, Some(200)));
    for ((context, queries), window_left) in all.into_iter().chain(some) {
        let run = |neighbours: &[u32]| -> Result<_, CaseError> {
            let spec = small().layers(1).paged(16, 700).determinism(Determinism::BatchInvariant);
            let mut lab = Lab::new(&device, spec.build()?, 12)?;
            let mut inputs = vec![tokens(100, queries)];
            for (id, len) in (1..).zip(neighbours) {
                lab.fill(id, *len)?;
                inputs.push(tokens(id, 1));
            }
            lab.rng = Rng::new(55);
            lab.fill(100, context)?;
            let how = How { window_left, sink_tokens: 4, ..How::default() };
            let mut rows = lab.random_rows(&[queries as usize], &how);
            let others = lab.random_rows(&vec![1; neighbours.len()], &how);
            rows.extend(others);
            lab.rng = Rng::new(77);
            lab.step_with(&inputs, &rows, &how)
        };
        let alone = run(&[])?;
        for neighbours in [&[5][..], &[4000, 1], &[100; 20]] {
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

fn repeatable<B: Device>(backend: &B) -> CaseResult {
    let run = || -> Result<_, CaseError> {
        let spec = small().layers(1).head_dim(32).paged(16, 120).build()?;
        let mut lab = Lab::new(backend, spec, 13)?;
        lab.fill(1, 900)?;
        lab.fill(2, 33)?;
        let decode = lab.step(&[tokens(1, 1), tokens(2, 1)], &How::default())?;
        let prefill = lab.step(&[tokens(2, 20), tokens(1, 9)], &How::default())?;
        Ok((decode, prefill))
    };
    let first = run()?;
    for round in 0..3 {
        ensure(run()? == first, || format!("round {round} gave other bits than the first"))?;
    }
    Ok(Outcome::Holds)
}

fn leaves_cache<B: Device>(backend: &B) -> CaseResult {
    let mut lab = Lab::new(backend, small().build()?, 14)?;
    lab.fill(1, 10)?;
    lab.fill(2, 3)?;
    for _ in 0..3 {
        lab.step(&[(1, Brings::Query(2)), (2, Brings::Query(5))], &How::default())?;
        lab.check()?;
    }
    Ok(Outcome::Holds)
}

/// An encoder's K and V, written once, read by every step of a decoder and by its forks.
fn cross<B: Device>(backend: &B) -> CaseResult {
    let mut lab = Lab::new(backend, small().build()?, 15)?;
    lab.fill(1, 11)?;
    lab.fill(2, 6)?;
    let how = How { causal: false, ..How::default() };
    let usage = lab.cache.usage();
    for queries in [1, 4, 1] {
        lab.step(&[(1, Brings::Query(queries)), (2, Brings::Query(1))], &how)?;
    }
    for child in 10..14 {
        lab.fork(1, child)?;
    }
    let inputs: Vec<_> = (10..14).map(|id| (id, Brings::Query(2))).collect();
    lab.step(&inputs, &how)?;
    let used = lab.cache.usage().blocks_used;
    ensure(used == usage.blocks_used, || {
        format!("queries and forks took blocks: {} used before, {used} after", usage.blocks_used)
    })?;
    lab.release(1)?;
    lab.step(&inputs, &how)?;
    lab.check()?;
    Ok(Outcome::Holds)
}

/// Outputs in host memory hold, to the bit, what the same call writes to device memory; what lies
/// between their rows stays as it was, which reading them back checks.
fn host_outputs<B: Device>(backend: &B) -> CaseResult {
    for q_format in FORMATS {
        for q_dtype in DTYPES {
            for lse in [true, false] {
                let run = |outputs| -> Result<_, CaseError> {
                    let room = Room { batch: 1, tokens: 2, gap: 2 };
                    let how = How { q_format, q_dtype, outputs, room, lse, ..How::default() };
                    let mut lab = Lab::new(backend, small().build()?, 16)?;
                    lab.fill(1, 9)?;
                    lab.start(2)?;
                    let prefill = lab.step(&[tokens(1, 12), tokens(2, 3)], &how)?;
                    Ok([prefill, lab.step(&[tokens(2, 1), tokens(1, 1)], &how)?])
                };
                let [host, device] = [run(Place::Host)?, run(Place::Device)?];
                ensure(host == device, || {
                    format!(
                        "{q_format:?}, {q_dtype}, lse {lse}: {host:?}, on the device {device:?}"
                    )
                })?;
            }
        }
    }
    Ok(Outcome::Holds)
}
