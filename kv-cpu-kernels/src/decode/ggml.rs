//! llama.cpp's blocks of 32 values: an f16 scale, then the codes.
#![expect(
    clippy::inline_always,
    reason = "kernel code: offsets inside of a row, and helpers must inline into the \
              `#[target_feature]` caller"
)]
use super::{Decode, GROUP, HALF, Rest, nibbles, rest_begin};
use crate::layout::RowLayout;
use crate::simd::Simd;

/// `q8_0`: signed bytes.
pub(crate) struct Q8Block;
/// `q4_0`: nibbles, of which 8 is zero.
pub(crate) struct Q4Block;

/// Returns the f16 scale before a block's codes.
///
/// # Safety
/// 1. Two bytes are readable.
#[inline(always)]
unsafe fn block_scale<S: Simd>(s: S, block: *const u8) -> S::F {
    // SAFETY: condition 1.
    let bits = u16::from_le_bytes(unsafe { block.cast::<[u8; 2]>().read() });
    s.splat_f16(bits)
}

/// Decodes the last block of a row, which is padded to its full length.
///
/// # Safety
/// As for [`Decode::rest`].
#[inline(always)]
unsafe fn last_block<S: Simd, E: Decode>(s: S, row: *const u8, layout: &RowLayout) -> Rest {
    let begin = rest_begin(layout.dim());
    let mut rest = [0.0; GROUP];
    for offset in (0..HALF).step_by(S::LANES) {
        // SAFETY: blocks are padded to their full length, so all of it can be loaded.
        let [first, second] = unsafe { E::load_pair(s, row, layout, begin, offset) };
        // SAFETY: both halves of the array.
        unsafe { s.store(rest.as_mut_ptr(), offset, first) };
        // SAFETY: as above.
        unsafe { s.store(rest.as_mut_ptr(), offset + HALF, second) };
    }
    rest[layout.dim() - begin..].fill(0.0);
    rest
}

impl Decode for Q8Block {
    #[inline(always)]
    unsafe fn load_pair<S: Simd>(
        s: S,
        row: *const u8,
        _: &RowLayout,
        group: usize,
        offset: usize,
    ) -> [S::F; 2] {
        let block = row.wrapping_add(group / GROUP * 34);
        // SAFETY: a block of the row begins with two bytes of scale.
        let scale = unsafe { block_scale(s, block) };
        let codes = block.wrapping_add(2).cast();
        // SAFETY: and has 32 codes after them.
        let first = unsafe { s.load_i8(codes, offset) };
        // SAFETY: as above.
        let second = unsafe { s.load_i8(codes, offset + HALF) };
        [s.mul(first, scale), s.mul(second, scale)]
    }
    #[inline(always)]
    unsafe fn rest<S: Simd>(s: S, row: *const u8, layout: &RowLayout) -> Rest {
        // SAFETY: the conditions are passed on.
        unsafe { last_block::<S, Self>(s, row, layout) }
    }
    #[inline(always)]
    unsafe fn half_rest<S: Simd>(s: S, row: *const u8, layout: &RowLayout, offset: usize) -> S::F {
        // SAFETY: blocks are padded to their full length.
        let [first, _] =
            unsafe { Self::load_pair(s, row, layout, rest_begin(layout.dim()), offset) };
        first
    }
}

impl Decode for Q4Block {
    #[inline(always)]
    unsafe fn load_pair<S: Simd>(
        s: S,
        row: *const u8,
        _: &RowLayout,
        group: usize,
        offset: usize,
    ) -> [S::F; 2] {
        let block = row.wrapping_add(group / GROUP * 18);
        // SAFETY: a block of the row begins with two bytes of scale.
        let scale = unsafe { block_scale(s, block) };
        let eight = s.splat(-8.0);
        let plane = block.wrapping_add(2);
        // SAFETY: and has sixteen bytes of codes after them.
        let first = unsafe { nibbles(s, plane, offset) };
        // SAFETY: as above.
        let second = unsafe { nibbles(s, plane, offset + HALF) };
        let (first, second) = (s.add(s.nibble(first), eight), s.add(s.nibble(second), eight));
        [s.mul(first, scale), s.mul(second, scale)]
    }
    #[inline(always)]
    unsafe fn rest<S: Simd>(s: S, row: *const u8, layout: &RowLayout) -> Rest {
        // SAFETY: the conditions are passed on.
        unsafe { last_block::<S, Self>(s, row, layout) }
    }
    #[inline(always)]
    unsafe fn half_rest<S: Simd>(s: S, row: *const u8, layout: &RowLayout, offset: usize) -> S::F {
        // SAFETY: blocks are padded to their full length.
        let [first, _] =
            unsafe { Self::load_pair(s, row, layout, rest_begin(layout.dim()), offset) };
        first
    }
}
