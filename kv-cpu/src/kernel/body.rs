//! The loops, each once, in the primitives of [`super::simd`].
//!
//! A sum has the same bits however its rows are grouped: every product of a row is added in the
//! same order for one, two or four rows at a time. Bounds are asserted where a loop is entered; the
//! assertions are about this crate's own callers.
#![expect(
    clippy::arithmetic_side_effects,
    clippy::indexing_slicing,
    clippy::inline_always,
    clippy::many_single_char_names,
    clippy::needless_range_loop,
    reason = "kernel code: bounds are asserted at the entry, and loops must melt into the function \
              that carries the target features"
)]
use super::simd::{LANES_MAX, Simd, Stored, load_tail, store_tail};
use super::{ROWS, Scores, Softmax, Sums, TILE};

const CACHE_LINE: usize = 64;

/// Fetches a row ahead of its use.
#[inline(always)]
fn fetch<S: Simd>(s: S, row: &[u8]) {
    let mut at = 0;
    while at < row.len() {
        s.prefetch(row.as_ptr().wrapping_add(at));
        at += CACHE_LINE;
    }
}

fn check_rows<E: Stored>(rows: &[&[u8]], (begin, end): (usize, usize), dim: usize) {
    assert!(begin <= end && end <= rows.len() && end <= TILE, "a token range lies inside its tile");
    assert!(
        rows[begin..end].iter().all(|row| row.len() >= dim * E::SIZE),
        "a row holds its values"
    );
}

/// Dot products of `args.rows` query rows with the tokens of a range.
#[inline(always)]
pub(super) fn scores<S: Simd, E: Stored>(s: S, args: &mut Scores<'_>) {
    check_rows::<E>(args.k, args.range, args.dim);
    assert!(
        args.stride.is_multiple_of(LANES_MAX)
            && args.dim <= args.stride
            && args.q.len() >= args.rows * args.stride
            && args.out.len() >= args.rows * TILE,
        "query and score rows lie inside their slices"
    );
    match args.rows {
        ROWS => score_rows::<S, E, ROWS, 2>(s, args),
        2 => score_rows::<S, E, 2, 4>(s, args),
        1 => score_rows::<S, E, 1, 8>(s, args),
        _ => unreachable!("kernels take 1, 2 or 4 rows"),
    }
}

/// `R` rows, `T` tokens at a time: eight sums side by side hide the latency of an addition.
#[inline(always)]
fn score_rows<S: Simd, E: Stored, const R: usize, const T: usize>(s: S, args: &mut Scores<'_>) {
    let (mut token, end) = args.range;
    while token + T <= end {
        let mut k = [std::ptr::null(); T];
        for j in 0..T {
            k[j] = args.k[token + j].as_ptr();
            if let Some(row) = args.ahead.get(token + j) {
                fetch(s, row);
            }
        }
        let dots = dot::<S, E, R, T>(s, args.q, args.stride, k, args.dim);
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
        let k = [args.k[token].as_ptr()];
        let dots = dot::<S, E, R, 1>(s, args.q, args.stride, k, args.dim);
        for r in 0..R {
            args.out[r * TILE + token] = s.reduce_add(dots[r][0]);
        }
        token += 1;
    }
}

/// `R * T` dot products, one vector of partial sums each. `scores` has asserted that `R` rows of
/// `q` hold `dim` values and zeros up to a whole vector, and that each of `k` holds `dim` values.
#[inline(always)]
fn dot<S: Simd, E: Stored, const R: usize, const T: usize>(
    s: S,
    q: &[f32],
    stride: usize,
    k: [*const u8; T],
    dim: usize,
) -> [[S::F; T]; R] {
    let q = q.as_ptr();
    let mut sums = [[s.splat(0.0); T]; R];
    let mut d = 0;
    while d + S::LANES <= dim {
        let mut keys = [s.splat(0.0); T];
        for j in 0..T {
            // SAFETY: `d + LANES <= dim` values of a K row, whose length `scores` has asserted.
            keys[j] = unsafe { E::load(s, k[j], d) };
        }
        for r in 0..R {
            // SAFETY: `d + LANES <= dim <= stride` values of query row `r`, by the same assertion.
            let query = unsafe { s.load(q, r * stride + d) };
            for j in 0..T {
                sums[r][j] = s.fma(query, keys[j], sums[r][j]);
            }
        }
        d += S::LANES;
    }
    if d < dim {
        for j in 0..T {
            // SAFETY: the last `dim - d` values of a K row.
            let key = unsafe { load_tail::<S, E>(s, k[j], d, dim - d) };
            for r in 0..R {
                // SAFETY: rows are padded to `LANES_MAX`, a multiple of `LANES`, so the vector that
                // holds the last values ends inside the row.
                let query = unsafe { s.load(q, r * stride + d) };
                sums[r][j] = s.fma(query, key, sums[r][j]);
            }
        }
    }
    sums
}

