//! The states of published models, against sizes worked out by hand.
use kv::DType;

use super::*;

/// Returns the bytes of a state in f32, over all layers.
fn state_bytes(geometry: &ModelGeometry) -> u64 {
    let values = |part: &StatePart| part.shape.iter().copied().map(u64::from).product::<u64>();
    geometry.states.iter().flat_map(|of| &of.parts).map(|part| values(part) * 4).sum()
}

/// Makes the configuration of a hybrid with gated delta rules.
fn delta(model_type: &str, layers: u32, kv_heads: u32, value_heads: u32) -> Value {
    with(
        usual(model_type, 5120, layers, 24, Some(kv_heads)),
        json!({"head_dim": 256, "full_attention_interval": 4, "linear_conv_kernel_dim": 4,
               "linear_num_key_heads": 16, "linear_key_head_dim": 128,
               "linear_num_value_heads": value_heads, "linear_value_head_dim": 128,
               "mamba_ssm_dtype": "float32"}),
    )
}

#[test]
fn states_of_qwen_have_their_published_sizes() {
    for (name, inner, [token, state, layers]) in [
        ("qwen3_5_text", delta("qwen3_5_text", 64, 4, 48), [65_536, 156_893_184, 48]),
        ("qwen3_5_moe_text", delta("qwen3_5_moe_text", 40, 2, 32), [20_480, 65_863_680, 30]),
    ] {
        let outer = name.trim_end_matches("_text");
        let file = json!({"model_type": outer, "text_config": inner, "vision_config": {}});
        let geometry = read(&file).expect(name);
        assert_eq!(bytes(&geometry.layers), token, "{name}");
        assert_eq!(state_bytes(&geometry), state, "{name}");
        assert_eq!(geometry.states.len(), usize::try_from(layers).expect("few"), "{name}");
        assert_eq!(geometry.layer_indices[..3], [3, 7, 11], "{name}");
        assert!(geometry.notes.is_empty(), "{name}: {:?}", geometry.notes);
        let LayerStates { layer, parts } = &geometry.states[3];
        let types: Vec<_> = parts.iter().map(|part| (part.name, part.dtype)).collect();
        assert_eq!(*layer, 4, "{name}");
        assert_eq!(types, [("window", None), ("matrix", Some(DType::F32))], "{name}");
    }
}

#[test]
#[expect(clippy::too_many_lines, reason = "one model for every architecture")]
fn every_architecture_has_its_own_parts() {
    let mamba = |config, heads: u32, state: u32| {
        with(
            config,
            json!({"mamba_d_conv": 4, "mamba_expand": 2, "mamba_n_heads": heads,
                   "mamba_d_state": state, "mamba_n_groups": 1}),
        )
    };
    let layers = |name: &str, at: &[usize], all: usize, has: &str| {
        let kind = |index| if at.contains(&index) { has } else { "mamba" };
        json!({ name: (0..all).map(kind).collect::<Vec<_>>() })
    };
    let kda = json!({"full_attn_layers": [4, 8, 12, 16, 20, 24, 27], "head_dim": 128,
                     "num_heads": 32, "short_conv_kernel_size": 4});
    for (name, config, found, parts) in [
        ("qwen3-next", delta("qwen3_next", 48, 2, 32), 36, [&[8192, 3][..], &[32, 128, 128]]),
        (
            "olmo hybrid 7b",
            with(usual("olmo_hybrid", 3840, 32, 30, None), json!({"linear_conv_kernel_dim": 4})),
            24,
            [&[11_520, 3], &[30, 96, 192]],
        ),
        (
            "kimi linear 48b",
            with(
                usual("kimi_linear", 2304, 27, 32, Some(32)),
                json!({"linear_attn_config": kda, "kv_lora_rank": 512, "qk_rope_head_dim": 64}),
            ),
            20,
            [&[12_288, 3], &[32, 128, 128]],
        ),
        (
            "granite 4 tiny",
            with(
                mamba(usual("granitemoehybrid", 1536, 40, 12, Some(4)), 48, 128),
                layers("layer_types", &[5, 15, 25, 35], 40, "attention"),
            ),
            36,
            [&[3328, 3], &[48, 64, 128]],
        ),
        (
            "bamba 9b",
            with(
                mamba(usual("bamba", 4096, 32, 32, Some(8)), 128, 128),
                json!({"attn_layer_indices": [9, 18, 27]}),
            ),
            29,
            [&[8448, 3], &[128, 64, 128]],
        ),
        (
            "falcon h1 1.5b",
            with(
                mamba(usual("falcon_h1", 2048, 24, 8, Some(2)), 48, 256),
                json!({"head_dim": 128, "mamba_d_ssm": 3072}),
            ),
            24,
            [&[3584, 3], &[48, 64, 256]],
        ),
        (
            "falcon h1 of the usual size",
            with(
                mamba(usual("falcon_h1", 2048, 24, 8, Some(2)), 64, 256),
                json!({"mamba_d_ssm": null}),
            ),
            24,
            [&[4608, 3], &[64, 64, 256]],
        ),
        (
            "nemotron-h, a part",
            with(
                usual("nemotron_h", 4096, 8, 32, Some(8)),
                json!({"hybrid_override_pattern": "M-M*-M*E", "head_dim": 128, "conv_kernel": 4,
                       "mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8,
                       "ssm_state_size": 128, "mamba_ssm_cache_dtype": "float32"}),
            ),
            3,
            [&[10_240, 3], &[128, 64, 128]],
        ),
        (
            "zamba2 1.2b",
            with(
                usual("zamba2", 2048, 38, 32, Some(32)),
                with(
                    layers("layers_block_type", &[5, 11, 17, 23, 29, 35], 38, "hybrid"),
                    json!({"attention_head_dim": 128, "n_mamba_heads": 64, "mamba_ngroups": 1,
                           "mamba_d_state": 128, "mamba_expand": 2, "mamba_d_conv": 4}),
                ),
            ),
            38,
            [&[4352, 3], &[64, 64, 128]],
        ),
        (
            "jamba",
            with(
                usual("jamba", 4096, 32, 32, Some(8)),
                json!({"attn_layer_period": 8, "attn_layer_offset": 4, "mamba_expand": 2,
                       "mamba_d_state": 16, "mamba_d_conv": 4}),
            ),
            28,
            [&[8192, 3], &[8192, 16]],
        ),
        (
            "recurrentgemma 2b",
            with(
                usual("recurrent_gemma", 2560, 26, 10, Some(1)),
                json!({"block_types": ["recurrent", "recurrent", "attention"], "head_dim": 256,
                       "attention_window_size": 2048, "lru_width": 2560, "conv1d_width": 4}),
            ),
            18,
            [&[2560, 3], &[2560]],
        ),
    ] {
        let geometry = read(&config).expect(name);
        let kinds = geometry.state_kinds();
        let [(own, of)] = kinds.as_slice() else { panic!("{name}: {kinds:?}") };
        assert_eq!(of.len(), found, "{name}");
        assert_eq!(own.iter().map(|part| part.shape.as_slice()).collect::<Vec<_>>(), parts);
        assert!(geometry.notes.is_empty(), "{name}: {:?}", geometry.notes);
    }
}

