//! Valid and invalid contents of a `config.json`.
#![expect(clippy::float_cmp, reason = "numbers of a file are used unchanged")]
mod hybrids;
mod layers;
mod published;

use serde_json::{Value, json};

use super::*;
use crate::rope::{Dynamic, Llama3, Yarn};

const GOOD: &str = r#"{
    "model_type": "llama", "hidden_act": "silu", "hidden_size": 64, "intermediate_size": 172,
    "num_hidden_layers": 5, "num_attention_heads": 8, "num_key_value_heads": 4,
    "vocab_size": 512, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
    "eos_token_id": 2, "bos_token_id": 1, "tie_word_embeddings": true
}"#;

/// Returns `GOOD` with the fields of another object set.
fn good_with(changes: &Value) -> Value {
    let mut json: Value = serde_json::from_str(GOOD).expect("GOOD");
    let fields = json.as_object_mut().expect("object");
    for (field, value) in changes.as_object().expect("object") {
        fields.insert(field.clone(), value.clone());
    }
    json
}

fn config(changes: &Value) -> ModelConfig {
    let text = good_with(changes).to_string();
    ModelConfig::parse(&text).unwrap_or_else(|error| panic!("{changes}: {error:#}"))
}

fn refusal(changes: &Value) -> String {
    let text = good_with(changes).to_string();
    format!("{:#}", ModelConfig::parse(&text).expect_err(&text))
}

/// Returns `GOOD` with one field set to a JSON value, or removed.
fn parse(field: &str, value: &str) -> Result<ModelConfig, Error> {
    let mut json: Value = serde_json::from_str(GOOD).expect("GOOD");
    let fields = json.as_object_mut().expect("object");
    match value {
        "" => fields.remove(field),
        value => fields.insert(field.to_owned(), serde_json::from_str(value).expect("value")),
    };
    ModelConfig::parse(&json.to_string())
}

fn message(field: &str, value: &str) -> String {
    format!("{:#}", parse(field, value).expect_err(value))
}

#[test]
fn defaults_are_those_of_llama() {
    let config = ModelConfig::parse(GOOD).expect("GOOD");
    assert_eq!((config.head_dim, config.kv_heads, config.layers()), (8, 4, 5));
    assert_eq!((config.bos, config.eos.as_slice()), (Some(1), [2].as_slice()));
    assert_eq!(config.rope.scaling, Scaling::None);
    assert_eq!(config.rope.theta, 10000.0);
    for value in ["", "null"] {
        assert_eq!(parse("num_key_value_heads", value).expect("MHA").kv_heads, 8);
        assert_eq!(parse("head_dim", value).expect("derived").head_dim, 8);
        assert_eq!(parse("rope_scaling", value).expect("none").rope.scaling, Scaling::None);
        assert_eq!(parse("model_type", value).expect("llama").architecture, Architecture::Llama);
    }
    assert_eq!(parse("head_dim", "32").expect("explicit").head_dim, 32);
    let window = LayerKind { attends: true, window_left: Some(127), rotates: true };
    assert_eq!(parse("sliding_window", "128").expect("window").layer_kinds, [window; 5]);
    assert_eq!(parse("partial_rotary_factor", "0.5").expect("partial").rope.rotary_dim, 4);
}

