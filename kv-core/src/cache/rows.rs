//! Cached rows outside a step: read back, or written ahead into reserved blocks.
use crate::backend::{Backend, Queue};
use crate::cache::KvCache;
use crate::error::{CacheError, PlanError};
use crate::geometry::QkvFormat;
use crate::ids::{LayerId, SequenceId};
use crate::plan::{BatchEntry, GatherArgs, GatherPlan, GatherRange, WriteArgs};
use crate::storage::Plane;
use crate::tensor::{TensorView, TensorViewMut};

impl<B: Backend> KvCache<B> {
    /// Reads cached rows of one layer back, decoded to the element type of `out`.
    ///
    /// Range `b` is `(sequence, first position, tokens)` and fills entry `b` of `out`, axes by
    /// `format`; rows past a range become zero.
    ///
    /// # Errors
    /// [`PlanError`] for an unknown sequence or layer, a range past a sequence's length or one that
    /// has left a window or that a layer lacks, or a shape that does not fit; the device's own.
    pub fn gather(
        &mut self,
        layer: impl Into<LayerId>,
        plane: Plane,
        ranges: &[(SequenceId, u32, u32)],
        out: TensorViewMut<'_, B::Buffer>,
        format: QkvFormat,
    ) -> Result<(), CacheError> {
        self.recover();
        self.restore()?;
        let layer = layer.into();
        let (group, index) = self.locate(layer)?;
        let mut rows = Vec::with_capacity(ranges.len());
        for &(sequence, begin, len) in ranges {
            let (row, state) = self.sequences.get(sequence)?;
            let asked = begin.saturating_add(len);
            if asked > state.len {
                let len = state.len;
                return Err(PlanError::SequenceTooShort { sequence, len, asked }.into());
            }
            self.check_in_window(group, (sequence, row), (begin, asked))?;
            if len > 0 {
                self.check_rows_in(layer, row, begin)?;
            }
            rows.push(GatherRange { row, begin, len });
        }
        let Some(group) = self.groups.get(group) else {
            return Ok(());
        };
        let view =
            group.storage.plane(index, plane).ok_or(PlanError::LayerUnallocated { layer })?;
        let plan = GatherPlan::new(view.layout(), &group.tables, &rows)?;
        let args = GatherArgs::new(&plan, view, out, format)?;
        Ok(self.queue.gather(&plan, args)?)
    }

    /// Refuses rows of a group that have fallen out of its window.
    pub(super) fn check_in_window(
        &self,
        group: usize,
        (sequence, row): (SequenceId, u32),
        (begin, end): (u32, u32),
    ) -> Result<(), PlanError> {
        let Some(group) = self.groups.get(group) else {
            return Ok(());
        };
        let (map, vacant) = (super::slot_map(group), group.vacant(row));
        let (gone, kept) = (map.tokens(vacant.start), map.tokens(vacant.end));
        if !vacant.is_empty() && begin < kept && end > gone && begin < end {
            return Err(PlanError::OutOfWindow { sequence, asked: begin, kept });
        }
        Ok(())
    }

    /// Writes rows behind a sequence's length without a step, into blocks it has reserved.
    pub(crate) fn write_ahead(
        &mut self,
        sequence: SequenceId,
        layer: LayerId,
        tokens: u32,
        [k, v]: [TensorView<'_, B::Buffer>; 2],
        format: QkvFormat,
    ) -> Result<(), CacheError> {
        let (group, index) = self.locate(layer)?;
        let (row, state) = self.sequences.get(sequence)?;
        let (len, max) = (state.len, state.reserved);
        if tokens == 0 {
            return Err(PlanError::ZeroTokens { sequence }.into());
        }
        if len.saturating_add(tokens) > max {
            let new = u64::from(tokens);
            return Err(PlanError::SequenceTooLong { sequence, len, new, max }.into());
        }
        self.wipe()?;
        let Some(group) = self.groups.get(group) else {
            return Ok(());
        };
        let entry = BatchEntry { row, cached: len, new_tokens: tokens, queries: 0 };
        let [layout, _] = group.storage.layouts();
        let determinism = self.spec.determinism();
        let (plan, _) = self.scratch.plan(layout, &group.tables, &[entry], 1, determinism)?;
        let unallocated = PlanError::LayerUnallocated { layer };
        let k_plane = group.storage.plane(index, Plane::Key).ok_or(unallocated.clone())?;
        let v_plane = group.storage.plane(index, Plane::Value).ok_or(unallocated)?;
        let args = WriteArgs::new(&plan, k, v, format, k_plane, v_plane)?;
        Ok(self.queue.write_kv(&plan, args)?)
    }

    /// Declares rows written by [`Self::write_ahead`] as part of the sequence.
    pub(crate) fn advance(&mut self, sequence: SequenceId, tokens: u32) -> Result<(), CacheError> {
        let (row, state) = self.sequences.get(sequence)?;
        let (len, max) = (state.len, state.reserved);
        let new_len = len.checked_add(tokens).filter(|n| *n <= max).ok_or({
            let new = u64::from(tokens);
            PlanError::SequenceTooLong { sequence, len, new, max }
        })?;
        self.queue.flush()?;
        if let Some(state) = self.sequences.at_mut(row) {
            state.len = new_len;
        }
        Ok(())
    }
}
