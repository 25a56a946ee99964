//! The engine: requests go in, steps are computed, events come out.
//!
//! Owns the life of a step, from [`Engine::begin_step`] to its end. What a step computes is decided
//! in `plan` and `admit`, what comes of it in `outcome` and `state`.
mod tiers;

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use kv_core::backend::{AnyBackend, Backend};
use kv_core::error::BlocksExhausted;
use kv_core::events::Snapshot;
use kv_core::eviction::{Clock, SystemClock};
use kv_core::invariant::Invariant;
use kv_core::spec::GroupSpec;
use kv_core::{CacheError, KvCache, Step};
use kv_tier::{Identity, SessionInfo, TierError, TieredCache};

use crate::accept::accept;
use crate::admit::{Admitted, admit};
use crate::error::{EngineError, RequestError};
use crate::held;
use crate::memory::Memory;
use crate::model::{Batch, Model, Output};
use crate::num::to_u32;
use crate::outcome::{Outcome, outcomes};
use crate::plan::{Size, plan};
use crate::request::{Event, Generated, Limits, Request};
use crate::sampler::Sampler;
use crate::session::{self, SavedText};
use crate::state::State;
use crate::stats::Stats;
use crate::task::Choice;

/// Runs requests over one cache, in continuous batches.
///
/// Submit requests at any time, and call [`Self::step`] while [`Self::has_work`]. A caller that
/// computes elsewhere, or across await points, does the parts of a step itself:
/// [`Self::begin_step`], [`Self::with_step`] and [`Self::end_step`] or [`Self::roll_back`].
///
/// ```
/// use kv::backend::NullBackend;
/// use kv::{Axes, CacheSpec, KvCache, TensorView};
/// use kv::engine::{Chosen, Engine, Event, Limits, Request};
///
/// let spec = CacheSpec::builder().layers(1).kv_heads(1).head_dim(1).paged(16, 64).build()?;
/// let mut engine = Engine::new(KvCache::new(NullBackend::new(), spec)?, Limits::new(1024));
/// engine.submit(Request::new(vec![5, 6, 7], 2))?;
/// let mut tokens = Vec::new();
/// while let Some(batch) = engine.begin_step()? {
///     let chosen = batch.chunks.iter().filter(|chunk| chunk.logits > 0).map(|chunk| Chosen {
///         sequence: chunk.sequence,
///         tokens: vec![9], // what the caller's kernels choose
///     });
///     let chosen: Vec<_> = chosen.collect();
///     engine.with_step(|step, batch| {
///         let rows = vec![0.0_f32; batch.tokens.len()];
///         let dims = [rows.len() as u32, 1, 1];
///         let rows = TensorView::host(&rows, &dims);
///         step.write(0, rows, rows, Axes::Thd)
///     })??;
///     for event in engine.end_step(chosen)? {
///         if let Event::Token { token, .. } = event {
///             tokens.push(token);
///         }
///     }
/// }
/// assert_eq!(tokens, [9, 9]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Engine<B: Backend = AnyBackend> {
    state: State<B>,
    batch: Batch,
    held: Option<HeldStep>,
}

/// Times and admissions of the held step.
#[derive(Debug)]
struct HeldStep {
    /// Time at which its call began.
    begun: Duration,
    /// Time at which its blocks were allocated.
    opened: Duration,
    /// Numbers of the requests that it admitted.
    admitted: Vec<usize>,
}

impl<B: Backend> Engine<B> {
    /// Takes a cache, which must have the layers and heads of the models that will run.
    pub fn new(cache: KvCache<B>, limits: Limits) -> Self {
        Self::over(Memory::Device(Box::new(cache)), limits)
    }

    /// Does what [`Self::new`] does, with a cache whose prompts also reuse blocks of its tiers.
    pub fn tiered(cache: TieredCache<B>, limits: Limits) -> Self {
        Self::over(Memory::Tiered(Box::new(cache)), limits)
    }

    fn over(memory: Memory<B>, limits: Limits) -> Self {
        Self {
            state: State::new(memory, limits, Arc::new(SystemClock::new())),
            batch: Batch::default(),
            held: None,
        }
    }

    /// Replaces the machine's clock, by a [`ManualClock`](kv_core::eviction::ManualClock) for
    /// example that the arrivals of a trace advance. All times of requests and of [`Stats`] are
    /// differences of this clock. Set it before the first request.
    #[must_use]
    pub fn with_clock(mut self, clock: Arc<dyn Clock>) -> Self {
        self.state.clock = clock;
        self
    }

    /// Returns the limits.
    pub fn limits(&self) -> &Limits {
        &self.state.limits
    }

    /// Returns the cache: usage, statistics, lengths.
    pub fn cache(&self) -> &KvCache<B> {
        self.state.memory.cache()
    }

