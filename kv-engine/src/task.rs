//! One request and its progress: sequences, search, results.
//!
//! The number of cached tokens of a sequence, and whether it exists, are the cache's to say.
use std::time::Duration;

use kv_core::eviction::Return;
use kv_core::scheduling::CacheState;
use kv_core::spec::GroupSpec;
use kv_core::{SequenceId, StartOptions};
use kv_tier::PrefetchId;

use crate::beams::BeamSearch;
use crate::num::{to_ms, to_u32, to_usize};
use crate::request::{Finish, Generated};
use crate::sampler::Sampler;

/// The tokens of one sequence. Those that are not cached yet are added to steps.
#[derive(Debug)]
pub(crate) struct Sequence {
    pub(crate) id: SequenceId,
    /// Prompt and generated tokens.
    pub(crate) tokens: Vec<u32>,
    /// Logits after its last token, kept until all beams have theirs.
    pub(crate) logits: Option<Vec<f32>>,
}

/// The method that chooses the next tokens.
#[derive(Debug)]
pub(crate) enum Search {
    Sample(Sampler),
    Beams(BeamSearch),
}

/// A text that a task with the same prompt computes the prompt for.
#[derive(Debug)]
pub(crate) struct Choice {
    pub(crate) index: usize,
    pub(crate) id: SequenceId,
    pub(crate) sampler: Sampler,
}

/// A running or waiting request.
#[derive(Debug)]
pub(crate) struct Task {
    /// Number of the request; a smaller one is older.
    pub(crate) index: usize,
    pub(crate) prompt_len: u32,
    /// Most tokens per sequence.
    pub(crate) tokens_max: u32,
    pub(crate) finish_at_max: Finish,
    /// One sequence, or the beams, all of one length; at least one.
    pub(crate) sequences: Vec<Sequence>,
    pub(crate) search: Search,
    pub(crate) salt: Vec<u8>,
    /// Lengths of the prompt, ascending, at which recurrent states are kept.
    pub(crate) stops: Vec<u32>,
    pub(crate) ignore_stop: bool,
    /// What is expected after its end.
    pub(crate) hint: Option<Return>,
    /// Other texts after the same prompt, which are forked once it is computed.
    pub(crate) choices: Vec<Choice>,
    pub(crate) reused: Option<u32>,
    pub(crate) submitted: Duration,
    /// Time until it was admitted first.
    pub(crate) admitted: Option<Duration>,
    /// Time until its first token.
    pub(crate) first_token: Duration,
    /// Whether it was preempted before.
    pub(crate) was_preempted: bool,
    /// Younger requests that were admitted before it.
    pub(crate) overtaken: u32,
    pub(crate) tiers: FromTiers,
}

/// The tier state of a waiting request.
#[derive(Debug, Clone, Copy)]
pub(crate) enum FromTiers {
    /// The cache has no tiers.
    Nothing,
    /// No prefetch was started yet.
    Unasked,
    Prefetching(PrefetchId),
    /// All that came in time is on the device, or was.
    Brought,
}

impl FromTiers {
    /// Returns whether the request need not wait for them.
    pub(crate) fn is_ready(self) -> bool {
        matches!(self, Self::Nothing | Self::Brought)
    }

    /// Asks again, if there are tiers.
    pub(crate) fn again(self) -> Self {
        if matches!(self, Self::Nothing) { self } else { Self::Unasked }
    }
}

impl Sequence {
    pub(crate) fn new(id: SequenceId, tokens: Vec<u32>) -> Self {
        Self { id, tokens, logits: None }
    }

    /// Returns the number of its tokens.
    pub(crate) fn len(&self) -> u32 {
        to_u32(self.tokens.len())
    }

    /// Returns the tokens after the prompt.
    pub(crate) fn new_tokens(&self, prompt_len: u32) -> &[u32] {
        &self.tokens[to_usize(prompt_len)..]
    }

    /// Returns the number of tokens up to `goal` that are to be computed; 0 unless it exists.
    pub(crate) fn pending(&self, cache: &CacheState, goal: u32) -> u32 {
        cache.seq_len(self.id).map_or(0, |cached| goal.saturating_sub(cached))
    }
}

impl Task {
    /// Returns the largest number of its sequences.
    pub(crate) fn width(&self) -> u32 {
        match &self.search {
            Search::Sample(_) => 1,
            Search::Beams(search) => search.width(),
        }
    }

