//! `cargo xtask conformance`: the shared suite, on every backend of the workspace.
//!
//! A backend's runner is its test target `conformance`, made by `kv-testkit`. It writes its counts
//! to the file that [`REPORT`] names; this module starts the runners and adds the counts. It knows
//! no case.
use std::ffi::OsString;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::emulator::{self, Sanitizer};
use crate::programs::{self, Program};
use crate::shell;
use crate::workspace::{Package, Workspace};

/// Name of the runner among a backend crate's test targets.
pub(crate) const TEST_TARGET: &str = "conformance";

/// Variable with the path of a runner's counts.
const REPORT: &str = "KV_CONFORMANCE_REPORT";

/// All backends, also those that are not in the workspace.
const BACKENDS: [&str; 3] = ["cpu", "wgpu", "cuda"];

/// The CUDA backend on the emulator: the runner of kv-cuda, only on request.
pub(crate) const EMULATED: &str = "emulated";

/// Returns whether a test target is a runner, which a separate stage runs.
pub(crate) fn is_runner(target: &str) -> bool {
    target == TEST_TARGET
}

/// Parts of names of the cases that an instruction set other than the best one runs: each kernel in
/// each format, element type and head dim, in ragged batches. The kernels' own tests compare every
/// loop of every instruction set with plain code.
pub(crate) const OF_KERNELS: [&str; 6] = [
    "cpu::attend/ragged",
    "cpu::attend/head_",
    "cpu::attend/every_dtype",
    "cpu::quant/every_dtype",
    "cpu::quant/gather",
    "cpu::quant/error_on_normal_rows",
];

/// Makes cases of many combinations take fewer of them, for devices that run on a CPU.
/// `cargo xtask soak` takes all.
pub(crate) const SHORT: (&str, &str) = ("KV_CONFORMANCE_SHORT", "1");

/// Options of a run.
#[derive(Debug, Default)]
pub(crate) struct Options {
    /// The backends to run; all of the workspace when empty.
    pub(crate) backends: Vec<String>,
    /// Absolute paths of folders of vector files, to run instead of the suite.
    pub(crate) vectors: Vec<PathBuf>,
    /// Further arguments of the runner: those of libtest, such as a part of a case's name.
    pub(crate) args: Vec<OsString>,
    /// The sanitizer for the kernels of [`EMULATED`].
    pub(crate) sanitizer: Sanitizer,
    /// Further variables for the runner.
    pub(crate) env: Vec<(&'static str, OsString)>,
}

/// Numbers of cases by outcome.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    passed: u64,
    failed: u64,
    skipped: u64,
}

impl Counts {
    /// Returns whether nothing failed.
    pub(crate) fn is_clean(&self) -> bool {
        self.failed == 0
    }

    /// Returns whether a case has run and passed.
    pub(crate) fn any_passed(&self) -> bool {
        self.passed > 0
    }

    fn add(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped += other.skipped;
    }

    fn parse(report: &Value) -> Option<Self> {
        let count = |key| report.get(key).and_then(Value::as_u64);
        Some(Self {
            passed: count("passed")?,
            failed: count("failed")?,
            skipped: count("skipped")?,
        })
    }
}

impl fmt::Display for Counts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { passed, failed, skipped } = self;
        write!(f, "{passed} passed, {failed} failed, {skipped} skipped")
    }
}

/// Runs the suite; the last line printed is the total.
pub(crate) fn run(options: &Options) -> Result<Counts> {
    if let Some(vectors) = options.vectors.iter().find(|path| !path.is_dir()) {
        bail!("--vectors {}: no such folder", vectors.display());
    }
    let is_emulated = options.backends == [EMULATED];
    if options.sanitizer != Sanitizer::None && !is_emulated {
        bail!("--sanitize watches the emulator: give it with `--backend {EMULATED}` alone");
    }
    let workspace = Workspace::load()?;
    let mut total = Counts::default();
    let mut lines = Vec::new();
    for (backend, requested) in chosen(&options.backends)? {
        let (line, counts) = match why_not(&workspace, backend) {
            None => run_backend(&workspace, backend, requested, options)?,
            Some(why) if requested => (why, Counts { failed: 1, ..Counts::default() }),
            Some(why) => (why, Counts::default()),
        };
        lines.push(format!("{backend}: {line}"));
        total.add(counts);
    }
    println!("\n{}\n{total}", lines.join("\n"));
    Ok(total)
}

