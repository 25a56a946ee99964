//! Differential tests: the same random operations on two devices, compared after every operation.
//!
//! Each device has its own [`CacheFixture`], which checks the device against the definition of the
//! formats and the oracle of attention. Beyond that, both devices are compared with each other:
//!
//! - results of calls, sharing of blocks and all counts, which must not depend on the device;
//! - the bytes of every cached row: equal wherever rows are not transformed, except a code or a
//!   scale that one device rounds to the other side, which its fixture has allowed;
//! - rows that are converted.
mod bytes;
mod choose;
mod compare;
mod geometry;

use std::fmt;

use kv_core::backend::AnyBackend;
use kv_core::{CacheError, DType, GroupId, StartOptions};

use crate::case::{At, CaseError, ensure};
use crate::device::dim;
use crate::fixture::{
    CacheFixture, Finish, LayerShape, StepConfig, StepKind, match_constants, seq,
};
use crate::model::Rows;
use crate::provenance;
use crate::rng::Rng;
use crate::suite::{ConstantRanges, End, check_gather, constants, convert};
use choose::Operation;
use geometry::Geometry;

/// Variable that replaces the seed of the first run.
pub const SEED_VARIABLE: &str = "KV_CONFORMANCE_SEED";
/// Variable that replaces the number of runs.
pub const RUNS_VARIABLE: &str = "KV_CONFORMANCE_RUNS";

/// Operations per run.
const OPERATIONS: usize = 14;

/// Coverage counts of random runs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Coverage {
    /// Operations, including those without effect.
    pub operations: u64,
    /// Steps that were written and attended.
    pub steps: u64,
    /// Steps that were refused because the pool lacked blocks.
    pub refused: u64,
    /// Tokens reused from other sequences.
    pub reused: u64,
    /// Forks and truncations.
    pub shared: u64,
    /// Batches of gathered rows.
    pub gathers: u64,
    /// Batches of rows converted.
    pub conversions: u64,
    /// Rows whose bytes were compared and are equal.
    pub rows_equal: u64,
    /// Rows whose bytes differ within the limits of their format.
    pub rows_rounded: u64,
}

/// Runs `runs` random runs with the seeds from `first` on; the variables [`SEED_VARIABLE`] and
/// [`RUNS_VARIABLE`] replace either number.
///
/// # Errors
/// The first broken guarantee, and how to reproduce it.
pub fn run_all(
    one: &AnyBackend,
    two: &AnyBackend,
    (first, runs): (u64, u64),
) -> Result<Coverage, CaseError> {
    let number = |variable: &str, default| match std::env::var(variable) {
        Err(_) => Ok(default),
        Ok(text) => text.parse().map_err(|_| format!("{variable} is not a number: {text}")),
    };
    let (first, runs) = (number(SEED_VARIABLE, first)?, number(RUNS_VARIABLE, runs)?);
    let mut all = Coverage::default();
    // Either may be any number.
    for seed in first..first.saturating_add(runs) {
        let place = format!("{SEED_VARIABLE}={seed} {RUNS_VARIABLE}=1");
        all = run(one, two, seed, all).map_err(|error| format!("{place}: {error}"))?;
    }
    Ok(all)
}

/// Runs one random run and adds its counts to `coverage`.
fn run(
    one: &AnyBackend,
    two: &AnyBackend,
    number: u64,
    coverage: Coverage,
) -> Result<Coverage, CaseError> {
    let mut rng = Rng::new(number);
    let geometry = geometry::choose(&mut rng, number, |wanted| {
        // The second pass finds a multiple of both devices' steps.
        dim(one, dim(two, dim(one, dim(two, wanted))))
    })?;
    let spec = geometry.spec.clone();
    let given = constants(&spec, RANGES, number);
    let place = |at: &str| format!("{at}, {spec:?}");
    let one = CacheFixture::calibrated(one, spec.clone(), given.clone(), number)
        .at(place("the first"))?;
    let two = CacheFixture::calibrated(two, spec.clone(), given, number).at(place("the second"))?;
    let shapes = one.layers().to_vec();
    let mut pair =
        DevicePair { one, two, geometry, shapes, rng, sequences: Vec::new(), next: 1, coverage };
    for index in 0..OPERATIONS {
        let operation = pair.choose();
        let done = pair.operate(&operation).and_then(|()| pair.compare());
        done.at(format!("operation {index}, {operation:?}, {spec:?}"))?;
        pair.coverage.operations += 1;
    }
    Ok(pair.coverage)
}

/// Means as in a model, but small enough that scores differ.
const RANGES: ConstantRanges = ConstantRanges { mean: 3.0, balance: 1.0 };

