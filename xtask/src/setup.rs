//! `cargo xtask setup`: what the suites need on a machine that has Rust.
//!
//! A backend that needs a driver or a compiler of its own gets a line in [`NEEDS`] and a probe.
use std::path::Path;

use anyhow::{Result, bail};

use crate::shell;

/// One thing the suites need.
struct Need {
    name: &'static str,
    for_what: &'static str,
    is_present: fn() -> bool,
    /// The command that gets it.
    get: &'static [&'static str],
    /// Whether `cargo xtask test` cannot do without.
    is_required: bool,
}

const NEEDS: &[Need] = &[
    Need {
        name: "rustfmt",
        for_what: "cargo xtask test: the format of the code",
        is_present: || works("fmt"),
        get: &["rustup", "component", "add", "rustfmt"],
        is_required: true,
    },
    Need {
        name: "clippy",
        for_what: "cargo xtask test: the lint table",
        is_present: || works("clippy"),
        get: &["rustup", "component", "add", "clippy"],
        is_required: true,
    },
    Need {
        name: "cargo-deny",
        for_what: "cargo xtask test: licences and sources of dependencies",
        is_present: || works("deny"),
        get: &["cargo", "install", "--locked", "cargo-deny"],
        is_required: false,
    },
    Need {
        name: "typos",
        for_what: "cargo xtask test: spelling",
        is_present: || shell::output(shell::program("typos").arg("--version")).is_some(),
        get: &["cargo", "install", "--locked", "typos-cli"],
        is_required: false,
    },
    Need {
        name: "g++",
        for_what: "cargo xtask emulator: CUDA kernels on the CPU",
        is_present: || shell::output(shell::program("g++").arg("--version")).is_some(),
        get: &["apt-get", "install", "g++"],
        is_required: false,
    },
    Need {
        name: CROSS_TARGET,
        for_what: "cargo xtask test: kv-cpu type-checked for another instruction set",
        is_present: has_cross_target,
        get: &["rustup", "target", "add", CROSS_TARGET],
        is_required: false,
    },
];

/// The target that kv-cpu is type-checked for beside the host's own.
pub(crate) const CROSS_TARGET: &str = "aarch64-unknown-linux-gnu";

/// Whether the standard library of [`CROSS_TARGET`] is installed.
pub(crate) fn has_cross_target() -> bool {
    let mut rustc = shell::program("rustc");
    let path = shell::output(rustc.args(["--print", "target-libdir", "--target", CROSS_TARGET]));
    path.is_some_and(|path| Path::new(path.trim()).is_dir())
}

/// Lists every need and installs the required ones that are missing.
pub(crate) fn run() -> Result<()> {
    for need in NEEDS {
        let state = if (need.is_present)() { "present" } else { "missing" };
        println!("{:<28}{state}  {}", need.name, need.for_what);
        if state == "missing" && !need.is_required {
            println!("{:<28}optional, get it with `{}`", "", need.get.join(" "));
        }
    }
    install_required()?;
    println!("The CPU backend needs no driver and no library. This machine is ready.");
    Ok(())
}

/// Installs what `cargo xtask test` cannot do without; names the command when that fails.
pub(crate) fn install_required() -> Result<()> {
    for need in NEEDS.iter().filter(|need| need.is_required) {
        if (need.is_present)() {
            continue;
        }
        let Some((name, args)) = need.get.split_first() else {
            continue;
        };
        let installed = shell::run(shell::program(name).args(args)).is_ok();
        if !installed || !(need.is_present)() {
            let get = need.get.join(" ");
            bail!("{} is missing ({}); get it with `{get}`", need.name, need.for_what);
        }
    }
    Ok(())
}

/// Whether an optional tool is there; otherwise the words for a skipped stage.
pub(crate) fn lacks(name: &str) -> Option<String> {
    let need = NEEDS.iter().find(|need| need.name == name)?;
    if (need.is_present)() {
        return None;
    }
    Some(format!("{} not installed, get it with `{}`", need.name, need.get.join(" ")))
}

fn works(subcommand: &str) -> bool {
    shell::output(&mut shell::cargo([subcommand, "--version"])).is_some()
}
