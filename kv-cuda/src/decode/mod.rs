//! Decoding on tensor cores: the calls that its kernels support, their launches, and their memory.
//!
//! The kernels are in `kernels/decode.h`; [`plan`] distributes the work.
mod plan;

pub(crate) use plan::{Kind, Work};

use crate::params::{Plane, Tensor};
use crate::step::Extent;

/// Maximum queries of an entry that is decoded; an entry with more is prefill.
pub(crate) const Q_LEN_MAX: u32 = 8;
/// Query rows that one thread block processes together: the rows of one matrix product.
const ROWS: u32 = 16;
/// Tokens of K or of V in a stage of a warp's ring buffer.
const STAGE_TOKENS: u32 = 32;
/// Stages of a warp's ring buffer: minimum and maximum.
const STAGES: (u32, u32) = (2, 8);
/// KV splits whose weights a warp holds at a time when it merges them.
const MERGE_SPLITS: u32 = 16;
/// Shared memory that a multiprocessor reserves for every thread block.
const SHARED_RESERVED: u32 = 1024;

/// Alignment of every row: of 16-byte copies, and of rows with a scale.
const ALIGNED: u64 = 16;
const ALIGNED_SCALED: u64 = 2;

/// Supported values of `head_dim`.
const DIMS: [u32; 6] = [64, 80, 96, 128, 192, 256];

/// Lists the kernels of a format, in the order of [`DIMS`].
macro_rules! kernels {
    ($format:literal) => {
        [
            concat!("decode_", $format, "_64"),
            concat!("decode_", $format, "_80"),
            concat!("decode_", $format, "_96"),
            concat!("decode_", $format, "_128"),
            concat!("decode_", $format, "_192"),
            concat!("decode_", $format, "_256"),
        ]
    };
}

/// Numbers of element types and stored formats in kernels.
mod code {
    use kv_core::KvFormat::{Bf16, F16 as Half, Fp8E4m3, Fp8E5m2, Int8, L4 as Lloyd4};
    use kv_core::Scaling::{Head, Row, Tensor};
    use kv_core::{DType, ScaleGroup, backend::kernels::dtype_code};

    pub(super) const DTYPE_F16: u32 = dtype_code(DType::F16);
    pub(super) const DTYPE_BF16: u32 = dtype_code(DType::Bf16);
    pub(super) const F16: u32 = Half.kernel_code();
    pub(super) const BF16: u32 = Bf16.kernel_code();
    pub(super) const E4M3: [u32; 2] = [Fp8E4m3(Tensor).kernel_code(), Fp8E4m3(Head).kernel_code()];
    pub(super) const E5M2: [u32; 2] = [Fp8E5m2(Tensor).kernel_code(), Fp8E5m2(Head).kernel_code()];
    pub(super) const INT8: [u32; 2] = [Int8(Tensor).kernel_code(), Int8(Head).kernel_code()];
    // Formats whose rows have a scale of their own.
    pub(super) const E4M3_ROW: u32 = Fp8E4m3(Row).kernel_code();
    pub(super) const E5M2_ROW: u32 = Fp8E5m2(Row).kernel_code();
    pub(super) const INT8_ROW: u32 = Int8(Row).kernel_code();
    pub(super) const L4: u32 = Lloyd4(ScaleGroup::Row).kernel_code();
}

/// The launch of a decoding kernel, except for the number of thread blocks, which is the plan's
/// number of slots.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Shape {
    /// Name of the kernel.
    pub(crate) kernel: &'static str,
    /// Threads of a block.
    pub(crate) threads: u32,
    /// `DecodeParams::stages`.
    pub(crate) stages: u32,
    /// `DecodeParams::block_shift`.
    pub(crate) block_shift: u32,
    /// Bytes of dynamic shared memory.
    pub(crate) shared_bytes: u32,
}

impl Shape {
    /// Chooses the launch of a call on a device whose thread blocks have `shared_bytes_max` bytes
    /// of shared memory. Returns `None` for a call that only the general kernel supports: different
    /// head dimensions of K and V, other formats, transforms of rows without scales of their own,
    /// block means, 16-bit rows among codes, and rows or blocks that are not aligned for copies.
    pub(crate) fn of(
        (q, out): (&Tensor, &Tensor),
        (k, v): (&Plane, &Plane),
        shared_bytes_max: u32,
    ) -> Option<Self> {
        let kernels = kernels_of(k, q.dtype)?;
        let alike = (k.format, k.head_dim) == (v.format, v.head_dim)
            && k.block_size == v.block_size
            && (q.dtype, q.dim, q.heads) == (out.dtype, out.dim, out.heads)
            && q.dim == k.head_dim;
        let lies_well = [k, v].into_iter().all(is_uniform) && [q, out].into_iter().all(is_even);
        let index = DIMS.iter().position(|dim| *dim == k.head_dim)?;
        let kernel = kernels.get(index).copied()?;
        if !alike || !lies_well {
            return None;
        }
        Self::sized(kernel, k, shared_bytes_max)
    }

