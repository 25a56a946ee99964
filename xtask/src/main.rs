//! The project's own tool: every task that is more than one cargo command.
//!
//! Owns the list and order of the checks, and does not know how they work inside. The tool depends
//! on no crate of the workspace, so it builds and reports errors even if the crates do not build.
#![forbid(unsafe_code)]
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a program for a terminal")]

mod arm;
mod bench;
mod candle;
mod conformance;
mod emulator;
mod example_llama;
mod examples;
mod fleet;
mod gate;
mod gpu;
mod kernels;
mod lanes;
mod programs;
mod public_api;
mod python;
mod readme;
mod setup;
mod shell;
mod soak;
mod stamps;
mod suite;
mod tidy;
mod webgpu;
mod workspace;

use std::ffi::OsString;
use std::process::ExitCode;

use anyhow::{Result, bail};
use lexopt::{Arg, Parser, ValueExt};

const HELP: &str = "\
Usage: cargo xtask COMMAND

  check                format, clippy, tidy, unit tests of core, quant and cpu, and the CPU's suite
                       on its best instruction set: a few minutes, while you work
  test                 everything a change must pass, each stage with its time; some are skipped
                       while their inputs are those they have passed with
      --all            runs these too: every night
      --record         notes in xtask/passed.txt what has passed, for other checkouts
  stage NAME           one stage of `test`, by its name in the table that this prints
  conformance          the shared suite on every backend of this workspace
      --backend NAME   only this one (repeatable); fails if it is absent or cannot be opened
                       `emulated` is the CUDA backend on the CPU, and needs g++
      --sanitize NAME  with --backend emulated: as below
      --vectors DIR    the vector files below DIR instead of the suite (repeatable)
      [-- ARG...]      passed to the runner, as to libtest: a part of a case's name, --list, --exact
  emulator             builds the library that runs CUDA kernels on the CPU: target/emulator
      --sanitize NAME  with sanitizer `address` (and undefined behaviour), `thread`, or `none`
      --self-test      runs the emulator's own tests instead, plain and with each sanitizer
      --tests          runs the kernels' own tests under sanitizers instead, as CI does; with
                       --sanitize NAME only the C++ programs, with that sanitizer
  soak                 tests that `test` shortens, at their full length: load on `kv serve` and its
                       page in a browser, in release; the suite on the CUDA emulator
      [-- ARG...]      only tests with this in their names
  arm                  the CPU backend on an emulated Arm CPU: the kernels' tests, then the suite
      [-- ARG...]      only tests with this in their names
  tidy                 rules about files, crates and documents that no compiler checks
  setup                installs what the suites need on this machine, if possible
  kernels              compiles every CUDA kernel for every architecture, and prints its registers
      --only UNIT      only this file of kv-cuda/kernels
      --arch ARCH      only for this architecture, such as sm_90a
      --check          checks instead that the compiled kernels in the tree are current
      --write          also writes them; those that are current are not compiled again
  gate                 reads the main loops of decode and prefill kernels in the compiled kernels of
                       the tree, and fails above limits: sizes, instructions, modelled times
      --update         also writes the figures: docs/gpu/model.md, and the model of predictions
  public-api           compares the public API of kv with the list in kv/public-api.txt
      --update         writes the list instead
  python               builds the wheel of kv-python in target/wheels and tests it in a virtual
                       environment, target/python; the tests with torch where that has it
      --update         writes the stubs of the compiled module instead
  fleet                installs vllm-router and Dynamo's indexer below target/fleet, 400 MB, and
                       proves with them that they read the events of `kv serve`
  gpu                  checks and measures the CUDA backend on a card: docs/gpu/CARD.md and .json
      --device N       the card with this number; otherwise the first
      --vectors DIR    these vector files too (repeatable)
      --deadline S     ends after S seconds, with the most valuable stages first
      --out DIR        writes the report there after every stage, with logs and records
      --package PLACE  makes an archive instead, for a machine with a card but without cargo or
                       network: a file *.sh, or a folder for one; `sh FILE` runs it there
      --list           lists the contents of an archive instead
      --kit DIR        runs the contents of an archive, as run.sh does
  bench [ARG...]       the benches; arguments go to criterion, such as a part of a name
  bench peers [ARG...] block management and attention beside other libraries
      blocks|attention only this; after attention, parts of case names (decode bf16 c4096)
      models           whole decode steps beside candle's own cache; parts of case names (wide b16)
      --full           every case, not only a cross through the grid
      --json           one JSON object instead of text
      --install        first installs PyTorch and llama-cpp-python below target/peers: 6 GB, and
                       10 minutes to compile; without them, only crates are compared
  help                 this text
