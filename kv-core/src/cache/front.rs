//! What the classic front ends need beyond steps that open and close in one call.
use crate::backend::{Backend, Queue};
use crate::cache::KvCache;
use crate::cache::open::planes;
use crate::cache::state::bounded;
use crate::error::{CacheError, PlanError};
use crate::geometry::QkvFormat;
use crate::ids::{LayerId, SequenceId};
use crate::invariant::Invariant;
use crate::plan::{AttendArgs, AttentionOptions, BatchEntry, GatherArgs, GatherPlan, GatherRange};
use crate::storage::Plane;
use crate::tensor::{TensorView, TensorViewMut};

impl<B: Backend> KvCache<B> {
    /// Reads all rows of the open step's batch, this step's included: entry `b` fills entry `b`.
    pub(crate) fn gather_open(
        &mut self,
        layer: LayerId,
        plane: Plane,
        out: TensorViewMut<'_, B::Buffer>,
        format: QkvFormat,
    ) -> Result<(), CacheError> {
        self.state.check_open("gather")?;
        if self.state.brings_tokens() && !self.written.contains(layer) {
            return Err(PlanError::AttendBeforeWrite { layer }.into());
        }
        let (group, index) = self.state.locate(layer)?;
        let ranges: Vec<_> = self.state.batch().iter().map(whole).collect();
        let view = self.storages.get(group).invariant(super::STORAGE).plane(index, plane);
        let view = view.ok_or(PlanError::LayerUnallocated { layer })?;
        let plan = GatherPlan::new(view.layout(), self.state.tables(group), &ranges)?;
        let args = GatherArgs::new(&plan, view, out, format)?;
        Ok(self.queue.gather(&plan, args)?)
    }

    /// Queries of one sequence outside a step; `ahead` rows behind its length, written by
    /// [`Self::write_ahead`], count as keys.
    pub(crate) fn query_ahead(
        &self,
        sequence: SequenceId,
        ahead: u32,
        queries: u32,
    ) -> Result<BatchEntry, PlanError> {
        let (row, len) = self.state.row_and_len(sequence)?;
        if queries == 0 {
            return Err(PlanError::ZeroTokens { sequence });
        }
        bounded("queries", queries, self.state.spec().max_queries())?;
        let cached = len.saturating_add(ahead);
        Ok(BatchEntry { row, cached, new_tokens: 0, queries })
    }

    /// Attends queries outside a step, entries made by [`Self::query_ahead`].
    pub(crate) fn attend_ahead(
        &mut self,
        layer: LayerId,
        batch: &[BatchEntry],
        q: TensorView<'_, B::Buffer>,
        out: TensorViewMut<'_, B::Buffer>,
        options: &AttentionOptions<'_>,
    ) -> Result<(), CacheError> {
        self.restore()?;
        let (group, index) = self.state.locate(layer)?;
        let storage = self.storages.get(group).invariant(super::STORAGE);
        let planes = planes(storage, layer, index)?;
        let ([layout, _], tables) = (storage.layouts(), self.state.tables(group));
        let workers = self.backend.capabilities().workers_of_heads(layout.num_kv_heads());
        let determinism = self.state.spec().determinism();
        let (_, plan) = self.scratch.plan(layout, tables, batch, workers, determinism)?;
        let args = AttendArgs::new(&plan, q, out, None, planes, *options)?;
        Ok(self.queue.attend(&plan, args)?)
    }
}

fn whole(entry: &BatchEntry) -> GatherRange {
    GatherRange { row: entry.row, begin: 0, len: entry.cached.saturating_add(entry.new_tokens) }
}
