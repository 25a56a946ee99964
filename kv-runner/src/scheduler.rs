//! Continuous batching: which sequences run, which tokens each adds to the next step, and which
//! request is preempted when blocks run out.
//!
//! A sequence is its tokens and the number of them that are cached; the rest is added to steps, all
//! at once, in chunks, or again after a preemption. This one rule covers prefill, decode,
//! recomputation and the mode without a cache. Requests are admitted while a step is open, so that
//! requests that arrive together compute their common prefix once. The oldest request is never
//! preempted and fits alone, which is checked before anything runs, so every step makes progress.
mod beams;
mod cancel;
mod choices;
mod draft;
mod error;
mod fit;
mod forks;
mod queues;
mod session;
mod stats;
mod task;
#[cfg(test)]
mod tests;
mod tiers;
mod verify_drafts;

use std::time::Instant;

use candle_core::Device;
use kv::backend::Backend;
use kv::error::BlocksExhausted;
use kv::tier::{Tiers, Unwritten};
use kv::{CacheError, KvCache, SequenceId};
use kv_candle::CandleStep;

use crate::config::ModelConfig;
use crate::error::Error;
use crate::model::{Chunk, Model};
use crate::num::{to_u32, to_usize};
use beams::BeamSearch;
pub use beams::{BeamOptions, Hypothesis};
pub use error::ScheduleError;
pub use fit::{Advice, RequestSize, Shortage};
use queues::Queues;
pub use session::SavedText;
pub use stats::Stats;
pub use task::{Finish, Generated, Request};
use task::{FromTiers, Search, Sequence, Task};
use verify_drafts::Outcome;

/// Limits of the scheduler.
#[derive(Debug, Clone)]
pub struct Limits {
    /// Sequences that run at once; a request that needs more runs alone.
    pub max_batch: usize,
    /// Tokens per step.
    pub max_step_tokens: usize,
    /// Tokens per sequence, including the prompt.
    pub context: u32,
    /// Tokens that end a sequence.
    pub stop: Vec<u32>,
    /// Whether everything is recomputed for each token, to measure what caching saves.
    pub forget: bool,
    /// Draft tokens per sequence and step, proposed from its own text.
    pub draft_tokens: usize,
}

impl Limits {
    /// Makes limits for a model: its context and stop tokens, 8 sequences at once, 512 tokens per
    /// step, no drafts.
    pub fn of(model: &ModelConfig) -> Self {
        Self {
            max_batch: 8,
            max_step_tokens: 512,
            context: model.context,
            stop: model.eos.clone(),
            forget: false,
            draft_tokens: 0,
        }
    }
}

/// A result of a step. Requests are named by the number that [`Scheduler::submit`] returned.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Event {
    /// A request has another token. Beam search chooses its text at the end, so all its tokens come
    /// right before its end.
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

/// Runs requests over one cache and one model, in continuous batches.
///
/// Submit requests at any time, and call [`Self::step`] while [`Self::has_work`]:
///
/// ```no_run
/// # fn run(cache: kv::KvCache, model: &kv_runner::Decoder) -> Result<(), kv_runner::Error> {
/// use kv_runner::{Event, Limits, Request, Scheduler};
///
/// let mut scheduler = Scheduler::new(cache, model, Limits::of(model.config()));
/// scheduler.submit(Request::new(vec![1, 403, 407], 20))?;
/// while scheduler.has_work() {
///     for event in scheduler.step()? {
///         if let Event::Token { index, token } = event {
///             println!("request {index}: token {token}");
///         }
///     }
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Scheduler<'m, B: Backend, M> {
    cache: KvCache<B>,
    model: &'m M,
    limits: Limits,
    queues: Queues,
    stats: Stats,
    /// Number of submitted requests.
    requests: usize,
    /// Id of the next fork.
    next_id: u64,
    tiers: Option<Tiers<B>>,
}

