//! The forward pass of a decoder over one step of the cache.
//!
//! Embeddings, norms and matrix products are candle's on the CPU, in f32; attention is that of
//! [`CandleStep`], and recurrences are computed token by token on states in the cache.
mod attention;
mod conv;
mod delta;
mod fingerprint;
mod layer;
mod mamba2;
mod mlp;
mod part;
mod recurrent;
mod short_conv;

use std::path::Path;

use candle_core::{CpuStorage, Device, Module, Storage, Tensor};
use candle_nn::Linear;
use kv::Step;
use kv::backend::Backend;
use kv::engine::{Batch, Logits, Model, ModelError};
use kv_candle::CandleStep;

use crate::config::ModelConfig;
use crate::error::{Error, InFile, WeightError};
use crate::gguf;
use crate::num::{to_f32, to_u32};
use crate::rope::Rope;
use crate::weights::Weights;
use layer::{Layer, Mixer};

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
        let norm = weights.take(config.architecture.weights().last_norm, &[hidden])?;
        let norm = if config.architecture.norms_less_one() { norm.affine(1.0, 1.0)? } else { norm };
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
            let h = self.norm(x.clone(), layer.mixer_norm.as_ref())?;
            let h = match &layer.mixer {
                Mixer::Attention(of) => self.attention(step, (index, of), &h, &rotation, tap)?,
                Mixer::Delta(of) => of.forward(step, index, &h)?,
                Mixer::ShortConv(of) => of.forward(step, index, &h)?,
                Mixer::Mamba2(of) => of.forward(step, index, &h)?,
            };
            x = self.add(&x, self.norm(h, layer.mixer_out_norm.as_ref())?)?;
            let h = self.norm(x.clone(), layer.mlp_norm.as_ref())?;
            let h = layer.mlp.forward(&h)?;
            x = self.add(&x, self.norm(h, layer.mlp_out_norm.as_ref())?)?;
        }
        Ok(x)
    }

    /// Computes the logits of rows of [`Self::hidden`]: `[rows, vocab]`.
    pub(crate) fn logits(&self, hidden: &Tensor) -> candle_core::Result<Tensor> {
        let logits = self.head.forward(&self.norm(hidden.clone(), Some(&self.norm))?)?;
        times(logits, 1.0 / self.config.multipliers.logits)
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
mod gguf_tests;
#[cfg(test)]
mod long_tests;
#[cfg(test)]
mod recorded;
#[cfg(test)]
mod recorded_tests;
#[cfg(test)]
mod recurrent_tests;
#[cfg(test)]
mod restored_tests;
#[cfg(test)]
mod rows_tests;
