//! `cargo xtask test`: every check of a change, as two lanes of stages, each with its time; `cargo
//! xtask check`: the checks before a change is shown to others, in two minutes.
use anyhow::{Result, bail};

use crate::conformance::Options;
use crate::emulator::Sanitizer;
use crate::lanes::{Lane, Outcome, Stage};
use crate::programs::{self, Program};
use crate::stamps::Inputs;
use crate::workspace::{FEATURES, Workspace};
use crate::{
    arm, candle, conformance, emulator, example_llama, examples, gate, kernels, lanes, public_api,
    python, readme, setup, shell, tidy, webgpu,
};

/// Crates whose tests run models: a stage of their own.
const MODELS: [&str; 2] = ["kv-runner", "kv-cli"];

/// The crate whose tests mostly wait for scripts that hang: a stage that runs beside another.
const TOOL: &str = "xtask";

/// The emulator's own tests, with each sanitizer.
const SELF_TEST: emulator::Options =
    emulator::Options { sanitizer: None, self_test: true, tests: false };

/// The kernels, the emulator, the host code that launches the kernels, and the tests of all three.
const SANITIZED: Inputs = Inputs::Files(&[
    "kv-cuda/kernels",
    "kv-cuda/src",
    "xtask/src/emulator",
    "xtask/src/emulator.rs",
]);

/// The crates with code for one instruction set, and the codecs that are inlined there.
const OF_ARM: Inputs =
    Inputs::Files(&["kv-cpu", "kv-cpu-kernels", "kv-format/src", "xtask/src/arm.rs"]);

/// The crates of a runner of the suite on the CPU.
const OF_CPU: Inputs = Inputs::Crates(&["kv-cpu"]);

/// The stages and their dependencies: a stage starts when the previous one of its lane and the
/// named ones have passed. Stages that compile keep both cores of a small machine busy most of the
/// time, stages that run fill the rest, and no stage waits for a lock of another one.
const STAGES: &[Stage] = &[
    compile("tools", &[], tools),
    compile("format", &[], format),
    compile("tidy", &[], |_| tidy::run().map(passed)),
    compile("licences", &[], licences),
    compile("spelling", &[], spelling),
    compile("build of the CUDA emulator", &[], build_emulator),
    compile("build of tests", &[], build_tests),
    // After the build, beside the tests: `check` has it first.
    compile("clippy", &[], clippy),
    compile("build of CUDA kernels with sanitizers", &[], build_sanitized).unless_same(SANITIZED),
    compile("build of CPU kernels for Arm", &["optional tools"], build_arm).unless_same(OF_ARM),
    // In this lane, because it links the module; its tests take seconds.
    compile("Python module", &["optional tools", "build of the CUDA emulator"], python_module)
        .unless_same(Inputs::Crates(&["kv-python"])),
    compile("doc tests", &[], doc_tests),
    compile("rustdoc", &[], rustdoc),
    compile("public API", &[], public_api::compare),
    compile("features", &[], features),
    // In this lane, so that nothing is compiled later because a package server is slow.
    run_stage("optional tools", &["tools"], |_| {
        setup::try_rest();
        Ok(Outcome::Passed)
    }),
    run_stage("CUDA kernels", &[], compile_kernels),
    run_stage("machine code", &["build of tests", "optional tools"], gate::stage)
        .unless_same(Inputs::Files(gate::INPUTS)),
    run_stage("unit and API tests, benches once", &["build of tests"], unit_tests),
    run_stage("conformance", &["build of tests"], conform).unless_same(OF_CPU),
    run_stage("conformance of all CPU kernels", &["build of tests"], conform_kernels)
        .unless_same(OF_CPU),
    run_stage("conformance of shaders", &["build of tests"], |_| webgpu::run())
        .unless_same(Inputs::Crates(&["kv-wgpu"])),
    run_stage("conformance of CUDA kernels on the emulator", &["build of tests"], conform_emulated)
        .unless_same(Inputs::Crates(&["kv-cuda"])),
    run_stage("kv-runner and kv-cli", &["build of tests"], model_tests),
    run_stage("xtask", &["build of tests"], tool_tests),
    run_stage("README commands", &["build of tests"], |_| readme::run().map(passed)),
    run_stage("CUDA emulator", &["build of CUDA kernels with sanitizers"], |_| {
        emulator::run(&SELF_TEST).map(passed)
    })
    .unless_same(SANITIZED),
    run_stage("CUDA kernels under sanitizers", &["build of CUDA kernels with sanitizers"], |_| {
        emulator::test_kernels().map(passed)
    })
    .unless_same(SANITIZED),
    run_stage("examples of kv", &["build of tests"], |workspace| {
        examples::run(workspace).map(passed)
    }),
    run_stage("examples of kv-candle", &["build of tests"], |_| example_llama::run().map(passed)),
    run_stage("CPU kernels on an emulated Arm CPU", &["build of CPU kernels for Arm"], other_cpu)
        .unless_same(OF_ARM),
];