/// A sequence on both devices.
#[derive(Debug, Clone)]
struct TrackedSequence {
    id: u64,
    /// The part of the prompt that is not computed yet.
    prompt: Vec<u32>,
    /// Committed tokens.
    tokens: Vec<u32>,
}

struct DevicePair {
    one: CacheFixture,
    two: CacheFixture,
    geometry: Geometry,
    /// Shapes of the layers before any recalibration.
    shapes: Vec<LayerShape>,
    rng: Rng,
    sequences: Vec<TrackedSequence>,
    next: u64,
    coverage: Coverage,
}

/// Fails unless both devices returned the same.
fn agreed<T: PartialEq + fmt::Debug>(
    what: &str,
    one: Result<T, impl Into<CaseError>>,
    two: Result<T, impl Into<CaseError>>,
) -> Result<T, CaseError> {
    let (one, two) = (one.at("the first device")?, two.at("the second device")?);
    ensure(one == two, || format!("{what}: {one:?} on the first device, {two:?} on the second"))?;
    Ok(one)
}

impl DevicePair {
    fn operate(&mut self, operation: &Operation) -> Result<(), CaseError> {
        match operation {
            Operation::Start { prompt } => self.start(prompt),
            Operation::Step { entries, config } => self.step(entries, config),
            Operation::Fork(which) => {
                let parent = self.sequences[*which].clone();
                let id = self.new_id();
                agreed("fork", self.one.fork(parent.id, id), self.two.fork(parent.id, id))?;
                self.coverage.shared += 1;
                self.sequences.push(TrackedSequence { id, ..parent });
                Ok(())
            }
            Operation::Truncate(which, len) => {
                let sequence = &mut self.sequences[*which];
                sequence.tokens.truncate(*len as usize);
                sequence.prompt.clear();
                self.coverage.shared += 1;
                let id = sequence.id;
                agreed("truncate", self.one.truncate(id, *len), self.two.truncate(id, *len))
            }
            Operation::Release(which) => {
                let id = self.sequences.remove(*which).id;
                agreed("release", self.one.release(id), self.two.release(id))
            }
            Operation::Gather { layer, ranges, form } => {
                let range = |(which, begin, len): &(usize, u32, u32)| {
                    (seq(self.sequences[*which].id), *begin, *len)
                };
                let ranges: Vec<_> = ranges.iter().map(range).collect();
                self.coverage.gathers += 1;
                let one = check_gather(&mut self.one, *layer, &ranges, *form);
                agreed("gather", one, check_gather(&mut self.two, *layer, &ranges, *form))
            }
            Operation::Convert { lens, heads_dim, ends } => self.convert(lens, *heads_dim, *ends),
            Operation::Recalibrate(seed) => {
                let given = constants(&self.geometry.spec, RANGES, *seed);
                let one = self.one.recalibrate(given.clone());
                agreed("recalibrate", one, self.two.recalibrate(given))
            }
            Operation::Nothing => Ok(()),
        }
    }

