//! Quantisation of blocks that a step fills, in formats that keep the rows of an unfinished block
//! (the tail) in 16 bits.
//!
//! The 16-bit rows may lie in another segment than the codes, and a dispatch binds one segment.
//! They are therefore copied to scratch memory first.
use kv_core::KvFormat;
use kv_core::error::DeviceError;
use kv_core::plan::WritePlan;

use super::write::{OPERATION, PlaneWrite, specialised};
use crate::device::unsupported;
use crate::params::{Plane, WriteParams};
use crate::pipelines::Kernel;
use crate::queue::WgpuQueue;
use crate::recording::{Recorder, Slot};
use kv_core::num::to_u32;

fn stage_kernel() -> Kernel {
    Kernel::new("stage_tail.wgsl")
}
fn encode_kernel(format: KvFormat) -> Kernel {
    specialised(Kernel::new("write_blocks.wgsl"), format)
}

#[cfg(test)]
pub(super) fn kernels() -> Vec<Kernel> {
    let mut all = vec![stage_kernel()];
    let formats = crate::params::FORMATS.iter();
    all.extend(formats.map(|format| encode_kernel(*format)));
    all.dedup();
    all
}

/// Runs of rows that this step quantises, one for each block and entry: `coded_runs.wgsl`.
pub(super) struct CodedRuns {
    pub(super) count: u32,
    /// Tail rows of all runs together.
    staged: u32,
    list: Option<Slot>,
}

impl CodedRuns {
    /// Collects the runs of a batch; none for formats without a tail.
    pub(super) fn of(recorder: &mut Recorder, plan: &WritePlan<'_>) -> Result<Self, DeviceError> {
        let map = plan.layout().slot_map();
        let (mut words, mut staged, mut count) = (Vec::new(), 0_u32, 0_u32);
        for (entry, sequence) in plan.sequences().iter().enumerate() {
            if !map.has_tail() || sequence.new_len == 0 {
                continue;
            }
            let cached = sequence.kv_len - sequence.new_len;
            let tail = map.tail_begin(sequence.kv_len, sequence.coded);
            let mut begin =
                map.tail_begin(cached, sequence.coded_before).max(map.full_precision_prefix());
            while begin < tail {
                let index = map.place(begin).index;
                let end = map.tokens(index + 1).min(tail);
                // A block that already has codes keeps its mean.
                let is_whole = begin <= map.tokens(index).max(map.full_precision_prefix());
                words.extend([to_u32(entry), begin, end, is_whole.into(), staged]);
                staged += cached.min(end).saturating_sub(begin);
                count += 1;
                begin = end.max(begin + 1);
            }
        }
        let list = if count == 0 { None } else { Some(recorder.push(&words)?.into()) };
        Ok(Self { count, staged, list })
    }
}

/// Runs of one plane, with their tail rows in scratch memory.
pub(super) struct Tail {
    format: KvFormat,
    count: u32,
    runs: Slot,
    staged: Slot,
}

impl Tail {
    /// Copies the tail rows of a plane to scratch memory; `None` if no block is quantised.
    pub(super) fn stage(
        queue: &mut WgpuQueue,
        put: &PlaneWrite<'_>,
        runs: &CodedRuns,
    ) -> Result<Option<Self>, DeviceError> {
        let Some(list) = &runs.list else { return Ok(None) };
        let format = put.view.layout().format();
        if runs.staged == 0 {
            let nothing = queue.recorder.push(&[0_u32; 4])?.into();
            return Ok(Some(Self {
                format,
                count: runs.count,
                runs: list.clone(),
                staged: nothing,
            }));
        }
        let shared = &std::sync::Arc::clone(&queue.recorder.shared);
        let bytes = staged_bytes(&put.plane, runs.staged);
        if bytes > u64::from(u32::MAX) {
            return Err(unsupported(OPERATION, format!("{bytes} bytes of tail rows")));
        }
        let memory = queue.scratch.reserve(shared, bytes, OPERATION)?;
        let call = queue.call(OPERATION);
        let units = u64::from(runs.count) * u64::from(put.plane.num_kv_heads);
        for index in 0..put.view.layout().num_segments() {
            let (plane, read) = call.segment((put.view, &put.plane), index, false)?;
            let (staged, _) = call.recorder.slot(&memory, (0, bytes), (true, OPERATION))?;
            let params = WriteParams { plane, ..put.params };
            let slots = [put.lists.clone(), read, list.clone(), staged];
            let groups = call.recorder.groups(units)?;
            call.recorder.dispatch(&stage_kernel(), &params, &slots, groups)?;
        }
        let (staged, _) = call.recorder.slot(&memory, (0, bytes), (false, OPERATION))?;
        Ok(Some(Self { format, count: runs.count, runs: list.clone(), staged }))
    }

    /// Quantises the runs whose blocks are in one segment, the last of `slots`.
    pub(super) fn encode(
        &self,
        recorder: &mut Recorder,
        params: &WriteParams,
        slots: [Slot; 4],
    ) -> Result<(), DeviceError> {
        let units = u64::from(self.count) * u64::from(params.plane.num_kv_heads);
        let groups = recorder.groups(units)?;
        let [lists, rows, constants, plane] = slots;
        let slots = [lists, rows, constants, plane, self.runs.clone(), self.staged.clone()];
        recorder.dispatch(&encode_kernel(self.format), params, &slots, groups)
    }
}

/// Returns the bytes of `rows` rows in f32.
fn staged_bytes(plane: &Plane, rows: u32) -> u64 {
    u64::from(rows) * u64::from(plane.num_kv_heads) * u64::from(plane.head_dim) * 4
}
