//! A text that goes on from a file.
use kv_runner::Tokenizer;
use serde_json::{Value, json as object};

use crate::architectures::directory;
use crate::recorded::recorded;
use crate::support::{bundled, fails, json, kv};

const PROMPT: [&str; 4] = ["generate", "--ignore-eos", "--prompt", "One day, Lily"];

fn tokens(report: &Value) -> Vec<Value> {
    report["sequences"][0]["tokens"].as_array().expect("tokens").clone()
}

#[test]
fn two_runs_give_the_text_of_one() {
    let folder = tempfile::tempdir().expect("a folder");
    for (temperature, format) in [("0", "f32"), ("0.9", "f32"), ("0", "int8")] {
        let path = folder.path().join(format!("{temperature}-{format}.kvs")).display().to_string();
        let settings = ["--temperature", temperature, "--seed", "3", "--format", format];
        let whole = json(&[&PROMPT, &settings[..], &["--max-new-tokens", "62"]].concat());
        let session = [&settings[..], &["--session", &path, "--max-new-tokens", "31"]].concat();
        let first = json(&[&PROMPT[..], &session].concat());
        assert_eq!(first["session"]["tokens_before"], 0);
        assert_eq!(first["stats"]["reused_tokens"], 0);
        let second = json(&[&["generate", "--ignore-eos"][..], &session].concat());
        assert_eq!([tokens(&first), tokens(&second)].concat(), tokens(&whole));

        let prompt = first["sequences"][0]["prompt_tokens"].as_array().expect("a prompt").len();
        let (before, after) = (prompt + 31, prompt + 62);
        // The last token of each run is not in the cache yet.
        assert_eq!(second["stats"]["reused_tokens"], before - 1);
        let bytes = std::fs::metadata(&path).expect("a file").len();
        let expected = object!({
            "file": path, "tokens_before": before, "loaded_tokens": before - 1,
            "tokens": after, "saved_tokens": after - 1, "bytes": bytes,
        });
        assert_eq!(second["session"], expected);
    }
}

#[test]
fn a_turn_of_a_model_with_states_computes_its_own_tokens() {
    let hybrids = recorded().into_iter().filter(|case| {
        let kinds = ["qwen3_5", "qwen3_next", "lfm2", "granitemoehybrid"];
        kinds.iter().any(|kind| case.name.starts_with(kind))
    });
    let mut models = 0;
    for case in hybrids {
        models += 1;
        let model = directory(&case);
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("chat.kvs").display().to_string();
        let turn = |prompt: &str| {
            let run =
                ["generate", "--ignore-eos", "--max-new-tokens", "9", "--model", model.path()];
            json(&[&run[..], &["--prompt", prompt, "--session", &path]].concat())
        };
        let (mut before, mut text) = (0, Vec::new());
        for (at, prompt) in [&*case.prompt, " And then", " One day"].into_iter().enumerate() {
            let report = turn(prompt);
            let sequence = &report["sequences"][0];
            let all = sequence["prompt_tokens"].as_array().expect("a prompt");
            // The last token of a turn is not in the cache yet.
            let known = if at == 0 { 0 } else { before - 1 };
            assert_eq!(report["stats"]["reused_tokens"], known, "{}, turn {at}", case.name);
            assert_eq!(report["session"]["loaded_tokens"], known);
            assert!(report["stats"]["states"]["kept"].as_u64() >= Some(1), "{report}");
            if at > 0 {
                assert_eq!(all[..text.len()], text, "{}", case.name);
            }
            text = [all.clone(), tokens(&report)].concat();
            before = text.len();
        }
    }
    assert!(models >= 4, "{models} models");
}

/// Whatever the options, the next run with the same ones goes on.
#[test]
fn every_file_that_a_run_writes_is_loaded_by_the_next() {
    let folder = tempfile::tempdir().expect("a folder");
    let constants = folder.path().join("calib.safetensors").display().to_string();
    let text = folder.path().join("text.txt").display().to_string();
    std::fs::write(&text, "One day, Lily and Ben went to the park. ".repeat(20)).expect("a file");
    json(&["calibrate", "--text", &text, "-o", &constants]);
    let with_file = format!("l4,calib={constants}");
    let nvfp4 = format!("nvfp4,calib={constants}");
    let options: [&[&str]; 9] = [
        &["--format", &with_file],
        &["--format", &nvfp4],
        &["--format", "int8/l4,full-precision-prefix=8,transform=off"],
        &["--format", "l4,tail=on"],
        &["--format", "l4,mean=block"],
        &["--paged", "1,512", "--max-step-tokens", "1"],
        &["--paged", "64,2"],
        &["--beams", "3"],
        &["--draft-tokens", "4", "--tier", "host=64MiB"],
    ];
    for (number, options) in options.into_iter().enumerate() {
        let path = folder.path().join(format!("{number}.kvs")).display().to_string();
        let session = ["--session", &path, "--max-new-tokens", "31"];
        let first = json(&[&PROMPT, options, &session].concat());
        let second = json(&[&["generate", "--ignore-eos"], options, &session].concat());
        let came = second["session"]["loaded_tokens"].as_u64().expect("a count");
        assert_eq!(first["session"]["tokens"], second["session"]["tokens_before"], "{options:?}");
        // Without whole blocks, as with a tail, the last one is computed again.
        assert!(came >= 16, "{options:?}: {came} tokens came back");
    }
}

