//! One request on its way: its sequences, how its next tokens are chosen, what came of it.
use std::time::Instant;

use kv::SequenceId;
use kv::spec::GroupSpec;

use super::beams::{BeamOptions, BeamSearch, Hypothesis};
use crate::num::to_u32;
use crate::sampler::Sampler;

/// One prompt to go on from.
#[derive(Debug, Clone)]
pub struct Request {
    /// At least one token.
    pub prompt: Vec<u32>,
    /// Tokens to generate, at most.
    pub max_new_tokens: u32,
    /// Chooses its tokens.
    pub sampler: Sampler,
    /// Beam search in place of the sampler.
    pub beams: Option<BeamOptions>,
}

impl Request {
    /// A request for the most likely tokens after a prompt, `max_new_tokens` of them at most.
    pub fn new(prompt: Vec<u32>, max_new_tokens: u32) -> Self {
        Self { prompt, max_new_tokens, sampler: Sampler::greedy(), beams: None }
    }
}

/// Why a sequence ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "a report names each of them")]
pub enum Finish {
    /// It has the requested number of new tokens.
    Length,
    /// It generated a token that ends a text; that token is the last one.
    Stop,
    /// It is as long as the model's context.
    Context,
}

/// What came of one request.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Generated {
    /// New tokens, with the one that ended the text.
    pub tokens: Vec<u32>,
    /// Why it ended.
    pub finish: Finish,
    /// Prompt tokens that were cached already when the sequence first started.
    pub reused: usize,
    /// Milliseconds from its submission until it was admitted.
    pub admitted_ms: f64,
    /// Milliseconds from its submission until its first token.
    pub first_token_ms: f64,
    /// What beam search ended with, best first; the first one's tokens are [`Self::tokens`].
    pub hypotheses: Vec<Hypothesis>,
}

/// One history of tokens. Whatever of it is not cached is brought to a step.
#[derive(Debug)]
pub(super) struct Sequence {
    pub(super) id: SequenceId,
    /// Prompt and generated tokens.
    pub(super) tokens: Vec<u32>,
    /// Tokens whose K and V are cached.
    pub(super) cached: usize,
    /// Whether the cache knows it.
    pub(super) is_live: bool,
    /// Logits that follow its last token, where they wait for those of other beams.
    pub(super) logits: Option<Vec<f32>>,
}

/// How the next tokens are chosen.
#[derive(Debug)]
pub(super) enum Search {
    Sample(Sampler),
    Beams(BeamSearch),
}

/// A request on its way.
#[derive(Debug)]
pub(super) struct Task {
    pub(super) index: usize,
    pub(super) prompt_len: usize,
    /// Tokens a sequence may have.
    pub(super) tokens_max: usize,
    pub(super) finish_at_max: Finish,
    /// One, or the beams that go on; all of one length.
    pub(super) sequences: Vec<Sequence>,
    pub(super) search: Search,
    pub(super) reused: Option<usize>,
    pub(super) submitted: Instant,
    pub(super) admitted_ms: Option<f64>,
    pub(super) first_token_ms: f64,
    /// Whether it was preempted before.
    pub(super) was_preempted: bool,
}

impl Sequence {
    pub(super) fn new(id: SequenceId, tokens: Vec<u32>) -> Self {
        Self { id, tokens, cached: 0, is_live: false, logits: None }
    }

    /// What follows its prompt.
    pub(super) fn new_tokens(&self, prompt_len: usize) -> &[u32] {
        self.tokens.get(prompt_len..).unwrap_or_default()
    }
}

impl Task {
    /// Sequences it may have at once.
    pub(super) fn width(&self) -> usize {
        match &self.search {
            Search::Sample(_) => 1,
            Search::Beams(search) => search.width(),
        }
    }

    /// How far its sequences are brought now: to their end, or, when only the first one lives,
    /// to where the others begin as forks of it.
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

    /// Whether sequences wait to become forks of the first one, which is as far as they agree.
    pub(super) fn can_fork(&self) -> bool {
        let waits = self.sequences.iter().any(|sequence| !sequence.is_live);
        let first = self.sequences.first().filter(|first| first.is_live);
        waits && first.is_some_and(|first| first.cached >= self.goal())
    }

    /// Blocks of a group that sequences take which are not there yet, at most.
    pub(super) fn blocks_of_forks(&self, group: &GroupSpec) -> u32 {
        let missing = self.sequences.iter().skip(1).filter(|sequence| !sequence.is_live);
        let shared = group.slot_map().full_blocks(to_u32(self.goal()));
        missing.fold(0_u32, |sum, sequence| {
            let all = group.slot_map().blocks_reserved(to_u32(sequence.tokens.len()));
            sum.saturating_add(all.saturating_sub(shared))
        })
    }

    /// The sequence of this id.
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
