//! The same random life on two devices, compared after every operation.
//!
//! Each device has a [`Lab`] of its own, which holds it to the definition of the formats and to the
//! oracle of attention. What only a pair can show is compared between both:
//!
//! - what the cache answers, who shares blocks, and its counts, which no device may have a say in;
//! - the bytes of every cached row: equal wherever rows are not transformed, but for a code or a
//!   scale on which one device rounds to the other side, which its lab has allowed;
//! - rows that are converted.
mod bytes;
mod choose;
mod compare;
mod geometry;

use std::fmt;

use kv_core::{CacheError, DType, GroupId, StartOptions};

use crate::case::{At, CaseError, ensure};
use crate::device::{Device, dim};
use crate::lab::{Brings, Finish, How, Lab, LayerShape, liken, seq};
use crate::model::Rows;
use crate::named;
use crate::rng::Rng;
use crate::suite::{End, Likeness, check_gather, constants, convert};
use choose::Operation;
use geometry::Geometry;

/// Replaces the seed of the first life.
pub const SEED_VARIABLE: &str = "KV_CONFORMANCE_SEED";
/// Replaces the number of lives.
pub const LIVES_VARIABLE: &str = "KV_CONFORMANCE_LIVES";

/// Operations of a life.
const OPERATIONS: usize = 14;

/// What happened in lives.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Paired {
    /// Operations, those included that had nothing to do.
    pub operations: u64,
    /// Steps that were written and attended.
    pub steps: u64,
    /// Steps for which there were too few blocks.
    pub refused: u64,
    /// Tokens taken over from other sequences.
    pub reused: u64,
    /// Forks and truncations.
    pub shared: u64,
    /// Batches of rows read in a form of their own.
    pub gathers: u64,
    /// Batches of rows converted.
    pub conversions: u64,
    /// Rows whose bytes were compared, and were the same.
    pub rows_alike: u64,
    /// Rows that differ as formats allow.
    pub rows_apart: u64,
}

/// Lives the lives of `lives` seeds on both devices, `first` the first of them; the variables
/// [`SEED_VARIABLE`] and [`LIVES_VARIABLE`] replace either number.
///
/// # Errors
/// The first promise that was broken, and how to see it again.
pub fn live_all<A: Device, B: Device>(
    one: &A,
    two: &B,
    (first, lives): (u64, u64),
) -> Result<Paired, CaseError> {
    let number = |variable: &str, default| match std::env::var(variable) {
        Err(_) => Ok(default),
        Ok(text) => text.parse().map_err(|_| format!("{variable} is no number: {text}")),
    };
    let (first, lives) = (number(SEED_VARIABLE, first)?, number(LIVES_VARIABLE, lives)?);
    let mut all = Paired::default();
    for seed in first..first.saturating_add(lives) {
        let place = format!("{SEED_VARIABLE}={seed} {LIVES_VARIABLE}=1");
        all = live(one, two, seed, all).map_err(|error| format!("{place}: {error}"))?;
    }
    Ok(all)
}

/// Lives one life; adds what happened to what did before.
fn live<A: Device, B: Device>(
    one: &A,
    two: &B,
    number: u64,
    seen: Paired,
) -> Result<Paired, CaseError> {
    let mut rng = Rng::new(number);
    let geometry = geometry::choose(&mut rng, number, |wanted| {
        // A multiple of what either takes is found at the second look.
        dim(one, dim(two, dim(one, dim(two, wanted))))
    })?;
    let spec = geometry.spec.clone();
    let given = constants(&spec, LIKE, number);
    let place = |at: &str| format!("{at}, {spec:?}");
    let one = Lab::calibrated(one, spec.clone(), given.clone(), number).at(place("the first"))?;
    let two = Lab::calibrated(two, spec.clone(), given, number).at(place("the second"))?;
    let shapes = one.layers().to_vec();
    let mut pair = Pair { one, two, geometry, shapes, rng, sequences: Vec::new(), next: 1, seen };
    for index in 0..OPERATIONS {
        let operation = pair.choose();
        let done = pair.operate(&operation).and_then(|()| pair.compare());
        done.at(format!("operation {index}, {operation:?}, {spec:?}"))?;
        pair.seen.operations += 1;
    }
    Ok(pair.seen)
}

