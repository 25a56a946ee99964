//! Published configurations, cut to the relevant fields, against bytes worked out by hand.
mod hybrids;
mod refusals;
mod states;
mod windows;

use serde_json::{Value, json};

use super::*;
use crate::object::Object;

fn read(config: &Value) -> Result<ModelGeometry, String> {
    let file = Object::new("", config).expect("an object");
    config::geometry(file).map_err(|error| error.to_string())
}

/// Returns the bytes in bf16 that layers need per token.
fn bytes<'a>(layers: impl IntoIterator<Item = &'a LayerGeometry>) -> u64 {
    let dims = |layer: &LayerGeometry| {
        layer.head_dim_k + if layer.is_latent { 0 } else { layer.head_dim_v }
    };
    let layers = layers.into_iter();
    layers.map(|layer| u64::from(layer.kv_heads) * u64::from(dims(layer)) * 2).sum()
}

/// Checks a model whose layers have no windows.
#[track_caller]
fn plain(name: &str, config: Value, [layers, kv_heads, head_dim]: [u64; 3]) -> ModelGeometry {
    let token = layers * 2 * kv_heads * head_dim * 2;
    check(name, config, token, token, usize::try_from(layers).expect("few"))
}

#[track_caller]
#[expect(clippy::needless_pass_by_value, reason = "configurations are written in place")]
fn check(
    name: &str,
    config: Value,
    token: u64,
    beyond_windows: u64,
    layers: usize,
) -> ModelGeometry {
    let geometry = read(&config).unwrap_or_else(|error| panic!("{name}: {error}"));
    let beyond = geometry.layers.iter().filter(|layer| layer.window.is_none());
    let needs = (bytes(&geometry.layers), bytes(beyond), geometry.layers.len());
    assert_eq!(needs, (token, beyond_windows, layers), "{name}: {:?}", geometry.notes);
    geometry
}

/// Makes a configuration with the usual fields.
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
    for (name, config, shape) in [
        ("llama 7b", usual("llama", 4096, 32, 32, None), [32, 32, 128]),
        ("llama 3 8b", usual("llama", 4096, 32, 32, Some(8)), [32, 8, 128]),
        ("llama 3.1 405b", usual("llama", 16384, 126, 128, Some(8)), [126, 8, 128]),
        ("mixtral 8x7b", usual("mixtral", 4096, 32, 32, Some(8)), [32, 8, 128]),
        ("qwen2 7b", usual("qwen2", 3584, 28, 28, Some(4)), [28, 4, 128]),
        ("qwen2 moe 57b", usual("qwen2_moe", 3584, 28, 28, Some(4)), [28, 4, 128]),
        ("phi-2", usual("phi", 2560, 32, 32, None), [32, 32, 80]),
        ("phi-4", usual("phi3", 5120, 40, 40, Some(10)), [40, 10, 128]),
        ("phi 3.5 moe", usual("phimoe", 4096, 32, 32, Some(8)), [32, 8, 128]),
        ("olmo 7b", usual("olmo", 4096, 32, 32, None), [32, 32, 128]),
        ("olmo2 7b", usual("olmo2", 4096, 32, 32, None), [32, 32, 128]),
        ("olmoe", usual("olmoe", 2048, 16, 16, Some(16)), [16, 16, 128]),
        ("granite 3 8b", usual("granite", 4096, 40, 32, Some(8)), [40, 8, 128]),
        ("granite moe", usual("granitemoe", 1536, 32, 24, Some(8)), [32, 8, 64]),
        ("command-r", usual("cohere", 8192, 40, 64, None), [40, 64, 128]),
        ("stablelm", usual("stablelm", 2560, 32, 32, Some(32)), [32, 32, 80]),
        (
            "glm4",
            with(usual("glm4", 4096, 40, 32, Some(2)), json!({"head_dim": 128})),
            [40, 2, 128],
        ),
        ("internlm2 7b", usual("internlm2", 4096, 32, 32, Some(8)), [32, 8, 128]),
        ("smollm3", usual("smollm3", 2048, 36, 16, Some(4)), [36, 4, 128]),
        (
            "qwen3 8b",
            with(usual("qwen3", 4096, 36, 32, Some(8)), json!({"head_dim": 128})),
            [36, 8, 128],
        ),
        (
            "qwen3 30b-a3b",
            with(usual("qwen3_moe", 2048, 48, 32, Some(4)), json!({"head_dim": 128})),
            [48, 4, 128],
        ),
        (
            "gemma 7b",
            with(usual("gemma", 3072, 28, 16, Some(16)), json!({"head_dim": 256})),
            [28, 16, 256],
        ),
        (
            "nemo",
            with(
                usual("mistral", 5120, 40, 32, Some(8)),
                json!({"head_dim": 128, "sliding_window": null}),
            ),
            [40, 8, 128],
        ),
        ("gpt-neox 20b", usual("gpt_neox", 6144, 44, 64, None), [44, 64, 96]),
        ("opt 6.7b", usual("opt", 4096, 32, 32, None), [32, 32, 128]),
    ] {
        let geometry = plain(name, config, shape);
        assert_eq!(geometry.context, Some(4096), "{name}");
        assert!(geometry.notes.is_empty(), "{name}: {:?}", geometry.notes);
    }
}

