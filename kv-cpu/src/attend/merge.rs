//! The exact merge of the parts of a context, and the arithmetic of running maxima and sums.
//!
//! Dao et al., "Flash-Decoding for long-context inference" (2023): every part's row and sum are
//! relative to its own maximum, so they are brought to the common one and added, part by part in
//! order.
#![expect(
    clippy::arithmetic_side_effects,
    clippy::float_cmp,
    reason = "kernel code: indices come from the units' plan; maxima are compared with themselves"
)]
use super::Job;
use super::unit::{Partials, Scratch};
use crate::kernel::Running;
use crate::num::to_usize;
use crate::rows::RowAt;

/// One query of a context that was cut.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Merge {
    pub(super) entry: usize,
    /// Query of the sequence.
    pub(super) query: u32,
    /// Partial result of its first head in the first part.
    pub(super) first: usize,
    /// Partial results from one part to the next.
    pub(super) stride: usize,
    pub(super) parts: usize,
}

/// Joins the parts of every head of one query.
pub(super) fn run(job: &Job<'_>, merge: &Merge, scratch: &mut Scratch, partials: &Partials<'_>) {
    let Some(sequence) = job.sequence(merge.entry) else {
        return;
    };
    let at = RowAt { entry: merge.entry, start: sequence.q_start, token: merge.query };
    let row = scratch.row(job.heads.dim_v);
    for head in 0..job.q.rows().heads() {
        let first = merge.first + to_usize(head);
        let mut total = Running::EMPTY;
        row.fill(0.0);
        for part in 0..merge.parts {
            let index = first + part * merge.stride;
            // SAFETY: the units are done, so nobody writes partial results any more.
            let (running, partial) = unsafe { partials.get(index, job.heads) };
            let joined = total.join(running);
            let (old, new) = (total.factor_to(joined), running.factor_to(joined));
            if running.sum != 0.0 {
                job.cpu.kernels.combine(row, old, partial, new);
            }
            total = joined;
        }
        // SAFETY: each query of a cut context is one merge, and its units finish no row.
        unsafe { job.finish(at, head, total, row) };
    }
}

impl Running {
    /// Both sums, relative to the greater maximum.
    fn join(self, other: Self) -> Self {
        let max = if self.max.is_nan() || other.max.is_nan() {
            f32::NAN
        } else {
            self.max.max(other.max)
        };
        let common = Self { max, sum: 0.0 };
        Self { max, sum: self.sum * self.factor_to(common) + other.sum * other.factor_to(common) }
    }

    /// What a value relative to this maximum is multiplied with to be relative to another's.
    fn factor_to(self, other: Self) -> f32 {
        if self.max == other.max || other.max == f32::NEG_INFINITY {
            1.0
        } else {
            (self.max - other.max).exp()
        }
    }

    /// With one more logit that carries no value.
    pub(super) fn with_sink(self, sink: f32) -> Self {
        self.join(Self { max: sink, sum: if sink == f32::NEG_INFINITY { 0.0 } else { 1.0 } })
    }

    /// What a row relative to this maximum is multiplied with to be a mean of weights summing to
    /// `total`.
    pub(super) fn weight_in(self, total: Self) -> f32 {
        self.factor_to(total) / total.sum
    }

    /// Natural logarithm of the sum of exponentials; negative infinity of none.
    pub(super) fn log_sum_exp(self) -> f32 {
        if self.sum == 0.0 { f32::NEG_INFINITY } else { self.max + self.sum.ln() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn joins_are_relative_to_the_greater_maximum() {
        let a = Running { max: 2.0, sum: 3.0 };
        let b = Running { max: 5.0, sum: 1.5 };
        let joined = a.join(b);
        assert!((joined.sum - (3.0 * (-3.0_f32).exp() + 1.5)).abs() < 1e-6);
        assert_eq!((joined.max, a.factor_to(joined)), (5.0, (-3.0_f32).exp()));
        let nothing = Running::EMPTY.join(Running::EMPTY);
        assert_eq!((nothing.max, nothing.sum), (f32::NEG_INFINITY, 0.0));
        let one_sided = Running::EMPTY.join(b);
        assert_eq!((one_sided.max, one_sided.sum), (5.0, 1.5));
    }

    #[test]
    fn sinks_join_the_sum_alone() {
        let seen = Running { max: 0.0, sum: 1.0 };
        let total = seen.with_sink(0.0);
        assert_eq!((total.sum, seen.weight_in(total)), (2.0, 0.5));
        assert_eq!(Running::EMPTY.with_sink(3.0).log_sum_exp(), 3.0);
        assert_eq!(Running::EMPTY.with_sink(f32::NEG_INFINITY).log_sum_exp(), f32::NEG_INFINITY);
    }
}
