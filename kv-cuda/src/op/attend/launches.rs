//! How the kernels of attention are started: the numbers that the head comments of their sources
//! give.
use super::super::MAX_YZ;
use crate::decode::{Shape, Work};
use crate::gpu::Launch;
use crate::params::{AttendParams, Plane, Tensor};
use crate::step::Extent;

/// `head_dim` of K and V together up to which four rows a warp fit the shared memory that every
/// card since `sm_80` has.
const DIMS_MAX: u32 = 768;
/// `head_dim`s of the kernels for prefill.
const PREFILL_DIMS: [u32; 6] = [64, 80, 96, 128, 192, 256];
/// Numbers of `KvDtype`, which are those of the plain formats too.
const F16: u32 = 1;
const BF16: u32 = 2;

/// `attend.cu`: every shape, format and option.
pub(super) fn rows(params: &AttendParams, extent: &Extent, splits_max: u32) -> Launch {
    let up = |n: u32| n.checked_next_multiple_of(64).unwrap_or(u32::MAX);
    let dims = up(params.k_plane.head_dim).saturating_add(up(params.v_plane.head_dim));
    // By head_dim alone, because results differ in the last bits.
    let (kernel, rows) =
        if dims <= DIMS_MAX { ("attend_rows", 4_u32) } else { ("attend_rows_large", 1) };
    let rows_of_block = rows.saturating_mul(4);
    let units = extent.total_q.saturating_mul(params.group).checked_div(rows_of_block);
    let shared_bytes =
        dims.saturating_add(72).saturating_mul(16).saturating_mul(rows).saturating_add(43_024);
    let grid = [
        units.unwrap_or(0).saturating_add(extent.sequences),
        params.k_plane.num_kv_heads,
        splits_max.clamp(1, MAX_YZ),
    ];
    Launch { kernel, grid, threads: 128, shared_bytes }
}

/// `decode.h`.
pub(super) fn decode(shape: &Shape, work: &Work) -> Launch {
    let Shape { kernel, threads, shared_bytes, .. } = *shape;
    Launch { kernel, grid: [work.slots, 1, 1], threads, shared_bytes }
}

/// `prefill.h`: the kernel that takes this call, if there is one.
pub(super) fn prefill_kernel(params: &AttendParams, shared_bytes_max: u32) -> Option<&'static str> {
    let AttendParams { q, out, k_plane, v_plane, .. } = params;
    let index = PREFILL_DIMS.iter().position(|dim| *dim == k_plane.head_dim)?;
    let kernels = match q.dtype {
        F16 => [
            "prefill_f16_64",
            "prefill_f16_80",
            "prefill_f16_96",
            "prefill_f16_128",
            "prefill_f16_192",
            "prefill_f16_256",
        ],
        BF16 => [
            "prefill_bf16_64",
            "prefill_bf16_80",
            "prefill_bf16_96",
            "prefill_bf16_128",
            "prefill_bf16_192",
            "prefill_bf16_256",
        ],
        _ => return None,
    };
    let alike = [k_plane, v_plane].into_iter().all(|plane| {
        plane.format == q.dtype && plane.head_dim == k_plane.head_dim && lies_well(plane)
    });
    let fits = prefill_bytes(k_plane.head_dim) <= shared_bytes_max;
    let takes = alike && fits && [q, out].into_iter().all(is_aligned);
    kernels.get(index).copied().filter(|_| takes)
}

pub(super) fn prefill(kernel: &'static str, params: &AttendParams, extent: &Extent) -> Launch {
    let rows = extent.total_q.saturating_mul(params.group);
    let units = rows.div_euclid(64).saturating_add(extent.sequences);
    let grid = [units, params.k_plane.num_kv_heads, 1];
    let shared_bytes = prefill_bytes(params.k_plane.head_dim);
    Launch { kernel, grid, threads: 128, shared_bytes }
}

fn prefill_bytes(dim: u32) -> u32 {
    let tokens: u32 = if dim <= 128 { 64 } else { 32 };
    let rows = tokens.saturating_mul(2).saturating_add(64);
    let staged = rows.saturating_mul(dim.saturating_add(8)).saturating_mul(2);
    staged.saturating_add(tokens.saturating_mul(32)).saturating_add(16)
}

/// Whether all rows are alike and lie on 16 bytes.
fn lies_well(plane: &Plane) -> bool {
    let strides = [plane.base, plane.block_bytes, plane.token_stride, plane.head_stride];
    let extras = [plane.transforms, plane.block_means, plane.sinks, plane.has_tail];
    strides.iter().all(|n| n.is_multiple_of(16)) && extras.iter().all(|n| *n == 0)
}

fn is_aligned(tensor: &Tensor) -> bool {
    [tensor.data, tensor.batch_stride, tensor.token_stride].iter().all(|n| n.is_multiple_of(16))
}
