//! Mean, balance, signs and Hadamard rotation of one row.
//!
//! The host version of the four operations of [`kv_core::calibration`]. `R` is [`rotate`]:
//!
//! | function | of | computes |
//! |---|---|---|
//! | [`store`] | a row of K or V, before encoding | `R((x - mean) * into)` |
//! | [`load`] | a row of K or V, after decoding | `R(x) * back + mean` |
//! | [`query`] | a query, once per step | `R(q * back)` |
//! | [`output`] | an attention output over stored V, once per query | `R(o) * back` |
//!
//! `R` is orthonormal and `into * back` is 1, so `query(q) . store(k) = q . (k - mean)`: scores
//! lack `q . mean`, which is the same for every key of a query. Planes of V have no mean, so
//! `output` of a weighted sum of stored rows is the weighted sum of the rows.
//!
//! A NaN reaches every channel of its block of the rotation, and no other row. [`store`] saturates
//! at [`STORED_MAX`] before it rotates, infinities too, so that no sum overflows. Queries and
//! outputs are not bounded: magnitudes above `f32::MAX / 2^ceil(log2(head_dim))` may become
//! infinite inside a rotation.
//!
//! # Panics
//! All four, if a row and the constants have different lengths.
//!
//! # Source
//! `QuaRot` (Ashkboos et al. 2024) for signs and rotation; [`kv_core::calibration`] names the rest.
use std::f32::consts::FRAC_1_SQRT_2;

use kv_core::calibration::HeadConstants;

/// Rotates a row: applies the orthonormal Walsh-Hadamard transform to each of its blocks.
///
/// The blocks are the powers of two that sum to the length, largest first ([`blocks`]). Two
/// rotations give the row back, up to rounding.
///
/// # Guarantees
/// The results are equal to the bit everywhere. Within a block of `n` values, for strides `h` = 1,
/// 2, 4, .. `n / 2`,
/// every pair at distance `h`, `a` where `index & h` is 0 and `b`, becomes `a + b` and `a - b`;
/// then every value is multiplied by [`norm`] once. Each step rounds once to `f32`, so an
/// implementation may work in any order that keeps the order of strides for each value.
///
/// # Examples
/// ```
/// let mut row = [3.0, 1.0, 1.0, -1.0, 7.0];
/// kv_quant::transform::rotate(&mut row);
/// assert_eq!(row, [2.0, 2.0, 2.0, 0.0, 7.0]); // blocks of 4 and 1
/// ```
pub fn rotate(values: &mut [f32]) {
    let mut rest = values;
    for block in blocks(rest.len()) {
        let Some((head, tail)) = rest.split_at_mut_checked(block) else {
            break; // the blocks sum to the length
        };
        rotate_block(head);
        rest = tail;
    }
}

/// Returns the powers of two that sum to `len`, largest first: 64 and 16 for 80.
pub fn blocks(len: usize) -> impl Iterator<Item = usize> {
    let largest = |rest: usize| rest.checked_ilog2().map(|bit| 1_usize << bit);
    std::iter::successors(largest(len), move |block| largest(len & (block - 1)))
}

/// Returns the factor of the rotation of a block of `block` values: `1 / sqrt(block)`, rounded to
/// nearest. `block` is a power of two.
pub fn norm(block: usize) -> f32 {
    let log2 = block.checked_ilog2().unwrap_or(0);
    // Exact, so the result for an odd power is rounded only by its constant.
    let halved = (0..log2.div_euclid(2)).fold(1.0, |scale: f32, _| scale * 0.5);
    if log2.rem_euclid(2) == 1 { halved * FRAC_1_SQRT_2 } else { halved }
}

/// The largest magnitude that [`store`] rotates: 2^112, far beyond what any scale reaches. Sums of
/// 2^15 such values are finite.
pub const STORED_MAX: f32 = f32::from_bits((127 + 112) << 23);

