//! `kv plan`, from a configuration alone.
use serde_json::{Value, json};

use crate::support::{ModelDir, fails, json, kv};

#[test]
fn figures_follow_from_the_configuration() {
    let report = plan(&llama(), &["--memory", "24GiB"]);
    assert_eq!(report["context"], 8192);
    let line = &report["formats"][0];
    // 32 layers, K and V, 8 heads of 128, two bytes: 128 KiB per token, 1 GiB per sequence.
    assert_eq!(line["bytes_per_token"], 131_072);
    assert_eq!(line["sequence_bytes"], 1_u64 << 30);
    assert_eq!(line["tokens"], 24 * 8192);
    assert_eq!(line["sequences"], 24);
    let report = plan_in(&[], &llama(), &["--memory", "1KiB", "--context", "131072"]);
    let formats = report["formats"].as_array().expect("a list");
    assert_eq!(formats.len(), 21, "every format by default");
    assert!(formats.iter().all(|line| line["sequences"] == 0 && line["tokens"] == 0));
    let report = plan_in(&["f16"], &llama(), &["--memory", "24GiB", "--context", "16385"]);
    assert_eq!(report["formats"][0]["sequences"], 11, "a started block counts whole");
}

#[test]
fn scales_and_wide_rows_are_counted() {
    let formats =
        ["l4", "l4,full-precision-prefix=0", "int8/l4", "fp8-e4m3", "q4_0,transform=on", "f32"];
    let report = plan_in(&formats, &llama(), &["--memory", "24GiB"]);
    // Bytes of a row of K and of V, then extra slots of the four rows in the full-precision prefix:
    // 256 bytes of f16 take four rows of 66.
    for ((line, name), (k, v, further, prefix)) in
        report["formats"].as_array().expect("a list").iter().zip(formats).zip([
            (66_u64, 66, 12, 4),
            (66, 66, 0, 0),
            (130, 66, 12, 4),
            (128, 128, 0, 0),
            (72, 72, 12, 4),
            (512, 512, 0, 0),
        ])
    {
        assert_eq!(line["format"], name);
        assert_eq!(line["full_precision_prefix"], prefix, "{line}");
        let bytes_per_token = 32 * 8 * (k + v);
        assert_eq!(line["bytes_per_token"], bytes_per_token, "{line}");
        let blocks = (8192_u64 + further).div_ceil(16);
        assert_eq!(line["sequence_bytes"], bytes_per_token * 16 * blocks, "{line}");
        // Each plane with a transform or a given scale has 8 heads of 2 scales and 3 lists of 128.
        let planes = if name == "f32" { 0 } else { 2 };
        let constants = 32 * planes * 8 * (2 + 3 * 128) * 4;
        let available = ((24_u64 << 30) - constants) / (bytes_per_token * 16);
        assert_eq!(line["sequences"], available / blocks, "{line}");
        assert_eq!(line["tokens"], available * 16 - further, "{line}");
        let bits = line["bits_per_value"].as_f64().expect("a number") * 256.0;
        assert!((bits - f64::from(u32::try_from(8 * (k + v)).expect("small"))).abs() < 1e-9);
    }
}

#[test]
fn a_block_must_hold_a_wide_row() {
    fails(&["plan", "--format", "l3", "--block-size", "2"], 1, "full_precision_prefix");
    let report = json(&["plan", "--format", "l3,full-precision-prefix=0", "--block-size", "2"]);
    assert_eq!(report["formats"][0]["full_precision_prefix"], 0);
}

#[test]
fn a_table_is_for_people() {
    let output = kv(&["plan", "--memory", "1GB"]);
    assert_eq!((output.code, output.stderr.as_str()), (0, ""));
    for words in ["bytes/token", "bits/value", "f32", "bf16", "1280", "l4-g32", "nvfp4"] {
        assert!(output.stdout.contains(words), "{}", output.stdout);
    }
}

#[test]
fn wrong_input_is_refused() {
    fails(&["plan", "--memory", "lots"], 2, "expected a number with an optional unit");
    fails(&["plan", "--memory", "-1"], 2, "--memory");
    fails(&["plan", "--format", "int3"], 2, "unknown stored format \"int3\"");
    fails(&["plan", "--context", "0"], 2, "at least 1");
    fails(&["plan", "--block-size", "0"], 2, "at least 1");
    fails(&["plan", "--block-size", "4294967295", "--model", "/no/such"], 1, "/no/such");
    let model = ModelDir::copy();
    model.set("num_attention_heads", Some(json!(0)));
    fails(&["plan", "--model", model.path()], 1, "num_attention_heads is 0");
}

/// Runs for a configuration in bf16.
fn plan(config: &Value, extra: &[&str]) -> Value {
    plan_in(&["bf16"], config, extra)
}

