//! Settings that differ between layers, and defaults of the architectures.
use super::*;

pub(super) fn windows(config: &ModelConfig) -> Vec<Option<u32>> {
    config.layer_kinds.iter().map(|kind| kind.window_left).collect()
}

#[test]
fn windows_follow_the_rules_of_the_architecture() {
    let none = vec![None; 5];
    let of = |changes: Value| windows(&config(&changes));
    // If the field is absent, the class has a default; null means no window.
    assert_eq!(of(json!({"model_type": "mistral"})), vec![Some(4095); 5]);
    assert_eq!(of(json!({"model_type": "mistral", "sliding_window": null})), none);
    assert_eq!(of(json!({"model_type": "phi3", "sliding_window": 20})), vec![Some(19); 5]);
    assert_eq!(of(json!({"model_type": "olmo2", "sliding_window": 20})), none);
    for name in ["qwen2", "qwen3"] {
        let qwen = |changes: Value| {
            let mut all = json!({"model_type": name, "sliding_window": 20, "max_window_layers": 3});
            let fields = all.as_object_mut().expect("object");
            fields.extend(changes.as_object().expect("object").clone());
            all
        };
        assert_eq!(of(qwen(json!({}))), none);
        assert_eq!(of(qwen(json!({"use_sliding_window": false}))), none);
        let three = [None, None, None, Some(19), Some(19)];
        assert_eq!(of(qwen(json!({"use_sliding_window": true}))), three);
        let types = [
            "sliding_attention",
            "full_attention",
            "full_attention",
            "full_attention",
            "sliding_attention",
        ];
        let listed = qwen(json!({"use_sliding_window": true, "layer_types": types}));
        assert_eq!(of(listed), [Some(19), None, None, None, Some(19)]);
        let error = refusal(&qwen(json!({"use_sliding_window": false, "layer_types": types})));
        assert!(error.contains("but use_sliding_window is false"), "{error}");
        let error = refusal(&qwen(json!({"layer_types": ["full_attention"]})));
        assert!(error.contains("layer_types has 1 entries for 5 layers"), "{error}");
        let error = refusal(&qwen(json!({"layer_types": vec!["chunked_attention"; 5]})));
        assert!(error.contains("layer_types \"chunked_attention\" is not supported"), "{error}");
    }
    let smollm3 = |changes: Value| {
        let mut all = json!({"model_type": "smollm3"});
        let fields = all.as_object_mut().expect("object");
        fields.extend(changes.as_object().expect("object").clone());
        config(&all).layer_kinds
    };
    let rotates = |kinds: &[LayerKind]| kinds.iter().map(|kind| kind.rotates).collect::<Vec<_>>();
    assert_eq!(rotates(&smollm3(json!({}))), [true, true, true, false, true]);
    let listed = smollm3(json!({"no_rope_layers": [1, 0, 1, 1, 0, 1], "sliding_window": 8,
        "use_sliding_window": true}));
    assert_eq!(rotates(&listed), [true, false, true, true, false]);
    let windows: Vec<_> = listed.iter().map(|kind| kind.window_left).collect();
    assert_eq!(windows, [None, Some(7), None, None, Some(7)]);
}

#[test]
fn the_type_goes_before_the_class() {
    let classes = json!(["LlamaForCausalLM"]);
    let of = |changes: Value| config(&changes).architecture;
    let both = json!({"model_type": "mistral", "architectures": classes});
    assert_eq!(of(both), Architecture::Mistral);
    assert_eq!(of(json!({"model_type": null, "architectures": classes})), Architecture::Llama);
    for (architecture, name, class) in Architecture::ALL {
        assert_eq!(of(json!({"model_type": name})), architecture);
        assert_eq!(of(json!({"model_type": null, "architectures": [class]})), architecture);
        assert_eq!(architecture.to_string(), name);
        assert!(Architecture::NAMES.contains(name));
    }
}

#[test]
fn defaults_follow_the_class_of_the_architecture() {
    let of = |name: &str, field: &str| {
        let mut file = good_with(&json!({"model_type": name}));
        file.as_object_mut().expect("object").remove(field);
        ModelConfig::parse(&file.to_string()).expect(name)
    };
    assert_eq!(of("qwen3", "head_dim").head_dim, 128);
    assert_eq!(config(&json!({"model_type": "qwen3", "head_dim": null})).head_dim, 8);
    assert_eq!(of("qwen2", "head_dim").head_dim, 8);
    assert_eq!(of("phi3", "rms_norm_eps").norm_eps, 1e-5);
    assert_eq!(of("llama", "rms_norm_eps").norm_eps, 1e-6);
    assert_eq!(of("smollm3", "rope_theta").rope.theta, 2e6);
    assert!(of("smollm3", "tie_word_embeddings").tied);
    assert!(!of("qwen2", "tie_word_embeddings").tied);
    let qkv = Biases { qkv: true, out: false, mlp: false };
    assert_eq!(of("qwen2", "attention_bias").biases, qkv);
    assert_eq!(of("granite", "attention_multiplier").attention_scale(), 1.0);
    assert_eq!(of("llama", "attention_multiplier").attention_scale(), 1.0 / 8.0_f64.sqrt());
}

#[test]
fn models_whose_layers_keep_different_rows_are_refused() {
    let mut mixed = vec!["full_attention"; 5];
    mixed[1] = "linear_attention";
    for (changes, words) in [
        (json!({"layer_types": mixed}), "layer_types \"linear_attention\" is not supported"),
        (
            json!({"num_key_value_heads": [4, 4, 2, 4, 4]}),
            "the layers of the model have 4 kv heads of 8 and 2 kv heads of 8: expected the same",
        ),
        (json!({"num_kv_shared_layers": 2}), "are 5, of which 3 have K and V of their own"),
        (json!({"v_head_dim": 4}), "v_head_dim is 4, but K has 8: expected one size of both"),
        (json!({"kv_lora_rank": 4, "qk_rope_head_dim": 2}), "keep one latent row per token"),
        (json!({"attn_layer_indices": []}), "no KV cache: no layer of the model has attention"),
    ] {
        let error = refusal(&changes);
        assert!(error.contains(words), "{changes}: {error}");
    }
}
