//! The report, the kit's contents, and the output of programs.
use std::fs;

use serde_json::json;

use super::extract::{counted, generated, last_lines};
use super::record::{Measure, Records};
use super::report::Check;
use super::stages::families_of;
use super::target::targets;

use super::*;

fn measure(name: &str, micros: f64, of_copy: Option<f64>) -> Measure {
    Measure {
        name: name.to_owned(),
        micros,
        bytes: of_copy.map(|_| 1e9),
        gb_per_s: of_copy.map(|share| share * 4000.0),
        tflop_per_s: None,
        of_copy,
        peers: Vec::new(),
    }
}

const DECODE: &str = "decode/bf16/block16/gqa8/b64/c8192";

const RECORDS: &str = r#"
{"kind":"fact","name":"card","value":"NVIDIA X1"}
{"kind":"fact","name":"multiprocessors","value":7}
{"kind":"check","name":"oracle/bf16","passed":true,"detail":""}
{"kind":"check","name":"oracle/int8","passed":false,"detail":"row 3"}
{"kind":"measure","name":"copy/driver","us":10,"bytes":4000,"gb_per_s":0.4,"of_copy":1}
{"kind":"measure","name":"DECODE","us":20,"bytes":7600,"gb_per_s":0.38,"of_copy":0.95}
{"kind":"measure","name":"prefill/bf16/gqa4/t1024","us":30,"tflop_per_s":500.5}
{"kind":"skipped","name":"decode/bf16/block16/gqa*/b256/c131072","detail":"do | not fit"}
{"kind":"peer","name":"DECODE","peer":"SDPA","us":25}
{"kind":"peer","name":"no such measure","peer":"SDPA","us":25}
{"kind":"measure","name":"cut off","us":"#;

fn report() -> Report {
    let mut records = Records::default();
    records.read(&RECORDS.replace("DECODE", DECODE));
    let check = |name: &str, outcome| Check {
        name: name.to_owned(),
        command: format!("bin/{name}"),
        exit_code: Some(0),
        seconds: 1.25,
        outcome,
    };
    Report {
        card: "NVIDIA X1 (80 GB)".to_owned(),
        driver: "580.1".to_owned(),
        commit: "abc".to_owned(),
        date: "2026-01-02".to_owned(),
        checks: vec![
            check("conformance", Outcome::Passed("3 passed, 0 failed, 1 skipped".to_owned())),
            check("replay", Outcome::Failed("boom".to_owned())),
            check("steps", Outcome::TimedOut("killed after 9.0 s".to_owned())),
            check("peers", Outcome::Skipped("no torch".to_owned())),
        ],
        records,
    }
}

#[test]
fn records_are_read_up_to_where_they_break_off() {
    let records = report().records;
    assert_eq!(records.measures.len(), 3);
    assert_eq!(records.measures[1].peers, [("SDPA".to_owned(), 25.0)]);
    assert_eq!(records.measures[2].tflop_per_s, Some(500.5));
    assert_eq!(records.fact("multiprocessors"), Some(&json!(7)));
    assert_eq!(records.checks[0].1, None);
    assert_eq!(records.checks[1].1.as_deref(), Some("row 3"));
}

#[test]
fn peers_are_matched_with_later_measures() {
    let mut records = Records::default();
    records.read(r#"{"kind":"peer","name":"prefill/x","peer":"SDPA","us":25}"#);
    records.read(r#"{"kind":"peer","name":"prefill/y","peer":"SDPA","us":26}"#);
    for name in ["prefill/y", "prefill/x", "prefill/x"] {
        records.read(&format!(r#"{{"kind":"measure","name":"{name}","us":30}}"#));
    }
    records.read(r#"{"kind":"peer","name":"prefill/y","peer":"FlashInfer","us":27}"#);
    let peers: Vec<_> = records.measures.iter().map(|measure| measure.peers.clone()).collect();
    let (sdpa, other) = ("SDPA".to_owned(), "FlashInfer".to_owned());
    assert_eq!(peers, [vec![(sdpa.clone(), 26.0), (other, 27.0)], vec![(sdpa, 25.0)], vec![]]);
}

#[test]
fn the_report_lists_checks_and_targets() {
    let report = report();
    assert_eq!(report.file_name(), "nvidia-x1-80-gb");
    assert_eq!(report.failed().len(), 2);
    let text = report.markdown();
    for line in [
        "# NVIDIA X1 (80 GB)",
        "Commit `abc`, driver 580.1, 2026-01-02.",
        "- multiprocessors: 7",
        "| conformance | `bin/conformance` | 0 | 1.2 | passed: 3 passed, 0 failed, 1 skipped |",
        "| replay | `bin/replay` | 0 | 1.2 | **FAILED**: boom |",
        "| steps | `bin/steps` | 0 | 1.2 | **TIMED OUT**: killed after 9.0 s |",
        "| peers | `bin/peers` | 0 | 1.2 | not run: no torch |",
        "## decode",
        "| what | bytes | us | rate | of copy | SDPA us | expected | target |",
        "| copy/driver | 4000 | 10.00 | 0.4 GB/s | 1.000 | - | - |  |",
        "| decode/bf16/block16/gqa8/b64/c8192 | 7600 | 20.00 | 0.4 GB/s | 0.950 | 25.00 | - | \
         >= 0.90 of copy: met; not slower than SDPA: met |",
        "| prefill/bf16/gqa4/t1024 | - | 30.00 | 500.5 TFLOP/s | - | - | - | \
         >= 0.60 of 989 TFLOP/s: **missed** |",
        "| decode/bf16/block16/gqa*/b256/c131072 | do \\| not fit |",
        "Targets are set for an H200",
    ] {
        assert!(text.contains(line), "{line}\n\n{text}");
    }
    assert!(text.ends_with("|\n"), "{text}");
}

#[test]
fn the_report_for_programs_has_the_same() {
    let json = report().json();
    let at = |pointer: &str| json.pointer(pointer).unwrap_or_else(|| panic!("no {pointer}"));
    assert_eq!(at("/card"), "NVIDIA X1 (80 GB)");
    assert_eq!(at("/checks/1/outcome"), "failed");
    assert_eq!(at("/checks/2/outcome"), "timed out");
    assert_eq!(at("/checks/3/detail"), "no torch");
    assert_eq!(at("/measures/1/of_copy"), 0.95);
    assert_eq!(at("/measures/1/peers_us/SDPA"), 25.0);
    assert_eq!(at("/measures/1/targets/0/is_met"), true);
    assert_eq!(at("/measures/2/bytes"), &json!(null));
    assert_eq!(at("/skipped/0/why"), "do | not fit");
}

#[test]
fn targets_are_those_of_the_shapes_they_name() {
    let of = |name: &str, micros, of_copy| -> Vec<(String, bool)> {
        let targets = targets(&measure(name, micros, of_copy)).into_iter();
        targets.map(|target| (target.text, target.is_met)).collect()
    };
    let one = |text: &str, is_met| vec![(text.to_owned(), is_met)];
    let decode = |rest: &str, share| of(&format!("decode/{rest}"), 1.0, Some(share));
    assert_eq!(decode("bf16/block16/gqa8/b2/c131072", 0.9), one(">= 0.90 of copy", true));
    assert_eq!(decode("bf16/block16/gqa8/b64/c8192", 0.89), one(">= 0.90 of copy", false));
    assert_eq!(decode("fp8-e4m3/block16/gqa8/b64/c8192", 0.86), one(">= 0.85 of copy", true));
    for rest in ["bf16/block16/gqa8/b1/c131072", "bf16/block64/gqa8/b64/c8192"] {
        assert_eq!(decode(rest, 0.1), [], "{rest}");
    }
    assert_eq!(of("append/bf16/b1/t16384", 1.0, Some(0.5)), one(">= 0.60 of copy", false));
    assert_eq!(of("append/bf16/b1/t4096", 1.0, Some(0.5)), []);
    assert_eq!(of("append/bf16/b64/t1/alone", 4.9, Some(0.1)), one("<= 5 us", true));
    assert_eq!(of("begin_step/b256", 10.1, None), one("<= 10 us", false));
    // A target without a measurement is not met.
    assert_eq!(of("append/bf16/b1/t16384", 1.0, None), one(">= 0.60 of copy", false));
}

#[test]
fn measures_have_the_expectation_of_their_card() {
    let with = |card: &str, of_copy| {
        let mut report = report();
        report.card = card.to_owned();
        report.records.measures = vec![measure(DECODE, 20.0, Some(of_copy))];
        (report.markdown(), report.json())
    };
    let (text, json) = with("NVIDIA H200", 0.90);
    assert!(text.contains("| 0.900 | 0.98 | >= 0.90 of copy: met |"), "{text}");
    let value = json.pointer("/measures/0/expected/value").and_then(serde_json::Value::as_f64);
    assert!(value.is_some_and(|value| (0.975..0.985).contains(&value)), "{value:?}");
    assert_eq!(json.pointer("/measures/0/expected/is_missed"), Some(&json!(false)));
    let (text, json) = with("NVIDIA H100 80GB HBM3", 0.495);
    assert!(text.contains(": **0.50 of it** |"), "{text}");
    assert_eq!(json.pointer("/measures/0/expected/is_missed"), Some(&json!(true)));
    // There are no predictions for other cards.
    let (text, json) = with("NVIDIA A100", 0.90);
    assert!(text.contains("| 0.900 | - | >= 0.90 of copy: met |"), "{text}");
    assert_eq!(json.pointer("/measures/0/expected"), Some(&json!(null)));
    // Faster than expected is marked too, and so is a compute rate.
    let of = |name: &str, of_copy, tflop_per_s| {
        let measure = Measure { tflop_per_s, ..measure(name, 1.0, of_copy) };
        predict::prediction("H200", &measure).map(|prediction| prediction.is_missed())
    };
    assert_eq!(of("decode/l4/block16/gqa8/b1/c8192", Some(0.10), None), Some(true));
    assert_eq!(of("decode/l4/block16/gqa8/b1/c8192", Some(0.060), None), Some(false));
    assert_eq!(of("prefill/bf16/gqa4/t4096", None, Some(190.0)), Some(true));
    assert_eq!(of("prefill/bf16/gqa4/t4096", None, Some(270.0)), Some(false));
    assert_eq!(of("decode/l4/block16/gqa4/b1/c8192", Some(0.1), None), None);
}

#[test]
fn a_kit_has_all_that_run_sh_needs() {
    let files = kit::data(&[shell::root().join("kv-testkit/testdata/te")]).unwrap();
    for place in [
        "models/stories260K/config.json",
        "models/stories260K/model.safetensors",
        "models/stories260K/tokenizer.json",
        "testdata/README.md",
        "peers.py",
        "LICENSE-MIT",
    ] {
        let source = files.get(Path::new(place)).unwrap_or_else(|| panic!("no {place}"));
        assert!(source.is_file(), "{}", source.display());
    }
    assert!(files.keys().any(|place| place.starts_with("vectors/0")));
    assert!(files.keys().all(|place| place.is_relative()));
    let contents = kit::contents(&[]).unwrap();
    for name in ["driver", "conformance", "replay", "gpu", "kv", "xtask"] {
        assert!(contents.contains(&Path::new("bin").join(name)), "{name}");
    }
    assert!(contents.contains(&PathBuf::from("run.sh")));
    assert!(contents.iter().all(|place| !place.starts_with("vectors")));
    assert!(kit::RUN.starts_with("#!/bin/sh\n") && kit::RUN.contains("bin/xtask\" gpu --kit"));
}

#[test]
fn the_output_of_programs_is_parsed() {
    let counts = json!({"passed": 3, "failed": 0, "skipped": 1});
    assert_eq!(counted(&counts).unwrap(), "3 passed, 0 failed, 1 skipped");
    assert_eq!(counted(&json!({"passed": 3})), None);
    let message = "a log\n7\n{\"sequences\":[{\"text\":\"One\"},{\"text\":\"Two\"}]}\n";
    assert_eq!(generated(message).unwrap(), ["One", "Two"]);
    assert_eq!(generated("error: no device"), None);
    assert_eq!(last_lines("a\n\n b\n"), "a / b");
    let call = run::Call::new(1, &["bin/kv", "--prompt", "Once upon"]).with("A", "1");
    assert_eq!(call.shown(), "A=1 bin/kv --prompt \"Once upon\"");
    let list = "cuda::b/x: test\ncuda::a/y: test\ntyped(cuda)::c/x: test\ncuda::b/z: test\n";
    assert_eq!(families_of(list), ["b", "a"]);
    assert_eq!(families_of("cuda::open: test\n"), [""; 0]);
}

#[cfg(unix)]
mod scripted;
