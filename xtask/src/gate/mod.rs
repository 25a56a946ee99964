//! `cargo xtask gate`: reads the main loops of decode and prefill kernels in the committed machine
//! code, prints their figures, and fails where they pass a limit. Every kernel, of other
//! units too, must wait for the previous kernel before it uses memory.
//!
//! Needs a disassembler, and neither a compiler nor a card: `nvdisasm` of `PyPI`. The
//! archive is unpacked by the program that writes it. How the figures are made is in
//! `docs/gpu/model.md`, whose tables are the committed state; the report of a card takes its
//! predictions from the same figures.
mod cubin;
mod family;
mod figures;
mod flow;
mod limits;
mod order;
mod pipes;
mod sass;
#[cfg(test)]
mod tests;
mod trip;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use anyhow::{Context, Result, anyhow, bail};

use crate::lanes::Outcome;
use crate::workspace::Workspace;
use crate::{kernels, setup, shell};
use family::{FAMILIES, Shape};
use figures::Figures;
pub(crate) use figures::{CLOCK, MULTIPROCESSORS};

/// The name of the disassembler in `setup`.
pub(crate) const TOOL: &str = "nvdisasm";
/// The folder of the disassembler, from the repository's root: a version that is not this one would
/// not be used.
pub(crate) const FOLDER: &str = "target/nvdisasm-13.5.37";
pub(crate) const PACKAGE: &str = "nvidia-cuda-nvdisasm==13.5.37";
const PROGRAM: &str = "nvidia/cu13/bin/nvdisasm";

/// Machine code of this architecture is read.
const ARCH: &str = "sm_90a";

const DOCUMENT: &str = "docs/gpu/model.md";
const CONSTANTS: &str = "xtask/src/gpu/loops.rs";
const UPDATE: &str = "cargo xtask gate --update";

/// The inputs of the stage: the machine code, the committed figures, and what reads them.
pub(crate) const INPUTS: &[&str] = &[
    "kv-cuda/kernels/compiled/sm_90a.kva",
    DOCUMENT,
    CONSTANTS,
    "xtask/src/gate",
    "kv-cuda/examples/kernels.rs",
];

/// Returns whether the disassembler is installed.
pub(crate) fn has_tool() -> bool {
    program().is_file()
}

fn program() -> PathBuf {
    shell::root().join(FOLDER).join(PROGRAM)
}

/// Runs `cargo xtask gate`.
pub(crate) fn run(update: bool) -> Result<()> {
    setup::try_one(TOOL);
    if let Some(why) = setup::lacks(TOOL) {
        bail!("{why}");
    }
    let all = read(&Workspace::load()?)?;
    let tables = figures::markdown(&all);
    println!("{tables}");
    if update {
        let path = shell::root().join(DOCUMENT);
        let document = text_of(&path)?;
        let document = figures::replaced(&document, &tables).context(DOCUMENT)?;
        fs::write(&path, document).context(DOCUMENT)?;
        fs::write(shell::root().join(CONSTANTS), figures::constants(&all)).context(CONSTANTS)?;
    }
    check(&all)
}

/// Runs the stage of `cargo xtask test`.
pub(crate) fn stage(workspace: &Workspace) -> Result<Outcome> {
    if let Some(why) = setup::lacks(TOOL) {
        return Ok(Outcome::Skipped(why));
    }
    check(&read(workspace)?)?;
    Ok(Outcome::Passed)
}

/// Compares the figures with their limits, and with what is committed.
fn check(all: &[Figures]) -> Result<()> {
    let mut problems = limits::problems(all);
    let document = text_of(&shell::root().join(DOCUMENT))?;
    let differences = figures::differences(&document, &figures::markdown(all)).context(DOCUMENT)?;
    let is_same = text_of(&shell::root().join(CONSTANTS))? == figures::constants(all);
    if !differences.is_empty() {
        problems.push(format!("{DOCUMENT} is not current, see `{UPDATE}`:"));
        problems.extend(differences);
    }
    if !is_same {
        problems.push(format!("{CONSTANTS} is not current, see `{UPDATE}`"));
    }
    if problems.is_empty() {
        println!("gate: {} kernels are within their limits", all.len());
        return Ok(());
    }
    bail!("machine code\n{}", problems.join("\n"));
}

fn text_of(path: &Path) -> Result<String> {
    fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
}

