//! How a step is planned, reserved, committed and taken back.
//!
//! A cache has at most one open step. [`Step`](super::Step) keeps it open for the length of a
//! borrow; front ends whose callers come back layer by layer keep it open across calls.
use crate::backend::{Backend, Queue};
use crate::cache::sequences::Sequence;
use crate::cache::{Group, KvCache, StepInput, block_size, slot_map};
use crate::error::{BlocksExhausted, CacheError, PlanError};
use crate::geometry::QkvFormat;
use crate::ids::{BlockId, GroupId, LayerId};
use crate::num::{to_u32, to_usize};
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
    undo: Vec<Undo>,
    /// Copy-on-write, by group.
    copies: Vec<Vec<BlockCopy>>,
}

/// How to take back one change of a table, last first.
#[derive(Debug, Clone, Copy)]
enum Undo {
    /// A block was appended.
    Pushed { group: usize, row: u32 },
    /// A shared block was exchanged for a copy.
    Replaced { group: usize, row: u32, index: usize, old: BlockId },
    /// A shared block lost a holder whose copy found no block.
    Released { group: usize, block: BlockId },
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

    /// Takes the blocks that the batch writes, and a private copy of each that others share.
    fn reserve(&mut self) -> Result<(), CacheError> {
        for index in 0..self.groups.len() {
            let (mut taken, mut missing) = (0_u32, 0_u32);
            let free = self.free_blocks(GroupId(u8::try_from(index).unwrap_or(u8::MAX)));
            for entry in 0..self.open.batch.len() {
                let Some(&entry) = self.open.batch.get(entry) else {
                    continue;
                };
                let (t, m) = self.reserve_entry(index, entry);
                (taken, missing) = (taken.saturating_add(t), missing.saturating_add(m));
            }
            if missing > 0 {
                let group = GroupId(u8::try_from(index).unwrap_or(u8::MAX));
                let needed = taken.saturating_add(missing);
                return Err(BlocksExhausted { group, needed, free, evictable: 0 }.into());
            }
        }
        Ok(())
    }

    /// Blocks taken and blocks missing for one entry in one group.
    fn reserve_entry(&mut self, index: usize, entry: BatchEntry) -> (u32, u32) {
        let (mut taken, mut missing) = (0_u32, 0_u32);
        let Some(group) = self.groups.get_mut(index) else {
            return (0, 0);
        };
        if entry.new_tokens == 0 {
            return (0, 0);
        }
        let row = entry.row;
        let (map, size) = (slot_map(group), block_size(group));
        let cached = map.slots(entry.cached);
        let first = map.place(entry.cached).index;
        let end = map.blocks(entry.cached.saturating_add(entry.new_tokens));
        for at in first..end {
            let held = group.tables.row(row).get(to_usize(at)).copied();
            if held.is_some_and(|block| group.pool.holders(block) == 1) {
                continue;
            }
            let Some(new) = group.pool.allocate() else {
                missing = missing.saturating_add(1);
                if let Some(block) = held {
                    group.pool.release(block);
                    self.open.undo.push(Undo::Released { group: index, block });
                }
                continue;
            };
            taken = taken.saturating_add(1);
            let Some(old) = held else {
                super::push_held(&mut group.tables, row, Some(new));
                self.open.undo.push(Undo::Pushed { group: index, row });
                continue;
            };
            // Both blocks are of this group's pool, so the exchange is not refused.
            let replaced = group.tables.replace(row, to_usize(at), new);
            debug_assert_eq!(replaced, Ok(Some(old)), "the entry was read just before");
            group.pool.release(old);
            let at = to_usize(at);
            self.open.undo.push(Undo::Replaced { group: index, row, index: at, old });
            let before = to_u32(at).saturating_mul(size);
            let slots = cached.saturating_sub(before).min(size);
            if let Some(copies) = self.open.copies.get_mut(index).filter(|_| slots > 0) {
                copies.push(BlockCopy { from: old, to: new, slots });
            }
        }
        (taken, missing)
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
        for entry in &self.open.batch {
            if let Some(sequence) = self.sequences.at_mut(entry.row) {
                sequence.len = entry.cached.saturating_add(entry.new_tokens);
            }
        }
        self.note_peak();
        self.close();
        Ok(())
    }

    /// Takes back every change of the open step; nothing to do when none is open.
    pub(crate) fn roll_back(&mut self) {
        while let Some(undo) = self.open.undo.pop() {
            let (index, freed) = match undo {
                Undo::Pushed { group: index, row } => {
                    let group = self.groups.get_mut(index);
                    (index, group.and_then(|group| release_last(group, row)))
                }
                Undo::Replaced { group: index, row, index: at, old } => {
                    let group = self.groups.get_mut(index);
                    (index, group.and_then(|group| restore(group, row, at, old)))
                }
                Undo::Released { group: index, block } => {
                    if let Some(group) = self.groups.get_mut(index) {
                        group.pool.retain(block);
                    }
                    (index, None)
                }
            };
            if let Some(block) = freed.filter(|_| self.spec.wipe_on_release()) {
                self.unwiped.push((index, block));
            }
        }
        self.close();
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

    fn close(&mut self) {
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

/// Takes a row's last block off; the block when nobody holds it any more.
fn release_last<Buf>(group: &mut Group<Buf>, row: u32) -> Option<BlockId> {
    let block = group.tables.pop(row)?;
    group.pool.release(block).then_some(block)
}

/// Puts a shared block back in the place of its copy; the copy when nobody holds it any more.
fn restore<Buf>(group: &mut Group<Buf>, row: u32, at: usize, old: BlockId) -> Option<BlockId> {
    group.pool.retain(old);
    let copy = group.tables.replace(row, at, old).ok().flatten()?;
    group.pool.release(copy).then_some(copy)
}
