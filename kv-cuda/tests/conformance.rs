//! Runs the conformance suite on a card. Skipped without one; `tests/emulated.rs` runs it on the
//! emulator everywhere.
use std::process::ExitCode;

use kv_cuda::{CudaBackend, CudaOptions};

fn main() -> ExitCode {
    kv_testkit::run("cuda", || CudaBackend::open(&CudaOptions::default()))
}
