//! Configurations from metadata alone: end tokens, rotary embeddings under old and new keys,
//! refusals.
use std::collections::HashMap;

use candle_core::Shape;
use candle_core::quantized::GgmlDType;
use candle_core::quantized::gguf_file::{Content, TensorInfo, Value, VersionedMagic};

use super::config::config;
use super::metadata::Metadata;
use super::names;
use crate::config::{Architecture, ModelConfig};
use crate::error::ConfigError;
use crate::rope::{Scaling, Yarn};

fn text(text: &str) -> Value {
    Value::String(text.to_owned())
}

/// Makes a small model of this architecture with further keys; a key without a dot gets the
/// architecture's prefix.
fn content(architecture: &str, more: &[(&str, Value)]) -> Content {
    let own = |key: &str| format!("{architecture}.{key}");
    let mut metadata = HashMap::from([("general.architecture".to_owned(), text(architecture))]);
    for (key, count) in [
        ("embedding_length", 64),
        ("block_count", 5),
        ("attention.head_count", 8),
        ("attention.head_count_kv", 4),
        ("feed_forward_length", 172),
        ("context_length", 4096),
    ] {
        metadata.insert(own(key), Value::U32(count));
    }
    for (key, value) in more {
        let is_general = key.starts_with("tokenizer.") || key.starts_with("general.");
        metadata.insert(if is_general { (*key).to_owned() } else { own(key) }, value.clone());
    }
    let info = TensorInfo { ggml_dtype: GgmlDType::F32, shape: Shape::from((512, 64)), offset: 0 };
    let tensor_infos = HashMap::from([("token_embd.weight".to_owned(), info)]);
    Content { magic: VersionedMagic::GgufV3, metadata, tensor_infos, tensor_data_offset: 0 }
}

fn read(architecture: &str, more: &[(&str, Value)]) -> Result<ModelConfig, ConfigError> {
    config(&[&content(architecture, more)], None)
}

fn refused(architecture: &str, more: &[(&str, Value)]) -> String {
    read(architecture, more).expect_err(architecture).to_string()
}

#[test]
fn names_are_translated() {
    for (architecture, name, expected) in [
        (Architecture::Llama, "token_embd.weight", Some("model.embed_tokens.weight")),
        (
            Architecture::Llama,
            "blk.12.attn_q.weight",
            Some("model.layers.12.self_attn.q_proj.weight"),
        ),
        (Architecture::Llama, "blk.0.ffn_down.bias", Some("model.layers.0.mlp.down_proj.bias")),
        (Architecture::Llama, "blk.0.ffn_up.weight", Some("model.layers.0.mlp.up_proj.weight")),
        (Architecture::Phi3, "blk.0.ffn_up.weight", Some("model.layers.0.mlp.gate_up_proj.weight")),
        (Architecture::Llama, "blk.0.ffn_gate_exps.weight", None),
        (Architecture::Llama, "blk.0.ssm_a", None),
        (Architecture::GraniteHybrid, "blk.0.ssm_a", Some("model.layers.0.mamba.A_log")),
        (
            Architecture::Lfm2,
            "blk.3.ffn_gate.weight",
            Some("model.layers.3.feed_forward.w1.weight"),
        ),
        (Architecture::Llama, "token_embd_norm.weight", None),
        (Architecture::Qwen35, "blk.0.ssm_a", Some("model.layers.0.linear_attn.A_log")),
        (
            Architecture::Qwen3Next,
            "blk.1.attn_gate.weight",
            Some("model.layers.1.linear_attn.in_proj_z.weight"),
        ),
        (Architecture::Qwen35, "blk.13.attn_q.weight", None),
        (Architecture::Qwen35, "blk.12.nextn.enorm.weight", None),
        (Architecture::Llama, "blk.x", None),
        (Architecture::Llama, "v.blk.0.attn_q.weight", None),
    ] {
        let known = names::hugging_face(architecture, 13, name).map(|known| known.name);
        assert_eq!(known.as_deref(), expected, "{name}");
    }
}

