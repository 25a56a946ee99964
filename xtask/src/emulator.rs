//! `cargo xtask emulator`: the library that runs the CUDA kernels on the CPU, for tests.
//!
//! Compiles every kernel of kv-cuda and the emulator with a C++ compiler, file by file, and
//! recompiles only changed files. Knows no kernel by name.
mod kernel_tests;
mod self_test;

use std::collections::VecDeque;
use std::env;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};
use std::time::SystemTime;

use anyhow::{Context, Result, bail};

use crate::shell;
use crate::workspace::Workspace;
pub(crate) use kernel_tests::{build_all as build_kernel_tests, run as test_kernels};

/// The folder of the kernels, from the repository's root.
pub(crate) const KERNELS: &str = "kv-cuda/kernels";

/// A sanitizer of the kernels.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Sanitizer {
    /// No sanitizer; optimised.
    #[default]
    None,
    /// Memory bounds and undefined behaviour of C++.
    Address,
    /// Data races.
    Thread,
}

impl Sanitizer {
    pub(crate) fn parse(name: &str) -> Result<Self> {
        let known = [Self::None, Self::Address, Self::Thread];
        let found = known.into_iter().find(|sanitizer| sanitizer.name() == name);
        found.with_context(|| format!("unknown sanitizer {name:?}, known: none, address, thread"))
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Address => "address",
            Self::Thread => "thread",
        }
    }

    /// Returns the compiler flags of kernels.
    fn kernel_flags(self) -> &'static [&'static str] {
        match self {
            Self::None => &["-O2"],
            Self::Address => ADDRESS,
            Self::Thread => &["-O1", "-g1", "-fsanitize=thread"],
        }
    }

    /// Returns the compiler flags of the emulator itself, whose bookkeeping `ThreadSanitizer` must
    /// not see. Its few files are optimised: half of the time of the tests is theirs.
    fn emulator_flags(self) -> Vec<&'static str> {
        match self {
            Self::None => self.kernel_flags().to_vec(),
            Self::Address => [ADDRESS, &["-O2"]].concat(),
            Self::Thread => vec!["-O2", "-g1", "-DKV_EMU_TSAN"],
        }
    }

    fn link_flags(self) -> &'static [&'static str] {
        match self {
            Self::None => &[],
            Self::Address => &["-fsanitize=address,undefined"],
            Self::Thread => &["-fsanitize=thread"],
        }
    }
}

/// `-g1` is enough for lines in reports, and halves the size. The checks that are left out overlap
/// with `AddressSanitizer`.
const ADDRESS: &[&str] = &[
    "-O1",
    "-g1",
    "-fsanitize=address,undefined",
    "-fno-sanitize=null,object-size,vptr",
    "-fno-sanitize-recover=all",
    "-fno-omit-frame-pointer",
];

/// Variable with the path of the library, for kv-cuda.
pub(crate) const SETTING: &str = "KV_CUDA_EMULATOR";

/// Flags of every file. Without contraction, so that sums equal the host's bit for bit.
const COMMON: &[&str] = &[
    "-std=c++17",
    "-DKV_EMU",
    "-fPIC",
    "-fvisibility=hidden",
    // The running thread is read in every kernel; by default a shared library calls for it.
    "-ftls-model=initial-exec",
    "-ffp-contract=off",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-Wno-unknown-pragmas",
];

/// Options of a build.
#[derive(Debug, Default)]
pub(crate) struct Options {
    pub(crate) sanitizer: Option<Sanitizer>,
    /// Tests the emulator itself instead.
    pub(crate) self_test: bool,
    /// Runs the kernels' own tests instead: with this sanitizer, or without one as in CI.
    pub(crate) tests: bool,
}

/// Builds the library and prints its path.
pub(crate) fn run(options: &Options) -> Result<()> {
    if options.self_test {
        return self_test::run();
    }
    if options.tests {
        return options.sanitizer.map_or_else(kernel_tests::run, kernel_tests::run_one);
    }
    let library = library(options.sanitizer.unwrap_or_default())?;
    println!("{}", library.display());
    Ok(())
}

/// One file to compile.
#[derive(Debug, Clone)]
pub(crate) struct Unit {
    /// Path from the repository's root.
    source: PathBuf,
    object: PathBuf,
    flags: Vec<OsString>,
}

