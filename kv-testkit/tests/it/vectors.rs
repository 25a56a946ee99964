//! Vector files that are damaged, inconsistent or wrong.
use std::fs;
use std::path::Path;

use kv_core::backend::{AnyBackend, NullBackend};
use kv_testkit::rng::Rng;
use kv_testkit::run_vectors;
use tempfile::TempDir;

fn write(folder: &TempDir, name: &str, content: impl AsRef<[u8]>) {
    fs::write(folder.path().join(name), content).unwrap();
}

fn testdata(name: &str) -> Vec<u8> {
    fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata").join(name)).unwrap()
}

/// Runs the vectors of a folder; none may panic. The null device computes nothing, so most fail.
fn run_all(folder: &TempDir) -> usize {
    let backend = AnyBackend::new(NullBackend::new());
    let name = folder.path().to_string_lossy();
    let mut failed = 0;
    for (_, result) in run_vectors(&backend, folder.path()) {
        if let Err(error) = result {
            assert!(error.to_string().contains(&*name), "{error} names no file");
            failed += 1;
        }
    }
    failed
}

/// Errors that only running finds: a code that differs from this library's.
#[test]
fn wrong_codes_are_found() {
    let text = |name: &str| String::from_utf8(testdata(&format!("quant/{name}"))).unwrap();
    let (e4m3, fp8) = (text("e4m3fn_decode.csv"), text("f32_to_fp8_encode.csv"));
    let folder = tempfile::tempdir().unwrap();
    let lies = [
        ("e5m2_decode.csv", e4m3),
        ("f32_to_fp8_encode.csv", fp8.replace(",0x7e", ",0x7d")),
        ("lloyd.json", text("lloyd_max_gaussian.json").replace("0.79788456", "0.79798456")),
        ("tables.json", text("decode_tables.json").replace("0.015625,", "0.015626,")),
        ("ggml.json", text("ggml_blocks.json").replace("1325000ff2", "1325000ff3")),
    ];
    for (name, content) in lies {
        write(&folder, name, content);
        assert!(run_all(&folder) > 0, "{name} passed");
        fs::remove_file(folder.path().join(name)).unwrap();
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
        let folder = tempfile::tempdir().unwrap();
        assert!(meta.contains(from), "{from:?} is not in {meta}");
        write(&folder, "meta.json", meta.replacen(from, to, 1));
        for file in files {
            write(&folder, file, testdata(&format!("quant/real_kv/{file}")));
        }
        assert!(run_all(&folder) > 0, "{from} for {to} passed");
    }
    let folder = tempfile::tempdir().unwrap();
    write(&folder, "meta.json", &meta);
    assert_eq!(run_all(&folder), 1, "numbers are missing");
    for file in files {
        write(&folder, file, testdata(&format!("quant/real_kv/{file}")));
    }
    write(&folder, files[1], &testdata("quant/real_kv/smollm2_135m_v.f16")[..100]);
    assert_eq!(run_all(&folder), 1, "numbers are cut off");
    write(&folder, "other_v.f16", "");
    assert_eq!(run_all(&folder), 1, "there are two files of V");
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
    for file in files {
        let bytes = testdata(file);
        let name = Path::new(file).file_name().unwrap().to_str().unwrap();
        for _ in 0..25 {
            let len = rng.below(bytes.len() as u32) as usize;
            let folder = tempfile::tempdir().unwrap();
            write(&folder, name, &bytes[..len]);
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
    for file in files {
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
            let folder = tempfile::tempdir().unwrap();
            write(&folder, name, &bytes);
            run_all(&folder);
        }
    }
}
