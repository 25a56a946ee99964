//! Beam search: which continuations are kept, and which texts the search ends with.
//!
//! Pure arithmetic over logits; the scheduler forks sequences accordingly.
use crate::num::{to_f64, to_u32, to_u64, to_usize};
use crate::request::Finish;
use crate::sampler::{SampleError, check_logits};

/// The options of a beam search.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BeamOptions {
    /// Number of beams, at least 1.
    pub width: u32,
    /// A text's score is its log-probability divided by its length to this power.
    pub length_penalty: f64,
}

/// A finished text.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Hypothesis {
    /// Generated tokens, including the one that ends the text.
    pub tokens: Vec<u32>,
    /// Sum of the natural logarithms of its tokens' probabilities.
    pub log_prob: f64,
    /// The score that texts are ranked by.
    pub score: f64,
    /// The reason of its end.
    pub finish: Finish,
}

/// One more token for one of the beams.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Branch {
    /// Index of the beam that it continues.
    pub(crate) parent: usize,
    pub(crate) token: u32,
    log_prob: f64,
}

/// The state of one search.
#[derive(Debug)]
pub(crate) struct BeamSearch {
    options: BeamOptions,
    /// Log-probabilities of the beams.
    log_probs: Vec<f64>,
    finished: Vec<Hypothesis>,
}

impl BeamSearch {
    /// Starts with one empty beam.
    pub(crate) fn new(options: BeamOptions) -> Self {
        Self { options, log_probs: vec![0.0], finished: Vec::new() }
    }

    pub(crate) fn width(&self) -> u32 {
        self.options.width
    }

    /// Continues the search with the logits of all beams; `generated` are their new tokens so far.
    /// The best continuations are kept, one per beam; those that end a text are stored separately.
    ///
    /// Twice as many candidates are considered, so that ended texts do not narrow the search; an
    /// ended text counts if it is among the first [`Self::width`].
    pub(crate) fn advance(
        &mut self,
        rows: &[&[f32]],
        generated: &[&[u32]],
        stop: &[u32],
    ) -> Result<Vec<Branch>, SampleError> {
        let width = to_usize(self.width());
        let mut branches = self.candidates(rows)?;
        branches.truncate(width * 2);
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

    /// Returns whether the number of ended texts equals the width.
    pub(crate) fn is_done(&self) -> bool {
        self.finished.len() >= to_usize(self.width())
    }

    /// Ends the remaining beams, in order.
    pub(crate) fn finish_all(&mut self, generated: &[&[u32]], finish: Finish) {
        for (tokens, log_prob) in generated.iter().zip(std::mem::take(&mut self.log_probs)) {
            self.finish(tokens, log_prob, finish);
        }
    }

    fn finish(&mut self, tokens: &[u32], log_prob: f64, finish: Finish) {
        let length = to_f64(to_u64(tokens.len().max(1)));
        let score = log_prob / length.powf(self.options.length_penalty);
        self.finished.push(Hypothesis { tokens: tokens.to_vec(), log_prob, score, finish });
    }

    /// Returns the best text, and all of them, sorted by score; ties keep their order.
    pub(crate) fn into_best(mut self, otherwise: Finish) -> (Vec<u32>, Finish, Vec<Hypothesis>) {
        self.finished.sort_by(|a, b| b.score.total_cmp(&a.score));
        self.finished.truncate(to_usize(self.options.width));
        let best = self.finished.first();
        let (tokens, finish) =
            best.map_or((Vec::new(), otherwise), |best| (best.tokens.clone(), best.finish));
        (tokens, finish, self.finished)
    }

    /// Returns twice the width of continuations per beam, sorted: the most likely first, of equals
    /// the first beam's, then the lowest token.
    fn candidates(&self, rows: &[&[f32]]) -> Result<Vec<Branch>, SampleError> {
        let most = to_usize(self.width()) * 2;
        let mut branches = Vec::with_capacity(most * rows.len());
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

/// Counts the continuations of each beam.
pub(crate) fn children(branches: &[Branch], parents: usize) -> Vec<u32> {
    let of = |parent| branches.iter().filter(|branch| branch.parent == parent).count();
    (0..parents).map(|parent| to_u32(of(parent))).collect()
}
