//! `kv eval` and `kv calibrate` on the bundled model.
use std::fs;
use std::path::PathBuf;

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::support::{ModelDir, data, entries, eval, fails, json, kv, number, safetensors};

const FIELDS: [&str; 8] =
    ["format", "bits_per_value", "kld_mean", "kld_p99", "top1", "delta_nll", "ppl", "tokens"];

#[test]
fn f32_has_no_divergence_from_itself() {
    let lines = eval(&["--format", "f32", "--window", "200", "--windows", "2"]);
    let line = &lines[0];
    assert_eq!(line["format"], "f32");
    for (field, expected) in
        [("kld_mean", 0.0), ("kld_p99", 0.0), ("delta_nll", 0.0), ("top1", 1.0)]
    {
        assert_eq!(number(line, field).to_bits(), f64::to_bits(expected), "{field}: {line}");
    }
    assert_eq!(line["tokens"], 2 * 199);
    assert_eq!(line["bits_per_value"], 32.0);
    // A story like those that the model was trained on: far better than chance, which would be 512.
    let ppl = number(line, "ppl");
    assert!((2.0..20.0).contains(&ppl), "{ppl}");
}

#[test]
fn sixteen_bits_cost_little_and_the_fields_are_all_there() {
    let lines = eval(&["--format", "f16", "--format", "bf16", "--format", "f32/bf16"]);
    let names: Vec<_> = lines.iter().map(|line| line["format"].as_str()).collect();
    assert_eq!(names, [Some("f16"), Some("bf16"), Some("f32/bf16")]);
    for line in &lines {
        let mut fields: Vec<_> = line.as_object().expect("an object").keys().collect();
        fields.sort();
        let mut expected = FIELDS.to_vec();
        expected.sort_unstable();
        assert_eq!(fields, expected);
        let (mean, p99) = (number(line, "kld_mean"), number(line, "kld_p99"));
        assert!(mean > 0.0 && mean < p99 && p99 < 0.01, "{line}");
        assert!(number(line, "top1") > 0.98, "{line}");
        assert!(number(line, "delta_nll").abs() < 0.01, "{line}");
    }
    let klds: Vec<_> = lines.iter().map(|line| number(line, "kld_mean")).collect();
    assert!(klds[0] < klds[1], "f16 has three bits more: {klds:?}");
    assert!(klds[2] < klds[1], "half as much is rounded: {klds:?}");
    assert_eq!(number(&lines[2], "bits_per_value").to_bits(), 24.0_f64.to_bits());
}

#[test]
fn windows_do_not_see_each_other() {
    let one = |skip: &str| {
        let lines =
            eval(&["--format", "f32", "--window", "100", "--windows", "1", "--skip-tokens", skip]);
        number(&lines[0], "ppl").ln()
    };
    let both = eval(&["--format", "f32", "--window", "100", "--windows", "2"]);
    let mean = f64::midpoint(one("0"), one("100"));
    assert!((number(&both[0], "ppl").ln() - mean).abs() < 1e-9);
}

#[test]
fn a_table_is_for_people() {
    let text = data("eval.txt");
    let output = kv(&["eval", "--text", &text, "--format", "bf16", "--window", "64"]);
    assert_eq!((output.code, output.stderr.as_str()), (0, ""));
    for words in ["bits/value", "KLD p99", "top-1", "delta nll", "bf16", "16.000", "no calibration"]
    {
        assert!(output.stdout.contains(words), "{}", output.stdout);
    }
}

