//! The sequences of a cache: names, lengths, and the table row each owns.
use hashbrown::HashMap;
use hashbrown::hash_map::Entry;

use crate::cache::history::History;
use crate::error::PlanError;
use crate::ids::SequenceId;
use crate::num::{to_u32, to_usize};

/// What the cache knows of one sequence.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sequence {
    /// Committed tokens.
    pub(crate) len: u32,
    /// Tokens whose blocks stay with the sequence even while it is shorter.
    pub(crate) reserved: u32,
    /// Leading tokens that are no drafts.
    pub(crate) certain: u32,
    /// Certain tokens at which the next block can be stored; no sooner, perhaps later.
    pub(crate) store_at: u32,
    /// The step that last named this sequence, to find a second mention.
    mark: u64,
}

/// Live sequences; a sequence keeps its row, in every group's tables, for life.
#[derive(Debug, Default)]
pub(crate) struct Sequences {
    rows: HashMap<SequenceId, u32>,
    states: Vec<Option<Sequence>>,
    histories: Vec<History>,
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

    pub(crate) fn history_mut(&mut self, row: u32) -> Option<&mut History> {
        self.histories.get_mut(to_usize(row))
    }
    pub(crate) fn both_mut(&mut self, row: u32) -> Option<(&mut Sequence, &mut History)> {
        let state = self.states.get_mut(to_usize(row))?.as_mut()?;
        Some((state, self.histories.get_mut(to_usize(row))?))
    }
    /// Two histories at once, to copy from the first to the second.
    pub(crate) fn histories(&mut self, from: u32, to: u32) -> Option<(&History, &mut History)> {
        let pair = self.histories.get_disjoint_mut([to_usize(from), to_usize(to)]).ok()?;
        let [from, to] = pair;
        Some((from, to))
    }

    pub(crate) fn insert(&mut self, id: SequenceId, len: u32) -> Result<u32, PlanError> {
        let Entry::Vacant(vacant) = self.rows.entry(id) else {
            return Err(PlanError::SequenceExists { sequence: id });
        };
        let row = self.free.pop().unwrap_or_else(|| {
            self.states.push(None);
            self.histories.push(History::default());
            to_u32(self.states.len().saturating_sub(1))
        });
        vacant.insert(row);
        if let Some(state) = self.states.get_mut(to_usize(row)) {
            *state = Some(Sequence { len, reserved: 0, certain: len, store_at: 0, mark: 0 });
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

    /// Lets the open step name a sequence again.
    pub(crate) fn unmark(&mut self, id: SequenceId) {
        if let Some(state) = self.row(id).ok().and_then(|row| self.at_mut(row)) {
            state.mark = 0;
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