/// Runs for a configuration in some formats; in all if none is named.
fn plan_in(formats: &[&str], config: &Value, extra: &[&str]) -> Value {
    let dir = tempfile::TempDir::new().expect("a directory");
    std::fs::write(dir.path().join("config.json"), config.to_string()).expect("config.json");
    let model = dir.path().to_str().expect("UTF-8");
    let formats: Vec<_> = formats.iter().flat_map(|format| ["--format", format]).collect();
    json(&[&["plan", "--model", model], &formats[..], extra].concat())
}

fn llama() -> Value {
    json!({
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128_256,
        "max_position_embeddings": 8192
    })
}

#[test]
fn latent_attention_shows_needed_and_stored_bytes() {
    let deepseek = json!({
        "model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61,
        "num_attention_heads": 128, "num_key_value_heads": 128, "kv_lora_rank": 512,
        "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
        "max_position_embeddings": 163_840, "rope_scaling": {"type": "yarn", "factor": 40}
    });
    let report = plan(&deepseek, &[]);
    let line = &report["formats"][0];
    assert_eq!(line["bytes_per_token"], 70_272);
    assert_eq!(line["stored_bytes_per_token"], 132_736);
    assert_eq!(line["sequence_bytes"], 132_736_u64 * 163_840);
    let notes = report["notes"].to_string();
    assert!(notes.contains("70272 bytes per token, 1.9 times that (132736) are stored"), "{notes}");
    let dir = tempfile::TempDir::new().expect("a directory");
    std::fs::write(dir.path().join("config.json"), deepseek.to_string()).expect("config.json");
    let output = kv(&["plan", "--model", dir.path().to_str().expect("UTF-8")]);
    assert!(output.stdout.contains("61 layers, a latent row of 576"), "{}", output.stdout);
    assert!(output.stdout.contains("note: multi-head latent attention"), "{}", output.stdout);
}

#[test]
fn layers_of_several_kinds_are_added_up() {
    let gpt_oss = json!({
        "model_type": "gpt_oss", "hidden_size": 2880, "num_hidden_layers": 24, "head_dim": 64,
        "num_attention_heads": 64, "num_key_value_heads": 8, "sliding_window": 128,
        "max_position_embeddings": 131_072
    });
    let report = plan(&gpt_oss, &["--memory", "80GB"]);
    let line = &report["formats"][0];
    assert_eq!(line["bytes_per_token"], 24 * 2048);
    assert_eq!(line["kind_bytes_per_token"], json!([12 * 2048, 12 * 2048]));
    assert_eq!(report["kinds"][0]["window"], 128);
    assert_eq!(report["kinds"][1]["window"], json!(null));
    // 8,192 blocks of 16 without a window, and nine for a window of 128.
    let sequence = (8192 + 9) * 16 * 12 * 2048_u64;
    assert_eq!(line["sequence_bytes"], sequence);
    assert_eq!(line["sequences"], 80_000_000_000 / sequence);
    let jamba = json!({
        "model_type": "jamba", "hidden_size": 4096, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "attn_layer_period": 8,
        "attn_layer_offset": 4, "max_position_embeddings": 262_144, "mamba_expand": 2,
        "mamba_d_conv": 4, "mamba_d_state": 16
    });
    let report = plan(&jamba, &[]);
    assert_eq!((&report["layers"], &report["attention_layers"]), (&json!(32), &json!(4)));
    assert_eq!(report["formats"][0]["bytes_per_token"], 4 * 4096);
    assert_eq!(report["notes"], json!([]), "states of 28 layers are counted");
}

#[test]
fn a_context_that_no_field_gives_is_noted() {
    let falcon = json!({
        "model_type": "falcon", "hidden_size": 4544, "num_hidden_layers": 32,
        "num_attention_heads": 71, "multi_query": true, "new_decoder_architecture": false
    });
    let report = plan(&falcon, &[]);
    assert_eq!((&report["context"], &report["architecture"]), (&json!(2048), &json!("falcon")));
    assert!(report["notes"][0].as_str().expect("a note").contains("--context N sets it"));
    let report = plan(&falcon, &["--context", "4096"]);
    assert_eq!((&report["context"], &report["notes"]), (&json!(4096), &json!([])));
}

