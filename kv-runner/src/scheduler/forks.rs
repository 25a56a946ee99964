//! Beams as sequences of the cache: the first continuation of a beam keeps its sequence, others are
//! forks.
use kv::backend::Backend;
use kv::{CacheError, KvCache, SequenceId};

use super::beams::{self, children};
use super::task::{Finish, Search, Sequence};
use super::{Event, Scheduler, forget};
use crate::error::Error;
use crate::model::Model;

impl<B: Backend, M: Model<B>> Scheduler<'_, B, M> {
    /// Forks beams again from the first one after a preemption.
    pub(super) fn fork_waiting(&mut self) -> Result<(), CacheError> {
        for task in self.queues.running.iter_mut().filter(|task| task.can_fork()) {
            let Some((first, others)) = task.sequences.split_first_mut() else {
                continue;
            };
            for other in others.iter_mut().filter(|other| !other.is_live) {
                self.cache.fork(first.id, other.id)?;
                (other.is_live, other.cached) = (true, first.cached);
            }
        }
        Ok(())
    }

    /// Continues the searches whose beams all have logits.
    pub(super) fn advance_beams(&mut self, events: &mut Vec<Event>) -> Result<(), Error> {
        let mut at = 0_usize;
        while let Some(task) = self.queues.running.get(at) {
            let is_ready = task.sequences.iter().all(|sequence| sequence.logits.is_some());
            match if is_ready { self.advance(at)? } else { None } {
                Some(finish) => self.end(at, finish, events)?,
                None => at = at.saturating_add(1),
            }
        }
        Ok(())
    }

    /// Continues the beams of one request by a token; returns the reason if it ended.
    fn advance(&mut self, at: usize) -> Result<Option<Finish>, Error> {
        let first_id = self.next_id;
        let Self { cache, limits, queues, .. } = self;
        let Some(task) = queues.running.get_mut(at) else {
            return Ok(None);
        };
        let Search::Beams(search) = &mut task.search else {
            return Ok(None);
        };
        if task.sequences.first().is_some_and(|first| first.tokens.len() == task.prompt_len) {
            task.first_token_ms = task.submitted.elapsed().as_secs_f64() * 1e3;
        }
        let rows: Vec<_> = task.sequences.iter().filter_map(|s| s.logits.as_deref()).collect();
        let branches = {
            let generated = generated(&task.sequences, task.prompt_len);
            search.advance(&rows, &generated, &limits.stop)?
        };
        let mut next_id = first_id;
        task.sequences = branch(cache, &task.sequences, &branches, &mut next_id)?;
        self.next_id = next_id;
        let len = task.sequences.first().map_or(task.tokens_max, |first| first.tokens.len());
        let Search::Beams(search) = &mut task.search else {
            return Ok(None);
        };
        if search.is_done() {
            return Ok(Some(Finish::Stop));
        }
        if len >= task.tokens_max {
            search.finish_all(&generated(&task.sequences, task.prompt_len), task.finish_at_max);
            return Ok(Some(task.finish_at_max));
        }
        if limits.forget {
            forget(cache, task)?;
        }
        Ok(None)
    }
}

/// Returns the new tokens of every sequence.
fn generated(sequences: &[Sequence], prompt_len: usize) -> Vec<&[u32]> {
    sequences.iter().map(|sequence| sequence.new_tokens(prompt_len)).collect()
}

/// Makes the sequences of the next step from those of the last: the first branch of each continues
/// it, further branches are forks, and sequences without a branch are released before any fork
/// needs their blocks.
fn branch<B: Backend>(
    cache: &mut KvCache<B>,
    parents: &[Sequence],
    branches: &[beams::Branch],
    next_id: &mut u64,
) -> Result<Vec<Sequence>, CacheError> {
    let mut is_taken = vec![false; parents.len()];
    for (parent, children) in parents.iter().zip(children(branches, parents.len())) {
        if children == 0 && parent.is_live {
            cache.release(parent.id)?;
        }
    }
    let mut sequences = Vec::with_capacity(branches.len());
    for branch in branches {
        let Some((parent, taken)) = parents.get(branch.parent).zip(is_taken.get_mut(branch.parent))
        else {
            continue;
        };
        let mut id = parent.id;
        if std::mem::replace(taken, true) {
            id = SequenceId(*next_id);
            *next_id = next_id.wrapping_add(1);
            cache.fork(parent.id, id)?;
        }
        let tokens = [parent.tokens.as_slice(), &[branch.token]].concat();
        let mut sequence = Sequence::new(id, tokens);
        (sequence.is_live, sequence.cached) = (true, parent.cached);
        sequences.push(sequence);
    }
    Ok(sequences)
}
