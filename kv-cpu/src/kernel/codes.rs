//! Encodings that pack values in groups: Lloyd-Max codes in bit planes, llama.cpp's blocks, NVFP4.
//!
//! Every vector has the bits that `kv_quant::row::decode_row` gives, short of the scale of the
//! whole row or tensor: one multiplication with a group's scale, if there is one, rounds.
#![expect(
    clippy::arithmetic_side_effects,
    clippy::indexing_slicing,
    clippy::inline_always,
    reason = "kernel code: bounds are asserted at the entry, and helpers must melt into the \
              function that carries the target features"
)]
use std::marker::PhantomData;

use kv_quant::lloyd;
use kv_quant::minifloat::E4M3;

use super::simd::{LANES_MAX, Simd};
use super::stored::{GROUP, Rest, Stored};
use crate::encoding::RowLayout;
use crate::num::to_usize;

/// Lloyd-Max codes with levels `L`; with one E4M3 scale a group if `GROUPED`.
pub(crate) struct Lloyd<L, const GROUPED: bool>(PhantomData<L>);
/// 64 levels: a plane of the low four bits of the magnitude's index, one of its fifth and the sign.
pub(crate) struct L6;
/// 16 levels: one plane, the sign on top.
pub(crate) struct L4;
/// 8 levels: a plane of magnitudes, one of signs.
pub(crate) struct L3;
/// llama.cpp's `q8_0`.
pub(crate) struct Q8Block;
/// llama.cpp's `q4_0`.
pub(crate) struct Q4Block;
/// E2M1 in nibbles, one E4M3 scale for 16.
pub(crate) struct Nvfp4;

// Constants here, so that the compiler sees their values where a kernel makes them vectors.
const L6_MAGNITUDES: [f32; 32] = lloyd::L6;
const L4_MAGNITUDES: [f32; 8] = lloyd::L4;
const L3_MAGNITUDES: [f32; 4] = lloyd::L3;

/// A Lloyd-Max code: its levels, and how whole groups are packed.
pub(crate) trait Levels {
    /// Bytes of a whole group.
    const BYTES: usize;
    /// Bits of a code in each plane, the plane with the lowest bits first.
    const PLANES: &'static [usize];
    /// `LANES` levels of a whole group, from value `offset` on.
    ///
    /// # Safety
    /// 1. The group's bytes are readable.
    unsafe fn load<S: Simd>(s: S, group: *const u8, offset: usize) -> S::F;
    /// The levels of codes whose bits lie together.
    fn levels<S: Simd>(s: S, codes: S::I) -> S::F;
}

/// Where the two bits of value `i` lie in byte `i % 8` of a group's plane of pairs.
static PAIR_SHIFTS: [u32; GROUP] = {
    let mut shifts = [0; GROUP];
    let mut i = 0_u32;
    while to_usize(i) < GROUP {
        shifts[to_usize(i)] = i / 8 * 2;
        i += 1;
    }
    shifts
};

/// What brings bit `i / 4` of byte `i % 4` of a word to its top: a plane of single bits.
static SINGLE_SHIFTS: [u32; GROUP] = {
    let mut shifts = [0; GROUP];
    let mut i = 0_u32;
    while to_usize(i) < GROUP {
        shifts[to_usize(i)] = 31 - (i % 4 * 8 + i / 4);
        i += 1;
    }
    shifts
};

/// Nibbles of a whole group's plane: value `i` in the low half of byte `i % 16`, or in the high.
///
/// # Safety
/// 1. Sixteen bytes are readable.
#[inline(always)]
unsafe fn nibbles<S: Simd>(s: S, plane: *const u8, offset: usize) -> S::I {
    // SAFETY: `offset % 16 + LANES <= 16`, since `LANES` divides both.
    let bytes = unsafe { s.load_bytes(plane, offset % 16) };
    if offset < 16 { bytes } else { s.shr(bytes, 4) }
}