impl<'m, B: Backend, M: Model<B>> Scheduler<'m, B, M> {
    /// Takes a cache, which must have the model's layers and heads.
    pub fn new(cache: KvCache<B>, model: &'m M, limits: Limits) -> Self {
        Self {
            cache,
            model,
            limits,
            queues: Queues::default(),
            stats: Stats::default(),
            requests: 0,
            next_id: 0,
            tiers: None,
        }
    }

    /// Takes the tiers of the cache: prompts then reuse what they have.
    #[must_use]
    pub fn with_tiers(mut self, tiers: Tiers<B>) -> Self {
        self.tiers = Some(tiers);
        self
    }

    /// Returns the tiers.
    pub fn tiers(&self) -> Option<&Tiers<B>> {
        self.tiers.as_ref()
    }

    /// Lets the tiers go on with copies and writes while nothing runs; a step does so too.
    ///
    /// # Errors
    /// [`Error::Tier`] if the device failed.
    pub fn poll_tiers(&mut self) -> Result<(), Error> {
        match &mut self.tiers {
            Some(tiers) => Ok(tiers.poll(&mut self.cache)?),
            None => Ok(()),
        }
    }

    /// Returns the prompt tokens that were cached when a running request first started.
    pub fn reused(&self, index: usize) -> Option<usize> {
        self.queues.running.iter().find(|task| task.index == index)?.reused
    }

    /// Gives the tiers time to write what only they have, and returns what is left: see
    /// [`Tiers::flush`]. Nothing is, without tiers.
    ///
    /// # Errors
    /// [`Error::Tier`] if the device failed.
    pub fn flush_tiers(&mut self, deadline: Instant) -> Result<Unwritten, Error> {
        match &mut self.tiers {
            Some(tiers) => Ok(tiers.flush(&mut self.cache, deadline)?),
            None => Ok(Unwritten::default()),
        }
    }

    /// Returns the requests that wait, and those that run.
    pub fn queued(&self) -> (usize, usize) {
        self.queues.count()
    }

    /// Returns the cache, for statistics.
    pub fn cache(&self) -> &KvCache<B> {
        &self.cache
    }

    /// Appends a request to the queue and returns its number, counted from 0.
    ///
    /// # Errors
    /// [`ScheduleError`] for a request that could never run, even alone; nothing has changed then.
    pub fn submit(&mut self, request: Request) -> Result<usize, ScheduleError> {
        let (index, prompt) = (self.requests, request.prompt.len());
        let task = self.accept(index, request)?;
        self.queues.waiting.push_back(task);
        self.requests = self.requests.saturating_add(1);
        self.stats.prompt_tokens = self.stats.prompt_tokens.saturating_add(prompt);
        Ok(index)
    }

    /// Returns whether a request waits or runs.
    pub fn has_work(&self) -> bool {
        !(self.queues.waiting.is_empty() && self.queues.running.is_empty())
    }

    /// Runs one step and returns its results; does nothing without work.
    ///
    /// If blocks are missing, drafts are left out first, then requests are preempted, youngest
    /// first; the last one gets fewer tokens per step, because blocks that leave a window in
    /// between make room for the rest.
    ///
    /// # Errors
    /// [`Error::Cache`] if the device fails, and the model's errors. The requests cannot continue
    /// after that: the step is rolled back, but sampled tokens are not.
    pub fn step(&mut self) -> Result<Vec<Event>, Error> {
        self.step_noting(|_| {})
    }

    /// Runs one step as [`Self::step`] does, and says what [`Self::queued`] is once requests have
    /// been admitted to it, before the model computes anything.
    ///
    /// # Errors
    /// Those of [`Self::step`].
    pub fn step_noting(
        &mut self,
        mut on_admitted: impl FnMut((usize, usize)),
    ) -> Result<Vec<Event>, Error> {
        let mut events = Vec::new();
        if self.has_work() {
            let begun = Instant::now();
            self.run_step(&mut events, &mut on_admitted)?;
            self.stats.seconds += begun.elapsed().as_secs_f64();
        }
        Ok(events)
    }

