//! Dot products of query rows with rows of K: one loop for every operand type.
//!
//! A register tile is `R` query rows by `T` tokens; its sums stay in registers over the whole row.
//! [`Product`] says how operands are loaded and multiplied: as `f32` ([`Floats`]), or as pairs of
//! bf16 ([`Bf16Words`]).
#![expect(
    clippy::arithmetic_side_effects,
    clippy::indexing_slicing,
    clippy::inline_always,
    clippy::needless_range_loop,
    reason = "kernel code: bounds are asserted at the entry, and loops must inline into the \
              `#[target_feature]` caller"
)]
use std::sync::atomic::{Ordering, compiler_fence};

use crate::decode::{Fp8, GROUP, HALF, LookUp, LookedUp, rest_begin};
use crate::layout::RowLayout;
use crate::load::{Load, V, place};
use crate::prefetch::Prefetch;
use crate::rows::{KeyRows, TileRows};
use crate::simd::Simd;

/// Values to which query rows are padded with zeros: the widest step of a product.
pub const QUERY_PAD: usize = 2 * GROUP;
/// Tokens to which score rows are padded: the widest register tile.
pub const SCORE_PAD: usize = 16;

/// Query rows against rows of K.
#[derive(Debug)]
pub struct Qk<'a, 'p> {
    /// Number of query rows.
    pub rows: usize,
    /// The rows, `q_stride` floats apart, zero from the values of a row of K up to a multiple of
    /// [`QUERY_PAD`].
    pub q: &'a [f32],
    /// The same as words of two bf16, half as far apart, where products of bf16 are used; see
    /// [`Kernels::query_words`](crate::Kernels::query_words).
    pub words: Option<&'a [u32]>,
    /// Floats from a query row to the next, a multiple of [`QUERY_PAD`].
    pub q_stride: usize,
    /// Rows of K.
    pub k: TileRows<'a>,
    /// Scores short of the scale of K's rows and of [`Kernels::factor`](crate::Kernels::factor),
    /// `score_stride` a query row. Those after the last token of a run, up to a multiple of
    /// [`SCORE_PAD`] from its first, are overwritten.
    pub scores: &'a mut [f32],
    /// Floats from a row of scores to the next, a multiple of [`SCORE_PAD`].
    pub score_stride: usize,
    /// Lines to prefetch meanwhile.
    pub prefetch: &'a mut Prefetch<'p>,
}

impl Qk<'_, '_> {
    /// Asserts what the loops rely on.
    #[inline]
    pub(crate) fn check(&self) {
        let (rows, dim) = (self.rows, self.k.layout().dim());
        assert!(
            self.q_stride.is_multiple_of(QUERY_PAD)
                && dim <= self.q_stride
                && self.q.len() >= rows * self.q_stride
                && self.words.is_none_or(|words| words.len() >= rows * self.q_stride / 2),
            "query rows lie inside their slice"
        );
        let (mut begin, mut fits) = (0, true);
        for run in self.k.runs() {
            fits &= begin + run.len().next_multiple_of(SCORE_PAD) <= self.score_stride;
            begin += run.len();
        }
        assert!(
            fits && self.score_stride.is_multiple_of(SCORE_PAD)
                && self.scores.len() >= rows * self.score_stride,
            "score rows lie inside their slice"
        );
    }
}

/// Operands of a dot product, and how they are multiplied.
pub(crate) trait Product: Copy {
    type S: Simd;
    type Query: Copy;
    type Key: Copy;
    /// Values of a key.
    const VALUES: usize;
    /// Keys are loaded from memory up to the last multiple of this many values of a row.
    const WHOLE: usize;

    fn simd(self) -> Self::S;
    /// Values of a query row from `value` on.
    ///
    /// # Safety
    /// 1. The row is readable up to a multiple of [`QUERY_PAD`] values.
    unsafe fn query(self, row: QueryRow, value: usize) -> Self::Query;
    /// Values of a row of K from `value` on.
    ///
    /// # Safety
    /// 1. The bytes of the row are readable, and `value` is below the last multiple of
    ///    [`Self::WHOLE`].
    unsafe fn key(self, row: *const u8, layout: &RowLayout, value: usize) -> Self::Key;
    /// The sums of a register tile over the values after the last multiple of [`Self::WHOLE`].
    ///
    /// # Safety
    /// 1. The bytes of the rows of K are readable, and they have such values.
    /// 2. Query rows are readable up to a multiple of [`QUERY_PAD`] values.
    unsafe fn rests<const R: usize, const T: usize>(
        self,
        layout: &RowLayout,
        queries: &[QueryRow; R],
        rows: &[*const u8; T],
    ) -> [[F<Self>; T]; R];
    /// Adds products to a vector of sums.
    fn add(self, sum: F<Self>, query: Self::Query, key: Self::Key) -> F<Self>;
}