/// The stages of `cargo xtask check`, run one after another.
const CHECKS: &[Stage] = &[
    compile("format", &[], format),
    compile("tidy", &[], |_| tidy::run().map(passed)),
    compile("clippy", &[], clippy),
    compile("unit tests of core, quant and cpu", &[], check_units),
    compile("conformance of the best CPU kernels", &[], check_conformance),
];

/// Crates whose tests `cargo xtask check` runs.
const CHECKED: [&str; 6] =
    ["kv-core", "kv-compat", "kv-format", "kv-quant", "kv-cpu-kernels", "kv-cpu"];

const fn compile(
    name: &'static str,
    after: &'static [&'static str],
    run: fn(&Workspace) -> Result<Outcome>,
) -> Stage {
    Stage { name, lane: Lane::Compile, after, run, inputs: Inputs::All }
}

const fn run_stage(
    name: &'static str,
    after: &'static [&'static str],
    run: fn(&Workspace) -> Result<Outcome>,
) -> Stage {
    Stage { name, lane: Lane::Run, after, run, inputs: Inputs::All }
}

/// Runs every stage; stops at the first failure.
pub(crate) fn run(options: lanes::Options) -> Result<()> {
    lanes::run(STAGES, options)
}

/// Runs one stage alone: `cargo xtask test` does so for each, in a separate process.
pub(crate) fn run_one(name: &str) -> Result<()> {
    lanes::run_one(STAGES, name)
}

/// Runs the stages of `cargo xtask check`.
pub(crate) fn check() -> Result<()> {
    lanes::run_in_order(CHECKS)
}

fn passed<T>(_: T) -> Outcome {
    Outcome::Passed
}

fn cargo(args: &[&str]) -> Result<Outcome> {
    shell::run(&mut shell::cargo(args)).map(passed)
}

fn tools(_: &Workspace) -> Result<Outcome> {
    setup::install_required().map(passed)
}

fn format(_: &Workspace) -> Result<Outcome> {
    cargo(&["fmt", "--all", "--check"])
}

/// Includes the heavy crates: their dependencies are only checked here, not built.
fn clippy(_: &Workspace) -> Result<Outcome> {
    let mut command = shell::cargo(["clippy", "--workspace", "--all-targets"]);
    shell::run(command.args(FEATURES).args(["--", "--deny", "warnings"])).map(passed)
}

fn licences(_: &Workspace) -> Result<Outcome> {
    match setup::lacks("cargo-deny") {
        Some(why) => Ok(Outcome::Skipped(why)),
        // Advisories need the network and change independently of the code; they are checked by
        // hand.
        None => cargo(&["deny", "check", "licenses", "bans", "sources"]),
    }
}

fn spelling(_: &Workspace) -> Result<Outcome> {
    match setup::lacks("typos") {
        Some(why) => Ok(Outcome::Skipped(why)),
        None => shell::run(&mut shell::program("typos")).map(passed),
    }
}

fn build_emulator(_: &Workspace) -> Result<Outcome> {
    emulator::library(Sanitizer::None).map(passed)
}

fn build_sanitized(_: &Workspace) -> Result<Outcome> {
    emulator::build_kernel_tests().map(passed)
}

/// Builds every test program that later stages run.
fn build_tests(workspace: &Workspace) -> Result<Outcome> {
    programs::build_all(&lanes::programs_file(workspace)).map(passed)
}

/// Builds the programs; without an emulator, only checks them.
fn build_arm(_: &Workspace) -> Result<Outcome> {
    let Some(why) = arm::lacks() else {
        return arm::build().map(passed);
    };
    if setup::lacks(arm::TARGET).is_none() {
        cargo(&["check", "--package", "kv-cpu", "--target", arm::TARGET])?;
    }
    Ok(Outcome::Skipped(why))
}

fn other_cpu(_: &Workspace) -> Result<Outcome> {
    match arm::lacks() {
        Some(why) => Ok(Outcome::Skipped(why)),
        None => arm::run(&[]).map(passed),
    }
}

/// Runs all tests except those of the crates that run models and the conformance runners, which
/// have separate stages.
fn unit_tests(workspace: &Workspace) -> Result<Outcome> {
    run_programs(workspace, |program| {
        !conformance::is_runner(&program.target)
            && !MODELS.contains(&&*program.package)
            && program.package != TOOL
    })
}

fn tool_tests(workspace: &Workspace) -> Result<Outcome> {
    run_programs(workspace, |program| program.package == TOOL)
}

fn model_tests(workspace: &Workspace) -> Result<Outcome> {
    run_programs(workspace, |program| MODELS.contains(&&*program.package))
}

fn run_programs(workspace: &Workspace, wanted: fn(&Program) -> bool) -> Result<Outcome> {
    let programs = programs::of_workspace::<&str>(&[], &[])?;
    let library = emulator::library(Sanitizer::None)?;
    for program in programs.iter().filter(|program| wanted(program)) {
        let mut command = program.command();
        conformance::quiet_drivers(&mut command, workspace)?;
        run_program(program, command.env(emulator::SETTING, &library))?;
    }
    Ok(Outcome::Passed)
}

