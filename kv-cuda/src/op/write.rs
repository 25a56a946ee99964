//! Writing new K and V rows into their slots.
use kv_core::error::DeviceError;
use kv_core::plan::{WriteArgs, WritePlan};

use super::lanes::{self, Rows};
use super::{MAX_YZ, Refusal, round16, warps4};
use crate::buffer::CudaBuffer;
use crate::capture::RowsOf;
use crate::gpu::Launch;
use crate::params::WriteParams;
use crate::queue::{CudaQueue, Parts};
use crate::step::Extent;
use crate::tensors::Room;

const OPERATION: &str = "write_kv";

pub(crate) fn write_kv(
    queue: &mut CudaQueue,
    plan: &WritePlan<'_>,
    args: &WriteArgs<'_, CudaBuffer>,
) -> Result<(), DeviceError> {
    let room = Room {
        entries: plan.sequences().len(),
        longest: plan.new_len_max(),
        total: plan.total_new(),
    };
    let step = queue.step(plan.batch(), plan.tables())?;
    let Parts { call, pack, constants, mut transfer } = queue.parts(OPERATION);
    let (k, k_from) = call.input(args.k(), room, pack)?;
    let (v, v_from) = call.input(args.v(), room, pack)?;
    for tensor in [args.k(), args.v()] {
        call.held.note_rows(RowsOf::NewTokens, tensor.rows());
    }
    let (blocks, planned) = (plan.tables().num_blocks(), Some(plan.layout()));
    let k_plane = call.plane(args.k_plane(), blocks, planned, (constants, &mut transfer))?;
    let v_plane = call.plane(args.v_plane(), blocks, planned, (constants, &mut transfer))?;
    let base = queue.send()?;
    let (k, v) = (k_from.rows(k, base), v_from.rows(v, base));
    let params = WriteParams { plan: step.plan, k, v, k_plane, v_plane };
    let launch = launch(&params, &step.extent);
    // SAFETY: the extent of every address was compared with what plan and layouts reach, and the
    // owner of the memory, or the queue, keeps it until the stream has passed.
    unsafe { queue.launch(&launch, &params) }
}

/// Returns the largest `head_dim` that fits the shared memory of `write_tails`: four warps, each
/// with three values of 4 bytes per channel.
pub(super) fn head_dim_max(shared_bytes_max: u32) -> u32 {
    (shared_bytes_max.saturating_sub(1024) / 48) & !15
}

/// Kernels of `write_codes.cu` and `write_lloyd.cu`, by `head_dim`.
const CODES: [Option<&str>; lanes::DIMS.len()] =
    [Some("write_codes_64"), Some("write_codes_128"), Some("write_codes_256")];
const LLOYD: [Option<&str>; lanes::DIMS.len()] =
    [None, Some("write_lloyd_128"), Some("write_lloyd_256")];

/// Returns the launch of a kernel that holds rows in registers, or why none takes these rows.
pub(crate) fn in_lanes(params: &WriteParams, extent: &Extent) -> Result<Launch, Refusal> {
    let WriteParams { k, v, k_plane, v_plane, .. } = params;
    let of_k = lanes::of_plane(k_plane)?;
    if of_k != lanes::of_plane(v_plane)? {
        return Err("K and V have different kinds of rows");
    }
    [k, v].into_iter().try_for_each(lanes::check_tensor)?;
    let head_dim = k_plane.head_dim;
    let blocks = lanes::blocks(extent.total_new, k_plane.num_kv_heads, head_dim)?;
    // Shared memory of each row: see the head comments.
    let (names, row) = match of_k.1 {
        Rows::Plain => return Err("write_plain copies whole tokens"),
        Rows::Other => return Err("a format without an encoder of this kind"),
        Rows::Codes => (CODES, head_dim + 16),
        Rows::Lloyd => (LLOYD, (head_dim + 8) * 4),
    };
    let kernel = names.get(of_k.0).copied().flatten().ok_or(lanes::NO_DIM)?;
    let shared_bytes = lanes::rows(head_dim) * row;
    Ok(Launch { kernel, grid: [blocks, 1, 1], threads: 128, shared_bytes })
}

/// Returns the kernel and the launch for these planes; the head comments of `write*.cu`
/// explain the numbers.
fn launch(params: &WriteParams, extent: &Extent) -> Launch {
    if let Ok(launch) = in_lanes(params, extent) {
        return launch;
    }
    let planes = [&params.k_plane, &params.v_plane];
    let heads = params.k_plane.num_kv_heads;
    let dim = planes.map(|plane| plane.head_dim).into_iter().max().unwrap_or(0);
    let row_bytes = planes.map(|plane| plane.row_bytes).into_iter().max().unwrap_or(0);
    let floats = round16(dim * 4);
    let warp = floats + 256 + round16(row_bytes);
    // One warp per plane and head.
    let blocks = |count: u32| warps4(u64::from(count) * u64::from(heads) * 2);
    let (kernel, x, y, shared) = if params.k_plane.has_tail != 0 {
        let parts = extent.new_len_max.checked_div(params.k_plane.block_size).unwrap_or(0);
        let each = warp + floats;
        ("write_tails", blocks(extent.sequences), (parts + 2).min(MAX_YZ), each)
    } else if planes.iter().all(|plane| plane.is_plain()) {
        ("write_plain", extent.total_new, 1, 0)
    } else {
        ("write_rows", blocks(extent.total_new), 1, warp)
    };
    let shared_bytes = shared * 4;
    Launch { kernel, grid: [x, y, 1], threads: 128, shared_bytes }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::params::Plane;

    #[test]
    fn the_largest_head_dim_fits_and_the_next_does_not() {
        for max in [101_376, 166_912, 232_448] {
            let bytes = |head_dim| {
                let plane =
                    Plane { head_dim, row_bytes: 4 * head_dim, has_tail: 1, ..Plane::default() };
                let params =
                    WriteParams { k_plane: plane, v_plane: plane, ..WriteParams::default() };
                launch(&params, &Extent::default()).shared_bytes
            };
            let dim = head_dim_max(max);
            assert!(dim > 1024 && bytes(dim) <= max && bytes(dim + 16) > max, "{dim}");
        }
    }
}
