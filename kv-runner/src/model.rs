//! The forward pass of a decoder over one step of the cache.
//!
//! Embeddings, norms and matrix products are candle's on the CPU, in f32. Everything that depends
//! on the past goes through the cache: K and V are written to it and attention reads it.
mod fingerprint;
mod layer;

use std::path::Path;

use candle_core::{CpuStorage, Device, Module, Storage, Tensor};
use candle_nn::Linear;
use kv::backend::Backend;
use kv::backend::{Queue, Readback};
use kv::{
    AttentionOptions, DType, QkvFormat, SequenceId, Step, StepInput, TensorView, TensorViewMut,
};

use crate::config::{ModelConfig, QkNorm};
use crate::error::{Error, InFile};
use crate::gguf;
use crate::num::{to_f32, to_u32, to_u64, to_usize};
use crate::rope::{Rope, Rotation};
use crate::weights::{WeightError, Weights};
use layer::Layer;

/// The part of one sequence that a step computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Chunk {
    /// The sequence.
    pub sequence: SequenceId,
    /// Tokens it brings.
    pub tokens: u32,
    /// Of these, the last ones that are draft tokens.
    pub drafts: u32,
    /// Last tokens after which logits are needed.
    pub logits: u32,
}

/// One forward pass: all tokens of the step, one sequence after another.
#[derive(Debug, Default)]
#[non_exhaustive]
pub struct Batch {
    /// The tokens of all chunks.
    pub tokens: Vec<u32>,
    /// One for each sequence.
    pub chunks: Vec<Chunk>,
    /// Draft tokens of one sequence, on their way into [`Self::tokens`].
    pub(crate) drafts: Vec<u32>,
}

impl Batch {
    /// The batch as inputs of a step.
    pub(crate) fn inputs(&self) -> Vec<StepInput<'_>> {
        let mut rest = self.tokens.as_slice();
        let mut inputs = Vec::with_capacity(self.chunks.len());
        for chunk in &self.chunks {
            let (tokens, behind) = rest.split_at(to_usize(chunk.tokens).min(rest.len()));
            inputs.push(StepInput::tokens(chunk.sequence, tokens).with_drafts(chunk.drafts));
            rest = behind;
        }
        inputs
    }
}

/// What turns tokens into logits: a [`Decoder`], or a model of the caller's own.
pub trait Model<B: Backend> {
    /// Writes K and V of every layer and returns rows of logits: those of the first chunk in the
    /// order of its tokens, then those of the next.
    ///
    /// # Errors
    /// Whatever fails in the model; [`Error::Model`] takes errors of any type.
    fn forward(&self, step: &mut Step<'_, B>, batch: &Batch) -> Result<Vec<Vec<f32>>, Error>;
}

/// What one layer hands to attention for the tokens of a step: `[tokens, heads, head_dim]`, Q and K
/// after their rotary embedding.
#[derive(Debug)]
pub(crate) struct Tapped<'a> {
    pub(crate) layer: u16,
    pub(crate) q: &'a [f32],
    pub(crate) k: &'a [f32],
    pub(crate) v: &'a [f32],
}

/// Sees every layer's rows on their way.
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
    /// GGUF file; of a model that is split, the first part.
    ///
    /// # Errors
    /// [`Error::File`] with what is wrong: [`Error::Io`], [`Error::Config`], [`Error::Weights`],
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

    /// Returns the shape and the constants of the model.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Normalises rows, where there are weights for it.
    fn norm(&self, x: Tensor, weight: Option<&Tensor>) -> candle_core::Result<Tensor> {
        match weight {
            Some(weight) => candle_nn::ops::rms_norm(&x, weight, to_f32(self.config.norm_eps)),
            None => Ok(x),
        }
    }

    /// Adds what attention or the MLP gave to its input.
    fn add(&self, x: &Tensor, part: Tensor) -> candle_core::Result<Tensor> {
        x.add(&times(part, self.config.multipliers.residual)?)
    }
}

/// Buffers one step's layers share.
#[derive(Debug)]
struct Scratch<Buf> {
    rotation: Rotation,
    q: Vec<f32>,
    k: Vec<f32>,
    /// Outputs of attention, on a device that cannot write them to the host.
    out: Option<Buf>,
}

