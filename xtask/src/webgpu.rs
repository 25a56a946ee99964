//! The WebGPU backend's conformance in every variation of its shaders, on drivers that a CPU runs.
use std::path::Path;

use anyhow::{Result, bail};

use crate::conformance::{self, Options};

/// Cases that are the same whatever compiles the shaders, or that take long: left out on the second
/// driver and without subgroups.
const FIRST_ONLY: &[&str] =
    &["any(", "buffer/", "cache/", "failure/", "front/", "lives/", "queue/", "random/", "reuse/"];

/// Where browsers bring `SwiftShader`, a Vulkan driver that has nothing in common with Mesa's.
const SECOND_DRIVERS: &[&str] = &[
    "/usr/lib/chromium/vk_swiftshader_icd.json",
    "/usr/lib/chromium-browser/vk_swiftshader_icd.json",
    "/usr/lib64/chromium-browser/vk_swiftshader_icd.json",
    "/opt/google/chrome/vk_swiftshader_icd.json",
];

/// Runs the suite on the first adapter, then parts of it without subgroups and on a second driver.
pub(crate) fn run() -> Result<()> {
    // What erasure does is the same on every backend.
    let own = Options { args: vec!["wgpu::".into()], ..Options::default() };
    check("on the first adapter", &own)?;
    let skips = FIRST_ONLY.iter().flat_map(|part| ["--skip".into(), (*part).into()]);
    let args: Vec<_> = own.args.iter().cloned().chain(skips).collect();
    let variation = |name, value: &str| Options {
        args: args.clone(),
        env: vec![(name, value.into())],
        ..Options::default()
    };
    check("without subgroups", &variation("KV_WGPU_SUBGROUPS", "0"))?;
    let Some(driver) = SECOND_DRIVERS.iter().find(|path| Path::new(path).is_file()) else {
        println!("wgpu: no second Vulkan driver on this machine");
        return Ok(());
    };
    check("on SwiftShader", &variation("VK_DRIVER_FILES", driver))
}

fn check(what: &str, options: &Options) -> Result<()> {
    let total = conformance::run_variation("wgpu", what, options)?;
    if !total.is_clean() {
        bail!("wgpu {what}: {total}");
    }
    Ok(())
}