#[test]
fn an_invalid_description_names_the_architecture() {
    let dir = tempfile::TempDir::new().expect("a directory");
    let file = |name: &str, bytes: &[u8]| {
        let path = dir.path().join(name);
        std::fs::write(&path, bytes).expect(name);
        path.to_str().expect("UTF-8").to_owned()
    };
    for (config, words) in [
        (json!({"model_type": "rwkv", "num_hidden_layers": 48}), "model_type \"rwkv\": no KV"),
        (json!({"model_type": "new", "layers": 3}), "model_type \"new\": num_hidden_layers is"),
        (json!({}), "no model_type: num_hidden_layers is missing"),
        (json!([]), "the file is [], expected an object"),
    ] {
        file("config.json", config.to_string().as_bytes());
        fails(&["plan", "--model", dir.path().to_str().expect("UTF-8")], 1, words);
    }
    // A file and its directory give the same result, with a byte order mark or without.
    let config = json!({"model_type": "gpt2", "n_layer": 12, "n_head": 12, "n_embd": 768});
    let marked = file("own.json", format!("\u{feff}{config}").as_bytes());
    let report = json(&["plan", "--model", &marked, "--format", "f16"]);
    assert_eq!(report["formats"][0]["bytes_per_token"], 12 * 2 * 768 * 2);
    let utf16: Vec<_> =
        format!("\u{feff}{config}").encode_utf16().flat_map(u16::to_le_bytes).collect();
    fails(&["plan", "--model", &file("utf16.json", &utf16)], 1, "UTF-16 by its byte order mark");
    fails(&["plan", "--model", &file("x.gguf", b"GGUF")], 1, "x.gguf: not a readable GGUF file");
    fails(&["plan", "--model", &file("x.bin", b"GGUF")], 1, "x.bin: not a readable GGUF file");
    std::fs::remove_file(dir.path().join("config.json")).expect("config.json");
    file("y.gguf", b"GGUF");
    let words = "several GGUF files";
    fails(&["plan", "--model", dir.path().to_str().expect("UTF-8")], 1, words);
    let empty = tempfile::TempDir::new().expect("a directory");
    fails(&["plan", "--model", empty.path().to_str().expect("UTF-8")], 1, "config.json: No such");
}

/// Returns the configuration of Qwen3.6-27B: rows in 16 of 64 layers, a delta rule in the others.
fn qwen() -> Value {
    json!({"model_type": "qwen3_5", "vision_config": {}, "text_config": {
        "model_type": "qwen3_5_text", "hidden_size": 5120, "num_hidden_layers": 64,
        "num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 256,
        "full_attention_interval": 4, "linear_conv_kernel_dim": 4, "linear_num_key_heads": 16,
        "linear_key_head_dim": 128, "linear_num_value_heads": 48, "linear_value_head_dim": 128,
        "max_position_embeddings": 262_144, "mamba_ssm_dtype": "float32"
    }})
}

#[test]
fn states_share_the_memory_with_rows() {
    let memory = 96_u64 << 30;
    let report = plan(&qwen(), &["--memory", "96GiB"]);
    let states = &report["states"];
    let state = 156_893_184_u64;
    assert_eq!(states["bytes"], state);
    assert_eq!(states["snapshot_bytes"], state / 2, "f16");
    assert_eq!(states["fit"], memory / state);
    let parts = json!([{"name": "window", "shape": [10_240, 3], "dtype": "f32"},
        {"name": "matrix", "shape": [48, 128, 128], "dtype": "f32"}]);
    assert_eq!(states["kinds"], json!([{"layers": 48, "parts": parts}]));
    assert_eq!((&report["layers"], &report["attention_layers"]), (&json!(64), &json!(16)));
    assert_eq!(report["notes"], json!([]));
    let line = &report["formats"][0];
    assert_eq!(line["bytes_per_token"], 65_536);
    // A slot for the state, and one for that which a step writes.
    let sequence = 65_536 * 262_144 + 2 * state;
    assert_eq!(line["sequence_bytes"], sequence);
    // 15 % for snapshots, and the slot of zeros.
    let snapshots = memory * 15 / 100 / (state / 2);
    let rest = memory - snapshots * (state / 2) - state;
    let running = rest / sequence;
    assert_eq!((line["sequences"].as_u64(), running), (Some(running), 5));
    let blocks = (rest - running * 2 * state) / (65_536 * 16);
    let pools = json!({"blocks": [blocks], "slots": 2 * running, "snapshots": snapshots});
    assert_eq!(line["pools"], pools);
    assert_eq!(line["tokens"], (rest - 2 * state) / (65_536 * 16) * 16);
    // All slots, with the one of zeros, all snapshots and all blocks fit, and no block more.
    let all = (2 * running + 1) * state + snapshots * (state / 2) + blocks * 65_536 * 16;
    assert!(all <= memory && all + 65_536 * 16 > memory, "{all}");
}

