//! FP8: by arithmetic on any vectors, and by lookups where the CPU has lookups of bytes.
#![expect(
    clippy::inline_always,
    reason = "kernel code: offsets inside of a row, and helpers must inline into the \
              `#[target_feature]` caller"
)]
use std::marker::PhantomData;

#[cfg(doc)]
use super::Decode;
use super::{GROUP, HALF, Rest, Valuewise};
use crate::layout::RowLayout;
use crate::simd::Simd;

/// FP8 E4M3, a binary16 except for shifts and NaN: loaded values are 2^-8 of the encoded ones.
pub(crate) struct E4m3;
/// FP8 E5M2, the upper byte of a binary16.
pub(crate) struct E5m2;

impl Valuewise for E4m3 {
    const SIZE: usize = 1;
    const FACTOR: f32 = 256.0;
    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, from: *const u8, at: usize) -> S::F {
        // SAFETY: condition 1 is passed on.
        unsafe { s.load_e4m3(from, at) }
    }
    #[inline(always)]
    unsafe fn load_two<S: Simd>(s: S, from: *const u8, at: usize) -> [S::F; 2] {
        // SAFETY: the condition is passed on.
        unsafe { s.load_e4m3_pair(from, at, HALF) }
    }
}

impl Valuewise for E5m2 {
    const SIZE: usize = 1;
    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, from: *const u8, at: usize) -> S::F {
        // SAFETY: condition 1 is passed on.
        unsafe { s.load_e5m2(from, at) }
    }
}

/// Lookups by bytes: AVX-512 VBMI.
pub(crate) trait LookUp: Copy {
    type S: Simd;

    fn simd(self) -> Self::S;
    /// Returns 64 codes as bf16, in their order.
    ///
    /// # Safety
    /// 1. As many bytes are readable.
    unsafe fn words(self, table: &'static Fp8Table, from: *const u8) -> [<Self::S as Simd>::I; 2];
    /// Returns 64 codes as `f32`, in their order.
    ///
    /// # Safety
    /// 1. As many bytes are readable.
    unsafe fn floats(self, table: &'static Fp8Table, from: *const u8) -> [<Self::S as Simd>::F; 4];
    /// Returns 32 codes as `f32`, in their order.
    ///
    /// # Safety
    /// 1. As many bytes are readable.
    unsafe fn half(self, table: &'static Fp8Table, from: *const u8) -> [<Self::S as Simd>::F; 2];
}

/// Lower and upper bytes of the bf16 of all 128 codes without their sign, each list in two vectors.
#[derive(Debug)]
#[repr(align(64))]
pub(crate) struct Fp8Table {
    pub(crate) lower: [[u8; 64]; 2],
    pub(crate) upper: [[u8; 64]; 2],
}

/// An FP8 encoding.
pub(crate) trait Fp8 {
    const TABLE: &'static Fp8Table;
}
impl Fp8 for E4m3 {
    const TABLE: &'static Fp8Table = {
        static TABLE: Fp8Table = Fp8Table::of(3, None);
        &TABLE
    };
}
impl Fp8 for E5m2 {
    const TABLE: &'static Fp8Table = {
        static TABLE: Fp8Table = Fp8Table::of(2, Some(0x7c));
        &TABLE
    };
}

impl Fp8Table {
    /// Returns the table of codes with `fraction` bits of fraction. Codes from `infinity` on are
    /// not finite; without an infinity only the last one is not.
    const fn of(fraction: u32, infinity: Option<u32>) -> Self {
        let mut codes = Self { lower: [[0; 64]; 2], upper: [[0; 64]; 2] };
        let mut code = 0;
        while code < 128 {
            let bits = match infinity {
                Some(infinity) if code == infinity => 0x7f80,
                Some(infinity) if code > infinity => 0x7fc0,
                None if code == 127 => 0x7fc0,
                _ => Self::finite(code, fraction),
            };
            let [lower, upper] = bits.to_le_bytes();
            #[expect(clippy::as_conversions, reason = "below 128, and `const`")]
            let (half, at) = (code as usize / 64, code as usize % 64);
            (codes.lower[half][at], codes.upper[half][at]) = (lower, upper);
            code += 1;
        }
        codes
    }

