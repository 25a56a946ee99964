//! The Llama of candle-transformers over a cache of kv.
//!
//! Adapted from `src/models/llama.rs` of candle-transformers 0.11.1, copyright of the candle
//! authors, MIT OR Apache-2.0. The configuration, the embedding, norms and MLPs are candle's. What
//! differs is in [`Rope::of`], [`Attention::forward`] and [`Llama::forward`].
#![expect(
    clippy::as_conversions,
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    reason = "numbers of a configuration are small"
)]
#![expect(clippy::many_single_char_names, clippy::needless_pass_by_value, reason = "as in candle")]
use std::f32::consts::PI;

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::{Embedding, Module, VarBuilder, embedding};
use candle_transformers::models::llama::{Config, Llama3RopeConfig, Llama3RopeType};
use candle_transformers::models::with_tracing::{Linear, RmsNorm, linear_no_bias as linear};
use kv_candle::CandleStep;
use kv_candle::kv::AttentionOptions;

/// Cosines and sines of the rotation, a row for each position.
#[derive(Debug, Clone)]
pub(crate) struct Rope {
    cos: Tensor,
    sin: Tensor,
}

fn frequencies(config: &Config) -> Vec<f32> {
    let head_dim = config.hidden_size / config.num_attention_heads;
    let frequency = |i| 1.0 / config.rope_theta.powf(i as f32 / head_dim as f32);
    (0..head_dim).step_by(2).map(frequency).collect()
}

/// Lowers the frequencies of long waves, as Llama 3.1 does for contexts longer than it was first
/// trained with.
fn scaled(frequency: f32, scaling: &Llama3RopeConfig) -> f32 {
    let context = scaling.original_max_position_embeddings as f32;
    let wavelength = 2.0 * PI / frequency;
    if wavelength < context / scaling.high_freq_factor {
        frequency
    } else if wavelength > context / scaling.low_freq_factor {
        frequency / scaling.factor
    } else {
        let (low, high) = (scaling.low_freq_factor, scaling.high_freq_factor);
        let smooth = (context / wavelength - low) / (high - low);
        (1.0 - smooth) * frequency / scaling.factor + smooth * frequency
    }
}

impl Rope {
    pub(crate) fn new(dtype: DType, config: &Config, device: &Device) -> Result<Self> {
        let mut frequencies = frequencies(config);
        if let Some(scaling) = &config.rope_scaling
            && matches!(scaling.rope_type, Llama3RopeType::Llama3)
        {
            for frequency in &mut frequencies {
                *frequency = scaled(*frequency, scaling);
            }
        }
        let frequencies = Tensor::new(frequencies, device)?.unsqueeze(0)?;
        let positions = Tensor::arange(0, config.max_position_embeddings as u32, device)?;
        let angles = positions.to_dtype(DType::F32)?.unsqueeze(1)?.matmul(&frequencies)?;
        Ok(Self { cos: angles.cos()?.to_dtype(dtype)?, sin: angles.sin()?.to_dtype(dtype)? })
    }

    /// Returns the rows of a step's tokens, which are at different positions.
    fn of(&self, step: &CandleStep<'_>) -> Result<Self> {
        let [cos, sin] = [&self.cos, &self.sin].map(|x| x.index_select(step.positions(), 0));
        Ok(Self { cos: cos?, sin: sin? })
    }

    /// Turns `[1, tokens, heads, head_dim]`.
    fn apply(&self, x: &Tensor) -> Result<Tensor> {
        candle_nn::rotary_emb::rope_thd(x, &self.cos, &self.sin)
    }
}

#[derive(Debug, Clone)]
struct Attention {
    q_proj: Linear,
    k_proj: Linear,
    v_proj: Linear,
    o_proj: Linear,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
}

impl Attention {
    /// Takes and returns `[1, tokens, hidden]`. There is no mask, no `cat` of K and V, and no
    /// repeated head: the cache has what came before, and [`CandleStep::attend`] does the rest.
    fn forward(
        &self,
        x: &Tensor,
        layer: usize,
        rope: &Rope,
        step: &CandleStep<'_>,
    ) -> Result<Tensor> {
        let (batch, tokens, hidden) = x.dims3()?;
        let rows = |x: Tensor, heads: usize| x.reshape((batch, tokens, heads, self.head_dim));
        let q = rows(self.q_proj.forward(x)?, self.heads)?;
        let k = rows(self.k_proj.forward(x)?, self.kv_heads)?;
        let v = rows(self.v_proj.forward(x)?, self.kv_heads)?.squeeze(0)?;
        let (q, k) = (rope.apply(&q)?.squeeze(0)?, rope.apply(&k)?.squeeze(0)?);
        let options = AttentionOptions::causal(1.0 / (self.head_dim as f32).sqrt());
        let y = step.attend(layer, &q, &k, &v, &options)?;
        self.o_proj.forward(&y.reshape((batch, tokens, hidden))?)
    }

