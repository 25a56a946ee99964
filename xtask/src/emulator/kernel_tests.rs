//! `cargo xtask emulator --tests`: the kernels under sanitizers, and a check that every kernel was
//! run.
//!
//! C++ programs under `kv-cuda/kernels/tests`, each linked with all kernels, and small parts of the
//! conformance suite for kernels that no program runs. The whole suite would take several times
//! longer than without a sanitizer.
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result, bail};

use super::self_test::{passes, program};
use super::{KERNELS, Sanitizer, build, emulator_units, kernels, library, sources, units};
use crate::conformance;
use crate::shell::{self, note};
use crate::workspace::Workspace;

/// The number of cases of each program: a case's number is its seed, which also shuffles blocks and
/// threads.
struct Amount {
    sanitizer: Sanitizer,
    /// Cases by program; a program that is not named runs without arguments.
    cases: &'static [(&'static str, u32, u32)],
}

/// Bounds and undefined behaviour for all cases, races for some: `ThreadSanitizer` is slower.
const AMOUNTS: &[Amount] = &[
    Amount { sanitizer: Sanitizer::Address, cases: &[("decode_test", 132, 132)] },
    Amount {
        sanitizer: Sanitizer::Thread,
        cases: &[("decode_test", 132, 12), ("broken_test", 30, 20)],
    },
];

/// Parts of the suite that reach the kernels that no program runs.
const PARTS: &[&str] = &[
    "write/",
    "copy/fork",
    "gather/",
    "convert/",
    "attend/padding_rows",
    "quant/wiped_blocks",
    "quant/tail_rolled_back",
];

/// Variable with the path to which the emulator writes the number of launches per kernel.
const LAUNCHES: &str = "KV_EMU_LAUNCHES";

/// Builds the programs of [`run`].
pub(crate) fn build_all() -> Result<()> {
    for amount in AMOUNTS {
        for source in sources(&Path::new(KERNELS).join("tests"), "cpp")? {
            let start = Instant::now();
            link(&source, &name_of(&source), amount.sanitizer)?;
            let watch = amount.sanitizer.name();
            note(&format!("{} ({watch}): built", name_of(&source)), start.elapsed());
        }
    }
    library(Sanitizer::Address).map(drop)
}

/// Runs the programs as CI does; also fails if a kernel was never launched.
pub(crate) fn run() -> Result<()> {
    let launches = Workspace::load()?.target_dir.join("emulator").join("launches.txt");
    if launches.exists() {
        fs::remove_file(&launches).context("cannot remove the launches of an earlier run")?;
    }
    for amount in AMOUNTS {
        let watched = (amount.sanitizer == Sanitizer::Address).then_some(&*launches);
        run_programs(amount.sanitizer, amount.cases, watched)?;
    }
    for part in PARTS {
        conform(part, &launches)?;
    }
    let text = fs::read_to_string(&launches).context("the emulator has not counted any launch")?;
    let counts = parse(&text)?;
    let idle: Vec<_> = counts.iter().filter(|(_, count)| **count == 0).map(|(k, _)| *k).collect();
    if !idle.is_empty() {
        bail!("kernels that no test under AddressSanitizer runs: {}", idle.join(", "));
    }
    println!("each of {} kernels was run under AddressSanitizer", counts.len());
    Ok(())
}

/// Runs the programs alone, with the cases of `AddressSanitizer`, under this sanitizer or none.
pub(super) fn run_one(sanitizer: Sanitizer) -> Result<()> {
    let most = AMOUNTS.first().map_or(&[][..], |amount| amount.cases);
    run_programs(sanitizer, most, None)
}

fn run_programs(
    sanitizer: Sanitizer,
    cases: &[(&str, u32, u32)],
    launches: Option<&Path>,
) -> Result<()> {
    for source in sources(&Path::new(KERNELS).join("tests"), "cpp")? {
        let name = name_of(&source);
        let path = link(&source, &name, sanitizer)?;
        let watch = sanitizer.name();
        let start = Instant::now();
        let chosen = cases.iter().find(|(program, ..)| *program == name);
        let runs = chosen.map_or_else(
            || vec![Vec::new()],
            |(_, first, count)| {
                shares(*first, *count, std::thread::available_parallelism().map_or(1, usize::from))
            },
        );
        side_by_side(&path, &runs, launches)?;
        note(&format!("{name} ({watch}): passed"), start.elapsed());
    }
    Ok(())
}

fn name_of(source: &Path) -> String {
    source.file_stem().unwrap_or_default().to_string_lossy().into_owned()
}