    /// The bits of the bf16 of a finite code. Its bias is 127 instead of that of `7 - fraction`
    /// bits.
    #[expect(
        clippy::as_conversions,
        clippy::cast_possible_truncation,
        reason = "15 bits, and `const`"
    )]
    const fn finite(code: u32, fraction: u32) -> u16 {
        let one = 1 << fraction;
        let bias = 127 + 1 - (1 << (6 - fraction));
        let (exponent, rest) = (code >> fraction, code & (one - 1));
        if exponent > 0 {
            return (((exponent + bias) << 7) | (rest << (7 - fraction))) as u16;
        }
        if rest == 0 {
            return 0;
        }
        // Its highest bit becomes the implicit one.
        let shift = fraction - rest.ilog2();
        (((bias + 1 - shift) << 7) | (((rest << shift) & (one - 1)) << (7 - fraction))) as u16
    }
}

/// FP8 rows read by lookups.
pub(crate) struct LookedUp<B, E>(pub(crate) B, PhantomData<E>);

impl<B, E> LookedUp<B, E> {
    pub(crate) const fn new(b: B) -> Self {
        Self(b, PhantomData)
    }
}
impl<B: Copy, E> Copy for LookedUp<B, E> {}
impl<B: Copy, E> Clone for LookedUp<B, E> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B: LookUp, E: Fp8> LookedUp<B, E> {
    /// 64 values as `f32`.
    ///
    /// # Safety
    /// 1. As many bytes are readable.
    #[inline(always)]
    pub(crate) unsafe fn two_groups(self, from: *const u8) -> [[<B::S as Simd>::F; 2]; 2] {
        // SAFETY: condition 1.
        let [a, b, c, d] = unsafe { self.0.floats(E::TABLE, from) };
        [[a, b], [c, d]]
    }
    /// 32 values as `f32`.
    ///
    /// # Safety
    /// 1. As many bytes are readable.
    #[inline(always)]
    pub(crate) unsafe fn group(self, from: *const u8) -> [<B::S as Simd>::F; 2] {
        // SAFETY: condition 1.
        unsafe { self.0.half(E::TABLE, from) }
    }
    /// 64 values as words of two bf16.
    ///
    /// # Safety
    /// 1. As many bytes are readable.
    #[inline(always)]
    pub(crate) unsafe fn words(self, from: *const u8) -> [<B::S as Simd>::I; 2] {
        // SAFETY: condition 1.
        unsafe { self.0.words(E::TABLE, from) }
    }
    /// The values after the last whole group, as [`Decode::rest`].
    ///
    /// # Safety
    /// As for [`Decode::rest`].
    #[inline(always)]
    pub(crate) unsafe fn rest(self, row: *const u8, layout: &RowLayout) -> Rest {
        let begin = super::rest_begin(layout.dim());
        let (mut codes, mut rest) = ([0; GROUP], [0.0; GROUP]);
        let n = layout.dim() - begin;
        // SAFETY: the last codes of the row, fewer than a group; the array is new.
        unsafe { std::ptr::copy_nonoverlapping(row.wrapping_add(begin), codes.as_mut_ptr(), n) };
        // SAFETY: an array of a group.
        let [first, second] = unsafe { self.group(codes.as_ptr()) };
        let s = self.0.simd();
        // SAFETY: both halves of the array.
        unsafe { s.store(rest.as_mut_ptr(), 0, first) };
        // SAFETY: as above.
        unsafe { s.store(rest.as_mut_ptr(), HALF, second) };
        rest
    }
    /// As [`Decode::half_rest`] of all [`HALF`] values.
    ///
    /// # Safety
    /// As for [`Decode::half_rest`].
    #[inline(always)]
    pub(crate) unsafe fn half_rest(self, row: *const u8, layout: &RowLayout) -> <B::S as Simd>::F {
        let mut codes = [0; GROUP];
        let from = row.wrapping_add(super::rest_begin(layout.dim()));
        // SAFETY: the last codes of the row; the array is new.
        unsafe { std::ptr::copy_nonoverlapping(from, codes.as_mut_ptr(), HALF) };
        // SAFETY: an array of a group.
        let [first, _] = unsafe { self.group(codes.as_ptr()) };
        first
    }
}

#[cfg(test)]
mod tests {
    use kv_format::minifloat::{e4m3_decode, e5m2_decode};

    use super::*;

    #[test]
    fn a_table_has_the_values_of_its_codes() {
        for code in 0..128 {
            let e4m3 = (E4m3::TABLE, e4m3_decode(code));
            for (table, expected) in [e4m3, (E5m2::TABLE, e5m2_decode(code))] {
                let at = usize::from(code);
                let (lower, upper) = (table.lower.as_flattened(), table.upper.as_flattened());
                let value = f32::from_le_bytes([0, 0, lower[at], upper[at]]);
                let is_same = value.to_bits() == expected.to_bits();
                assert!(
                    is_same || value.is_nan() && expected.is_nan(),
                    "{code}: {value} {expected}"
                );
            }
        }
    }
}