    /// Computes the launch: two thread blocks share a multiprocessor if their ring buffers have two
    /// stages each.
    fn sized(kernel: &'static str, plane: &Plane, shared_bytes_max: u32) -> Option<Self> {
        let (dim, row_stride) = (plane.head_dim, row_stride(plane));
        let warps: u32 = if dim >= 192 { 2 } else { 4 };
        // Queries in shared memory: long ones, and the rounding errors of f16 in transformed ones.
        let copies = u32::from(dim >= 192) + u32::from(is_scaled(plane));
        let queries = dim * ROWS * 2 * copies;
        let stage_bytes = warps * STAGE_TOKENS * row_stride;
        // Padded rows of every warp with their maxima and sums, weights of splits, and a flag.
        let row = (dim + 4) * 4 + 8;
        let row = row + MERGE_SPLITS * 4;
        let merge = warps * ROWS * row + 16;
        let shared = |stages: u32| queries + (stages * stage_bytes).max(merge);
        let most = |room: u32| {
            let ring = room.checked_sub(queries)?.checked_div(stage_bytes)?;
            let stages = ring.min(STAGES.1);
            (stages >= STAGES.0 && shared(stages) <= room).then_some(stages)
        };
        let half = shared_bytes_max.saturating_sub(SHARED_RESERVED).checked_div(2)?;
        let stages = most(half).or_else(|| most(shared_bytes_max))?;
        let threads = warps * 32;
        let block_shift = shift_of(plane.block_size);
        Some(Self { kernel, threads, stages, block_shift, shared_bytes: shared(stages) })
    }
}

/// Returns the kernels that read a plane for queries of this type.
fn kernels_of(plane: &Plane, dtype: u32) -> Option<[&'static str; DIMS.len()]> {
    let is_short = [code::DTYPE_F16, code::DTYPE_BF16].contains(&dtype);
    match plane.format {
        code::F16 if dtype == code::DTYPE_F16 => Some(kernels!("f16")),
        code::BF16 if dtype == code::DTYPE_BF16 => Some(kernels!("bf16")),
        _ if !is_short => None,
        codes if code::E4M3.contains(&codes) => Some(kernels!("e4m3")),
        codes if code::E5M2.contains(&codes) => Some(kernels!("e5m2")),
        codes if code::INT8.contains(&codes) => Some(kernels!("int8")),
        // Longer rows would spill registers.
        code::E4M3_ROW if plane.head_dim <= 192 => Some(kernels!("e4m3_row")),
        code::E5M2_ROW => Some(kernels!("e5m2_row")),
        code::INT8_ROW => Some(kernels!("int8_row")),
        // Only rows of whole groups.
        code::L4 if plane.head_dim.is_multiple_of(32) => Some(kernels!("l4")),
        _ => None,
    }
}

/// Returns whether rows have scales of their own after their codes.
fn is_scaled(plane: &Plane) -> bool {
    [code::E4M3_ROW, code::E5M2_ROW, code::INT8_ROW, code::L4].contains(&plane.format)
}

/// Returns whether the kernels score keys of this plane as exactly as f32 does, as a log-sum-exp
/// requires. Levels of `l4` are rounded to f16.
pub(crate) fn scores_exactly(k: &Plane) -> bool {
    k.format != code::L4
}

/// Returns the logarithm of a power of two; 0 for other sizes, which kernels divide by.
fn shift_of(block_size: u32) -> u32 {
    if block_size.is_power_of_two() { block_size.trailing_zeros() } else { 0 }
}

/// Returns the bytes of a row in shared memory: all 16-byte chunks that contain a part of it,
/// wherever it begins.
fn row_stride(plane: &Plane) -> u32 {
    if is_scaled(plane) { plane.scales_begin + 16 } else { plane.row_bytes }
}

/// Returns whether all rows have one width and are aligned for copies of 16 bytes. Copies of rows
/// with scales go beyond a row: blocks must begin and end at 16 bytes, so that no copy leaves its
/// block.
fn is_uniform(plane: &Plane) -> bool {
    let extras = [plane.block_means, plane.full_precision_prefix, plane.has_tail];
    let rows = [plane.token_stride, plane.head_stride];
    let of_rows = if is_scaled(plane) { ALIGNED_SCALED } else { ALIGNED };
    [plane.block_bytes, plane.base].iter().all(|n| n.is_multiple_of(ALIGNED))
        && rows.iter().all(|stride| stride.is_multiple_of(of_rows))
        && extras.iter().all(|n| *n == 0)
        && (is_scaled(plane) || plane.transforms == 0)
}

