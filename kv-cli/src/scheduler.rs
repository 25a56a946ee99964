//! Continuous batching: which sequences run, what each brings to the next step, and who gives way
//! when blocks run out.
//!
//! A sequence is its tokens and how many of them are cached; whatever is not cached is brought to a
//! step, all at once, in chunks, or again after a preemption. That one rule serves prefill, decode,
//! recomputation and the mode without a cache. Requests come in while a step is open, so that
//! those that arrive together compute what they share once. The oldest request never gives way and
//! fits alone, which is checked before anything runs, so every step moves something forward.
mod beams;
mod draft;
mod fit;
mod forks;
mod judge;
mod queues;
mod stats;
mod task;
#[cfg(test)]
mod tests;

use std::time::Instant;

use kv::{Backend, BlocksExhausted, CacheError, KvCache, SequenceId};

use crate::model::{Chunk, Model};
use crate::num::{to_u32, to_usize};
use beams::BeamSearch;
pub(crate) use beams::{BeamOptions, Hypothesis};
pub(crate) use fit::Reading;
use fit::Shortage;
use judge::Outcome;
use queues::Queues;
pub(crate) use stats::Stats;
pub(crate) use task::{Finish, Generated, Request};
use task::{Search, Sequence, Task};

/// What the scheduler may do.
#[derive(Debug, Clone)]
pub(crate) struct Limits {
    /// Sequences that run at once; a request that needs more runs alone.
    pub(crate) max_batch: usize,
    /// Tokens of one step.
    pub(crate) max_step_tokens: usize,
    /// Tokens one sequence may have, prompt included.
    pub(crate) context: u32,
    /// Tokens that end a sequence.
    pub(crate) stop: Vec<u32>,
    /// Whether each token computes everything before it again.
    pub(crate) forget: bool,
    /// Guesses of the next tokens that a sequence brings to a step.
    pub(crate) draft_tokens: usize,
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

/// Hears the news.
pub(crate) type News<'n> = dyn FnMut(Event<'_>) -> anyhow::Result<()> + 'n;

/// A request that can never run, or a failure on the way.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ScheduleError {
    #[error("prompt {index} has {tokens} tokens, which leaves no room in a context of {context}")]
    PromptTooLong { index: usize, tokens: usize, context: u32 },
    #[error(
        "prompt {index} with its new tokens is {tokens} tokens long and needs {} blocks{}, the \
         cache has {}: {}",
        .shortage.needed, of_group(shortage), .shortage.available, .shortage.advice
    )]
    DoesNotFit { index: usize, tokens: u32, shortage: Shortage },
    #[error(
        "prompt {index} with its new tokens is {tokens} tokens long, a sequence of the cache has \
         at most {max}: fewer --max-new-tokens would do"
    )]
    TooLong { index: usize, tokens: u32, max: u32 },
    #[error(
        "prompt {index} needs {needed} sequences at once, the cache has room for {available}: \
         fewer --beams would do"
    )]
    TooManyBeams { index: usize, needed: usize, available: u32 },
    #[error("prompt {index} has no tokens")]
    EmptyPrompt { index: usize },
    #[error("the model gave {got} rows of logits, {expected} were asked for")]
    Logits { got: usize, expected: usize },
    #[error("no sequence can go on")]
    Stuck,
    #[error(transparent)]
    Cache(#[from] CacheError),
}

/// Names the group of a shortage, where there are several.
fn of_group(shortage: &Shortage) -> String {
    let Shortage { group, num_groups, .. } = shortage;
    if *num_groups > 1 { format!(" of layer group {group}") } else { String::new() }
}

/// Runs requests over one cache and one model.
pub(crate) struct Scheduler<'m, B: Backend, M> {
    cache: KvCache<B>,
    model: &'m M,
    limits: Limits,
    queues: Queues,
    done: Vec<Option<Generated>>,
    stats: Stats,
    begun: Instant,
    /// For the next fork.
    next_id: u64,
}

impl<'m, B: Backend, M: Model<B>> Scheduler<'m, B, M> {
    pub(crate) fn new(cache: KvCache<B>, model: &'m M, limits: Limits) -> Self {
        Self {
            cache,
            model,
            limits,
            queues: Queues::default(),
            done: Vec::new(),
            stats: Stats::default(),
            begun: Instant::now(),
            next_id: 0,
        }
    }

