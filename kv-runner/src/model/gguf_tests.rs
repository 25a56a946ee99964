//! GGUF files of hybrid models, with the names and values of llama.cpp's converter, against logits
//! of transformers.
use std::fs::File;
use std::path::Path;

use candle_core::quantized::gguf_file::{self, Value};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{Device, Tensor};
use kv::{SequenceId, StartOptions};

use super::Decoder;
use super::recorded::{Recorded, recorded};
use super::recorded_tests::{cache, check, read, text};
use crate::num::to_usize;

/// A recorded model as the contents of a GGUF file.
struct Contents {
    architecture: &'static str,
    keys: Vec<(String, Value)>,
    tensors: Vec<(String, Vec<usize>, Vec<f32>)>,
}

/// Returns the names of recorded models, and their architectures in GGUF files.
const CASES: [(&str, &str); 4] = [
    ("lfm2", "lfm2"),
    ("lfm2-options", "lfm2"),
    ("granitemoehybrid", "granitehybrid"),
    ("granitemoehybrid-options", "granitehybrid"),
];

fn number(case: &Recorded, field: &str) -> u32 {
    u32::try_from(case.config[field].as_u64().expect(field)).expect("small")
}

#[expect(clippy::cast_possible_truncation, clippy::as_conversions, reason = "rounding is meant")]
fn real(value: &serde_json::Value) -> Value {
    Value::F32(value.as_f64().expect("a number") as f32)
}

/// Returns the name of a tensor in a GGUF file.
fn name(tensor: &str) -> String {
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
        "feed_forward.w2" | "shared_mlp.output_linear" => "ffn_down",
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

fn contents(case: &Recorded, architecture: &'static str) -> Contents {
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
        if tensor.ends_with(".shared_mlp.input_linear.weight") {
            let (gate, up) = values.split_at(values.len() / 2);
            let layer = name(&tensor.replace("shared_mlp.input_linear", "input_layernorm"));
            let half = vec![shape[0] / 2, shape[1]];
            for (part, values) in [("ffn_gate", gate), ("ffn_up", up)] {
                let name = layer.replace("attn_norm", part);
                tensors.push((name, half.clone(), values.to_vec()));
            }
            continue;
        }
        entry.0 = name(tensor);
        tensors.push(entry);
    }
    Contents { architecture, keys: keys(case, architecture, &tensors), tensors }
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
    let gate = tensors.iter().find(|(name, ..)| name == "blk.0.ffn_gate.weight");
    let width = gate.map(|(_, shape, _)| u32::try_from(shape[0]).expect("small"));
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
        ]);
    }
    let named = keys.into_iter().map(|(key, value)| (format!("{architecture}.{key}"), value));
    let name = ("general.architecture".to_owned(), Value::String(architecture.to_owned()));
    std::iter::once(name).chain(named).collect()
}

impl Contents {
    fn of(name: &str, architecture: &'static str) -> (Recorded, Self) {
        let case = recorded().into_iter().find(|case| case.name == name).expect("recorded");
        let contents = contents(&case, architecture);
        (case, contents)
    }

    fn set(&mut self, key: &str, value: Option<Value>) {
        let key = format!("{}.{key}", self.architecture);
        self.keys.retain(|(known, _)| *known != key);
        self.keys.extend(value.map(|value| (key, value)));
    }

    fn tensor(&mut self, name: &str) -> &mut (String, Vec<usize>, Vec<f32>) {
        self.tensors.iter_mut().find(|(known, ..)| known == name).expect(name)
    }

    fn write(&self, path: &Path) {
        let quantised = self.tensors.iter().map(|(name, shape, values)| {
            let values = Tensor::from_slice(values, shape.as_slice(), &Device::Cpu);
            let values = values.expect("a tensor");
            (name.as_str(), QTensor::quantize(&values, GgmlDType::F32).expect("f32"))
        });
        let quantised: Vec<_> = quantised.collect();
        let tensors: Vec<_> = quantised.iter().map(|(name, tensor)| (*name, tensor)).collect();
        let keys: Vec<_> = self.keys.iter().map(|(key, value)| (key.as_str(), value)).collect();
        let mut file = File::create(path).expect("a file");
        gguf_file::write(&mut file, &keys, &tensors).expect("a GGUF file");
    }

