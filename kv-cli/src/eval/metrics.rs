//! The difference between two distributions of the next token, per token and over a text.
//!
//! All sums are f64, over log-probabilities of f32 logits.
use crate::num::{to_f64, to_u64};

/// One predicted token: the stored format against f32.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Score {
    /// `KL(f32 || format)` of the next token's distribution, in nats.
    pub(crate) kld: f64,
    /// Whether both have the same most likely token.
    pub(crate) same_top1: bool,
    /// Negative log-likelihood of the token that follows in the text, in nats: of f32, and of the
    /// format.
    pub(crate) nll: [f64; 2],
}

/// Scores over a text.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Summary {
    pub(crate) kld_mean: f64,
    /// 99th percentile of the divergence.
    pub(crate) kld_p99: f64,
    /// Share of the tokens after which the most likely token is the same.
    pub(crate) top1: f64,
    /// Mean nll of the format minus that of f32.
    pub(crate) delta_nll: f64,
    /// Perplexity of the format.
    pub(crate) ppl: f64,
    pub(crate) tokens: usize,
}

/// Logits that are not a distribution: some are NaN or infinite.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the logits hold what is not a finite number")]
pub(crate) struct NotFinite;

/// One row of logits as a distribution: the logits, and the logarithm of the sum of their
/// exponentials.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Distribution<'a> {
    logits: &'a [f32],
    log_sum: f64,
    top1: usize,
}

impl<'a> Distribution<'a> {
    /// Makes a distribution.
    ///
    /// # Errors
    /// [`NotFinite`], also without logits.
    pub(crate) fn new(logits: &'a [f32]) -> Result<Self, NotFinite> {
        let (mut top1, mut max) = (0, f32::NEG_INFINITY);
        for (index, logit) in logits.iter().enumerate() {
            if !logit.is_finite() {
                return Err(NotFinite);
            }
            // The first of equals, as in the sampler.
            if *logit > max {
                (top1, max) = (index, *logit);
            }
        }
        if logits.is_empty() {
            return Err(NotFinite);
        }
        let max = f64::from(max);
        let sum: f64 = logits.iter().map(|logit| (f64::from(*logit) - max).exp()).sum();
        Ok(Self { logits, log_sum: max + sum.ln(), top1 })
    }

    /// Returns the log-probability of token `index`, `None` past the last.
    fn log_p(&self, index: usize) -> Option<f64> {
        self.logits.get(index).map(|logit| f64::from(*logit) - self.log_sum)
    }

    /// Compares this distribution with another one of the same tokens, if `next` followed; `None`
    /// if their lengths differ or `next` is beyond them.
    pub(crate) fn compare(&self, other: &Self, next: usize) -> Option<Score> {
        if self.logits.len() != other.logits.len() {
            return None;
        }
        let terms = self.logits.iter().zip(other.logits).map(|(p, q)| {
            let (p, q) = (f64::from(*p) - self.log_sum, f64::from(*q) - other.log_sum);
            p.exp() * (p - q)
        });
        // Not negative by Gibbs' inequality; rounding may make it slightly negative.
        let kld = terms.sum::<f64>().max(0.0);
        let nll = [-self.log_p(next)?, -other.log_p(next)?];
        Some(Score { kld, same_top1: self.top1 == other.top1, nll })
    }
}

impl Summary {
    /// Summarises scores; `None` without any.
    pub(crate) fn of(scores: &[Score]) -> Option<Self> {
        let tokens = scores.len();
        if tokens == 0 {
            return None;
        }
        let count = to_f64(to_u64(tokens));
        let mean = |value: fn(&Score) -> f64| scores.iter().map(value).sum::<f64>() / count;
        let same = scores.iter().filter(|score| score.same_top1).count();
        Some(Self {
            kld_mean: mean(|score| score.kld),
            kld_p99: nearest_rank(scores.iter().map(|score| score.kld).collect(), 99)?,
            top1: to_f64(to_u64(same)) / count,
            delta_nll: mean(|score| score.nll[1] - score.nll[0]),
            ppl: mean(|score| score.nll[1]).exp(),
            tokens,
        })
    }
}

