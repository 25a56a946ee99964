//! The CPU backend keeps the whole contract.
use std::process::ExitCode;

use kv_cpu::{CpuBackend, CpuOptions};

fn main() -> ExitCode {
    kv_testkit::run("cpu", || CpuBackend::open(CpuOptions::default()))
}
