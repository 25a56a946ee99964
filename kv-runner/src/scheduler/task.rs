//! One request and its progress: sequences, search, results.
use std::time::Instant;

use kv::SequenceId;
use kv::spec::GroupSpec;
use kv::tier::PrefetchId;

use super::beams::{BeamOptions, BeamSearch, Hypothesis};
use crate::num::to_u32;
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
    /// Whether it goes on after a token that ends a text.
    pub ignore_stop: bool,
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
            ignore_stop: false,
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
    /// [`Scheduler::cancel`](super::Scheduler::cancel) ended it.
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

/// The tokens of one sequence. Those that are not cached yet are added to steps.
#[derive(Debug)]
pub(super) struct Sequence {
    pub(super) id: SequenceId,
    /// Prompt and generated tokens.
    pub(super) tokens: Vec<u32>,
    /// Number of tokens whose K and V are cached.
    pub(super) cached: usize,
    /// Whether the sequence exists in the cache.
    pub(super) is_live: bool,
    /// Logits after its last token, kept until all beams have theirs.
    pub(super) logits: Option<Vec<f32>>,
}

/// The method that chooses the next tokens.
#[derive(Debug)]
pub(super) enum Search {
    Sample(Sampler),
    Beams(BeamSearch),
}

/// A text that a task with the same prompt computes the prompt for.
#[derive(Debug)]
pub(super) struct Choice {
    pub(super) index: usize,
    pub(super) id: SequenceId,
    pub(super) sampler: Sampler,
}

/// A running or waiting request.
#[derive(Debug)]
pub(super) struct Task {
    pub(super) index: usize,
    pub(super) prompt_len: usize,
    /// Most tokens per sequence.
    pub(super) tokens_max: usize,
    pub(super) finish_at_max: Finish,
    /// One sequence, or the beams, all of one length.
    pub(super) sequences: Vec<Sequence>,
    pub(super) search: Search,
    pub(super) salt: Vec<u8>,
    pub(super) ignore_stop: bool,
    /// Other texts after the same prompt, which are forked once it is computed.
    pub(super) choices: Vec<Choice>,
    pub(super) reused: Option<usize>,
    pub(super) submitted: Instant,
    pub(super) admitted_ms: Option<f64>,
    pub(super) first_token_ms: f64,
    /// Whether it was preempted before.
    pub(super) was_preempted: bool,
    pub(super) tiers: FromTiers,
}

/// What a waiting request has got from tiers.
#[derive(Debug, Clone, Copy)]
pub(super) enum FromTiers {
    /// They were not asked yet.
    Unasked,
    Prefetching(PrefetchId),
    /// All that came in time is on the device, or was.
    Brought,
}

impl Sequence {
    pub(super) fn new(id: SequenceId, tokens: Vec<u32>) -> Self {
        Self { id, tokens, cached: 0, is_live: false, logits: None }
    }

    /// Returns the tokens after the prompt.
    pub(super) fn new_tokens(&self, prompt_len: usize) -> &[u32] {
        self.tokens.get(prompt_len..).unwrap_or_default()
    }
}

impl Task {
    /// Returns the largest number of its sequences.
    pub(super) fn width(&self) -> usize {
        match &self.search {
            Search::Sample(_) => 1,
            Search::Beams(search) => search.width(),
        }
    }

    /// Returns the length that its sequences are computed to: their end or, if only the first one
    /// exists, the point where the others are forked from it.
    pub(super) fn goal(&self) -> usize {
        let Some((first, others)) = self.sequences.split_first() else {
            return 0;
        };
        let end = first.tokens.len();
        if others.iter().all(|other| other.is_live) {
            return end;
        }
        let common = |other: &Sequence| {
            first.tokens.iter().zip(&other.tokens).take_while(|(a, b)| a == b).count()
        };
        others.iter().map(common).fold(end, usize::min)
    }

    /// Returns whether sequences wait to be forked from the first one, which has reached their
    /// common length.
    pub(super) fn can_fork(&self) -> bool {
        let waits = self.sequences.iter().any(|sequence| !sequence.is_live);
        let first = self.sequences.first().filter(|first| first.is_live);
        waits && first.is_some_and(|first| first.cached >= self.goal())
    }

    /// Returns the largest number of blocks of a group that sequences without blocks will need.
    pub(super) fn blocks_of_forks(&self, group: &GroupSpec) -> u32 {
        let missing = self.sequences.iter().skip(1).filter(|sequence| !sequence.is_live);
        let shared = group.slot_map().full_blocks(to_u32(self.goal()));
        missing.fold(0_u32, |sum, sequence| {
            let all = group.slot_map().blocks_reserved(to_u32(sequence.tokens.len()));
            sum.saturating_add(all.saturating_sub(shared))
        })
    }

    /// Returns the number of texts that it is for.
    pub(super) fn texts(&self) -> usize {
        self.choices.len().saturating_add(1)
    }

    /// Returns whether this token ends its text.
    pub(super) fn stops_at(&self, token: u32, stop: &[u32]) -> bool {
        !self.ignore_stop && stop.contains(&token)
    }

    /// Returns the sequence with this id.
    pub(super) fn sequence_mut(&mut self, id: SequenceId) -> Option<&mut Sequence> {
        self.sequences.iter_mut().find(|sequence| sequence.id == id)
    }

    pub(super) fn into_generated(self, finish: Finish) -> (usize, Generated) {
        let (tokens, finish, hypotheses) = match self.search {
            Search::Beams(search) => search.into_best(finish),
            Search::Sample(_) => {
                let tokens = self.sequences.into_iter().next().map(|sequence| sequence.tokens);
                let new = tokens.unwrap_or_default().split_off(self.prompt_len);
                (new, finish, Vec::new())
            }
        };
        let generated = Generated {
            tokens,
            finish,
            reused: self.reused.unwrap_or(0),
            admitted_ms: self.admitted_ms.unwrap_or(0.0),
            first_token_ms: self.first_token_ms,
            hypotheses,
        };
        (self.index, generated)
    }
}
