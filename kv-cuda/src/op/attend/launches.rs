//! Launches of the attention kernels, with the numbers that the head comments of their sources
//! give.
#[cfg(test)]
mod tests;

use kv_core::error::DeviceError;
use kv_core::{KvFormat, ScaleGroup, Scaling};

use super::super::{MAX_YZ, Refusal};
use super::OPERATION;
use crate::decode::{self, Shape, Work};
use crate::gpu::Launch;
use crate::params::{AttendParams, Plane, Tensor};
use crate::step::Extent;
use crate::tensors::unsupported;

/// `head_dim` of K and V together up to which four rows per warp fit the shared memory that every
/// card since `sm_80` has.
const DIMS_MAX: u32 = 768;
/// Bytes of shared memory of `attend_rows` and `attend_rows_large` besides their rows.
const ROWS_FIXED: u32 = 43_024;
/// Values of their rows besides those of K and V.
const ROWS_MORE: u32 = 72;
/// Values of `head_dim` that the prefill kernels support.
const PREFILL_DIMS: [u32; 6] = [64, 80, 96, 128, 192, 256];
/// Numbers of element types in kernels, which equal those of the unquantised formats.
const F16: u32 = KvFormat::F16.kernel_code();
const BF16: u32 = KvFormat::Bf16.kernel_code();
/// Formats whose levels f16 represents exactly in `prefill_levels.h`.
const EXACT: &[KvFormat] = &[
    KvFormat::F16,
    KvFormat::Fp8E4m3(Scaling::Tensor),
    KvFormat::Fp8E4m3(Scaling::Head),
    KvFormat::Fp8E4m3(Scaling::Row),
    KvFormat::Fp8E5m2(Scaling::Tensor),
    KvFormat::Fp8E5m2(Scaling::Head),
    KvFormat::Fp8E5m2(Scaling::Row),
    KvFormat::Int8(Scaling::Tensor),
    KvFormat::Int8(Scaling::Head),
    KvFormat::Int8(Scaling::Row),
    KvFormat::Nvfp4,
];
/// Formats whose levels are rounded to f16 there.
const ROUNDED_LEVELS: &[KvFormat] = &[
    KvFormat::L6(ScaleGroup::Row),
    KvFormat::L6(ScaleGroup::Group32),
    KvFormat::L4(ScaleGroup::Row),
    KvFormat::L4(ScaleGroup::Group32),
    KvFormat::L3(ScaleGroup::Row),
    KvFormat::L3(ScaleGroup::Group32),
    KvFormat::Q8_0,
    KvFormat::Q4_0,
];

/// Formats that `prefill_staged.h` decodes, by the scales of their rows: one of a head or tensor,
/// one of each row, and 4-bit codes with one of each row.
const STAGED: &[Staged] = &[
    Staged {
        names: ["prefill_codes_64", "prefill_codes_128"],
        formats: &[
            KvFormat::Fp8E4m3(Scaling::Tensor),
            KvFormat::Fp8E4m3(Scaling::Head),
            KvFormat::Fp8E5m2(Scaling::Tensor),
            KvFormat::Fp8E5m2(Scaling::Head),
            KvFormat::Int8(Scaling::Tensor),
            KvFormat::Int8(Scaling::Head),
        ],
        per_byte: 1,
        row_alignment: 16,
    },
    Staged {
        names: ["prefill_rows_64", "prefill_rows_128"],
        formats: &[
            KvFormat::Fp8E4m3(Scaling::Row),
            KvFormat::Fp8E5m2(Scaling::Row),
            KvFormat::Int8(Scaling::Row),
        ],
        per_byte: 1,
        row_alignment: 2,
    },
    Staged {
        names: ["prefill_l4_64", "prefill_l4_128"],
        formats: &[KvFormat::L4(ScaleGroup::Row)],
        per_byte: 2,
        row_alignment: 2,
    },
];
/// Values of `head_dim` that `prefill_staged.h` supports, those of nearly all models: the others
/// would double its machine code.
const STAGED_DIMS: [u32; 2] = [64, 128];