#[test]
fn heads_of_gpt_and_falcon_are_found() {
    for (name, config, shape) in [
        (
            "gpt2",
            json!({"model_type": "gpt2", "n_layer": 12, "n_head": 12, "n_embd": 768,
                   "n_ctx": 1024, "n_positions": 1024}),
            [12, 12, 64],
        ),
        (
            "gptj 6b",
            json!({"model_type": "gptj", "n_layer": 28, "n_head": 16, "n_embd": 4096,
                   "n_positions": 2048, "rotary_dim": 64}),
            [28, 16, 256],
        ),
        (
            "starcoder",
            json!({"model_type": "gpt_bigcode", "n_layer": 40, "n_head": 48, "n_embd": 6144,
                   "multi_query": true, "n_positions": 8192}),
            [40, 1, 128],
        ),
        (
            "falcon 7b",
            json!({"model_type": "falcon", "hidden_size": 4544, "num_hidden_layers": 32,
                   "num_attention_heads": 71, "multi_query": true,
                   "new_decoder_architecture": false}),
            [32, 1, 64],
        ),
        (
            "falcon 7b, saved anew",
            json!({"model_type": "falcon", "hidden_size": 4544, "num_hidden_layers": 32,
                   "num_attention_heads": 71, "num_kv_heads": 71, "multi_query": true,
                   "new_decoder_architecture": false, "max_position_embeddings": 2048}),
            [32, 1, 64],
        ),
        (
            "falcon 40b",
            json!({"model_type": "falcon", "hidden_size": 8192, "num_hidden_layers": 60,
                   "num_attention_heads": 128, "num_kv_heads": 8, "multi_query": true,
                   "new_decoder_architecture": true}),
            [60, 8, 64],
        ),
        (
            "falcon-rw 1b",
            json!({"model_type": "falcon", "hidden_size": 2048, "num_hidden_layers": 24,
                   "num_attention_heads": 32, "multi_query": false,
                   "new_decoder_architecture": false}),
            [24, 32, 64],
        ),
    ] {
        plain(name, config, shape);
    }
}

#[test]
fn fields_of_other_names_are_found() {
    for (name, config, shape) in [
        (
            "mpt 7b",
            json!({"model_type": "mpt", "n_layers": 32, "n_heads": 32, "d_model": 4096,
                   "max_seq_len": 2048, "attn_config": {"attn_type": "multihead_attention"}}),
            [32, 32, 128],
        ),
        (
            "dbrx",
            json!({"model_type": "dbrx", "n_layers": 40, "n_heads": 48, "d_model": 6144,
                   "max_seq_len": 32768, "attn_config": {"kv_n_heads": 8, "clip_qkv": 8}}),
            [40, 8, 128],
        ),
        (
            "bloom 176b",
            json!({"model_type": "bloom", "n_layer": 70, "num_attention_heads": 112,
                   "n_embed": 14336, "seq_length": 2048}),
            [70, 112, 128],
        ),
        (
            "chatglm3",
            json!({"model_type": "chatglm", "num_layers": 28, "num_attention_heads": 32,
                   "hidden_size": 4096, "kv_channels": 128, "multi_query_attention": true,
                   "multi_query_group_num": 2, "seq_length": 8192}),
            [28, 2, 128],
        ),
        (
            "exaone 3",
            json!({"model_type": "exaone", "num_layers": 32, "num_attention_heads": 32,
                   "num_key_value_heads": 8, "hidden_size": 4096,
                   "max_position_embeddings": 4096}),
            [32, 8, 128],
        ),
        (
            "qwen 7b",
            json!({"model_type": "qwen", "num_hidden_layers": 32, "num_attention_heads": 32,
                   "hidden_size": 4096, "kv_channels": 128, "seq_length": 8192,
                   "max_position_embeddings": 32768}),
            [32, 32, 128],
        ),
    ] {
        plain(name, config, shape);
    }
}

