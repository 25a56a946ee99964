//! The WebGPU backend's conformance in every variation of its shaders, on drivers that run on a
//! CPU.
use std::path::Path;

use anyhow::{Result, bail};

use crate::conformance::{self, Counts, Options};
use crate::lanes::Outcome;

/// Cases that need shaders of every stored format, which drivers on a CPU take minutes to compile;
/// left out here. The differential runs of `kv/tests/differential.rs` cover all formats.
const LONG: &[&str] = &["quant/", "random/", "reuse/quantised", "vectors/"];

/// Cases that reach every kernel that has variations.
const VARIED: &[&str] =
    &["wgpu::attend/head_groups", "wgpu::attend/options", "wgpu::quant/error_on_normal_rows"];

/// Places where browsers install `SwiftShader`, a Vulkan driver independent of Mesa.
const SECOND_DRIVERS: &[&str] = &[
    "/usr/lib/chromium/vk_swiftshader_icd.json",
    "/usr/lib/chromium-browser/vk_swiftshader_icd.json",
    "/usr/lib64/chromium-browser/vk_swiftshader_icd.json",
    "/opt/google/chrome/vk_swiftshader_icd.json",
];

/// Runs most of the suite on the first adapter, then some of it without subgroups and on a second
/// driver.
pub(crate) fn run() -> Result<Outcome> {
    let args = LONG.iter().flat_map(|part| ["--skip".into(), (*part).into()]).collect();
    let env = vec![(conformance::SHORT.0, conformance::SHORT.1.into())];
    let total = check("on the first adapter", &Options { args, env, ..Options::default() })?;
    if !total.any_passed() {
        return Ok(Outcome::Skipped("no adapter".to_owned()));
    }
    vary("without subgroups", ("KV_WGPU_SUBGROUPS", "0"))?;
    match SECOND_DRIVERS.iter().find(|path| Path::new(path).is_file()) {
        Some(driver) => vary("on SwiftShader", ("VK_DRIVER_FILES", driver))?,
        None => println!("wgpu: no second Vulkan driver on this machine"),
    }
    Ok(Outcome::Passed)
}

fn vary(what: &str, (name, value): (&'static str, &str)) -> Result<()> {
    for part in VARIED {
        let env = vec![(name, value.into())];
        check(what, &Options { args: vec![(*part).into()], env, ..Options::default() })?;
    }
    Ok(())
}

fn check(what: &str, options: &Options) -> Result<Counts> {
    let total = conformance::run_variation("wgpu", what, options)?;
    if !total.is_clean() {
        bail!("wgpu {what}: {total}");
    }
    Ok(total)
}
