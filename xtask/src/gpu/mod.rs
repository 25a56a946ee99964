//! `cargo xtask gpu`: checks and measures the CUDA backend on a card, and writes the report.
//!
//! Programs and data are laid out in one folder, the kit, and everything runs from there: here, or
//! on a machine that got the folder as an archive (`--package`) and has neither cargo nor network.
mod kit;
mod record;
mod report;
mod run;
mod target;
#[cfg(test)]
mod tests;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::shell;
use crate::workspace::Workspace;
use report::Report;

/// What to do.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Options {
    /// Makes an archive there, or in that folder, instead of running anything.
    pub(crate) package: Option<PathBuf>,
    /// Names what an archive has, and builds nothing.
    pub(crate) list: bool,
    /// Runs a kit that lies there already, and leaves the report in it.
    pub(crate) kit: Option<PathBuf>,
    /// Folders of vector files to run besides the suite.
    pub(crate) vectors: Vec<PathBuf>,
    /// Ordinal of the card.
    pub(crate) device: u32,
}

/// Runs, or packs; whether nothing failed.
pub(crate) fn run(options: &Options) -> Result<bool> {
    if let Some(vectors) = options.vectors.iter().find(|path| !path.is_dir()) {
        bail!("--vectors {}: no such folder", vectors.display());
    }
    if options.list {
        for place in kit::contents(&options.vectors)? {
            println!("{}", place.display());
        }
        return Ok(true);
    }
    if let Some(place) = &options.package {
        let (folder, commit) = make_kit(&options.vectors)?;
        kit::pack(&folder, place, &commit)?;
        return Ok(true);
    }
    if let Some(why) = no_card() {
        bail!("nothing was run and nothing written: {why}");
    }
    if let Some(folder) = &options.kit {
        return check(&std::path::absolute(folder)?, folder, options.device);
    }
    let (folder, _) = make_kit(&options.vectors)?;
    check(&folder, &shell::root().join("docs/gpu"), options.device)
}

/// Why no card can be here, before anything is built; the driver has the last word.
fn no_card() -> Option<String> {
    let nodes = ["/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg"];
    let is_there = nodes.iter().any(|node| Path::new(node).exists());
    (!is_there && shell::output(Command::new("nvidia-smi").arg("-L")).is_none()).then(|| {
        format!("no NVIDIA card: none of {} is there, and nvidia-smi lists none", nodes.join(", "))
    })
}

/// Builds a kit; its folder, and the commit it is of.
fn make_kit(vectors: &[PathBuf]) -> Result<(PathBuf, String)> {
    let workspace = Workspace::load()?;
    let folder = workspace.target_dir.join("gpu/kit");
    let before = commit()?;
    kit::make(&folder, vectors, &before)?;
    let after = commit()?;
    if before != after {
        bail!("the tree went from {before} to {after} while it was built: once more, please");
    }
    Ok((folder, before))
}

/// The commit that is checked out, and whether files differ from it.
fn commit() -> Result<String> {
    let mut git = shell::program("git");
    let hash = shell::output(git.args(["rev-parse", "--short=12", "HEAD"]));
    let hash = hash.context("git does not tell the commit")?.trim().to_owned();
    let mut git = shell::program("git");
    let changes = shell::output(git.args(["status", "--porcelain", "--untracked-files=no"]));
    let is_changed = changes.is_some_and(|changes| !changes.trim().is_empty());
    Ok(if is_changed { format!("{hash}-changed") } else { hash })
}

/// Runs a kit and writes its report; whether all of it passed.
fn check(kit: &Path, reports: &Path, device: u32) -> Result<bool> {
    let report = run::all(kit, device)?;
    fs::create_dir_all(reports)?;
    let name = report.file_name();
    let write = |extension: &str, text: String| {
        let file = reports.join(format!("{name}.{extension}"));
        fs::write(&file, text).with_context(|| format!("cannot write {}", file.display()))?;
        println!("wrote {}", file.display());
        Ok::<_, anyhow::Error>(())
    };
    write("json", format!("{:#}\n", report.json()))?;
    write("md", report.markdown())?;
    Ok(summary(&report))
}

fn summary(report: &Report) -> bool {
    let failed = report.failed();
    for check in &failed {
        println!("FAILED {}", check.name);
    }
    println!("{} checks, {} failed", report.checks.len(), failed.len());
    failed.is_empty()
}
