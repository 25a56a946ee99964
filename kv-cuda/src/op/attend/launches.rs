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
/// Bytes of shared memory of `attend_rows` and `attend_rows_large` besides their rows.
const ROWS_FIXED: u32 = 43_024;
/// Values of a row of theirs besides those of K and V.
const ROWS_MORE: u32 = 72;
/// `head_dim`s of the kernels for prefill.
const PREFILL_DIMS: [u32; 6] = [64, 80, 96, 128, 192, 256];
/// Numbers of `KvDtype`, which are those of the plain formats too.
const F16: u32 = 1;
const BF16: u32 = 2;
/// Numbers of `KvFormat`: from the first of these on, levels take more than f16 has, but for NVFP4.
const L6: u32 = 12;
const NVFP4: u32 = 20;

/// `attend.cu`: every shape, format and option.
pub(super) fn rows(params: &AttendParams, extent: &Extent, splits_max: u32) -> Launch {
    let up = |n: u32| n.checked_next_multiple_of(64).unwrap_or(u32::MAX);
    let dims = up(params.k_plane.head_dim).saturating_add(up(params.v_plane.head_dim));
    // By head_dim alone, because results differ in the last bits.
    let (kernel, rows) =
        if dims <= DIMS_MAX { ("attend_rows", 4_u32) } else { ("attend_rows_large", 1) };
    let rows_of_block = rows.saturating_mul(4);
    let units = extent.total_q.saturating_mul(params.group).checked_div(rows_of_block);
    let shared_bytes = dims
        .saturating_add(ROWS_MORE)
        .saturating_mul(16)
        .saturating_mul(rows)
        .saturating_add(ROWS_FIXED);
    let grid = [
        units.unwrap_or(0).saturating_add(extent.sequences),
        params.k_plane.num_kv_heads,
        splits_max.clamp(1, MAX_YZ),
    ];
    Launch { kernel, grid, threads: 128, shared_bytes }
}

/// Largest `head_dim` of K and of V that `attend_rows_large` has the shared memory for.
pub(in crate::op) fn head_dim_max(shared_bytes_max: u32) -> u32 {
    let dims = (shared_bytes_max.saturating_sub(ROWS_FIXED) / 16).saturating_sub(ROWS_MORE);
    (dims / 128).saturating_mul(64)
}

/// `decode.h`.
pub(super) fn decode(shape: &Shape, work: &Work) -> Launch {
    let Shape { kernel, threads, shared_bytes, .. } = *shape;
    Launch { kernel, grid: [work.slots, 1, 1], threads, shared_bytes }
}

/// What a kernel for prefill has in shared memory at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Tiles {
    /// Rows of queries of a thread block: 16 or 32 for each of four warps.
    rows: u32,
    /// Tokens of a tile.
    tokens: u32,
    /// Tiles of K, and of V.
    buffers: u32,
}

impl Tiles {
    /// The table: by `head_dim`, and by whether rows are copied (`prefill.h`) or decoded
    /// (`prefill_coded.h`). 32 rows a warp are as many as registers have room for up to 128; what
    /// is decoded has registers for 16.
    const fn of(dim: u32, is_copied: bool) -> Self {
        let (rows, tokens) = if dim <= 128 { (128, 64) } else { (64, 32) };
        if is_copied {
            Self { rows, tokens, buffers: 2 }
        } else {
            Self { rows: 64, tokens, buffers: 1 }
        }
    }

    /// Bytes of rows, of `of_token` more for each token of a tile, and of `more`.
    const fn bytes(self, dim: u32, of_token: u32, more: u32) -> u32 {
        let tokens = self.tokens.saturating_mul(self.buffers).saturating_mul(2);
        let rows = self.rows.saturating_add(tokens).saturating_mul(dim).saturating_mul(2);
        rows.saturating_add(self.tokens.saturating_mul(of_token)).saturating_add(more)
    }
}

/// A kernel for prefill, and the bytes of shared memory that it needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Prefill {
    pub(super) kernel: &'static str,
    rows: u32,
    shared_bytes: u32,
}

impl Prefill {
    /// The kernel that takes this call, if there is one: that of `prefill.h`, else that of
    /// `prefill_coded.h`.
    pub(super) fn of(params: &AttendParams, shared_bytes_max: u32) -> Option<Self> {
        let AttendParams { q, out, k_plane, v_plane, .. } = params;
        let planes = [k_plane, v_plane];
        let dim = k_plane.head_dim;
        let index = PREFILL_DIMS.iter().position(|known| *known == dim)?;
        let alike = planes.iter().all(|plane| plane.head_dim == dim);
        let takes = alike && [q, out].into_iter().all(is_aligned);
        let is_plain = planes.iter().all(|plane| plane.format == q.dtype && lies_well(plane));
        let is_coded = planes.iter().all(|plane| decodes(plane))
            && (params.lse.data == 0 || is_scored_exactly(k_plane));
        let (names, of_token, more) = match q.dtype {
            F16 if is_plain => (PREFILL_F16, 32, 32),
            BF16 if is_plain => (PREFILL_BF16, 32, 32),
            F16 | BF16 if is_coded => (PREFILL_CODED, 64, 800),
            _ => return None,
        };
        let kernel = names.get(index).copied()?;
        let tiles = Tiles::of(dim, is_plain);
        let (rows, shared_bytes) = (tiles.rows, tiles.bytes(dim, of_token, more));
        (takes && shared_bytes <= shared_bytes_max).then_some(Self { kernel, rows, shared_bytes })
    }
}

