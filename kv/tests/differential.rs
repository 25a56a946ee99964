//! Differential tests: the same random operations on the CPU and on every other backend that is
//! built in and can be opened here. `kv_testkit::differential` lists what is compared.
//!
//! `KV_CONFORMANCE_SEED` and `KV_CONFORMANCE_RUNS` choose other runs than the default ones.
#![cfg(feature = "cpu")]
#![forbid(unsafe_code)]
#![expect(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test, and its helpers outside the test functions"
)]

use kv::backend::AnyBackend;
use kv::cpu::{CpuBackend, CpuOptions, Isa};
use kv_testkit::differential::{Coverage, RUNS_VARIABLE, SEED_VARIABLE, run_all};

fn cpu(isa: Isa) -> AnyBackend {
    AnyBackend::new(CpuBackend::open(CpuOptions::default().with_isa(isa)).unwrap())
}

/// Runs on the CPU and on another device, and checks what the runs covered.
fn compare(other: &AnyBackend, runs: u64) {
    let seen = run_all(&cpu(Isa::detect()), other, (1, runs)).unwrap_or_else(|e| panic!("{e}"));
    let Coverage { steps, reused, shared, gathers, conversions, rows_equal, rows_rounded, .. } =
        seen;
    if std::env::var_os(SEED_VARIABLE).or(std::env::var_os(RUNS_VARIABLE)).is_some() {
        return;
    }
    let least = [steps / 4, reused, shared, gathers, conversions].into_iter().min().unwrap();
    assert!(2 * least >= runs, "{runs} runs covered too little: {seen:?}");
    // Codes that are rounded to the other side are rare.
    assert!(rows_equal > 20 * runs && rows_rounded * 100 < rows_equal, "{seen:?}");
}

#[test]
fn cpu_scalar() {
    compare(&cpu(Isa::SCALAR), 200);
}

/// Uses the adapter that `KV_WGPU_ADAPTER` names, or the first; without one, the test is skipped.
#[cfg(feature = "wgpu")]
#[test]
fn cpu_and_wgpu() {
    use kv::wgpu::{AdapterName, WgpuBackend, WgpuOptions};
    let name = std::env::var("KV_WGPU_ADAPTER").unwrap_or_default();
    let adapter = if name.is_empty() { AdapterName::default() } else { name.parse().unwrap() };
    match WgpuBackend::open(&WgpuOptions::new(adapter)) {
        // Each takes seconds on a CPU: more of them by `KV_CONFORMANCE_RUNS`.
        Ok(backend) => compare(&AnyBackend::new(backend), 12),
        Err(error) if name.is_empty() => skipped(&error),
        Err(error) => panic!("{error}"),
    }
}

/// Uses the first card; without one, the test is skipped.
#[cfg(feature = "cuda")]
#[test]
fn cpu_and_cuda() {
    use kv::cuda::{CudaBackend, CudaOptions};
    match CudaBackend::open(&CudaOptions::new(0)) {
        Ok(backend) => compare(&AnyBackend::new(backend), 200),
        Err(error) => skipped(&error),
    }
}

#[cfg(any(feature = "wgpu", feature = "cuda"))]
fn skipped(error: &kv::error::DeviceError) {
    use std::io::Write;
    assert_eq!(error.kind(), kv::error::DeviceErrorKind::Unsupported, "{error}");
    let _ = writeln!(std::io::stderr(), "skipped: {error}");
}
