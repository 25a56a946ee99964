//! Random lives of a cache against the naive model, shrunk to the shortest one that fails.
use kv_core::{
    CacheError, CacheSpec, CacheSpecBuilder, Calibration, GroupId, KeyMean, KvFormat, StepInput,
};
use proptest::collection::vec;
use proptest::prelude::{Just, Strategy, any, prop_oneof};
use proptest::test_runner::{
    Config, RngAlgorithm, TestCaseError, TestCaseResult, TestError, TestRng, TestRunner,
};

use super::quant::{LARGE_MEANS, constants, quantised};
use super::{case, small};
use crate::case::{At, Case, CaseError, CaseResult, Outcome, ensure};
use crate::device::{Device, dim};
use crate::lab::{Brings, Finish, How, Lab, seq, unchanged};
use crate::rng::Rng;

pub(super) fn cases<B: Device>() -> Vec<Case<B>> {
    vec![
        case("random/contiguous", |b| lives(b, &|spec| spec.contiguous(5, 24))),
        case("random/paged_1", |b| lives(b, &|spec| spec.paged(1, 40))),
        case("random/paged_3", |b| lives(b, &|spec| spec.paged(3, 15))),
        case("random/paged_16", |b| lives(b, &|spec| spec.paged(16, 6))),
        case("random/wiped_and_limited", |b| {
            lives(b, &|spec| spec.paged(3, 15).wipe_on_release(true).max_seq_len(17))
        }),
        case("random/quantised_contiguous", |b| {
            coded(b, &|spec| spec.contiguous(5, 24).full_precision_prefix(2))
        }),
        case("random/quantised_paged_5", |b| coded(b, &|spec| spec.paged(5, 15))),
        case("random/quantised_full_precision_prefix", |b| {
            coded(b, &|spec| spec.paged(9, 14).full_precision_prefix(3))
        }),
        case("random/quantised_tail", |b| {
            coded(b, &|spec| {
                spec.paged(8, 24).full_precision_prefix(1).tail(true).key_mean(KeyMean::PerBlock)
            })
        }),
    ]
}

/// Lives tried for each geometry.
const LIVES: u32 = 48;
/// Lives tried for each pair of quantised formats.
const LIVES_CODED: u32 = 6;
/// Replaces the fixed seed, to look further than the suite does.
const SEED: &str = "KV_CONFORMANCE_SEED";

/// One operation; numbers choose among what is live when it runs.
#[derive(Debug, Clone)]
enum Op {
    Start,
    Step { entries: Vec<(u8, Bring)>, seed: u64, keep: bool },
    Fork(u8),
    Truncate(u8, u8),
    Release(u8),
    Reset,
}

#[derive(Debug, Clone, Copy)]
enum Bring {
    Decode,
    Prefill(u32),
    Query(u32),
    Idle,
}

fn operation() -> impl Strategy<Value = Op> {
    let bring = prop_oneof![
        4 => Just(Bring::Decode),
        3 => (1_u32..14).prop_map(Bring::Prefill),
        1 => (1_u32..5).prop_map(Bring::Query),
        1 => Just(Bring::Idle),
    ];
    let entries = vec((any::<u8>(), bring), 1..6);
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

fn lives<B: Device>(backend: &B, geometry: Geometry<'_>) -> CaseResult {
    for (index, k) in (0_u64..).zip(KvFormat::PLAIN) {
        let v = KvFormat::PLAIN[(index as usize + 1) % KvFormat::PLAIN.len()];
        for formats in [[*k, *k], [*k, v]] {
            let spec =
                geometry(small().head_dims(8, dim(backend, 6))).formats(formats[0], formats[1]);
            search(backend, &spec.build()?, None, LIVES).at(format!("{formats:?}"))?;
        }
    }
    Ok(Outcome::Holds)
}

/// Every quantised format as K, another one as V, with constants.
fn coded<B: Device>(backend: &B, geometry: Geometry<'_>) -> CaseResult {
    let all: Vec<_> = KvFormat::all().collect();
    for (index, k) in quantised().enumerate() {
        let v = all[(5 * index + 1) % all.len()];
        let spec = geometry(small().head_dims(dim(backend, 18), 12)).formats(k, v).build()?;
        let given = constants(&spec, LARGE_MEANS, index as u64);
        search(backend, &spec, Some(&given), LIVES_CODED).at(format!("{k} and {v}"))?;
    }
    Ok(Outcome::Holds)
}

/// Runs random lives; a failing one is shortened before it is reported.
fn search<B: Device>(
    backend: &B,
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
        match live(backend, spec, given, &ops) {
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
            Err(format!("{why}\n  {SEED}={seed}, shortest life:{}", ops.concat()).into())
        }
        Err(TestError::Abort(why)) => Err(format!("{SEED}={seed}: {why}").into()),
    }
}

fn live<B: Device>(
    backend: &B,
    spec: &CacheSpec,
    given: Option<&Calibration>,
    ops: &[Op],
) -> Result<(), CaseError> {
    let mut lab = match given {
        None => Lab::new(backend, spec.clone(), 1)?,
        Some(given) => Lab::calibrated(backend, spec.clone(), given.clone(), 1)?,
    };
    let mut next = 0;
    for (index, op) in ops.iter().enumerate() {
        apply(&mut lab, op, &mut next).at(format!("operation {index}, {op:?}"))?;
        lab.check().at(format!("after operation {index}, {op:?}"))?;
    }
    lab.reset()?;
    let free = lab.cache.free_blocks(GroupId(0));
    ensure(free == spec.groups()[0].num_blocks(), || format!("{free} blocks free at the end"))
}

