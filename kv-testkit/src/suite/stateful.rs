//! Stateful tests with prefix reuse, and the same operations in pools of every size.
use kv_core::backend::AnyBackend;

use super::case;
use crate::amount;
use crate::case::{At, Case, CaseError, CaseResult, Outcome, ensure};
use crate::rng::Rng;
use crate::stateful::{Behaviour, Coverage, run, run_with_blocks};

pub(super) fn cases() -> Vec<Case> {
    vec![case("random/reuse", random), case("random/reuse_in_pools_of_every_size", every_size)]
}

/// Number of runs of `random/reuse`, unless [`RUNS_VARIABLE`] is set.
const RUNS: u32 = 200;
/// Variable that replaces the number of runs of random operation sequences.
pub(super) const RUNS_VARIABLE: &str = "KV_CONFORMANCE_RUNS";
/// Variable that replaces the fixed seed.
const SEED_VARIABLE: &str = "KV_CONFORMANCE_SEED";
/// Bytes per run.
const BYTES: usize = 1500;
/// Number of scripts that are run in every pool.
const SCRIPTS: u32 = 12;
const PLENTY: u32 = 180;
/// After this number of pool sizes in a row without a refusal, larger pools are not tried.
const QUIET: u32 = 4;

/// Returns the number of a variable, or another one where it is not set.
pub(super) fn number(variable: &str, default: u64) -> Result<u64, CaseError> {
    match std::env::var(variable) {
        Err(_) => Ok(default),
        Ok(text) => text.parse().map_err(|_| format!("{variable} is not a number: {text}").into()),
    }
}

fn bytes(seed: u64, len: usize) -> Vec<u8> {
    let mut rng = Rng::new(seed);
    (0..len).map(|_| (rng.bits() >> 32) as u8).collect()
}

fn random(backend: &AnyBackend) -> CaseResult {
    let usual = u64::from(amount::runs(RUNS));
    let (runs, first) = (number(RUNS_VARIABLE, usual)?, number(SEED_VARIABLE, 1)?);
    let begin = std::time::Instant::now();
    let mut total = Coverage::default();
    for seed in first..first + runs {
        let one = run(backend, &bytes(seed, BYTES));
        total = total.and(one.at(format!("{SEED_VARIABLE}={seed} {RUNS_VARIABLE}=1"))?);
    }
    if runs != usual || first != 1 {
        use std::io::Write;
        let _ = writeln!(std::io::stdout(), "{runs} runs, {total:?}, {:?}", begin.elapsed());
        return Ok(Outcome::Holds);
    }
    // Fail if the runs have become short or empty.
    let count = |what| total.count(what);
    let operations = count(Behaviour::Operation);
    let least = operations.min(total.refused() * 20).min(count(Behaviour::Reused) * 4);
    let least = least.min(count(Behaviour::Evicted) * 4);
    ensure(least > runs * 20, || format!("{runs} runs saw no more than {total:?}"))?;
    // Fail if a behaviour is no longer covered; the rare ones need all runs.
    let missing = if usual == u64::from(RUNS) { total.missing() } else { Vec::new() };
    ensure(missing.is_empty(), || format!("{missing:?} never happened: {total:?}"))?;
    Ok(Outcome::Holds)
}

/// Runs each script in pools of growing size, so that every allocation is refused in some pool.
fn every_size(backend: &AnyBackend) -> CaseResult {
    for script in 0..u64::from(amount::runs(SCRIPTS)) {
        let bytes = bytes(1 << 32 | script, 400);
        let (mut refused, mut some, mut quiet) = (0, 0, 0);
        // Up to the size without refusals, and in the largest pool.
        for blocks in 1..=PLENTY {
            if quiet >= QUIET && blocks < PLENTY {
                continue;
            }
            let coverage = run_with_blocks(backend, &bytes, Some(blocks));
            let coverage = coverage.at(format!("script {script}, {blocks} blocks"))?;
            refused = coverage.refused();
            some += u32::from(refused > 0);
            let is_quiet = refused == 0 && coverage.count(Behaviour::Operation) > 0;
            quiet = if is_quiet { quiet + 1 } else { 0 };
        }
        // The largest pool never refuses, and several smaller ones do.
        ensure(refused == 0, || format!("script {script}: refused with {PLENTY} blocks"))?;
        ensure(some > 3, || format!("script {script}: refused in {some} pools only"))?;
    }
    Ok(Outcome::Holds)
}
