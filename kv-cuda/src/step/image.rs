//! One batch's lists on the device.
use std::sync::Arc;

use kv_core::DeviceError;
use kv_core::block::BlockTables;
use kv_core::plan::{PlanBuffers, PlanId};

use super::tables::{Change, DeviceTables};
use super::{Extent, StepLimits, StepPlan, Way};
use crate::buffer::CudaBuffer;
use crate::decode::{DecodePlan, Work, room};
use crate::gpu::{Gpu, Launch};
use crate::num::{to_u32, to_u64, to_usize};
use crate::params::{
    Address, Counts, DecodePlanParams, Entry, Piece, Plan, Sequence, Split, TableParams,
};
use crate::scratch::{At, Pack, Scratch};

/// The lists of one batch, and the tables they point into.
#[derive(Debug)]
pub(super) struct Image {
    gpu: Arc<dyn Gpu>,
    id: PlanId,
    pub(super) used: u64,
    memory: Scratch,
    /// The lists of batches beyond the limits.
    larger: Scratch,
    /// Changes of the tables, of which there may be any number.
    changes: Scratch,
    tables: DeviceTables,
    /// Whether its lists keep their addresses.
    is_fixed: bool,
    step: StepPlan,
    /// The batch, for plans that are made on the host: those that no captured launch needs.
    sequences: Vec<Sequence>,
    plan: DecodePlan,
    /// Layers that decode alike share a plan: one, or one for every window.
    decodes: Vec<DecodeImage>,
}

/// How the batch is decoded.
#[derive(Debug)]
struct DecodeImage {
    work: Work,
    memory: Scratch,
    pieces: Address,
    starts: Address,
    /// Whether it is this batch's.
    is_made: bool,
}

/// Ways of decoding that are kept.
const DECODES_KEPT: usize = 16;

/// How many elements each list has room for.
#[derive(Debug, Clone, Copy)]
struct Room {
    sequences: usize,
    splits: usize,
    slots: usize,
}

impl Image {
    pub(super) fn new(gpu: &Arc<dyn Gpu>) -> Self {
        Self {
            gpu: Arc::clone(gpu),
            id: super::no_plans(),
            used: 0,
            memory: Scratch::new(gpu),
            larger: Scratch::new(gpu),
            changes: Scratch::new(gpu),
            tables: DeviceTables::new(gpu),
            is_fixed: false,
            step: StepPlan::default(),
            sequences: Vec::new(),
            plan: DecodePlan::default(),
            decodes: Vec::new(),
        }
    }

    pub(super) fn holds(&self, id: PlanId) -> bool {
        self.id == id && id != super::no_plans()
    }
    pub(super) fn step(&self) -> StepPlan {
        self.step
    }

    /// Why launches of this batch cannot be captured or replayed, `None` where they can.
    pub(super) fn not_fixed(&self, limits: &StepLimits) -> Option<String> {
        let unknown = || "the step is not one of these limits".to_owned();
        (!self.is_fixed).then(|| within(&self.step.extent, limits).unwrap_or_else(unknown))
    }

    /// All memory that captured launches may name.
    pub(super) fn memory(&self) -> Vec<CudaBuffer> {
        let decodes = self.decodes.iter().filter_map(|decode| decode.memory.memory());
        let own = [self.memory.memory(), self.tables.memory()].into_iter().flatten();
        own.chain(decodes).cloned().collect()
    }

    /// The batch is nobody's until its copy stands.
    fn forget(&mut self) {
        self.id = super::no_plans();
        for decode in &mut self.decodes {
            decode.is_made = false;
        }
    }

    /// Addresses of the pieces and starts of this batch's decoding, planned at the first call.
    pub(super) fn decode(
        &mut self,
        way: &mut Way<'_>,
        work: &Work,
    ) -> Result<(Address, Address), DeviceError> {
        let extent = self.step.extent;
        let known = self.decodes.iter().position(|decode| decode.work == *work);
        let index = known.unwrap_or_else(|| {
            if self.decodes.len() >= DECODES_KEPT {
                self.decodes.clear();
            }
            let memory = Scratch::new(&self.gpu);
            let (pieces, starts) = (0, 0);
            self.decodes.push(DecodeImage { work: *work, memory, pieces, starts, is_made: false });
            self.decodes.len().saturating_sub(1)
        });
        let Some(decode) = self.decodes.get_mut(index) else {
            return Ok((0, 0));
        };
        if decode.is_made {
            return Ok((decode.pieces, decode.starts));
        }
        let room = room(work, &extent);
        let pieces = room.pieces.saturating_mul(to_u64(size_of::<Piece>()));
        let starts = u64::from(work.slots).saturating_add(1).saturating_mul(4);
        decode.pieces = decode.memory.reserve(pieces.saturating_add(starts))?;
        decode.starts = decode.pieces.saturating_add(pieces);
        if self.is_fixed {
            plan_on_device(way, (self.step.plan, decode.pieces, decode.starts), work)?;
        } else {
            self.plan.fill(&self.sequences, work);
            debug_assert!(to_u64(self.plan.pieces.len()) <= room.pieces, "as many as any batch");
            let pieces = bytemuck::cast_slice(&self.plan.pieces);
            let starts = bytemuck::cast_slice(&self.plan.starts);
            // SAFETY: there is room for as many pieces as any batch of this extent is cut into.
            unsafe { way.staging.upload(way.stream, decode.pieces, pieces)? };
            // SAFETY: and for one more start than there are slots.
            unsafe { way.staging.upload(way.stream, decode.starts, starts)? };
        }
        decode.is_made = true;
        Ok((decode.pieces, decode.starts))
    }

