//! How a step is planned, reserved, committed and taken back.
//!
//! A cache has at most one open step. [`Step`](super::Step) keeps it open for the length of a
//! borrow; front ends whose callers come back layer by layer keep it open across calls.
use crate::backend::{Backend, Queue};
use crate::cache::reserve::Undo;
use crate::cache::sequences::Sequence;
use crate::cache::{Group, KvCache, StepInput};
use crate::error::{CacheError, PlanError};
use crate::geometry::QkvFormat;
use crate::ids::{GroupId, LayerId};
use crate::plan::{
    AttendArgs, AttentionOptions, AttentionPlan, BatchEntry, BlockCopy, CopyArgs, CopyPlan,
    PlanBuffers, PlannedSequence, SplitPolicy, WriteArgs, WritePlan,
};
use crate::storage::{Plane, PlaneView};
use crate::tensor::{TensorView, TensorViewMut};

/// The open step of a cache, and the buffers all its steps share.
#[derive(Debug)]
pub(super) struct OpenStep {
    is_open: bool,
    /// Number of this step, to mark sequences with.
    number: u64,
    pub(super) batch: Vec<BatchEntry>,
    /// Plans, by group.
    plans: Vec<PlanBuffers>,
    pub(super) positions: Vec<u32>,
    /// Whether a layer was written, by layer.
    written: Vec<bool>,
    num_written: usize,
    pub(super) undo: Vec<Undo>,
    /// Copy-on-write, by group.
    pub(super) copies: Vec<Vec<BlockCopy>>,
}

impl OpenStep {
    pub(super) fn new(groups: usize) -> Self {
        Self {
            is_open: false,
            number: 0,
            batch: Vec::new(),
            plans: (0..groups).map(|_| PlanBuffers::default()).collect(),
            positions: Vec::new(),
            written: Vec::new(),
            num_written: 0,
            undo: Vec::new(),
            copies: (0..groups).map(|_| Vec::new()).collect(),
        }
    }

    pub(super) fn is_written(&self, layer: LayerId) -> bool {
        self.written.get(usize::from(layer.0)).copied().unwrap_or(false)
    }

    fn set_written(&mut self, layer: LayerId) {
        let index = usize::from(layer.0);
        if self.written.len() <= index {
            self.written.resize(index.saturating_add(1), false);
        }
        if let Some(written) = self.written.get_mut(index).filter(|written| !**written) {
            *written = true;
            self.num_written = self.num_written.saturating_add(1);
        }
    }

    pub(super) fn brings_tokens(&self) -> bool {
        self.batch.iter().any(|entry| entry.new_tokens > 0)
    }
}

