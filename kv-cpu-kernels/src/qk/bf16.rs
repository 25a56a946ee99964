//! Operands as words of two bf16: rows of bf16 in place, FP8 by lookups.
use super::{F, Product, QueryRow};
use crate::decode::{Fp8, GROUP, HALF, LookUp, LookedUp};
use crate::layout::RowLayout;
use crate::simd::Simd;

/// Products of pairs of bf16: AVX-512 BF16.
pub(crate) trait DotBf16: Copy {
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

/// Rows of K as words of two bf16.
pub(crate) trait KeyWords: Copy {
    type S: Simd;
    type Words: Copy;
    /// Number of values of a key, and of the bytes that hold them.
    const VALUES: usize;
    const BYTES: usize;

    /// Loads the words of a key.
    ///
    /// # Safety
    /// 1. The bytes are readable.
    unsafe fn load(self, from: *const u8) -> Self::Words;
    /// Loads the words of the values after the last whole key of a row of `dim` values, then zeros.
    ///
    /// # Safety
    /// 1. The bytes of the row are readable, and there is such a value.
    #[inline(always)]
    unsafe fn load_rest(self, row: *const u8, dim: usize) -> Self::Words {
        const { assert!(Self::BYTES == 2 * GROUP, "the rest is shorter than a key") };
        let begin = dim / Self::VALUES * Self::BYTES;
        let (from, bytes) = (row.wrapping_add(begin), dim * Self::BYTES / Self::VALUES - begin);
        // An array of a known number of bytes stays in a register.
        match bytes {
            // SAFETY: the last bytes of the row.
            16 => unsafe { self.load_padded::<16>(from, 16) },
            // SAFETY: as above.
            32 => unsafe { self.load_padded::<32>(from, 32) },
            // SAFETY: as above.
            48 => unsafe { self.load_padded::<48>(from, 48) },
            // SAFETY: as above, fewer than those of a key.
            _ => unsafe { self.load_padded::<{ 2 * GROUP }>(from, bytes) },
        }
    }
    /// Loads the words of `bytes` bytes, at most `N`, then zeros.
    ///
    /// # Safety
    /// 1. The bytes are readable.
    #[inline(always)]
    unsafe fn load_padded<const N: usize>(self, from: *const u8, bytes: usize) -> Self::Words {
        let mut padded = [0_u8; 2 * GROUP];
        // SAFETY: condition 1; a new array, which has room for `N`.
        unsafe { std::ptr::copy_nonoverlapping(from, padded.as_mut_ptr(), bytes.min(N)) };
        // SAFETY: an array of the bytes of a key.
        unsafe { self.load(padded.as_ptr()) }
    }
    fn add<B: DotBf16<S = Self::S>>(
        b: B,
        sum: <Self::S as Simd>::F,
        query: Self::Words,
        key: Self::Words,
    ) -> <Self::S as Simd>::F;
    /// Loads words of a query row.
    ///
    /// # Safety
    /// 1. The words of a key are readable.
    unsafe fn query(self, from: *const u32) -> Self::Words;
}

/// Rows of bf16, which are words of two bf16 in memory.
#[derive(Clone, Copy)]
pub(crate) struct Bf16Rows<S>(pub(crate) S);

impl<S: Simd> KeyWords for Bf16Rows<S> {
    type S = S;
    type Words = S::I;
    const VALUES: usize = GROUP;
    const BYTES: usize = 2 * GROUP;

    #[inline(always)]
    unsafe fn load(self, from: *const u8) -> S::I {
        // SAFETY: condition 1.
        unsafe { self.0.load_bits(from.cast(), 0) }
    }
    #[inline(always)]
    fn add<B: DotBf16<S = S>>(b: B, sum: S::F, query: S::I, key: S::I) -> S::F {
        b.dot(query, key, sum)
    }
    #[inline(always)]
    unsafe fn query(self, from: *const u32) -> S::I {
        // SAFETY: condition 1.
        unsafe { self.0.load_bits(from, 0) }
    }
}

impl<B: LookUp, E: Fp8> KeyWords for LookedUp<B, E> {
    type S = B::S;
    type Words = [<B::S as Simd>::I; 2];
    const VALUES: usize = 2 * GROUP;
    const BYTES: usize = 2 * GROUP;

    #[inline(always)]
    unsafe fn load(self, from: *const u8) -> Self::Words {
        // SAFETY: condition 1.
        unsafe { self.words(from) }
    }
    #[inline(always)]
    fn add<D: DotBf16<S = B::S>>(
        d: D,
        sum: <B::S as Simd>::F,
        query: Self::Words,
        key: Self::Words,
    ) -> <B::S as Simd>::F {
        d.dot(query[1], key[1], d.dot(query[0], key[0], sum))
    }
    #[inline(always)]
    unsafe fn query(self, from: *const u32) -> Self::Words {
        let s = self.0.simd();
        // SAFETY: condition 1.
        let first = unsafe { s.load_bits(from, 0) };
        // SAFETY: as above.
        [first, unsafe { s.load_bits(from, HALF) }]
    }
}

/// Operands as words of two bf16.
#[derive(Clone, Copy)]
pub(crate) struct Bf16Words<B, K>(pub(crate) B, pub(crate) K);

impl<B: DotBf16, K: KeyWords<S = B::S>> Product for Bf16Words<B, K> {
    type S = B::S;
    type Query = K::Words;
    type Key = K::Words;
    const VALUES: usize = K::VALUES;
    const WHOLE: usize = K::VALUES;

    #[inline(always)]
    fn simd(self) -> B::S {
        self.0.simd()
    }
    #[inline(always)]
    unsafe fn query(self, row: QueryRow, value: usize) -> K::Words {
        // SAFETY: condition 1.
        unsafe { self.1.query(row.words.wrapping_add(value / 2)) }
    }
    #[inline(always)]
    unsafe fn key(self, row: *const u8, _: &RowLayout, value: usize) -> K::Words {
        // SAFETY: condition 1.
        unsafe { self.1.load(row.wrapping_add(value / K::VALUES * K::BYTES)) }
    }
    #[inline(always)]
    unsafe fn rests<const R: usize, const T: usize>(
        self,
        layout: &RowLayout,
        queries: &[QueryRow; R],
        rows: &[*const u8; T],
    ) -> [[F<Self>; T]; R] {
        let whole = layout.dim() / K::VALUES * K::VALUES;
        let mut sums = [[self.simd().splat(0.0); T]; R];
        for t in 0..T {
            // SAFETY: condition 1.
            let key = unsafe { self.1.load_rest(rows[t], layout.dim()) };
            for r in 0..R {
                // SAFETY: condition 2.
                let query = unsafe { self.query(queries[r], whole) };
                sums[r][t] = self.add(sums[r][t], query, key);
            }
        }
        sums
    }
    #[inline(always)]
    fn add(self, sum: F<Self>, query: K::Words, key: K::Words) -> F<Self> {
        K::add(self.0, sum, query, key)
    }
}
