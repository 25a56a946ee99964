//! Continuous batching: which sequences run, what each brings to the next step, and who gives way
//! when blocks run out.
//!
//! A sequence is its tokens and how many of them are cached; whatever is not cached is brought to a
//! step, all at once, in chunks, or again after a preemption. That one rule serves prefill, decode,
//! recomputation and the mode without a cache. The oldest sequence never gives way and fits alone,
//! which is checked before anything runs, so every step moves something forward.
mod stats;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::time::Instant;

use kv::{Backend, BlocksExhausted, CacheError, GroupId, KvCache, SequenceId, StartOptions};

use crate::model::{Batch, Chunk, Model};
use crate::num::{to_u32, to_usize};
use crate::sampler::Sampler;
use crate::stored::blocks_of;
pub(crate) use stats::Stats;

/// One prompt to go on from.
#[derive(Debug, Clone)]
pub(crate) struct Request {
    /// At least one token.
    pub(crate) prompt: Vec<u32>,
    pub(crate) max_new_tokens: u32,
    pub(crate) sampler: Sampler,
}

/// What the scheduler may do.
#[derive(Debug, Clone)]
pub(crate) struct Limits {
    /// Sequences that run at once.
    pub(crate) max_batch: usize,
    /// Tokens of one step.
    pub(crate) max_step_tokens: usize,
    /// Tokens one sequence may have, prompt included.
    pub(crate) context: u32,
    /// Tokens that end a sequence.
    pub(crate) stop: Vec<u32>,
    /// Whether each token computes everything before it again.
    pub(crate) forget: bool,
}

/// Why a sequence ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Finish {
    /// It has as many new tokens as were asked for.
    Length,
    /// It generated a token that ends a text; that token is the last one.
    Stop,
    /// It is as long as the model's context.
    Context,
}

/// What came of one request.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Generated {
    pub(crate) tokens: Vec<u32>,
    pub(crate) finish: Finish,
    /// Prompt tokens that were cached already when the sequence first started.
    pub(crate) reused: usize,
    /// From the start of the run to the first token.
    pub(crate) first_token_ms: f64,
}

/// News of the requests, by their index.
#[derive(Debug)]
pub(crate) enum Event<'a> {
    /// All requests can run; none was refused.
    Accepted,
    Token {
        index: usize,
        token: u32,
    },
    Finished {
        index: usize,
        generated: &'a Generated,
    },
}

/// A request that can never run, or a failure on the way.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ScheduleError {
    #[error("prompt {index} has {tokens} tokens, which leaves no room in a context of {context}")]
    PromptTooLong { index: usize, tokens: usize, context: u32 },
    #[error(
        "prompt {index} with its new tokens is {tokens} tokens long and needs {needed} blocks, \
         the cache has {available}"
    )]
    DoesNotFit { index: usize, tokens: u32, needed: u32, available: u32 },
    #[error("prompt {index} has no tokens")]
    EmptyPrompt { index: usize },
    #[error("the model gave {got} rows of logits, {expected} were asked for")]
    Logits { got: usize, expected: usize },
    #[error(transparent)]
    Cache(#[from] CacheError),
}

/// A request on its way.
#[derive(Debug)]
struct Sequence {
    index: usize,
    id: SequenceId,
    /// Prompt and generated tokens.
    tokens: Vec<u32>,
    prompt_len: usize,
    /// Tokens whose K and V are cached.
    cached: usize,
    tokens_max: usize,
    finish_at_max: Finish,
    sampler: Sampler,
    reused: Option<usize>,
    first_token_ms: f64,
}

/// Runs requests over one cache and one model.
pub(crate) struct Scheduler<'m, B: Backend, M> {
    cache: KvCache<B>,
    model: &'m M,
    limits: Limits,
    waiting: VecDeque<Sequence>,
    /// Oldest first.
    running: Vec<Sequence>,
    done: Vec<Option<Generated>>,
    batch: Batch,
    stats: Stats,
    begun: Instant,
}

impl<'m, B: Backend, M: Model<B>> Scheduler<'m, B, M> {
    pub(crate) fn new(cache: KvCache<B>, model: &'m M, limits: Limits) -> Self {
        Self {
            cache,
            model,
            limits,
            waiting: VecDeque::new(),
            running: Vec::new(),
            done: Vec::new(),
            batch: Batch::default(),
            stats: Stats::default(),
            begun: Instant::now(),
        }
    }

