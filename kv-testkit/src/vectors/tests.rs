//! Readers of damaged, inconsistent and unknown files.
use std::fs;
use std::path::{Path, PathBuf};

use kv_core::backend::NullBackend;

use super::*;
use crate::device::Shared;
use crate::rng::Rng;

/// A temporary folder that is deleted on drop.
struct Folder(PathBuf);

impl Folder {
    fn new(test: &str) -> Self {
        let path = std::env::temp_dir().join(format!("kv-testkit-{}-{test}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }
    fn with(&self, name: &str, content: impl AsRef<[u8]>) -> &Self {
        let path = self.0.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, content).unwrap();
        self
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
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
    let folder = Folder::new("empty");
    folder.with("README.md", "words").with("make.py", "pass");
    assert!(bad(&find(&folder.0))[0].contains("no vector file"));
    assert_eq!(bad(&find(&folder.0.join("missing"))).len(), 1);
}

#[test]
fn unknown_files_are_failures_and_those_of_others_are_skipped() {
    let folder = Folder::new("unknown");
    folder
        .with("a.json", r#"{"schema": "te-trace/2"}"#)
        .with("b.json", r#"{"name": "no schema"}"#)
        .with("c.json", "[]")
        .with("d.csv", "1,2")
        .with("e.bin", "x")
        .with("f.f16", "xx")
        .with("g.json", r#"{"schema": "te-trace/1", "steps": 3}"#)
        .with("h.json", r#"{"schema": "te-errors/1"}"#)
        .with("i.safetensors", "short")
        .with("j.json", r#"{"schema": "vllm-scenario/1"}"#)
        .with("k.json", r#"{"schema": "vllm-fuzz/1"}"#);
    let found = find(&folder.0);
    assert_eq!(bad(&found).len(), 11, "{found:?}");
    for (why, letter) in bad(&found).iter().zip("abcdefghijk".chars()) {
        assert!(why.contains(&format!("/{letter}.")), "{why} does not name {letter}");
    }
    let folder = Folder::new("others");
    folder.with("ggml.json", GGML);
    let found = find(&folder.0);
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
    let folder = Folder::new("codes");
    for (name, content, complaint) in bad_files {
        folder.with(name, content);
        let found = find(&folder.0);
        let why = bad(&found);
        assert!(why.len() == 1 && why[0].contains(complaint), "{name}, {complaint}: {found:?}");
        assert!(why[0].contains(name), "{why:?} does not name {name}");
        fs::remove_file(folder.0.join(name)).unwrap();
    }
    // Errors that only running finds: a code that differs from this library's.
    let lies = [
        ("e5m2_decode.csv", e4m3),
        ("f32_to_fp8_encode.csv", fp8.replace(",0x7e", ",0x7d")),
        ("lloyd.json", text("lloyd_max_gaussian.json").replace("0.79788456", "0.79798456")),
        ("tables.json", text("decode_tables.json").replace("0.015625,", "0.015626,")),
        ("ggml.json", text("ggml_blocks.json").replace("1325000ff2", "1325000ff3")),
    ];
    for (name, content) in lies {
        folder.with(name, content);
        assert!(run_all(&folder) > 0, "{name} passed");
        fs::remove_file(folder.0.join(name)).unwrap();
    }
}

/// A recording whose description does not match its numbers.
#[test]
fn wrong_recordings_are_found() {
    let meta = String::from_utf8(testdata("quant/real_kv/meta.json")).unwrap();
    let files = ["smollm2_135m_k.f16", "smollm2_135m_v.f16", "smollm2_135m_q_every8.f16"];
    let lies: [(&str, &str); 7] = [
        ("256,", "128,"),
        ("64\n", "32\n"),
        ("\"k_shape\"", "\"k\""),
        ("q_every8_shape", "q_every7_shape"),
        ("q_every8_shape", "q_every0_shape"),
        ("256,", "16777216,"),
        ("256,", "-1,"),
    ];
    for (from, to) in lies {
        let folder = Folder::new("recording");
        assert!(meta.contains(from), "{from:?} is not in {meta}");
        folder.with("meta.json", meta.replacen(from, to, 1));
        for file in files {
            folder.with(file, testdata(&format!("quant/real_kv/{file}")));
        }
        assert!(run_all(&folder) > 0, "{from} for {to} passed");
    }
    let folder = Folder::new("recording");
    folder.with("meta.json", &meta);
    assert_eq!(run_all(&folder), 1, "numbers are missing");
    for file in files {
        folder.with(file, testdata(&format!("quant/real_kv/{file}")));
    }
    folder.with(files[1], &testdata("quant/real_kv/smollm2_135m_v.f16")[..100]);
    assert_eq!(run_all(&folder), 1, "numbers are cut off");
    folder.with("other_v.f16", "");
    assert_eq!(run_all(&folder), 1, "there are two files of V");
}

#[test]
fn one_bad_case_fails_alone() {
    let folder = Folder::new("cases");
    let text = r#"{"schema": "te-rope/1", "cases": [{"name": "x", "base": "many"}, {"base": 1.0,
        "rotary_percent": 1.0, "interleaved": false, "max_seq": 4, "start_positions": [0],
        "shape": [1, 1, 1, 2], "y": [0.0, 0.0], "a_new_field": 1}]}"#;
    folder.with("rope.json", text);
    let found = find(&folder.0);
    assert_eq!((found.len(), bad(&found).len()), (2, 1));
    assert!(bad(&found)[0].contains("case x"));
}

/// Runs the vectors of a folder; none may panic. The null device computes nothing, so most fail.
fn run_all(folder: &Folder) -> usize {
    let backend = Shared::new(NullBackend::new());
    let mut failed = 0;
    for found in find(&folder.0) {
        match found {
            Found::Vector { job, .. } => match run(&backend, &job) {
                Ok(_) => {}
                Err(error) => {
                    let name = folder.0.to_string_lossy();
                    assert!(error.to_string().contains(&*name), "{error} names no file");
                    failed += 1;
                }
            },
            Found::Bad { .. } => failed += 1,
            Found::Skipped { .. } => {}
        }
    }
    failed
}

#[test]
fn truncated_files_fail_and_never_panic() {
    let mut rng = Rng::new(3);
    let files = [
        "te/page_reuse.json",
        "te/quirks.json",
        "attention/attention_1011.safetensors",
        "quant/decode_tables.json",
        "quant/ggml_blocks.json",
        "quant/lloyd_max_gaussian.json",
        "quant/ue4m3_decode.csv",
        "quant/e2m1_decode.csv",
    ];
    for (index, file) in files.into_iter().enumerate() {
        let bytes = testdata(file);
        let name = Path::new(file).file_name().unwrap().to_str().unwrap();
        for _ in 0..25 {
            let len = rng.below(bytes.len() as u32) as usize;
            let folder = Folder::new(&format!("cut-{index}"));
            folder.with(name, &bytes[..len]);
            assert!(run_all(&folder) > 0, "{file} cut to {len} bytes passed");
        }
    }
}

#[test]
fn inconsistent_files_never_panic() {
    let mut rng = Rng::new(4);
    let files = [
        "te/page_reuse.json",
        "te/dyn_nonpaged_b6.json",
        "te/errors.json",
        "te/quirks.json",
        "te/rope.json",
        "te/convert.json",
        "attention/attention_1011.safetensors",
        "quant/decode_tables.json",
        "quant/ggml_blocks.json",
        "quant/lloyd_max_gaussian.json",
        "quant/e8m0_decode.csv",
        "quant/f32_to_e2m1_e8m0_encode.csv",
        "quant/real_kv/meta.json",
    ];
    for (index, file) in files.into_iter().enumerate() {
        let original = testdata(file);
        let name = Path::new(file).file_name().unwrap().to_str().unwrap();
        // The head of a file names its schema; its digits are its claims.
        let head = original.len().min(3000);
        // The file of quirks has a step of 2^24 tokens.
        let rounds = if file.ends_with("quirks.json") { 3 } else { 15 };
        for _ in 0..rounds {
            let mut bytes = original.clone();
            for _ in 0..rng.within(1, 4) {
                let at = rng.below(head as u32) as usize;
                if let Some(digit) = bytes[at..].iter().position(u8::is_ascii_digit) {
                    bytes[at + digit] = b'0' + rng.below(10) as u8;
                }
            }
            let folder = Folder::new(&format!("lie-{index}"));
            folder.with(name, &bytes);
            run_all(&folder);
        }
    }
}
