//! The same model in other file formats gives the same text.
use std::fs::File;

use candle_core::quantized::gguf_file::{self, Value};
use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{Device, Tensor};
use serde_json::json;

use crate::support::{Entry, ModelDir, all_tokens, bundled, entries, fails, json, safetensors};

fn generate(model: &str, extra: &[&str]) -> Vec<Vec<u64>> {
    let args = ["generate", "--ignore-eos", "--max-new-tokens", "40", "--model", model];
    all_tokens(&json(&[&args[..], extra].concat()))
}

fn expected() -> Vec<Vec<u64>> {
    generate(bundled().to_str().expect("UTF-8"), &[])
}

#[test]
fn shards_are_one_model() {
    let model = ModelDir::copy();
    std::fs::remove_file(model.file("model.safetensors")).expect("weights");
    let tensors = entries();
    let (first, second) = tensors.split_at(tensors.len() / 2);
    let mut map = serde_json::Map::new();
    for (file, part) in [("a.safetensors", first), ("b.safetensors", second)] {
        model.write(file, safetensors(part));
        map.extend(part.iter().map(|entry| (entry.name.clone(), json!(file))));
    }
    model.write("model.safetensors.index.json", json!({ "weight_map": map }).to_string());
    assert_eq!(generate(model.path(), &[]), expected());
}

#[test]
fn sixteen_bit_weights_are_upcast() {
    let (wide, narrow) = (ModelDir::copy(), ModelDir::copy());
    let mut tensors = entries();
    for entry in &mut tensors {
        // Values that bfloat16 holds exactly.
        entry.bytes.chunks_exact_mut(4).for_each(|value| value[..2].fill(0));
    }
    wide.write("model.safetensors", safetensors(&tensors));
    for entry in &mut tensors {
        entry.dtype = "BF16".to_owned();
        entry.bytes = entry.bytes.chunks_exact(4).flat_map(|value| [value[2], value[3]]).collect();
    }
    narrow.write("model.safetensors", safetensors(&tensors));
    assert_eq!(generate(narrow.path(), &[]), generate(wide.path(), &[]));
}

#[test]
fn untied_embeddings_and_biases_are_read() {
    let model = ModelDir::copy();
    let mut tensors = entries();
    let embedding = tensors.iter().find(|entry| entry.name == "model.embed_tokens.weight");
    let mut head = embedding.expect("an embedding").clone();
    head.name = "lm_head.weight".to_owned();
    tensors.push(head);
    for layer in 0..5 {
        for (part, width) in [("q", 64), ("k", 32), ("v", 32), ("o", 64)] {
            let name = format!("model.layers.{layer}.self_attn.{part}_proj.bias");
            tensors.push(Entry::f32(&name, &[width], &vec![0.0; width]));
        }
    }
    model.write("model.safetensors", safetensors(&tensors));
    model.set("tie_word_embeddings", Some(json!(false)));
    model.set("attention_bias", Some(json!(true)));
    assert_eq!(generate(model.path(), &[]), expected());
    // A bias that is not zero must be used.
    let bias = tensors.iter_mut().find(|entry| entry.name.ends_with("0.self_attn.v_proj.bias"));
    let bias = bias.expect("a bias");
    *bias = Entry::f32(&bias.name, &[32], &[1.0; 32]);
    model.write("model.safetensors", safetensors(&tensors));
    assert_ne!(generate(model.path(), &[]), expected());
}

#[test]
fn stop_tokens_come_from_the_configuration() {
    let all = expected().remove(0);
    let model = ModelDir::copy();
    model.write("generation_config.json", json!({ "eos_token_id": [2, all[9]] }).to_string());
    let end = all.iter().position(|token| *token == all[9]).expect("it is there") + 1;
    let report = json(&["generate", "--max-new-tokens", "40", "--model", model.path()]);
    assert_eq!(all_tokens(&report)[0], all[..end], "the stop token is the last one");
    assert_eq!(report["sequences"][0]["finish"], "eos");
    assert_eq!(generate(model.path(), &[])[0], all, "--ignore-eos continues");
}