/// Adds `weight * V` of the tokens of a range to `args.rows` output rows.
#[inline(always)]
pub(super) fn sums<S: Simd, E: Stored>(s: S, args: &mut Sums<'_>) {
    check_rows::<E>(args.v, args.range, args.dim);
    assert!(
        args.stride.is_multiple_of(LANES_MAX)
            && args.dim <= args.stride
            && args.out.len() >= args.rows * args.stride
            && args.weights.len() >= args.rows * TILE,
        "output and weight rows lie inside their slices"
    );
    match args.rows {
        ROWS => sum_rows::<S, E, ROWS, 2>(s, args),
        2 => sum_rows::<S, E, 2, 4>(s, args),
        1 => sum_rows::<S, E, 1, 8>(s, args),
        _ => unreachable!("kernels take 1, 2 or 4 rows"),
    }
}

/// `R` rows, `D` vectors of them at a time, which stay in registers for all tokens.
#[inline(always)]
fn sum_rows<S: Simd, E: Stored, const R: usize, const D: usize>(s: S, args: &mut Sums<'_>) {
    let (begin, end) = args.range;
    for row in args.ahead {
        fetch(s, row);
    }
    let tokens = &args.v[begin..end];
    let mut d = 0;
    while d + D * S::LANES <= args.dim {
        sum_columns::<S, E, R, D>(s, args.out, args.stride, args.weights, begin, tokens, d);
        d += D * S::LANES;
    }
    while d + S::LANES <= args.dim {
        sum_columns::<S, E, R, 1>(s, args.out, args.stride, args.weights, begin, tokens, d);
        d += S::LANES;
    }
    if d < args.dim {
        let (out, stride) = (args.out.as_mut_ptr(), args.stride);
        for (i, row) in tokens.iter().enumerate() {
            // SAFETY: the last `dim - d` values of a V row, whose length `sums` has asserted.
            let value = unsafe { load_tail::<S, E>(s, row.as_ptr(), d, args.dim - d) };
            for r in 0..R {
                let weight = s.splat(args.weights[r * TILE + begin + i]);
                // SAFETY: output rows are padded to `LANES_MAX`, by the assertion in `sums`.
                let sum = unsafe { s.load(out, r * stride + d) };
                let sum = s.fma(weight, value, sum);
                // SAFETY: as above.
                unsafe { s.store(out, r * stride + d, sum) };
            }
        }
    }
}

/// `D` vectors of `R` rows from value `d` on. `sums` has asserted the extents, `sum_rows` that the
/// vectors end at or before `dim`.
#[inline(always)]
fn sum_columns<S: Simd, E: Stored, const R: usize, const D: usize>(
    s: S,
    out: &mut [f32],
    stride: usize,
    weights: &[f32],
    begin: usize,
    tokens: &[&[u8]],
    d: usize,
) {
    let out = out.as_mut_ptr();
    let mut sums = [[s.splat(0.0); D]; R];
    for r in 0..R {
        for j in 0..D {
            // SAFETY: the vectors lie in output row `r`, see above.
            sums[r][j] = unsafe { s.load(out, r * stride + d + j * S::LANES) };
        }
    }
    for (i, row) in tokens.iter().enumerate() {
        let mut values = [s.splat(0.0); D];
        for j in 0..D {
            // SAFETY: the vectors lie in the V row, see above.
            values[j] = unsafe { E::load(s, row.as_ptr(), d + j * S::LANES) };
        }
        for r in 0..R {
            // SAFETY: `i < tokens.len()`, so this is weight `begin + i < TILE` of row `r`.
            let weight = s.splat(unsafe { *weights.get_unchecked(r * TILE + begin + i) });
            for j in 0..D {
                sums[r][j] = s.fma(weight, values[j], sums[r][j]);
            }
        }
    }
    for r in 0..R {
        for j in 0..D {
            // SAFETY: as for the loads.
            unsafe { s.store(out, r * stride + d + j * S::LANES, sums[r][j]) };
        }
    }
}

