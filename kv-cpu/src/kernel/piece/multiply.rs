//! How queries and keys are multiplied: as `f32`, or as the pairs of bf16 as which K lies there.
#![expect(
    clippy::arithmetic_side_effects,
    clippy::indexing_slicing,
    clippy::inline_always,
    reason = "kernel code: the strip was checked, and loops must melt into the function that \
              carries the target features"
)]
use std::marker::PhantomData;

use super::super::simd::Simd;
use super::super::stored::{Bf16Pairs, GROUP, Stored};
use super::super::tile::HALF;
use super::{Meeting, Piece, Rows};

/// The query rows of a head, and the K rows of a piece.
pub(super) struct Operands<'a> {
    q: *const f32,
    q_stride: usize,
    pub(super) k: Rows<'a>,
}

impl<'a> Operands<'a> {
    /// Those of a piece.
    ///
    /// # Safety
    /// As for [`Rows::new`].
    #[inline(always)]
    pub(super) unsafe fn new(args: &Meeting<'a>, piece: &Piece) -> Self {
        let q = args.q.as_ptr().wrapping_add(piece.head * args.rows * args.q_stride);
        // SAFETY: the condition is passed on.
        Self { q, q_stride: args.q_stride, k: unsafe { Rows::new(args, piece, 0) } }
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

    /// The same of the row of K that begins at `row`.
    #[inline(always)]
    pub(super) fn key<S: Simd, E: Stored>(&self, s: S, row: *const u8, group: usize) -> [S::F; 2] {
        // SAFETY: a whole group of a row, see `Rows::new`.
        unsafe { E::load_pair(s, row, self.k.layout, group * GROUP, 0) }
    }

    /// As it lies there, of two bytes a value.
    #[inline(always)]
    fn key_bits<S: Simd>(&self, s: S, row: *const u8, group: usize) -> S::I {
        debug_assert_eq!(self.k.layout.bytes(), 2 * self.k.layout.dim(), "values of 16 bits");
        // SAFETY: a whole group of a row, see `Rows::new`; `weigh_bf16` takes no other encoding.
        unsafe { s.load_bits(row.cast(), group * HALF) }
    }
}

/// How groups of values are multiplied.
pub(super) trait Multiply: Copy {
    type S: Simd;
    /// A group of values.
    type Group: Copy;
    /// Cache lines that such a group of K has, if its rows are to be met whole.
    const LINES: usize;

    fn simd(self) -> Self::S;
    fn query(self, x: &Operands<'_>, row: usize, group: usize) -> Self::Group;
    /// Of the row of K that begins at `row`.
    fn key(self, x: &Operands<'_>, row: *const u8, group: usize) -> Self::Group;
    /// Adds the products of group number `c` of a query with that of a key to two vectors of sums.
    fn add(self, c: usize, sums: [F<Self>; 2], groups: (Self::Group, Self::Group)) -> [F<Self>; 2];
}

/// A vector of sums.
pub(super) type F<M> = <<M as Multiply>::S as Simd>::F;

/// As `f32`, whatever K is stored in.
pub(super) struct Decoded<S, E>(S, PhantomData<E>);

impl<S, E> Decoded<S, E> {
    pub(super) const fn new(s: S) -> Self {
        Self(s, PhantomData)
    }
}
impl<S: Copy, E> Copy for Decoded<S, E> {}
impl<S: Copy, E> Clone for Decoded<S, E> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<S: Simd, E: Stored> Multiply for Decoded<S, E> {
    type S = S;
    type Group = [S::F; 2];
    const LINES: usize = E::LINES;

    #[inline(always)]
    fn simd(self) -> S {
        self.0
    }
    #[inline(always)]
    fn query(self, x: &Operands<'_>, row: usize, group: usize) -> [S::F; 2] {
        x.query(self.0, row, group)
    }
    #[inline(always)]
    fn key(self, x: &Operands<'_>, row: *const u8, group: usize) -> [S::F; 2] {
        x.key::<S, E>(self.0, row, group)
    }
    #[inline(always)]
    fn add(self, _: usize, [a, b]: [S::F; 2], (q, k): ([S::F; 2], [S::F; 2])) -> [S::F; 2] {
        [self.0.fma(q[0], k[0], a), self.0.fma(q[1], k[1], b)]
    }
}

/// Products of bf16, which not every CPU has that has the vectors.
pub(in super::super) trait DotBf16: Copy {
    type S: Simd;

    fn simd(self) -> Self::S;
    /// Words of an even value, the lower half, and the odd one behind it, both as bf16 has them.
    fn pairs(self, even_and_odd: [<Self::S as Simd>::F; 2]) -> <Self::S as Simd>::I;
    /// Adds the products of both values of each word.
    fn dot(
        self,
        a: <Self::S as Simd>::I,
        b: <Self::S as Simd>::I,
        sums: <Self::S as Simd>::F,
    ) -> <Self::S as Simd>::F;
}

/// As pairs of bf16, of which queries are too. Twice as many products at once.
#[derive(Clone, Copy)]
pub(super) struct Paired<B>(pub(super) B);

impl<B: DotBf16> Multiply for Paired<B> {
    type S = B::S;
    type Group = <B::S as Simd>::I;
    const LINES: usize = Bf16Pairs::LINES;

    #[inline(always)]
    fn simd(self) -> B::S {
        self.0.simd()
    }
    #[inline(always)]
    fn query(self, x: &Operands<'_>, row: usize, group: usize) -> Self::Group {
        self.0.pairs(x.query(self.0.simd(), row, group))
    }
    #[inline(always)]
    fn key(self, x: &Operands<'_>, row: *const u8, group: usize) -> Self::Group {
        x.key_bits(self.0.simd(), row, group)
    }
    #[inline(always)]
    fn add(
        self,
        c: usize,
        mut sums: [F<Self>; 2],
        (q, k): (Self::Group, Self::Group),
    ) -> [F<Self>; 2] {
        // Two chains of sums, as one waits for itself.
        sums[c % 2] = self.0.dot(q, k, sums[c % 2]);
        sums
    }
}
