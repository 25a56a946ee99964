//! What a `config.json` may and may not say.
#![expect(clippy::float_cmp, reason = "numbers of a file are taken over as they are")]
use super::*;
use crate::rope::Llama3;

const GOOD: &str = r#"{
    "model_type": "llama", "hidden_act": "silu", "hidden_size": 64, "intermediate_size": 172,
    "num_hidden_layers": 5, "num_attention_heads": 8, "num_key_value_heads": 4,
    "vocab_size": 512, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
    "eos_token_id": 2, "bos_token_id": 1, "tie_word_embeddings": true
}"#;

/// `GOOD` with one field set to a JSON value, or removed.
fn parse(field: &str, value: &str) -> anyhow::Result<ModelConfig> {
    let mut json: serde_json::Value = serde_json::from_str(GOOD).expect("GOOD");
    match value {
        "" => json.as_object_mut().expect("object").remove(field),
        value => json
            .as_object_mut()
            .expect("object")
            .insert(field.to_owned(), serde_json::from_str(value).expect("value")),
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
    assert_eq!(parse("num_key_value_heads", "").expect("MHA").kv_heads, 8);
    assert_eq!(parse("head_dim", "32").expect("explicit").head_dim, 32);
    assert_eq!(parse("eos_token_id", "[2, 7]").expect("list").eos, [2, 7]);
    let window = LayerKind { window_left: Some(127), rotates: true };
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
    let error = message("rope_scaling", r#"{"type": "ntk", "factor": 4.0}"#);
    assert!(error.contains("\"ntk\" is not supported"), "{error}");
    let error = message("rope_scaling", r#"{"type": "linear"}"#);
    assert!(error.contains("factor is missing"), "{error}");
    let error = message("rope_scaling", r#"{"type": "linear", "factor": 0.0}"#);
    assert!(error.contains("above 0"), "{error}");
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
        ("hidden_size", "", "missing field `hidden_size`"),
        ("hidden_size", "\"64\"", "invalid type"),
        ("max_position_embeddings", "", "missing field `max_position_embeddings`"),
        ("rope_theta", "-1.0", "rope_theta is -1"),
        ("rms_norm_eps", "0.0", "rms_norm_eps is 0"),
        ("partial_rotary_factor", "0.01", "rotary_dim is 0"),
        ("sliding_window", "0", "sliding_window is 0"),
        ("model_type", "\"gpt2\"", "\"gpt2\" is not supported"),
        ("hidden_act", "\"gelu\"", "\"gelu\" is not supported"),
    ] {
        let error = message(field, value);
        assert!(error.contains(words), "{field} = {value}: {error}");
    }
    assert!(ModelConfig::parse("").is_err());
    assert!(ModelConfig::parse("[]").is_err());
}
