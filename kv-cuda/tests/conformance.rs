//! The CUDA backend keeps the whole contract on a card. Skipped where there is none; the same runs
//! on the emulator everywhere: `tests/emulated.rs`.
use std::process::ExitCode;

use kv_cuda::{CudaBackend, CudaOptions};

fn main() -> ExitCode {
    kv_testkit::run("cuda", || CudaBackend::open(&CudaOptions::default()))
}
