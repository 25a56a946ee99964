//! Every architecture and every rope type through the program, against transformers.
use std::fs;

use serde_json::json;

use crate::recorded::{Recorded, recorded, values};
use crate::support::{Entry, ModelDir, all_tokens, json, safetensors};

fn tensors(case: &Recorded) -> Vec<Entry> {
    let tensors = case.tensors.iter();
    tensors.map(|(name, shape)| Entry::f32(name, shape, &values(name, shape))).collect()
}

/// The directory that transformers saved, but for the tokenizer.
fn directory(case: &Recorded) -> ModelDir {
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
fn every_architecture_goes_on_as_in_transformers() {
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
        // Twice the same prompt: the second one finds the first one's rows.
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