/// A family of kernels of `prefill_staged.h`.
#[derive(Debug)]
struct Staged {
    /// Kernels in the order of [`STAGED_DIMS`].
    names: [&'static str; STAGED_DIMS.len()],
    formats: &'static [KvFormat],
    /// Codes in a byte.
    per_byte: u32,
    /// Alignment of rows. Copies of 16 bytes go beyond rows with a scale, but not beyond blocks.
    row_alignment: u64,
}

/// Query rows of one kv head that kernels can count: in 32 bits, rounded up to 128.
const ROWS_MAX: u32 = u32::MAX - 127;

/// Refuses a step with more query rows than kernels can count: a query has `group` rows.
pub(super) fn require_rows(total_q: u32, group: u32) -> Result<(), DeviceError> {
    match total_q.checked_mul(group) {
        Some(rows) if rows <= ROWS_MAX => Ok(()),
        _ => {
            let why = format!("{total_q} queries, {group} heads a group: over {ROWS_MAX} rows");
            Err(unsupported(OPERATION, why))
        }
    }
}

/// Launches `attend.cu`, which supports every shape, format and option.
pub(super) fn rows(params: &AttendParams, extent: &Extent, splits_max: u32) -> Launch {
    // Saturating: planes of a caller may have any `head_dim`, and an extent of step limits any
    // size. A device refuses such a launch.
    let up = |n: u32| n.checked_next_multiple_of(64).unwrap_or(u32::MAX);
    let dims = up(params.k_plane.head_dim).saturating_add(up(params.v_plane.head_dim));
    // Chosen by head_dim alone, because results differ in the last bits.
    let (kernel, rows) =
        if dims <= DIMS_MAX { ("attend_rows", 4_u32) } else { ("attend_rows_large", 1) };
    let rows_of_block = rows * 4;
    let items = extent.total_q.saturating_mul(params.group) / rows_of_block;
    let shared_bytes =
        dims.saturating_add(ROWS_MORE).saturating_mul(16 * rows).saturating_add(ROWS_FIXED);
    let grid = [
        items.saturating_add(extent.sequences),
        params.k_plane.num_kv_heads,
        splits_max.clamp(1, MAX_YZ),
    ];
    Launch { kernel, grid, threads: 128, shared_bytes }
}

/// Returns the largest `head_dim` of K and of V whose rows fit the shared memory of
/// `attend_rows_large`.
pub(in crate::op) fn head_dim_max(shared_bytes_max: u32) -> u32 {
    let dims = (shared_bytes_max.saturating_sub(ROWS_FIXED) / 16).saturating_sub(ROWS_MORE);
    dims / 128 * 64
}

/// Launches `decode.h`.
pub(super) fn decode(shape: &Shape, work: &Work) -> Launch {
    let Shape { kernel, threads, shared_bytes, .. } = *shape;
    Launch { kernel, grid: [work.slots, 1, 1], threads, shared_bytes }
}

/// Tiles of a prefill kernel in shared memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Tiles {
    /// Query rows of a thread block: 16 or 32 for each of four warps.
    rows: u32,
    /// Tokens of a tile.
    tokens: u32,
    /// Buffered tiles of K, and of V.
    buffers: u32,
}

impl Tiles {
    /// Returns the tiles by `head_dim`, and by whether rows are copied (`prefill.h`) or decoded
    /// (`prefill_coded.h`). Up to a `head_dim` of 128, registers hold at most 32 rows per warp;
    /// with decoding, 16. [`Tiles::staged`] are shorter, so that registers hold 32 beside codes.
    const fn of(dim: u32, is_copied: bool) -> Self {
        let (rows, tokens) = if dim <= 128 { (128, 64) } else { (64, 32) };
        if is_copied {
            Self { rows, tokens, buffers: 2 }
        } else {
            Self { rows: 64, tokens, buffers: 1 }
        }
    }

    const fn staged(dim: u32) -> Self {
        Self { rows: 128, tokens: if dim <= 64 { 64 } else { 32 }, buffers: 2 }
    }

    /// Returns the bytes of all rows, plus `of_token` per token of a tile, plus `more`.
    const fn bytes(self, dim: u32, of_token: u32, more: u32) -> u32 {
        let rows = self.rows + self.tokens * self.buffers * 2;
        rows * dim * 2 + self.tokens * of_token + more
    }
}

/// A prefill kernel, and the bytes of shared memory that it needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Prefill {
    pub(super) kernel: &'static str,
    /// Query rows of a thread block.
    pub(super) rows: u32,
    shared_bytes: u32,
}