/// Runs the suite of one backend in some variation; a machine without the backend skips.
pub(crate) fn run_variation(backend: &str, what: &str, options: &Options) -> Result<Counts> {
    let workspace = Workspace::load()?;
    if let Some(why) = why_not(&workspace, backend) {
        println!("{backend}: {why}");
        return Ok(Counts::default());
    }
    let (line, counts) = run_backend(&workspace, backend, false, options)?;
    println!("{backend} {what}: {line}");
    Ok(counts)
}

/// Returns the backends to run, and whether each was requested by name.
fn chosen(requested: &[String]) -> Result<Vec<(&'static str, bool)>> {
    if requested.is_empty() {
        return Ok(BACKENDS.map(|name| (name, false)).into());
    }
    let known = |name: &String| {
        let mut all = BACKENDS.into_iter().chain([EMULATED]);
        let backend = all.find(|backend| backend == name).map(|backend| (backend, true));
        let known = BACKENDS.join(", ");
        backend.with_context(|| format!("unknown backend {name:?}, known: {known}, {EMULATED}"))
    };
    requested.iter().map(known).collect()
}

/// Returns why a backend has no runner, `None` if it has one.
fn why_not(workspace: &Workspace, backend: &str) -> Option<String> {
    let Some(package) = workspace.package(&package_of(backend)) else {
        return Some("not in this workspace yet".to_owned());
    };
    (!has_runner(package)).then(|| format!("{} has no tests/{TEST_TARGET}.rs yet", package.name))
}

fn package_of(backend: &str) -> String {
    if backend == EMULATED { "kv-cuda".to_owned() } else { format!("kv-{backend}") }
}

fn has_runner(package: &Package) -> bool {
    package.targets_of("test").any(|target| is_runner(&target.name))
}

fn run_backend(
    workspace: &Workspace,
    backend: &str,
    requested: bool,
    options: &Options,
) -> Result<(String, Counts)> {
    let folder = workspace.target_dir.join("conformance");
    let report = folder.join(format!("{backend}.json"));
    fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    // Counts of an earlier run must not be used for a runner that fails to start.
    match fs::remove_file(&report) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            return Err(error).with_context(|| format!("cannot remove {}", report.display()));
        }
        _ => {}
    }
    let mut command = match runner(workspace, backend) {
        Ok(program) => program.command(),
        Err(error) => return Ok(outcome(None, Err(error))),
    };
    if backend == EMULATED {
        emulate(&mut command, options.sanitizer)?;
    }
    if requested {
        // A device that cannot be opened is then a failure, not a skipped case.
        command.args(["--backend", backend]);
    }
    for vectors in &options.vectors {
        command.arg("--vectors").arg(vectors);
    }
    command.args(&options.args).env(REPORT, &report);
    quiet_drivers(&mut command, workspace)?;
    command.envs(options.env.iter().map(|(name, value)| (*name, value)));
    let ended = shell::run(&mut command);
    if options.args.iter().any(|arg| arg == "--list") {
        ended?;
        return Ok(("listed, nothing ran".to_owned(), Counts::default()));
    }
    Ok(outcome(read_report(&report).as_ref(), ended))
}

/// Builds the runner of a backend, without those of other backends.
fn runner(workspace: &Workspace, backend: &str) -> Result<Program> {
    let package = package_of(backend);
    let others = workspace.packages.iter().filter(|other| other.name != package);
    let others: Vec<_> = others.filter(|other| has_runner(other)).map(|o| &*o.name).collect();
    let programs = programs::of_workspace(&others, &["--test", TEST_TARGET])?;
    let found = programs.into_iter().find(|p| p.package == package && is_runner(&p.target));
    found.with_context(|| format!("cargo built no {TEST_TARGET} of {package}"))
}

/// Builds the emulator's library and passes its path to the runner.
fn emulate(command: &mut Command, sanitizer: Sanitizer) -> Result<()> {
    command.env(emulator::SETTING, emulator::library(sanitizer)?);
    // The sanitizer must be loaded into the program first, because the program is not compiled with
    // it.
    if let Some(runtime) = emulator::runtime(sanitizer)? {
        command.env("ASAN_OPTIONS", "detect_leaks=0").env("LD_PRELOAD", runtime);
        command.env("UBSAN_OPTIONS", "print_stacktrace=1");
    }
    Ok(())
}

