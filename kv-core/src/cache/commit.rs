//! How a step ends: lengths advance, and full blocks are offered.
use crate::backend::{Backend, Queue};
use crate::cache::KvCache;
use crate::error::{CacheError, PlanError};
use crate::ids::LayerId;
use crate::plan::BatchEntry;
use crate::spec::PublishAt;

impl<B: Backend> KvCache<B> {
    /// Ends the open step; on an error it is rolled back. `accepted`: how many new tokens of each
    /// entry stay, all where there is none.
    pub(crate) fn commit_open(&mut self, accepted: Option<&[u32]>) -> Result<(), CacheError> {
        self.check_open("commit")?;
        let flushed = self
            .check_all_written()
            .and_then(|()| self.check_accepted(accepted))
            .map_err(CacheError::from)
            .and_then(|()| Ok(self.queue.flush()?));
        if flushed.is_err() {
            self.roll_back();
            return flushed;
        }
        let has_tail = self.groups.iter().any(|group| super::slot_map(group).has_tail());
        let at_commit = self.spec.publish_at() == PublishAt::Commit;
        for index in 0..self.open.batch.len() {
            let Some(&BatchEntry { row, cached, new_tokens, .. }) = self.open.batch.get(index)
            else {
                continue;
            };
            if new_tokens == 0 {
                continue;
            }
            let len = cached.saturating_add(new_tokens);
            let certain = len.saturating_sub(self.open.entry(index).drafts);
            let mut store_at = u32::MAX;
            if let Some(sequence) = self.sequences.at_mut(row) {
                (sequence.len, sequence.certain) = (len, certain);
                store_at = sequence.store_at;
            }
            if has_tail {
                self.settle(row, len);
            }
            let stays = accepted.and_then(|accepted| accepted.get(index)).copied();
            let stays = stays.filter(|n| *n < new_tokens).map(|n| cached.saturating_add(n));
            let certain = if accepted.is_some() { stays.unwrap_or(len) } else { certain };
            if at_commit && certain >= store_at {
                self.store_full(row, (certain, len), false);
            }
            if let Some(len) = stays {
                self.cut_back(row, len);
            }
        }
        if !at_commit {
            self.settle_early();
        }
        while let Some((index, block)) = self.open.kept.pop() {
            let group = self.groups.get_mut(index);
            let emptied = group.is_some_and(|group| group.pool.release(block));
            if emptied && self.spec.wipe_on_release() {
                self.unwiped.push((index, block));
            }
        }
        self.note_peak();
        self.close();
        Ok(())
    }

    fn check_accepted(&self, accepted: Option<&[u32]>) -> Result<(), PlanError> {
        let Some(accepted) = accepted else {
            return Ok(());
        };
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

    /// Every layer that has memory must have been written, unless the step brings no tokens.
    pub(crate) fn check_all_written(&self) -> Result<(), PlanError> {
        let allocated =
            self.groups.iter().map(|group| group.storage.num_allocated()).sum::<usize>();
        if !self.open.brings_tokens() || self.open.num_written == allocated {
            return Ok(());
        }
        let has_memory = |layer: &LayerId| {
            let place = self.locate(*layer).ok();
            place.is_some_and(|(group, index)| {
                self.groups.get(group).is_some_and(|group| group.storage.is_allocated(index))
            })
        };
        let first = (0..self.spec.num_layers())
            .map(LayerId)
            .find(|layer| has_memory(layer) && !self.open.is_written(*layer));
        let others = allocated.saturating_sub(self.open.num_written).saturating_sub(1);
        Err(PlanError::LayersUnwritten { layer: first.unwrap_or(LayerId(0)), others })
    }
}
