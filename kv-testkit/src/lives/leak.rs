//! Steps with queries only, leaked steps, and sequences that grow long.
use kv_core::{CacheError, PlanError, StepInput};

use super::choose::Bytes;
use super::join::join;
use super::step::{Entry, Taken};
use super::{Happened, Life};
use crate::case::{At, CaseError, same};
use crate::device::Device;
use crate::named;

impl<B: Device> Life<B> {
    /// Runs queries over cached tokens; such a step writes nothing and allocates nothing.
    pub(super) fn query(&mut self, bytes: &mut Bytes<'_>) -> Result<(), CaseError> {
        let sequence = &self.sequences[bytes.index(self.sequences.len())];
        let (id, len) = (sequence.id, sequence.names.len() as u32);
        let queries = 1 + bytes.below(3).min(len);
        let (before, has_window) = (self.see(), self.has_window());
        self.tell(|| format!("{queries} queries of {id}"));
        match self.cache.begin_step(&[StepInput::query(id, queries)]) {
            Ok(step) => {
                let first = len.saturating_sub(queries);
                let positions: Vec<_> = (first..first + queries).collect();
                same("positions of the queries", step.positions(), positions.as_slice())?;
                step.commit()?;
                self.lived.add(Happened::Queried);
            }
            // The queries start before the next token, so they may see keys that left its window.
            Err(CacheError::Plan(PlanError::OutOfWindow { .. })) if has_window => {}
            // There are more queries than keys.
            Err(CacheError::Plan(PlanError::TooMany { .. })) if queries > len => {}
            Err(other) => return Err(other.into()),
        }
        self.unchanged(&before).at("queries")
    }

    /// Leaks a step in which sequences started and rows were written; the next call rolls it back.
    pub(super) fn leak(&mut self, bytes: &mut Bytes<'_>) -> Result<(), CaseError> {
        let at = bytes.index(self.sequences.len());
        let Some(entry) = self.entry(at, bytes) else {
            return Ok(());
        };
        let mut entries = vec![entry];
        let late = self.late(bytes, &entries);
        let before = self.see();
        self.tell(|| format!("leak a step of {entries:?}, then {late:?}"));
        let ids: Vec<_> = self.sequences.iter().map(|sequence| sequence.id).collect();
        let device = self.backend.clone();
        let inputs: Vec<_> = entries.iter().map(|entry| entry.input(ids[entry.at])).collect();
        if !self.demand(&inputs)?.0 {
            return Ok(());
        }
        self.leave_windows(&entries, &late);
        let mut step = self.cache.begin_step(&inputs).at("a step predicted to fit")?;
        let joined = join((&mut step, &device), late, &ids, &mut entries)?;
        self.lived = self.lived.and(joined.lived);
        let names: Vec<_> = entries.iter().flat_map(|entry| entry.names.clone()).collect();
        if bytes.one_in(2) {
            named::write_layer(&mut step, &self.spec, self.layers[0], &names)?;
        }
        std::mem::forget(step);
        self.lived.add(Happened::Leaked);
        match bytes.below(4) {
            0 => drop(self.cache.queue_mut()),
            1 => drop(self.cache.begin_step(&[])?),
            2 => {
                let layer = self.layers[0];
                same("second allocation of a layer", self.cache.allocate_layer(layer)?, false)?;
            }
            _ => {
                // A query of a sequence that was in the step.
                let taken_back = self.cache.begin_step(&[StepInput::idle(ids[at])])?;
                same("queries of an idle row", taken_back.positions().len(), 0)?;
            }
        }
        self.see().undone(&before).at("a leaked step")
    }

    /// Extends one sequence by many tokens, a few a step, so that others take the blocks that leave
    /// its window.
    pub(super) fn wander(&mut self, bytes: &mut Bytes<'_>) -> Result<(), CaseError> {
        let at = bytes.index(self.sequences.len());
        let (steps, each) = (2 + bytes.below(4), 1 + bytes.index(4));
        self.go_on(at, (steps, each), bytes)
    }

    /// Extends a sequence by `steps` steps of `each` tokens, as far as there is room.
    pub(super) fn go_on(
        &mut self,
        at: usize,
        (steps, each): (u32, usize),
        bytes: &mut Bytes<'_>,
    ) -> Result<(), CaseError> {
        for _ in 0..steps {
            let sequence = &self.sequences[at];
            let room = (self.spec.max_seq_len() as usize).saturating_sub(sequence.names.len());
            let tokens: Vec<_> = (0..each.min(room)).map(|_| bytes.token()).collect();
            if tokens.is_empty() {
                break;
            }
            let names = self.name(sequence, &tokens, false);
            let (is_unknown, drafts, lookahead) = (false, 0, 0);
            let entry = Entry { at, tokens, is_unknown, drafts, lookahead, names };
            if self.take_alone(entry)? == Taken::Refused {
                break;
            }
            self.lived.add(Happened::Wandered);
        }
        Ok(())
    }
}
