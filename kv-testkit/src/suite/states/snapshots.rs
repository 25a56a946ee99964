//! Snapshots: prompts that go on from a state at any length, and from no other's.
use kv_core::backend::AnyBackend;
use kv_core::spec::{StateFormat, StatesBuilder};
use kv_core::{
    Axes, CacheError, CacheSpec, DType, KvCache, KvFormat, StartOptions, StepInput, TensorView,
    TensorViewMut,
};
use kv_quant::row::{decode_row, encode_row};

use super::recurrence::{End, Entry, Recurrence, spec_with};
use crate::case::{At, CaseError, CaseResult, Outcome, ensure, refused};
use crate::device::limited_erased;
use crate::fixture::{check_rows, seq};
use crate::rng::Rng;

/// Returns tokens that differ from those of another seed from the first one on.
fn text(seed: u32, len: u32) -> Vec<u32> {
    (0..len).map(|at| seed * 1000 + at).collect()
}

const SAME: fn(StatesBuilder) -> StatesBuilder =
    |states| states.slots(8).snapshots(128, StateFormat::Same);

pub(super) fn every_length(backend: &AnyBackend) -> CaseResult {
    let states = |states: StatesBuilder| states.slots(8).snapshots(512, StateFormat::Same);
    let mut run = Recurrence::new(backend, spec_with(backend, states, 1024)?)?;
    let (prompt, stops): (_, Vec<_>) = (text(1, 100), (1..=100).collect());
    let none = run.request((&prompt, &[]), StartOptions::default().with_stops(&stops))?;
    ensure(none == 0, || format!("{none} reused in an empty cache"))?;
    for len in 1..=100 {
        // A branch at `len`, inside a block or at its end.
        let branch = [&prompt[..len as usize], &[9, 8, 7]].concat();
        let reused = run.request((&branch, &[6]), StartOptions::default())?;
        ensure(reused == len, || format!("{reused} reused, {len} cached"))?;
    }
    Ok(Outcome::Holds)
}

pub(super) fn turns(backend: &AnyBackend) -> CaseResult {
    // Of prompts shorter than a block, and longer.
    for len in [1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 31, 33] {
        let mut run = Recurrence::new(backend, spec_with(backend, SAME, 256)?)?;
        let mut prompt = text(len, len);
        for turn in 0..4 {
            let mut check = |of: &[u32], more: &[u32], expected: usize| {
                let reused = run.request((of, more), StartOptions::default())?;
                ensure(reused as usize == expected, || {
                    format!("{len} tokens, turn {turn}: {reused} reused, expected {expected}")
                })
            };
            // A turn computes its own tokens alone, and the same prompt again its last one.
            let new = if turn == 0 { prompt.len() } else { 3 };
            let answer = text(100 + turn, 2 + turn);
            check(&prompt, &answer, prompt.len() - new)?;
            check(&prompt, &[], prompt.len() - 1)?;
            prompt = [&prompt[..], &answer, &text(200 + turn, 3)].concat();
        }
    }
    // A grid rounds both down.
    let grid = |states| SAME(states).grid(8);
    let mut run = Recurrence::new(backend, spec_with(backend, grid, 256)?)?;
    let prompt = text(1, 21);
    run.request((&prompt, &text(2, 5)), StartOptions::default())?;
    let reused = run.request((&prompt, &[]), StartOptions::default())?;
    ensure(reused == 16, || format!("{reused} reused on a grid of 8"))?;
    Ok(Outcome::Holds)
}

