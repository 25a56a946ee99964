//! Dot products of query rows with the K rows of a tile.
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
use super::{ROWS, ROWS_THAT_WAIT, Scores, TILE};
use crate::encoding::RowLayout;

/// Dot products of query rows with the tokens of a range.
#[inline(always)]
pub(super) fn scores<S: Simd, E: Stored>(s: S, args: &mut Scores<'_>, ahead: &mut Ahead<'_>) {
    check_rows(args.k, args.range, args.layout);
    assert!(
        args.stride.is_multiple_of(LANES_MAX)
            && args.layout.dim() <= args.stride
            && args.q.len() >= args.rows * args.stride
            && args.out.len() >= args.rows * TILE,
        "query and score rows lie inside their slices"
    );
    if args.rows <= ROWS_THAT_WAIT {
        ahead.find_pages(s);
    }
    let mut rests = NO_RESTS;
    decode_rests::<S, E>(s, args.k, args.range, args.layout, &mut rests);
    let mut row = 0;
    while row < args.rows {
        // Sums of all rows and tokens that are taken together stay in registers.
        row += match (args.rows - row, S::SUMS) {
            (1, ..=4) => score_rows::<S, E, 1, 4>(s, args, row, &rests, ahead),
            (1, _) => score_rows::<S, E, 1, 8>(s, args, row, &rests, ahead),
            (2 | 3, ..=4) => score_rows::<S, E, 2, 2>(s, args, row, &rests, ahead),
            (2 | 3, ..=8) => score_rows::<S, E, 2, 4>(s, args, row, &rests, ahead),
            (2 | 3, _) => score_rows::<S, E, 2, 8>(s, args, row, &rests, ahead),
            (_, ..=4) => score_rows::<S, E, ROWS, 1>(s, args, row, &rests, ahead),
            (_, ..=8) => score_rows::<S, E, ROWS, 2>(s, args, row, &rests, ahead),
            _ => score_rows::<S, E, ROWS, 4>(s, args, row, &rests, ahead),
        };
    }
    if let Some(factors) = Factors::of::<S, E>(s, args.k, args.range, args.layout, args.scale) {
        factors.apply(s, &mut args.out[..args.rows * TILE]);
    }
}

/// `R` rows from `row` on, `T` tokens at a time: sums side by side hide the latency of an addition.
/// Returns `R`.
#[inline(always)]
fn score_rows<S: Simd, E: Stored, const R: usize, const T: usize>(
    s: S,
    args: &mut Scores<'_>,
    row: usize,
    rests: &Rests,
    ahead: &mut Ahead<'_>,
) -> usize {
    assert!(row + R <= args.rows, "rows lie inside their slices, by what `scores` asserts");
    let steps = visits(args.rows) * (args.range.1 - args.range.0).div_ceil(T);
    let pace = ahead.pace(part::SCORES, steps);
    // Several rows keep a step long, so some is asked for with each group of values.
    let groups = if R > 1 { args.layout.dim() / GROUP } else { 0 };
    let (before, inside) = pace.checked_div(groups).map_or((pace, 0), |part| (0, part + 1));
    let (q, keys) = (args.q.as_ptr().wrapping_add(row * args.stride), args.k.at());
    let out = args.out.as_mut_ptr().wrapping_add(row * TILE);
    let (mut token, end) = args.range;
    while token + T <= end {
        let mut k = [(std::ptr::null(), std::ptr::null()); T];
        for j in 0..T {
            k[j] = (keys[token + j], rests[token + j].as_ptr().cast());
        }
        ahead.fetch(s, before);
        let dots = dot::<S, E, R, T>(s, (q, args.stride), k, args.layout, (&mut *ahead, inside));
        let mut sums = [0.0; SUMS_MAX];
        let (eights, _) = sums.as_chunks_mut::<8>();
        for (i, eight) in eights[..(R * T).div_ceil(8)].iter_mut().enumerate() {
            let mut flat = [s.splat(0.0); 8];
            for j in 0..8.min(R * T) {
                flat[j] = dots[(i * 8 + j) / T][(i * 8 + j) % T];
            }
            *eight = s.reduce_add8(flat);
        }
        for r in 0..R {
            let mut some = [0.0; T];
            some.copy_from_slice(&sums[r * T..][..T]);
            let to = out.wrapping_add(r * TILE + token).cast::<[f32; T]>();
            // SAFETY: `token + T <= end <= TILE` in row `row + r` of the scores, see above.
            unsafe { to.write(some) };
        }
        token += T;
    }
    while T > 1 && token < end {
        let k = [(keys[token], rests[token].as_ptr().cast())];
        ahead.fetch(s, pace);
        let dots = dot::<S, E, R, 1>(s, (q, args.stride), k, args.layout, (&mut *ahead, 0));
        for r in 0..R {
            // SAFETY: `token < end <= TILE` in row `row + r` of the scores, see above.
            unsafe { out.wrapping_add(r * TILE + token).write(s.reduce_add(dots[r][0])) };
        }
        token += 1;
    }
    R
}