fn run_program(program: &Program, command: &mut std::process::Command) -> Result<()> {
    println!("{}: {} {}", program.package, program.kind, program.target);
    shell::run(command)
}

fn checked_programs() -> Result<Vec<Program>> {
    let mut args: Vec<&str> = CHECKED.iter().flat_map(|name| ["--package", *name]).collect();
    args.extend(["--features", "kv-cpu/rayon", "--lib", "--tests"]);
    programs::build(&args, &[])
}

fn python_module(workspace: &Workspace) -> Result<Outcome> {
    if let Some(reason) = setup::FOR_PYTHON.into_iter().find_map(setup::lacks) {
        return Ok(Outcome::Skipped(reason));
    }
    python::test(workspace).map(passed)
}

fn check_units(_: &Workspace) -> Result<Outcome> {
    for program in checked_programs()? {
        if !conformance::is_runner(&program.target) {
            run_program(&program, &mut program.command())?;
        }
    }
    Ok(Outcome::Passed)
}

/// Runs the suite, without the cases that repeat a call on the backend's own type.
fn check_conformance(_: &Workspace) -> Result<Outcome> {
    let programs = checked_programs()?;
    let runner = programs.iter().find(|program| conformance::is_runner(&program.target));
    let Some(runner) = runner else { bail!("kv-cpu has no conformance runner") };
    run_program(runner, runner.command().args(["cpu::", "--quiet"]))?;
    Ok(Outcome::Passed)
}

/// Compiles the kernels if there are no archives: archives were compiled without a spill, and a
/// unit test of kv-cuda checks that they belong to the present sources. A machine without the
/// compiler has still tested the kernels on the emulator.
fn compile_kernels(workspace: &Workspace) -> Result<Outcome> {
    if kernels::has_archives() {
        return Ok(Outcome::Skipped("archives exist; a unit test compares them".to_owned()));
    }
    match kernels::lacks(workspace) {
        Some(why) => Ok(Outcome::Skipped(why)),
        None => kernels::run(&[]).map(passed),
    }
}

fn doc_tests(_: &Workspace) -> Result<Outcome> {
    let mut command = shell::cargo(["test", "--workspace", "--doc"]);
    shell::run(command.args(FEATURES)).map(passed)
}

/// Runs all cases with the best kernels of this machine.
fn conform(_: &Workspace) -> Result<Outcome> {
    let all = Options::default();
    clean("cpu", &conformance::run_variation("cpu", "with its best kernels", &all)?)
}

/// Runs the cases that depend on a kernel; the stage before has used the best kernels of this
/// machine for the whole suite.
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
        for part in conformance::OF_KERNELS {
            let env = vec![("KV_CPU_ISA", (*isa).into())];
            let options = Options { args: vec![part.into()], env, ..Options::default() };
            let what = format!("with {isa} kernels");
            clean(isa, &conformance::run_variation("cpu", &what, &options)?)?;
        }
    }
    Ok(Outcome::Passed)
}

/// Returns leaf 7 of CPUID: bit 22 of EDX (AMX-BF16).
#[cfg(target_arch = "x86_64")]
fn has_amx() -> bool {
    use std::arch::x86_64::{__cpuid_count, __get_cpuid_max};
    let (leaves, _) = __get_cpuid_max(0);
    leaves >= 7 && __cpuid_count(7, 0).edx & 1 << 22 != 0
}

/// Fails if a case failed, or if the names of cases no longer match any.
fn clean(what: &str, total: &conformance::Counts) -> Result<Outcome> {
    if !total.is_clean() || !total.any_passed() {
        bail!("{what}: {total}");
    }
    Ok(Outcome::Passed)
}

/// Runs the suite on the emulator, whose threads are slow: cases of many combinations are short.
fn conform_emulated(_: &Workspace) -> Result<Outcome> {
    let options = Options {
        backends: vec![conformance::EMULATED.to_owned()],
        env: vec![(conformance::SHORT.0, conformance::SHORT.1.into())],
        ..Options::default()
    };
    clean(conformance::EMULATED, &conformance::run(&options)?)
}

fn rustdoc(_: &Workspace) -> Result<Outcome> {
    public_api::document().map(passed)
}

/// Features only add: the library must build without any, and the program as README builds it.
/// kv-candle is built below the program for the CPU, and alone for cards.
///
/// Two workspaces of their own are left out, `fuzz` and the comparisons of `bench peers`: compiling
/// their dependencies takes minutes.
fn features(workspace: &Workspace) -> Result<Outcome> {
    cargo(&["check", "--package", "kv", "--no-default-features"])?;
    // Every other stage builds the program with its default features. The tool adds macros, which
    // run on this machine: no feature of what `kv` is made of changes.
    let program = ["check", "--package", "kv-cli", "--package", TOOL, "--no-default-features"];
    cargo(&[&program[..], &["--features", "xtask/macros"]].concat())?;
    candle::check_cuda(workspace)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A stage that needs a later one of its own lane, or an unknown one, never starts.
    #[test]
    fn every_stage_can_start() {
        lanes::check_order(STAGES);
        lanes::check_order(CHECKS);
    }
}
