//! Published configurations, cut to the fields that matter here, with their values and spelling.
use super::*;

/// Heads, kv heads, head size, rotary size, context.
type Shape = (u32, u32, u32, u32, u32);

fn read(file: &Value) -> (Architecture, Shape, ModelConfig) {
    let config = ModelConfig::parse(&file.to_string()).unwrap_or_else(|e| panic!("{file}: {e:#}"));
    let ModelConfig { architecture, heads, kv_heads, head_dim, context, .. } = config;
    (architecture, (heads, kv_heads, head_dim, config.rope.rotary_dim, context), config)
}

#[test]
fn llama_3_with_both_names_of_the_rope_type() {
    let (architecture, shape, config) = read(&json!({
        "architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
        "bos_token_id": 128_000, "eos_token_id": [128_001, 128_008, 128_009],
        "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
        "intermediate_size": 14336, "max_position_embeddings": 131_072, "mlp_bias": false,
        "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
        "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192, "rope_type": "llama3", "type": "llama3"},
        "rope_theta": 500_000.0, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
        "transformers_version": "4.43.0.dev0", "use_cache": true, "vocab_size": 128_256
    }));
    assert_eq!((architecture, shape), (Architecture::Llama, (32, 8, 128, 128, 131_072)));
    assert_eq!(config.eos, [128_001, 128_008, 128_009]);
    assert!(matches!(config.rope.scaling, Scaling::Llama3(Llama3 { original_context: 8192, .. })));
}

#[test]
fn mistral_7b_of_the_first_release_and_nemo() {
    let seven = json!({
        "architectures": ["MistralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2,
        "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
        "max_position_embeddings": 32768, "model_type": "mistral", "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
        "rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": false,
        "torch_dtype": "bfloat16", "vocab_size": 32000
    });
    let (architecture, shape, config) = read(&seven);
    assert_eq!((architecture, shape), (Architecture::Mistral, (32, 8, 128, 128, 32768)));
    assert_eq!(layers::windows(&config), [Some(4095); 32]);
    let mut nemo = seven;
    let fields = nemo.as_object_mut().expect("object");
    for (key, value) in [
        ("hidden_size", json!(5120)),
        ("head_dim", json!(128)),
        ("sliding_window", json!(null)),
        ("rope_theta", json!(1_000_000.0)),
        ("max_position_embeddings", json!(131_072)),
    ] {
        fields.insert(key.to_owned(), value);
    }
    let (_, shape, config) = read(&nemo);
    assert_eq!(shape, (32, 8, 128, 128, 131_072));
    assert_eq!(layers::windows(&config), [None; 32]);
}

#[test]
fn qwen_2_5_with_yarn_and_qwen_3() {
    let file = json!({
        "architectures": ["Qwen2ForCausalLM"], "bos_token_id": 151_643, "eos_token_id": 151_645,
        "hidden_act": "silu", "hidden_size": 3584, "intermediate_size": 18944,
        "max_position_embeddings": 32768, "max_window_layers": 28, "model_type": "qwen2",
        "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06, "rope_theta": 1_000_000.0, "sliding_window": 131_072,
        "tie_word_embeddings": false, "use_sliding_window": false, "vocab_size": 152_064,
        "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"}
    });
    let (architecture, shape, config) = read(&file);
    assert_eq!((architecture, shape), (Architecture::Qwen2, (28, 4, 128, 128, 131_072)));
    assert_eq!(layers::windows(&config), [None; 28]);
    let (architecture, shape, config) = read(&json!({
        "architectures": ["Qwen3ForCausalLM"], "attention_bias": false, "bos_token_id": 151_643,
        "eos_token_id": 151_645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024,
        "intermediate_size": 3072, "max_position_embeddings": 40960, "max_window_layers": 28,
        "model_type": "qwen3", "num_attention_heads": 16, "num_hidden_layers": 28,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": null,
        "rope_theta": 1_000_000, "sliding_window": null, "tie_word_embeddings": true,
        "torch_dtype": "bfloat16", "use_sliding_window": false, "vocab_size": 151_936
    }));
    assert_eq!((architecture, shape), (Architecture::Qwen3, (16, 8, 128, 128, 40960)));
    assert!(config.tied && config.rope.scaling == Scaling::None);
}