const LONG_QUERIES: Refusal = "queries that are not f16 or bf16";
const NO_DIM: Refusal = "head_dim is not 64, 80, 96, 128, 192 or 256";
const UNLIKE_DIMS: Refusal = "K and V differ in head_dim";
const UNALIGNED_TENSORS: Refusal = "queries or outputs that do not begin at multiples of 16 bytes";
const OTHER_TYPE: Refusal = "rows of another type than the queries";
const NOT_COPIED: Refusal = "rows that are transformed, of several widths or not aligned";
const OTHER_FORMAT: Refusal = "a format that is not staged";
const UNLIKE_FORMATS: Refusal = "K and V differ in format";
const NO_STAGED_DIM: Refusal = "head_dim is not 64 or 128";
const NOT_STAGED: Refusal = "codes beside rows of 16 bits, or not aligned";
const NO_EXPONENTS: Refusal = "scores that are capped or whose scale is not positive";
const NO_FORMAT: Refusal = "a format that prefill does not decode";
const BLOCK_MEANS: Refusal = "block means";
const ROUNDED: Refusal = "a log-sum-exp of keys or queries that are rounded to f16";
const NO_ROOM: Refusal = "too little shared memory for a tile";

impl Staged {
    /// Returns whether all rows of a plane are codes that copies of 16 bytes reach.
    fn reads(&self, plane: &Plane) -> bool {
        let is_wide = plane.full_precision_prefix != 0 || plane.has_tail != 0;
        let blocks = [plane.base, plane.block_bytes];
        let rows = [plane.token_stride, plane.head_stride];
        !is_wide
            && blocks.iter().all(|n| n.is_multiple_of(16))
            && rows.iter().all(|n| n.is_multiple_of(self.row_alignment))
    }
}

impl Prefill {
    /// Chooses the kernel for a call, the fastest that takes it, or returns why the last one does
    /// not: only the general kernel is left.
    pub(super) fn of(params: &AttendParams, shared_bytes_max: u32) -> Result<Self, Refusal> {
        Self::copied(params, shared_bytes_max)
            .or_else(|_| Self::staged(params, shared_bytes_max))
            .or_else(|_| Self::decoded(params, shared_bytes_max))
    }

    /// Returns the kernel of `prefill.h`, which copies rows of the queries' type, or why it does
    /// not take a call.
    fn copied(params: &AttendParams, shared_bytes_max: u32) -> Result<Self, Refusal> {
        let index = dim_of(params)?;
        let names = if params.q.dtype == F16 { PREFILL_F16 } else { PREFILL_BF16 };
        for plane in [&params.k_plane, &params.v_plane] {
            if plane.format != params.q.dtype {
                return Err(OTHER_TYPE);
            }
            if !is_copyable(plane) {
                return Err(NOT_COPIED);
            }
        }
        let tiles = Tiles::of(params.k_plane.head_dim, true);
        let kernel = names.get(index).copied().ok_or(NO_DIM)?;
        Self::sized(kernel, params, (tiles, 32, 32), shared_bytes_max)
    }

    /// Returns the kernel of `prefill_staged.h`, which copies codes ahead and decodes them beside
    /// the products, or why it does not take a call.
    fn staged(params: &AttendParams, shared_bytes_max: u32) -> Result<Self, Refusal> {
        dim_of(params)?;
        let AttendParams { k_plane, v_plane, .. } = params;
        let dim = k_plane.head_dim;
        let index = STAGED_DIMS.iter().position(|known| *known == dim).ok_or(NO_STAGED_DIM)?;
        let is_of_k = |family: &&Staged| is_of(k_plane, family.formats);
        let family = STAGED.iter().find(is_of_k).ok_or(OTHER_FORMAT)?;
        if v_plane.format != k_plane.format {
            return Err(UNLIKE_FORMATS);
        }
        for plane in [k_plane, v_plane] {
            if plane.block_means != 0 {
                return Err(BLOCK_MEANS);
            }
            if !family.reads(plane) {
                return Err(NOT_STAGED);
            }
        }
        // The largest exponent of a tile is found before it is scaled.
        if params.soft_cap > 0.0 || params.scale.is_nan() || params.scale <= 0.0 {
            return Err(NO_EXPONENTS);
        }
        if params.lse.data != 0 && !is_scored_exactly(k_plane) {
            return Err(ROUNDED);
        }
        let kernel = family.names.get(index).copied().ok_or(NO_STAGED_DIM)?;
        let tiles = Tiles::staged(dim);
        let of_token = 2 * (dim / family.per_byte + 16) + 56;
        Self::sized(kernel, params, (tiles, of_token, 8 * tiles.rows + 32), shared_bytes_max)
    }

