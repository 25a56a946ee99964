//! What the classic front ends need beyond steps that open and close in one call.
use crate::backend::{Backend, Queue};
use crate::cache::KvCache;
use crate::cache::step::bounded;
use crate::error::{CacheError, PlanError};
use crate::geometry::QkvFormat;
use crate::ids::{LayerId, SequenceId};
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
        self.check_open("gather")?;
        if self.open.brings_tokens() && !self.open.is_written(layer) {
            return Err(PlanError::AttendBeforeWrite { layer }.into());
        }
        let (group, index) = self.locate(layer)?;
        let ranges: Vec<_> = self.open.batch.iter().map(whole).collect();
        let unallocated = PlanError::LayerUnallocated { layer };
        let group = self.groups.get(group).ok_or_else(|| unallocated.clone())?;
        let view = group.storage.plane(index, plane).ok_or(unallocated)?;
        let plan = GatherPlan::new(view.layout(), &group.tables, &ranges)?;
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
        let (row, state) = self.sequences.get(sequence)?;
        if queries == 0 {
            return Err(PlanError::ZeroTokens { sequence });
        }
        bounded("queries", queries, self.spec.max_queries())?;
        let cached = state.len.saturating_add(ahead);
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
        let (group, index) = self.locate(layer)?;
        let unallocated = PlanError::LayerUnallocated { layer };
        let group = self.groups.get(group).ok_or_else(|| unallocated.clone())?;
        let planes = group.storage.plane(index, Plane::Key);
        let planes = planes.zip(group.storage.plane(index, Plane::Value)).ok_or(unallocated)?;
        let [layout, _] = group.storage.layouts();
        let workers = self.backend.capabilities().workers_of_heads(layout.num_kv_heads());
        let determinism = self.spec.determinism();
        let (_, plan) = self.scratch.plan(layout, &group.tables, batch, workers, determinism)?;
        let args = AttendArgs::new(&plan, q, out, None, planes.into(), *options)?;
        Ok(self.queue.attend(&plan, args)?)
    }
}

fn whole(entry: &BatchEntry) -> GatherRange {
    GatherRange { row: entry.row, begin: 0, len: entry.cached.saturating_add(entry.new_tokens) }
}
