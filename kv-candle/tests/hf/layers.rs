//! Layers that several families have.
use candle_core::{DType, Result, Tensor};
use candle_nn::ops::rms_norm;
use candle_nn::rotary_emb::rope_thd;
use kv_candle::CandleStep;
use kv_candle::kv::AttentionOptions;

use crate::recorded::Recorded;

impl Recorded {
    pub(crate) fn weight(&self, name: &str) -> &Tensor {
        self.weights.get(name).expect(name)
    }

    /// Returns the values of a tensor.
    pub(crate) fn values(&self, name: &str) -> Result<Vec<f32>> {
        self.weight(name).flatten_all()?.to_vec1()
    }

    pub(crate) fn linear(&self, name: &str, x: &Tensor) -> Result<Tensor> {
        let y = x.matmul(&self.weight(&format!("{name}.weight")).t()?)?;
        match self.weights.get(&format!("{name}.bias")) {
            Some(bias) => y.broadcast_add(bias),
            None => Ok(y),
        }
    }

    /// Computes the norm of a family whose configuration has its `epsilon`.
    pub(crate) fn norm(&self, name: &str, epsilon: &str, x: &Tensor) -> Result<Tensor> {
        rms_norm(x, self.weight(&format!("{name}.weight")), self.field(epsilon))
    }

    /// Returns a row of an embedding for each token.
    pub(crate) fn embed(&self, name: &str, tokens: &[u32]) -> Result<Tensor> {
        let embedding = self.weight(name);
        embedding.index_select(&Tensor::new(tokens, embedding.device())?, 0)
    }

    /// Computes a network with a gate, whose values are multiplied by `factor` first.
    pub(crate) fn swiglu(&self, name: &str, factor: f64, x: &Tensor) -> Result<Tensor> {
        let gate = (self.linear(&format!("{name}.gate_proj"), x)? * factor)?.silu()?;
        let up = self.linear(&format!("{name}.up_proj"), x)?;
        self.linear(&format!("{name}.down_proj"), &(gate * up)?)
    }

    /// Attends in a layer of the cache. Keys are multiplied by `key_factor`; with `angles`, the
    /// first values of every head are rotated.
    pub(crate) fn attend(
        &self,
        name: &str,
        (step, layer): (&CandleStep<'_>, usize),
        (angles, key_factor): (Option<&(Tensor, Tensor)>, f64),
        x: &Tensor,
    ) -> Result<Tensor> {
        let dim: usize = self.field("head_dim");
        let heads = |part: &str| {
            self.linear(&format!("{name}.{part}_proj"), x)?.reshape((x.dim(0)?, (), dim))
        };
        let (q, k, v) = (heads("q")?, (heads("k")? * key_factor)?, heads("v")?);
        let (q, k) = match angles {
            Some(angles) => (rotate(&q, angles)?, rotate(&k, angles)?),
            None => (q, k),
        };
        let scale = self.field::<f32>("head_dim").sqrt().recip();
        let out = step.attend(layer, &q, &k, &v, &AttentionOptions::causal(scale))?;
        self.linear(&format!("{name}.o_proj"), &out)
    }

    /// Returns cosines and sines for positions, each with a value for every recorded frequency.
    pub(crate) fn angles(&self, positions: &Tensor) -> Result<(Tensor, Tensor)> {
        let positions = positions.to_dtype(DType::F64)?.unsqueeze(1)?;
        let per_position = self.weight("inv_freq").to_dtype(DType::F64)?.unsqueeze(0)?;
        let angles = positions.matmul(&per_position)?;
        Ok((angles.cos()?.to_dtype(DType::F32)?, angles.sin()?.to_dtype(DType::F32)?))
    }
}

/// Rotates as many of the first values of every head as there are angles for.
fn rotate(heads: &Tensor, (cos, sin): &(Tensor, Tensor)) -> Result<Tensor> {
    let (dim, rotated) = (heads.dim(2)?, 2 * cos.dim(1)?);
    let first = heads.narrow(2, 0, rotated)?.contiguous()?.unsqueeze(0)?;
    let first = rope_thd(&first, cos, sin)?.squeeze(0)?;
    Tensor::cat(&[first, heads.narrow(2, rotated, dim - rotated)?], 2)
}
