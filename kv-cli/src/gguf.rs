//! A model in one GGUF file of the llama architecture: its metadata as a configuration, its tensors
//! dequantised to f32 under the names Hugging Face gives them.
//!
//! Such files keep the rows of Q and K interleaved, so that pairs `(2i, 2i + 1)` turn together. The
//! tokenizer inside the file is not read; a `tokenizer.json` is asked for instead.
use std::collections::HashMap;
use std::fs::File;
use std::io::BufReader;
use std::path::Path;

use anyhow::{Context, bail};
use candle_core::Device;
use candle_core::quantized::gguf_file::{Content, TensorInfo, Value};

use crate::config::{
    Architecture, Biases, ConfigError, LayerKind, ModelConfig, Multipliers, divide, layers,
    non_zero,
};
use crate::num::{to_f64, to_u32, to_u64};
use crate::rope::{Pairing, RopeConfig, Scaling};
use crate::weights::Weights;

/// Name under which the factors of a stretched model's frequencies are kept.
pub(crate) const ROPE_FACTORS: &str = "rope_freqs.weight";

/// Reads the file whole.
pub(crate) fn read(path: &Path) -> anyhow::Result<(ModelConfig, Weights)> {
    let describe = || path.display().to_string();
    let mut file = BufReader::new(File::open(path).with_context(describe)?);
    let content = Content::read(&mut file).context("not a readable GGUF file");
    let content = content.with_context(describe)?;
    let config = config(&content).with_context(describe)?;
    let mut weights = Weights::default();
    for (name, info) in &content.tensor_infos {
        let Some(known) = hugging_face_name(name) else {
            continue;
        };
        check_size(name, info).with_context(describe)?;
        let tensor = content
            .tensor(&mut file, name, &Device::Cpu)
            .and_then(|tensor| tensor.dequantize(&Device::Cpu))
            .with_context(|| format!("{}: tensor {name}", path.display()))?;
        weights.insert(known, tensor);
    }
    Ok((config, weights))
}

/// The reader below multiplies extents without a check.
fn check_size(name: &str, info: &TensorInfo) -> anyhow::Result<()> {
    let elements = info.shape.dims().iter().try_fold(1_u64, |n, dim| n.checked_mul(to_u64(*dim)));
    match elements.and_then(|n| n.checked_mul(4)) {
        Some(bytes) if isize::try_from(bytes).is_ok() => Ok(()),
        _ => bail!("tensor {name} has shape {:?}, too large", info.shape.dims()),
    }
}

/// Metadata by key, with the numbers of every width as one.
struct Metadata<'a>(&'a HashMap<String, Value>);

impl Metadata<'_> {
    fn text(&self, key: &str) -> Option<&str> {
        self.0.get(key).and_then(|value| value.to_string().ok()).map(String::as_str)
    }

    fn count(&self, key: &'static str) -> Result<Option<u32>, ConfigError> {
        let Some(value) = self.0.get(key) else {
            return Ok(None);
        };
        let number = match value {
            Value::I32(n) => u64::try_from(*n).ok(),
            Value::I64(n) => u64::try_from(*n).ok(),
            other => other.to_u64().ok(),
        };
        let number = number.and_then(|n| u32::try_from(n).ok());
        number.map(Some).ok_or_else(|| ConfigError::Unsupported {
            field: key,
            got: format!("{value:?}"),
            expected: "one whole number",
        })
    }

    fn required(&self, key: &'static str) -> Result<u32, ConfigError> {
        non_zero(key, self.count(key)?.ok_or(ConfigError::Missing { field: key })?)
    }

    fn number(&self, key: &str) -> Option<f64> {
        match self.0.get(key)? {
            Value::F32(x) => Some(f64::from(*x)),
            Value::F64(x) => Some(*x),
            other => other.to_u64().ok().map(to_f64),
        }
    }
}

