//! Truncation and end of sequences.
use crate::cache::state::{CacheState, lookup};
use crate::error::{PlanError, StateProblem};
use crate::eviction::Return;
use crate::ids::{LayerId, SequenceId};
use crate::invariant::Invariant;
use crate::num::{to_u32, to_usize};
use crate::plan::{BatchEntry, GatherRange};

impl CacheState {
    /// See [`KvCache::truncate`](crate::KvCache::truncate).
    pub(in crate::cache) fn truncate(
        &mut self,
        sequence: SequenceId,
        len: u32,
    ) -> Result<(), PlanError> {
        self.check_closed("truncate")?;
        let (row, state) = self.sequences.get(sequence)?;
        if len > state.len {
            let (asked, len) = (len, state.len);
            return Err(PlanError::SequenceTooShort { sequence, len, asked });
        }
        if len < state.len {
            let (before, reserved) = (state.len, state.reserved);
            self.check_in_windows(sequence, row, (len, len))?;
            let snapshots = self.state_at(sequence, row, (before, len))?;
            if len == 0 {
                self.clear_states(row);
            } else {
                self.begin_with(row, &snapshots);
            }
            self.sequences.at_mut(row).len = len;
            self.drop_blocks(row, (len, reserved), None);
            self.unpublish_from(row, len);
            self.sequences.mark_shared(row);
            self.late.truncate(row, len);
        }
        Ok(())
    }

    /// Removes tokens whose slots stay with the sequence.
    pub(super) fn cut_back(&mut self, row: u32, len: u32) {
        if self.groups.have_tail() {
            let reserved = self.sequences.at(row).reserved;
            self.drop_blocks(row, (len, reserved), None);
        }
        self.sequences.at_mut(row).len = len;
        self.unpublish_from(row, len);
    }

    /// Returns the row of a sequence whose `len` tokens from `begin` on can be read in one group.
    pub(in crate::cache) fn row_of(
        &self,
        sequence: SequenceId,
        group: usize,
        (begin, len): (u32, u32),
    ) -> Result<u32, PlanError> {
        let (row, state) = self.sequences.get(sequence)?;
        // The caller's range may be any.
        let asked = begin.saturating_add(len);
        if asked > state.len {
            let len = state.len;
            return Err(PlanError::SequenceTooShort { sequence, len, asked });
        }
        self.check_kept(row, group, (begin, asked))?;
        Ok(row)
    }

    /// Returns the rows of every entry of the open step's batch, this step's included; refuses
    /// batches with rows that a layer of the group cannot read.
    pub(in crate::cache) fn batch_rows(
        &self,
        layer: LayerId,
        group: usize,
    ) -> Result<Vec<GatherRange>, PlanError> {
        if self.groups.at(group).slot_map().has_tail() {
            let problem = StateProblem::TailInStep;
            return Err(PlanError::State { operation: "gather", problem });
        }
        let whole = |entry: &BatchEntry| {
            let len = entry.cached + entry.new_tokens;
            if len > 0 {
                self.check_kept(entry.row, group, (0, len))?;
                self.check_rows_in(layer, entry.row, 0)?;
            }
            Ok(GatherRange { row: entry.row, begin: 0, len })
        };
        self.batch().iter().map(whole).collect()
    }

    /// Refuses positions `begin..end` of a row that fell out of a window.
    fn check_kept(
        &self,
        row: u32,
        group: usize,
        (begin, end): (u32, u32),
    ) -> Result<(), PlanError> {
        let group = self.groups.at(group);
        let (map, vacant) = (group.slot_map(), group.vacant(row));
        let (gone, kept) = (map.tokens(vacant.start), map.tokens(vacant.end));
        if !vacant.is_empty() && begin < kept && end > gone && begin < end {
            let sequence = self.sequences.id(row).invariant("the row of a sequence has its id");
            return Err(PlanError::OutOfWindow { sequence, asked: begin, kept });
        }
        Ok(())
    }