#[test]
fn a_state_may_be_a_window_or_a_matrix_alone() {
    let lfm2 = with(
        usual("lfm2", 2048, 16, 32, Some(8)),
        json!({"full_attn_idxs": [2, 5, 8, 10, 12, 14], "conv_L_cache": 3}),
    );
    let minimax = with(
        usual("minimax", 6144, 8, 64, Some(8)),
        json!({"head_dim": 128, "attn_type_list": [0, 0, 0, 0, 0, 0, 0, 1]}),
    );
    for (name, config, layers, part) in [
        ("lfm2", lfm2.clone(), 10, ("window", vec![2048, 2])),
        ("minimax", minimax, 7, ("matrix", vec![64, 128, 128])),
    ] {
        let geometry = read(&config).expect(name);
        assert_eq!(geometry.states.len(), layers, "{name}");
        for LayerStates { parts, .. } in &geometry.states {
            let parts: Vec<_> = parts.iter().map(|own| (own.name, own.shape.clone())).collect();
            assert_eq!(parts, std::slice::from_ref(&part), "{name}");
        }
    }
    // A convolution of one token keeps nothing.
    let none = read(&with(lfm2, json!({"conv_L_cache": 1}))).expect("lfm2");
    assert!(none.states.is_empty() && none.layers.len() == 6, "{none:?}");
}

#[test]
fn models_without_attention_have_states_alone() {
    let mamba = json!({"model_type": "mamba", "hidden_size": 768, "num_hidden_layers": 24,
        "expand": 2, "conv_kernel": 4, "state_size": 16});
    let mamba2 = json!({"model_type": "mamba2", "hidden_size": 2560, "num_hidden_layers": 64,
        "expand": 2, "conv_kernel": 4, "state_size": 128, "num_heads": 80, "n_groups": 1});
    for (name, config, layers, parts) in [
        ("mamba 130m", mamba, 24, [&[1536, 3][..], &[1536, 16]]),
        ("mamba2 2.7b", mamba2, 64, [&[5376, 3], &[80, 64, 128]]),
    ] {
        let geometry = read(&config).expect(name);
        assert!(geometry.layers.is_empty(), "{name}");
        assert_eq!(geometry.states.len(), layers, "{name}");
        let own = &geometry.states[0].parts;
        assert_eq!(own.iter().map(|part| part.shape.as_slice()).collect::<Vec<_>>(), parts);
    }
}

#[test]
fn absent_sizes_are_noted_and_contradicting_ones_are_refused() {
    let mut config = delta("qwen3_next", 48, 2, 32);
    config.as_object_mut().expect("an object").remove("linear_num_value_heads");
    let geometry = read(&config).expect("qwen3-next");
    let note = "linear_num_value_heads is not in the file: 32, as models of this type have it";
    assert_eq!(geometry.notes, [note]);
    for (more, words) in [
        (json!({"linear_num_value_heads": null}), "linear_num_value_heads is missing"),
        (json!({"linear_num_value_heads": 0}), "linear_num_value_heads is 0"),
        (json!({"linear_value_head_dim": 1 << 30}), "at most 1048576"),
        (
            json!({"linear_value_head_dim": 1 << 20, "linear_num_value_heads": 1 << 20}),
            "channels of a convolution",
        ),
        (json!({"mamba_ssm_dtype": "float8"}), "mamba_ssm_dtype is \"float8\", expected float32"),
    ] {
        let error = read(&with(delta("qwen3_next", 48, 2, 32), more)).expect_err(words);
        assert!(error.contains(words), "{words}: {error}");
    }
    let halves = with(delta("qwen3_next", 48, 2, 32), json!({"mamba_ssm_dtype": "bfloat16"}));
    let geometry = read(&halves).expect("qwen3-next");
    assert_eq!(geometry.states[0].parts[1].dtype, Some(DType::Bf16));
    let odd = with(usual("mamba2", 64, 4, 4, None), json!({"num_heads": 48}));
    assert!(read(&odd).expect_err("heads").contains("inner channels of Mamba 2 128"));
}
