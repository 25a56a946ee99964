//! The contents of the kit: the programs and files of the folder that everything runs from.
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::shell;

/// The script that starts a run on a machine without cargo.
pub(super) const RUN: &str = r#"#!/bin/sh
# Checks and measures the CUDA backend on this machine's card (--device N: the N-th). Needs an
# NVIDIA driver, nothing else; uses ncu, compute-sanitizer, and PyTorch and FlashInfer of python3,
# where they are at hand. Stages are ended at their limits, all of them by --deadline SECONDS, and
# the report, <card>.md and <card>.json, is written anew after each: into --out DIR, or beside this
# file.
here=$(CDPATH= cd -- "$(dirname -- "$0")" && pwd) || exit 1
exec "$here/bin/xtask" gpu --kit "$here" "$@"
"#;

/// A program of the kit, and its name in cargo.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Program {
    name: &'static str,
    target: &'static str,
    /// Whether it is built with the test harness.
    is_test: bool,
}

/// One build, and its programs.
type Build = (&'static [&'static str], &'static [Program]);

/// Release builds, as they are measured. Tests and programs are built separately: cargo builds an
/// example that has tests in only one of the two forms at a time.
const BUILDS: [Build; 4] = [
    (
        &["test", "--no-run", "--package=kv-cuda", "--lib", "--test=conformance", "--test=replay"],
        &[
            Program { name: "driver", target: "kv_cuda", is_test: true },
            Program { name: "conformance", target: "conformance", is_test: true },
            Program { name: "replay", target: "replay", is_test: true },
        ],
    ),
    (
        &["build", "--package=kv-cuda", "--example=gpu"],
        &[Program { name: "gpu", target: "gpu", is_test: false }],
    ),
    (
        &["build", "--package=kv-cli", "--features=cuda,wgpu"],
        &[Program { name: "kv", target: "kv", is_test: false }],
    ),
    (&["build", "--package=xtask"], &[Program { name: "xtask", target: "xtask", is_test: false }]),
];

/// Files and folders of the tree that a kit contains, and their places.
const DATA: [(&str, &str); 5] = [
    ("models/stories260K", "models/stories260K"),
    ("kv-testkit/testdata", "testdata"),
    ("kv-cuda/bench/peers.py", "peers.py"),
    ("LICENSE-APACHE", "LICENSE-APACHE"),
    ("LICENSE-MIT", "LICENSE-MIT"),
];

/// Returns every file of a kit by its place, except the programs.
pub(super) fn data(vectors: &[PathBuf]) -> Result<BTreeMap<PathBuf, PathBuf>> {
    let mut files = BTreeMap::new();
    for (source, place) in DATA {
        list(&shell::root().join(source), Path::new(place), &mut files)?;
    }
    for (index, folder) in vectors.iter().enumerate() {
        list(folder, &PathBuf::from(format!("vectors/{index}")), &mut files)?;
    }
    Ok(files)
}

/// Returns all contents of a kit by place, without building.
pub(super) fn contents(vectors: &[PathBuf]) -> Result<Vec<PathBuf>> {
    let programs = BUILDS.iter().flat_map(|(_, programs)| programs.iter());
    let programs = programs.map(|program| Path::new("bin").join(program.name));
    let written = ["commit", "run.sh"].map(PathBuf::from);
    Ok(programs.chain(written).chain(data(vectors)?.into_keys()).collect())
}

fn list(source: &Path, place: &Path, files: &mut BTreeMap<PathBuf, PathBuf>) -> Result<()> {
    let context = || format!("cannot read {}", source.display());
    if !fs::metadata(source).with_context(context)?.is_dir() {
        files.insert(place.to_owned(), source.to_owned());
        return Ok(());
    }
    for entry in fs::read_dir(source).with_context(context)? {
        let entry = entry?;
        list(&entry.path(), &place.join(entry.file_name()), files)?;
    }
    Ok(())
}

/// Builds everything and writes the kit anew.
pub(super) fn make(folder: &Path, vectors: &[PathBuf], commit: &str) -> Result<()> {
    let mut built = Vec::new();
    for (args, programs) in &BUILDS {
        built.extend(build(args, programs)?);
    }
    if folder.exists() {
        fs::remove_dir_all(folder)?;
    }
    let bin = folder.join("bin");
    fs::create_dir_all(&bin)?;
    for (name, executable) in built {
        let place = bin.join(name);
        fs::copy(&executable, &place)?;
        shell::run(shell::program("strip").arg(&place)).context("binutils has `strip`")?;
    }
    for (place, source) in data(vectors)? {
        let place = folder.join(place);
        if let Some(parent) = place.parent() {
            fs::create_dir_all(parent)?;
        }
        fs::copy(&source, &place).with_context(|| format!("cannot copy {}", source.display()))?;
    }
    fs::write(folder.join("commit"), format!("{commit}\n"))?;
    fs::write(folder.join("run.sh"), RUN)?;
    make_executable(&folder.join("run.sh"))
}

#[cfg(unix)]
fn make_executable(file: &Path) -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    Ok(fs::set_permissions(file, fs::Permissions::from_mode(0o755))?)
}

#[cfg(not(unix))]
fn make_executable(_: &Path) -> Result<()> {
    bail!("a kit is for Linux")
}

fn build(args: &[&str], programs: &[Program]) -> Result<Vec<(&'static str, PathBuf)>> {
    let mut command = shell::cargo(args);
    command.args(["--release", "--message-format=json-render-diagnostics"]);
    println!("$ {}", shell::line(&command));
    let output = command.stderr(std::process::Stdio::inherit()).output()?;
    if !output.status.success() {
        bail!("`{}` failed ({})", shell::line(&command), output.status);
    }
    let text = String::from_utf8_lossy(&output.stdout);
    let find = |program: &Program| {
        let found = text.lines().find_map(|line| executable(line, *program));
        let found = found.with_context(|| format!("cargo built no {}", program.target))?;
        Ok((program.name, found))
    };
    programs.iter().map(find).collect()
}

/// Returns the executable in a message of cargo, if it is this program's.
fn executable(line: &str, program: Program) -> Option<PathBuf> {
    let message: Value = serde_json::from_str(line).ok()?;
    let name = message.pointer("/target/name")?.as_str()?;
    let is_test = message.pointer("/profile/test")?.as_bool()?;
    // A runner without the harness counts as a test.
    let kind = message.pointer("/target/kind/0")?.as_str()?;
    let is_ours = name == program.target && (is_test || kind == "test") == program.is_test;
    is_ours.then(|| message.get("executable")?.as_str().map(PathBuf::from))?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn executables_are_found_in_messages() {
        let message = |name: &str, kind: &str, is_test: bool| {
            serde_json::json!({
                "reason": "compiler-artifact",
                "target": {"name": name, "kind": [kind]},
                "profile": {"test": is_test},
                "executable": "/x/y",
            })
            .to_string()
        };
        let test = Program { name: "driver", target: "kv_cuda", is_test: true };
        let found = Some(PathBuf::from("/x/y"));
        assert_eq!(executable(&message("kv_cuda", "lib", true), test), found);
        assert_eq!(executable(&message("kv_cuda", "lib", false), test), None);
        assert_eq!(executable(&message("other", "lib", true), test), None);
        let runner = Program { name: "conformance", target: "conformance", is_test: true };
        assert_eq!(executable(&message("conformance", "test", false), runner), found);
        let program = Program { name: "gpu", target: "gpu", is_test: false };
        assert_eq!(executable(&message("gpu", "example", false), program), found);
        assert_eq!(executable("not json", program), None);
    }
}
