//! Recurrent states as tensors of candle, against the same recurrence over the whole text.
#![expect(clippy::unwrap_used, reason = "tests")]
use std::collections::BTreeMap;

use candle_core::{DType, Device, Tensor};
use kv_candle::kv::error::PlanError;
use kv_candle::kv::{AttentionOptions, CacheError, CacheSpec, KvFormat, LayerId};
use kv_candle::kv::{SequenceId, StartOptions, StepInput};
use kv_candle::{CandleCache, CandleStep, Error, kv};

/// The layer with rows, and the one with a state.
const ROWS: usize = 0;
const STATE: usize = 1;
/// Extents of the parts of the state.
const PARTS: [&[usize]; 2] = [&[3, 2], &[5]];

fn cache() -> CandleCache {
    let spec = CacheSpec::builder().layers(2).kv_heads(1).head_dim(4).format(KvFormat::F32);
    let spec = spec.paged(4, 64).states([1], |states| {
        let states = states.part([3, 2], kv::DType::F32);
        states.part([5], kv::DType::Bf16).slots(16).drafts(3)
    });
    CandleCache::new(&Device::Cpu, spec.build().unwrap()).unwrap()
}

/// The values of a part behind some tokens: whole numbers below 251, which bf16 keeps.
fn expected(part: usize, tokens: &[u32]) -> Vec<f32> {
    let count = PARTS[part].iter().product();
    let start = vec![0_u32; count];
    let state = tokens.iter().fold(start, |state, token| {
        (0_u32..).zip(&state).map(|(at, value)| (value * 3 + token + at) % 251).collect()
    });
    state.into_iter().map(|value| f32::from(u16::try_from(value).unwrap())).collect()
}

/// One sequence in a step: its new tokens, and how many of these are drafts.
#[derive(Clone, Copy)]
struct Entry<'a> {
    sequence: u64,
    tokens: &'a [u32],
    drafts: u32,
}

fn entry(sequence: u64, tokens: &[u32]) -> Entry<'_> {
    Entry { sequence, tokens, drafts: 0 }
}

/// A cache, and the tokens that its sequences stand for.
struct Run {
    cache: CandleCache,
    texts: BTreeMap<u64, Vec<u32>>,
}

impl Run {
    fn new(sequences: &[u64]) -> Self {
        let mut cache = cache();
        for id in sequences {
            cache.kv_mut().start(SequenceId(*id), &[], StartOptions::default()).unwrap();
        }
        Self { cache, texts: sequences.iter().map(|id| (*id, vec![])).collect() }
    }