#[test]
fn architectures_are_run_or_refused_by_name() {
    for name in ["llama", "qwen2", "qwen3", "phi3", "olmo2", "granite", "smollm3"] {
        assert_eq!(read(name, &[]).expect(name).architecture.name(), name);
    }
    for name in ["gemma3", "mistral", "deepseek2", "mamba", "lfm2moe", "granitemoe", "qwen3moe", ""]
    {
        let error = refused(name, &[]);
        assert!(error.contains(&format!("{name:?} is not supported, expected llama")), "{error}");
    }
    let error = config(&[&Content { metadata: HashMap::new(), ..content("llama", &[]) }], None);
    assert!(error.expect_err("no keys").to_string().starts_with("general.architecture"));
}

#[test]
fn values_per_layer_must_be_equal() {
    let list = |counts: &[u32]| Value::Array(counts.iter().copied().map(Value::U32).collect());
    let equal = read("llama", &[("attention.head_count_kv", list(&[4; 5]))]).expect("equal");
    assert_eq!(equal, read("llama", &[]).expect("one number"));
    for (key, counts, words) in [
        (
            "attention.head_count_kv",
            &[4, 4, 2, 4, 4][..],
            "llama.attention.head_count_kv is [4, 4, 2, 4, 4]: it differs by layer",
        ),
        ("feed_forward_length", &[172, 100, 172, 172, 172], "it differs by layer"),
        ("attention.head_count_kv", &[], "llama.attention.head_count_kv has no entries"),
    ] {
        let error = refused("llama", &[(key, list(counts))]);
        assert!(error.contains(words), "{error}");
    }
}

#[test]
fn mixtures_of_experts_are_named() {
    let error = refused("llama", &[("expert_count", Value::U32(8))]);
    assert!(error.contains("llama.expert_count is 8: a mixture of experts"), "{error}");
    read("llama", &[("expert_count", Value::U32(0))]).expect("no experts");
}

#[test]
fn every_end_token_is_a_stop_token() {
    let ids = |ids: &[i32]| Value::Array(ids.iter().copied().map(Value::I32).collect());
    let words = |words: &[&str]| Value::Array(words.iter().map(|word| text(word)).collect());
    for (more, ends) in [
        (&[][..], &[][..]),
        (&[("tokenizer.ggml.eos_token_id", Value::U32(2))], &[2]),
        (&[("tokenizer.ggml.eot_token_id", Value::U32(7))], &[7]),
        (&[("tokenizer.ggml.eom_token_id", Value::I64(8))], &[8]),
        (&[("tokenizer.ggml.eos_token_id", Value::I32(-1))], &[]),
        (&[("tokenizer.ggml.eos_token_ids", ids(&[9, 4, 9]))], &[4, 9]),
        (
            &[
                ("tokenizer.ggml.eos_token_id", Value::U32(2)),
                ("tokenizer.ggml.eot_token_id", Value::U32(2)),
                ("tokenizer.ggml.eom_token_id", Value::U32(1)),
            ],
            &[1, 2],
        ),
        (
            &[
                ("tokenizer.ggml.eos_token_id", Value::U32(3)),
                ("tokenizer.ggml.tokens", words(&["a", "<|eot_id|>", "b", "<|im_end|>", "<EOT>"])),
            ],
            &[1, 3, 4],
        ),
    ] {
        assert_eq!(read("llama", more).expect("a model").eos, ends, "{more:?}");
    }
    for value in [text("2"), Value::F32(2.0), ids(&[-3])] {
        let error = refused("llama", &[("tokenizer.ggml.eot_token_id", value)]);
        assert!(error.contains("tokenizer.ggml.eot_token_id is not a token id"), "{error}");
    }
}