pub(super) fn prefill(taker: Prefill, params: &AttendParams, extent: &Extent) -> Launch {
    let rows = extent.total_q.saturating_mul(params.group);
    let units = rows.checked_div(taker.rows).unwrap_or(0).saturating_add(extent.sequences);
    let grid = [units, params.k_plane.num_kv_heads, 1];
    Launch { kernel: taker.kernel, grid, threads: 128, shared_bytes: taker.shared_bytes }
}

/// Whether all rows are alike and lie on 16 bytes.
fn lies_well(plane: &Plane) -> bool {
    let strides = [plane.base, plane.block_bytes, plane.token_stride, plane.head_stride];
    let extras = [plane.transforms, plane.block_means, plane.sinks, plane.has_tail];
    strides.iter().all(|n| n.is_multiple_of(16)) && extras.iter().all(|n| *n == 0)
}

/// Whether rows become levels of f16: codes of every format do.
fn decodes(plane: &Plane) -> bool {
    (plane.format == F16 || plane.format > BF16) && plane.block_means == 0
}

/// Whether neither levels of these keys nor the queries that meet them are rounded to f16.
fn is_scored_exactly(k_plane: &Plane) -> bool {
    let is_exact = k_plane.format < L6 || k_plane.format == NVFP4;
    is_exact && k_plane.transforms == 0
}

fn is_aligned(tensor: &Tensor) -> bool {
    [tensor.data, tensor.batch_stride, tensor.token_stride].iter().all(|n| n.is_multiple_of(16))
}

const PREFILL_F16: [&str; 6] = [
    "prefill_f16_64",
    "prefill_f16_80",
    "prefill_f16_96",
    "prefill_f16_128",
    "prefill_f16_192",
    "prefill_f16_256",
];
const PREFILL_BF16: [&str; 6] = [
    "prefill_bf16_64",
    "prefill_bf16_80",
    "prefill_bf16_96",
    "prefill_bf16_128",
    "prefill_bf16_192",
    "prefill_bf16_256",
];
const PREFILL_CODED: [&str; 6] = [
    "prefill_coded_64",
    "prefill_coded_80",
    "prefill_coded_96",
    "prefill_coded_128",
    "prefill_coded_192",
    "prefill_coded_256",
];

#[cfg(test)]
mod tests {
    use super::*;

    const FORMATS: u32 = 21; // as many as `KvFormat::all` has
    const FORMAT_F32: u32 = 0;
    const ROOM: u32 = 99 << 10;

    fn params(dtype: u32, formats: [u32; 2], dim: u32) -> AttendParams {
        let tensor = Tensor { data: 4096, dtype, dim, token_stride: 2048, ..Tensor::default() };
        let [k_plane, v_plane] = formats.map(|format| Plane {
            base: 4096,
            block_bytes: 4096,
            token_stride: 512,
            head_stride: 512,
            head_dim: dim,
            format,
            ..Plane::default()
        });
        AttendParams { q: tensor, out: tensor, k_plane, v_plane, ..AttendParams::default() }
    }

