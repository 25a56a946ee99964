//! What waiting requests get from tiers.
use kv::backend::Backend;
use kv::reuse::Import;
use kv::scheduling::Admission;
use kv::{CacheError, KvCache};

use super::Scheduler;
use super::queues::promised;
use super::task::{FromTiers, Task};
use crate::error::Error;
use crate::model::Model;
use crate::num::to_usize;

impl<B: Backend, M: Model<B>> Scheduler<'_, B, M> {
    /// Asks the tiers for the prompts that are next, and brings what has come for those that can
    /// be admitted. The blocks are held until the caller has started the sequences.
    ///
    /// Waits for a prompt only if nothing runs. The requests after one that is not ready wait too:
    /// they keep their order.
    pub(super) fn bring(&mut self) -> Result<Vec<Import>, Error> {
        let mut imports = Vec::new();
        let brought = self.bring_to(&mut imports);
        if let Err(error) = brought {
            finish(&mut self.cache, imports)?;
            return Err(error);
        }
        Ok(imports)
    }

    fn bring_to(&mut self, imports: &mut Vec<Import>) -> Result<(), Error> {
        let Self { cache, queues, limits, tiers, .. } = self;
        let Some(tiers) = tiers.as_mut().filter(|_| !limits.forget) else { return Ok(()) };
        tiers.poll(cache)?;
        let batch = limits.max_batch.max(1);
        for task in queues.waiting.iter_mut().take(batch) {
            if matches!(task.tiers, FromTiers::Unasked) {
                let options = task.start_options();
                let prefetch = tiers.prefetch(cache, task.first_part(), &options);
                task.tiers = FromTiers::Prefetching(prefetch);
            }
        }
        let room = batch.min(to_usize(cache.state().spec().max_sequences()));
        let free = room.saturating_sub(queues.running.len());
        for at in 0..free.max(1) {
            let Some(task) = queues.waiting.get_mut(at) else { break };
            let FromTiers::Prefetching(prefetch) = task.tiers else { continue };
            // Alone, it is admitted in any case.
            let is_alone = at == 0 && queues.running.is_empty();
            if is_alone {
                tiers.wait(cache, prefetch)?;
            }
            if !tiers.is_ready(prefetch) || !(is_alone || fits(cache, &queues.running, task)?) {
                break;
            }
            imports.extend(tiers.bring(cache, prefetch, &task.start_options())?);
            task.tiers = FromTiers::Brought;
        }
        Ok(())
    }

    /// Lets requests that were not admitted ask the tiers again: what was brought for them may have
    /// been evicted when they are.
    pub(super) fn ask_again(&mut self) {
        for task in &mut self.queues.waiting {
            if matches!(task.tiers, FromTiers::Brought) {
                task.tiers = FromTiers::Unasked;
            }
        }
    }
}

/// Ends imports, whose sequences have started.
pub(super) fn finish<B: Backend>(
    cache: &mut KvCache<B>,
    imports: Vec<Import>,
) -> Result<(), CacheError> {
    let finished = imports.into_iter().map(|import| cache.finish_import(import));
    finished.fold(Ok(()), Result::and)
}

/// Returns whether the cache has blocks for a whole prompt, beside those of everything that runs:
/// imported blocks must not force a preemption.
fn fits<B: Backend>(cache: &KvCache<B>, running: &[Task], task: &Task) -> Result<bool, Error> {
    let watermark = promised(cache, running, task)?;
    let admission = Admission::default().with_must_fit(true).with_watermark(watermark);
    match cache.state().check_admission(task.first_part(), task.start_options(), &admission) {
        Ok(_) => Ok(true),
        Err(CacheError::Exhausted(_)) => Ok(false),
        Err(error) => Err(error.into()),
    }
}