    /// Runs a step, which reads and writes all states, and is ended by `end`.
    fn step(
        &mut self,
        entries: &[Entry<'_>],
        end: impl FnOnce(CandleStep<'_>) -> Result<(), Error>,
    ) {
        let inputs: Vec<_> = entries
            .iter()
            .map(|entry| match entry.tokens {
                [] => StepInput::idle(SequenceId(entry.sequence)),
                tokens => {
                    StepInput::tokens(SequenceId(entry.sequence), tokens).with_drafts(entry.drafts)
                }
            })
            .collect();
        let step = self.cache.step(&inputs).unwrap();
        let count = entries.iter().map(|entry| entry.tokens.len()).sum::<usize>();
        let rows = Tensor::zeros((count, 1, 4), DType::F32, &Device::Cpu).unwrap();
        step.attend(ROWS, &rows, &rows, &rows, &AttentionOptions::causal(0.5)).unwrap();
        for part in 0..PARTS.len() {
            compute(&step, &self.texts, entries, part);
        }
        end(step).unwrap();
    }

    fn commit(&mut self, entries: &[Entry<'_>]) {
        self.step(entries, commit);
        for entry in entries {
            self.texts.get_mut(&entry.sequence).unwrap().extend(entry.tokens);
        }
    }

    /// Reads the states of all sequences in a step without tokens.
    fn check(&mut self) {
        let ids: Vec<_> = self.texts.keys().copied().collect();
        let entries: Vec<_> = ids.iter().map(|id| entry(*id, &[])).collect();
        self.step(&entries, commit);
    }
}

fn commit(step: CandleStep<'_>) -> Result<(), Error> {
    step.commit()
}

/// Compares the states of a part before the step with those of the texts, and writes the next.
fn compute(
    step: &CandleStep<'_>,
    texts: &BTreeMap<u64, Vec<u32>>,
    entries: &[Entry<'_>],
    part: usize,
) {
    let shape = [&[entries.len()], PARTS[part]].concat();
    let read = step.state(STATE, part).unwrap();
    assert_eq!((read.dims(), read.dtype()), (shape.as_slice(), DType::F32));
    let all = |tokens: usize| {
        let of = |entry: &Entry<'_>| {
            let new = &entry.tokens[..tokens.min(entry.tokens.len())];
            expected(part, &[&texts[&entry.sequence], new].concat())
        };
        let values: Vec<_> = entries.iter().flat_map(of).collect();
        Tensor::from_vec(values, shape.as_slice(), &Device::Cpu).unwrap()
    };
    assert_eq!(values(&read), values(&all(0)));
    let most = entries.iter().map(|entry| entry.tokens.len()).max().unwrap_or(0);
    for tokens in 1..=most {
        let kept = |(at, entry): (usize, &Entry<'_>)| {
            let keeps = step.keeps_state_after(STATE, at, tokens).unwrap();
            let drafts = usize::try_from(entry.drafts).unwrap();
            assert_eq!(keeps, (0..=drafts).any(|from| tokens + from == entry.tokens.len()));
            keeps
        };
        let kept = entries.iter().enumerate().map(kept).collect::<Vec<_>>();
        if kept.contains(&true) {
            step.set_state_after(STATE, part, tokens, &all(tokens)).unwrap();
        }
    }
    step.set_state(STATE, part, &all(most)).unwrap();
}

fn values(tensor: &Tensor) -> Vec<f32> {
    tensor.flatten_all().unwrap().to_vec1().unwrap()
}

#[test]
fn ragged_batches_read_what_each_sequence_left() {
    let mut run = Run::new(&[1, 2, 3]);
    run.commit(&[entry(1, &[7, 8, 9, 10, 11]), entry(3, &[4])]);
    run.commit(&[entry(2, &[1, 2]), entry(1, &[12]), entry(3, &[])]);
    run.commit(&[entry(3, &[5, 6, 7]), entry(2, &[3]), entry(1, &[13, 14])]);
    run.check();
    // A sequence that begins again begins with zeros.
    run.cache.kv_mut().release(SequenceId(2)).unwrap();
    run.cache.kv_mut().start(SequenceId(2), &[], StartOptions::default()).unwrap();
    run.texts.insert(2, vec![]);
    run.commit(&[entry(1, &[15]), entry(2, &[9, 9])]);
    run.check();
}

#[test]
fn entries_are_the_rows_of_each_sequence() {
    let mut run = Run::new(&[1, 2, 3]);
    let step = run.cache.step(&[
        StepInput::tokens(SequenceId(1), &[7, 8, 9]),
        StepInput::idle(SequenceId(2)),
        StepInput::tokens(SequenceId(3), &[4]),
    ]);
    let step = step.unwrap();
    assert_eq!(step.entries(), [0..3, 3..3, 3..4]);
    assert_eq!(step.positions().to_vec1::<u32>().unwrap(), [0, 1, 2, 0]);
}

#[test]
fn forks_go_on_from_the_state_of_their_parent() {
    let mut run = Run::new(&[1]);
    run.commit(&[entry(1, &[7, 8, 9])]);
    run.cache.kv_mut().fork(SequenceId(1), SequenceId(2)).unwrap();
    let text = run.texts[&1].clone();
    run.texts.insert(2, text);
    run.commit(&[entry(2, &[20]), entry(1, &[21, 22])]);
    run.commit(&[entry(1, &[23])]);
    run.check();
}

#[test]
fn a_step_that_is_dropped_leaves_the_states_before_it() {
    let mut run = Run::new(&[1, 2]);
    run.commit(&[entry(1, &[7, 8, 9])]);
    run.step(&[entry(1, &[10, 11]), entry(2, &[5])], |step| {
        drop(step);
        Ok(())
    });
    run.check();
    run.commit(&[entry(2, &[6]), entry(1, &[12])]);
    run.check();
}

#[test]
fn accepted_drafts_leave_the_state_behind_the_last_of_them() {
    for accepted in [[2, 5, 1], [3, 4, 1], [4, 3, 2], [5, 2, 3]] {
        let mut run = Run::new(&[1, 2, 3]);
        run.commit(&[entry(1, &[7, 8, 9])]);
        let drafts = |sequence, tokens, drafts| Entry { sequence, tokens, drafts };
        let entries = [
            drafts(1, &[10, 11, 12, 13, 14][..], 3),
            drafts(2, &[20, 21, 22, 23, 24], 3),
            drafts(3, &[30, 31, 32], 2),
        ];
        run.step(&entries, |step| step.commit_accepted(&accepted));
        for (entry, accepted) in entries.iter().zip(accepted) {
            let kept = &entry.tokens[..usize::try_from(accepted).unwrap()];
            run.texts.get_mut(&entry.sequence).unwrap().extend(kept);
        }
        run.check();
        run.commit(&[entry(3, &[1]), entry(1, &[2])]);
        run.check();
    }
}

#[test]
fn tensors_of_other_types_and_layouts_are_converted() {
    let mut run = Run::new(&[1]);
    let step = run.cache.step(&[StepInput::tokens(SequenceId(1), &[7])]).unwrap();
    let written = Tensor::from_vec((0..12_u32).collect(), (1, 3, 4), &Device::Cpu).unwrap();
    // Two of four columns, and a second entry that the step does not have.
    let part = written.narrow(2, 1, 2).unwrap();
    let part = Tensor::cat(&[&part, &part], 0).unwrap();
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        step.set_state(STATE, 0, &part.to_dtype(dtype).unwrap()).unwrap();
    }
    assert_eq!(step.copies(), 0);
    let apart = written.to_dtype(DType::F32).unwrap().narrow(2, 1, 2).unwrap();
    step.set_state(STATE, 0, &apart).unwrap();
    assert_eq!(step.copies(), 1);
    step.set_state(STATE, 1, &Tensor::zeros((1, 5), DType::F32, &Device::Cpu).unwrap()).unwrap();
    let rows = Tensor::zeros((1, 1, 4), DType::F32, &Device::Cpu).unwrap();
    step.attend(ROWS, &rows, &rows, &rows, &AttentionOptions::causal(0.5)).unwrap();
    step.commit().unwrap();
    let step = run.cache.step(&[StepInput::idle(SequenceId(1))]).unwrap();
    assert_eq!(values(&step.state(STATE, 0).unwrap()), [1.0, 2.0, 5.0, 6.0, 9.0, 10.0]);
}

#[test]
fn what_does_not_fit_is_refused_and_the_step_goes_on() {
    let mut run = Run::new(&[1, 2]);
    run.commit(&[entry(1, &[7, 8, 9])]);
    run.step(&[entry(1, &[10]), entry(2, &[5, 6])], |step| {
        let zeros = |dims: &[usize]| Tensor::zeros(dims, DType::F32, &Device::Cpu).unwrap();
        let good = zeros(&[2, 3, 2]);
        let words = |refused: candle_core::Result<()>, words: &str| {
            let error = refused.unwrap_err().to_string();
            assert!(error.contains(words), "{error}, expected {words}");
        };
        let read = |layer, part| step.state(layer, part).map(drop);
        words(read(ROWS, 0), "layer 0 has no state");
        words(read(2, 0), "layer 2 is unknown, the cache has 2 layers");
        words(read(70_000, 0), "a cache has no layer 70000");
        words(read(STATE, 2), "layer 1 has no part 2, its state has 2");
        words(step.set_state(ROWS, 0, &good), "layer 0 has no state");
        words(step.set_state(STATE, 2, &good), "layer 1 has no part 2, its state has 2");
        words(step.set_state(STATE, 0, &zeros(&[1, 3, 2])), "[1, 3, 2]");
        words(step.set_state(STATE, 0, &zeros(&[2, 2, 3])), "[2, 2, 3]");
        words(step.set_state(STATE, 0, &zeros(&[2, 6])), "state has shape [2, 6]");
        words(step.set_state(STATE, 0, &zeros(&[2, 3, 2, 1, 4])), "state has shape");
        let whole = good.to_dtype(DType::U32).unwrap();
        words(step.set_state(STATE, 0, &whole), "state is U32: it must be f32, f16 or bf16");
        words(step.set_state_after(STATE, 0, 0, &good), "tokens of a state");
        words(step.set_state_after(STATE, 0, 3, &good), "new tokens before a state");
        words(step.keeps_state_after(STATE, 2, 1).map(drop), "a step of 2 entries has no entry 2");
        words(step.keeps_state_after(ROWS, 0, 1).map(drop), "layer 0 has no state");
        step.commit()
    });
    for (sequence, tokens) in [(1, &[10][..]), (2, &[5, 6])] {
        run.texts.get_mut(&sequence).unwrap().extend(tokens);
    }
    run.check();
}

#[test]
fn a_commit_without_a_state_is_rolled_back() {
    let mut run = Run::new(&[1]);
    run.commit(&[entry(1, &[7, 8])]);
    let step = run.cache.step(&[StepInput::tokens(SequenceId(1), &[9])]).unwrap();
    let rows = Tensor::zeros((1, 1, 4), DType::F32, &Device::Cpu).unwrap();
    step.attend(ROWS, &rows, &rows, &rows, &AttentionOptions::causal(0.5)).unwrap();
    step.set_state(STATE, 1, &Tensor::zeros((1, 5), DType::F32, &Device::Cpu).unwrap()).unwrap();
    let Err(Error::Cache(CacheError::Plan(refused))) = step.commit() else {
        panic!("a state is missing")
    };
    let layer = LayerId(1);
    let sequence = SequenceId(1);
    assert_eq!(refused, PlanError::StateUnwritten { layer, part: 0, sequence, tokens: 1 });
    run.check();
}
