//! `cargo xtask emulator --self-test`: checks that the emulator computes the results of a GPU and
//! detects errors, with C++ programs under `kv-cuda/kernels/emulator/tests`, in every build
//! variant.
//!
//! A program of correct kernels must pass in every variant. A decode kernel with one of six
//! mistakes must fail in every variant, and `ThreadSanitizer` must report those that are races.
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, bail};

use super::{KERNELS, Sanitizer, build, emulator_units, sources, units};
use crate::shell::{self, note};
use crate::workspace::Workspace;

/// One way to build the emulator.
struct Variant {
    name: &'static str,
    sanitizer: Sanitizer,
    /// Uses the context switch of the C library instead of our own.
    is_portable: bool,
    /// Seeds for the order of blocks and threads; 0 means no shuffling.
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

/// Exit code of a program in which `ThreadSanitizer` found a race.
const RACE: i32 = 66;

/// Builds and runs every variant.
pub(super) fn run() -> Result<()> {
    let folder = Workspace::load()?.target_dir.join("emulator");
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
                    bail!("{}, seed {seed}: not detected: \"{what}\"", variant.name);
                }
                if variant.sanitizer == Sanitizer::Thread && *is_race && code != Some(RACE) {
                    bail!("seed {seed}: ThreadSanitizer did not detect \"{what}\" ({code:?})");
                }
            }
        }
        let count = MISTAKES.len();
        note(&format!("{}: passed, {count} mistakes detected", variant.name), start.elapsed());
    }
    Ok(())
}

/// Returns the two programs of a variant, below the folder of the libraries that they reuse.
fn programs(libraries: &Path, variant: &Variant) -> Result<(PathBuf, PathBuf)> {
    let folder = libraries.join("self-test").join(variant.name);
    let emulator = if variant.is_portable {
        let mut units = emulator_units(&folder, variant.sanitizer)?;
        for unit in &mut units {
            unit.flags.push("-DKV_EMU_UCONTEXT".into());
        }
        units
    } else {
        emulator_units(&libraries.join(variant.sanitizer.name()), variant.sanitizer)?
    };
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
        all.extend(units(&folder, &main_of, &variant.sanitizer.emulator_flags()));
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
    // The first report is enough; for an expected error, it need not name lines.
    command.env("TSAN_OPTIONS", format!("halt_on_error=1 exitcode={RACE}"));
    command.env("UBSAN_OPTIONS", "print_stacktrace=1");
    command
}

/// Runs a program that must pass; shows its output otherwise.
pub(super) fn passes(command: &mut Command) -> Result<()> {
    let (code, message) = ends(command)?;
    if code != Some(0) {
        bail!("`{}` failed ({code:?}):\n{message}", shell::line(command));
    }
    Ok(())
}

/// Returns the exit code of a program, `None` if a signal ended it, and its output.
fn ends(command: &mut Command) -> Result<(Option<i32>, String)> {
    let line = shell::line(command);
    let output = command.output().with_context(|| format!("cannot start `{line}`"))?;
    let message = [output.stdout, output.stderr].concat();
    Ok((output.status.code(), String::from_utf8_lossy(&message).into_owned()))
}
