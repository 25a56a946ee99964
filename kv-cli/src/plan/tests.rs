//! Published configurations, cut to what matters here, against bytes worked out by hand.
#![expect(clippy::arithmetic_side_effects, reason = "a test that overflows fails, as it should")]
mod refusals;

use serde_json::{Value, json};

use super::config::geometry;
use super::*;

/// What a model needs in bf16: bytes of a token, and of one that left every window.
#[derive(Debug, PartialEq, Eq)]
struct Needs {
    token: u64,
    beyond_windows: u64,
    layers: usize,
}

fn read(config: &Value) -> Result<Geometry, String> {
    let file = config.as_object().expect("an object");
    geometry(file).map_err(|error| error.to_string())
}

fn bf16(geometry: &Geometry) -> Needs {
    let kinds = geometry.kinds();
    let stored = Stored::plain("bf16".parse().expect("a format"));
    let plan = Plan::new(&kinds, 16, &stored).expect("a plan");
    let bytes = |(group, kind, layers)| (kind, bytes_per_token((group, kind, layers)));
    let of: Vec<(&LayerKind, u64)> = plan.groups().map(bytes).collect();
    let beyond = of.iter().filter(|(kind, _)| kind.window.is_none());
    Needs {
        token: of.iter().map(|(_, bytes)| bytes).sum(),
        beyond_windows: beyond.map(|(_, bytes)| bytes).sum(),
        layers: geometry.layers.len(),
    }
}

/// Checks a model whose layers all keep everything.
#[track_caller]
fn plain(name: &str, config: Value, layers: u64, kv_heads: u64, head_dim: u64) -> Geometry {
    let token = layers * 2 * kv_heads * head_dim * 2;
    check(name, config, token, token, usize::try_from(layers).expect("few"))
}

#[track_caller]
#[expect(clippy::needless_pass_by_value, reason = "configurations are written in place")]
fn check(name: &str, config: Value, token: u64, beyond_windows: u64, layers: usize) -> Geometry {
    let geometry = read(&config).unwrap_or_else(|error| panic!("{name}: {error}"));
    let needs = bf16(&geometry);
    assert_eq!(needs, Needs { token, beyond_windows, layers }, "{name}: {:?}", geometry.notes);
    geometry
}

/// The usual fields.
fn usual(model_type: &str, hidden: u32, layers: u32, heads: u32, kv_heads: Option<u32>) -> Value {
    json!({
        "model_type": model_type, "hidden_size": hidden, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "max_position_embeddings": 4096
    })
}

fn with(mut config: Value, more: Value) -> Value {
    let Value::Object(more) = more else { panic!("an object") };
    config.as_object_mut().expect("an object").extend(more);
    config
}

