//! The life cycle of sequences and steps, and refused calls.
use kv_core::backend::{AnyBackend, AnyBuffer, Backend};
use kv_core::error::{DeviceErrorKind, PlanError};
use kv_core::{
    AttentionOptions, Axes, CacheError, DType, KvCache, KvFormat, LayerId, StartOptions, StepInput,
    TensorView, TensorViewMut,
};

use super::{case, small};
use crate::case::{At, Case, CaseError, CaseResult, Outcome, device_error, ensure, refused, same};
use crate::device::{Place, Staged, limited_erased};
use crate::fixture::{CacheFixture, Finish, StepConfig, StepKind, dense, seq, unchanged};

pub(super) fn cases() -> Vec<Case> {
    vec![
        case("cache/rolled_back_steps_change_nothing", roll_back),
        case("cache/commit_names_unwritten_layers", unwritten),
        case("cache/attend_before_write_is_refused", attend_first),
        case("cache/layers_in_any_order", any_order),
        case("cache/token_ids_or_counts", token_ids),
        case("cache/truncate_then_regrow", regrow),
        case("cache/release_and_reuse", reuse),
        case("cache/reset_forgets_all", reset),
        case("cache/exhaustion_changes_nothing", exhaustion),
        case("cache/refusals_change_nothing", refusals),
        case("cache/unsupported_head_dims_are_refused", head_dims),
        case("cache/unsupported_formats_are_refused", formats),
        case("cache/host_tensors_alone", host_tensors),
    ]
}

fn tokens(id: u64, n: u32) -> (u64, StepKind) {
    (id, StepKind::Tokens(n))
}

fn roll_back(backend: &AnyBackend) -> CaseResult {
    let mut fixture = CacheFixture::new(backend, small().build()?, 1)?;
    let dropped = StepConfig { finish: Finish::Drop, ..StepConfig::default() };
    fixture.fill(1, 6)?;
    fixture.start(2)?;
    for _ in 0..3 {
        let before = fixture.state();
        fixture.step(&[tokens(1, 5), tokens(2, 4)], &dropped)?;
        unchanged(&mut fixture, &before, "a dropped step")?;
        let step = fixture.cache.begin_step(&[StepInput::count(seq(1), 3)])?;
        drop(step);
        unchanged(&mut fixture, &before, "a step dropped before any write")?;
        fixture.step(&[tokens(2, 1), tokens(1, 2)], &StepConfig::default())?;
        fixture.check()?;
    }
    Ok(Outcome::Holds)
}

/// Host tensors of one layer of `small()` for `n` tokens.
fn kv(fixture: &mut CacheFixture, n: usize) -> Result<Staged<AnyBuffer>, CaseError> {
    let layout = dense(Axes::Thd, &[n], [2, 8]);
    let rows = vec![fixture.rng.normals(n * 16)];
    let made = (layout, layout.pack(DType::F32, &rows, 0.0));
    let backend = fixture.backend.clone();
    Ok(Staged::new(&backend, fixture.cache.queue_mut(), made, Place::Host)?)
}

fn unwritten(backend: &AnyBackend) -> CaseResult {
    let mut fixture = CacheFixture::new(backend, small().layers(4).build()?, 2)?;
    fixture.fill(1, 6)?;
    let before = fixture.state();
    for written in [&[][..], &[0], &[0, 1, 3], &[3, 2, 1], &[2, 2, 2, 2]] {
        let rows = kv(&mut fixture, 3)?;
        let mut step = fixture.cache.begin_step(&[StepInput::count(seq(1), 3)])?;
        for layer in written {
            step.write(*layer, rows.view(), rows.view(), Axes::Thd)?;
        }
        let first = (0..4).find(|layer| !written.contains(layer)).unwrap_or(0);
        let missing = (0..4).filter(|layer| !written.contains(layer)).count();
        let expected = PlanError::LayersUnwritten { layer: LayerId(first), others: missing - 1 };
        refused(
            format!("commit after {written:?}"),
            step.commit(),
            |error| matches!(error, CacheError::Plan(error) if *error == expected),
        )?;
        unchanged(&mut fixture, &before, "a refused commit")?;
    }
    fixture.step(&[tokens(1, 3)], &StepConfig::default())?;
    fixture.check()?;
    Ok(Outcome::Holds)
}

