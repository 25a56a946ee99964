//! Recurrent states: a recurrence in integers, whose every value depends on all tokens before it.
//!
//! The state of a sequence is computed from the one that the cache returns, never from the model,
//! so that a state which is stale, of another sequence, or at another length stays wrong for good.
use std::collections::BTreeMap;

use kv_core::backend::{AnyBackend, Backend, PlaneRole, Queue};
use kv_core::error::PlanError;
use kv_core::spec::StatesBuilder;
use kv_core::{
    Axes, CacheError, CacheSpec, DType, GroupId, KvCache, SequenceId, StartOptions, Step,
    StepInput, TensorView, TensorViewMut,
};

use super::case;
use crate::case::{At, Case, CaseError, CaseResult, Outcome, ensure, refused};
use crate::device::fetch;
use crate::fault::{FaultInjector, FaultKind};
use crate::fixture::seq;
use crate::rng::Rng;
use crate::tokens::Tensor;

pub(super) fn cases() -> Vec<Case> {
    vec![
        case("states/steps_of_any_length", lengths),
        case("states/drafts", drafts),
        case("states/random_operations", random),
        case("states/slots_in_place", in_place),
        case("states/wiped_slots_are_zero", wipe),
        case("states/refusals", refusals),
    ]
}

/// Layers of the model: 0 has rows, 1 and 2 a state of two parts, 3 rows and a state of one part.
const LAYERS: u16 = 4;
/// Layer, part, extents, element type and modulus: integers below it are exact in the type.
const PARTS: [(u16, usize, &[u32], DType, u32); 5] = [
    (1, 0, &[3, 2], DType::F32, 1 << 24),
    (1, 1, &[2, 5, 4], DType::Bf16, 251),
    (2, 0, &[3, 2], DType::F32, 1 << 24),
    (2, 1, &[2, 5, 4], DType::Bf16, 251),
    (3, 0, &[7], DType::F16, 2039),
];

fn spec(backend: &AnyBackend, slots: u32, drafts: u32) -> Result<CacheSpec, CaseError> {
    let dim = crate::device::dim(backend, 4);
    let both = move |states: StatesBuilder| states.slots(slots).drafts(drafts);
    let spec = CacheSpec::builder().layers(LAYERS).kv_heads(1).head_dim(dim).paged(4, 64);
    let spec = spec.group([3], |group| group.paged(4, 64));
    let spec = spec.states([1, 2], |states| {
        both(states).part([3, 2], DType::F32).part([2, 5, 4], DType::Bf16)
    });
    Ok(spec
        .states([3], |states| both(states).part([7], DType::F16))
        .build()
        .map_err(CacheError::from)?)
}

/// Returns the value after a token, from the one before.
fn next(before: u32, token: u32, index: usize, modulus: u32) -> u32 {
    let mixed = u64::from(before) * 31 + u64::from(token) * 7 + index as u64 * 3 + 1;
    (mixed % u64::from(modulus)) as u32
}

/// Returns the state of a part behind some tokens.
fn expected(part: usize, tokens: &[u32]) -> Vec<u32> {
    let (_, _, shape, _, modulus) = PARTS[part];
    let values = shape.iter().product::<u32>() as usize;
    let start = vec![0; values];
    tokens.iter().fold(start, |state, token| {
        let each = state.iter().enumerate();
        each.map(|(index, value)| next(*value, *token, index + part, modulus)).collect()
    })
}

/// A cache with states, and the tokens that its sequences must stand for.
struct Recurrence<'a> {
    backend: &'a AnyBackend,
    cache: KvCache,
    texts: BTreeMap<SequenceId, Vec<u32>>,
}

/// The end of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Commit,
    Accept,
    RollBack,
    Leak,
    /// Held between all calls, then committed.
    Hold,
}

impl<'a> Recurrence<'a> {
    fn new(backend: &'a AnyBackend, spec: CacheSpec) -> Result<Self, CaseError> {
        let cache = KvCache::new(backend.clone(), spec)?;
        Ok(Self { backend, cache, texts: BTreeMap::new() })
    }

    fn start(&mut self, sequence: SequenceId) -> Result<(), CaseError> {
        let reused = self.cache.start(sequence, &[1, 2, 3], StartOptions::default())?;
        ensure(reused == 0, || format!("{reused} tokens reused without a state"))?;
        self.texts.insert(sequence, Vec::new());
        Ok(())
    }

