//! Reading cached rows into a plain tensor.
use kv_core::error::DeviceError;
use kv_core::plan::{GatherArgs, GatherPlan};

use super::pad::{self, Owned};
use super::{Refusal, lanes, round16, warps4};
use crate::buffer::CudaBuffer;
use crate::gpu::Launch;
use crate::params::{Entry, GatherParams, Range};
use crate::queue::{CudaQueue, Parts};
use crate::tensors::Room;
use kv_core::num::to_u32;

const OPERATION: &str = "gather";

pub(crate) fn gather(
    queue: &mut CudaQueue,
    plan: &GatherPlan<'_>,
    mut args: GatherArgs<'_, CudaBuffer>,
) -> Result<(), DeviceError> {
    let tables = plan.tables();
    let (mut blocks, mut ranges, mut entries) = (Vec::new(), Vec::new(), Vec::new());
    let (mut start, mut longest) = (0_u32, 0);
    for range in plan.ranges() {
        ranges.push(Range {
            table: to_u32(blocks.len()),
            begin: range.begin,
            len: range.len,
            coded: tables.coded(range.row),
            start,
            ..Range::default()
        });
        entries.push(Entry { start, len: range.len });
        blocks.extend(tables.row(range.row).iter().map(|block| block.0));
        start += range.len;
        longest = longest.max(range.len);
    }
    let room = Room { entries: plan.ranges().len(), longest, total: plan.total() };
    let Parts { call, pack, constants, mut transfer } = queue.parts(OPERATION);
    let out = call.output(args.out(), room)?;
    let (of_pool, planned) = (tables.num_blocks(), Some(plan.layout()));
    let plane = call.plane(args.plane(), of_pool, planned, (constants, &mut transfer))?;
    let ranges_at = pack.push(&ranges);
    let entries_at = pack.push(&entries);
    let tables_at = pack.push(&blocks);
    let base = queue.send()?;
    let params = GatherParams {
        plane,
        out,
        ranges: ranges_at.from(base),
        tables: tables_at.from(base),
        num_ranges: to_u32(ranges.len()),
        total: plan.total(),
    };
    let launch = launch(&params);
    // SAFETY: the extent of every address was compared with what plan and layouts reach, and the
    // owner of the memory, or the queue, keeps it until the stream has passed.
    unsafe { queue.launch(&launch, &params)? };
    let owned = Owned { entries: entries_at.from(base), count: to_u32(entries.len()), counts: 0 };
    pad::pad_rows(queue, (out, owned), plan.total(), 0.0)
}

/// Kernels of `gather_values.cu`, by `head_dim`.
const PLAIN: [&str; lanes::DIMS.len()] =
    ["gather_plain_64", "gather_plain_128", "gather_plain_256"];
const VALUES: [&str; lanes::DIMS.len()] =
    ["gather_values_64", "gather_values_128", "gather_values_256"];

/// Returns the launch of `gather_values.cu`, or why it does not take these rows.
pub(crate) fn values(params: &GatherParams) -> Result<Launch, Refusal> {
    let plane = &params.plane;
    let (dim, _) = lanes::of_plane(plane)?;
    lanes::check_tensor(&params.out)?;
    let blocks = lanes::blocks(params.total, plane.num_kv_heads, plane.head_dim)?;
    let kernels = if plane.is_plain() { PLAIN } else { VALUES };
    let kernel = kernels.get(dim).copied().ok_or(lanes::NO_DIM)?;
    Ok(Launch { kernel, grid: [blocks, 1, 1], threads: 128, shared_bytes: 0 })
}

/// Returns the launch; `gather.cu` and `gather_values.cu` explain the numbers.
fn launch(params: &GatherParams) -> Launch {
    if let Ok(launch) = values(params) {
        return launch;
    }
    let plane = &params.plane;
    let warps = u64::from(params.total) * u64::from(plane.num_kv_heads);
    let row = round16(plane.head_dim * 4) * 4;
    let shared_bytes = if plane.is_plain() { 0 } else { row };
    Launch { kernel: "gather_rows", grid: [warps4(warps), 1, 1], threads: 128, shared_bytes }
}
