//! The loops over the rows of a tile: dot products with K, weighted sums of V.
//!
//! A sum has the same bits however its rows are grouped: every product of a row is added in the
//! same order for one, two or four rows at a time, and in every encoding. That order takes a group
//! of 32 values as pairs of vectors 16 values apart, which is how nibbles lie in bytes, so that
//! what is loaded for one vector serves the other.
//!
//! A row's own scale multiplies its scores and weights instead of its values: the exact result is
//! the same, but products are rounded before the scale instead of after it, and a score is rounded
//! once more.
#![expect(
    clippy::arithmetic_side_effects,
    clippy::indexing_slicing,
    clippy::inline_always,
    clippy::needless_range_loop,
    reason = "kernel code: bounds are asserted at the entry, and loops must melt into the function \
              that carries the target features"
)]
use std::mem::MaybeUninit;

use super::simd::{LANES_MAX, Simd};
use super::stored::{GROUP, Rest, Stored, whole};
use super::{ROWS, RowScale, Scores, Sums, TILE};
use crate::encoding::RowLayout;

const CACHE_LINE: usize = 64;
/// From one vector of a pair to the other.
const HALF: usize = GROUP / 2;

/// Fetches a row ahead of its use.
#[inline(always)]
fn fetch<S: Simd>(s: S, row: &[u8]) {
    let mut at = 0;
    while at < row.len() {
        s.prefetch(row.as_ptr().wrapping_add(at));
        at += CACHE_LINE;
    }
}

fn check_rows(rows: &[&[u8]], (begin, end): (usize, usize), layout: &RowLayout) {
    assert!(begin <= end && end <= rows.len() && end <= TILE, "a token range lies inside its tile");
    assert!(
        rows[begin..end].iter().all(|row| row.len() >= layout.bytes()),
        "a row holds its values"
    );
}

/// What the tokens of a range are multiplied with, 1 outside of it; `None` where that is 1 for all.
#[inline(always)]
fn factors<S: Simd>(
    s: S,
    rows: &[&[u8]],
    (begin, end): (usize, usize),
    layout: &RowLayout,
    scale: RowScale<'_>,
) -> Option<[f32; TILE]> {
    const ONE: u16 = 0x3c00;
    let mut factors = [1.0; TILE];
    match scale {
        RowScale::Given(scale) if scale.to_bits() == 1.0_f32.to_bits() => return None,
        RowScale::Given(scale) => factors[begin..end].fill(scale),
        RowScale::Each(scales) => factors[begin..end].copy_from_slice(&scales[begin..end]),
        RowScale::Stored => {
            let mut bits = [ONE; TILE];
            let at = layout.scales();
            for (bits, row) in bits[begin..end].iter_mut().zip(&rows[begin..end]) {
                *bits = u16::from_le_bytes([row[at], row[at + 1]]);
            }
            let mut i = 0;
            while i < TILE {
                // SAFETY: `i + LANES <= TILE`.
                let values = unsafe { s.load_f16(bits.as_ptr(), i) };
                // SAFETY: as above.
                unsafe { s.store(factors.as_mut_ptr(), i, values) };
                i += S::LANES;
            }
        }
    }
    Some(factors)
}

/// The scales of a tile's rows.
#[inline(always)]
pub(super) fn row_scales<S: Simd>(s: S, rows: &[&[u8]], layout: &RowLayout) -> [f32; TILE] {
    check_rows(rows, (0, rows.len()), layout);
    factors(s, rows, (0, rows.len()), layout, RowScale::Stored).unwrap_or([1.0; TILE])
}

/// `to = from * factors`, a tile of scores or weights.
#[inline(always)]
fn multiply<S: Simd>(s: S, from: *const f32, factors: &[f32; TILE], to: *mut f32) {
    let mut i = 0;
    while i < TILE {
        // SAFETY: callers have `TILE` values at `from` and at `to`, and `i + LANES <= TILE`.
        let values = unsafe { s.load(from, i) };
        // SAFETY: `i + LANES <= TILE`.
        let factors = unsafe { s.load(factors.as_ptr(), i) };
        // SAFETY: as for the values.
        unsafe { s.store(to, i, s.mul(values, factors)) };
        i += S::LANES;
    }
}

/// Rests of the rows of a tile.
type Rests = [MaybeUninit<Rest>; TILE];

/// The values of the tokens of a range that fill no vector, decoded once for all query rows;
/// written where a row has any.
#[inline(always)]
fn rests<S: Simd, E: Stored>(
    s: S,
    rows: &[&[u8]],
    (begin, end): (usize, usize),
    layout: &RowLayout,
) -> Rests {
    let mut rests = [const { MaybeUninit::uninit() }; TILE];
    let whole = whole::<S, E>(layout.dim());
    if whole < layout.dim() {
        for (row, rest) in rows[begin..end].iter().zip(&mut rests[begin..end]) {
            // SAFETY: a row of the layout, as callers have asserted, and where its rest begins.
            rest.write(unsafe { E::rest(s, row.as_ptr(), layout, whole) });
        }
    }
    rests
}

