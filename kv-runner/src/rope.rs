//! Rotary position embedding of Q and K rows.
//!
//! Pair `i` of a row is rotated by `position * theta^(-2i / rotary_dim)` (Su et al., "`RoFormer`",
//! 2021). Angles are computed in f64 once per step for all layers; the rotation itself is f32.
use std::f64::consts::TAU;

use crate::num::{to_f32, to_u32, to_usize};

/// The two values of a row that form a pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pairing {
    /// `(i, i + rotary_dim / 2)`: Hugging Face weights.
    Half,
    /// `(2i, 2i + 1)`: the original Llama weights and GGUF files of the llama architecture.
    Interleaved,
}

/// The method that extends a model beyond the context of its first training.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Scaling {
    None,
    /// Positions divided by `factor`.
    Linear {
        factor: f64,
    },
    Dynamic(Dynamic),
    Yarn(Yarn),
    Llama3(Llama3),
    /// Every frequency divided by its own factor; these are the factors up to the original context.
    LongRope {
        short: Vec<f64>,
        attention_factor: f64,
    },
}

/// A base that grows with the position after `original_context` positions (dynamic NTK).
///
/// A row is rotated with the base of its own position, whatever follows: K then depends on the
/// tokens before it only, as prefix reuse needs, and equals that of a growing text for which the
/// base is recomputed in every step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Dynamic {
    pub(crate) factor: f64,
    pub(crate) original_context: u32,
}

/// Low frequencies divided by `factor`, high ones unchanged, a ramp over the pairs between (Peng et
/// al., "`YaRN`", 2023).
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Yarn {
    pub(crate) factor: f64,
    pub(crate) original_context: u32,
    /// Rotations over the original context at which the ramp begins and ends.
    pub(crate) beta_fast: f64,
    pub(crate) beta_slow: f64,
    /// Whether the ramp begins and ends at whole pairs.
    pub(crate) truncate: bool,
    /// Factor of rotated rows.
    pub(crate) attention_factor: f64,
}

/// Low frequencies divided by `factor`, high ones unchanged, a ramp between (Llama 3.1).
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Llama3 {
    pub(crate) factor: f64,
    pub(crate) low_freq_factor: f64,
    pub(crate) high_freq_factor: f64,
    pub(crate) original_context: u32,
}

/// Parameters of a [`Rope`].
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct RopeConfig {
    pub(crate) theta: f64,
    pub(crate) head_dim: u32,
    /// Leading values of a row that are rotated; even, at least 2, at most `head_dim`.
    pub(crate) rotary_dim: u32,
    pub(crate) pairing: Pairing,
    pub(crate) scaling: Scaling,
}

/// Frequencies of one model.
#[derive(Debug)]
pub(crate) struct Rope {
    head_dim: usize,
    rotary_dim: usize,
    pairing: Pairing,
    /// Radians per position, by pair.
    frequencies: Vec<f64>,
    /// Factor of cosines and sines.
    magnitude: f64,
    /// The base of the first positions and its growth, for dynamic NTK.
    dynamic: Option<(f64, Dynamic)>,
}

/// Cosines and sines of one step: a row of `rotary_dim / 2` per token.
#[derive(Debug, Default)]
pub(crate) struct Rotation {
    cos: Vec<f32>,
    sin: Vec<f32>,
}

impl Rope {
    pub(crate) fn new(config: &RopeConfig) -> Self {
        let RopeConfig { theta, rotary_dim, .. } = *config;
        let mut frequencies: Vec<_> = plain(theta, rotary_dim).collect();
        let (mut magnitude, mut dynamic) = (1.0, None);
        match &config.scaling {
            Scaling::None => {}
            Scaling::Linear { factor } => {
                for frequency in &mut frequencies {
                    *frequency /= factor;
                }
            }
            Scaling::Dynamic(growth) => dynamic = Some((theta, *growth)),
            Scaling::Yarn(yarn) => {
                yarn.scale(&mut frequencies, theta, rotary_dim);
                magnitude = yarn.attention_factor;
            }
            Scaling::Llama3(llama3) => {
                for frequency in &mut frequencies {
                    *frequency = llama3.scale(*frequency);
                }
            }
            Scaling::LongRope { short, attention_factor } => {
                for (frequency, factor) in frequencies.iter_mut().zip(short) {
                    *frequency /= factor;
                }
                magnitude = *attention_factor;
            }
        }
        Self {
            head_dim: to_usize(config.head_dim),
            rotary_dim: to_usize(rotary_dim),
            pairing: config.pairing,
            frequencies,
            magnitude,
            dynamic,
        }
    }

    /// Divides every frequency by its own factor, as a GGUF file may require.
    pub(crate) fn divide_frequencies(&mut self, factors: &[f32]) {
        for (frequency, factor) in self.frequencies.iter_mut().zip(factors) {
            *frequency /= f64::from(*factor);
        }
    }

    /// Returns radians per position, by pair.
    pub(crate) fn frequencies(&self) -> &[f64] {
        &self.frequencies
    }

    /// Passes the numbers that distinguish this embedding from another with the same frequencies to
    /// `add`.
    pub(crate) fn hash_refinements(&self, add: &mut dyn FnMut(f64)) {
        if self.magnitude.total_cmp(&1.0).is_ne() {
            add(self.magnitude);
        }
        if let Some((theta, Dynamic { factor, original_context })) = self.dynamic {
            [theta, factor, f64::from(original_context)].into_iter().for_each(add);
        }
    }

