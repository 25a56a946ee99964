//! `cargo xtask gpu`: checks and measures the CUDA backend on a card, and writes the report.
//!
//! Programs and data are collected in one folder, the kit, and everything runs from there: here, or
//! on a machine that received the folder as an archive (`--package`) and needs neither cargo nor a
//! network.
mod extract;
mod kit;
mod loops;
mod pack;
mod predict;
mod process;
mod record;
mod report;
mod run;
mod stages;
mod target;
#[cfg(test)]
mod tests;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::shell;
use crate::workspace::Workspace;
use report::{Outcome, Report};
use run::{Limits, Runner};

/// Options of the command.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Options {
    /// Makes an archive at this path or in this folder, instead of running anything.
    pub(crate) package: Option<PathBuf>,
    /// Lists the contents of an archive, and builds nothing.
    pub(crate) list: bool,
    /// Runs an existing kit, and leaves the report in it.
    pub(crate) kit: Option<PathBuf>,
    /// Folders of vector files to run besides the suite.
    pub(crate) vectors: Vec<PathBuf>,
    /// Ordinal of the card.
    pub(crate) device: u32,
    /// Seconds for all stages together.
    pub(crate) deadline: Option<u64>,
    /// Folder for the report and all other files of a run.
    pub(crate) out: Option<PathBuf>,
}

/// Runs or packs; returns whether nothing failed.
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
        pack::pack(&folder, place, &commit)?;
        return Ok(true);
    }
    if let Some(why) = no_card() {
        bail!("nothing was run and nothing written: {why}");
    }
    let limits = Limits { deadline: options.deadline.map(Duration::from_secs), stage_max: None };
    let out = options.out.as_ref().map(std::path::absolute).transpose()?;
    let (kit, reports) = if let Some(folder) = &options.kit {
        let kit = std::path::absolute(folder)?;
        (kit.clone(), kit)
    } else {
        (make_kit(&options.vectors)?.0, shell::root().join("docs/gpu"))
    };
    check(&kit, (&reports, out.as_deref()), options.device, limits)
}

/// Returns why there cannot be a card here, before anything is built; otherwise the driver decides.
fn no_card() -> Option<String> {
    let nodes = ["/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg"];
    let is_there = nodes.iter().any(|node| Path::new(node).exists());
    (!is_there
        && process::output(Command::new("nvidia-smi").arg("-L"), Duration::from_secs(30)).is_none())
    .then(|| {
        format!("no NVIDIA card: none of {} exists, and nvidia-smi lists none", nodes.join(", "))
    })
}

/// Builds a kit; returns its folder and its commit.
fn make_kit(vectors: &[PathBuf]) -> Result<(PathBuf, String)> {
    let workspace = Workspace::load()?;
    let folder = workspace.target_dir.join("gpu/kit");
    let before = commit()?;
    kit::make(&folder, vectors, &before)?;
    let after = commit()?;
    if before != after {
        bail!("the tree changed from {before} to {after} during the build: run it again");
    }
    Ok((folder, before))
}

/// Returns the current commit, and whether files differ from it.
fn commit() -> Result<String> {
    let mut git = shell::program("git");
    let hash = shell::output(git.args(["rev-parse", "--short=12", "HEAD"]));
    let hash = hash.context("git does not tell the commit")?.trim().to_owned();
    let mut git = shell::program("git");
    let changes = shell::output(git.args(["status", "--porcelain", "--untracked-files=no"]));
    let is_changed = changes.is_some_and(|changes| !changes.trim().is_empty());
    Ok(if is_changed { format!("{hash}-changed") } else { hash })
}

/// Runs a kit, which writes its report; returns whether nothing failed.
fn check(kit: &Path, places: (&Path, Option<&Path>), device: u32, limits: Limits) -> Result<bool> {
    let mut runner = Runner::new(kit, places, device, limits)?;
    run_kit(&mut runner)
}

fn run_kit(runner: &mut Runner<'_>) -> Result<bool> {
    runner.prepare()?;
    if stages::facts(runner)? {
        stages::all(runner)?;
    }
    for extension in ["json", "md"] {
        println!("wrote {}", runner.report_file(extension).display());
    }
    Ok(summary(&runner.report))
}

fn summary(report: &Report) -> bool {
    let failed = report.failed();
    for check in &failed {
        println!("{} {}", check.outcome.words().0.to_uppercase(), check.name);
    }
    let is_skipped = |outcome: &Outcome| matches!(outcome, Outcome::Skipped(_));
    let skipped = report.checks.iter().filter(|check| is_skipped(&check.outcome)).count();
    println!("{} checks, {} failed, {skipped} not run", report.checks.len(), failed.len());
    failed.is_empty()
}