    /// Runs all requests to their end; the answers are in the order of the requests.
    pub(crate) fn run(
        mut self,
        requests: Vec<Request>,
        news: &mut News<'_>,
    ) -> anyhow::Result<(Vec<Generated>, Stats)> {
        self.done = requests.iter().map(|_| None).collect();
        self.stats.prompt_tokens = requests.iter().map(|request| request.prompt.len()).sum();
        for (index, request) in requests.into_iter().enumerate() {
            let task = self.accept(index, request)?;
            self.queues.waiting.push_back(task);
        }
        news(Event::Accepted)?;
        self.begun = Instant::now();
        while !(self.queues.waiting.is_empty() && self.queues.running.is_empty()) {
            self.step(news)?;
        }
        self.stats.seconds = self.begun.elapsed().as_secs_f64();
        self.stats.note_end(&self.cache);
        Ok((self.done.into_iter().flatten().collect(), self.stats))
    }

    /// Refuses what can never run.
    fn accept(&mut self, index: usize, request: Request) -> Result<Task, ScheduleError> {
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
        let id = self.new_id();
        let task = Task {
            index,
            prompt_len: tokens,
            tokens_max,
            finish_at_max,
            sequences: vec![Sequence::new(id, request.prompt)],
            search: match request.beams {
                None => Search::Sample(request.sampler),
                Some(options) => Search::Beams(BeamSearch::new(options)),
            },
            reused: None,
            admitted_ms: None,
            first_token_ms: 0.0,
            was_preempted: false,
        };
        self.check_fits(&task)?;
        Ok(task)
    }

    fn check_fits(&self, task: &Task) -> Result<(), ScheduleError> {
        let Task { index, .. } = *task;
        let Limits { max_step_tokens, forget, .. } = self.limits;
        let spec = self.cache.spec();
        // The last token is never brought to a step.
        let tokens = to_u32(task.tokens_max.saturating_sub(1));
        let (prompt, width) = (to_u32(task.prompt_len), to_u32(task.width()));
        let chunk = to_u32(max_step_tokens.max(1)).min(if forget { tokens } else { prompt });
        let reading = Reading { prompt, chunk, tokens, width, forget };
        reading.check(spec).map_err(|shortage| ScheduleError::DoesNotFit {
            index,
            tokens,
            shortage,
        })?;
        let max = spec.max_seq_len();
        if tokens > max {
            return Err(ScheduleError::TooLong { index, tokens, max });
        }
        if width > spec.max_sequences() {
            let (needed, available) = (task.width(), spec.max_sequences());
            return Err(ScheduleError::TooManyBeams { index, needed, available });
        }
        Ok(())
    }

    fn new_id(&mut self) -> SequenceId {
        let id = SequenceId(self.next_id);
        self.next_id = self.next_id.wrapping_add(1);
        id
    }

    /// Runs one step; first guesses are left out, then requests give way, youngest first, until its
    /// blocks are there. The last request brings fewer tokens at once: what leaves a window on the
    /// way makes room for the rest.
    fn step(&mut self, news: &mut News<'_>) -> anyhow::Result<()> {
        let mut with_drafts = self.limits.draft_tokens > 0;
        let mut tokens_max = self.limits.max_step_tokens.max(1);
        loop {
            self.queues.fill(&self.limits, tokens_max, with_drafts);
            match self.try_step(tokens_max, news)? {
                Ok(()) => return Ok(()),
                Err(_) if self.queues.batch.chunks.iter().any(|chunk| chunk.drafts > 0) => {
                    with_drafts = false;
                }
                Err(_) if self.queues.running.len() <= 1 && tokens_max > 1 => tokens_max /= 2,
                Err(exhausted) => self.preempt(exhausted)?,
            }
        }
    }

    fn try_step(
        &mut self,
        tokens_max: usize,
        news: &mut News<'_>,
    ) -> anyhow::Result<Result<(), BlocksExhausted>> {
        let begun = Instant::now();
        let Self { cache, model, limits, queues, .. } = self;
        let mut step = match cache.begin_step(&queues.batch.inputs()) {
            Ok(step) => step,
            Err(CacheError::Exhausted(exhausted)) => return Ok(Err(exhausted)),
            Err(error) => return Err(error.into()),
        };
        let refused = queues.admit(&mut step, limits, tokens_max, self.begun)?;
        if queues.batch.chunks.is_empty() {
            return refused.map(Err).ok_or_else(|| ScheduleError::Stuck.into());
        }
        let logits = model.forward(&mut step, &queues.batch)?;
        let outcomes = queues.judge(logits, limits)?;
        if queues.batch.chunks.iter().any(|chunk| chunk.drafts > 0) {
            let kept: Vec<_> = outcomes.iter().map(|outcome| outcome.kept).collect();
            step.commit_accepted(&kept)?;
        } else {
            step.commit()?;
        }
        self.note_step(begun, &outcomes);
        self.take(outcomes, news)?;
        Ok(Ok(()))
    }

