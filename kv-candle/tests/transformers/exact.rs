//! The models without their numeric details: every operation in f64, over a whole text, no cache.
//!
//! candle cannot do this itself: its norms refuse f64. Only the tolerance comes from here.
use std::collections::HashMap;

use candle_core::{D, DType, Device, Result, Tensor};

use crate::run::Logits;

const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const DIM: usize = 8;

/// Weights of a decoder with norms before attention and MLP.
pub(crate) struct Exact {
    tensors: HashMap<String, Tensor>,
    layers: u16,
}

impl Exact {
    pub(crate) fn new(tensors: &HashMap<String, Tensor>, layers: u16) -> Self {
        let wide = |(name, tensor): (&String, &Tensor)| {
            (name.clone(), tensor.to_dtype(DType::F64).unwrap())
        };
        Self { tensors: tensors.iter().map(wide).collect(), layers }
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
                ["gate_proj", "up_proj"].map(|part| self.linear(&h, &format!("{mlp}.{part}")));
            let (gate, up) = (gate?, up?);
            x = (x + self.linear(&(gate.silu()? * up)?, &format!("{mlp}.down_proj"))?)?;
        }
        let x = self.norm(&x, "model.norm")?;
        let tied = self.tensors.get("lm_head.weight").unwrap_or(embedding);
        x.matmul(&tied.t()?)
    }

    fn attention(&self, x: &Tensor, name: &str) -> Result<Tensor> {
        let len = x.dim(0)?;
        let heads = |part: &str, count: usize| -> Result<Tensor> {
            let rows = self.linear(x, &format!("{name}.{part}"))?;
            rows.reshape((len, count, DIM))?.transpose(0, 1)?.contiguous()
        };
        let q = rope(&heads("q_proj", HEADS)?)?;
        let k = rope(&heads("k_proj", KV_HEADS)?)?;
        let v = heads("v_proj", KV_HEADS)?;
        let shared = |x: &Tensor| -> Result<Tensor> {
            let x = x.unsqueeze(1)?.expand((KV_HEADS, HEADS / KV_HEADS, len, DIM))?;
            x.reshape((HEADS, len, DIM))
        };
        let hidden = |at: usize| if at % len <= at / len { 0.0 } else { f64::NEG_INFINITY };
        let mask: Vec<_> = (0..len * len).map(hidden).collect();
        let scores = (q.matmul(&shared(&k)?.t()?)? / 8.0_f64.sqrt())?;
        let scores = scores.broadcast_add(&Tensor::from_vec(mask, (len, len), &Device::Cpu)?)?;
        let out = candle_nn::ops::softmax(&scores, D::Minus1)?.matmul(&shared(&v)?)?;
        let out = out.transpose(0, 1)?.reshape((len, HEADS * DIM))?;
        self.linear(&out, &format!("{name}.o_proj"))
    }

    fn linear(&self, x: &Tensor, name: &str) -> Result<Tensor> {
        x.matmul(&self.get(&format!("{name}.weight")).t()?)
    }

    fn norm(&self, x: &Tensor, name: &str) -> Result<Tensor> {
        let weight = self.get(&format!("{name}.weight"));
        let squares = x.sqr()?.mean_keepdim(D::Minus1)?;
        x.broadcast_div(&(squares + 1e-6)?.sqrt()?)?.broadcast_mul(weight)
    }

    fn get(&self, name: &str) -> &Tensor {
        self.tensors.get(name).unwrap()
    }
}

/// Turns the two halves of every head.
fn rope(x: &Tensor) -> Result<Tensor> {
    const HALF: usize = DIM / 2;
    let len = x.dim(1)?;
    let angle = |at: usize| {
        let [position, i, all] =
            [at / HALF, 2 * (at % HALF), DIM].map(|n| f32::from(u16::try_from(n).unwrap()));
        // The tables of the model come from products in f32.
        f64::from(position * (1.0 / 10_000.0_f32.powf(i / all)))
    };
    let angles: Vec<_> = (0..len * HALF).map(angle).collect();
    let angles = Tensor::from_vec(angles, (1, len, HALF), &Device::Cpu)?;
    let (cos, sin) = (angles.cos()?, angles.sin()?);
    let (a, b) = (x.narrow(2, 0, HALF)?, x.narrow(2, HALF, HALF)?);
    let first = (a.broadcast_mul(&cos)? - b.broadcast_mul(&sin)?)?;
    let second = (b.broadcast_mul(&cos)? + a.broadcast_mul(&sin)?)?;
    Tensor::cat(&[first, second], 2)
}