    /// Returns the kernel of `prefill_coded.h`, which decodes rows, or why it does not take a call.
    fn decoded(params: &AttendParams, shared_bytes_max: u32) -> Result<Self, Refusal> {
        let index = dim_of(params)?;
        for plane in [&params.k_plane, &params.v_plane] {
            if !is_of(plane, EXACT) && !is_of(plane, ROUNDED_LEVELS) {
                return Err(NO_FORMAT);
            }
            if plane.block_means != 0 {
                return Err(BLOCK_MEANS);
            }
        }
        if params.lse.data != 0 && !is_scored_exactly(&params.k_plane) {
            return Err(ROUNDED);
        }
        let tiles = Tiles::of(params.k_plane.head_dim, false);
        let kernel = PREFILL_CODED.get(index).copied().ok_or(NO_DIM)?;
        Self::sized(kernel, params, (tiles, 64, 800), shared_bytes_max)
    }

    /// Returns a kernel whose tiles have `of_token` bytes per token, plus `more`.
    fn sized(
        kernel: &'static str,
        params: &AttendParams,
        (tiles, of_token, more): (Tiles, u32, u32),
        shared_bytes_max: u32,
    ) -> Result<Self, Refusal> {
        let shared_bytes = tiles.bytes(params.k_plane.head_dim, of_token, more);
        if shared_bytes > shared_bytes_max {
            return Err(NO_ROOM);
        }
        Ok(Self { kernel, rows: tiles.rows, shared_bytes })
    }

    /// Returns the bytes of a partial result: for every 64 rows, 128 threads have 16 bytes for
    /// every 8 columns, and 16 more.
    pub(super) fn partial_bytes(self, dim: u64) -> u64 {
        (dim + 8) * u64::from(self.rows) * 4
    }
}

pub(super) fn prefill(selected: Prefill, work: &Work, extent: &Extent) -> Launch {
    // A device refuses a grid of so many.
    let items = u32::try_from(decode::Room::of(work, extent).items).unwrap_or(u32::MAX);
    let grid = [items, work.kv_heads, 1];
    Launch { kernel: selected.kernel, grid, threads: 128, shared_bytes: selected.shared_bytes }
}

/// Returns the index in [`PREFILL_DIMS`] of a call's `head_dim`, after checking what all prefill
/// kernels require.
fn dim_of(params: &AttendParams) -> Result<usize, Refusal> {
    let AttendParams { q, out, k_plane, v_plane, .. } = params;
    if ![F16, BF16].contains(&q.dtype) {
        return Err(LONG_QUERIES);
    }
    if k_plane.head_dim != v_plane.head_dim {
        return Err(UNLIKE_DIMS);
    }
    if ![q, out].into_iter().all(is_aligned) {
        return Err(UNALIGNED_TENSORS);
    }
    PREFILL_DIMS.iter().position(|known| *known == k_plane.head_dim).ok_or(NO_DIM)
}

/// Returns whether all rows have one width and are aligned to 16 bytes.
fn is_copyable(plane: &Plane) -> bool {
    let strides = [plane.base, plane.block_bytes, plane.token_stride, plane.head_stride];
    let extras = [plane.transforms, plane.block_means, plane.full_precision_prefix, plane.has_tail];
    strides.iter().all(|n| n.is_multiple_of(16)) && extras.iter().all(|n| *n == 0)
}

fn is_of(plane: &Plane, formats: &[KvFormat]) -> bool {
    formats.iter().any(|format| format.kernel_code() == plane.format)
}

/// Returns whether neither levels of these keys nor their queries are rounded to f16.
fn is_scored_exactly(k_plane: &Plane) -> bool {
    is_of(k_plane, EXACT) && k_plane.transforms == 0
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
