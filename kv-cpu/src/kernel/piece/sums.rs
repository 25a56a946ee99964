//! Weighted sums of the V rows of a piece.
#![expect(
    clippy::arithmetic_side_effects,
    clippy::indexing_slicing,
    clippy::inline_always,
    clippy::needless_range_loop,
    reason = "kernel code: bounds are asserted at the entry, and loops must melt into the function \
              that carries the target features"
)]
use super::super::simd::{LANES_MAX, LINE, Simd};
use super::super::stored::{E4m3, FiniteE4m3, GROUP};
use super::super::tile::HALF;
use super::ask::Ask;
use super::multiply::{Decoded, Load};
use super::{Meeting, PIECE, Piece, Rows, tokens_of};
use crate::read_ahead::Fetch;

/// Adds a piece of E4M3.
///
/// # Safety
/// 1. It is one of the strip, which was checked.
#[inline(always)]
pub(in super::super) unsafe fn sum_e4m3<S: Simd>(s: S, args: &mut Meeting<'_>, piece: &Piece) {
    // SAFETY: the condition is passed on, here and below.
    if unsafe { Rows::new(args, piece, 1) }.are_finite(s) {
        // SAFETY: as above.
        unsafe { sum(Decoded::<S, FiniteE4m3>::new(s), args, piece) };
    } else {
        // SAFETY: as above.
        unsafe { sum(Decoded::<S, E4m3>::new(s), args, piece) };
    }
}

/// Adds a piece whose rows are read so.
///
/// # Safety
/// 1. It is one of the strip, which was checked.
#[inline(always)]
pub(in super::super) unsafe fn sum<L: Load>(l: L, args: &mut Meeting<'_>, piece: &Piece) {
    const { assert!(L::S::LANES == LANES_MAX, "a vector has the weights of a piece by a row") };
    // SAFETY: the condition is passed on.
    let v = unsafe { Rows::new(args, piece, 1) };
    let factors = v.factors(l.simd(), args.lanes[piece.head].scales[1], L::FACTOR);
    scale_weights(l.simd(), args, piece, factors);
    let out = args.out.as_mut_ptr().wrapping_add(piece.head * args.rows * args.out_stride);
    let x = Sums { v, weights: args.weights.as_ptr(), out, stride: args.out_stride };
    if L::WHOLE && args.rows > 2 && piece.fetch == Fetch::Twice {
        let mut ask = Ask::<true>::new(args, piece, 1);
        sum_whole(l, args.rows, &x, &mut ask);
        ask.finish(l.simd());
        return;
    }
    let mut ask = Ask::<false>::new(args, piece, 1);
    if L::WHOLE {
        sum_whole(l, args.rows, &x, &mut ask);
    } else {
        sum_decoded(l, args.rows, &x, &mut ask);
    }
    ask.finish(l.simd());
}

/// Rows of V of a piece, the weights of its tokens and the sums of a head, all of which are there:
/// [`sum`] has been promised that.
struct Sums<'a> {
    v: Rows<'a>,
    weights: *const f32,
    out: *mut f32,
    stride: usize,
}

/// Which output rows visit V.
#[derive(Clone, Copy)]
struct Visit {
    row: usize,
    /// Which visit it is, and of how many.
    nth: usize,
    of: usize,
    /// Lines to ask for by token otherwise.
    pace: usize,
}

/// Rows of V are taken whole, in the order of memory, as often as there are pairs of output rows,
/// whose sums stay in registers; of two groups of values those of four rows do.
#[inline(always)]
fn sum_whole<L: Load, const TWICE: bool>(l: L, rows: usize, x: &Sums<'_>, ask: &mut Ask<TWICE>) {
    let visit = |row: usize, nth: usize, of: usize| Visit { row, nth, of, pace: 0 };
    match (rows, x.v.layout.dim() > 2 * GROUP) {
        (1, _) => sum_rows::<L, 1, 16, 4, _>(l, x, visit(0, 0, 1), ask),
        (2, _) => sum_rows::<L, 2, 8, 4, _>(l, x, visit(0, 0, 1), ask),
        (3, false) => sum_rows::<L, 3, 4, 2, _>(l, x, visit(0, 0, 1), ask),
        (4, false) => sum_rows::<L, 4, 4, 2, _>(l, x, visit(0, 0, 1), ask),
        (_, false) => {
            for nth in 0..2 {
                sum_rows::<L, 4, 2, 2, _>(l, x, visit(4 * nth, nth, 2), ask);
            }
        }
        (3, true) => {
            sum_rows::<L, 2, 4, 4, _>(l, x, visit(0, 0, 2), ask);
            sum_rows::<L, 1, 4, 4, _>(l, x, visit(2, 1, 2), ask);
        }
        (4, true) => {
            for nth in 0..2 {
                sum_rows::<L, 2, 4, 4, _>(l, x, visit(2 * nth, nth, 2), ask);
            }
        }
        (_, true) => {
            for nth in 0..4 {
                sum_rows::<L, 2, 2, 4, _>(l, x, visit(2 * nth, nth, 4), ask);
            }
        }
    }
}