impl<B: Backend> Model<B> for Decoder {
    fn forward(&self, step: &mut Step<'_, B>, batch: &Batch) -> Result<Vec<Vec<f32>>, Error> {
        let hidden = self.hidden(step, &batch.tokens, &mut |_| Ok(()))?;
        let mut end = 0_u32;
        let mut rows = Vec::new();
        for chunk in &batch.chunks {
            end = end.saturating_add(chunk.tokens);
            rows.extend(end.saturating_sub(chunk.logits)..end);
        }
        if rows.is_empty() {
            return Ok(Vec::new());
        }
        let rows = Tensor::from_slice(&rows, rows.len(), &Device::Cpu)?;
        Ok(self.logits(&hidden.index_select(&rows, 0)?)?.to_vec2()?)
    }
}

impl Decoder {
    /// Runs all layers over the tokens of a step; a row of `[tokens, hidden]` for each of them.
    ///
    /// `tap` sees what every layer hands to attention.
    pub(crate) fn hidden<B: Backend>(
        &self,
        step: &mut Step<'_, B>,
        tokens: &[u32],
        tap: &mut Tap<'_>,
    ) -> Result<Tensor, Error> {
        let mut scratch =
            Scratch { rotation: Rotation::default(), q: Vec::new(), k: Vec::new(), out: None };
        self.rope.fill(step.positions(), &mut scratch.rotation);
        let ids = Tensor::from_slice(tokens, tokens.len(), &Device::Cpu)?;
        let embedded = self.embedding.index_select(&ids, 0)?;
        let mut x = times(embedded, self.config.multipliers.embedding)?;
        for (layer, index) in self.layers.iter().zip(0..) {
            let h = self.norm(x.clone(), layer.attention_norm.as_ref())?;
            let h = self.attention(step, index, layer, &h, &mut scratch, tap)?;
            x = self.add(&x, self.norm(h, layer.attention_out_norm.as_ref())?)?;
            let h = self.norm(x.clone(), layer.mlp_norm.as_ref())?;
            let h = layer.mlp(&h)?;
            x = self.add(&x, self.norm(h, layer.mlp_out_norm.as_ref())?)?;
        }
        Ok(x)
    }

    /// Logits of rows that [`Self::hidden`] gave: `[rows, vocab]`.
    pub(crate) fn logits(&self, hidden: &Tensor) -> candle_core::Result<Tensor> {
        let logits = self.head.forward(&self.norm(hidden.clone(), Some(&self.norm))?)?;
        times(logits, 1.0 / self.config.multipliers.logits)
    }

    /// Normalises rows of Q or K, where the architecture does.
    fn qk_norm(&self, x: Tensor, weight: Option<&Tensor>) -> candle_core::Result<Tensor> {
        if self.config.architecture.qk_norm() != Some(QkNorm::Head) {
            return self.norm(x, weight);
        }
        let heads = x.reshape(((), to_usize(self.config.head_dim)))?;
        self.norm(heads, weight)?.reshape(x.shape())
    }

    fn attention<B: Backend>(
        &self,
        step: &mut Step<'_, B>,
        index: u16,
        layer: &Layer,
        h: &Tensor,
        scratch: &mut Scratch<B::Buffer>,
        tap: &mut Tap<'_>,
    ) -> Result<Tensor, Error> {
        let ModelConfig { heads, kv_heads, head_dim, .. } = self.config;
        let tokens = to_u32(h.dim(0)?);
        let (q, k, v) = (layer.q.forward(h)?, layer.k.forward(h)?, layer.v.forward(h)?);
        let q = self.qk_norm(q, layer.q_norm.as_ref())?;
        let k = self.qk_norm(k, layer.k_norm.as_ref())?;
        let Scratch { rotation, q: q_turned, k: k_turned, out: buffer } = scratch;
        let turn = |rows: &[f32], heads, turned: &mut Vec<f32>| {
            if layer.kind.rotates {
                self.rope.rotate(rotation, rows, to_usize(heads), turned);
            } else {
                turned.clear();
                turned.extend_from_slice(rows);
            }
        };
        with_values(&q, |q| turn(q, heads, q_turned));
        with_values(&k, |k| turn(k, kv_heads, k_turned));
        with_values(&v, |v| {
            let dims = [tokens, kv_heads, head_dim];
            let k = TensorView::host::<f32>(k_turned, &dims);
            step.write(index, k, TensorView::host::<f32>(v, &dims), QkvFormat::Thd)?;
            tap(&Tapped { layer: index, q: q_turned, k: k_turned, v })
        })?;
        let mut options = AttentionOptions::causal(to_f32(self.config.attention_scale()));
        if let Some(window) = layer.kind.window_left {
            options = options.with_window_left(window);
        }
        let dims = [tokens, heads, head_dim];
        let mut out = vec![0.0_f32; q_turned.len()];
        let q = TensorView::host::<f32>(q_turned, &dims);
        if step.cache().backend().capabilities().host_outputs {
            step.attend(index, q, TensorViewMut::host(&mut out, &dims), &options)?;
        } else {
            attend_on_device(step, index, (q, &dims), &options, (buffer, &mut out))?;
        }
        let out = Tensor::from_vec(out, q_dims(h, heads, head_dim)?, &Device::Cpu)?;
        Ok(layer.out.forward(&out)?)
    }
}

