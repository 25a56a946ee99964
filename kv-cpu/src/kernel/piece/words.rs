//! Keys of signed bytes as words of 16 bits, which some CPUs multiply twice as fast as `f32`, by
//! queries in fixed point: where outputs have 16 bits themselves, for which a 65,536th of the
//! greatest value of a query row is little enough ([`put_words`]).
//!
//! Weights stay `f32`: small ones count where V is zero for the great ones.
//!
//! [`put_words`]: super::Lanes::put_words
#![expect(
    clippy::arithmetic_side_effects,
    clippy::inline_always,
    reason = "kernel code: the strip was checked, and loops must melt into the function that \
              carries the target features"
)]
use super::super::simd::Simd;
use super::super::stored::GROUP;
use super::multiply::{Multiply, Operands};

/// Most values of a row: that many products of the greatest numbers are still below 2^31.
pub(super) const VALUES_MAX: usize = 512;

/// The greatest number in fixed point.
pub(super) const GREATEST: f32 = 32_767.0;

/// Products of words of 16 bits, two of which a lane has, and what is done with their sums, which
/// are integers of 32 bits.
pub(in super::super) trait DotWords: Copy {
    type S: Simd;

    fn simd(self) -> Self::S;
    /// 32 bytes as words.
    ///
    /// # Safety
    /// 1. As many bytes are readable.
    unsafe fn load(self, from: *const u8) -> <Self::S as Simd>::I;
    /// Adds the products of both words of each lane.
    fn dot(
        self,
        a: <Self::S as Simd>::I,
        b: <Self::S as Simd>::I,
        sums: <Self::S as Simd>::I,
    ) -> <Self::S as Simd>::I;
    fn add(self, a: <Self::S as Simd>::I, b: <Self::S as Simd>::I) -> <Self::S as Simd>::I;
    /// As [`Simd::fold`].
    fn fold(
        self,
        bit: u32,
        a: <Self::S as Simd>::I,
        b: <Self::S as Simd>::I,
    ) -> <Self::S as Simd>::I;
    fn floats(self, sums: <Self::S as Simd>::I) -> <Self::S as Simd>::F;
}

/// Products with rows of bytes.
#[derive(Clone, Copy)]
pub(in super::super) struct Bytes<B>(pub(in super::super) B);

impl<B: DotWords> Multiply for Bytes<B> {
    type S = B::S;
    type Group = <B::S as Simd>::I;
    type Sums = <B::S as Simd>::I;
    const BYTES: usize = GROUP;

    #[inline(always)]
    fn simd(self) -> B::S {
        self.0.simd()
    }
    #[inline(always)]
    fn zero(self) -> Self::Sums {
        self.simd().splat_bits(0)
    }
    #[inline(always)]
    fn query(self, x: &Operands<'_>, row: usize, group: usize) -> Self::Group {
        x.query_words(self.simd(), row, group)
    }
    #[inline(always)]
    fn key(self, _: &Operands<'_>, row: *const u8, group: usize) -> Self::Group {
        // SAFETY: a whole group of a row of as many bytes, by the check of the strip.
        unsafe { self.0.load(row.wrapping_add(group * GROUP)) }
    }
    #[inline(always)]
    fn dot(self, [a, b]: [Self::Sums; 2], (q, k): (Self::Group, Self::Group)) -> [Self::Sums; 2] {
        [self.0.dot(q, k, a), b]
    }
    #[inline(always)]
    fn add(self, a: Self::Sums, b: Self::Sums) -> Self::Sums {
        self.0.add(a, b)
    }
    #[inline(always)]
    fn fold(self, bit: u32, a: Self::Sums, b: Self::Sums) -> Self::Sums {
        self.0.fold(bit, a, b)
    }
    #[inline(always)]
    fn scores(self, x: &Operands<'_>, sums: Self::Sums) -> <B::S as Simd>::F {
        let s = self.simd();
        s.mul(self.0.floats(sums), x.units(s))
    }
}
