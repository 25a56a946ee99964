//! Converts recorded models of LFM2 and of hybrid Granite as llama.cpp's converter does.
use candle_core::quantized::gguf_file::Value;

use super::Contents;
use crate::model::recorded::Recorded;
use crate::num::to_usize;

pub(super) fn number(case: &Recorded, field: &str) -> u32 {
    u32::try_from(fields(case)[field].as_u64().expect(field)).expect("small")
}

/// Returns the configuration of the text model.
pub(super) fn fields(case: &Recorded) -> &serde_json::Value {
    case.config.get("text_config").unwrap_or(&case.config)
}

#[expect(clippy::cast_possible_truncation, clippy::as_conversions, reason = "rounding is meant")]
pub(super) fn real(value: &serde_json::Value) -> Value {
    Value::F32(value.as_f64().expect("a number") as f32)
}

/// Returns the name of a tensor in a GGUF file.
fn name(tensor: &str, has_experts: bool) -> String {
    let Some(rest) = tensor.strip_prefix("model.layers.") else {
        let known = match tensor {
            "model.embed_tokens.weight" => "token_embd.weight",
            "model.norm.weight" => "output_norm.weight",
            "model.embedding_norm.weight" => "token_embd_norm.weight",
            "lm_head.weight" => "output.weight",
            other => panic!("{other}"),
        };
        return known.to_owned();
    };
    let (layer, part) = rest.split_once('.').expect("a part");
    let whole = match part {
        "mamba.A_log" => Some("ssm_a"),
        "mamba.D" => Some("ssm_d"),
        "mamba.dt_bias" => Some("ssm_dt.bias"),
        _ => None,
    };
    if let Some(whole) = whole {
        return format!("blk.{layer}.{whole}");
    }
    let (part, kind) = part.rsplit_once('.').expect("a kind");
    let part = match part {
        "operator_norm" | "input_layernorm" => "attn_norm",
        "ffn_norm" | "post_attention_layernorm" => "ffn_norm",
        "self_attn.q_proj" => "attn_q",
        "self_attn.k_proj" => "attn_k",
        "self_attn.v_proj" => "attn_v",
        "self_attn.q_layernorm" => "attn_q_norm",
        "self_attn.k_layernorm" => "attn_k_norm",
        "self_attn.out_proj" | "self_attn.o_proj" => "attn_output",
        "feed_forward.w1" => "ffn_gate",
        "feed_forward.w3" => "ffn_up",
        "shared_mlp.output_linear" if has_experts => "ffn_down_shexp",
        "feed_forward.w2" | "shared_mlp.output_linear" => "ffn_down",
        "block_sparse_moe.router.layer" => "ffn_gate_inp",
        "block_sparse_moe.output_linear" => "ffn_down_exps",
        "conv.conv" => "shortconv.conv",
        "conv.in_proj" => "shortconv.in_proj",
        "conv.out_proj" => "shortconv.out_proj",
        "mamba.in_proj" => "ssm_in",
        "mamba.conv1d" => "ssm_conv1d",
        "mamba.norm" => "ssm_norm",
        "mamba.out_proj" => "ssm_out",
        other => panic!("{other}"),
    };
    format!("blk.{layer}.{part}.{kind}")
}

/// Interleaves the halves of each head's rows.
fn interleave(values: &[f32], head_dim: usize, width: usize) -> Vec<f32> {
    let head = |rows: &[f32]| {
        let (first, second) = rows.split_at(rows.len() / 2);
        let pairs = first.chunks(width).zip(second.chunks(width));
        pairs.flat_map(|(a, b)| [a, b].concat()).collect::<Vec<_>>()
    };
    values.chunks(head_dim * width).flat_map(head).collect()
}

