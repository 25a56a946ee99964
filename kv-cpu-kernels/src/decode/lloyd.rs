//! Lloyd-Max codes in bit planes.
#![expect(
    clippy::inline_always,
    reason = "kernel code: offsets inside of a row, and helpers must inline into the \
              `#[target_feature]` caller"
)]
use std::marker::PhantomData;

use kv_format::lloyd;

use super::{Decode, GROUP, HALF, Rest, group_scale, nibbles, rest_begin};
use crate::layout::RowLayout;
use crate::simd::Simd;
use kv_format::num::to_usize;

/// Lloyd-Max codes with levels `L`; with one E4M3 scale per group if `GROUPED`.
pub(crate) struct Lloyd<L, const GROUPED: bool>(PhantomData<L>);
/// 64 levels: a plane of the low four bits of the magnitude's index, one of its fifth and the sign.
pub(crate) struct L6;
/// 16 levels: one plane, the sign on top.
pub(crate) struct L4;
/// 8 levels: a plane of magnitudes, one of signs.
pub(crate) struct L3;

// Constants, so that the compiler knows their values where a kernel makes vectors of them.
const L6_MAGNITUDES: [f32; 32] = lloyd::L6;
const L4_MAGNITUDES: [f32; 8] = lloyd::L4;
const L3_MAGNITUDES: [f32; 4] = lloyd::L3;

/// A Lloyd-Max code: its levels, and how whole groups are packed.
pub(crate) trait Levels {
    /// Bytes of a whole group.
    const BYTES: usize;
    /// Bits of a code in each plane, the plane with the lowest bits first.
    const PLANES: &'static [usize];
    /// Returns `LANES` levels of a whole group, from value `offset` on.
    ///
    /// # Safety
    /// 1. The group's bytes are readable.
    unsafe fn load<S: Simd>(s: S, group: *const u8, offset: usize) -> S::F;
    /// Returns the levels of codes whose bits lie together.
    fn levels<S: Simd>(s: S, codes: S::I) -> S::F;
}

/// Offsets of the two bits of value `i` in byte `i % 8` of a group's plane of pairs.
static PAIR_SHIFTS: [u32; GROUP] = {
    let mut shifts = [0; GROUP];
    let mut i = 0_u32;
    while to_usize(i) < GROUP {
        shifts[to_usize(i)] = i / 8 * 2;
        i += 1;
    }
    shifts
};

/// Left shifts that move bit `i / 4` of byte `i % 4` of a word to its top, for a plane of single
/// bits.
static SINGLE_SHIFTS: [u32; GROUP] = {
    let mut shifts = [0; GROUP];
    let mut i = 0_u32;
    while to_usize(i) < GROUP {
        shifts[to_usize(i)] = 31 - (i % 4 * 8 + i / 4);
        i += 1;
    }
    shifts
};

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

impl<L: Levels, const GROUPED: bool> Decode for Lloyd<L, GROUPED> {
    #[inline(always)]
    unsafe fn load_pair<S: Simd>(
        s: S,
        row: *const u8,
        layout: &RowLayout,
        group: usize,
        offset: usize,
    ) -> [S::F; 2] {
        let codes = row.wrapping_add(group / GROUP * L::BYTES);
        // SAFETY: the group is whole, by condition 2.
        let first = unsafe { L::load(s, codes, offset) };
        // SAFETY: as above.
        let second = unsafe { L::load(s, codes, offset + HALF) };
        if !GROUPED {
            return [first, second];
        }
        // SAFETY: a group of the row.
        let scale = s.splat(unsafe { group_scale(row, layout, group / GROUP) });
        [s.mul(first, scale), s.mul(second, scale)]
    }

    #[inline(always)]
    unsafe fn rest<S: Simd>(s: S, row: *const u8, layout: &RowLayout) -> Rest {
        let begin = rest_begin(layout.dim());
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
        for i in (0..n).step_by(S::LANES) {
            // SAFETY: `i + LANES` is at most `GROUP`, and there are more codes.
            let levels = L::levels(s, unsafe { s.load_bytes(codes.as_ptr(), i) });
            // SAFETY: `i + LANES` is at most `GROUP`.
            unsafe { s.store(rest.as_mut_ptr(), i, s.mul(levels, s.splat(scale))) };
        }
        rest[n..].fill(0.0);
        rest
    }

    #[inline(always)]
    unsafe fn half_rest<S: Simd>(s: S, row: *const u8, layout: &RowLayout, offset: usize) -> S::F {
        let group = rest_begin(layout.dim()) / GROUP;
        // SAFETY: the last group of the row has `HALF` values, by condition 2.
        let codes = unsafe { unpack_half::<L>(row.wrapping_add(group * L::BYTES)) };
        // SAFETY: `offset + LANES` is at most `HALF`.
        let levels = L::levels(s, unsafe { s.load_bytes(codes.as_ptr(), offset) });
        if !GROUPED {
            return levels;
        }
        // SAFETY: the last group of the row.
        s.mul(levels, s.splat(unsafe { group_scale(row, layout, group) }))
    }
}

/// Returns the codes of a group of [`HALF`] values as [`unpack`] does, but in registers.
///
/// # Safety
/// 1. The group's bytes are readable.
#[inline(always)]
unsafe fn unpack_half<L: Levels>(group: *const u8) -> [u8; HALF] {
    let (mut codes, mut plane, mut low) = (0_u128, group, 0);
    for &width in L::PLANES {
        let len = HALF * width / 8;
        let mut bytes = [0; 8];
        // SAFETY: the plane's bytes, by condition 1; at most eight, and the array is new.
        unsafe { std::ptr::copy_nonoverlapping(plane, bytes.as_mut_ptr(), len.min(8)) };
        let word = u64::from_le_bytes(bytes);
        let mask = u64::from_le_bytes([(1 << width) - 1; 8]) >> (64 - 8 * len);
        for j in 0..8 / width {
            codes |= u128::from((word >> (j * width)) & mask) << (8 * len * j + low);
        }
        low += width;
        plane = plane.wrapping_add(len);
    }
    codes.to_le_bytes()
}

/// Returns the codes of a group of `n < GROUP` values, one a byte.
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
            // Codes written after `len` are overwritten by the next iteration, or lie after `n`.
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
