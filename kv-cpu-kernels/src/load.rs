//! Loads of rows as vectors of `f32`, for every encoding and instruction set.
#![expect(
    clippy::inline_always,
    clippy::needless_range_loop,
    reason = "kernel code: offsets inside of a row, and helpers must inline into the \
              `#[target_feature]` caller"
)]
use std::marker::PhantomData;

use crate::decode::{Decode, Fp8, GROUP, HALF, LookUp, LookedUp, Rest};
use crate::layout::RowLayout;
use crate::simd::Simd;

/// A vector of values.
pub(crate) type V<L> = <<L as Load>::S as Simd>::F;

/// Reads rows as `f32`, by pairs of vectors: pair `p` of a row is its values
/// `p / n * GROUP + p % n * LANES` and [`HALF`] values further on, where `n` pairs make a group.
pub(crate) trait Load: Copy {
    type S: Simd;

    fn simd(self) -> Self::S;
    /// Returns `P` pairs from pair `first` on.
    ///
    /// # Safety
    /// 1. The bytes of the row are readable, and the pairs lie in its whole groups.
    unsafe fn pairs<const P: usize>(
        self,
        row: *const u8,
        layout: &RowLayout,
        first: usize,
    ) -> [[V<Self>; 2]; P];
    /// Returns the values after the last whole group.
    ///
    /// # Safety
    /// 1. The bytes of the row are readable, and there is such a value.
    unsafe fn rest(self, row: *const u8, layout: &RowLayout) -> Rest;
    /// Returns the vector at value `offset` of a rest of [`HALF`] values.
    ///
    /// # Safety
    /// 1. The bytes of the row are readable, its rest has [`HALF`] values, and `offset` is below
    ///    that and a multiple of `LANES`.
    unsafe fn half_rest(self, row: *const u8, layout: &RowLayout, offset: usize) -> V<Self>;
}

/// Group and offset of a pair.
#[inline(always)]
pub(crate) fn place<S: Simd>(pair: usize) -> (usize, usize) {
    let of_group = HALF / S::LANES;
    (pair / of_group * GROUP, pair % of_group * S::LANES)
}

/// Loads by the primitives of a vector type.
pub(crate) struct Decoded<S, E>(S, PhantomData<E>);

impl<S, E> Decoded<S, E> {
    pub(crate) const fn new(s: S) -> Self {
        Self(s, PhantomData)
    }
}
impl<S: Copy, E> Copy for Decoded<S, E> {}
impl<S: Copy, E> Clone for Decoded<S, E> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<S: Simd, E: Decode> Load for Decoded<S, E> {
    type S = S;

    #[inline(always)]
    fn simd(self) -> S {
        self.0
    }
    #[inline(always)]
    unsafe fn pairs<const P: usize>(
        self,
        row: *const u8,
        layout: &RowLayout,
        first: usize,
    ) -> [[S::F; 2]; P] {
        let mut values = [[self.0.splat(0.0); 2]; P];
        for p in 0..P {
            let (group, offset) = place::<S>(first + p);
            // SAFETY: a whole group of the row, by condition 1.
            values[p] = unsafe { E::load_pair(self.0, row, layout, group, offset) };
        }
        values
    }
    #[inline(always)]
    unsafe fn rest(self, row: *const u8, layout: &RowLayout) -> Rest {
        // SAFETY: condition 1.
        unsafe { E::rest(self.0, row, layout) }
    }
    #[inline(always)]
    unsafe fn half_rest(self, row: *const u8, layout: &RowLayout, offset: usize) -> S::F {
        // SAFETY: condition 1.
        unsafe { E::half_rest(self.0, row, layout, offset) }
    }
}

/// Loads by lookups, two groups at a time where there are two; a pair is a group.
impl<B: LookUp, E: Fp8> Load for LookedUp<B, E> {
    type S = B::S;

    #[inline(always)]
    fn simd(self) -> B::S {
        self.0.simd()
    }
    #[inline(always)]
    unsafe fn pairs<const P: usize>(
        self,
        row: *const u8,
        _: &RowLayout,
        first: usize,
    ) -> [[V<Self>; 2]; P] {
        const { assert!(B::S::LANES == HALF, "a pair is a group") };
        let mut values = [[self.simd().splat(0.0); 2]; P];
        let mut p = 0;
        while p + 2 <= P {
            // SAFETY: two groups of a row of as many bytes as values, by condition 1.
            let two = unsafe { self.two_groups(row.wrapping_add((first + p) * GROUP)) };
            values[p..p + 2].copy_from_slice(&two);
            p += 2;
        }
        if p < P {
            // SAFETY: a group of the row.
            values[p] = unsafe { self.group(row.wrapping_add((first + p) * GROUP)) };
        }
        values
    }
    #[inline(always)]
    unsafe fn rest(self, row: *const u8, layout: &RowLayout) -> Rest {
        // SAFETY: condition 1.
        unsafe { Self::rest(self, row, layout) }
    }
    #[inline(always)]
    unsafe fn half_rest(self, row: *const u8, layout: &RowLayout, _: usize) -> V<Self> {
        // SAFETY: condition 1; a vector has all of the rest.
        unsafe { Self::half_rest(self, row, layout) }
    }
}
