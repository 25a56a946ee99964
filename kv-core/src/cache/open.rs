//! How a step is planned, reserved, committed and taken back.
//!
//! A cache has at most one open step. [`Step`](super::Step) keeps it open for the length of a
//! borrow; front ends whose callers come back layer by layer keep it open across calls.
use crate::backend::{Backend, Queue};
use crate::cache::demand::Exchanged;
use crate::cache::step::check_queries;
use crate::cache::undo::Undo;
use crate::cache::{Group, KvCache, StartOptions, StepInput};
use crate::error::{CacheError, PlanError};
use crate::geometry::QkvFormat;
use crate::ids::{BlockId, GroupId, LayerId, SequenceId};
use crate::num::{list_bytes, recycle, to_usize};
use crate::plan::{
    AttendArgs, AttentionOptions, AttentionPlan, BatchEntry, BlockCopy, CopyArgs, CopyPlan,
    PlanBuffers, PlannedSequence, SplitPolicy, WriteArgs, WritePlan,
};
use crate::spec::PublishAt;
use crate::storage::{Plane, PlaneView};
use crate::tensor::{TensorView, TensorViewMut};

/// What is known of one batch entry besides its counts.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct OpenEntry {
    /// Last new tokens that may be taken back.
    pub(super) drafts: u32,
    /// Tokens behind the new ones whose slots are taken too.
    pub(super) lookahead: u32,
}

/// The open step of a cache, and the buffers all its steps share.
#[derive(Debug)]
pub(super) struct OpenStep {
    is_open: bool,
    /// Whether a front end keeps the step open from call to call. Any other open step that a call
    /// of the cache finds was leaked.
    spans_calls: bool,
    /// Number of this step, to mark sequences with.
    number: u64,
    pub(super) batch: Vec<BatchEntry>,
    /// Rows of the entries, and of those of a longer batch before.
    rows: Vec<u32>,
    /// What else is known of the batch, entry by entry.
    pub(super) entries: Vec<OpenEntry>,
    /// Plans, by group.
    plans: Vec<PlanBuffers>,
    pub(super) positions: Vec<u32>,
    /// Whether a layer was written, by layer.
    written: Vec<bool>,
    pub(super) num_written: usize,
    pub(super) undo: Vec<Undo>,
    /// Entries that were last added and that need blocks, or others than they have.
    pub(super) growing: Vec<usize>,
    pub(super) exchanged: Exchanged,
    /// Blocks that were exchanged for a copy, and that nobody else holds: let go when the step
    /// ends.
    pub(super) kept: Vec<(usize, BlockId)>,
    /// Row, entry and filled slots of blocks that are written though others may reuse them; of one
    /// group, while its blocks are taken.
    pub(super) stored_targets: Vec<(u32, u32, u32)>,
    /// Copy-on-write, by group.
    pub(super) copies: Vec<Vec<BlockCopy>>,
}

impl OpenStep {
    pub(super) fn new(groups: usize) -> Self {
        Self {
            is_open: false,
            spans_calls: false,
            number: 0,
            batch: Vec::new(),
            rows: Vec::new(),
            entries: Vec::new(),
            growing: Vec::new(),
            exchanged: Exchanged::default(),
            kept: Vec::new(),
            stored_targets: Vec::new(),
            plans: (0..groups).map(|_| PlanBuffers::default()).collect(),
            positions: Vec::new(),
            written: Vec::new(),
            num_written: 0,
            undo: Vec::new(),
            copies: (0..groups).map(|_| Vec::new()).collect(),
        }
    }

    /// Bytes that the lists and plans of steps take.
    pub(super) fn host_bytes(&self) -> usize {
        let lists = [
            list_bytes(&self.batch),
            list_bytes(&self.rows),
            list_bytes(&self.entries),
            list_bytes(&self.positions),
            list_bytes(&self.undo),
            list_bytes(&self.growing),
            list_bytes(&self.kept),
            list_bytes(&self.stored_targets),
        ];
        let plans = self.plans.iter().map(PlanBuffers::host_bytes);
        let copies = self.copies.iter().map(list_bytes);
        lists.into_iter().chain(plans).chain(copies).fold(0, usize::saturating_add)
    }

    pub(super) fn entry(&self, number: usize) -> OpenEntry {
        self.entries.get(number).copied().unwrap_or_default()
    }

    pub(super) fn is_written(&self, layer: LayerId) -> bool {
        self.written.get(usize::from(layer.0)).copied().unwrap_or(false)
    }