    /// Runs a step: sequences with their new tokens, and the number of these that are drafts. With
    /// [`End::Accept`], entry `i` keeps `accepted[i]` tokens.
    fn step(&mut self, entries: &[Entry], accepted: &[u32], end: End) -> Result<(), CaseError> {
        let inputs: Vec<_> = entries.iter().map(Entry::input).collect();
        let Self { backend, cache, texts } = self;
        let mut step = cache.begin_step(&inputs)?;
        let count: usize = entries.iter().map(|entry| entry.tokens.len()).sum();
        let dim = crate::device::dim(*backend, 4);
        let rows = vec![0.5_f32; count * dim as usize];
        let rows = TensorView::host(&rows, &[count as u32, 1, dim]);
        if count > 0 {
            step.write(3, rows, rows, Axes::Thd)?;
            step.write(0, rows, rows, Axes::Thd)?;
        }
        for part in 0..PARTS.len() {
            read_and_write(backend, &mut step, texts, (entries, part))?;
            if end == End::Hold {
                step.hold();
                step = cache.held().ok_or("the step is not held")?;
            }
        }
        match end {
            End::Commit | End::Hold => step.commit()?,
            End::Accept => step.commit_accepted(accepted)?,
            End::RollBack => step.roll_back(),
            End::Leak => std::mem::forget(step),
        }
        for (at, Entry { sequence, tokens, .. }) in entries.iter().enumerate() {
            let kept = match end {
                End::Commit | End::Hold => tokens.len(),
                End::Accept => accepted[at] as usize,
                End::RollBack | End::Leak => 0,
            };
            texts.entry(*sequence).or_default().extend(&tokens[..kept]);
        }
        Ok(())
    }

    /// Reads every state in a step without new tokens.
    fn check(&mut self) -> Result<(), CaseError> {
        let entries: Vec<_> = self.texts.keys().map(|id| Entry::new(*id, &[], 0)).collect();
        for (sequence, text) in &self.texts {
            let len = self.cache.state().seq_len(*sequence);
            ensure(len == Some(text.len() as u32), || format!("{sequence}: {len:?} tokens"))?;
        }
        self.step(&entries, &[], End::RollBack)
    }
}

/// One sequence in a step.
#[derive(Debug, Clone)]
struct Entry {
    sequence: SequenceId,
    tokens: Vec<u32>,
    drafts: u32,
}

impl Entry {
    fn new(sequence: SequenceId, tokens: &[u32], drafts: u32) -> Self {
        Self { sequence, tokens: tokens.to_vec(), drafts }
    }
    fn input(&self) -> StepInput<'_> {
        if self.tokens.is_empty() {
            return StepInput::idle(self.sequence);
        }
        StepInput::tokens(self.sequence, &self.tokens).with_drafts(self.drafts)
    }
}

/// Compares the states of one part with the model, and writes those behind the new tokens.
fn read_and_write(
    backend: &AnyBackend,
    step: &mut Step<'_>,
    texts: &BTreeMap<SequenceId, Vec<u32>>,
    (entries, part): (&[Entry], usize),
) -> Result<(), CaseError> {
    let (layer, number, shape, dtype, modulus) = PARTS[part];
    let values = shape.iter().product::<u32>() as usize;
    // One entry more than the step has, which stays as it is.
    let dims: Vec<_> = [entries.len() as u32 + 1].iter().chain(shape).copied().collect();
    let out = Tensor::filled(dtype, (entries.len() + 1) * values, 9.0);
    let size = out.bytes().len() as u64;
    let buffer = backend.alloc(size)?;
    step.queue_mut().upload(&buffer, 0, out.bytes())?;
    step.read_state(layer, number, TensorViewMut::device(dtype, &buffer, 0, &dims))?;
    let bytes = fetch(backend.capabilities(), step.queue_mut(), &buffer, (0, size))?;
    let read = Tensor::from_bytes(dtype, &bytes).values();
    let (states, rest) = read.split_at(entries.len() * values);
    ensure(rest.iter().all(|x| *x == 9.0), || format!("part {part}: written past the batch"))?;
    let mut states: Vec<Vec<u32>> =
        states.chunks(values).map(|state| state.iter().map(|x| *x as u32).collect()).collect();
    for (Entry { sequence, .. }, state) in entries.iter().zip(&states) {
        let right = expected(part, &texts[sequence]);
        ensure(*state == right, || {
            format!("part {part} of {sequence}: {state:?}, expected {right:?}")
        })?;
    }
    let most = entries.iter().map(|entry| entry.tokens.len()).max().unwrap_or(0);
    for tokens in 1..=most {
        for (entry, state) in entries.iter().zip(&mut states) {
            if let Some(token) = entry.tokens.get(tokens - 1) {
                let each = state.iter().enumerate();
                *state = each.map(|(i, x)| next(*x, *token, i + part, modulus)).collect();
            }
        }
        // In f32, whatever the cache keeps.
        let all: Vec<_> = states.iter().flatten().map(|value| *value as f32).collect();
        let dims: Vec<_> = [entries.len() as u32].iter().chain(shape).copied().collect();
        let all = TensorView::host(&all, &dims);
        let is_kept = |entry: &Entry| entry.tokens.len() - tokens <= entry.drafts as usize;
        if entries.iter().any(|entry| entry.tokens.len() > tokens && is_kept(entry)) {
            step.write_state_after(layer, number, tokens as u32, all)?;
        }
        if tokens == most {
            step.write_state(layer, number, all)?;
        }
    }
    Ok(())
}