#[test]
fn text_decoders_inside_other_models_are_found() {
    for (name, config, shape) in [
        (
            "mistral small 3.1",
            json!({"model_type": "mistral3", "vision_config": {"num_hidden_layers": 24},
                   "text_config": {"model_type": "mistral", "num_hidden_layers": 40,
                   "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
                   "hidden_size": 5120, "max_position_embeddings": 131_072,
                   "sliding_window": null}}),
            [40, 8, 128],
        ),
        (
            "llava 1.5, whose text part leaves out what llama has anyway",
            json!({"model_type": "llava", "text_config": {"model_type": "llama",
                   "max_position_embeddings": 4096, "vocab_size": 32064}}),
            [32, 32, 128],
        ),
        (
            "qwen2.5-vl, outer fields",
            with(
                usual("qwen2_5_vl", 3584, 28, 28, Some(4)),
                json!({"vision_config": {"window_size": 112}, "sliding_window": 32768,
                        "use_sliding_window": false, "max_window_layers": 28}),
            ),
            [28, 4, 128],
        ),
    ] {
        plain(name, config, shape);
    }
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
    let zeros = json!({"kv_lora_rank": 512, "use_mla": false, "qk_rope_head_dim": 0,
                       "v_head_dim": 0});
    plain("zeros", with(usual("deepseek_v2", 1280, 12, 10, Some(10)), zeros), [12, 10, 128]);
    // Without ranks it is normal attention.
    let none = with(usual("deepseek_v3", 2048, 2, 16, Some(16)), json!({"kv_lora_rank": null}));
    plain("no ranks", none, [2, 16, 128]);
}

#[test]
fn models_without_a_cache_are_refused_by_name() {
    let none = [("rwkv", "no attention"), ("xlstm", "no attention"), ("bert", "an encoder")];
    for (name, words) in none {
        let error = read(&usual(name, 768, 12, 12, None)).expect_err(name);
        assert!(error.contains(words), "{name}: {error}");
    }
    let never = with(usual("brand_new", 64, 4, 4, None), json!({"attn_layer_indices": []}));
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
    let geometry = plain("whisper large", whisper, [32, 20, 64]);
    assert_eq!(geometry.context, Some(448));
    assert!(geometry.notes[0].contains("cross attention"), "{:?}", geometry.notes);
    let t5 = json!({"model_type": "t5", "is_encoder_decoder": true, "num_layers": 24,
        "num_decoder_layers": 24, "num_heads": 128, "d_kv": 128, "d_model": 1024,
        "n_positions": 512});
    plain("t5 11b", t5, [24, 128, 128]);
}

#[test]
fn a_model_of_an_unknown_type_is_planned_with_a_note() {
    let geometry = plain("new", usual("brand_new", 4096, 32, 32, Some(8)), [32, 8, 128]);
    assert_eq!(geometry.notes, ["model_type \"brand_new\" is unknown: planned from its fields"]);
    let mut nameless = usual("x", 4096, 32, 32, None);
    nameless.as_object_mut().expect("an object").remove("model_type");
    let geometry = plain("nameless", nameless, [32, 32, 128]);
    assert_eq!(geometry.notes, ["the file names no model_type: planned from its fields"]);
}

#[test]
fn rotary_embeddings_do_not_change_a_plan() {
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
        plain("llama", config, [32, 8, 128]);
    }
}
