//! Reading of cached rows: ranges of sequences, or the batch of the open step.
use crate::backend::{Backend, Queue};
use crate::cache::KvCache;
use crate::error::{CacheError, PlanError};
use crate::geometry::Axes;
use crate::ids::Plane;
use crate::ids::{LayerId, SequenceId};
use crate::invariant::Invariant;
use crate::plan::{GatherArgs, GatherPlan, GatherRange};
use crate::tensor::TensorViewMut;

impl<B: Backend> KvCache<B> {
    /// Reads cached rows of one layer, decoded to the element type of `out`.
    ///
    /// Range `b` is `(sequence, first position, tokens)` and fills entry `b` of `out`, axes by
    /// `axes`; rows past a range become zero.
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
        axes: Axes,
    ) -> Result<(), CacheError> {
        self.recover();
        self.state.check_closed("gather")?;
        self.restore()?;
        let layer = layer.into();
        let (group, _) = self.state.locate(layer)?;
        let mut rows = Vec::with_capacity(ranges.len());
        for &(sequence, begin, len) in ranges {
            let row = self.state.row_of(sequence, group, (begin, len))?;
            if len > 0 {
                self.state.check_rows_in(layer, row, begin)?;
            }
            rows.push(GatherRange { row, begin, len });
        }
        self.gather_rows(layer, plane, &rows, out, axes)
    }

    /// Reads the rows of the open step's batch: [`Step::gather`](crate::Step::gather).
    pub(super) fn gather_open(
        &mut self,
        layer: LayerId,
        plane: Plane,
        out: TensorViewMut<'_, B::Buffer>,
        axes: Axes,
    ) -> Result<(), CacheError> {
        self.state.check_open("gather")?;
        let (group, index) = self.state.locate(layer)?;
        if !self.storage_at(group).is_allocated(index) {
            return Err(PlanError::LayerUnallocated { layer }.into());
        }
        if self.state.brings_tokens() && !self.written.contains(layer) {
            return Err(PlanError::AttendBeforeWrite { layer }.into());
        }
        let rows = self.state.batch_rows(layer, group)?;
        self.gather_rows(layer, plane, &rows, out, axes)
    }

    fn gather_rows(
        &mut self,
        layer: LayerId,
        plane: Plane,
        rows: &[GatherRange],
        out: TensorViewMut<'_, B::Buffer>,
        axes: Axes,
    ) -> Result<(), CacheError> {
        let (group, index) = self.state.locate(layer)?;
        let view = self.storages.get(group).invariant(super::STORAGE).plane(index, plane);
        let view = view.ok_or(PlanError::LayerUnallocated { layer })?;
        let plan = GatherPlan::new(view.layout(), self.state.tables(group), rows)?;
        let args = GatherArgs::new(&plan, view, out, axes)?;
        Ok(self.queue.gather(&plan, args)?)
    }
}
