//! How rows are read, and how queries and keys are multiplied: as `f32`, whatever they are stored
//! in. `bf16.rs` and `words.rs` have what takes half the time where a CPU has instructions for it.
#![expect(
    clippy::arithmetic_side_effects,
    clippy::inline_always,
    clippy::needless_range_loop,
    clippy::indexing_slicing,
    reason = "kernel code: the strip was checked, and loops must melt into the function that \
              carries the target features"
)]
use std::marker::PhantomData;

use super::super::simd::{LINE, Simd};
use super::super::stored::{GROUP, Stored};
use super::super::tile::HALF;
use super::{Meeting, Piece, Rows};

/// How rows are read as `f32`.
pub(in super::super) trait Load: Copy {
    type S: Simd;
    /// Whether rows are met whole, in the order of memory, though some is decoded more than once:
    /// where values need hardly any decoding (`docs/performance.md`).
    const WHOLE: bool;
    /// Bytes of a group of values, or 0 where that is not known here.
    const BYTES: usize;
    /// What loaded values are multiplied with besides the scale of their row.
    const FACTOR: f32;

    fn simd(self) -> Self::S;
    /// `C` groups from one on of the row that begins at `row`, which is one of `rows`.
    ///
    /// # Safety
    /// 1. The rows are those of a piece, see [`Rows::new`], and have so many groups.
    unsafe fn load<const C: usize>(
        self,
        rows: &Rows<'_>,
        row: *const u8,
        group: usize,
    ) -> [[V<Self>; 2]; C];
}

/// A vector of values.
pub(in super::super) type V<L> = <<L as Load>::S as Simd>::F;

/// By the primitives of an encoding.
pub(in super::super) struct Decoded<S, E>(S, PhantomData<E>);

impl<S, E> Decoded<S, E> {
    pub(in super::super) const fn new(s: S) -> Self {
        Self(s, PhantomData)
    }
}
impl<S: Copy, E> Copy for Decoded<S, E> {}
impl<S: Copy, E> Clone for Decoded<S, E> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<S: Simd, E: Stored> Load for Decoded<S, E> {
    type S = S;
    const WHOLE: bool = E::LINES > 0;
    const BYTES: usize = E::LINES * LINE;
    const FACTOR: f32 = E::FACTOR;

    #[inline(always)]
    fn simd(self) -> S {
        self.0
    }
    #[inline(always)]
    unsafe fn load<const C: usize>(
        self,
        rows: &Rows<'_>,
        row: *const u8,
        group: usize,
    ) -> [[S::F; 2]; C] {
        let mut values = [[self.0.splat(0.0); 2]; C];
        for c in 0..C {
            let at = (group + c) * GROUP;
            // SAFETY: a whole group of a row, by condition 1.
            values[c] = unsafe { E::load_pair(self.0, row, rows.layout, at, 0) };
        }
        values
    }
}

/// The query rows of a head, and the K rows of a piece.
pub(in super::super) struct Operands<'a> {
    q: *const f32,
    q_stride: usize,
    words: *const u32,
    units: *const f32,
    pub(super) k: Rows<'a>,
}

impl<'a> Operands<'a> {
    /// Those of a piece.
    ///
    /// # Safety
    /// As for [`Rows::new`].
    #[inline(always)]
    pub(super) unsafe fn new(args: &Meeting<'a>, piece: &Piece) -> Self {
        let first = piece.head * args.rows * args.q_stride;
        Self {
            q: args.q.as_ptr().wrapping_add(first),
            q_stride: args.q_stride,
            words: args.words.as_ptr().wrapping_add(first / 2),
            units: args.lanes[piece.head].units.as_ptr(),
            // SAFETY: the condition is passed on.
            k: unsafe { Rows::new(args, piece, 0) },
        }
    }