    /// Runs all requests to their end; the answers are in the order of the requests.
    pub(crate) fn run(
        mut self,
        requests: Vec<Request>,
        news: &mut dyn FnMut(Event<'_>) -> anyhow::Result<()>,
    ) -> anyhow::Result<(Vec<Generated>, Stats)> {
        self.done = requests.iter().map(|_| None).collect();
        self.stats.prompt_tokens = requests.iter().map(|request| request.prompt.len()).sum();
        for (index, request) in requests.into_iter().enumerate() {
            let sequence = self.accept(index, request)?;
            self.waiting.push_back(sequence);
        }
        news(Event::Accepted)?;
        self.begun = Instant::now();
        while !(self.waiting.is_empty() && self.running.is_empty()) {
            self.admit()?;
            let logits = self.step()?;
            self.take(&logits, news)?;
        }
        self.stats.seconds = self.begun.elapsed().as_secs_f64();
        self.stats.blocks_total = self.cache.usage().blocks_total;
        let memory = self.cache.spec().memory();
        self.stats.bytes_per_token = memory.bytes_per_token;
        self.stats.cache_bytes = memory.bytes_total.saturating_add(memory.bytes_constants);
        Ok((self.done.into_iter().flatten().collect(), self.stats))
    }

    /// Refuses what can never run.
    fn accept(&self, index: usize, request: Request) -> Result<Sequence, ScheduleError> {
        let Limits { context, .. } = self.limits;
        let tokens = request.prompt.len();
        if tokens == 0 {
            return Err(ScheduleError::EmptyPrompt { index });
        }
        if tokens >= to_usize(context) {
            return Err(ScheduleError::PromptTooLong { index, tokens, context });
        }
        let wanted = tokens.saturating_add(to_usize(request.max_new_tokens));
        let (tokens_max, finish_at_max) = if wanted > to_usize(context) {
            (to_usize(context), Finish::Context)
        } else {
            (wanted, Finish::Length)
        };
        // The last token is never brought to a step.
        let cached_max = to_u32(tokens_max.saturating_sub(1));
        let needed = blocks_of(self.cache.spec(), cached_max);
        let available = self.num_blocks();
        if needed > available || cached_max > self.cache.spec().max_seq_len() {
            return Err(ScheduleError::DoesNotFit { index, tokens: cached_max, needed, available });
        }
        Ok(Sequence {
            index,
            id: SequenceId(u64::try_from(index).unwrap_or(u64::MAX)),
            tokens: request.prompt,
            prompt_len: tokens,
            cached: 0,
            tokens_max,
            finish_at_max,
            sampler: request.sampler,
            reused: None,
            first_token_ms: 0.0,
        })
    }

    fn block_size(&self) -> u32 {
        self.cache.spec().groups().first().map_or(1, kv::GroupSpec::block_size)
    }

    fn num_blocks(&self) -> u32 {
        self.cache.spec().groups().first().map_or(0, kv::GroupSpec::num_blocks)
    }

    /// Blocks a sequence still has to take for all tokens it has now.
    fn blocks_to_take(&self, sequence: &Sequence) -> u32 {
        let held = self.cache.block_table(sequence.id, GroupId(0)).map_or(0, <[_]>::len);
        let needed = blocks_of(self.cache.spec(), to_u32(sequence.tokens.len()));
        needed.saturating_sub(to_u32(held))
    }

    /// Starts waiting sequences while the blocks for everything that already runs are left.
    fn admit(&mut self) -> Result<(), ScheduleError> {
        let room = to_usize(self.cache.spec().max_sequences()).min(self.limits.max_batch.max(1));
        while self.running.len() < room {
            let Some(next) = self.waiting.front() else {
                return Ok(());
            };
            let promised = self.running.iter().map(|running| self.blocks_to_take(running));
            let promised = promised.fold(0_u32, u32::saturating_add);
            let needed = promised.saturating_add(self.blocks_to_take(next));
            let is_alone = self.running.is_empty();
            if needed > self.cache.free_blocks(GroupId(0)) && !is_alone {
                return Ok(());
            }
            let Some(mut next) = self.waiting.pop_front() else {
                return Ok(());
            };
            let reused = self.cache.start(next.id, &next.tokens, StartOptions::default())?;
            // One token at least must be brought to a step, or there are no logits to go on from.
            let last = next.tokens.len().saturating_sub(1);
            if reused > last {
                self.cache.truncate(next.id, to_u32(last))?;
            }
            next.cached = reused.min(last);
            next.reused = next.reused.or(Some(next.cached.min(next.prompt_len)));
            self.running.push(next);
        }
        Ok(())
    }

    /// Fills the batch with what each sequence brings: first those that need one token, so that no
    /// prompt holds up the others, then as much of the rest as a step may have.
    fn fill_batch(&mut self) {
        let mut left = self.limits.max_step_tokens.max(1);
        let Batch { tokens, chunks } = &mut self.batch;
        tokens.clear();
        chunks.clear();
        let pending = |sequence: &Sequence| sequence.tokens.len().saturating_sub(sequence.cached);
        for decoding in [true, false] {
            for sequence in self.running.iter().filter(|s| (pending(s) <= 1) == decoding) {
                let count = pending(sequence).min(left);
                let end = sequence.cached.saturating_add(count);
                let Some(new) =
                    sequence.tokens.get(sequence.cached..end).filter(|new| !new.is_empty())
                else {
                    continue;
                };
                left = left.saturating_sub(count);
                tokens.extend_from_slice(new);
                chunks.push(Chunk {
                    sequence: sequence.id,
                    tokens: to_u32(count),
                    wants_logits: end == sequence.tokens.len(),
                });
            }
        }
    }

    /// Runs one step; sequences give way, youngest first, until its blocks are there.
    fn step(&mut self) -> anyhow::Result<Vec<Vec<f32>>> {
        loop {
            self.fill_batch();
            match self.try_step()? {
                Ok(logits) => return Ok(logits),
                Err(exhausted) => self.preempt(exhausted)?,
            }
        }
    }

    fn try_step(&mut self) -> anyhow::Result<Result<Vec<Vec<f32>>, BlocksExhausted>> {
        let begun = Instant::now();
        let mut step = match self.cache.begin_step(&self.batch.inputs()) {
            Ok(step) => step,
            Err(CacheError::Exhausted(exhausted)) => return Ok(Err(exhausted)),
            Err(error) => return Err(error.into()),
        };
        let logits = self.model.forward(&mut step, &self.batch)?;
        step.commit()?;
        self.note_step(begun);
        Ok(Ok(logits))
    }

    /// Takes the youngest sequence's blocks; it computes everything again later.
    fn preempt(&mut self, exhausted: BlocksExhausted) -> Result<(), ScheduleError> {
        if self.running.len() <= 1 {
            return Err(CacheError::from(exhausted).into());
        }
        if let Some(mut youngest) = self.running.pop() {
            self.cache.release(youngest.id)?;
            youngest.cached = 0;
            self.stats.preemptions = self.stats.preemptions.saturating_add(1);
            self.waiting.push_front(youngest);
        }
        Ok(())
    }

    fn note_step(&mut self, begun: Instant) {
        let is_decode = |chunk: &Chunk| {
            let sequence = self.running.iter().find(|sequence| sequence.id == chunk.sequence);
            chunk.tokens == 1 && sequence.is_some_and(|s| s.cached >= s.prompt_len)
        };
        let decode = self.batch.chunks.iter().filter(|chunk| is_decode(chunk)).count();
        self.stats.note_step(begun.elapsed().as_secs_f64(), self.batch.tokens.len(), decode);
        self.stats.note_usage(&self.cache.usage(), self.block_size());
    }

    /// Samples from the logits of a step that was committed, and lets go of what is finished.
    fn take(
        &mut self,
        logits: &[Vec<f32>],
        news: &mut dyn FnMut(Event<'_>) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let expected = self.batch.chunks.iter().filter(|chunk| chunk.wants_logits).count();
        if logits.len() != expected {
            return Err(ScheduleError::Logits { got: logits.len(), expected }.into());
        }
        let mut rows = logits.iter();
        for chunk in &self.batch.chunks {
            let Some(at) = self.running.iter().position(|s| s.id == chunk.sequence) else {
                continue;
            };
            let Some(sequence) = self.running.get_mut(at) else {
                continue;
            };
            sequence.cached = sequence.cached.saturating_add(to_usize(chunk.tokens));
            let Some(row) = chunk.wants_logits.then(|| rows.next()).flatten() else {
                continue;
            };
            let token = sequence.sampler.sample(row)?;
            if sequence.tokens.len() == sequence.prompt_len {
                sequence.first_token_ms = self.begun.elapsed().as_secs_f64() * 1e3;
            }
            sequence.tokens.push(token);
            self.stats.generated_tokens = self.stats.generated_tokens.saturating_add(1);
            news(Event::Token { index: sequence.index, token })?;
            let finish = if self.limits.stop.contains(&token) {
                Some(Finish::Stop)
            } else {
                (sequence.tokens.len() >= sequence.tokens_max).then_some(sequence.finish_at_max)
            };
            if let Some(finish) = finish {
                let sequence = self.running.remove(at);
                self.cache.release(sequence.id)?;
                let generated = sequence.into_generated(finish);
                news(Event::Finished { index: generated.0, generated: &generated.1 })?;
                if let Some(done) = self.done.get_mut(generated.0) {
                    *done = Some(generated.1);
                }
            } else if self.limits.forget {
                self.cache.truncate(sequence.id, 0)?;
                sequence.cached = 0;
            }
        }
        Ok(())
    }
}

impl Sequence {
    fn into_generated(mut self, finish: Finish) -> (usize, Generated) {
        let tokens = self.tokens.split_off(self.prompt_len.min(self.tokens.len()));
        let reused = self.reused.unwrap_or(0);
        let first_token_ms = self.first_token_ms;
        (self.index, Generated { tokens, finish, reused, first_token_ms })
    }
}