/// Interleaves rows of Q and K as in files of the llama architecture.
fn interleave(values: &[f32], head_dim: usize, width: usize) -> Vec<f32> {
    let half = head_dim / 2;
    let head = |rows: &[f32]| {
        let row = |i: usize| rows[i * width..(i + 1) * width].to_vec();
        (0..half).flat_map(|i| [row(i), row(i + half)]).flatten().collect::<Vec<_>>()
    };
    values.chunks_exact(head_dim * width).flat_map(head).collect()
}

/// Keys of a GGUF file.
type Keys<'k> = &'k [(&'k str, Value)];

fn gguf(path: &std::path::Path, architecture: &str) {
    gguf_with(path, architecture, &[]);
}

/// Writes the bundled model as one GGUF file; `more` keys replace those of the same name.
fn gguf_with(path: &std::path::Path, architecture: &str, more: Keys<'_>) {
    let tensors = gguf_tensors();
    write_gguf(path, architecture, more, &tensors);
}

fn write_gguf(
    path: &std::path::Path,
    architecture: &str,
    more: Keys<'_>,
    tensors: &[(String, QTensor)],
) {
    let tensors: Vec<_> = tensors.iter().map(|(name, tensor)| (name.as_str(), tensor)).collect();
    let metadata = [
        ("general.architecture", Value::String(architecture.to_owned())),
        ("llama.embedding_length", Value::U32(64)),
        ("llama.block_count", Value::U32(5)),
        ("llama.attention.head_count", Value::U32(8)),
        ("llama.attention.head_count_kv", Value::U32(4)),
        ("llama.feed_forward_length", Value::U32(172)),
        ("llama.context_length", Value::U32(512)),
        ("llama.attention.layer_norm_rms_epsilon", Value::F32(1e-5)),
        ("llama.rope.dimension_count", Value::U32(8)),
    ];
    let is_replaced = |key: &str| more.iter().any(|(other, _)| *other == key);
    let kept = metadata.iter().filter(|(key, _)| !is_replaced(key));
    let metadata: Vec<_> = kept.chain(more).map(|(key, value)| (*key, value)).collect();
    let mut file = File::create(path).expect("a file");
    gguf_file::write(&mut file, &metadata, &tensors).expect("a GGUF file");
}

/// Returns the tensors of the bundled model under their GGUF names.
fn gguf_tensors() -> Vec<(String, QTensor)> {
    let rename = |name: &str| match name.strip_prefix("model.layers.") {
        None if name.starts_with("model.embed") => "token_embd.weight".to_owned(),
        None => "output_norm.weight".to_owned(),
        Some(rest) => {
            let (layer, part) = rest.split_once('.').expect("a part");
            let part = match part {
                "input_layernorm.weight" => "attn_norm",
                "post_attention_layernorm.weight" => "ffn_norm",
                "self_attn.q_proj.weight" => "attn_q",
                "self_attn.k_proj.weight" => "attn_k",
                "self_attn.v_proj.weight" => "attn_v",
                "self_attn.o_proj.weight" => "attn_output",
                "mlp.gate_proj.weight" => "ffn_gate",
                "mlp.up_proj.weight" => "ffn_up",
                "mlp.down_proj.weight" => "ffn_down",
                other => panic!("{other}"),
            };
            format!("blk.{layer}.{part}.weight")
        }
    };
    let tensor = |entry: Entry| {
        let mut values = entry.values();
        if entry.name.contains("q_proj") || entry.name.contains("k_proj") {
            values = interleave(&values, 8, 64);
        }
        let tensor = Tensor::from_vec(values, entry.shape, &Device::Cpu).expect("a tensor");
        (rename(&entry.name), QTensor::quantize(&tensor, GgmlDType::F32).expect("f32"))
    };
    entries().into_iter().map(tensor).collect()
}

#[test]
fn a_gguf_file_is_a_model() {
    let model = ModelDir::copy();
    let path = model.file("model.gguf");
    gguf(&path, "llama");
    let path = path.to_str().expect("UTF-8");
    assert_eq!(generate(path, &[]), expected());
    let tokenizer = bundled().join("tokenizer.json");
    std::fs::remove_file(model.file("tokenizer.json")).expect("tokenizer.json");
    fails(&["generate", "--model", path], 1, "give --tokenizer FILE");
    let tokenizer = tokenizer.to_str().expect("UTF-8");
    assert_eq!(generate(path, &["--tokenizer", tokenizer]), expected());
}

#[test]
fn an_inconsistent_gguf_file_is_refused() {
    let model = ModelDir::copy();
    let path = model.file("model.gguf");
    gguf(&path, "llama");
    let good = std::fs::read(&path).expect("a file");
    let name = path.to_str().expect("UTF-8");
    for length in [0, 3, 8, 30, 400, good.len() / 2, good.len() - 4] {
        std::fs::write(&path, &good[..length]).expect("a file");
        fails(&["generate", "--json", "--model", name], 1, "model.gguf: ");
    }
    for at in [8, 16] {
        let mut bytes = good.clone();
        bytes[at..at + 8].fill(0xFF);
        std::fs::write(&path, bytes).expect("a file");
        fails(&["generate", "--json", "--model", name], 1, "model.gguf: ");
    }
    gguf(&path, "gemma3");
    fails(&["generate", "--json", "--model", name], 1, "\"gemma3\" is not supported");
    std::fs::write(&path, "not a GGUF file").expect("a file");
    fails(&["generate", "--json", "--model", name], 1, "model.gguf: ");
}

#[test]
fn old_and_new_factor_keys_scale_the_rotation() {
    let model = ModelDir::copy();
    let path = model.file("model.gguf");
    let name = path.to_str().expect("UTF-8");
    let text = |keys: Keys<'_>| {
        gguf_with(&path, "llama", keys);
        generate(name, &[])
    };
    let kind = |kind: &str| ("llama.rope.scaling.type", Value::String(kind.to_owned()));
    let factor = |key, factor| (key, Value::F32(factor));
    let plain = expected();
    let linear = text(&[kind("linear"), factor("llama.rope.scaling.factor", 4.0)]);
    assert_ne!(linear, plain);
    assert_eq!(text(&[factor("llama.rope.scaling.factor", 4.0)]), linear);
    assert_eq!(text(&[factor("llama.rope.scale_linear", 4.0)]), linear);
    assert_eq!(text(&[factor("llama.rope.scaling.factor", 0.0)]), plain);
    assert_eq!(text(&[kind("none"), factor("llama.rope.scaling.factor", 4.0)]), plain);
    let yarn = text(&[kind("yarn"), factor("llama.rope.scaling.factor", 4.0)]);
    assert!(yarn != plain && yarn != linear, "neither scaled alike nor not at all");
    gguf_with(&path, "llama", &[kind("su")]);
    fails(&["generate", "--json", "--model", name], 1, "\"su\" is not supported");
}

#[test]
fn every_end_of_a_turn_ends_a_text() {
    let all = expected().remove(0);
    let id = u32::try_from(all[9]).expect("a token");
    let end = all.iter().position(|token| *token == all[9]).expect("it is there") + 1;
    let model = ModelDir::copy();
    let path = model.file("model.gguf");
    let name = path.to_str().expect("UTF-8");
    let mut words: Vec<_> = (0..512).map(|id| Value::String(format!("word {id}"))).collect();
    words[usize::try_from(id).expect("small")] = Value::String("<|im_end|>".to_owned());
    let ids = Value::Array(vec![Value::U32(2), Value::U32(id)]);
    for (key, value) in [
        ("tokenizer.ggml.eos_token_id", Value::U32(id)),
        ("tokenizer.ggml.eot_token_id", Value::U32(id)),
        ("tokenizer.ggml.eom_token_id", Value::U32(id)),
        ("tokenizer.ggml.eos_token_ids", ids),
        ("tokenizer.ggml.tokens", Value::Array(words)),
    ] {
        gguf_with(&path, "llama", &[(key, value)]);
        let report = json(&["generate", "--max-new-tokens", "40", "--model", name]);
        assert_eq!(all_tokens(&report)[0], all[..end], "{key}");
        assert_eq!(report["sequences"][0]["finish"], "eos", "{key}");
    }
}

#[test]
fn heads_by_layer_are_read_where_they_are_equal() {
    let model = ModelDir::copy();
    let path = model.file("model.gguf");
    let name = path.to_str().expect("UTF-8");
    let heads = |heads: &[u32]| {
        let list = Value::Array(heads.iter().copied().map(Value::U32).collect());
        gguf_with(&path, "llama", &[("llama.attention.head_count_kv", list)]);
    };
    heads(&[4; 5]);
    assert_eq!(generate(name, &[]), expected());
    heads(&[4, 4, 2, 4, 4]);
    let words = "llama.attention.head_count_kv is [4, 4, 2, 4, 4]: it differs by layer";
    fails(&["generate", "--json", "--model", name], 1, words);
    // Bytes follow from the heads of each layer.
    let report = json(&["plan", "--model", name, "--format", "bf16"]);
    assert_eq!(report["formats"][0]["bytes_per_token"], (4 * 4 + 2) * 2 * 8 * 2);
    gguf_with(&path, "llama", &[("llama.expert_count", Value::U32(8))]);
    let words = "llama.expert_count is 8: a mixture of experts, such as Mixtral";
    fails(&["generate", "--json", "--model", name], 1, words);
    let report = json(&["plan", "--model", name, "--format", "bf16"]);
    assert_eq!(report["formats"][0]["bytes_per_token"], 5 * 4 * 2 * 8 * 2);
}

#[test]
fn a_model_in_several_gguf_files_is_one() {
    let model = ModelDir::copy();
    let tensors = gguf_tensors();
    let path = |number: usize| model.file(&format!("model-0000{number}-of-00003.gguf"));
    let split = |number: usize| {
        let place = |key, value: usize| (key, Value::U16(u16::try_from(value).expect("small")));
        [place("split.no", number - 1), place("split.count", 3)]
    };
    for (part, number) in tensors.chunks(tensors.len().div_ceil(3)).zip(1..) {
        write_gguf(&path(number), "llama", &split(number), part);
    }
    let first = path(1);
    let first = first.to_str().expect("UTF-8");
    assert_eq!(generate(first, &[]), expected());
    // A plan needs the first part only, and a directory has one model.
    std::fs::remove_file(model.file("config.json")).expect("config.json");
    for model in [first, model.path()] {
        let report = json(&["plan", "--model", model, "--format", "bf16"]);
        assert_eq!(report["formats"][0]["bytes_per_token"], 5 * 4 * 2 * 8 * 2);
    }
    let second = path(2);
    let second = second.to_str().expect("UTF-8");
    let words = "part 2 of a model in 3 files, give model-00001-of-00003.gguf instead";
    fails(&["generate", "--json", "--model", second], 1, words);
    fails(&["plan", "--model", second], 1, words);
    write_gguf(&path(2), "llama", &split(3), &tensors[..1]);
    fails(&["generate", "--json", "--model", first], 1, "part 3 of 3 by split.no");
    std::fs::remove_file(path(2)).expect("a part");
    let words = "00002-of-00003.gguf: part 2 of a model in 3 files is not there";
    fails(&["generate", "--json", "--model", first], 1, words);
    std::fs::rename(path(1), model.file("renamed.gguf")).expect("a part");
    let renamed = model.file("renamed.gguf");
    let renamed = renamed.to_str().expect("UTF-8");
    fails(&["generate", "--json", "--model", renamed], 1, "does not end in -00001-of-00003.gguf");
}