fn config(content: &Content) -> Result<ModelConfig, ConfigError> {
    let metadata = Metadata(&content.metadata);
    let architecture = metadata.text("general.architecture").unwrap_or_default();
    if architecture != "llama" {
        return Err(ConfigError::Unsupported {
            field: "general.architecture",
            got: architecture.to_owned(),
            expected: "llama",
        });
    }
    let hidden = metadata.required("llama.embedding_length")?;
    let heads = metadata.required("llama.attention.head_count")?;
    let kv_heads = metadata.count("llama.attention.head_count_kv")?.unwrap_or(heads);
    divide("num_attention_heads", heads, non_zero("num_key_value_heads", kv_heads)?)?;
    let head_dim = match metadata.count("llama.attention.key_length")? {
        Some(dim) => dim,
        None => divide("hidden_size", hidden, heads)?,
    };
    let rotary_dim = metadata.count("llama.rope.dimension_count")?.unwrap_or(head_dim);
    let embedding = content.tensor_infos.get("token_embd.weight");
    let vocab = embedding.and_then(|info| info.shape.dims().first().copied());
    let num_layers = layers("llama.block_count", metadata.required("llama.block_count")?)?;
    ModelConfig {
        architecture: Architecture::Llama,
        layer_kinds: vec![LayerKind::FULL; usize::from(num_layers)],
        hidden,
        intermediate: metadata.required("llama.feed_forward_length")?,
        heads,
        kv_heads,
        head_dim,
        vocab: non_zero("vocab_size", to_u32(vocab.unwrap_or(0)))?,
        context: metadata.required("llama.context_length")?,
        norm_eps: metadata.number("llama.attention.layer_norm_rms_epsilon").unwrap_or(1e-5),
        tied: !content.tensor_infos.contains_key("output.weight"),
        biases: Biases::default(),
        multipliers: Multipliers::default(),
        rope: RopeConfig {
            theta: metadata.number("llama.rope.freq_base").unwrap_or(10000.0),
            head_dim,
            rotary_dim: rotary_dim.min(head_dim),
            pairing: Pairing::Interleaved,
            scaling: scaling(&metadata)?,
        },
        bos: metadata.count("tokenizer.ggml.bos_token_id")?,
        eos: metadata.count("tokenizer.ggml.eos_token_id")?.into_iter().collect(),
    }
    .check()
}

fn scaling(metadata: &Metadata<'_>) -> Result<Scaling, ConfigError> {
    match metadata.text("llama.rope.scaling.type") {
        None | Some("none") => Ok(Scaling::None),
        Some("linear") => {
            let field = "llama.rope.scaling.factor";
            let factor = metadata.number(field).ok_or(ConfigError::Missing { field })?;
            if factor.is_finite() && factor > 0.0 {
                Ok(Scaling::Linear { factor })
            } else {
                Err(ConfigError::NotPositive { field, got: factor })
            }
        }
        Some(other) => Err(ConfigError::Unsupported {
            field: "llama.rope.scaling.type",
            got: other.to_owned(),
            expected: "none or linear",
        }),
    }
}

/// What a tensor is called elsewhere, `None` for one that is not needed.
fn hugging_face_name(name: &str) -> Option<String> {
    match name {
        "token_embd.weight" => return Some("model.embed_tokens.weight".to_owned()),
        "output_norm.weight" => return Some("model.norm.weight".to_owned()),
        "output.weight" => return Some("lm_head.weight".to_owned()),
        ROPE_FACTORS => return Some(ROPE_FACTORS.to_owned()),
        _ => {}
    }
    let (layer, part) = name.strip_prefix("blk.")?.split_once('.')?;
    let (part, kind) = part.rsplit_once('.')?;
    let part = match part {
        "attn_norm" => "input_layernorm",
        "ffn_norm" => "post_attention_layernorm",
        "attn_q" => "self_attn.q_proj",
        "attn_k" => "self_attn.k_proj",
        "attn_v" => "self_attn.v_proj",
        "attn_output" => "self_attn.o_proj",
        "ffn_gate" => "mlp.gate_proj",
        "ffn_up" => "mlp.up_proj",
        "ffn_down" => "mlp.down_proj",
        _ => return None,
    };
    Some(format!("model.layers.{layer}.{part}.{kind}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_translated() {
        for (name, expected) in [
            ("token_embd.weight", Some("model.embed_tokens.weight")),
            ("blk.12.attn_q.weight", Some("model.layers.12.self_attn.q_proj.weight")),
            ("blk.0.ffn_down.bias", Some("model.layers.0.mlp.down_proj.bias")),
            ("blk.0.ffn_gate_exps.weight", None),
            ("blk.x", None),
            ("v.blk.0.attn_q.weight", None),
        ] {
            assert_eq!(hugging_face_name(name).as_deref(), expected, "{name}");
        }
    }

    fn content(metadata: &[(&str, Value)]) -> Content {
        let metadata = metadata.iter().map(|(key, value)| ((*key).to_owned(), value.clone()));
        let magic = candle_core::quantized::gguf_file::VersionedMagic::GgufV3;
        Content {
            magic,
            metadata: metadata.collect(),
            tensor_infos: HashMap::new(),
            tensor_data_offset: 0,
        }
    }

    #[test]
    fn other_architectures_are_refused() {
        let text = |s: &str| Value::String(s.to_owned());
        let error = config(&content(&[("general.architecture", text("gemma3"))]));
        let error = error.expect_err("gemma3").to_string();
        assert!(error.contains("\"gemma3\" is not supported, expected llama"), "{error}");
        let error = config(&content(&[("general.architecture", text("llama"))]));
        let error = error.expect_err("no fields").to_string();
        assert_eq!(error, "llama.embedding_length is missing");
    }
}
