//! Samples the next token from logits.
//!
//! Every sequence has its own generator, seeded by the program's seed and the prompt's index, and
//! draws once per token, so its draws do not depend on batch, chunks or preemption. The last bits
//! of the logits do, because products of one row and of many add in different orders.
use crate::num::{to_f64, to_u32, to_u64};

/// The random stream of one sequence.
#[derive(Debug, Clone, PartialEq)]
pub struct Sampler {
    /// 0 takes the most likely token.
    temperature: f64,
    /// Share of the probability that the likely tokens have, which are sampled from.
    top_p: f64,
    state: u64,
}

/// Logits from which no token can be sampled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SampleError {
    /// There are no logits.
    #[error("the model gave no logits")]
    Empty,
    /// A logit is NaN or infinite.
    #[error("the model gave a logit that is not a number or infinite: its weights may be damaged")]
    NotFinite,
}

impl Sampler {
    /// Makes a sampler: temperature 0 takes the most likely token, 1 samples from the model's own
    /// distribution. Each `index` has its own stream, so that requests with one seed differ.
    pub fn new(temperature: f64, seed: u64, index: usize) -> Self {
        let stream = to_u64(index);
        Self { temperature, top_p: 1.0, state: mix(seed) ^ mix(stream.wrapping_add(GOLDEN)) }
    }

    /// Makes a sampler that takes the most likely token.
    pub fn greedy() -> Self {
        Self::new(0.0, 0, 0)
    }

    /// Samples from the fewest likely tokens that have this share of the probability (nucleus
    /// sampling, Holtzman et al. 2019). The most likely one is always among them; 1 is all tokens.
    #[must_use]
    pub fn with_top_p(self, top_p: f64) -> Self {
        Self { top_p, ..self }
    }

    /// Moves to the place in the stream after `drawn` tokens: for a text that goes on.
    #[must_use]
    pub fn after(mut self, drawn: u64) -> Self {
        if self.temperature > 0.0 {
            self.state = self.state.wrapping_add(GOLDEN.wrapping_mul(drawn));
        }
        self
    }

    /// Chooses the next token. The lowest id wins a tie.
    ///
    /// # Errors
    /// [`SampleError`] for logits from which no token can be sampled.
    pub fn sample(&mut self, logits: &[f32]) -> Result<u32, SampleError> {
        let max = check_logits(logits)?;
        let best = logits.iter().zip(0..).find(|(logit, _)| **logit >= max).map_or(0, |(_, id)| id);
        if self.temperature <= 0.0 {
            return Ok(best);
        }
        let temperature = self.temperature;
        let weight = |logit: &f32| (f64::from(logit - max) / temperature).exp();
        let total: f64 = logits.iter().map(weight).sum();
        if self.top_p < 1.0 {
            let weights = logits.iter().map(weight).collect::<Vec<_>>();
            return Ok(self.sample_likely(&weights, total).unwrap_or(best));
        }
        let mut left = self.uniform() * total;
        for (index, logit) in logits.iter().enumerate() {
            left -= weight(logit);
            if left < 0.0 {
                return Ok(to_u32(index));
            }
        }
        // Only rounding leads here.
        Ok(best)
    }

    /// Samples from the likely tokens; `None` where only rounding leads.
    fn sample_likely(&mut self, weights: &[f64], total: f64) -> Option<u32> {
        let mut ranked: Vec<(f64, u32)> = weights.iter().copied().zip(0..).collect();
        // Of equal ones the lowest id is first, so that a text does not depend on the sort.
        ranked.sort_unstable_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        let (mut sum, mut kept) = (0.0, 0_usize);
        for (weight, _) in &ranked {
            sum += weight;
            kept += 1;
            if sum >= self.top_p * total {
                break;
            }
        }
        let mut left = self.uniform() * sum;
        let chosen = ranked.iter().take(kept).find(|(weight, _)| {
            left -= weight;
            left < 0.0
        });
        chosen.map(|(_, id)| *id)
    }

    /// Returns a uniform number in `[0, 1)` with 53 bits.
    fn uniform(&mut self) -> f64 {
        self.state = self.state.wrapping_add(GOLDEN);
        to_f64(mix(self.state) >> 11) / to_f64(1 << 53)
    }
}

