//! Slots of running sequences: steps, forks, drafts, kernels in place, wipes, refusals.
use kv_core::backend::{AnyBackend, Backend, PlaneRole, Queue};
use kv_core::error::PlanError;
use kv_core::{
    Axes, CacheError, CacheSpec, DType, GroupId, KvCache, StartOptions, Step, StepInput,
    TensorView, TensorViewMut,
};

use super::recurrence::{End, Entry, PARTS, Recurrence, expected, spec};
use crate::case::{At, CaseError, CaseResult, Outcome, ensure, refused};
use crate::device::fetch;
use crate::fixture::seq;
use crate::rng::Rng;
use crate::tokens::Tensor;

pub(super) fn lengths(backend: &AnyBackend) -> CaseResult {
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
    run.release(seq(1))?;
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

pub(super) fn drafts(backend: &AnyBackend) -> CaseResult {
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
        run.release(seq(3))?;
    }
    Ok(Outcome::Holds)
}

/// A kernel of the caller that works in place: copies the bytes of a slot itself.
pub(super) fn in_place(backend: &AnyBackend) -> CaseResult {
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

pub(super) fn wipe(backend: &AnyBackend) -> CaseResult {
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

pub(super) fn refusals(backend: &AnyBackend) -> CaseResult {
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
    // One axis more than a tensor has, of a part with three.
    let forty = [0.0_f32; 80];
    let five = TensorView::host(&forty, &[1, 2, 5, 4, 2]);
    expect(write(1, 1, None, five), "axes", |e| matches!(e, PlanError::Shape { .. }))?;
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