    /// Runs all requests to their end and returns their results, in order.
    ///
    /// # Errors
    /// Those of [`Self::submit`], before anything runs, and of [`Self::step`].
    pub fn run(mut self, requests: Vec<Request>) -> Result<(Vec<Generated>, Stats), Error> {
        for request in requests {
            self.submit(request)?;
        }
        let mut done: Vec<_> = (0..self.requests).map(|_| None).collect();
        while self.has_work() {
            for event in self.step()? {
                if let Event::Finished { index, generated } = event
                    && let Some(place) = done.get_mut(index)
                {
                    *place = Some(generated);
                }
            }
        }
        Ok((done.into_iter().flatten().collect(), self.stats()))
    }

    /// Returns the counts so far.
    pub fn stats(&self) -> Stats {
        let mut stats = self.stats.clone();
        stats.note_cache(&self.cache);
        stats
    }

    /// Refuses requests that can never run.
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
            salt: request.salt,
            ignore_stop: request.ignore_stop,
            choices: Vec::new(),
            reused: None,
            submitted: Instant::now(),
            admitted_ms: None,
            first_token_ms: 0.0,
            was_preempted: false,
            tiers: FromTiers::Unasked,
        };
        self.check_fits(&task)?;
        Ok(task)
    }

    fn check_fits(&self, task: &Task) -> Result<(), ScheduleError> {
        let Task { index, .. } = *task;
        let Limits { max_step_tokens, forget, .. } = self.limits;
        let spec = self.cache.state().spec();
        // The last token is never added to a step.
        let tokens = to_u32(task.tokens_max.saturating_sub(1));
        let (prompt, width) = (to_u32(task.prompt_len), to_u32(task.width()));
        let chunk = to_u32(max_step_tokens.max(1)).min(if forget { tokens } else { prompt });
        let size = RequestSize { prompt, chunk, tokens, width, forget };
        size.check(spec).map_err(|shortage| ScheduleError::DoesNotFit {
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

    fn run_step(
        &mut self,
        events: &mut Vec<Event>,
        on_admitted: &mut dyn FnMut((usize, usize)),
    ) -> Result<(), Error> {
        let mut with_drafts = self.limits.draft_tokens > 0;
        let mut tokens_max = self.limits.max_step_tokens.max(1);
        loop {
            let imports = self.bring()?;
            self.queues.fill(&self.limits, tokens_max, with_drafts);
            let tried = self.try_step(tokens_max, events, on_admitted);
            self.ask_again();
            let finished = tiers::finish(&mut self.cache, imports);
            let tried = tried?;
            finished?;
            match tried {
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
        events: &mut Vec<Event>,
        on_admitted: &mut dyn FnMut((usize, usize)),
    ) -> Result<Result<(), BlocksExhausted>, Error> {
        let begun = Instant::now();
        let Self { cache, model, limits, queues, .. } = self;
        let mut step = match cache.begin_step(&queues.batch.inputs()) {
            Ok(step) => step,
            Err(CacheError::Exhausted(exhausted)) => return Ok(Err(exhausted)),
            Err(error) => return Err(error.into()),
        };
        let refused = queues.admit(&mut step, limits, tokens_max)?;
        if queues.batch.chunks.is_empty() {
            return refused.map(Err).ok_or_else(|| ScheduleError::Stuck.into());
        }
        on_admitted(queues.count());
        let step = CandleStep::over(step, &Device::Cpu)?;
        let logits = model.forward(&step, &queues.batch)?;
        let outcomes = queues.verify_drafts(logits, limits)?;
        if queues.batch.chunks.iter().any(|chunk| chunk.drafts > 0) {
            let kept: Vec<_> = outcomes.iter().map(|outcome| outcome.kept).collect();
            step.commit_accepted(&kept)?;
        } else {
            step.commit()?;
        }
        self.note_step(begun, &outcomes);
        self.take(outcomes, events)?;
        Ok(Ok(()))
    }

    /// Preempts the youngest request. It is admitted again with its blocks that are still cached,
    /// and computes the rest again.
    fn preempt(&mut self, exhausted: BlocksExhausted) -> Result<(), CacheError> {
        if self.queues.running.len() <= 1 {
            return Err(exhausted.into());
        }
        if let Some(mut youngest) = self.queues.running.pop() {
            for sequence in youngest.sequences.iter_mut().filter(|sequence| sequence.is_live) {
                self.cache.preempt(sequence.id)?;
                (sequence.is_live, sequence.cached, sequence.logits) = (false, 0, None);
            }
            youngest.was_preempted = true;
            youngest.tiers = FromTiers::Unasked;
            self.stats.preemptions = self.stats.preemptions.saturating_add(1);
            self.queues.waiting.push_front(youngest);
        }
        Ok(())
    }

    fn note_step(&mut self, begun: Instant, outcomes: &[Outcome]) {
        let Self { queues, stats, cache, tiers, .. } = self;
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
        if decode == 0
            && let Some(tiers) = tiers
        {
            tiers.note_compute(to_u32(queues.batch.tokens.len()), begun.elapsed());
        }
        let seconds = begun.elapsed().as_secs_f64();
        stats.note_step(seconds, queues.batch.tokens.len(), (decode, kept));
        let block_size =
            cache.state().spec().groups().first().map_or(1, kv::spec::GroupSpec::block_size);
        stats.note_usage(&cache.state().usage(), block_size);
    }

    /// Applies the tokens of a committed step, and ends finished requests.
    fn take(&mut self, outcomes: Vec<Outcome>, events: &mut Vec<Event>) -> Result<(), Error> {
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
            let last = outcome.new.last().copied();
            if is_first && !outcome.new.is_empty() {
                task.first_token_ms = task.submitted.elapsed().as_secs_f64() * 1e3;
            }
            for token in outcome.new {
                self.stats.generated_tokens = self.stats.generated_tokens.saturating_add(1);
                events.push(Event::Token { index, token });
            }
            if let Some(logits) = outcome.after_prompt {
                self.fork_choices(at, &logits, events)?;
            }
            let Some(last) = last else {
                continue;
            };
            self.continue_or_end(at, last, events)?;
        }
        self.queues.batch.chunks = chunks;
        self.fork_waiting()?;
        self.advance_beams(events)
    }

    /// Ends a running request after its newest token, if that is the last one.
    fn continue_or_end(
        &mut self,
        at: usize,
        last: u32,
        events: &mut Vec<Event>,
    ) -> Result<(), CacheError> {
        let Some(task) = self.queues.running.get_mut(at) else {
            return Ok(());
        };
        let len = task.sequences.first().map_or(0, |first| first.tokens.len());
        if task.stops_at(last, &self.limits.stop) {
            self.end(at, Finish::Stop, events)
        } else if len >= task.tokens_max {
            let finish = task.finish_at_max;
            self.end(at, finish, events)
        } else if self.limits.forget {
            forget(&mut self.cache, task)
        } else {
            Ok(())
        }
    }

    /// Ends a running request.
    fn end(
        &mut self,
        at: usize,
        finish: Finish,
        events: &mut Vec<Event>,
    ) -> Result<(), CacheError> {
        let task = self.queues.running.remove(at);
        for sequence in task.sequences.iter().filter(|sequence| sequence.is_live) {
            self.cache.release(sequence.id)?;
        }
        let is_beams = matches!(task.search, Search::Beams(_));
        let (index, generated) = task.into_generated(finish);
        if is_beams {
            for token in &generated.tokens {
                self.stats.generated_tokens = self.stats.generated_tokens.saturating_add(1);
                events.push(Event::Token { index, token: *token });
            }
        }
        events.push(Event::Finished { index, generated });
        Ok(())
    }
}

/// Truncates a request's sequences, so that it computes everything again.
fn forget<B: Backend>(cache: &mut KvCache<B>, task: &mut Task) -> Result<(), CacheError> {
    for sequence in &mut task.sequences {
        cache.truncate(sequence.id, 0)?;
        sequence.cached = 0;
    }
    Ok(())
}
