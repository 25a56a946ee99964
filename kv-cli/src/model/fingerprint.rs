//! What tells one model from another, for files that are made for one.
use candle_core::Tensor;
use xxhash_rust::xxh3::Xxh3Default;

use super::{Llama, with_values};

impl Llama {
    /// A text that no other model has: the shape of its K and V, and a hash (XXH3, 128 bits) of
    /// what their rows come from: the projections and their biases, the norms before them, and the
    /// frequencies of the rotary embedding.
    ///
    /// The same weights in another container, or in a wider element type, are the same model; a
    /// file that keeps the channels of K in another order is another one.
    pub(crate) fn fingerprint(&self) -> anyhow::Result<String> {
        let config = &self.config;
        let mut hash = Xxh3Default::new();
        for number in [config.heads, config.kv_heads, config.head_dim, config.hidden] {
            hash.update(&number.to_le_bytes());
        }
        hash.update(&config.norm_eps.to_le_bytes());
        for frequency in self.rope.frequencies() {
            hash.update(&frequency.to_le_bytes());
        }
        for layer in &self.layers {
            let mut tensors = vec![&layer.attention_norm];
            for linear in [&layer.q, &layer.k, &layer.v] {
                tensors.push(linear.weight());
                tensors.extend(linear.bias());
            }
            for tensor in tensors {
                update(&mut hash, tensor)?;
            }
        }
        let (layers, heads, head_dim) = (config.layers, config.kv_heads, config.head_dim);
        Ok(format!("llama-{layers}x{heads}x{head_dim}-{:032x}", hash.digest128()))
    }
}

fn update(hash: &mut Xxh3Default, tensor: &Tensor) -> anyhow::Result<()> {
    for extent in tensor.dims() {
        hash.update(&crate::num::to_u64(*extent).to_le_bytes());
    }
    // Little-endian everywhere, a piece at a time.
    let mut bytes = Vec::new();
    with_values(tensor, |values| {
        for values in values.chunks(1 << 14) {
            bytes.clear();
            bytes.extend(values.iter().flat_map(|value| value.to_le_bytes()));
            hash.update(&bytes);
        }
    })
}
