//! Operands as `f32`, decoded from any encoding.
use super::{Product, QueryRow};
use crate::decode::{GROUP, HALF, rest_begin};
use crate::layout::RowLayout;
use crate::load::{Load, V, place};
use crate::simd::Simd;

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
    unsafe fn add_rests<const R: usize, const T: usize>(
        self,
        layout: &RowLayout,
        (queries, rows): (&[QueryRow; R], &[*const u8; T]),
        sums: &mut [[V<L>; T]; R],
    ) -> bool {
        let (s, dim, begin) = (self.simd(), layout.dim(), rest_begin(layout.dim()));
        if dim - begin != HALF || dim / Self::WHOLE * Self::WHOLE != begin {
            return false;
        }
        for vector in 0..HALF / L::S::LANES {
            let offset = vector * L::S::LANES;
            let mut keys = [s.splat(0.0); T];
            for t in 0..T {
                // SAFETY: condition 1, and the rest has `HALF` values.
                keys[t] = unsafe { self.0.half_rest(rows[t], layout, offset) };
            }
            for r in 0..R {
                // SAFETY: condition 2.
                let query = unsafe { s.load(queries[r].values, begin + offset) };
                for t in 0..T {
                    sums[r][t] = s.fma(query, keys[t], sums[r][t]);
                }
            }
        }
        true
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

/// Loads `A` pairs of vectors of floats, from value `value` on.
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
