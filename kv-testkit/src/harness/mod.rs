//! The test binary: arguments, trials, counts.
mod args;

use std::io::Write;
use std::process::ExitCode;
use std::sync::Arc;

use kv_core::backend::{AnyBackend, Backend};
use kv_core::error::{DeviceError, DeviceErrorKind};
use libtest_mimic::{Completion, Failed, Trial};

use crate::case::{CaseResult, Outcome};
use crate::device::{Device, Shared};
use crate::suite;
use crate::vectors::{self, Found};
use args::Args;

/// Variable that names the file for the counts as JSON, for `cargo xtask conformance`.
const REPORT: &str = "KV_CONFORMANCE_REPORT";

/// Runs the suite as a test binary with `harness = false`.
///
/// Every case runs twice: on the backend's own type (`name::case`) and erased (`any(name)::case`).
///
/// Arguments are those of libtest and two more: `--vectors DIR` (repeatable) runs the vector files
/// under DIR instead of the suite; with `--backend NAME`, the backend of that name must open, and
/// any other backend runs nothing. The last line of output is `N passed, N failed, N skipped`.
pub fn run<B: Backend>(name: &'static str, open: impl Fn() -> Result<B, DeviceError>) -> ExitCode {
    let args = match Args::parse(std::env::args()) {
        Ok(args) => args,
        Err(problem) => {
            let _ = writeln!(std::io::stderr(), "error: {problem}");
            return ExitCode::from(2);
        }
    };
    let requested = args.backend.as_deref() == Some(name);
    let trials = if args.backend.is_some() && !requested {
        Vec::new()
    } else {
        match open().and_then(|own| Ok((own, open()?))) {
            Ok((own, other)) => all_trials(name, own, AnyBackend::new(other), &args),
            Err(error) => vec![unopened(name, requested, &error)],
        }
    };
    conclude(name, &args, trials)
}

fn conclude(name: &str, args: &Args, trials: Vec<Trial>) -> ExitCode {
    let conclusion = libtest_mimic::run(&args.libtest, trials);
    if args.libtest.list {
        return ExitCode::SUCCESS;
    }
    let (passed, failed) = (conclusion.num_passed, conclusion.num_failed);
    let skipped = conclusion.num_ignored;
    let mut code = conclusion.exit_code();
    if let Some(file) = std::env::var_os(REPORT) {
        let report = serde_json::json!({
            "backend": name, "passed": passed, "failed": failed, "skipped": skipped,
        });
        if let Err(error) = std::fs::write(&file, format!("{report}\n")) {
            let _ = writeln!(std::io::stderr(), "error: {}: {error}", file.display());
            code = ExitCode::FAILURE;
        }
    }
    let _ = writeln!(std::io::stdout(), "{passed} passed, {failed} failed, {skipped} skipped");
    code
}

/// Makes the trial for a device that did not open: skipped, or failed if the backend was required.
fn unopened(name: &str, requested: bool, error: &DeviceError) -> Trial {
    let why = format!("{name} cannot be opened: {error}");
    let absent = error.kind() == DeviceErrorKind::Unsupported && !requested;
    Trial::ignorable_test(format!("{name}::open"), move || {
        if absent { Ok(Completion::ignored_with(why)) } else { Err(Failed::from(why)) }
    })
}

fn all_trials<B: Backend>(name: &str, own: B, other: AnyBackend, args: &Args) -> Vec<Trial> {
    let found = if args.vectors.is_empty() {
        vectors::own()
    } else {
        args.vectors.iter().flat_map(|dir| vectors::find(dir)).collect()
    };
    let (own, other) = (Shared::new(own), Shared::new(other));
    let mut trials = Vec::new();
    if args.vectors.is_empty() {
        trials.extend(suite_trials(name, &own));
        trials.extend(suite_trials(&format!("any({name})"), &other));
    }
    for found in found {
        match found {
            Found::Vector { name: vector, job } => {
                for erased in [false, true] {
                    let prefix = if erased { format!("any({name})") } else { name.to_owned() };
                    let title = format!("{prefix}::vectors/{vector}");
                    let work = Arc::clone(&job);
                    trials.push(if erased {
                        let device = other.clone();
                        trial(title, move || vectors::run(&device, &work))
                    } else {
                        let device = own.clone();
                        trial(title, move || vectors::run(&device, &work))
                    });
                }
            }
            Found::Skipped { name: vector, why } => {
                trials
                    .push(Trial::ignorable_test(format!("{name}::vectors/{vector}"), move || {
                        Ok(Completion::ignored_with(why))
                    }));
            }
            Found::Bad { name: vector, why } => {
                trials.push(Trial::test(format!("{name}::vectors/{vector}"), move || {
                    Err(Failed::from(why))
                }));
            }
        }
    }
    trials
}

fn suite_trials<B: Device>(prefix: &str, backend: &B) -> Vec<Trial> {
    let one = |case: crate::Case<B>| {
        let backend = backend.clone();
        trial(format!("{prefix}::{}", case.name), move || (case.run)(&backend))
    };
    suite::cases().into_iter().map(one).collect()
}

fn trial(name: String, run: impl FnOnce() -> CaseResult + Send + 'static) -> Trial {
    Trial::ignorable_test(name, move || match run() {
        Ok(Outcome::Holds) => Ok(Completion::Completed),
        Ok(Outcome::Unsupported(why)) => Ok(Completion::ignored_with(why)),
        Err(error) => match error.unsupported() {
            Some(why) => Ok(Completion::ignored_with(why)),
            None => Err(Failed::from(error)),
        },
    })
}
