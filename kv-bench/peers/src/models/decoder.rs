//! A decoder on candle, with random weights. Attention is a parameter: everything else is the same
//! code for every contender.
use candle_core::{Device, Result, Tensor};
use candle_nn::{Linear, Module, RmsNorm};

use super::case::Shape;

const EPSILON: f64 = 1e-5;
const ROPE_THETA: f32 = 10_000.0;

/// The weights of a model, in f32.
pub(crate) struct Decoder {
    shape: Shape,
    embedding: Tensor,
    layers: Vec<Layer>,
    norm: RmsNorm,
    head: Linear,
    /// Cosines and sines of every position, `[positions, head_dim / 2]`.
    rope: [Tensor; 2],
}

struct Layer {
    norms: [RmsNorm; 2],
    q: Linear,
    k: Linear,
    v: Linear,
    o: Linear,
    gate: Linear,
    up: Linear,
    down: Linear,
}

/// Makes `count` pseudo-random values between -`size` and `size`.
pub(crate) fn random(count: usize, size: f32, seed: u32) -> Vec<f32> {
    let mut state = seed;
    let next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let [_, _, low, high] = state.to_le_bytes();
        f32::from(i16::from_le_bytes([low, high])) / 32768.0 * size
    };
    std::iter::repeat_with(next).take(count).collect()
}

impl Decoder {
    /// Makes a model for sequences of `positions` tokens.
    pub(crate) fn random(shape: Shape, positions: usize) -> Result<Self> {
        let mut seed = 0;
        let mut weights = |rows: usize, columns: usize| {
            seed += 1;
            // Products have a variance near 1, as after training.
            let size = (3.0 / f32::from(u16::try_from(columns).unwrap_or(u16::MAX))).sqrt();
            Tensor::from_vec(random(rows * columns, size, seed), (rows, columns), &Device::Cpu)
        };
        let Shape { hidden, q_heads, kv_heads, head_dim, mlp, vocabulary, .. } = shape;
        let norm = || {
            let ones = Tensor::from_vec(vec![1_f32; hidden], hidden, &Device::Cpu);
            ones.map(|ones| RmsNorm::new(ones, EPSILON))
        };
        let embedding = weights(vocabulary, hidden)?;
        let mut linear = |rows, columns| weights(rows, columns).map(|rows| Linear::new(rows, None));
        let layer = |_| -> Result<Layer> {
            Ok(Layer {
                norms: [norm()?, norm()?],
                q: linear(q_heads * head_dim, hidden)?,
                k: linear(kv_heads * head_dim, hidden)?,
                v: linear(kv_heads * head_dim, hidden)?,
                o: linear(hidden, q_heads * head_dim)?,
                gate: linear(mlp, hidden)?,
                up: linear(mlp, hidden)?,
                down: linear(hidden, mlp)?,
            })
        };
        let layers = (0..shape.layers).map(layer).collect::<Result<_>>()?;
        let count = |number: usize| f32::from(u16::try_from(number).unwrap_or(u16::MAX));
        let frequencies: Vec<f32> = (0..head_dim)
            .step_by(2)
            .map(|at| ROPE_THETA.powf(-count(at) / count(head_dim)))
            .collect();
        let angles: Vec<f32> = (0..positions)
            .flat_map(|position| frequencies.iter().map(move |by| count(position) * by))
            .collect();
        let angles = Tensor::from_vec(angles, (positions, head_dim / 2), &Device::Cpu)?;
        let head = Linear::new(embedding.clone(), None);
        let rope = [angles.cos()?, angles.sin()?];
        Ok(Self { shape, embedding, layers, norm: norm()?, head, rope })
    }

    /// Computes the logits after one new token of each sequence, `[t, vocabulary]`. `positions` has
    /// one for every token, or one for all.
    ///
    /// `attend` takes layer, q, k and v, `[t, heads, head_dim]`, and returns
    /// `[t, q_heads * head_dim]`.
    pub(crate) fn forward(
        &self,
        tokens: &Tensor,
        positions: &Tensor,
        mut attend: impl FnMut(usize, &Tensor, &Tensor, &Tensor) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let count = tokens.elem_count();
        let Shape { q_heads, kv_heads, head_dim, .. } = self.shape;
        let [cos, sin] = &self.rope;
        let (cos, sin) = (cos.index_select(positions, 0)?, sin.index_select(positions, 0)?);
        // With one position for all, tokens are a batch; otherwise a sequence.
        let (batch, len) = if positions.elem_count() == 1 { (count, 1) } else { (1, count) };
        let rope = |rows: Tensor, heads: usize| -> Result<Tensor> {
            let rows = rows.reshape((batch, len, heads, head_dim))?;
            candle_nn::rotary_emb::rope_thd(&rows, &cos, &sin)?.reshape((count, heads, head_dim))
        };
        let mut hidden = self.embedding.index_select(tokens, 0)?;
        for (at, layer) in self.layers.iter().enumerate() {
            let input = layer.norms[0].forward(&hidden)?;
            let q = rope(layer.q.forward(&input)?, q_heads)?;
            let k = rope(layer.k.forward(&input)?, kv_heads)?;
            let v = layer.v.forward(&input)?.reshape((count, kv_heads, head_dim))?;
            hidden = (layer.o.forward(&attend(at, &q, &k, &v)?)? + hidden)?;
            let input = layer.norms[1].forward(&hidden)?;
            let gated = (layer.gate.forward(&input)?.silu()? * layer.up.forward(&input)?)?;
            hidden = (layer.down.forward(&gated)? + hidden)?;
        }
        self.head.forward(&self.norm.forward(&hidden)?)
    }
}