    /// Returns the cache alone. A held step is rolled back, and all requests end.
    pub fn into_cache(mut self) -> KvCache<B> {
        self.roll_back();
        for task in self.state.queues.take_all() {
            self.state.release(&task);
        }
        self.state.memory.into_cache()
    }

    /// Returns the cache's [events](kv_core::events) since the last call: see
    /// [`KvCache::take_events`].
    pub fn take_events(&mut self) -> Vec<kv_core::events::Event> {
        self.state.memory.cache_mut().take_events()
    }

    /// Returns the reusable blocks of the cache and of its tiers, with the number of the first
    /// event after them: see [`TieredCache::snapshot`].
    pub fn snapshot(&mut self) -> Snapshot {
        match &mut self.state.memory {
            Memory::Device(cache) => cache.state().snapshot(),
            Memory::Tiered(cache) => cache.snapshot(),
        }
    }

    /// Returns the prompt tokens that were cached when a running request first started.
    pub fn reused(&self, index: usize) -> Option<usize> {
        let task = self.state.queues.running().iter().find(|task| task.index == index)?;
        task.reused.and_then(|reused| reused.try_into().ok())
    }

    /// Returns the texts that wait, and those that run.
    pub fn queued(&self) -> (usize, usize) {
        self.state.queues.count()
    }

    /// Returns whether a request waits or runs.
    pub fn has_work(&self) -> bool {
        !self.state.queues.is_empty()
    }

    /// Returns the counts so far.
    pub fn stats(&self) -> Stats {
        let mut stats = self.state.stats.clone();
        stats.note_cache(self.state.memory.state());
        stats
    }

    /// Appends a request to the queue and returns its number, counted from 0.
    ///
    /// # Errors
    /// [`RequestError`] for a request that could never run, even alone; nothing has changed then.
    pub fn submit(&mut self, request: Request) -> Result<usize, RequestError> {
        Ok(self.submit_choices(request, Vec::new())?.start)
    }

    /// Appends a request for several texts after one prompt, and returns their numbers: the first
    /// is sampled by the request's own sampler, each other by one of `samplers`.
    ///
    /// The prompt is computed once. Then every text is a request of its own, which is as long, and
    /// reads as, it would alone.
    ///
    /// # Errors
    /// Those of [`Self::submit`], and [`RequestError::BeamsOrChoices`] for a request with beams;
    /// nothing has changed then.
    pub fn submit_choices(
        &mut self,
        request: Request,
        samplers: Vec<Sampler>,
    ) -> Result<Range<usize>, RequestError> {
        let state = &mut self.state;
        let first = state.requests;
        if request.beams.is_some() && !samplers.is_empty() {
            return Err(RequestError::BeamsOrChoices { index: first });
        }
        let prompt_tokens = request.prompt.len();
        let spec = state.memory.state().spec();
        let mut task = accept(request, first, spec, &state.limits)?;
        task.submitted = state.now();
        task.tiers = state.memory.at_first(&state.limits);
        task.sequences[0].id = state.new_id();
        for (sampler, index) in samplers.into_iter().zip(first + 1..) {
            task.choices.push(Choice { index, id: state.new_id(), sampler });
        }
        state.requests += task.texts();
        state.stats.prompt_tokens += prompt_tokens;
        state.queues.wait(task);
        Ok(first..state.requests)
    }

    /// Ends a request now, and returns its generated text; `None` for a request that has ended, or
    /// never existed.
    ///
    /// Its blocks are free at once. While a step is held they are free when the step ends, and the
    /// batch stays as it is: the output of the step has the request's rows, which nothing reads.
    ///
    /// Other texts after the same prompt go on, at the place that this one had.
    pub fn cancel(&mut self, index: usize) -> Option<Generated> {
        let (generated, from_tiers) = self.state.cancel(index)?;
        self.state.memory.cancel(from_tiers);
        Some(generated)
    }

    /// Begins a step and holds it; `None` without work. It stays open, across await points and
    /// errors of the caller, until [`Self::end_step`] or [`Self::roll_back`].
    ///
    /// If blocks are missing, drafts are left out first, then requests are preempted, youngest
    /// first; the last one gets fewer tokens per step, because blocks that leave a window in
    /// between make room for the rest.
    ///
    /// # Errors
    /// [`EngineError::StepOpen`] if a step is held already, which goes on;
    /// [`EngineError::Cache`] and [`EngineError::Tier`] if the device fails;
    /// [`EngineError::Cache`] and [`EngineError::Stuck`] if something else holds the blocks that
    /// the oldest request needs. Nothing has begun then, and the next call tries again.
    pub fn begin_step(&mut self) -> Result<Option<&Batch>, EngineError> {
        self.check_closed("begin step")?;
        self.state.take_failure()?;
        if !self.has_work() {
            return Ok(None);
        }
        let begun = self.state.now();
        let tokens = self.state.limits.max_step_tokens.max(1);
        let mut size = Size { tokens, with_drafts: self.state.limits.draft_tokens > 0 };
        loop {
            let exhausted = match self.try_begin(size) {
                Ok(Ok(Admitted { requests: admitted, .. })) => {
                    self.held = Some(HeldStep { begun, opened: self.state.now(), admitted });
                    return Ok(Some(&self.batch));
                }
                Ok(Err(exhausted)) => exhausted,
                Err(error) => {
                    self.close();
                    return Err(error);
                }
            };
            self.close();
            let has_drafts = self.batch.chunks.iter().any(|chunk| chunk.drafts > 0);
            let is_alone = self.state.queues.running().len() <= 1;
            if has_drafts {
                size.with_drafts = false;
            } else if is_alone && size.tokens > 1 {
                size.tokens /= 2;
            } else if !self.state.preempt() {
                return Err(exhausted.into());
            }
        }
    }