pub(super) fn branches(backend: &AnyBackend) -> CaseResult {
    let mut run = Recurrence::new(backend, spec_with(backend, SAME, 256)?)?;
    let mut reused = |prompt: &[u32], options| run.request((prompt, &[5]), options);
    let same = |got: u32, expected: u32, what: &str| {
        ensure(got == expected, || format!("{what}: {got} reused, expected {expected}"))
    };
    let options = StartOptions::default;
    // The first prompt that branches off inside a block has the rows and no state there. It leaves
    // one for the next.
    let prompt = text(1, 30);
    let branch = |at: usize, seed| [&prompt[..at], &text(seed, 9)].concat();
    same(reused(&prompt, options())?, 0, "empty")?;
    same(reused(&branch(22, 2), options())?, 0, "the first at a branch")?;
    same(reused(&branch(22, 3), options())?, 22, "the second at a branch")?;
    same(reused(&branch(10, 4), options())?, 0, "before the branch")?;
    same(reused(&branch(10, 5), options())?, 10, "again before the branch")?;
    same(reused(&branch(22, 6), options())?, 22, "the later branch, after a split")?;
    // The last tokens of a template change each turn: the caller names where they begin.
    let chat = text(7, 19);
    let turn = |seed| [&chat[..], &text(seed, 4)].concat();
    same(reused(&turn(8), options().with_stops(&[19]))?, 0, "a template")?;
    same(reused(&turn(9), options().with_stops(&[19]))?, 19, "its next turn")?;
    // Nothing of another tenant.
    let [a, b] = [b"a", b"b"].map(|salt| options().with_salt(salt));
    same(reused(&prompt, a)?, 0, "a tenant")?;
    same(reused(&prompt, b)?, 0, "another tenant")?;
    same(reused(&prompt, a)?, 29, "the same tenant")?;
    // And nothing after it was forgotten.
    let forgotten = run.cache.forget_salt(b"a")?;
    ensure(forgotten > 14, || format!("{forgotten} blocks and snapshots forgotten"))?;
    let mut reused = |prompt: &[u32], options| run.request((prompt, &[5]), options);
    same(reused(&prompt, a)?, 0, "after its salt was forgotten")?;
    same(reused(&prompt, b)?, 29, "the other tenant")?;
    run.cache.forget_prefix(&turn(8), options(), 4)?;
    let mut reused = |prompt: &[u32], options| run.request((prompt, &[5]), options);
    same(reused(&turn(10), options())?, 0, "after the template was forgotten")?;
    // Drafts of 3 after a hit.
    same(reused(&prompt, options())?, 29, "before drafts")?;
    drafts_after_a_hit(backend, &prompt)?;
    // A pinned state outlives all others.
    let pin = run.cache.pin_prefix(&prompt[..29], options());
    ensure(pin.tokens == 29, || format!("{} tokens pinned", pin.tokens))?;
    for seed in 50..200 {
        run.request((&text(seed, 6), &[1]), options())?;
    }
    same(run.request((&prompt, &[]), options())?, 29, "pinned")?;
    ensure(run.cache.unpin(pin.id)?, || "the pin was there".to_owned())?;
    ensure(run.cache.reset_prefixes()?, || "nothing is held".to_owned())?;
    same(run.request((&prompt, &[]), options())?, 0, "after a reset")?;
    Ok(Outcome::Holds)
}

fn drafts_after_a_hit(backend: &AnyBackend, prompt: &[u32]) -> Result<(), CaseError> {
    let states = |states| SAME(states).drafts(3);
    let mut run = Recurrence::new(backend, spec_with(backend, states, 256)?)?;
    run.request((prompt, &[]), StartOptions::default())?;
    for accepted in 1..=4 {
        let reused = run.start_on(seq(1), prompt, StartOptions::default())?;
        ensure(reused as usize == prompt.len() - 1, || format!("{reused} reused"))?;
        let last = prompt[prompt.len() - 1];
        let entry = Entry::new(seq(1), &[last, 70, 71, 72], 3);
        run.step(std::slice::from_ref(&entry), &[], End::RollBack)?;
        run.step(&[entry], &[accepted], End::Accept)?;
        run.check()?;
        run.release(seq(1))?;
        // What was accepted is published, and the rejected drafts are not.
        let longer = [prompt, &[70, 71, 72, 73]].concat();
        let reused = run.request((&longer, &[]), StartOptions::default())?;
        let expected = prompt.len() as u32 - 1 + accepted;
        ensure(reused == expected, || format!("{reused} reused, {expected} accepted"))?;
        run.cache.forget_prefix(&longer, StartOptions::default(), prompt.len() as u32)?;
    }
    Ok(())
}

