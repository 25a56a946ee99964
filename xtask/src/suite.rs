//! `cargo xtask test`: everything a change must pass, cheapest first, each stage with its time.
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::conformance::Options;
use crate::emulator::Sanitizer;
use crate::workspace::Workspace;
use crate::{arm, conformance, emulator, examples, kernels, readme, setup, shell, tidy, webgpu};

/// The crates with the heavy dependencies: built once, in release, for their tests and for README
/// alike. All other crates are always chosen together, because cargo builds a dependency again for
/// every choice of crates that switches other features of it on.
pub(crate) const HEAVY: [&str; 2] = ["kv-runner", "kv-cli"];

/// Leaves them out of a choice of crates.
pub(crate) const LIGHT: [&str; 5] =
    ["--workspace", "--exclude", "kv-runner", "--exclude", "kv-cli"];

/// Switched on in every build of the light crates, for the same reason: the CUDA backend runs on
/// the emulator too, `kv` opens every backend there is, and the CPU computes on rayon too.
pub(crate) const FEATURES: [&str; 2] = ["--features", "kv-cuda/emulated,kv/wgpu,kv/cuda,kv/rayon"];

/// The emulator's own tests, with each sanitizer.
const SELF_TEST: emulator::Options =
    emulator::Options { sanitizer: None, self_test: true, tests: false };

/// How a stage ended.
enum Outcome {
    Passed,
    Skipped(String),
}

