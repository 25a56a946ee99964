//! The example over folders with random weights, against greedy decoding by candle-transformers.
use std::fs;
use std::path::Path;

use clap::Parser;
use kv_candle::kv::KvFormat;
use tempfile::TempDir;
use tokenizers::Tokenizer;

use crate::llama;
use crate::models::{self, Model};
use crate::run::run;

const PROMPT: &str = "Lily and Ben went to the park";
const NEW: usize = 20;

fn tokenizer() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/stories260K/tokenizer.json")
}

/// Writes the folder of a model.
fn folder(model: &Model) -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path();
    fs::write(path.join("config.json"), model.config.to_string()).unwrap();
    fs::copy(tokenizer(), path.join("tokenizer.json")).unwrap();
    candle_core::safetensors::save(&model.tensors, path.join("model.safetensors")).unwrap();
    folder
}

fn arguments(folder: &Path, more: &[&str]) -> Vec<String> {
    let folder = folder.to_str().unwrap();
    let given = ["example", "--model", folder, "--max-new-tokens", "20"];
    given.iter().chain(more).map(|word| (*word).to_owned()).collect()
}

/// Continues a text by candle's model, which computes everything again for each token.
fn as_candle(model: &Model, prompt: &str) -> String {
    let tokenizer = Tokenizer::from_file(tokenizer()).unwrap();
    let mut tokens = tokenizer.encode(prompt, true).unwrap().get_ids().to_vec();
    let before = tokenizer.decode(&tokens, false).unwrap();
    for _ in 0..NEW {
        let logits = run(&mut (model.theirs)(), &tokens, 0).unwrap();
        let best = (0_u32..).zip(logits).max_by(|(_, one), (_, other)| one.total_cmp(other));
        tokens.push(best.unwrap().0);
    }
    let all = tokenizer.decode(&tokens, false).unwrap();
    format!("{prompt}{}", all.strip_prefix(&before).unwrap())
}

#[test]
fn the_example_prints_the_text_of_candle() {
    let model = models::llama();
    let folder = folder(&model);
    let given = arguments(folder.path(), &["--prompt", PROMPT]);
    let text = llama::run(&Parser::parse_from(given)).unwrap();
    assert_eq!(text, as_candle(&model, PROMPT));
    assert!(text.len() > PROMPT.len());
}

#[test]
fn requests_of_a_file_are_answered_in_their_order() {
    let model = models::llama();
    let folder = folder(&model);
    let file = folder.path().join("requests.txt");
    let requests = ["One day", PROMPT, "The dog", "He ran"];
    fs::write(&file, requests.join("\n\n")).unwrap();
    let given = ["--requests", file.to_str().unwrap(), "--system", "Tom", "--max-batch", "2"];
    let text = llama::run(&Parser::parse_from(arguments(folder.path(), &given))).unwrap();
    let expected = requests.map(|request| {
        let alone = as_candle(&model, &format!("Tom\n{request}"));
        format!("{}\n", alone.strip_prefix("Tom\n").unwrap())
    });
    assert_eq!(text, expected.join("\n"));
}

#[test]
fn a_folder_that_is_wrong_is_said_with_its_file() {
    let model = models::llama();
    for (file, content, words) in [
        ("config.json", None, "config.json: No such file"),
        ("config.json", Some("{\"hidden_size\": 32}"), "config.json: missing field"),
        ("config.json", Some("{"), "config.json: EOF while parsing"),
        ("tokenizer.json", Some("{}"), "tokenizer.json: "),
        ("tokenizer.json", Some("no JSON"), "tokenizer.json: expected"),
        ("model.safetensors", None, "model.safetensors: "),
        ("model.safetensors", Some("no tensors"), "model.safetensors: "),
    ] {
        let folder = folder(&model);
        let path = folder.path().join(file);
        fs::remove_file(&path).unwrap();
        if let Some(content) = content {
            fs::write(&path, content).unwrap();
        }
        let error = llama::run(&Parser::parse_from(arguments(folder.path(), &[]))).unwrap_err();
        let error = format!("{error:#}");
        assert!(error.contains(words), "{file}, {content:?}: {error}");
    }
    let mut fewer = models::llama();
    fewer.tensors.remove("model.layers.1.mlp.up_proj.weight").unwrap();
    let folder = folder(&fewer);
    let error = llama::run(&Parser::parse_from(arguments(folder.path(), &[]))).unwrap_err();
    assert!(error.to_string().contains("model.layers.1.mlp.up_proj"), "{error}");
    assert!("l5".parse::<KvFormat>().unwrap_err().to_string().contains("l4"));
}