fn lengths(backend: &AnyBackend) -> CaseResult {
    let mut run = Recurrence::new(backend, spec(backend, 16, 0)?)?;
    let mut rng = Rng::new(1);
    for id in 1..=3 {
        run.start(seq(id))?;
    }
    // Steps of 1, 7 and 64 tokens, in mixed batches and any order of sequences.
    for lens in [[1, 7, 64], [7, 0, 1], [64, 1, 0], [0, 1, 1], [1, 1, 1]] {
        let mut entries: Vec<_> = (1..=3)
            .zip(lens)
            .map(|(id, len)| {
                let tokens: Vec<_> = (0..len).map(|_| rng.below(1000)).collect();
                Entry::new(seq(id), &tokens, 0)
            })
            .collect();
        entries.rotate_left(rng.below(3) as usize);
        run.step(&entries, &[], End::Commit)?;
        run.check().at(format!("{lens:?}"))?;
    }
    // A fork shares the state, and each goes on alone.
    run.cache.fork(seq(1), seq(9))?;
    let text = run.texts[&seq(1)].clone();
    run.texts.insert(seq(9), text);
    run.step(&[Entry::new(seq(9), &[5], 0), Entry::new(seq(1), &[6, 7], 0)], &[], End::Commit)?;
    run.cache.release(seq(1))?;
    run.texts.remove(&seq(1));
    run.step(&[Entry::new(seq(9), &[8], 0)], &[], End::Commit)?;
    run.check()?;
    // Nothing is left of it where a sequence begins, or begins again.
    run.cache.truncate(seq(9), 0)?;
    run.texts.insert(seq(9), Vec::new());
    run.start(seq(1))?;
    run.check()?;
    run.step(&[Entry::new(seq(9), &[3], 0), Entry::new(seq(1), &[4], 0)], &[], End::Hold)?;
    run.check()?;
    Ok(Outcome::Holds)
}

fn drafts(backend: &AnyBackend) -> CaseResult {
    let mut run = Recurrence::new(backend, spec(backend, 16, 3)?)?;
    run.start(seq(1))?;
    run.start(seq(2))?;
    for accepted in 1..=4 {
        // Beside a prompt without drafts, and a sequence of which every token is one.
        run.start(seq(3))?;
        let entries = [
            Entry::new(seq(1), &[10 + accepted, 2, 3, 4], 3),
            Entry::new(seq(3), &[5, 6, 7, 8, 9, 10, 11], 0),
            Entry::new(seq(2), &[7, 8], 2),
        ];
        for end in [End::RollBack, End::Leak] {
            run.step(&entries, &[], end)?;
            run.check().at(format!("{end:?}"))?;
        }
        run.step(&entries, &[accepted, 7, accepted % 3], End::Accept)?;
        run.check().at(format!("{accepted} accepted"))?;
        run.cache.release(seq(3))?;
        run.texts.remove(&seq(3));
    }
    Ok(Outcome::Holds)
}

fn random(backend: &AnyBackend) -> CaseResult {
    for seed in 0..4 {
        let faults = FaultInjector::new(backend.clone());
        let device = AnyBackend::new(faults.clone());
        let mut run = Recurrence::new(&device, spec(backend, 20, 2)?)?;
        let mut rng = Rng::new(seed);
        for operation in 0..120 {
            operate(&mut run, &faults, &mut rng)
                .at(format!("seed {seed}, operation {operation}"))?;
        }
    }
    Ok(Outcome::Holds)
}