/// Returns whether rows can be read and written two values at a time.
fn is_even(tensor: &Tensor) -> bool {
    [tensor.data, tensor.batch_stride, tensor.token_stride].iter().all(|n| n.is_multiple_of(4))
}

/// Memory that a scheduled call needs in addition to its tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Room {
    /// Number of work items of the plan; for prefill, of each kv head.
    pub(crate) items: u64,
    /// Partial results, each with a counter of 4 bytes.
    pub(crate) partials: u64,
}

/// The query rows that decoding has at most, for the memory of its partial results.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Rows {
    /// Queries of an entry that is decoded: `AttendParams::q_len_max`.
    pub(crate) q_len_max: u32,
    /// Rows of a partial result, each with `head_dim` f32 in `partial_rows` and one in
    /// `partial_stats`.
    pub(crate) of_partial: u64,
}

impl Rows {
    /// Counts the rows of any batch within this extent, as decode_merge.h does.
    pub(crate) fn of(work: &Work, extent: &Extent) -> Self {
        let q_len_max = extent.decode_q_len_max;
        let rows = u64::from(q_len_max) * u64::from(work.group);
        Self { q_len_max, of_partial: rows.min(ROWS.into()) }
    }
}

impl Room {
    /// Computes the need of any plan for a batch within this extent. The tokens of the longest
    /// sequence matter only if the splits may not depend on the batch.
    pub(crate) fn of(work: &Work, extent: &Extent) -> Self {
        let [sequences, total_q, tokens] =
            [extent.sequences, extent.total_q, extent.kv_len_max].map(u64::from);
        let group = u64::from(work.group);
        if let Kind::Prefill { rows: rows_of_tile } = work.kind {
            let tiles = total_q * group / u64::from(rows_of_tile) + sequences;
            return Self::of_prefill(work, sequences, tiles, tokens);
        }
        // Queries of longer entries are not decoded.
        let q_len_max = u64::from(Rows::of(work, extent).q_len_max);
        let rows = total_q.min(sequences * q_len_max) * group;
        let of_tile = u64::from(ROWS);
        let tiles = rows.div_ceil(of_tile) + sequences;
        let tiles = tiles.min(sequences * (q_len_max * group).div_ceil(of_tile));
        let query_tiles = tiles * u64::from(work.kv_heads);
        if work.invariant {
            let splits = tokens.div_ceil(plan::INVARIANT_TOKENS).max(1);
            let items = query_tiles * splits;
            return Self { items, partials: if splits > 1 { items } else { 0 } };
        }
        let slots = u64::from(work.slots);
        Self { items: query_tiles + slots, partials: slots * 2 }
    }