    /// Sends a batch with its block tables.
    pub(super) fn send_whole(
        &mut self,
        way: &mut Way<'_>,
        pack: &mut Pack,
        batch: &PlanBuffers,
        tables: &BlockTables,
    ) -> Result<(), DeviceError> {
        self.forget();
        let (mut blocks, mut begins) = (Vec::new(), Vec::new());
        for sequence in batch.sequences() {
            begins.push(to_u32(blocks.len()));
            blocks.extend(tables.row(sequence.row).iter().map(|block| block.0));
        }
        let table = |index: usize, _| begins.get(index).copied().unwrap_or(0);
        let lists = Lists::put(pack, batch, None, (table, &mut self.sequences));
        self.is_fixed = false;
        let blocks = pack.push(&blocks);
        let base = self.memory.send((way.stream, way.staging), pack)?;
        self.step = lists.at(base, blocks.from(base));
        self.id = batch.id();
        Ok(())
    }

    /// Sends a batch, and of the block tables what is not on the device yet.
    pub(super) fn send_with_changes(
        &mut self,
        way: &mut Way<'_>,
        pack: &mut Pack,
        (batch, tables): (&PlanBuffers, &BlockTables),
        limits: Option<StepLimits>,
    ) -> Result<(), DeviceError> {
        self.forget();
        self.tables.fit(tables, limits)?;
        let rows = batch.sequences().iter().map(|sequence| sequence.row);
        let changes = self.tables.changes(rows, tables);
        let width = self.tables.width();
        let table = |_, row: u32| row.saturating_mul(width);
        let fixed = limits.filter(|limits| within(&extent_of(batch), limits).is_none());
        self.is_fixed = fixed.is_some();
        let lists = Lists::put(pack, batch, fixed, (table, &mut self.sequences));
        let is_larger = limits.is_some() && fixed.is_none();
        let memory = if is_larger { &mut self.larger } else { &mut self.memory };
        let sent = memory.send((way.stream, way.staging), pack).and_then(|base| {
            self.step = lists.at(base, self.tables.address());
            if changes.is_empty() {
                return Ok(());
            }
            pack.clear();
            let at = pack.push(&changes);
            let base = self.changes.send((way.stream, way.staging), pack)?;
            let params = TableParams {
                changes: at.from(base),
                tables: self.tables.address(),
                num_changes: to_u32(changes.len()),
                pad: 0,
            };
            let grid = [params.num_changes.div_ceil(256).min(1024), 1, 1];
            let launch = Launch { kernel: "update_tables", grid, threads: 256, shared_bytes: 0 };
            // SAFETY: the changes lie in the image's memory, and name entries of the tables'.
            unsafe { way.stream.launch(&launch, bytemuck::bytes_of(&params)) }
        });
        if sent.is_err() {
            // Rows that were noted as sent may not be.
            self.tables.forget();
            return sent;
        }
        self.id = batch.id();
        Ok(())
    }
}

/// Cuts a batch that only the device knows when the launch is replayed.
fn plan_on_device(
    way: &mut Way<'_>,
    (plan, pieces, starts): (Plan, Address, Address),
    work: &Work,
) -> Result<(), DeviceError> {
    let params = DecodePlanParams {
        plan,
        pieces,
        starts,
        slots: work.slots,
        kv_heads: work.kv_heads,
        group: work.group,
        full: work.full.into(),
        window_left: work.window_left,
        sink_tokens: work.sink_tokens,
        invariant: work.invariant.into(),
        q_len_max: work.q_len_max,
    };
    let launch = Launch { kernel: "plan_decode", grid: [1, 1, 1], threads: 32, shared_bytes: 0 };
    // SAFETY: the plan lies in the image's memory; there is room for as many pieces as any batch of
    // the image's extent is cut into.
    unsafe { way.stream.launch(&launch, bytemuck::bytes_of(&params)) }
}

/// Where the lists of a batch are in a pack.
struct Lists {
    counts: At,
    sequences: At,
    entries: At,
    part_index: At,
    splits: At,
    slots: At,
    extent: Extent,
}

