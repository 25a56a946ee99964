//! Conversion of axes and element type, and to and from stored rows.
use kv_core::KvFormat;
use kv_core::backend::{TokenTensor, TokenTensorMut};
use kv_core::error::DeviceError;
use kv_core::num::to_u32;
use kv_core::plan::{ConvertArgs, ConvertEnds, ConvertPlan, StoredRows};

use super::pad::{self, Owned};
use super::warps4;
use crate::buffer::CudaBuffer;
use crate::gpu::Launch;
use crate::params::{ConvertParams, Entry, StoredParams};
use crate::queue::{CudaQueue, Parts};
use crate::tensors::{Room, unsupported};

const OPERATION: &str = "convert";

/// The entries of a plan, for its launches.
struct Entries {
    list: Vec<Entry>,
    room: Room,
}

impl Entries {
    fn of(plan: &ConvertPlan) -> Self {
        let list: Vec<_> = plan.entries().map(|(start, len)| Entry { start, len }).collect();
        let longest = list.iter().map(|entry| entry.len).max().unwrap_or(0);
        let room = Room { entries: plan.batch(), longest, total: plan.total() };
        Self { list, room }
    }
    fn count(&self) -> u32 {
        to_u32(self.list.len())
    }
}

pub(crate) fn convert(
    queue: &mut CudaQueue,
    plan: &ConvertPlan,
    mut args: ConvertArgs<'_, CudaBuffer>,
) -> Result<(), DeviceError> {
    let entries = Entries::of(plan);
    match args.ends() {
        ConvertEnds::Tensors(src, dst) => convert_tensors(queue, &entries, (src, dst)),
        ConvertEnds::Encode(src, dst) => store(queue, &entries, (src, dst)),
        ConvertEnds::Decode(src, dst) => load(queue, &entries, (src, dst)),
    }
}

fn convert_tensors(
    queue: &mut CudaQueue,
    entries: &Entries,
    (src, dst): (&TokenTensor<'_, CudaBuffer>, &mut TokenTensorMut<'_, CudaBuffer>),
) -> Result<(), DeviceError> {
    let Parts { call, pack, .. } = queue.parts(OPERATION);
    let dst = call.output(dst, entries.room)?;
    let (src, from) = call.input(src, entries.room, pack)?;
    let entries_at = pack.push(&entries.list);
    let base = queue.send()?;
    let params = ConvertParams {
        src: from.rows(src, base),
        dst,
        entries: entries_at.from(base),
        num_entries: entries.count(),
        total: entries.room.total,
    };
    let launch = launch(&params);
    // SAFETY: the extent of every address was compared with what the plan reaches, and the owner of
    // the memory, or the queue, keeps it until the stream has passed.
    unsafe { queue.launch(&launch, &params)? };
    let owned = Owned { entries: params.entries, count: params.num_entries, counts: 0 };
    pad::pad_rows(queue, (dst, owned), entries.room.total, 0.0)
}

fn store(
    queue: &mut CudaQueue,
    entries: &Entries,
    (src, dst): (&TokenTensor<'_, CudaBuffer>, &StoredRows<'_, CudaBuffer>),
) -> Result<(), DeviceError> {
    let (kernel, _) = kernels(dst.format())?;
    let Parts { call, pack, .. } = queue.parts(OPERATION);
    let stored = call.stored(dst, entries.room)?;
    let (rows, from) = call.input(src, entries.room, pack)?;
    let entries_at = pack.push(&entries.list);
    let base = queue.send()?;
    let params = StoredParams {
        rows: from.rows(rows, base),
        stored,
        entries: entries_at.from(base),
        num_entries: entries.count(),
        total: entries.room.total,
    };
    // SAFETY: as for tensors; stored rows have the bytes of all entries.
    unsafe { queue.launch(&kernel.launch(&params), &params) }
}

fn load(
    queue: &mut CudaQueue,
    entries: &Entries,
    (src, dst): (&StoredRows<'_, CudaBuffer>, &mut TokenTensorMut<'_, CudaBuffer>),
) -> Result<(), DeviceError> {
    let (_, kernel) = kernels(src.format())?;
    let Parts { call, pack, .. } = queue.parts(OPERATION);
    let rows = call.output(dst, entries.room)?;
    let stored = call.stored(src, entries.room)?;
    let entries_at = pack.push(&entries.list);
    let base = queue.send()?;
    let params = StoredParams {
        rows,
        stored,
        entries: entries_at.from(base),
        num_entries: entries.count(),
        total: entries.room.total,
    };
    // SAFETY: as for tensors; stored rows have the bytes of all entries.
    unsafe { queue.launch(&kernel.launch(&params), &params)? };
    let owned = Owned { entries: params.entries, count: params.num_entries, counts: 0 };
    pad::pad_rows(queue, (rows, owned), entries.room.total, 0.0)
}

/// Returns the launch; `convert.cu` explains the numbers.
fn launch(params: &ConvertParams) -> Launch {
    let grid = [warps4(params.total.into()), 1, 1];
    Launch { kernel: "convert_rows", grid, threads: 128, shared_bytes: 0 }
}

/// A kernel that encodes or decodes rows, and the values of a row that a warp takes.
struct Stored {
    name: &'static str,
    run: u32,
}

/// Returns the kernels that encode and decode rows of a format.
fn kernels(format: KvFormat) -> Result<(Stored, Stored), DeviceError> {
    match format {
        KvFormat::Q8_0 => {
            Ok((Stored { name: "store_q8_0", run: 128 }, Stored { name: "load_q8_0", run: 256 }))
        }
        other => Err(unsupported(OPERATION, format!("format {other}: no kernel converts it"))),
    }
}

impl Stored {
    /// Returns the launch; `convert.cu` explains the numbers.
    fn launch(&self, params: &StoredParams) -> Launch {
        let rows = u64::from(params.total) * u64::from(params.rows.heads);
        // More warps than fit a grid take several parts each.
        let warps = rows.saturating_mul(params.rows.dim.div_ceil(self.run).into());
        Launch { kernel: self.name, grid: [warps4(warps), 1, 1], threads: 128, shared_bytes: 0 }
    }
}
