//! Sums over a row.
#![expect(
    clippy::inline_always,
    reason = "encoders are inlined into callers that enable target features"
)]

pub(super) const LANES: usize = 8;

/// Sums a term over the pairs of two lists of equal length, as eight partial sums: an order that is
/// the same on every machine and vectorises.
#[inline(always)]
pub(super) fn sum(left: &[f32], right: &[f32], term: impl Fn(f32, f32) -> f32) -> f32 {
    total(lanes(left, right, term))
}

/// Returns the eight partial sums.
#[inline(always)]
pub(super) fn lanes(left: &[f32], right: &[f32], term: impl Fn(f32, f32) -> f32) -> [f32; LANES] {
    let mut lanes = [0.0_f32; LANES];
    let (left_whole, left_rest) = left.as_chunks::<LANES>();
    let (right_whole, right_rest) = right.as_chunks::<LANES>();
    for (left, right) in left_whole.iter().zip(right_whole) {
        for lane in 0..LANES {
            lanes[lane] += term(left[lane], right[lane]);
        }
    }
    for ((left, right), lane) in left_rest.iter().zip(right_rest).zip(&mut lanes) {
        *lane += term(*left, *right);
    }
    lanes
}

/// Adds the eight partial sums.
#[inline(always)]
#[expect(clippy::many_single_char_names, reason = "the eight lanes")]
pub(super) fn total([a, b, c, d, e, f, g, h]: [f32; LANES]) -> f32 {
    ((a + e) + (c + g)) + ((b + f) + (d + h))
}