/// Returns the smallest value that at least `percent` % of all do not exceed (the nearest-rank
/// method); `None` without values.
fn nearest_rank(mut values: Vec<f64>, percent: usize) -> Option<f64> {
    values.sort_unstable_by(f64::total_cmp);
    let rank = (values.len() * percent).div_ceil(100);
    values.get(rank.saturating_sub(1)).copied()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::num::to_f32;

    fn near(got: f64, expected: f64, tolerance: f64) {
        assert!((got - expected).abs() <= tolerance, "{got}, expected {expected}");
    }

    /// Converts probabilities to logits with an arbitrary shift, which softmax removes.
    fn logits(probabilities: &[f64], shift: f64) -> Vec<f32> {
        probabilities.iter().map(|p| to_f32(p.ln() + shift)).collect()
    }

    fn compare(p: &[f32], q: &[f32], next: usize) -> Score {
        let [p, q] = [p, q].map(|logits| Distribution::new(logits).expect("numbers"));
        p.compare(&q, next).expect("the same tokens")
    }

    #[test]
    fn a_coin_by_hand() {
        // KL((1/2, 1/2) || (1/4, 3/4)) = ln 2 - ln 3 / 2.
        let score = compare(&logits(&[0.5, 0.5], 3.0), &logits(&[0.25, 0.75], -7.0), 1);
        near(score.kld, 2_f64.ln() - 3_f64.ln() / 2.0, 1e-6);
        near(score.nll[0], 2_f64.ln(), 1e-6);
        near(score.nll[1], (4.0_f64 / 3.0).ln(), 1e-6);
        // Of equals, the first is the most likely.
        assert!(!score.same_top1);
        assert!(compare(&[1.0, 0.0], &[9.0, 8.0], 0).same_top1);
    }

    #[test]
    fn a_distribution_has_no_divergence_from_itself() {
        let row = [3.0, -80.0, 0.25, 11.5, 11.5];
        let score = compare(&row, &row, 2);
        assert_eq!((score.kld.to_bits(), score.same_top1), (0, true));
        assert_eq!(score.nll[0].to_bits(), score.nll[1].to_bits());
        // Nor from itself shifted, up to rounding.
        near(compare(&row, &row.map(|x| x + 64.0), 0).kld, 0.0, 1e-12);
    }

    /// Computes the formula as it is written, in f64, with each probability by itself.
    fn plainly(p: &[f32], q: &[f32]) -> f64 {
        let softmax = |row: &[f32]| {
            let powers: Vec<f64> = row.iter().map(|x| f64::from(*x).exp()).collect();
            let sum: f64 = powers.iter().sum();
            powers.into_iter().map(move |power| power / sum).collect::<Vec<_>>()
        };
        softmax(p).iter().zip(softmax(q)).map(|(p, q)| p * (p / q).ln()).sum()
    }

    #[test]
    fn random_rows_follow_the_formula() {
        let mut state = 7_u64;
        let mut random = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            f64::from(u32::try_from(state >> 33).expect("31 bits")) / f64::from(1_u32 << 31)
        };
        for size in [1, 2, 10, 513] {
            let p: Vec<_> = (0..size).map(|_| to_f32(random() * 20.0 - 10.0)).collect();
            let q: Vec<_> = p.iter().map(|p| p + to_f32(random() - 0.5)).collect();
            let (got, expected) = (compare(&p, &q, 0).kld, plainly(&p, &q));
            near(got, expected, 1e-12);
            assert!(got > 0.0 || size == 1);
        }
    }

    #[test]
    fn large_logits_do_not_overflow() {
        let score = compare(&[3e38, 0.0], &[3e38, 1e38], 0);
        assert_eq!(score, Score { kld: 0.0, same_top1: true, nll: [0.0, 0.0] });
    }

    #[test]
    fn logits_that_are_not_finite_are_refused() {
        for row in [&[][..], &[f32::NAN], &[0.0, f32::INFINITY], &[f32::NEG_INFINITY, 0.0]] {
            assert_eq!(Distribution::new(row).expect_err("no distribution"), NotFinite);
        }
        let [two, three] = [&[0.0, 1.0][..], &[0.0, 1.0, 2.0]].map(Distribution::new);
        let (two, three) = (two.expect("two"), three.expect("three"));
        assert_eq!(two.compare(&three, 0), None);
        assert_eq!(two.compare(&two, 2), None);
    }

    #[test]
    fn a_percentile_is_the_nearest_rank() {
        let up_to = |n: u32| (1..=n).rev().map(f64::from).collect::<Vec<_>>();
        for (n, expected) in
            [(1, 1.0), (2, 2.0), (99, 99.0), (100, 99.0), (101, 100.0), (200, 198.0)]
        {
            near(nearest_rank(up_to(n), 99).expect("a value"), expected, 0.0);
        }
        assert_eq!(nearest_rank(Vec::new(), 99), None);
    }

    #[test]
    fn a_summary_by_hand() {
        let score = |kld, same_top1, nll| Score { kld, same_top1, nll };
        let scores = [
            score(0.1, true, [1.0, 1.5]),
            score(0.3, false, [2.0, 1.75]),
            score(0.0, true, [0.5, 0.25]),
            score(0.2, true, [0.5, 0.5]),
        ];
        let summary = Summary::of(&scores).expect("scores");
        near(summary.kld_mean, 0.15, 1e-15);
        near(summary.kld_p99, 0.3, 0.0);
        near(summary.top1, 0.75, 0.0);
        near(summary.delta_nll, 0.0, 1e-15);
        near(summary.ppl, 1_f64.exp(), 1e-15);
        assert_eq!(summary.tokens, 4);
        assert_eq!(Summary::of(&[]), None);
    }
}
