//! Greedy decoding of one sequence.
use anyhow::bail;
use candle_core::{D, Device, Tensor};
use kv_candle::CandleCache;
use kv_candle::kv::{SequenceId, StartOptions, StepInput};

use super::Model;

/// Where a text ends.
#[derive(Debug, Clone)]
pub(crate) struct Limits {
    pub(crate) max_new_tokens: u32,
    /// Tokens of a sequence, prompt included.
    pub(crate) context: u32,
    /// Tokens that end a text and are no part of it.
    pub(crate) stop: Vec<u32>,
}

impl Limits {
    /// Returns the most tokens that a sequence with this prompt has.
    pub(crate) fn longest(&self, prompt: &[u32]) -> u32 {
        let prompt = u32::try_from(prompt.len()).unwrap_or(u32::MAX);
        prompt.saturating_add(self.max_new_tokens).min(self.context)
    }

    /// Refuses a prompt that leaves no room for a token after it.
    pub(crate) fn check(&self, prompt: &[u32]) -> anyhow::Result<()> {
        let (tokens, context) = (prompt.len(), self.context);
        if u32::try_from(tokens).is_ok_and(|tokens| tokens < context) {
            return Ok(());
        }
        bail!("the prompt has {tokens} tokens, the model's context {context}");
    }
}

/// Continues a prompt with the most likely tokens. The sequence has left the cache afterwards.
pub(crate) fn generate(
    cache: &mut CandleCache,
    model: &impl Model,
    prompt: &[u32],
    limits: &Limits,
) -> anyhow::Result<Vec<u32>> {
    limits.check(prompt)?;
    let sequence = SequenceId(0);
    let longest = usize::try_from(limits.longest(prompt))?;
    let mut tokens = prompt.to_vec();
    // What an earlier prompt has left in the cache is not computed again.
    let mut cached = cache.kv_mut().start(sequence, prompt, StartOptions::default())?;
    while tokens.len() < longest {
        let new = tokens.get(usize::try_from(cached)?..).unwrap_or_default();
        let step = cache.step(&[StepInput::tokens(sequence, new)])?;
        let ids = Tensor::new(new, &Device::Cpu)?.unsqueeze(0)?;
        let logits = model(&ids, &step)?;
        step.commit()?;
        cached = u32::try_from(tokens.len())?;
        let token = best(&logits)?;
        match token.first().filter(|token| !limits.stop.contains(token)) {
            Some(token) => tokens.push(*token),
            None => break,
        }
    }
    cache.kv_mut().release(sequence)?;
    Ok(tokens.split_off(prompt.len()))
}

/// Returns the most likely token of each sequence of a step.
pub(crate) fn best(logits: &Tensor) -> candle_core::Result<Vec<u32>> {
    logits.argmax(D::Minus1)?.to_vec1()
}
