//! Settings that must not change the tokens: block size, batch, chunks, preemption, no cache at
//! all.
use std::io::Read;
use std::process::Stdio;

use serde_json::Value;

use crate::support::{Output, all_tokens, command, json, kv};

const PROMPTS: [&str; 5] = [
    "Once upon a time",
    "",
    "Lily and Ben were playing in the park when",
    "The big red ball was lost. Tom looked for it under the bed, behind the door and in the garden",
    "One day, a",
];

fn generate(extra: &[&str]) -> Value {
    let mut args = vec!["generate", "--ignore-eos", "--max-new-tokens", "60"];
    args.extend(PROMPTS.iter().flat_map(|prompt| ["--prompt", prompt]));
    args.extend(extra);
    json(&args)
}

#[test]
fn every_way_to_run_gives_the_same_tokens() {
    let expected = all_tokens(&generate(&[]));
    assert_eq!(expected.len(), PROMPTS.len());
    assert!(expected.iter().all(|tokens| tokens.len() == 60));
    for extra in [
        &["--contiguous"][..],
        &["--paged", "1,600"],
        &["--paged", "3,200"],
        &["--paged", "64,10"],
        &["--paged", "512,1"],
        &["--max-batch", "1"],
        &["--max-batch", "2", "--contiguous"],
        &["--max-step-tokens", "1"],
        &["--max-step-tokens", "7"],
        &["--max-step-tokens", "7", "--contiguous", "--max-batch", "3"],
        &["--no-cache"],
        &["--no-cache", "--max-step-tokens", "10", "--max-batch", "2"],
        &["--no-reuse"],
    ] {
        assert_eq!(all_tokens(&generate(extra)), expected, "{extra:?}");
    }
}

#[test]
fn preemption_gives_the_same_tokens() {
    let expected = all_tokens(&generate(&[]));
    for paged in ["4,26", "8,14", "16,7", "16,8", "1,100"] {
        let report = generate(&["--paged", paged]);
        assert_eq!(all_tokens(&report), expected, "{paged}");
        let stats = &report["stats"];
        assert!(stats["preemptions"].as_u64().expect("a count") > 0, "{paged}: {stats}");
        assert!(stats["blocks_peak"].as_u64() <= stats["blocks_total"].as_u64(), "{stats}");
    }
}

#[test]
fn sampling_depends_on_the_seed_and_the_prompt_alone() {
    let sampled = |extra: &[&str]| {
        all_tokens(&generate(&[&["--temperature", "0.9", "--seed", "7"], extra].concat()))
    };
    let expected = sampled(&[]);
    assert_ne!(expected, all_tokens(&generate(&[])));
    assert_eq!(sampled(&["--max-batch", "1"]), expected);
    assert_eq!(sampled(&["--max-step-tokens", "5", "--contiguous"]), expected);
    assert_eq!(sampled(&["--paged", "8,14"]), expected);
    assert_ne!(all_tokens(&generate(&["--temperature", "0.9", "--seed", "8"])), expected);
}

#[test]
fn the_report_has_its_fields() {
    let report = generate(&["--paged", "8,200"]);
    assert_eq!(report["model"], "stories260K");
    assert_eq!(report["backend"], "cpu");
    assert_eq!(report["format"], "f32");
    assert_eq!(report["layout"], "paged 8,200");
    for (sequence, prompt) in report["sequences"].as_array().expect("a list").iter().zip(PROMPTS) {
        assert_eq!(sequence["prompt"], prompt);
        assert!(sequence["prompt_tokens"].as_array().is_some_and(|ids| !ids.is_empty()));
        assert!(sequence["text"].as_str().is_some_and(|text| text.len() > 60));
        assert_eq!(sequence["finish"], "length");
        assert_eq!(sequence["reused_tokens"], 0);
        assert!(sequence["ttft_ms"].as_f64().is_some_and(|ms| ms > 0.0));
    }
    let stats = &report["stats"];
    for field in ["tokens_per_s", "prefill_tokens_per_s", "decode_tokens_per_s", "seconds"] {
        assert!(stats[field].as_f64().is_some_and(|n| n > 0.0), "{field}: {stats}");
    }
    // 5 layers, K and V, 4 heads of 8, f32.
    assert_eq!(stats["cache_bytes"], 5 * 2 * 4 * 8 * 4 * 8 * 200);
    assert_eq!(stats["blocks_total"], 200);
    assert_eq!(stats["preemptions"], 0);
    assert_eq!(stats["generated_tokens"], 300);
    let peak = stats["blocks_peak"].as_u64().expect("a count");
    assert!((40..=60).contains(&peak), "{stats}");
    let waste = stats["waste_ratio"].as_f64().expect("a ratio");
    assert!(waste > 0.0 && waste < 0.5, "{stats}");
}

