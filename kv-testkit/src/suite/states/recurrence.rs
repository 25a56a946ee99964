//! A recurrence in integers, whose every value depends on all tokens before it.
//!
//! The state of a sequence is computed from the one that the cache returns, never from the model,
//! so that a state which is stale, of another sequence, or at another length stays wrong for good.
use std::collections::BTreeMap;

use kv_core::backend::{AnyBackend, Backend, Queue};
use kv_core::spec::{StateFormat, StatesBuilder};
use kv_core::{
    Axes, CacheError, CacheSpec, DType, KvCache, SequenceId, StartOptions, Step, StepInput,
    TensorView, TensorViewMut,
};

use crate::case::{CaseError, ensure};
use crate::device::fetch;
use crate::fixture::seq;
use crate::tokens::Tensor;

/// Layers of the model: 0 has rows, 1 and 2 a state of two parts, 3 rows and a state of one part.
pub(super) const LAYERS: u16 = 4;
/// Layer, part, extents, element type and modulus: integers below it are exact in the type.
pub(super) const PARTS: [(u16, usize, &[u32], DType, u32); 5] = [
    (1, 0, &[3, 2], DType::F32, 1 << 24),
    (1, 1, &[2, 5, 4], DType::Bf16, 251),
    (2, 0, &[3, 2], DType::F32, 1 << 24),
    (2, 1, &[2, 5, 4], DType::Bf16, 251),
    (3, 0, &[7], DType::F16, 2039),
];

pub(super) fn spec(backend: &AnyBackend, slots: u32, drafts: u32) -> Result<CacheSpec, CaseError> {
    spec_with(backend, |states| states.slots(slots).drafts(drafts), 64)
}

/// States of all kinds, with the same settings for both groups.
pub(super) fn spec_with(
    backend: &AnyBackend,
    both: impl Fn(StatesBuilder) -> StatesBuilder,
    blocks: u32,
) -> Result<CacheSpec, CaseError> {
    let dim = crate::device::dim(backend, 4);
    let spec = CacheSpec::builder().layers(LAYERS).kv_heads(1).head_dim(dim).paged(4, blocks);
    let spec = spec.group([3], |group| group.paged(4, blocks));
    let spec = spec.states([1, 2], |states| {
        both(states).part([3, 2], DType::F32).part([2, 5, 4], DType::Bf16)
    });
    Ok(spec
        .states([3], |states| both(states).part([7], DType::F16))
        .build()
        .map_err(CacheError::from)?)
}

/// Returns the value after a token, from the one before.
fn next(before: u32, token: u32, index: usize, modulus: u32) -> u32 {
    let mixed = u64::from(before) * 31 + u64::from(token) * 7 + index as u64 * 3 + 1;
    (mixed % u64::from(modulus)) as u32
}

/// Returns the state of a part behind some tokens.
pub(super) fn expected(part: usize, tokens: &[u32]) -> Vec<u32> {
    expected_below(part, tokens, PARTS[part].4)
}

fn expected_below(part: usize, tokens: &[u32], modulus: u32) -> Vec<u32> {
    let (_, _, shape, _, _) = PARTS[part];
    let values = shape.iter().product::<u32>() as usize;
    let start = vec![0; values];
    tokens.iter().fold(start, |state, token| {
        let each = state.iter().enumerate();
        each.map(|(index, value)| next(*value, *token, index + part, modulus)).collect()
    })
}

/// A cache with states, and the tokens that its sequences must stand for.
pub(super) struct Recurrence<'a> {
    pub(super) backend: &'a AnyBackend,
    pub(super) cache: KvCache,
    pub(super) texts: BTreeMap<SequenceId, Vec<u32>>,
    /// Bound of the values of each part.
    moduli: [u32; PARTS.len()],
    /// Whether values are rounded to integers when they are read.
    rounds: bool,
}

/// The end of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    Commit,
    Accept,
    RollBack,
    Leak,
    /// Held between all calls, then committed.
    Hold,
}

impl<'a> Recurrence<'a> {
    pub(super) fn new(backend: &'a AnyBackend, spec: CacheSpec) -> Result<Self, CaseError> {
        let cache = KvCache::new(backend.clone(), spec)?;
        let moduli = PARTS.map(|part| part.4);
        Ok(Self { backend, cache, texts: BTreeMap::new(), moduli, rounds: false })
    }

