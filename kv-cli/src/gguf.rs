//! A model in GGUF files: their metadata as a configuration, their tensors dequantised to f32 under
//! the names Hugging Face gives them.
//!
//! Files of some architectures keep the rows of Q and K interleaved, so that pairs `(2i, 2i + 1)`
//! turn together. The tokenizer inside a file is not read, but for the tokens that end a text; a
//! `tokenizer.json` is asked for instead.
mod config;
mod metadata;
mod parts;
mod rope;
#[cfg(test)]
mod tests;

use std::path::Path;

use anyhow::{Context, bail};
use candle_core::quantized::gguf_file::TensorInfo;
use candle_core::{Device, Tensor};

use crate::config::{Architecture, ModelConfig};
use crate::num::to_u64;
use crate::weights::Weights;
pub(crate) use metadata::{Metadata, whole};
use parts::Part;
pub(crate) use parts::{first as first_part, is_further_part};

/// Name under which the factors of a stretched model's frequencies are kept.
pub(crate) const ROPE_FACTORS: &str = "rope_freqs.weight";

/// The factors of frequencies that hold up to the original context.
const SHORT_FACTORS: &str = "rope_factors_short.weight";

/// The most values of [`SHORT_FACTORS`]: more than any head has.
const SHORT_FACTORS_MAX: usize = 1 << 16;

/// Reads the file, and the further parts of a model that is split, whole.
pub(crate) fn read(path: &Path) -> anyhow::Result<(ModelConfig, Weights)> {
    let mut parts = parts::all(path)?;
    let short = short_factors(&mut parts)?;
    let contents: Vec<_> = parts.iter().map(|part| &part.content).collect();
    let config = config::config(&contents, short).with_context(|| path.display().to_string())?;
    let mut weights = Weights::default();
    for part in &mut parts {
        read_tensors(part, config.architecture, &mut weights)?;
    }
    Ok((config, weights))
}

fn read_tensors(
    part: &mut Part,
    architecture: Architecture,
    weights: &mut Weights,
) -> anyhow::Result<()> {
    let Part { path, file, content } = part;
    for (name, info) in &content.tensor_infos {
        let Some(known) = hugging_face_name(architecture, name) else {
            continue;
        };
        check_size(name, info).with_context(|| path.display().to_string())?;
        let tensor = content
            .tensor(file, name, &Device::Cpu)
            .and_then(|tensor| tensor.dequantize(&Device::Cpu))
            .with_context(|| format!("{}: tensor {name}", path.display()))?;
        if weights.contains(&known) {
            bail!("{}: tensor {name} is in another part too", path.display());
        }
        weights.insert(known, tensor);
    }
    Ok(())
}

/// Factors by pair of frequencies, where a part brings them.
fn short_factors(parts: &mut [Part]) -> anyhow::Result<Option<Vec<f64>>> {
    for Part { path, file, content } in parts {
        let Some(info) = content.tensor_infos.get(SHORT_FACTORS) else {
            continue;
        };
        let describe = || format!("{}: tensor {SHORT_FACTORS}", path.display());
        let count = info.shape.dims().iter().try_fold(1_usize, |n, dim| n.checked_mul(*dim));
        if count.is_none_or(|count| count > SHORT_FACTORS_MAX) {
            bail!("{}: has shape {:?}, too large", describe(), info.shape.dims());
        }
        let tensor = content.tensor(file, SHORT_FACTORS, &Device::Cpu).with_context(describe)?;
        let values: Tensor = tensor.dequantize(&Device::Cpu).and_then(|t| t.flatten_all())?;
        let values = values.to_vec1::<f32>().with_context(describe)?;
        return Ok(Some(values.into_iter().map(f64::from).collect()));
    }
    Ok(None)
}

/// The reader below multiplies extents without a check.
fn check_size(name: &str, info: &TensorInfo) -> anyhow::Result<()> {
    let elements = info.shape.dims().iter().try_fold(1_u64, |n, dim| n.checked_mul(to_u64(*dim)));
    match elements.and_then(|n| n.checked_mul(4)) {
        Some(bytes) if isize::try_from(bytes).is_ok() => Ok(()),
        _ => bail!("tensor {name} has shape {:?}, too large", info.shape.dims()),
    }
}

/// What a tensor is called elsewhere, `None` for one that is not needed.
fn hugging_face_name(architecture: Architecture, name: &str) -> Option<String> {
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
        // The same name for a norm before the MLP and for one of what attention gives.
        "ffn_norm" | "post_attention_norm" => "post_attention_layernorm",
        "post_ffw_norm" => "post_feedforward_layernorm",
        "attn_q" => "self_attn.q_proj",
        "attn_k" => "self_attn.k_proj",
        "attn_v" => "self_attn.v_proj",
        "attn_qkv" => "self_attn.qkv_proj",
        "attn_q_norm" => "self_attn.q_norm",
        "attn_k_norm" => "self_attn.k_norm",
        "attn_output" => "self_attn.o_proj",
        "ffn_gate" => "mlp.gate_proj",
        // Gate and up in one.
        "ffn_up" if architecture.fuses_projections() => "mlp.gate_up_proj",
        "ffn_up" => "mlp.up_proj",
        "ffn_down" => "mlp.down_proj",
        _ => return None,
    };
    Some(format!("model.layers.{layer}.{part}.{kind}"))
}