type Stage = (&'static str, fn(&Workspace) -> Result<Outcome>);

const STAGES: &[Stage] = &[
    ("tools", tools),
    ("format", format),
    ("tidy", |_| tidy::run().map(passed)),
    ("clippy", clippy),
    ("licences", licences),
    ("spelling", spelling),
    ("CPU kernels for Arm, on an emulator", other_cpu),
    ("CUDA emulator", |_| emulator::run(&SELF_TEST).map(passed)),
    ("CUDA kernels", compile_kernels),
    ("unit and API tests, benches once", unit_tests),
    ("doc tests", doc_tests),
    ("examples of kv", |workspace| examples::run(workspace).map(passed)),
    ("conformance", conform),
    ("conformance of all CPU kernels", conform_kernels),
    ("conformance of shaders", |_| webgpu::run().map(passed)),
    ("conformance of CUDA kernels on the emulator", conform_emulated),
    ("CUDA kernels under sanitizers", |_| emulator::test_kernels().map(passed)),
    ("kv-runner and kv-cli in release", heavy_tests),
    ("rustdoc", rustdoc),
    ("features", features),
    ("README commands", |_| readme::run().map(passed)),
];

/// Runs every stage; stops at the first that fails.
pub(crate) fn run() -> Result<()> {
    let workspace = Workspace::load()?;
    let start = Instant::now();
    let mut lines = Vec::new();
    for (name, stage) in STAGES {
        println!("\n== {name}");
        let stage_start = Instant::now();
        let outcome = stage(&workspace);
        let words = match &outcome {
            Ok(Outcome::Passed) => String::new(),
            Ok(Outcome::Skipped(why)) => format!(" (skipped: {why})"),
            Err(_) => " FAILED".to_owned(),
        };
        let line = format!("{}  {name}{words}", seconds(stage_start.elapsed()));
        println!("{line}");
        lines.push(line);
        if let Err(error) = outcome {
            println!("\n{}", lines.join("\n"));
            return Err(error).with_context(|| format!("stage \"{name}\""));
        }
    }
    println!("\n{}\n{}  all passed", lines.join("\n"), seconds(start.elapsed()));
    Ok(())
}

/// Prints how long a part of a stage took.
pub(crate) fn note(what: &str, took: Duration) {
    println!("{}  {what}", seconds(took));
}

fn seconds(took: Duration) -> String {
    format!("{:>7.1} s", took.as_secs_f64())
}

fn passed<T>(_: T) -> Outcome {
    Outcome::Passed
}

fn cargo(args: &[&str]) -> Result<Outcome> {
    shell::run(&mut shell::cargo(args)).map(passed)
}

fn tools(_: &Workspace) -> Result<Outcome> {
    setup::install_required()?;
    setup::try_rest();
    Ok(Outcome::Passed)
}

fn format(_: &Workspace) -> Result<Outcome> {
    cargo(&["fmt", "--all", "--check"])
}

/// The heavy crates too: what they depend on is only checked here, not built.
fn clippy(_: &Workspace) -> Result<Outcome> {
    let mut command = shell::cargo(["clippy", "--workspace", "--all-targets"]);
    shell::run(command.args(FEATURES).args(["--", "--deny", "warnings"])).map(passed)
}

fn licences(_: &Workspace) -> Result<Outcome> {
    match setup::lacks("cargo-deny") {
        Some(why) => Ok(Outcome::Skipped(why)),
        // Advisories need the network and change without us; they are checked by hand.
        None => cargo(&["deny", "check", "licenses", "bans", "sources"]),
    }
}

fn spelling(_: &Workspace) -> Result<Outcome> {
    match setup::lacks("typos") {
        Some(why) => Ok(Outcome::Skipped(why)),
        None => shell::run(&mut shell::program("typos")).map(passed),
    }
}

/// Where no emulator is to be had they are only checked.
fn other_cpu(_: &Workspace) -> Result<Outcome> {
    let Some(why) = arm::lacks() else {
        return arm::run(&[]).map(passed);
    };
    if setup::lacks(arm::TARGET).is_none() {
        cargo(&["check", "--package", "kv-cpu", "--target", arm::TARGET])?;
    }
    Ok(Outcome::Skipped(why))
}

/// All tests but the heavy crates', the conformance runners, which have a stage of their own, and
/// doc tests, which cargo does not run beside named targets.
fn unit_tests(workspace: &Workspace) -> Result<Outcome> {
    let mut args: Vec<&str> = vec!["test"];
    args.extend(LIGHT);
    args.extend(FEATURES);
    args.extend(["--lib", "--bins", "--examples", "--benches"]);
    let light = workspace.packages.iter().filter(|package| !HEAVY.contains(&&*package.name));
    let names = light.flat_map(|package| package.targets_of("test")).map(|test| &*test.name);
    // Several crates name a test target alike; cargo takes a name for all of them.
    let names: BTreeSet<&str> = names.filter(|name| !conformance::is_runner(name)).collect();
    for name in names {
        args.extend(["--test", name]);
    }
    let library = emulator::library(Sanitizer::None)?;
    let mut command = shell::cargo(args);
    conformance::quiet_drivers(&mut command, workspace)?;
    shell::run(command.env(emulator::SETTING, library)).map(passed)
}

/// Archives in the tree were compiled without a spill, and a unit test of kv-cuda says whether they
/// are of the sources as they are. Without archives the kernels are compiled here; a machine that
/// cannot get the compiler has still tested them on the emulator.
fn compile_kernels(workspace: &Workspace) -> Result<Outcome> {
    if kernels::has_archives() {
        return Ok(Outcome::Skipped("archives are there; a unit test compares them".to_owned()));
    }
    match kernels::lacks(workspace) {
        Some(why) => Ok(Outcome::Skipped(why)),
        None => kernels::run(&[]).map(passed),
    }
}

fn doc_tests(_: &Workspace) -> Result<Outcome> {
    let mut command = shell::cargo(["test", "--doc"]);
    shell::run(command.args(LIGHT).args(FEATURES)).map(passed)
}

fn conform(_: &Workspace) -> Result<Outcome> {
    clean("cpu", &conformance::run_variation("cpu", "with its best kernels", &Options::default())?)
}

/// The stage before has used the best kernels of this machine, and has erased them too.
fn conform_kernels(_: &Workspace) -> Result<Outcome> {
    #[cfg(target_arch = "x86_64")]
    let below_best: &[&str] = if !is_x86_feature_detected!("avx512f") {
        &[]
    } else if has_amx() {
        &["avx2", "avx512", "avx512+bf16+vbmi"]
    } else if is_x86_feature_detected!("avx512bf16") || is_x86_feature_detected!("avx512vbmi") {
        &["avx2", "avx512"]
    } else {
        &["avx2"]
    };
    #[cfg(not(target_arch = "x86_64"))]
    let below_best: &[&str] = &[];
    for isa in std::iter::once(&"scalar").chain(below_best) {
        let env = vec![("KV_CPU_ISA", (*isa).into())];
        let options = Options { args: vec!["cpu::".into()], env, ..Options::default() };
        let what = format!("with {isa} kernels");
        clean(isa, &conformance::run_variation("cpu", &what, &options)?)?;
    }
    Ok(Outcome::Passed)
}

/// Leaf 7 of CPUID: bit 22 of EDX (AMX-BF16).
#[cfg(target_arch = "x86_64")]
fn has_amx() -> bool {
    use std::arch::x86_64::{__cpuid_count, __get_cpuid_max};
    let (leaves, _) = __get_cpuid_max(0);
    leaves >= 7 && __cpuid_count(7, 0).edx & 1 << 22 != 0
}

fn clean(what: &str, total: &conformance::Counts) -> Result<Outcome> {
    if !total.is_clean() {
        bail!("{what}: {total}");
    }
    Ok(Outcome::Passed)
}

/// Threads of the emulator are slow, so the suite runs once here and not erased as well; what
/// erasure does is the same on every backend.
fn conform_emulated(_: &Workspace) -> Result<Outcome> {
    let options = Options {
        backends: vec![conformance::EMULATED.to_owned()],
        args: vec![format!("{}::", conformance::EMULATED).into()],
        ..Options::default()
    };
    clean(conformance::EMULATED, &conformance::run(&options)?)
}

fn heavy_tests(workspace: &Workspace) -> Result<Outcome> {
    let mut command = shell::cargo(["test", "--release"]);
    command.args(HEAVY.iter().flat_map(|name| ["--package", name]));
    conformance::quiet_drivers(&mut command, workspace)?;
    shell::run(&mut command).map(passed)
}

fn rustdoc(_: &Workspace) -> Result<Outcome> {
    // Programs are left out: `kv` the program and `kv` the library would share a page. The choice
    // of crates and features is clippy's, so that what that checked is not checked again.
    let mut command = shell::cargo(["doc", "--workspace", "--no-deps", "--lib"]);
    shell::run(command.args(FEATURES).env("RUSTDOCFLAGS", "--deny warnings")).map(passed)
}

/// Features only add: what users import must build with none of them.
fn features(workspace: &Workspace) -> Result<Outcome> {
    match workspace.package("kv") {
        Some(_) => cargo(&["check", "--package", "kv", "--no-default-features"]),
        None => Ok(Outcome::Skipped("kv: not in this workspace yet".to_owned())),
    }
}
