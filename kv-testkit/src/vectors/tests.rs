//! Readers of damaged, inconsistent and unknown files.
use std::fs;
use std::path::Path;

use tempfile::TempDir;

use super::*;

fn write(folder: &TempDir, name: &str, content: impl AsRef<[u8]>) {
    fs::write(folder.path().join(name), content).unwrap();
}

fn testdata(name: &str) -> Vec<u8> {
    fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata").join(name)).unwrap()
}

fn bad(found: &[Found]) -> Vec<&str> {
    found
        .iter()
        .filter_map(|found| match found {
            Found::Bad { why, .. } => Some(why.as_str()),
            _ => None,
        })
        .collect()
}

#[test]
fn own_vectors_are_all_known() {
    let found = own();
    assert!(found.len() > 80, "{} found", found.len());
    assert_eq!(bad(&found), Vec::<&str>::new());
    assert!(found.iter().all(|found| matches!(found, Found::Vector { .. })));
}

#[test]
fn an_empty_folder_and_a_missing_one_are_failures() {
    let folder = tempfile::tempdir().unwrap();
    write(&folder, "README.md", "words");
    write(&folder, "make.py", "pass");
    assert!(bad(&find(folder.path()))[0].contains("no vector file"));
    assert_eq!(bad(&find(&folder.path().join("missing"))).len(), 1);
}

#[test]
fn unknown_files_are_failures_and_those_of_others_are_skipped() {
    let folder = tempfile::tempdir().unwrap();
    write(&folder, "a.json", r#"{"schema": "te-trace/2"}"#);
    write(&folder, "b.json", r#"{"name": "no schema"}"#);
    write(&folder, "c.json", "[]");
    write(&folder, "d.csv", "1,2");
    write(&folder, "e.bin", "x");
    write(&folder, "f.f16", "xx");
    write(&folder, "g.json", r#"{"schema": "te-trace/1", "steps": 3}"#);
    write(&folder, "h.json", r#"{"schema": "te-errors/1"}"#);
    write(&folder, "i.safetensors", "short");
    write(&folder, "j.json", r#"{"schema": "vllm-scenario/1"}"#);
    write(&folder, "k.json", r#"{"schema": "vllm-fuzz/1"}"#);
    let found = find(folder.path());
    assert_eq!(bad(&found).len(), 11, "{found:?}");
    for (why, letter) in bad(&found).iter().zip("abcdefghijk".chars()) {
        assert!(why.contains(&format!("/{letter}.")), "{why} does not name {letter}");
    }
    let folder = tempfile::tempdir().unwrap();
    write(&folder, "ggml.json", GGML);
    let found = find(folder.path());
    let [Found::Skipped { why, .. }] = found.as_slice() else {
        panic!("{found:?}");
    };
    assert_eq!(why, "not a stored format here");
}

/// A file of blocks that this library does not store.
const GGML: &str = r#"{"schema": "quant-ggml-blocks/1", "rows": [{"name": "x", "x_f32_bits": "",
    "formats": {}}], "meta": {"block_bytes": {"q4_1": 20}, "block_elems": {"q4_1": 32}}}"#;

/// Files of the quant schemas with wrong content, each with a word of the expected message.
#[test]
fn wrong_codes_are_found() {
    let text = |name: &str| String::from_utf8(testdata(&format!("quant/{name}"))).unwrap();
    let e4m3 = text("e4m3fn_decode.csv");
    let ue4m3 = text("ue4m3_decode.csv");
    let fp8 = text("f32_to_fp8_encode.csv");
    let cut = |text: &str, lines: usize| text.lines().take(lines).collect::<Vec<_>>().join("\n");
    let bad_files = [
        ("e4m3fn_decode.csv", cut(&e4m3, 256), "255 codes"),
        ("e4m3fn_decode.csv", e4m3.replace("0x01,", "0x02,"), "ascending"),
        ("e4m3fn_decode.csv", e4m3.replace("0x3b000000", "0x3b000001"), "has the bits"),
        ("e4m3fn_decode.csv", e4m3.replace("subnormal", "inf"), "of class"),
        ("e4m3fn_decode.csv", e4m3.replace(",value", ",value,more"), "fields"),
        ("e4m3fn_decode.csv", e4m3.replace("class", "klass"), "columns unknown"),
        ("e3m4_decode.csv", e4m3.clone(), "unknown kind"),
        ("e4m3fn_decode.csv", cut(&e4m3, 1), "without rows"),
        ("ue4m3_decode.csv", ue4m3.replace("0x02,0.00390625,", "0x02,0.0039,"), "in ggml"),
        ("f32_to_fp8_encode.csv", fp8.replace("e5m2_torch", "e5m2_jax"), "unknown column e5m2_jax"),
        ("f32_to_fp8_encode.csv", fp8.replace("e5m2_torch", "e4m3_torch"), "appears twice"),
        ("f32_to_fp8_encode.csv", fp8.replace(",0x7e", ",0x7"), "not a hexadecimal number"),
        ("f32_to_fp8_encode.csv", fp8.replace("0x7e", "0x+7"), "not a hexadecimal number"),
        (
            "a.csv",
            "f32_bits,category\n0x00000000,zero\n".to_owned(),
            "no column in this library's convention",
        ),
        ("a.csv", "x,y\n1,2\n".to_owned(), "unknown header"),
        ("a.csv", String::new(), "without rows"),
    ];
    let folder = tempfile::tempdir().unwrap();
    for (name, content, complaint) in bad_files {
        write(&folder, name, content);
        let found = find(folder.path());
        let why = bad(&found);
        assert!(why.len() == 1 && why[0].contains(complaint), "{name}, {complaint}: {found:?}");
        assert!(why[0].contains(name), "{why:?} does not name {name}");
        fs::remove_file(folder.path().join(name)).unwrap();
    }
}

#[test]
fn one_bad_case_fails_alone() {
    let folder = tempfile::tempdir().unwrap();
    let text = r#"{"schema": "te-rope/1", "cases": [{"name": "x", "base": "many"}, {"base": 1.0,
        "rotary_percent": 1.0, "interleaved": false, "max_seq": 4, "start_positions": [0],
        "shape": [1, 1, 1, 2], "y": [0.0, 0.0], "a_new_field": 1}]}"#;
    write(&folder, "rope.json", text);
    let found = find(folder.path());
    assert_eq!((found.len(), bad(&found).len()), (2, 1));
    assert!(bad(&found)[0].contains("case x"));
}