#[test]
fn phi_3_mini_and_phi_4_mini() {
    let (architecture, shape, config) = read(&json!({
        "architectures": ["Phi3ForCausalLM"], "attention_bias": false, "bos_token_id": 1,
        "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"}, "embd_pdrop": 0.0,
        "eos_token_id": 32000, "hidden_act": "silu", "hidden_size": 3072,
        "intermediate_size": 8192, "max_position_embeddings": 4096, "model_type": "phi3",
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
        "original_max_position_embeddings": 4096, "pad_token_id": 32000, "resid_pdrop": 0.0,
        "rms_norm_eps": 1e-05, "rope_scaling": null, "rope_theta": 10000.0,
        "sliding_window": 2047, "tie_word_embeddings": false, "vocab_size": 32064
    }));
    assert_eq!((architecture, shape), (Architecture::Phi3, (32, 32, 96, 96, 4096)));
    assert_eq!(layers::windows(&config), [Some(2046); 32]);
    let (_, shape, config) = read(&json!({
        "architectures": ["Phi3ForCausalLM"], "full_attn_mod": 1, "hidden_act": "silu",
        "hidden_size": 3072, "interpolate_factor": 1, "intermediate_size": 8192,
        "bos_token_id": 199_999, "eos_token_id": 199_999, "lm_head_bias": false, "mlp_bias": false,
        "max_position_embeddings": 131_072, "model_type": "phi3", "num_attention_heads": 24,
        "num_hidden_layers": 32, "num_key_value_heads": 8, "partial_rotary_factor": 0.75,
        "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
        "rope_scaling": {"long_factor": vec![1.5; 48], "short_factor": vec![1.0; 48],
            "type": "longrope"},
        "sliding_window": 262_144, "tie_word_embeddings": true, "vocab_size": 200_064
    }));
    assert_eq!(shape, (24, 8, 128, 96, 4096));
    let Scaling::LongRope { attention_factor, short } = config.rope.scaling else {
        panic!("{:?}", config.rope.scaling);
    };
    assert_eq!(short, [1.0; 48]);
    assert!((attention_factor - 1.190_238_071_4).abs() < 1e-9, "{attention_factor}");
}

#[test]
fn olmo_2_granite_3_and_smollm_3() {
    let (architecture, shape, config) = read(&json!({
        "architectures": ["Olmo2ForCausalLM"], "attention_bias": false, "eos_token_id": 100_257,
        "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 11008,
        "max_position_embeddings": 4096, "model_type": "olmo2", "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 32, "pad_token_id": 100_277,
        "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 500_000,
        "tie_word_embeddings": false, "vocab_size": 100_352
    }));
    assert_eq!((architecture, shape), (Architecture::Olmo2, (32, 32, 128, 128, 4096)));
    assert_eq!((config.bos, config.rope.theta), (None, 5e5));
    let (architecture, shape, config) = read(&json!({
        "architectures": ["GraniteForCausalLM"], "attention_bias": false,
        "attention_multiplier": 0.015_625, "bos_token_id": 0, "embedding_multiplier": 12.0,
        "eos_token_id": 0, "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 8192,
        "logits_scaling": 8.0, "max_position_embeddings": 131_072, "mlp_bias": false,
        "model_type": "granite", "num_attention_heads": 32, "num_hidden_layers": 40,
        "num_key_value_heads": 8, "residual_multiplier": 0.22, "rms_norm_eps": 1e-05,
        "rope_scaling": null, "rope_theta": 5_000_000.0, "tie_word_embeddings": true,
        "vocab_size": 49155
    }));
    assert_eq!((architecture, shape), (Architecture::Granite, (32, 8, 64, 64, 131_072)));
    assert_eq!((config.attention_scale(), config.multipliers.residual), (0.015_625, 0.22));
    let no_rope: Vec<u32> = (1..=36).map(|layer| u32::from(layer % 4 != 0)).collect();
    let (architecture, shape, config) = read(&json!({
        "architectures": ["SmolLM3ForCausalLM"], "attention_bias": false, "bos_token_id": 128_000,
        "eos_token_id": 128_012, "hidden_act": "silu", "hidden_size": 2048,
        "intermediate_size": 11008, "layer_types": vec!["full_attention"; 36],
        "max_position_embeddings": 65536, "max_window_layers": 28, "mlp_bias": false,
        "model_type": "smollm3", "no_rope_layer_interval": 4, "no_rope_layers": no_rope,
        "num_attention_heads": 16, "num_hidden_layers": 36, "num_key_value_heads": 4,
        "pretraining_tp": 2, "rms_norm_eps": 1e-06, "rope_scaling": null,
        "rope_theta": 5_000_000.0, "sliding_window": null, "use_sliding_window": false,
        "vocab_size": 128_256
    }));
    assert_eq!((architecture, shape), (Architecture::SmolLm3, (16, 4, 128, 128, 65536)));
    assert_eq!(config.layer_kinds.iter().filter(|kind| !kind.rotates).count(), 9);
    assert!(config.tied);
}

#[test]
fn a_code_model_with_linear_scaling_under_the_oldest_keys() {
    let (_, shape, config) = read(&json!({
        "architectures": ["LlamaForCausalLM"], "bos_token_id": 32013, "eos_token_id": 32014,
        "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 5504,
        "max_position_embeddings": 16384, "model_type": "llama", "num_attention_heads": 16,
        "num_hidden_layers": 24, "num_key_value_heads": 16, "pretraining_tp": 1,
        "rms_norm_eps": 1e-06, "rope_scaling": {"factor": 4.0, "type": "linear"},
        "rope_theta": 100_000, "tie_word_embeddings": false, "vocab_size": 32256
    }));
    assert_eq!(shape, (16, 16, 128, 128, 16384));
    assert_eq!(config.rope.scaling, Scaling::Linear { factor: 4.0 });
}
