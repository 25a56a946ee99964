//! `cargo xtask emulator --self-test`: does the emulator compute what a GPU does, and notice what
//! is wrong? Programs of C++ under `kv-cuda/kernels/emulator/tests`, in each build there is.
//!
//! A program of right kernels must pass everywhere. A decode kernel that makes one of six mistakes
//! must fail everywhere, and those that are races must be reported by `ThreadSanitizer`.
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, bail};

use super::{KERNELS, Sanitizer, build, emulator_units, sources, units};
use crate::shell;
use crate::suite::note;
use crate::workspace::Workspace;

/// One way to build the emulator.
struct Variant {
    name: &'static str,
    sanitizer: Sanitizer,
    /// With the switch of the C library instead of ours.
    is_portable: bool,
    /// Orders of blocks and threads to try; 0 is none.
    seeds: &'static [u32],
}

const VARIANTS: &[Variant] = &[
    Variant { name: "plain", sanitizer: Sanitizer::None, is_portable: false, seeds: &[0, 1, 2, 3] },
    Variant { name: "ucontext", sanitizer: Sanitizer::None, is_portable: true, seeds: &[0, 1] },
    Variant { name: "address", sanitizer: Sanitizer::Address, is_portable: false, seeds: &[0, 1] },
    Variant { name: "thread", sanitizer: Sanitizer::Thread, is_portable: false, seeds: &[0, 1] },
];

/// Mistakes of `split_decode.h` by number, and whether each is a race.
const MISTAKES: &[(u32, &str, bool)] = &[
    (1, "no __syncwarp", true),
    (2, "waits for one group of copies too few", true),
    (3, "no __syncthreads before shared memory is used again", true),
    (4, "block index not clamped", false),
    (5, "no __syncthreads before the flag is read", true),
    (6, "divergent shuffle", false),
];

/// Exit code of a program in which `ThreadSanitizer` has found a race.
const RACE: i32 = 66;

/// Builds and runs every variant.
pub(super) fn run() -> Result<()> {
    let folder = Workspace::load()?.target_dir.join("emulator").join("self-test");
    for variant in VARIANTS {
        let start = Instant::now();
        let (device, decode) = programs(&folder, variant)?;
        note(&format!("{}: built", variant.name), start.elapsed());
        let start = Instant::now();
        passes(&mut program(&device))?;
        for seed in variant.seeds {
            passes(program(&decode).args(["0", &seed.to_string()]))?;
            for (mistake, what, is_race) in MISTAKES {
                let args = [mistake.to_string(), seed.to_string()];
                let code = ends(program(&decode).args(args))?.0;
                if code == Some(0) {
                    bail!("{}, seed {seed}: nothing noticed \"{what}\"", variant.name);
                }
                if variant.sanitizer == Sanitizer::Thread && *is_race && code != Some(RACE) {
                    bail!("seed {seed}: ThreadSanitizer did not notice \"{what}\" ({code:?})");
                }
            }
        }
        let count = MISTAKES.len();
        note(&format!("{}: passed, {count} mistakes noticed", variant.name), start.elapsed());
    }
    Ok(())
}

/// The two programs of a variant.
fn programs(folder: &Path, variant: &Variant) -> Result<(PathBuf, PathBuf)> {
    let folder = folder.join(variant.name);
    let mut emulator = emulator_units(&folder, variant.sanitizer)?;
    for unit in &mut emulator {
        if variant.is_portable {
            unit.flags.push("-DKV_EMU_UCONTEXT".into());
        }
    }
    let tests = Path::new(KERNELS).join("emulator/tests");
    let (kernels, mains) = (sources(&tests, "cu")?, sources(&tests, "cpp")?);
    let program = |main: &str, is_kernel: fn(&str) -> bool| -> Result<PathBuf> {
        let named = |source: &&PathBuf, keep: &dyn Fn(&str) -> bool| {
            source.file_stem().and_then(|stem| stem.to_str()).is_some_and(keep)
        };
        let main_of: Vec<_> =
            mains.iter().filter(|source| named(source, &|stem| stem == main)).cloned().collect();
        let kernels: Vec<_> =
            kernels.iter().filter(|source| named(source, &is_kernel)).cloned().collect();
        let mut all = emulator.clone();
        all.extend(units(&folder, &main_of, variant.sanitizer.emulator_flags()));
        all.extend(units(&folder, &kernels, variant.sanitizer.kernel_flags()));
        let output = folder.join(main);
        build(&all, &output, variant.sanitizer, &[])?;
        Ok(output)
    };
    let device = program("device", |kernel| kernel != "split_decode")?;
    let decode = program("split_decode", |kernel| kernel == "split_decode")?;
    Ok((device, decode))
}

pub(super) fn program(path: &Path) -> Command {
    let mut command = shell::program(path);
    // The first report is enough, and it need not name lines where one is expected.
    command.env("TSAN_OPTIONS", format!("halt_on_error=1 exitcode={RACE}"));
    command.env("UBSAN_OPTIONS", "print_stacktrace=1");
    command
}

/// Runs a program that must pass; shows what it says when it does not.
pub(super) fn passes(command: &mut Command) -> Result<()> {
    let (code, said) = ends(command)?;
    if code != Some(0) {
        bail!("`{}` failed ({code:?}):\n{said}", shell::line(command));
    }
    Ok(())
}

/// The exit code of a program, `None` where a signal ended it, and what it said.
fn ends(command: &mut Command) -> Result<(Option<i32>, String)> {
    let line = shell::line(command);
    let output = command.output().with_context(|| format!("cannot start `{line}`"))?;
    let said = [output.stdout, output.stderr].concat();
    Ok((output.status.code(), String::from_utf8_lossy(&said).into_owned()))
}
