//! Weighted sums of the V rows of a piece.
#![expect(
    clippy::arithmetic_side_effects,
    clippy::indexing_slicing,
    clippy::inline_always,
    clippy::needless_range_loop,
    reason = "kernel code: bounds are asserted at the entry, and loops must melt into the function \
              that carries the target features"
)]
use super::super::simd::{LANES_MAX, Simd};
use super::super::stored::{E4m3, FiniteE4m3, GROUP, Stored};
use super::super::tile::HALF;
use super::ask::Ask;
use super::{Piece, Rows, has_rows, tokens_of};

/// Adds a piece of E4M3.
#[inline(always)]
pub(in super::super) fn sum_e4m3<S: Simd>(s: S, args: &mut Piece<'_>) {
    if Rows::new(&args.v, args.tokens).are_finite(s) {
        sum::<S, FiniteE4m3>(s, args);
    } else {
        sum::<S, E4m3>(s, args);
    }
}

/// Adds a piece.
#[inline(always)]
pub(in super::super) fn sum<S: Simd, E: Stored>(s: S, args: &mut Piece<'_>) {
    const { assert!(S::LANES == LANES_MAX, "a vector has the weights of a piece by a row") };
    assert!(
        has_rows(args.rows)
            && args.out_stride >= args.v.layout.dim()
            && args.out.len() >= args.rows * args.out_stride,
        "output rows lie inside their slice"
    );
    let v = Rows::new(&args.v, args.tokens);
    scale_weights::<S, E>(s, args, &v);
    // Sums of so many rows and groups stay in registers; where values are hardly decoded rows of V
    // are taken whole, in the order of memory, if twice.
    let groups = args.v.layout.dim() / GROUP;
    let visits = match (args.rows, E::AS_IT_LIES) {
        (..=2, _) => groups.div_ceil(4),
        (rows, true) => rows.div_ceil(2) * groups.div_ceil(4),
        (..=4, false) => groups.div_ceil(2),
        _ => groups,
    };
    let mut ask = Ask::new(args.v.next, visits * args.tokens);
    match (args.rows, E::AS_IT_LIES) {
        (1, _) => sum_rows::<S, E, 1, 16, 4>(s, args, &v, 0, &mut ask),
        (2, _) => sum_rows::<S, E, 2, 8, 4>(s, args, &v, 0, &mut ask),
        (3, false) => sum_rows::<S, E, 3, 4, 2>(s, args, &v, 0, &mut ask),
        (4, false) => sum_rows::<S, E, 4, 4, 2>(s, args, &v, 0, &mut ask),
        (_, false) => sum_rows::<S, E, 8, 2, 1>(s, args, &v, 0, &mut ask),
        (3, true) => {
            sum_rows::<S, E, 2, 4, 4>(s, args, &v, 0, &mut ask);
            sum_rows::<S, E, 1, 4, 4>(s, args, &v, 2, &mut ask);
        }
        (4, true) => {
            for row in [0, 2] {
                sum_rows::<S, E, 2, 4, 4>(s, args, &v, row, &mut ask);
            }
        }
        (_, true) => {
            for row in [0, 2, 4, 6] {
                sum_rows::<S, E, 2, 2, 4>(s, args, &v, row, &mut ask);
            }
        }
    }
    ask.finish(s);
}

/// Multiplies weights by the scales of tokens.
#[inline(always)]
fn scale_weights<S: Simd, E: Stored>(s: S, args: &mut Piece<'_>, v: &Rows<'_>) {
    let Some(factors) = v.factors::<S, E>(s, args.v.scale) else {
        return;
    };
    let tokens = tokens_of(args.rows);
    let steps = args.weights.chunks_exact_mut(LANES_MAX).take(args.tokens.div_ceil(tokens));
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

/// `R` rows from `row` on, whose vectors of weights have `T` tokens each, `C` groups of values at a
/// time.
#[inline(always)]
fn sum_rows<S: Simd, E: Stored, const R: usize, const T: usize, const C: usize>(
    s: S,
    args: &mut Piece<'_>,
    v: &Rows<'_>,
    row: usize,
    ask: &mut Ask,
) {
    let groups = args.v.layout.dim() / GROUP;
    let mut group = 0;
    while group + C <= groups {
        sum_groups::<S, E, R, T, C>(s, args, v, (row, group), ask);
        group += C;
    }
    while C > 2 && group + 2 <= groups {
        sum_groups::<S, E, R, T, 2>(s, args, v, (row, group), ask);
        group += 2;
    }
    if group < groups {
        sum_groups::<S, E, R, T, 1>(s, args, v, (row, group), ask);
    }
}

/// `C` groups of `R` rows, whose sums stay in registers.
#[inline(always)]
fn sum_groups<S: Simd, E: Stored, const R: usize, const T: usize, const C: usize>(
    s: S,
    args: &mut Piece<'_>,
    v: &Rows<'_>,
    (row, group): (usize, usize),
    ask: &mut Ask,
) {
    assert!(
        row + R <= args.rows && T == tokens_of(args.rows) && (group + C) * GROUP <= v.layout.dim(),
        "rows and values are there"
    );
    let (stride, out) = (args.out_stride, args.out.as_mut_ptr());
    let weights = args.weights.as_ptr().wrapping_add(row * T);
    let mut sums = [[[s.splat(0.0); 2]; C]; R];
    for r in 0..R {
        for c in 0..C {
            for half in 0..2 {
                let at = (row + r) * stride + (group + c) * GROUP + half * HALF;
                // SAFETY: values of an output row, by the assertion here and that of `sum`.
                sums[r][c][half] = unsafe { s.load(out, at) };
            }
        }
    }
    for token in 0..args.tokens {
        ask.step(s);
        let mut weight = [s.splat(0.0); R];
        for r in 0..R {
            let lane = token / T * LANES_MAX + r * T + token % T;
            // SAFETY: `token < PIECE` and `row + r < ROWS_MAX`, so there is such a weight.
            weight[r] = s.splat(unsafe { weights.wrapping_add(lane).read() });
        }
        let from = v.first.wrapping_add(token * v.stride);
        for c in 0..C {
            // SAFETY: a whole group of a row, see `Rows::new`.
            let values = unsafe { E::load_pair(s, from, v.layout, (group + c) * GROUP, 0) };
            for r in 0..R {
                for half in 0..2 {
                    sums[r][c][half] = s.fma(weight[r], values[half], sums[r][c][half]);
                }
            }
        }
    }
    for r in 0..R {
        for c in 0..C {
            for half in 0..2 {
                let at = (row + r) * stride + (group + c) * GROUP + half * HALF;
                // SAFETY: as for the loads.
                unsafe { s.store(out, at, sums[r][c][half]) };
            }
        }
    }
}