    /// Refuses queries from position `first` on, after `len` tokens, that would see tokens outside
    /// a window.
    pub(super) fn check_in_windows(
        &self,
        sequence: SequenceId,
        row: u32,
        (first, len): (u32, u32),
    ) -> Result<(), PlanError> {
        for group in self.groups.iter() {
            let (map, vacant) = (group.slot_map(), group.vacant(row));
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

    /// See [`KvCache::release`](crate::KvCache::release).
    pub(in crate::cache) fn release(&mut self, sequence: SequenceId) -> Result<(), PlanError> {
        self.check_closed("release")?;
        let row = self.sequences.row(sequence)?;
        self.end(sequence, row);
        Ok(())
    }

    /// See [`KvCache::hint`](crate::KvCache::hint).
    pub(in crate::cache) fn hint(
        &mut self,
        sequence: SequenceId,
        hint: Option<Return>,
    ) -> Result<(), PlanError> {
        let row = self.sequences.row(sequence)?;
        self.sequences.set_hint(row, hint);
        Ok(())
    }

    /// See [`KvCache::preempt`](crate::KvCache::preempt).
    pub(in crate::cache) fn preempt(&mut self, sequence: SequenceId) -> Result<(), PlanError> {
        self.check_closed("release")?;
        let row = self.sequences.row(sequence)?;
        // The hint is about the time after the sequence, which goes on.
        self.sequences.set_hint(row, None);
        self.end(sequence, row);
        self.stats.preemptions += 1;
        Ok(())
    }

    /// See [`KvCache::reset`](crate::KvCache::reset).
    pub(in crate::cache) fn reset(&mut self) -> Result<(), PlanError> {
        self.check_closed("reset")?;
        let ids: Vec<_> = self.sequences.ids().collect();
        ids.into_iter().try_for_each(|id| self.release(id))
    }

    fn end(&mut self, sequence: SequenceId, row: u32) {
        self.publish_rest(row);
        self.drop_row(sequence, row);
    }

    fn drop_row(&mut self, sequence: SequenceId, row: u32) {
        let hint = self.sequences.history(row).0.hint;
        self.drop_blocks(row, (0, 0), hint);
        self.clear_states(row);
        if let Some(stops) = self.stops.get_mut(to_usize(row)) {
            stops.clear();
        }
        self.late.end(row);
        let (_, history) = self.sequences.both_mut(row);
        history.end(&mut self.ledger);
        self.sequences.remove(sequence);
    }

    /// Ends a sequence that began in a step that is rolled back.
    pub(super) fn unstart(&mut self, sequence: SequenceId) {
        let row = self.sequences.row(sequence);
        let row = row.invariant("a sequence of an open step ends with the step");
        self.sequences.set_hint(row, None);
        self.drop_row(sequence, row);
    }

    /// Records how many tokens of a committed sequence of `len` tokens are quantised, and releases
    /// the blocks of a tail that was quantised.
    pub(super) fn settle_tail(&mut self, row: u32, len: u32) {
        let reserved = self.sequences.at(row).reserved;
        for index in 0..self.groups.len() {
            let group = self.groups.at_mut(index);
            let map = group.slot_map();
            if map.has_tail() {
                let coded = map.coded_after(group.tables.coded(row), len);
                group.tables.set_coded(row, coded);
                let keep = map.blocks_in(len, coded).max(map.blocks_reserved(reserved));
                self.shorten(index, row, to_usize(keep), None);
            }
        }
    }

    /// Releases the blocks that a sequence of `len` tokens does not need, last first; `reserved`
    /// tokens keep theirs. `hint` is what an ending sequence said of its return.
    pub(super) fn drop_blocks(
        &mut self,
        row: u32,
        (len, reserved): (u32, u32),
        hint: Option<Return>,
    ) {
        for index in 0..self.groups.len() {
            let group = self.groups.at_mut(index);
            let map = group.slot_map();
            let coded = map.coded_truncated(group.tables.coded(row), len);
            group.tables.set_coded(row, coded);
            let needed = map.blocks_in(len, coded);
            // Reserved entries that left a window are vacant: later tokens there get other blocks.
            let is_left = group.vacant(row).end > needed;
            let reserved = if is_left { 0 } else { map.blocks_reserved(reserved) };
            let keep = needed.max(reserved);
            self.shorten(index, row, to_usize(keep), hint);
        }
    }

    /// Releases a row's blocks beyond the first `keep`, last first. `hint` is what an ending
    /// sequence said of its return.
    pub(super) fn shorten(&mut self, index: usize, row: u32, keep: usize, hint: Option<Return>) {
        let Self { groups, unwiped, .. } = self;
        let group = groups.at_mut(index);
        let vacant = group.vacant(row);
        let id = group.group_id();
        let blocks = group.tables.row(row).iter().enumerate().skip(keep).rev();
        for (_, block) in blocks.filter(|(at, _)| !vacant.contains(&to_u32(*at))) {
            if group.pool.release_hinted(*block, hint) {
                unwiped.note(id, *block);
            }
        }
        group.tables.truncate(row, keep);
        let live = group.tables.live(row).min(to_u32(group.tables.row(row).len()));
        group.tables.set_live(row, live);
    }
}