";

enum Command {
    Check,
    Test(lanes::Options),
    Stage(String),
    Conformance(conformance::Options),
    Emulator(emulator::Options),
    Arm(Vec<OsString>),
    Soak(Vec<OsString>),
    Fleet,
    Tidy,
    Setup,
    Bench(Vec<OsString>),
    Kernels(Vec<OsString>),
    Gate { update: bool },
    PublicApi { update: bool },
    Python { update: bool },
    Gpu(gpu::Options),
    Help,
}

fn main() -> ExitCode {
    if let Some(documented) = public_api::stand_in() {
        return documented.unwrap_or_else(|error| {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        });
    }
    let command = match parse(Parser::from_env()) {
        Ok(command) => command,
        Err(error) => {
            eprintln!("error: {error:#}\n\n{HELP}");
            return ExitCode::from(2);
        }
    };
    match run(command) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(command: Command) -> Result<ExitCode> {
    match command {
        Command::Check => suite::check()?,
        Command::Test(options) => suite::run(options)?,
        Command::Stage(name) => suite::run_one(&name)?,
        Command::Conformance(options) => {
            // The last line is the total, so nothing is printed after a failure.
            let total = conformance::run(&options)?;
            return Ok(if total.is_clean() { ExitCode::SUCCESS } else { ExitCode::FAILURE });
        }
        Command::Emulator(options) => emulator::run(&options)?,
        Command::Arm(names) => arm::run(&names)?,
        Command::Soak(names) => soak::run(&names)?,
        Command::Fleet => fleet::run()?,
        Command::Tidy => tidy::run()?,
        Command::Setup => setup::run()?,
        Command::Bench(args) => bench::run(&args)?,
        Command::Kernels(args) => kernels::run(&args)?,
        Command::Gate { update } => gate::run(update)?,
        Command::PublicApi { update } => public_api::run(update)?,
        Command::Python { update: true } => python::update_stubs()?,
        Command::Python { update: false } => python::run()?,
        Command::Gpu(options) => {
            let is_clean = gpu::run(&options)?;
            return Ok(if is_clean { ExitCode::SUCCESS } else { ExitCode::FAILURE });
        }
        Command::Help => print!("{HELP}"),
    }
    Ok(ExitCode::SUCCESS)
}

fn parse(mut parser: Parser) -> Result<Command> {
    let Some(first) = parser.next()? else {
        bail!("no command given");
    };
    let name = match first {
        Arg::Value(name) => name.string()?,
        Arg::Short('h') | Arg::Long("help") => return Ok(Command::Help),
        other => return Err(other.unexpected().into()),
    };
    let command = match name.as_str() {
        "conformance" => return parse_conformance(parser),
        "test" => return parse_test(parser),
        "emulator" => return parse_emulator(parser),
        "bench" => return Ok(Command::Bench(parser.raw_args()?.collect())),
        "arm" => return parse_names(parser, Command::Arm),
        "soak" => return parse_names(parser, Command::Soak),
        "kernels" => return parse_kernels(parser),
        "gpu" => return parse_gpu(parser),
        "gate" => return parse_update(parser, |update| Command::Gate { update }),
        "public-api" => return parse_update(parser, |update| Command::PublicApi { update }),
        "python" => return parse_update(parser, |update| Command::Python { update }),
        "check" => Command::Check,
        "stage" => Command::Stage(parser.value()?.string()?),
        "fleet" => Command::Fleet,
        "tidy" => Command::Tidy,
        "setup" => Command::Setup,
        "help" => Command::Help,
        other => bail!("unknown command {other:?}"),
    };
    match (parser.next()?, command) {
        (None, command) => Ok(command),
        (Some(Arg::Short('h') | Arg::Long("help")), _) => Ok(Command::Help),
        (Some(other), _) => Err(other.unexpected().into()),
    }
}

fn parse_conformance(mut parser: Parser) -> Result<Command> {
    let mut options = conformance::Options::default();
    // Everything after `--` is for the runner; lexopt would only stop reading options there.
    let args: Vec<OsString> = parser.raw_args()?.collect();
    let ours = args.iter().position(|arg| arg == "--").unwrap_or(args.len());
    options.args.extend(args.iter().skip(ours).skip(1).cloned());
    let mut parser = Parser::from_args(args.into_iter().take(ours));
    while let Some(arg) = parser.next()? {
        match arg {
            Arg::Long("backend") => options.backends.push(parser.value()?.string()?),
            Arg::Long("sanitize") => {
                options.sanitizer = emulator::Sanitizer::parse(&parser.value()?.string()?)?;
            }
            Arg::Long("vectors") => {
                // The runner has another working directory.
                options.vectors.push(std::path::absolute(parser.value()?)?);
            }
            Arg::Short('h') | Arg::Long("help") => return Ok(Command::Help),
            Arg::Value(filter) => options.args.insert(0, filter),
            other => return Err(other.unexpected().into()),
        }
    }
    Ok(Command::Conformance(options))
}

fn parse_test(mut parser: Parser) -> Result<Command> {
    let mut options = lanes::Options::default();
    while let Some(arg) = parser.next()? {
        match arg {
            Arg::Long("all") => options.all = true,
            Arg::Long("record") => options.record = true,
            Arg::Short('h') | Arg::Long("help") => return Ok(Command::Help),
            other => return Err(other.unexpected().into()),
        }
    }
    Ok(Command::Test(options))
}

/// Takes `--update` of a command that compares or writes.
fn parse_update(mut parser: Parser, make: fn(bool) -> Command) -> Result<Command> {
    let mut update = false;
    while let Some(arg) = parser.next()? {
        match arg {
            Arg::Long("update") => update = true,
            Arg::Short('h') | Arg::Long("help") => return Ok(Command::Help),
            other => return Err(other.unexpected().into()),
        }
    }
    Ok(make(update))
}

/// Takes arguments of a test program after `--`.
fn parse_names(mut parser: Parser, make: fn(Vec<OsString>) -> Command) -> Result<Command> {
    let mut args = parser.raw_args()?;
    match args.next() {
        None => Ok(make(Vec::new())),
        Some(arg) if arg == "--" => Ok(make(args.collect())),
        Some(arg) if arg == "-h" || arg == "--help" => Ok(Command::Help),
        Some(arg) => bail!("unexpected argument {}: names of tests come after `--`", arg.display()),
    }
}

fn parse_emulator(mut parser: Parser) -> Result<Command> {
    let mut options = emulator::Options::default();
    while let Some(arg) = parser.next()? {
        match arg {
            Arg::Long("sanitize") => {
                let name = parser.value()?.string()?;
                options.sanitizer = Some(emulator::Sanitizer::parse(&name)?);
            }
            Arg::Long("self-test") => options.self_test = true,
            Arg::Long("tests") => options.tests = true,
            Arg::Short('h') | Arg::Long("help") => return Ok(Command::Help),
            other => return Err(other.unexpected().into()),
        }
    }
    Ok(Command::Emulator(options))
}

/// Checks the arguments here, so that a wrong one is found before anything is built.
fn parse_kernels(mut parser: Parser) -> Result<Command> {
    let mut args: Vec<OsString> = Vec::new();
    while let Some(arg) = parser.next()? {
        match arg {
            Arg::Long("only") => args.extend(["--only".into(), parser.value()?]),
            Arg::Long("arch") => args.extend(["--arch".into(), parser.value()?]),
            Arg::Long("check") => args.push("--check".into()),
            Arg::Long("write") => args.push("--write".into()),
            Arg::Short('h') | Arg::Long("help") => return Ok(Command::Help),
            other => return Err(other.unexpected().into()),
        }
    }
    Ok(Command::Kernels(args))
}

fn parse_gpu(mut parser: Parser) -> Result<Command> {
    let mut options = gpu::Options::default();
    while let Some(arg) = parser.next()? {
        match arg {
            Arg::Long("device") => options.device = parser.value()?.parse()?,
            Arg::Long("vectors") => {
                options.vectors.push(std::path::absolute(parser.value()?)?);
            }
            Arg::Long("package") => options.package = Some(parser.value()?.into()),
            Arg::Long("list") => options.list = true,
            Arg::Long("kit") => options.kit = Some(parser.value()?.into()),
            Arg::Long("deadline") => options.deadline = Some(parser.value()?.parse()?),
            Arg::Long("out") => options.out = Some(parser.value()?.into()),
            Arg::Short('h') | Arg::Long("help") => return Ok(Command::Help),
            other => return Err(other.unexpected().into()),
        }
    }
    let packs = options.package.is_some() || options.list || !options.vectors.is_empty();
    if options.kit.is_some() && packs {
        bail!("--kit runs what is there: it packs nothing and takes no --vectors");
    }
    if options.package.is_some() && (options.deadline.is_some() || options.out.is_some()) {
        bail!("--package runs nothing: --deadline and --out are for the machine with the card");
    }
    Ok(Command::Gpu(options))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(line: &str) -> Result<Command> {
        parse(Parser::from_args(line.split_whitespace()))
    }

    #[test]
    fn conformance_takes_backends_vectors_and_arguments_of_the_runner() {
        let Ok(Command::Conformance(options)) =
            parsed("conformance --backend cpu --vectors some/dir -- attend --exact")
        else {
            panic!("not parsed as conformance");
        };
        assert_eq!(options.backends, ["cpu"]);
        assert!(options.vectors[0].is_absolute());
        assert_eq!(options.args, ["attend", "--exact"]);
    }

    #[test]
    fn test_takes_its_options() {
        let Ok(Command::Test(options)) = parsed("test --all --record") else {
            panic!("not parsed as test");
        };
        assert!(options.all && options.record);
        let Ok(Command::Test(options)) = parsed("test") else {
            panic!("not parsed as test");
        };
        assert_eq!(options, lanes::Options::default());
    }

    #[test]
    fn bench_passes_everything_on() {
        let Ok(Command::Bench(args)) = parsed("bench attend --test") else {
            panic!("not parsed as bench");
        };
        assert_eq!(args, ["attend", "--test"]);
    }

    #[test]
    fn kernels_passes_on_what_it_knows() {
        let Ok(Command::Kernels(args)) = parsed("kernels --only attend.cu --arch sm_90a") else {
            panic!("not parsed as kernels");
        };
        assert_eq!(args, ["--only", "attend.cu", "--arch", "sm_90a"]);
        assert!(parsed("kernels --fast").is_err() && parsed("kernels --only").is_err());
    }

    #[test]
    fn arm_and_soak_take_names_of_tests() {
        let Ok(Command::Arm(names)) = parsed("arm -- attend/ --exact") else {
            panic!("not parsed as arm");
        };
        assert_eq!(names, ["attend/", "--exact"]);
        let Ok(Command::Soak(names)) = parsed("soak -- load/") else {
            panic!("not parsed as soak");
        };
        assert_eq!(names, ["load/"]);
        assert!(parsed("arm attend/").is_err() && parsed("soak load/").is_err());
    }

    #[test]
    fn emulator_takes_a_sanitizer() {
        let Ok(Command::Emulator(options)) = parsed("emulator --sanitize address") else {
            panic!("not parsed as emulator");
        };
        assert_eq!(options.sanitizer, Some(emulator::Sanitizer::Address));
        assert!(!options.self_test && !options.tests);
        let Ok(Command::Emulator(options)) = parsed("emulator --tests") else {
            panic!("not parsed as emulator");
        };
        assert!(options.tests && options.sanitizer.is_none());
        assert!(parsed("emulator --sanitize memory").is_err());
        assert!(parsed("conformance --backend emulated --sanitize thread").is_ok());
    }

    #[test]
    fn gpu_runs_packs_or_runs_what_was_packed() {
        let Ok(Command::Gpu(options)) = parsed("gpu --package out --vectors some/dir") else {
            panic!("not parsed as gpu");
        };
        assert_eq!(options.package.as_deref(), Some(std::path::Path::new("out")));
        assert!(options.vectors[0].is_absolute() && options.kit.is_none());
        let Ok(Command::Gpu(options)) = parsed("gpu --kit . --device 1 --deadline 560 --out x")
        else {
            panic!("not parsed as gpu");
        };
        assert_eq!((options.device, options.deadline), (1, Some(560)));
        assert_eq!(options.out.as_deref(), Some(std::path::Path::new("x")));
        for line in [
            "gpu --kit . --package x",
            "gpu --package x --deadline 9",
            "gpu --deadline soon",
            "gpu --device one",
            "gpu now",
            "gpu --package",
        ] {
            assert!(parsed(line).is_err(), "{line:?}");
        }
    }

    #[test]
    fn wrong_usage_is_refused() {
        for line in [
            "",
            "tests",
            "test now",
            "stage",
            "tidy --fix",
            "test --fix",
            "conformance --backends x",
        ] {
            assert!(parsed(line).is_err(), "{line:?}");
        }
    }
}