    /// Returns the number of rotated pairs of a row.
    pub(crate) fn num_pairs(&self) -> usize {
        self.frequencies.len()
    }

    /// Returns the rotation of tokens at these positions.
    pub(crate) fn rotation(&self, positions: &[u32]) -> Rotation {
        let mut rotation = Rotation::default();
        for &position in positions {
            match self.dynamic {
                Some((theta, dynamic)) if position >= dynamic.original_context => {
                    let rotary_dim = to_u32(self.rotary_dim);
                    let base = dynamic.base(theta, position, rotary_dim);
                    self.push(position, plain(base, rotary_dim), &mut rotation);
                }
                _ => self.push(position, self.frequencies.iter().copied(), &mut rotation),
            }
        }
        rotation
    }

    fn push(&self, position: u32, frequencies: impl Iterator<Item = f64>, rotation: &mut Rotation) {
        for frequency in frequencies {
            let (sin, cos) = (f64::from(position) * frequency).sin_cos();
            rotation.cos.push(to_f32(cos * self.magnitude));
            rotation.sin.push(to_f32(sin * self.magnitude));
        }
    }

    /// Rotates `[tokens, heads, head_dim]`.
    pub(crate) fn rotate(&self, rotation: &Rotation, rows: &[f32], heads: usize) -> Vec<f32> {
        let mut rotated = Vec::with_capacity(rows.len());
        let pairs = self.frequencies.len().max(1);
        let angles = rotation.cos.chunks_exact(pairs).zip(rotation.sin.chunks_exact(pairs));
        let token = (heads * self.head_dim).max(1);
        for (token, (cos, sin)) in rows.chunks_exact(token).zip(angles) {
            for row in token.chunks_exact(self.head_dim.max(1)) {
                let (turning, rest) = row.split_at(self.rotary_dim.min(row.len()));
                let angles = cos.iter().zip(sin);
                match self.pairing {
                    Pairing::Half => {
                        let (a, b) = turning.split_at(pairs.min(turning.len()));
                        let all = || a.iter().zip(b).zip(angles.clone());
                        rotated.extend(all().map(|((a, b), (cos, sin))| a * cos - b * sin));
                        rotated.extend(all().map(|((a, b), (cos, sin))| b * cos + a * sin));
                    }
                    Pairing::Interleaved => {
                        for (pair, (cos, sin)) in turning.chunks_exact(2).zip(angles) {
                            if let &[a, b] = pair {
                                rotated.extend([a * cos - b * sin, b * cos + a * sin]);
                            }
                        }
                    }
                }
                rotated.extend_from_slice(rest);
            }
        }
        rotated
    }
}

impl Dynamic {
    /// Returns the base for the row at this position, as if it were the last one of its text.
    fn base(self, theta: f64, position: u32, rotary_dim: u32) -> f64 {
        let length = f64::from(position) + 1.0;
        let stretched = self.factor * length / f64::from(self.original_context);
        let dim = f64::from(rotary_dim);
        // A single pair is rotated by its position, whatever the base.
        let exponent = if rotary_dim > 2 { dim / (dim - 2.0) } else { 0.0 };
        theta * (stretched - (self.factor - 1.0)).powf(exponent)
    }
}

/// Returns frequencies without scaling, by pair.
fn plain(theta: f64, rotary_dim: u32) -> impl Iterator<Item = f64> {
    let (dim, pairs) = (f64::from(rotary_dim), rotary_dim >> 1);
    (0..pairs).map(move |i| theta.powf(-2.0 * f64::from(i) / dim))
}

impl Llama3 {
    /// Scales one frequency.
    fn scale(self, frequency: f64) -> f64 {
        let Self { factor, low_freq_factor, high_freq_factor, original_context } = self;
        // Rotations of the pair over the context of the first training.
        let turns = f64::from(original_context) * frequency / TAU;
        let kept = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor);
        let kept = kept.clamp(0.0, 1.0);
        frequency * kept + frequency / factor * (1.0 - kept)
    }
}

impl Yarn {
    /// Divides the frequencies after the ramp by the factor, and interpolates on it.
    fn scale(self, frequencies: &mut [f64], theta: f64, rotary_dim: u32) {
        let dim = f64::from(rotary_dim);
        // The (fractional) pair that makes this number of rotations.
        let pair = |turns: f64| {
            let per_turn = f64::from(self.original_context) / (turns * TAU);
            dim * per_turn.ln() / (2.0 * theta.ln())
        };
        let (mut first, mut last) = (pair(self.beta_fast), pair(self.beta_slow));
        if self.truncate {
            (first, last) = (first.floor(), last.ceil());
        }
        (first, last) = (first.max(0.0), last.min(dim - 1.0));
        if first.total_cmp(&last).is_eq() {
            last += 0.001;
        }
        for (frequency, i) in frequencies.iter_mut().zip(0_u32..) {
            let divided = ((f64::from(i) - first) / (last - first)).clamp(0.0, 1.0);
            *frequency = *frequency / self.factor * divided + *frequency * (1.0 - divided);
        }
    }
}

#[cfg(test)]
mod tests;
