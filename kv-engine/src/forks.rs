//! Beams as sequences of the cache: the first continuation of a beam keeps its sequence, others are
//! forks.
use kv_core::backend::Backend;
use kv_core::invariant::Invariant;

use crate::beams::{Branch, children};
use crate::request::{Event, Finish};
use crate::state::State;
use crate::task::{Search, Sequence};

impl<B: Backend> State<B> {
    /// Forks beams again from the first one after a preemption.
    pub(crate) fn fork_waiting(&mut self) {
        let cache = self.memory.cache_mut();
        for task in self.queues.running().iter().filter(|task| task.sequences.len() > 1) {
            if !task.can_fork(cache.state()) {
                continue;
            }
            for other in &task.sequences[1..] {
                if !cache.state().contains(other.id) {
                    cache.fork(task.first().id, other.id).invariant(FORKS);
                }
            }
        }
    }

    /// Continues the searches whose beams all have logits.
    pub(crate) fn advance_beams(&mut self, events: &mut Vec<Event>) {
        let mut at = 0;
        while let Some(task) = self.queues.running().get(at) {
            let is_ready = task.sequences.iter().all(|sequence| sequence.logits.is_some());
            match if is_ready { self.advance(at) } else { None } {
                Some(finish) => self.end(at, finish, events),
                None => at += 1,
            }
        }
    }

    /// Continues the beams of one request by a token; returns the reason if it ended.
    fn advance(&mut self, at: usize) -> Option<Finish> {
        let since = self.since_submitted(&self.queues.running()[at]);
        let task = &mut self.queues.running_mut()[at];
        let Search::Beams(search) = &mut task.search else {
            unreachable!("only beams keep their logits");
        };
        if task.sequences[0].len() == task.prompt_len {
            task.first_token = since;
        }
        let rows: Vec<_> = task.sequences.iter().filter_map(|s| s.logits.as_deref()).collect();
        let branches = {
            let generated = generated(&task.sequences, task.prompt_len);
            let advanced = search.advance(&rows, &generated, &self.limits.stop);
            advanced.invariant("logits are checked before a step is committed")
        };
        let parents = std::mem::take(&mut task.sequences);
        let sequences = self.branch(&parents, &branches);
        let task = &mut self.queues.running_mut()[at];
        task.sequences = sequences;
        let Search::Beams(search) = &mut task.search else {
            unreachable!("only beams keep their logits");
        };
        if search.is_done() {
            return Some(Finish::Stop);
        }
        // Without a sequence, every continuation has ended its text.
        if task.sequences.first().is_none_or(|first| first.len() >= task.tokens_max) {
            search.finish_all(&generated(&task.sequences, task.prompt_len), task.finish_at_max);
            return Some(task.finish_at_max);
        }
        if self.limits.forget {
            self.forget(at);
        }
        None
    }

    /// Makes the sequences of the next step from those of the last: the first branch of each
    /// continues it, further branches are forks, and sequences without a branch are released before
    /// any fork needs their blocks.
    fn branch(&mut self, parents: &[Sequence], branches: &[Branch]) -> Vec<Sequence> {
        let mut is_taken = vec![false; parents.len()];
        for (parent, children) in parents.iter().zip(children(branches, parents.len())) {
            if children == 0 {
                self.release_sequence(parent.id);
            }
        }
        let mut sequences = Vec::with_capacity(branches.len());
        for branch in branches {
            let parent = &parents[branch.parent];
            let mut id = parent.id;
            if std::mem::replace(&mut is_taken[branch.parent], true) {
                id = self.new_id();
                self.memory.cache_mut().fork(parent.id, id).invariant(FORKS);
            }
            sequences.push(Sequence::new(id, [&parent.tokens[..], &[branch.token]].concat()));
        }
        sequences
    }
}

/// Returns the new tokens of every sequence.
fn generated(sequences: &[Sequence], prompt_len: u32) -> Vec<&[u32]> {
    sequences.iter().map(|sequence| sequence.new_tokens(prompt_len)).collect()
}

const FORKS: &str = "there is room for the sequences of all beams";
