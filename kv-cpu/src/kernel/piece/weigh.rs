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
use super::super::stored::{E4m3, FiniteE4m3, GROUP};
use super::ask::Ask;
use super::dots::{dots, dots_decoded};
use super::multiply::{Decoded, Floats, Load, Multiply, Operands};
use super::{Lanes, Meeting, PIECE, Piece, ROWS_MAX, Rows, SHORT_PIECE};
use crate::read_ahead::Fetch;

/// Scores and weighs a piece of E4M3.
///
/// # Safety
/// 1. It is one of the strip, which was checked.
#[inline(always)]
pub(in super::super) unsafe fn weigh_e4m3<S: Simd>(s: S, args: &mut Meeting<'_>, piece: &Piece) {
    // SAFETY: the condition is passed on, here and below.
    if unsafe { Rows::new(args, piece, 0) }.are_finite(s) {
        // SAFETY: as above.
        unsafe { weigh(Decoded::<S, FiniteE4m3>::new(s), args, piece) };
    } else {
        // SAFETY: as above.
        unsafe { weigh(Decoded::<S, E4m3>::new(s), args, piece) };
    }
}

/// Scores and weighs a piece whose rows are read so.
///
/// # Safety
/// 1. It is one of the strip, which was checked.
#[inline(always)]
pub(in super::super) unsafe fn weigh<L: Load>(l: L, args: &mut Meeting<'_>, piece: &Piece) {
    // SAFETY: the condition is passed on.
    let x = &unsafe { Operands::new(args, piece) };
    if !L::WHOLE {
        match args.rows {
            1 => weigh_decoded::<L, 1, 16>(l, args, piece, x),
            2 => weigh_decoded::<L, 2, 8>(l, args, piece, x),
            3 => weigh_decoded::<L, 3, 4>(l, args, piece, x),
            4 => weigh_decoded::<L, 4, 4>(l, args, piece, x),
            _ => weigh_decoded::<L, 8, 2>(l, args, piece, x),
        }
        return;
    }
    // Query values of so many rows and groups stay in registers; keys of more groups than two are
    // taken whole, in the order of memory, if more than once.
    let (m, x) = (Floats(l), (x, L::FACTOR));
    match (args.rows, x.0.k.layout.dim() > 2 * GROUP) {
        (1, _) => weigh_products::<_, 1, 16, 1, 4>(m, args, piece, x),
        (2, _) => weigh_products::<_, 2, 8, 2, 4>(m, args, piece, x),
        (3, true) => weigh_products::<_, 3, 4, 2, 4>(m, args, piece, x),
        (3, false) => weigh_products::<_, 3, 4, 4, 2>(m, args, piece, x),
        (4, true) => weigh_products::<_, 4, 4, 2, 4>(m, args, piece, x),
        (4, false) => weigh_products::<_, 4, 4, 4, 2>(m, args, piece, x),
        (_, true) => weigh_products::<_, 8, 2, 2, 4>(m, args, piece, x),
        (_, false) => weigh_products::<_, 8, 2, 4, 2>(m, args, piece, x),
    }
}

/// Scores and weighs a piece whose keys take long to decode: `R` rows, of which a vector has the
/// scores by `T` tokens.
#[inline(always)]
fn weigh_decoded<L: Load, const R: usize, const T: usize>(
    l: L,
    args: &mut Meeting<'_>,
    piece: &Piece,
    x: &Operands<'_>,
) {
    let (s, mut ask) = (l.simd(), Ask::<false>::new(args, piece, 0));
    let scores = dots_decoded::<L, R, T>(l, x, &mut ask);
    ask.finish(s);
    weigh_scores::<L::S, R, T, PIECE>(s, args, piece, x, (scores, L::FACTOR));
}

/// Scores and weighs a piece that is multiplied so, for queries that are there as such words.
///
/// # Safety
/// 1. It is one of the strip, which was checked.
#[inline(always)]
pub(in super::super) unsafe fn weigh_words<M: Multiply>(
    m: M,
    args: &mut Meeting<'_>,
    piece: &Piece,
) {
    // SAFETY: the condition is passed on.
    let x = &unsafe { Operands::new(args, piece) };
    match args.rows {
        1 => weigh_rows_of_words::<M, 1, 16, 1>(m, args, piece, x),
        2 => weigh_rows_of_words::<M, 2, 8, 2>(m, args, piece, x),
        3 => weigh_rows_of_words::<M, 3, 4, 4>(m, args, piece, x),
        4 => weigh_rows_of_words::<M, 4, 4, 4>(m, args, piece, x),
        _ => weigh_rows_of_words::<M, 8, 2, 4>(m, args, piece, x),
    }
}

/// `R` rows, of which a vector has the scores by `T` tokens; see [`dots`] for `P`.
#[inline(always)]
fn weigh_rows_of_words<M: Multiply, const R: usize, const T: usize, const P: usize>(
    m: M,
    args: &mut Meeting<'_>,
    piece: &Piece,
    x: &Operands<'_>,
) {
    // Four rows by 128 values are 16 registers.
    if M::VALUES == GROUP {
        weigh_products::<M, R, T, P, 4>(m, args, piece, (x, 1.0));
    } else {
        weigh_products::<M, R, T, P, 2>(m, args, piece, (x, 1.0));
    }
}