fn operate(
    run: &mut Recurrence<'_>,
    faults: &FaultInjector<AnyBackend>,
    rng: &mut Rng,
) -> Result<(), CaseError> {
    let known: Vec<_> = run.texts.keys().copied().collect();
    let id = seq(u64::from(rng.below(8)));
    match rng.below(10) {
        0 | 1 if !known.contains(&id) => run.start(id)?,
        2 if !known.is_empty() && !known.contains(&id) => {
            let parent = rng.pick(&known);
            run.cache.fork(parent, id)?;
            let text = run.texts[&parent].clone();
            run.texts.insert(id, text);
        }
        3 if known.contains(&id) && rng.one_in(2) => {
            run.cache.release(id)?;
            run.texts.remove(&id);
        }
        4 if known.contains(&id) => {
            let len = run.texts[&id].len() as u32;
            let to = rng.below(len + 1);
            let truncated = run.cache.truncate(id, to);
            if to == 0 || to == len {
                truncated?;
                run.texts.get_mut(&id).ok_or("a known text")?.truncate(to as usize);
            } else {
                refused("truncate", truncated, |error| {
                    matches!(error, CacheError::Plan(PlanError::StateMissing { .. }))
                })?;
            }
        }
        _ => step_of_some(run, faults, rng, known)?,
    }
    if rng.one_in(4) { run.check() } else { Ok(()) }
}

fn step_of_some(
    run: &mut Recurrence<'_>,
    faults: &FaultInjector<AnyBackend>,
    rng: &mut Rng,
    mut known: Vec<SequenceId>,
) -> Result<(), CaseError> {
    let mut entries = Vec::new();
    while !known.is_empty() && entries.len() < 4 && !rng.one_in(4) {
        let id = known.swap_remove(rng.below(known.len() as u32) as usize);
        let tokens: Vec<_> = (0..rng.below(6)).map(|_| rng.below(1000)).collect();
        let drafts = rng.below(3).min(tokens.len() as u32);
        entries.push(Entry::new(id, &tokens, drafts));
    }
    let ends = [End::Commit, End::Accept, End::RollBack, End::Leak, End::Hold];
    let end = rng.pick(&ends);
    // What is not a draft stays.
    let accepted: Vec<_> = entries
        .iter()
        .map(|Entry { tokens, drafts, .. }| tokens.len() as u32 - rng.below(drafts + 1))
        .collect();
    if rng.one_in(3) {
        faults.fail(u64::from(rng.below(40)), rng.pick(&FaultKind::ALL));
    }
    let done = run.step(&entries, &accepted, end);
    let has_failed = faults.clear();
    match done {
        // A step with too few slots or blocks changes nothing, nor does a device that fails.
        Err(CaseError::Cache(CacheError::Exhausted(_))) => run.check(),
        Err(CaseError::Cache(CacheError::Device(_))) if has_failed => run.check(),
        done => done,
    }
}

/// A kernel of the caller that works in place: copies the bytes of a slot itself.
fn in_place(backend: &AnyBackend) -> CaseResult {
    let mut run = Recurrence::new(backend, spec(backend, 4, 1)?)?;
    run.start(seq(1))?;
    run.step(&[Entry::new(seq(1), &[11, 12], 0)], &[], End::Commit)?;
    let group = GroupId(2);
    let inputs = [Entry::new(seq(1), &[13, 14], 1)];
    let mut step = run.cache.begin_step(&[inputs[0].input()])?;
    let slots = step.state_slots(1)?;
    ensure((slots.group(), slots.layer()) == (group, 0), || format!("{slots:?}"))?;
    let (read, after, last) = (slots.read(0), slots.write_after(0, 1), slots.write(0));
    let (after, last) = after.zip(last).ok_or("a draft has two states")?;
    ensure(after != last && ![after, last].contains(&read), || format!("{after} {last} {read}"))?;
    ensure(slots.write_after(0, 3).is_none(), || "a slot behind no token".to_owned())?;
    for (layer, index) in [(1, 0), (2, 1)] {
        for part in [0, 1] {
            let storage = step.cache().storage(group).ok_or("states have planes")?;
            let plane = storage.plane(index, PlaneRole::State(part)).ok_or("a part has a plane")?;
            let bytes = plane.layout().block_bytes();
            let (from, begin) = plane.layout().locate(read);
            let from = plane.segment(from).ok_or("a slot has a segment")?.clone();
            let (to, end) = plane.layout().locate(after);
            let to = plane.segment(to).ok_or("a slot has a segment")?.clone();
            let state = fetch(backend.capabilities(), step.queue_mut(), &from, (begin, bytes))?;
            step.queue_mut().upload(&to, end, &state)?;
        }
        step.mark_state_written(layer)?;
    }
    step.mark_written();
    step.commit_accepted(&[1])?;
    // The kernel has made the state behind the token that of before.
    let (first, rest) = run.texts[&seq(1)].split_at(2);
    ensure(rest.is_empty(), || "a token more".to_owned())?;
    let first = first.to_vec();
    let read = |step: &mut Step<'_>, part: usize| -> Result<Vec<u32>, CaseError> {
        let (layer, number, shape, dtype, _) = PARTS[part];
        let values = shape.iter().product::<u32>() as usize;
        let buffer = backend.alloc((values * dtype.size()) as u64)?;
        let dims: Vec<_> = [1].iter().chain(shape).copied().collect();
        step.read_state(layer, number, TensorViewMut::device(dtype, &buffer, 0, &dims))?;
        let size = (values * dtype.size()) as u64;
        let bytes = fetch(backend.capabilities(), step.queue_mut(), &buffer, (0, size))?;
        let values = Tensor::from_bytes(dtype, &bytes).values();
        Ok(values.iter().map(|x| *x as u32).collect())
    };
    let mut step = run.cache.begin_step(&[StepInput::idle(seq(1))])?;
    for part in 0..4 {
        let got = read(&mut step, part)?;
        ensure(got == expected(part, &first), || format!("part {part}: {got:?}"))?;
    }
    Ok(Outcome::Holds)
}

