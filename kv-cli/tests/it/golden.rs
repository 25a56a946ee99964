//! Greedy continuations against those computed in f64 from the same weights.
use std::fs;

use serde_json::Value;

use crate::support::{all_tokens, bundled, json, kv, tokens};

fn cases() -> Vec<Value> {
    let text = fs::read_to_string(bundled().join("golden.json")).expect("golden.json");
    let golden: Value = serde_json::from_str(&text).expect("JSON");
    golden["cases"].as_array().expect("cases").clone()
}

#[test]
fn the_bundled_model_gives_the_text_of_f64() {
    let cases = cases();
    assert_eq!(cases.len(), 3);
    for case in &cases {
        let prompt = case["prompt"].as_str().expect("text");
        let report = json(&["generate", "--ignore-eos", "--prompt", prompt]);
        let sequence = &report["sequences"][0];
        assert_eq!(tokens(&sequence["prompt_tokens"]), tokens(&case["prompt_ids"]), "{prompt:?}");
        assert_eq!(tokens(&sequence["tokens"]), tokens(&case["output_ids"]), "{prompt:?}");
        let text = sequence["text"].as_str().expect("text");
        // The recorded text was decoded alone, which loses the blank after a word.
        let after_word = if prompt.is_empty() { None } else { text.strip_prefix(' ') };
        assert_eq!(after_word.unwrap_or(text), case["text"], "{prompt:?}");
    }
}

#[test]
fn all_prompts_at_once_give_what_each_gives_alone() {
    let cases = cases();
    let mut args = vec!["generate", "--ignore-eos"];
    for case in &cases {
        args.extend(["--prompt", case["prompt"].as_str().expect("text")]);
    }
    let expected: Vec<_> = cases.iter().map(|case| tokens(&case["output_ids"])).collect();
    assert_eq!(all_tokens(&json(&args)), expected);
}

/// A 16-bit cache may change a token only if the two most likely ones are close.
#[test]
fn sixteen_bit_caches_agree_up_to_a_close_call() {
    for format in ["f16", "bf16"] {
        for case in &cases() {
            let prompt = case["prompt"].as_str().expect("text");
            let report =
                json(&["generate", "--ignore-eos", "--format", format, "--prompt", prompt]);
            let (got, expected) = (&all_tokens(&report)[0], tokens(&case["output_ids"]));
            let turned = got.iter().zip(&expected).position(|(got, expected)| got != expected);
            if let Some(step) = turned {
                let margin = case["steps"][step]["margin"].as_f64().expect("a margin");
                assert!(margin < 0.05, "{format}, {prompt:?}: step {step}, margin {margin}");
            }
        }
    }
}

#[test]
fn text_streams_after_its_prompt_and_a_report_follows() {
    for case in &cases() {
        let prompt = case["prompt"].as_str().expect("text");
        let output = kv(&["generate", "--ignore-eos", "--prompt", prompt]);
        assert_eq!((output.code, output.stderr.as_str()), (0, ""));
        let text = case["text"].as_str().expect("text");
        let rest = output.stdout.strip_prefix(prompt).expect("the prompt comes first");
        let rest = rest.trim_start_matches(' ').strip_prefix(text).expect("then its text");
        for words in ["128 tokens in", "tokens/s", "time to first token", "blocks used", "reused"] {
            assert!(rest.contains(words), "{rest}");
        }
    }
}

#[test]
fn prompt_and_text_are_what_is_printed() {
    for prompt in ["Lily", "One day, Lily", "The", "Once upon a time"] {
        let args = ["generate", "--ignore-eos", "--max-new-tokens", "12", "--prompt", prompt];
        let report = json(&args);
        let text = report["sequences"][0]["text"].as_str().expect("a text");
        let printed = kv(&args).stdout;
        assert!(printed.starts_with(&format!("{prompt}{text}\n")), "{text:?} in {printed:?}");
        let beams = json(&[&args[..], &["--beams", "2"]].concat());
        let sequence = &beams["sequences"][0];
        assert_eq!(sequence["hypotheses"][0]["text"], sequence["text"]);
    }
    let report = json(&["generate", "--ignore-eos", "--max-new-tokens", "4", "--prompt", "Lily"]);
    let text = report["sequences"][0]["text"].as_str().expect("a text");
    assert!(text.starts_with(' '), "{text:?}");
}
