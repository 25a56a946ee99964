//! Weighted sums of the V rows of a tile.
#![expect(
    clippy::arithmetic_side_effects,
    clippy::indexing_slicing,
    clippy::inline_always,
    clippy::needless_range_loop,
    reason = "kernel code: bounds are asserted at the entry, and loops must melt into the function \
              that carries the target features"
)]
use super::ahead::{Ahead, part};
use super::simd::{LANES_MAX, Simd};
use super::stored::{GROUP, Stored, whole};
use super::tile::{Factors, HALF, NO_RESTS, Rests, check_rows, decode_rests, visits};
use super::{ROWS, Sums, TILE};

/// Adds `weight * V` of the tokens of a range to output rows.
#[inline(always)]
pub(super) fn sums<S: Simd, E: Stored>(s: S, args: &mut Sums<'_>, ahead: &mut Ahead<'_>) {
    check_rows(args.v, args.range, args.layout);
    assert!(
        args.stride.is_multiple_of(LANES_MAX)
            && args.layout.dim() <= args.stride
            && args.out.len() >= args.rows * args.stride
            && args.weights.len() >= args.rows * TILE,
        "output and weight rows lie inside their slices"
    );
    if let Some(factors) = Factors::of::<S, E>(s, args.v, args.range, args.layout, args.scale) {
        factors.apply(s, &mut args.weights[..args.rows * TILE]);
    }
    let dim = args.layout.dim();
    let mut rests = NO_RESTS;
    decode_rests::<S, E>(s, args.v, args.range, args.layout, &mut rests);
    let mut row = 0;
    while row < args.rows {
        let rows = match (args.rows - row, S::SUMS) {
            (1, ..=4) => sum_rows::<S, E, 1, 1>(s, args, row, ahead),
            (1, _) => sum_rows::<S, E, 1, 4>(s, args, row, ahead),
            (2 | 3, ..=4) => sum_rows::<S, E, 2, 1>(s, args, row, ahead),
            (2 | 3, ..=8) => sum_rows::<S, E, 2, 2>(s, args, row, ahead),
            (2 | 3, _) => sum_rows::<S, E, 2, 4>(s, args, row, ahead),
            (_, ..=8) => sum_rows::<S, E, ROWS, 1>(s, args, row, ahead),
            _ => sum_rows::<S, E, ROWS, 2>(s, args, row, ahead),
        };
        if !dim.is_multiple_of(GROUP) {
            sum_last::<S, E>(s, args, (row, rows), &rests);
        }
        row += rows;
    }
    ahead.fetch(s, ahead.pace(part::END, 1));
}

/// The values behind the whole groups of `rows` rows from `first` on.
#[inline(always)]
fn sum_last<S: Simd, E: Stored>(
    s: S,
    args: &mut Sums<'_>,
    (first, rows): (usize, usize),
    rests: &Rests,
) {
    let dim = args.layout.dim();
    let (group, whole) = (dim / GROUP * GROUP, whole::<S, E>(dim));
    let (begin, end) = args.range;
    for token in begin..end {
        let mut d = group;
        while d < dim {
            let value = if d < whole {
                // SAFETY: a vector of a V row, `d + LANES <= whole`.
                unsafe { E::load(s, args.v.at()[token], args.layout, group, d - group) }
            } else {
                // SAFETY: the rest is written, since there is one; `d - whole` is a multiple of
                // `LANES` below `GROUP`.
                unsafe { s.load(rests[token].as_ptr().cast(), d - whole) }
            };
            for row in first..first + rows {
                let out = args.out.as_mut_ptr();
                // SAFETY: output rows are padded to `LANES_MAX`, by the assertion in `sums`.
                let sum = unsafe { s.load(out, row * args.stride + d) };
                let sum = s.fma(s.splat(args.weights[row * TILE + token]), value, sum);
                // SAFETY: as above.
                unsafe { s.store(out, row * args.stride + d, sum) };
            }
            d += S::LANES;
        }
    }
}

