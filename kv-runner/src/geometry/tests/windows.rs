//! Models with sliding windows.
use super::*;

/// A model with windows: bytes per token and layer, layers without a window, with one, and its
/// tokens.
type Windowed = (&'static str, Value, [u32; 4]);

fn check_windows<const N: usize>(models: [Windowed; N]) {
    for (name, config, [layer, full, slides, window]) in models {
        let (token, beyond) = (layer * (full + slides), layer * full);
        let layers = to_usize(full + slides);
        let geometry = check(name, config, token.into(), beyond.into(), layers);
        let windows: Vec<_> = geometry.layers.iter().filter_map(|kind| kind.window).collect();
        assert_eq!(windows, vec![window; to_usize(slides)], "{name}");
    }
}

/// Makes `layer_types` of these kinds, repeated.
fn types(pattern: &[&str], layers: usize) -> Vec<String> {
    let kinds = pattern.iter().map(|kind| format!("{kind}_attention"));
    kinds.collect::<Vec<_>>().into_iter().cycle().take(layers).collect()
}

fn sliding(config: Value, window: u32) -> Value {
    with(config, json!({ "sliding_window": window }))
}

fn dim(config: Value, dim: u32) -> Value {
    with(config, json!({ "head_dim": dim }))
}

#[test]
fn windows_are_those_of_each_layer() {
    check_windows([
        ("mistral 7b", sliding(usual("mistral", 4096, 32, 32, Some(8)), 4096), [4096, 0, 32, 4096]),
        ("phi-3 mini", sliding(usual("phi3", 3072, 32, 32, Some(32)), 2047), [12288, 0, 32, 2047]),
        (
            "starcoder2 15b",
            sliding(usual("starcoder2", 6144, 40, 48, Some(4)), 4096),
            [2048, 0, 40, 4096],
        ),
        (
            "gemma2 9b",
            dim(sliding(usual("gemma2", 3584, 42, 16, Some(8)), 4096), 256),
            [8192, 21, 21, 4096],
        ),
        (
            "gemma3 1b",
            with(
                dim(sliding(usual("gemma3_text", 1152, 26, 4, Some(1)), 512), 256),
                json!({"sliding_window_pattern": 6}),
            ),
            [1024, 4, 22, 512],
        ),
        (
            "gemma3 4b, whose text part leaves out heads",
            json!({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text",
                   "hidden_size": 2560, "num_hidden_layers": 34, "sliding_window": 1024}}),
            [4096, 5, 29, 1024],
        ),
        (
            "gemma3 27b",
            json!({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text",
                   "hidden_size": 5376, "num_hidden_layers": 62, "num_attention_heads": 32,
                   "num_key_value_heads": 16, "head_dim": 128, "sliding_window": 1024}}),
            [8192, 10, 52, 1024],
        ),
    ]);
}

#[test]
fn windows_alternate_as_in_the_files() {
    let alternating = types(&["sliding", "full"], 24);
    check_windows([
        (
            "gpt-oss 20b",
            with(
                dim(sliding(usual("gpt_oss", 2880, 24, 64, Some(8)), 128), 64),
                json!({"layer_types": alternating}),
            ),
            [2048, 12, 12, 128],
        ),
        (
            "command-r7b",
            with(
                sliding(usual("cohere2", 4096, 32, 32, Some(8)), 4096),
                json!({"sliding_window_pattern": 4}),
            ),
            [4096, 8, 24, 4096],
        ),
        (
            "exaone4 32b",
            with(
                dim(sliding(usual("exaone4", 5120, 64, 40, Some(8)), 4096), 128),
                json!({"sliding_window_pattern": "LLLG"}),
            ),
            [4096, 16, 48, 4096],
        ),
        (
            "qwen2 with windows in its last layers",
            with(
                sliding(usual("qwen2", 3584, 28, 28, Some(4)), 4096),
                json!({"use_sliding_window": true, "max_window_layers": 20}),
            ),
            [2048, 20, 8, 4096],
        ),
    ]);
}

#[test]
fn windows_of_chunks_and_shared_layers_are_counted() {
    let five = types(&["sliding", "sliding", "sliding", "sliding", "full"], 35);
    check_windows([
        (
            "gpt-neo 1.3b",
            json!({"model_type": "gpt_neo", "num_layers": 24, "num_heads": 16,
                   "hidden_size": 2048, "window_size": 256, "max_position_embeddings": 2048,
                   "attention_types": [[["global", "local"], 12]]}),
            [8192, 12, 12, 256],
        ),
        (
            "llama 4 scout",
            json!({"model_type": "llama4", "text_config": {"model_type": "llama4_text",
                   "num_hidden_layers": 48, "num_attention_heads": 40, "num_key_value_heads": 8,
                   "head_dim": 128, "hidden_size": 5120, "attention_chunk_size": 8192,
                   "no_rope_layers": [], "max_position_embeddings": 10_485_760}}),
            [4096, 12, 36, 8192],
        ),
        (
            "gemma3n e4b, 20 of whose 35 layers have rows of their own",
            json!({"model_type": "gemma3n", "text_config": {"model_type": "gemma3n_text",
                   "num_hidden_layers": 35, "num_attention_heads": 8, "num_key_value_heads": 2,
                   "head_dim": 256, "num_kv_shared_layers": 15, "sliding_window": 512,
                   "layer_types": five}}),
            [2048, 4, 16, 512],
        ),
    ]);
}
