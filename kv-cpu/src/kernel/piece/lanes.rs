//! What the query rows of a kv head are and have come to, besides their values and sums.
#![expect(
    clippy::arithmetic_side_effects,
    clippy::indexing_slicing,
    reason = "kernel code: rows and lanes are counted by the callers and the types here"
)]
use super::super::simd::{LANES_MAX, exp};
use super::super::stored::GROUP;
use super::super::tile::HALF;
use super::super::{RowScale, Running};
use super::tokens_of;
use super::words::GREATEST;

/// As what query rows are there besides `f32`: words of two values of 16 bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Words {
    /// bf16, which loses no bit.
    Bf16,
    /// Signed fixed point, of which 32,767 is the greatest magnitude of a row: for scores that are
    /// off by some millionths of the lengths of queries and keys.
    Fixed,
}

/// What the query rows of a kv head have come to; the lanes of a row as in [`Weights`].
///
/// [`Weights`]: super::Weights
#[derive(Debug, Clone, Copy)]
#[repr(align(64))]
pub(crate) struct Lanes {
    /// What is added to scores before they are scaled.
    pub(super) bias: [f32; LANES_MAX],
    /// What weights are relative to, about the greatest score: the same in all lanes of a row, and
    /// finite, so that what is infinitely less weighs nothing.
    pub(super) max: [f32; LANES_MAX],
    /// Of the weights of a row each lane has a part.
    pub(super) sum: [f32; LANES_MAX],
    /// What rows of K and V are multiplied with.
    pub(super) scales: [RowScale<'static>; 2],
    words: Option<Words>,
    /// What a query value of 1 in fixed point is.
    pub(super) units: [f32; LANES_MAX],
}

impl Lanes {
    /// Nothing seen yet by query rows with these biases.
    pub(crate) fn new(bias: &[f32], scales: [RowScale<'static>; 2]) -> Self {
        let zero = [0.0; LANES_MAX];
        let max = [f32::MIN; LANES_MAX];
        let mut lanes = Self { bias: zero, max, sum: zero, scales, words: None, units: zero };
        for (lanes, bias) in lanes.bias.chunks_mut(tokens_of(bias.len())).zip(bias) {
            lanes.fill(*bias);
        }
        lanes
    }

    /// Rows of K and V are multiplied with these from now on.
    pub(crate) fn set_scales(&mut self, scales: [RowScale<'static>; 2]) {
        self.scales = scales;
    }

    /// As what words the query rows are there, if as any.
    pub(super) fn words(&self) -> Option<Words> {
        self.words
    }

    /// Puts the query rows, in the order of pairs or not, into such words if they can be: values
    /// that have no more bits than bf16, or finite ones none of which is great among the others.
    /// Each head has its own answer, so that its bits do not depend on which others it is met with.
    pub(crate) fn put_words(
        &mut self,
        words: Words,
        (q, rows, in_pairs): (&[f32], usize, bool),
        to: &mut [u32],
    ) {
        let stride = q.len() / rows;
        let (q, to) = (q.chunks_exact(stride), to.chunks_exact_mut(stride / 2));
        let lanes = self.units.chunks_mut(tokens_of(rows));
        let all = q.zip(to).zip(lanes).all(|((q, to), units)| match words {
            Words::Bf16 => put_bf16(q, in_pairs, to),
            Words::Fixed => put_fixed(q, to).map(|unit| units.fill(unit)).is_some(),
        });
        self.words = all.then_some(words);
    }

    /// Maximum and sum of one of so many rows.
    pub(crate) fn running(&self, row: usize, rows: usize) -> Running {
        let tokens = tokens_of(rows);
        let sum: f32 = self.sum[row * tokens..][..tokens].iter().sum();
        // Where nothing weighs, nothing was seen.
        if sum == 0.0 { Running::EMPTY } else { Running { max: self.max[row * tokens], sum } }
    }
}

/// The upper halves of values, whose lower ones are zero if that is the answer.
fn put_bf16(q: &[f32], in_pairs: bool, to: &mut [u32]) -> bool {
    let mut lost = 0;
    for (q, to) in q.as_chunks::<GROUP>().0.iter().zip(to.as_chunks_mut::<HALF>().0) {
        for (i, to) in to.iter_mut().enumerate() {
            let [first, second] = if in_pairs { [i, i + HALF] } else { [2 * i, 2 * i + 1] };
            let [first, second] = [q[first].to_bits(), q[second].to_bits()];
            lost |= (first | second) << 16;
            *to = first >> 16 | second & 0xffff_0000;
        }
    }
    lost == 0
}

/// How many times the mean square the greatest one may be where values are put in fixed point. If
/// few values are great, and keys are small where they are, others decide, and would be too coarse;
/// rows that were rotated, and most others, are well below it.
const SQUARES_MAX: f32 = 32.0;

/// Values as parts of the greatest magnitude, and what one of these is, or `None` where fixed point
/// is too coarse or has no such values.
fn put_fixed(q: &[f32], to: &mut [u32]) -> Option<f32> {
    // Bits of magnitudes have their order, and what is not finite is above all others.
    let greatest = q.iter().fold(0, |greatest, q| q.abs().to_bits().max(greatest));
    let greatest = f32::from_bits(greatest);
    if greatest == 0.0 {
        to.fill(0);
        return Some(0.0);
    }
    let (times, unit) = (GREATEST / greatest, greatest / GREATEST);
    if !greatest.is_finite() || !times.is_finite() || !unit.is_normal() {
        return None;
    }
    // The last bits of such a sum are the number, rounded.
    let fixed = |q: f32| (q * times + exp::ROUND).to_bits();
    let mut squares = [0.0; HALF];
    for (q, to) in q.as_chunks::<GROUP>().0.iter().zip(to.as_chunks_mut::<HALF>().0) {
        for (i, to) in to.iter_mut().enumerate() {
            let [first, second] = [q[2 * i], q[2 * i + 1]];
            squares[i] += (first / greatest).powi(2) + (second / greatest).powi(2);
            *to = fixed(first) & 0xffff | fixed(second) << 16;
        }
    }
    let dim = f32::from(u16::try_from(q.len()).unwrap_or(u16::MAX));
    (dim <= SQUARES_MAX * squares.iter().sum::<f32>()).then_some(unit)
}
