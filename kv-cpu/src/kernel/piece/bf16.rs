//! Rows whose values bf16 holds, and that some CPUs multiply as such: bf16 itself and FP8, for
//! queries of no more bits than bf16.
#![expect(
    clippy::arithmetic_side_effects,
    clippy::inline_always,
    clippy::indexing_slicing,
    reason = "kernel code: the strip was checked, and loops must melt into the function that \
              carries the target features"
)]
use std::marker::PhantomData;

use super::super::simd::Simd;
use super::super::stored::{E4m3, E5m2, GROUP};
use super::super::tile::HALF;
use super::Rows;
use super::multiply::{Load, Multiply, Operands};

/// Products of bf16, which not every CPU has that has the vectors.
pub(in super::super) trait DotBf16: Copy {
    type S: Simd;

    fn simd(self) -> Self::S;
    /// Adds the products of both values of each word.
    fn dot(
        self,
        a: <Self::S as Simd>::I,
        b: <Self::S as Simd>::I,
        sums: <Self::S as Simd>::F,
    ) -> <Self::S as Simd>::F;
}

/// Lookups by bytes, which not every CPU has either.
pub(in super::super) trait LookUp: Copy {
    type S: Simd;

    fn simd(self) -> Self::S;
    /// 64 codes as bf16, in their order.
    ///
    /// # Safety
    /// 1. As many bytes are readable.
    unsafe fn words(self, codes: &'static Codes, from: *const u8) -> [<Self::S as Simd>::I; 2];
    /// 64 codes as `f32`, in their order.
    ///
    /// # Safety
    /// 1. As many bytes are readable.
    unsafe fn floats(self, codes: &'static Codes, from: *const u8) -> [<Self::S as Simd>::F; 4];
    /// 32 of them.
    ///
    /// # Safety
    /// 1. As many bytes are readable.
    unsafe fn half(self, codes: &'static Codes, from: *const u8) -> [<Self::S as Simd>::F; 2];
}

/// Codes of 8 bits as bf16, without signs, the lower and the upper byte of each; halves of both are
/// vectors.
#[derive(Debug)]
#[repr(align(64))]
pub(in super::super) struct Codes {
    pub(in super::super) lower: [[u8; 64]; 2],
    pub(in super::super) upper: [[u8; 64]; 2],
}

/// An encoding of such codes.
pub(in super::super) trait Fp8 {
    const CODES: &'static Codes;
}
impl Fp8 for E4m3 {
    const CODES: &'static Codes = {
        static CODES: Codes = Codes::of(3, None);
        &CODES
    };
}
impl Fp8 for E5m2 {
    const CODES: &'static Codes = {
        static CODES: Codes = Codes::of(2, Some(0x7c));
        &CODES
    };
}

impl Codes {
    /// Of codes with so many bits of fraction. From the code of infinity on, or only the last one
    /// where there is none, they are not finite.
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

    /// The bits of bf16, whose bias of 127 is that of `7 - fraction` bits and what lies between.
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
        // Its highest bit becomes the one that is not written.
        let shift = fraction - rest.ilog2();
        (((bias + 1 - shift) << 7) | (((rest << shift) & (one - 1)) << (7 - fraction))) as u16
    }
}

/// FP8 by lookups.
pub(in super::super) struct Coded<B, E>(B, PhantomData<E>);

impl<B, E> Coded<B, E> {
    pub(in super::super) const fn new(b: B) -> Self {
        Self(b, PhantomData)
    }
}
impl<B: Copy, E> Copy for Coded<B, E> {}
impl<B: Copy, E> Clone for Coded<B, E> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B: LookUp, E: Fp8> Load for Coded<B, E> {
    type S = B::S;
    const WHOLE: bool = false;
    const BYTES: usize = GROUP;
    const FACTOR: f32 = 1.0;

    #[inline(always)]
    fn simd(self) -> B::S {
        self.0.simd()
    }
    #[inline(always)]
    unsafe fn load<const C: usize>(
        self,
        _: &Rows<'_>,
        row: *const u8,
        group: usize,
    ) -> [[<B::S as Simd>::F; 2]; C] {
        let mut values = [[self.simd().splat(0.0); 2]; C];
        let mut c = 0;
        while c + 2 <= C {
            let from = row.wrapping_add((group + c) * GROUP);
            // SAFETY: two groups of a row of as many bytes as values, by condition 1.
            let four = unsafe { self.0.floats(E::CODES, from) };
            (values[c], values[c + 1]) = ([four[0], four[1]], [four[2], four[3]]);
            c += 2;
        }
        if c < C {
            let from = row.wrapping_add((group + c) * GROUP);
            // SAFETY: as above, of one group.
            values[c] = unsafe { self.0.half(E::CODES, from) };
        }
        values
    }
}