    /// Bounds the values of parts in f32 to integers that survive a snapshot in this form.
    pub(super) fn keep_as(&mut self, format: StateFormat) {
        let most = match format {
            // Off by a quarter at most: half a step of the largest value, 63 of 127 codes.
            StateFormat::Int8 => 64,
            StateFormat::F16 => 2039,
            _ => u32::MAX,
        };
        self.rounds = format == StateFormat::Int8;
        for (modulus, (_, _, _, dtype, _)) in self.moduli.iter_mut().zip(PARTS) {
            if dtype == DType::F32 {
                *modulus = most.min(*modulus);
            }
        }
    }

    pub(super) fn start(&mut self, sequence: SequenceId) -> Result<(), CaseError> {
        let prompt = [5001, 5002, 5003];
        let reused = self.cache.start(sequence, &prompt, StartOptions::default())?;
        ensure(reused == 0, || format!("{reused} tokens reused without a state"))?;
        self.texts.insert(sequence, Vec::new());
        Ok(())
    }

    /// Starts a sequence on a prompt, and returns the tokens that it reuses.
    pub(super) fn start_on(
        &mut self,
        sequence: SequenceId,
        prompt: &[u32],
        options: StartOptions<'_>,
    ) -> Result<u32, CaseError> {
        let reused = self.cache.start(sequence, prompt, options)?;
        ensure(reused < prompt.len() as u32, || format!("{reused} of {} reused", prompt.len()))?;
        self.texts.insert(sequence, prompt[..reused as usize].to_vec());
        Ok(reused)
    }

    /// Computes the rest of a prompt, in steps that end where the cache wants one.
    pub(super) fn compute(
        &mut self,
        sequence: SequenceId,
        prompt: &[u32],
    ) -> Result<(), CaseError> {
        loop {
            let len = self.texts[&sequence].len();
            if len >= prompt.len() {
                return Ok(());
            }
            let stop = self.cache.state().next_stop(sequence).map_or(usize::MAX, |at| at as usize);
            ensure(stop > len, || format!("a stop at {stop} behind {len} tokens"))?;
            let entry = Entry::new(sequence, &prompt[len..stop.min(prompt.len())], 0);
            self.step(&[entry], &[], End::Commit)?;
        }
    }

    /// Runs a request: its prompt, `more` tokens one by one, and its end. Returns the reused
    /// tokens.
    pub(super) fn request(
        &mut self,
        (prompt, more): (&[u32], &[u32]),
        options: StartOptions<'_>,
    ) -> Result<u32, CaseError> {
        let id = seq(77);
        let reused = self.start_on(id, prompt, options)?;
        self.compute(id, prompt)?;
        for token in more {
            self.step(&[Entry::new(id, &[*token], 0)], &[], End::Commit)?;
        }
        self.check()?;
        self.release(id)?;
        Ok(reused)
    }

    pub(super) fn release(&mut self, sequence: SequenceId) -> Result<(), CaseError> {
        self.cache.release(sequence)?;
        self.texts.remove(&sequence);
        Ok(())
    }

    /// Runs a step: sequences with their new tokens, and the number of these that are drafts. With
    /// [`End::Accept`], entry `i` keeps `accepted[i]` tokens.
    pub(super) fn step(
        &mut self,
        entries: &[Entry],
        accepted: &[u32],
        end: End,
    ) -> Result<(), CaseError> {
        let inputs: Vec<_> = entries.iter().map(Entry::input).collect();
        let Self { backend, cache, texts, moduli, rounds } = self;
        let mut step = cache.begin_step(&inputs)?;
        let count: usize = entries.iter().map(|entry| entry.tokens.len()).sum();
        let dim = crate::device::dim(*backend, 4);
        let rows = vec![0.5_f32; count * dim as usize];
        let rows = TensorView::host(&rows, &[count as u32, 1, dim]);
        if count > 0 {
            step.write(3, rows, rows, Axes::Thd)?;
            step.write(0, rows, rows, Axes::Thd)?;
        }
        for (part, modulus) in moduli.iter().enumerate() {
            let part = (part, *modulus, *rounds);
            read_and_write(backend, &mut step, texts, (entries, part))?;
            if end == End::Hold {
                step.hold();
                step = cache.held().ok_or("the step is not held")?;
            }
        }
        match end {
            End::Commit | End::Hold => step.commit()?,
            End::Accept => step.commit_accepted(accepted)?,
            End::RollBack => step.roll_back(),
            End::Leak => std::mem::forget(step),
        }
        for (at, Entry { sequence, tokens, .. }) in entries.iter().enumerate() {
            let kept = match end {
                End::Commit | End::Hold => tokens.len(),
                End::Accept => accepted[at] as usize,
                End::RollBack | End::Leak => 0,
            };
            texts.entry(*sequence).or_default().extend(&tokens[..kept]);
        }
        Ok(())
    }