/// Pairs of bits of a whole group's plane, in the lowest two bits of each lane.
///
/// # Safety
/// 1. Eight bytes are readable.
#[inline(always)]
unsafe fn pairs<S: Simd>(s: S, plane: *const u8, offset: usize) -> S::I {
    // SAFETY: eight bytes, by condition 1.
    let bytes = unsafe { s.load_of_8(plane, offset) };
    // SAFETY: `offset + LANES` is at most the array's length.
    let shifts = unsafe { s.load_bits(PAIR_SHIFTS.as_ptr(), offset) };
    s.shr_each(bytes, shifts)
}

impl Levels for L4 {
    const BYTES: usize = 16;
    const PLANES: &'static [usize] = &[4];
    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, group: *const u8, offset: usize) -> S::F {
        // SAFETY: condition 1.
        Self::levels(s, unsafe { nibbles(s, group, offset) })
    }
    #[inline(always)]
    fn levels<S: Simd>(s: S, codes: S::I) -> S::F {
        s.symmetric16(&L4_MAGNITUDES, codes)
    }
}

impl Levels for L6 {
    const BYTES: usize = 24;
    const PLANES: &'static [usize] = &[4, 2];
    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, group: *const u8, offset: usize) -> S::F {
        // SAFETY: the first sixteen bytes of the group.
        let low = unsafe { nibbles(s, group, offset) };
        // SAFETY: the other eight.
        let high = unsafe { pairs(s, group.wrapping_add(16), offset) };
        s.flip(s.lookup32(&L6_MAGNITUDES, low, high), s.shl(high, 30))
    }
    #[inline(always)]
    fn levels<S: Simd>(s: S, codes: S::I) -> S::F {
        s.flip(s.lookup32(&L6_MAGNITUDES, codes, s.shr(codes, 4)), s.shl(codes, 26))
    }
}

impl Levels for L3 {
    const BYTES: usize = 12;
    const PLANES: &'static [usize] = &[2, 1];
    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, group: *const u8, offset: usize) -> S::F {
        // SAFETY: the first eight bytes of the group.
        let magnitudes = unsafe { pairs(s, group, offset) };
        let signs = group.wrapping_add(8).cast::<[u8; 4]>();
        // SAFETY: the other four.
        let signs = s.splat_bits(u32::from_le_bytes(unsafe { signs.read() }));
        // SAFETY: `offset + LANES` is at most the array's length.
        let shifts = unsafe { s.load_bits(SINGLE_SHIFTS.as_ptr(), offset) };
        s.flip(s.lookup4(&L3_MAGNITUDES, magnitudes), s.shl_each(signs, shifts))
    }
    #[inline(always)]
    fn levels<S: Simd>(s: S, codes: S::I) -> S::F {
        s.flip(s.lookup4(&L3_MAGNITUDES, codes), s.shl(codes, 29))
    }
}

/// The E4M3 scale of group `index`.
///
/// # Safety
/// 1. The bytes of the row are readable, and the row has that group.
#[inline(always)]
unsafe fn group_scale(row: *const u8, layout: &RowLayout, index: usize) -> f32 {
    // SAFETY: one byte a group lies behind the codes, by condition 1.
    let code = unsafe { row.wrapping_add(layout.scales() + index).read() };
    E4M3[usize::from(code)]
}

impl<L: Levels, const GROUPED: bool> Stored for Lloyd<L, GROUPED> {
    const RUN: usize = GROUP;

    #[inline(always)]
    unsafe fn load<S: Simd>(
        s: S,
        row: *const u8,
        layout: &RowLayout,
        group: usize,
        offset: usize,
    ) -> S::F {
        let codes = row.wrapping_add(group / GROUP * L::BYTES);
        // SAFETY: the group is whole, by condition 2.
        let levels = unsafe { L::load(s, codes, offset) };
        if !GROUPED {
            return levels;
        }
        // SAFETY: a group of the row.
        let scale = unsafe { group_scale(row, layout, group / GROUP) };
        s.mul(levels, s.splat(scale))
    }