/// Links a test program with all kernels and the emulator.
fn link(source: &Path, name: &str, sanitizer: Sanitizer) -> Result<PathBuf> {
    let folder = Workspace::load()?.target_dir.join("emulator");
    // The folder of the library's own objects, so that nothing is compiled twice.
    let objects = folder.join(sanitizer.name());
    let mut all = units(&objects, &kernels()?, sanitizer.kernel_flags());
    all.extend(emulator_units(&objects, sanitizer)?);
    all.extend(units(&objects, &[source.to_owned()], sanitizer.kernel_flags()));
    let output = folder.join(format!("{name}_{}", sanitizer.name()));
    build(&all, &output, sanitizer, &[])?;
    Ok(output)
}

/// Divides the cases among `processes` processes, as arguments `FIRST COUNT`.
fn shares(first: u32, count: u32, processes: usize) -> Vec<Vec<String>> {
    let processes = u32::try_from(processes).unwrap_or(u32::MAX).clamp(1, count.max(1));
    let size = count.div_ceil(processes);
    let begins = (0..processes).map(|i| size * i).filter(|begin| *begin < count);
    let share = |begin: u32| {
        let length = size.min(count - begin);
        vec![(first + begin).to_string(), length.to_string()]
    };
    begins.map(share).collect()
}

fn side_by_side(path: &Path, runs: &[Vec<String>], launches: Option<&Path>) -> Result<()> {
    let run = |args: &Vec<String>| {
        let mut command = program(path);
        command.args(args);
        if let Some(launches) = launches {
            command.env(LAUNCHES, launches);
        }
        println!("$ {}", shell::line(&command));
        passes(&mut command)
    };
    std::thread::scope(|scope| {
        let workers: Vec<_> = runs.iter().map(|args| scope.spawn(move || run(args))).collect();
        let mut outcomes = workers
            .into_iter()
            .map(|worker| worker.join().unwrap_or_else(|_| bail!("a thread of a test panicked")));
        outcomes.try_for_each(|outcome| outcome)
    })
}

/// Runs cases of the suite with `AddressSanitizer`.
fn conform(part: &str, launches: &Path) -> Result<()> {
    let start = Instant::now();
    let options = conformance::Options {
        backends: vec![conformance::EMULATED.to_owned()],
        args: vec![format!("{}::{part}", conformance::EMULATED).into()],
        sanitizer: Sanitizer::Address,
        env: vec![(LAUNCHES, launches.into())],
        ..conformance::Options::default()
    };
    let total = conformance::run(&options)?;
    if !total.is_clean() {
        bail!("{part}: {total}");
    }
    note(&format!("{part} (address)"), start.elapsed());
    Ok(())
}

/// Sums the launches of each kernel over lines `LAUNCHES KERNEL`; each program writes one line per
/// kernel.
fn parse(text: &str) -> Result<BTreeMap<&str, u64>> {
    let mut counts = BTreeMap::new();
    for line in text.lines() {
        let parsed =
            line.split_once(' ').and_then(|(count, name)| Some((count.parse().ok()?, name)));
        let (count, name): (u64, _) =
            parsed.with_context(|| format!("not a count of launches: {line:?}"))?;
        let sum = counts.entry(name).or_insert(0_u64);
        *sum += count;
    }
    Ok(counts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn launches_are_summed_by_kernel() {
        let counts = parse("3 copy\n0 plan\n2 copy\n").unwrap();
        assert_eq!(counts, BTreeMap::from([("copy", 5), ("plan", 0)]));
        assert!(parse("copy 3").is_err() && parse("copy").is_err());
    }

    #[test]
    fn shares_are_all_cases_once() {
        let as_text = |shares: Vec<Vec<String>>| {
            shares.iter().map(|args| args.join(" ")).collect::<Vec<_>>().join(", ")
        };
        assert_eq!(as_text(shares(60, 7, 2)), "60 4, 64 3");
        assert_eq!(as_text(shares(1, 2, 16)), "1 1, 2 1");
        assert_eq!(as_text(shares(0, 9, 8)), "0 2, 2 2, 4 2, 6 2, 8 1");
    }

    /// A renamed program would run as it does without arguments.
    #[test]
    fn named_programs_exist() {
        let programs = sources(&Path::new(KERNELS).join("tests"), "cpp").unwrap();
        for (name, ..) in AMOUNTS.iter().flat_map(|amount| amount.cases) {
            assert!(programs.iter().any(|path| path.file_stem().unwrap() == *name), "{name}");
        }
    }
}
