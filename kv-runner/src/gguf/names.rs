//! Names of the tensors of a GGUF file, and what its converter does to their values.
use candle_core::Tensor;

use super::ROPE_FACTORS;
use super::forms::{Form, Heads};
use crate::config::{Architecture, ModelConfig, Recurrence};

/// A tensor of a layer: its names within the layer here and there, and what is done to its values.
type Entry = (&'static str, &'static str, Form, Heads);

/// Tensors of LFM2 that have names of their own.
const LFM2: [Entry; 6] = [
    ("shortconv.conv.weight", "conv.conv.weight", Form::Channels, Heads::Same),
    ("shortconv.conv.bias", "conv.conv.bias", Form::Same, Heads::Same),
    ("shortconv.in_proj.weight", "conv.in_proj.weight", Form::Same, Heads::Same),
    ("shortconv.in_proj.bias", "conv.in_proj.bias", Form::Same, Heads::Same),
    ("shortconv.out_proj.weight", "conv.out_proj.weight", Form::Same, Heads::Same),
    ("shortconv.out_proj.bias", "conv.out_proj.bias", Form::Same, Heads::Same),
];

/// Tensors of hybrid Granite that have names of their own.
const GRANITE_HYBRID: [Entry; 18] = [
    ("ssm_in.weight", "mamba.in_proj.weight", Form::Same, Heads::Same),
    ("ssm_in.bias", "mamba.in_proj.bias", Form::Same, Heads::Same),
    ("ssm_conv1d.weight", "mamba.conv1d.weight", Form::Channels, Heads::Same),
    ("ssm_conv1d.bias", "mamba.conv1d.bias", Form::Same, Heads::Same),
    ("ssm_dt.bias", "mamba.dt_bias", Form::Same, Heads::Same),
    ("ssm_a", "mamba.A_log", Form::Decay, Heads::Same),
    ("ssm_d", "mamba.D", Form::Flat, Heads::Same),
    // A row for each group.
    ("ssm_norm.weight", "mamba.norm.weight", Form::Flat, Heads::Same),
    ("ssm_out.weight", "mamba.out_proj.weight", Form::Same, Heads::Same),
    ("ssm_out.bias", "mamba.out_proj.bias", Form::Same, Heads::Same),
    ("ffn_gate_inp.weight", "block_sparse_moe.router.layer.weight", Form::Same, Heads::Same),
    // Beside experts, the MLP has the name of a shared one.
    ("ffn_gate_shexp.weight", "mlp.gate_proj.weight", Form::Same, Heads::Same),
    ("ffn_up_shexp.weight", "mlp.up_proj.weight", Form::Same, Heads::Same),
    ("ffn_down_shexp.weight", "shared_mlp.output_linear.weight", Form::Same, Heads::Same),
    ("ffn_gate_exps.weight", "block_sparse_moe.gate.weight", Form::Same, Heads::Same),
    ("ffn_up_exps.weight", "block_sparse_moe.up.weight", Form::Same, Heads::Same),
    ("ffn_gate_up_exps.weight", "block_sparse_moe.input_linear.weight", Form::Same, Heads::Same),
    ("ffn_down_exps.weight", "block_sparse_moe.output_linear.weight", Form::Same, Heads::Same),
];

/// Tensors of linear attention in Qwen3.5: the heads of V are in turns.
const QWEN35: [Entry; 9] = [
    ("attn_qkv.weight", "linear_attn.in_proj_qkv.weight", Form::Same, Heads::RowsBehindKeys),
    ("attn_gate.weight", "linear_attn.in_proj_z.weight", Form::Same, Heads::Rows),
    ("ssm_alpha.weight", "linear_attn.in_proj_a.weight", Form::Same, Heads::Rows),
    ("ssm_beta.weight", "linear_attn.in_proj_b.weight", Form::Same, Heads::Rows),
    ("ssm_conv1d.weight", "linear_attn.conv1d.weight", Form::Channels, Heads::RowsBehindKeys),
    ("ssm_dt.bias", "linear_attn.dt_bias", Form::Flat, Heads::Rows),
    ("ssm_a", "linear_attn.A_log", Form::Decay, Heads::Rows),
    // The same weights for every head; unlike those of other norms, kept as they are.
    ("ssm_norm.weight", "linear_attn.norm.weight", Form::Same, Heads::Same),
    ("ssm_out.weight", "linear_attn.out_proj.weight", Form::Same, Heads::Columns),
];

/// Tensors of linear attention in Qwen3-Next: the heads of V keep their order.
const QWEN3_NEXT: [Entry; 9] = [
    // In place of both, older files have the one matrix of Hugging Face.
    ("attn_qkv.weight", "linear_attn.in_proj_qkv.weight", Form::Same, Heads::Same),
    ("attn_gate.weight", "linear_attn.in_proj_z.weight", Form::Same, Heads::Same),
    ("ssm_in.weight", "linear_attn.in_proj_qkvz.weight", Form::Same, Heads::Same),
    ("ssm_ba.weight", "linear_attn.in_proj_ba.weight", Form::Same, Heads::Same),
    ("ssm_conv1d.weight", "linear_attn.conv1d.weight", Form::Channels, Heads::Same),
    ("ssm_dt.bias", "linear_attn.dt_bias", Form::Flat, Heads::Same),
    ("ssm_a", "linear_attn.A_log", Form::Decay, Heads::Same),
    ("ssm_norm.weight", "linear_attn.norm.weight", Form::Same, Heads::Same),
    ("ssm_out.weight", "linear_attn.out_proj.weight", Form::Same, Heads::Same),
];

