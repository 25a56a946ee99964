//! Names of the tensors of a GGUF file, and what its converter does to their values.
use candle_core::Tensor;

use super::ROPE_FACTORS;
use crate::config::{Architecture, ModelConfig};
use crate::error::Error;
use crate::weights::Weights;

/// What a converter has done to a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    Same,
    /// The weights of a convolution lack the axis of inputs, of which a channel has one.
    Channels,
    /// Other axes.
    Flat,
    /// A decay itself, below 0, in place of the logarithm of its negative.
    Decay,
}

impl Form {
    /// Returns the values as Hugging Face has them.
    pub(super) fn restore(self, tensor: &Tensor) -> candle_core::Result<Tensor> {
        match self {
            Self::Same => Ok(tensor.clone()),
            Self::Channels => tensor.unsqueeze(1),
            Self::Flat => tensor.flatten_all(),
            Self::Decay => {
                let decays: Vec<f32> = tensor.flatten_all()?.to_vec1()?;
                if let Some(decay) = decays.iter().find(|decay| decay.is_nan() || **decay >= 0.0) {
                    candle_core::bail!("a decay of {decay}: a number below 0 is expected");
                }
                tensor.flatten_all()?.neg()?.log()
            }
        }
    }
}

/// Tensors of recurrences: the names within a layer here and there.
const RECURRENT: [(&str, &str, Form); 16] = [
    ("shortconv.conv.weight", "conv.conv.weight", Form::Channels),
    ("shortconv.conv.bias", "conv.conv.bias", Form::Same),
    ("shortconv.in_proj.weight", "conv.in_proj.weight", Form::Same),
    ("shortconv.in_proj.bias", "conv.in_proj.bias", Form::Same),
    ("shortconv.out_proj.weight", "conv.out_proj.weight", Form::Same),
    ("shortconv.out_proj.bias", "conv.out_proj.bias", Form::Same),
    ("ssm_in.weight", "mamba.in_proj.weight", Form::Same),
    ("ssm_in.bias", "mamba.in_proj.bias", Form::Same),
    ("ssm_conv1d.weight", "mamba.conv1d.weight", Form::Channels),
    ("ssm_conv1d.bias", "mamba.conv1d.bias", Form::Same),
    ("ssm_dt.bias", "mamba.dt_bias", Form::Same),
    ("ssm_a", "mamba.A_log", Form::Decay),
    ("ssm_d", "mamba.D", Form::Flat),
    // A row for each group.
    ("ssm_norm.weight", "mamba.norm.weight", Form::Flat),
    ("ssm_out.weight", "mamba.out_proj.weight", Form::Same),
    ("ssm_out.bias", "mamba.out_proj.bias", Form::Same),
];

/// Returns the Hugging Face name of a tensor, and what its values are there; `None` for one that is
/// not needed.
pub(super) fn hugging_face(architecture: Architecture, name: &str) -> Option<(String, Form)> {
    let names = architecture.weights();
    let same = |name: &str| Some((name.to_owned(), Form::Same));
    match name {
        "token_embd.weight" => return same("model.embed_tokens.weight"),
        "output_norm.weight" => return same(names.last_norm),
        // The name of the last norm in most files of LFM2.
        "token_embd_norm.weight" if architecture == Architecture::Lfm2 => {
            return same(names.last_norm);
        }
        "output.weight" => return same("lm_head.weight"),
        ROPE_FACTORS => return same(ROPE_FACTORS),
        _ => {}
    }
    let (layer, part) = name.strip_prefix("blk.")?.split_once('.')?;
    let full = |part: &str, form| Some((format!("model.layers.{layer}.{part}"), form));
    if !architecture.recurrent_layers().is_empty()
        && let Some((_, own, form)) = RECURRENT.iter().find(|(known, ..)| *known == part)
    {
        return full(own, *form);
    }
    let (part, kind) = part.rsplit_once('.')?;
    let part = match part {
        "attn_norm" => names.mixer_norm,
        // The same name for the norm before the MLP and for the one after attention.
        "ffn_norm" | "post_attention_norm" => names.mlp_norm,
        "post_ffw_norm" => "post_feedforward_layernorm",
        "attn_q" => "self_attn.q_proj",
        "attn_k" => "self_attn.k_proj",
        "attn_v" => "self_attn.v_proj",
        "attn_qkv" => "self_attn.qkv_proj",
        "attn_q_norm" => names.q_norm,
        "attn_k_norm" => names.k_norm,
        "attn_output" => names.attention_out,
        "ffn_gate" => names.gate,
        // Gate and up in one matrix.
        "ffn_up" if architecture.fuses_projections() => "mlp.gate_up_proj",
        "ffn_up" => names.up,
        "ffn_down" => names.down,
        _ => return None,
    };
    full(&format!("{part}.{kind}"), Form::Same)
}

/// Puts gate and up into one matrix, where files of Hugging Face have one and GGUF files two.
pub(super) fn join_gates(config: &ModelConfig, weights: &mut Weights) -> Result<(), Error> {
    let architecture = config.architecture;
    let names = architecture.weights();
    let Some(joined) = names.gate_up.filter(|_| !architecture.fuses_projections()) else {
        return Ok(());
    };
    for layer in 0..config.layers() {
        let name = |part: &str| format!("model.layers.{layer}.{part}.weight");
        let shape = [config.intermediate, config.hidden];
        let gate = weights.take(&name(names.gate), &shape)?;
        let up = weights.take(&name(names.up), &shape)?;
        weights.insert(name(joined), Tensor::cat(&[gate, up], 0)?);
    }
    Ok(())
}