#[test]
fn wrong_input_is_refused() {
    let text = &data("eval.txt");
    let eval = |extra: &[&str], code: i32, words: &str| {
        fails(&[&["eval", "--json", "--text", text], extra].concat(), code, words);
    };
    fails(&["eval"], 2, "--text");
    fails(&["eval", "--text", "/no/such/text"], 1, "/no/such/text");
    eval(&["--format", "l5"], 2, "unknown stored format \"l5\"");
    eval(&["--window", "1"], 2, "at least 2 are needed");
    eval(&["--windows", "0"], 2, "at least 1");
    eval(&["--calib", "a", "--calib-text", "b"], 2, "cannot be used with");
    eval(&["--window", "513"], 1, "the model's context is 512");
    eval(&["--windows", "9", "--window", "512"], 1, "tokens, 4608 are needed");
    eval(&["--skip-tokens", "4294967295"], 1, "4294967295 skipped");
    eval(&["--plot", "/no/such/folder/plot.svg"], 1, "/no/such/folder/plot.svg: not a file in");
    eval(&["--format", "l4,calib=a"], 1, "give --calib or --calib-text");
    eval(&["--calib", "/no/such/file"], 1, "/no/such/file");
    for (format, instead) in
        [("fp8-e4m3", "fp8-e4m3-row"), ("int8-head/f16", "such as int8"), ("nvfp4", "l4-g32")]
    {
        eval(&["--format", format], 1, "needs scales from a calibration: give --calib-text FILE");
        eval(&["--format", format], 1, instead);
        fails(&["generate", "--json", "--format", format], 1, "give calib=FILE or calib=online");
    }
}

/// Makes a file with the constants of the bundled model.
fn calibrate(dir: &TempDir, extra: &[&str]) -> (PathBuf, Value) {
    let file = dir.path().join("calib.safetensors");
    let (text, name) = (data("calibration.txt"), file.to_str().expect("UTF-8"));
    let report = json(&[&["calibrate", "--text", &text, "-o", name], extra].concat());
    (file, report)
}

#[test]
fn a_calibration_is_made_and_belongs_to_its_model() {
    let dir = TempDir::new().expect("a directory");
    let (file, report) = calibrate(&dir, &["--tokens", "300"]);
    let name = file.to_str().expect("UTF-8");
    assert_eq!(report["file"], name);
    assert_eq!(report["tokens"], 296, "the full-precision prefix does not count");
    assert_eq!((&report["layers"], &report["kv_heads"]), (&json!(5), &json!(4)));
    let bytes = fs::read(&file).expect("the file");
    assert_eq!(report["bytes"], bytes.len());
    assert_eq!(fs::read_dir(dir.path()).expect("the directory").count(), 1, "nothing else is left");
    // The same text makes the same file; the same weights in another container are the same model.
    let model = ModelDir::copy();
    model.write("model.safetensors", safetensors(&entries()));
    let (_, again) = calibrate(&dir, &["--tokens", "300", "--model", model.path()]);
    assert_eq!(again["fingerprint"], report["fingerprint"]);
    assert_eq!(fs::read(&file).expect("the file"), bytes);
    // A model with one changed weight is another model, and both are named.
    let mut tensors = entries();
    let v = tensors.iter_mut().find(|entry| entry.name.ends_with("3.self_attn.v_proj.weight"));
    v.expect("a projection").bytes[2] ^= 1;
    model.write("model.safetensors", safetensors(&tensors));
    let format = format!("l4,calib={name}");
    let other = ["generate", "--json", "--model", model.path(), "--format", &format];
    fails(&other, 1, report["fingerprint"].as_str().expect("text"));
    let text = data("eval.txt");
    let other = ["eval", "--model", model.path(), "--text", &text, "--calib", name];
    fails(&other, 1, report["fingerprint"].as_str().expect("text"));
}

#[test]
fn a_calibration_that_cannot_be_made_or_read_is_refused() {
    let dir = TempDir::new().expect("a directory");
    let (file, text) = (dir.path().join("c"), data("calibration.txt"));
    let name = file.to_str().expect("UTF-8");
    fails(&["calibrate", "--text", &text], 2, "--output");
    fails(&["calibrate", "--text", &text, "-o", "/no/such/folder/c"], 1, "/no/such/folder/c");
    fails(&["calibrate", "--text", "/no/such/text", "-o", name], 1, "/no/such/text");
    fails(&["calibrate", "--text", &text, "-o", name, "--tokens", "10"], 1, "calibration.txt: ");
    assert!(!file.exists(), "nothing is written for a failure");
    let format = format!("l4,calib={name}");
    fails(&["generate", "--json", "--format", &format], 1, name);
    fs::write(&file, "not a calibration").expect("a file");
    fails(&["generate", "--json", "--format", &format], 1, name);
}