    pub(super) fn set_written(&mut self, layer: LayerId) {
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
    /// Takes back a step that its caller leaked ([`std::mem::forget`]): a [`Step`](super::Step)
    /// borrows the cache, so no call finds one open that can still be ended.
    pub(super) fn recover(&mut self) {
        if self.open.is_open && !self.open.spans_calls {
            self.roll_back();
        }
    }

    /// Begins a step that ends with the borrow of its [`Step`](super::Step).
    pub(super) fn begin_borrowed(&mut self, inputs: &[StepInput<'_>]) -> Result<(), CacheError> {
        self.recover();
        self.begin_open(inputs)?;
        self.open.spans_calls = false;
        Ok(())
    }

    /// Begins a step that stays open from call to call, for front ends.
    pub(crate) fn begin_open(&mut self, inputs: &[StepInput<'_>]) -> Result<(), CacheError> {
        if self.open.is_open {
            let problem = "a step is open already";
            return Err(PlanError::State { operation: "begin step", problem }.into());
        }
        self.wipe()?;
        self.open.number = self.open.number.wrapping_add(1).max(1);
        recycle(&mut self.open.batch);
        recycle(&mut self.open.entries);
        recycle(&mut self.open.positions);
        recycle(&mut self.open.growing);
        self.read_inputs(inputs)?;
        (self.open.is_open, self.open.spans_calls) = (true, true);
        let planned = self.take_inputs(0);
        if planned.is_err() {
            self.roll_back();
        }
        planned
    }

    /// Takes one more sequence into the open step, or changes nothing.
    pub(super) fn add_open(&mut self, input: StepInput<'_>) -> Result<(), CacheError> {
        self.check_open("add")?;
        if self.open.num_written > 0 {
            let problem = "a layer is written already";
            return Err(PlanError::State { operation: "add", problem }.into());
        }
        let first = self.open.batch.len();
        let (positions, undo) = (self.open.positions.len(), self.open.undo.len());
        let inputs = [input];
        self.open.growing.clear();
        let added = self
            .read_inputs(&inputs)
            .map_err(CacheError::from)
            .and_then(|()| self.take_inputs(first));
        if let Err(refused) = &added {
            self.undo_to(undo);
            self.open.batch.truncate(first);
            self.open.entries.truncate(first);
            self.open.positions.truncate(positions);
            self.open.growing.clear();
            // A second mention is refused, the first one stays.
            if !matches!(refused, CacheError::Plan(PlanError::DuplicateSequence { .. })) {
                self.sequences.unmark(input.sequence);
            }
            // What the failed entry left in the plans goes; the others fit as before.
            self.plan_open()?;
        }
        added
    }

    /// Starts a sequence that goes away with the open step if it is rolled back.
    pub(super) fn start_open(
        &mut self,
        sequence: SequenceId,
        prompt: &[u32],
        options: StartOptions<'_>,
    ) -> Result<usize, CacheError> {
        self.check_open("start")?;
        let (_, started) = self.start_row(sequence, prompt, options)?;
        self.open.undo.push(Undo::Started { sequence });
        Ok(to_usize(started))
    }

    /// Reserves and plans the batch from entry `first` on.
    fn take_inputs(&mut self, first: usize) -> Result<(), CacheError> {
        let copied: Vec<usize> =
            if first == 0 { Vec::new() } else { self.open.copies.iter().map(Vec::len).collect() };
        self.reserve(first)?;
        self.wipe()?;
        self.plan_open()?;
        self.list_positions(first);
        self.copy_open(&copied)?;
        if self.spec.publish_at() == PublishAt::Begin {
            self.store_early(first);
        }
        Ok(())
    }

    /// Checks inputs and adds them to the batch; changes no table.
    fn read_inputs(&mut self, inputs: &[StepInput<'_>]) -> Result<(), PlanError> {
        let max = self.spec.max_seq_len();
        self.open.batch.reserve(inputs.len());
        self.open.entries.reserve(inputs.len());
        let mut only_asks = false;
        for input in inputs {
            let sequence = input.sequence;
            // Batches follow each other in the same order, mostly.
            let place = self.open.batch.len();
            let guess = self.open.rows.get(place).copied().unwrap_or(0);
            let (row, state) = self.sequences.mark(sequence, guess, self.open.number)?;
            let (len, own_end) = (state.len, state.own_end);
            let (new_tokens, queries) = input.counts(len, max)?;
            let details = input.details();
            if new_tokens > 0 {
                // Tokens of a step that never happens are no harm: the next ones replace them.
                self.sequences.note(row, len, input.ids(), &self.chains);
                let end = len.saturating_add(new_tokens).saturating_add(details.lookahead);
                if end > own_end {
                    self.open.growing.push(place);
                }
            } else {
                only_asks |= queries > 0;
            }
            self.open.batch.push(BatchEntry { row, cached: len, new_tokens, queries });
            self.open.entries.push(details);
            match self.open.rows.get_mut(place) {
                Some(known) => *known = row,
                None => self.open.rows.push(row),
            }
            if self.has_windows && queries > new_tokens {
                let first = len.saturating_add(new_tokens).saturating_sub(queries);
                self.check_in_windows(sequence, row, (first, len))?;
            }
        }
        if only_asks { check_queries(&self.open.batch, &self.spec) } else { Ok(()) }
    }

    /// Lists the positions of queries, of entries from `first` on. The batch has its blocks by
    /// then, so that it is no larger than the pools allow.
    fn list_positions(&mut self, first: usize) {
        let OpenStep { batch, positions, .. } = &mut self.open;
        let batch = batch.get(first..).unwrap_or_default();
        // Query i stands at kv_len - queries + i; queries beyond the keys stand at 0.
        let kv_len = |entry: &BatchEntry| entry.cached.saturating_add(entry.new_tokens);
        let first = |entry: &BatchEntry| kv_len(entry).saturating_sub(entry.queries);
        if batch.iter().all(|entry| entry.queries == 1) {
            positions.extend(batch.iter().map(first));
            return;
        }
        for entry in batch {
            let first = first(entry);
            positions.extend((0..entry.queries).map(|i| first.saturating_add(i)));
        }
    }

    /// Offers the blocks that entries from `first` on are about to fill.
    fn store_early(&mut self, first: usize) {
        for number in first..self.open.batch.len() {
            let Some(&BatchEntry { row, cached, new_tokens, .. }) = self.open.batch.get(number)
            else {
                continue;
            };
            let len = cached.saturating_add(new_tokens);
            let certain = len.saturating_sub(self.open.entry(number).drafts);
            let store_at = self.sequences.at_mut(row).map_or(u32::MAX, |state| state.store_at);
            if new_tokens > 0 && certain >= store_at {
                self.store_full(row, (certain, len), true);
            }
        }
    }

    fn plan_open(&mut self) -> Result<(), CacheError> {
        let capabilities = self.backend.capabilities();
        let determinism = self.spec.determinism();
        for (group, plans) in self.groups.iter().zip(&mut self.open.plans) {
            let [layout, _] = group.storage.layouts();
            let workers = capabilities.workers_of_heads(layout.num_kv_heads());
            let policy = SplitPolicy { workers, determinism };
            plans.fill_private(layout, &group.tables, &self.open.batch, policy)?;
        }
        let Self { queue, groups, open, .. } = self;
        for ((group, plans), id) in groups.iter().zip(&open.plans).zip(0..) {
            let [layout, _] = group.storage.layouts();
            let write = plans.write_plan(layout, &group.tables);
            let attend = plans.attention_plan(layout, &group.tables);
            queue.prepare(GroupId(id), &write, &attend)?;
        }
        Ok(())
    }

    /// Copies blocks, but for the first `done` of each group.
    fn copy_open(&mut self, done: &[usize]) -> Result<(), CacheError> {
        let done = done.iter().copied().chain(std::iter::repeat(0));
        for ((group, copies), done) in self.groups.iter().zip(&self.open.copies).zip(done) {
            let Some(copies) = copies.get(done..).filter(|copies| !copies.is_empty()) else {
                continue;
            };
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
        if !self.open.spans_calls {
            // Front ends let a late layer see zeros, as what they stand for does.
            self.check_written_in(layer, options)?;
        }
        let Self { queue, groups, open, .. } = self;
        let parts = groups.get(index).zip(open.plans.get(index));
        let (group, plan) = parts.ok_or(PlanError::LayerUnallocated { layer })?;
        let layer_planes = planes(group, layer, in_group)?;
        if open.brings_tokens() && !open.is_written(layer) {
            return Err(PlanError::AttendBeforeWrite { layer }.into());
        }
        check_window(group, options)?;
        let [layout, _] = group.storage.layouts();
        let plan = plan.attention_plan(layout, &group.tables);
        let args = AttendArgs::new(&plan, q, out, lse, layer_planes, *options)?;
        Ok(queue.attend(&plan, args)?)
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

    pub(super) fn close(&mut self) {
        self.open.is_open = false;
        recycle(&mut self.open.undo);
        self.open.exchanged.clear();
        recycle(&mut self.open.kept);
        recycle(&mut self.open.stored_targets);
        self.open.copies.iter_mut().for_each(recycle);
        self.open.written.iter_mut().for_each(|written| *written = false);
        self.open.num_written = 0;
    }
}

/// Attention must not see more than a group keeps.
fn check_window<Buf>(group: &Group<Buf>, options: &AttentionOptions<'_>) -> Result<(), PlanError> {
    let Some(window) = group.window else {
        return Ok(());
    };
    if options.window().is_none_or(|left| left > window.left) {
        let problem = "is none, or larger than what the group of the layer keeps";
        return Err(PlanError::Option { option: "window_left", problem });
    }
    if options.num_sink_tokens() > window.sink_tokens {
        let problem = "are more than what the group of the layer keeps";
        return Err(PlanError::Option { option: "sink_tokens", problem });
    }
    Ok(())
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