    /// Takes the youngest request's blocks; it comes back with what nobody needed, and computes the
    /// rest again.
    fn preempt(&mut self, exhausted: BlocksExhausted) -> Result<(), ScheduleError> {
        if self.queues.running.len() <= 1 {
            return Err(CacheError::from(exhausted).into());
        }
        if let Some(mut youngest) = self.queues.running.pop() {
            for sequence in youngest.sequences.iter_mut().filter(|sequence| sequence.is_live) {
                self.cache.preempt(sequence.id)?;
                (sequence.is_live, sequence.cached, sequence.logits) = (false, 0, None);
            }
            youngest.was_preempted = true;
            self.stats.preemptions = self.stats.preemptions.saturating_add(1);
            self.queues.waiting.push_front(youngest);
        }
        Ok(())
    }

    fn note_step(&mut self, begun: Instant, outcomes: &[Outcome]) {
        let Self { queues, stats, cache, .. } = self;
        let is_decode = |chunk: &Chunk| {
            let task = queues.position(chunk.sequence).and_then(|at| queues.running.get(at));
            task.is_some_and(|task| {
                let sequence = task.sequences.iter().find(|s| s.id == chunk.sequence);
                chunk.logits > 0 && sequence.is_some_and(|s| s.cached >= task.prompt_len)
            })
        };
        let (mut decode, mut kept) = (0_u32, 0_u32);
        for (chunk, outcome) in queues.batch.chunks.iter().zip(outcomes) {
            if is_decode(chunk) {
                decode = decode.saturating_add(chunk.tokens);
                kept = kept.saturating_add(outcome.kept);
            }
            let accepted = outcome.kept.saturating_add(chunk.drafts).saturating_sub(chunk.tokens);
            stats.note_drafts(chunk.drafts, accepted);
        }
        let seconds = begun.elapsed().as_secs_f64();
        stats.note_step(seconds, queues.batch.tokens.len(), (decode, kept));
        let block_size = cache.spec().groups().first().map_or(1, kv::GroupSpec::block_size);
        stats.note_usage(&cache.usage(), block_size);
    }

    /// Takes what a committed step said, and lets go of what is finished.
    fn take(&mut self, outcomes: Vec<Outcome>, news: &mut News<'_>) -> anyhow::Result<()> {
        let chunks = std::mem::take(&mut self.queues.batch.chunks);
        for (chunk, outcome) in chunks.iter().zip(outcomes) {
            let Some(at) = self.queues.position(chunk.sequence) else {
                continue;
            };
            let Some(task) = self.queues.running.get_mut(at) else {
                continue;
            };
            let (index, prompt_len) = (task.index, task.prompt_len);
            let Some(sequence) = task.sequence_mut(chunk.sequence) else {
                continue;
            };
            sequence.cached = sequence.cached.saturating_add(to_usize(outcome.kept));
            sequence.logits = outcome.row;
            let is_first = sequence.tokens.len() == prompt_len;
            sequence.tokens.extend_from_slice(&outcome.new);
            let (len, last) = (sequence.tokens.len(), outcome.new.last().copied());
            if is_first {
                task.first_token_ms = self.begun.elapsed().as_secs_f64() * 1e3;
            }
            for token in outcome.new {
                self.stats.generated_tokens = self.stats.generated_tokens.saturating_add(1);
                news(Event::Token { index, token })?;
            }
            let Some(last) = last else {
                continue;
            };
            if self.limits.stop.contains(&last) {
                self.end(at, Finish::Stop, news)?;
            } else if len >= task.tokens_max {
                let finish = task.finish_at_max;
                self.end(at, finish, news)?;
            } else if self.limits.forget {
                forget(&mut self.cache, task)?;
            }
        }
        self.queues.batch.chunks = chunks;
        self.fork_waiting()?;
        self.advance_beams(news)
    }

    /// Ends a running request.
    fn end(&mut self, at: usize, finish: Finish, news: &mut News<'_>) -> anyhow::Result<()> {
        let task = self.queues.running.remove(at);
        for sequence in task.sequences.iter().filter(|sequence| sequence.is_live) {
            self.cache.release(sequence.id)?;
        }
        let is_beams = matches!(task.search, Search::Beams(_));
        let (index, generated) = task.into_generated(finish);
        if is_beams {
            for token in &generated.tokens {
                self.stats.generated_tokens = self.stats.generated_tokens.saturating_add(1);
                news(Event::Token { index, token: *token })?;
            }
        }
        news(Event::Finished { index, generated: &generated })?;
        if let Some(done) = self.done.get_mut(index) {
            *done = Some(generated);
        }
        Ok(())
    }
}

/// Lets a request compute everything again.
fn forget<B: Backend>(cache: &mut KvCache<B>, task: &mut Task) -> Result<(), CacheError> {
    for sequence in &mut task.sequences {
        cache.truncate(sequence.id, 0)?;
        sequence.cached = 0;
    }
    Ok(())
}