#[test]
fn the_template_of_chats_is_the_only_one_or_the_default() {
    const ONE: &str = "tokenizer.chat_template";
    let named = |name: &str, source: &str| (format!("{ONE}.{name}"), text(source));
    let one = || (ONE.to_owned(), text("one"));
    let list = text("not a template");
    for (keys, expected) in [
        (vec![], None),
        (vec![("tokenizer.chat_templates".to_owned(), list)], None),
        (vec![one()], Some((ONE, "one"))),
        (vec![one(), named("default", "d"), named("a", "a")], Some((ONE, "one"))),
        (
            vec![named("a", "a"), named("default", "d")],
            Some(("tokenizer.chat_template.default", "d")),
        ),
        (
            vec![named("tool_use", "t"), named("rag", "r")],
            Some(("tokenizer.chat_template.rag", "r")),
        ),
    ] {
        let keys: Vec<_> = keys.iter().map(|(key, value)| (key.as_str(), value.clone())).collect();
        let content = content("llama", &keys);
        assert_eq!(Metadata::new(&content).chat_template().expect("texts"), expected, "{keys:?}");
    }
    let number = content("llama", &[(ONE, Value::U32(5))]);
    let error = Metadata::new(&number).chat_template().expect_err("a number").to_string();
    assert_eq!(error, "tokenizer.chat_template is not a text");
}

#[test]
fn special_tokens_are_named_by_their_ids() {
    let words = ["<unk>", "<s>", "</s>"].map(text).to_vec();
    let content = content(
        "llama",
        &[
            ("tokenizer.ggml.tokens", Value::Array(words)),
            ("tokenizer.ggml.bos_token_id", Value::U32(1)),
            ("tokenizer.ggml.eos_token_id", Value::U64(2)),
            ("tokenizer.ggml.padding_token_id", Value::I32(-1)),
            ("tokenizer.ggml.unknown_token_id", Value::U32(3)),
        ],
    );
    let tokens: Vec<_> = Metadata::new(&content).special_tokens().collect();
    assert_eq!(tokens, [("bos_token", "<s>"), ("eos_token", "</s>")]);
}

fn scaling(more: &[(&str, Value)]) -> Scaling {
    read("llama", more).expect("a model").rope.scaling
}

#[test]
fn old_and_new_factor_keys_scale() {
    let factor = |key, factor| (key, Value::F32(factor));
    let kind = |name: &str| ("rope.scaling.type", text(name));
    let linear = Scaling::Linear { factor: 4.0 };
    for (more, expected) in [
        (&[][..], &Scaling::None),
        (&[factor("rope.scaling.factor", 4.0)], &linear),
        (&[factor("rope.scale_linear", 4.0)], &linear),
        (&[kind("linear"), factor("rope.scaling.factor", 4.0)], &linear),
        (&[kind("linear"), factor("rope.scale_linear", 4.0)], &linear),
        // The newer key takes precedence, also as 0, which means no scaling.
        (&[factor("rope.scaling.factor", 4.0), factor("rope.scale_linear", 8.0)], &linear),
        (&[factor("rope.scaling.factor", 0.0), factor("rope.scale_linear", 8.0)], &Scaling::None),
        (&[kind("linear")], &Scaling::None),
        (&[factor("rope.scaling.factor", 1.0)], &Scaling::None),
        (&[kind("none"), factor("rope.scaling.factor", 4.0)], &Scaling::None),
        (&[("rope.scaling.factor", Value::U32(4))], &linear),
    ] {
        assert_eq!(&scaling(more), expected, "{more:?}");
    }
    let stretched = |attention_factor| Scaling::LongRope { short: vec![4.0; 4], attention_factor };
    let more = [factor("rope.scaling.factor", 4.0), factor("rope.scaling.attn_factor", 1.5)];
    assert_eq!(scaling(&more), stretched(1.5));
}

