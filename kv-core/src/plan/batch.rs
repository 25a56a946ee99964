//! The batch of a step: table rows and token ranges.
use std::sync::atomic::{AtomicU64, Ordering};

use crate::block::BlockTables;
use crate::error::PlanError;
use crate::geometry::PlaneLayout;
use crate::ids::{BlockId, Slot};
use crate::num::{list_bytes, recycle, to_u32, to_usize};
use crate::plan::growth::Growth;
use crate::plan::split::{Determinism, KvSplit, Splits};
use crate::plan::{AttentionPlan, WritePlan};
use crate::slot_map::SlotMap;

/// One sequence of a step, before it is checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "a literal names each of the four numbers")]
pub struct BatchEntry {
    /// Row of the sequence in the block tables.
    pub row: u32,
    /// Tokens cached before this step.
    pub cached: u32,
    /// Tokens whose K and V this step writes.
    pub new_tokens: u32,
    /// Queries that attend; equals `new_tokens` for self-attention.
    pub queries: u32,
}

/// One checked batch entry.
///
/// All numbers count tokens. Queries are aligned bottom-right: query `i` of `q_len` stands at
/// position `kv_len - q_len + i`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct PlannedSequence {
    /// Row of the sequence in the block tables.
    pub row: u32,
    /// First row of its queries in a ragged tensor.
    pub q_start: u32,
    /// Queries.
    pub q_len: u32,
    /// First row of its new K and V in a ragged tensor.
    pub new_start: u32,
    /// Tokens written by this step, at positions `kv_len - new_len..kv_len`.
    pub new_len: u32,
    /// Valid tokens, this step's included.
    pub kv_len: u32,
    /// Leading tokens that are quantised, or in the full-precision prefix, once the step is
    /// written; `kv_len` without a [tail](crate::backend::SlotMap).
    pub coded: u32,
    /// The same before the step. Cached tokens between the two are in the tail and are quantised by
    /// this step.
    pub coded_before: u32,
    /// Index in the block table at which the blocks of the old tail lie while the step is open:
    /// after all others. Meaningless unless cached tokens are quantised.
    pub sealed_index: u32,
    /// First of its splits.
    pub split_start: u32,
    /// Number of its splits: 0 only for a sequence without queries or without keys.
    pub num_splits: u32,
}

/// The plans of one group for one batch, from which checked plans borrow; kept across steps.
#[derive(Debug, Clone, Default)]
pub struct PlanBuffers {
    sequences: Vec<PlannedSequence>,
    splits: Splits,
    slots: Vec<Slot>,
    id: PlanId,
    determinism: Determinism,
    stamps: Vec<u64>,
    stamp: u64,
    /// Whether blocks are checked for two writers.
    claims: bool,
    total_q: u32,
    total_new: u32,
    q_len_max: u32,
    new_len_max: u32,
}

/// The identity of the content of one batch's plans. All layers of a step share the plans, so a
/// backend that keeps a copy on its device compares IDs. No two batches of a process have the same
/// ID.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct PlanId(u64);

impl PlanId {
    fn next() -> Self {
        static LAST: AtomicU64 = AtomicU64::new(0);
        Self(LAST.fetch_add(1, Ordering::Relaxed).wrapping_add(1))
    }
}

/// The number of workers, and the rule by which a plan splits long contexts.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SplitPolicy {
    pub(crate) workers: u32,
    pub(crate) determinism: Determinism,
}

