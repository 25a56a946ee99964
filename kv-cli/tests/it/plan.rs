//! `kv plan`, from a configuration alone.
use serde_json::json;

use crate::support::{ModelDir, fails, json, kv};

#[test]
fn figures_follow_from_the_configuration() {
    let dir = tempfile::TempDir::new().expect("a directory");
    let config = json!({
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128_256,
        "max_position_embeddings": 8192
    });
    std::fs::write(dir.path().join("config.json"), config.to_string()).expect("config.json");
    let model = dir.path().to_str().expect("UTF-8");
    let report = json(&["plan", "--model", model, "--memory", "24GiB", "--format", "bf16"]);
    assert_eq!(report["context"], 8192);
    let line = &report["formats"][0];
    // 32 layers, K and V, 8 heads of 128, two bytes: 128 KiB a token, 1 GiB a sequence.
    assert_eq!(line["bytes_per_token"], 131_072);
    assert_eq!(line["sequence_bytes"], 1_u64 << 30);
    assert_eq!(line["tokens"], 24 * 8192);
    assert_eq!(line["sequences"], 24);
    let report = json(&["plan", "--model", model, "--memory", "1KiB", "--context", "131072"]);
    let formats = report["formats"].as_array().expect("a list");
    assert_eq!(formats.len(), 21, "every format unless asked otherwise");
    assert!(formats.iter().all(|line| line["sequences"] == 0 && line["tokens"] == 0));
    let report = json(&[
        "plan",
        "--model",
        model,
        "--memory",
        "24GiB",
        "--format",
        "f16",
        "--context",
        "16385",
    ]);
    assert_eq!(report["formats"][0]["sequences"], 11, "a started block counts whole");
}

#[test]
fn scales_and_sinks_are_counted() {
    let dir = tempfile::TempDir::new().expect("a directory");
    let config = json!({
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128_256,
        "max_position_embeddings": 8192
    });
    std::fs::write(dir.path().join("config.json"), config.to_string()).expect("config.json");
    let model = dir.path().to_str().expect("UTF-8");
    let formats = ["l4", "l4,sinks=0", "int8/l4", "fp8-e4m3", "q4_0,transform=on", "f32"];
    let mut args = vec!["plan", "--model", model, "--memory", "24GiB"];
    args.extend(formats.iter().flat_map(|format| ["--format", format]));
    let report = json(&args);
    // Bytes of a row of K and of V, then slots that the four sinks take beyond one a token: 256
    // bytes of f16 in rows of 66 take four.
    for ((line, name), (k, v, further, sinks)) in
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
        assert_eq!(line["sinks"], sinks, "{line}");
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
fn a_block_must_hold_a_sink() {
    fails(&["plan", "--format", "l3", "--block-size", "2"], 1, "sinks");
    let report = json(&["plan", "--format", "l3,sinks=0", "--block-size", "2"]);
    assert_eq!(report["formats"][0]["sinks"], 0);
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