#[test]
fn models_with_the_usual_fields_are_planned() {
    for (name, config, layers, kv_heads, head_dim) in [
        ("llama 7b", usual("llama", 4096, 32, 32, None), 32, 32, 128),
        ("llama 3 8b", usual("llama", 4096, 32, 32, Some(8)), 32, 8, 128),
        ("llama 3.1 405b", usual("llama", 16384, 126, 128, Some(8)), 126, 8, 128),
        ("mixtral 8x7b", usual("mixtral", 4096, 32, 32, Some(8)), 32, 8, 128),
        ("qwen2 7b", usual("qwen2", 3584, 28, 28, Some(4)), 28, 4, 128),
        ("qwen2 moe 57b", usual("qwen2_moe", 3584, 28, 28, Some(4)), 28, 4, 128),
        ("phi-2", usual("phi", 2560, 32, 32, None), 32, 32, 80),
        ("phi-4", usual("phi3", 5120, 40, 40, Some(10)), 40, 10, 128),
        ("phi 3.5 moe", usual("phimoe", 4096, 32, 32, Some(8)), 32, 8, 128),
        ("olmo 7b", usual("olmo", 4096, 32, 32, None), 32, 32, 128),
        ("olmo2 7b", usual("olmo2", 4096, 32, 32, None), 32, 32, 128),
        ("olmoe", usual("olmoe", 2048, 16, 16, Some(16)), 16, 16, 128),
        ("granite 3 8b", usual("granite", 4096, 40, 32, Some(8)), 40, 8, 128),
        ("granite moe", usual("granitemoe", 1536, 32, 24, Some(8)), 32, 8, 64),
        ("command-r", usual("cohere", 8192, 40, 64, None), 40, 64, 128),
        ("stablelm", usual("stablelm", 2560, 32, 32, Some(32)), 32, 32, 80),
        ("glm4", with(usual("glm4", 4096, 40, 32, Some(2)), json!({"head_dim": 128})), 40, 2, 128),
        ("internlm2 7b", usual("internlm2", 4096, 32, 32, Some(8)), 32, 8, 128),
        ("smollm3", usual("smollm3", 2048, 36, 16, Some(4)), 36, 4, 128),
        (
            "qwen3 8b",
            with(usual("qwen3", 4096, 36, 32, Some(8)), json!({"head_dim": 128})),
            36,
            8,
            128,
        ),
        (
            "qwen3 30b-a3b",
            with(usual("qwen3_moe", 2048, 48, 32, Some(4)), json!({"head_dim": 128})),
            48,
            4,
            128,
        ),
        (
            "gemma 7b",
            with(usual("gemma", 3072, 28, 16, Some(16)), json!({"head_dim": 256})),
            28,
            16,
            256,
        ),
        (
            "nemo",
            with(usual("mistral", 5120, 40, 32, Some(8)), json!({"head_dim": 128})),
            40,
            8,
            128,
        ),
        ("gpt-neox 20b", usual("gpt_neox", 6144, 44, 64, None), 44, 64, 96),
        ("opt 6.7b", usual("opt", 4096, 32, 32, None), 32, 32, 128),
    ] {
        let geometry = plain(name, config, layers, kv_heads, head_dim);
        assert_eq!(geometry.context, Some(4096), "{name}");
        assert!(geometry.notes.is_empty(), "{name}: {:?}", geometry.notes);
    }
}

#[test]
fn heads_of_gpt_and_falcon_are_found() {
    for (name, config, layers, kv_heads, head_dim) in [
        (
            "gpt2",
            json!({"model_type": "gpt2", "n_layer": 12, "n_head": 12, "n_embd": 768,
                   "n_ctx": 1024, "n_positions": 1024}),
            12,
            12,
            64,
        ),
        (
            "gptj 6b",
            json!({"model_type": "gptj", "n_layer": 28, "n_head": 16, "n_embd": 4096,
                   "n_positions": 2048, "rotary_dim": 64}),
            28,
            16,
            256,
        ),
        (
            "starcoder",
            json!({"model_type": "gpt_bigcode", "n_layer": 40, "n_head": 48, "n_embd": 6144,
                   "multi_query": true, "n_positions": 8192}),
            40,
            1,
            128,
        ),
        (
            "falcon 7b",
            json!({"model_type": "falcon", "hidden_size": 4544, "num_hidden_layers": 32,
                   "num_attention_heads": 71, "multi_query": true,
                   "new_decoder_architecture": false}),
            32,
            1,
            64,
        ),
        (
            "falcon 7b, saved anew",
            json!({"model_type": "falcon", "hidden_size": 4544, "num_hidden_layers": 32,
                   "num_attention_heads": 71, "num_kv_heads": 71, "multi_query": true,
                   "new_decoder_architecture": false, "max_position_embeddings": 2048}),
            32,
            1,
            64,
        ),
        (
            "falcon 40b",
            json!({"model_type": "falcon", "hidden_size": 8192, "num_hidden_layers": 60,
                   "num_attention_heads": 128, "num_kv_heads": 8, "multi_query": true,
                   "new_decoder_architecture": true}),
            60,
            8,
            64,
        ),
        (
            "falcon-rw 1b",
            json!({"model_type": "falcon", "hidden_size": 2048, "num_hidden_layers": 24,
                   "num_attention_heads": 32, "multi_query": false,
                   "new_decoder_architecture": false}),
            24,
            32,
            64,
        ),
    ] {
        plain(name, config, layers, kv_heads, head_dim);
    }
}