/// Attends into memory of the device, kept in `buffer` from layer to layer, and fetches the result.
fn attend_on_device<B: Backend>(
    step: &mut Step<'_, B>,
    layer: u16,
    (q, dims): (TensorView<'_, B::Buffer>, &[u32]),
    options: &AttentionOptions<'_>,
    (buffer, out): (&mut Option<B::Buffer>, &mut [f32]),
) -> Result<(), Error> {
    let bytes = to_u64(size_of_val(out));
    let buffer = match buffer {
        Some(buffer) => buffer,
        None => buffer.insert(step.cache().backend().alloc(bytes)?),
    };
    step.attend(layer, q, TensorViewMut::device(DType::F32, buffer, 0, dims), options)?;
    let queue = step.queue_mut();
    let readback = queue.download(buffer, 0, bytes)?;
    queue.flush()?;
    bytemuck::cast_slice_mut(out).copy_from_slice(&readback.wait()?);
    Ok(())
}

/// The product with a constant, which is nothing to compute for 1.
fn times(x: Tensor, factor: f64) -> candle_core::Result<Tensor> {
    if factor.total_cmp(&1.0).is_eq() { Ok(x) } else { x.affine(factor, 0.0) }
}

fn q_dims(h: &Tensor, heads: u32, head_dim: u32) -> candle_core::Result<(usize, usize)> {
    Ok((h.dim(0)?, to_usize(heads).saturating_mul(to_usize(head_dim))))
}

/// Lends the values of a tensor, without a copy.
///
/// # Panics
/// If the tensor is not a dense one of f32 in host memory, as all of a decoder are.
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
mod recorded;
#[cfg(test)]
mod recorded_tests;
#[cfg(test)]
mod tests {
    use super::*;
    use kv::cpu::{CpuBackend, CpuOptions};
    use kv::{CacheSpec, KvCache, StartOptions};

    #[test]
    fn outputs_on_the_device_are_those_on_the_host() {
        let spec = CacheSpec::builder().layers(2).kv_heads(1).head_dim(4).paged(4, 4);
        let backend = CpuBackend::open(CpuOptions::default().with_threads(1)).unwrap();
        let mut cache = KvCache::new(backend, spec.build().unwrap()).unwrap();
        let id = SequenceId(1);
        cache.start(id, &[], StartOptions::default()).unwrap();
        let mut step = cache.begin_step(&[StepInput::count(id, 3)]).unwrap();
        let rows: Vec<f32> = (0_u8..24).map(|n| f32::from(n) / 7.0).collect();
        let options = AttentionOptions::causal(0.5);
        let mut buffer = None;
        for layer in 0..2 {
            let kv = TensorView::host(&rows[usize::from(layer)..][..12], &[3, 1, 4]);
            step.write(layer, kv, kv, QkvFormat::Thd).unwrap();
            let dims = [3, 2, 4];
            let q = TensorView::host(&rows, &dims);
            let (mut host, mut device) = ([0.0_f32; 24], [1.0_f32; 24]);
            step.attend(layer, q, TensorViewMut::host(&mut host, &dims), &options).unwrap();
            let out = (&mut buffer, &mut device[..]);
            attend_on_device(&mut step, layer, (q, &dims), &options, out).unwrap();
            let bits = |values: [f32; 24]| values.map(f32::to_bits);
            assert_eq!(bits(device), bits(host), "layer {layer}");
        }
    }
}
