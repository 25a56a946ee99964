//! The WebGPU backend keeps the whole contract, on the first adapter or on the one that
//! `KV_WGPU_ADAPTER` names; with `KV_WGPU_SUBGROUPS=0` without subgroups.
use std::process::ExitCode;

use kv_wgpu::{WgpuBackend, WgpuOptions};

fn main() -> ExitCode {
    kv_testkit::run("wgpu", || {
        let name = std::env::var("KV_WGPU_ADAPTER").unwrap_or_default();
        let adapter = match name.as_str() {
            "" => kv_wgpu::AdapterName::default(),
            name => match name.parse() {
                Ok(adapter) => adapter,
            },
        };
        let is_without = std::env::var("KV_WGPU_SUBGROUPS").is_ok_and(|value| value == "0");
        WgpuBackend::open(&WgpuOptions::new(adapter).with_subgroups(!is_without))
    })
}