/// Scales and caps the scores of a range, makes them weights relative to the new running maximum
/// and updates the running sum. Returns the factor from the old maximum to the new.
#[inline(always)]
pub(super) fn softmax<S: Simd>(s: S, args: &mut Softmax<'_>) -> f32 {
    let (begin, end) = args.range;
    assert!(
        args.scores.len() >= TILE && begin <= end && end <= TILE,
        "a token range lies inside its tile"
    );
    let scores = args.scores.as_mut_ptr();
    // Whole vectors around the range; TILE is a multiple of every vector's length.
    let first = begin / S::LANES * S::LANES;
    let last = end.div_ceil(S::LANES) * S::LANES;
    let scale = s.splat(args.scale);
    let mut i = first;
    while i < last {
        // SAFETY: `i + LANES <= last <= TILE`.
        let scaled = s.mul(unsafe { s.load(scores, i) }, scale);
        // SAFETY: as above.
        unsafe { s.store(scores, i, scaled) };
        i += S::LANES;
    }
    if let Some(cap) = args.cap {
        for score in &mut args.scores[begin..end] {
            *score = cap * (*score / cap).tanh();
        }
    }
    args.scores[first..begin].fill(f32::NEG_INFINITY);
    args.scores[end..last].fill(f32::NEG_INFINITY);
    let scores = args.scores.as_mut_ptr();

    let mut max = s.splat(args.running.max);
    let mut i = first;
    while i < last {
        // SAFETY: `i + LANES <= last <= TILE`.
        max = s.max(max, unsafe { s.load(scores, i) });
        i += S::LANES;
    }
    let max = s.reduce_max(max);
    // Relative to 0 as long as every score is minus infinity: the difference of two is NaN.
    let base = if max == f32::NEG_INFINITY { 0.0 } else { max };
    let minus_base = s.splat(-base);
    let mut sum = s.splat(0.0);
    let mut i = first;
    while i < last {
        // SAFETY: `i + LANES <= last <= TILE`.
        let score = unsafe { s.load(scores, i) };
        let weight = s.exp(s.add(score, minus_base));
        sum = s.add(sum, weight);
        // SAFETY: as above.
        unsafe { s.store(scores, i, weight) };
        i += S::LANES;
    }
    let factor = (args.running.max - base).exp();
    args.running.sum = args.running.sum * factor + s.reduce_add(sum);
    args.running.max = max;
    factor
}

/// Decodes as many values as `to` has room for.
#[inline(always)]
pub(super) fn decode<S: Simd, E: Stored>(s: S, from: &[u8], to: &mut [f32]) {
    assert!(from.len() >= to.len() * E::SIZE, "as many values as are asked for");
    let (n, mut i) = (to.len(), 0);
    while i + S::LANES <= n {
        // SAFETY: `i + LANES <= n` values, by the assertion.
        let v = unsafe { E::load(s, from.as_ptr(), i) };
        // SAFETY: `i + LANES <= n = to.len()`.
        unsafe { s.store(to.as_mut_ptr(), i, v) };
        i += S::LANES;
    }
    if i < n {
        // SAFETY: the last `n - i` values, by the assertion.
        let v = unsafe { load_tail::<S, E>(s, from.as_ptr(), i, n - i) };
        // SAFETY: the last `n - i` places of `to`.
        unsafe { store_tail::<S, super::simd::F32>(s, to.as_mut_ptr().cast(), i, n - i, v) };
    }
}

/// Encodes all of `from`.
#[inline(always)]
pub(super) fn encode<S: Simd, E: Stored>(s: S, from: &[f32], to: &mut [u8]) {
    assert!(to.len() >= from.len() * E::SIZE, "room for the values given");
    let (n, mut i) = (from.len(), 0);
    while i + S::LANES <= n {
        // SAFETY: `i + LANES <= n = from.len()`.
        let v = unsafe { s.load(from.as_ptr(), i) };
        // SAFETY: `i + LANES <= n` places, by the assertion.
        unsafe { E::store(s, to.as_mut_ptr(), i, v) };
        i += S::LANES;
    }
    if i < n {
        // SAFETY: the last `n - i` values of `from`.
        let v = unsafe { load_tail::<S, super::simd::F32>(s, from.as_ptr().cast(), i, n - i) };
        // SAFETY: the last `n - i` places, by the assertion.
        unsafe { store_tail::<S, E>(s, to.as_mut_ptr(), i, n - i, v) };
    }
}

/// `a = a * x + b * y`, value by value.
#[inline(always)]
pub(super) fn combine<S: Simd>(s: S, a: &mut [f32], x: f32, b: &[f32], y: f32) {
    assert_eq!(a.len(), b.len(), "rows of one length");
    let (n, mut i) = (a.len(), 0);
    let (xs, ys) = (s.splat(x), s.splat(y));
    while i + S::LANES <= n {
        // SAFETY: `i + LANES <= n`.
        let left = unsafe { s.load(a.as_ptr(), i) };
        // SAFETY: as above, the rows have one length.
        let right = unsafe { s.load(b.as_ptr(), i) };
        let sum = s.fma(right, ys, s.mul(left, xs));
        // SAFETY: as above.
        unsafe { s.store(a.as_mut_ptr(), i, sum) };
        i += S::LANES;
    }
    for (a, b) in a[i..].iter_mut().zip(&b[i..]) {
        *a = *a * x + *b * y;
    }
}

/// `a = a * x`, value by value.
#[inline(always)]
pub(super) fn scale<S: Simd>(s: S, a: &mut [f32], x: f32) {
    let (n, mut i) = (a.len(), 0);
    let xs = s.splat(x);
    while i + S::LANES <= n {
        // SAFETY: `i + LANES <= n`.
        let scaled = s.mul(unsafe { s.load(a.as_ptr(), i) }, xs);
        // SAFETY: as above.
        unsafe { s.store(a.as_mut_ptr(), i, scaled) };
        i += S::LANES;
    }
    for a in &mut a[i..] {
        *a *= x;
    }
}
