//! The same random lives on two backends, of all that were built in and can be opened here:
//! `kv_testkit::pair` says what is compared.
//!
//! `KV_CONFORMANCE_SEED` and `KV_CONFORMANCE_LIVES` choose other lives than those of every run.
#![cfg(feature = "cpu")]
#![forbid(unsafe_code)]
#![expect(
    clippy::unwrap_used,
    clippy::panic,
    clippy::arithmetic_side_effects,
    reason = "a test, and its helpers outside the test functions"
)]

use kv::cpu::{CpuBackend, CpuOptions, Isa};
use kv_testkit::pair::{LIVES_VARIABLE, Paired, SEED_VARIABLE, live_all};
use kv_testkit::{Device, Shared};

fn cpu(isa: Isa) -> Shared<CpuBackend> {
    Shared::new(CpuBackend::open(CpuOptions::default().with_isa(isa)).unwrap())
}

/// Lives on the CPU and on another device, and what must have happened in them.
fn live(other: &impl Device, lives: u64) {
    let seen = live_all(&cpu(Isa::detect()), other, (1, lives)).unwrap_or_else(|e| panic!("{e}"));
    let Paired { steps, reused, shared, gathers, conversions, rows_alike, rows_apart, .. } = seen;
    if std::env::var_os(SEED_VARIABLE).or(std::env::var_os(LIVES_VARIABLE)).is_some() {
        return;
    }
    let least = [steps / 4, reused, shared, gathers, conversions].into_iter().min().unwrap();
    assert!(2 * least >= lives, "{lives} lives saw too little: {seen:?}");
    // A code on the other side of a threshold is rare.
    assert!(rows_alike > 20 * lives && rows_apart * 100 < rows_alike, "{seen:?}");
}

#[test]
fn cpu_scalar() {
    live(&cpu(Isa::SCALAR), 200);
}

/// The adapter that `KV_WGPU_ADAPTER` names, or the first; without one, the test says so.
#[cfg(feature = "wgpu")]
#[test]
fn cpu_and_wgpu() {
    use kv::wgpu::{AdapterName, WgpuBackend, WgpuOptions};
    let name = std::env::var("KV_WGPU_ADAPTER").unwrap_or_default();
    let adapter = if name.is_empty() { AdapterName::default() } else { name.parse().unwrap() };
    match WgpuBackend::open(&WgpuOptions::new(adapter)) {
        Ok(backend) => live(&Shared::new(backend), 24),
        Err(error) if name.is_empty() => skipped(&error),
        Err(error) => panic!("{error}"),
    }
}

/// The first card; without one, the test says so.
#[cfg(feature = "cuda")]
#[test]
fn cpu_and_cuda() {
    use kv::cuda::{CudaBackend, CudaOptions};
    match CudaBackend::open(&CudaOptions::new(0)) {
        Ok(backend) => live(&Shared::new(backend), 200),
        Err(error) => skipped(&error),
    }
}

#[cfg(any(feature = "wgpu", feature = "cuda"))]
fn skipped(error: &kv::error::DeviceError) {
    use std::io::Write;
    assert_eq!(error.kind(), kv::error::DeviceErrorKind::Unsupported, "{error}");
    let _ = writeln!(std::io::stderr(), "skipped: {error}");
}