    /// Computes the need of prefill with up to `tiles` query tiles of each kv head.
    fn of_prefill(work: &Work, sequences: u64, tiles: u64, tokens: u64) -> Self {
        let heads = u64::from(work.kv_heads).max(1);
        let partials = if work.invariant {
            let few = plan::INVARIANT_BLOCKS_PREFILL / heads;
            let splits = tokens.div_ceil(plan::INVARIANT_TOKENS_PREFILL);
            let split_tiles = tiles.min(sequences * few);
            if splits > 1 { split_tiles * splits } else { 0 }
        } else if tokens > plan::SHORT_PREFILL {
            u64::from(work.slots) * 2 / heads
        } else {
            0
        };
        Self { items: tiles + partials, partials: partials * heads }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SCALED: [u32; 4] = [code::E4M3_ROW, code::E5M2_ROW, code::INT8_ROW, code::L4];

    fn tensor(dtype: u32, dim: u32) -> Tensor {
        let token_stride = u64::from(dim) * 8 * 2;
        Tensor {
            data: 256,
            token_stride,
            dtype,
            batch: 1,
            tokens: 4,
            heads: 8,
            dim,
            ..Tensor::default()
        }
    }

    fn plane(format: u32, head_dim: u32) -> Plane {
        let codes = match format {
            code::F16 | code::BF16 => head_dim * 2,
            code::L4 => head_dim / 2,
            _ => head_dim,
        };
        let row_bytes = if SCALED.contains(&format) { codes + 2 } else { codes };
        let head_stride = u64::from(row_bytes);
        Plane {
            base: 4096,
            block_bytes: head_stride * 2 * 16,
            token_stride: head_stride * 2,
            head_stride,
            num_blocks: 9,
            block_size: 16,
            num_kv_heads: 2,
            head_dim,
            format,
            row_bytes,
            scales_begin: codes,
            ..Plane::default()
        }
    }

    fn shape(format: u32, dtype: u32, dim: u32, shared: u32) -> Option<Shape> {
        let (q, plane) = (tensor(dtype, dim), plane(format, dim));
        Shape::of((&q, &q), (&plane, &plane), shared)
    }

    #[test]
    fn two_blocks_share_a_multiprocessor_if_possible() {
        const KIB: u32 = 1024;
        let expected = |kernel, threads, stages, shared_bytes| {
            Some(Shape { kernel, threads, stages, block_shift: 4, shared_bytes })
        };
        for (kib, stages) in [(227, 3), (163, 2), (99, 3)] {
            let found = shape(code::BF16, code::DTYPE_BF16, 128, kib * KIB);
            assert_eq!(found, expected("decode_bf16_128", 128, stages, stages * 32 * KIB), "{kib}");
        }
        let found = shape(code::F16, code::DTYPE_F16, 256, 99 * KIB);
        assert_eq!(found, expected("decode_f16_256", 64, 2, 72 * KIB));
        let found = shape(code::E4M3[1], code::DTYPE_BF16, 64, 227 * KIB);
        assert_eq!(found, expected("decode_e4m3_64", 128, 8, 64 * KIB));
        let found = shape(code::INT8_ROW, code::DTYPE_BF16, 128, 227 * KIB);
        assert_eq!(found, expected("decode_int8_row_128", 128, 6, 112 * KIB));
        for (shared, dim) in
            [227, 163, 99].into_iter().flat_map(|kib| DIMS.map(|dim| (kib * KIB, dim)))
        {
            let formats = [code::F16, code::BF16, code::E4M3[0], code::E5M2[0], code::INT8[0]];
            for format in formats.into_iter().chain(SCALED) {
                let dtype = if format == code::BF16 { code::DTYPE_BF16 } else { code::DTYPE_F16 };
                if [(code::L4, 80), (code::E4M3_ROW, 256)].contains(&(format, dim)) {
                    continue;
                }
                let found = shape(format, dtype, dim, shared).unwrap();
                assert!(
                    found.shared_bytes <= shared && (2..=8).contains(&found.stages),
                    "{found:?}"
                );
            }
        }
    }

    #[test]
    fn block_sizes_of_powers_of_two_use_a_shift() {
        let shifts = [1, 2, 3, 16, 48, 64, 256].map(shift_of);
        assert_eq!(shifts, [0, 1, 0, 4, 0, 6, 8]);
    }

    #[test]
    fn other_calls_are_left_to_the_general_kernel() {
        let shared = 99 * 1024;
        assert_eq!(shape(code::F16, code::DTYPE_BF16, 128, shared), None, "types differ");
        assert_eq!(shape(code::F16, 0, 128, shared), None, "f32 queries");
        assert_eq!(shape(12, code::DTYPE_F16, 128, shared), None, "l6");
        assert_eq!(shape(code::INT8_ROW, 0, 128, shared), None, "f32 queries over codes");
        assert_eq!(shape(code::L4, code::DTYPE_F16, 80, shared), None, "l4 with a partial group");
        assert_eq!(shape(code::E4M3_ROW, code::DTYPE_F16, 256, shared), None, "would spill");
        assert_eq!(shape(code::F16, code::DTYPE_F16, 72, shared), None, "another head_dim");
        let (q, good) = (tensor(code::DTYPE_F16, 128), plane(code::F16, 128));
        let takes = |k: &Plane, v: &Plane| Shape::of((&q, &q), (k, v), shared).is_some();
        assert!(takes(&good, &good));
        let bad = [
            Plane { token_stride: 8, ..good },
            Plane { base: 8, ..good },
            Plane { transforms: 1, ..good },
            Plane { block_means: 1, ..good },
            Plane { full_precision_prefix: 4, ..good },
            Plane { has_tail: 1, ..good },
            Plane { head_dim: 64, ..good },
        ];
        for plane in bad {
            assert!(!takes(&plane, &good) && !takes(&good, &plane), "{plane:?}");
        }
        for format in SCALED {
            let good = plane(format, 128);
            let takes = |k: &Plane, v: &Plane| Shape::of((&q, &q), (k, v), shared).is_some();
            assert!(takes(&good, &good));
            assert!(takes(&Plane { transforms: 1, ..good }, &good), "rows may be transformed");
            let bad = [
                Plane { token_stride: 131, ..good },
                Plane { base: 8, ..good },
                Plane { block_bytes: good.block_bytes + 2, ..good },
                Plane { block_means: 1, ..good },
                Plane { full_precision_prefix: 4, ..good },
                Plane { has_tail: 1, ..good },
            ];
            for plane in bad {
                assert!(!takes(&plane, &good) && !takes(&good, &plane), "{plane:?}");
            }
        }
        let odd = Tensor { data: 258, ..q };
        assert_eq!(Shape::of((&odd, &q), (&good, &good), shared), None);
        assert_eq!(Shape::of((&q, &odd), (&good, &good), shared), None);
    }
}
