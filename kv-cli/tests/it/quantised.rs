//! Quantised caches under a model: accuracy, text, and settings that must not change it.
use std::fs;

use serde_json::Value;
use tempfile::TempDir;

use crate::support::{all_tokens, bundled, data, eval, json, number, tokens};

/// A file with constants of the bundled model.
struct Constants(TempDir);

impl Constants {
    fn new() -> Self {
        let dir = TempDir::new().expect("a directory");
        let (text, file) = (data("calibration.txt"), dir.path().join("c.safetensors"));
        json(&["calibrate", "--text", &text, "-o", file.to_str().expect("UTF-8")]);
        Self(dir)
    }

    fn path(&self) -> String {
        self.0.path().join("c.safetensors").to_str().expect("UTF-8").to_owned()
    }
}

/// Returns the mean divergence of each format.
fn klds(formats: &[&str], extra: &[&str]) -> Vec<f64> {
    let mut args: Vec<_> = formats.iter().flat_map(|format| ["--format", format]).collect();
    args.extend(extra);
    let lines = eval(&args);
    assert_eq!(lines.len(), formats.len());
    for (line, format) in lines.iter().zip(formats) {
        assert_eq!(line["format"], *format);
    }
    lines.iter().map(|line| number(line, "kld_mean")).collect()
}

fn assert_ascending(formats: &[&str], klds: &[f64]) {
    assert!(klds.is_sorted(), "{formats:?}: {klds:?}");
}

#[test]
fn every_format_runs_and_fewer_bits_cost_more() {
    let text = data("calibration.txt");
    let lines = eval(&["--calib-text", &text]);
    let names: Vec<_> = lines.iter().map(|line| line["format"].as_str().expect("text")).collect();
    assert_eq!(names.len(), 20, "all but f32: {names:?}");
    let kld = |format: &str| {
        let at = names.iter().position(|name| *name == format).expect(format);
        number(&lines[at], "kld_mean")
    };
    for line in &lines {
        assert!(number(line, "kld_mean") > 0.0 && number(line, "kld_mean") < 1.0, "{line}");
        assert!(number(line, "top1") > 0.5, "{line}");
    }
    for formats in [
        &["f16", "bf16", "fp8-e4m3", "fp8-e5m2"][..],
        &["f16", "int8", "l6", "l4", "l3"],
        &["f16", "int8", "l6-g32", "l4-g32", "l3-g32"],
        &["fp8-e4m3-row", "fp8-e5m2-row", "q4_0"],
        &["int8", "int8-tensor", "l4"],
        &["q8_0", "q4_0"],
        &["int8", "l4", "nvfp4", "q4_0"],
    ] {
        let klds: Vec<_> = formats.iter().map(|format| kld(format)).collect();
        assert_ascending(formats, &klds);
    }
}

#[test]
fn without_a_calibration_formats_with_given_scales_are_left_out() {
    let lines = eval(&["--window", "64", "--windows", "1"]);
    let names: Vec<_> = lines.iter().map(|line| line["format"].as_str().expect("text")).collect();
    assert_eq!(names.len(), 13, "{names:?}");
    assert!(!names.contains(&"fp8-e4m3") && names.contains(&"fp8-e4m3-row"), "{names:?}");
}

#[test]
fn k_and_v_have_formats_of_their_own() {
    let formats = ["int8", "int8/l3", "l3"];
    assert_ascending(&formats, &klds(&formats, &[]));
    let formats = ["f32", "f32/l3", "l3"];
    assert_ascending(&formats, &klds(&formats, &[]));
}

#[test]
fn a_file_of_constants_equals_its_text() {
    let (text, constants) = (data("calibration.txt"), Constants::new());
    let formats = ["l4", "int8,full-precision-prefix=4", "fp8-e4m3,full-precision-prefix=4"];
    let from_text = klds(&formats, &["--calib-text", &text]);
    let from_file = klds(&formats, &["--calib", &constants.path()]);
    assert_eq!(from_text, from_file);
}

#[test]
fn options_of_a_format_change_what_is_stored() {
    let text = data("calibration.txt");
    let formats =
        ["l4", "l4,full-precision-prefix=0", "l4,full-precision-prefix=32", "l4,transform=off"];
    let klds_on = klds(&formats, &["--calib-text", &text]);
    for (index, kld) in klds_on.iter().enumerate() {
        assert!(
            klds_on[..index].iter().all(|other| other.to_bits() != kld.to_bits()),
            "{klds_on:?}"
        );
    }
    assert!(klds_on[3] > klds_on[0] * 4.0, "the transform is worth its while: {klds_on:?}");
    let off = klds(&["l4"], &["--calib-text", &text, "--no-transform"]);
    let same = klds(&["l4,full-precision-prefix=0,transform=off"], &["--calib-text", &text]);
    assert_eq!(off, same, "without a transform there is no prefix by default");
    assert_eq!(
        klds(&["l4"], &["--no-transform", "--full-precision-prefix", "7"]),
        klds(&["l4,full-precision-prefix=7,transform=off"], &[])
    );
}

