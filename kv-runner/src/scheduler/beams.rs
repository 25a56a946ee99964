//! Beam search: which continuations of several histories go on, and which texts it ends with.
//!
//! Pure arithmetic over logits; the scheduler makes forks of sequences of it.
use super::task::Finish;
use crate::num::{to_f64, to_u32, to_u64, to_usize};
use crate::sampler::{SampleError, check_logits};

/// The width of a beam search, and what a long text loses.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BeamOptions {
    /// Histories that go on at once, at least 1.
    pub width: u32,
    /// A text's score is its log-probability over its length to this power.
    pub length_penalty: f64,
}

/// A text that came to its end.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Hypothesis {
    /// Generated tokens, with the one that ends the text.
    pub tokens: Vec<u32>,
    /// Sum over its tokens, natural logarithm.
    pub log_prob: f64,
    /// What texts are ranked by.
    pub score: f64,
    /// Why it ended.
    pub finish: Finish,
}

/// One more token for one of the histories.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Branch {
    /// Index of the history it goes on from.
    pub(super) parent: usize,
    pub(super) token: u32,
    log_prob: f64,
}

/// The state of one search.
#[derive(Debug)]
pub(super) struct BeamSearch {
    options: BeamOptions,
    /// Of the histories that go on.
    log_probs: Vec<f64>,
    finished: Vec<Hypothesis>,
}

impl BeamSearch {
    /// Begins with one empty history.
    pub(super) fn new(options: BeamOptions) -> Self {
        Self { options, log_probs: vec![0.0], finished: Vec::new() }
    }

    pub(super) fn width(&self) -> usize {
        to_usize(self.options.width)
    }

    /// Takes the logits of all histories; `generated` are their new tokens so far. The best
    /// continuations go on, as many as the search is wide; those that end a text are kept apart.
    ///
    /// As many candidates again are looked at, so that endings do not narrow the search; an ending
    /// counts where it is among the first [`Self::width`] of them.
    pub(super) fn advance(
        &mut self,
        rows: &[&[f32]],
        generated: &[&[u32]],
        stop: &[u32],
    ) -> Result<Vec<Branch>, SampleError> {
        let width = self.width();
        let mut branches = self.candidates(rows)?;
        branches.truncate(width.saturating_mul(2));
        let mut next = Vec::with_capacity(width);
        for (rank, branch) in branches.into_iter().enumerate() {
            if !stop.contains(&branch.token) {
                next.push(branch);
                if next.len() >= width {
                    break;
                }
            } else if rank < width {
                let before = generated.get(branch.parent).copied().unwrap_or_default();
                self.finish(&[before, &[branch.token]].concat(), branch.log_prob, Finish::Stop);
            }
        }
        self.log_probs = next.iter().map(|branch| branch.log_prob).collect();
        Ok(next)
    }

    /// Whether as many texts have ended as the search is wide.
    pub(super) fn is_done(&self) -> bool {
        self.finished.len() >= self.width()
    }

    /// Ends the histories that still go on, in their order.
    pub(super) fn finish_all(&mut self, generated: &[&[u32]], finish: Finish) {
        for (tokens, log_prob) in generated.iter().zip(std::mem::take(&mut self.log_probs)) {
            self.finish(tokens, log_prob, finish);
        }
    }

    fn finish(&mut self, tokens: &[u32], log_prob: f64, finish: Finish) {
        let length = to_f64(to_u64(tokens.len().max(1)));
        let score = log_prob / length.powf(self.options.length_penalty);
        self.finished.push(Hypothesis { tokens: tokens.to_vec(), log_prob, score, finish });
    }

    /// The best text, and all of them: the first of equals first.
    pub(super) fn into_best(mut self, otherwise: Finish) -> (Vec<u32>, Finish, Vec<Hypothesis>) {
        self.finished.sort_by(|a, b| b.score.total_cmp(&a.score));
        self.finished.truncate(to_usize(self.options.width));
        let best = self.finished.first();
        let (tokens, finish) =
            best.map_or((Vec::new(), otherwise), |best| (best.tokens.clone(), best.finish));
        (tokens, finish, self.finished)
    }

    /// Twice the width of continuations of each history, all of them in order: the most likely
    /// first, of equals the first history's, then the lowest token.
    fn candidates(&self, rows: &[&[f32]]) -> Result<Vec<Branch>, SampleError> {
        let most = self.width().saturating_mul(2);
        let mut branches = Vec::with_capacity(most.saturating_mul(rows.len()));
        let mut order: Vec<(f32, u32)> = Vec::new();
        for ((parent, row), log_prob) in rows.iter().enumerate().zip(&self.log_probs) {
            let max = check_logits(row)?;
            let total: f64 = row.iter().map(|logit| f64::from(logit - max).exp()).sum();
            let norm = f64::from(max) + total.ln();
            order.clear();
            order.extend(row.iter().zip(0_u32..).map(|(logit, token)| (*logit, token)));
            let by_logit = |a: &(f32, u32), b: &(f32, u32)| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1));
            if let Some(last) = most.checked_sub(1).filter(|last| *last < order.len()) {
                order.select_nth_unstable_by(last, by_logit);
            }
            order.truncate(most);
            order.sort_unstable_by(by_logit);
            branches.extend(order.iter().map(|(logit, token)| Branch {
                parent,
                token: *token,
                log_prob: log_prob + (f64::from(*logit) - norm),
            }));
        }
        branches.sort_by(|a, b| b.log_prob.total_cmp(&a.log_prob));
        Ok(branches)
    }
}

/// How many histories go on from each parent.
pub(super) fn children(branches: &[Branch], parents: usize) -> Vec<u32> {
    let of = |parent| branches.iter().filter(|branch| branch.parent == parent).count();
    (0..parents).map(|parent| to_u32(of(parent))).collect()
}
