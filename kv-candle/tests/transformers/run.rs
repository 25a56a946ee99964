//! Runs both forms of the model over the same tokens.
use candle_core::{DType, Device, Tensor};
use kv_candle::CandleCache;
use kv_candle::kv::{KvFormat, SequenceId, StartOptions, StepInput};

use crate::models::{Model, Theirs};

/// Logits of one token.
pub(crate) type Logits = Vec<f64>;

/// A port with its cache.
pub(crate) struct Ported<'m> {
    model: &'m Model,
    pub(crate) cache: CandleCache,
}

impl<'m> Ported<'m> {
    /// Makes a cache of `blocks` blocks of 4 tokens.
    pub(crate) fn new(model: &'m Model, format: KvFormat, blocks: u32) -> Self {
        let spec = model.spec.clone().format(format).paged(4, blocks).build().unwrap();
        Self { model, cache: CandleCache::new(&Device::Cpu, spec).unwrap() }
    }

    /// Runs one step with new tokens of some sequences, and returns the logits of the last of each.
    /// A sequence begins with its first tokens.
    pub(crate) fn step(&mut self, new: &[(u64, &[u32])]) -> Vec<Logits> {
        for (sequence, _) in new {
            if !self.cache.kv().state().contains(SequenceId(*sequence)) {
                let options = StartOptions::default();
                self.cache.kv_mut().start(SequenceId(*sequence), &[], options).unwrap();
            }
        }
        let inputs = new.iter().map(|(id, tokens)| StepInput::tokens(SequenceId(*id), tokens));
        let inputs: Vec<_> = inputs.collect();
        let ids: Vec<u32> = new.iter().flat_map(|(_, tokens)| *tokens).copied().collect();
        let step = self.cache.step(&inputs).unwrap();
        let ids = Tensor::new(ids, &Device::Cpu).unwrap().unsqueeze(0).unwrap();
        let logits = (self.model.ours)(&ids, &step).unwrap();
        assert_eq!(step.copies(), 0, "copied tensors");
        step.commit().unwrap();
        let logits = logits.to_dtype(DType::F64).unwrap();
        assert_eq!(logits.dim(0).unwrap(), new.len());
        logits.to_vec2().unwrap()
    }

    /// Runs one step with new tokens of one sequence.
    pub(crate) fn one(&mut self, sequence: u64, new: &[u32]) -> Logits {
        self.step(&[(sequence, new)]).remove(0)
    }
}

/// Runs a model of candle with some tokens after `offset` others.
pub(crate) fn run(model: &mut Theirs, new: &[u32], offset: usize) -> candle_core::Result<Logits> {
    let ids = Tensor::new(new, &Device::Cpu)?.unsqueeze(0)?;
    model(&ids, offset)?.to_dtype(DType::F64)?.flatten_all()?.to_vec1()
}

/// Runs candle's model over a text, as its users do: the prompt at once, then token by token.
/// Returns the logits of the prompt's last token and of all after it.
pub(crate) fn as_candle(mut model: Theirs, text: &[u32], prompt: usize) -> Vec<Logits> {
    let (first, rest) = text.split_at(prompt);
    let mut all = vec![run(&mut model, first, 0).unwrap()];
    for (token, offset) in rest.iter().zip(prompt..) {
        all.push(run(&mut model, &[*token], offset).unwrap());
    }
    all
}

/// Returns the largest difference of two lists of logits.
#[track_caller]
pub(crate) fn apart(got: &[Logits], expected: &[Logits]) -> f64 {
    assert_eq!(got.len(), expected.len());
    let pairs = got.iter().flatten().zip(expected.iter().flatten());
    // A NaN is not close to anything.
    pairs
        .map(|(got, expected)| (got - expected).abs())
        .fold(0.0, |worst, next| if next <= worst { worst } else { next })
}

/// Returns the largest logit.
pub(crate) fn largest(logits: &[Logits]) -> f64 {
    logits.iter().flatten().fold(0.0, |most, logit| logit.abs().max(most))
}
