//! Recorded models as GGUF files, with the names and orders of llama.cpp's converter.
use std::fs::File;

use candle_core::quantized::gguf_file::{self, Value};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{Device, Tensor};

use crate::recorded::{Recorded, recorded};
use crate::support::{ModelDir, all_tokens, json};

fn number(case: &Recorded, field: &str) -> Option<u32> {
    case.config[field].as_u64().map(|n| u32::try_from(n).expect("small"))
}

fn head_dim(case: &Recorded) -> u32 {
    let of = |field| number(case, field).expect(field);
    number(case, "head_dim").unwrap_or_else(|| of("hidden_size") / of("num_attention_heads"))
}

/// Returns whether files of the architecture have the two values of a pair next to each other in Q
/// and K.
fn interleaves(architecture: &str) -> bool {
    ["llama", "granite", "smollm3"].contains(&architecture)
}

/// Converts a number of a configuration to GGUF's type.
#[expect(clippy::cast_possible_truncation, clippy::as_conversions, reason = "rounding is meant")]
fn real(value: &serde_json::Value) -> Value {
    Value::F32(value.as_f64().expect("a number") as f32)
}

fn metadata(case: &Recorded, architecture: &str) -> Vec<(String, Value)> {
    let count = |field| Value::U32(number(case, field).expect(field));
    let mut keys = vec![
        ("embedding_length", count("hidden_size")),
        ("block_count", count("num_hidden_layers")),
        ("attention.head_count", count("num_attention_heads")),
        ("attention.head_count_kv", count("num_key_value_heads")),
        ("attention.key_length", Value::U32(head_dim(case))),
        ("attention.value_length", Value::U32(head_dim(case))),
        ("feed_forward_length", count("intermediate_size")),
        ("context_length", count("max_position_embeddings")),
        ("attention.layer_norm_rms_epsilon", real(&case.config["rms_norm_eps"])),
        ("rope.dimension_count", Value::U32(head_dim(case))),
        ("rope.freq_base", real(&case.config["rope_parameters"]["rope_theta"])),
    ];
    if let (Some(window), "phi3") = (number(case, "sliding_window"), architecture) {
        keys.push(("attention.sliding_window", Value::U32(window)));
    }
    for (key, field) in [
        ("embedding_scale", "embedding_multiplier"),
        ("attention.scale", "attention_multiplier"),
        ("residual_scale", "residual_multiplier"),
        ("logit_scale", "logits_scaling"),
    ] {
        if architecture == "granite" {
            keys.push((key, real(&case.config[field])));
        }
    }
    let rope = &case.config["rope_parameters"];
    if let Some(name @ ("linear" | "yarn")) = rope["rope_type"].as_str() {
        keys.push(("rope.scaling.type", Value::String(name.to_owned())));
        keys.push(("rope.scaling.factor", real(&rope["factor"])));
        if let Some(original) = rope["original_max_position_embeddings"].as_u64() {
            let original = u32::try_from(original).expect("small");
            keys.push(("rope.scaling.original_context_length", Value::U32(original)));
        }
    }
    let named = keys.into_iter().map(|(key, value)| (format!("{architecture}.{key}"), value));
    let name = ("general.architecture".to_owned(), Value::String(architecture.to_owned()));
    std::iter::once(name).chain(named).collect()
}

fn name(architecture: &str, name: &str) -> String {
    let Some(rest) = name.strip_prefix("model.layers.") else {
        return match name {
            "model.embed_tokens.weight" => "token_embd.weight",
            "model.norm.weight" => "output_norm.weight",
            "lm_head.weight" => "output.weight",
            other => panic!("{other}"),
        }
        .to_owned();
    };
    let (layer, part) = rest.split_once('.').expect("a part");
    let (part, kind) = part.rsplit_once('.').expect("a kind");
    let part = match (part, architecture) {
        ("post_attention_layernorm", "olmo2") => "post_attention_norm",
        ("post_feedforward_layernorm", _) => "post_ffw_norm",
        ("input_layernorm", _) => "attn_norm",
        ("post_attention_layernorm", _) => "ffn_norm",
        ("self_attn.q_proj", _) => "attn_q",
        ("self_attn.k_proj", _) => "attn_k",
        ("self_attn.v_proj", _) => "attn_v",
        ("self_attn.qkv_proj", _) => "attn_qkv",
        ("self_attn.q_norm", _) => "attn_q_norm",
        ("self_attn.k_norm", _) => "attn_k_norm",
        ("self_attn.o_proj", _) => "attn_output",
        ("mlp.gate_proj", _) => "ffn_gate",
        ("mlp.up_proj" | "mlp.gate_up_proj", _) => "ffn_up",
        ("mlp.down_proj", _) => "ffn_down",
        (other, _) => panic!("{other}"),
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

fn write(case: &Recorded, architecture: &str, path: &std::path::Path) {
    let tensors = case.weights().map(|(tensor, shape, mut values)| {
        let turns = tensor.contains("q_proj") || tensor.contains("k_proj");
        if turns && interleaves(architecture) {
            let width = shape.get(1).copied().unwrap_or(1);
            values = interleave(&values, usize::try_from(head_dim(case)).expect("small"), width);
        }
        let values = Tensor::from_vec(values, shape, &Device::Cpu).expect("a tensor");
        let quantised = QTensor::quantize(&values, GgmlDType::F32).expect("f32");
        (name(architecture, tensor), quantised)
    });
    let tensors: Vec<_> = tensors.collect();
    let tensors: Vec<_> = tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
    let metadata = metadata(case, architecture);
    let metadata: Vec<_> = metadata.iter().map(|(key, value)| (key.as_str(), value)).collect();
    let mut file = File::create(path).expect("a file");
    gguf_file::write(&mut file, &metadata, &tensors).expect("a GGUF file");
}

#[test]
fn a_gguf_file_of_every_architecture_continues_as_in_transformers() {
    let cases = recorded();
    for name in [
        "llama",
        "llama-tied",
        "llama-linear",
        "llama-yarn",
        "qwen2-yarn",
        "qwen3",
        "phi3",
        "olmo2",
        "olmo2-yarn",
        "granite",
        "smollm3",
    ] {
        let case = cases.iter().find(|case| case.name == name).expect(name);
        let architecture = case.config["model_type"].as_str().expect("a type");
        let model = ModelDir::copy();
        let path = model.file("model.gguf");
        write(case, architecture, &path);
        let path = path.to_str().expect("UTF-8");
        let args = ["generate", "--ignore-eos", "--max-new-tokens", "20", "--model", path];
        let got = all_tokens(&json(&[&args[..], &["--prompt", &case.prompt]].concat()));
        let expected: Vec<_> = case.output_ids.iter().copied().map(u64::from).collect();
        assert_eq!(got, [expected], "{name}");
    }
}
