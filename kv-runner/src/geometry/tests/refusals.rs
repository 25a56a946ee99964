//! Configurations with contradictions, missing fields and hostile values.
use super::*;

#[test]
fn contradicting_and_missing_fields_are_named() {
    let llama = || usual("llama", 4096, 32, 32, Some(8));
    for (more, words) in [
        (json!({"hidden_size": null}), "hidden_size is missing"),
        (json!({"num_hidden_layers": null}), "num_hidden_layers is missing"),
        (json!({"num_attention_heads": null}), "num_attention_heads is missing"),
        (json!({"num_attention_heads": 0}), "num_attention_heads is 0"),
        (json!({"num_key_value_heads": 0}), "num_key_value_heads is 0"),
        (json!({"num_key_value_heads": 5}), "num_attention_heads 32 is not a multiple"),
        (json!({"num_attention_heads": 24}), "hidden_size 4096 is not a multiple"),
        (json!({"hidden_size": -1}), "hidden_size is -1, expected a whole number"),
        (json!({"hidden_size": "big"}), "hidden_size is \"big\", expected"),
        (json!({"hidden_size": 4096.5}), "hidden_size is 4096.5, expected"),
        (json!({"head_dim": 0}), "head_dim is 0"),
        (json!({"head_dim": 18_446_744_073_709_551_615_u64}), "at most 1048576"),
        (json!({"num_hidden_layers": 100_000}), "num_hidden_layers is 100000, at most 65535"),
        (json!({"n_layer": 31}), "num_hidden_layers is 32, but n_layer is 31"),
        (json!({"n_head": 16}), "num_attention_heads is 32, but n_head is 16"),
        (json!({"layer_types": ["full_attention"]}), "layer_types has 1 entries for 32 layers"),
        (json!({"layer_types": vec!["new_attention"; 32]}), "layer_types is \"new_attention\""),
        (json!({"layer_types": "full"}), "layer_types is \"full\", expected a list"),
        (json!({"sliding_window": -4}), "sliding_window is -4"),
        (json!({"sliding_window_pattern": 0}), "sliding_window_pattern is 0"),
        (json!({"use_sliding_window": 1}), "use_sliding_window is 1, expected true or false"),
        (json!({"kv_lora_rank": 512}), "qk_rope_head_dim is missing"),
        (json!({"num_key_value_heads": [8, 8]}), "num_key_value_heads has 2 entries"),
        (json!({"attn_layer_period": 0}), "attn_layer_period is 0"),
        (json!({"max_position_embeddings": 0}), "max_position_embeddings is 0"),
        (json!({"attention_types": [[["global"], 4_000_000_000_u64]]}), "at most 1048576"),
        (json!({"attention_types": [[["global"], 1_000_000]]}), "33 entries for 32 layers"),
    ] {
        let error = read(&with(llama(), more.clone())).expect_err("refused");
        assert!(error.contains(words), "{more}: {error}");
    }
}

/// Fields that a geometry is read from.
const FIELDS: &str = "
    model_type hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim
    max_position_embeddings sliding_window sliding_window_pattern layer_types layers_block_type
    block_types hybrid_override_pattern attn_type_list attention_layers attention_types
    attn_layer_indices cross_attention_layers linear_attn_config attn_layer_period
    full_attention_interval no_rope_layers attention_chunk_size block_configs kv_lora_rank
    qk_rope_head_dim v_head_dim num_kv_shared_layers attn_config multi_query text_config
    is_encoder_decoder decoder_layers max_window_layers use_sliding_window
    num_global_key_value_heads global_head_dim d_kv num_decoder_layers attention_hidden_size";

#[test]
fn no_file_causes_a_panic_or_a_delay() {
    let deep = format!("{}1{}", "[".repeat(100_000), "]".repeat(100_000));
    let nested = "{\"text_config\":".repeat(100) + "{}" + &"}".repeat(100);
    for text in ["", "{", "null", "[]", "7", "{}", deep.as_str(), nested.as_str(), "{\"a\":}"] {
        assert!(config::parse(text).is_err(), "{}", text.chars().take(40).collect::<String>());
    }
    // Every field replaced by every kind of value: each gives a result or an error, quickly.
    let values = [
        json!(null),
        json!(-1),
        json!(0),
        json!(1),
        json!(1_u64 << 63),
        json!(1e300),
        json!("x"),
        json!([]),
        json!([[], 0]),
        json!({}),
        json!({"attention": 0}),
        json!(true),
    ];
    let fields: Vec<_> = FIELDS.split_whitespace().collect();
    for model_type in ["llama", "llama4", "qwen2", "falcon", "gpt_bigcode", "gemma3_text", "t5"] {
        for (field, other) in fields.iter().zip(fields.iter().skip(1).chain(&fields)) {
            for value in &values {
                for second in &values {
                    let config = with(
                        usual(model_type, 512, 6, 8, Some(4)),
                        json!({*field: value, *other: second}),
                    );
                    if let Ok(geometry) = read(&config) {
                        assert!(!geometry.layers.is_empty(), "{config}");
                    }
                }
            }
        }
    }
}
