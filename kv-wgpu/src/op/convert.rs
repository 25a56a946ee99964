//! Conversion of axes and element type, and to and from stored rows.
use kv_core::KvFormat;
use kv_core::backend::{TokenTensor, TokenTensorMut};
use kv_core::error::DeviceError;
use kv_core::num::{to_offset, to_u32};
use kv_core::plan::{ConvertArgs, ConvertEnds, ConvertPlan, StoredRows};

use super::pad::{self, Owned};
use crate::buffer::WgpuBuffer;
use crate::params::{ConvertParams, StoredParams, Tensor};
use crate::pipelines::Kernel;
use crate::queue::WgpuQueue;
use crate::recording::Slot;
use crate::tensors::Room;

const OPERATION: &str = "convert";
/// Values that share a scale in the formats that rows are encoded to.
const BLOCK: u32 = 32;
/// Blocks that a workgroup of `store_rows.wgsl` encodes.
const BLOCKS: u64 = 8;
/// Values that a workgroup of `load_rows.wgsl` decodes.
const DECODED: u32 = 256;

fn convert_kernel() -> Kernel {
    Kernel::new("convert.wgsl")
}
fn store_kernel(format: KvFormat) -> Kernel {
    Kernel::new("store_rows.wgsl").with("FORMAT", format.kernel_code())
}
fn load_kernel(format: KvFormat) -> Kernel {
    Kernel::new("load_rows.wgsl").with("FORMAT", format.kernel_code())
}

#[cfg(test)]
pub(crate) fn kernels() -> Vec<Kernel> {
    let stored = KvFormat::all().filter(|of| ConvertPlan::encodes(kv_core::DType::F32, *of));
    let stored = stored.flat_map(|format| [store_kernel(format), load_kernel(format)]);
    std::iter::once(convert_kernel()).chain(stored).collect()
}

/// The entries of a plan, for its dispatches.
struct Entries {
    lists: Slot,
    count: u32,
    room: Room,
}

impl Entries {
    fn of(queue: &mut WgpuQueue, plan: &ConvertPlan) -> Result<Self, DeviceError> {
        let (mut entries, mut longest) = (Vec::new(), 0);
        for (start, len) in plan.entries() {
            entries.extend([start, len]);
            longest = longest.max(len);
        }
        let room = Room { entries: plan.batch(), longest, total: plan.total() };
        let lists = queue.call(OPERATION).recorder.push(&entries)?.into();
        Ok(Self { lists, count: to_u32(plan.batch()), room })
    }
    /// Fills the rows of an output that belong to no entry.
    fn pad(self, queue: &mut WgpuQueue, out: (Tensor, Slot)) -> Result<(), DeviceError> {
        let Self { lists, count, room } = self;
        let owned = Owned { lists, entries: 0, count, total: room.total };
        pad::pad_rows(&mut queue.recorder, out, owned, 0.0)
    }
}

pub(crate) fn convert(
    queue: &mut WgpuQueue,
    plan: &ConvertPlan,
    mut args: ConvertArgs<'_, WgpuBuffer>,
) -> Result<(), DeviceError> {
    let entries = Entries::of(queue, plan)?;
    match args.ends() {
        ConvertEnds::Tensors(src, dst) => convert_tensors(queue, entries, (src, dst)),
        ConvertEnds::Encode(src, dst) => store(queue, &entries, (src, dst)),
        ConvertEnds::Decode(src, dst) => load(queue, entries, (src, dst)),
    }
}

fn convert_tensors(
    queue: &mut WgpuQueue,
    entries: Entries,
    (src, dst): (&TokenTensor<'_, WgpuBuffer>, &mut TokenTensorMut<'_, WgpuBuffer>),
) -> Result<(), DeviceError> {
    let Entries { lists, count: num_entries, room } = &entries;
    let mut call = queue.call(OPERATION);
    let (dst, written) = call.output(dst, *room)?;
    let (src, read) = call.input(src, *room)?;
    let (num_entries, total) = (*num_entries, room.total);
    let params = ConvertParams { src, dst, num_entries, total, ..ConvertParams::default() };
    let recorder = &mut queue.recorder;
    let groups = recorder.groups(total.into())?;
    let slots = [lists.clone(), read, written.clone()];
    recorder.dispatch(&convert_kernel(), &params, &slots, groups)?;
    entries.pad(queue, (dst, written))
}

/// Returns the parameters of a conversion between a tensor and stored rows, from byte `data` on.
/// Sizes fit 32 bits: longer rows are refused when they are bound.
fn params(
    rows: Tensor,
    (stored, data): (&StoredRows<'_, WgpuBuffer>, u32),
    entries: &Entries,
) -> StoredParams {
    let narrow = |bytes: u64| to_u32(to_offset(bytes));
    StoredParams {
        rows,
        data,
        row_bytes: narrow(stored.row_bytes()),
        block_bytes: narrow(stored.format().row_bytes(BLOCK)),
        num_entries: entries.count,
        total: entries.room.total,
        ..StoredParams::default()
    }
}

fn store(
    queue: &mut WgpuQueue,
    entries: &Entries,
    (src, dst): (&TokenTensor<'_, WgpuBuffer>, &StoredRows<'_, WgpuBuffer>),
) -> Result<(), DeviceError> {
    let mut call = queue.call(OPERATION);
    let (data, written) = call.stored(dst, entries.room, true)?;
    let (rows, read) = call.input(src, entries.room)?;
    let params = params(rows, (dst, data), entries);
    let heads = u64::from(entries.room.total) * u64::from(rows.heads);
    let blocks = heads * u64::from(rows.dim.div_ceil(BLOCK));
    let recorder = &mut queue.recorder;
    let groups = recorder.groups(blocks.div_ceil(BLOCKS))?;
    let slots = [entries.lists.clone(), read, written];
    recorder.dispatch(&store_kernel(dst.format()), &params, &slots, groups)
}

fn load(
    queue: &mut WgpuQueue,
    entries: Entries,
    (src, dst): (&StoredRows<'_, WgpuBuffer>, &mut TokenTensorMut<'_, WgpuBuffer>),
) -> Result<(), DeviceError> {
    let mut call = queue.call(OPERATION);
    let (rows, written) = call.output(dst, entries.room)?;
    let (data, read) = call.stored(src, entries.room, false)?;
    let params = params(rows, (src, data), &entries);
    let heads = u64::from(entries.room.total) * u64::from(rows.heads);
    let recorder = &mut queue.recorder;
    let groups = recorder.groups(heads * u64::from(rows.dim.div_ceil(DECODED)))?;
    let slots = [entries.lists.clone(), read, written.clone()];
    recorder.dispatch(&load_kernel(src.format()), &params, &slots, groups)?;
    entries.pad(queue, (rows, written))
}