/// Scores and weighs a piece of products, by `R` rows, of which a vector has the scores by `T`
/// tokens; see [`dots`] for `P` and `C`. Code for fewer tokens, and for lines that are asked for
/// twice, is there where it is of use: for more than two rows, as fewer come here seldom, and for
/// values of more than 8 bits, as others take more time for products than for memory.
#[inline(always)]
fn weigh_products<M: Multiply, const R: usize, const T: usize, const P: usize, const C: usize>(
    m: M,
    args: &mut Meeting<'_>,
    piece: &Piece,
    x: (&Operands<'_>, f32),
) {
    let is_twice = R > 2 && M::BYTES > M::VALUES && piece.fetch == Fetch::Twice;
    // Pieces of so few values are never short, and of more values of `f32` always.
    let is_short = R > 2
        && M::BYTES > M::VALUES
        && C * M::VALUES > 2 * GROUP
        && (M::BYTES > 2 * M::VALUES || piece.tokens <= SHORT_PIECE);
    match (is_short, is_twice) {
        (false, false) => weigh_by::<M, R, T, P, C, PIECE, false>(m, args, piece, x),
        (false, true) => weigh_by::<M, R, T, P, C, PIECE, true>(m, args, piece, x),
        (true, false) => weigh_by::<M, R, T, P, C, SHORT_PIECE, false>(m, args, piece, x),
        (true, true) => weigh_by::<M, R, T, P, C, SHORT_PIECE, true>(m, args, piece, x),
    }
}

/// The same of `N` tokens at most, whose lines are asked for `TWICE` or not.
#[inline(always)]
fn weigh_by<
    M: Multiply,
    const R: usize,
    const T: usize,
    const P: usize,
    const C: usize,
    const N: usize,
    const TWICE: bool,
>(
    m: M,
    args: &mut Meeting<'_>,
    piece: &Piece,
    (x, factor): (&Operands<'_>, f32),
) {
    let (s, mut ask) = (m.simd(), Ask::<TWICE>::new(args, piece, 0));
    let scores = dots::<M, R, P, C, N, TWICE>(m, x, &mut ask);
    ask.finish(s);
    weigh_scores::<M::S, R, T, N>(s, args, piece, x, (scores, factor));
}

/// How far scores may be above what weights are relative to: sums are multiplied when it is passed,
/// and not for each new maximum. Weights are as exact, and their sums far from what overflows.
const SLACK: f32 = 8.0;

/// Makes products with `N` tokens at most, of values times a factor, scores and weights.
#[inline(always)]
fn weigh_scores<S: Simd, const R: usize, const T: usize, const N: usize>(
    s: S,
    args: &mut Meeting<'_>,
    piece: &Piece,
    x: &Operands<'_>,
    (mut scores, factor): ([S::F; ROWS_MAX], f32),
) {
    const { assert!(S::LANES == LANES_MAX, "a vector has the scores of a piece by a row") };
    let steps = const { N / T };
    let lanes = &args.lanes[piece.head];
    // Scales lie behind values, which have been read by now.
    let factors = x.k.factors(s, lanes.scales[0], factor);
    let mut limits = [0.0; PIECE];
    limits[piece.tokens..].fill(f32::NEG_INFINITY);
    // SAFETY: an array of as many, as all that is loaded here and below.
    let bias = unsafe { s.load(lanes.bias.as_ptr(), 0) };
    let mut top = s.splat(f32::NEG_INFINITY);
    for step in 0..steps {
        if let Some(factors) = &factors {
            // SAFETY: so many of the factors, as their number divides that of a piece's tokens.
            let factors = unsafe { s.load_repeated(factors.as_ptr().wrapping_add(step * T), T) };
            scores[step] = s.mul(scores[step], factors);
        }
        scores[step] = s.mul(s.add(scores[step], bias), s.splat(args.scale));
        if piece.tokens < N {
            // SAFETY: as above.
            let limits = unsafe { s.load_repeated(limits.as_ptr().wrapping_add(step * T), T) };
            // Whatever came of a token that there is not, be it NaN, is minus infinity.
            scores[step] = s.add(s.zero_below(limits, 0.0, scores[step]), limits);
        }
        top = s.max(scores[step], top);
    }
    // SAFETY: as above.
    let max = unsafe { s.load(lanes.max.as_ptr(), 0) };
    if s.any_greater(top, s.add(max, s.splat(SLACK))) {
        rise::<S, R, T>(s, args, piece.head, top);
    }
    if args.exact {
        weigh_steps::<S, true>(s, args, piece.head, &scores[..steps]);
    } else {
        weigh_steps::<S, false>(s, args, piece.head, &scores[..steps]);
    }
}

/// Makes greater maxima what weights are relative to.
#[inline(always)]
fn rise<S: Simd, const R: usize, const T: usize>(
    s: S,
    args: &mut Meeting<'_>,
    head: usize,
    top: S::F,
) {
    let mut tops = [0.0; LANES_MAX];
    // SAFETY: an array of as many, as all that is loaded and stored here.
    unsafe { s.store(tops.as_mut_ptr(), 0, top) };
    let Lanes { max, sum, .. } = &mut args.lanes[head];
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
            let at = (head * R + r) * args.out_stride + i;
            // SAFETY: values of an output row, by the check of the strip.
            let sum = unsafe { s.load(args.out.as_ptr(), at) };
            // SAFETY: as above.
            unsafe { s.store(args.out.as_mut_ptr(), at, s.mul(sum, factor)) };
        }
    }
}

/// Makes scores weights.
#[inline(always)]
fn weigh_steps<S: Simd, const EXACT: bool>(
    s: S,
    args: &mut Meeting<'_>,
    head: usize,
    scores: &[S::F],
) {
    let Lanes { max, sum, .. } = &mut args.lanes[head];
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
