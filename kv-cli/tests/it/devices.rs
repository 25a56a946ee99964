//! `kv devices`, and the program on devices that not every machine has.
use serde_json::Value;

use crate::support::{json, kv};

/// Returns the devices of one backend, or the reason why there is none.
fn of(backend: &str) -> Result<Vec<Value>, String> {
    let report = json(&["devices"]);
    let list = |field: &str| report[field].as_array().expect("a list").clone();
    let is_its = |value: &Value| value["backend"] == backend;
    let found: Vec<_> = list("devices").into_iter().filter(is_its).collect();
    let missing: Vec<_> = list("missing").into_iter().filter(is_its).collect();
    match missing.as_slice() {
        [] => {
            assert!(!found.is_empty(), "{backend} is neither there nor missing: {report}");
            Ok(found)
        }
        [missing] => {
            assert!(found.is_empty(), "{backend} is there and missing: {report}");
            let reason = missing["reason"].as_str().expect("text");
            assert!(!reason.is_empty() && !reason.contains('\n'));
            let optional = [("wgpu", cfg!(feature = "wgpu")), ("cuda", cfg!(feature = "cuda"))];
            let is_built = optional.iter().all(|(name, is_built)| *name != backend || *is_built);
            assert_eq!(reason.contains(&format!("add --features {backend}")), !is_built);
            Err(reason.to_owned())
        }
        _ => panic!("{backend} is missing twice: {report}"),
    }
}

/// Returns the adapters of this machine; prints why a test is skipped without one.
#[expect(clippy::print_stdout, reason = "the output of a test shows what it left out")]
fn adapters() -> Vec<Value> {
    of("wgpu").unwrap_or_else(|reason| {
        println!("skipped: {reason}");
        Vec::new()
    })
}

#[test]
fn every_backend_is_there_or_missing_with_a_reason() {
    let cpu = of("cpu").expect("the CPU is always there");
    assert_eq!(cpu.len(), 1);
    assert_eq!(cpu[0]["name"], "cpu");
    assert!(cpu[0]["threads"].as_u64().expect("a number") >= 1);
    assert!(!cpu[0]["instruction_set"].as_str().expect("text").is_empty());
    for (adapter, index) in of("wgpu").unwrap_or_default().iter().zip(0_u32..) {
        assert_eq!(adapter["name"], format!("wgpu:{index}"));
        let bytes = |field: &str| adapter[field].as_u64().expect("a number");
        assert!(bytes("binding_bytes_max") >= 128 << 20, "what WebGPU promises: {adapter}");
        assert!(bytes("buffer_bytes_max") >= 256 << 20, "what WebGPU promises: {adapter}");
        assert!(bytes("workgroup_bytes_max") >= 16 << 10, "what WebGPU promises: {adapter}");
        assert!(adapter["subgroups"].is_boolean() && adapter["f16"].is_boolean());
    }
    for (card, index) in of("cuda").unwrap_or_default().iter().zip(0_u32..) {
        assert_eq!(card["name"], format!("cuda:{index}"));
        assert!(card["memory_bytes"].as_u64().expect("a number") > 0);
    }
}

#[test]
fn the_list_for_people_has_the_same_devices() {
    let output = kv(&["devices"]);
    assert_eq!((output.code, output.stderr.as_str()), (0, ""));
    for backend in ["cpu", "wgpu", "cuda"] {
        let word = match of(backend) {
            Ok(devices) => devices[0]["name"].as_str().expect("text").to_owned(),
            Err(reason) => format!("none: {reason}"),
        };
        assert!(output.stdout.contains(&word), "{word}: {}", output.stdout);
    }
}

#[test]
fn an_adapter_writes_the_text_of_the_cpu() {
    for adapter in adapters() {
        let by_index = adapter["name"].as_str().expect("text");
        let by_name = format!("wgpu:{}", adapter["adapter"].as_str().expect("text"));
        for (format, name) in [("f32", by_index), ("bf16", by_name.as_str())] {
            let run = |backend: &str| {
                let prompts = ["--prompt", "Once upon a time", "--prompt", "Lily and Ben"];
                let size = ["--max-new-tokens", "64", "--paged", "8,64"];
                let how = ["generate", "--backend", backend, "--format", format];
                let report = json(&[&how[..], &prompts, &size].concat());
                let texts = report["sequences"].as_array().expect("sequences").clone();
                let texts = texts.iter().map(|one| one["text"].as_str().expect("text").to_owned());
                texts.collect::<Vec<_>>()
            };
            assert_eq!(run(name), run("cpu"), "{format} on {name}");
        }
    }
}
