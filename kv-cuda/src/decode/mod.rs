//! Decoding on tensor cores: the calls that its kernels support, their launches, and their memory.
//!
//! The kernels are in `kernels/decode.h`; [`plan`] distributes the work.
mod plan;

pub(crate) use plan::{Kind, Work};

use crate::op::Refusal;
use crate::params::{AttendParams, Plane, Tensor};
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

const LONG_QUERIES: Refusal = "queries that are not f16 or bf16";
const OTHER_TYPE: Refusal = "rows of another 16-bit type than the queries";
const NO_FORMAT: Refusal = "a format without a decode kernel";
const SPILLS: Refusal = "e4m3 rows with a scale and a head_dim over 192 would spill registers";
const PARTIAL_GROUP: Refusal = "l4 with a head_dim that is no multiple of 32";
const NO_DIM: Refusal = "head_dim is not 64, 80, 96, 128, 192 or 256";
const UNLIKE_PLANES: Refusal = "K and V differ in format, head_dim or block size";
const UNLIKE_TENSORS: Refusal = "queries and outputs differ from each other or from K";
const ROUNDED: Refusal = "a log-sum-exp of levels that are rounded to f16";
const WIDE_ROWS: Refusal = "a tail, a full-precision prefix or block means";
const TRANSFORMED: Refusal = "transformed rows without scales of their own";
const UNALIGNED: Refusal = "rows or blocks that are not aligned for copies of 16 bytes";
const ODD_TENSORS: Refusal = "queries or outputs that do not begin at multiples of 4 bytes";
const NO_ROOM: Refusal = "too little shared memory for two stages";

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
    /// of shared memory, or returns why only the general kernel takes the call.
    ///
    /// A tensor in host memory has no address yet; it will be aligned.
    pub(crate) fn of(params: &AttendParams, shared_bytes_max: u32) -> Result<Self, Refusal> {
        let AttendParams { q, out, k_plane: k, v_plane: v, .. } = params;
        let kernels = kernels_of(k, q.dtype)?;
        let index = DIMS.iter().position(|dim| *dim == k.head_dim).ok_or(NO_DIM)?;
        let kernel = kernels.get(index).copied().ok_or(NO_DIM)?;
        if (k.format, k.head_dim, k.block_size) != (v.format, v.head_dim, v.block_size) {
            return Err(UNLIKE_PLANES);
        }
        if (q.dtype, q.dim, q.heads) != (out.dtype, out.dim, out.heads) || q.dim != k.head_dim {
            return Err(UNLIKE_TENSORS);
        }
        if params.lse.data != 0 && !scores_exactly(k) {
            return Err(ROUNDED);
        }
        [k, v].into_iter().try_for_each(check_rows)?;
        if ![q, out].into_iter().all(is_even) {
            return Err(ODD_TENSORS);
        }
        Self::sized(kernel, k, shared_bytes_max).ok_or(NO_ROOM)
    }

    /// Computes the launch: two thread blocks share a multiprocessor if their ring buffers have two
    /// stages each.
    fn sized(kernel: &'static str, plane: &Plane, shared_bytes_max: u32) -> Option<Self> {
        let (dim, row_stride) = (plane.head_dim, row_stride(plane));
        let warps: u32 = if dim >= 192 { 2 } else { 4 };
        // Queries in shared memory: long ones, and over rows with scales all, with the rounding
        // errors of f16.
        let copies = if is_scaled(plane) { 2 } else { u32::from(dim >= 192) };
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
fn kernels_of(plane: &Plane, dtype: u32) -> Result<[&'static str; DIMS.len()], Refusal> {
    match plane.format {
        _ if ![code::DTYPE_F16, code::DTYPE_BF16].contains(&dtype) => Err(LONG_QUERIES),
        code::F16 if dtype == code::DTYPE_F16 => Ok(kernels!("f16")),
        code::BF16 if dtype == code::DTYPE_BF16 => Ok(kernels!("bf16")),
        code::F16 | code::BF16 => Err(OTHER_TYPE),
        codes if code::E4M3.contains(&codes) => Ok(kernels!("e4m3")),
        codes if code::E5M2.contains(&codes) => Ok(kernels!("e5m2")),
        codes if code::INT8.contains(&codes) => Ok(kernels!("int8")),
        code::E4M3_ROW if plane.head_dim > 192 => Err(SPILLS),
        code::E4M3_ROW => Ok(kernels!("e4m3_row")),
        code::E5M2_ROW => Ok(kernels!("e5m2_row")),
        code::INT8_ROW => Ok(kernels!("int8_row")),
        code::L4 if !plane.head_dim.is_multiple_of(32) => Err(PARTIAL_GROUP),
        code::L4 => Ok(kernels!("l4")),
        _ => Err(NO_FORMAT),
    }
}

/// Returns whether rows have scales of their own after their codes.
fn is_scaled(plane: &Plane) -> bool {
    [code::E4M3_ROW, code::E5M2_ROW, code::INT8_ROW, code::L4].contains(&plane.format)
}

/// Returns whether the kernels score keys of this plane as exactly as f32 does, as a log-sum-exp
/// requires. Levels of `l4` are rounded to f16.
fn scores_exactly(k: &Plane) -> bool {
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

/// Checks that all rows have one width and are aligned for copies of 16 bytes. Copies of rows with
/// scales go beyond a row: blocks must begin and end at 16 bytes, so that no copy leaves its block.
fn check_rows(plane: &Plane) -> Result<(), Refusal> {
    if plane.block_means != 0 || plane.full_precision_prefix != 0 || plane.has_tail != 0 {
        return Err(WIDE_ROWS);
    }
    if plane.transforms != 0 && !is_scaled(plane) {
        return Err(TRANSFORMED);
    }
    let of_rows = if is_scaled(plane) { ALIGNED_SCALED } else { ALIGNED };
    let rows = [plane.token_stride, plane.head_stride].into_iter();
    let blocks = [plane.block_bytes, plane.base].into_iter();
    let lie_well = rows.map(|n| (n, of_rows)).chain(blocks.map(|n| (n, ALIGNED)));
    if lie_well.into_iter().all(|(n, to)| n.is_multiple_of(to)) { Ok(()) } else { Err(UNALIGNED) }
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
    /// Counts the rows of any batch within this extent, as `decode_merge.h` does.
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

    fn params(q: Tensor, [k_plane, v_plane]: [Plane; 2]) -> AttendParams {
        AttendParams { q, out: q, k_plane, v_plane, ..AttendParams::default() }
    }

    fn shape(format: u32, dtype: u32, dim: u32, shared: u32) -> Result<Shape, Refusal> {
        Shape::of(&params(tensor(dtype, dim), [plane(format, dim); 2]), shared)
    }

    #[test]
    fn two_blocks_share_a_multiprocessor_if_possible() {
        const KIB: u32 = 1024;
        let expected = |kernel, threads, stages, shared_bytes| {
            Ok(Shape { kernel, threads, stages, block_shift: 4, shared_bytes })
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
        assert_eq!(found, expected("decode_int8_row_128", 128, 5, 98 * KIB));
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

    /// Every rule, with a plane or a tensor that breaks it alone; K and V are checked alike.
    #[test]
    fn each_rule_refuses() {
        const HALF: u32 = code::DTYPE_F16;
        let shared = 99 * 1024;
        for (format, dtype, dim, why) in [
            (code::F16, 0, 128, LONG_QUERIES),
            (code::INT8_ROW, 0, 128, LONG_QUERIES),
            (code::F16, code::DTYPE_BF16, 128, OTHER_TYPE),
            (code::BF16, HALF, 128, OTHER_TYPE),
            (12, HALF, 128, NO_FORMAT),
            (code::E4M3_ROW, HALF, 256, SPILLS),
            (code::L4, HALF, 80, PARTIAL_GROUP),
            (code::F16, HALF, 72, NO_DIM),
            (code::L4, HALF, 160, NO_DIM),
        ] {
            assert_eq!(shape(format, dtype, dim, shared), Err(why), "{format}, {dtype}, {dim}");
        }
        assert_eq!(shape(code::F16, HALF, 128, 40 * 1024), Err(NO_ROOM));
        let q = tensor(HALF, 128);
        for format in [code::F16, code::E4M3[0], code::INT8[1]].into_iter().chain(SCALED) {
            let good = plane(format, 128);
            let choice = |planes| Shape::of(&params(q, planes), shared).map(|_| ());
            assert_eq!(choice([good; 2]), Ok(()));
            let is_scaled = SCALED.contains(&format);
            let odd_rows = if is_scaled { 131 } else { good.token_stride + 8 };
            let transformed = if is_scaled { Ok(()) } else { Err(TRANSFORMED) };
            for (plane, result) in [
                (Plane { head_dim: 64, ..good }, Err(UNLIKE_PLANES)),
                (Plane { block_size: 32, ..good }, Err(UNLIKE_PLANES)),
                (Plane { block_means: 1, ..good }, Err(WIDE_ROWS)),
                (Plane { full_precision_prefix: 4, ..good }, Err(WIDE_ROWS)),
                (Plane { has_tail: 1, ..good }, Err(WIDE_ROWS)),
                (Plane { transforms: 1, ..good }, transformed),
                (Plane { token_stride: odd_rows, ..good }, Err(UNALIGNED)),
                (Plane { head_stride: odd_rows, ..good }, Err(UNALIGNED)),
                (Plane { block_bytes: good.block_bytes + 2, ..good }, Err(UNALIGNED)),
                (Plane { base: 8, ..good }, Err(UNALIGNED)),
            ] {
                assert_eq!(choice([good, plane]), result, "V {plane:?}");
                assert_eq!(choice([plane, good]), result, "K {plane:?}");
            }
            let good = params(q, [good; 2]);
            let lse = Tensor { data: 4096, ..Tensor::default() };
            let rounded = if format == code::L4 { Err(ROUNDED) } else { Ok(()) };
            let odd = Tensor { data: 258, ..q };
            let (other, wider) = (Tensor { dtype: 2, ..q }, Tensor { dim: 64, ..q });
            for (params, result) in [
                (AttendParams { lse, ..good }, rounded),
                (AttendParams { q: odd, ..good }, Err(ODD_TENSORS)),
                (AttendParams { out: odd, ..good }, Err(ODD_TENSORS)),
                (AttendParams { out: other, ..good }, Err(UNLIKE_TENSORS)),
                (AttendParams { q: wider, out: wider, ..good }, Err(UNLIKE_TENSORS)),
            ] {
                assert_eq!(Shape::of(&params, shared).map(|_| ()), result, "{params:?}");
            }
        }
    }
}
