//! Reused blocks to the bit: which bytes are shared, which are wiped, which are kept apart.
use kv_core::backend::{AnyBackend, Backend, Plane};
use kv_core::{Axes, CacheSpec, GroupId, KvFormat, ScaleGroup, StepInput};

use super::super::{case, scale, small};
use super::prompts::Prompts;
use super::{plain, tokens, with};
use crate::case::{At, Case, CaseError, CaseResult, Outcome, ensure, same};
use crate::device::{Place, Staged};
use crate::fixture::{dense, seq};
use crate::provenance;

pub(super) fn cases() -> Vec<Case> {
    vec![
        case("reuse/quantised_rows_are_the_same_bits", quantised),
        case("reuse/wiped_when_evicted", wiped),
        case("reuse/salts_adapters_and_contents", apart),
    ]
}

/// Returns the rows of the first `len` tokens, as bits.
fn bits(prompts: &mut Prompts, id: u64, len: usize) -> Result<Vec<Vec<u32>>, CaseError> {
    let mut all = Vec::new();
    for layer in 0..prompts.spec.num_layers() {
        for plane in [Plane::Key, Plane::Value] {
            let made = (dense(Axes::Thd, &[len], [2, 32]), kv_core::DType::F32);
            let queue = prompts.cache.queue_mut();
            let mut out = Staged::output(&prompts.backend, queue, made, Place::Device)?;
            let range = [(seq(id), 0, len as u32)];
            prompts.cache.gather(layer, plane, &range, out.view_mut(), Axes::Thd)?;
            let capabilities = prompts.backend.capabilities().clone();
            let rows = out.read(&capabilities, prompts.cache.queue_mut())?.values();
            all.push(rows.into_iter().map(f32::to_bits).collect());
        }
    }
    Ok(all)
}

fn quantised(backend: &AnyBackend) -> CaseResult {
    let formats = [KvFormat::F16, KvFormat::Q8_0, KvFormat::L4(ScaleGroup::Row)];
    for format in formats {
        for (full_precision_prefix, tail) in [(0, false), (3, false), (2, true)] {
            if tail && !format.is_quantised() {
                continue;
            }
            let spec = CacheSpec::builder().layers(2).kv_heads(2).head_dim(32).format(format);
            let spec = spec
                .transform(kv_core::spec::Transform::Off)
                .full_precision_prefix(full_precision_prefix)
                .tail(tail);
            let mut prompts = Prompts::new(backend, spec.paged(8, 24))?;
            let place = format!("{format}, {full_precision_prefix} wide rows, tail: {tail}");
            let spec = prompts.spec.clone();
            let prompt = tokens(0..30);
            let mut first = Vec::new();
            for (id, prompt) in [(1, prompt.clone()), (2, with(tokens(0..26), &[70, 71]))] {
                let reused = prompts.cache.start(seq(id), &prompt, plain())?;
                ensure((reused > 8) == (id == 2), || format!("{place}: {reused} tokens"))?;
                if id == 2 {
                    let got = bits(&mut prompts, 2, reused as usize).at(&place)?;
                    let row = |bits: &Vec<u32>| bits[..reused as usize * 64].to_vec();
                    let expected: Vec<_> = first.iter().map(row).collect();
                    ensure(got == expected, || format!("{place}: other bits"))?;
                }
                let hashes = provenance::prefix_hashes(&prompt, &plain());
                let input = StepInput::prompt(seq(id), &prompt);
                let mut step = prompts.cache.begin_step(&[input]).at(&place)?;
                provenance::write(&mut step, &spec, &hashes[reused as usize..])?;
                step.commit()?;
                if id == 1 {
                    first = bits(&mut prompts, 1, 30)?;
                }
            }
            ensure(bits(&mut prompts, 1, 30)? == first, || format!("{place}: the donor changed"))?;
        }
    }
    Ok(Outcome::Holds)
}

fn wiped(backend: &AnyBackend) -> CaseResult {
    let mut prompts = Prompts::new(backend, small().paged(4, 5).wipe_on_release(true))?;
    let stale = |prompts: &mut Prompts| -> Result<usize, CaseError> {
        let all = scale::bytes(&mut prompts.cache, GroupId(0))?;
        Ok(all.iter().flatten().filter(|byte| **byte != 0).count())
    };
    prompts.begin(1, &tokens(0..16), plain())?;
    prompts.cache.release(seq(1))?;
    ensure(stale(&mut prompts)? > 0, || "what is cached was wiped".to_owned())?;
    let row = 2 * 2 * 8 * 2 * 4;
    prompts.begin(2, &[90], plain())?;
    prompts.begin(3, &[91], plain())?;
    prompts.begin(4, &[92], plain())?;
    let left = stale(&mut prompts)?;
    // Two of the four cached blocks were evicted; each holds one row now.
    ensure(left <= 8 * row + 3 * row, || format!("{left} bytes hold something"))?;
    for id in 2..5 {
        prompts.cache.release(seq(id))?;
    }
    ensure(prompts.cache.reset_prefixes()?, || "a reset was refused".to_owned())?;
    same("bytes left by a reset", stale(&mut prompts)?, 0)?;
    Ok(Outcome::Holds)
}

fn apart(backend: &AnyBackend) -> CaseResult {
    let mut prompts = Prompts::new(backend, small().paged(4, 64))?;
    let span = |id| [kv_core::reuse::ContentSpan { begin: 5, len: 2, id }];
    let (cat, dog, bird) = (span(1), span(2), span(3));
    let all = [
        (plain(), 0),
        (plain().with_salt(b"t1"), 0),
        (plain().with_salt(b"t2"), 0),
        (plain().with_adapter(1), 0),
        (plain().with_salt(b"t1").with_adapter(1), 0),
        // Up to the beginning of the picture.
        (plain().with_contents(&cat), 5),
        (plain().with_contents(&dog), 5),
    ];
    for ((options, expected), id) in all.iter().zip(0..) {
        let got = prompts.begin(id, &tokens(0..14), *options)?;
        same(format!("tokens of others with {options:?}"), got, *expected)?;
    }
    for ((options, _), id) in all.iter().zip(100..) {
        let got = prompts.begin(id, &tokens(0..14), *options)?;
        ensure(got >= 12, || format!("{got} tokens of its own with {options:?}"))?;
    }
    // A partly filled block with tokens of the picture is reused with the same picture only.
    let mut other = tokens(0..9);
    other[7] = 999;
    for (contents, expected, id) in [(&cat, 7, 200), (&bird, 5, 201)] {
        let got = prompts.begin(id, &other, plain().with_contents(contents))?;
        same(format!("tokens of a part with {contents:?}"), got, expected)?;
    }
    Ok(Outcome::Holds)
}