    fn kernel(params: &AttendParams) -> Option<&'static str> {
        Prefill::of(params, ROOM).map(|taker| taker.kernel)
    }

    #[test]
    fn rows_of_the_queries_type_are_copied_where_they_lie_well() {
        let params = params(F16, [F16; 2], 128);
        assert_eq!(kernel(&params), Some("prefill_f16_128"));
        let mut crooked = params;
        crooked.v_plane.token_stride += 2;
        assert_eq!(kernel(&crooked), Some("prefill_coded_128"));
        let mut turned = params;
        turned.k_plane.transforms = 1;
        assert_eq!(kernel(&turned), Some("prefill_coded_128"));
        let mut crooked = params;
        crooked.q.data += 2;
        assert_eq!(kernel(&crooked), None);
    }

    #[test]
    fn codes_of_every_format_are_decoded() {
        for dim in PREFILL_DIMS {
            for k in BF16 + 1..FORMATS {
                for v in BF16 + 1..FORMATS {
                    let name = |dtype| kernel(&params(dtype, [k, v], dim));
                    let coded = format!("prefill_coded_{dim}");
                    assert_eq!(name(F16), Some(coded.as_str()));
                    assert_eq!(name(BF16), Some(coded.as_str()));
                    assert_eq!(name(FORMAT_F32), None);
                }
            }
        }
    }

    #[test]
    fn plain_rows_are_decoded_where_they_have_room() {
        let code = BF16 + 1;
        assert_eq!(kernel(&params(BF16, [BF16, BF16], 64)), Some("prefill_bf16_64"));
        assert_eq!(kernel(&params(BF16, [F16, code], 64)), Some("prefill_coded_64"));
        assert_eq!(kernel(&params(F16, [code, F16], 64)), Some("prefill_coded_64"));
        assert_eq!(kernel(&params(F16, [code, BF16], 64)), None);
        assert_eq!(kernel(&params(BF16, [FORMAT_F32, code], 64)), None);
    }

    #[test]
    fn a_log_sum_exp_needs_exact_scores() {
        let exact = [F16, 3, 11, NVFP4];
        for format in [F16, 3, 11, L6, 13, 17, 18, 19, NVFP4] {
            let mut params = params(BF16, [format, L6], 64);
            params.lse = Tensor { data: 4096, ..Tensor::default() };
            assert_eq!(kernel(&params).is_some(), exact.contains(&format), "{format}");
            params.k_plane.transforms = 1;
            assert_eq!(kernel(&params), None, "{format}");
        }
    }

    #[test]
    fn what_no_kernel_has_is_left() {
        let code = [BF16 + 1; 2];
        assert_eq!(kernel(&params(BF16, code, 72)), None);
        let mut uneven = params(BF16, code, 64);
        uneven.v_plane.head_dim = 80;
        assert_eq!(kernel(&uneven), None);
        let mut means = params(BF16, code, 64);
        means.k_plane.block_means = 1;
        assert_eq!(kernel(&means), None);
        let mut tail = params(BF16, code, 64);
        (tail.k_plane.sinks, tail.k_plane.has_tail) = (4, 1);
        assert_eq!(kernel(&tail), Some("prefill_coded_64"));
        let little = Prefill::of(&params(BF16, code, 256), 48 << 10);
        assert_eq!(little, None);
    }

    #[test]
    fn shared_memory_is_what_the_sources_say() {
        // By hand: 2 * 128 * (128 + 4 * 64) + 64 * 32 + 32, 2 * 256 * (64 + 4 * 32) + 32 * 32 + 32,
        // and 2 * 256 * (64 + 2 * 32) + 32 * 64 + 800.
        let bytes = |params| Prefill::of(&params, ROOM).map(|taker| taker.shared_bytes);
        assert_eq!(bytes(params(F16, [F16; 2], 128)), Some(100_384));
        assert_eq!(bytes(params(F16, [F16; 2], 256)), Some(99_360));
        assert_eq!(bytes(params(F16, [BF16 + 1; 2], 256)), Some(68_384));
    }

    #[test]
    fn tiles_are_as_large_as_registers_and_shared_memory_allow() {
        let code = BF16 + 1;
        for (dim, copied, decoded) in [
            (64, [128, 64, 2], [64, 64, 1]),
            (80, [128, 64, 2], [64, 64, 1]),
            (96, [128, 64, 2], [64, 64, 1]),
            (128, [128, 64, 2], [64, 64, 1]),
            (192, [64, 32, 2], [64, 32, 1]),
            (256, [64, 32, 2], [64, 32, 1]),
        ] {
            for (is_copied, expected) in [(true, copied), (false, decoded)] {
                let Tiles { rows, tokens, buffers } = Tiles::of(dim, is_copied);
                assert_eq!([rows, tokens, buffers], expected, "{dim}");
            }
            // Cards with the least of it, `sm_86` and `sm_89`, have this for a thread block.
            for format in [F16, code] {
                let params = params(F16, [format; 2], dim);
                assert!(Prefill::of(&params, 101_376).is_some(), "{dim}");
            }
        }
    }

    #[test]
    fn a_grid_has_a_block_for_every_unit_of_rows() {
        let extent = Extent { total_q: 100, sequences: 3, ..Extent::default() };
        let grid = |format, dim| {
            let mut params = params(F16, [format; 2], dim);
            (params.group, params.k_plane.num_kv_heads) = (4, 2);
            prefill(Prefill::of(&params, ROOM).unwrap(), &params, &extent).grid
        };
        assert_eq!(grid(F16, 128), [6, 2, 1]);
        assert_eq!(grid(F16, 256), [9, 2, 1]);
        assert_eq!(grid(BF16 + 1, 128), [9, 2, 1]);
    }

    #[test]
    fn the_largest_head_dim_fits_and_the_next_does_not() {
        let extent = Extent::default();
        for (max, dim) in [(101_376, 1728), (232_448, 5824)] {
            assert_eq!(head_dim_max(max), dim);
            let bytes = |dim| rows(&params(F16, [F16; 2], dim), &extent, 1).shared_bytes;
            assert!(bytes(dim) <= max && bytes(dim + 1) > max, "{dim}");
        }
        assert_eq!(head_dim_max(1024), 0);
    }
}
