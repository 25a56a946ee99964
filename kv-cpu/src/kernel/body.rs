//! The loops over tensors and rows of scores, each once, in the primitives of [`super::simd`].
//!
//! [`super::scores`] and [`super::sums`] have those over the rows of a tile. Bounds are asserted
//! where a loop is entered; the assertions are about this crate's own callers.
#![expect(
    clippy::arithmetic_side_effects,
    clippy::indexing_slicing,
    clippy::inline_always,
    clippy::many_single_char_names,
    clippy::needless_range_loop,
    reason = "kernel code: bounds are asserted at the entry, and loops must melt into the function \
              that carries the target features"
)]
use super::ahead::{Ahead, part};
use super::simd::{LINE, Simd};
use super::stored::{F32, GROUP, Plain, Stored, Valuewise, load_part, store_part, whole};
use super::{Running, Softmax, TILE};
use crate::encoding::RowLayout;

/// One step of the online softmax, row by row.
#[inline(always)]
pub(super) fn softmax<S: Simd, const EXACT: bool>(
    s: S,
    args: &mut Softmax<'_>,
    ahead: &mut Ahead<'_>,
) {
    let ((begin, end), rows) = (args.range, args.running.len());
    assert!(
        begin <= end
            && end <= TILE
            && args.bias.len() == rows
            && args.scores.len() >= rows * TILE
            && args.out.len() >= rows * args.stride,
        "a token range lies inside its tile, and rows inside their slices"
    );
    let pace = ahead.pace(part::SOFTMAX, rows);
    if begin == 0 && end > 0 && end.is_multiple_of(S::LANES) && args.cap.is_none() {
        let mut row = 0;
        while row < rows {
            let some = (rows - row).min(TOGETHER);
            // Loops of a known length are better code, and so is one row alone.
            let ahead = (&mut *ahead, pace);
            if some > 1 {
                weigh_rows::<S, TOGETHER, EXACT>(s, args, (row, some, end), ahead);
            } else {
                weigh_rows::<S, 1, EXACT>(s, args, (row, 1, end), ahead);
            }
            row += some;
        }
        return;
    }
    for (row, running) in args.running.iter_mut().enumerate() {
        ahead.fetch(s, pace);
        let scores = &mut args.scores[row * TILE..][..TILE];
        let factor = weigh::<S, EXACT>(
            s,
            scores,
            args.range,
            (args.bias[row], args.scale, args.cap),
            running,
        );
        rescale(s, &mut args.out[row * args.stride..][..args.stride], factor);
    }
}

/// Rows whose maxima and sums are taken together.
const TOGETHER: usize = 8;

