//! The weights of one layer, under the names of each architecture.
use candle_core::{Module, Tensor};
use candle_nn::Linear;

use crate::config::{LayerKind, ModelConfig, QkNorm};
use crate::error::{Error, WeightError};
use crate::num::to_usize;
use crate::weights::Weights;

/// One layer; a norm that its architecture lacks is `None`.
#[derive(Debug)]
pub(super) struct Layer {
    pub(super) kind: LayerKind,
    /// Norms before and after attention.
    pub(super) attention_norm: Option<Tensor>,
    pub(super) attention_out_norm: Option<Tensor>,
    pub(super) q: Linear,
    pub(super) k: Linear,
    pub(super) v: Linear,
    pub(super) q_norm: Option<Tensor>,
    pub(super) k_norm: Option<Tensor>,
    pub(super) out: Linear,
    /// Norms before and after the MLP.
    pub(super) mlp_norm: Option<Tensor>,
    pub(super) mlp_out_norm: Option<Tensor>,
    gate: Linear,
    up: Linear,
    down: Linear,
}

impl Layer {
    pub(super) fn build(
        config: &ModelConfig,
        weights: &mut Weights,
        kind: LayerKind,
        layer: u16,
    ) -> Result<Self, Error> {
        let head_dim = config.head_dim;
        let width = |heads: u32| {
            heads.checked_mul(head_dim).ok_or(WeightError::TooWide { heads, head_dim })
        };
        let (q_width, kv_width) = (width(config.heads)?, width(config.kv_heads)?);
        let (hidden, inner) = (config.hidden, config.intermediate);
        let mut part = Part { weights, layer };
        let architecture = config.architecture;
        let (before, after) = (!architecture.norms_outputs(), architecture.norms_outputs());
        let attention_norm = part.norm_if(before, "input_layernorm", hidden)?;
        // The same name for a norm at another place.
        let attention_out_norm = part.norm_if(after, "post_attention_layernorm", hidden)?;
        let mlp_norm = part.norm_if(before, "post_attention_layernorm", hidden)?;
        let mlp_out_norm = part.norm_if(after, "post_feedforward_layernorm", hidden)?;
        let [q, k, v] = if architecture.fuses_projections() {
            part.fused("self_attn.qkv_proj", [q_width, kv_width, kv_width], hidden)?
        } else {
            let has_bias = config.biases.qkv;
            [
                part.linear("self_attn.q_proj", q_width, hidden, has_bias)?,
                part.linear("self_attn.k_proj", kv_width, hidden, has_bias)?,
                part.linear("self_attn.v_proj", kv_width, hidden, has_bias)?,
            ]
        };
        let [gate, up] = if architecture.fuses_projections() {
            part.fused("mlp.gate_up_proj", [inner, inner], hidden)?
        } else {
            [
                part.linear("mlp.gate_proj", inner, hidden, config.biases.mlp)?,
                part.linear("mlp.up_proj", inner, hidden, config.biases.mlp)?,
            ]
        };
        let qk_norm = architecture.qk_norm();
        let norm_width =
            |width| if qk_norm == Some(QkNorm::Head) { config.head_dim } else { width };
        Ok(Self {
            kind,
            attention_norm,
            attention_out_norm,
            q,
            k,
            v,
            q_norm: part.norm_if(qk_norm.is_some(), "self_attn.q_norm", norm_width(q_width))?,
            k_norm: part.norm_if(qk_norm.is_some(), "self_attn.k_norm", norm_width(kv_width))?,
            out: part.linear("self_attn.o_proj", hidden, q_width, config.biases.out)?,
            mlp_norm,
            mlp_out_norm,
            gate,
            up,
            down: part.linear("mlp.down_proj", hidden, inner, config.biases.mlp)?,
        })
    }

    /// Computes the gated MLP.
    pub(super) fn mlp(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let gate = self.gate.forward(x)?.silu()?;
        self.down.forward(&gate.mul(&self.up.forward(x)?)?)
    }
}

/// The weights of a model, and the prefix of one layer.
struct Part<'w> {
    weights: &'w mut Weights,
    layer: u16,
}

impl Part<'_> {
    fn name(&self, part: &str) -> String {
        format!("model.layers.{}.{part}", self.layer)
    }

    fn norm_if(&mut self, is_there: bool, part: &str, width: u32) -> Result<Option<Tensor>, Error> {
        if !is_there {
            return Ok(None);
        }
        let name = self.name(&format!("{part}.weight"));
        Ok(Some(self.weights.take(&name, &[width])?))
    }

    fn linear(
        &mut self,
        part: &str,
        out: u32,
        inputs: u32,
        has_bias: bool,
    ) -> Result<Linear, Error> {
        let weight = self.weights.take(&self.name(&format!("{part}.weight")), &[out, inputs])?;
        let bias = self.name(&format!("{part}.bias"));
        // A bias in the file is used, whatever the configuration says.
        let has_bias = has_bias || self.weights.contains(&bias);
        let bias = if has_bias { Some(self.weights.take(&bias, &[out])?) } else { None };
        Ok(Linear::new(weight, bias))
    }

    /// Splits a matrix into projections that are stacked in it.
    fn fused<const N: usize>(
        &mut self,
        part: &str,
        widths: [u32; N],
        inputs: u32,
    ) -> Result<[Linear; N], Error> {
        let all = widths.iter().try_fold(0_u32, |sum, width| sum.checked_add(*width));
        let all = all.ok_or(WeightError::FusedTooWide { rows: widths.to_vec() })?;
        let weight = self.weights.take(&self.name(&format!("{part}.weight")), &[all, inputs])?;
        let mut begin = 0_usize;
        let mut linears = Vec::with_capacity(N);
        for width in widths.map(to_usize) {
            let rows = weight.narrow(0, begin, width)?.copy()?;
            linears.push(Linear::new(rows, None));
            begin += width;
        }
        Ok(linears.try_into().unwrap_or_else(|_| unreachable!("one projection for each width")))
    }
}
