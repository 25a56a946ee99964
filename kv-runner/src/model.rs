//! The forward pass of a decoder over one step of the cache.
//!
//! Embeddings, norms and matrix products are candle's on the CPU, in f32; attention is that of
//! [`CandleStep`].
mod fingerprint;
mod layer;

use std::path::Path;

use candle_core::{CpuStorage, Device, Module, Storage, Tensor};
use candle_nn::Linear;
use kv::backend::Backend;
use kv::engine::{Batch, Logits, Model, ModelError};
use kv::{AttentionOptions, Step};
use kv_candle::CandleStep;

use crate::config::{ModelConfig, QkNorm};
use crate::error::{Error, InFile, WeightError};
use crate::gguf;
use crate::num::{to_f32, to_u32, to_usize};
use crate::rope::{Rope, Rotation};
use crate::weights::Weights;
use layer::Layer;

/// Inputs of one layer's attention for the tokens of a step: `[tokens, heads, head_dim]`, Q and K
/// after their rotary embedding.
#[derive(Debug)]
pub(crate) struct Tapped<'a> {
    pub(crate) layer: u16,
    pub(crate) q: &'a [f32],
    pub(crate) k: &'a [f32],
    pub(crate) v: &'a [f32],
}

/// A callback that gets the attention inputs of every layer.
pub(crate) type Tap<'t> = dyn FnMut(&Tapped<'_>) -> Result<(), Error> + 't;

/// A decoder with its weights in memory, in f32.
#[derive(Debug)]
pub struct Decoder {
    config: ModelConfig,
    embedding: Tensor,
    layers: Vec<Layer>,
    norm: Tensor,
    head: Linear,
    rope: Rope,
}

impl Decoder {
    /// Reads a directory with `config.json` and `model.safetensors` (or its index and shards), or a
    /// GGUF file; of a split model, the first part.
    ///
    /// # Errors
    /// [`Error::File`] with the cause: [`Error::Io`], [`Error::Config`], [`Error::Weights`],
    /// [`Error::Gguf`], [`Error::Json`], [`Error::Text`], [`Error::Tensor`].
    pub fn read(path: &Path) -> Result<Self, Error> {
        let (config, weights) = if path.is_file() {
            gguf::read(path)?
        } else {
            (ModelConfig::read(path)?, Weights::read(path)?)
        };
        Self::build(config, weights).in_file(path)
    }

    fn build(config: ModelConfig, mut weights: Weights) -> Result<Self, Error> {
        let mut rope = Rope::new(&config.rope);
        if weights.contains(gguf::ROPE_FACTORS) {
            let factors =
                weights.take(gguf::ROPE_FACTORS, &[to_u32(rope.num_pairs())])?.to_vec1::<f32>()?;
            if !factors.iter().all(|factor| factor.is_finite() && *factor > 0.0) {
                return Err(WeightError::Factor { name: gguf::ROPE_FACTORS }.into());
            }
            rope.divide_frequencies(&factors);
        }
        let (hidden, vocab) = (config.hidden, config.vocab);
        let embedding = weights.take("model.embed_tokens.weight", &[vocab, hidden])?;
        let head = if config.tied {
            embedding.clone()
        } else {
            weights.take("lm_head.weight", &[vocab, hidden])?
        };
        let kinds = config.layer_kinds.iter().zip(0..);
        let layers = kinds
            .map(|(kind, layer)| Layer::build(&config, &mut weights, *kind, layer))
            .collect::<Result<_, _>>()?;
        let norm = weights.take("model.norm.weight", &[hidden])?;
        Ok(Self { config, embedding, layers, norm, head: Linear::new(head, None), rope })
    }

    /// Returns the configuration of the model.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Normalises rows, if there is a weight.
    fn norm(&self, x: Tensor, weight: Option<&Tensor>) -> candle_core::Result<Tensor> {
        match weight {
            Some(weight) => candle_nn::ops::rms_norm(&x, weight, to_f32(self.config.norm_eps)),
            None => Ok(x),
        }
    }

    /// Adds the output of attention or the MLP to its input.
    fn add(&self, x: &Tensor, part: Tensor) -> candle_core::Result<Tensor> {
        x.add(&times(part, self.config.multipliers.residual)?)
    }
}

