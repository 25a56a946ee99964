//! The sequences of a cache: names, lengths, and the table row each owns.
use std::num::NonZeroU8;

use hashbrown::HashMap;
use hashbrown::hash_map::Entry;

use crate::block::Ledger;
use crate::cache::state::history::History;
use crate::error::PlanError;
use crate::eviction::Return;
use crate::ids::SequenceId;
use crate::invariant::Invariant;
use crate::num::{to_u32, to_usize};
use crate::slot_map::SlotMap;

/// State of one sequence.
#[derive(Debug, Clone, Copy)]
#[repr(align(64))]
pub(crate) struct Sequence {
    /// Committed tokens.
    pub(crate) len: u32,
    /// Tokens whose blocks stay with the sequence even while it is shorter.
    pub(crate) reserved: u32,
    /// Leading tokens that are not drafts.
    pub(crate) certain: u32,
    /// Number of certain tokens at which the next block may be published; not before.
    pub(crate) store_at: u32,
    /// Positions from `len` up to this one are in blocks that only this sequence may write: tokens
    /// there need nothing from the pools. 0 if unknown.
    pub(crate) own_end: u32,
    /// The step that last named this sequence, to find a second mention.
    mark: u64,
    /// Leading tokens with known ids, including those in `recent`.
    known: u32,
    /// The last known tokens, before they are moved to the history together: a decode step then
    /// touches nothing else.
    recent: [u32; RECENT],
    /// Number of tokens in `recent`, plus one: 0 marks a free row.
    recent_end: NonZeroU8,
}

const ROW: &str = "a live sequence has a row, and every row its lists";

/// Tokens that wait to be moved to the history: as many as fill a cache line with the rest.
const RECENT: usize = 6;
const _: () = assert!(size_of::<Option<Sequence>>() == 64, "a step touches one line a sequence");

impl Sequence {
    /// Appends one known token; `false` if there is no space or a gap.
    #[inline]
    fn note(&mut self, position: u32, token: u32) -> bool {
        let end = self.num_recent();
        let slot = self.recent.get_mut(end);
        let Some(slot) = slot.filter(|_| position == self.known) else {
            return false;
        };
        *slot = token;
        // Never saturates: the slot exists.
        self.recent_end = self.recent_end.saturating_add(1);
        self.known += 1;
        true
    }

    fn flush(&mut self, history: &mut History) {
        let recent = self.recent.get(..self.num_recent()).unwrap_or_default();
        history.push(recent);
        self.recent_end = NonZeroU8::MIN;
    }

    fn num_recent(&self) -> usize {
        usize::from(self.recent_end.get()) - 1
    }
}

/// Live sequences; a sequence keeps its row, in every group's tables, until it ends.
#[derive(Debug, Default)]
pub(crate) struct Sequences {
    rows: HashMap<SequenceId, u32>,
    /// Owner of each row.
    ids: Vec<Option<SequenceId>>,
    states: Vec<Option<Sequence>>,
    histories: Vec<History>,
    free: Vec<u32>,
    /// The row that ended last: its history keeps a little memory for the next sequence.
    ended: Option<u32>,
}

impl Sequences {
    pub(crate) fn len(&self) -> usize {
        self.rows.len()
    }
    /// Returns the number of rows ever used, which tables need.
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

    /// Returns the history of a row, and the known tokens that are not in it yet.
    pub(crate) fn history(&self, row: u32) -> (&History, &[u32]) {
        let state = self.at(row);
        let recent = state.recent.get(..state.num_recent()).unwrap_or_default();
        (self.histories.get(to_usize(row)).invariant(ROW), recent)
    }

    /// Returns the bytes of the histories of all rows.
    #[cfg(test)]
    pub(super) fn history_bytes(&self) -> usize {
        self.histories.iter().map(History::bytes).sum()
    }

    /// Returns the owner of a row.
    pub(crate) fn id(&self, row: u32) -> Option<SequenceId> {
        self.ids.get(to_usize(row)).copied().flatten()
    }
    pub(crate) fn row(&self, id: SequenceId) -> Result<u32, PlanError> {
        self.rows.get(&id).copied().ok_or(PlanError::UnknownSequence { sequence: id })
    }
    pub(crate) fn get(&self, id: SequenceId) -> Result<(u32, &Sequence), PlanError> {
        let row = self.row(id)?;
        Ok((row, self.at(row)))
    }
    /// Returns the sequence of a row.
    #[inline]
    pub(crate) fn at(&self, row: u32) -> &Sequence {
        self.states.get(to_usize(row)).and_then(Option::as_ref).invariant(ROW)
    }
    /// Does what [`Self::at`] does, mutably.
    #[inline]
    pub(crate) fn at_mut(&mut self, row: u32) -> &mut Sequence {
        self.states.get_mut(to_usize(row)).and_then(Option::as_mut).invariant(ROW)
    }

