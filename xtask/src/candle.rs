//! Checks kv-candle with its feature `cuda` on a machine without CUDA.
//!
//! candle compiles its own kernels with `nvcc` in the build script of candle-kernels. For a check
//! of types only the names of their modules matter, so that crate is replaced by its own sources
//! with a build script that writes empty modules. The package that replaces it cannot be part of
//! this workspace, whose builds use no patches: it is written below the target folder.
use std::fs;
use std::path::Path;

use anyhow::{Result, bail};

use crate::lanes::Outcome;
use crate::shell;
use crate::workspace::{self, Workspace};

const KERNELS: &str = "candle-kernels";

/// Checks the types of a program on cards alone. It has both crates' features of cudarc, as any
/// program with both.
pub(crate) fn check_cuda(workspace: &Workspace) -> Result<Outcome> {
    let folder = workspace.target_dir.join("kv-candle-cuda");
    let manifest = folder.join("Cargo.toml");
    fs::create_dir_all(folder.join("src"))?;
    fs::write(folder.join("src/lib.rs"), "")?;
    // The same versions, so that shared crates are checked once.
    fs::copy(shell::root().join("Cargo.lock"), folder.join("Cargo.lock"))?;
    let profiles = fs::read_to_string(shell::root().join("Cargo.toml"))?;
    fs::write(&manifest, program(&profiles, false)?)?;
    let (source, version) = workspace::source_of(&manifest, KERNELS)?;
    replace(&source, &version, &folder.join(KERNELS))?;
    fs::write(&manifest, program(&profiles, true)?)?;
    without_cpu(&manifest)?;
    let mut command = shell::cargo(["check", "--manifest-path"]);
    command.arg(&manifest).env("CARGO_TARGET_DIR", &workspace.target_dir);
    shell::run(&mut command).map(|()| Outcome::Passed)
}

/// Refuses a program on cards that compiles kernels of the CPU.
fn without_cpu(manifest: &Path) -> Result<()> {
    let mut command = shell::cargo(["tree", "--edges", "normal,build", "--prefix", "none"]);
    let Some(tree) = shell::output(command.arg("--manifest-path").arg(manifest)) else {
        bail!("`{}` failed", shell::line(&command));
    };
    match tree.lines().find(|line| line.starts_with("kv-cpu")) {
        Some(found) => bail!("kv-candle without its feature `cpu` depends on {found}"),
        None if tree.lines().any(|line| line.starts_with("kv-cuda ")) => Ok(()),
        None => bail!("kv-candle with its feature `cuda` does not depend on kv-cuda"),
    }
}

/// Writes the manifest of a program on CUDA, with the profiles of this workspace: crates that are
/// checked with others are other crates for cargo.
fn program(root: &str, is_patched: bool) -> Result<String> {
    let profiles = root.find("[profile.dev]").and_then(|begin| root.get(begin..));
    let Some(profiles) = profiles else { bail!("the workspace has no profile `dev`") };
    let kv_candle = shell::root().join("kv-candle");
    let kv_candle = kv_candle.display();
    let patch = if is_patched {
        format!("[patch.crates-io]\n{KERNELS} = {{ path = \"{KERNELS}\" }}\n")
    } else {
        String::new()
    };
    Ok(format!(
        "[package]\nname = \"kv-candle-cuda\"\nversion = \"0.0.0\"\nedition = \"2024\"\n\n\
         [workspace]\n\n\
         [dependencies]\nkv-candle = {{ path = '{kv_candle}', default-features = false, \
         features = [\"cuda\"] }}\n\n\
         {patch}\n{profiles}"
    ))
}

/// Copies the Rust sources of the kernels beside a build script that writes empty modules.
fn replace(source: &Path, version: &str, folder: &Path) -> Result<()> {
    fs::create_dir_all(folder.join("src"))?;
    for entry in fs::read_dir(source.join("src"))? {
        let path = entry?.path();
        if let (Some("rs"), Some(name)) =
            (path.extension().and_then(|ending| ending.to_str()), path.file_name())
        {
            fs::copy(&path, folder.join("src").join(name))?;
        }
    }
    let library = fs::read_to_string(folder.join("src/lib.rs"))?;
    let modules = modules(&library);
    if modules.is_empty() {
        bail!("{KERNELS} {version} names no modules");
    }
    let line = |name: &&str| format!("pub const {name}: &str = \\\"\\\";\\n");
    let lines = modules.iter().map(line).collect::<Vec<_>>().concat();
    let build = format!(
        "fn main() {{\n    let out = std::env::var(\"OUT_DIR\").unwrap();\n    \
         std::fs::write(out + \"/ptx.rs\", \"{lines}\").unwrap();\n}}\n"
    );
    fs::write(folder.join("build.rs"), build)?;
    let manifest = format!(
        "[package]\nname = \"{KERNELS}\"\nversion = \"{version}\"\nedition = \"2021\"\n\n\
         [features]\ncutile = []\n"
    );
    Ok(fs::write(folder.join("Cargo.toml"), manifest)?)
}

/// Returns the names of the modules that `lib.rs` takes from its build script, each in a line such
/// as `mdl!(AFFINE, Affine);`.
fn modules(library: &str) -> Vec<&str> {
    let names = library.lines().filter_map(|line| line.trim().strip_prefix("mdl!("));
    names.filter_map(|rest| rest.split(',').next()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modules_are_found_where_the_macro_is_used() {
        let library = "macro_rules! mdl {\n    ($cst:ident, $id:ident) => {}\n}\n\
                       mdl!(AFFINE, Affine);\n  mdl!(UNARY, Unary);\nfn other() {}\n";
        assert_eq!(modules(library), ["AFFINE", "UNARY"]);
    }

    #[test]
    fn a_program_has_the_profiles_of_the_workspace() {
        let root = "[workspace]\nmembers = []\n\n[profile.dev]\ndebug = false\n";
        let [plain, patched] = [false, true].map(|is_patched| program(root, is_patched).unwrap());
        assert!(plain.ends_with("[profile.dev]\ndebug = false\n"), "{plain}");
        assert!(!plain.contains("[patch") && !plain.contains("members"), "{plain}");
        assert!(patched.contains("[patch.crates-io]\ncandle-kernels"), "{patched}");
        assert!(program("[workspace]\n", false).is_err());
    }
}
