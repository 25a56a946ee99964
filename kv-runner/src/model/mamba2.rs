//! The state space model of Mamba 2 (Dao and Gu, "Transformers are SSMs", 2024), in its recurrent
//! form.
use candle_core::{Module, Tensor};
use candle_nn::Linear;
use kv::backend::Backend;
use kv_candle::CandleStep;

use super::conv::CausalConv;
use super::part::Part;
use super::recurrent::{State, inverse_rms, row, run, silu, softplus, values};
use crate::config::{MambaConfig, ModelConfig};
use crate::error::Error;
use crate::num::{to_f32, to_usize};

/// The weights of a state space model.
#[derive(Debug)]
pub(super) struct Mamba2 {
    of: MambaConfig,
    /// The gate of the output, the channels of the convolution, and the time steps.
    pub(super) input: [Linear; 3],
    pub(super) conv: CausalConv,
    /// Logarithms of decays, biases of time steps, factors of inputs, and the norm.
    pub(super) decay_log: Vec<f32>,
    pub(super) step_bias: Vec<f32>,
    pub(super) skip: Vec<f32>,
    pub(super) norm: Vec<f32>,
    pub(super) out: Linear,
    norm_eps: f32,
}

impl Mamba2 {
    pub(super) fn build(
        config: &ModelConfig,
        part: &mut Part<'_>,
        of: MambaConfig,
    ) -> Result<Self, Error> {
        let hidden = config.hidden;
        let MambaConfig { heads, kernel, width, channels, has_bias, has_conv_bias, .. } = of;
        let widths = (1, [width, channels, heads]);
        Ok(Self {
            of,
            input: part.split("mamba.in_proj", widths, hidden, has_bias)?,
            conv: CausalConv::build(part, "mamba.conv1d", (channels, kernel), has_conv_bias)?,
            decay_log: part.values("mamba.A_log", &[heads])?,
            step_bias: part.values("mamba.dt_bias", &[heads])?,
            skip: part.values("mamba.D", &[heads])?,
            norm: part.values("mamba.norm.weight", &[width])?,
            out: part.linear("mamba.out_proj", hidden, width, has_bias)?,
            norm_eps: to_f32(config.norm_eps),
        })
    }

    pub(super) fn forward<B: Backend>(
        &self,
        step: &CandleStep<'_, B>,
        layer: u16,
        h: &Tensor,
    ) -> Result<Tensor, Error> {
        let project = |linear: &Linear| values(&linear.forward(h)?);
        let [gates, mixed, steps] = &self.input;
        let inputs = [project(gates)?, project(mixed)?, project(steps)?];
        let width = to_usize(self.of.width);
        let mixed = run(step, layer, 2, width, |at, state, out| {
            self.advance(&inputs, at, state, out);
        })?;
        Ok(self.out.forward(&mixed)?)
    }

    /// Computes one token.
    fn advance(
        &self,
        [gates, mixed, steps]: &[Vec<f32>; 3],
        at: usize,
        state: &mut State<'_>,
        out: &mut [f32],
    ) {
        let MambaConfig { heads, head_dim, groups, state: values, width, .. } = self.of;
        let MambaConfig { group_width, channels, .. } = self.of;
        let [head_dim, values, width] = [head_dim, values, width].map(to_usize);
        let inputs = row(mixed, at, to_usize(channels)).iter().copied();
        let mut mixed = self.conv.advance(state.window, inputs);
        for x in &mut mixed {
            *x = silu(*x);
        }
        let (x, rest) = mixed.split_at(width);
        let (b, c) = rest.split_at(to_usize(group_width));
        let shared = to_usize(heads / groups);
        let groups_of_heads = b.chunks_exact(values).zip(c.chunks_exact(values));
        let groups_of_heads = groups_of_heads.flat_map(|pair| std::iter::repeat_n(pair, shared));
        let steps = row(steps, at, to_usize(heads)).iter().zip(&self.step_bias);
        let steps = steps.map(|(step, bias)| softplus(step + bias));
        let constants = steps.zip(&self.decay_log).zip(&self.skip);
        let matrices = state.matrix.chunks_exact_mut(head_dim * values);
        let all = matrices.zip(x.chunks_exact(head_dim)).zip(groups_of_heads).zip(constants);
        for ((((matrix, x), (b, c)), ((step, log), skip)), out) in
            all.zip(out.chunks_exact_mut(head_dim))
        {
            let decay = (-log.exp() * step).exp();
            for ((row, x), out) in matrix.chunks_exact_mut(values).zip(x).zip(out) {
                let mut sum = 0.0;
                for ((kept, b), c) in row.iter_mut().zip(b).zip(c) {
                    *kept = *kept * decay + step * b * x;
                    sum += *kept * c;
                }
                *out = sum + x * skip;
            }
        }
        let gates = row(gates, at, width);
        out.iter_mut().zip(gates).for_each(|(x, gate)| *x *= silu(*gate));
        let group = (width / to_usize(groups)).max(1);
        for (out, weights) in out.chunks_mut(group).zip(self.norm.chunks(group)) {
            let scale = inverse_rms(out, self.norm_eps);
            out.iter_mut().zip(weights).for_each(|(x, weight)| *x *= scale * weight);
        }
    }
}