/// The whole groups of `R` rows from `row` on, `P` pairs of vectors at a time, which stay in
/// registers for all tokens. Returns `R`.
#[inline(always)]
fn sum_rows<S: Simd, E: Stored, const R: usize, const P: usize>(
    s: S,
    args: &mut Sums<'_>,
    row: usize,
    ahead: &mut Ahead<'_>,
) -> usize {
    assert!(row + R <= args.rows, "rows lie inside their slices, by what `sums` asserts");
    let dim = args.layout.dim();
    // Pairs of a group, and groups that `P` pairs span.
    let pairs = HALF / S::LANES;
    let span = P.div_ceil(pairs) * GROUP;
    // By pair, so that a pass asks for as much as it has of them.
    let steps = (args.range.1 - args.range.0).div_ceil(step(R));
    let pace = ahead.pace(part::SUMS, visits(args.rows) * (dim / GROUP * pairs) * steps);
    let mut group = 0;
    while group + span <= dim {
        let mut first = 0;
        while first < pairs {
            sum_pairs::<S, E, R, P>(s, args, row, (group, first), (&mut *ahead, P * pace));
            first += P;
        }
        group += span;
    }
    // Where more than one group is taken at a time, some may be left.
    while P > 2 && pairs == 1 && group + 2 * GROUP <= dim {
        sum_pairs::<S, E, R, 2>(s, args, row, (group, 0), (&mut *ahead, 2 * pace));
        group += 2 * GROUP;
    }
    while P > pairs && group + GROUP <= dim {
        for first in 0..pairs {
            sum_pairs::<S, E, R, 1>(s, args, row, (group, first), (&mut *ahead, pace));
        }
        group += GROUP;
    }
    // What became due at the end of a run.
    ahead.fetch(s, 0);
    R
}

/// Tokens between one fetch and the next, for so many rows at a time.
const fn step(rows: usize) -> usize {
    if rows > 1 { 4 } else { 8 }
}

/// `P` pairs of `R` rows from `row` on, from pair `first` of a group on. `sums` has asserted the
/// extents, `sum_rows` that the pairs end at or before the last whole group.
#[inline(always)]
fn sum_pairs<S: Simd, E: Stored, const R: usize, const P: usize>(
    s: S,
    args: &mut Sums<'_>,
    row: usize,
    (group, first): (usize, usize),
    (ahead, pace): (&mut Ahead<'_>, usize),
) {
    let pairs = HALF / S::LANES;
    let vector = |p: usize, half: usize| {
        let pair = first + p;
        (group + pair / pairs * GROUP, pair % pairs * S::LANES + half * HALF)
    };
    let stride = args.stride;
    let out = args.out.as_mut_ptr().wrapping_add(row * stride);
    let weights = args.weights.as_ptr().wrapping_add(row * TILE);
    ahead.fetch(s, 0);
    let mut sums = [[[s.splat(0.0); 2]; P]; R];
    for r in 0..R {
        for p in 0..P {
            for half in 0..2 {
                let (group, offset) = vector(p, half);
                // SAFETY: the vector lies in output row `row + r`, see above.
                sums[r][p][half] = unsafe { s.load(out, r * stride + group + offset) };
            }
        }
    }
    let (mut token, end) = args.range;
    while token < end {
        ahead.fetch_inside(s, pace);
        let stop = (token / step(R) * step(R) + step(R)).min(end);
        for v in &args.v.at()[token..stop] {
            let mut values = [[s.splat(0.0); 2]; P];
            for p in 0..P {
                let (group, offset) = vector(p, 0);
                // SAFETY: a whole group of a V row, see above.
                values[p] = unsafe { E::load_pair(s, *v, args.layout, group, offset) };
            }
            for r in 0..R {
                let weight = weights.wrapping_add(r * TILE + token);
                // SAFETY: `token < TILE` of row `row + r`, and there are weights of all rows.
                let weight = s.splat(unsafe { weight.read() });
                for p in 0..P {
                    for half in 0..2 {
                        sums[r][p][half] = s.fma(weight, values[p][half], sums[r][p][half]);
                    }
                }
            }
            token += 1;
        }
    }
    for r in 0..R {
        for p in 0..P {
            for half in 0..2 {
                let (group, offset) = vector(p, half);
                // SAFETY: as for the loads.
                unsafe { s.store(out, r * stride + group + offset, sums[r][p][half]) };
            }
        }
    }
}
