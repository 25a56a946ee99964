//! Random operation sequences against the naive model, shrunk to the shortest one that fails.
use kv_core::backend::AnyBackend;
use kv_core::calibration::Calibration;
use kv_core::spec::{CacheSpecBuilder, KeyMean};
use kv_core::{CacheError, CacheSpec, GroupId, KvFormat, StepInput};
use proptest::collection::vec;
use proptest::prelude::{Just, Strategy, any, prop_oneof};
use proptest::test_runner::{
    Config, RngAlgorithm, TestCaseError, TestCaseResult, TestError, TestRng, TestRunner,
};

use super::quant::{LARGE_MEANS, constants, quantised};
use super::{case, small};
use crate::amount::runs;
use crate::case::{At, Case, CaseError, CaseResult, Outcome, ensure};
use crate::device::dim;
use crate::fixture::{CacheFixture, Finish, StepConfig, StepKind, seq, unchanged};
use crate::rng::Rng;

pub(super) fn cases() -> Vec<Case> {
    vec![
        case("random/contiguous", |b| plain_formats(b, &|spec| spec.contiguous(5, 24))),
        case("random/paged_1", |b| plain_formats(b, &|spec| spec.paged(1, 40))),
        case("random/paged_3", |b| plain_formats(b, &|spec| spec.paged(3, 15))),
        case("random/paged_16", |b| plain_formats(b, &|spec| spec.paged(16, 6))),
        case("random/wiped_and_limited", |b| {
            plain_formats(b, &|spec| spec.paged(3, 15).wipe_on_release(true).max_seq_len(17))
        }),
        case("random/quantised_contiguous", |b| {
            quantised_formats(b, &|spec| spec.contiguous(5, 24).full_precision_prefix(2))
        }),
        case("random/quantised_paged_5", |b| quantised_formats(b, &|spec| spec.paged(5, 15))),
        case("random/quantised_full_precision_prefix", |b| {
            quantised_formats(b, &|spec| spec.paged(9, 14).full_precision_prefix(3))
        }),
        case("random/quantised_tail", |b| {
            quantised_formats(b, &|spec| {
                spec.paged(8, 24).full_precision_prefix(1).tail(true).key_mean(KeyMean::PerBlock)
            })
        }),
    ]
}

/// Runs per geometry.
const RUNS: u32 = 48;
/// Runs per pair of quantised formats.
const RUNS_QUANTISED: u32 = 6;
/// Variable that replaces the fixed seed, to search further than the suite does.
const SEED: &str = "KV_CONFORMANCE_SEED";

/// One operation; numbers choose among the sequences that exist when it runs.
#[derive(Debug, Clone)]
enum Op {
    Start,
    Step { entries: Vec<(u8, Entry)>, seed: u64, keep: bool },
    Fork(u8),
    Truncate(u8, u8),
    Release(u8),
    Reset,
}

#[derive(Debug, Clone, Copy)]
enum Entry {
    Decode,
    Prefill(u32),
    Query(u32),
    Idle,
}

fn operation() -> impl Strategy<Value = Op> {
    let entry = prop_oneof![
        4 => Just(Entry::Decode),
        3 => (1_u32..14).prop_map(Entry::Prefill),
        1 => prop_oneof![3 => 1_u32..5, 1 => 9_u32..41].prop_map(Entry::Query),
        1 => Just(Entry::Idle),
    ];
    let entries = vec((any::<u8>(), entry), 1..6);
    let step = (entries, any::<u64>(), proptest::bool::weighted(0.85));
    prop_oneof![
        4 => Just(Op::Start),
        10 => step.prop_map(|(entries, seed, keep)| Op::Step { entries, seed, keep }),
        3 => any::<u8>().prop_map(Op::Fork),
        2 => (any::<u8>(), any::<u8>()).prop_map(|(which, part)| Op::Truncate(which, part)),
        3 => any::<u8>().prop_map(Op::Release),
        1 => proptest::bool::weighted(0.2).prop_map(|all| if all { Op::Reset } else { Op::Start }),
    ]
}

type Geometry<'g> = &'g dyn Fn(CacheSpecBuilder) -> CacheSpecBuilder;

