//! The test binary: arguments, trials, counts.
mod args;

use std::io::Write;
use std::process::ExitCode;

use kv_core::backend::{AnyBackend, Backend};
use kv_core::error::{DeviceError, DeviceErrorKind};
use libtest_mimic::{Completion, Failed, Trial};

use crate::case::{Case, CaseResult, Outcome};
use crate::device::{Device, Shared};
use crate::suite;
use crate::vectors::{self, Found};
use args::Args;

/// Variable that names the file for the counts as JSON, for `cargo xtask conformance`.
const REPORT: &str = "KV_CONFORMANCE_REPORT";

/// Runs the suite as a test binary with `harness = false`.
///
/// Every case runs on the backend with its type erased, as users hold it (`name::case`). Those that
/// make each call of the contract run on the backend's own type too (`typed(name)::case`).
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
            Ok((own, erased)) => {
                all_trials(name, &AnyBackend::new(erased), &Shared::new(own), &args)
            }
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

fn all_trials<B: Device>(name: &str, erased: &AnyBackend, own: &B, args: &Args) -> Vec<Trial> {
    if !args.vectors.is_empty() {
        let found = args.vectors.iter().flat_map(|dir| vectors::find(dir));
        return found.map(|found| vector_trial(name, erased, found)).collect();
    }
    let mut trials = erased_trials(name, erased);
    trials.extend(suite_trials(&format!("typed({name})"), own, suite::typed_cases()));
    trials
}

/// Lists the trials of an erased device. Not generic: the suite is compiled once, with this crate.
fn erased_trials(name: &str, erased: &AnyBackend) -> Vec<Trial> {
    let mut trials = suite_trials(name, erased, suite::cases());
    trials.extend(vectors::own().into_iter().map(|found| vector_trial(name, erased, found)));
    trials
}

fn vector_trial(name: &str, backend: &AnyBackend, found: Found) -> Trial {
    match found {
        Found::Vector { name: vector, job } => {
            let backend = backend.clone();
            trial(format!("{name}::vectors/{vector}"), move || vectors::run(&backend, &job))
        }
        Found::Skipped { name: vector, why } => {
            Trial::ignorable_test(format!("{name}::vectors/{vector}"), move || {
                Ok(Completion::ignored_with(why))
            })
        }
        Found::Bad { name: vector, why } => {
            Trial::test(format!("{name}::vectors/{vector}"), move || Err(Failed::from(why)))
        }
    }
}

fn suite_trials<B: Device>(prefix: &str, backend: &B, cases: Vec<Case<B>>) -> Vec<Trial> {
    let one = |case: Case<B>| {
        let backend = backend.clone();
        trial(format!("{prefix}::{}", case.name), move || (case.run)(&backend))
    };
    cases.into_iter().map(one).collect()
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