/// As in a model, but not so large that scores are all alike.
const LIKE: Likeness = Likeness { mean: 3.0, balance: 1.0 };

/// A sequence on both devices.
#[derive(Debug, Clone)]
struct Known {
    id: u64,
    /// Of its prompt, what may still come.
    prompt: Vec<u32>,
    /// Committed.
    tokens: Vec<u32>,
}

struct Pair<A: Device, B: Device> {
    one: Lab<A>,
    two: Lab<B>,
    geometry: Geometry,
    /// Of the layers when they were new.
    shapes: Vec<LayerShape>,
    rng: Rng,
    sequences: Vec<Known>,
    next: u64,
    seen: Paired,
}

/// What both devices answered, which must be the same.
fn agreed<T: PartialEq + fmt::Debug>(
    what: &str,
    one: Result<T, impl Into<CaseError>>,
    two: Result<T, impl Into<CaseError>>,
) -> Result<T, CaseError> {
    let (one, two) = (one.at("the first device")?, two.at("the second device")?);
    ensure(one == two, || format!("{what}: {one:?} on the first device, {two:?} on the second"))?;
    Ok(one)
}

impl<A: Device, B: Device> Pair<A, B> {
    fn operate(&mut self, operation: &Operation) -> Result<(), CaseError> {
        match operation {
            Operation::Start { prompt } => self.start(prompt),
            Operation::Step { entries, how } => self.step(entries, how),
            Operation::Fork(which) => {
                let parent = self.sequences[*which].clone();
                let id = self.new_id();
                agreed("fork", self.one.fork(parent.id, id), self.two.fork(parent.id, id))?;
                self.seen.shared += 1;
                self.sequences.push(Known { id, ..parent });
                Ok(())
            }
            Operation::Truncate(which, len) => {
                let known = &mut self.sequences[*which];
                known.tokens.truncate(*len as usize);
                known.prompt.clear();
                self.seen.shared += 1;
                let id = known.id;
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
                self.seen.gathers += 1;
                let one = check_gather(&mut self.one, *layer, &ranges, *form);
                agreed("gather", one, check_gather(&mut self.two, *layer, &ranges, *form))
            }
            Operation::Convert { lens, heads_dim, ends } => self.convert(lens, *heads_dim, *ends),
            Operation::Recalibrate(seed) => {
                let given = constants(&self.geometry.spec, LIKE, *seed);
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
        let mut known = Known { id, prompt: Vec::new(), tokens: Vec::new() };
        if self.geometry.shares {
            let (shapes, dtype) = (&self.shapes, self.geometry.dtype);
            let rows = |len: u32| rows(shapes, dtype, &prompt[..len as usize], 0);
            let one = self.one.start_prompt(id, prompt, rows);
            let reused = agreed("tokens taken over", one, self.two.start_prompt(id, prompt, rows))?;
            self.seen.reused += u64::from(reused);
            known.tokens = prompt[..reused as usize].to_vec();
            known.prompt = prompt[reused as usize..].to_vec();
        } else {
            agreed("start", self.one.start(id), self.two.start(id))?;
        }
        self.sequences.push(known);
        Ok(())
    }

    fn step(&mut self, entries: &[(usize, Brings)], how: &How) -> Result<(), CaseError> {
        let new: Vec<_> =
            entries.iter().map(|(which, brings)| self.tokens(*which, *brings)).collect();
        let pairs = || entries.iter().zip(&new);
        let list = || -> Vec<_> {
            let told = |new| Some(new).filter(|_| self.geometry.shares);
            pairs()
                .map(|((which, brings), new)| {
                    brings.input(seq(self.sequences[*which].id), told(new))
                })
                .collect()
        };
        let demands = |demand: kv_core::BlockDemand| (demand.needed, demand.free, demand.fits());
        let one = self.one.cache.blocks_for_step(GroupId(0), &list()).map(demands);
        let two = self.two.cache.blocks_for_step(GroupId(0), &list()).map(demands);
        if !agreed("blocks for a step", one, two)?.2 {
            let refused = [
                self.one.cache.begin_step(&list()).map(drop),
                self.two.cache.begin_step(&list()).map(drop),
            ];
            let is_full = |one: &Result<(), _>| matches!(one, Err(CacheError::Exhausted(_)));
            self.seen.refused += 1;
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
            for ((id, brings), new) in inputs.iter().zip(&new) {
                if matches!(brings, Brings::Tokens(_)) {
                    self.one.tell(*id, new);
                    self.two.tell(*id, new);
                }
            }
        }
        self.one.step_with(&inputs, &rows, how).at("the first device")?;
        self.two.step_with(&inputs, &rows, how).at("the second device")?;
        self.seen.steps += 1;
        if how.finish == Finish::Commit {
            for ((which, _), new) in entries.iter().zip(&new) {
                let known = &mut self.sequences[*which];
                let told = new.len().min(known.prompt.len());
                known.prompt.drain(..told);
                known.tokens.extend(new);
            }
        }
        Ok(())
    }

    /// The tokens that an entry brings: those of its prompt first.
    fn tokens(&mut self, which: usize, brings: Brings) -> Vec<u32> {
        let Brings::Tokens(n) = brings else { return Vec::new() };
        let known = &self.sequences[which];
        let mut tokens: Vec<_> = known.prompt.iter().copied().take(n as usize).collect();
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
        self.seen.conversions += 1;
        Ok(())
    }
}

/// K and V of tokens from the `first` on, which follow from all tokens up to each.
fn rows(shapes: &[LayerShape], dtype: DType, tokens: &[u32], first: usize) -> Rows {
    let names = named::names(tokens, &StartOptions::default());
    let plane = |(shape, layer): (&LayerShape, u64)| {
        [0, 1].map(|plane| {
            let stored = &shape.stored[plane];
            let row = |name: &named::Name| {
                let seed = name.wrapping_add(layer << 8 | plane as u64);
                Rng::new(seed).normals(stored.width())
            };
            liken(stored, names[first..].iter().flat_map(row).collect(), dtype)
        })
    };
    shapes.iter().zip(0..).map(plane).collect()
}

#[cfg(test)]
mod tests {
    use kv_core::backend::NullBackend;

    use super::*;
    use crate::device::Shared;

    /// A device that stores nothing is found out, and the message says how to see it again.
    #[test]
    fn a_device_that_forgets_is_found_out() {
        let device = Shared::new(NullBackend::new());
        let error = live_all(&device, &device, (3, 2)).unwrap_err().to_string();
        assert!(error.starts_with("KV_CONFORMANCE_SEED=3 KV_CONFORMANCE_LIVES=1: "), "{error}");
    }

    #[test]
    fn answers_that_differ_are_refused() {
        let answer = |n: u32| Ok::<_, CacheError>(n);
        assert_eq!(agreed("a number", answer(1), answer(1)).unwrap(), 1);
        let error = agreed("a number", answer(1), answer(2)).unwrap_err().to_string();
        assert!(error.contains("a number: 1 on the first device, 2 on the second"), "{error}");
    }

    /// Every geometry that lives are made of can be built.
    #[test]
    fn geometries_are_possible() {
        for (number, fit) in (0..3000_u64).zip([1, 4, 8].into_iter().cycle()) {
            let fit = |wanted: u32| wanted.next_multiple_of(fit);
            let chosen = geometry::choose(&mut Rng::new(number), number, fit);
            assert!(chosen.is_ok(), "{number}: {chosen:?}");
        }
    }
}
