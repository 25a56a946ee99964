//! The fingerprint of a model, for files that belong to one model.
use candle_core::Tensor;
use candle_nn::Linear;
use xxhash_rust::xxh3::Xxh3Default;

use super::layer::Mixer;
use super::{Decoder, with_values};
use crate::config::{Architecture, Multipliers};

impl Decoder {
    /// Returns a text that identifies the model: the shape of its K and V, and a hash (XXH3, 128
    /// bits) of everything their rows depend on: the projections and their biases, the norms around
    /// them, the rotary embedding, and the multipliers of the architecture.
    ///
    /// The same weights in another container, or in a wider element type, are the same model; a
    /// file with the channels of K in another order is another model.
    pub fn fingerprint(&self) -> String {
        let config = &self.config;
        let mut hash = Xxh3Default::new();
        for number in [config.heads, config.kv_heads, config.head_dim, config.hidden] {
            hash.update(&number.to_le_bytes());
        }
        hash.update(&config.norm_eps.to_le_bytes());
        for frequency in self.rope.frequencies() {
            hash.update(&frequency.to_le_bytes());
        }
        self.rope.hash_refinements(&mut |number| hash.update(&number.to_le_bytes()));
        let Multipliers { embedding, residual, attention, .. } = config.multipliers;
        if config.multipliers != Multipliers::default() {
            for number in [embedding, residual, attention.unwrap_or_default()] {
                hash.update(&number.to_le_bytes());
            }
        }
        for layer in &self.layers {
            let mut tensors: Vec<_> = layer.mixer_norm.iter().collect();
            let (linears, norms, values) = layer.mixer.weights();
            for linear in linears {
                tensors.push(linear.weight());
                tensors.extend(linear.bias());
            }
            tensors.extend(norms);
            tensors.extend(layer.mixer_out_norm.iter().chain(&layer.mlp_out_norm));
            for tensor in tensors {
                update(&mut hash, tensor);
            }
            for values in values {
                update_values(&mut hash, values);
            }
            if matches!(&layer.mixer, Mixer::Attention(of) if !of.kind.rotates) {
                hash.update(b"no rotation");
            }
        }
        let (layers, heads, head_dim) = (config.layers(), config.kv_heads, config.head_dim);
        // Both are llama in a GGUF file.
        let name = match config.architecture {
            Architecture::Mistral => Architecture::Llama,
            other => other,
        };
        format!("{name}-{layers}x{heads}x{head_dim}-{:032x}", hash.digest128())
    }
}

fn update(hash: &mut Xxh3Default, tensor: &Tensor) {
    for extent in tensor.dims() {
        hash.update(&crate::num::to_u64(*extent).to_le_bytes());
    }
    with_values(tensor, |values| update_values(hash, values));
}

fn update_values(hash: &mut Xxh3Default, values: &[f32]) {
    // Little-endian on every machine, in chunks.
    let mut bytes = Vec::new();
    for values in values.chunks(1 << 14) {
        bytes.clear();
        bytes.extend(values.iter().flat_map(|value| value.to_le_bytes()));
        hash.update(&bytes);
    }
}

/// Projections, norms of Q and K, and other weights of a mixer.
type MixerWeights<'a> = (Vec<&'a Linear>, Vec<&'a Tensor>, Vec<&'a [f32]>);

impl Mixer {
    /// Returns the weights that rows and states in the cache depend on.
    fn weights(&self) -> MixerWeights<'_> {
        match self {
            Self::Attention(of) => {
                let norms = of.q_norm.iter().chain(&of.k_norm).collect();
                (of.projections().collect(), norms, Vec::new())
            }
            Self::Delta(of) => {
                let linears = of.qkv.iter().chain([&of.z, &of.a, &of.b, &of.out]).collect();
                let own = [&of.decay_log, &of.decay_bias, &of.norm].map(Vec::as_slice);
                (linears, Vec::new(), of.conv.weights().chain(own).collect())
            }
            Self::ShortConv(of) => {
                let linears = of.input.iter().chain([&of.out]).collect();
                (linears, Vec::new(), of.conv.weights().collect())
            }
            Self::Mamba2(of) => {
                let linears = of.input.iter().chain([&of.out]).collect();
                let own = [&of.decay_log, &of.step_bias, &of.skip, &of.norm].map(Vec::as_slice);
                (linears, Vec::new(), of.conv.weights().chain(own).collect())
            }
        }
    }
}
