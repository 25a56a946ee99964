//! `cargo xtask python`: the wheel of kv-python, installed and tested as a user would have it.
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::emulator::{self, Sanitizer};
use crate::{setup, shell};

/// The virtual environment in which wheels are built and tested, from the repository's root.
pub(crate) const ENVIRONMENT: &str = "target/python";
/// The folder of the wheels.
const WHEELS: &str = "target/wheels";
/// The stubs of the compiled module, which the wheel has.
const STUBS: &str = "kv-python/python/kvblock/_kvblock.pyi";
/// A wheel with the backends `cpu` and `cuda` stays below this.
const WHEEL_BYTES_MAX: u64 = 25_000_000;

/// The device of tests on CUDA without a card, which no wheel for users has.
const EMULATED: &[&str] = &["--features", "emulated"];
/// Fails if the installed wheel has [`EMULATED`].
const NOT_EMULATED: &str = "import kvblock; assert 'emulated' not in kvblock.features()";

/// How the module is compiled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Profile {
    /// As users get it.
    Release,
    /// Without optimisation and with the device `emulated`, for the stage of `cargo xtask test`.
    Dev,
}

/// Builds the wheel, installs it and runs its tests: those that need numpy, and those that need
/// torch and transformers where the environment has them.
pub(crate) fn run(profile: Profile) -> Result<()> {
    check_tools()?;
    check_stubs()?;
    let wheel = build(profile)?;
    let bytes = fs::metadata(&wheel).context("the wheel")?.len();
    println!("{}: {:.1} MB", wheel.display(), kilobytes(bytes) / 1000.0);
    if profile == Profile::Release && bytes > WHEEL_BYTES_MAX {
        bail!("the wheel has {bytes} bytes, {WHEEL_BYTES_MAX} are the most");
    }
    let mut pip = tool("pip");
    pip.args(["install", "--quiet", "--no-index", "--no-deps", "--force-reinstall"]).arg(&wheel);
    shell::run(&mut pip)?;
    shell::run(tool("python").args(["-m", "kvblock"]))?;
    let mut tests = tool("python");
    tests.args(["-m", "unittest", "discover", "-s", "kv-python/tests"]);
    match profile {
        Profile::Release => shell::run(tool("python").args(["-c", NOT_EMULATED]))?,
        Profile::Dev => {
            tests.env(emulator::SETTING, emulator::library(Sanitizer::None)?);
        }
    }
    shell::run(&mut tests)?;
    shell::run(tool("python").args(["-m", "mypy.stubtest", "kvblock._kvblock"]))?;
    let has_all = shell::output(tool("python").args(["-c", "import torch, transformers"]));
    if has_all.is_none() {
        println!(
            "the tests that need torch or transformers did not run: \
             `{ENVIRONMENT}/bin/pip install torch transformers` installs both, 6 GB"
        );
    }
    Ok(())
}

/// Writes [`STUBS`]: the signatures of the compiled module, made of what its macros know.
pub(crate) fn update_stubs() -> Result<()> {
    check_tools()?;
    fs::write(shell::root().join(STUBS), generate_stubs()?).context(STUBS)?;
    println!("{STUBS} is written");
    Ok(())
}

fn check_tools() -> Result<()> {
    match setup::FOR_PYTHON.into_iter().find_map(setup::lacks) {
        Some(lacks) => bail!("{lacks}"),
        None => Ok(()),
    }
}

/// Compares the stubs of the tree with those of the code.
fn check_stubs() -> Result<()> {
    let written = fs::read_to_string(shell::root().join(STUBS)).context(STUBS)?;
    if written != generate_stubs()? {
        bail!("{STUBS} is not that of the code: `cargo xtask python --update` writes it");
    }
    Ok(())
}

fn generate_stubs() -> Result<String> {
    let folder = Path::new(ENVIRONMENT).join("stubs");
    let mut maturin = tool("maturin");
    maturin.args(["generate-stubs", "--quiet", "--manifest-path", "kv-python/Cargo.toml"]);
    // As the wheel of tests is compiled: not a second time.
    maturin.args(EMULATED).args(["--profile", "dev", "--out"]).arg(&folder);
    maturin.arg("--interpreter").arg(program("python"));
    shell::run(&mut maturin)?;
    let file = shell::root().join(folder).join("kvblock/_kvblock.pyi");
    fs::read_to_string(&file).with_context(|| file.display().to_string())
}

/// Builds the only wheel in [`WHEELS`].
fn build(profile: Profile) -> Result<PathBuf> {
    let folder = shell::root().join(WHEELS);
    for old in wheels(&folder) {
        fs::remove_file(&old).with_context(|| old.display().to_string())?;
    }
    let mut maturin = tool("maturin");
    maturin.args(["build", "--quiet", "--manifest-path", "kv-python/Cargo.toml"]);
    maturin.args(["--out", WHEELS]);
    maturin.arg("--interpreter").arg(program("python"));
    match profile {
        Profile::Release => maturin.args(["--release", "--strip"]),
        Profile::Dev => maturin.args(EMULATED).args(["--profile", "dev"]),
    };
    shell::run(&mut maturin)?;
    wheels(&folder).pop().context("maturin has made no wheel")
}

fn wheels(folder: &Path) -> Vec<PathBuf> {
    let files = fs::read_dir(folder).into_iter().flatten().flatten().map(|file| file.path());
    files.filter(|path| path.extension().is_some_and(|ending| ending == "whl")).collect()
}

fn program(name: &str) -> PathBuf {
    shell::root().join(ENVIRONMENT).join("bin").join(name)
}

/// Returns a program of the environment.
fn tool(name: &str) -> std::process::Command {
    shell::program(program(name))
}

#[expect(clippy::as_conversions, clippy::cast_precision_loss, reason = "a figure for people")]
fn kilobytes(bytes: u64) -> f64 {
    bytes as f64 / 1000.0
}