/// Most sums that are taken together.
const SUMS_MAX: usize = 16;

/// `R * T` dot products, one vector of partial sums each; asks for some of `ahead` with each group
/// of values where `R` is more than 1. `scores` has asserted that the `R` rows at `q` hold the
/// values of a row and zeros up to a whole vector, and that each of `k` is a row, and has decoded
/// its rest if it has one.
#[inline(always)]
fn dot<S: Simd, E: Stored, const R: usize, const T: usize>(
    s: S,
    (q, stride): (*const f32, usize),
    k: [(*const u8, *const f32); T],
    layout: &RowLayout,
    (ahead, pace): (&mut Ahead<'_>, usize),
) -> [[S::F; T]; R] {
    let dim = layout.dim();
    let mut sums = [[s.splat(0.0); T]; R];
    let together = if E::BY_ROW && R == 1 { 1 } else { T };
    for first in (0..T).step_by(together) {
        let mut group = 0;
        while group + GROUP <= dim {
            if R > 1 {
                ahead.fetch_inside(s, pace);
            }
            let mut offset = 0;
            while offset < HALF {
                let mut keys = [[s.splat(0.0); 2]; T];
                for j in first..first + together {
                    // SAFETY: a whole group of a K row, whose length `scores` has asserted.
                    keys[j] = unsafe { E::load_pair(s, k[j].0, layout, group, offset) };
                }
                for r in 0..R {
                    for half in 0..2 {
                        let at = r * stride + group + offset + half * HALF;
                        // SAFETY: values of query row `r` below `dim <= stride`, by the same
                        // assertion.
                        let query = unsafe { s.load(q, at) };
                        for j in first..first + together {
                            sums[r][j] = s.fma(query, keys[j][half], sums[r][j]);
                        }
                    }
                }
                offset += S::LANES;
            }
            group += GROUP;
        }
    }
    let group = dim / GROUP * GROUP;
    let whole = whole::<S, E>(dim);
    let mut d = group;
    while d < whole {
        for j in 0..T {
            // SAFETY: a vector of a K row, `d + LANES <= whole`.
            let key = unsafe { E::load(s, k[j].0, layout, group, d - group) };
            for r in 0..R {
                // SAFETY: values of query row `r` below `dim <= stride`.
                let query = unsafe { s.load(q, r * stride + d) };
                sums[r][j] = s.fma(query, key, sums[r][j]);
            }
        }
        d += S::LANES;
    }
    while d < dim {
        for j in 0..T {
            // SAFETY: the rest is written, see above, and has `GROUP` values; `d - whole` is a
            // multiple of `LANES` below that.
            let key = unsafe { s.load(k[j].1, d - whole) };
            for r in 0..R {
                // SAFETY: rows are padded to `LANES_MAX`, a multiple of `LANES`, so the vector that
                // holds the last values ends inside the row.
                let query = unsafe { s.load(q, r * stride + d) };
                sums[r][j] = s.fma(query, key, sums[r][j]);
            }
        }
        d += S::LANES;
    }
    sums
}
