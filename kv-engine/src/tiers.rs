//! What waiting requests get from tiers.
use std::time::Instant;

use kv_core::backend::Backend;
use kv_core::reuse::Import;
use kv_core::scheduling::{Admission, CacheState};
use kv_core::{CacheError, KvCache};
use kv_tier::{TierError, Tiers, Unwritten};

use crate::num::to_usize;
use crate::queues::Queues;
use crate::request::Limits;
use crate::task::{FromTiers, Task};

/// The tiers below a cache, if there are any, and the blocks that they have brought for the next
/// or the held step.
#[derive(Debug)]
pub(crate) struct Lower<B: Backend> {
    pub(crate) tiers: Option<Tiers<B>>,
    /// Hold their blocks until the step has started the sequences and has ended.
    imports: Vec<Import>,
}

impl<B: Backend> Lower<B> {
    pub(crate) fn new() -> Self {
        Self { tiers: None, imports: Vec::new() }
    }

    pub(crate) fn poll(&mut self, cache: &mut KvCache<B>) -> Result<(), TierError> {
        self.tiers.as_mut().map_or(Ok(()), |tiers| tiers.poll(cache))
    }

    pub(crate) fn flush(
        &mut self,
        cache: &mut KvCache<B>,
        deadline: Instant,
    ) -> Result<Unwritten, TierError> {
        match &mut self.tiers {
            Some(tiers) => tiers.flush(cache, deadline),
            None => Ok(Unwritten::default()),
        }
    }

    /// Returns what a new request has got.
    pub(crate) fn at_first(&self, limits: &Limits) -> FromTiers {
        if self.tiers.is_none() || limits.forget { FromTiers::Nothing } else { FromTiers::Unasked }
    }

    /// Stops looking for the blocks of a request that has ended.
    pub(crate) fn cancel(&mut self, from: FromTiers) {
        if let (Some(tiers), FromTiers::Prefetching(prefetch)) = (&mut self.tiers, from) {
            tiers.cancel(prefetch);
        }
    }

    /// Asks the tiers for the prompts that are next, and brings what has come for those that can
    /// be admitted.
    ///
    /// Waits for a prompt only if nothing runs. A prompt that is not ready is passed over.
    pub(crate) fn bring(
        &mut self,
        cache: &mut KvCache<B>,
        queues: &mut Queues,
        limits: &Limits,
    ) -> Result<(), TierError> {
        let Some(tiers) = &mut self.tiers else { return Ok(()) };
        tiers.poll(cache)?;
        let batch = limits.max_batch.max(1);
        for task in queues.waiting_mut().iter_mut().take(to_usize(batch)) {
            if matches!(task.tiers, FromTiers::Unasked) {
                let options = task.start_options();
                let prefetch = tiers.prefetch(cache, task.first_part(cache.state()), &options);
                task.tiers = FromTiers::Prefetching(prefetch);
            }
        }
        let room = to_usize(batch.min(cache.state().spec().max_sequences()));
        let free = room.saturating_sub(queues.running().len());
        for at in 0..free.max(1).min(queues.waiting().len()) {
            let task = &queues.waiting()[at];
            let FromTiers::Prefetching(prefetch) = task.tiers else { continue };
            // Alone, it is admitted in any case.
            let is_alone = at == 0 && queues.running().is_empty();
            if is_alone {
                tiers.wait(cache, prefetch)?;
            }
            if !tiers.is_ready(prefetch) {
                continue;
            }
            if !(is_alone || fits(cache.state(), queues, task)?) {
                break;
            }
            self.imports.extend(tiers.bring(cache, prefetch, &task.start_options())?);
            queues.waiting_mut()[at].tiers = FromTiers::Brought;
        }
        Ok(())
    }

    /// Ends the imports of a step. Requests that it did not admit ask again: what was brought for
    /// them may have been evicted when they are.
    pub(crate) fn finish(
        &mut self,
        cache: &mut KvCache<B>,
        queues: &mut Queues,
    ) -> Result<(), CacheError> {
        for task in queues.waiting_mut() {
            if matches!(task.tiers, FromTiers::Brought) {
                task.tiers = task.tiers.again();
            }
        }
        let finished = self.imports.drain(..).map(|import| cache.finish_import(import));
        finished.fold(Ok(()), Result::and)
    }
}

/// Returns whether the cache has blocks for a whole prompt, beside those of everything that runs:
/// imported blocks must not force a preemption.
fn fits(cache: &CacheState, queues: &Queues, task: &Task) -> Result<bool, CacheError> {
    let watermark = queues.promised(cache, task)?;
    let admission = Admission::default().with_must_fit(true).with_watermark(watermark);
    match cache.check_admission(task.first_part(cache), task.start_options(), &admission) {
        Ok(_) => Ok(true),
        Err(CacheError::Exhausted(_)) => Ok(false),
        Err(error) => Err(error),
    }
}
