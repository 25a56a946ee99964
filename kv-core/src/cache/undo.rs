//! How a step that never happened is taken back.
use crate::backend::Backend;
use crate::cache::KvCache;
use crate::ids::{BlockId, SequenceId};
use crate::num::to_usize;

/// How to take back one change of an open step, last first.
#[derive(Debug, Clone, Copy)]
pub(super) enum Undo {
    /// Blocks were appended.
    Pushed { group: usize, row: u32, count: u32 },
    /// A block that others hold or may reuse was exchanged for a copy; `kept`: nobody else holds
    /// it, so it stays held until the step ends.
    Replaced { group: usize, row: u32, index: usize, old: BlockId, kept: bool },
    /// The blocks of a tail went behind the others.
    Rotated { group: usize, row: u32, begin: usize, by: usize },
    /// The block at entry `at` of a row was offered to the index; `is_new` where the index took it.
    Stored { group: usize, row: u32, at: u32, block: BlockId, is_new: bool },
    /// A sequence began.
    Started { sequence: SequenceId },
}

impl<B: Backend> KvCache<B> {
    /// Takes back every change of the open step; nothing to do when none is open.
    pub(crate) fn roll_back(&mut self) {
        self.undo_to(0);
        if !self.open.exchanged.is_empty() {
            // Who kept a block that others let go of shares it again.
            for entry in &self.open.batch {
                self.sequences.disown(entry.row);
            }
        }
        self.close();
    }

    /// Takes back the changes of the open step but for the first `keep`.
    pub(super) fn undo_to(&mut self, keep: usize) {
        while self.open.undo.len() > keep {
            let Some(undo) = self.open.undo.pop() else {
                break;
            };
            self.undo(undo);
        }
    }

    fn undo(&mut self, undo: Undo) {
        let index = match undo {
            Undo::Started { sequence } => return self.unstart(sequence),
            Undo::Pushed { group, .. }
            | Undo::Replaced { group, .. }
            | Undo::Rotated { group, .. }
            | Undo::Stored { group, .. } => group,
        };
        let Some(group) = self.groups.get_mut(index) else {
            return;
        };
        let freed = match undo {
            Undo::Pushed { row, count, .. } => {
                self.sequences.disown(row);
                let keep = group.tables.row(row).len().checked_sub(to_usize(count));
                assert!(keep.is_some(), "row {row} has the {count} blocks that the step appended");
                return self.shorten(index, row, keep.unwrap_or(0));
            }
            Undo::Replaced { row, index: at, old, kept, .. } => {
                self.sequences.disown(row);
                if kept {
                    self.open.kept.pop();
                } else {
                    group.pool.retain(old);
                }
                let copy = group.tables.replace(row, at, old).ok().flatten();
                copy.filter(|copy| group.pool.release(*copy))
            }
            Undo::Rotated { row, begin, by, .. } => {
                group.tables.rotate_back(row, begin, by);
                None
            }
            Undo::Stored { row, block, is_new, .. } => {
                if is_new {
                    group.pool.forget(block, &mut self.ledger);
                }
                if let Some((state, history)) = self.sequences.both_mut(row) {
                    state.store_at = 0;
                    history.set_stored(index, history.stored(index).saturating_sub(1));
                }
                None
            }
            Undo::Started { .. } => None,
        };
        if let Some(block) = freed.filter(|_| self.spec.wipe_on_release()) {
            self.unwiped.push((index, block));
        }
    }
}