/// Constants that are measured in a run are those of its text: a file in them would have no reader.
#[test]
fn constants_of_one_run_are_refused_before_it() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("chat.kvs");
    let session = ["--session", &path.display().to_string(), "--max-new-tokens", "3", "--json"];
    for format in ["l4,calib=online", "f32,calib=online", "int8/nvfp4,calib=online,tail=on"] {
        let given = [&PROMPT[..], &session, &["--format", format]].concat();
        fails(&given, 2, "calib=FILE");
        assert!(!path.exists(), "{format}");
    }
}

#[test]
fn more_text_goes_on_without_a_begin_token() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("chat.kvs").display().to_string();
    let session = ["--session", &path, "--max-new-tokens", "5"];
    let first = json(&[&PROMPT[..], &session].concat());
    let more = ["generate", "--ignore-eos", "--prompt", " But then Tom"];
    let output = kv(&[&more[..], &session].concat());
    assert_eq!((output.code, output.stderr.as_str()), (0, ""));
    assert!(output.stdout.starts_with(" But then Tom"), "{}", output.stdout);
    assert!(output.stdout.contains("9 of 10 tokens came back"), "{}", output.stdout);
    // The same with both texts at once.
    let third = json(&[&["generate", "--ignore-eos"][..], &session].concat());
    let prompt = third["sequences"][0]["prompt_tokens"].as_array().expect("a prompt").clone();
    let begin = first["sequences"][0]["prompt_tokens"][0].clone();
    assert_eq!(prompt.iter().filter(|token| **token == begin).count(), 1, "{prompt:?}");
}

#[test]
fn more_text_is_what_was_given_to_the_blank() {
    let tokenizer = Tokenizer::read(&bundled().join("tokenizer.json")).expect("a tokenizer");
    let folder = tempfile::tempdir().expect("a folder");
    for (at, more) in [" But then", "But then", "  two", "\nTom"].into_iter().enumerate() {
        let path = folder.path().join(format!("{at}.kvs")).display().to_string();
        let session = ["--session", &path, "--max-new-tokens", "5"];
        let first = json(&[&PROMPT[..], &session].concat());
        let more_args = ["generate", "--ignore-eos", "--prompt", more];
        let second = json(&[&more_args[..], &session].concat());
        let text = first["sequences"][0]["text"].as_str().expect("a text");
        let ids = second["sequences"][0]["prompt_tokens"].as_array().expect("tokens").clone();
        let ids: Vec<_> =
            ids.iter().map(|id| u32::try_from(id.as_u64().expect("an id")).expect("one")).collect();
        let all = tokenizer.decode(&ids).expect("text");
        assert_eq!(all, format!("<s> One day, Lily{text}{more}"));
    }
}

#[test]
fn what_cannot_go_on_is_refused_and_stays() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("chat.kvs");
    let name = path.display().to_string();
    let session = ["generate", "--session", &name, "--max-new-tokens", "3"];
    json(&session);
    let written = std::fs::read(&path).expect("a file");

    // A byte of a block: only the whole check finds it.
    let mut damaged = written.clone();
    let at = damaged.len() - 5000;
    damaged[at] ^= 1;
    for (bytes, words) in [
        (&damaged[..], "block"),
        (&written[..written.len() - 1], "the header says"),
        (b"Once upon a time", "not a session"),
        (b"", "not a session"),
    ] {
        std::fs::write(&path, bytes).expect("a file");
        fails(&[&session[..], &["--json"]].concat(), 1, words);
        assert_eq!(std::fs::read(&path).expect("a file"), bytes);
    }
    std::fs::write(&path, &written).expect("a file");
    let format = ["--json", "--format", "f16"];
    fails(&[&session[..], &format].concat(), 1, "another stored format");
    let absent = folder.path().join("absent/chat.kvs").display().to_string();
    fails(
        &["generate", "--json", "--session", &absent, "--max-new-tokens", "3"],
        1,
        "cannot create",
    );
    for (args, words) in [
        (&["--prompt", "a", "--prompt", "b"][..], "a second --prompt"),
        (&["--no-reuse"], "cannot be used with"),
        (&["--compare"], "cannot be used with"),
    ] {
        fails(&[&session[..], args].concat(), 2, words);
    }
    assert_eq!(std::fs::read(&path).expect("a file"), written);
    // The context ends.
    let long = ["generate", "--session", &name, "--max-new-tokens", "2000", "--ignore-eos"];
    json(&long);
    fails(&[&long[..], &["--json"]].concat(), 1, "leaves no room");
}