    /// A group of values of a query row.
    #[inline(always)]
    pub(super) fn query<S: Simd>(&self, s: S, row: usize, group: usize) -> [S::F; 2] {
        let at = row * self.q_stride + group * GROUP;
        // SAFETY: the rows have as many values as those of K, by the check of the strip.
        let first = unsafe { s.load(self.q, at) };
        // SAFETY: as above.
        [first, unsafe { s.load(self.q, at + HALF) }]
    }

    /// The same as words of two values, for heads whose queries are there as such.
    #[inline(always)]
    pub(super) fn query_words<S: Simd>(&self, s: S, row: usize, group: usize) -> S::I {
        let at = row * self.q_stride / 2 + group * HALF;
        // SAFETY: there are as many, half as far apart, by the check of the strip.
        unsafe { s.load_bits(self.words, at) }
    }

    /// By lane of scores, what a query value of 1 in fixed point is.
    #[inline(always)]
    pub(super) fn units<S: Simd>(&self, s: S) -> S::F {
        // SAFETY: an array of as many, see `new`.
        unsafe { s.load(self.units, 0) }
    }
}

/// How groups of values are multiplied, and products added.
pub(in super::super) trait Multiply: Copy {
    type S: Simd;
    /// A group of values.
    type Group: Copy;
    /// A vector of sums of products.
    type Sums: Copy;
    /// Values of a group.
    const VALUES: usize = GROUP;
    /// Bytes of a group of K, or 0 where lines are not asked for by it.
    const BYTES: usize;

    fn simd(self) -> Self::S;
    fn zero(self) -> Self::Sums;
    fn query(self, x: &Operands<'_>, row: usize, group: usize) -> Self::Group;
    /// Of the row of K that begins at `row`.
    fn key(self, x: &Operands<'_>, row: *const u8, group: usize) -> Self::Group;
    /// Adds the products of a query's group with that of a key to two vectors.
    fn dot(self, sums: [Self::Sums; 2], groups: (Self::Group, Self::Group)) -> [Self::Sums; 2];
    fn add(self, a: Self::Sums, b: Self::Sums) -> Self::Sums;
    /// As [`Simd::fold`].
    fn fold(self, bit: u32, a: Self::Sums, b: Self::Sums) -> Self::Sums;
    /// What sums whose lanes are those of scores come to.
    fn scores(self, x: &Operands<'_>, sums: Self::Sums) -> <Self::S as Simd>::F;
}

/// As `f32`.
#[derive(Clone, Copy)]
pub(super) struct Floats<L>(pub(super) L);

impl<L: Load> Multiply for Floats<L> {
    type S = L::S;
    type Group = [V<L>; 2];
    type Sums = V<L>;
    const BYTES: usize = if L::WHOLE { L::BYTES } else { 0 };

    #[inline(always)]
    fn simd(self) -> L::S {
        self.0.simd()
    }
    #[inline(always)]
    fn zero(self) -> V<L> {
        self.simd().splat(0.0)
    }
    #[inline(always)]
    fn query(self, x: &Operands<'_>, row: usize, group: usize) -> [V<L>; 2] {
        x.query(self.simd(), row, group)
    }
    #[inline(always)]
    fn key(self, x: &Operands<'_>, row: *const u8, group: usize) -> [V<L>; 2] {
        // SAFETY: a group of K of a piece, by the check of the strip.
        let [values] = unsafe { self.0.load::<1>(&x.k, row, group) };
        values
    }
    #[inline(always)]
    fn dot(self, sums: [V<L>; 2], (q, k): ([V<L>; 2], [V<L>; 2])) -> [V<L>; 2] {
        let s = self.simd();
        [s.fma(q[0], k[0], sums[0]), s.fma(q[1], k[1], sums[1])]
    }
    #[inline(always)]
    fn add(self, a: V<L>, b: V<L>) -> V<L> {
        self.simd().add(a, b)
    }
    #[inline(always)]
    fn fold(self, bit: u32, a: V<L>, b: V<L>) -> V<L> {
        self.simd().fold(bit, a, b)
    }
    #[inline(always)]
    fn scores(self, _: &Operands<'_>, sums: V<L>) -> V<L> {
        sums
    }
}