/// Calls [`weigh_tile`] with a length that it knows, where that is a usual one.
#[inline(always)]
fn weigh_rows<S: Simd, const MOST: usize, const EXACT: bool>(
    s: S,
    args: &mut Softmax<'_>,
    (first, rows, end): (usize, usize, usize),
    ahead: (&mut Ahead<'_>, usize),
) {
    if end == S::TOKENS {
        weigh_tile::<S, MOST, EXACT>(s, args, (first, rows, S::TOKENS), ahead);
    } else if end == TILE {
        weigh_tile::<S, MOST, EXACT>(s, args, (first, rows, TILE), ahead);
    } else {
        weigh_tile::<S, MOST, EXACT>(s, args, (first, rows, end), ahead);
    }
}

/// As [`weigh`] does for one, with the same bits: several rows of whole vectors from a tile's begin
/// on, so that those wait for each other's reductions less.
#[inline(always)]
fn weigh_tile<S: Simd, const MOST: usize, const EXACT: bool>(
    s: S,
    args: &mut Softmax<'_>,
    (first, rows, end): (usize, usize, usize),
    (ahead, pace): (&mut Ahead<'_>, usize),
) {
    assert!(end <= TILE && end.is_multiple_of(S::LANES) && rows <= MOST, "vectors of a tile");
    let scores = args.scores[first * TILE..][..rows * TILE].as_mut_ptr();
    let mut tops = [s.splat(f32::NEG_INFINITY); TOGETHER];
    for row in 0..rows {
        let (bias, scale) = (s.splat(args.bias[first + row]), s.splat(args.scale));
        tops[row] = scale_row(s, scores.wrapping_add(row * TILE), end, (bias, scale));
        ahead.fetch(s, pace);
    }
    let tops = if MOST == 1 { [s.reduce_max(tops[0]); TOGETHER] } else { s.reduce_max8(tops) };
    let mut sums = [s.splat(0.0); TOGETHER];
    for row in 0..rows {
        let base = base(args.running[first + row].max.max(tops[row]));
        sums[row] = weigh_row::<S, EXACT>(s, scores.wrapping_add(row * TILE), end, s.splat(-base));
    }
    let sums = if MOST == 1 { [s.reduce_add(sums[0]); TOGETHER] } else { s.reduce_add8(sums) };
    for row in 0..rows {
        let running = &mut args.running[first + row];
        let factor = running.add(running.max.max(tops[row]), sums[row]);
        rescale(s, &mut args.out[(first + row) * args.stride..][..args.stride], factor);
    }
}

/// Biases and scales the scores of a row up to `end`. Returns the greatest, lane by lane.
/// `weigh_tile` has asserted that they lie inside their slice and fill vectors.
#[inline(always)]
fn scale_row<S: Simd>(s: S, scores: *mut f32, end: usize, (bias, scale): (S::F, S::F)) -> S::F {
    let (mut top, mut i) = (s.splat(f32::NEG_INFINITY), 0);
    while i < end {
        // SAFETY: `i + LANES <= end`, see above.
        let score = unsafe { s.load(scores, i) };
        let scaled = s.mul(s.add(score, bias), scale);
        // SAFETY: as above.
        unsafe { s.store(scores, i, scaled) };
        top = s.max(top, scaled);
        i += S::LANES;
    }
    top
}

/// Makes them weights. Returns their sum, lane by lane.
#[inline(always)]
fn weigh_row<S: Simd, const EXACT: bool>(
    s: S,
    scores: *mut f32,
    end: usize,
    minus_base: S::F,
) -> S::F {
    let (mut sum, mut i) = (s.splat(0.0), 0);
    while i < end {
        // SAFETY: as in `scale_row`.
        let score = unsafe { s.load(scores, i) };
        let weight = exp::<S, EXACT>(s, s.add(score, minus_base));
        sum = s.add(sum, weight);
        // SAFETY: as above.
        unsafe { s.store(scores, i, weight) };
        i += S::LANES;
    }
    sum
}

#[inline(always)]
fn exp<S: Simd, const EXACT: bool>(s: S, x: S::F) -> S::F {
    if EXACT { s.exp(x) } else { s.exp_short(x) }
}

/// What weights are relative to: 0 as long as every score is minus infinity, as the difference of
/// two is NaN.
fn base(max: f32) -> f32 {
    if max == f32::NEG_INFINITY { 0.0 } else { max }
}

impl Running {
    /// Adds a sum of weights relative to a maximum that is at least its own. Returns the factor
    /// from the old maximum to the new.
    #[inline(always)]
    fn add(&mut self, max: f32, sum: f32) -> f32 {
        let moved = self.max.to_bits() != base(max).to_bits();
        let factor = if moved { (self.max - base(max)).exp() } else { 1.0 };
        *self = Self { max, sum: self.sum * factor + sum };
        factor
    }
}

/// Brings sums to a new maximum, which seldom moves after the first tiles.
#[inline(always)]
fn rescale<S: Simd>(s: S, out: &mut [f32], factor: f32) {
    if factor.to_bits() != 1.0_f32.to_bits() {
        scale(s, out, factor);
    }
}

/// Biases, scales and caps the scores of a range, makes them weights relative to the new running
/// maximum and updates the running sum. Returns the factor from the old maximum to the new.
#[inline(always)]
fn weigh<S: Simd, const EXACT: bool>(
    s: S,
    scores: &mut [f32],
    (begin, end): (usize, usize),
    (bias, scale, cap): (f32, f32, Option<f32>),
    running: &mut Running,
) -> f32 {
    assert!(scores.len() == TILE && end <= TILE, "a range of a tile");
    // Whole vectors around the range; `TILE` is a multiple of every vector's length.
    let first = begin / S::LANES * S::LANES;
    let last = end.div_ceil(S::LANES) * S::LANES;
    let mut i = first;
    while i < last {
        // SAFETY: `i + LANES <= last <= TILE`, the length of the scores.
        let score = unsafe { s.load(scores.as_ptr(), i) };
        let scaled = s.mul(s.add(score, s.splat(bias)), s.splat(scale));
        // SAFETY: as above.
        unsafe { s.store(scores.as_mut_ptr(), i, scaled) };
        i += S::LANES;
    }
    if let Some(cap) = cap {
        for score in &mut scores[begin..end] {
            *score = cap * (*score / cap).tanh();
        }
    }
    scores[first..begin].fill(f32::NEG_INFINITY);
    scores[end..last].fill(f32::NEG_INFINITY);
    let mut max = s.splat(running.max);
    let mut i = first;
    while i < last {
        // SAFETY: as above.
        max = s.max(max, unsafe { s.load(scores.as_ptr(), i) });
        i += S::LANES;
    }
    let max = s.reduce_max(max);
    let base = base(max);
    let mut sum = s.splat(0.0);
    let mut i = first;
    while i < last {
        // SAFETY: as above.
        let score = unsafe { s.load(scores.as_ptr(), i) };
        let weight = exp::<S, EXACT>(s, s.add(score, s.splat(-base)));
        sum = s.add(sum, weight);
        // SAFETY: as above.
        unsafe { s.store(scores.as_mut_ptr(), i, weight) };
        i += S::LANES;
    }
    running.add(max, s.reduce_add(sum))
}

/// Decodes a row, short of its own scale.
#[inline(always)]
pub(super) fn decode<S: Simd, E: Stored>(s: S, layout: &RowLayout, from: &[u8], to: &mut [f32]) {
    let dim = layout.dim();
    assert!(from.len() >= layout.bytes() && to.len() == dim, "a row, and room for its values");
    let (whole, mut i) = (whole::<S, E>(dim), 0);
    while i < whole {
        // SAFETY: the row is readable by the assertion, and `i + LANES <= whole`.
        let v = unsafe { E::load(s, from.as_ptr(), layout, i / GROUP * GROUP, i % GROUP) };
        // SAFETY: `i + LANES <= whole <= to.len()`.
        unsafe { s.store(to.as_mut_ptr(), i, v) };
        i += S::LANES;
    }
    if whole < dim {
        // SAFETY: the row is readable by the assertion, and `whole` is where its rest begins.
        let rest = unsafe { E::rest(s, from.as_ptr(), layout, whole) };
        to[whole..].copy_from_slice(&rest[..dim - whole]);
    }
}

/// Encodes all of `from`.
#[inline(always)]
pub(super) fn encode<S: Simd, E: Plain>(s: S, from: &[f32], to: &mut [u8]) {
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
        let v = unsafe { load_part::<S, F32>(s, from.as_ptr().cast(), i, n - i) };
        // SAFETY: the last `n - i` places, by the assertion.
        unsafe { store_part::<S, E>(s, to.as_mut_ptr(), i, n - i, v) };
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

/// Brings values of one type to another, as many as there is room for.
#[inline(always)]
pub(super) fn convert<S: Simd, A: Plain, B: Plain>(s: S, from: &[u8], to: &mut [u8]) {
    let (n, mut i) = (to.len() / B::SIZE, 0);
    assert!(from.len() >= n * A::SIZE, "a value for every place");
    while i + S::LANES <= n {
        // SAFETY: `i + LANES <= n` values, by the assertion.
        let v = unsafe { <A as Valuewise>::load(s, from.as_ptr(), i) };
        // SAFETY: and as many places.
        unsafe { B::store(s, to.as_mut_ptr(), i, v) };
        i += S::LANES;
    }
    if i < n {
        // SAFETY: the last `n - i` values, by the assertion.
        let v = unsafe { load_part::<S, A>(s, from.as_ptr(), i, n - i) };
        // SAFETY: the last `n - i` places.
        unsafe { store_part::<S, B>(s, to.as_mut_ptr(), i, n - i, v) };
    }
}

/// The same past the caches, if `to` is made of whole lines. Fetches `ahead` meanwhile.
#[inline(always)]
pub(super) fn convert_past<S: Simd, A: Plain, B: Plain>(
    s: S,
    from: &[u8],
    to: &mut [u8],
    ahead: &[u8],
) {
    fetch(s, ahead);
    if !is_lines(to) {
        convert::<S, A, B>(s, from, to);
        return;
    }
    let values = LINE / B::SIZE;
    assert!(from.len() >= to.len() / B::SIZE * A::SIZE, "a value for every place");
    let lines = to.as_chunks_mut::<LINE>().0.iter_mut();
    for (from, to) in from.chunks_exact(values * A::SIZE).zip(lines) {
        let mut line = [0; LINE];
        convert::<S, A, B>(s, from, &mut line);
        // SAFETY: a line begins where `to` does, and every `LINE` bytes on.
        unsafe { s.stream(&line, to) };
    }
}

/// Copies a row past the caches, if it is made of whole lines, and fetches another meanwhile.
#[inline(always)]
pub(super) fn copy_past<S: Simd>(s: S, from: &[u8], to: &mut [u8], ahead: &[u8]) {
    assert_eq!(from.len(), to.len(), "rows of one length");
    fetch(s, ahead);
    if !is_lines(to) {
        to.copy_from_slice(from);
        return;
    }
    for (from, to) in from.as_chunks::<LINE>().0.iter().zip(to.as_chunks_mut::<LINE>().0) {
        // SAFETY: a line begins where `to` does, and every `LINE` bytes on.
        unsafe { s.stream(from, to) };
    }
}

/// Starts to fetch bytes.
#[inline(always)]
fn fetch<S: Simd>(s: S, ahead: &[u8]) {
    for at in (0..ahead.len()).step_by(LINE) {
        s.prefetch(ahead.as_ptr().wrapping_add(at));
    }
}

/// Whether it is made of whole cache lines.
#[inline(always)]
fn is_lines(bytes: &[u8]) -> bool {
    bytes.as_ptr().addr().is_multiple_of(LINE) && bytes.len().is_multiple_of(LINE)
}