#[test]
fn the_context_ends_a_sequence() {
    let report = json(&["generate", "--ignore-eos", "--max-new-tokens", "1000", "--prompt", ""]);
    assert_eq!(report["sequences"][0]["finish"], "context");
    assert_eq!(all_tokens(&report)[0].len(), 511);
}

#[test]
fn several_prompts_are_labelled() {
    let output = kv(&["generate", "--max-new-tokens", "9", "--prompt", "Tom", "--prompt", "Lily"]);
    assert_eq!((output.code, output.stderr.as_str()), (0, ""));
    assert!(output.stdout.contains("[1] Tom") && output.stdout.contains("[2] Lily"));
    assert!(output.stdout.contains("18 tokens in"), "{}", output.stdout);
}

#[test]
fn prompts_come_from_a_file() {
    let dir = tempfile::TempDir::new().expect("a directory");
    let file = dir.path().join("prompts.txt");
    std::fs::write(&file, "Once upon a time\n\n\"Lily\\nand\"\n").expect("prompts.txt");
    let file = file.to_str().expect("UTF-8");
    let report = json(&["generate", "--max-new-tokens", "3", "--prompts", file]);
    assert_eq!(report["sequences"][0]["prompt"], "Once upon a time");
    assert_eq!(report["sequences"][1]["prompt"], "Lily\nand");
    assert_eq!(report["sequences"].as_array().map(Vec::len), Some(2));
}

#[test]
fn compare_prints_its_figures() {
    let output = kv(&["generate", "--compare", "--max-new-tokens", "40"]);
    let Output { code, stdout, stderr } = &output;
    assert_eq!((*code, stderr.as_str()), (0, ""));
    assert_eq!(stdout.lines().count(), 2 + 9 + 5, "{stdout}");
    for variant in ["paged", "contiguous", "no cache"] {
        let lines = stdout.lines().filter(|line| line.starts_with(variant));
        assert!(lines.clone().all(|line| line.ends_with("yes")), "{stdout}");
        assert_eq!(lines.count(), 3, "{stdout}");
    }
    let report = json(&["generate", "--compare", "--max-new-tokens", "8", "--prompt", "Tom"]);
    let lines = report["compare"].as_array().expect("a list");
    let lengths: Vec<_> = lines.iter().map(|line| line["new_tokens"].as_u64()).collect();
    assert_eq!(lengths, [2, 2, 2, 4, 4, 4, 8, 8, 8].map(Some));
    assert!(lines.iter().all(|line| line["tokens_per_s"].as_f64().is_some_and(|n| n > 0.0)));
}

#[test]
fn a_reader_that_goes_away_is_no_failure() {
    for args in [&["generate", "--max-new-tokens", "500"][..], &["plan"], &["generate", "--help"]] {
        let mut child = command(args)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the program starts");
        drop(child.stdout.take());
        let mut stderr = String::new();
        child.stderr.take().expect("piped").read_to_string(&mut stderr).expect("UTF-8");
        assert_eq!(child.wait().expect("it ends").code(), Some(0), "{args:?}: {stderr}");
        assert_eq!(stderr, "", "{args:?}");
    }
}
