//! Blocks that a step fills, where rows wait in 16 bits until then: they become codes.
//!
//! Rows that waited may lie in another segment than the codes, and a dispatch sees one segment; so
//! they are laid aside first.
use kv_core::plan::WritePlan;
use kv_core::{DeviceError, KvFormat};

use super::write::{OPERATION, Put, specialised};
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
    let formats = kv_core::backend::kernels::FORMATS.iter();
    all.extend(formats.map(|format| encode_kernel(*format)));
    all.dedup();
    all
}

/// Rows of a block that get codes in a step, for every such block of the batch: `pieces.wgsl`.
pub(super) struct Pieces {
    pub(super) count: u32,
    /// Rows that waited, of all.
    staged: u32,
    list: Option<Slot>,
}

impl Pieces {
    /// Those of a batch; none where rows do not wait.
    pub(super) fn of(recorder: &mut Recorder, plan: &WritePlan<'_>) -> Result<Self, DeviceError> {
        let map = plan.layout().slot_map();
        let (mut words, mut staged, mut count) = (Vec::new(), 0_u32, 0_u32);
        for (entry, sequence) in plan.sequences().iter().enumerate() {
            if !map.has_tail() || sequence.new_len == 0 {
                continue;
            }
            let cached = sequence.kv_len.saturating_sub(sequence.new_len);
            let tail = map.tail_begin(sequence.kv_len, sequence.coded);
            let mut begin =
                map.tail_begin(cached, sequence.coded_before).max(map.full_precision_prefix());
            while begin < tail {
                let index = map.place(begin).index;
                let end = map.tokens(index.saturating_add(1)).min(tail);
                // Codes that were in the block before keep its mean.
                let is_whole = begin <= map.tokens(index).max(map.full_precision_prefix());
                words.extend([to_u32(entry), begin, end, is_whole.into(), staged]);
                staged = staged.saturating_add(cached.min(end).saturating_sub(begin));
                count = count.saturating_add(1);
                begin = end.max(begin.saturating_add(1));
            }
        }
        let list = if count == 0 { None } else { Some(recorder.push(&words)?.into()) };
        Ok(Self { count, staged, list })
    }
}

/// Pieces of one plane, with the rows that waited laid aside.
pub(super) struct Tail {
    format: KvFormat,
    count: u32,
    pieces: Slot,
    staged: Slot,
}

impl Tail {
    /// Lays the rows of a plane aside that waited; `None` where no block gets codes.
    pub(super) fn stage(
        queue: &mut WgpuQueue,
        put: &Put<'_>,
        pieces: &Pieces,
    ) -> Result<Option<Self>, DeviceError> {
        let Some(list) = &pieces.list else { return Ok(None) };
        let format = put.view.layout().format();
        if pieces.staged == 0 {
            let nothing = queue.recorder.push(&[0_u32; 4])?.into();
            return Ok(Some(Self {
                format,
                count: pieces.count,
                pieces: list.clone(),
                staged: nothing,
            }));
        }
        let shared = &std::sync::Arc::clone(&queue.recorder.shared);
        let bytes = staged_bytes(&put.plane, pieces.staged);
        if bytes > u64::from(u32::MAX) {
            return Err(unsupported(OPERATION, format!("{bytes} bytes of rows that waited")));
        }
        let memory = queue.scratch.reserve(shared, bytes, OPERATION)?;
        let call = queue.call(OPERATION);
        let units = u64::from(pieces.count).saturating_mul(put.plane.num_kv_heads.into());
        for index in 0..put.view.layout().num_segments() {
            let (plane, read) = call.segment((put.view, &put.plane), index, false)?;
            let (staged, _) = call.recorder.slot(&memory, (0, bytes), (true, OPERATION))?;
            let params = WriteParams { plane, ..put.params };
            let slots = [put.lists.clone(), read, list.clone(), staged];
            let groups = call.recorder.groups(units)?;
            call.recorder.dispatch(&stage_kernel(), &params, &slots, groups)?;
        }
        let (staged, _) = call.recorder.slot(&memory, (0, bytes), (false, OPERATION))?;
        Ok(Some(Self { format, count: pieces.count, pieces: list.clone(), staged }))
    }

    /// Encodes the pieces whose blocks are in one segment, the last of `slots`.
    pub(super) fn encode(
        &self,
        recorder: &mut Recorder,
        params: &WriteParams,
        slots: [Slot; 4],
    ) -> Result<(), DeviceError> {
        let units = u64::from(self.count).saturating_mul(params.plane.num_kv_heads.into());
        let groups = recorder.groups(units)?;
        let [lists, rows, constants, plane] = slots;
        let slots = [lists, rows, constants, plane, self.pieces.clone(), self.staged.clone()];
        recorder.dispatch(&encode_kernel(self.format), params, &slots, groups)
    }
}

/// Bytes of rows as f32.
fn staged_bytes(plane: &Plane, rows: u32) -> u64 {
    u64::from(rows)
        .saturating_mul(plane.num_kv_heads.into())
        .saturating_mul(plane.head_dim.into())
        .saturating_mul(4)
}
