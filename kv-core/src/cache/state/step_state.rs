//! The open step: its batch, its plans, and the undo of each change.
use crate::cache::state::block_demand::Exchanged;
use crate::cache::state::undo::Undo;
use crate::cache::state::{CacheState, GROUP, Group};
use crate::error::{PlanError, StateProblem};
use crate::ids::{BlockId, GroupId};
use crate::invariant::Invariant;
use crate::num::{list_bytes, recycle};
use crate::plan::{AttentionPlan, BatchEntry, BlockCopy, PlanBuffers, PlannedSequence, WritePlan};

/// Properties of one batch entry besides its counts.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct OpenEntry {
    /// Last new tokens that may be removed.
    pub(super) drafts: u32,
    /// Tokens after the new ones whose slots are taken too.
    pub(super) lookahead: u32,
}

/// The open step of a cache, and the buffers all its steps share.
#[derive(Debug)]
pub(super) struct OpenStep {
    pub(super) is_open: bool,
    /// Number of this step, with which sequences are marked.
    pub(super) number: u64,
    pub(super) batch: Vec<BatchEntry>,
    /// Rows of the entries, followed by those of an earlier, longer batch.
    pub(super) rows: Vec<u32>,
    /// Other properties, entry by entry.
    pub(super) entries: Vec<OpenEntry>,
    /// Plans, by group.
    pub(super) plans: Vec<PlanBuffers>,
    pub(super) positions: Vec<u32>,
    /// Queries of the batch.
    pub(super) total_q: u64,
    pub(super) undo: Vec<Undo>,
    /// Entries added last that need blocks, or other blocks than they have.
    pub(super) growing: Vec<usize>,
    pub(super) exchanged: Exchanged,
    /// Blocks that were replaced by a copy and have no other holder: released when the step ends.
    pub(super) kept: Vec<(usize, BlockId)>,
    /// Row, entry and filled slots of blocks that are written although they are in the index; of
    /// one group, while its blocks are allocated.
    pub(super) stored_targets: Vec<(u32, u32, u32)>,
    /// Copy-on-write, by group.
    pub(super) copies: Vec<Vec<BlockCopy>>,
}

/// Positions in each list of the open step from which on entries were added.
#[derive(Debug, Default)]
pub(crate) struct Added {
    pub(in crate::cache) first: usize,
    pub(super) positions: usize,
    pub(super) total_q: u64,
    pub(super) undo: usize,
    /// Copies listed before, by group; empty for a step that begins.
    pub(super) copies: Vec<usize>,
}

const ADDED: &str = "entries are added at the end of the batch";

impl OpenStep {
    pub(super) fn new(groups: usize) -> Self {
        Self {
            is_open: false,
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
            total_q: 0,
            undo: Vec::new(),
            copies: (0..groups).map(|_| Vec::new()).collect(),
        }
    }

    /// Returns the bytes of the lists and plans of steps.
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
        lists.into_iter().chain(plans).chain(copies).sum()
    }

    /// Empties the lists for a step that begins.
    pub(super) fn begin(&mut self) {
        self.number = self.number.wrapping_add(1).max(1);
        recycle(&mut self.batch);
        recycle(&mut self.entries);
        recycle(&mut self.positions);
        self.total_q = 0;
        recycle(&mut self.growing);
    }

    pub(super) fn close(&mut self) {
        self.is_open = false;
        recycle(&mut self.undo);
        self.exchanged.clear();
        recycle(&mut self.kept);
        recycle(&mut self.stored_targets);
        self.copies.iter_mut().for_each(recycle);
    }

    /// Returns the current end of all lists.
    pub(super) fn end(&self) -> Added {
        Added {
            first: self.batch.len(),
            positions: self.positions.len(),
            total_q: self.total_q,
            undo: self.undo.len(),
            copies: self.copies.iter().map(Vec::len).collect(),
        }
    }

    pub(super) fn entry(&self, number: usize) -> (BatchEntry, OpenEntry) {
        let entry = self.batch.get(number).zip(self.entries.get(number));
        let (entry, details) = entry.invariant("every entry of a batch has its details");
        (*entry, *details)
    }

    /// Returns the entries from `first` on.
    pub(super) fn batch_from(&self, first: usize) -> &[BatchEntry] {
        self.batch.get(first..).invariant(ADDED)
    }

    /// Lists the positions of queries, of entries from `first` on. Their blocks are allocated by
    /// then, so that the list is no larger than the pools allow.
    pub(super) fn list_positions(&mut self, first: usize) {
        let Self { batch, positions, .. } = self;
        let batch = batch.get(first..).invariant(ADDED);
        // Query i has position kv_len - queries + i; queries beyond the keys have position 0.
        let kv_len = |entry: &BatchEntry| entry.cached + entry.new_tokens;
        let first = |entry: &BatchEntry| kv_len(entry).saturating_sub(entry.queries);
        if batch.iter().all(|entry| entry.queries == 1) {
            positions.extend(batch.iter().map(first));
            return;
        }
        for entry in batch {
            let first = first(entry);
            positions.extend(first..first + entry.queries);
        }
    }
}

impl CacheState {
    /// Returns whether a step was begun and neither committed nor rolled back.
    pub fn is_step_open(&self) -> bool {
        self.open.is_open
    }
    /// Returns the position of every query of the open step in its sequence, entries one after
    /// another; of the last step if none is open.
    pub(in crate::cache) fn positions(&self) -> &[u32] {
        &self.open.positions
    }
    /// Returns the plans of the open step for one group, of the last step if none is open; `None`
    /// for an unknown group.
    pub(in crate::cache) fn plans(
        &self,
        group: GroupId,
    ) -> Option<(WritePlan<'_>, AttentionPlan<'_>)> {
        let group = self.find_group(group)?;
        Some((self.write_plan(group.id), self.attention_plan(group.id)))
    }

    pub(in crate::cache) fn write_plan(&self, index: usize) -> WritePlan<'_> {
        let (group, plans) = self.planned(index);
        plans.write_plan(group.layout(), &group.tables)
    }
    pub(in crate::cache) fn attention_plan(&self, index: usize) -> AttentionPlan<'_> {
        let (group, plans) = self.planned(index);
        plans.attention_plan(group.layout(), &group.tables)
    }
    fn planned(&self, index: usize) -> (&Group, &PlanBuffers) {
        (self.groups.at(index), self.open.plans.get(index).invariant(GROUP))
    }
    /// Returns the batch of the open step as planned for the first group.
    pub(in crate::cache) fn planned_sequences(&self) -> &[PlannedSequence] {
        self.planned(0).1.sequences()
    }
    pub(in crate::cache) fn batch(&self) -> &[BatchEntry] {
        &self.open.batch
    }
    /// Returns whether the open step writes any token.
    pub(in crate::cache) fn brings_tokens(&self) -> bool {
        self.open.batch.iter().any(|entry| entry.new_tokens > 0)
    }

    /// Refuses a call that needs an open step.
    pub(in crate::cache) fn check_open(&self, operation: &'static str) -> Result<(), PlanError> {
        if self.open.is_open {
            return Ok(());
        }
        Err(PlanError::State { operation, problem: StateProblem::NoStep })
    }
    /// Refuses a call that an open step could not undo, or that would change its undo.
    pub(in crate::cache) fn check_closed(&self, operation: &'static str) -> Result<(), PlanError> {
        if !self.open.is_open {
            return Ok(());
        }
        Err(PlanError::State { operation, problem: StateProblem::StepOpen })
    }
}