impl PlanBuffers {
    /// Checks a batch against its tables and makes the plans of one group.
    ///
    /// Contexts are split for `workers` parallel workers, each of which processes one kv head of a
    /// split at a time, or by position alone for [`Determinism::BatchInvariant`].
    ///
    /// # Errors
    /// [`PlanError::TableTooShort`] when a sequence has more tokens than its blocks hold,
    /// [`PlanError::BlockShared`] when two entries would write the same block,
    /// [`PlanError::TooMany`] when the tokens of the batch do not fit `u32`,
    /// [`PlanError::LengthMismatch`] for tables of another pool.
    pub fn plan<'p>(
        &'p mut self,
        layout: &'p PlaneLayout,
        tables: &'p BlockTables,
        batch: &[BatchEntry],
        workers: u32,
        determinism: Determinism,
    ) -> Result<(WritePlan<'p>, AttentionPlan<'p>), PlanError> {
        self.fill(layout, tables, batch, (SplitPolicy { workers, determinism }, true))?;
        Ok((self.write_plan(layout, tables), self.attention_plan(layout, tables)))
    }

    /// Returns the ID of the last plans.
    pub fn id(&self) -> PlanId {
        self.id
    }
    /// Returns the inputs of KV splits.
    pub fn determinism(&self) -> Determinism {
        self.determinism
    }
    /// Returns the batch, in the caller's order.
    pub fn sequences(&self) -> &[PlannedSequence] {
        &self.sequences
    }
    /// Returns the KV splits, sequence by sequence.
    pub fn splits(&self) -> &[KvSplit] {
        self.splits.list()
    }
    /// Returns the first slot of each new token, entries one after another.
    pub fn slots(&self) -> &[Slot] {
        &self.slots
    }
    /// Returns the queries of the whole batch.
    pub fn total_q(&self) -> u32 {
        self.total_q
    }
    /// Returns the new tokens of the whole batch.
    pub fn total_new(&self) -> u32 {
        self.total_new
    }
    /// Returns the largest number of queries of an entry.
    pub fn q_len_max(&self) -> u32 {
        self.q_len_max
    }
    /// Returns the largest number of new tokens of an entry.
    pub fn new_len_max(&self) -> u32 {
        self.new_len_max
    }

    /// Does what [`Self::plan`] does for a caller that guarantees that no two entries write one
    /// block.
    pub(crate) fn fill_private(
        &mut self,
        layout: &PlaneLayout,
        tables: &BlockTables,
        batch: &[BatchEntry],
        policy: SplitPolicy,
    ) -> Result<(), PlanError> {
        self.fill(layout, tables, batch, (policy, cfg!(debug_assertions)))
    }

    /// As [`Self::fill_private`], where the entries before `first` are planned already and their
    /// blocks are unchanged: only the others are listed. Contexts are split anew only when the
    /// batch has grown by an eighth, so that many calls cost as much as one for the whole batch.
    pub(crate) fn extend_private(
        &mut self,
        layout: &PlaneLayout,
        tables: &BlockTables,
        (batch, first): (&[BatchEntry], usize),
        policy: SplitPolicy,
    ) -> Result<(), PlanError> {
        if first == 0 || self.sequences.len() != first {
            return self.fill_private(layout, tables, batch, policy);
        }
        self.id = PlanId::next();
        if let Err(refused) = self.list(layout, tables, (batch, first)) {
            self.clear();
            return Err(refused);
        }
        self.splits.extend((&mut self.sequences, first), layout, policy);
        debug_assert!(
            self.is_plan_of(layout, tables, batch, policy),
            "the batch changed before {first}"
        );
        Ok(())
    }

    /// Returns whether a batch that is planned as a whole has these plans.
    fn is_plan_of(
        &self,
        layout: &PlaneLayout,
        tables: &BlockTables,
        batch: &[BatchEntry],
        policy: SplitPolicy,
    ) -> bool {
        let mut whole = Self::default();
        whole.fill_private(layout, tables, batch, policy).is_ok()
            && (&whole.sequences, whole.splits.list(), &whole.slots)
                == (&self.sequences, self.splits.list(), &self.slots)
            && (whole.total_q, whole.total_new, whole.q_len_max, whole.new_len_max)
                == (self.total_q, self.total_new, self.q_len_max, self.new_len_max)
    }

    fn fill(
        &mut self,
        layout: &PlaneLayout,
        tables: &BlockTables,
        batch: &[BatchEntry],
        (policy, claims): (SplitPolicy, bool),
    ) -> Result<(), PlanError> {
        self.clear();
        self.id = PlanId::next();
        self.determinism = policy.determinism;
        self.claims = claims;
        layout.check_pool(tables.num_blocks())?;
        if claims {
            self.stamps.resize(to_usize(tables.num_blocks()), 0);
        }
        self.sequences.reserve(batch.len());
        // Checked below, where they are listed.
        let new = batch.iter().fold(0_u32, |n, entry| n.saturating_add(entry.new_tokens));
        // Each token has a slot of its own, or the batch is refused.
        let slots = layout.num_blocks() * layout.block_size();
        self.slots.reserve(to_usize(new.min(slots)));
        if let Err(refused) = self.list(layout, tables, (batch, 0)) {
            self.clear();
            return Err(refused);
        }
        self.splits.extend((&mut self.sequences, 0), layout, policy);
        Ok(())
    }

    /// Returns the bytes of host memory of the lists.
    pub fn host_bytes(&self) -> usize {
        let lists =
            [list_bytes(&self.sequences), self.splits.host_bytes(), list_bytes(&self.slots)];
        list_bytes(&self.stamps) + lists.iter().sum::<usize>()
    }

    /// Drops the batch. The memory stays for the next one.
    pub(crate) fn clear(&mut self) {
        recycle(&mut self.sequences);
        self.splits.clear();
        recycle(&mut self.slots);
        self.stamp = self.stamp.wrapping_add(1).max(1);
        (self.total_q, self.total_new, self.q_len_max, self.new_len_max) = (0, 0, 0, 0);
    }

    pub(crate) fn write_plan<'p>(
        &'p self,
        layout: &'p PlaneLayout,
        tables: &'p BlockTables,
    ) -> WritePlan<'p> {
        WritePlan::from_checked(layout, tables, self)
    }

    pub(crate) fn attention_plan<'p>(
        &'p self,
        layout: &'p PlaneLayout,
        tables: &'p BlockTables,
    ) -> AttentionPlan<'p> {
        AttentionPlan::from_checked(layout, tables, self)
    }

    /// Checks the entries from `first` on and lists them with the slots of their new tokens.
    fn list(
        &mut self,
        layout: &PlaneLayout,
        tables: &BlockTables,
        (batch, first): (&[BatchEntry], usize),
    ) -> Result<(), PlanError> {
        let map = layout.slot_map();
        let mut entries = batch.iter().enumerate().skip(first);
        if map.is_plain() {
            // Nearly every cache: unneeded work stays out of the loop.
            return entries.try_for_each(|(index, entry)| {
                let table = tables.row(entry.row);
                let growth = |kv_len| Growth::without_tail(map, entry.cached, kv_len);
                let (kv_len, _) = self.push(index, (table, map), entry, growth)?;
                self.claim_plain(table, map, (entry.cached, kv_len))
            });
        }
        entries.try_for_each(|(index, entry)| {
            let (table, coded) = (tables.row(entry.row), tables.coded(entry.row));
            let growth = |kv_len| Growth::new(map, coded, entry.cached, kv_len);
            let (kv_len, growth) = self.push(index, (table, map), entry, growth)?;
            self.claim_places(table, map, &growth, (entry.cached, kv_len))
        })
    }

    /// Lists an entry with its row of the tables. Returns its length and its growth.
    #[inline]
    fn push(
        &mut self,
        index: usize,
        (table, map): (&[BlockId], &SlotMap),
        entry: &BatchEntry,
        growth: impl Fn(u32) -> Growth,
    ) -> Result<(u32, Growth), PlanError> {
        let too_many =
            |got| PlanError::TooMany { what: "tokens in a step", got, max: u64::from(u32::MAX) };
        let sum =
            |a: u32, b: u32| a.checked_add(b).ok_or_else(|| too_many(u64::from(a) + u64::from(b)));
        let kv_len = sum(entry.cached, entry.new_tokens)?;
        let growth = growth(kv_len);
        if to_usize(growth.blocks()) > table.len() {
            let (blocks, block_size) = (table.len(), map.block_size());
            return Err(PlanError::TableTooShort { index, tokens: kv_len, blocks, block_size });
        }
        let total_q = sum(self.total_q, entry.queries)?;
        let total_new = sum(self.total_new, entry.new_tokens)?;
        self.sequences.push(PlannedSequence {
            row: entry.row,
            q_start: self.total_q,
            q_len: entry.queries,
            new_start: self.total_new,
            new_len: entry.new_tokens,
            kv_len,
            coded: growth.coded,
            coded_before: growth.coded_before,
            // After reserved blocks too.
            sealed_index: to_u32(table.len()) - growth.tail_blocks_before,
            split_start: 0,
            num_splits: 0,
        });
        (self.total_q, self.total_new) = (total_q, total_new);
        self.q_len_max = self.q_len_max.max(entry.queries);
        self.new_len_max = self.new_len_max.max(entry.new_tokens);
        Ok((kv_len, growth))
    }

    /// Claims the blocks of new tokens and lists their slots, if each token has one slot.
    #[inline]
    fn claim_plain(
        &mut self,
        table: &[BlockId],
        map: &SlotMap,
        (cached, kv_len): (u32, u32),
    ) -> Result<(), PlanError> {
        let block_size = map.block_size();
        let mut position = cached;
        while position < kv_len {
            let index = map.full_blocks(position);
            let begin = index * block_size;
            let end = begin + (kv_len - begin).min(block_size);
            let block = table[to_usize(index)].0;
            self.claim(block)?;
            // `num_blocks * block_size` fits u32, by the layout's constructor.
            let first = block * block_size;
            let slot = |position: u32| Slot(first + (position - begin));
            if end - position == 1 {
                self.slots.push(slot(position));
            } else {
                self.slots.extend((position..end).map(slot));
            }
            position = end;
        }
        Ok(())
    }

    fn claim_places(
        &mut self,
        table: &[BlockId],
        map: &SlotMap,
        growth: &Growth,
        (cached, kv_len): (u32, u32),
    ) -> Result<(), PlanError> {
        let block_size = map.block_size();
        // A tail that is quantised is written to the block it was waiting for.
        let mut claimed = None;
        if growth.seals() {
            let index = map.place_in(growth.tail_begin, growth.coded).index;
            let block = table[to_usize(index)].0;
            self.claim(block)?;
            claimed = Some(index);
        }
        for position in cached..kv_len {
            let place = map.place_in(position, growth.coded);
            let block = table[to_usize(place.index)].0;
            if claimed != Some(place.index) {
                self.claim(block)?;
                claimed = Some(place.index);
            }
            // `num_blocks * block_size` fits u32, by the layout's constructor.
            self.slots.push(Slot(block * block_size + place.inside));
        }
        Ok(())
    }

    /// Marks a block as written by this batch: two writers of one block would race.
    #[inline]
    fn claim(&mut self, block: u32) -> Result<(), PlanError> {
        if !self.claims {
            return Ok(());
        }
        // A table's entries are below its pool's size.
        let stamp = &mut self.stamps[to_usize(block)];
        if *stamp == self.stamp {
            return Err(PlanError::BlockShared { block });
        }
        *stamp = self.stamp;
        Ok(())
    }
}
