//! The waiting and running requests, and the batch of the next step.
use std::collections::VecDeque;

use kv::backend::Backend;
use kv::error::BlocksExhausted;
use kv::scheduling::Admission;
use kv::{CacheError, GroupId, KvCache, SequenceId, StartOptions, Step, StepInput};

use super::Limits;
use super::draft;
use super::task::{FromTiers, Search, Sequence, Task};
use crate::model::{Batch, Chunk};
use crate::num::{to_u32, to_usize};

/// Requests, and the batch that is made of them.
#[derive(Debug, Default)]
pub(super) struct Queues {
    pub(super) waiting: VecDeque<Task>,
    /// Running requests, oldest first.
    pub(super) running: Vec<Task>,
    pub(super) batch: Batch,
}

impl Queues {
    /// Returns the texts that wait, and those that run.
    pub(super) fn count(&self) -> (usize, usize) {
        let waiting = self.waiting.iter().map(Task::texts).sum();
        (waiting, self.running.iter().map(Task::texts).sum())
    }

    /// Fills the batch with tokens of each running sequence: first those that need one token, so
    /// that no prompt delays the others, then as much of the rest as a step may have.
    ///
    /// A sequence that needs one token gets drafts of the next ones too, as far as they leave every
    /// other such sequence its token. A step has at most `tokens_max` tokens.
    pub(super) fn fill(&mut self, limits: &Limits, tokens_max: usize, with_drafts: bool) {
        let Self { running, batch, .. } = self;
        batch.tokens.clear();
        batch.chunks.clear();
        let mut left = tokens_max;
        let goals: Vec<_> = running.iter().map(Task::goal).collect();
        let pending = |sequence: &Sequence, goal: usize| goal.saturating_sub(sequence.cached);
        let decoding = running.iter().zip(&goals).flat_map(|(task, goal)| {
            task.sequences.iter().filter(|s| s.is_live && pending(s, *goal) == 1)
        });
        let mut spare = left.saturating_sub(decoding.count());
        for is_first in [true, false] {
            for (task, goal) in running.iter().zip(&goals) {
                for sequence in task.sequences.iter().filter(|sequence| sequence.is_live) {
                    let count = pending(sequence, *goal);
                    if count == 0 || (count == 1) != is_first || left == 0 {
                        continue;
                    }
                    let mut drafts = 0;
                    if with_drafts && count == 1 {
                        let max = limits.draft_tokens.min(spare);
                        drafts = draft_after(task, sequence, max, &mut batch.drafts);
                        spare = spare.saturating_sub(drafts);
                    }
                    let count = count.min(left);
                    push(batch, sequence, count, drafts);
                    left = left.saturating_sub(count.saturating_add(drafts));
                }
            }
        }
    }

    /// Admits waiting requests while the step has room for their tokens and the cache has blocks
    /// for their prompts and for everything that runs. A request that is admitted with another one
    /// shares the blocks which the other fills in the same step. Returns the shortage of blocks
    /// that delays the next request, if any.
    pub(super) fn admit<B: Backend>(
        &mut self,
        step: &mut Step<'_, B>,
        limits: &Limits,
        tokens_max: usize,
    ) -> Result<Option<BlocksExhausted>, CacheError> {
        loop {
            let left = tokens_max.saturating_sub(self.batch.tokens.len());
            let Some(next) = self.waiting.front().filter(|_| left > 0) else {
                return Ok(None);
            };
            if matches!(next.tiers, FromTiers::Prefetching(_)) {
                return Ok(None);
            }
            let room = self.room(limits, step.cache().state().spec().max_sequences());
            let is_alone = self.running.is_empty();
            if !is_alone && next.width() > room {
                return Ok(None);
            }
            let watermark = if is_alone { 0 } else { promised(step.cache(), &self.running, next)? };
            let admission = Admission::default().with_chunk(to_u32(left)).with_must_fit(true);
            let admission = admission.with_watermark(watermark);
            let options = next.start_options();
            let fits = step.cache().state().check_admission(next.first_part(), options, &admission);
            match fits {
                Ok(_) => {}
                Err(CacheError::Exhausted(exhausted)) => return Ok(Some(exhausted)),
                Err(error) => return Err(error),
            }
            let Some(mut next) = self.waiting.pop_front() else {
                return Ok(None);
            };
            let added = self.start(step, &mut next, left);
            let waited = next.submitted.elapsed().as_secs_f64() * 1e3;
            next.admitted_ms.get_or_insert(waited);
            self.running.push(next);
            if let Err(error) = added {
                return match error {
                    // The sequence stays, with its reused blocks, and its tokens are added in a
                    // later step.
                    CacheError::Exhausted(exhausted) => Ok(Some(exhausted)),
                    error => Err(error),
                };
            }
        }
    }