/// A vector of sums.
type F<P> = <<P as Product>::S as Simd>::F;

/// Where a query row begins, as `f32` and as words.
#[derive(Clone, Copy)]
pub(crate) struct QueryRow {
    values: *const f32,
    words: *const u32,
}

/// Where query rows begin.
#[inline(always)]
fn query_rows<const R: usize>(x: &Qk<'_, '_>) -> [QueryRow; R] {
    let words = x.words.map_or(std::ptr::null(), <[u32]>::as_ptr);
    let mut queries = [QueryRow { values: x.q.as_ptr(), words }; R];
    for r in 1..R {
        queries[r].values = queries[r].values.wrapping_add(r * x.q_stride);
        queries[r].words = words.wrapping_add(r * x.q_stride / 2);
    }
    queries
}

/// Reduces sums of `T` tokens from one on to scores.
#[inline(always)]
fn store<P: Product, const R: usize, const T: usize>(
    p: P,
    x: &mut Qk<'_, '_>,
    token: usize,
    sums: [[F<P>; T]; R],
) {
    let s = p.simd();
    let mut scores = [0.0; 16];
    if R * T == 16 {
        let all = [eight_of(s, &sums, 0), eight_of(s, &sums, 8)];
        scores = s.reduce_add16(all);
    } else if R * T == 8 {
        scores[..8].copy_from_slice(&s.reduce_add8(eight_of(s, &sums, 0)));
    } else {
        for i in 0..R * T {
            scores[i] = s.reduce_add(sums[i / T][i % T]);
        }
    }
    for r in 0..R {
        let mut some = [0.0; T];
        some.copy_from_slice(&scores[r * T..][..T]);
        let to = x.scores.as_mut_ptr().wrapping_add(r * x.score_stride + token).cast::<[f32; T]>();
        // SAFETY: `T` places of a row of scores, which has room for each run up to a multiple of
        // `SCORE_PAD`, by `Qk::check`.
        unsafe { to.write(some) };
    }
}

/// Eight sums from one on, row by row.
#[inline(always)]
fn eight_of<S: Simd, const R: usize, const T: usize>(
    s: S,
    sums: &[[S::F; T]; R],
    first: usize,
) -> [S::F; 8] {
    let mut some = [s.splat(0.0); 8];
    for i in 0..8 {
        some[i] = sums[(first + i) / T][(first + i) % T];
    }
    some
}

/// Scores all tokens by `R` query rows, `T` tokens at a time. The arguments were checked, and have
/// `R` rows.
#[inline(always)]
pub(crate) fn qk<P: Product, const R: usize, const T: usize>(p: P, x: &mut Qk<'_, '_>) {
    const { assert!(SCORE_PAD.is_multiple_of(T) && R * T <= 16, "scores fit their padding") };
    let (s, layout, k) = (p.simd(), x.k.layout(), x.k);
    let whole = layout.dim() / P::WHOLE * P::WHOLE;
    let mut prefetch = *x.prefetch;
    let pace = prefetch.pace((k.len() / T + k.runs().len()) * whole.div_ceil(P::VALUES));
    let mut begin = 0;
    for run in k.runs() {
        let mut token = 0;
        while token < run.len() {
            let (at, lines) = ((run, token), (&mut prefetch, pace));
            if run.len() - token == 1 {
                let sums = tile::<P, R, 1>(p, x, at, whole, lines);
                store::<P, R, 1>(p, x, begin + token, sums);
            } else {
                let sums = tile::<P, R, T>(p, x, at, whole, lines);
                store::<P, R, T>(p, x, begin + token, sums);
            }
            token += T;
        }
        begin += run.len();
    }
    prefetch.finish(s);
    *x.prefetch = prefetch;
}

