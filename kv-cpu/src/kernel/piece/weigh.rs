//! Scores of a piece, and what they weigh.
#![expect(
    clippy::arithmetic_side_effects,
    clippy::inline_always,
    clippy::indexing_slicing,
    clippy::needless_range_loop,
    reason = "kernel code: bounds are asserted at the entry, and loops must melt into the function \
              that carries the target features"
)]
use super::super::simd::{LANES_MAX, Simd};
use super::super::stored::{E4m3, FiniteE4m3, GROUP, Stored};
use super::super::tile::HALF;
use super::ask::Ask;
use super::{Lanes, PIECE, Piece, Rows, tokens_of};

/// Scores and weighs a piece of E4M3.
#[inline(always)]
pub(in super::super) fn weigh_e4m3<S: Simd>(s: S, args: &mut Piece<'_>) {
    if Rows::new(&args.k, args.tokens).are_finite(s) {
        weigh::<S, FiniteE4m3>(s, args);
    } else {
        weigh::<S, E4m3>(s, args);
    }
}

/// Scores and weighs a piece.
#[inline(always)]
pub(in super::super) fn weigh<S: Simd, E: Stored>(s: S, args: &mut Piece<'_>) {
    const { assert!(S::LANES == LANES_MAX, "a vector has the scores of a piece by a row") };
    assert!(
        args.q_stride >= args.k.layout.dim()
            && args.q.len() >= args.rows * args.q_stride
            && args.out_stride.is_multiple_of(LANES_MAX)
            && args.out.len() >= args.rows * args.out_stride,
        "query and output rows lie inside their slices"
    );
    match (args.rows, args.tokens) {
        (1, _) => weigh_rows::<S, E, 1, 16, 1>(s, args),
        (2, ..=8) => weigh_rows::<S, E, 2, 8, 1>(s, args),
        (2, _) => weigh_rows::<S, E, 2, 8, 2>(s, args),
        (3, ..=4) => weigh_rows::<S, E, 3, 4, 1>(s, args),
        (3, _) => weigh_rows::<S, E, 3, 4, 4>(s, args),
        (4, ..=4) => weigh_rows::<S, E, 4, 4, 1>(s, args),
        (4, _) => weigh_rows::<S, E, 4, 4, 4>(s, args),
        (_, ..=2) => weigh_rows::<S, E, 8, 2, 1>(s, args),
        _ => weigh_rows::<S, E, 8, 2, 8>(s, args),
    }
}

/// How far scores may be above what weights are relative to: sums are multiplied when it is passed,
/// and not for each new maximum. Weights are as exact, and their sums far from what overflows.
const SLACK: f32 = 8.0;

/// `R` rows, whose scores are `N` vectors of `T` tokens each; those behind the last token are those
/// of the last one, and weigh nothing.
#[inline(always)]
fn weigh_rows<S: Simd, E: Stored, const R: usize, const T: usize, const N: usize>(
    s: S,
    args: &mut Piece<'_>,
) {
    const { assert!(T == tokens_of(R) && T * N <= PIECE, "scores are those of a piece") };
    assert!(args.rows == R && args.tokens <= T * N, "all rows and tokens have scores");
    let k = Rows::new(&args.k, args.tokens);
    let mut ask = Ask::new(args.k.next, N * args.k.layout.dim() / GROUP);
    let mut scores = [s.splat(0.0); N];
    for step in 0..N {
        let dots = dots::<S, E, R, T>(s, (args.q, args.q_stride), &k, step * T, &mut ask);
        scores[step] = s.reduce_add_each(dots);
    }
    ask.finish(s);
    let factors = k.factors::<S, E>(s, args.k.scale);
    let mut limits = [0.0; PIECE];
    limits[args.tokens..].fill(f32::NEG_INFINITY);
    // SAFETY: an array of as many, as all that is loaded here and below.
    let bias = unsafe { s.load(args.lanes.bias.as_ptr(), 0) };
    let mut top = s.splat(f32::NEG_INFINITY);
    for step in 0..N {
        if let Some(factors) = &factors {
            // SAFETY: `T` of the factors, as `step * T < PIECE`, which `T` divides.
            let factors = unsafe { s.load_repeated(factors.as_ptr().wrapping_add(step * T), T) };
            scores[step] = s.mul(scores[step], factors);
        }
        scores[step] = s.mul(s.add(scores[step], bias), s.splat(args.scale));
        if args.tokens < PIECE {
            // SAFETY: as above.
            let limits = unsafe { s.load_repeated(limits.as_ptr().wrapping_add(step * T), T) };
            scores[step] = s.add(scores[step], limits);
        }
        top = s.max(scores[step], top);
    }
    // SAFETY: as above.
    let max = unsafe { s.load(args.lanes.max.as_ptr(), 0) };
    if s.any_greater(top, s.add(max, s.splat(SLACK))) {
        rise::<S, R, T>(s, args, top);
    }
    if args.exact {
        weigh_steps::<S, true, N>(s, args, &scores);
    } else {
        weigh_steps::<S, false, N>(s, args, &scores);
    }
}

