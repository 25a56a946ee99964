//! A gated convolution (LFM2).
use candle_core::{Module, Tensor};
use candle_nn::Linear;
use kv::backend::Backend;
use kv_candle::CandleStep;

use super::conv::CausalConv;
use super::part::Part;
use super::recurrent::{row, run, values};
use crate::config::{ConvConfig, ModelConfig};
use crate::error::Error;
use crate::num::to_usize;

/// The weights of a gated convolution.
#[derive(Debug)]
pub(super) struct ShortConv {
    /// The gate of the input, the gate of the output, and the input.
    pub(super) input: [Linear; 3],
    pub(super) conv: CausalConv,
    pub(super) out: Linear,
    channels: usize,
}

impl ShortConv {
    pub(super) fn build(
        config: &ModelConfig,
        part: &mut Part<'_>,
        of: ConvConfig,
    ) -> Result<Self, Error> {
        let ConvConfig { channels, kernel, has_bias } = of;
        let hidden = config.hidden;
        Ok(Self {
            input: part.split("conv.in_proj", (1, [channels; 3]), hidden, has_bias)?,
            conv: CausalConv::build(part, "conv.conv", (channels, kernel), has_bias)?,
            out: part.linear("conv.out_proj", hidden, channels, has_bias)?,
            channels: to_usize(channels),
        })
    }

    pub(super) fn forward<B: Backend>(
        &self,
        step: &CandleStep<'_, B>,
        layer: u16,
        h: &Tensor,
    ) -> Result<Tensor, Error> {
        let [gate_in, gate_out, x] = &self.input;
        let gated = values(&gate_in.forward(h)?.mul(&x.forward(h)?)?)?;
        let width = self.channels;
        let mixed = run(step, layer, 1, width, |at, state, out| {
            let inputs = row(&gated, at, width).iter().copied();
            out.copy_from_slice(&self.conv.advance(state.window, inputs));
        })?;
        Ok(self.out.forward(&gate_out.forward(h)?.mul(&mixed)?)?)
    }
}