/// The sums of a register tile: `R` query rows by `T` tokens of a run from one on. Where there are
/// fewer, the last one is scored again.
#[inline(always)]
fn tile<P: Product, const R: usize, const T: usize>(
    p: P,
    x: &Qk<'_, '_>,
    (run, token): (&KeyRows<'_>, usize),
    whole: usize,
    (prefetch, pace): (&mut Prefetch<'_>, usize),
) -> [[F<P>; T]; R] {
    let (s, layout, queries) = (p.simd(), x.k.layout(), query_rows::<R>(x));
    let mut rows = [run.at(token); T];
    for t in 1..T {
        let step = if token + t < run.len() { run.stride() } else { 0 };
        rows[t] = rows[t - 1].wrapping_add(step);
    }
    let mut sums = [[s.splat(0.0); T]; R];
    let mut value = 0;
    while value < whole {
        prefetch.step(s, pace);
        add_tile::<P, R, T>(p, layout, (&queries, &rows), value, &mut sums);
        value += P::VALUES;
    }
    if whole < layout.dim() {
        // Sums of their own: a loop that is not unrolled would keep the others in memory.
        // SAFETY: rows of K, which have a rest; query rows were checked.
        let rests = unsafe { p.rests::<R, T>(layout, &queries, &rows) };
        for r in 0..R {
            for t in 0..T {
                sums[r][t] = s.add(sums[r][t], rests[r][t]);
            }
        }
    }
    sums
}

/// Adds the products of a key's values with all rows of a register tile.
#[inline(always)]
fn add_tile<P: Product, const R: usize, const T: usize>(
    p: P,
    layout: &RowLayout,
    (queries, rows): (&[QueryRow; R], &[*const u8; T]),
    value: usize,
    sums: &mut [[F<P>; T]; R],
) {
    // What is the shorter of both stays in registers, if it is short enough. Loops and not `map`: a
    // closure does not carry the target features.
    if R <= T && R * size_of::<P::Query>() > 8 * size_of::<F<P>>() {
        for t in 0..T {
            // SAFETY: a row of K, and `value` is below the last multiple of `WHOLE`.
            let key = unsafe { p.key(rows[t], layout, value) };
            for r in 0..R {
                // SAFETY: the query rows were checked.
                let query = unsafe { p.query(queries[r], value) };
                sums[r][t] = p.add(sums[r][t], query, key);
            }
            // Keeps the compiler from holding the queries for the next token, and spilling sums.
            compiler_fence(Ordering::SeqCst);
        }
        return;
    }
    if R <= T {
        // SAFETY: the query rows were checked.
        let mut some = [unsafe { p.query(queries[0], value) }; R];
        for r in 1..R {
            // SAFETY: as above.
            some[r] = unsafe { p.query(queries[r], value) };
        }
        for t in 0..T {
            // SAFETY: a row of K, and `value` is below the last multiple of `WHOLE`.
            let key = unsafe { p.key(rows[t], layout, value) };
            for r in 0..R {
                sums[r][t] = p.add(sums[r][t], some[r], key);
            }
        }
        return;
    }
    // SAFETY: rows of K, and `value` is below the last multiple of `WHOLE`.
    let mut keys = [unsafe { p.key(rows[0], layout, value) }; T];
    for t in 1..T {
        // SAFETY: as above.
        keys[t] = unsafe { p.key(rows[t], layout, value) };
    }
    for r in 0..R {
        // SAFETY: the query rows were checked.
        let query = unsafe { p.query(queries[r], value) };
        for t in 0..T {
            sums[r][t] = p.add(sums[r][t], query, keys[t]);
        }
    }
}

/// Operands as `f32`, `A` pairs of vectors at a time.
#[derive(Clone, Copy)]
pub(crate) struct Floats<L, const A: usize>(pub(crate) L);

impl<L: Load, const A: usize> Product for Floats<L, A> {
    type S = L::S;
    type Query = [[V<L>; 2]; A];
    type Key = [[V<L>; 2]; A];
    const VALUES: usize = A * 2 * L::S::LANES;
    const WHOLE: usize = if Self::VALUES > GROUP { Self::VALUES } else { GROUP };

    #[inline(always)]
    fn simd(self) -> L::S {
        self.0.simd()
    }
    #[inline(always)]
    unsafe fn query(self, row: QueryRow, value: usize) -> Self::Query {
        // SAFETY: condition 1.
        unsafe { pairs_of::<L::S, A>(self.simd(), row.values, value) }
    }
    #[inline(always)]
    unsafe fn key(self, row: *const u8, layout: &RowLayout, value: usize) -> Self::Key {
        // SAFETY: condition 1.
        unsafe { self.0.pairs::<A>(row, layout, value / (2 * L::S::LANES)) }
    }
    #[inline(always)]
    unsafe fn rests<const R: usize, const T: usize>(
        self,
        layout: &RowLayout,
        queries: &[QueryRow; R],
        rows: &[*const u8; T],
    ) -> [[V<L>; T]; R] {
        const { assert!(Self::WHOLE <= 2 * GROUP, "one whole group is left at most") };
        let (s, dim, begin) = (self.simd(), layout.dim(), rest_begin(layout.dim()));
        let mut sums = [[s.splat(0.0); T]; R];
        if dim / Self::WHOLE * Self::WHOLE < begin {
            for offset in 0..HALF / L::S::LANES {
                let pair = (begin - GROUP) / (2 * L::S::LANES) + offset;
                for t in 0..T {
                    // SAFETY: the last whole group of a row of K, by condition 1.
                    let [key] = unsafe { self.0.pairs::<1>(rows[t], layout, pair) };
                    for r in 0..R {
                        let value = pair * 2 * L::S::LANES;
                        // SAFETY: condition 2.
                        let query = unsafe { pairs_of::<L::S, 1>(s, queries[r].values, value) };
                        sums[r][t] = s.fma(query[0][0], key[0], sums[r][t]);
                        sums[r][t] = s.fma(query[0][1], key[1], sums[r][t]);
                    }
                }
            }
        }
        if dim - begin == HALF {
            for offset in (0..HALF).step_by(L::S::LANES) {
                for t in 0..T {
                    // SAFETY: condition 1, and the rest has `HALF` values.
                    let key = unsafe { self.0.half_rest(rows[t], layout, offset) };
                    add_vector(s, queries, begin + offset, key, t, &mut sums);
                }
            }
        } else if begin < dim {
            for t in 0..T {
                // SAFETY: condition 1, and there is a rest.
                let rest = unsafe { self.0.rest(rows[t], layout) };
                for offset in (0..GROUP).step_by(L::S::LANES) {
                    // SAFETY: an array of a group.
                    let key = unsafe { s.load(rest.as_ptr(), offset) };
                    add_vector(s, queries, begin + offset, key, t, &mut sums);
                }
            }
        }
        sums
    }
    #[inline(always)]
    fn add(self, mut sum: V<L>, query: Self::Query, key: Self::Key) -> V<L> {
        let s = self.simd();
        for a in 0..A {
            for half in 0..2 {
                sum = s.fma(query[a][half], key[a][half], sum);
            }
        }
        sum
    }
}

/// Adds the products of all query rows with a vector of values of token `t`, the first of which is
/// `value`.
#[inline(always)]
fn add_vector<S: Simd, const R: usize, const T: usize>(
    s: S,
    queries: &[QueryRow; R],
    value: usize,
    key: S::F,
    t: usize,
    sums: &mut [[S::F; T]; R],
) {
    for r in 0..R {
        // SAFETY: query rows are readable up to a multiple of `QUERY_PAD` values.
        let query = unsafe { s.load(queries[r].values, value) };
        sums[r][t] = s.fma(query, key, sums[r][t]);
    }
}

/// `A` pairs of vectors of floats, the first of which has value `value`.
///
/// # Safety
/// 1. The floats are readable.
#[inline(always)]
unsafe fn pairs_of<S: Simd, const A: usize>(
    s: S,
    from: *const f32,
    value: usize,
) -> [[S::F; 2]; A] {
    let mut pairs = [[s.splat(0.0); 2]; A];
    for a in 0..A {
        let (group, offset) = place::<S>(value / (2 * S::LANES) + a);
        for half in 0..2 {
            // SAFETY: condition 1.
            pairs[a][half] = unsafe { s.load(from, group + offset + half * HALF) };
        }
    }
    pairs
}

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
    /// Values of a key, and bytes of as many.
    const VALUES: usize;
    const BYTES: usize;

    /// Words of a key.
    ///
    /// # Safety
    /// 1. As many bytes are readable.
    unsafe fn load(self, from: *const u8) -> Self::Words;
    /// Words of the values after the last whole key of a row of `dim` values, then zeros.
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
    /// Words of `bytes` bytes, at most `N`, then zeros.
    ///
    /// # Safety
    /// 1. As many bytes are readable.
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
    /// Words of a query row.
    ///
    /// # Safety
    /// 1. As many words are readable.
    unsafe fn query(self, from: *const u32) -> Self::Words;
}

/// Rows of bf16, whose memory is such words.
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
