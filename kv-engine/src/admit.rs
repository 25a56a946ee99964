//! The admission of requests to a step that has begun: their prompts find the blocks that it fills.
use std::time::Duration;

use kv_core::backend::Backend;
use kv_core::error::BlocksExhausted;
use kv_core::invariant::Invariant;
use kv_core::scheduling::{Admission, CacheState};
use kv_core::spec::PublishAt;
use kv_core::{CacheError, SequenceId, Step, StepInput};

use crate::model::Batch;
use crate::num::to_usize;
use crate::plan::{Newcomer, Plan, Share, push};
use crate::queues::{Overtakes, Queues};
use crate::request::Limits;

/// The outcome for the newcomers of a step.
#[derive(Debug, Default)]
pub(crate) struct Admitted {
    /// Numbers of the requests that run now.
    pub(crate) requests: Vec<usize>,
    /// The shortage of the first newcomer that does not run, if blocks are missing.
    pub(crate) refused: Option<BlocksExhausted>,
}

/// Starts the newcomers of a plan, and adds their tokens to the step.
///
/// A newcomer is admitted if the cache has blocks for its whole prompt and for everything that
/// runs.
pub(crate) fn admit<B: Backend>(
    step: &mut Step<'_, B>,
    queues: &mut Queues,
    batch: &mut Batch,
    plan: Plan,
    (limits, now): (&Limits, Duration),
) -> Result<Admitted, CacheError> {
    let mut admitted = Admitted { requests: Vec::new(), refused: plan.refused };
    let (mut spare, mut overtakes) = (plan.spare, Overtakes::new());
    for Newcomer { request, share, stops } in plan.newcomers {
        let tokens = match share {
            Share::Own(tokens) => tokens,
            Share::After { leader, len } if reusable(step.cache().state(), batch, leader) < len => {
                0
            }
            Share::After { .. } => std::mem::take(&mut spare),
        };
        let one = match tokens {
            0 => One::NotYet,
            _ if !overtakes.are_left() => One::NotYet,
            _ => admit_one(step, queues, batch, (request, tokens, &stops), (limits, now))?,
        };
        spare += tokens;
        match one {
            One::Added(added) => {
                admitted.requests.push(request);
                overtakes.note_admitted();
                spare -= added;
                continue;
            }
            One::Started(exhausted) => {
                admitted.requests.push(request);
                overtakes.note_admitted();
                admitted.refused = admitted.refused.or(Some(exhausted));
                continue;
            }
            One::NoBlocks(exhausted) => admitted.refused = admitted.refused.or(Some(exhausted)),
            One::NotYet => {}
        }
        let waits = queues.waiting().iter().find(|task| task.index == request);
        overtakes.note_passed_over(waits.invariant(WAITS), limits);
    }
    Ok(admitted)
}

/// The outcome for one newcomer.
enum One {
    /// It runs, and adds this many tokens.
    Added(u32),
    /// The request runs with its reused blocks; its tokens are added in a later step.
    Started(BlocksExhausted),
    NoBlocks(BlocksExhausted),
    NotYet,
}

fn admit_one<B: Backend>(
    step: &mut Step<'_, B>,
    queues: &mut Queues,
    batch: &mut Batch,
    (request, tokens, stops): (usize, u32, &[u32]),
    (limits, now): (&Limits, Duration),
) -> Result<One, CacheError> {
    let at = queues.waiting().iter().position(|task| task.index == request).invariant(WAITS);
    let task = &queues.waiting()[at];
    let is_alone = queues.running().is_empty();
    let cache = step.cache();
    if !is_alone && task.width() > queues.room(limits, cache.state().spec()) {
        return Ok(One::NotYet);
    }
    let watermark = if is_alone { 0 } else { queues.promised(cache.state(), task)? };
    let admission = Admission::default().with_chunk(tokens).with_must_fit(true);
    let admission = admission.with_watermark(watermark);
    match cache.state().check_admission(
        task.first_part(cache.state()),
        task.start_options(),
        &admission,
    ) {
        Ok(_) => {}
        Err(CacheError::Exhausted(exhausted)) => return Ok(One::NoBlocks(exhausted)),
        Err(error) => return Err(error),
    }
    let goal = task.goal(cache.state());
    let first = task.first_part(cache.state());
    let stops = merged(&task.stops, stops);
    let options = task.start_options().with_stops(&stops);
    let reused = step.start(task.first().id, first, options)?;
    let mut task = queues.take_waiting(at);
    task.reused.get_or_insert(reused.min(task.prompt_len));
    task.admitted.get_or_insert(now.saturating_sub(task.submitted));
    let at = queues.run(task);
    let task = &queues.running()[at];
    let first = task.first();
    let end = step.cache().state().next_stop(first.id).map_or(goal, |at| at.min(goal));
    let count = tokens.min(end - reused);
    let new = &first.tokens[to_usize(reused)..to_usize(reused + count)];
    match step.add(StepInput::tokens(first.id, new)) {
        Ok(()) => {
            push(batch, step.cache().state(), (task, first), count, &[]);
            Ok(One::Added(count))
        }
        Err(CacheError::Exhausted(exhausted)) => Ok(One::Started(exhausted)),
        Err(error) => Err(error),
    }
}

/// Returns two lists in ascending order, each number once.
fn merged(one: &[u32], other: &[u32]) -> Vec<u32> {
    let mut all = [one, other].concat();
    all.sort_unstable();
    all.dedup();
    all
}

/// Returns how many tokens of a sequence a prompt of this step can reuse.
fn reusable(cache: &CacheState, batch: &Batch, leader: SequenceId) -> u32 {
    let Some(cached) = cache.seq_len(leader) else {
        return 0;
    };
    let chunk = batch.chunks.iter().find(|chunk| chunk.sequence == leader);
    match cache.spec().publish_at() {
        // States are kept by the commit alone.
        _ if !cache.spec().states().is_empty() => cached,
        PublishAt::Begin => cached + chunk.map_or(0, |chunk| chunk.tokens),
        PublishAt::Commit => cached,
    }
}

const WAITS: &str = "newcomers of a plan wait until they are admitted";
