//! Random operation sequences, on devices that fail, with few slots, snapshots and blocks.
use kv_core::backend::AnyBackend;
use kv_core::error::PlanError;
use kv_core::spec::{StateFormat, StatesBuilder};
use kv_core::{CacheError, SequenceId, StartOptions};

use super::recurrence::{End, Entry, Recurrence, spec, spec_with};
use crate::case::{At, CaseError, CaseResult, Outcome, ensure};
use crate::fault::{FaultInjector, FaultKind};
use crate::fixture::seq;
use crate::rng::Rng;
use crate::suite::stateful::{RUNS_VARIABLE, number};

pub(super) fn random(backend: &AnyBackend) -> CaseResult {
    for seed in 0..number(RUNS_VARIABLE, 4)? {
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
        3 if known.contains(&id) && rng.one_in(2) => run.release(id)?,
        4 if known.contains(&id) => {
            let len = run.texts[&id].len() as u32;
            let to = rng.below(len + 1);
            let has_snapshots = run.cache.state().spec().states()[0].snapshots().is_some();
            match run.cache.truncate(id, to) {
                Err(CacheError::Plan(PlanError::StateMissing {
                    asked, shorter, longer, ..
                })) => {
                    let is_right = asked == to && shorter < to && longer == len && to > 0;
                    ensure(is_right, || format!("{asked} {shorter} {longer} of {len}"))?;
                }
                done => {
                    done?;
                    let is_known = has_snapshots || to == 0 || to == len;
                    ensure(is_known, || format!("{to} of {len} tokens without a state"))?;
                    run.texts.get_mut(&id).ok_or("a known text")?.truncate(to as usize);
                }
            }
        }
        5 if known.contains(&id) && rng.one_in(2) => {
            if rng.one_in(3) {
                faults.fail(u64::from(rng.below(6)), rng.pick(&FaultKind::ALL));
            }
            let kept = run.cache.keep_state(id);
            if !(faults.clear() && matches!(kept, Err(CacheError::Device(_)))) {
                kept?;
            }
        }
        6 if known.contains(&id) && rng.one_in(2) => run.cache.add_stop(id, rng.below(40))?,
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

pub(super) fn random_with_snapshots(backend: &AnyBackend) -> CaseResult {
    let mut reused = 0;
    for seed in 0..number(RUNS_VARIABLE, 6)? {
        let faults = FaultInjector::new(backend.clone());
        let device = AnyBackend::new(faults.clone());
        // So few snapshots and blocks that most are evicted.
        let format = match seed / 2 % 3 {
            0 => StateFormat::Same,
            1 => StateFormat::Int8,
            _ => StateFormat::F16,
        };
        let states = move |states: StatesBuilder| {
            let grid = if seed % 3 == 2 { 3 } else { 1 };
            let states = states.slots(24).drafts(2).snapshots(10, format).grid(grid);
            if seed % 2 == 1 { states.snapshots_per_path(2) } else { states }
        };
        let mut run = Recurrence::new(&device, spec_with(&device, states, 48)?)?;
        run.keep_as(format);
        let mut rng = Rng::new(seed);
        for operation in 0..400 {
            operate_on_prompts(&mut run, &faults, &mut rng, &mut reused)
                .at(format!("seed {seed}, operation {operation}"))?;
        }
    }
    ensure(reused > 300, || format!("only {reused} tokens were reused"))?;
    Ok(Outcome::Holds)
}

fn operate_on_prompts(
    run: &mut Recurrence<'_>,
    faults: &FaultInjector<AnyBackend>,
    rng: &mut Rng,
    reused: &mut u32,
) -> Result<(), CaseError> {
    let id = seq(u64::from(rng.below(8)));
    // Prompts of one tree, which leave a text sooner or later.
    let (len, at) = (rng.within(1, 16), rng.within(1, 16));
    let prompt: Vec<_> = (0..len).map(|i| if i < at { i } else { 20 + rng.below(2) }).collect();
    match rng.below(12) {
        0..=3 if !run.texts.contains_key(&id) => {
            let salt: &[u8] = if rng.one_in(4) { b"x" } else { b"" };
            let stops = [rng.within(1, prompt.len() as u32)];
            let options = StartOptions::default().with_salt(salt);
            let options = if rng.one_in(3) { options.with_stops(&stops) } else { options };
            match run.start_on(id, &prompt, options) {
                Ok(tokens) => *reused += tokens,
                Err(CaseError::Cache(CacheError::Exhausted(_))) => {}
                Err(error) => return Err(error),
            }
            if run.texts.contains_key(&id) && !rng.one_in(4) {
                match run.compute(id, &prompt) {
                    Err(CaseError::Cache(CacheError::Exhausted(_))) => {}
                    done => done?,
                }
            }
            Ok(())
        }
        4..=6 if run.texts.contains_key(&id) => {
            if rng.one_in(4) {
                faults.fail(u64::from(rng.below(8)), rng.pick(&FaultKind::ALL));
            }
            let released = run.release(id);
            faults.clear();
            released
        }
        7 if rng.one_in(3) => {
            match rng.below(4) {
                0 => drop(run.cache.forget_salt(b"x")?),
                1 => drop(run.cache.forget_prefix(&prompt, StartOptions::default(), 2)?),
                2 if run.texts.contains_key(&id) => drop(run.cache.forget_sequence(id)?),
                _ => {
                    let pin = run.cache.pin_prefix(&prompt, StartOptions::default());
                    run.check()?;
                    run.cache.unpin(pin.id)?;
                }
            }
            run.check()
        }
        _ => operate(run, faults, rng),
    }
}