    /// Writes a file and reads the model from it.
    fn decoder(&self) -> Result<Decoder, String> {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("model.gguf");
        self.write(&path);
        Decoder::read(&path).map_err(|error| {
            let causes = std::iter::successors(std::error::Error::source(&error), |of| of.source());
            causes.fold(error.to_string(), |all, cause| format!("{all}: {cause}"))
        })
    }
}

#[test]
fn a_gguf_file_of_a_hybrid_model_has_the_logits_of_transformers() {
    for (name, architecture) in CASES {
        let (case, contents) = Contents::of(name, architecture);
        let model = contents.decoder().expect(name);
        let ids = text(&case);
        for chunk in [ids.len(), 7] {
            let mut cache = cache(&model);
            let id = SequenceId(1);
            cache.start(id, &[], StartOptions::default()).expect("starts");
            for (first, tokens) in (0..).step_by(chunk).zip(ids.chunks(chunk)) {
                let rows = read(&model, &mut cache, id, tokens);
                check(&case, first, &rows, &format!("GGUF in steps of {chunk}"));
            }
        }
    }
}

#[test]
fn the_last_norm_of_lfm2_has_one_of_two_names() {
    let (case, mut contents) = Contents::of("lfm2", "lfm2");
    "output_norm.weight".clone_into(&mut contents.tensor("token_embd_norm.weight").0);
    let model = contents.decoder().expect("a model");
    let mut cache = cache(&model);
    cache.start(SequenceId(1), &[], StartOptions::default()).expect("starts");
    let rows = read(&model, &mut cache, SequenceId(1), &case.prompt_ids);
    check(&case, 0, &rows, "GGUF");
}

#[test]
fn files_that_contradict_themselves_are_refused_by_name() {
    type Change = fn(&mut Contents);
    let cases: [(&str, Change, &str); 12] = [
        ("lfm2", |of| of.set("shortconv.l_cache", None), "lfm2.shortconv.l_cache is missing"),
        (
            "lfm2",
            |of| of.set("shortconv.l_cache", Some(Value::U32(1))),
            "lfm2.shortconv.l_cache is 1: a convolution sees at least 2",
        ),
        (
            "lfm2",
            |of| of.set("shortconv.l_cache", Some(Value::U32(4))),
            "model.layers.0.conv.conv.weight",
        ),
        (
            "lfm2",
            |of| of.set("attention.sliding_window", Some(Value::U32(4))),
            "lfm2.attention.sliding_window is 4, but no layer of lfm2 has a window",
        ),
        (
            "lfm2",
            |of| of.set("attention.causal", Some(Value::Bool(false))),
            "lfm2.attention.causal is false",
        ),
        (
            "lfm2",
            |of| {
                let (name, ..) = of.tensor("blk.0.shortconv.conv.weight");
                "blk.0.shortconv.c.weight".clone_into(name);
            },
            "model.layers.0.conv.conv.weight",
        ),
        (
            "granitemoehybrid",
            |of| of.set("ssm.time_step_rank", Some(Value::U32(5))),
            "ssm.inner_size 96 is not a multiple of ssm.time_step_rank 5",
        ),
        (
            "granitemoehybrid",
            |of| of.set("ssm.group_count", Some(Value::U32(4))),
            "ssm.time_step_rank 6 is not a multiple of ssm.group_count 4",
        ),
        (
            "granitemoehybrid",
            |of| of.set("ssm.state_size", None),
            "granitehybrid.ssm.state_size is missing",
        ),
        (
            "granitemoehybrid",
            |of| of.set("expert_count", Some(Value::U32(4))),
            "granitehybrid.expert_count is 4: a mixture of experts",
        ),
        (
            "granitemoehybrid",
            |of| of.tensor("blk.0.ssm_a").2[1] = 0.5,
            "a decay of 0.5: a number below 0 is expected",
        ),
        (
            "granitemoehybrid",
            |of| "blk.0.ffn".clone_into(&mut of.tensor("blk.0.ffn_up.weight").0),
            "model.layers.0.mlp.up_proj.weight",
        ),
    ];
    for (name, change, words) in cases {
        let known = CASES.iter().find(|(known, _)| *known == name);
        let (_, mut contents) = Contents::of(name, known.expect("a case").1);
        change(&mut contents);
        let error = contents.decoder().expect_err(words);
        assert!(error.contains(words), "{error}");
    }
}