fn apply<B: Device>(lab: &mut Lab<B>, op: &Op, next: &mut u64) -> Result<(), CaseError> {
    let live = lab.model.sequences();
    let chosen = |which: u8| live.get(usize::from(which) % live.len().max(1)).map(|id| id.0);
    let room = live.len() < lab.cache.spec().max_sequences() as usize;
    match op {
        Op::Start if room => {
            lab.start(*next)?;
            *next += 1;
        }
        Op::Fork(which) if room => {
            if let Some(parent) = chosen(*which) {
                lab.fork(parent, *next)?;
                *next += 1;
            }
        }
        Op::Start | Op::Fork(_) => {
            let before = lab.state();
            let started = lab.cache.start(seq(u64::MAX), &[], kv_core::StartOptions::default());
            ensure(started.is_err(), || "a sequence past the limit was started".to_owned())?;
            unchanged(lab, &before, "a refused start")?;
        }
        Op::Truncate(which, part) => {
            if let Some(id) = chosen(*which) {
                let len = lab.model.len(seq(id)).unwrap_or(0);
                lab.truncate(id, u32::from(*part) % (len + 1))?;
            }
        }
        Op::Release(which) => {
            if let Some(id) = chosen(*which) {
                lab.release(id)?;
            }
        }
        Op::Reset => lab.reset()?,
        Op::Step { entries, seed, keep } => {
            let mut inputs: Vec<(u64, Brings)> = Vec::new();
            for (which, bring) in entries {
                match chosen(*which) {
                    Some(id) if inputs.iter().all(|(other, _)| *other != id) => {
                        inputs.push((id, brings(*bring)));
                    }
                    _ => {}
                }
            }
            let finish = if *keep { Finish::Commit } else { Finish::Drop };
            let how = How { finish, ..How::random(&mut Rng::new(*seed)) };
            step(lab, &inputs, &how)?;
        }
    }
    Ok(())
}

fn brings(bring: Bring) -> Brings {
    match bring {
        Bring::Decode => Brings::Tokens(1),
        Bring::Prefill(n) => Brings::Tokens(n),
        Bring::Query(n) => Brings::Query(n),
        Bring::Idle => Brings::Idle,
    }
}

/// A step that must succeed, or one that must be refused and change nothing.
fn step<B: Device>(lab: &mut Lab<B>, inputs: &[(u64, Brings)], how: &How) -> Result<(), CaseError> {
    let map = *lab.cache.spec().groups()[0].slot_map();
    let total = u64::from(lab.cache.spec().groups()[0].num_blocks());
    let max_len = lab.cache.spec().max_seq_len();
    let new = |brings: &Brings| if let Brings::Tokens(n) = brings { *n } else { 0 };
    let len = |id: u64| lab.model.len(seq(id)).unwrap_or(0);
    let too_long = inputs.iter().any(|(id, brings)| len(*id) + new(brings) > max_len);
    let growth = |(id, brings): &(u64, Brings)| {
        let coded = lab.model.coded(seq(*id), 0);
        let after = map.coded_after(coded, len(*id) + new(brings));
        let held = map.blocks_in(len(*id), coded);
        // While the step is open, a tail that becomes codes is held beside them.
        let tail = held - map.blocks(map.tail_begin(len(*id), coded));
        let open = map.blocks_in(len(*id) + new(brings), after);
        u64::from((open + if after > coded { tail } else { 0 }).saturating_sub(held))
    };
    // Without sharing, every sequence has its own blocks: with it, never more are needed.
    let most = lab.model.blocks_unshared(&map) + inputs.iter().map(growth).sum::<u64>();
    let least = inputs.iter().map(growth).sum::<u64>();
    let free = lab.cache.free_blocks(GroupId(0));
    let before = lab.state();
    let list: Vec<_> = inputs
        .iter()
        .map(|(id, brings)| match brings {
            Brings::Tokens(n) => StepInput::count(seq(*id), *n),
            Brings::Query(n) => StepInput::query(seq(*id), *n),
            Brings::Idle => StepInput::idle(seq(*id)),
        })
        .collect();
    match lab.cache.begin_step(&list).map(drop) {
        Ok(()) => {
            ensure(!too_long && least <= u64::from(free), || {
                format!("accepted: {least} blocks at least, {free} free, too long: {too_long}")
            })?;
            unchanged(lab, &before, "a step dropped at once")?;
            lab.step(inputs, how)?;
            if how.finish == Finish::Drop {
                unchanged(lab, &before, "a dropped step")?;
            }
            Ok(())
        }
        Err(CacheError::Plan(_)) if too_long => unchanged(lab, &before, "a step too long"),
        Err(CacheError::Exhausted(error)) => {
            ensure(error.free == free && error.needed > free && !too_long && most > total, || {
                format!("refused by {error}, though {most} of {total} blocks are enough")
            })?;
            unchanged(lab, &before, "an exhausted step")
        }
        Err(error) => Err(error.into()),
    }
}