/// Tensors of the experts of Qwen3-Next and Qwen3.5.
const QWEN_EXPERTS: [Entry; 9] = [
    ("ffn_gate_inp.weight", "mlp.gate.weight", Form::Same, Heads::Same),
    ("ffn_gate_inp_shexp.weight", "mlp.shared_expert_gate.weight", Form::Row, Heads::Same),
    ("ffn_gate_shexp.weight", "mlp.shared_expert.gate_proj.weight", Form::Same, Heads::Same),
    ("ffn_up_shexp.weight", "mlp.shared_expert.up_proj.weight", Form::Same, Heads::Same),
    ("ffn_down_shexp.weight", "mlp.shared_expert.down_proj.weight", Form::Same, Heads::Same),
    // All experts in one tensor.
    ("ffn_gate_exps.weight", "mlp.experts.gate_proj.weight", Form::Same, Heads::Same),
    ("ffn_up_exps.weight", "mlp.experts.up_proj.weight", Form::Same, Heads::Same),
    ("ffn_gate_up_exps.weight", "mlp.experts.gate_up_proj.weight", Form::Same, Heads::Same),
    ("ffn_down_exps.weight", "mlp.experts.down_proj.weight", Form::Same, Heads::Same),
];

/// Returns the tensors of layers that only few architectures have.
fn own(architecture: Architecture) -> impl Iterator<Item = &'static Entry> {
    let tables: [&[Entry]; 2] = match architecture {
        Architecture::Lfm2 => [&LFM2, &[]],
        Architecture::GraniteHybrid => [&GRANITE_HYBRID, &[]],
        Architecture::Qwen35 => [&QWEN35, &QWEN_EXPERTS],
        Architecture::Qwen3Next => [&QWEN3_NEXT, &QWEN_EXPERTS],
        _ => [&[], &[]],
    };
    tables.into_iter().flatten()
}

/// A tensor under its Hugging Face name, with what its converter has done to its values.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Known {
    pub(super) name: String,
    form: Form,
    heads: Heads,
}

impl Known {
    /// Returns the values as Hugging Face has them.
    pub(super) fn restore(
        &self,
        tensor: &Tensor,
        config: &ModelConfig,
    ) -> candle_core::Result<Tensor> {
        let tensor = self.form.restore(tensor)?;
        match &config.recurrence {
            Some(Recurrence::Delta(of)) => self.heads.restore(&tensor, of),
            _ => Ok(tensor),
        }
    }
}

/// Returns the Hugging Face name of a tensor, and what its values are there; `None` for one that is
/// not needed, such as one of a layer behind the `layers` of the model.
pub(super) fn hugging_face(architecture: Architecture, layers: u16, name: &str) -> Option<Known> {
    let names = architecture.weights();
    let known = |name: &str, form| Some(Known { name: name.to_owned(), form, heads: Heads::Same });
    let norm = if architecture.norms_less_one() { Form::Whole } else { Form::Same };
    match name {
        "token_embd.weight" => return known("model.embed_tokens.weight", Form::Same),
        "output_norm.weight" => return known(names.last_norm, norm),
        // The name of the last norm in most files of LFM2.
        "token_embd_norm.weight" if architecture == Architecture::Lfm2 => {
            return known(names.last_norm, norm);
        }
        "output.weight" => return known("lm_head.weight", Form::Same),
        ROPE_FACTORS => return known(ROPE_FACTORS, Form::Same),
        _ => {}
    }
    let (layer, part) = name.strip_prefix("blk.")?.split_once('.')?;
    // Layers behind those of the model predict tokens further ahead.
    layer.parse::<u16>().ok().filter(|layer| *layer < layers)?;
    let full = |part: &str| format!("model.layers.{layer}.{part}");
    if let Some((_, own, form, heads)) = own(architecture).find(|(name, ..)| *name == part) {
        return Some(Known { name: full(own), form: *form, heads: *heads });
    }
    let (part, kind) = part.rsplit_once('.')?;
    let (part, form) = match part {
        "attn_norm" => (names.mixer_norm, norm),
        // The same name for the norm before the MLP and for the one after attention.
        "ffn_norm" | "post_attention_norm" => (names.mlp_norm, norm),
        "post_ffw_norm" => ("post_feedforward_layernorm", norm),
        "attn_q" => ("self_attn.q_proj", Form::Same),
        "attn_k" => ("self_attn.k_proj", Form::Same),
        "attn_v" => ("self_attn.v_proj", Form::Same),
        "attn_qkv" => ("self_attn.qkv_proj", Form::Same),
        "attn_q_norm" => (names.q_norm, norm),
        "attn_k_norm" => (names.k_norm, norm),
        "attn_output" => (names.attention_out, Form::Same),
        "ffn_gate" => (names.gate, Form::Same),
        // Gate and up in one matrix.
        "ffn_up" if architecture.fuses_projections() => ("mlp.gate_up_proj", Form::Same),
        "ffn_up" => (names.up, Form::Same),
        "ffn_down" => (names.down, Form::Same),
        _ => return None,
    };
    known(&full(&format!("{part}.{kind}")), form)
}