fn plain_formats(backend: &AnyBackend, geometry: Geometry<'_>) -> CaseResult {
    for (index, k) in (0_u64..).zip(KvFormat::PLAIN) {
        let v = KvFormat::PLAIN[(index as usize + 1) % KvFormat::PLAIN.len()];
        for formats in [[*k, *k], [*k, v]] {
            let spec =
                geometry(small().head_dims(8, dim(backend, 6))).formats(formats[0], formats[1]);
            find_failure(backend, &spec.build()?, None, runs(RUNS)).at(format!("{formats:?}"))?;
        }
    }
    Ok(Outcome::Holds)
}

/// Runs every quantised format as K with another format as V, with constants.
fn quantised_formats(backend: &AnyBackend, geometry: Geometry<'_>) -> CaseResult {
    let all: Vec<_> = KvFormat::all().collect();
    for (index, k) in quantised(1).enumerate() {
        let v = all[(5 * index + 1) % all.len()];
        let spec = geometry(small().head_dims(dim(backend, 18), 12)).formats(k, v).build()?;
        let given = constants(&spec, LARGE_MEANS, index as u64);
        find_failure(backend, &spec, Some(&given), runs(RUNS_QUANTISED))
            .at(format!("{k} and {v}"))?;
    }
    Ok(Outcome::Holds)
}

/// Runs random operation sequences and shrinks a failing one.
fn find_failure(
    backend: &AnyBackend,
    spec: &CacheSpec,
    given: Option<&Calibration>,
    cases: u32,
) -> Result<(), CaseError> {
    let text = std::env::var(SEED).unwrap_or_default();
    let seed: u64 = text.parse().unwrap_or(20_240_611);
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &bytes);
    let config = Config {
        cases,
        failure_persistence: None,
        max_shrink_iters: 2000,
        verbose: 0,
        ..Config::default()
    };
    let mut runner = TestRunner::new_with_rng(config, rng);
    let outcome = std::cell::RefCell::new(None);
    let found = runner.run(&vec(operation(), 1..24), |ops| -> TestCaseResult {
        match run(backend, spec, given, &ops) {
            Ok(()) => Ok(()),
            Err(error) if error.unsupported().is_some() => {
                *outcome.borrow_mut() = Some(error);
                Ok(())
            }
            Err(error) => Err(TestCaseError::fail(error.to_string())),
        }
    });
    if let Some(unsupported) = outcome.into_inner() {
        return Err(unsupported);
    }
    match found {
        Ok(()) => Ok(()),
        Err(TestError::Fail(why, ops)) => {
            let ops: Vec<_> = ops.iter().map(|op| format!("\n    {op:?}")).collect();
            Err(format!("{why}\n  {SEED}={seed}, shortest failing run:{}", ops.concat()).into())
        }
        Err(TestError::Abort(why)) => Err(format!("{SEED}={seed}: {why}").into()),
    }
}

fn run(
    backend: &AnyBackend,
    spec: &CacheSpec,
    given: Option<&Calibration>,
    ops: &[Op],
) -> Result<(), CaseError> {
    let mut fixture = match given {
        None => CacheFixture::new(backend, spec.clone(), 1)?,
        Some(given) => CacheFixture::calibrated(backend, spec.clone(), given.clone(), 1)?,
    };
    let mut next = 0;
    for (index, op) in ops.iter().enumerate() {
        apply(&mut fixture, op, &mut next).at(format!("operation {index}, {op:?}"))?;
        fixture.check().at(format!("after operation {index}, {op:?}"))?;
    }
    fixture.reset()?;
    let free = fixture.cache.state().free_blocks(GroupId(0));
    ensure(free == spec.groups()[0].num_blocks(), || format!("{free} blocks free at the end"))
}