/// A decoder is only read, so that a reference runs for any number of engines.
impl<B: Backend> Model<B> for &Decoder {
    fn forward(&mut self, step: &mut Step<'_, B>, batch: &Batch) -> Result<Logits, ModelError> {
        let step = CandleStep::over_mut(step, &Device::Cpu).map_err(Error::from)?;
        Ok(self.rows(&step, batch)?)
    }
}

impl Decoder {
    /// Computes the rows of logits of a batch.
    fn rows<B: Backend>(&self, step: &CandleStep<'_, B>, batch: &Batch) -> Result<Logits, Error> {
        let hidden = self.hidden(step, &batch.tokens, &mut |_| Ok(()))?;
        let rows: Vec<u32> = batch.logit_rows().collect();
        if rows.is_empty() {
            return Ok(Logits::default());
        }
        let rows = Tensor::from_slice(&rows, rows.len(), &Device::Cpu)?;
        let logits = self.logits(&hidden.index_select(&rows, 0)?)?;
        Ok(Logits::new(logits.flatten_all()?.to_vec1()?, self.config.vocab))
    }
}

impl Decoder {
    /// Runs all layers over the tokens of a step; returns `[tokens, hidden]`.
    ///
    /// `tap` gets the attention inputs of every layer.
    pub(crate) fn hidden<B: Backend>(
        &self,
        step: &CandleStep<'_, B>,
        tokens: &[u32],
        tap: &mut Tap<'_>,
    ) -> Result<Tensor, Error> {
        let rotation = step.with_step(|step| self.rope.rotation(step.positions()));
        let ids = Tensor::from_slice(tokens, tokens.len(), &Device::Cpu)?;
        let embedded = self.embedding.index_select(&ids, 0)?;
        let mut x = times(embedded, self.config.multipliers.embedding)?;
        for (layer, index) in self.layers.iter().zip(0..) {
            let h = self.norm(x.clone(), layer.attention_norm.as_ref())?;
            let h = self.attention(step, (index, layer), &h, &rotation, tap)?;
            x = self.add(&x, self.norm(h, layer.attention_out_norm.as_ref())?)?;
            let h = self.norm(x.clone(), layer.mlp_norm.as_ref())?;
            let h = layer.mlp(&h)?;
            x = self.add(&x, self.norm(h, layer.mlp_out_norm.as_ref())?)?;
        }
        Ok(x)
    }

    /// Computes the logits of rows of [`Self::hidden`]: `[rows, vocab]`.
    pub(crate) fn logits(&self, hidden: &Tensor) -> candle_core::Result<Tensor> {
        let logits = self.head.forward(&self.norm(hidden.clone(), Some(&self.norm))?)?;
        times(logits, 1.0 / self.config.multipliers.logits)
    }

    /// Normalises rows of Q or K, if the architecture does.
    fn qk_norm(&self, x: Tensor, weight: Option<&Tensor>) -> candle_core::Result<Tensor> {
        if self.config.architecture.qk_norm() != Some(QkNorm::Head) {
            return self.norm(x, weight);
        }
        let heads = x.reshape(((), to_usize(self.config.head_dim)))?;
        self.norm(heads, weight)?.reshape(x.shape())
    }

    fn attention<B: Backend>(
        &self,
        step: &CandleStep<'_, B>,
        (index, layer): (u16, &Layer),
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
        Ok(layer.out.forward(&step.attend(index.into(), &q, &k, &v, &options)?)?)
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

/// Multiplies by a constant; 1 needs no work.
fn times(x: Tensor, factor: f64) -> candle_core::Result<Tensor> {
    if factor.total_cmp(&1.0).is_eq() { Ok(x) } else { x.affine(factor, 0.0) }
}

/// Calls `read` with the values of a tensor, without a copy.
///
/// # Panics
/// If the tensor is not a dense f32 tensor in host memory, as all tensors of a decoder are.
fn with_values<R>(tensor: &Tensor, read: impl FnOnce(&[f32]) -> R) -> R {
    let (storage, layout) = tensor.storage_and_layout();
    let Storage::Cpu(CpuStorage::F32(values)) = &*storage else {
        unreachable!("a decoder computes in f32 in host memory");
    };
    let range = layout.contiguous_offsets().map(|(begin, end)| begin..end);
    match range.and_then(|range| values.get(range)) {
        Some(values) => read(values),
        None => unreachable!("weights and projections are dense"),
    }
}

#[cfg(test)]
mod beams_tests;
#[cfg(test)]
mod recorded;
#[cfg(test)]
mod recorded_tests;
#[cfg(test)]
mod rows_tests;