    #[inline(always)]
    unsafe fn rest<S: Simd>(s: S, row: *const u8, layout: &RowLayout, begin: usize) -> Rest {
        let n = layout.dim() - begin;
        // SAFETY: the last group of the row begins there, by condition 2.
        let codes = unsafe { unpack::<L>(row.wrapping_add(begin / GROUP * L::BYTES), n) };
        let scale = if GROUPED {
            // SAFETY: the last group of the row, by condition 2.
            unsafe { group_scale(row, layout, begin / GROUP) }
        } else {
            1.0
        };
        let mut rest = [0.0; GROUP];
        let mut i = 0;
        while i < n {
            // SAFETY: `i + LANES` is at most `GROUP`, and there are more codes.
            let levels = L::levels(s, unsafe { s.load_bytes(codes.as_ptr(), i) });
            let values = s.mul(levels, s.splat(scale));
            // SAFETY: `i + LANES` is at most `GROUP`.
            unsafe { s.store(rest.as_mut_ptr(), i, values) };
            i += S::LANES;
        }
        rest[n..].fill(0.0);
        rest
    }
}

/// The codes of a group of `n < GROUP` values, one a byte.
///
/// A plane of `w` bits and `m` bytes holds value `i + j * m` at bits `j * w` of byte `i`, so for
/// each `j` the whole plane is shifted and masked at once.
///
/// # Safety
/// 1. The group's bytes are readable.
#[inline]
unsafe fn unpack<L: Levels>(group: *const u8, n: usize) -> [u8; 48] {
    let mut all = [0; 48];
    let (mut plane, mut low) = (group, 0);
    for &width in L::PLANES {
        let per_byte = 8 / width;
        let len = n.div_ceil(per_byte).min(16);
        let mut bytes = [0; 16];
        // SAFETY: the plane's bytes, by condition 1; at most sixteen, and the array is new.
        unsafe { std::ptr::copy_nonoverlapping(plane, bytes.as_mut_ptr(), len) };
        let word = u128::from_le_bytes(bytes);
        let mask = u128::from_le_bytes([(1 << width) - 1; 16]);
        let mut codes = [0; 48];
        for j in 0..per_byte {
            // What is written past `len` codes is overwritten by the next turn, or past `n`.
            let part = ((word >> (j * width)) & mask).to_le_bytes();
            codes[j * len..][..16].copy_from_slice(&part);
        }
        for (all, code) in all.iter_mut().zip(codes) {
            *all |= code << low;
        }
        low += width;
        plane = plane.wrapping_add(len);
    }
    all
}

/// The f16 in front of a block's codes.
///
/// # Safety
/// 1. Two bytes are readable.
#[inline(always)]
unsafe fn block_scale<S: Simd>(s: S, block: *const u8) -> S::F {
    // SAFETY: condition 1.
    let bits = u16::from_le_bytes(unsafe { block.cast::<[u8; 2]>().read() });
    s.splat_f16(bits)
}

/// A whole block decoded, of which the first values are the row's.
///
/// # Safety
/// 1. The bytes of the block of value `begin` are readable, as [`Stored::load`] needs them.
#[inline(always)]
unsafe fn last_block<S: Simd, E: Stored>(
    s: S,
    row: *const u8,
    layout: &RowLayout,
    begin: usize,
) -> Rest {
    let mut rest = [0.0; GROUP];
    let mut i = 0;
    while i < GROUP {
        // SAFETY: blocks are padded to their full length, so all of it can be loaded.
        let values = unsafe { E::load(s, row, layout, begin, i) };
        // SAFETY: `i + LANES` is at most `GROUP`.
        unsafe { s.store(rest.as_mut_ptr(), i, values) };
        i += S::LANES;
    }
    rest[layout.dim() - begin..].fill(0.0);
    rest
}

