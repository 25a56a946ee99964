//! `cargo xtask arm`: the CPU backend on an emulated Arm CPU, for its NEON kernels.
//!
//! Programs are linked statically, so that the emulator needs no libraries of the other kind.
use std::ffi::OsString;

use anyhow::{Result, bail};

use crate::programs::{self, Program};
use crate::{conformance, setup, shell};

/// What they are built for.
pub(crate) const TARGET: &str = "aarch64-unknown-linux-gnu";
/// As variables of cargo have it.
const IN_VARIABLES: &str = "CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU";
pub(crate) const EMULATOR: &str = "qemu-aarch64";
pub(crate) const LINKER: &str = "aarch64-linux-gnu-gcc";
/// Name of both among the needs of [`setup`].
pub(crate) const TOOLS: &str = "Arm emulator";

/// Whether this is such a CPU, which needs no emulator.
pub(crate) const IS_HERE: bool = cfg!(target_arch = "aarch64");

/// Crates and targets whose tests run on it: kernels against plain code, and the suite.
const TARGETS: &[&str] =
    &["--package=kv-cpu-kernels", "--package=kv-cpu", "--test=kernels", "--test=conformance"];

/// Why they cannot run here; `None` where they can.
pub(crate) fn lacks() -> Option<String> {
    if IS_HERE {
        return Some("this CPU is one, and has run them".to_owned());
    }
    if !cfg!(target_os = "linux") {
        return Some(format!("{EMULATOR} runs programs on Linux alone"));
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

/// Runs the tests that have these words in their names; without any, those of `cargo xtask test`:
/// all of the kernels', and of the suite what looks at a kernel.
pub(crate) fn run(names: &[OsString]) -> Result<()> {
    if let Some(why) = lacks() {
        bail!("{why}");
    }
    let programs = build()?;
    if programs.len() < 2 {
        bail!("cargo built {} programs of two", programs.len());
    }
    for program in programs {
        let mut command = program.run_by(Some(EMULATOR));
        if names.is_empty() && conformance::is_runner(&program.target) {
            command.args(conformance::kernel_cases("cpu::"));
        }
        shell::run(command.args(names))?;
    }
    Ok(())
}
