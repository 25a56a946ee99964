//! The CPU backend keeps the whole contract, on its own type and erased.
use std::process::ExitCode;

use kv_cpu::{CpuBackend, CpuOptions};

fn main() -> ExitCode {
    kv_testkit::run("cpu", || CpuBackend::open(CpuOptions::default()))
}