impl Lists {
    /// Adds the lists of a batch to an empty pack; with limits, each at the same place every time.
    fn put(
        pack: &mut Pack,
        batch: &PlanBuffers,
        limits: Option<StepLimits>,
        (table, sequences): (impl Fn(usize, u32) -> u32, &mut Vec<Sequence>),
    ) -> Self {
        pack.clear();
        sequences.clear();
        let (mut entries, mut part_index) = (Vec::new(), Vec::new());
        let mut parts = 0_u64;
        for (index, sequence) in batch.sequences().iter().enumerate() {
            part_index.push(u32::try_from(parts).unwrap_or(u32::MAX));
            if sequence.num_splits > 1 {
                let own = u64::from(sequence.num_splits).saturating_mul(sequence.q_len.into());
                parts = parts.saturating_add(own);
            }
            entries.push(Entry { start: sequence.q_start, len: sequence.q_len });
            sequences.push(Sequence {
                row: sequence.row,
                q_start: sequence.q_start,
                q_len: sequence.q_len,
                new_start: sequence.new_start,
                new_len: sequence.new_len,
                kv_len: sequence.kv_len,
                coded: sequence.coded,
                coded_before: sequence.coded_before,
                sealed_index: sequence.sealed_index,
                split_start: sequence.split_start,
                num_splits: sequence.num_splits,
                table: table(index, sequence.row),
            });
        }
        let split = |split: &kv_core::plan::KvSplit| Split {
            sequence: split.sequence,
            begin: split.kv_begin,
            end: split.kv_end,
            pad: 0,
        };
        let splits: Vec<_> = batch.splits().iter().map(split).collect();
        let slots: Vec<u32> = batch.slots().iter().map(|slot| slot.0).collect();
        let actual = extent_of(batch);
        let extent = limits.map_or(actual, |limits| largest(&limits));
        let counts = Counts {
            sequences: actual.sequences,
            splits: actual.splits,
            total_q: actual.total_q,
            total_new: actual.total_new,
            q_len_max: actual.q_len_max,
            new_len_max: actual.new_len_max,
            pad0: 0,
            pad1: 0,
        };
        let room = Room {
            sequences: to_usize(extent.sequences),
            splits: to_usize(extent.splits),
            slots: to_usize(extent.total_new),
        };
        Self {
            counts: pack.push(&[counts]),
            sequences: pack.push_in(sequences, room.sequences),
            entries: pack.push_in(&entries, room.sequences),
            part_index: pack.push_in(&part_index, room.sequences),
            splits: pack.push_in(&splits, room.splits),
            slots: pack.push_in(&slots, room.slots),
            extent,
        }
    }

    fn at(&self, base: Address, tables: Address) -> StepPlan {
        StepPlan {
            plan: Plan {
                counts: self.counts.from(base),
                sequences: self.sequences.from(base),
                splits: self.splits.from(base),
                slots: self.slots.from(base),
                tables,
            },
            queries: self.entries.from(base),
            part_index: self.part_index.from(base),
            extent: self.extent,
        }
    }
}

/// The numbers of a batch.
fn extent_of(batch: &PlanBuffers) -> Extent {
    let sequences = batch.sequences();
    let parts = sequences.iter().filter(|sequence| sequence.num_splits > 1);
    let parts = parts.map(|s| u64::from(s.num_splits).saturating_mul(s.q_len.into()));
    Extent {
        sequences: to_u32(sequences.len()),
        splits: to_u32(batch.splits().len()),
        total_q: batch.total_q(),
        total_new: batch.total_new(),
        q_len_max: batch.q_len_max(),
        new_len_max: batch.new_len_max(),
        kv_len_max: sequences.iter().map(|s| s.kv_len).max().unwrap_or(0),
        parts: parts.fold(0, u64::saturating_add),
    }
}

/// The limits as an extent.
fn largest(limits: &StepLimits) -> Extent {
    let tokens = limits.sequences.saturating_mul(limits.tokens_per_sequence);
    Extent {
        sequences: limits.sequences,
        splits: limits.splits,
        total_q: tokens,
        total_new: tokens,
        q_len_max: limits.tokens_per_sequence,
        new_len_max: limits.tokens_per_sequence,
        kv_len_max: limits.max_seq_len,
        parts: u64::from(limits.splits).saturating_mul(limits.tokens_per_sequence.into()),
    }
}

/// What of a step is beyond the limits.
fn within(step: &Extent, limits: &StepLimits) -> Option<String> {
    let largest = largest(limits);
    let found = [
        ("sequences", step.sequences, largest.sequences),
        ("parts of contexts", step.splits, largest.splits),
        ("queries of one sequence", step.q_len_max, largest.q_len_max),
        ("new tokens of one sequence", step.new_len_max, largest.new_len_max),
        ("tokens of one sequence", step.kv_len_max, largest.kv_len_max),
    ];
    let beyond = found.into_iter().find(|(_, got, max)| got > max);
    beyond.map(|(what, got, max)| format!("{got} {what}, and the limits of steps allow {max}"))
}

/// Of a batch's changes, what a pack takes.
impl Pack {
    /// As [`Self::push`], with room for `room` values at least, so that what comes behind does not
    /// move.
    fn push_in<T: bytemuck::NoUninit>(&mut self, values: &[T], room: usize) -> At {
        let at = self.push(values);
        let missing = room.saturating_sub(values.len()).saturating_mul(size_of::<T>());
        self.skip(to_u64(missing));
        at
    }
}

const _: () = assert!(size_of::<Change>() == 8, "two words each");