fn apply(fixture: &mut CacheFixture, op: &Op, next: &mut u64) -> Result<(), CaseError> {
    let sequences = fixture.model.sequences();
    let chosen =
        |which: u8| sequences.get(usize::from(which) % sequences.len().max(1)).map(|id| id.0);
    let has_room = sequences.len() < fixture.cache.state().spec().max_sequences() as usize;
    match op {
        Op::Start if has_room => {
            fixture.start(*next)?;
            *next += 1;
        }
        Op::Fork(which) if has_room => {
            if let Some(parent) = chosen(*which) {
                fixture.fork(parent, *next)?;
                *next += 1;
            }
        }
        Op::Start | Op::Fork(_) => {
            let before = fixture.state();
            let started = fixture.cache.start(seq(u64::MAX), &[], kv_core::StartOptions::default());
            ensure(started.is_err(), || "a sequence past the limit was started".to_owned())?;
            unchanged(fixture, &before, "a refused start")?;
        }
        Op::Truncate(which, part) => {
            if let Some(id) = chosen(*which) {
                let len = fixture.model.len(seq(id)).unwrap_or(0);
                fixture.truncate(id, u32::from(*part) % (len + 1))?;
            }
        }
        Op::Release(which) => {
            if let Some(id) = chosen(*which) {
                fixture.release(id)?;
            }
        }
        Op::Reset => fixture.reset()?,
        Op::Step { entries, seed, keep } => {
            let mut inputs: Vec<(u64, StepKind)> = Vec::new();
            for (which, entry) in entries {
                match chosen(*which) {
                    Some(id) if inputs.iter().all(|(other, _)| *other != id) => {
                        inputs.push((id, step_kind(*entry)));
                    }
                    _ => {}
                }
            }
            let finish = if *keep { Finish::Commit } else { Finish::Drop };
            let config = StepConfig { finish, ..StepConfig::random(&mut Rng::new(*seed)) };
            step(fixture, &inputs, &config)?;
        }
    }
    Ok(())
}

fn step_kind(entry: Entry) -> StepKind {
    match entry {
        Entry::Decode => StepKind::Tokens(1),
        Entry::Prefill(n) => StepKind::Tokens(n),
        Entry::Query(n) => StepKind::Query(n),
        Entry::Idle => StepKind::Idle,
    }
}

/// Runs a step that must succeed, or one that must be refused and change nothing.
fn step(
    fixture: &mut CacheFixture,
    inputs: &[(u64, StepKind)],
    config: &StepConfig,
) -> Result<(), CaseError> {
    let map = *fixture.cache.state().spec().groups()[0].slot_map();
    let total = u64::from(fixture.cache.state().spec().groups()[0].num_blocks());
    let max_len = fixture.cache.state().spec().max_seq_len();
    let new = |step_kind: &StepKind| if let StepKind::Tokens(n) = step_kind { *n } else { 0 };
    let len = |id: u64| fixture.model.len(seq(id)).unwrap_or(0);
    let too_long = inputs.iter().any(|(id, step_kind)| len(*id) + new(step_kind) > max_len);
    let growth = |(id, step_kind): &(u64, StepKind)| {
        let quantised_formats = fixture.model.coded(seq(*id), 0);
        let after = map.coded_after(quantised_formats, len(*id) + new(step_kind));
        let held = map.blocks_in(len(*id), quantised_formats);
        // While the step is open, it holds the blocks of a tail that becomes codes besides the new
        // ones.
        let tail = held - map.blocks(map.tail_begin(len(*id), quantised_formats));
        let open = map.blocks_in(len(*id) + new(step_kind), after);
        u64::from((open + if after > quantised_formats { tail } else { 0 }).saturating_sub(held))
    };
    // Without sharing, every sequence has its own blocks; with sharing, fewer are needed.
    let most = fixture.model.blocks_unshared(&map) + inputs.iter().map(growth).sum::<u64>();
    let least = inputs.iter().map(growth).sum::<u64>();
    let free = fixture.cache.state().free_blocks(GroupId(0));
    let before = fixture.state();
    let list: Vec<_> = inputs
        .iter()
        .map(|(id, step_kind)| match step_kind {
            StepKind::Tokens(n) => StepInput::count(seq(*id), *n),
            StepKind::Query(n) => StepInput::query(seq(*id), *n),
            StepKind::Idle => StepInput::idle(seq(*id)),
        })
        .collect();
    match fixture.cache.begin_step(&list).map(drop) {
        Ok(()) => {
            ensure(!too_long && least <= u64::from(free), || {
                format!("accepted: {least} blocks at least, {free} free, too long: {too_long}")
            })?;
            unchanged(fixture, &before, "a step dropped at once")?;
            fixture.step(inputs, config)?;
            if config.finish == Finish::Drop {
                unchanged(fixture, &before, "a dropped step")?;
            }
            Ok(())
        }
        Err(CacheError::Plan(_)) if too_long => unchanged(fixture, &before, "a step too long"),
        Err(CacheError::Exhausted(error)) => {
            ensure(error.free == free && error.needed > free && !too_long && most > total, || {
                format!("refused by {error}, though {most} of {total} blocks are enough")
            })?;
            unchanged(fixture, &before, "an exhausted step")
        }
        Err(error) => Err(error.into()),
    }
}