/// How rows are read as bf16.
pub(in super::super) trait AsBf16: Copy {
    type S: Simd;
    /// Bytes of [`PAIRED`] values.
    const BYTES: usize;

    /// So many values, the first of which has this number.
    ///
    /// # Safety
    /// 1. The row has them.
    unsafe fn words(self, row: *const u8, first: usize) -> [<Self::S as Simd>::I; 2];
}

/// Values of two words of all lanes.
pub(super) const PAIRED: usize = 2 * GROUP;

/// Rows of bf16.
#[derive(Clone, Copy)]
pub(in super::super) struct Plain<S>(pub(in super::super) S);

impl<S: Simd> AsBf16 for Plain<S> {
    type S = S;
    const BYTES: usize = 2 * PAIRED;

    #[inline(always)]
    unsafe fn words(self, row: *const u8, first: usize) -> [S::I; 2] {
        let at = first / 2;
        // SAFETY: values of the row, by condition 1.
        let words = unsafe { self.0.load_bits(row.cast(), at) };
        // SAFETY: as above.
        [words, unsafe { self.0.load_bits(row.cast(), at + HALF) }]
    }
}

impl<B: LookUp, E: Fp8> AsBf16 for Coded<B, E> {
    type S = B::S;
    const BYTES: usize = PAIRED;

    #[inline(always)]
    unsafe fn words(self, row: *const u8, first: usize) -> [<B::S as Simd>::I; 2] {
        // SAFETY: values of the row, by condition 1, of a byte each.
        unsafe { self.0.words(E::CODES, row.wrapping_add(first)) }
    }
}

/// Products of bf16 with rows that are read so.
#[derive(Clone, Copy)]
pub(in super::super) struct Paired<B, K>(pub(in super::super) B, pub(in super::super) K);

impl<B: DotBf16, K: AsBf16<S = B::S>> Multiply for Paired<B, K> {
    type S = B::S;
    type Group = [<B::S as Simd>::I; 2];
    type Sums = <B::S as Simd>::F;
    const VALUES: usize = PAIRED;
    const BYTES: usize = K::BYTES;

    #[inline(always)]
    fn simd(self) -> B::S {
        self.0.simd()
    }
    #[inline(always)]
    fn zero(self) -> Self::Sums {
        self.simd().splat(0.0)
    }
    #[inline(always)]
    fn query(self, x: &Operands<'_>, row: usize, group: usize) -> Self::Group {
        let s = self.simd();
        [x.query_words(s, row, 2 * group), x.query_words(s, row, 2 * group + 1)]
    }
    #[inline(always)]
    fn key(self, _: &Operands<'_>, row: *const u8, group: usize) -> Self::Group {
        // SAFETY: values of a row of K, by the check of the strip.
        unsafe { self.1.words(row, group * PAIRED) }
    }
    #[inline(always)]
    fn dot(self, [a, b]: [Self::Sums; 2], (q, k): (Self::Group, Self::Group)) -> [Self::Sums; 2] {
        [self.0.dot(q[0], k[0], a), self.0.dot(q[1], k[1], b)]
    }
    #[inline(always)]
    fn add(self, a: Self::Sums, b: Self::Sums) -> Self::Sums {
        self.simd().add(a, b)
    }
    #[inline(always)]
    fn fold(self, bit: u32, a: Self::Sums, b: Self::Sums) -> Self::Sums {
        self.simd().fold(bit, a, b)
    }
    #[inline(always)]
    fn scores(self, _: &Operands<'_>, sums: Self::Sums) -> Self::Sums {
        sums
    }
}

#[cfg(test)]
mod tests {
    use kv_quant::minifloat::{e4m3_decode, e5m2_decode};

    use super::*;

    /// All codes are what they decode to, which bf16 holds.
    #[test]
    fn codes_are_their_values() {
        for code in 0..128 {
            let e4m3 = (E4m3::CODES, e4m3_decode(code));
            for (codes, wanted) in [e4m3, (E5m2::CODES, e5m2_decode(code))] {
                let at = usize::from(code);
                let (lower, upper) = (codes.lower.as_flattened(), codes.upper.as_flattened());
                let value = f32::from_le_bytes([0, 0, lower[at], upper[at]]);
                let is_same = value.to_bits() == wanted.to_bits();
                assert!(is_same || value.is_nan() && wanted.is_nan(), "{code}: {value} {wanted}");
            }
        }
    }
}
