//! The sequences of a cache: names, lengths, and the table row each owns.
use hashbrown::HashMap;
use hashbrown::hash_map::Entry;

use crate::error::PlanError;
use crate::ids::SequenceId;
use crate::num::{to_u32, to_usize};

/// How a sequence starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct StartOptions {
    /// Tokens whose blocks are taken at once and stay with the sequence for life.
    pub reserve: u32,
}

impl StartOptions {
    /// Takes the blocks of `tokens` tokens at once, so that no step up to there can run out of
    /// blocks.
    #[must_use]
    pub fn reserve(mut self, tokens: u32) -> Self {
        self.reserve = tokens;
        self
    }
}

/// What the cache knows of one sequence.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sequence {
    /// Committed tokens.
    pub(crate) len: u32,
    /// Tokens whose blocks stay with the sequence even while it is shorter.
    pub(crate) reserved: u32,
    /// The step that last named this sequence, to find a second mention.
    mark: u64,
}

/// Live sequences; a sequence keeps its row, in every group's tables, for life.
#[derive(Debug, Default)]
pub(crate) struct Sequences {
    rows: HashMap<SequenceId, u32>,
    states: Vec<Option<Sequence>>,
    free: Vec<u32>,
}

impl Sequences {
    pub(crate) fn len(&self) -> usize {
        self.rows.len()
    }
    /// Rows ever used: tables need so many.
    pub(crate) fn num_rows(&self) -> usize {
        self.states.len()
    }
    pub(crate) fn ids(&self) -> impl Iterator<Item = SequenceId> + '_ {
        self.rows.keys().copied()
    }
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u32, &Sequence)> + '_ {
        self.states.iter().zip(0..).filter_map(|(state, row)| Some((row, state.as_ref()?)))
    }
    pub(crate) fn contains(&self, id: SequenceId) -> bool {
        self.rows.contains_key(&id)
    }

    pub(crate) fn row(&self, id: SequenceId) -> Result<u32, PlanError> {
        self.rows.get(&id).copied().ok_or(PlanError::UnknownSequence { sequence: id })
    }
    pub(crate) fn get(&self, id: SequenceId) -> Result<(u32, &Sequence), PlanError> {
        let row = self.row(id)?;
        let state = self.states.get(to_usize(row)).and_then(Option::as_ref);
        state.map(|state| (row, state)).ok_or(PlanError::UnknownSequence { sequence: id })
    }
    pub(crate) fn at_mut(&mut self, row: u32) -> Option<&mut Sequence> {
        self.states.get_mut(to_usize(row))?.as_mut()
    }

    pub(crate) fn insert(&mut self, id: SequenceId, len: u32) -> Result<u32, PlanError> {
        let Entry::Vacant(vacant) = self.rows.entry(id) else {
            return Err(PlanError::SequenceExists { sequence: id });
        };
        let row = self.free.pop().unwrap_or_else(|| {
            self.states.push(None);
            to_u32(self.states.len().saturating_sub(1))
        });
        vacant.insert(row);
        if let Some(state) = self.states.get_mut(to_usize(row)) {
            *state = Some(Sequence { len, reserved: 0, mark: 0 });
        }
        Ok(row)
    }
    pub(crate) fn remove(&mut self, id: SequenceId) {
        if let Some(row) = self.rows.remove(&id) {
            if let Some(state) = self.states.get_mut(to_usize(row)) {
                *state = None;
            }
            self.free.push(row);
        }
    }

    /// Finds a sequence for step `step` and refuses a second mention in the same step.
    pub(crate) fn mark(&mut self, id: SequenceId, step: u64) -> Result<(u32, Sequence), PlanError> {
        let row = self.row(id)?;
        let state = self.at_mut(row).ok_or(PlanError::UnknownSequence { sequence: id })?;
        if state.mark == step {
            return Err(PlanError::DuplicateSequence { sequence: id });
        }
        state.mark = step;
        Ok((row, *state))
    }
}