/// Products of `R` query rows with `T` rows of K from a token on, a vector of sums each.
#[inline(always)]
fn dots<S: Simd, E: Stored, const R: usize, const T: usize>(
    s: S,
    (q, stride): (&[f32], usize),
    k: &Rows<'_>,
    token: usize,
    ask: &mut Ask,
) -> [S::F; LANES_MAX] {
    let mut rows = [k.first; T];
    for t in 0..T {
        rows[t] = k.at(token + t);
    }
    let mut dots = [s.splat(0.0); LANES_MAX];
    for group in (0..k.layout.dim()).step_by(GROUP) {
        ask.step(s);
        // What is the shorter of both stays in registers.
        if R <= T {
            let queries = queries::<S, R>(s, (q, stride), (0, group));
            for t in 0..T {
                // SAFETY: a whole group of a row, see `Rows::new`.
                let keys = unsafe { E::load_pair(s, rows[t], k.layout, group, 0) };
                for r in 0..R {
                    dots[r * T + t] = s.fma(queries[r][0], keys[0], dots[r * T + t]);
                    dots[r * T + t] = s.fma(queries[r][1], keys[1], dots[r * T + t]);
                }
            }
            continue;
        }
        let mut keys = [[s.splat(0.0); 2]; T];
        for t in 0..T {
            // SAFETY: as above.
            keys[t] = unsafe { E::load_pair(s, rows[t], k.layout, group, 0) };
        }
        for r in 0..R {
            let [[even, odd]] = queries::<S, 1>(s, (q, stride), (r, group));
            for t in 0..T {
                dots[r * T + t] = s.fma(even, keys[t][0], dots[r * T + t]);
                dots[r * T + t] = s.fma(odd, keys[t][1], dots[r * T + t]);
            }
        }
    }
    dots
}

/// A group of values of `R` query rows from one on, which `weigh` has asserted to be there.
#[inline(always)]
fn queries<S: Simd, const R: usize>(
    s: S,
    (q, stride): (&[f32], usize),
    (row, group): (usize, usize),
) -> [[S::F; 2]; R] {
    let mut queries = [[s.splat(0.0); 2]; R];
    for r in 0..R {
        for half in 0..2 {
            let at = (row + r) * stride + group + half * HALF;
            // SAFETY: values of a query row, as `weigh` has asserted.
            queries[r][half] = unsafe { s.load(q.as_ptr(), at) };
        }
    }
    queries
}

/// Makes greater maxima what weights are relative to.
#[inline(always)]
fn rise<S: Simd, const R: usize, const T: usize>(s: S, args: &mut Piece<'_>, top: S::F) {
    let mut tops = [0.0; LANES_MAX];
    // SAFETY: an array of as many, as all that is loaded and stored here.
    unsafe { s.store(tops.as_mut_ptr(), 0, top) };
    let Lanes { max, sum, .. } = &mut *args.lanes;
    // SAFETY: as above.
    let before = unsafe { s.load(max.as_ptr(), 0) };
    for (tops, max) in tops.chunks(T).zip(max.chunks_mut(T)) {
        let greatest = tops.iter().fold(max[0], |max, top| max.max(*top));
        max.fill(greatest);
    }
    // SAFETY: as above.
    let after = unsafe { s.load(max.as_ptr(), 0) };
    let off = s.add(before, s.mul(after, s.splat(-1.0)));
    let factor = if args.exact { s.exp(off) } else { s.exp_short(off) };
    // SAFETY: as above.
    let sums = s.mul(unsafe { s.load(sum.as_ptr(), 0) }, factor);
    let mut factors = [0.0; LANES_MAX];
    // SAFETY: as above.
    unsafe { s.store(sum.as_mut_ptr(), 0, sums) };
    // SAFETY: as above.
    unsafe { s.store(factors.as_mut_ptr(), 0, factor) };
    for r in 0..R {
        let factor = s.splat(factors[r * T]);
        for i in (0..args.out_stride).step_by(S::LANES) {
            let at = r * args.out_stride + i;
            // SAFETY: values of an output row, by the assertion in `weigh`.
            let sum = unsafe { s.load(args.out.as_ptr(), at) };
            // SAFETY: as above.
            unsafe { s.store(args.out.as_mut_ptr(), at, s.mul(sum, factor)) };
        }
    }
}

/// Makes scores weights.
#[inline(always)]
fn weigh_steps<S: Simd, const EXACT: bool, const N: usize>(
    s: S,
    args: &mut Piece<'_>,
    scores: &[S::F; N],
) {
    let Lanes { max, sum, .. } = &mut *args.lanes;
    // SAFETY: an array of as many, as all that is loaded and stored here.
    let below = s.mul(unsafe { s.load(max.as_ptr(), 0) }, s.splat(-1.0));
    // SAFETY: as above.
    let mut sums = unsafe { s.load(sum.as_ptr(), 0) };
    for (weights, score) in args.weights.chunks_exact_mut(LANES_MAX).zip(scores) {
        let off = s.add(*score, below);
        let weight = if EXACT { s.exp(off) } else { s.exp_short(off) };
        sums = s.add(sums, weight);
        // SAFETY: as above.
        unsafe { s.store(weights.as_mut_ptr(), 0, weight) };
    }
    // SAFETY: as above.
    unsafe { s.store(sum.as_mut_ptr(), 0, sums) };
}
