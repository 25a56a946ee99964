//! Lists of a batch in device memory: sequences, KV splits, slots and block tables.
//!
//! They are sent once per batch; all layers that use the batch read the same copy.
use std::sync::Arc;

use kv_core::block::BlockTables;
use kv_core::error::DeviceError;
use kv_core::plan::{PlanBuffers, PlanId};

use crate::device::Shared;
use crate::params::Plan;
use crate::recording::{Recorder, Slot};
use crate::scratch::Scratch;
use kv_core::num::to_u32;

/// Number of batches that are kept: a step has one for each group of layers.
const KEPT: usize = 8;

/// A batch on the device.
#[derive(Debug, Clone)]
pub(crate) struct Step {
    pub(crate) plan: Plan,
    /// Binding of all lists.
    pub(crate) lists: Slot,
}

#[derive(Debug)]
struct Image {
    id: PlanId,
    used: u64,
    memory: Scratch,
    step: Step,
}

/// The batches that a queue used last.
#[derive(Debug, Default)]
pub(crate) struct Steps {
    images: Vec<Image>,
    clock: u64,
}

impl Steps {
    /// Returns the lists of a batch, and sends them on first use.
    ///
    /// # Errors
    /// `OutOfMemory`, `Unsupported` for lists beyond the binding limit, or `Lost`.
    pub(crate) fn get(
        &mut self,
        recorder: &mut Recorder,
        batch: &PlanBuffers,
        tables: &BlockTables,
    ) -> Result<Step, DeviceError> {
        self.clock += 1;
        let (clock, id) = (self.clock, batch.id());
        if let Some(image) = self.images.iter_mut().find(|image| image.id == id) {
            image.used = clock;
            return Ok(image.step.clone());
        }
        let oldest = self.images.iter().enumerate().min_by_key(|(_, image)| image.used);
        let replaced = oldest.map(|(index, _)| index).filter(|_| self.images.len() >= KEPT);
        let mut memory = replaced.map(|index| self.images.swap_remove(index).memory);
        let mut memory = memory.take().unwrap_or_default();
        let step = send(recorder, &mut memory, (batch, tables))?;
        self.images.push(Image { id, used: clock, memory, step: step.clone() });
        Ok(step)
    }

    /// Drops all batches, because the commands that sent them did not run.
    pub(crate) fn forget(&mut self) {
        self.images.clear();
    }
}

fn send(
    recorder: &mut Recorder,
    memory: &mut Scratch,
    (batch, tables): (&PlanBuffers, &BlockTables),
) -> Result<Step, DeviceError> {
    const SEND: &str = "send a plan";
    let (words, plan) = lists(batch, tables);
    let sent = recorder.push(&words)?;
    let shared: &Arc<Shared> = &Arc::clone(&recorder.shared);
    let room = memory.reserve(shared, sent.size, SEND)?;
    let (lists, _) = recorder.slot(&room, (0, sent.size), (false, SEND))?;
    let (from, at, size) = (&sent.buffer, sent.offset, sent.size);
    recorder.encoder()?.copy_buffer_to_buffer(from, at, &lists.buffer, lists.offset, size);
    Ok(Step { plan, lists })
}

/// Concatenates the lists and returns where each begins.
fn lists(batch: &PlanBuffers, tables: &BlockTables) -> (Vec<u32>, Plan) {
    let (mut sequences, mut entries) = (Vec::new(), Vec::new());
    let (mut splits, mut blocks) = (Vec::new(), Vec::new());
    for sequence in batch.sequences() {
        let table = to_u32(blocks.len());
        sequences.extend([
            sequence.row,
            sequence.q_start,
            sequence.q_len,
            sequence.new_start,
            sequence.new_len,
            sequence.kv_len,
            sequence.coded,
            sequence.coded_before,
            sequence.sealed_index,
            sequence.split_start,
            sequence.num_splits,
            table,
        ]);
        entries.extend([sequence.q_start, sequence.q_len]);
        blocks.extend(tables.row(sequence.row).iter().map(|block| block.0));
    }
    for split in batch.splits() {
        splits.extend([split.sequence, split.kv_begin, split.kv_end, 0]);
    }
    let slots = batch.slots().iter().map(|slot| slot.0).collect::<Vec<_>>();
    let mut words = Vec::new();
    let mut put = |list: &[u32]| {
        let begin = to_u32(words.len());
        words.extend_from_slice(list);
        begin
    };
    let plan = Plan {
        sequences: put(&sequences),
        entries: put(&entries),
        splits: put(&splits),
        slots: put(&slots),
        tables: put(&blocks),
        num_sequences: to_u32(batch.sequences().len()),
        num_splits: to_u32(batch.splits().len()),
        total_new: batch.total_new(),
    };
    (words, plan)
}
