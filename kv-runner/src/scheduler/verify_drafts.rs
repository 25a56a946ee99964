//! Chooses the tokens of a step from its logits before the commit, and rejects draft tokens that
//! the sampler does not choose.
use super::queues::Queues;
use super::task::{Search, Task};
use super::{Limits, ScheduleError};
use crate::error::Error;
use crate::num::{to_u32, to_usize};

/// The result of one chunk.
#[derive(Debug, Default)]
pub(super) struct Outcome {
    /// Accepted tokens of the chunk.
    pub(super) kept: u32,
    pub(super) new: Vec<u32>,
    /// Logits after the prompt, for other texts after it.
    pub(super) after_prompt: Option<Vec<f32>>,
    /// Logits that are kept until all beams have theirs.
    pub(super) row: Option<Vec<f32>>,
}

impl Queues {
    /// Chooses tokens by the logits of an open step. Draft tokens are accepted up to the first that
    /// differs from the sampler's choice.
    ///
    /// The sampler draws once per generated token, as without drafts. So a draft token `x` is
    /// accepted with probability `p(x)`, any other token is chosen with its own probability, and a
    /// seed gives the same text with and without drafts.
    pub(super) fn verify_drafts(
        &mut self,
        logits: Vec<Vec<f32>>,
        limits: &Limits,
    ) -> Result<Vec<Outcome>, Error> {
        let expected = self.batch.chunks.iter().map(|chunk| to_usize(chunk.logits)).sum();
        if logits.len() != expected {
            return Err(ScheduleError::Logits { got: logits.len(), expected }.into());
        }
        let (mut rows, mut outcomes, mut end) = (logits.into_iter(), Vec::new(), 0_usize);
        for chunk in &self.batch.chunks {
            end = end.saturating_add(to_usize(chunk.tokens));
            let mut outcome = Outcome { kept: chunk.tokens, ..Outcome::default() };
            let mut rows = rows.by_ref().take(to_usize(chunk.logits));
            let task = self
                .running
                .iter_mut()
                .find(|task| task.sequences.iter().any(|sequence| sequence.id == chunk.sequence));
            if let Some(task) = task {
                let drafts = end.saturating_sub(to_usize(chunk.drafts))..end;
                let drafts = self.batch.tokens.get(drafts).unwrap_or_default();
                task.choose(&mut rows, drafts, &limits.stop, &mut outcome)?;
            }
            rows.for_each(drop);
            outcomes.push(outcome);
        }
        Ok(outcomes)
    }
}

impl Task {
    /// Chooses tokens by the rows of its chunk, whose last tokens are drafts.
    fn choose(
        &mut self,
        rows: &mut dyn Iterator<Item = Vec<f32>>,
        drafts: &[u32],
        stop: &[u32],
        outcome: &mut Outcome,
    ) -> Result<(), Error> {
        let Self { search, choices, ignore_stop, .. } = self;
        let Search::Sample(sampler) = search else {
            outcome.row = rows.next();
            return Ok(());
        };
        outcome.kept = outcome.kept.saturating_sub(to_u32(drafts.len()));
        let mut drafts = drafts.iter();
        for row in rows {
            let token = sampler.sample(&row)?;
            outcome.new.push(token);
            let is_last = !*ignore_stop && stop.contains(&token);
            if is_last || drafts.next() != Some(&token) {
                // A request with other choices has no drafts: its only row follows the prompt.
                outcome.after_prompt = (!choices.is_empty()).then_some(row);
                break;
            }
            outcome.kept = outcome.kept.saturating_add(1);
        }
        Ok(())
    }
}
