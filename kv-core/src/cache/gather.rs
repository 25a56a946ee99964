//! Access to cached rows outside a step: reading them, and writing them into reserved blocks.
use crate::backend::{Backend, Queue};
use crate::cache::KvCache;
use crate::cache::open::planes;
use crate::error::{CacheError, PlanError};
use crate::geometry::QkvFormat;
use crate::ids::{LayerId, SequenceId};
use crate::invariant::Invariant;
use crate::plan::{BatchEntry, GatherArgs, GatherPlan, GatherRange, WriteArgs};
use crate::storage::Plane;
use crate::tensor::{TensorView, TensorViewMut};

impl<B: Backend> KvCache<B> {
    /// Reads cached rows of one layer, decoded to the element type of `out`.
    ///
    /// Range `b` is `(sequence, first position, tokens)` and fills entry `b` of `out`, axes by
    /// `format`; rows past a range become zero.
    ///
    /// # Errors
    /// [`PlanError`] for an unknown sequence or layer, for a range past a sequence's length,
    /// outside a window, or missing in a layer, and for a shape that does not fit; the device's
    /// errors.
    pub fn gather(
        &mut self,
        layer: impl Into<LayerId>,
        plane: Plane,
        ranges: &[(SequenceId, u32, u32)],
        out: TensorViewMut<'_, B::Buffer>,
        format: QkvFormat,
    ) -> Result<(), CacheError> {
        self.recover();
        self.state.check_closed("gather")?;
        self.restore()?;
        let layer = layer.into();
        let (group, index) = self.state.locate(layer)?;
        let mut rows = Vec::with_capacity(ranges.len());
        for &(sequence, begin, len) in ranges {
            let row = self.state.row_of(sequence, group, (begin, len))?;
            if len > 0 {
                self.state.check_rows_in(layer, row, begin)?;
            }
            rows.push(GatherRange { row, begin, len });
        }
        let view = self.storages.get(group).invariant(super::STORAGE).plane(index, plane);
        let view = view.ok_or(PlanError::LayerUnallocated { layer })?;
        let plan = GatherPlan::new(view.layout(), self.state.tables(group), &rows)?;
        let args = GatherArgs::new(&plan, view, out, format)?;
        Ok(self.queue.gather(&plan, args)?)
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
        let (group, index) = self.state.locate(layer)?;
        let (row, len) = self.state.room_ahead(sequence, tokens)?;
        if tokens == 0 {
            return Err(PlanError::ZeroTokens { sequence }.into());
        }
        self.wipe()?;
        let entry = BatchEntry { row, cached: len, new_tokens: tokens, queries: 0 };
        let Self { queue, state, storages, scratch, .. } = self;
        let storage = storages.get(group).invariant(super::STORAGE);
        let ([layout, _], tables) = (storage.layouts(), state.tables(group));
        let (plan, _) = scratch.plan(layout, tables, &[entry], 1, state.spec().determinism())?;
        let [k_plane, v_plane] = planes(storage, layer, index)?;
        let args = WriteArgs::new(&plan, k, v, format, k_plane, v_plane)?;
        Ok(queue.write_kv(&plan, args)?)
    }

    /// Declares rows written by [`Self::write_ahead`] as part of the sequence.
    pub(crate) fn advance(&mut self, sequence: SequenceId, tokens: u32) -> Result<(), CacheError> {
        let (row, len) = self.state.room_ahead(sequence, tokens)?;
        self.queue.flush()?;
        self.state.set_len(row, len.saturating_add(tokens));
        Ok(())
    }
}