impl<B: Backend> KvCache<B> {
    pub(crate) fn begin_open(&mut self, inputs: &[StepInput<'_>]) -> Result<(), CacheError> {
        if self.open.is_open {
            let problem = "a step is open already";
            return Err(PlanError::State { operation: "begin step", problem }.into());
        }
        self.wipe()?;
        self.read_inputs(inputs)?;
        self.open.is_open = true;
        let planned =
            self.reserve().and_then(|()| self.plan_open()).and_then(|()| self.copy_open());
        if planned.is_err() {
            self.roll_back();
        }
        planned
    }

    /// Checks every input and fills the batch; changes no table.
    fn read_inputs(&mut self, inputs: &[StepInput<'_>]) -> Result<(), PlanError> {
        let max = self.spec.max_seq_len();
        self.open.number = self.open.number.wrapping_add(1).max(1);
        self.open.batch.clear();
        self.open.positions.clear();
        for input in inputs {
            let sequence = input.sequence;
            let (row, Sequence { len, .. }) = self.sequences.mark(sequence, self.open.number)?;
            let (new, queries) = input.counts()?;
            let kv_len = u64::from(len).saturating_add(new);
            if kv_len > u64::from(max) {
                return Err(PlanError::SequenceTooLong { sequence, len, new, max });
            }
            let too_many = |got| PlanError::TooMany { what: "queries", got, max: max.into() };
            let queries = u32::try_from(queries).map_err(|_| too_many(queries))?;
            let new_tokens = u32::try_from(new).map_err(|_| too_many(new))?;
            self.open.batch.push(BatchEntry { row, cached: len, new_tokens, queries });
            // Query i stands at kv_len - queries + i; queries beyond the keys stand at 0.
            let first = len.saturating_add(new_tokens).saturating_sub(queries);
            self.open.positions.extend((0..queries).map(|i| first.saturating_add(i)));
        }
        Ok(())
    }

    fn plan_open(&mut self) -> Result<(), CacheError> {
        let workers = self.backend.capabilities().workers;
        let policy = SplitPolicy { workers, determinism: self.spec.determinism() };
        for (group, plans) in self.groups.iter().zip(&mut self.open.plans) {
            let [layout, _] = group.storage.layouts();
            plans.fill(layout, &group.tables, &self.open.batch, policy)?;
        }
        Ok(())
    }

    fn copy_open(&mut self) -> Result<(), CacheError> {
        for (group, copies) in self.groups.iter().zip(&self.open.copies) {
            if copies.is_empty() {
                continue;
            }
            let [layout, _] = group.storage.layouts();
            let plan = CopyPlan::new(layout, copies)?;
            let args = CopyArgs::new(&plan, group.storage.view())?;
            self.queue.copy_blocks(&plan, args)?;
        }
        Ok(())
    }

    pub(crate) fn write_open(
        &mut self,
        layer: LayerId,
        [k, v]: [TensorView<'_, B::Buffer>; 2],
        format: QkvFormat,
    ) -> Result<(), CacheError> {
        self.check_open("write")?;
        let (index, in_group) = self.locate(layer)?;
        let Self { queue, groups, open, .. } = self;
        let parts = groups.get(index).zip(open.plans.get(index));
        let (group, plan) = parts.ok_or(PlanError::LayerUnallocated { layer })?;
        let [k_plane, v_plane] = planes(group, layer, in_group)?;
        let [layout, _] = group.storage.layouts();
        let plan = plan.write_plan(layout, &group.tables);
        let args = WriteArgs::new(&plan, k, v, format, k_plane, v_plane)?;
        queue.write_kv(&plan, args)?;
        self.open.set_written(layer);
        Ok(())
    }

    pub(crate) fn attend_open(
        &mut self,
        layer: LayerId,
        q: TensorView<'_, B::Buffer>,
        (out, lse): (TensorViewMut<'_, B::Buffer>, Option<TensorViewMut<'_, B::Buffer>>),
        options: &AttentionOptions<'_>,
    ) -> Result<(), CacheError> {
        self.check_open("attend")?;
        let (index, in_group) = self.locate(layer)?;
        let Self { queue, groups, open, .. } = self;
        let parts = groups.get(index).zip(open.plans.get(index));
        let (group, plan) = parts.ok_or(PlanError::LayerUnallocated { layer })?;
        let layer_planes = planes(group, layer, in_group)?;
        if open.brings_tokens() && !open.is_written(layer) {
            return Err(PlanError::AttendBeforeWrite { layer }.into());
        }
        let [layout, _] = group.storage.layouts();
        let plan = plan.attention_plan(layout, &group.tables);
        let args = AttendArgs::new(&plan, q, out, lse, layer_planes, *options)?;
        Ok(queue.attend(&plan, args)?)
    }

    /// Ends the open step; on an error it is rolled back.
    pub(crate) fn commit_open(&mut self) -> Result<(), CacheError> {
        self.check_open("commit")?;
        let flushed = self
            .check_all_written()
            .map_err(CacheError::from)
            .and_then(|()| Ok(self.queue.flush()?));
        if flushed.is_err() {
            self.roll_back();
            return flushed;
        }
        let has_tail = self.groups.iter().any(|group| super::slot_map(group).has_tail());
        for index in 0..self.open.batch.len() {
            let Some(&BatchEntry { row, cached, new_tokens, .. }) = self.open.batch.get(index)
            else {
                continue;
            };
            let len = cached.saturating_add(new_tokens);
            if let Some(sequence) = self.sequences.at_mut(row) {
                sequence.len = len;
            }
            if has_tail && new_tokens > 0 {
                self.settle(row, len);
            }
        }
        self.note_peak();
        self.close();
        Ok(())
    }

    pub(crate) fn is_step_open(&self) -> bool {
        self.open.is_open
    }

    pub(crate) fn open_plans(&self, group: GroupId) -> Option<(WritePlan<'_>, AttentionPlan<'_>)> {
        let index = usize::from(group.0);
        let (group, plans) = self.groups.get(index).zip(self.open.plans.get(index))?;
        let [layout, _] = group.storage.layouts();
        let tables = &group.tables;
        Some((plans.write_plan(layout, tables), plans.attention_plan(layout, tables)))
    }

    pub(super) fn open_sequences(&self) -> &[PlannedSequence] {
        self.open_plans(GroupId(0)).map_or(&[], |(_, attend)| attend.sequences())
    }

    pub(super) fn check_open(&self, operation: &'static str) -> Result<(), PlanError> {
        if self.open.is_open {
            return Ok(());
        }
        Err(PlanError::State { operation, problem: "no step is open" })
    }

    /// Every layer that has memory must have been written, unless the step brings no tokens.
    pub(crate) fn check_all_written(&self) -> Result<(), PlanError> {
        let allocated =
            self.groups.iter().map(|group| group.storage.num_allocated()).sum::<usize>();
        if !self.open.brings_tokens() || self.open.num_written == allocated {
            return Ok(());
        }
        let has_memory = |layer: &LayerId| {
            let place = self.locate(*layer).ok();
            place.is_some_and(|(group, index)| {
                self.groups.get(group).is_some_and(|group| group.storage.is_allocated(index))
            })
        };
        let first = (0..self.spec.num_layers())
            .map(LayerId)
            .find(|layer| has_memory(layer) && !self.open.is_written(*layer));
        let others = allocated.saturating_sub(self.open.num_written).saturating_sub(1);
        Err(PlanError::LayersUnwritten { layer: first.unwrap_or(LayerId(0)), others })
    }

    pub(super) fn close(&mut self) {
        self.open.is_open = false;
        self.open.undo.clear();
        self.open.copies.iter_mut().for_each(Vec::clear);
        self.open.written.iter_mut().for_each(|written| *written = false);
        self.open.num_written = 0;
    }
}

fn planes<Buf: 'static>(
    group: &Group<Buf>,
    layer: LayerId,
    index: usize,
) -> Result<[PlaneView<'_, Buf>; 2], PlanError> {
    let k = group.storage.plane(index, Plane::Key);
    let v = group.storage.plane(index, Plane::Value);
    let (k, v) = k.zip(v).ok_or(PlanError::LayerUnallocated { layer })?;
    Ok([k, v])
}