fn wipe(backend: &AnyBackend) -> CaseResult {
    let dim = crate::device::dim(backend, 4);
    let spec = CacheSpec::builder().layers(2).kv_heads(1).head_dim(dim).paged(4, 8);
    let spec = spec.states([1], |states| states.part([8], DType::F32).slots(2));
    let spec = spec.wipe_on_release(true).build().map_err(CacheError::from)?;
    let mut cache = KvCache::new(backend.clone(), spec)?;
    cache.start(seq(1), &[], StartOptions::default())?;
    let mut step = cache.begin_step(&[StepInput::count(seq(1), 1)])?;
    let rows = vec![1.0_f32; dim as usize];
    let rows = TensorView::host(&rows, &[1, 1, dim]);
    step.write(0, rows, rows, Axes::Thd)?;
    step.write_state(1, 0, TensorView::host(&[3.0_f32; 8], &[1, 8]))?;
    let slot = step.state_slots(1)?.write(0).ok_or("a token has a state")?;
    step.commit()?;
    let bytes = |cache: &mut KvCache| -> Result<Vec<u8>, CaseError> {
        let plane = cache.storage(GroupId(1)).and_then(|of| of.plane(0, PlaneRole::State(0)));
        let plane = plane.ok_or("the state has a plane")?;
        let (segment, begin) = plane.layout().locate(slot);
        let buffer = plane.segment(segment).ok_or("a slot has a segment")?.clone();
        Ok(fetch(backend.capabilities(), cache.queue_mut(), &buffer, (begin, 32))?)
    };
    let written = Tensor::filled(DType::F32, 8, 3.0);
    ensure(bytes(&mut cache)? == written.bytes(), || "the state was not written".to_owned())?;
    cache.release(seq(1))?;
    cache.wipe()?;
    ensure(bytes(&mut cache)? == [0; 32], || "a state outlives its sequence".to_owned())?;
    Ok(Outcome::Holds)
}