#[test]
fn fields_of_other_names_are_found() {
    for (name, config, layers, kv_heads, head_dim) in [
        (
            "mpt 7b",
            json!({"model_type": "mpt", "n_layers": 32, "n_heads": 32, "d_model": 4096,
                   "max_seq_len": 2048, "attn_config": {"attn_type": "multihead_attention"}}),
            32,
            32,
            128,
        ),
        (
            "dbrx",
            json!({"model_type": "dbrx", "n_layers": 40, "n_heads": 48, "d_model": 6144,
                   "max_seq_len": 32768, "attn_config": {"kv_n_heads": 8, "clip_qkv": 8}}),
            40,
            8,
            128,
        ),
        (
            "bloom 176b",
            json!({"model_type": "bloom", "n_layer": 70, "num_attention_heads": 112,
                   "n_embed": 14336, "seq_length": 2048}),
            70,
            112,
            128,
        ),
        (
            "chatglm3",
            json!({"model_type": "chatglm", "num_layers": 28, "num_attention_heads": 32,
                   "hidden_size": 4096, "kv_channels": 128, "multi_query_attention": true,
                   "multi_query_group_num": 2, "seq_length": 8192}),
            28,
            2,
            128,
        ),
        (
            "exaone 3",
            json!({"model_type": "exaone", "num_layers": 32, "num_attention_heads": 32,
                   "num_key_value_heads": 8, "hidden_size": 4096,
                   "max_position_embeddings": 4096}),
            32,
            8,
            128,
        ),
        (
            "qwen 7b",
            json!({"model_type": "qwen", "num_hidden_layers": 32, "num_attention_heads": 32,
                   "hidden_size": 4096, "kv_channels": 128, "seq_length": 8192,
                   "max_position_embeddings": 32768}),
            32,
            32,
            128,
        ),
    ] {
        plain(name, config, layers, kv_heads, head_dim);
    }
}

#[test]
fn text_decoders_inside_other_models_are_found() {
    for (name, config, layers, kv_heads, head_dim) in [
        (
            "mistral small 3.1",
            json!({"model_type": "mistral3", "vision_config": {"num_hidden_layers": 24},
                   "text_config": {"model_type": "mistral", "num_hidden_layers": 40,
                   "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
                   "hidden_size": 5120, "max_position_embeddings": 131_072,
                   "sliding_window": null}}),
            40,
            8,
            128,
        ),
        (
            "llava 1.5, whose text part leaves out what llama has anyway",
            json!({"model_type": "llava", "text_config": {"model_type": "llama",
                   "max_position_embeddings": 4096, "vocab_size": 32064}}),
            32,
            32,
            128,
        ),
        (
            "qwen2.5-vl, outer fields",
            with(
                usual("qwen2_5_vl", 3584, 28, 28, Some(4)),
                json!({"vision_config": {"window_size": 112}, "sliding_window": 32768,
                        "use_sliding_window": false, "max_window_layers": 28}),
            ),
            28,
            4,
            128,
        ),
    ] {
        plain(name, config, layers, kv_heads, head_dim);
    }
}

/// A model with windows: bytes of a token of one layer, layers without a window, with one, and its
/// tokens.
type Windowed = (&'static str, Value, u64, u64, u64, u32);

fn check_windows<const N: usize>(models: [Windowed; N]) {
    for (name, config, layer, full, slides, window) in models {
        let (token, beyond) = (layer * (full + slides), layer * full);
        let layers = usize::try_from(full + slides).expect("few");
        let geometry = check(name, config, token, beyond, layers);
        let windows: Vec<_> = geometry.layers.iter().filter_map(|kind| kind.window).collect();
        assert_eq!(windows, vec![window; usize::try_from(slides).expect("few")], "{name}");
    }
}

/// `layer_types` of these kinds, repeated.
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
        ("mistral 7b", sliding(usual("mistral", 4096, 32, 32, Some(8)), 4096), 4096, 0, 32, 4096),
        ("phi-3 mini", sliding(usual("phi3", 3072, 32, 32, Some(32)), 2047), 12288, 0, 32, 2047),
        (
            "starcoder2 15b",
            sliding(usual("starcoder2", 6144, 40, 48, Some(4)), 4096),
            2048,
            0,
            40,
            4096,
        ),
        (
            "gemma2 9b",
            dim(sliding(usual("gemma2", 3584, 42, 16, Some(8)), 4096), 256),
            8192,
            21,
            21,
            4096,
        ),
        (
            "gemma3 1b",
            with(
                dim(sliding(usual("gemma3_text", 1152, 26, 4, Some(1)), 512), 256),
                json!({"sliding_window_pattern": 6}),
            ),
            1024,
            4,
            22,
            512,
        ),
        (
            "gemma3 4b, whose text part leaves out heads",
            json!({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text",
                   "hidden_size": 2560, "num_hidden_layers": 34, "sliding_window": 1024}}),
            4096,
            5,
            29,
            1024,
        ),
        (
            "gemma3 27b",
            json!({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text",
                   "hidden_size": 5376, "num_hidden_layers": 62, "num_attention_heads": 32,
                   "num_key_value_heads": 16, "head_dim": 128, "sliding_window": 1024}}),
            8192,
            10,
            52,
            1024,
        ),
    ]);
}

