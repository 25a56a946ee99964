//! The requests of a load and their times: from a trace, or made ones.
use std::num::NonZeroU32;
use std::path::Path;
use std::time::Duration;

use super::tokens::{Seed, Tokens, uniform};
use crate::num::{to_count, to_u32, to_usize};
use crate::replay::{Sizes, Trace};

/// Longest prompt.
const PROMPT_TOKENS_MAX: u64 = 1 << 24;
/// Longest time until a request is sent, in seconds: 31 days.
const SECONDS_MAX: f64 = 31.0 * 86_400.0;

/// The third word of seeds that are not the blocks of a trace.
const SHARED: u32 = u32::MAX;
const OWN: u32 = u32::MAX - 1;

/// A workload that cannot be made.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub(crate) enum WorkloadError {
    #[error("--shared-prefix-tokens {shared}: a prompt has {prompt} tokens (--prompt-tokens)")]
    Shared { shared: u32, prompt: u32 },
    #[error("the prompt of turn {turns} has {got} tokens, at most {max} are possible")]
    TooLong { turns: u32, got: u64, max: u64 },
    #[error(
        "request {request} would be sent {seconds:.3e} s after the first one, at most 31 days are \
         possible: see --{flag}"
    )]
    TooLate { request: usize, seconds: f64, flag: &'static str },
    #[error("--first-token {first}: the vocabulary has {vocab} tokens (--vocab)")]
    Vocab { first: u32, vocab: u32 },
}

/// The distances of made requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub(crate) enum Arrivals {
    /// Independent of each other
    #[default]
    Poisson,
    /// All the same
    Constant,
}

/// Made requests: conversations of several turns, with one prefix that all share.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Synthetic {
    /// Requests per second.
    pub(crate) rate: f64,
    pub(crate) arrivals: Arrivals,
    pub(crate) requests: u32,
    /// Of a conversation's first turn.
    pub(crate) prompt_tokens: u32,
    pub(crate) shared_prefix_tokens: u32,
    pub(crate) max_new_tokens: u32,
    pub(crate) turns: NonZeroU32,
}

/// Options for turning a trace into requests.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TraceOptions {
    /// Factor of the rate at which requests come.
    pub(crate) speed: f64,
    /// Factor of the lengths of prompts and answers.
    pub(crate) tokens: f64,
    /// Requests that are sent.
    pub(crate) limit: Option<u32>,
    /// Longer prompts lose their end.
    pub(crate) max_prompt_tokens: Option<u32>,
    /// Longer answers lose theirs.
    pub(crate) max_new_tokens: Option<u32>,
    /// Tokens per id.
    pub(crate) tokens_per_id: Option<NonZeroU32>,
}

/// The vocabulary that prompts are made of.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Vocabulary {
    pub(crate) first: u32,
    pub(crate) tokens: u32,
    pub(crate) seed: u64,
}

/// A request, without its prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Planned {
    /// Time at which it is sent, after the first one.
    pub(super) due: Duration,
    pub(super) prompt_tokens: u32,
    pub(super) max_new_tokens: u32,
    /// The number of the request in the trace, or of its conversation.
    source: u32,
}

#[derive(Debug)]
enum Source {
    Synthetic { shared: u32 },
    Trace { trace: Box<Trace>, tokens: f64 },
}

/// Requests in the order of their times.
#[derive(Debug)]
pub(super) struct Workload {
    planned: Vec<Planned>,
    source: Source,
    tokens: Tokens,
}

impl Vocabulary {
    fn tokens(self) -> Result<Tokens, WorkloadError> {
        let Self { first, tokens: vocab, seed } = self;
        if first >= vocab {
            return Err(WorkloadError::Vocab { first, vocab });
        }
        Ok(Tokens { first, vocab, seed })
    }
}

