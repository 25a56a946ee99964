//! Candle's own cache, and attention as candle-transformers writes it.
use candle_core::{Device, Result, Tensor, bail};
use candle_nn::attention::{AttnMask, flash_attn};
use candle_nn::kv_cache::ConcatKvCache;
use candle_nn::ops::softmax_last_dim;

use super::case::{Case, Shape};
use super::decoder::{Decoder, random};

/// The way in which a step attends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Way {
    /// As in `llama`: K and V are repeated for the q heads of a group, then two products and a
    /// softmax.
    Matmul,
    /// As in `qwen3`: K and V are transposed for `candle_nn::attention::flash_attn`.
    Flash,
}

/// A cache for each layer, `[batch, kv_heads, context, head_dim]`, in f32. Both ways append to the
/// cache by the same concatenation, so they share it: after a step, its tokens are dropped.
pub(crate) struct Candle {
    layers: Vec<ConcatKvCache>,
    batch: usize,
    context: usize,
    scale: f32,
}

impl Candle {
    /// Makes a cache with random K and V.
    pub(crate) fn filled(case: &Case) -> Result<Self> {
        let Case { shape, batch, context, .. } = *case;
        let Shape { layers, kv_heads, head_dim, .. } = shape;
        let rows = |seed: u32| {
            let count = batch * kv_heads * context * head_dim;
            let values = random(count, 1.7, seed);
            Tensor::from_vec(values, (batch, kv_heads, context, head_dim), &Device::Cpu)
        };
        // Values of a head are around a mean of its own. Otherwise outputs of long contexts would
        // be near zero, and wrong ones next to the model's other values too.
        let means = random(kv_heads * head_dim, 1.7, 3);
        let means = Tensor::from_vec(means, (1, kv_heads, 1, head_dim), &Device::Cpu)?;
        let (k, v) = (rows(1)?, rows(2)?.broadcast_add(&means)?);
        let layer = |at: usize| {
            // Every layer has the rows in another order.
            let shift = i32::try_from(at + 1).unwrap_or(1);
            let mut cache = ConcatKvCache::new(2);
            cache.append(&k.roll(shift, 2)?, &v.roll(-shift, 2)?)?;
            Ok(cache)
        };
        let layers = (0..layers).map(layer).collect::<Result<_>>()?;
        let dim = f32::from(u16::try_from(head_dim).unwrap_or(u16::MAX));
        Ok(Self { layers, batch, context, scale: dim.sqrt().recip() })
    }

    /// Returns K and V of a layer.
    pub(crate) fn rows(&self, layer: usize) -> Result<[&Tensor; 2]> {
        let cache = self.layers.get(layer);
        match cache.and_then(|cache| cache.k().zip(cache.v())) {
            Some((k, v)) => Ok([k, v]),
            None => bail!("candle's cache has no layer {layer}"),
        }
    }

    /// Returns the bytes of all K and V.
    pub(crate) fn bytes(&self) -> u64 {
        let tensors = self.layers.iter().flat_map(|cache| [cache.k(), cache.v()]).flatten();
        let bytes = |tensor: &Tensor| tensor.elem_count() * tensor.dtype().size_in_bytes();
        tensors.map(|tensor| u64::try_from(bytes(tensor)).unwrap_or(u64::MAX)).sum()
    }

    /// Computes a step's logits.
    pub(crate) fn step(&mut self, decoder: &Decoder, tokens: &Tensor, way: Way) -> Result<Tensor> {
        let position = u32::try_from(self.context).unwrap_or(u32::MAX);
        let positions = Tensor::new(&[position], &Device::Cpu)?;
        decoder.forward(tokens, &positions, |layer, q, k, v| {
            let [q, k, v] = [q.unsqueeze(2)?, k.unsqueeze(2)?, v.unsqueeze(2)?];
            let Some(cache) = self.layers.get_mut(layer) else { bail!("no layer {layer}") };
            let (k, v) = cache.append(&k, &v)?;
            let out = match way {
                Way::Matmul => matmul(&q, k, v, self.scale)?,
                Way::Flash => flash(&q, &k, &v, self.scale, self.context)?,
            };
            out.reshape((self.batch, ()))
        })
    }

    /// Drops the tokens of a step. The remaining rows are not copied: the next concatenation reads
    /// them as fast as before.
    pub(crate) fn rewind(&mut self) -> Result<()> {
        for cache in &mut self.layers {
            if let Some(k) = cache.k_mut() {
                *k = k.narrow(2, 0, self.context)?;
            }
            if let Some(v) = cache.v_mut() {
                *v = v.narrow(2, 0, self.context)?;
            }
        }
        Ok(())
    }
}

/// Attends as candle-transformers' `llama`.
fn matmul(q: &Tensor, k: Tensor, v: Tensor, scale: f32) -> Result<Tensor> {
    let group = q.dim(1)? / k.dim(1)?;
    let (k, v) = (repeat(k, group)?, repeat(v, group)?);
    let scores = (q.matmul(&k.t()?)? * f64::from(scale))?;
    softmax_last_dim(&scores)?.matmul(&v.contiguous()?)?.transpose(1, 2)
}

/// Repeats every head, as `candle_transformers::utils::repeat_kv`.
fn repeat(rows: Tensor, times: usize) -> Result<Tensor> {
    if times == 1 {
        return Ok(rows);
    }
    let (batch, heads, tokens, dim) = rows.dims4()?;
    Tensor::cat(&vec![&rows; times], 2)?.reshape((batch, heads * times, tokens, dim))
}

/// Attends as candle-transformers' `qwen3` on a CPU.
fn flash(q: &Tensor, k: &Tensor, v: &Tensor, scale: f32, context: usize) -> Result<Tensor> {
    let [q, k, v] = [q, k, v].map(|rows| rows.transpose(1, 2)?.contiguous());
    let mask = AttnMask::causal_with_offset(context);
    flash_attn::<f32>(&q?, &k?, &v?, scale, mask, None, None)?.transpose(1, 2)
}