fn attend_first(backend: &AnyBackend) -> CaseResult {
    let mut fixture = CacheFixture::new(backend, small().build()?, 3)?;
    fixture.fill(1, 6)?;
    let rows = kv(&mut fixture, 1)?;
    let layout = dense(Axes::Thd, &[1], [2, 8]);
    let (device, queue) = (fixture.backend.clone(), fixture.cache.queue_mut());
    let mut out = Staged::output(&device, queue, (layout, DType::F32), Place::Device)?;
    let mut step = fixture.cache.begin_step(&[StepInput::count(seq(1), 1)])?;
    let options = AttentionOptions::causal(1.0);
    step.write(0, rows.view(), rows.view(), Axes::Thd)?;
    step.attend(0, rows.view(), out.view_mut(), &options).at("attend after write")?;
    let early = step.attend(1, rows.view(), out.view_mut(), &options);
    refused("attend before write", early, |error| {
        let expected = PlanError::AttendBeforeWrite { layer: LayerId(1) };
        matches!(error, CacheError::Plan(error) if *error == expected)
    })?;
    step.write(1, rows.view(), rows.view(), Axes::Thd).at("the step is still open")?;
    step.attend(1, rows.view(), out.view_mut(), &options)?;
    step.commit()?;
    same("length", fixture.cache.state().seq_len(seq(1)), Some(7))?;
    Ok(Outcome::Holds)
}

fn any_order(backend: &AnyBackend) -> CaseResult {
    let config = StepConfig { shuffled: true, ..StepConfig::default() };
    let mut fixture = CacheFixture::new(backend, small().layers(5).build()?, 4)?;
    fixture.start(1)?;
    fixture.start(2)?;
    for _ in 0..4 {
        fixture.step(&[tokens(1, 2), tokens(2, 3)], &config)?;
        fixture.check()?;
    }
    Ok(Outcome::Holds)
}

fn token_ids(backend: &AnyBackend) -> CaseResult {
    let mut fixture = CacheFixture::new(backend, small().build()?, 5)?;
    let prompt = [7, 8, 9, 10, 11];
    let reused = fixture.cache.start(seq(1), &prompt, StartOptions::default())?;
    ensure((reused as usize) < prompt.len(), || {
        format!("{reused} tokens reused by an empty cache")
    })?;
    fixture.model.start(seq(1));
    let rows = kv(&mut fixture, 5)?;
    let mut step = fixture.cache.begin_step(&[StepInput::tokens(seq(1), &prompt)])?;
    same("positions", step.positions().to_vec(), vec![0, 1, 2, 3, 4])?;
    for layer in [0, 1] {
        step.write(layer, rows.view(), rows.view(), Axes::Thd)?;
    }
    step.commit()?;
    let step = fixture.cache.begin_step(&[StepInput::query(seq(1), 2)])?;
    same("positions of queries", step.positions().to_vec(), vec![3, 4])?;
    drop(step);
    let step = fixture.cache.begin_step(&[StepInput::tokens(seq(1), &[1])])?;
    same("position of the next token", step.positions().to_vec(), vec![5])?;
    drop(step);
    let step = fixture.cache.begin_step(&[]).at("an empty step")?;
    step.commit().at("commit of an empty step")?;
    Ok(Outcome::Holds)
}