/// Dot products of `args.rows` query rows with the tokens of a range.
#[inline(always)]
pub(super) fn scores<S: Simd, E: Stored>(s: S, args: &mut Scores<'_>) {
    check_rows(args.k, args.range, args.layout);
    assert!(
        args.stride.is_multiple_of(LANES_MAX)
            && args.layout.dim() <= args.stride
            && args.q.len() >= args.rows * args.stride
            && args.out.len() >= args.rows * TILE,
        "query and score rows lie inside their slices"
    );
    let rests = rests::<S, E>(s, args.k, args.range, args.layout);
    match args.rows {
        ROWS => score_rows::<S, E, ROWS, 2>(s, args, &rests),
        2 => score_rows::<S, E, 2, 4>(s, args, &rests),
        1 => score_rows::<S, E, 1, 8>(s, args, &rests),
        _ => unreachable!("kernels take 1, 2 or 4 rows"),
    }
    if let Some(factors) = factors(s, args.k, args.range, args.layout, args.scale) {
        for row in args.out.chunks_exact_mut(TILE).take(args.rows) {
            multiply(s, row.as_ptr(), &factors, row.as_mut_ptr());
        }
    }
}

/// `R` rows, `T` tokens at a time: eight sums side by side hide the latency of an addition.
#[inline(always)]
fn score_rows<S: Simd, E: Stored, const R: usize, const T: usize>(
    s: S,
    args: &mut Scores<'_>,
    rests: &Rests,
) {
    let (mut token, end) = args.range;
    while token + T <= end {
        let mut k = [(std::ptr::null(), std::ptr::null()); T];
        for j in 0..T {
            k[j] = (args.k[token + j].as_ptr(), rests[token + j].as_ptr().cast());
            if let Some(row) = args.ahead.get(token + j) {
                fetch(s, row);
            }
        }
        let dots = dot::<S, E, R, T>(s, args.q, args.stride, k, args.layout);
        let mut flat = [s.splat(0.0); 8];
        for r in 0..R {
            for j in 0..T {
                flat[r * T + j] = dots[r][j];
            }
        }
        let sums = s.reduce_add8(flat);
        for r in 0..R {
            for j in 0..T {
                args.out[r * TILE + token + j] = sums[r * T + j];
            }
        }
        token += T;
    }
    while token < end {
        if let Some(row) = args.ahead.get(token) {
            fetch(s, row);
        }
        let k = [(args.k[token].as_ptr(), rests[token].as_ptr().cast())];
        let dots = dot::<S, E, R, 1>(s, args.q, args.stride, k, args.layout);
        for r in 0..R {
            args.out[r * TILE + token] = s.reduce_add(dots[r][0]);
        }
        token += 1;
    }
}

