//! Many requests at once: sequences come, share their common prefix, and go.
use std::collections::VecDeque;

use candle_core::{Device, Tensor};
use kv_candle::CandleCache;
use kv_candle::kv::{SequenceId, StartOptions, StepInput};

use super::common::generate::{Limits, best};
use super::common::{BLOCK_SIZE, Model};

/// What a run has generated.
#[derive(Debug, Default)]
pub(crate) struct Served {
    /// Tokens after each prompt, in the order of the requests.
    pub(crate) new: Vec<Vec<u32>>,
    /// Tokens of all prompts, and those of them that were cached when their prompt started.
    pub(crate) prompt_tokens: usize,
    pub(crate) reused_tokens: usize,
    pub(crate) steps: usize,
    /// The most sequences of a step.
    pub(crate) batch: usize,
}

/// A sequence of the batch.
struct Running<'p> {
    request: usize,
    prompt: &'p [u32],
    tokens: Vec<u32>,
    /// Tokens that the cache has.
    cached: usize,
    longest: usize,
}

impl Running<'_> {
    fn id(&self) -> SequenceId {
        SequenceId(u64::try_from(self.request).unwrap_or(u64::MAX))
    }

    fn new_tokens(&self) -> &[u32] {
        self.tokens.get(self.cached..).unwrap_or_default()
    }

    /// Returns the full blocks that this sequence will share with `prompt` once its own prompt is
    /// computed; none if it is already.
    fn coming_blocks(&self, prompt: &[u32]) -> usize {
        let pairs = self.prompt.iter().zip(prompt);
        let shared = pairs.take_while(|(one, other)| one == other).count();
        if self.cached < self.prompt.len() { blocks(shared) } else { 0 }
    }
}

/// Continues every prompt with the most likely tokens, at most `max_batch` at once. No sequence is
/// left in the cache afterwards.
pub(crate) fn serve(
    cache: &mut CandleCache,
    model: &impl Model,
    prompts: &[Vec<u32>],
    limits: &Limits,
    max_batch: usize,
) -> anyhow::Result<Served> {
    prompts.iter().try_for_each(|prompt| limits.check(prompt))?;
    let mut served = Served { new: vec![Vec::new(); prompts.len()], ..Served::default() };
    let mut waiting: VecDeque<_> = prompts.iter().enumerate().collect();
    let mut running: Vec<Running<'_>> = Vec::new();
    loop {
        while running.len() < max_batch {
            let Some((request, prompt)) = waiting.pop_front() else { break };
            let found = cache.kv().state().probe(prompt, StartOptions::default());
            let found = blocks(usize::try_from(found)?);
            if running.iter().any(|other| other.coming_blocks(prompt) > found) {
                // After the next step there is more to reuse.
                waiting.push_front((request, prompt));
                break;
            }
            let longest = usize::try_from(limits.longest(prompt))?;
            let mut sequence =
                Running { request, prompt, tokens: prompt.clone(), cached: 0, longest };
            let options = StartOptions::default();
            let reused = cache.kv_mut().start(sequence.id(), prompt, options)?;
            sequence.cached = usize::try_from(reused)?;
            served.prompt_tokens += prompt.len();
            served.reused_tokens += sequence.cached;
            running.push(sequence);
        }
        if running.is_empty() {
            return Ok(served);
        }
        served.steps += 1;
        served.batch = served.batch.max(running.len());
        let logits = advance(cache, model, &running)?;
        let mut still = Vec::new();
        for (mut sequence, token) in running.into_iter().zip(best(&logits)?) {
            sequence.cached = sequence.tokens.len();
            let is_end = limits.stop.contains(&token);
            if !is_end {
                sequence.tokens.push(token);
            }
            if !is_end && sequence.tokens.len() < sequence.longest {
                still.push(sequence);
                continue;
            }
            cache.kv_mut().release(sequence.id())?;
            if let Some(new) = served.new.get_mut(sequence.request) {
                *new = sequence.tokens.split_off(sequence.prompt.len());
            }
        }
        running = still;
    }
}

/// Runs one step of all sequences: their new tokens follow each other in one row of ids.
fn advance(
    cache: &mut CandleCache,
    model: &impl Model,
    running: &[Running<'_>],
) -> anyhow::Result<Tensor> {
    let inputs: Vec<_> = running
        .iter()
        .map(|sequence| StepInput::tokens(sequence.id(), sequence.new_tokens()))
        .collect();
    let ids: Vec<u32> = running.iter().flat_map(Running::new_tokens).copied().collect();
    let step = cache.step(&inputs)?;
    let logits = model(&Tensor::new(ids, &Device::Cpu)?.unsqueeze(0)?, &step)?;
    step.commit()?;
    Ok(logits)
}

/// Returns the number of full blocks of some tokens.
fn blocks(tokens: usize) -> usize {
    usize::try_from(BLOCK_SIZE).ok().and_then(|size| tokens.checked_div(size)).unwrap_or(0)
}