#[test]
fn means_of_blocks_bring_a_format_closer_and_a_tail_is_stored() {
    let text = data("calibration.txt");
    let formats = ["l4,mean=block", "l4", "l4,tail=on"];
    let klds_on = klds(&formats, &["--calib-text", &text, "--block-size", "32"]);
    assert!(klds_on[0] < klds_on[1] * 0.8, "{klds_on:?}");
    // If a text is read at once, a tail holds less than a block: few codes differ.
    assert!(klds_on[2] < klds_on[1] * 1.5, "{klds_on:?}");
    assert_ne!(klds_on[2].to_bits(), klds_on[1].to_bits());
    // Block means need no calibration.
    let formats = ["l4,mean=block", "l4"];
    assert_ascending(&formats, &klds(&formats, &["--block-size", "32"]));
}

#[test]
fn a_plot_has_a_point_for_every_format() {
    let dir = TempDir::new().expect("a directory");
    let path = dir.path().join("plot.svg");
    let name = path.to_str().expect("UTF-8");
    klds(&["int8/l4", "bf16", "l3"], &["--window", "64", "--windows", "1", "--plot", name]);
    let svg = fs::read_to_string(&path).expect("a plot");
    assert!(svg.starts_with("<svg"), "{svg}");
    assert_eq!(svg.matches("<circle ").count(), 3);
    for label in ["int8/l4", "bf16", "l3"] {
        assert!(svg.contains(&format!("\n{label}\n")), "{label}: {svg}");
    }
}

/// The bundled model gives the same text with 4 bits as with 32, up to the first close call.
#[test]
fn four_bits_agree_up_to_a_close_call() {
    let constants = Constants::new();
    let text = fs::read_to_string(bundled().join("golden.json")).expect("golden.json");
    let golden: Value = serde_json::from_str(&text).expect("JSON");
    let file = format!("l4,calib={}", constants.path());
    for format in [&file, "l4,calib=online", "int8", "l6"] {
        for case in golden["cases"].as_array().expect("cases") {
            let prompt = case["prompt"].as_str().expect("text");
            let report =
                json(&["generate", "--ignore-eos", "--format", format, "--prompt", prompt]);
            assert_eq!(report["format"], *format);
            let (got, expected) = (&all_tokens(&report)[0], tokens(&case["output_ids"]));
            assert_eq!(got.len(), expected.len());
            let turned = got.iter().zip(&expected).position(|(got, expected)| got != expected);
            if let Some(step) = turned {
                let margin = case["steps"][step]["margin"].as_f64().expect("a margin");
                assert!(margin < 0.5, "{format}, {prompt:?}: step {step}, margin {margin}");
            }
        }
    }
}

#[test]
fn block_sizes_and_steps_do_not_change_the_tokens() {
    let constants = Constants::new();
    let run = |format: &str, extra: &[&str]| {
        let format = format!("{format},calib={}", constants.path());
        let prompts = ["Once upon a time", "Lily and Ben were playing in the park when", "One day"];
        let mut args = vec!["generate", "--ignore-eos", "--max-new-tokens", "50"];
        args.extend(["--format", &format]);
        args.extend(prompts.iter().flat_map(|prompt| ["--prompt", prompt]));
        args.extend(extra);
        json(&args)
    };
    for format in ["l4", "int8/l3", "fp8-e4m3", "q4_0"] {
        let expected = all_tokens(&run(format, &[]));
        for extra in [&["--contiguous"][..], &["--paged", "8,100"], &["--paged", "64,12"]] {
            assert_eq!(all_tokens(&run(format, extra)), expected, "{format} {extra:?}");
        }
    }
    // Other steps change the last bits of K and V, and so some codes: with few bits that may change
    // a token, with eight it does not here.
    let expected = all_tokens(&run("int8", &[]));
    for extra in [
        &["--max-batch", "1"][..],
        &["--max-step-tokens", "7"],
        &["--no-cache"],
        &["--paged", "8,14"],
    ] {
        let report = run("int8", extra);
        assert_eq!(all_tokens(&report), expected, "{extra:?}");
        let preemptions = report["stats"]["preemptions"].as_u64().expect("a count");
        assert_eq!(preemptions > 0, extra == ["--paged", "8,14"], "{}", report["stats"]);
    }
}

#[test]
fn a_report_counts_codes_and_scales() {
    let report = json(&["generate", "--format", "int8/l4", "--paged", "8,50"]);
    // 5 layers, 4 heads; rows of 8: 8 bytes of codes and 4, each with a scale of 2.
    let per_token = 5 * 4 * (10 + 6);
    assert_eq!(report["format"], "int8/l4");
    assert_eq!(report["stats"]["bytes_per_token"], per_token);
    // K and V of 5 layers, 4 heads: 2 scales and 3 lists of 8, in f32.
    let constants = 2 * 5 * 4 * (2 + 3 * 8) * 4;
    assert_eq!(report["stats"]["cache_bytes"], per_token * 8 * 50 + constants);
}
