//! Several texts after one prompt: it is computed once, and the others are forks of its sequence.
use std::ops::Range;

use kv::backend::Backend;

use super::error::ScheduleError;
use super::task::{Choice, FromTiers, Request, Search, Sequence, Task};
use super::{Event, Scheduler};
use crate::error::Error;
use crate::model::Model;
use crate::sampler::Sampler;

impl<B: Backend, M: Model<B>> Scheduler<'_, B, M> {
    /// Appends a request for several texts after one prompt, and returns their numbers: the first
    /// is sampled by the request's own sampler, each other by one of `samplers`.
    ///
    /// The prompt is computed once. Then every text is a request of its own, which is as long, and
    /// reads as, it would alone.
    ///
    /// # Errors
    /// Those of [`Self::submit`], and [`ScheduleError::BeamsOrChoices`] for a request with beams;
    /// nothing has changed then.
    pub fn submit_choices(
        &mut self,
        request: Request,
        samplers: Vec<Sampler>,
    ) -> Result<Range<usize>, ScheduleError> {
        if request.beams.is_some() && !samplers.is_empty() {
            return Err(ScheduleError::BeamsOrChoices { index: self.requests });
        }
        let first = self.submit(request)?;
        let mut choices = Vec::with_capacity(samplers.len());
        for sampler in samplers {
            choices.push(Choice { index: self.requests, id: self.new_id(), sampler });
            self.requests = self.requests.saturating_add(1);
        }
        if let Some(task) = self.queues.waiting.back_mut() {
            task.choices = choices;
        }
        Ok(first..self.requests)
    }

    /// Forks the other choices of a running request, whose prompt the step has computed, and gives
    /// each its first token by the prompt's logits. Those that may not run yet wait, and reuse the
    /// prompt's blocks.
    pub(super) fn fork_choices(
        &mut self,
        at: usize,
        logits: &[f32],
        events: &mut Vec<Event>,
    ) -> Result<(), Error> {
        let Some(first) = self.queues.running.get_mut(at) else {
            return Ok(());
        };
        let mut choices = std::mem::take(&mut first.choices);
        let Some(parent) = first.sequences.first().map(|sequence| sequence.id) else {
            return Ok(());
        };
        let mut tasks: Vec<_> = choices.drain(..).map(|choice| first.with_choice(choice)).collect();
        let room = self.queues.room(&self.limits, self.cache.state().spec().max_sequences());
        let room = if self.limits.forget { 0 } else { room };
        // The first of those that wait is at the front of the queue.
        for task in tasks.drain(room.min(tasks.len())..).rev() {
            self.queues.waiting.push_front(task);
        }
        for mut task in tasks {
            let Search::Sample(sampler) = &mut task.search else {
                continue;
            };
            let token = sampler.sample(logits)?;
            let Some(sequence) = task.sequences.first_mut() else {
                continue;
            };
            self.cache.fork(parent, sequence.id)?;
            (sequence.is_live, sequence.cached) = (true, sequence.tokens.len());
            sequence.tokens.push(token);
            task.first_token_ms = task.submitted.elapsed().as_secs_f64() * 1e3;
            self.stats.generated_tokens = self.stats.generated_tokens.saturating_add(1);
            events.push(Event::Token { index: task.index, token });
            let at = self.queues.running.len();
            self.queues.running.push(task);
            self.continue_or_end(at, token, events)?;
        }
        Ok(())
    }
}

impl Task {
    /// Returns the request of another text after its prompt.
    fn with_choice(&self, choice: Choice) -> Self {
        let prompt = self.sequences.first().and_then(|first| first.tokens.get(..self.prompt_len));
        let prompt = prompt.unwrap_or_default().to_vec();
        Self {
            index: choice.index,
            prompt_len: self.prompt_len,
            tokens_max: self.tokens_max,
            finish_at_max: self.finish_at_max,
            sequences: vec![Sequence::new(choice.id, prompt)],
            search: Search::Sample(choice.sampler),
            salt: self.salt.clone(),
            ignore_stop: self.ignore_stop,
            choices: Vec::new(),
            reused: self.reused,
            submitted: self.submitted,
            admitted_ms: self.admitted_ms,
            first_token_ms: 0.0,
            was_preempted: false,
            tiers: FromTiers::Unasked,
        }
    }
}