    /// Lends the held step and its batch, for the caller's kernels. If `using` panics the step is
    /// rolled back.
    ///
    /// # Errors
    /// [`EngineError::NoStep`] if none is held.
    pub fn with_step<T>(
        &mut self,
        using: impl FnOnce(&mut Step<'_, B>, &Batch) -> T,
    ) -> Result<T, EngineError> {
        if self.held.is_none() {
            return Err(EngineError::NoStep { operation: "use step" });
        }
        let unwinding = RollBackOnUnwind(self);
        let Self { state, batch, .. } = &mut *unwinding.0;
        let used = held::lend(state.memory.cache_mut(), |step| using(step, batch));
        std::mem::forget(unwinding);
        Ok(used.invariant(HELD))
    }

    /// Ends the held step with its logits, or with the tokens that the caller has chosen from them,
    /// and returns its events.
    ///
    /// # Errors
    /// [`EngineError::NoStep`] if none is held; [`EngineError::Output`] for logits or tokens that
    /// are not of this step or cannot be used; [`EngineError::Cache`] for a layer that was not
    /// written, and if the device fails. The step is rolled back then, no token was sampled, and
    /// the next step repeats it. A request whose logits are refused each time is to be cancelled.
    pub fn end_step(&mut self, output: impl Into<Output>) -> Result<Vec<Event>, EngineError> {
        let Some(step) = self.held.take() else {
            return Err(EngineError::NoStep { operation: "end step" });
        };
        let output = output.into();
        let committed = self.commit(&output, &step);
        let events = committed.map(|outcomes| self.state.apply(&self.batch, outcomes));
        self.close();
        let events = events?;
        self.state.stats.seconds += self.state.now().saturating_sub(step.begun).as_secs_f64();
        Ok(events)
    }

    /// Rolls the held step back: its requests go on as if it had not begun. Does nothing without a
    /// held step.
    pub fn roll_back(&mut self) {
        if self.held.take().is_some() {
            self.close();
        }
    }

    /// Runs one step and returns its results; nothing without work. It is [`Self::begin_step`] and
    /// [`Self::forward`].
    ///
    /// # Errors
    /// Those of both.
    pub fn step(&mut self, model: impl Model<B>) -> Result<Vec<Event>, EngineError> {
        if self.begin_step()?.is_none() {
            return Ok(Vec::new());
        }
        self.forward(model)
    }

    /// Runs a model over the held step and ends it. If the model panics the step is rolled back.
    ///
    /// # Errors
    /// [`EngineError::Model`] with the model's error; those of [`Self::end_step`]. The step is
    /// rolled back then, and the next one repeats it.
    pub fn forward(&mut self, mut model: impl Model<B>) -> Result<Vec<Event>, EngineError> {
        match self.with_step(|step, batch| model.forward(step, batch))? {
            Ok(logits) => self.end_step(logits),
            Err(error) => {
                self.roll_back();
                Err(EngineError::Model(error))
            }
        }
    }

    /// Runs all requests to their end and returns their results, in order.
    ///
    /// # Errors
    /// Those of [`Self::submit`], before anything runs, and of [`Self::step`].
    pub fn run(
        mut self,
        mut model: impl Model<B>,
        requests: Vec<Request>,
    ) -> Result<(Vec<Generated>, Stats), EngineError> {
        for request in requests {
            self.submit(request)?;
        }
        let mut done = vec![None; self.state.requests];
        while self.has_work() {
            for event in self.step(&mut model)? {
                if let Event::Finished { index, generated } = event {
                    done[index] = Some(generated);
                }
            }
        }
        Ok((done.into_iter().flatten().collect(), self.stats()))
    }

    /// Brings the blocks of a session file to the cache, where prompts that begin with the file's
    /// text find them. Returns the number of its tokens that can be reused. The whole file is
    /// verified first.
    ///
    /// # Errors
    /// [`EngineError::StepOpen`] while a step is held; [`EngineError::Session`]. Nothing has
    /// changed then.
    pub fn load_session(&mut self, identity: &Identity, from: &Path) -> Result<u32, EngineError> {
        self.check_closed("load session")?;
        Ok(session::load(self.state.memory.cache_mut(), identity, from)?)
    }

    /// Writes a text to a session file, with those of its blocks that are in the cache. Call it
    /// when the text has been generated: its blocks stay until others need the room.
    ///
    /// # Errors
    /// [`EngineError::StepOpen`] while a step is held; [`EngineError::Session`]: a file that was
    /// there before stays.
    pub fn save_session(
        &mut self,
        identity: &Identity,
        text: &SavedText,
        to: &Path,
    ) -> Result<SessionInfo, EngineError> {
        self.check_closed("save session")?;
        let id = self.state.new_id();
        Ok(session::save(self.state.memory.cache_mut(), id, identity, text, to)?)
    }

    fn check_closed(&self, operation: &'static str) -> Result<(), EngineError> {
        match self.held {
            Some(_) => Err(EngineError::StepOpen { operation }),
            None => Ok(()),
        }
    }

    /// Opens a step of at most this size, with the requests that join it; `Err` inside if blocks
    /// are missing.
    fn try_begin(&mut self, size: Size) -> Result<Result<Admitted, BlocksExhausted>, EngineError> {
        let Self { state, batch, .. } = self;
        state.memory.bring(&mut state.queues, &state.limits)?;
        let now = state.now();
        let State { memory, queues, limits, .. } = state;
        let plan = plan(memory.state(), queues, limits, size, batch)?;
        for (sequence, stop) in &plan.stops {
            memory.cache_mut().add_stop(*sequence, *stop)?;
        }
        match memory.open(&batch.inputs()) {
            Ok(()) => {}
            Err(TierError::Cache(CacheError::Exhausted(exhausted))) => return Ok(Err(exhausted)),
            Err(TierError::Cache(error)) => return Err(error.into()),
            Err(error) => return Err(error.into()),
        }
        let cache = memory.cache_mut();
        let admitted = held::lend(cache, |step| admit(step, queues, batch, plan, (limits, now)));
        let admitted = admitted.invariant(HELD)?;
        if batch.chunks.is_empty() {
            return admitted.refused.map(Err).ok_or(EngineError::Stuck);
        }
        Ok(Ok(admitted))
    }

    /// Chooses the tokens of the held step and commits it.
    fn commit<'o>(
        &mut self,
        output: &'o Output,
        step: &HeldStep,
    ) -> Result<Vec<Outcome<'o>>, EngineError> {
        let Self { state, batch, .. } = self;
        let outcomes = outcomes(output, batch, &state.queues, &state.limits)?;
        let (decoded, kept) = state.decoded(batch, &outcomes);
        if batch.chunks.iter().any(|chunk| chunk.drafts > 0) {
            let accepted: Vec<_> = outcomes.iter().map(|outcome| outcome.kept).collect();
            held::commit(state.memory.cache_mut(), Some(&accepted))?;
        } else {
            held::commit(state.memory.cache_mut(), None)?;
        }
        for index in &step.admitted {
            state.queues.note_overtaken(*index);
        }
        let took = state.now().saturating_sub(step.opened);
        let tokens = batch.tokens.len();
        if let Some(cache) = state.memory.tiered_mut().filter(|_| decoded == 0) {
            cache.note_compute(to_u32(tokens), took);
        }
        let stats = &mut state.stats;
        for (chunk, outcome) in batch.chunks.iter().zip(&outcomes) {
            stats.note_drafts(chunk.drafts, outcome.kept + chunk.drafts - chunk.tokens);
        }
        stats.note_step(took.as_secs_f64(), tokens, (decoded, kept));
        let block_size =
            state.memory.state().spec().groups().first().map_or(1, GroupSpec::block_size);
        stats.note_usage(&state.memory.state().usage(), block_size);
        Ok(outcomes)
    }

    /// Ends the remains of a step that was committed or is to be rolled back: requests without a
    /// sequence in the cache wait again, imports end, and so do the sequences of requests that were
    /// cancelled meanwhile.
    fn close(&mut self) {
        let state = &mut self.state;
        held::roll_back(state.memory.cache_mut());
        state.queues.wait_again(state.memory.state());
        state.memory.release_brought(&mut state.queues);
        state.release_ended();
    }
}

/// Rolls the held step back if a panic drops it.
struct RollBackOnUnwind<'e, B: Backend>(&'e mut Engine<B>);

impl<B: Backend> Drop for RollBackOnUnwind<'_, B> {
    fn drop(&mut self) {
        self.0.roll_back();
    }
}

const HELD: &str = "an engine that holds a step has one open in its cache";
