//! A convolution over the last tokens, each channel by itself.
use super::part::Part;
use crate::error::Error;
use crate::num::to_usize;

/// The weights of a causal convolution.
#[derive(Debug)]
pub(super) struct CausalConv {
    kernel: usize,
    /// `[channels, kernel]`.
    weight: Vec<f32>,
    bias: Option<Vec<f32>>,
}

impl CausalConv {
    pub(super) fn build(
        part: &mut Part<'_>,
        name: &str,
        (channels, kernel): (u32, u32),
        has_bias: bool,
    ) -> Result<Self, Error> {
        let weight = part.values(&format!("{name}.weight"), &[channels, 1, kernel])?;
        let bias = has_bias.then(|| part.values(&format!("{name}.bias"), &[channels]));
        Ok(Self { kernel: to_usize(kernel), weight, bias: bias.transpose()? })
    }

    pub(super) fn weights(&self) -> impl Iterator<Item = &[f32]> {
        [self.weight.as_slice()].into_iter().chain(self.bias.as_deref())
    }

    /// Returns the output for a token, and moves its inputs into the window.
    pub(super) fn advance(
        &self,
        window: &mut [f32],
        inputs: impl IntoIterator<Item = f32>,
    ) -> Vec<f32> {
        let before = (self.kernel - 1).max(1);
        let channels = window.chunks_exact_mut(before).zip(self.weight.chunks_exact(self.kernel));
        let biases = self.bias.iter().flatten().copied().chain(std::iter::repeat(0.0));
        let mut out = Vec::with_capacity(channels.len());
        for (((window, weight), input), bias) in channels.zip(inputs).zip(biases) {
            let inputs = window.iter().copied().chain([input]);
            let sum: f32 = inputs.zip(weight).map(|(x, weight)| x * weight).sum();
            window.rotate_left(1);
            if let Some(last) = window.last_mut() {
                *last = input;
            }
            out.push(sum + bias);
        }
        out
    }
}

#[cfg(test)]
#[expect(clippy::float_cmp, reason = "sums of few digits")]
mod tests {
    use super::*;

    #[test]
    fn a_window_slides_over_the_tokens() {
        let conv =
            CausalConv { kernel: 3, weight: vec![1.0, 10.0, 100.0, 2.0, 0.0, 0.5], bias: None };
        let mut window = [0.0; 4];
        assert_eq!(conv.advance(&mut window, [1.0, 4.0]), [100.0, 2.0]);
        assert_eq!(conv.advance(&mut window, [2.0, 6.0]), [210.0, 3.0]);
        assert_eq!(conv.advance(&mut window, [3.0, 8.0]), [321.0, 12.0]);
        assert_eq!(window, [2.0, 3.0, 6.0, 8.0]);
        let biased = CausalConv { bias: Some(vec![0.5, -1.0]), ..conv };
        assert_eq!(biased.advance(&mut window, [0.0, 0.0]), [32.5, 11.0]);
    }
}