/// Builds the library; returns its path.
pub(crate) fn library(sanitizer: Sanitizer) -> Result<PathBuf> {
    let folder = Workspace::load()?.target_dir.join("emulator");
    let name = match sanitizer {
        Sanitizer::None => "libkv_emulator.so".to_owned(),
        watched => format!("libkv_emulator_{}.so", watched.name()),
    };
    let library = folder.join(name);
    let objects = folder.join(sanitizer.name());
    let mut units = units(&objects, &kernels()?, sanitizer.kernel_flags());
    units.extend(emulator_units(&objects, sanitizer)?);
    // The stacks of its engines are kept for later launches, so the library stays loaded when the
    // last device is closed: one that is loaded again would allocate them again.
    build(&units, &library, sanitizer, &["-shared", "-Wl,-z,nodelete"])?;
    Ok(library)
}

/// Returns the sanitizer's own library, for programs that are not compiled with it.
pub(crate) fn runtime(sanitizer: Sanitizer) -> Result<Option<PathBuf>> {
    let name = match sanitizer {
        Sanitizer::None => return Ok(None),
        Sanitizer::Address => "libasan.so",
        Sanitizer::Thread => "libtsan.so",
    };
    let printed = shell::output(compiler().arg(format!("-print-file-name={name}")));
    let path = printed.and_then(|path| fs::canonicalize(path.trim()).ok());
    path.map(Some).with_context(|| format!("the C++ compiler has no {name}"))
}

/// Returns the kernels' sources.
fn kernels() -> Result<Vec<PathBuf>> {
    sources(Path::new(KERNELS), "cu")
}

/// Returns the emulator's own files.
pub(crate) fn emulator_units(objects: &Path, sanitizer: Sanitizer) -> Result<Vec<Unit>> {
    let sources = sources(&Path::new(KERNELS).join("emulator"), "cpp")?;
    Ok(units(objects, &sources, &sanitizer.emulator_flags()))
}

/// Returns the files of a folder with this extension, from the repository's root.
pub(crate) fn sources(folder: &Path, extension: &str) -> Result<Vec<PathBuf>> {
    let path = shell::root().join(folder);
    let entries = fs::read_dir(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let names = entries.map(|entry| Ok(folder.join(entry?.file_name())));
    let mut names = names.collect::<Result<Vec<_>>>()?;
    names.retain(|name| name.extension().is_some_and(|found| found == extension));
    names.sort();
    Ok(names)
}

/// Returns flags for fused multiply-add, if this machine has it: a call of the C library is slower.
fn fused() -> &'static [&'static str] {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("fma") {
        return &["-mfma"];
    }
    &[]
}

pub(crate) fn units(objects: &Path, sources: &[PathBuf], flags: &[&str]) -> Vec<Unit> {
    let unit = |source: &PathBuf| {
        let name = source.file_name().unwrap_or_default();
        let mut object = objects.join(name).into_os_string();
        object.push(".o");
        let flags = COMMON.iter().chain(fused()).chain(flags).map(OsString::from).collect();
        Unit { source: source.clone(), object: object.into(), flags }
    };
    sources.iter().map(unit).collect()
}

/// Compiles changed files, and links if there are any.
pub(crate) fn build(
    units: &[Unit],
    output: &Path,
    sanitizer: Sanitizer,
    link_flags: &[&str],
) -> Result<()> {
    let stale: VecDeque<_> = units.iter().filter(|unit| !is_fresh(unit)).collect();
    let linked = modified(output);
    let newest = units.iter().filter_map(|unit| modified(&unit.object)).max();
    if stale.is_empty() && linked.is_some() && linked >= newest && lists(output, units) {
        return Ok(());
    }
    probe()?;
    compile(stale)?;
    let mut command = compiler();
    command.args(units.iter().map(|unit| &unit.object));
    command.args(link_flags).args(sanitizer.link_flags()).args(["-pthread", "-o"]).arg(output);
    shell::run(&mut command)?;
    fs::write(list_of(output), list(units)).context("cannot note what was linked")
}

/// Compiles on all threads of the machine.
fn compile(stale: VecDeque<&Unit>) -> Result<()> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(stale.len());
    let queue = Mutex::new(stale);
    let next = || queue.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
    let work = || {
        while let Some(unit) = next() {
            compile_one(unit)?;
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        let mut outcomes = workers.into_iter().map(|worker| {
            worker.join().unwrap_or_else(|_| bail!("a thread that compiles panicked"))
        });
        outcomes.try_for_each(|outcome| outcome)
    })
}

