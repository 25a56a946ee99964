//! The cache of an engine, and the blocks that waiting requests get from the tiers below it.
use std::time::Instant;

use kv_core::backend::Backend;
use kv_core::scheduling::{Admission, CacheState};
use kv_core::{CacheError, KvCache, StepInput};
use kv_tier::{TierError, TieredCache, Unwritten};

use crate::num::to_usize;
use crate::queues::Queues;
use crate::request::Limits;
use crate::task::{FromTiers, Task};

/// A cache, with or without tiers.
#[derive(Debug)]
pub(crate) enum Memory<B: Backend> {
    Device(Box<KvCache<B>>),
    Tiered(Box<TieredCache<B>>),
}

impl<B: Backend> Memory<B> {
    pub(crate) fn cache(&self) -> &KvCache<B> {
        match self {
            Self::Device(cache) => cache,
            Self::Tiered(cache) => cache.cache(),
        }
    }
    pub(crate) fn cache_mut(&mut self) -> &mut KvCache<B> {
        match self {
            Self::Device(cache) => cache,
            Self::Tiered(cache) => cache.cache_mut(),
        }
    }
    pub(crate) fn state(&self) -> &CacheState {
        self.cache().state()
    }
    pub(crate) fn tiered(&self) -> Option<&TieredCache<B>> {
        match self {
            Self::Device(_) => None,
            Self::Tiered(cache) => Some(cache),
        }
    }
    pub(crate) fn tiered_mut(&mut self) -> Option<&mut TieredCache<B>> {
        match self {
            Self::Device(_) => None,
            Self::Tiered(cache) => Some(cache),
        }
    }
    pub(crate) fn into_cache(self) -> KvCache<B> {
        match self {
            Self::Device(cache) => *cache,
            Self::Tiered(cache) => cache.into_cache(),
        }
    }

    /// Opens a step that is held from call to call.
    pub(crate) fn open(&mut self, inputs: &[StepInput<'_>]) -> Result<(), TierError> {
        match self {
            Self::Device(cache) => cache.begin_step(inputs)?.hold(),
            Self::Tiered(cache) => cache.begin_step(inputs)?.hold(),
        }
        Ok(())
    }

    pub(crate) fn poll(&mut self) -> Result<(), TierError> {
        self.tiered_mut().map_or(Ok(()), TieredCache::poll)
    }

    pub(crate) fn flush(&mut self, deadline: Instant) -> Result<Unwritten, TierError> {
        self.tiered_mut().map_or(Ok(Unwritten::default()), |cache| cache.flush(deadline))
    }

    pub(crate) fn drain(&mut self, deadline: Instant) -> Result<bool, TierError> {
        self.tiered_mut().map_or(Ok(true), |cache| cache.drain(deadline))
    }

    /// Returns what a new request has got.
    pub(crate) fn at_first(&self, limits: &Limits) -> FromTiers {
        match self {
            Self::Tiered(_) if !limits.forget => FromTiers::Unasked,
            _ => FromTiers::Nothing,
        }
    }

    /// Stops looking for the blocks of a request that has ended.
    pub(crate) fn cancel(&mut self, from: FromTiers) {
        if let (Some(cache), FromTiers::Prefetching(prefetch)) = (self.tiered_mut(), from) {
            cache.cancel(prefetch);
        }
    }

    /// Prefetches the next prompts from the tiers, and brings the blocks of requests that can be
    /// admitted.
    ///
    /// Waits for a prompt only if nothing runs. A prompt that is not ready is passed over.
    pub(crate) fn bring(&mut self, queues: &mut Queues, limits: &Limits) -> Result<(), TierError> {
        let Some(cache) = self.tiered_mut() else { return Ok(()) };
        cache.poll()?;
        let batch = limits.max_batch.max(1);
        for task in queues.waiting_mut().iter_mut().take(to_usize(batch)) {
            if matches!(task.tiers, FromTiers::Unasked) {
                let prompt = task.first_part(cache.state());
                let prefetch = cache.prefetch(prompt, &task.start_options());
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
                cache.wait(prefetch)?;
            }
            if !cache.is_ready(prefetch) {
                continue;
            }
            if !(is_alone || fits(cache.state(), queues, task)?) {
                break;
            }
            cache.bring(prefetch, &task.start_options())?;
            queues.waiting_mut()[at].tiers = FromTiers::Brought;
        }
        Ok(())
    }

    /// Ends the imports for a step. Requests that the step did not admit prefetch again: their
    /// blocks may have been evicted by then.
    pub(crate) fn release_brought(&mut self, queues: &mut Queues) {
        let Some(cache) = self.tiered_mut() else { return };
        for task in queues.waiting_mut() {
            if matches!(task.tiers, FromTiers::Brought) {
                task.tiers = task.tiers.again();
            }
        }
        cache.release_brought();
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
