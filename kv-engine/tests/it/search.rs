//! Beam search without a cache and without forks, by its definition: `kv-runner` compares a real
//! model with it too.

/// A text of a search.
#[derive(Debug, Clone)]
pub(crate) struct Text {
    pub(crate) tokens: Vec<u32>,
    pub(crate) score: f64,
    /// Whether it ended with a stop token.
    pub(crate) has_stopped: bool,
}

/// The search by its definition: all candidates, sorted.
pub(crate) fn brute_force(
    rule: &dyn Fn(&[u32]) -> Vec<f32>,
    prompt: &[u32],
    new: usize,
    stop: &[u32],
    (width, penalty): (usize, f64),
) -> Vec<Text> {
    let mut live: Vec<(Vec<u32>, f64)> = vec![(Vec::new(), 0.0)];
    let mut ended: Vec<Text> = Vec::new();
    let finished = |tokens: Vec<u32>, sum: f64, has_stopped| {
        let length = f64::from(u32::try_from(tokens.len()).expect("few"));
        Text { tokens, score: sum / length.powf(penalty), has_stopped }
    };
    for _ in 0..new {
        let mut candidates = Vec::new();
        for (tokens, sum) in &live {
            let row = rule(&[prompt, tokens].concat());
            let total: f64 = row.iter().map(|x| f64::from(*x).exp()).sum();
            for (token, logit) in (0..).zip(&row) {
                let text = [tokens.as_slice(), &[token]].concat();
                candidates.push((text, sum + f64::from(*logit) - total.ln()));
            }
        }
        candidates.sort_by(|a, b| b.1.total_cmp(&a.1));
        live.clear();
        for (rank, (text, sum)) in candidates.into_iter().take(2 * width).enumerate() {
            if !stop.contains(text.last().expect("a token")) {
                if live.len() < width {
                    live.push((text, sum));
                }
            } else if rank < width && live.len() < width {
                ended.push(finished(text, sum, true));
            }
        }
        if ended.len() >= width {
            live.clear();
            break;
        }
    }
    ended.extend(live.into_iter().map(|(tokens, sum)| finished(tokens, sum, false)));
    ended.sort_by(|a, b| b.score.total_cmp(&a.score));
    ended.truncate(width);
    ended
}
