//! Attention: its weights, and its output for the tokens of a step.
use candle_core::{Device, Module, Tensor};
use candle_nn::Linear;
use kv::AttentionOptions;
use kv::backend::Backend;
use kv_candle::CandleStep;

use super::part::Part;
use super::{Decoder, Tap, Tapped, with_values};
use crate::config::{LayerKind, ModelConfig, QkNorm};
use crate::error::{Error, WeightError};
use crate::num::{to_f32, to_usize};
use crate::rope::Rotation;

/// The weights of attention; a norm that the architecture lacks is `None`.
#[derive(Debug)]
pub(super) struct Attention {
    pub(super) kind: LayerKind,
    pub(super) q: Linear,
    pub(super) k: Linear,
    pub(super) v: Linear,
    /// The gate of the output.
    gate: Option<Linear>,
    pub(super) q_norm: Option<Tensor>,
    pub(super) k_norm: Option<Tensor>,
    out: Linear,
}

impl Attention {
    pub(super) fn build(
        config: &ModelConfig,
        part: &mut Part<'_>,
        kind: LayerKind,
    ) -> Result<Self, Error> {
        let ModelConfig { head_dim, heads, hidden, architecture, .. } = *config;
        let width = |heads: u32| {
            heads.checked_mul(head_dim).ok_or(WeightError::TooWide { heads, head_dim })
        };
        let (q_width, kv_width) = (width(heads)?, width(config.kv_heads)?);
        let has_bias = config.biases.qkv;
        let mut gate = None;
        let [q, k, v] = if architecture.fuses_projections() {
            let widths = (1, [q_width, kv_width, kv_width]);
            part.split("self_attn.qkv_proj", widths, hidden, false)?
        } else {
            let q = if architecture.gates_attention() {
                let widths = (heads, [head_dim; 2]);
                let [q, of_q] = part.split("self_attn.q_proj", widths, hidden, has_bias)?;
                gate = Some(of_q);
                q
            } else {
                part.linear("self_attn.q_proj", q_width, hidden, has_bias)?
            };
            let k = part.linear("self_attn.k_proj", kv_width, hidden, has_bias)?;
            [q, k, part.linear("self_attn.v_proj", kv_width, hidden, has_bias)?]
        };
        let qk_norm = architecture.qk_norm();
        let norm_width = |width| if qk_norm == Some(QkNorm::Head) { head_dim } else { width };
        let names = architecture.weights();
        Ok(Self {
            kind,
            q,
            k,
            v,
            gate,
            q_norm: part.norm_if(qk_norm.is_some(), names.q_norm, norm_width(q_width))?,
            k_norm: part.norm_if(qk_norm.is_some(), names.k_norm, norm_width(kv_width))?,
            out: part.linear(names.attention_out, hidden, q_width, config.biases.out)?,
        })
    }

    /// Returns the projections that rows in the cache depend on.
    pub(super) fn projections(&self) -> impl Iterator<Item = &Linear> {
        [&self.q, &self.k, &self.v].into_iter().chain(&self.gate)
    }
}

impl Decoder {
    /// Normalises rows of Q or K, if the architecture does.
    fn qk_norm(&self, x: Tensor, weight: Option<&Tensor>) -> candle_core::Result<Tensor> {
        if self.config.architecture.qk_norm() != Some(QkNorm::Head) {
            return self.norm(x, weight);
        }
        let heads = x.reshape(((), to_usize(self.config.head_dim)))?;
        self.norm(heads, weight)?.reshape(x.shape())
    }

    /// Computes the attention of one layer.
    pub(super) fn attention<B: Backend>(
        &self,
        step: &CandleStep<'_, B>,
        (index, layer): (u16, &Attention),
        h: &Tensor,
        rotation: &Rotation,
        tap: &mut Tap<'_>,
    ) -> Result<Tensor, Error> {
        let ModelConfig { heads, kv_heads, .. } = self.config;
        let (q, k, v) = (layer.q.forward(h)?, layer.k.forward(h)?, layer.v.forward(h)?);
        let q = self.qk_norm(q, layer.q_norm.as_ref())?;
        let k = self.qk_norm(k, layer.k_norm.as_ref())?;
        let (q, k) = if layer.kind.rotates {
            (self.rotate(rotation, &q, heads)?, self.rotate(rotation, &k, kv_heads)?)
        } else {
            (self.heads(&q, heads)?, self.heads(&k, kv_heads)?)
        };
        let v = self.heads(&v, kv_heads)?;
        with_values(&q, |q| {
            with_values(&k, |k| with_values(&v, |v| tap(&Tapped { layer: index, q, k, v })))
        })?;
        let mut options = AttentionOptions::causal(to_f32(self.config.attention_scale()));
        if let Some(window) = layer.kind.window_left {
            options = options.with_window_left(window);
        }
        let mut out = step.attend(index.into(), &q, &k, &v, &options)?;
        if let Some(gate) = &layer.gate {
            out = out.mul(&candle_nn::ops::sigmoid(&gate.forward(h)?)?)?;
        }
        Ok(layer.out.forward(&out)?)
    }

    /// Rotates rows of Q or K: `[tokens, heads, head_dim]`.
    fn rotate(&self, by: &Rotation, rows: &Tensor, heads: u32) -> candle_core::Result<Tensor> {
        let rotated = with_values(rows, |rows| self.rope.rotate(by, rows, to_usize(heads)));
        self.heads(&Tensor::from_vec(rotated, rows.shape(), &Device::Cpu)?, heads)
    }

    /// Views rows as `[tokens, heads, head_dim]`.
    fn heads(&self, rows: &Tensor, heads: u32) -> candle_core::Result<Tensor> {
        rows.reshape(((), to_usize(heads), to_usize(self.config.head_dim)))
    }
}
