//! Models some of whose layers have no attention.
use super::*;

/// Makes a list of layers with `has` at the indices `at`, and mamba elsewhere.
fn list(name: &str, at: &[usize], layers: usize, has: &str) -> Value {
    let kind = |index| if at.contains(&index) { has } else { "mamba" };
    json!({ name: (0..layers).map(kind).collect::<Vec<_>>() })
}

/// Checks a model whose layers without attention have a state, if they have memory at all.
#[track_caller]
fn hybrid(name: &str, config: Value, shape: [u64; 3]) {
    let geometry = plain(name, config, shape);
    let is_counted = |note: &String| !note.contains("not counted");
    assert!(geometry.notes.iter().all(is_counted), "{name}: {:?}", geometry.notes);
    assert!(!geometry.states.is_empty(), "{name}");
    assert!(geometry.state_kinds().len() == 1, "{name}");
}

#[test]
fn layers_with_attention_are_found_among_state_space_layers() {
    for (name, config, shape) in [
        (
            "jamba",
            with(
                usual("jamba", 4096, 32, 32, Some(8)),
                json!({"attn_layer_period": 8, "attn_layer_offset": 4}),
            ),
            [4, 8, 128],
        ),
        (
            "bamba",
            with(usual("bamba", 4096, 32, 32, Some(8)), json!({"attn_layer_indices": [9, 18, 27]})),
            [3, 8, 128],
        ),
        (
            "granite 4 tiny",
            with(
                usual("granitemoehybrid", 1536, 40, 12, Some(4)),
                list("layer_types", &[5, 15, 25, 35], 40, "attention"),
            ),
            [4, 4, 128],
        ),
        (
            "zamba2 1.2b",
            with(
                usual("zamba2", 2048, 38, 32, Some(32)),
                with(
                    list("layers_block_type", &[5, 11, 17, 23, 29, 35], 38, "hybrid"),
                    json!({"attention_head_dim": 128}),
                ),
            ),
            [6, 32, 128],
        ),
        (
            "nemotron-h, a part",
            with(
                usual("nemotron_h", 4096, 8, 32, Some(8)),
                json!({"hybrid_override_pattern": "M-M*-M*-", "head_dim": 128}),
            ),
            [2, 8, 128],
        ),
    ] {
        hybrid(name, config, shape);
    }
}

#[test]
fn layers_with_attention_are_found_among_others() {
    for (name, config, shape) in [
        (
            "qwen3-next",
            with(
                usual("qwen3_next", 2048, 48, 16, Some(2)),
                json!({"head_dim": 256, "full_attention_interval": 4}),
            ),
            [12, 2, 256],
        ),
        (
            "lfm2",
            with(
                usual("lfm2", 2048, 16, 32, Some(8)),
                json!({"full_attn_idxs": [2, 5, 8, 10, 12, 14]}),
            ),
            [6, 8, 64],
        ),
        (
            "minimax",
            with(
                usual("minimax", 6144, 8, 64, Some(8)),
                json!({"head_dim": 128, "attn_type_list": [0, 0, 0, 0, 0, 0, 0, 1]}),
            ),
            [1, 8, 128],
        ),
    ] {
        hybrid(name, config, shape);
    }
    let recurrent = with(
        usual("recurrent_gemma", 2560, 26, 10, Some(1)),
        json!({"block_types": ["recurrent", "recurrent", "attention"], "head_dim": 256,
               "attention_window_size": 2048}),
    );
    check("recurrentgemma", recurrent, 8 * 1024, 0, 8);
}

#[test]
fn layers_with_memory_that_is_not_known_are_named_and_not_counted() {
    let vision = with(
        usual("mllama_text_model", 4096, 40, 32, Some(8)),
        json!({"cross_attention_layers": [3, 8, 13, 18, 23, 28, 33, 38]}),
    );
    let vision = json!({"model_type": "mllama", "text_config": vision});
    let new = with(usual("brand_new", 64, 4, 4, None), list("layer_types", &[1], 4, "attention"));
    for (name, config, shape, words) in [
        ("llama 3.2 vision", vision, [32, 8, 128], "8 of 40 layers are cross attention"),
        ("a new type", new, [1, 4, 16], "3 of 4 layers are state-space"),
    ] {
        let geometry = plain(name, config, shape);
        let note = geometry.notes.iter().find(|note| note.contains("not counted"));
        assert!(note.is_some_and(|note| note.starts_with(words)), "{:?}", geometry.notes);
        assert!(geometry.states.is_empty(), "{name}");
    }
}