pub(super) fn rounded(backend: &AnyBackend) -> CaseResult {
    let states = |states: StatesBuilder| states.slots(8).snapshots(16, StateFormat::F16);
    let mut run = Recurrence::new(backend, spec_with(backend, states, 64)?)?;
    let spec = &run.cache.state().spec().states()[0];
    let sizes = (spec.state_bytes(), spec.snapshot_bytes());
    ensure(sizes == (2 * (64 + 96), 2 * (32 + 96)), || format!("{sizes:?} bytes"))?;
    run.keep_as(StateFormat::F16);
    let prompt = text(1, 18);
    run.request((&prompt, &[]), StartOptions::default())?;
    let reused = run.request((&prompt, &[3, 4]), StartOptions::default())?;
    ensure(reused == 17, || format!("{reused} reused"))?;
    Ok(Outcome::Holds)
}

/// Snapshots in blocks of 32 values with a scale: parts in f32 of less than a block, of some with a
/// rest, and of whole blocks; the others are as they were.
pub(super) fn quantised(backend: &AnyBackend) -> CaseResult {
    let states = |states: StatesBuilder| states.slots(8).snapshots(16, StateFormat::Int8);
    let mut run = Recurrence::new(backend, spec_with(backend, states, 64)?)?;
    let spec = &run.cache.state().spec().states()[0];
    let sizes = (spec.state_bytes(), spec.snapshot_bytes());
    ensure(sizes == (2 * (64 + 96), 2 * (272 + 96)), || format!("{sizes:?} bytes"))?;
    run.keep_as(StateFormat::Int8);
    let prompt = text(1, 18);
    run.request((&prompt, &[]), StartOptions::default())?;
    let reused = run.request((&prompt, &[3, 4]), StartOptions::default())?;
    ensure(reused == 17, || format!("{reused} reused"))?;
    for values in [1, 6, 31, 32, 33, 100, 256, 1000, 512 * 3, 32 * 37] {
        one_part(backend, values).at(format!("a part of {values} values"))?;
    }
    // A device that lacks the format has none of the cache.
    let limited = limited_erased(backend, |of| of.with_formats(KvFormat::PLAIN));
    let made = KvCache::new(limited.clone(), spec_with(&limited, states, 64)?);
    refused("a format that the device lacks", made, |error| {
        error.to_string().contains("format q8_0 of ")
    })?;
    Ok(Outcome::Holds)
}

/// Keeps one part in a snapshot, and compares what a sequence reads that goes on from it with the
/// definition of the format.
fn one_part(backend: &AnyBackend, values: usize) -> Result<(), CaseError> {
    let dim = crate::device::dim(backend, 4);
    let spec = CacheSpec::builder().layers(2).kv_heads(1).head_dim(dim).paged(4, 8);
    let spec = spec.states([1], |states| {
        let states = states.slots(4).snapshots(4, StateFormat::Int8);
        states.part([values as u32], DType::F32)
    });
    let mut cache = KvCache::new(backend.clone(), spec.build().map_err(CacheError::from)?)?;
    let (prompt, state) = (text(1, 5), Rng::new(values as u64).normals(values));
    let dims = [1, values as u32];
    cache.start(seq(1), &prompt, StartOptions::default())?;
    let mut step = cache.begin_step(&[StepInput::tokens(seq(1), &prompt)])?;
    let rows = vec![0.5_f32; 5 * dim as usize];
    let rows = TensorView::host(&rows, &[5, 1, dim]);
    step.write(0, rows, rows, Axes::Thd)?;
    step.write_state(1, 0, TensorView::host(&state, &dims))?;
    step.commit()?;
    cache.release(seq(1))?;
    let longer = [&prompt[..], &[9]].concat();
    let reused = cache.start(seq(2), &longer, StartOptions::default())?;
    ensure(reused == 5, || format!("{reused} reused"))?;
    let mut step = cache.begin_step(&[StepInput::idle(seq(2))])?;
    let mut got = vec![0.0_f32; values];
    step.read_state(1, 0, TensorViewMut::host(&mut got, &dims))?;
    let mut stored = vec![0; KvFormat::Q8_0.row_bytes(values as u32) as usize];
    encode_row(KvFormat::Q8_0, 1.0, &state, &mut stored);
    let mut expected = state.clone();
    decode_row(KvFormat::Q8_0, 1.0, &stored, &mut expected);
    ensure(expected != state, || "nothing was rounded".to_owned())?;
    check_rows(&got, &expected, values)
}