/// Sets variables for graphics drivers: compiled shaders are stored below `target`, and a session
/// folder exists even if no user is logged in. Mesa's driver for CPUs takes longer to optimise
/// shaders than the tests take to run.
pub(crate) fn quiet_drivers(command: &mut Command, workspace: &Workspace) -> Result<()> {
    let named = [("MESA_SHADER_CACHE_DIR", "shaders"), ("XDG_RUNTIME_DIR", "session")];
    for (name, folder) in named.into_iter().filter(|(name, _)| std::env::var_os(name).is_none()) {
        let folder = workspace.target_dir.join("drivers").join(folder);
        fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
        command.env(name, folder);
    }
    if std::env::var_os("GALLIVM_PERF").is_none() {
        command.env("GALLIVM_PERF", "nopt");
    }
    Ok(())
}

fn read_report(path: &Path) -> Option<Value> {
    serde_json::from_slice(&fs::read(path).ok()?).ok()
}

/// Combines one runner's report and its exit status. A runner that fails without a failed case
/// counts as one.
fn outcome(report: Option<&Value>, ended: Result<()>) -> (String, Counts) {
    let counts = report.and_then(Counts::parse);
    match (counts, ended) {
        (Some(counts), Ok(())) => (counts.to_string(), counts),
        (Some(counts), Err(_)) if counts.failed > 0 => (counts.to_string(), counts),
        (counts, ended) => {
            let why = match ended {
                Err(error) => format!("{error:#}"),
                Ok(()) => "the runner left no counts".to_owned(),
            };
            let counts = counts.unwrap_or_default();
            (why, Counts { failed: counts.failed + 1, ..counts })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workspace::Target;
    use crate::workspace::tests::workspace;

    fn counts(passed: u64, failed: u64, skipped: u64) -> Counts {
        Counts { passed, failed, skipped }
    }

    fn report(failed: u64) -> Value {
        serde_json::json!({"backend": "cpu", "passed": 3, "failed": failed, "skipped": 1})
    }

    #[test]
    fn counts_are_taken_from_the_report() {
        assert_eq!(outcome(Some(&report(0)), Ok(())).1, counts(3, 0, 1));
        assert_eq!(outcome(Some(&report(2)), Err(anyhow::anyhow!("exit 101"))).1, counts(3, 2, 1));
        assert_eq!(counts(3, 0, 1).to_string(), "3 passed, 0 failed, 1 skipped");
    }

    #[test]
    fn a_runner_that_fails_is_a_failure() {
        let (line, broken) = outcome(None, Err(anyhow::anyhow!("does not build")));
        assert_eq!((line.as_str(), broken), ("does not build", counts(0, 1, 0)));
        assert_eq!(outcome(None, Ok(())).1, counts(0, 1, 0));
        assert_eq!(outcome(Some(&report(0)), Err(anyhow::anyhow!("aborted"))).1, counts(3, 1, 1));
        assert_eq!(outcome(Some(&Value::Null), Ok(())).1, counts(0, 1, 0));
    }

    #[test]
    fn absent_backends_have_a_reason() {
        let mut workspace = workspace(&[("kv-cpu", &[])]);
        assert_eq!(why_not(&workspace, "cuda").unwrap(), "not in this workspace yet");
        assert!(why_not(&workspace, "cpu").unwrap().contains("no tests/conformance.rs"));
        let (name, kind) = (TEST_TARGET.to_owned(), "test".to_owned());
        workspace.packages[0].targets.push(Target { name, kind });
        assert_eq!(why_not(&workspace, "cpu"), None);
    }

    #[test]
    fn only_known_backends_are_accepted() {
        assert_eq!(chosen(&[]).unwrap().len(), BACKENDS.len());
        assert_eq!(chosen(&["cpu".to_owned()]).unwrap(), [("cpu", true)]);
        assert_eq!(chosen(&["emulated".to_owned()]).unwrap(), [("emulated", true)]);
        assert!(chosen(&["gpu".to_owned()]).is_err());
    }
}