#[test]
fn windows_alternate_as_files_say() {
    let alternating = types(&["sliding", "full"], 24);
    check_windows([
        (
            "gpt-oss 20b",
            with(
                dim(sliding(usual("gpt_oss", 2880, 24, 64, Some(8)), 128), 64),
                json!({"layer_types": alternating}),
            ),
            2048,
            12,
            12,
            128,
        ),
        (
            "command-r7b",
            with(
                sliding(usual("cohere2", 4096, 32, 32, Some(8)), 4096),
                json!({"sliding_window_pattern": 4}),
            ),
            4096,
            8,
            24,
            4096,
        ),
        (
            "exaone4 32b",
            with(
                dim(sliding(usual("exaone4", 5120, 64, 40, Some(8)), 4096), 128),
                json!({"sliding_window_pattern": "LLLG"}),
            ),
            4096,
            16,
            48,
            4096,
        ),
        (
            "qwen2 with windows in its last layers",
            with(
                sliding(usual("qwen2", 3584, 28, 28, Some(4)), 4096),
                json!({"use_sliding_window": true, "max_window_layers": 20}),
            ),
            2048,
            20,
            8,
            4096,
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
            8192,
            12,
            12,
            256,
        ),
        (
            "llama 4 scout",
            json!({"model_type": "llama4", "text_config": {"model_type": "llama4_text",
                   "num_hidden_layers": 48, "num_attention_heads": 40, "num_key_value_heads": 8,
                   "head_dim": 128, "hidden_size": 5120, "attention_chunk_size": 8192,
                   "no_rope_layers": [], "max_position_embeddings": 10_485_760}}),
            4096,
            12,
            36,
            8192,
        ),
        (
            "gemma3n e4b, 20 of whose 35 layers have rows of their own",
            json!({"model_type": "gemma3n", "text_config": {"model_type": "gemma3n_text",
                   "num_hidden_layers": 35, "num_attention_heads": 8, "num_key_value_heads": 2,
                   "head_dim": 256, "num_kv_shared_layers": 15, "sliding_window": 512,
                   "layer_types": five}}),
            2048,
            4,
            16,
            512,
        ),
    ]);
}

#[test]
fn what_left_a_window_is_given_back() {
    let config = with(usual("mistral", 4096, 32, 32, Some(8)), json!({"sliding_window": 4096}));
    let kinds = read(&config).expect("mistral").kinds();
    let stored = Stored::plain("bf16".parse().expect("a format"));
    let plan = Plan::new(&kinds, 16, &stored).expect("a plan");
    // 4,096 tokens in 256 blocks, and one more where the window begins inside a block.
    let block = 131_072 * 16;
    assert_eq!(plan.sequence_bytes(4096, true), Some(256 * block));
    assert_eq!(plan.sequence_bytes(32_768, true), Some(257 * block));
    assert_eq!(plan.sequence_bytes(32_768, false), Some(2048 * block));
    assert_eq!(plan.tokens_within(257 * block), 257 * 16, "kept at once");
    // Beside layers that keep everything, only those grow.
    let config = with(
        usual("gpt_oss", 2880, 24, 64, Some(8)),
        json!({"sliding_window": 128, "head_dim": 64}),
    );
    let kinds = read(&config).expect("gpt_oss").kinds();
    let plan = Plan::new(&kinds, 16, &stored).expect("a plan");
    let block = 12 * 2048 * 16;
    assert_eq!(plan.sequence_bytes(131_072, true), Some((9 + 8192) * block));
    assert_eq!(plan.tokens_within((9 + 8192) * block), 131_072);
}

