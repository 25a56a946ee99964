//! The WebGPU backend keeps the whole contract, on the first adapter or on the one that
//! `KV_WGPU_ADAPTER` names.
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
        WgpuBackend::open(&WgpuOptions::new(adapter))
    })
}
