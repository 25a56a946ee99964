//! The cache of an engine, and the blocks that waiting requests get from the tiers below it.
use std::time::Instant;

use kv_core::backend::Backend;
use kv_core::scheduling::{Admission, CacheState};
use kv_core::{CacheError, GroupId, KvCache, StepInput};
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
        let room = to_usize(batch.min(cache.state().spec().max_sequences_in_step()));
        let free = room.saturating_sub(queues.running().len());
        let mut promised = 0;
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
            if !(is_alone || fits(cache.state(), queues, task, promised)?) {
                break;
            }
            let before = free_blocks(cache.state());
            let brought = cache.bring(prefetch, &task.start_options());
            let task = &mut queues.waiting_mut()[at];
            // The prefetch has ended, also if the device has failed.
            task.tiers = FromTiers::Unasked;
            brought?;
            task.tiers = FromTiers::Brought;
            promised += blocks_to_come(cache.state(), &queues.waiting()[at], &before);
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

/// Returns whether the cache has blocks for a whole prompt, beside those of everything that runs
/// and those `promised` to requests whose blocks were brought for the same step: imported blocks
/// must not force a preemption, nor keep an older request from starting.
fn fits(
    cache: &CacheState,
    queues: &Queues,
    task: &Task,
    promised: u32,
) -> Result<bool, CacheError> {
    let watermark = queues.promised(cache, task)? + promised;
    let admission = Admission::default().with_must_fit(true).with_watermark(watermark);
    match cache.check_admission(task.first_part(cache), task.start_options(), &admission) {
        Ok(_) => Ok(true),
        Err(CacheError::Exhausted(_)) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Returns the free blocks of each group.
fn free_blocks(cache: &CacheState) -> Vec<u32> {
    let groups = (0..).map(GroupId).take(cache.spec().groups().len());
    groups.map(|group| cache.free_blocks(group)).collect()
}

/// Returns the blocks that a request still needs, in the group that needs most, after its import
/// has taken blocks of those that were free before.
fn blocks_to_come(cache: &CacheState, task: &Task, free_before: &[u32]) -> u32 {
    let len = task.goal(cache);
    let groups = cache.spec().groups().iter().zip(free_before).zip(free_blocks(cache));
    let blocks = groups.map(|((group, before), after)| {
        let all = group.slot_map().blocks_reserved(len) + task.blocks_of_forks(cache, group);
        // An import also holds cached blocks of a window that the prompt will have left.
        all.saturating_sub(before - after)
    });
    blocks.max().unwrap_or(0)
}