    /// Reads every state in a step without new tokens.
    pub(super) fn check(&mut self) -> Result<(), CaseError> {
        let entries: Vec<_> = self.texts.keys().map(|id| Entry::new(*id, &[], 0)).collect();
        for (sequence, text) in &self.texts {
            let len = self.cache.state().seq_len(*sequence);
            ensure(len == Some(text.len() as u32), || format!("{sequence}: {len:?} tokens"))?;
        }
        self.step(&entries, &[], End::RollBack)
    }
}

/// One sequence in a step.
#[derive(Debug, Clone)]
pub(super) struct Entry {
    pub(super) sequence: SequenceId,
    pub(super) tokens: Vec<u32>,
    pub(super) drafts: u32,
}

impl Entry {
    pub(super) fn new(sequence: SequenceId, tokens: &[u32], drafts: u32) -> Self {
        Self { sequence, tokens: tokens.to_vec(), drafts }
    }
    pub(super) fn input(&self) -> StepInput<'_> {
        if self.tokens.is_empty() {
            return StepInput::idle(self.sequence);
        }
        StepInput::tokens(self.sequence, &self.tokens).with_drafts(self.drafts)
    }
}

/// Compares the states of one part with the model, and writes those behind the new tokens.
fn read_and_write(
    backend: &AnyBackend,
    step: &mut Step<'_>,
    texts: &BTreeMap<SequenceId, Vec<u32>>,
    (entries, (part, modulus, rounds)): (&[Entry], (usize, u32, bool)),
) -> Result<(), CaseError> {
    let (layer, number, shape, dtype, _) = PARTS[part];
    let values = shape.iter().product::<u32>() as usize;
    // One entry more than the step has, which stays as it is.
    let dims: Vec<_> = [entries.len() as u32 + 1].iter().chain(shape).copied().collect();
    let out = Tensor::filled(dtype, (entries.len() + 1) * values, 9.0);
    let size = out.bytes().len() as u64;
    let buffer = backend.alloc(size)?;
    step.queue_mut().upload(&buffer, 0, out.bytes())?;
    step.read_state(layer, number, TensorViewMut::device(dtype, &buffer, 0, &dims))?;
    let bytes = fetch(backend.capabilities(), step.queue_mut(), &buffer, (0, size))?;
    let read = Tensor::from_bytes(dtype, &bytes).values();
    let (states, rest) = read.split_at(entries.len() * values);
    ensure(rest.iter().all(|x| *x == 9.0), || format!("part {part}: written past the batch"))?;
    let integer = |x: &f32| if rounds { x.round() as u32 } else { *x as u32 };
    let mut states: Vec<Vec<u32>> =
        states.chunks(values).map(|state| state.iter().map(integer).collect()).collect();
    for (Entry { sequence, .. }, state) in entries.iter().zip(&states) {
        let right = expected_below(part, &texts[sequence], modulus);
        ensure(*state == right, || {
            format!("part {part} of {sequence}: {state:?}, expected {right:?}")
        })?;
    }
    let most = entries.iter().map(|entry| entry.tokens.len()).max().unwrap_or(0);
    for tokens in 1..=most {
        for (entry, state) in entries.iter().zip(&mut states) {
            if let Some(token) = entry.tokens.get(tokens - 1) {
                let each = state.iter().enumerate();
                *state = each.map(|(i, x)| next(*x, *token, i + part, modulus)).collect();
            }
        }
        // In f32, whatever the cache keeps.
        let all: Vec<_> = states.iter().flatten().map(|value| *value as f32).collect();
        let dims: Vec<_> = [entries.len() as u32].iter().chain(shape).copied().collect();
        let all = TensorView::host(&all, &dims);
        let is_kept = |entry: &Entry| entry.tokens.len() - tokens <= entry.drafts as usize;
        if entries.iter().any(|entry| entry.tokens.len() > tokens && is_kept(entry)) {
            step.write_state_after(layer, number, tokens as u32, all)?;
        }
        if tokens == most {
            step.write_state(layer, number, all)?;
        }
    }
    Ok(())
}
