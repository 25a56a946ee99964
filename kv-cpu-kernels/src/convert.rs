//! Loops over tensors: conversions between element types, with non-temporal stores too, and
//! arithmetic on rows of `f32`.
#![expect(
    clippy::inline_always,
    reason = "kernel code: bounds are asserted at the entry, and loops must inline into the \
              `#[target_feature]` caller"
)]
use crate::decode::{F32, GROUP, Plain, Valuewise, load_part, store_part};
use crate::simd::{LINE, Simd};

/// Encodes all of `from`.
#[inline(always)]
pub(crate) fn encode<S: Simd, E: Plain>(s: S, from: &[f32], to: &mut [u8]) {
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

/// `row = row * by + other * other_by`, value by value.
#[inline(always)]
pub(crate) fn combine<S: Simd>(s: S, row: &mut [f32], by: f32, other: &[f32], other_by: f32) {
    assert_eq!(row.len(), other.len(), "rows of one length");
    let (len, mut i) = (row.len(), 0);
    let factors = [s.splat(by), s.splat(other_by)];
    while i + S::LANES <= len {
        // SAFETY: `i + LANES <= len`.
        let left = unsafe { s.load(row.as_ptr(), i) };
        // SAFETY: as above, the rows have one length.
        let right = unsafe { s.load(other.as_ptr(), i) };
        let sum = s.fma(right, factors[1], s.mul(left, factors[0]));
        // SAFETY: as above.
        unsafe { s.store(row.as_mut_ptr(), i, sum) };
        i += S::LANES;
    }
    for (value, other) in row[i..].iter_mut().zip(&other[i..]) {
        *value = *value * by + *other * other_by;
    }
}

/// `row = row * by`, value by value.
#[inline(always)]
pub(crate) fn scale<S: Simd>(s: S, row: &mut [f32], by: f32) {
    let (len, mut i) = (row.len(), 0);
    let factor = s.splat(by);
    while i + S::LANES <= len {
        // SAFETY: `i + LANES <= len`.
        let scaled = s.mul(unsafe { s.load(row.as_ptr(), i) }, factor);
        // SAFETY: as above.
        unsafe { s.store(row.as_mut_ptr(), i, scaled) };
        i += S::LANES;
    }
    row[i..].iter_mut().for_each(|value| *value *= by);
}

/// Converts values from one element type to another, as many as `to` has room for.
#[inline(always)]
pub(crate) fn convert<S: Simd, A: Plain, B: Plain>(s: S, from: &[u8], to: &mut [u8]) {
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

/// The same with non-temporal stores, if `to` consists of whole cache lines. Prefetches `ahead`
/// meanwhile.
#[inline(always)]
pub(crate) fn convert_non_temporal<S: Simd, A: Plain, B: Plain>(
    s: S,
    from: &[u8],
    to: &mut [u8],
    ahead: &[u8],
) {
    prefetch(s, ahead);
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

/// Copies a row with non-temporal stores, if it consists of whole cache lines. Prefetches `ahead`
/// meanwhile.
#[inline(always)]
pub(crate) fn copy_non_temporal<S: Simd>(s: S, from: &[u8], to: &mut [u8], ahead: &[u8]) {
    assert_eq!(from.len(), to.len(), "rows of one length");
    prefetch(s, ahead);
    if !is_lines(to) {
        to.copy_from_slice(from);
        return;
    }
    for (from, to) in from.as_chunks::<LINE>().0.iter().zip(to.as_chunks_mut::<LINE>().0) {
        // SAFETY: a line begins where `to` does, and every `LINE` bytes on.
        unsafe { s.stream(from, to) };
    }
}

/// Prefetches bytes.
#[inline(always)]
fn prefetch<S: Simd>(s: S, ahead: &[u8]) {
    for at in (0..ahead.len()).step_by(LINE) {
        s.prefetch_l1(ahead.as_ptr().wrapping_add(at));
    }
}

/// Returns whether a slice consists of whole cache lines.
#[inline(always)]
fn is_lines(bytes: &[u8]) -> bool {
    bytes.as_ptr().addr().is_multiple_of(LINE) && bytes.len().is_multiple_of(LINE)
}

/// Moves the even values of each whole group of a row before the odd ones.
#[inline(always)]
pub(crate) fn split_pairs<S: Simd>(s: S, row: &mut [f32]) {
    for group in row.as_chunks_mut::<GROUP>().0 {
        s.split_pairs(group);
    }
}

/// Undoes [`split_pairs`].
#[inline(always)]
pub(crate) fn join_pairs<S: Simd>(s: S, row: &mut [f32]) {
    for group in row.as_chunks_mut::<GROUP>().0 {
        s.join_pairs(group);
    }
}
