//! `cargo xtask arm`: the CPU backend on an emulated Arm CPU, for its NEON kernels.
//!
//! Programs are linked statically, so that the emulator needs no libraries of the other kind.
use std::ffi::OsString;

use anyhow::{Result, bail};

use crate::{setup, shell};

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

/// Targets and tests: kernels against plain code, then the suite on the backend's own type.
const PARTS: [(&[&str], &str); 2] = [
    (&["--package", "kv-cpu-kernels", "--lib"], ""),
    (&["--package", "kv-cpu", "--test", "conformance"], "cpu::"),
];

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

/// Runs the tests that have these words in their names; without any, those of `cargo xtask test`.
pub(crate) fn run(names: &[OsString]) -> Result<()> {
    if let Some(why) = lacks() {
        bail!("{why}");
    }
    for (targets, usual) in PARTS {
        let mut command = shell::cargo(["test", "--target", TARGET]);
        command.args(targets).arg("--");
        if names.is_empty() && !usual.is_empty() {
            command.arg(usual);
        }
        command.args(names);
        command.env(format!("{IN_VARIABLES}_LINKER"), LINKER);
        command.env(format!("{IN_VARIABLES}_RUNNER"), EMULATOR);
        command.env(format!("{IN_VARIABLES}_RUSTFLAGS"), "-Ctarget-feature=+crt-static");
        shell::run(&mut command)?;
    }
    Ok(())
}
