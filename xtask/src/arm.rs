//! `cargo xtask arm`: the CPU backend on an emulated Arm CPU, for its NEON kernels.
//!
//! Programs are linked statically, so that the emulator needs no Arm libraries.
use std::ffi::OsString;

use anyhow::{Result, bail};

use crate::programs::{self, Program};
use crate::{conformance, setup, shell};

/// The target of the programs.
pub(crate) const TARGET: &str = "aarch64-unknown-linux-gnu";
/// The target's name in variables of cargo.
const IN_VARIABLES: &str = "CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU";
pub(crate) const EMULATOR: &str = "qemu-aarch64";
pub(crate) const LINKER: &str = "aarch64-linux-gnu-gcc";
/// Name of emulator and linker among the needs of [`setup`].
pub(crate) const TOOLS: &str = "Arm emulator";

/// Whether this CPU is an Arm CPU, so that no emulator is needed.
pub(crate) const IS_HERE: bool = cfg!(target_arch = "aarch64");

/// Crates and targets whose tests run on it: kernels against plain code, and the suite.
const TARGETS: &[&str] =
    &["--package=kv-cpu-kernels", "--package=kv-cpu", "--test=kernels", "--test=conformance"];

/// Returns why they cannot run here, `None` if they can.
pub(crate) fn lacks() -> Option<String> {
    if IS_HERE {
        return Some("this CPU is an Arm CPU and has run them".to_owned());
    }
    if !cfg!(target_os = "linux") {
        return Some(format!("{EMULATOR} runs programs on Linux only"));
    }
    setup::lacks(TARGET).or_else(|| setup::lacks(TOOLS))
}

/// Builds the programs.
pub(crate) fn build() -> Result<Vec<Program>> {
    let mut args = vec!["--target", TARGET];
    args.extend(TARGETS);
    let variables = [
        (format!("{IN_VARIABLES}_LINKER"), LINKER),
        (format!("{IN_VARIABLES}_RUSTFLAGS"), "-Ctarget-feature=+crt-static"),
    ];
    programs::build(&args, &variables)
}

/// Runs the tests whose names contain these words; without words, those of `cargo xtask test`: all
/// tests of the kernels, and the cases of the suite that depend on a kernel.
pub(crate) fn run(names: &[OsString]) -> Result<()> {
    if let Some(why) = lacks() {
        bail!("{why}");
    }
    let programs = build()?;
    if programs.len() < 2 {
        bail!("cargo built {} programs of two", programs.len());
    }
    for program in programs {
        if names.is_empty() && conformance::is_runner(&program.target) {
            for part in conformance::OF_KERNELS {
                shell::run(program.run_by(Some(EMULATOR)).arg(part))?;
            }
        } else {
            shell::run(program.run_by(Some(EMULATOR)).args(names))?;
        }
    }
    Ok(())
}