#[test]
fn pools_of_states_follow_the_options() {
    let (memory, state) = (96_u64 << 30, 156_893_184_u64);
    let options = ["--memory", "96GiB", "--sequences", "64", "--draft-tokens", "3"];
    let more = ["--snapshots", "10", "--snapshot-format", "same"];
    let report = plan(&qwen(), &[&options[..], &more].concat());
    assert_eq!(report["states"]["snapshot_bytes"], state);
    let pools = &report["formats"][0]["pools"];
    let slots = 64 * 5;
    let blocks = (memory - (slots + 1 + 10) * state) / (65_536 * 16);
    assert_eq!(*pools, json!({"blocks": [blocks], "slots": slots, "snapshots": 10}));
    // 48 layers of windows of 10,240 x 3 in f16 and of matrices of 48 x 128 x 128, 34 bytes for 32.
    let bytes = plan(&qwen(), &["--snapshot-format", "int8"]);
    let each = 10_240 * 3 * 2 + 48 * 128 * 128 / 32 * 34;
    assert_eq!(bytes["states"]["snapshot_bytes"], 48 * each);
    let halves = plan(&qwen(), &["--state-window", "bf16", "--snapshots", "0%"]);
    // 48 windows of 10,240 x 3 take half.
    assert_eq!(halves["states"]["bytes"], state - 48 * 10_240 * 3 * 2);
    assert_eq!(halves["formats"][0]["pools"]["snapshots"], 0);
    let small = plan(&qwen(), &["--memory", "1GiB", "--sequences", "64"]);
    assert_eq!(small["formats"][0]["pools"]["blocks"], json!([0]));
    assert_eq!(small["notes"], json!(["slots and snapshots leave no memory for blocks"]));
}

#[test]
fn experts_do_not_change_a_state() {
    let mut config = qwen();
    let text = config["text_config"].as_object_mut().expect("an object");
    for (field, value) in [
        ("model_type", json!("qwen3_5_moe_text")),
        ("num_hidden_layers", json!(40)),
        ("num_key_value_heads", json!(2)),
        ("num_attention_heads", json!(16)),
        ("hidden_size", json!(2048)),
        ("linear_num_value_heads", json!(32)),
        ("num_experts", json!(256)),
    ] {
        text.insert(field.to_owned(), value);
    }
    let report = plan(&config, &[]);
    assert_eq!(report["formats"][0]["bytes_per_token"], 20_480);
    assert_eq!(report["states"]["bytes"], 65_863_680);
}

#[test]
fn layers_may_have_rows_and_a_state_or_a_state_alone() {
    let falcon = json!({
        "model_type": "falcon_h1", "hidden_size": 2048, "num_hidden_layers": 24, "head_dim": 128,
        "num_attention_heads": 8, "num_key_value_heads": 2, "mamba_d_ssm": 3072,
        "mamba_n_heads": 48, "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4,
        "max_position_embeddings": 131_072
    });
    let report = plan(&falcon, &[]);
    assert_eq!(report["formats"][0]["bytes_per_token"], 24 * 2 * 2 * 128 * 2);
    assert_eq!(report["states"]["bytes"], 24 * (3584 * 3 + 48 * 64 * 256) * 4);
    let mamba = json!({
        "model_type": "mamba2", "hidden_size": 2560, "num_hidden_layers": 64, "num_heads": 80,
        "head_dim": 64, "n_groups": 1, "state_size": 128, "conv_kernel": 4, "expand": 2
    });
    let report = plan_in(&[], &mamba, &["--memory", "24GiB", "--snapshots", "0"]);
    let state = 64 * (5376 * 3 + 80 * 64 * 128) * 4_u64;
    let lines = report["formats"].as_array().expect("a list");
    let [line] = lines.as_slice() else { panic!("one line: {lines:?}") };
    assert_eq!(report["states"]["bytes"], state);
    assert_eq!((&line["bytes_per_token"], &line["tokens"]), (&json!(0), &json!(null)));
    let running = ((24 << 30) - state) / (2 * state);
    assert_eq!(line["sequences"], running);
    assert_eq!(line["pools"], json!({"blocks": [], "slots": 2 * running, "snapshots": 0}));
    let dir = tempfile::TempDir::new().expect("a directory");
    std::fs::write(dir.path().join("config.json"), mamba.to_string()).expect("config.json");
    let output = kv(&["plan", "--model", dir.path().to_str().expect("UTF-8")]);
    let words = "states of 64 layers, window 5376x3 f32 and matrix 80x64x128 f32";
    assert!(output.stdout.contains(": no attention\n"), "{}", output.stdout);
    assert!(output.stdout.contains(words), "{}", output.stdout);
}

#[test]
fn options_of_states_need_a_model_with_states() {
    for option in ["--sequences", "--draft-tokens", "--snapshots"] {
        let words = format!("{option}: ");
        fails(&["plan", option, "2"], 1, &words);
    }
    fails(&["plan", "--snapshot-format", "same"], 1, "has no recurrent states");
    fails(&["plan", "--state-window", "bf16"], 1, "has no recurrent states");
    fails(&["plan", "--snapshots", "101%"], 2, "expected a share from 0% to 100%");
    fails(&["plan", "--snapshot-format", "l4"], 2, "same, f16, int8");
    fails(&["plan", "--state-window", "int8"], 2, "f32, f16, bf16");
}
