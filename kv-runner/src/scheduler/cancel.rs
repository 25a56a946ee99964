//! The end of a request before its text ends.
use kv::backend::Backend;

use super::Scheduler;
use super::queues::Queues;
use super::task::{Finish, FromTiers, Generated, Search, Task};
use crate::error::Error;
use crate::model::Model;

impl<B: Backend, M: Model<B>> Scheduler<'_, B, M> {
    /// Ends a request now: its blocks are free before the next step. Returns what it has generated;
    /// `None` for one that has ended, or never was.
    ///
    /// Other texts after the same prompt go on, at the place that this one had.
    ///
    /// # Errors
    /// [`Error::Cache`] if the device failed.
    pub fn cancel(&mut self, index: usize) -> Result<Option<Generated>, Error> {
        let Queues { waiting, running, .. } = &mut self.queues;
        let mut tasks = waiting.iter_mut().chain(running.iter_mut());
        if let Some(ended) = tasks.find_map(|task| task.drop_text(index)) {
            return Ok(Some(ended));
        }
        let is_its = |task: &Task| task.index == index;
        let task = match waiting.iter().position(is_its) {
            Some(at) => waiting.remove(at),
            None => running.iter().position(is_its).map(|at| running.remove(at)),
        };
        task.map(|task| self.release(task)).transpose()
    }

    /// Releases what a request holds.
    fn release(&mut self, task: Task) -> Result<Generated, Error> {
        if let (Some(tiers), FromTiers::Prefetching(prefetch)) = (&mut self.tiers, task.tiers) {
            tiers.cancel(prefetch);
        }
        for sequence in task.sequences.iter().filter(|sequence| sequence.is_live) {
            self.cache.release(sequence.id)?;
        }
        Ok(task.into_generated(Finish::Cancelled).1)
    }
}

impl Task {
    /// Drops one of several texts that share the prompt, which is not computed yet; `None` if it
    /// is none of them, or the only one.
    fn drop_text(&mut self, index: usize) -> Option<Generated> {
        if self.index == index {
            // The sequence stays, and becomes that of the next text.
            let next = (!self.choices.is_empty()).then(|| self.choices.remove(0))?;
            self.index = next.index;
            self.search = Search::Sample(next.sampler);
        } else {
            let at = self.choices.iter().position(|choice| choice.index == index)?;
            self.choices.remove(at);
        }
        Some(Generated {
            tokens: Vec::new(),
            finish: Finish::Cancelled,
            reused: self.reused.unwrap_or(0),
            admitted_ms: self.admitted_ms.unwrap_or(0.0),
            first_token_ms: 0.0,
            hypotheses: Vec::new(),
        })
    }
}
