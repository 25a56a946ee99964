//! Steps with queries only, leaked steps, and sequences that grow long.
use kv_core::error::PlanError;
use kv_core::{CacheError, StepInput};

use super::choices::Choices;
use super::join::join;
use super::step::{Entry, StepOutcome};
use super::{Behaviour, StatefulTest};
use crate::case::{At, CaseError, same};
use crate::provenance;

impl StatefulTest {
    /// Runs queries over cached tokens; such a step writes nothing and allocates nothing.
    pub(super) fn query(&mut self, choices: &mut Choices<'_>) -> Result<(), CaseError> {
        let sequence = &self.sequences[choices.index(self.sequences.len())];
        let (id, len) = (sequence.id, sequence.hashes.len() as u32);
        let queries = 1 + choices.below(3).min(len);
        let (before, has_window) = (self.visible_state(), self.has_window());
        self.record(|| format!("{queries} queries of {id}"));
        match self.cache.begin_step(&[StepInput::query(id, queries)]) {
            Ok(step) => {
                let first = len.saturating_sub(queries);
                let positions: Vec<_> = (first..first + queries).collect();
                same("positions of the queries", step.positions(), positions.as_slice())?;
                step.commit()?;
                self.coverage.add(Behaviour::QueriesOnly);
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
    pub(super) fn leak(&mut self, choices: &mut Choices<'_>) -> Result<(), CaseError> {
        let at = choices.index(self.sequences.len());
        let Some(entry) = self.entry(at, choices) else {
            return Ok(());
        };
        let mut entries = vec![entry];
        let joins = self.joins(choices, &entries);
        let before = self.visible_state();
        self.record(|| format!("leak a step of {entries:?}, then {joins:?}"));
        let ids: Vec<_> = self.sequences.iter().map(|sequence| sequence.id).collect();
        let faults = self.faults.clone();
        let inputs: Vec<_> = entries.iter().map(|entry| entry.input(ids[entry.at])).collect();
        if !self.demand(&inputs)?.0 {
            return Ok(());
        }
        self.update_floors(&entries, &joins);
        let mut step = self.cache.begin_step(&inputs).at("a step predicted to fit")?;
        let joined = join((&mut step, &faults), joins, &ids, &mut entries)?;
        self.coverage = self.coverage.and(joined.coverage);
        let hashes: Vec<_> = entries.iter().flat_map(|entry| entry.hashes.clone()).collect();
        if choices.one_in(2) {
            provenance::write_layer(&mut step, &self.spec, self.layers[0], &hashes)?;
        }
        std::mem::forget(step);
        self.coverage.add(Behaviour::Leaked);
        match choices.below(4) {
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
        self.visible_state().check_undone(&before).at("a leaked step")
    }

    /// Extends one sequence by many tokens, a few a step, so that others take the blocks that leave
    /// its window.
    pub(super) fn grow_long(&mut self, choices: &mut Choices<'_>) -> Result<(), CaseError> {
        let at = choices.index(self.sequences.len());
        let (steps, each) = (2 + choices.below(4), 1 + choices.index(4));
        self.extend_by(at, (steps, each), choices)
    }

    /// Extends a sequence by `steps` steps of `each` tokens, as far as there is room.
    pub(super) fn extend_by(
        &mut self,
        at: usize,
        (steps, each): (u32, usize),
        choices: &mut Choices<'_>,
    ) -> Result<(), CaseError> {
        for _ in 0..steps {
            let sequence = &self.sequences[at];
            let room = (self.spec.max_seq_len() as usize).saturating_sub(sequence.hashes.len());
            let tokens: Vec<_> = (0..each.min(room)).map(|_| choices.token()).collect();
            if tokens.is_empty() {
                break;
            }
            let hashes = self.hash_tokens(sequence, &tokens, false);
            let (is_unknown, drafts, lookahead) = (false, 0, 0);
            let entry = Entry { at, tokens, is_unknown, drafts, lookahead, hashes };
            if self.run_alone(entry)? == StepOutcome::Refused {
                break;
            }
            self.coverage.add(Behaviour::GrewLong);
        }
        Ok(())
    }
}