#[test]
fn every_rope_scaling_is_named() {
    let linear = r#"{"type": "linear", "factor": 4.0}"#;
    let linear = parse("rope_scaling", linear).expect("linear").rope.scaling;
    assert_eq!(linear, Scaling::Linear { factor: 4.0 });
    let llama3 = r#"{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}"#;
    let llama3 = parse("rope_scaling", llama3).expect("llama3").rope.scaling;
    assert!(matches!(llama3, Scaling::Llama3(Llama3 { original_context: 8192, .. })));
    let parameters = r#"{"rope_type": "default", "rope_theta": 5e5}"#;
    assert_eq!(parse("rope_parameters", parameters).expect("default").rope.theta, 5e5);
    let dynamic = parse("rope_scaling", r#"{"type": "dynamic", "factor": 2.5}"#).expect("dynamic");
    let expected = Dynamic { factor: 2.5, original_context: 512 };
    assert_eq!(dynamic.rope.scaling, Scaling::Dynamic(expected));
    assert_eq!(dynamic.context, 1280);
    let error = message("rope_scaling", r#"{"type": "ntk", "factor": 4.0}"#);
    assert!(error.contains("\"ntk\" is not supported"), "{error}");
    for name in ["linear", "dynamic", "yarn"] {
        let error = message("rope_scaling", &format!(r#"{{"type": "{name}"}}"#));
        assert!(error.contains("rope_scaling factor is missing"), "{error}");
        let error = message("rope_parameters", &format!(r#"{{"type": "{name}", "factor": 0.0}}"#));
        assert!(error.contains("rope_parameters factor is 0, a number above 0"), "{error}");
    }
}

#[test]
fn yarn_is_read_with_all_its_options() {
    let yarn = |value: Value| match config(&json!({ "rope_scaling": value })) {
        ModelConfig { rope: RopeConfig { scaling: Scaling::Yarn(yarn), .. }, context, .. } => {
            (yarn, context)
        }
        other => panic!("{other:?}"),
    };
    let (plain, context) = yarn(json!({"type": "yarn", "factor": 4}));
    let magnitude = |scale: f64| 0.1 * scale * 4.0_f64.ln() + 1.0;
    let expected = Yarn {
        factor: 4.0,
        original_context: 512,
        beta_fast: 32.0,
        beta_slow: 1.0,
        truncate: true,
        attention_factor: magnitude(1.0),
    };
    assert_eq!((plain, context), (expected, 2048));
    // As Qwen writes it for a context that is not extended, and as DeepSeek does.
    for original in [512, 128] {
        let (read, context) = yarn(json!({
            "type": "yarn", "factor": 4.0, "original_max_position_embeddings": original
        }));
        assert_eq!((read.original_context, context), (original, 512.max(original * 4)));
    }
    // The factor follows from the contexts.
    let (read, _) = yarn(json!({
        "rope_type": "yarn", "factor": null, "original_max_position_embeddings": 64
    }));
    assert_eq!(read.factor, 8.0);
    let (read, _) = yarn(json!({
        "rope_type": "yarn", "factor": 4.0, "beta_fast": 16, "beta_slow": 0.5, "mscale": 0.8,
        "mscale_all_dim": 0.4, "truncate": false
    }));
    assert_eq!((read.beta_fast, read.beta_slow, read.truncate), (16.0, 0.5, false));
    assert_eq!(read.attention_factor, magnitude(0.8) / magnitude(0.4));
    let (read, _) = yarn(json!({"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.5}));
    assert_eq!(read.attention_factor, 1.5);
}

#[test]
fn old_and_new_keys_may_stand_side_by_side() {
    let llama3 = |names: &Value| {
        let mut value = json!({
            "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192
        });
        let fields = value.as_object_mut().expect("object");
        fields.extend(names.as_object().expect("object").clone());
        value
    };
    let expected = config(&json!({
        "rope_theta": 5e5, "rope_scaling": llama3(&json!({"rope_type": "llama3"}))
    }));
    let both = llama3(&json!({"rope_type": "llama3", "type": "llama3"}));
    let new = llama3(&json!({"rope_type": "llama3", "rope_theta": 500_000}));
    for same in [
        json!({"rope_theta": 5e5, "rope_scaling": both}),
        json!({"rope_theta": 5e5, "rope_scaling": llama3(&json!({"type": "llama3"}))}),
        json!({"rope_theta": 5e5,
            "rope_scaling": llama3(&json!({"type": "llama3", "rope_type": null}))}),
        json!({"rope_parameters": new}),
        json!({"rope_parameters": new, "rope_theta": 500_000.0, "rope_scaling": null}),
        json!({"rope_parameters": new, "rope_theta": 5e5, "rope_scaling": both}),
        json!({"rope_parameters": new, "rope_scaling": {"type": "llama3"}}),
        json!({"rope_parameters": new, "torch_dtype": "bfloat16", "dtype": "bfloat16"}),
        json!({"rope_parameters": new, "torch_dtype": "torch.float16", "dtype": "float16"}),
        json!({"rope_parameters": new, "original_max_position_embeddings": 8192}),
        json!({"rope_parameters": new, "layer_types": vec!["full_attention"; 5]}),
        json!({"rope_parameters": new, "architectures": ["LlamaForCausalLM"]}),
    ] {
        assert_eq!(config(&same), expected, "{same}");
    }
}

#[test]
fn contradicting_keys_are_refused_by_name() {
    for (changes, words) in [
        (
            json!({"rope_scaling": {"rope_type": "llama3", "type": "linear", "factor": 2.0}}),
            "rope_scaling rope_type is llama3, but rope_scaling type is linear",
        ),
        (
            json!({"rope_scaling": {"type": "linear", "factor": 2.0},
                "rope_parameters": {"rope_type": "default"}}),
            "rope_scaling type is linear, but rope_parameters rope_type is default",
        ),
        (
            json!({"rope_scaling": {"type": "linear", "factor": 2.0},
                "rope_parameters": {"rope_type": "linear", "factor": 4.0}}),
            "rope_scaling factor is 2, but rope_parameters factor is 4",
        ),
        (
            json!({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}}),
            "rope_theta is 10000, but rope_parameters rope_theta is 500000",
        ),
        (
            json!({"partial_rotary_factor": 1.0,
                "rope_parameters": {"partial_rotary_factor": 0.5}}),
            "partial_rotary_factor is 1, but rope_parameters partial_rotary_factor is 0.5",
        ),
        (
            json!({"original_max_position_embeddings": 128, "rope_scaling":
                {"type": "yarn", "factor": 4, "original_max_position_embeddings": 64}}),
            "original_max_position_embeddings is 128, but rope_scaling \
             original_max_position_embeddings is 64",
        ),
        (
            json!({"layer_types": vec!["sliding_attention"; 5]}),
            "layer_types names sliding_attention, but there is no sliding_window",
        ),
        (
            json!({"layer_types": vec!["full_attention"; 5], "sliding_window": 16}),
            "layer_types names full_attention, but all layers of llama have windows",
        ),
    ] {
        let error = refusal(&changes);
        assert!(error.contains(words), "{changes}: {error}");
    }
}

#[test]
fn tokens_that_end_a_text_may_be_written_in_every_way() {
    for (value, expected) in [
        (json!(2), &[2][..]),
        (json!([2, 7]), &[2, 7]),
        (json!([]), &[]),
        (json!(null), &[]),
        (json!(-1), &[]),
        (json!([-1, 5]), &[5]),
    ] {
        assert_eq!(config(&json!({"eos_token_id": value})).eos, expected, "{value}");
        let file = json!({"eos_token_id": value, "temperature": 0.6}).to_string();
        let got = ModelConfig::parse_generation(&file).expect("generation_config.json");
        assert_eq!(got, (!value.is_null()).then(|| expected.to_vec()), "{value}");
        let bos = config(&json!({"bos_token_id": value})).bos;
        assert_eq!(bos, expected.first().copied(), "{value}");
    }
    assert!(parse("eos_token_id", "").expect("absent").eos.is_empty());
    assert_eq!(ModelConfig::parse_generation("{}").expect("nothing"), None);
    for value in [json!(-2), json!("</s>"), json!(1.5), json!([[2]]), json!(4_294_967_296_u64)] {
        for field in ["eos_token_id", "bos_token_id"] {
            let error = refusal(&json!({ field: value }));
            let words = "expected a token id, a list of them, or null or -1 for none";
            assert!(error.contains(field) && error.contains(words), "{value}: {error}");
        }
    }
}

#[test]
fn an_unsupported_architecture_is_refused_by_its_name() {
    // No other field that a decoder needs is set.
    for name in [
        "gpt2",
        "falcon",
        "gemma",
        "gemma2",
        "gemma3_text",
        "mixtral",
        "qwen3_moe",
        "deepseek_v3",
        "starcoder2",
        "cohere",
        "gpt_oss",
        "jamba",
        "olmo3",
    ] {
        let text = json!({"model_type": name, "n_layer": 12}).to_string();
        let error = ModelConfig::parse(&text).expect_err(name).to_string();
        let words = format!("model_type \"{name}\" is not supported, expected llama, mistral,");
        assert!(error.contains(&words), "{error}");
    }
    for (file, words) in [
        (
            json!({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}}),
            "\"gemma3\"",
        ),
        (
            json!({"model_type": "llama4", "text_config": {"model_type": "llama4_text"}}),
            "\"llama4\"",
        ),
        (json!({"model_type": "gemma3", "text_config": {"hidden_size": 2560}}), "\"gemma3\""),
        (
            json!({"model_type": "mistral3", "text_config": {"model_type": "ministral3"}}),
            "\"ministral3\"",
        ),
        (json!({"architectures": ["GPT2LMHeadModel"]}), "\"GPT2LMHeadModel\""),
    ] {
        let error = ModelConfig::parse(&file.to_string()).expect_err("refused").to_string();
        assert!(error.contains(&format!("{words} is not supported")), "{error}");
    }
    let error = refusal(&json!({"quantization_config": {"quant_method": "gptq", "bits": 4}}));
    assert!(error.contains("quantization_config \"gptq\" is not supported"), "{error}");
}

#[test]
fn the_text_part_of_a_wrapper_is_the_model() {
    let wrapper = |outer: &Value, inner: &Value| {
        let mut file = json!({
            "model_type": "mistral3", "architectures": ["Mistral3ForConditionalGeneration"],
            "vision_config": {"hidden_size": 16},
        });
        let mut text = good_with(inner);
        let fields = text.as_object_mut().expect("object");
        fields.insert("model_type".to_owned(), json!("mistral"));
        fields.remove("tie_word_embeddings");
        let fields = file.as_object_mut().expect("object");
        fields.extend(outer.as_object().expect("object").clone());
        fields.insert("text_config".to_owned(), text);
        ModelConfig::parse(&file.to_string())
    };
    let none = json!({});
    let config = wrapper(&none, &json!({"sliding_window": null})).expect("mistral3");
    assert_eq!((config.architecture, config.tied), (Architecture::Mistral, false));
    assert_eq!((config.hidden, layers::windows(&config)), (64, vec![None; 5]));
    let tied = wrapper(&json!({"tie_word_embeddings": true, "hidden_size": 64}), &none);
    assert!(tied.expect("the same size twice").tied);
    let error = wrapper(&json!({"hidden_size": 32}), &none).expect_err("two sizes").to_string();
    assert!(error.contains("hidden_size is 32, but text_config hidden_size is 64"), "{error}");
    let error = wrapper(&none, &json!({"hidden_size": "64"})).expect_err("text").to_string();
    assert!(error.contains("text_config hidden_size has an invalid type"), "{error}");
}

#[test]
fn short_factors_limit_the_context() {
    let long = json!({"type": "longrope", "short_factor": [1.0, 1.5, 2.0, 3.0],
        "long_factor": [1.0, 2.0, 4.0, 8.0], "original_max_position_embeddings": 128});
    let config = |scaling: &Value| config(&json!({"model_type": "phi3", "rope_scaling": scaling}));
    let read = config(&long);
    let attention_factor = (1.0 + 4.0_f64.ln() / 128.0_f64.ln()).sqrt();
    let expected = Scaling::LongRope { short: vec![1.0, 1.5, 2.0, 3.0], attention_factor };
    assert_eq!((read.rope.scaling, read.context), (expected, 128));
    for name in ["su", "yarn"] {
        let mut old = long.clone();
        *old.get_mut("type").expect("a type") = json!(name);
        assert_eq!(config(&old), config(&long), "{name}");
    }
    for (field, value, words) in [
        ("short_factor", json!([1.0, 2.0]), "2 factors for a rotary dimension of 8"),
        ("short_factor", json!([1.0, 0.0, 1.0, 1.0]), "short_factor is 0"),
        ("short_factor", json!(null), "short_factor is missing"),
        ("original_max_position_embeddings", json!(null), "embeddings is missing"),
    ] {
        let mut bad = long.clone();
        *bad.get_mut(field).expect(field) = value;
        let error = refusal(&json!({"model_type": "phi3", "rope_scaling": bad}));
        assert!(error.contains(words), "{error}");
    }
    let by_layer = json!({"rope_parameters": {"full_attention": {"rope_type": "default"}}});
    let error = refusal(&by_layer);
    assert!(error.contains("rope_parameters full_attention gives layers parameters"), "{error}");
}

#[test]
fn impossible_shapes_are_refused() {
    for (field, value, words) in [
        ("num_attention_heads", "0", "num_attention_heads is 0"),
        ("num_key_value_heads", "0", "num_key_value_heads is 0"),
        ("num_key_value_heads", "3", "8 is not a multiple of num_key_value_heads 3"),
        ("num_attention_heads", "7", "64 is not a multiple of num_attention_heads 7"),
        ("num_hidden_layers", "0", "num_hidden_layers is 0"),
        ("num_hidden_layers", "70000", "at most 65535"),
        ("head_dim", "0", "head_dim is 0"),
        ("head_dim", "7", "7 is not a multiple"),
        ("head_dim", "4000000000", "at most"),
        ("vocab_size", "0", "vocab_size is 0"),
        ("vocab_size", "-1", "invalid value"),
        ("hidden_size", "", "hidden_size is missing"),
        ("hidden_size", "\"64\"", "hidden_size has an invalid type"),
        ("max_position_embeddings", "", "max_position_embeddings is missing"),
        ("max_position_embeddings", "0", "max_position_embeddings is 0"),
        ("rope_theta", "-1.0", "rope_theta is -1"),
        ("rope_scaling", r#"{"type": "yarn", "factor": 4, "rope_theta": 1}"#, "a base above 1"),
        ("rope_scaling", "4", "rope_scaling is 4, expected an object"),
        ("rms_norm_eps", "0.0", "rms_norm_eps is 0"),
        ("partial_rotary_factor", "0.01", "rotary_dim is 0"),
        ("sliding_window", "0", "sliding_window is 0"),
        ("model_type", "\"gpt2\"", "\"gpt2\" is not supported"),
        ("model_type", "7", "model_type has an invalid type"),
        ("hidden_act", "\"gelu\"", "\"gelu\" is not supported"),
    ] {
        let error = message(field, value);
        assert!(error.contains(words), "{field} = {value}: {error}");
    }
    assert!(ModelConfig::parse("").is_err());
    let error = ModelConfig::parse("[]").expect_err("a list").to_string();
    assert!(error.contains("the file is [], expected an object"), "{error}");
}
