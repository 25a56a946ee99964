//! Writes to sequences with a tail: new rows wait in 16 bits, full blocks become codes.
//!
//! A work item is one kv head of one sequence. Rows that become codes come from the step's input or
//! from the previous tail, which lies after the sequence's other blocks while the step is open and
//! is only read: so a write may be repeated, and a step may be rolled back.
use kv_core::KvFormat;
use kv_core::backend::Place;
use kv_core::invariant::Invariant;
use kv_core::plan::{PlannedSequence, WritePlan};
use kv_quant::block::{self, BlockMean};
use kv_quant::transform;

use crate::context::Cpu;
use crate::layout::{PlaneRows, RowAt, RowsIn};
use crate::scratch::Scratch;
use kv_core::num::{to_offset, to_usize};
use kv_cpu_kernels::{Element, RowLayout};

/// Writes one plane of one sequence and kv head.
struct TailWriter<'a> {
    cpu: &'a Cpu,
    table: &'a [kv_core::BlockId],
    entry: usize,
    sequence: &'a PlannedSequence,
    rows: &'a RowsIn<'a>,
    plane: &'a PlaneRows<'a>,
    head: u32,
}

/// Writes the new rows of a step to kv head `head` of entry `entry`.
pub(super) fn write(
    cpu: &Cpu,
    plan: &WritePlan<'_>,
    (entry, head): (usize, u32),
    (rows, plane): (&RowsIn<'_>, &PlaneRows<'_>),
    scratch: &mut Scratch,
) {
    let sequence = plan.sequences().get(entry).invariant("a work item is a head of an entry");
    if sequence.new_len == 0 {
        return;
    }
    let table = plan.tables().row(sequence.row);
    let mut writer = TailWriter { cpu, table, entry, sequence, rows, plane, head };
    let map = plane.layout().slot_map();
    let cached = writer.cached();
    let (values, mean) = scratch.row_and_mean(to_usize(plane.layout().head_dim()));
    for position in cached..sequence.kv_len.min(map.full_precision_prefix()) {
        writer.put_wide(position, values);
    }
    let tail = map.tail_begin(sequence.kv_len, sequence.coded);
    let mut begin = map.tail_begin(cached, sequence.coded_before).max(map.full_precision_prefix());
    while begin < tail {
        let index = map.place(begin).index;
        let end = map.tokens(index + 1).min(tail);
        // Codes that are in the block already keep its mean.
        let is_whole = begin <= map.tokens(index).max(map.full_precision_prefix());
        writer.put_codes(begin..end, is_whole, values, mean);
        begin = end.max(begin + 1);
    }
    for position in tail.max(cached).max(map.full_precision_prefix())..sequence.kv_len {
        writer.put_wide(position, values);
    }
}

impl<'a> TailWriter<'a> {
    /// Returns the tokens before the step.
    fn cached(&self) -> u32 {
        self.sequence.kv_len - self.sequence.new_len
    }

    /// Reads a row, transformed but not encoded, from the input or from the previous tail.
    fn read(&self, position: u32, values: &mut [f32]) {
        let Some(token) = position.checked_sub(self.cached()) else {
            let place = self.sealed(position);
            let wide = self.plane.rows(true);
            let begin = self.plane.layout().row_begin(place, self.head);
            let from = self.plane.get(self.block(place), begin, wide.bytes());
            self.cpu.kernels.decode(wide, from, values);
            return;
        };
        let at = RowAt { entry: self.entry, start: self.sequence.new_start, token };
        let source = RowLayout::plain(self.rows.element(), values.len());
        self.cpu.kernels.decode(&source, self.rows.get(at, self.head, 1), values);
        if let Some(constants) = self.plane.transform(self.head) {
            transform::store(values, &constants);
        }
        if self.plane.layout().format().is_quantised() {
            for value in values {
                *value = block::round_wide(*value);
            }
        }
    }

    /// Returns the place of a row of the previous tail.
    fn sealed(&self, position: u32) -> Place {
        let map = self.plane.layout().slot_map();
        map.place_sealed(position, self.sequence.coded_before, self.sequence.sealed_index)
    }

    fn block(&self, place: Place) -> u32 {
        let block = self.table.get(to_usize(place.index));
        block.invariant("a sequence has the blocks of its tokens").0
    }

    /// Returns the bytes of a block, for writing.
    fn bytes(&mut self, block: u32, begin: u64, len: usize) -> &'a mut [u8] {
        // SAFETY: the plane is locked for writing; a plan gives no block to two entries, a work
        // item writes the rows and the mean of its own head alone and holds one slice at a time,
        // and the blocks of the previous tail are not written.
        unsafe { self.plane.get_mut(block, begin, len) }
    }

    fn put_wide(&mut self, position: u32, values: &mut [f32]) {
        self.read(position, values);
        let layout = self.plane.layout();
        let place = layout.slot_map().place_in(position, self.sequence.coded);
        let begin = layout.row_begin(place, self.head);
        let to = self.bytes(self.block(place), begin, self.plane.rows(true).bytes());
        // The values were rounded when they were read, so nothing is lost and nothing overflows.
        let element = Element::of_format(layout.wide_format()).unwrap_or(Element::F16);
        self.cpu.kernels.encode(element, values, to);
    }

    /// Encodes rows of one block up to its end. With `is_whole` the rows begin at the block's start
    /// and define its mean.
    fn put_codes(
        &mut self,
        positions: std::ops::Range<u32>,
        is_whole: bool,
        values: &mut [f32],
        mean: &mut BlockMean,
    ) {
        let layout = self.plane.layout();
        let place = layout.slot_map().place(positions.start);
        let block = self.block(place);
        let means = if layout.has_block_means() {
            if is_whole {
                mean.reset(values.len());
                for position in positions.clone() {
                    self.read(position, values);
                    mean.add(values);
                }
                let bytes = to_offset(KvFormat::F16.row_bytes(layout.head_dim()));
                let to = self.bytes(block, layout.mean_begin(self.head), bytes);
                let finished = mean.finish();
                block::encode_wide(finished, to);
                Some(finished)
            } else {
                self.plane.read_mean(block, self.head, values);
                Some(mean.restore(values))
            }
        } else {
            None
        };
        for position in positions {
            self.read(position, values);
            if let Some(mean) = means {
                for (value, mean) in values.iter_mut().zip(mean) {
                    *value -= mean;
                }
            }
            let begin = layout.row_begin(layout.slot_map().place(position), self.head);
            let to = self.bytes(block, begin, self.plane.rows(false).bytes());
            if let Some(element) = Element::of_format(layout.format()) {
                self.cpu.kernels.encode(element, values, to);
            } else {
                let constants = self.plane.head_constants(self.head);
                let inv_scale = constants.map_or(1.0, |head| head.inv_scale);
                self.cpu.kernels.encode_row(layout.format(), inv_scale, values, to);
            }
        }
    }
}