    fn new_id(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn start(&mut self, prompt: &[u32]) -> Result<(), CaseError> {
        let id = self.new_id();
        let mut sequence = TrackedSequence { id, prompt: Vec::new(), tokens: Vec::new() };
        if self.geometry.shares {
            let (shapes, dtype) = (&self.shapes, self.geometry.dtype);
            let rows = |len: u32| rows(shapes, dtype, &prompt[..len as usize], 0);
            let one = self.one.start_prompt(id, prompt, rows);
            let reused = agreed("reused tokens", one, self.two.start_prompt(id, prompt, rows))?;
            self.coverage.reused += u64::from(reused);
            sequence.tokens = prompt[..reused as usize].to_vec();
            sequence.prompt = prompt[reused as usize..].to_vec();
        } else {
            agreed("start", self.one.start(id), self.two.start(id))?;
        }
        self.sequences.push(sequence);
        Ok(())
    }

    fn step(
        &mut self,
        entries: &[(usize, StepKind)],
        config: &StepConfig,
    ) -> Result<(), CaseError> {
        let new: Vec<_> = entries.iter().map(|(which, kind)| self.tokens(*which, *kind)).collect();
        let pairs = || entries.iter().zip(&new);
        let list = || -> Vec<_> {
            let token_ids = |new| Some(new).filter(|_| self.geometry.shares);
            pairs()
                .map(|((which, kind), new)| {
                    kind.input(seq(self.sequences[*which].id), token_ids(new))
                })
                .collect()
        };
        let demands =
            |demand: kv_core::scheduling::BlockDemand| (demand.needed, demand.free, demand.fits());
        let one = self.one.cache.state().blocks_for_step(GroupId(0), &list()).map(demands);
        let two = self.two.cache.state().blocks_for_step(GroupId(0), &list()).map(demands);
        if !agreed("blocks for a step", one, two)?.2 {
            let refused = [
                self.one.cache.begin_step(&list()).map(drop),
                self.two.cache.begin_step(&list()).map(drop),
            ];
            let is_full = |one: &Result<(), _>| matches!(one, Err(CacheError::Exhausted(_)));
            self.coverage.refused += 1;
            return ensure(refused.iter().all(is_full), || {
                format!("does not fit, but {refused:?}")
            });
        }
        let all = |which: usize, new: &[u32]| [&self.sequences[which].tokens, new].concat();
        let begins = |which: usize| self.sequences[which].tokens.len();
        let rows: Vec<_> = pairs()
            .map(|((which, _), new)| {
                let all = all(*which, new);
                rows(&self.shapes, self.geometry.dtype, &all, begins(*which))
            })
            .collect();
        let inputs: Vec<_> =
            entries.iter().map(|(which, b)| (self.sequences[*which].id, *b)).collect();
        if self.geometry.shares {
            for ((id, kind), new) in inputs.iter().zip(&new) {
                if matches!(kind, StepKind::Tokens(_)) {
                    self.one.set_token_ids(*id, new);
                    self.two.set_token_ids(*id, new);
                }
            }
        }
        self.one.step_with(&inputs, &rows, config).at("the first device")?;
        self.two.step_with(&inputs, &rows, config).at("the second device")?;
        self.coverage.steps += 1;
        if config.finish == Finish::Commit {
            for ((which, _), new) in entries.iter().zip(&new) {
                let sequence = &mut self.sequences[*which];
                let used = new.len().min(sequence.prompt.len());
                sequence.prompt.drain(..used);
                sequence.tokens.extend(new);
            }
        }
        Ok(())
    }

    /// Returns the tokens of an entry: those of its prompt first.
    fn tokens(&mut self, which: usize, kind: StepKind) -> Vec<u32> {
        let StepKind::Tokens(n) = kind else { return Vec::new() };
        let sequence = &self.sequences[which];
        let mut tokens: Vec<_> = sequence.prompt.iter().copied().take(n as usize).collect();
        while tokens.len() < n as usize {
            tokens.push(self.rng.below(1 << 20));
        }
        tokens
    }

    fn convert(
        &mut self,
        lens: &[usize],
        heads_dim: [usize; 2],
        ends: [End; 2],
    ) -> Result<(), CaseError> {
        let width = heads_dim[0] * heads_dim[1];
        let made: Vec<Vec<f32>> = lens.iter().map(|len| self.rng.normals(len * width)).collect();
        let round = |x: &f32| crate::oracle::round::round_f32(ends[0].dtype, *x);
        let made: Vec<_> = made.iter().map(|rows| rows.iter().map(round).collect()).collect();
        let one = convert(&self.one.backend, &made, heads_dim, ends);
        agreed("converted", one, convert(&self.two.backend, &made, heads_dim, ends))?;
        self.coverage.conversions += 1;
        Ok(())
    }
}

/// Makes K and V of the tokens from position `first` on; each row depends on all tokens up to its
/// own.
fn rows(shapes: &[LayerShape], dtype: DType, tokens: &[u32], first: usize) -> Rows {
    let hashes = provenance::prefix_hashes(tokens, &StartOptions::default());
    let plane = |(shape, layer): (&LayerShape, u64)| {
        [0, 1].map(|plane| {
            let stored = &shape.stored[plane];
            let row = |name: &provenance::PrefixHash| {
                let seed = name.wrapping_add(layer << 8 | plane as u64);
                Rng::new(seed).normals(stored.width())
            };
            match_constants(stored, hashes[first..].iter().flat_map(row).collect(), dtype)
        })
    };
    shapes.iter().zip(0..).map(plane).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_that_differ_are_refused() {
        let answer = |n: u32| Ok::<_, CacheError>(n);
        assert_eq!(agreed("a number", answer(1), answer(1)).unwrap(), 1);
        let error = agreed("a number", answer(1), answer(2)).unwrap_err().to_string();
        assert!(error.contains("a number: 1 on the first device, 2 on the second"), "{error}");
    }

    /// Every geometry that may be chosen can be built.
    #[test]
    fn geometries_are_possible() {
        for (number, fit) in (0..3000_u64).zip([1, 4, 8].into_iter().cycle()) {
            let fit = |wanted: u32| wanted.next_multiple_of(fit);
            let chosen = geometry::choose(&mut Rng::new(number), number, fit);
            assert!(chosen.is_ok(), "{number}: {chosen:?}");
        }
    }
}