    /// Starts a request's first sequence and adds its tokens to the step.
    fn start<B: Backend>(
        &mut self,
        step: &mut Step<'_, B>,
        task: &mut Task,
        left: usize,
    ) -> Result<(), CacheError> {
        let (goal, options) = (task.goal(), task.start_options());
        let Some(id) = task.sequences.first().map(|first| first.id) else {
            return Ok(());
        };
        let reused = to_usize(step.start(id, task.first_part(), options)?);
        task.reused.get_or_insert(reused.min(task.prompt_len));
        let Some(first) = task.sequences.first_mut() else {
            return Ok(());
        };
        (first.is_live, first.cached) = (true, reused);
        let count = goal.saturating_sub(reused).min(left);
        let end = reused.saturating_add(count);
        let new = first.tokens.get(reused..end).unwrap_or_default();
        step.add(StepInput::tokens(id, new))?;
        push(&mut self.batch, first, count, 0);
        Ok(())
    }

    /// Returns how many more sequences may run.
    pub(super) fn room(&self, limits: &Limits, max_sequences: u32) -> usize {
        let running: usize = self.running.iter().map(Task::width).sum();
        let most = to_usize(max_sequences).min(limits.max_batch.max(1));
        most.saturating_sub(running)
    }

    /// Returns the index of the running request of this sequence.
    pub(super) fn position(&self, id: SequenceId) -> Option<usize> {
        self.running.iter().position(|task| task.sequences.iter().any(|s| s.id == id))
    }
}

impl Task {
    pub(super) fn start_options(&self) -> StartOptions<'_> {
        StartOptions::default().with_resumed(self.was_preempted).with_salt(&self.salt)
    }

    /// Returns the tokens of its first sequence before any fork.
    pub(super) fn first_part(&self) -> &[u32] {
        let first = self.sequences.first().map(|first| first.tokens.as_slice());
        first.and_then(|tokens| tokens.get(..self.goal())).unwrap_or_default()
    }
}

/// Returns the blocks that present tokens will need in the group that needs most: those of
/// everything that runs, and of further beams of the new request.
pub(super) fn promised<B: Backend>(
    cache: &KvCache<B>,
    running: &[Task],
    next: &Task,
) -> Result<u32, CacheError> {
    let mut most = 0_u32;
    for (group, id) in cache.state().spec().groups().iter().zip((0..).map(GroupId)) {
        let mut blocks = next.blocks_of_forks(group);
        for task in running {
            blocks = blocks.saturating_add(task.blocks_of_forks(group));
            for sequence in task.sequences.iter().filter(|sequence| sequence.is_live) {
                let len = to_u32(sequence.tokens.len());
                let more = cache.state().blocks_to_completion(id, sequence.id, len)?;
                blocks = blocks.saturating_add(more);
            }
        }
        most = most.max(blocks);
    }
    Ok(most)
}

/// Drafts tokens after a sequence's last one, within its length limit.
fn draft_after(task: &Task, sequence: &Sequence, max: usize, drafts: &mut Vec<u32>) -> usize {
    drafts.clear();
    if matches!(task.search, Search::Sample(_)) && task.choices.is_empty() {
        // The step's own token follows the last accepted one.
        let room = task.tokens_max.saturating_sub(sequence.tokens.len()).saturating_sub(1);
        draft::propose(&sequence.tokens, max.min(room), drafts);
    }
    drafts.len()
}

/// Adds the next tokens of a sequence, and the first drafts of the batch.
fn push(batch: &mut Batch, sequence: &Sequence, count: usize, drafts: usize) {
    let end = sequence.cached.saturating_add(count);
    let new = sequence.tokens.get(sequence.cached..end).unwrap_or_default();
    batch.tokens.extend_from_slice(new);
    batch.tokens.extend(batch.drafts.iter().take(drafts));
    let wanted = if end == sequence.tokens.len() { drafts.saturating_add(1) } else { 0 };
    batch.chunks.push(Chunk {
        sequence: sequence.id,
        tokens: to_u32(count.saturating_add(drafts)),
        drafts: to_u32(drafts),
        logits: to_u32(wanted),
    });
}