fn regrow(backend: &AnyBackend) -> CaseResult {
    let mut fixture = CacheFixture::new(backend, small().build()?, 6)?;
    fixture.fill(1, 14)?;
    fixture.fill(2, 3)?;
    for len in [13, 12, 8, 7, 1, 0] {
        fixture.truncate(1, len)?;
        fixture.check().at(format!("truncated to {len}"))?;
        let used = fixture.cache.state().usage().blocks_used;
        same("blocks in use", used, len.div_ceil(4) + 3_u32.div_ceil(4))?;
        fixture.step(&[tokens(1, 3), (2, StepKind::Idle)], &StepConfig::default())?;
        fixture.check().at(format!("regrown from {len}"))?;
        fixture.truncate(1, len)?;
    }
    let before = fixture.state();
    refused("truncation to a longer length", fixture.cache.truncate(seq(2), 4), |error| {
        matches!(error, CacheError::Plan(PlanError::SequenceTooShort { .. }))
    })?;
    unchanged(&mut fixture, &before, "a refused truncation")?;
    Ok(Outcome::Holds)
}

fn reuse(backend: &AnyBackend) -> CaseResult {
    let mut fixture = CacheFixture::new(backend, small().paged(4, 5).build()?, 7)?;
    for round in 0..6 {
        fixture.fill(round, 17).at(format!("round {round}"))?;
        same("free blocks", fixture.cache.state().free_blocks(kv_core::GroupId(0)), 0)?;
        fixture.step(&[tokens(round, 3)], &StepConfig::default())?;
        fixture.check()?;
        fixture.release(round)?;
        same("free blocks", fixture.cache.state().free_blocks(kv_core::GroupId(0)), 5)?;
    }
    Ok(Outcome::Holds)
}

fn reset(backend: &AnyBackend) -> CaseResult {
    let mut fixture = CacheFixture::new(backend, small().build()?, 8)?;
    for _ in 0..2 {
        fixture.fill(1, 9)?;
        fixture.fork(1, 2)?;
        fixture.fill(3, 1)?;
        fixture.step(&[tokens(2, 2), tokens(1, 1)], &StepConfig::default())?;
        fixture.reset()?;
        let usage = fixture.cache.state().usage();
        let counts = (usage.sequences, usage.tokens, usage.blocks_used, usage.slots_wasted);
        same("usage after reset", counts, (0, 0, 0, 0))?;
    }
    Ok(Outcome::Holds)
}

fn exhaustion(backend: &AnyBackend) -> CaseResult {
    let mut fixture = CacheFixture::new(backend, small().paged(4, 6).build()?, 9)?;
    fixture.fill(1, 10)?;
    fixture.fork(1, 2)?;
    fixture.fill(3, 4)?;
    // 4 of 6 blocks are used: 3 shared by 1 and 2, 1 of 3.
    let attempts: [(&[(u64, u32)], u32); 5] = [
        (&[(3, 13)], 4),
        (&[(3, 1), (1, 3), (2, 3)], 4),
        (&[(1, 7), (3, 1)], 4),
        (&[(2, 3), (1, 1), (3, 1)], 3),
        (&[(1, 1), (3, 9)], 4),
    ];
    for (inputs, needed) in attempts {
        let before = fixture.state();
        let list: Vec<_> = inputs.iter().map(|(id, n)| StepInput::count(seq(*id), *n)).collect();
        let begun = fixture.cache.begin_step(&list).map(drop);
        refused(
            format!("{inputs:?} with 2 free blocks"),
            begun,
            |error| matches!(error, CacheError::Exhausted(e) if e.needed == needed && e.free == 2),
        )
        .at(format!("{needed} needed"))?;
        unchanged(&mut fixture, &before, "an exhausted step")?;
    }
    fixture.step(&[tokens(1, 1), tokens(2, 1), (3, StepKind::Idle)], &StepConfig::default())?;
    fixture.check()?;
    let before = fixture.state();
    let reserve = StartOptions::default().with_reserve(20);
    refused(
        "a reserve larger than the pool",
        fixture.cache.start(seq(9), &[], reserve),
        |error| matches!(error, CacheError::Exhausted(e) if e.needed == 5),
    )?;
    unchanged(&mut fixture, &before, "a refused reserve")?;
    Ok(Outcome::Holds)
}