/// Converts a recorded model of LFM2, or of hybrid Granite.
pub(super) fn contents(case: &Recorded, architecture: &'static str) -> Contents {
    let has_experts = case.config["num_local_experts"].as_u64().is_some_and(|count| count > 0);
    let head_dim = number(case, "hidden_size") / number(case, "num_attention_heads");
    let mut tensors = Vec::new();
    for (tensor, shape, values) in case.weights() {
        let mut entry = (String::new(), shape.to_vec(), values);
        let (_, shape, values) = &mut entry;
        if tensor.ends_with(".conv.conv.weight") || tensor.ends_with(".conv1d.weight") {
            shape.remove(1);
        } else if tensor.ends_with(".A_log") {
            for x in values.iter_mut() {
                *x = -x.exp();
            }
            shape.push(1);
        } else if tensor.ends_with(".mamba.D") {
            shape.push(1);
        } else if tensor.ends_with(".mamba.norm.weight") {
            let groups = to_usize(number(case, "mamba_n_groups"));
            *shape = vec![groups, shape[0] / groups];
        } else if architecture == "granitehybrid"
            && (tensor.contains(".q_proj.") || tensor.contains(".k_proj."))
        {
            *values = interleave(values, to_usize(head_dim), shape[1]);
        }
        // Gate and up are in one matrix for each expert, and for the MLP that all tokens share.
        let joined = [
            (".shared_mlp.input_linear.weight", if has_experts { "_shexp" } else { "" }),
            (".block_sparse_moe.input_linear.weight", "_exps"),
        ];
        if let Some((end, kind)) = joined.iter().find(|(end, _)| tensor.ends_with(end)) {
            let layer = tensor.strip_suffix(end).and_then(|of| of.rsplit('.').next());
            let (rows, width) = (shape[shape.len() - 2] / 2, shape[shape.len() - 1]);
            let mut half = shape.clone();
            half[shape.len() - 2] = rows;
            for (at, part) in ["ffn_gate", "ffn_up"].into_iter().enumerate() {
                let name = format!("blk.{}.{part}{kind}.weight", layer.expect("a layer"));
                let halves = values.chunks(rows * width).skip(at).step_by(2).flatten();
                tensors.push((name, half.clone(), halves.copied().collect()));
            }
            continue;
        }
        entry.0 = name(tensor, has_experts);
        tensors.push(entry);
    }
    let keys = keys(case, architecture, &tensors);
    Contents { architecture, keys, tensors, is_quantised: false }
}

fn keys(
    case: &Recorded,
    architecture: &str,
    tensors: &[(String, Vec<usize>, Vec<f32>)],
) -> Vec<(String, Value)> {
    let count = |field| Value::U32(number(case, field));
    let has = |name: String| tensors.iter().any(|(known, ..)| *known == name);
    let kv_heads = |layer| {
        let attends = has(format!("blk.{layer}.attn_q.weight"));
        Value::U32(if attends { number(case, "num_key_value_heads") } else { 0 })
    };
    let kv_heads = (0..number(case, "num_hidden_layers")).map(kv_heads);
    let gates = ["blk.0.ffn_gate.weight", "blk.0.ffn_gate_exps.weight"];
    let gate = tensors.iter().find(|(name, ..)| gates.contains(&name.as_str()));
    let width = gate.map(|(_, shape, _)| u32::try_from(shape[shape.len() - 2]).expect("small"));
    let mut keys = vec![
        ("embedding_length", count("hidden_size")),
        ("block_count", count("num_hidden_layers")),
        ("attention.head_count", count("num_attention_heads")),
        ("attention.head_count_kv", Value::Array(kv_heads.collect())),
        ("feed_forward_length", Value::U32(width.expect("a gate"))),
        ("context_length", count("max_position_embeddings")),
        ("rope.freq_base", real(&case.config["rope_parameters"]["rope_theta"])),
    ];
    if architecture == "lfm2" {
        keys.push(("attention.layer_norm_rms_epsilon", real(&case.config["norm_eps"])));
        keys.push(("shortconv.l_cache", count("conv_L_cache")));
    } else {
        let inner = number(case, "hidden_size") * number(case, "mamba_expand");
        let rotates = case.config["position_embedding_type"] == "rope";
        keys.extend([
            ("attention.layer_norm_rms_epsilon", real(&case.config["rms_norm_eps"])),
            ("embedding_scale", real(&case.config["embedding_multiplier"])),
            ("attention.scale", real(&case.config["attention_multiplier"])),
            ("residual_scale", real(&case.config["residual_multiplier"])),
            ("logit_scale", real(&case.config["logits_scaling"])),
            ("expert_shared_feed_forward_length", count("shared_intermediate_size")),
            ("ssm.conv_kernel", count("mamba_d_conv")),
            ("ssm.state_size", count("mamba_d_state")),
            ("ssm.group_count", count("mamba_n_groups")),
            ("ssm.inner_size", Value::U32(inner)),
            ("ssm.time_step_rank", count("mamba_n_heads")),
            ("rope.scaling.finetuned", Value::Bool(rotates)),
            ("expert_count", count("num_local_experts")),
            ("expert_used_count", count("num_experts_per_tok")),
        ]);
    }
    named(architecture, keys)
}

/// Gives keys the prefix of an architecture, and adds its name.
pub(super) fn named(architecture: &str, keys: Vec<(&str, Value)>) -> Vec<(String, Value)> {
    let named = keys.into_iter().map(|(key, value)| (format!("{architecture}.{key}"), value));
    let name = ("general.architecture".to_owned(), Value::String(architecture.to_owned()));
    std::iter::once(name).chain(named).collect()
}
