//! Stateful tests with prefix reuse, and the same operations in pools of every size.
use super::case;
use crate::case::{At, Case, CaseError, CaseResult, Outcome, ensure};
use crate::device::Device;
use crate::lives::{Happened, Lived, live, live_in};
use crate::rng::Rng;

pub(super) fn cases<B: Device>() -> Vec<Case<B>> {
    vec![case("random/reuse", random), case("random/reuse_in_pools_of_every_size", every_size)]
}

/// Number of runs of `random/reuse`, unless [`RUNS_VARIABLE`] is set.
const LIVES: u64 = 200;
/// Variable that replaces the number of runs of `random/reuse`.
const LIVES_VARIABLE: &str = "KV_CONFORMANCE_LIVES";
/// Variable that replaces the fixed seed.
const SEED_VARIABLE: &str = "KV_CONFORMANCE_SEED";
/// Bytes per run.
const BYTES: usize = 1500;
/// Number of scripts that are run in every pool.
const SCRIPTS: u64 = 12;
const PLENTY: u32 = 180;
/// After this number of pool sizes in a row without a refusal, larger pools are not tried.
const QUIET: u32 = 4;

fn number(variable: &str, default: u64) -> Result<u64, CaseError> {
    match std::env::var(variable) {
        Err(_) => Ok(default),
        Ok(text) => text.parse().map_err(|_| format!("{variable} is not a number: {text}").into()),
    }
}

fn bytes(seed: u64, len: usize) -> Vec<u8> {
    let mut rng = Rng::new(seed);
    (0..len).map(|_| (rng.bits() >> 32) as u8).collect()
}

fn random<B: Device>(backend: &B) -> CaseResult {
    let (lives, first) = (number(LIVES_VARIABLE, LIVES)?, number(SEED_VARIABLE, 1)?);
    let begin = std::time::Instant::now();
    let mut total = Lived::default();
    for seed in first..first + lives {
        let one = live(backend, &bytes(seed, BYTES));
        total = total.and(one.at(format!("{SEED_VARIABLE}={seed} {LIVES_VARIABLE}=1"))?);
    }
    if lives != LIVES || first != 1 {
        use std::io::Write;
        let _ = writeln!(std::io::stdout(), "{lives} lives, {total:?}, {:?}", begin.elapsed());
        return Ok(Outcome::Holds);
    }
    // Fail if the runs have become short or empty.
    let count = |what| total.count(what);
    let operations = count(Happened::Operated);
    let least = operations.min(total.refused() * 20).min(count(Happened::Reused) * 4);
    let least = least.min(count(Happened::Evicted) * 4);
    ensure(least > lives * 20, || format!("{lives} lives saw no more than {total:?}"))?;
    // Fail if a behaviour is no longer covered.
    let missing = total.missing();
    ensure(missing.is_empty(), || format!("{missing:?} never happened: {total:?}"))?;
    Ok(Outcome::Holds)
}

/// Runs each script in pools of growing size, so that every allocation is refused in some pool.
fn every_size<B: Device>(backend: &B) -> CaseResult {
    for script in 0..SCRIPTS {
        let bytes = bytes(1 << 32 | script, 400);
        let (mut refused, mut some, mut quiet) = (0, 0, 0);
        // Up to the size without refusals, and in the largest pool.
        for blocks in 1..=PLENTY {
            if quiet >= QUIET && blocks < PLENTY {
                continue;
            }
            let lived = live_in(backend, &bytes, Some(blocks));
            let lived = lived.at(format!("script {script}, {blocks} blocks"))?;
            refused = lived.refused();
            some += u32::from(refused > 0);
            let is_quiet = refused == 0 && lived.count(Happened::Operated) > 0;
            quiet = if is_quiet { quiet + 1 } else { 0 };
        }
        // The largest pool never refuses, and several smaller ones do.
        ensure(refused == 0, || format!("script {script}: refused with {PLENTY} blocks"))?;
        ensure(some > 3, || format!("script {script}: refused in {some} pools only"))?;
    }
    Ok(Outcome::Holds)
}