#[test]
fn latent_attention_keeps_its_ranks() {
    let latent = |model_type: &str, layers: u32, heads: u32, rank: u32, rope: u32| {
        with(
            usual(model_type, 7168, layers, heads, Some(heads)),
            json!({"kv_lora_rank": rank, "qk_rope_head_dim": rope, "qk_nope_head_dim": 128,
                   "v_head_dim": 128, "q_lora_rank": 1536}),
        )
    };
    for (name, config, token, layers) in [
        ("deepseek v3", latent("deepseek_v3", 61, 128, 512, 64), 70_272, 61),
        ("deepseek v2 lite", latent("deepseek_v2", 27, 16, 512, 64), 27 * 576 * 2, 27),
        ("minicpm3", latent("minicpm3", 62, 40, 256, 32), 62 * 288 * 2, 62),
    ] {
        let geometry = check(name, config, token, token, layers);
        assert!(geometry.layers.iter().all(|kind| kind.is_latent), "{name}");
    }
    let kinds = read(&latent("deepseek_v3", 61, 128, 512, 64)).expect("deepseek v3").kinds();
    let stored = Stored::plain("bf16".parse().expect("a format"));
    let plan = Plan::new(&kinds, 16, &stored).expect("a plan");
    assert_eq!(plan.spec.memory().bytes_per_token, 132_736, "V is stored beside K");
    let zeros = json!({"kv_lora_rank": 512, "use_mla": false, "qk_rope_head_dim": 0,
                       "v_head_dim": 0});
    plain("zeros", with(usual("deepseek_v2", 1280, 12, 10, Some(10)), zeros), 12, 10, 128);
    // Without ranks it is attention as usual.
    let none = with(usual("deepseek_v3", 2048, 2, 16, Some(16)), json!({"kv_lora_rank": null}));
    plain("no ranks", none, 2, 16, 128);
}

/// A list of layers that names those of `at`, and calls all others mamba.
fn list(name: &str, at: &[usize], layers: usize, has: &str) -> Value {
    let kind = |index| if at.contains(&index) { has } else { "mamba" };
    json!({ name: (0..layers).map(kind).collect::<Vec<_>>() })
}

/// Checks a model some of whose layers have no attention, which a note counts.
#[track_caller]
fn hybrid(name: &str, config: Value, layers: u64, kv_heads: u64, head_dim: u64) {
    let geometry = plain(name, config, layers, kv_heads, head_dim);
    let all = geometry.num_layers;
    let words = format!("{} of {all} layers are", u64::from(all) - layers);
    assert!(geometry.notes.iter().any(|note| note.starts_with(&words)), "{:?}", geometry.notes);
}

#[test]
fn state_space_layers_are_named_and_not_counted() {
    for (name, config, layers, kv_heads, head_dim) in [
        (
            "jamba",
            with(
                usual("jamba", 4096, 32, 32, Some(8)),
                json!({"attn_layer_period": 8, "attn_layer_offset": 4}),
            ),
            4,
            8,
            128,
        ),
        (
            "bamba",
            with(usual("bamba", 4096, 32, 32, Some(8)), json!({"attn_layer_indices": [9, 18, 27]})),
            3,
            8,
            128,
        ),
        (
            "granite 4 tiny",
            with(
                usual("granitemoehybrid", 1536, 40, 12, Some(4)),
                list("layer_types", &[5, 15, 25, 35], 40, "attention"),
            ),
            4,
            4,
            128,
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
            6,
            32,
            128,
        ),
        (
            "nemotron-h, a part",
            with(
                usual("nemotron_h", 4096, 8, 32, Some(8)),
                json!({"hybrid_override_pattern": "M-M*-M*-", "head_dim": 128}),
            ),
            2,
            8,
            128,
        ),
    ] {
        hybrid(name, config, layers, kv_heads, head_dim);
    }
}

#[test]
fn layers_of_other_kinds_are_named_and_not_counted() {
    for (name, config, layers, kv_heads, head_dim) in [
        (
            "qwen3-next",
            with(
                usual("qwen3_next", 2048, 48, 16, Some(2)),
                json!({"head_dim": 256, "full_attention_interval": 4}),
            ),
            12,
            2,
            256,
        ),
        (
            "lfm2",
            with(
                usual("lfm2", 2048, 16, 32, Some(8)),
                json!({"full_attn_idxs": [2, 5, 8, 10, 12, 14]}),
            ),
            6,
            8,
            64,
        ),
        (
            "minimax",
            with(
                usual("minimax", 6144, 8, 64, Some(8)),
                json!({"head_dim": 128, "attn_type_list": [0, 0, 0, 0, 0, 0, 0, 1]}),
            ),
            1,
            8,
            128,
        ),
        (
            "llama 3.2 vision",
            json!({"model_type": "mllama", "text_config": with(
                usual("mllama_text_model", 4096, 40, 32, Some(8)),
                json!({"cross_attention_layers": [3, 8, 13, 18, 23, 28, 33, 38]}))}),
            32,
            8,
            128,
        ),
    ] {
        hybrid(name, config, layers, kv_heads, head_dim);
    }
    let recurrent = with(
        usual("recurrent_gemma", 2560, 26, 10, Some(1)),
        json!({"block_types": ["recurrent", "recurrent", "attention"], "head_dim": 256,
               "attention_window_size": 2048}),
    );
    check("recurrentgemma", recurrent, 8 * 1024, 0, 8);
}

