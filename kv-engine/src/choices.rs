//! Several texts after one prompt: one sequence computes the prompt, and the others fork it.
use kv_core::backend::Backend;
use kv_core::invariant::Invariant;

use crate::num::to_usize;
use crate::request::Event;
use crate::state::State;
use crate::task::{Choice, Search, Sequence, Task};

impl<B: Backend> State<B> {
    /// Forks the other choices of a running request, whose prompt the step has computed, and gives
    /// each its first token by the prompt's logits. Those that may not run yet wait, and reuse the
    /// prompt's blocks.
    pub(crate) fn fork_choices(&mut self, at: usize, logits: &[f32], events: &mut Vec<Event>) {
        let room = self.queues.room(&self.limits, self.memory.state().spec());
        let room = if self.limits.forget { 0 } else { to_usize(room) };
        let first = &mut self.queues.running_mut()[at];
        let choices = std::mem::take(&mut first.choices);
        let (parent, since) = (first.first().id, first.submitted);
        let mut tasks: Vec<_> =
            choices.into_iter().map(|choice| first.with_choice(choice)).collect();
        for task in tasks.split_off(room.min(tasks.len())) {
            self.queues.wait(task);
        }
        for mut task in tasks {
            let Search::Sample(sampler) = &mut task.search else {
                unreachable!("a choice samples");
            };
            let token = sampler.sample(logits);
            let token = token.invariant("the first text was sampled from the same row");
            let sequence = &mut task.sequences[0];
            let forked = self.memory.cache_mut().fork(parent, sequence.id);
            forked.invariant("there is room for the sequence of a choice");
            sequence.tokens.push(token);
            task.first_token = self.now().saturating_sub(since);
            self.stats.generated_tokens += 1;
            events.push(Event::Token { index: task.index, token });
            let at = self.queues.run(task);
            self.continue_or_end(at, token, events);
        }
    }
}

impl Task {
    /// Returns the request of another text after its prompt.
    fn with_choice(&self, choice: Choice) -> Self {
        let prompt = self.first().tokens[..to_usize(self.prompt_len)].to_vec();
        Self {
            index: choice.index,
            prompt_len: self.prompt_len,
            tokens_max: self.tokens_max,
            finish_at_max: self.finish_at_max,
            sequences: vec![Sequence::new(choice.id, prompt)],
            search: Search::Sample(choice.sampler),
            salt: self.salt.clone(),
            stops: self.stops.clone(),
            ignore_stop: self.ignore_stop,
            hint: self.hint,
            choices: Vec::new(),
            reused: self.reused,
            submitted: self.submitted,
            admitted: self.admitted,
            first_token: self.first_token,
            was_preempted: false,
            overtaken: 0,
            tiers: self.tiers.again(),
        }
    }
}