    /// Returns the first sequence, which the others are forks of.
    pub(crate) fn first(&self) -> &Sequence {
        &self.sequences[0]
    }

    /// Returns whether one of its sequences exists in the cache.
    pub(crate) fn is_live(&self, cache: &CacheState) -> bool {
        self.sequences.iter().any(|sequence| cache.contains(sequence.id))
    }

    /// Returns the length to which the sequences are computed: their end or, if only the first one
    /// exists, the point where the others fork from it.
    pub(crate) fn goal(&self, cache: &CacheState) -> u32 {
        let (first, others) = (self.first(), &self.sequences[1..]);
        if others.iter().all(|other| cache.contains(other.id)) {
            return first.len();
        }
        others.iter().map(|other| common(&first.tokens, &other.tokens)).fold(first.len(), u32::min)
    }

    /// Returns whether sequences wait to be forked from the first one, which has reached their
    /// common length.
    pub(crate) fn can_fork(&self, cache: &CacheState) -> bool {
        let waits = self.sequences.iter().any(|sequence| !cache.contains(sequence.id));
        let cached = cache.seq_len(self.first().id);
        waits && cached.is_some_and(|cached| cached >= self.goal(cache))
    }

    /// Returns the largest number of blocks of a group that sequences without blocks will need.
    pub(crate) fn blocks_of_forks(&self, cache: &CacheState, group: &GroupSpec) -> u32 {
        let missing = self.sequences[1..].iter().filter(|sequence| !cache.contains(sequence.id));
        let shared = group.slot_map().full_blocks(self.goal(cache));
        missing.map(|sequence| group.slot_map().blocks_reserved(sequence.len()) - shared).sum()
    }

    /// Returns the number of texts that it is for.
    pub(crate) fn texts(&self) -> usize {
        self.choices.len() + 1
    }

    /// Returns whether this token ends its text.
    pub(crate) fn stops_at(&self, token: u32, stop: &[u32]) -> bool {
        !self.ignore_stop && stop.contains(&token)
    }

    pub(crate) fn start_options(&self) -> StartOptions<'_> {
        let options = StartOptions::default().with_resumed(self.was_preempted);
        let options = options.with_salt(&self.salt).with_stops(&self.stops);
        self.hint.map_or(options, |hint| options.with_hint(hint))
    }

    /// Returns the tokens of its first sequence before any fork.
    pub(crate) fn first_part(&self, cache: &CacheState) -> &[u32] {
        &self.first().tokens[..to_usize(self.goal(cache))]
    }

    /// Drops one of several texts whose common prompt is not computed yet; `None` for the only
    /// text, and for a text of another task.
    pub(crate) fn drop_text(&mut self, index: usize) -> Option<Generated> {
        if self.index == index {
            // The sequence stays, and becomes that of the next text.
            let next = (!self.choices.is_empty()).then(|| self.choices.remove(0))?;
            self.index = next.index;
            self.search = Search::Sample(next.sampler);
        } else {
            let at = self.choices.iter().position(|choice| choice.index == index)?;
            self.choices.remove(at);
        }
        Some(Generated {
            tokens: Vec::new(),
            finish: Finish::Cancelled,
            reused: to_usize(self.reused.unwrap_or(0)),
            admitted_ms: to_ms(self.admitted.unwrap_or_default()),
            first_token_ms: 0.0,
            hypotheses: Vec::new(),
        })
    }

    pub(crate) fn into_generated(self, finish: Finish) -> (usize, Generated) {
        let (tokens, finish, hypotheses) = match self.search {
            Search::Beams(search) => search.into_best(finish),
            Search::Sample(_) => {
                (self.sequences[0].new_tokens(self.prompt_len).to_vec(), finish, Vec::new())
            }
        };
        let generated = Generated {
            tokens,
            finish,
            reused: to_usize(self.reused.unwrap_or(0)),
            admitted_ms: to_ms(self.admitted.unwrap_or_default()),
            first_token_ms: to_ms(self.first_token),
            hypotheses,
        };
        (self.index, generated)
    }
}

/// Returns the length of the longest common prefix.
pub(crate) fn common(a: &[u32], b: &[u32]) -> u32 {
    to_u32(a.iter().zip(b).take_while(|(a, b)| a == b).count())
}
