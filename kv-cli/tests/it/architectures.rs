//! Every architecture and every rope type through the program, against transformers.
use std::fs;

use serde_json::json;

use crate::recorded::{Recorded, recorded};
use crate::support::{Entry, ModelDir, all_tokens, fails, json, safetensors};

fn tensors(case: &Recorded) -> Vec<Entry> {
    case.weights().map(|(name, shape, values)| Entry::f32(name, shape, &values)).collect()
}

/// Makes the directory that transformers saved, with another tokenizer.
pub(crate) fn directory(case: &Recorded) -> ModelDir {
    let model = ModelDir::copy();
    model.write("config.json", case.config.to_string());
    model.write("model.safetensors", safetensors(&tensors(case)));
    model
}

fn generate(case: &Recorded, model: &ModelDir, extra: &[&str]) -> Vec<Vec<u64>> {
    let args = ["generate", "--ignore-eos", "--max-new-tokens", "20", "--model", model.path()];
    all_tokens(&json(&[&args[..], &["--prompt", &case.prompt], extra].concat()))
}

#[test]
fn every_architecture_continues_as_in_transformers() {
    for case in &recorded() {
        let model = directory(case);
        let expected: Vec<_> = case.output_ids.iter().copied().map(u64::from).collect();
        for extra in [
            &[][..],
            &["--max-step-tokens", "5", "--paged", "4,40"],
            &["--contiguous"],
            &["--draft-tokens", "3"],
            &["--no-cache"],
        ] {
            let got = generate(case, &model, extra);
            assert_eq!(got, std::slice::from_ref(&expected), "{} {extra:?}", case.name);
        }
        // The same prompt twice: the second one reuses the first one's rows.
        let got = generate(case, &model, &["--prompt", &case.prompt, "--max-batch", "1"]);
        assert_eq!(got, [expected.clone(), expected], "{}", case.name);
    }
}

#[test]
fn layers_with_and_without_windows_share_a_batch_and_few_blocks() {
    for case in recorded().iter().filter(|case| {
        ["qwen2", "qwen3-layer-types", "smollm3-windows"].contains(&case.name.as_str())
    }) {
        let model = directory(case);
        let prompts = ["--prompt", "Tom and Sam", "--prompt", &case.prompt, "--prompt", "One day"];
        let expected = generate(case, &model, &prompts);
        let others = [&prompts[..], &["--paged", "4,17"]].concat();
        let args = ["generate", "--ignore-eos", "--max-new-tokens", "20", "--model", model.path()];
        let report = json(&[&args[..], &["--prompt", &case.prompt], &others].concat());
        assert_eq!(all_tokens(&report), expected, "{}", case.name);
        let preemptions = report["stats"]["preemptions"].as_u64().expect("a count");
        assert!(preemptions > 0, "{}: {}", case.name, report["stats"]);
        for extra in [&["--no-reuse"][..], &["--contiguous"], &["--no-cache"]] {
            let got = generate(case, &model, &[&prompts[..], extra].concat());
            assert_eq!(got, expected, "{} {extra:?}", case.name);
        }
    }
}

#[test]
fn shards_under_an_index_with_a_byte_order_mark_are_one_model() {
    let cases = recorded();
    let case = cases.iter().find(|case| case.name == "phi3").expect("phi3");
    let model = directory(case);
    fs::remove_file(model.file("model.safetensors")).expect("weights");
    let all = tensors(case);
    let mut map = serde_json::Map::new();
    let mut size = 0;
    for (part, number) in all.chunks(8).zip(1..) {
        let file = format!("model-{number:05}-of-00003.safetensors");
        model.write(&file, safetensors(part));
        size += part.iter().map(|entry| entry.bytes.len()).sum::<usize>();
        map.extend(part.iter().map(|entry| (entry.name.clone(), json!(file))));
    }
    let index = json!({ "metadata": { "total_size": size }, "weight_map": map });
    model.write("model.safetensors.index.json", format!("\u{feff}{index}"));
    for file in ["config.json", "tokenizer.json"] {
        let text = fs::read_to_string(model.file(file)).expect(file);
        model.write(file, format!("\u{feff}{text}"));
    }
    model.write("generation_config.json", "\u{feff}{\"eos_token_id\": [2]}");
    let expected: Vec<_> = case.output_ids.iter().copied().map(u64::from).collect();
    assert_eq!(generate(case, &model, &[]), [expected]);
}

#[test]
fn old_and_new_keys_run_and_contradictions_are_refused() {
    let run = |changes: &[(&str, serde_json::Value)]| {
        let model = ModelDir::copy();
        for (field, value) in changes {
            model.set(field, Some(value.clone()));
        }
        let args = ["generate", "--max-new-tokens", "60", "--ignore-eos", "--model", model.path()];
        all_tokens(&json(&args))
    };
    let llama3 = |name: &str| {
        json!({
            "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64, name: "llama3"
        })
    };
    let mut both = llama3("type");
    both["rope_type"] = json!("llama3");
    let scaled = run(&[("rope_scaling", llama3("rope_type"))]);
    assert_ne!(scaled, run(&[]));
    assert_eq!(run(&[("rope_scaling", both.clone())]), scaled);
    assert_eq!(run(&[("rope_scaling", llama3("type")), ("rope_parameters", both)]), scaled);
    assert_eq!(run(&[("eos_token_id", json!(-1)), ("rope_scaling", llama3("type"))]), scaled);
    for (field, value, words) in [
        (
            "rope_scaling",
            json!({"rope_type": "llama3", "type": "linear", "factor": 2.0}),
            "config.json: rope_scaling rope_type is llama3, but rope_scaling type is linear",
        ),
        (
            "rope_parameters",
            json!({"rope_theta": 5e5}),
            "rope_theta is 10000, but rope_parameters rope_theta is 500000",
        ),
        ("eos_token_id", json!(-2), "config.json: eos_token_id is -2, expected a token id"),
        ("model_type", json!("mixtral"), "model_type \"mixtral\" is not supported"),
    ] {
        let model = ModelDir::copy();
        model.set("rope_theta", Some(json!(10000.0)));
        model.set(field, Some(value));
        fails(&["generate", "--json", "--model", model.path()], 1, words);
    }
    let model = ModelDir::copy();
    model.write("config.json", json!({"model_type": "gpt2", "n_embd": 768}).to_string());
    fails(&["generate", "--json", "--model", model.path()], 1, "\"gpt2\" is not supported");
}