/// What takes long to decode is taken once, by as many groups as have all sums in registers.
#[inline(always)]
fn sum_decoded<L: Load>(l: L, rows: usize, x: &Sums<'_>, ask: &mut Ask<false>) {
    let at_once = match rows {
        1 | 2 => 4,
        3 | 4 => 2,
        _ => 1,
    };
    let groups = x.v.layout.dim() / GROUP;
    let visits = groups / at_once + groups % at_once / 2 + groups % at_once % 2;
    let all = Visit { row: 0, nth: 0, of: 1, pace: ask.pace(visits * x.v.tokens) };
    match rows {
        1 => sum_rows::<L, 1, 16, 4, _>(l, x, all, ask),
        2 => sum_rows::<L, 2, 8, 4, _>(l, x, all, ask),
        3 => sum_rows::<L, 3, 4, 2, _>(l, x, all, ask),
        4 => sum_rows::<L, 4, 4, 2, _>(l, x, all, ask),
        _ => sum_rows::<L, 8, 2, 1, _>(l, x, all, ask),
    }
}

/// Multiplies weights by the scales of tokens, if there are any.
#[inline(always)]
fn scale_weights<S: Simd>(
    s: S,
    args: &mut Meeting<'_>,
    piece: &Piece,
    factors: Option<[f32; PIECE]>,
) {
    let Some(factors) = factors else {
        return;
    };
    let tokens = tokens_of(args.rows);
    let steps = args.weights.chunks_exact_mut(LANES_MAX).take(piece.tokens.div_ceil(tokens));
    for (step, weights) in steps.enumerate() {
        let factors = factors.as_ptr().wrapping_add(step * tokens);
        // SAFETY: as many of the factors, whose number they divide.
        let factors = unsafe { s.load_repeated(factors, tokens) };
        // SAFETY: a whole vector, as all that is loaded and stored here.
        let weight = unsafe { s.load(weights.as_ptr(), 0) };
        // SAFETY: as above.
        unsafe { s.store(weights.as_mut_ptr(), 0, s.mul(weight, factors)) };
    }
}

/// `R` rows, whose vectors of weights have `T` tokens each, `C` groups of values at a time.
#[inline(always)]
fn sum_rows<L: Load, const R: usize, const T: usize, const C: usize, const TWICE: bool>(
    l: L,
    x: &Sums<'_>,
    visit: Visit,
    ask: &mut Ask<TWICE>,
) {
    let groups = x.v.layout.dim() / GROUP;
    let mut group = 0;
    while group + C <= groups {
        sum_groups::<L, R, T, C, TWICE>(l, x, (visit, group), ask);
        group += C;
    }
    while C > 2 && group + 2 <= groups {
        sum_groups::<L, R, T, 2, TWICE>(l, x, (visit, group), ask);
        group += 2;
    }
    if group < groups {
        sum_groups::<L, R, T, 1, TWICE>(l, x, (visit, group), ask);
    }
}

/// `C` groups of them, whose sums stay in registers.
#[inline(always)]
fn sum_groups<L: Load, const R: usize, const T: usize, const C: usize, const TWICE: bool>(
    l: L,
    x: &Sums<'_>,
    (visit, group): (Visit, usize),
    ask: &mut Ask<TWICE>,
) {
    let s = l.simd();
    let mut sums = [[[s.splat(0.0); 2]; C]; R];
    for r in 0..R {
        for c in 0..C {
            for half in 0..2 {
                let at = (visit.row + r) * x.stride + (group + c) * GROUP + half * HALF;
                // SAFETY: values of an output row, see `Sums`.
                sums[r][c][half] = unsafe { s.load(x.out, at) };
            }
        }
    }
    for token in 0..x.v.tokens {
        let lines = C * L::BYTES / LINE;
        if lines > 0 {
            ask.visit(s, (lines, L::BYTES > 2 * GROUP), (visit.nth, visit.of));
        } else {
            ask.step(s, visit.pace);
        }
        let mut weight = [s.splat(0.0); R];
        for r in 0..R {
            let lane = token / T * LANES_MAX + (visit.row + r) * T + token % T;
            // SAFETY: the weight of a token by a row, see `Sums`.
            weight[r] = s.splat(unsafe { x.weights.wrapping_add(lane).read() });
        }
        let from = x.v.first.wrapping_add(token * x.v.stride);
        // SAFETY: whole groups of a row, see `Rows::new`.
        let values = unsafe { l.load::<C>(&x.v, from, group) };
        for c in 0..C {
            for r in 0..R {
                for half in 0..2 {
                    sums[r][c][half] = s.fma(weight[r], values[c][half], sums[r][c][half]);
                }
            }
        }
    }
    for r in 0..R {
        for c in 0..C {
            for half in 0..2 {
                let at = (visit.row + r) * x.stride + (group + c) * GROUP + half * HALF;
                // SAFETY: as for the loads.
                unsafe { s.store(x.out, at, sums[r][c][half]) };
            }
        }
    }
}
