//! `cargo xtask bench`: the benches of `kv-bench`, and comparisons with other libraries.
use std::ffi::OsString;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Result, bail};

use crate::shell;

/// Python packages whose attention is compared; each works without the other.
const PACKAGES: [&[&str]; 2] = [&["numpy", "torch"], &["numpy", "llama-cpp-python"]];

/// Runs every bench; `args` are passed to criterion. After `peers`, they are passed to the
/// workspace that compares with other libraries, which nothing else builds.
pub(crate) fn run(args: &[OsString]) -> Result<()> {
    if let Some((first, rest)) = args.split_first()
        && first == "peers"
    {
        return peers(rest);
    }
    // `--benches` leaves out the unit tests of the library, which do not accept criterion's
    // arguments.
    let mut command = shell::cargo(["bench", "--package", "kv-bench", "--benches", "--"]);
    shell::run(command.args(args))
}

/// Runs the comparisons; Python packages are used if `--install` has installed them.
fn peers(args: &[OsString]) -> Result<()> {
    let (install, args): (Vec<&OsString>, Vec<_>) =
        args.iter().partition(|arg| *arg == "--install");
    if !install.is_empty() {
        self::install()?;
    }
    let manifest = ["--manifest-path", "kv-bench/peers/Cargo.toml"];
    let mut command = shell::cargo(["run", "--release"]);
    command.args(manifest).arg("--").args(&args);
    let python = python();
    if python.is_file() {
        command.arg("--python").arg(python);
    }
    let wants_object = args.iter().any(|arg| *arg == "--json");
    if wants_object { finish(&mut command) } else { shell::run(&mut command) }
}

/// Runs a command like [`shell::run`], with nothing but its own output on standard output.
fn finish(command: &mut Command) -> Result<()> {
    let status = command.status()?;
    if !status.success() {
        bail!("`{}` failed ({status})", shell::line(command));
    }
    Ok(())
}

fn environment() -> PathBuf {
    shell::root().join("target").join("peers").join("venv")
}

fn python() -> PathBuf {
    let place = if cfg!(windows) { "Scripts/python.exe" } else { "bin/python" };
    environment().join(place)
}

/// Makes a Python environment and installs the peers into it. A package that cannot be installed is
/// left out.
fn install() -> Result<()> {
    println!(
        "Installing PyTorch and llama-cpp-python below target/peers. PyTorch takes 5.5 GB on \
         Linux for x86-64, because it contains CUDA's libraries; llama-cpp-python is compiled, 10 minutes \
         of one core, and needs a C++ compiler. Removing the folder takes all of it back."
    );
    let system = if cfg!(windows) { "python" } else { "python3" };
    shell::run(shell::program(system).args(["-m", "venv"]).arg(environment()))?;
    for packages in PACKAGES {
        let mut pip = shell::program(python());
        if let Err(error) = shell::run(pip.args(["-m", "pip", "install"]).args(packages)) {
            println!("{} will be absent: {error:#}", packages.join(" and "));
        }
    }
    Ok(())
}