/// Refuses unusable logits; otherwise returns the largest one.
pub(crate) fn check_logits(logits: &[f32]) -> Result<f32, SampleError> {
    let first = *logits.first().ok_or(SampleError::Empty)?;
    if !logits.iter().all(|logit| logit.is_finite()) {
        return Err(SampleError::NotFinite);
    }
    Ok(logits.iter().copied().fold(first, f32::max))
}

/// Computes the output function of `SplitMix64` (Steele, Lea, Flood 2014).
fn mix(state: u64) -> u64 {
    let mut z = state;
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn greedy_takes_the_first_of_the_largest() {
        let mut sampler = Sampler::new(0.0, 1, 0);
        assert_eq!(sampler.sample(&[0.0, 3.0, 3.0, -1.0]), Ok(1));
        assert_eq!(sampler.sample(&[-5.0]), Ok(0));
    }

    #[test]
    fn bad_logits_are_refused() {
        for temperature in [0.0, 1.0] {
            let mut sampler = Sampler::new(temperature, 1, 0);
            assert_eq!(sampler.sample(&[]), Err(SampleError::Empty));
            assert_eq!(sampler.sample(&[0.0, f32::NAN]), Err(SampleError::NotFinite));
            assert_eq!(sampler.sample(&[f32::INFINITY, 0.0]), Err(SampleError::NotFinite));
        }
    }

    #[test]
    fn draws_follow_the_distribution() {
        let mut sampler = Sampler::new(2.0, 7, 3);
        let (logits, draws) = ([0.0_f32, 2.0, -1.0, 4.0], 40_000);
        let mut counts = [0_u32; 4];
        for _ in 0..draws {
            let token = sampler.sample(&logits).expect("finite");
            counts[usize::try_from(token).expect("small")] += 1;
        }
        let total: f64 = logits.iter().map(|l| (f64::from(*l) / 2.0).exp()).sum();
        for (logit, count) in logits.iter().zip(counts) {
            let expected = (f64::from(*logit) / 2.0).exp() / total;
            let got = f64::from(count) / f64::from(draws);
            assert!((got - expected).abs() < 0.01, "{got} {expected}");
        }
    }

    #[test]
    fn only_the_likely_tokens_are_drawn() {
        // Probabilities 0.4, 0.3, 0.2, 0.1, in another order.
        let probabilities = [0.2_f64, 0.4, 0.1, 0.3];
        #[expect(clippy::as_conversions, clippy::cast_possible_truncation, reason = "rounded")]
        let logits = probabilities.map(|p| p.ln() as f32);
        for (top_p, kept) in
            [(0.0, &[1][..]), (0.39, &[1]), (0.5, &[1, 3]), (0.8, &[1, 3, 0]), (1.0, &[1, 3, 0, 2])]
        {
            let mut sampler = Sampler::new(1.0, 5, 0).with_top_p(top_p);
            let (mut counts, draws) = ([0_u32; 4], 20_000);
            for _ in 0..draws {
                let token = sampler.sample(&logits).expect("finite");
                counts[usize::try_from(token).expect("small")] += 1;
            }
            let total: f64 = kept.iter().map(|id| probabilities[*id]).sum();
            for (id, count) in counts.iter().enumerate() {
                let expected = if kept.contains(&id) { probabilities[id] / total } else { 0.0 };
                let got = f64::from(*count) / f64::from(draws);
                assert!((got - expected).abs() < 0.015, "{top_p}: {id} {got} {expected}");
            }
        }
        // Equal tokens: those with low ids.
        let mut sampler = Sampler::new(1.0, 5, 0).with_top_p(0.5);
        assert!((0..100).all(|_| sampler.sample(&[0.0; 4]).expect("finite") < 2));
    }

    #[test]
    fn a_stream_depends_on_seed_and_index_alone() {
        let logits = [0.0; 1000];
        let draw = |seed, index| {
            let mut sampler = Sampler::new(1.0, seed, index);
            (0..8).map(|_| sampler.sample(&logits).expect("finite")).collect::<Vec<_>>()
        };
        assert_eq!(draw(1, 0), draw(1, 0));
        assert_ne!(draw(1, 0), draw(1, 1));
        assert_ne!(draw(1, 0), draw(2, 0));
    }

    #[test]
    fn a_tiny_temperature_is_greedy() {
        let mut sampler = Sampler::new(f64::MIN_POSITIVE, 1, 0);
        assert_eq!(sampler.sample(&[0.0, 1.0, 0.5]), Ok(1));
    }
}
