//! Decoders: one file per family of stored formats.
//!
//! Every decoder is written in the primitives of [`Simd`]. Its values are, to the bit, those of
//! `kv_format::row::decode_row` without the scale of the whole row or tensor and without
//! [`Decode::FACTOR`].
#![expect(
    clippy::inline_always,
    reason = "kernel code: offsets inside of a row, and helpers must inline into the \
              `#[target_feature]` caller"
)]
mod fp8;
mod ggml;
mod int8;
mod lloyd;
mod nvfp4;
mod plain;

use kv_format::minifloat::E4M3;

pub(crate) use self::fp8::{E4m3, E5m2, Fp8, Fp8Table, LookUp, LookedUp};
pub(crate) use self::ggml::{Q4Block, Q8Block};
pub(crate) use self::int8::Int8;
pub(crate) use self::lloyd::{L3, L4, L6, Lloyd};
pub(crate) use self::nvfp4::Nvfp4;
pub(crate) use self::plain::{Bf16, Bf16Pairs, F16, F32, Plain, Valuewise, load_part, store_part};

use crate::layout::RowLayout;
use crate::rows::KeyRows;
use crate::simd::{LANES_MAX, Simd};
use kv_format::num::to_u32;

/// Values of a group: the step of loops over a row, and the unit in which packed formats pack
/// values.
pub(crate) const GROUP: usize = 32;
/// Values from one vector of a pair to the other. The two nibbles of a byte are this far apart in
/// packed formats, so one load serves both vectors.
pub(crate) const HALF: usize = GROUP / 2;

/// The values of a row after its last whole group, and zeros after them.
pub(crate) type Rest = [f32; GROUP];

/// Decoder of one encoding. The layouts given are those of rows of this encoding.
pub(crate) trait Decode {
    /// The factor that loaded values lack: callers multiply scores or weights with it instead.
    const FACTOR: f32 = 1.0;

    /// Decodes the vectors at values `group + offset` and `group + offset + HALF`. `group` is a
    /// multiple of [`GROUP`], `offset` is below [`HALF`] and a multiple of `LANES`.
    ///
    /// # Safety
    /// 1. The bytes of the row are readable.
    /// 2. The row has the whole group.
    unsafe fn load_pair<S: Simd>(
        s: S,
        row: *const u8,
        layout: &RowLayout,
        group: usize,
        offset: usize,
    ) -> [S::F; 2];

    /// Decodes the values after the last whole group.
    ///
    /// # Safety
    /// 1. The bytes of the row are readable.
    /// 2. There is such a value.
    unsafe fn rest<S: Simd>(s: S, row: *const u8, layout: &RowLayout) -> Rest;

    /// Decodes the vector at value `offset` of a rest of [`HALF`] values: `head_dim` 80 and 112.
    /// `offset` is below [`HALF`] and a multiple of `LANES`.
    ///
    /// # Safety
    /// 1. The bytes of the row are readable.
    /// 2. The rest has [`HALF`] values.
    unsafe fn half_rest<S: Simd>(s: S, row: *const u8, layout: &RowLayout, offset: usize) -> S::F;
}

/// First value after the last whole group of a row of `dim` values.
pub(crate) const fn rest_begin(dim: usize) -> usize {
    dim / GROUP * GROUP
}

/// Decodes rows, without the scale of the whole row or tensor, to rows of `padded` floats. Floats
/// after the values of a row become zero.
#[inline(always)]
pub(crate) fn decode<S: Simd, E: Decode>(s: S, rows: &KeyRows<'_>, padded: usize, to: &mut [f32]) {
    let layout = rows.layout();
    let dim = layout.dim();
    assert!(dim <= padded && rows.len() * padded <= to.len(), "there is memory for decoded rows");
    let (rest, factor) = (rest_begin(dim), s.splat(E::FACTOR));
    for index in 0..rows.len() {
        let (row, to) = (rows.at(index), &mut to[index * padded..][..padded]);
        for group in (0..rest).step_by(GROUP) {
            for offset in (0..HALF).step_by(S::LANES) {
                // SAFETY: a row is readable, and the group is whole.
                let pair = unsafe { E::load_pair(s, row, layout, group, offset) };
                for (half, v) in pair.into_iter().enumerate() {
                    let is_one = E::FACTOR.to_bits() == 1.0_f32.to_bits();
                    let v = if is_one { v } else { s.mul(v, factor) };
                    // SAFETY: the group is whole, and `to` has as many values as the row.
                    unsafe { s.store(to.as_mut_ptr(), group + offset + half * HALF, v) };
                }
            }
        }
        if rest < padded {
            to[rest..].fill(0.0);
        }
        if rest < dim {
            // SAFETY: a row is readable, and has a rest.
            let values = unsafe { E::rest(s, row, layout) };
            for (to, value) in to[rest..dim].iter_mut().zip(values) {
                *to = value * E::FACTOR;
            }
        }
    }
}

/// Returns the E4M3 scale of group `index`.
///
/// # Safety
/// 1. The bytes of the row are readable, and the row has that group.
#[inline(always)]
pub(in crate::decode) unsafe fn group_scale(
    row: *const u8,
    layout: &RowLayout,
    index: usize,
) -> f32 {
    // SAFETY: one byte per group lies after the codes, by condition 1.
    let code = unsafe { row.wrapping_add(layout.scales() + index).read() };
    E4M3[usize::from(code)]
}

/// Nibbles of a whole group's plane: value `i` in the low half of byte `i % 16`, or in the high.
///
/// # Safety
/// 1. Sixteen bytes are readable.
#[inline(always)]
pub(in crate::decode) unsafe fn nibbles<S: Simd>(s: S, plane: *const u8, offset: usize) -> S::I {
    // SAFETY: `offset % 16 + LANES <= 16`, since `LANES` divides both.
    let bytes = unsafe { s.load_bytes(plane, offset % 16) };
    if offset < 16 { bytes } else { s.shr(bytes, 4) }
}

/// Reads the f16 scale after the codes of each row; the elements after them, up to a multiple of
/// [`LANES_MAX`], become 1.
#[inline(always)]
pub(crate) fn row_scales<S: Simd>(s: S, rows: &KeyRows<'_>, to: &mut [f32]) {
    const ONE: u16 = 0x3c00;
    let (at, count) = (rows.layout().scales(), rows.len());
    assert!(
        rows.layout().has_scale() && to.len() >= count.next_multiple_of(LANES_MAX),
        "rows have scales, and there is room for them"
    );
    for i in (0..count.next_multiple_of(LANES_MAX)).step_by(S::LANES) {
        let values = if i + S::LANES <= count && at >= 2 && rows.stride() < 1 << 27 {
            let first = rows.at(i).wrapping_add(at);
            // SAFETY: scales of rows, and bytes of codes before them; not too far from each other.
            unsafe { s.gather_f16(first, to_u32(rows.stride())) }
        } else {
            let mut bits = [ONE; LANES_MAX];
            for token in i..count.min(i + S::LANES) {
                let scale = rows.at(token).wrapping_add(at).cast::<[u8; 2]>();
                // SAFETY: the scale of a row.
                bits[token - i] = u16::from_le_bytes(unsafe { scale.read() });
            }
            // SAFETY: an array of as many.
            unsafe { s.load_f16(bits.as_ptr(), 0) }
        };
        // SAFETY: `i + LANES` is at most the length of `to`.
        unsafe { s.store(to.as_mut_ptr(), i, values) };
    }
}
