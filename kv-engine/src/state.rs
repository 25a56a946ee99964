//! The cache, the requests and the counters: the state that changes between two steps.
//!
//! Owns the end of sequences. One that ends while a step is held stays in the cache until the step
//! ends, because a held step is the only writer of the cache.
use std::sync::Arc;
use std::time::Duration;

use kv_core::backend::Backend;
use kv_core::eviction::Clock;
use kv_core::{CacheError, SequenceId};

use crate::memory::Memory;
use crate::model::{Batch, Chunk};
use crate::num::to_usize;
use crate::outcome::Outcome;
use crate::queues::Queues;
use crate::request::{Event, Finish, Generated, Limits};
use crate::stats::Stats;
use crate::task::{FromTiers, Search, Task};

/// The state of an engine between two steps.
#[derive(Debug)]
pub(crate) struct State<B: Backend> {
    pub(crate) memory: Memory<B>,
    pub(crate) limits: Limits,
    pub(crate) queues: Queues,
    pub(crate) stats: Stats,
    pub(crate) clock: Arc<dyn Clock>,
    /// Number of submitted requests.
    pub(crate) requests: usize,
    /// Id of the next sequence.
    next_id: u64,
    /// Sequences that ended while a step was held.
    ended: Vec<SequenceId>,
    /// A failure of the device after which the call stands: the next step reports it.
    failed: Option<CacheError>,
}

impl<B: Backend> State<B> {
    pub(crate) fn new(memory: Memory<B>, limits: Limits, clock: Arc<dyn Clock>) -> Self {
        Self {
            memory,
            limits,
            queues: Queues::default(),
            stats: Stats::default(),
            clock,
            requests: 0,
            next_id: 0,
            ended: Vec::new(),
            failed: None,
        }
    }

    /// Returns the time by the engine's clock.
    pub(crate) fn now(&self) -> Duration {
        self.clock.now()
    }

    /// Returns the time since a task was submitted.
    pub(crate) fn since_submitted(&self, task: &Task) -> Duration {
        self.now().saturating_sub(task.submitted)
    }

    pub(crate) fn new_id(&mut self) -> SequenceId {
        let id = SequenceId(self.next_id);
        self.next_id += 1;
        id
    }

    /// Keeps a failure of the device for the next step. Blocks whose content it left behind are
    /// wiped before they are written again.
    pub(crate) fn note_failure(&mut self, result: Result<(), CacheError>) {
        if let Err(error) = result {
            self.failed.get_or_insert(error);
        }
    }

    /// Returns a failure that no step has reported yet.
    pub(crate) fn take_failure(&mut self) -> Result<(), CacheError> {
        self.failed.take().map_or(Ok(()), Err)
    }

    /// Ends the sequences of a task, now or with the held step.
    pub(crate) fn release(&mut self, task: &Task) {
        for sequence in &task.sequences {
            self.release_sequence(sequence.id);
        }
    }

    pub(crate) fn release_sequence(&mut self, id: SequenceId) {
        if self.memory.state().is_step_open() {
            self.ended.push(id);
        } else if self.memory.state().contains(id) {
            let released = self.memory.cache_mut().release(id);
            self.note_failure(released);
        }
    }

    /// Ends the sequences that ended while a step was held.
    pub(crate) fn release_ended(&mut self) {
        for id in std::mem::take(&mut self.ended) {
            self.release_sequence(id);
        }
    }

    /// Preempts the youngest request; `false` for the only one. It is admitted again with its
    /// blocks that are still cached, and computes the rest again.
    pub(crate) fn preempt(&mut self) -> bool {
        if self.queues.running().len() <= 1 {
            return false;
        }
        let Some(mut youngest) = self.queues.take_youngest() else {
            return false;
        };
        for sequence in &mut youngest.sequences {
            sequence.logits = None;
            if self.memory.state().contains(sequence.id) {
                let preempted = self.memory.cache_mut().preempt(sequence.id);
                self.note_failure(preempted);
            }
        }
        youngest.was_preempted = true;
        youngest.tiers = youngest.tiers.again();
        self.stats.preemptions += 1;
        self.queues.wait(youngest);
        true
    }