/// Transforms a row of K or V for encoding. Magnitudes above [`STORED_MAX`] after mean and balance
/// saturate at it; NaN stays.
pub fn store(values: &mut [f32], constants: &HeadConstants<'_>) {
    shift(values, constants);
    for x in values.iter_mut() {
        *x = x.clamp(-STORED_MAX, STORED_MAX);
    }
    rotate(values);
}

/// Does the same without the bound, for calibration, which refuses rows that overflow.
pub(crate) fn store_unbounded(values: &mut [f32], constants: &HeadConstants<'_>) {
    shift(values, constants);
    rotate(values);
}

fn shift(values: &mut [f32], constants: &HeadConstants<'_>) {
    let HeadConstants { mean, into, .. } = *constants;
    assert_lengths(values, mean);
    assert_lengths(values, into);
    for ((x, mean), into) in values.iter_mut().zip(mean).zip(into) {
        *x = (*x - mean) * into;
    }
}

/// Inverts [`store`] for a decoded row of K or V.
pub fn load(values: &mut [f32], constants: &HeadConstants<'_>) {
    let HeadConstants { mean, back, .. } = *constants;
    assert_lengths(values, mean);
    assert_lengths(values, back);
    rotate(values);
    for ((x, mean), back) in values.iter_mut().zip(mean).zip(back) {
        *x = *x * back + mean;
    }
}

/// Transforms a query so that its products with stored keys are the scores minus `q . mean`.
///
/// `constants` are those of K. The caller adds `q . mean`, computed from the original query.
pub fn query(values: &mut [f32], constants: &HeadConstants<'_>) {
    assert_lengths(values, constants.back);
    for (q, back) in values.iter_mut().zip(constants.back) {
        *q *= back;
    }
    rotate(values);
}

/// Inverts [`store`] for a weighted sum of stored rows of V. `constants` are those of V.
pub fn output(values: &mut [f32], constants: &HeadConstants<'_>) {
    assert_lengths(values, constants.back);
    rotate(values);
    for (o, back) in values.iter_mut().zip(constants.back) {
        *o *= back;
    }
}

fn assert_lengths(values: &[f32], constants: &[f32]) {
    assert!(
        values.len() == constants.len(),
        "a row of {} values, constants for {}",
        values.len(),
        constants.len()
    );
}

/// Rotates one block, whose length is a power of two.
fn rotate_block(values: &mut [f32]) {
    let norm = norm(values.len());
    let mut stride: usize = 1;
    // Two strides at a time where possible, in loops of constant length.
    for four in values.as_chunks_mut::<4>().0 {
        *four = two_strides(*four);
        stride = 4;
    }
    for part in values.as_chunks_mut::<16>().0 {
        two_strides_of_parts::<4>(part);
        stride = 16;
    }
    for part in values.as_chunks_mut::<64>().0 {
        two_strides_of_parts::<16>(part);
        stride = 64;
    }
    while stride < values.len() {
        butterflies(values, stride);
        stride *= 2;
    }
    for value in values {
        *value *= norm;
    }
}

/// Applies the strides of one value and of two.
fn two_strides([a, b, c, d]: [f32; 4]) -> [f32; 4] {
    let ((ab, a_b), (cd, c_d)) = ((a + b, a - b), (c + d, c - d));
    [ab + cd, a_b + c_d, ab - cd, a_b - c_d]
}

/// Applies the strides of `N` values and of twice that.
#[inline]
fn two_strides_of_parts<const N: usize>(values: &mut [f32]) {
    if let [a, b, c, d] = values.as_chunks_mut::<N>().0 {
        for (((a, b), c), d) in a.iter_mut().zip(b).zip(c).zip(d) {
            [*a, *b, *c, *d] = two_strides([*a, *b, *c, *d]);
        }
    }
}

fn butterflies(values: &mut [f32], stride: usize) {
    for pair in values.chunks_exact_mut(stride * 2) {
        let (upper, lower) = pair.split_at_mut(stride);
        for (a, b) in upper.iter_mut().zip(lower) {
            (*a, *b) = (*a + *b, *a - *b);
        }
    }
}

#[cfg(test)]
mod tests;