    /// Returns state and history of a row, after moving all tokens to the history.
    pub(crate) fn both_mut(&mut self, row: u32) -> (&mut Sequence, &mut History) {
        let state = self.states.get_mut(to_usize(row)).and_then(Option::as_mut).invariant(ROW);
        let history = self.histories.get_mut(to_usize(row)).invariant(ROW);
        state.flush(history);
        (state, history)
    }
    /// Calls `each` for the state and the history of every live sequence, with its row.
    pub(crate) fn each_mut(&mut self, mut each: impl FnMut(u32, &mut Sequence, &mut History)) {
        for ((state, history), row) in self.states.iter_mut().zip(&mut self.histories).zip(0..) {
            if let Some(state) = state {
                state.flush(history);
                each(row, state, history);
            }
        }
    }
    /// Swaps the history of a row.
    pub(crate) fn swap_history(&mut self, row: u32, history: &mut History) {
        let (state, own) = self.both_mut(row);
        std::mem::swap(own, history);
        state.known = own.known();
    }
    /// Sets what the caller expects after the end of a row's sequence.
    pub(crate) fn set_hint(&mut self, row: u32, hint: Option<Return>) {
        self.histories.get_mut(to_usize(row)).invariant(ROW).hint = hint;
    }
    /// Makes the history of row `to` a copy of that of `from`, with `len` tokens.
    pub(crate) fn fork_history(
        &mut self,
        (from, to): (u32, u32),
        known: (u32, &[SlotMap]),
        ledger: &mut Ledger,
    ) {
        // Its last tokens go to the history first.
        self.both_mut(from);
        let pair = self.histories.get_disjoint_mut([to_usize(from), to_usize(to)]);
        let [parent, child] = pair.invariant("parent and child have rows of their own");
        child.fork_from(parent, known, ledger);
        let known = child.known();
        self.at_mut(to).known = known;
    }

    /// Records the ids of tokens that a step adds at `position`, if they are known.
    #[inline]
    pub(crate) fn note(
        &mut self,
        row: u32,
        position: u32,
        ids: Option<&[u32]>,
        chains: &[SlotMap],
    ) {
        let state = self.at_mut(row);
        // After unknown tokens, further ids are of no use.
        let is_gap = position > state.known || (ids.is_none() && position == state.known);
        if is_gap || matches!(ids, Some(&[token]) if state.note(position, token)) {
            return;
        }
        let (state, history) = self.both_mut(row);
        history.note(position, ids, chains);
        state.known = history.known();
    }

    /// Records that a block of the row may be shared now.
    pub(crate) fn mark_shared(&mut self, row: u32) {
        self.at_mut(row).own_end = 0;
    }

    pub(crate) fn insert(&mut self, id: SequenceId, len: u32) -> Result<u32, PlanError> {
        let Entry::Vacant(vacant) = self.rows.entry(id) else {
            return Err(PlanError::SequenceExists { sequence: id });
        };
        let row = self.free.pop().unwrap_or_else(|| {
            self.ids.push(None);
            self.states.push(None);
            self.histories.push(History::default());
            to_u32(self.states.len() - 1)
        });
        vacant.insert(row);
        *self.ids.get_mut(to_usize(row)).invariant(ROW) = Some(id);
        let state = self.states.get_mut(to_usize(row)).invariant(ROW);
        let before = state.replace(Sequence {
            len,
            reserved: 0,
            certain: len,
            store_at: 0,
            own_end: 0,
            mark: 0,
            known: 0,
            recent: [0; RECENT],
            recent_end: NonZeroU8::MIN,
        });
        assert!(before.is_none(), "row {row} was free");
        Ok(row)
    }
    pub(crate) fn remove(&mut self, id: SequenceId) {
        if let Some(row) = self.rows.remove(&id) {
            *self.states.get_mut(to_usize(row)).invariant(ROW) = None;
            *self.ids.get_mut(to_usize(row)).invariant(ROW) = None;
            self.free.push(row);
            self.clear_history(row);
        }
    }

    /// Clears the history of a row that ended, and frees the memory kept by the row that ended
    /// before.
    fn clear_history(&mut self, row: u32) {
        self.histories.get_mut(to_usize(row)).invariant(ROW).clear();
        let before = self.ended.replace(row).filter(|before| *before != row).map(to_usize);
        let before = before.filter(|row| self.states.get(*row).is_some_and(Option::is_none));
        if let Some(history) = before.and_then(|row| self.histories.get_mut(row)) {
            *history = History::default();
        }
    }

    /// Lets the open step name a sequence again that it could not add. A block that other rows
    /// released in the step may be shared again.
    pub(crate) fn unmark(&mut self, id: SequenceId) {
        if let Ok(row) = self.row(id) {
            self.unmark_row(row);
        }
    }
    /// Does what [`Self::unmark`] does, for the sequence of a row.
    pub(crate) fn unmark_row(&mut self, row: u32) {
        let state = self.at_mut(row);
        (state.mark, state.own_end) = (0, 0);
    }

    /// Finds a sequence for step `step` and refuses a second mention in the same step. `guess` is
    /// its likely row, which saves the search.
    #[inline]
    pub(crate) fn mark(
        &mut self,
        id: SequenceId,
        guess: u32,
        step: u64,
    ) -> Result<(u32, &Sequence), PlanError> {
        let is_right = self.ids.get(to_usize(guess)) == Some(&Some(id));
        let row = if is_right { guess } else { self.row(id)? };
        let state = self.at_mut(row);
        if state.mark == step {
            return Err(PlanError::DuplicateSequence { sequence: id });
        }
        state.mark = step;
        Ok((row, state))
    }
}
