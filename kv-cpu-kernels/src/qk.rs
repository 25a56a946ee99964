//! Dot products of query rows with rows of K: one loop for every operand type.
//!
//! A register tile is `R` query rows by `T` tokens; its sums stay in registers over the whole row.
//! [`Product`] is how operands are loaded and multiplied: as `f32` (`floats`), or as pairs of bf16
//! (`bf16`).
#![expect(
    clippy::inline_always,
    clippy::needless_range_loop,
    reason = "kernel code: bounds are asserted at the entry, and loops must inline into the \
              `#[target_feature]` caller"
)]
mod bf16;
mod floats;

use std::sync::atomic::{Ordering, compiler_fence};

use crate::decode::GROUP;
use crate::layout::RowLayout;
use crate::prefetch::Prefetch;
use crate::rows::{KeyRows, TileRows};
use crate::simd::Simd;
pub(crate) use bf16::{Bf16Rows, Bf16Words, DotBf16};
pub(crate) use floats::Floats;

/// Values to which query rows are padded with zeros: the widest step of a product.
pub const QUERY_PAD: usize = 2 * GROUP;
/// Tokens to which score rows are padded: the widest register tile.
pub const SCORE_PAD: usize = 16;

/// Arguments of QK: query rows, rows of K, and their scores.
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
    /// Scores without the scale of K's rows and without
    /// [`Kernels::factor`](crate::Kernels::factor), `score_stride` per query row. Scores after the
    /// last token of a run, up to a multiple of [`SCORE_PAD`] from its first, are overwritten.
    pub scores: &'a mut [f32],
    /// Floats from a row of scores to the next, a multiple of [`SCORE_PAD`].
    pub score_stride: usize,
    /// Memory for decoded rows of K, [`Kernels::decoded_len`](crate::Kernels::decoded_len) floats.
    pub decoded: &'a mut [f32],
    /// Lines to prefetch meanwhile.
    pub prefetch: &'a mut Prefetch<'p>,
}

impl Qk<'_, '_> {
    /// Asserts the bounds that the loops rely on.
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
    /// Number of values of a key.
    const VALUES: usize;
    /// Keys are loaded from memory up to the last multiple of this many values of a row.
    const WHOLE: usize;

    fn simd(self) -> Self::S;
    /// Loads values of a query row from `value` on.
    ///
    /// # Safety
    /// 1. The row is readable up to a multiple of [`QUERY_PAD`] values.
    unsafe fn query(self, row: QueryRow, value: usize) -> Self::Query;
    /// Loads values of a row of K from `value` on.
    ///
    /// # Safety
    /// 1. The bytes of the row are readable, and `value` is below the last multiple of
    ///    [`Self::WHOLE`].
    unsafe fn key(self, row: *const u8, layout: &RowLayout, value: usize) -> Self::Key;
    /// Adds the products of the values after the last multiple of [`Self::WHOLE`] to a register
    /// tile where they are a few whole vectors. Returns whether they are.
    ///
    /// # Safety
    /// As [`Self::rests`].
    #[inline(always)]
    unsafe fn add_rests<const R: usize, const T: usize>(
        self,
        _: &RowLayout,
        _: (&[QueryRow; R], &[*const u8; T]),
        _: &mut [[F<Self>; T]; R],
    ) -> bool {
        false
    }
    /// Returns the sums of a register tile over the values after the last multiple of
    /// [`Self::WHOLE`].
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

/// The beginning of a query row, as `f32` and as words.
#[derive(Clone, Copy)]
pub(crate) struct QueryRow {
    values: *const f32,
    words: *const u32,
}

/// Returns the beginnings of the query rows.
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

/// Reduces the sums of `T` tokens to scores, and stores them from token `token` on.
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

/// Returns eight sums, row by row, from sum `first` on.
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

/// Computes the scores of all tokens for `R` query rows, `T` tokens at a time. The arguments were
/// checked, and have `R` rows.
#[inline(always)]
pub(crate) fn qk<P: Product, const R: usize, const T: usize>(p: P, x: &mut Qk<'_, '_>) {
    const { assert!(SCORE_PAD.is_multiple_of(T) && R * T <= 16, "scores fit their padding") };
    let (s, layout, k) = (p.simd(), x.k.layout(), x.k);
    let whole = layout.dim() / P::WHOLE * P::WHOLE;
    let mut prefetch = *x.prefetch;
    let pace = prefetch.pace((k.len() / T + k.runs().len()) * (whole / P::WHOLE));
    let mut begin = 0;
    for run in k.runs() {
        let mut token = 0;
        while token < run.len() {
            prefetch.catch_up(s);
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

/// Computes the sums of a register tile: `R` query rows by `T` tokens of a run, from `token` on.
/// Where fewer are left, the last token is repeated.
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
        for key in 0..P::WHOLE / P::VALUES {
            let value = value + key * P::VALUES;
            add_tile::<P, R, T>(p, layout, (&queries, &rows), value, &mut sums);
        }
        value += P::WHOLE;
    }
    // SAFETY: rows of K, and query rows, which were checked.
    if whole < layout.dim() && !unsafe { p.add_rests::<R, T>(layout, (&queries, &rows), &mut sums) }
    {
        // Separate sums: a loop that is not unrolled would keep `sums` in memory.
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

/// Adds the products of the values of one key to all sums of a register tile.
#[inline(always)]
fn add_tile<P: Product, const R: usize, const T: usize>(
    p: P,
    layout: &RowLayout,
    (queries, rows): (&[QueryRow; R], &[*const u8; T]),
    value: usize,
    sums: &mut [[F<P>; T]; R],
) {
    // The smaller list, queries or keys, stays in registers if it is small enough. Loops and not
    // `map`: a closure does not carry the target features.
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
