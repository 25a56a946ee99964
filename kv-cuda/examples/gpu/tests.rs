//! The whole program at tiny sizes on the emulator.
use std::collections::BTreeSet;

use super::*;

fn options(line: &str) -> Result<Options> {
    Options::parse(line.split_whitespace().map(str::to_owned))
}

#[test]
fn every_family_is_checked_and_measured() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("records.json");
    let mut options = options("--emulated --tiny").unwrap();
    options.out = Some(file.clone());
    assert!(run(&options).unwrap(), "a check failed");
    let text = std::fs::read_to_string(file).unwrap();
    let name = |line: &str| {
        let (_, rest) = line.split_once("\"name\":\"").unwrap();
        rest.split_once('"').unwrap().0.to_owned()
    };
    let of = |kind: &str| -> Vec<String> {
        let start = format!("{{\"kind\":\"{kind}\"");
        text.lines().filter(|line| line.starts_with(&start)).map(name).collect()
    };
    assert_eq!(of("check").len(), 14, "{text}");
    assert_eq!(of("skipped"), Vec::<String>::new());
    let measured = of("measure");
    assert_eq!(measured[0], "copy/driver", "everything else is a fraction of it");
    let headlines = ["decode", "prefill", "append"].map(|family| {
        let is_of = |name: &&String| name.starts_with(family) && !name.ends_with("/alone");
        measured[1..15].iter().filter(is_of).count()
    });
    assert_eq!(headlines, [8, 2, 2], "{measured:?}");
    let families: BTreeSet<_> =
        measured.iter().map(|name| name.split('/').next().unwrap().to_owned()).collect();
    let all =
        ["append", "begin_step", "copy", "copy_blocks", "decode", "gather", "prefill", "step"];
    assert_eq!(families, all.map(str::to_owned).into());
    let decode = text.lines().find(|line| line.contains("decode/bf16/block16/gqa4/b2/c40"));
    let decode = decode.expect("the shape is measured");
    // 2 sequences of 40 tokens, K and V of 2 heads of 128; 8 heads of queries and outputs.
    let bytes = 2 * 40 * 2 * 2 * 128 * 2 + 2 * 2 * 8 * 128 * 2;
    assert!(decode.contains(&format!("\"bytes\":{bytes},")), "{decode}");
    for key in ["\"us\":", "\"gb_per_s\":", "\"of_copy\":"] {
        assert!(decode.contains(key), "{decode}");
    }
    let prefill = text.lines().find(|line| line.contains("prefill/bf16/gqa4/t40")).unwrap();
    assert!(prefill.contains("\"tflop_per_s\":"), "{prefill}");
}

/// Returns the names of the measures of a run.
fn measured(line: &str) -> Vec<String> {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("records.json");
    let mut options = options(&format!("--emulated --tiny {line}")).unwrap();
    options.out = Some(file.clone());
    assert!(run(&options).unwrap(), "a check failed");
    let text = std::fs::read_to_string(file).unwrap();
    let measures = text.lines().filter(|line| line.starts_with("{\"kind\":\"measure\""));
    let name = |line: &str| {
        let (_, rest) = line.split_once("\"name\":\"").unwrap();
        rest.split_once('"').unwrap().0.to_owned()
    };
    measures.map(name).collect()
}

#[test]
fn a_part_measures_only_its_own() {
    assert_eq!(measured("--part facts"), [""; 0]);
    let names = measured("--part decode --format l4");
    let name = "decode/l4/block16/gqa8/b2/c40";
    assert_eq!(names, ["", "/d64", "/d256"].map(|dim| format!("{name}{dim}")));
    let name = "decode/fp8-e4m3/block16/gqa8/b1/c30";
    assert_eq!(measured(&format!("--part headline --only {name}")), ["copy/driver", name, name]);
}

#[test]
fn headlines_are_measured_once() {
    let name = "decode/bf16/block16/gqa8/b64/c8192";
    assert!(headline::has(name) && !headline::has("decode/bf16/block16/gqa4/b64/c8192"));
    assert!(headline::has("prefill/bf16/gqa4/t16384") && headline::has("append/bf16/b64/t1"));
    let mut bench = Bench::open(&options("--emulated --tiny").unwrap()).unwrap();
    assert!(!bench.wants(kv_core::KvFormat::Bf16, name));
    bench.set_headline(true);
    assert!(bench.wants(kv_core::KvFormat::Bf16, name));
}

#[test]
fn arguments_are_read() {
    assert_eq!(options("--device 3").unwrap().device, 3);
    assert_eq!(options("--part steps").unwrap().part, Part::Steps);
    assert_eq!(options("--format int8").unwrap().format.unwrap().to_string(), "int8");
    for wrong in ["--device", "--device x", "--fast", "now", "--part some", "--format x"] {
        assert!(options(wrong).is_err(), "{wrong}");
    }
}

#[test]
fn records_are_json() {
    let line = record::Record::new("fact", "a \"b\"\\\n\u{1}")
        .number("x", 1.5)
        .number("none", f64::NAN)
        .truth("y", true)
        .line();
    let expected = r#"{"kind":"fact","name":"a \"b\"\\\n\u0001","x":1.5,"y":true}"#;
    assert_eq!(line, format!("{expected}\n"));
}

#[test]
fn the_median_of_samples() {
    let cases: [(&[f64], f64); 4] =
        [(&[], 0.0), (&[3.0], 3.0), (&[9.0, 1.0, 2.0], 2.0), (&[4.0, 1.0, 2.0, 8.0], 3.0)];
    for (samples, middle) in cases {
        assert!((bench::median(samples.to_vec()) - middle).abs() < 1e-12, "{samples:?}");
    }
}