#[test]
fn models_without_a_cache_are_refused_by_name() {
    let none = [
        ("mamba", "no attention"),
        ("falcon_mamba", "no attention"),
        ("rwkv", "no attention"),
        ("bert", "an encoder"),
    ];
    for (name, words) in none {
        let error = read(&usual(name, 768, 12, 12, None)).expect_err(name);
        assert!(error.contains(words), "{name}: {error}");
    }
    let never = with(usual("jamba", 64, 4, 4, None), json!({"attn_layer_indices": []}));
    assert!(read(&never).expect_err("no layer").contains("no layer of the model has attention"));
}

#[test]
fn heads_may_differ_by_layer() {
    let openelm = json!({"model_type": "openelm", "num_transformer_layers": 3, "head_dim": 64,
        "model_dim": 1280, "num_kv_heads": [3, 3, 5], "num_query_heads": [12, 12, 20],
        "max_context_length": 2048});
    let geometry = check("openelm", openelm, 11 * 64 * 4, 11 * 64 * 4, 3);
    assert_eq!(geometry.kinds().len(), 2);
    let block = |attention: Value| json!({ "attention": attention });
    let blocks = [
        block(json!({"n_heads_in_group": 8})),
        block(json!({"no_op": true, "n_heads_in_group": null})),
        block(json!({"replace_with_linear": true})),
        block(json!({"n_heads_in_group": 16})),
    ];
    let deci = with(usual("nemotron-nas", 8192, 4, 64, None), json!({"block_configs": blocks}));
    check("nemotron 51b, a part", deci, 12 * 128 * 4, 12 * 128 * 4, 2);
}

#[test]
fn decoders_beside_an_encoder_are_counted() {
    let whisper = json!({"model_type": "whisper", "is_encoder_decoder": true, "d_model": 1280,
        "encoder_layers": 32, "decoder_layers": 32, "decoder_attention_heads": 20,
        "num_hidden_layers": 32, "max_target_positions": 448});
    let geometry = plain("whisper large", whisper, 32, 20, 64);
    assert_eq!(geometry.context, Some(448));
    assert!(geometry.notes[0].contains("cross attention"), "{:?}", geometry.notes);
    let t5 = json!({"model_type": "t5", "is_encoder_decoder": true, "num_layers": 24,
        "num_decoder_layers": 24, "num_heads": 128, "d_kv": 128, "d_model": 1024,
        "n_positions": 512});
    plain("t5 11b", t5, 24, 128, 128);
}

#[test]
fn a_model_of_an_unknown_type_is_planned_with_a_word() {
    let geometry = plain("new", usual("brand_new", 4096, 32, 32, Some(8)), 32, 8, 128);
    assert_eq!(geometry.notes, ["model_type \"brand_new\" is unknown: planned from its fields"]);
    let mut nameless = usual("x", 4096, 32, 32, None);
    nameless.as_object_mut().expect("an object").remove("model_type");
    let geometry = plain("nameless", nameless, 32, 32, 128);
    assert_eq!(geometry.notes, ["the file names no model_type: planned from its fields"]);
}

#[test]
fn rotary_embeddings_are_no_matter_of_memory() {
    for scaling in [
        json!({"type": "yarn"}),
        json!({"rope_type": "llama3", "type": "linear"}),
        json!("nonsense"),
        json!([1, {"a": 2}]),
    ] {
        let config = with(
            usual("llama", 4096, 32, 32, Some(8)),
            json!({"rope_scaling": scaling,
            "rope_parameters": 7, "rope_theta": "high", "hidden_act": "gelu", "vocab_size": -1}),
        );
        plain("llama", config, 32, 8, 128);
    }
}
