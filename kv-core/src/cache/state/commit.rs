//! The end of a step: lengths advance, and full blocks are published.
use crate::cache::state::CacheState;
use crate::error::PlanError;
use crate::plan::BatchEntry;
use crate::spec::PublishAt;

impl CacheState {
    /// Ends the open step. `accepted`, already checked, is how many new tokens of each entry stay;
    /// all if `None`.
    pub(in crate::cache) fn commit_checked(&mut self, accepted: Option<&[u32]>) {
        self.commit_states(accepted);
        let has_tail = self.groups.have_tail();
        let at_commit = self.spec.publish_at() == PublishAt::Commit;
        for index in 0..self.open.batch.len() {
            let (BatchEntry { row, cached, new_tokens, .. }, details) = self.open.entry(index);
            if new_tokens == 0 {
                continue;
            }
            let len = cached + new_tokens;
            // Tokens that were accepted are text, drafts or not; others are until the next step.
            let accepted = accepted.and_then(|accepted| accepted.get(index)).copied();
            let kept = accepted.map(|accepted| cached + accepted);
            let certain = kept.unwrap_or_else(|| len - details.drafts);
            let sequence = self.sequences.at_mut(row);
            (sequence.len, sequence.certain) = (len, certain);
            let store_at = sequence.store_at;
            if has_tail {
                self.settle_tail(row, len);
            }
            if at_commit && certain >= store_at {
                self.publish_full(row, (certain, len), false);
            }
            if let Some(len) = kept.filter(|kept| *kept < len) {
                self.cut_back(row, len);
            }
        }
        if !at_commit {
            self.settle_early();
        }
        let Self { groups, open, unwiped, .. } = self;
        while let Some((index, block)) = open.kept.pop() {
            groups.at_mut(index).release_holder(block, unwiped);
        }
        self.note_peak();
        self.open.close();
    }

    /// Refuses numbers of accepted tokens that do not fit the batch.
    pub(in crate::cache) fn check_accepted(&self, accepted: &[u32]) -> Result<(), PlanError> {
        let (expected, got) = (self.open.batch.len(), accepted.len());
        if expected != got {
            let what = "numbers of accepted tokens";
            return Err(PlanError::LengthMismatch { what, expected, got });
        }
        let too_many = accepted.iter().zip(&self.open.batch).find(|(n, e)| **n > e.new_tokens);
        match too_many {
            None => Ok(()),
            Some((n, entry)) => {
                let (got, max) = (u64::from(*n), u64::from(entry.new_tokens));
                Err(PlanError::TooMany { what: "accepted tokens", got, max })
            }
        }
    }
}