    fn load(vb: VarBuilder<'_>, config: &Config) -> Result<Self> {
        let (size, head_dim) =
            (config.hidden_size, config.hidden_size / config.num_attention_heads);
        let kv_size = head_dim * config.num_key_value_heads;
        Ok(Self {
            q_proj: linear(size, size, vb.pp("q_proj"))?,
            k_proj: linear(size, kv_size, vb.pp("k_proj"))?,
            v_proj: linear(size, kv_size, vb.pp("v_proj"))?,
            o_proj: linear(size, size, vb.pp("o_proj"))?,
            heads: config.num_attention_heads,
            kv_heads: config.num_key_value_heads,
            head_dim,
        })
    }
}

#[derive(Debug, Clone)]
struct Mlp {
    gate: Linear,
    up: Linear,
    down: Linear,
}

impl Mlp {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let gate = candle_nn::ops::silu(&self.gate.forward(x)?)?;
        self.down.forward(&(gate * self.up.forward(x)?)?)
    }

    fn load(vb: VarBuilder<'_>, config: &Config) -> Result<Self> {
        let (size, inner) = (config.hidden_size, config.intermediate_size);
        Ok(Self {
            gate: linear(size, inner, vb.pp("gate_proj"))?,
            up: linear(size, inner, vb.pp("up_proj"))?,
            down: linear(inner, size, vb.pp("down_proj"))?,
        })
    }
}

#[derive(Debug, Clone)]
struct Block {
    input_norm: RmsNorm,
    attention: Attention,
    mlp_norm: RmsNorm,
    mlp: Mlp,
}

impl Block {
    fn forward(
        &self,
        x: &Tensor,
        layer: usize,
        rope: &Rope,
        step: &CandleStep<'_>,
    ) -> Result<Tensor> {
        let x = (self.attention.forward(&self.input_norm.forward(x)?, layer, rope, step)? + x)?;
        self.mlp.forward(&self.mlp_norm.forward(&x)?)? + x
    }

    fn load(vb: VarBuilder<'_>, config: &Config) -> Result<Self> {
        let norm = |name: &str| RmsNorm::new(config.hidden_size, config.rms_norm_eps, vb.pp(name));
        Ok(Self {
            input_norm: norm("input_layernorm")?,
            attention: Attention::load(vb.pp("self_attn"), config)?,
            mlp_norm: norm("post_attention_layernorm")?,
            mlp: Mlp::load(vb.pp("mlp"), config)?,
        })
    }
}

/// A Llama. One serves any number of conversations, which are sequences of the cache.
#[derive(Debug, Clone)]
pub(crate) struct Llama {
    embedding: Embedding,
    blocks: Vec<Block>,
    norm: RmsNorm,
    head: Linear,
    rope: Rope,
}

impl Llama {
    /// Takes the token ids of a step, `[1, tokens]`: those of the first sequence, then those of the
    /// next. Returns the logits after the last token of each sequence, `[sequences, vocab]`.
    pub(crate) fn forward(&self, ids: &Tensor, step: &CandleStep<'_>) -> Result<Tensor> {
        let rope = self.rope.of(step)?;
        let mut x = self.embedding.forward(ids)?;
        for (layer, block) in self.blocks.iter().enumerate() {
            x = block.forward(&x, layer, &rope, step)?;
        }
        let last = self.norm.forward(&x)?.index_select(step.last_rows(), 1)?.squeeze(0)?;
        self.head.forward(&last)?.to_dtype(DType::F32)
    }

    pub(crate) fn load(vb: VarBuilder<'_>, config: &Config) -> Result<Self> {
        let (vocab, size) = (config.vocab_size, config.hidden_size);
        let embedding = embedding(vocab, size, vb.pp("model.embed_tokens"))?;
        let head = if config.tie_word_embeddings {
            Linear::from_weights(embedding.embeddings().clone(), None)
        } else {
            linear(size, vocab, vb.pp("lm_head"))?
        };
        let block = |layer| Block::load(vb.pp(format!("model.layers.{layer}")), config);
        Ok(Self {
            embedding,
            blocks: (0..config.num_hidden_layers).map(block).collect::<Result<_>>()?,
            norm: RmsNorm::new(size, config.rms_norm_eps, vb.pp("model.norm"))?,
            head,
            rope: Rope::new(vb.dtype(), config, vb.device())?,
        })
    }
}
