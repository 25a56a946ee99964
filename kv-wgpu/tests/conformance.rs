//! Runs the conformance suite on the first adapter, or on the one that `KV_WGPU_ADAPTER` names;
//! with `KV_WGPU_SUBGROUPS=0` without subgroups.
use std::cell::OnceCell;
use std::process::ExitCode;

use kv_wgpu::{AdapterName, WgpuBackend, WgpuOptions};

fn main() -> ExitCode {
    // One device for all cases: drivers compile shaders for seconds, and again for every device.
    let opened = OnceCell::new();
    kv_testkit::run("wgpu", || {
        if let Some(backend) = opened.get() {
            return Ok(WgpuBackend::clone(backend));
        }
        let backend = WgpuBackend::open(&options())?;
        Ok(opened.get_or_init(|| backend).clone())
    })
}

fn options() -> WgpuOptions {
    let name = std::env::var("KV_WGPU_ADAPTER").unwrap_or_default();
    let adapter = match name.as_str() {
        "" => AdapterName::default(),
        name => match name.parse() {
            Ok(adapter) => adapter,
        },
    };
    let is_without = std::env::var("KV_WGPU_SUBGROUPS").is_ok_and(|value| value == "0");
    WgpuOptions::new(adapter).with_subgroups(!is_without)
}
