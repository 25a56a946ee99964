//! `cargo xtask python`: the wheel of kv-python, installed and tested as a user would have it.
use std::env::consts::{DLL_PREFIX, DLL_SUFFIX};
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::emulator::{self, Sanitizer};
use crate::workspace::{FEATURES, Workspace};
use crate::{setup, shell};

/// The virtual environment in which wheels are built and tested, from the repository's root.
pub(crate) const ENVIRONMENT: &str = "target/python";
/// The folder of the wheels.
const WHEELS: &str = "target/wheels";
/// The half of the module that is written in Python.
const SOURCES: &str = "kv-python/python/kvblock";
/// The stubs of the compiled module, which the wheel has.
const STUBS: &str = "kv-python/python/kvblock/_kvblock.pyi";
/// A wheel with the backends `cpu` and `cuda` stays below this.
const WHEEL_BYTES_MAX: u64 = 25_000_000;

/// The folder of the module that [`test`] runs.
const MODULE: &str = "target/python/module";
/// Fails if the installed wheel has the device of tests on CUDA without a card.
const NOT_EMULATED: &str = "import kvblock; assert 'emulated' not in kvblock.features()";

/// Builds the wheel as users get it, installs it and runs its tests: those that need numpy, and
/// those that need torch and transformers where the environment has them.
pub(crate) fn run() -> Result<()> {
    check_tools()?;
    check_stubs()?;
    let wheel = build()?;
    let bytes = fs::metadata(&wheel).context("the wheel")?.len();
    println!("{}: {:.1} MB", wheel.display(), kilobytes(bytes) / 1000.0);
    if bytes > WHEEL_BYTES_MAX {
        bail!("the wheel has {bytes} bytes, {WHEEL_BYTES_MAX} are the most");
    }
    let mut pip = tool("pip");
    pip.args(["install", "--quiet", "--no-index", "--no-deps", "--force-reinstall"]).arg(&wheel);
    shell::run(&mut pip)?;
    shell::run(tool("python").args(["-m", "kvblock"]))?;
    shell::run(tool("python").args(["-c", NOT_EMULATED]))?;
    run_tests(&[])
}

/// Runs the tests over the module of the workspace's own build: without optimisation, with the
/// device `emulated`, and without a wheel, which would compile most crates again.
pub(crate) fn test(workspace: &Workspace) -> Result<()> {
    let mut build = shell::cargo(["build", "--quiet", "--workspace", "--lib", "--tests"]);
    shell::run(build.args(FEATURES))?;
    let library = format!("{DLL_PREFIX}_kvblock{DLL_SUFFIX}");
    let library = workspace.target_dir.join("debug").join(library);
    let folder = shell::root().join(MODULE).join("kvblock");
    if folder.exists() {
        fs::remove_dir_all(&folder).context(MODULE)?;
    }
    copy_sources(&shell::root().join(SOURCES), &folder)?;
    let ending = if cfg!(windows) { "pyd" } else { "abi3.so" };
    fs::copy(&library, folder.join(format!("_kvblock.{ending}")))
        .with_context(|| library.display().to_string())?;
    let module = shell::root().join(MODULE).display().to_string();
    let emulator = emulator::library(Sanitizer::None)?.display().to_string();
    run_tests(&[("PYTHONPATH", &module), ("MYPYPATH", &module), (emulator::SETTING, &emulator)])
}

/// Copies a folder, without what Python has compiled there.
fn copy_sources(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to).with_context(|| to.display().to_string())?;
    for entry in fs::read_dir(from).with_context(|| from.display().to_string())? {
        let path = entry?.path();
        let Some(name) = path.file_name().filter(|name| *name != "__pycache__") else { continue };
        if path.is_dir() {
            copy_sources(&path, &to.join(name))?;
        } else {
            fs::copy(&path, to.join(name)).with_context(|| path.display().to_string())?;
        }
    }
    Ok(())
}

fn run_tests(variables: &[(&str, &str)]) -> Result<()> {
    let python = || {
        let mut python = tool("python");
        python.envs(variables.iter().copied());
        // Threads of torch wait for each other in a loop, which tests beside a build suffer from.
        python.env("OMP_NUM_THREADS", "1");
        python
    };
    // Names of arguments that transformers is about to take away: every version has its own.
    let quiet = ["-W", "ignore::FutureWarning"];
    let tests = ["-m", "unittest", "discover", "-s", "kv-python/tests"];
    shell::run(python().args(quiet).args(tests))?;
    shell::run(python().args(["-m", "mypy.stubtest", "kvblock._kvblock"]))?;
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
    maturin.args(["--profile", "dev", "--out"]).arg(&folder);
    maturin.arg("--interpreter").arg(program("python"));
    shell::run(&mut maturin)?;
    let file = shell::root().join(folder).join("kvblock/_kvblock.pyi");
    fs::read_to_string(&file).with_context(|| file.display().to_string())
}

/// Builds the only wheel in [`WHEELS`].
fn build() -> Result<PathBuf> {
    let folder = shell::root().join(WHEELS);
    for old in wheels(&folder) {
        fs::remove_file(&old).with_context(|| old.display().to_string())?;
    }
    let mut maturin = tool("maturin");
    maturin.args(["build", "--quiet", "--manifest-path", "kv-python/Cargo.toml"]);
    maturin.args(["--release", "--strip", "--out", WHEELS]);
    maturin.arg("--interpreter").arg(program("python"));
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