#[test]
fn yarn_has_its_own_keys() {
    let more = [
        ("rope.scaling.type", text("yarn")),
        ("rope.scaling.factor", Value::F32(4.0)),
        ("rope.scaling.original_context_length", Value::U32(1024)),
    ];
    let expected = Yarn {
        factor: 4.0,
        original_context: 1024,
        beta_fast: 32.0,
        beta_slow: 1.0,
        truncate: true,
        attention_factor: 1.0 + 0.1 * 4_f64.ln(),
    };
    assert_eq!(scaling(&more), Scaling::Yarn(expected));
    let own = [
        ("rope.scaling.yarn_beta_fast", Value::F32(16.0)),
        ("rope.scaling.yarn_beta_slow", Value::F32(2.0)),
        ("rope.scaling.attn_factor", Value::F32(0.5)),
    ];
    let changed = Yarn {
        beta_fast: 16.0,
        beta_slow: 2.0,
        attention_factor: 0.5 * (1.0 + 0.1 * 4_f64.ln()),
        ..expected
    };
    assert_eq!(scaling(&[&more[..], &own].concat()), Scaling::Yarn(changed));
    let without = [("rope.scaling.yarn_ext_factor", Value::F32(0.0))];
    let linear = Scaling::Linear { factor: 4.0 };
    assert_eq!(scaling(&[&more[..], &without].concat()), linear);
    let part = [("rope.scaling.yarn_ext_factor", Value::F32(0.5))];
    let error = refused("llama", &[&more[..], &part].concat());
    assert!(error.contains("yarn_ext_factor is 0.5, expected 0 or 1"), "{error}");
}

#[test]
fn longrope_takes_its_short_factors() {
    let more = [
        ("rope.scaling.type", text("longrope")),
        ("rope.scaling.attn_factor", Value::F32(1.25)),
        ("rope.scaling.original_context_length", Value::U32(2048)),
    ];
    let short = vec![1.0, 1.5, 2.0, 4.0];
    let read = config(&[&content("phi3", &more)], Some(short.clone())).expect("a model");
    assert_eq!(read.rope.scaling, Scaling::LongRope { short, attention_factor: 1.25 });
    assert_eq!(read.context, 2048, "the short factors hold no further");
    // Converters write the factors without a type.
    let without = config(&[&content("phi3", &more[1..])], Some(vec![1.0, 1.5, 2.0, 4.0]));
    assert_eq!(without.expect("a model").rope, read.rope);
    let yarn = [("rope.scaling.type", text("yarn"))];
    let both = config(&[&content("phi3", &yarn)], Some(vec![1.0; 4])).expect_err("both");
    assert!(both.to_string().contains("beside rope.scaling.type yarn"), "{both}");
    let error = refused("phi3", &more);
    assert!(error.contains("rope_factors_short.weight is missing"), "{error}");
}

#[test]
fn invalid_values_are_refused() {
    for (key, value, words) in [
        ("rope.scaling.type", text("su"), "llama.rope.scaling.type \"su\" is not supported"),
        ("rope.scaling.type", Value::U32(1), "llama.rope.scaling.type is not a text"),
        ("rope.scaling.factor", Value::F32(-4.0), "rope.scaling.factor is -4"),
        ("rope.scaling.factor", Value::F32(f32::NAN), "is not a finite number"),
        ("rope.scale_linear", text("4"), "is not a finite number"),
        ("rope.freq_base", Value::F32(-1.0), "rope.freq_base is -1"),
        ("attention.head_count", Value::U32(0), "llama.attention.head_count is 0"),
        ("attention.head_count_kv", Value::U32(3), "is not a multiple"),
        ("attention.value_length", Value::U32(4), "attention.value_length is 4, but K has 8"),
        ("block_count", Value::U64(1 << 40), "block_count is not one whole number"),
        ("block_count", Value::U32(70_000), "at most 65535"),
    ] {
        let error = refused("llama", &[(key, value)]);
        assert!(error.contains(words), "{error}");
    }
}

#[test]
fn a_vocabulary_beyond_32_bits_is_refused() {
    let mut content = content("llama", &[]);
    let embedding = content.tensor_infos.get_mut("token_embd.weight").expect("an embedding");
    embedding.shape = Shape::from((1 << 40, 64));
    let error = config(&[&content], None).expect_err("too many").to_string();
    assert_eq!(error, "vocab_size is 1099511627776, at most 4294967295 is possible");
}
