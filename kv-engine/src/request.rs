//! Requests to an engine, and their events.
use kv_core::eviction::Return;

use crate::beams::{BeamOptions, Hypothesis};
use crate::sampler::Sampler;

/// A prompt to continue.
#[derive(Debug, Clone)]
pub struct Request {
    /// At least one token.
    pub prompt: Vec<u32>,
    /// Most tokens to generate.
    pub max_new_tokens: u32,
    /// The sampler of its tokens.
    pub sampler: Sampler,
    /// Beam search instead of the sampler.
    pub beams: Option<BeamOptions>,
    /// Prompts share blocks only with those of an equal salt.
    pub salt: Vec<u8>,
    /// Lengths of the prompt, ascending, at which a model with recurrent states keeps them for
    /// other prompts, besides the cache's own: the end of a message, or where a template's last
    /// tokens begin. Chunks of the prompt end there.
    pub stops: Vec<u32>,
    /// Whether the text goes on after a stop token.
    pub ignore_stop: bool,
    /// What the caller expects after the end of the request: whether and when its text is
    /// continued. It changes the order of eviction, and no result.
    pub hint: Option<Return>,
}

impl Request {
    /// Makes a request for the most likely tokens after a prompt, at most `max_new_tokens`.
    pub fn new(prompt: Vec<u32>, max_new_tokens: u32) -> Self {
        Self {
            prompt,
            max_new_tokens,
            sampler: Sampler::greedy(),
            beams: None,
            salt: Vec::new(),
            stops: Vec::new(),
            ignore_stop: false,
            hint: None,
        }
    }
}

/// Limits of an engine.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "a literal changes what it names")]
pub struct Limits {
    /// Sequences that run at once; a request that needs more runs alone.
    pub max_batch: u32,
    /// Tokens per step, at least [`Self::max_batch`] for the bound of [fairness](crate#fairness).
    pub max_step_tokens: u32,
    /// Tokens per sequence, including the prompt.
    pub context: u32,
    /// Tokens that a row of logits has a value for, if the engine is to check it.
    pub vocab: Option<u32>,
    /// Tokens that end a sequence.
    pub stop: Vec<u32>,
    /// Whether everything is recomputed for each token, to measure the benefit of caching.
    pub forget: bool,
    /// Draft tokens per sequence and step, proposed from its own text.
    pub draft_tokens: u32,
    /// Younger requests that may be admitted before one for which there is no room yet. Then
    /// nothing is admitted before it; 0 admits strictly in the order of arrival.
    pub max_overtakes: u32,
}

impl Limits {
    /// Makes limits for sequences of up to `context` tokens: 8 sequences at once, 512 tokens per
    /// step, no stop tokens, no drafts, 16 overtakes.
    pub fn new(context: u32) -> Self {
        Self {
            max_batch: 8,
            max_step_tokens: 512,
            context,
            vocab: None,
            stop: Vec::new(),
            forget: false,
            draft_tokens: 0,
            max_overtakes: 16,
        }
    }
}

/// The reason of a sequence's end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "a report names each of them")]
pub enum Finish {
    /// It has the requested number of new tokens.
    Length,
    /// It generated a token that ends a text; that token is the last one.
    Stop,
    /// It fills the model's context.
    Context,
    /// [`Engine::cancel`](crate::Engine::cancel) ended it.
    Cancelled,
}

/// The result of one request.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Generated {
    /// New tokens, including the one that ended the text.
    pub tokens: Vec<u32>,
    /// The reason of the end.
    pub finish: Finish,
    /// Prompt tokens that were cached when the sequence first started.
    pub reused: usize,
    /// Milliseconds from its submission until it was admitted.
    pub admitted_ms: f64,
    /// Milliseconds from its submission until its first token.
    pub first_token_ms: f64,
    /// Texts of a beam search, best first; the first one's tokens are [`Self::tokens`].
    pub hypotheses: Vec<Hypothesis>,
}

/// A result of a step. Requests are named by the number that
/// [`Engine::submit`](crate::Engine::submit) returned.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Event {
    /// A request has another token. Beam search chooses the text at the end, so all tokens of its
    /// text come right before the end of the request.
    Token {
        /// Number of the request.
        index: usize,
        /// The token.
        token: u32,
    },
    /// A request has ended.
    Finished {
        /// Number of the request.
        index: usize,
        /// Its result.
        generated: Generated,
    },
}
