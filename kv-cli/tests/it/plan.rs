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
    assert_eq!(report["formats"].as_array().map(Vec::len), Some(3));
    assert_eq!(report["formats"][0]["sequences"], 0);
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
fn a_table_is_for_people() {
    let output = kv(&["plan", "--memory", "1GB"]);
    assert_eq!((output.code, output.stderr.as_str()), (0, ""));
    for words in ["bytes/token", "f32", "bf16", "1280"] {
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