    /// Returns the tokens of a step that continue texts, and those of them that stay. Call it while
    /// the step is held.
    pub(crate) fn decoded(&self, batch: &Batch, outcomes: &[Outcome<'_>]) -> (u32, u32) {
        let is_decode = |chunk: &Chunk| {
            let task = self.queues.position(chunk.sequence).map(|at| &self.queues.running()[at]);
            let cached = self.memory.state().seq_len(chunk.sequence).unwrap_or(0);
            chunk.logits > 0 && task.is_some_and(|task| cached >= task.prompt_len)
        };
        let chunks = batch.chunks.iter().zip(outcomes).filter(|(chunk, _)| is_decode(chunk));
        chunks.fold((0, 0), |(tokens, kept), (chunk, outcome)| {
            (tokens + chunk.tokens, kept + outcome.kept)
        })
    }

    /// Applies the tokens of a committed step, and ends finished requests.
    pub(crate) fn apply(&mut self, batch: &Batch, outcomes: Vec<Outcome<'_>>) -> Vec<Event> {
        let mut events = Vec::new();
        for (chunk, outcome) in batch.chunks.iter().zip(outcomes) {
            let Some(at) = self.queues.position(chunk.sequence) else {
                let is_cancelled = self.ended.contains(&chunk.sequence);
                assert!(is_cancelled, "a sequence of a step runs until its request is cancelled");
                continue;
            };
            let since = self.since_submitted(&self.queues.running()[at]);
            let task = &mut self.queues.running_mut()[at];
            let (index, prompt_len) = (task.index, to_usize(task.prompt_len));
            if let Some(sampler) = outcome.sampler {
                task.search = Search::Sample(sampler);
            }
            for sequence in task.sequences.iter_mut().filter(|s| s.id == chunk.sequence) {
                sequence.logits = outcome.row.map(<[f32]>::to_vec);
                if sequence.tokens.len() == prompt_len && !outcome.new.is_empty() {
                    task.first_token = since;
                }
                sequence.tokens.extend_from_slice(&outcome.new);
            }
            self.stats.generated_tokens += outcome.new.len();
            events.extend(outcome.new.iter().map(|token| Event::Token { index, token: *token }));
            if let Some(logits) = outcome.after_prompt {
                self.fork_choices(at, logits, &mut events);
            }
            if let Some(last) = outcome.new.last() {
                self.continue_or_end(at, *last, &mut events);
            }
        }
        self.fork_waiting();
        self.advance_beams(&mut events);
        events
    }

    /// Ends a running request after its newest token, if that is the last one.
    pub(crate) fn continue_or_end(&mut self, at: usize, last: u32, events: &mut Vec<Event>) {
        let task = &self.queues.running()[at];
        if task.stops_at(last, &self.limits.stop) {
            self.end(at, Finish::Stop, events);
        } else if task.first().len() >= task.tokens_max {
            let finish = task.finish_at_max;
            self.end(at, finish, events);
        } else if self.limits.forget {
            self.forget(at);
        }
    }

    /// Ends a running request.
    pub(crate) fn end(&mut self, at: usize, finish: Finish, events: &mut Vec<Event>) {
        let task = self.queues.take_running(at);
        self.release(&task);
        let is_beams = matches!(task.search, Search::Beams(_));
        let (index, generated) = task.into_generated(finish);
        if is_beams {
            self.stats.generated_tokens += generated.tokens.len();
            let token = |token: &u32| Event::Token { index, token: *token };
            events.extend(generated.tokens.iter().map(token));
        }
        events.push(Event::Finished { index, generated });
    }

    /// Truncates a running request's sequences, so that it computes everything again.
    pub(crate) fn forget(&mut self, at: usize) {
        let ids: Vec<_> = self.queues.running()[at].sequences.iter().map(|s| s.id).collect();
        for id in ids {
            let truncated = self.memory.cache_mut().truncate(id, 0);
            self.note_failure(truncated);
        }
    }

    /// Ends a request now. Returns its task if the task has not ended before, or the outcome of one
    /// of several texts that share the prompt.
    pub(crate) fn cancel(&mut self, index: usize) -> Option<(Generated, FromTiers)> {
        if let Some(ended) = self.queues.all_mut().find_map(|task| task.drop_text(index)) {
            return Some((ended, FromTiers::Nothing));
        }
        let task = self.queues.remove(index)?;
        self.release(&task);
        let tiers = task.tiers;
        Some((task.into_generated(Finish::Cancelled).1, tiers))
    }
}
