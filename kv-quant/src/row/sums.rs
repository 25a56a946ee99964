//! Sums over a row.
#![expect(
    clippy::inline_always,
    reason = "what encodes is compiled for the instruction set of its caller"
)]
#![expect(clippy::indexing_slicing, reason = "lanes are fewer than LANES")]

const LANES: usize = 8;

/// Sums `N` terms of every pair of two equally long lists, in an order that is the same on every
/// machine and that vector code can follow: eight sums side by side.
#[inline(always)]
pub(super) fn sums<const N: usize>(
    left: &[f32],
    right: &[f32],
    terms: impl Fn(f32, f32) -> [f32; N],
) -> [f32; N] {
    let mut lanes = [[0.0_f32; LANES]; N];
    let (left_whole, left_rest) = left.as_chunks::<LANES>();
    let (right_whole, right_rest) = right.as_chunks::<LANES>();
    for (left, right) in left_whole.iter().zip(right_whole) {
        for lane in 0..LANES {
            let terms = terms(left[lane], right[lane]);
            for (sum, term) in lanes.iter_mut().zip(terms) {
                sum[lane] += term;
            }
        }
    }
    for ((left, right), lane) in left_rest.iter().zip(right_rest).zip(0_usize..) {
        let terms = terms(*left, *right);
        for (sum, term) in lanes.iter_mut().zip(terms) {
            sum[lane] += term;
        }
    }
    lanes.map(|[a, b, c, d, e, f, g, h]| ((a + e) + (c + g)) + ((b + f) + (d + h)))
}