/// `R * T` dot products, one vector of partial sums each. `scores` has asserted that `R` rows of
/// `q` hold the values of a row and zeros up to a whole vector, and that each of `k` is a row, and
/// has decoded its rest if it has one.
#[inline(always)]
fn dot<S: Simd, E: Stored, const R: usize, const T: usize>(
    s: S,
    q: &[f32],
    stride: usize,
    k: [(*const u8, *const f32); T],
    layout: &RowLayout,
) -> [[S::F; T]; R] {
    let q = q.as_ptr();
    let dim = layout.dim();
    let mut sums = [[s.splat(0.0); T]; R];
    let mut group = 0;
    while group + GROUP <= dim {
        let mut offset = 0;
        while offset < HALF {
            let mut keys = [[s.splat(0.0); 2]; T];
            for j in 0..T {
                for half in 0..2 {
                    let offset = offset + half * HALF;
                    // SAFETY: a whole group of a K row, whose length `scores` has asserted.
                    keys[j][half] = unsafe { E::load(s, k[j].0, layout, group, offset) };
                }
            }
            for r in 0..R {
                for half in 0..2 {
                    let at = r * stride + group + offset + half * HALF;
                    // SAFETY: values of query row `r` below `dim <= stride`, by the same assertion.
                    let query = unsafe { s.load(q, at) };
                    for j in 0..T {
                        sums[r][j] = s.fma(query, keys[j][half], sums[r][j]);
                    }
                }
            }
            offset += S::LANES;
        }
        group += GROUP;
    }
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

/// Adds `weight * V` of the tokens of a range to `args.rows` output rows.
#[inline(always)]
pub(super) fn sums<S: Simd, E: Stored>(s: S, args: &mut Sums<'_>) {
    check_rows(args.v, args.range, args.layout);
    assert!(
        args.stride.is_multiple_of(LANES_MAX)
            && args.layout.dim() <= args.stride
            && args.out.len() >= args.rows * args.stride
            && args.weights.len() >= args.rows * TILE,
        "output and weight rows lie inside their slices"
    );
    let mut scaled = [0.0; ROWS * TILE];
    let mut weights = args.weights;
    if let Some(factors) = factors(s, args.v, args.range, args.layout, args.scale) {
        let rows = args.weights.chunks_exact(TILE).take(args.rows);
        for (from, to) in rows.zip(scaled.chunks_exact_mut(TILE)) {
            multiply(s, from.as_ptr(), &factors, to.as_mut_ptr());
        }
        weights = &scaled;
    }
    match args.rows {
        ROWS => sum_rows::<S, E, ROWS, 1>(s, args, weights),
        2 => sum_rows::<S, E, 2, 2>(s, args, weights),
        1 => sum_rows::<S, E, 1, 4>(s, args, weights),
        _ => unreachable!("kernels take 1, 2 or 4 rows"),
    }
    let dim = args.layout.dim();
    let (group, whole) = (dim / GROUP * GROUP, whole::<S, E>(dim));
    if group == dim {
        return;
    }
    let rests = rests::<S, E>(s, args.v, args.range, args.layout);
    let (begin, end) = args.range;
    for token in begin..end {
        let mut d = group;
        while d < dim {
            let value = if d < whole {
                // SAFETY: a vector of a V row, `d + LANES <= whole`.
                unsafe { E::load(s, args.v[token].as_ptr(), args.layout, group, d - group) }
            } else {
                // SAFETY: the rest is written, since there is one; `d - whole` is a multiple of
                // `LANES` below `GROUP`.
                unsafe { s.load(rests[token].as_ptr().cast(), d - whole) }
            };
            for r in 0..args.rows {
                let out = args.out.as_mut_ptr();
                // SAFETY: output rows are padded to `LANES_MAX`, by the assertion above.
                let sum = unsafe { s.load(out, r * args.stride + d) };
                let sum = s.fma(s.splat(weights[r * TILE + token]), value, sum);
                // SAFETY: as above.
                unsafe { s.store(out, r * args.stride + d, sum) };
            }
            d += S::LANES;
        }
    }
}

/// The whole groups of `R` rows, `P` pairs of vectors at a time, which stay in registers for all
/// tokens.
#[inline(always)]
fn sum_rows<S: Simd, E: Stored, const R: usize, const P: usize>(
    s: S,
    args: &mut Sums<'_>,
    weights: &[f32],
) {
    for row in args.ahead {
        fetch(s, row);
    }
    let dim = args.layout.dim();
    // Pairs of a group, and groups that `P` pairs span.
    let pairs = HALF / S::LANES;
    let span = P.div_ceil(pairs) * GROUP;
    let mut group = 0;
    while group + span <= dim {
        let mut first = 0;
        while first < pairs {
            sum_pairs::<S, E, R, P>(s, args, weights, group, first);
            first += P;
        }
        group += span;
    }
    while group + GROUP <= dim {
        for first in 0..pairs {
            sum_pairs::<S, E, R, 1>(s, args, weights, group, first);
        }
        group += GROUP;
    }
}

/// `P` pairs of `R` rows, from pair `first` of a group on. `sums` has asserted the extents,
/// `sum_rows` that the pairs end at or before the last whole group.
#[inline(always)]
fn sum_pairs<S: Simd, E: Stored, const R: usize, const P: usize>(
    s: S,
    args: &mut Sums<'_>,
    weights: &[f32],
    group: usize,
    first: usize,
) {
    let pairs = HALF / S::LANES;
    let place = |p: usize, half: usize| {
        let pair = first + p;
        (group + pair / pairs * GROUP, pair % pairs * S::LANES + half * HALF)
    };
    let (out, stride, (begin, end)) = (args.out.as_mut_ptr(), args.stride, args.range);
    let mut sums = [[[s.splat(0.0); 2]; P]; R];
    for r in 0..R {
        for p in 0..P {
            for half in 0..2 {
                let (group, offset) = place(p, half);
                // SAFETY: the vector lies in output row `r`, see above.
                sums[r][p][half] = unsafe { s.load(out, r * stride + group + offset) };
            }
        }
    }
    for (token, row) in (begin..end).zip(&args.v[begin..end]) {
        let mut values = [[s.splat(0.0); 2]; P];
        for p in 0..P {
            for half in 0..2 {
                let (group, offset) = place(p, half);
                let row = row.as_ptr();
                // SAFETY: a whole group of a V row, see above.
                values[p][half] = unsafe { E::load(s, row, args.layout, group, offset) };
            }
        }
        for r in 0..R {
            // SAFETY: `token < TILE`, and there are `R * TILE` weights.
            let weight = s.splat(unsafe { *weights.get_unchecked(r * TILE + token) });
            for p in 0..P {
                for half in 0..2 {
                    sums[r][p][half] = s.fma(weight, values[p][half], sums[r][p][half]);
                }
            }
        }
    }
    for r in 0..R {
        for p in 0..P {
            for half in 0..2 {
                let (group, offset) = place(p, half);
                // SAFETY: as for the loads.
                unsafe { s.store(out, r * stride + group + offset, sums[r][p][half]) };
            }
        }
    }
}