impl Stored for Q8Block {
    const RUN: usize = GROUP;
    #[inline(always)]
    unsafe fn load<S: Simd>(
        s: S,
        row: *const u8,
        _: &RowLayout,
        group: usize,
        offset: usize,
    ) -> S::F {
        let block = row.wrapping_add(group / GROUP * 34);
        // SAFETY: a block of the row begins with two bytes of scale.
        let scale = unsafe { block_scale(s, block) };
        // SAFETY: and has 32 codes behind them.
        let codes = unsafe { s.load_i8(block.wrapping_add(2).cast(), offset) };
        s.mul(codes, scale)
    }
    #[inline(always)]
    unsafe fn rest<S: Simd>(s: S, row: *const u8, layout: &RowLayout, begin: usize) -> Rest {
        // SAFETY: the last block, by condition 2.
        unsafe { last_block::<S, Self>(s, row, layout, begin) }
    }
}

impl Stored for Q4Block {
    const RUN: usize = GROUP;
    #[inline(always)]
    unsafe fn load<S: Simd>(
        s: S,
        row: *const u8,
        _: &RowLayout,
        group: usize,
        offset: usize,
    ) -> S::F {
        let block = row.wrapping_add(group / GROUP * 18);
        // SAFETY: a block of the row begins with two bytes of scale.
        let scale = unsafe { block_scale(s, block) };
        // SAFETY: and has sixteen bytes of codes behind them.
        let codes = unsafe { nibbles(s, block.wrapping_add(2), offset) };
        s.mul(s.add(s.nibble(codes), s.splat(-8.0)), scale)
    }
    #[inline(always)]
    unsafe fn rest<S: Simd>(s: S, row: *const u8, layout: &RowLayout, begin: usize) -> Rest {
        // SAFETY: the last block, by condition 2.
        unsafe { last_block::<S, Self>(s, row, layout, begin) }
    }
}

/// Magnitudes of E2M1.
const E2M1: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
/// Values that share a scale in NVFP4.
const NVFP4_GROUP: usize = 16;

impl Stored for Nvfp4 {
    const RUN: usize = 1;
    #[inline(always)]
    unsafe fn load<S: Simd>(
        s: S,
        row: *const u8,
        layout: &RowLayout,
        group: usize,
        offset: usize,
    ) -> S::F {
        let at = group + offset;
        // SAFETY: inside the row's codes, by condition 2.
        let codes = unsafe { s.load_nibbles(row, at) };
        // SAFETY: a group of the row; a vector lies in one, since `LANES` divides its length.
        let scale = unsafe { group_scale(row, layout, at / NVFP4_GROUP) };
        s.mul(s.symmetric16(&E2M1, codes), s.splat(scale))
    }
    #[inline(always)]
    unsafe fn rest<S: Simd>(s: S, row: *const u8, layout: &RowLayout, begin: usize) -> Rest {
        let n = layout.dim() - begin;
        let mut bytes = [0; LANES_MAX];
        let len = n.div_ceil(2).min(LANES_MAX);
        // SAFETY: `begin` is even where anything is left, so these are the last bytes of codes; the
        // array is new.
        unsafe {
            std::ptr::copy_nonoverlapping(row.wrapping_add(begin / 2), bytes.as_mut_ptr(), len);
        }
        // SAFETY: the array has the bytes of a vector.
        let codes = unsafe { s.load_nibbles(bytes.as_ptr(), 0) };
        // SAFETY: the row's last group.
        let scale = unsafe { group_scale(row, layout, begin / NVFP4_GROUP) };
        let values = s.mul(s.symmetric16(&E2M1, codes), s.splat(scale));
        let mut rest = [0.0; GROUP];
        // SAFETY: the array holds more than a vector.
        unsafe { s.store(rest.as_mut_ptr(), 0, values) };
        rest[n..].fill(0.0);
        rest
    }
}
