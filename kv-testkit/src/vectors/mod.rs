//! Golden vectors: finds files, recognises their schema, runs their content.
//!
//! Files come from other systems, so nothing in them is trusted: a truncated or inconsistent file
//! is a failed trial that names the file.
mod attention;
mod files;
mod quant;
pub(crate) mod te;
mod te_convert;
mod te_errors;
mod te_quirks;
mod te_rope;
mod te_trace;
#[cfg(test)]
mod tests;
mod vllm;
mod vllm_engine;
mod vllm_fuzz;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use kv_core::backend::AnyBackend;

use crate::case::{At, CaseError, CaseResult, Outcome};

/// One job of a vector file.
#[derive(Debug)]
pub(crate) struct Job {
    file: String,
    kind: Kind,
}

/// The content of a job, by schema.
#[derive(Debug)]
enum Kind {
    /// `te-trace/1`.
    TeTrace(te_trace::Trace),
    /// One case of `te-errors/1`.
    TeError(te_errors::ErrorCase),
    /// One case of `te-quirks/1`.
    TeQuirk(te_quirks::Quirk),
    /// One case of `te-rope/1`.
    TeRope(te_rope::RopeCase),
    /// `te-convert/1`.
    TeConvert(te_convert::ConvertCase),
    /// `attention-case/1`, read when it runs.
    Attention(PathBuf),
    /// `vllm-scenario/1`.
    VllmScenario(vllm::Scenario),
    /// `vllm-fuzz/1`.
    VllmFuzz(vllm_fuzz::Run),
    /// `quant-...`, and CSV files of codes.
    Quant(quant::Quant),
}

/// One file, or one case of a file.
#[derive(Debug)]
pub(crate) enum Found {
    /// A job to run.
    Vector {
        /// Path below the directory, and the case's name.
        name: String,
        /// The work.
        job: Arc<Job>,
    },
    /// Something that this crate does not implement.
    Skipped {
        /// Path below the directory.
        name: String,
        /// The reason.
        why: String,
    },
    /// Something that cannot be run.
    Bad {
        /// Path below the directory.
        name: String,
        /// The reason.
        why: String,
    },
}

/// Variable that names the folder of this crate's vectors where the source tree is missing.
const TESTDATA: &str = "KV_CONFORMANCE_TESTDATA";

/// Finds the vectors of this crate.
pub(crate) fn own() -> Vec<Found> {
    match std::env::var_os(TESTDATA) {
        Some(folder) => find(Path::new(&folder)),
        None => find(&Path::new(env!("CARGO_MANIFEST_DIR")).join("testdata")),
    }
}

/// Finds every vector under `dir`; the list is never empty.
pub(crate) fn find(dir: &Path) -> Vec<Found> {
    files::find(dir)
}

/// Runs every vector under `dir` on a backend; returns the name of each and its result.
///
/// # Errors
/// By vector: the first value that differs, or why the file cannot be run. A schema that is not for
/// this library counts as [`Outcome::Unsupported`].
pub fn run_vectors(backend: &AnyBackend, dir: &Path) -> Vec<(String, Result<Outcome, CaseError>)> {
    let result = |found| match found {
        Found::Vector { name, job } => (name, run(backend, &job)),
        Found::Skipped { name, why } => (name, Ok(Outcome::Unsupported(why))),
        Found::Bad { name, why } => (name, Err(CaseError::Broken(why))),
    };
    find(dir).into_iter().map(result).collect()
}

/// Runs one job.
pub(crate) fn run(backend: &AnyBackend, job: &Job) -> CaseResult {
    let result = match &job.kind {
        Kind::TeTrace(trace) => te_trace::run(backend, trace),
        Kind::TeError(case) => te_errors::run(backend, case),
        Kind::TeQuirk(quirk) => te_quirks::run(backend, quirk),
        Kind::TeRope(case) => te_rope::run(backend, case),
        Kind::TeConvert(case) => te_convert::run(backend, case),
        Kind::Attention(path) => attention::run(backend, path),
        Kind::VllmScenario(scenario) => vllm::run(backend, scenario),
        Kind::VllmFuzz(run) => vllm_fuzz::run(backend, run),
        Kind::Quant(quant) => quant::run(backend, quant),
    };
    result.at(&job.file)
}