fn refusals(backend: &AnyBackend) -> CaseResult {
    let mut run = Recurrence::new(backend, spec(backend, 4, 1)?)?;
    run.start(seq(1))?;
    run.step(&[Entry::new(seq(1), &[1, 2, 3], 0)], &[], End::Commit)?;
    let (six, bad) = ([0.5_f32; 16], |error: CacheError| match error {
        CacheError::Plan(error) => Some(error),
        _ => None,
    });
    let mut step = run.cache.begin_step(&[StepInput::tokens(seq(1), &[4, 5]).with_drafts(1)])?;
    let good = TensorView::host(&six, &[1, 3, 2]);
    let mut write = |layer: u16, part, tokens: Option<u32>, view: TensorView<'_, _>| {
        let done = match tokens {
            None => step.write_state(layer, part, view),
            Some(tokens) => step.write_state_after(layer, part, tokens, view),
        };
        done.err().and_then(bad)
    };
    let expect = |got: Option<PlanError>, what: &str, fits: fn(&PlanError) -> bool| {
        ensure(got.as_ref().is_some_and(fits), || format!("{what}: {got:?}"))
    };
    expect(write(0, 0, None, good), "no state", |e| matches!(e, PlanError::NoState { .. }))?;
    expect(write(4, 0, None, good), "no layer", |e| matches!(e, PlanError::UnknownLayer { .. }))?;
    expect(write(1, 2, None, good), "no part", |e| matches!(e, PlanError::UnknownPart { .. }))?;
    expect(write(1, 0, Some(0), good), "0 tokens", |e| matches!(e, PlanError::Option { .. }))?;
    expect(write(1, 0, Some(3), good), "3 of 2", |e| matches!(e, PlanError::TooMany { .. }))?;
    for dims in [&[1, 2, 3][..], &[0, 3, 2], &[1, 6], &[1, 3, 2, 1]] {
        let view = TensorView::host(&six, dims);
        expect(write(1, 0, None, view), "shape", |e| matches!(e, PlanError::Shape { .. }))?;
    }
    let short = TensorView::host(&six[..5], &[1, 3, 2]);
    expect(write(1, 0, None, short), "bytes", |e| matches!(e, PlanError::TensorBytes { .. }))?;
    let integers = TensorView::host_bytes(DType::U32, &[0; 64], &[1, 3, 2]);
    expect(write(1, 0, None, integers), "type", |e| matches!(e, PlanError::ElementType { .. }))?;
    let gaps = good.with_outer_strides([8, 2]);
    expect(write(1, 0, None, gaps), "gaps", |e| matches!(e, PlanError::NotDense { .. }))?;
    let rows = TensorView::host(&six, &[2, 1, 8]);
    let of_rows = step.write(1, rows, rows, Axes::Thd).err().and_then(bad);
    expect(of_rows, "rows of a state", |e| matches!(e, PlanError::NoRows { .. }))?;
    drop(step);
    unwritten(&mut run)?;
    // More drafts than the states allow, and more sequences than there are slots.
    let draft = [Entry::new(seq(1), &[4, 5, 6], 2)];
    refused("two drafts", run.cache.begin_step(&[draft[0].input()]), |error| {
        matches!(error, CacheError::Plan(PlanError::TooMany { got: 2, max: 1, .. }))
    })?;
    run.check()?;
    for id in [2, 3, 4] {
        run.start(seq(id))?;
    }
    let many = [2, 3, 4, 1].map(|id| Entry::new(seq(id), &[1], 0));
    let inputs = many.each_ref().map(Entry::input);
    refused("four states in three slots", run.cache.begin_step(&inputs), |error| {
        matches!(error, CacheError::Exhausted(of)
            if (of.group, of.needed, of.free) == (GroupId(2), 4, 3))
    })?;
    run.check()?;
    run.step(&many[..3], &[], End::Commit)?;
    run.check()?;
    Ok(Outcome::Holds)
}

/// A commit names the state that it lacks, and changes nothing.
fn unwritten(run: &mut Recurrence<'_>) -> Result<(), CaseError> {
    let dim = crate::device::dim(run.backend, 4);
    let rows = vec![0.5_f32; 2 * dim as usize];
    let rows = TensorView::host(&rows, &[2, 1, dim]);
    for (accepted, lacks) in [(None, 2), (Some(2), 2), (Some(1), 1)] {
        let input = StepInput::tokens(seq(1), &[4, 5]).with_drafts(1);
        let mut step = run.cache.begin_step(&[input])?;
        step.write(3, rows, rows, Axes::Thd)?;
        step.write(0, rows, rows, Axes::Thd)?;
        for (part, (layer, number, shape, _, _)) in PARTS.into_iter().enumerate() {
            let values = vec![0.5_f32; shape.iter().product::<u32>() as usize];
            let dims: Vec<_> = [1].iter().chain(shape).copied().collect();
            let state = TensorView::host(&values, &dims);
            // Of the third part, only the other state.
            if part != 2 || lacks == 1 {
                step.write_state(layer, number, state)?;
            }
            if part != 2 || lacks == 2 {
                step.write_state_after(layer, number, 1, state)?;
            }
        }
        let committed = match accepted {
            None => step.commit(),
            Some(accepted) => step.commit_accepted(&[accepted]),
        };
        let expected =
            PlanError::StateUnwritten { layer: 2.into(), part: 0, sequence: seq(1), tokens: lacks };
        let fits = |error: &CacheError| matches!(error, CacheError::Plan(got) if *got == expected);
        refused("commit", committed, fits)?;
        run.check().at(format!("{accepted:?} accepted"))?;
    }
    Ok(())
}
