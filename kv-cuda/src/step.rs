//! The plan of a step in device memory.
//!
//! Made once for all layers of a group: the first call that brings a batch uploads it, the others
//! find it by its [`PlanId`]. A cache has a batch for each group of layers, so several are kept.
use std::sync::Arc;

use kv_core::DeviceError;
use kv_core::block::BlockTables;
use kv_core::plan::{PlanBuffers, PlanId};

use crate::gpu::{Gpu, Stream};
use crate::num::{to_u32, to_u64};
use crate::params::{Address, Counts, Entry, Plan, Sequence, Split};
use crate::scratch::{Pack, Scratch};
use crate::staging::Staging;

/// Batches that are kept: as many as a model has groups, in nearly every case.
const KEPT: usize = 8;

/// One batch on the device.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct StepPlan {
    /// What kernels take.
    pub(crate) plan: Plan,
    /// `Entry` of every sequence: its queries in a ragged tensor.
    pub(crate) queries: Address,
    /// For every sequence, how many splits of cut sequences come before its own, by queries.
    pub(crate) part_index: Address,
    /// Partial results of one head, over all splits of cut sequences and their queries.
    pub(crate) num_parts: u64,
}

#[derive(Debug)]
struct Image {
    id: PlanId,
    used: u64,
    memory: Scratch,
    step: StepPlan,
}

/// The batches that this queue has met last.
#[derive(Debug)]
pub(crate) struct Steps {
    gpu: Arc<dyn Gpu>,
    images: Vec<Image>,
    clock: u64,
    pack: Pack,
}

impl Steps {
    pub(crate) fn new(gpu: &Arc<dyn Gpu>) -> Self {
        Self { gpu: Arc::clone(gpu), images: Vec::new(), clock: 0, pack: Pack::default() }
    }

    /// The batch on the device, uploaded if it is not there.
    pub(crate) fn get(
        &mut self,
        (stream, staging): (&mut dyn Stream, &mut Staging),
        batch: &PlanBuffers,
        tables: &BlockTables,
    ) -> Result<StepPlan, DeviceError> {
        self.clock = self.clock.saturating_add(1);
        let clock = self.clock;
        if let Some(image) = self.images.iter_mut().find(|image| image.id == batch.id()) {
            image.used = clock;
            return Ok(image.step);
        }
        let image = if self.images.len() < KEPT {
            let memory = Scratch::new(&self.gpu);
            let (id, step) = (PlanId::default(), StepPlan::default());
            self.images.push(Image { id, used: 0, memory, step });
            self.images.last_mut()
        } else {
            self.images.iter_mut().min_by_key(|image| image.used)
        };
        let Some(image) = image else {
            return Ok(StepPlan::default());
        };
        // Until the copy stands, the image is nobody's.
        (image.id, image.used) = (PlanId::default(), clock);
        let base_of = fill(&mut self.pack, batch, tables);
        let base = image.memory.send((stream, staging), &self.pack)?;
        image.step = base_of(base);
        image.id = batch.id();
        Ok(image.step)
    }
}

/// Lays a batch out in `pack`; what it is once the pack lies at an address.
fn fill(
    pack: &mut Pack,
    batch: &PlanBuffers,
    tables: &BlockTables,
) -> impl FnOnce(Address) -> StepPlan + use<> {
    pack.clear();
    let (mut entries, mut sequences, mut blocks) = (Vec::new(), Vec::new(), Vec::new());
    let (mut part_index, mut num_parts) = (Vec::new(), 0_u64);
    for sequence in batch.sequences() {
        part_index.push(u32::try_from(num_parts).unwrap_or(u32::MAX));
        if sequence.num_splits > 1 {
            let parts = u64::from(sequence.num_splits).saturating_mul(sequence.q_len.into());
            num_parts = num_parts.saturating_add(parts);
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
            table: to_u32(blocks.len()),
        });
        blocks.extend(tables.row(sequence.row).iter().map(|block| block.0));
    }
    let splits: Vec<_> = batch
        .splits()
        .iter()
        .map(|split| Split {
            sequence: split.sequence,
            begin: split.kv_begin,
            end: split.kv_end,
            pad: 0,
        })
        .collect();
    let slots: Vec<u32> = batch.slots().iter().map(|slot| slot.0).collect();
    let counts = Counts {
        sequences: to_u32(sequences.len()),
        splits: to_u32(splits.len()),
        total_q: batch.total_q(),
        total_new: batch.total_new(),
        q_len_max: batch.q_len_max(),
        new_len_max: batch.new_len_max(),
        pad0: 0,
        pad1: 0,
    };
    let counts = pack.push(&[counts]);
    let sequences = pack.push(&sequences);
    let splits = pack.push(&splits);
    let slots = pack.push(&slots);
    let blocks = pack.push(&blocks);
    let entries = pack.push(&entries);
    let part_index = pack.push(&part_index);
    move |base| StepPlan {
        plan: Plan {
            counts: counts.from(base),
            sequences: sequences.from(base),
            splits: splits.from(base),
            slots: slots.from(base),
            tables: blocks.from(base),
        },
        queries: entries.from(base),
        part_index: part_index.from(base),
        num_parts,
    }
}

/// Bytes that `count` values of `size` bytes take.
pub(crate) fn bytes_of(count: u64, size: usize) -> u64 {
    count.saturating_mul(to_u64(size))
}