fn refusals(backend: &AnyBackend) -> CaseResult {
    let spec = small().max_seq_len(20).max_sequences(3).build()?;
    let mut fixture = CacheFixture::new(backend, spec, 10)?;
    fixture.fill(1, 6)?;
    fixture.fill(2, 1)?;
    let before = fixture.state();
    let count = |id, n| StepInput::count(seq(id), n);
    let steps: [(&str, &[StepInput<'_>], PlanError); 6] = [
        ("unknown", &[count(1, 1), count(5, 1)], PlanError::UnknownSequence { sequence: seq(5) }),
        ("twice", &[count(1, 1), count(1, 1)], PlanError::DuplicateSequence { sequence: seq(1) }),
        ("zero tokens", &[count(2, 1), count(1, 0)], PlanError::ZeroTokens { sequence: seq(1) }),
        ("no ids", &[StepInput::tokens(seq(1), &[])], PlanError::ZeroTokens { sequence: seq(1) }),
        ("no queries", &[StepInput::query(seq(1), 0)], PlanError::ZeroTokens { sequence: seq(1) }),
        (
            "too long",
            &[count(2, 1), count(1, 15)],
            PlanError::SequenceTooLong { sequence: seq(1), len: 6, new: 15, max: 20 },
        ),
    ];
    for (what, inputs, expected) in steps {
        let begun = fixture.cache.begin_step(inputs).map(drop);
        refused(what, begun, |error| matches!(error, CacheError::Plan(e) if *e == expected))?;
        unchanged(&mut fixture, &before, what)?;
    }
    let plan = |error: &CacheError| matches!(error, CacheError::Plan(_));
    refused("a second start", fixture.cache.start(seq(1), &[], StartOptions::default()), plan)?;
    refused(
        "a prompt too long",
        fixture.cache.start(seq(7), &[0; 21], StartOptions::default()),
        plan,
    )?;
    refused("release of an unknown", fixture.cache.release(seq(7)), plan)?;
    refused("truncation of an unknown", fixture.cache.truncate(seq(7), 0), plan)?;
    refused("a fork of an unknown", fixture.cache.fork(seq(7), seq(8)), plan)?;
    refused("a fork onto a live one", fixture.cache.fork(seq(1), seq(2)), plan)?;
    unchanged(&mut fixture, &before, "refused calls")?;
    fixture.start(3)?;
    refused(
        "one sequence too many",
        fixture.cache.start(seq(4), &[], StartOptions::default()),
        plan,
    )?;
    refused("one fork too many", fixture.cache.fork(seq(1), seq(4)), plan)?;
    fixture
        .step(&[tokens(1, 14), tokens(3, 1)], &StepConfig::default())
        .at("exactly the longest")?;
    fixture.check()?;
    Ok(Outcome::Holds)
}

/// A device that supports some stored formats refuses a cache of any other, in K, in V and in any
/// group, and names the format.
fn formats(backend: &AnyBackend) -> CaseResult {
    const TAKEN: &[KvFormat] = &[KvFormat::F32, KvFormat::Bf16];
    let limited = limited_erased(backend, |capabilities| capabilities.with_formats(TAKEN));
    for k in KvFormat::PLAIN {
        for v in KvFormat::PLAIN {
            let spec = small().format(KvFormat::F32).group([1], |group| group.formats(*k, *v));
            let spec = spec.build()?;
            if TAKEN.contains(k) && TAKEN.contains(v) {
                let mut fixture = CacheFixture::new(&limited, spec, 12)?;
                fixture.start(1)?;
                fixture.step(&[tokens(1, 3)], &StepConfig::default()).at(format!("{k} and {v}"))?;
                continue;
            }
            let provenance = |error: &CacheError| {
                device_error(DeviceErrorKind::Unsupported)(error)
                    && error.to_string().contains("format f16")
            };
            let made = KvCache::new(limited.clone(), spec);
            refused(format!("{k} and {v}"), made, provenance)?;
        }
    }
    Ok(Outcome::Holds)
}

/// A device that supports some `head_dim`s refuses all others at once, and works with all of those.
fn head_dims(backend: &AnyBackend) -> CaseResult {
    let own = backend.capabilities();
    let (step, most) = (own.head_dim_multiple.max(1), own.head_dim_max);
    let unsupported = device_error(DeviceErrorKind::Unsupported);
    let mut wrong = vec![(most.saturating_add(1), most < u32::MAX), (step / 2, step > 1)];
    wrong.push((2 * step + 1, step > 1));
    for dim in wrong.into_iter().filter_map(|(dim, is_wrong)| is_wrong.then_some(dim)) {
        for dims in [(dim, step), (step, dim)] {
            let spec = small().layers(1).head_dims(dims.0, dims.1).paged(1, 1).build()?;
            let made = KvCache::new(backend.clone(), spec);
            refused(format!("head_dims {dims:?}"), made, unsupported)?;
        }
    }
    // A declared range that is smaller than the device's own is checked too.
    let limited = limited_erased(backend, |c| c.with_head_dims(4 * step, 16 * step));
    for (dims, is_taken) in [([4, 16], true), ([6, 8], false), ([8, 20], false), ([12, 4], true)] {
        let [k, v] = dims.map(|dim| dim * step);
        // The second group has the unsupported dim.
        let spec = small().head_dim(8 * step).group([1], |group| group.head_dims(k, v)).build()?;
        if is_taken {
            let mut fixture = CacheFixture::new(&limited, spec, 11)?;
            fixture.start(1)?;
            fixture
                .step(&[tokens(1, 3)], &StepConfig::default())
                .at(format!("head_dims {k} and {v}"))?;
        } else {
            let made = KvCache::new(limited.clone(), spec);
            refused(format!("head_dims {k} and {v}"), made, unsupported)?;
        }
    }
    Ok(Outcome::Holds)
}

/// README's example: a program whose tensors are all in host memory.
fn host_tensors(backend: &AnyBackend) -> CaseResult {
    let spec = small().layers(1).kv_heads(1).head_dim(4).build()?;
    let mut cache = KvCache::new(backend.clone(), spec)?;
    let prompt = [11, 22];
    cache.start(seq(1), &prompt, StartOptions::default())?;
    let mut step = cache.begin_step(&[StepInput::prompt(seq(1), &prompt)])?;
    let (k, v) = ([1.0_f32; 8], [1.0_f32, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]);
    let (q, mut out, mut lse) = ([0.0_f32; 8], [0.0_f32; 8], [1.0_f32; 2]);
    let view = |data| TensorView::host::<f32>(data, &[2, 1, 4]);
    step.write(0, view(&k), view(&v), Axes::Thd)?;
    let (to, lse_to) =
        (TensorViewMut::host(&mut out, &[2, 1, 4]), TensorViewMut::host(&mut lse, &[2, 1]));
    step.attend_lse(0, view(&q), to, lse_to, &AttentionOptions::causal(0.7))?;
    step.commit()?;
    same("outputs", out, [1.0, 2.0, 3.0, 4.0, 3.0, 4.0, 5.0, 6.0])?;
    ensure(lse[0] == 0.0 && (lse[1] - 2.0_f32.ln()).abs() < 1e-5, || format!("lse {lse:?}"))?;
    let mut rows = [0.0_f32; 4];
    let to = TensorViewMut::host(&mut rows, &[1, 1, 4]);
    cache.gather(0, kv_core::backend::Plane::Value, &[(seq(1), 1, 1)], to, Axes::Thd)?;
    same("gathered rows", rows, [5.0, 6.0, 7.0, 8.0])?;
    Ok(Outcome::Holds)
}
