//! The models without their numeric details: every operation in f64, over a whole text, no cache.
//!
//! candle cannot do this itself: its norms refuse f64. Only the tolerance comes from here.
use std::collections::HashMap;

use candle_core::{D, DType, Device, Result, Tensor};

use crate::run::Logits;

const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const DIM: usize = 8;

/// Weights of a decoder with norms before attention and MLP; fused projections, biases and norms of
/// heads are found by their names.
pub(crate) struct Exact {
    tensors: HashMap<String, Tensor>,
    /// Values of a head that RoPE turns.
    rotated: usize,
    /// Tokens that a query sees, its own included.
    window: usize,
    layers: u16,
}

impl Exact {
    pub(crate) fn new(
        tensors: &HashMap<String, Tensor>,
        rotated: usize,
        window: Option<usize>,
        layers: u16,
    ) -> Self {
        let wide = |(name, tensor): (&String, &Tensor)| {
            (name.clone(), tensor.to_dtype(DType::F64).unwrap())
        };
        Self {
            tensors: tensors.iter().map(wide).collect(),
            rotated,
            window: window.unwrap_or(usize::MAX),
            layers,
        }
    }

    /// Returns the logits of every token of a text.
    pub(crate) fn logits(&self, text: &[u32]) -> Vec<Logits> {
        self.forward(text).unwrap().to_vec2().unwrap()
    }

    fn forward(&self, text: &[u32]) -> Result<Tensor> {
        let embedding = self.get("model.embed_tokens.weight");
        let mut x = embedding.index_select(&Tensor::new(text, &Device::Cpu)?, 0)?;
        for layer in 0..self.layers {
            let layer = format!("model.layers.{layer}");
            let h = self.norm(&x, &format!("{layer}.input_layernorm"))?;
            x = (x + self.attention(&h, &format!("{layer}.self_attn"))?)?;
            let h = self.norm(&x, &format!("{layer}.post_attention_layernorm"))?;
            let mlp = format!("{layer}.mlp");
            let [gate, up] =
                self.split(&h, &mlp, ["gate_proj", "up_proj"], "gate_up_proj", [48; 2])?;
            x = (x + self.linear(&(gate.silu()? * up)?, &format!("{mlp}.down_proj"))?)?;
        }
        let x = self.norm(&x, "model.norm")?;
        let tied = self.tensors.get("lm_head.weight").unwrap_or(embedding);
        x.matmul(&tied.t()?)
    }

    fn attention(&self, x: &Tensor, name: &str) -> Result<Tensor> {
        let len = x.dim(0)?;
        let parts = ["q_proj", "k_proj", "v_proj"];
        let sizes = [HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM];
        let [q, k, v] = self.split(x, name, parts, "qkv_proj", sizes)?;
        let heads = |x: Tensor, count: usize| -> Result<Tensor> {
            x.reshape((len, count, DIM))?.transpose(0, 1)?.contiguous()
        };
        let (q, k, v) = (heads(q, HEADS)?, heads(k, KV_HEADS)?, heads(v, KV_HEADS)?);
        let q = self.rope(&self.norm(&q, &format!("{name}.q_norm"))?)?;
        let k = self.rope(&self.norm(&k, &format!("{name}.k_norm"))?)?;
        let shared = |x: &Tensor| -> Result<Tensor> {
            let x = x.unsqueeze(1)?.expand((KV_HEADS, HEADS / KV_HEADS, len, DIM))?;
            x.reshape((HEADS, len, DIM))
        };
        let hidden = |at: usize| match (at / len).checked_sub(at % len) {
            Some(before) if before < self.window => 0.0,
            _ => f64::NEG_INFINITY,
        };
        let mask: Vec<_> = (0..len * len).map(hidden).collect();
        let scores = (q.matmul(&shared(&k)?.t()?)? / 8.0_f64.sqrt())?;
        let scores = scores.broadcast_add(&Tensor::from_vec(mask, (len, len), &Device::Cpu)?)?;
        let out = candle_nn::ops::softmax(&scores, D::Minus1)?.matmul(&shared(&v)?)?;
        let out = out.transpose(0, 1)?.reshape((len, HEADS * DIM))?;
        self.linear(&out, &format!("{name}.o_proj"))
    }

    /// Turns the two halves of the first values of every head.
    fn rope(&self, x: &Tensor) -> Result<Tensor> {
        let (len, half) = (x.dim(1)?, self.rotated / 2);
        let angle = |at: usize| {
            let [position, i, all] = [at / half, 2 * (at % half), self.rotated]
                .map(|n| f32::from(u16::try_from(n).unwrap()));
            // The tables of the models come from products in f32.
            f64::from(position * (1.0 / 10_000.0_f32.powf(i / all)))
        };
        let angles: Vec<_> = (0..len * half).map(angle).collect();
        let angles = Tensor::from_vec(angles, (1, len, half), &Device::Cpu)?;
        let (cos, sin) = (angles.cos()?, angles.sin()?);
        let part = |from, count| x.narrow(2, from, count);
        let (a, b, rest) = (part(0, half)?, part(half, half)?, part(2 * half, DIM - 2 * half)?);
        let first = (a.broadcast_mul(&cos)? - b.broadcast_mul(&sin)?)?;
        let second = (b.broadcast_mul(&cos)? + a.broadcast_mul(&sin)?)?;
        Tensor::cat(&[first, second, rest], 2)
    }

    /// Applies projections that may be one.
    fn split<const N: usize>(
        &self,
        x: &Tensor,
        name: &str,
        parts: [&str; N],
        fused: &str,
        sizes: [usize; N],
    ) -> Result<[Tensor; N]> {
        let fused = format!("{name}.{fused}");
        if !self.tensors.contains_key(&format!("{fused}.weight")) {
            return Ok(parts.map(|part| self.linear(x, &format!("{name}.{part}")).unwrap()));
        }
        let all = self.linear(x, &fused)?;
        let mut from = 0;
        Ok(sizes.map(|size| {
            from += size;
            all.narrow(1, from - size, size).unwrap()
        }))
    }

    fn linear(&self, x: &Tensor, name: &str) -> Result<Tensor> {
        let out = x.matmul(&self.get(&format!("{name}.weight")).t()?)?;
        match self.tensors.get(&format!("{name}.bias")) {
            Some(bias) => out.broadcast_add(bias),
            None => Ok(out),
        }
    }

    /// Applies a norm; `x` as it is if the model has none of this name.
    fn norm(&self, x: &Tensor, name: &str) -> Result<Tensor> {
        let Some(weight) = self.tensors.get(&format!("{name}.weight")) else {
            return Ok(x.clone());
        };
        let squares = x.sqr()?.mean_keepdim(D::Minus1)?;
        x.broadcast_div(&(squares + 1e-6)?.sqrt()?)?.broadcast_mul(weight)
    }

    fn get(&self, name: &str) -> &Tensor {
        self.tensors.get(name).unwrap()
    }
}
