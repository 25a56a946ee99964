//! How sequences become shorter and end.
use crate::backend::Backend;
use crate::cache::{KvCache, lookup, slot_map};
use crate::error::{CacheError, PlanError};
use crate::ids::SequenceId;
use crate::num::{to_u32, to_usize};

impl<B: Backend> KvCache<B> {
    /// Takes tokens back, so that `sequence` has `len`; blocks beyond go back unless reserved.
    ///
    /// # Errors
    /// [`PlanError::UnknownSequence`], [`PlanError::SequenceTooShort`], [`PlanError::OutOfWindow`]
    /// when what the next token sees has fallen out of a window, which keeps as many tokens more as
    /// [`GroupBuilder::window_slack`] says: the shortest length possible is the error's `kept` and
    /// the window's `left` together; a device failure of the wipe,
    /// after which the truncation stands and the wipe is tried again before any block is
    /// handed out.
    ///
    /// [`GroupBuilder::window_slack`]: crate::GroupBuilder::window_slack
    pub fn truncate(&mut self, sequence: SequenceId, len: u32) -> Result<(), CacheError> {
        self.recover();
        let (row, state) = self.sequences.get(sequence)?;
        if len > state.len {
            let (asked, len) = (len, state.len);
            return Err(PlanError::SequenceTooShort { sequence, len, asked }.into());
        }
        if len < state.len {
            let reserved = state.reserved;
            self.check_in_windows(sequence, row, (len, len))?;
            if let Some(state) = self.sequences.at_mut(row) {
                state.len = len;
            }
            self.drop_blocks(row, len, reserved);
            self.unstore_from(row, len);
            self.sequences.disown(row);
            self.late.truncate(row, len);
        }
        Ok(self.wipe()?)
    }

    /// Takes tokens back whose slots stay with the sequence.
    pub(super) fn cut_back(&mut self, row: u32, len: u32) {
        if self.groups.iter().any(|group| slot_map(group).has_tail()) {
            let reserved = self.sequences.at_mut(row).map_or(0, |state| state.reserved);
            self.drop_blocks(row, len, reserved);
        }
        if let Some(state) = self.sequences.at_mut(row) {
            state.len = len;
        }
        self.unstore_from(row, len);
    }

    /// Refuses queries from position `first` on, behind `len` tokens, that would see what fell out
    /// of a window.
    pub(super) fn check_in_windows(
        &self,
        sequence: SequenceId,
        row: u32,
        (first, len): (u32, u32),
    ) -> Result<(), PlanError> {
        for group in &self.groups {
            let (map, vacant) = (slot_map(group), group.vacant(row));
            let Some(window) = group.window.filter(|_| !vacant.is_empty()) else {
                continue;
            };
            let seen = lookup::first_live(&map, window, first).max(vacant.start);
            if seen < vacant.end.min(map.blocks(len)) {
                let kept = map.tokens(vacant.end);
                return Err(PlanError::OutOfWindow { sequence, asked: first, kept });
            }
        }
        Ok(())
    }

    /// Ends a sequence; blocks that nobody else holds are free. What they hold can be reused until
    /// they are needed.
    ///
    /// # Errors
    /// [`PlanError::UnknownSequence`]; a device failure of the wipe as for [`Self::truncate`].
    pub fn release(&mut self, sequence: SequenceId) -> Result<(), CacheError> {
        self.recover();
        let row = self.sequences.row(sequence)?;
        self.end(sequence, row);
        Ok(self.wipe()?)
    }

    fn end(&mut self, sequence: SequenceId, row: u32) {
        self.store_rest(row);
        self.drop_row(sequence, row);
    }

    fn drop_row(&mut self, sequence: SequenceId, row: u32) {
        self.drop_blocks(row, 0, 0);
        self.late.end(row);
        if let Some((_, history)) = self.sequences.both_mut(row) {
            history.end(&mut self.ledger);
        }
        self.sequences.remove(sequence);
    }

    /// Ends a sequence that began in a step that never happened.
    pub(super) fn unstart(&mut self, sequence: SequenceId) {
        if let Ok(row) = self.sequences.row(sequence) {
            self.drop_row(sequence, row);
        }
    }

    /// Ends every sequence; what they leave behind can be reused.
    ///
    /// # Errors
    /// A device failure of the wipe as for [`Self::truncate`].
    pub fn reset(&mut self) -> Result<(), CacheError> {
        self.recover();
        let ids: Vec<_> = self.sequences.ids().collect();
        for id in ids {
            let row = self.sequences.row(id)?;
            self.end(id, row);
        }
        Ok(self.wipe()?)
    }

    /// Notes what is codes in a committed sequence of `len` tokens and gives the blocks of a tail
    /// back that has become codes.
    pub(super) fn settle(&mut self, row: u32, len: u32) {
        let reserved = self.sequences.at_mut(row).map_or(0, |state| state.reserved);
        for index in 0..self.groups.len() {
            let Some(group) = self.groups.get_mut(index) else {
                continue;
            };
            let map = slot_map(group);
            if map.has_tail() {
                let coded = map.coded_after(group.tables.coded(row), len);
                group.tables.set_coded(row, coded);
                let keep = map.blocks_in(len, coded).max(map.blocks_reserved(reserved));
                self.shorten(index, row, to_usize(keep));
            }
        }
    }

    /// Lets go of the blocks that a sequence of `len` tokens does not need, last first; `reserved`
    /// tokens keep theirs.
    pub(super) fn drop_blocks(&mut self, row: u32, len: u32, reserved: u32) {
        for index in 0..self.groups.len() {
            let Some(group) = self.groups.get_mut(index) else {
                continue;
            };
            let map = slot_map(group);
            let coded = map.coded_truncated(group.tables.coded(row), len);
            group.tables.set_coded(row, coded);
            let needed = map.blocks_in(len, coded);
            // Reserved entries that fell out of a window are no blocks any more: what comes anew
            // gets others.
            let is_left = group.vacant(row).end > needed;
            let reserved = if is_left { 0 } else { map.blocks_reserved(reserved) };
            let keep = needed.max(reserved);
            self.shorten(index, row, to_usize(keep));
        }
    }

    /// Lets go of a row's blocks beyond the first `keep`, last first.
    pub(super) fn shorten(&mut self, index: usize, row: u32, keep: usize) {
        let Some(group) = self.groups.get_mut(index) else {
            return;
        };
        let vacant = group.vacant(row);
        let wipes = self.spec.wipe_on_release();
        let blocks = group.tables.row(row).iter().enumerate().skip(keep).rev();
        for (_, block) in blocks.filter(|(at, _)| !vacant.contains(&to_u32(*at))) {
            if group.pool.release(*block) && wipes {
                self.unwiped.push((index, *block));
            }
        }
        group.tables.truncate(row, keep);
        let live = group.tables.live(row).min(to_u32(group.tables.row(row).len()));
        group.tables.set_live(row, live);
    }
}