impl Workload {
    /// Makes conversations: first the first turn of all, then the second turn of all, and so on. A
    /// turn adds an answer and a new question to the prompt before it.
    pub(super) fn synthetic(made: &Synthetic, vocab: Vocabulary) -> Result<Self, WorkloadError> {
        let tokens = vocab.tokens()?;
        let Synthetic { prompt_tokens, shared_prefix_tokens: shared, turns, .. } = *made;
        let Some(question) = prompt_tokens.checked_sub(shared) else {
            return Err(WorkloadError::Shared { shared, prompt: prompt_tokens });
        };
        let added = u64::from(question) + u64::from(made.max_new_tokens);
        // Turns may be any number.
        let length =
            |turn: u32| u64::from(prompt_tokens).saturating_add(added.saturating_mul(turn.into()));
        let longest = length(turns.get() - 1);
        if longest > PROMPT_TOKENS_MAX {
            let (turns, max) = (turns.get(), PROMPT_TOKENS_MAX);
            return Err(WorkloadError::TooLong { turns, got: longest, max });
        }
        let conversations = made.requests.div_ceil(turns.get()).max(1);
        let mut seconds = 0.0;
        let planned = (0..made.requests).map(|index| {
            let due = due(seconds, to_usize(index), "rate")?;
            let gap = match made.arrivals {
                Arrivals::Constant => 1.0,
                Arrivals::Poisson => -(-uniform(vocab.seed, index)).ln_1p(),
            };
            seconds += gap / made.rate;
            let turn = index.checked_div(conversations).unwrap_or(0);
            Ok(Planned {
                due,
                prompt_tokens: u32::try_from(length(turn)).unwrap_or(u32::MAX),
                max_new_tokens: made.max_new_tokens,
                source: index.checked_rem(conversations).unwrap_or(0),
            })
        });
        let planned = planned.collect::<Result<_, WorkloadError>>()?;
        Ok(Self { planned, source: Source::Synthetic { shared }, tokens })
    }

    /// Reads a trace.
    pub(super) fn of_trace(
        path: &Path,
        options: &TraceOptions,
        vocab: Vocabulary,
    ) -> anyhow::Result<Self> {
        let tokens = vocab.tokens()?;
        let sizes = Sizes { block: None, id: options.tokens_per_id };
        let trace = Trace::read(path, sizes)?;
        let limit = options.limit.map_or(usize::MAX, to_usize);
        let arrivals = || trace.arrivals().iter().take(limit);
        let first = arrivals().map(|arrival| arrival.seconds).fold(f64::INFINITY, f64::min);
        let scaled = |tokens: u32, most: Option<u32>| {
            let tokens = to_count(f64::from(tokens) * options.tokens);
            tokens.min(most.unwrap_or(u32::MAX)).max(1)
        };
        let requests = trace.requests().iter().zip(arrivals()).enumerate();
        let planned = requests.map(|(index, (request, arrival))| {
            Ok(Planned {
                due: due((arrival.seconds - first) / options.speed, index, "scale")?,
                prompt_tokens: scaled(request.tokens, options.max_prompt_tokens),
                max_new_tokens: scaled(arrival.output_tokens, options.max_new_tokens),
                source: to_u32(index),
            })
        });
        let mut planned = planned.collect::<Result<Vec<_>, WorkloadError>>()?;
        planned.sort_by_key(|planned| planned.due);
        let source = Source::Trace { trace: Box::new(trace), tokens: options.tokens };
        Ok(Self { planned, source, tokens })
    }

    pub(super) fn planned(&self) -> &[Planned] {
        &self.planned
    }

    /// Makes a request's prompt.
    pub(super) fn prompt(&self, planned: &Planned) -> Vec<u32> {
        let seeds: Box<dyn Fn(u32) -> Seed> = match &self.source {
            Source::Synthetic { shared } => {
                let (shared, own) = (*shared, [planned.source, 0, OWN]);
                Box::new(move |position| if position < shared { [0, 0, SHARED] } else { own })
            }
            Source::Trace { trace, tokens } => {
                let mut blocks = Vec::new();
                if let Some(request) = trace.requests().get(to_usize(planned.source)) {
                    trace.blocks(request, &mut blocks);
                }
                let (last, own) = (blocks.len().saturating_sub(1), [planned.source, 0, OWN]);
                let tokens_per_block = f64::from(trace.block_size.get()) * tokens;
                // A shortened prompt takes tokens from everywhere, so it shares the prefixes of the
                // whole prompt.
                Box::new(move |position| {
                    let index = to_count(f64::from(position) / tokens_per_block);
                    let block = blocks.get(to_usize(index).min(last));
                    block.map_or(own, |block| trace.tokens(*block))
                })
            }
        };
        let token = |position| self.tokens.token(seeds(position), position);
        (0..planned.prompt_tokens).map(token).collect()
    }
}

/// Returns the time of a request after the first one; refuses a load that takes too long.
fn due(seconds: f64, index: usize, flag: &'static str) -> Result<Duration, WorkloadError> {
    // Of two times that are equal the difference may be a little less than nothing.
    let due = Duration::try_from_secs_f64(seconds.max(0.0)).ok();
    due.filter(|due| due.as_secs_f64() <= SECONDS_MAX).ok_or_else(|| {
        let request = index + 1;
        WorkloadError::TooLate { request, seconds, flag }
    })
}

#[cfg(test)]
mod tests;
