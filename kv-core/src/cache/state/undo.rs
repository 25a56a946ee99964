//! Rollback of a step.
use crate::cache::state::CacheState;
use crate::ids::{BlockId, SequenceId};
use crate::invariant::Invariant;
use crate::num::to_usize;

/// One change of an open step, to be undone last first.
#[derive(Debug, Clone, Copy)]
pub(super) enum Undo {
    /// Blocks were appended.
    Pushed { group: usize, row: u32, count: u32 },
    /// A shared or indexed block was replaced by a copy. With `kept` it has no other holder and
    /// stays held until the step ends.
    Replaced { group: usize, row: u32, at: u32, old: BlockId, kept: bool },
    /// The blocks of a tail moved after the others.
    Rotated { group: usize, row: u32, begin: usize, by: usize },
    /// The block at entry `at` of a row was published; `is_new` if the index took it.
    Stored { group: usize, row: u32, at: u32, block: BlockId, is_new: bool },
    /// A sequence began.
    Started { sequence: SequenceId },
}

impl CacheState {
    /// Ends the open step as if it had never begun; does nothing if none is open: see
    /// [`Step::roll_back`](crate::Step::roll_back).
    pub(in crate::cache) fn roll_back(&mut self) {
        if !self.open.exchanged.is_empty() {
            // Rows that kept a block which others released share it again. Sequences that began in
            // the step still exist.
            for entry in &self.open.batch {
                self.sequences.mark_shared(entry.row);
            }
        }
        self.take_back_states(0);
        self.undo_to(0);
        self.open.close();
    }

    /// Undoes all changes of the open step except the first `keep`.
    pub(super) fn undo_to(&mut self, keep: usize) {
        while self.open.undo.len() > keep {
            let undo = self.open.undo.pop().invariant("there are more changes than are kept");
            self.undo(undo);
        }
    }

    fn undo(&mut self, undo: Undo) {
        let Self { groups, ledger, sequences, open, unwiped, .. } = self;
        match undo {
            Undo::Started { sequence } => self.unstart(sequence),
            Undo::Pushed { group, row, count } => {
                sequences.mark_shared(row);
                let had = groups.at(group).tables.row_len(row).checked_sub(count);
                let had = had.invariant("a row has the blocks that the step appended");
                self.shorten(group, row, to_usize(had), None);
            }
            Undo::Replaced { group, row, at, old, kept } => {
                sequences.mark_shared(row);
                let group = groups.at_mut(group);
                if kept {
                    let last = open.kept.pop();
                    assert_eq!(last, Some((group.id, old)), "kept blocks go back last first");
                } else {
                    group.pool.retain(old);
                }
                let copy = group.entry(row, at);
                group.replace(row, at, (copy, old));
                group.release_holder(copy, unwiped);
            }
            Undo::Rotated { group, row, begin, by } => {
                groups.at_mut(group).tables.rotate_back(row, begin, by);
            }
            Undo::Stored { group, row, block, is_new, .. } => {
                if is_new {
                    groups.at_mut(group).forget(block, ledger, unwiped);
                }
                let (state, history) = sequences.both_mut(row);
                state.store_at = 0;
                let stored = history.stored(group).checked_sub(1);
                history.set_stored(group, stored.invariant("the block was noted as offered"));
            }
        }
    }
}