fn compile_one(unit: &Unit) -> Result<()> {
    if let Some(folder) = unit.object.parent() {
        fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    }
    let mut command = compiler();
    command.args(&unit.flags).args(["-MMD", "-MF"]).arg(depends_of(unit));
    command.args(["-x", "c++", "-c"]).arg(&unit.source).arg("-o").arg(&unit.object);
    // An object without its flags file is compiled again, in case this is interrupted.
    let _ = fs::remove_file(flags_of(unit));
    shell::run(&mut command)?;
    fs::write(flags_of(unit), text_of(&unit.flags)).context("cannot note the flags")
}

/// Returns whether the object was made with these flags from the present sources and headers.
fn is_fresh(unit: &Unit) -> bool {
    let flags = fs::read_to_string(flags_of(unit)).ok();
    let (Some(made), Some(depends)) =
        (modified(&unit.object), fs::read_to_string(depends_of(unit)).ok())
    else {
        return false;
    };
    let root = shell::root();
    let is_older = |file: &str| modified(&root.join(file)).is_some_and(|changed| changed < made);
    flags.is_some_and(|flags| flags == text_of(&unit.flags)) && depends_on(&depends).all(is_older)
}

/// Returns the files of a compiler's rule for `make`: `object: source header \ header ...`.
fn depends_on(rule: &str) -> impl Iterator<Item = &str> {
    let files = rule.split_once(": ").map_or("", |(_, files)| files);
    files.split_whitespace().filter(|word| *word != "\\")
}

fn lists(output: &Path, units: &[Unit]) -> bool {
    fs::read_to_string(list_of(output)).is_ok_and(|text| text == list(units))
}

fn list(units: &[Unit]) -> String {
    let objects = units.iter().map(|unit| unit.object.to_string_lossy().into_owned());
    objects.collect::<Vec<_>>().join("\n")
}

fn list_of(output: &Path) -> PathBuf {
    output.with_extension("list")
}

fn flags_of(unit: &Unit) -> PathBuf {
    unit.object.with_extension("flags")
}

fn depends_of(unit: &Unit) -> PathBuf {
    unit.object.with_extension("d")
}

fn text_of(flags: &[OsString]) -> String {
    flags.iter().map(|flag| flag.to_string_lossy()).collect::<Vec<_>>().join(" ")
}

fn modified(path: &Path) -> Option<SystemTime> {
    fs::metadata(path).ok()?.modified().ok()
}

fn compiler() -> Command {
    shell::program(env::var_os("CXX").unwrap_or_else(|| "g++".into()))
}

/// Fails without a C++ compiler.
fn probe() -> Result<()> {
    if shell::output(compiler().arg("--version")).is_some() {
        return Ok(());
    }
    let name = compiler().get_program().to_string_lossy().into_owned();
    bail!("no C++ compiler: `{name}` does not start; install g++, or name one in CXX");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rule_for_make_lists_what_was_read() {
        let rule = "a/b.cu.o: kernels/b.cu \\\n kernels/dev.h \\\n kernels/emulator/emulator.h\n";
        let files: Vec<_> = depends_on(rule).collect();
        assert_eq!(files, ["kernels/b.cu", "kernels/dev.h", "kernels/emulator/emulator.h"]);
        assert_eq!(depends_on("").count(), 0);
    }

    #[test]
    fn an_object_is_fresh_until_its_flags_or_sources_change() {
        let folder = env::temp_dir().join(format!("kv-xtask-fresh-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let source = folder.join("x.cu");
        fs::write(&source, "").unwrap();
        let unit = units(&folder, std::slice::from_ref(&source), &["-O2"]).remove(0);
        assert!(!is_fresh(&unit));
        let later = SystemTime::now().checked_add(std::time::Duration::from_secs(5)).unwrap();
        fs::write(&unit.object, "").unwrap();
        let object = fs::File::options().write(true).open(&unit.object).unwrap();
        object.set_modified(later).unwrap();
        fs::write(depends_of(&unit), format!("x.o: {}", source.display())).unwrap();
        fs::write(flags_of(&unit), text_of(&unit.flags)).unwrap();
        assert!(is_fresh(&unit));
        let other = units(&folder, std::slice::from_ref(&source), &["-O1"]).remove(0);
        assert!(!is_fresh(&other));
        fs::remove_file(&source).unwrap();
        assert!(!is_fresh(&unit));
        fs::remove_dir_all(&folder).unwrap();
    }
}