/// Unpacks, disassembles and reads every unit, as many at a time as there are processors.
fn read(workspace: &Workspace) -> Result<Vec<Figures>> {
    let folder = workspace.target_dir.join("gate");
    if folder.is_dir() {
        fs::remove_dir_all(&folder)?;
    }
    kernels::unpack(workspace, ARCH, &folder)?;
    let units = units_of(&folder)?;
    let next = AtomicUsize::new(0);
    let done = Mutex::new(BTreeMap::new());
    let workers = thread::available_parallelism().map_or(1, usize::from);
    thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                while let Some(unit) = units.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let read = read_unit(&folder, unit);
                    let Ok(mut done) = done.lock() else { break };
                    done.insert(unit, read);
                }
            });
        }
    });
    let mut done = done.into_inner().map_err(|_| anyhow!("a thread panicked"))?;
    let (mut all, mut problems) = (Vec::new(), Vec::new());
    for unit in &units {
        match done.remove(unit).with_context(|| format!("{unit} was not read"))? {
            Ok(figures) => all.extend(figures),
            Err(error) => problems.push(format!("{error:#}")),
        }
    }
    if !problems.is_empty() {
        bail!("machine code\n{}", problems.join("\n"));
    }
    Ok(all)
}

/// Lists the units of a folder, those with figures first, in their order.
fn units_of(folder: &Path) -> Result<Vec<String>> {
    let mut others = Vec::new();
    for entry in
        fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))?
    {
        let path = entry?.path();
        others.extend(path.file_stem().and_then(|name| name.to_str()).map(str::to_owned));
    }
    others.retain(|unit| FAMILIES.iter().all(|(known, _)| known != unit));
    others.sort();
    let mut units: Vec<_> = FAMILIES.iter().map(|(unit, _)| (*unit).to_owned()).collect();
    // A unit of several formats is listed once for each.
    units.dedup();
    units.extend(others);
    Ok(units)
}

/// Reads one unit: the order of every kernel, and the figures of those that its source defines.
fn read_unit(folder: &Path, unit: &str) -> Result<Vec<Figures>> {
    let path = folder.join(format!("{unit}.cubin"));
    let image = fs::read(&path).with_context(|| format!("{ARCH} has no unit {unit}"))?;
    let resources = cubin::resources(&image).with_context(|| format!("{ARCH}: {unit}"))?;
    let mut command = shell::program(program());
    let text = shell::output(command.args(["-c", "-hex"]).arg(&path));
    let text = text.with_context(|| format!("{TOOL} does not read {unit}"))?;
    let kernels = sass::parse(&text).with_context(|| format!("{ARCH}: {unit}"))?;
    let early: Vec<_> = kernels.iter().filter_map(order::problem).collect();
    if !early.is_empty() {
        bail!("{}", early.join("\n"));
    }
    if FAMILIES.iter().all(|(known, _)| *known != unit) {
        return Ok(Vec::new());
    }
    let source = text_of(&shell::root().join("kv-cuda/kernels").join(format!("{unit}.cu")))?;
    let wanted = family::defined(&source).with_context(|| format!("{unit}.cu"))?;
    figures_of(&wanted, &kernels, &resources)
}

/// Returns the figures of every wanted kernel.
///
/// # Errors
/// Names every kernel that is missing, unknown, or has no main loop.
fn figures_of(
    wanted: &BTreeSet<Shape>,
    kernels: &[sass::Kernel],
    resources: &BTreeMap<String, cubin::Resources>,
) -> Result<Vec<Figures>> {
    let mut found = Vec::new();
    let mut problems = Vec::new();
    for kernel in kernels {
        if !wanted.iter().any(|shape| shape.kernel() == kernel.name) {
            problems.push(format!("{}: not in the sources", kernel.name));
        }
    }
    for shape in wanted {
        let name = shape.kernel();
        let Some(kernel) = kernels.iter().find(|kernel| kernel.name == name) else {
            problems.push(format!("{name}: not in the archive"));
            continue;
        };
        match Figures::new(kernel, shape, resources.get(&name)) {
            Ok(figures) => found.push(figures),
            Err(error) => problems.push(format!("{shape}: {error:#}")),
        }
    }
    if !problems.is_empty() {
        bail!("{}", problems.join("\n"));
    }
    Ok(found)
}
