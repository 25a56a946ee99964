//! Findings of the kit on a device that stores nothing. Here and not beside the code, so that the
//! suite is not compiled once more for these tests.
#![expect(
    clippy::as_conversions,
    clippy::cast_possible_truncation,
    clippy::unwrap_used,
    reason = "tests"
)]
mod vectors;

use kv_core::backend::{AnyBackend, NullBackend};
use kv_testkit::{differential, stateful};

fn device() -> AnyBackend {
    AnyBackend::new(NullBackend::new())
}

/// The first row that is read shows that the device stores nothing.
#[test]
fn a_stateful_test_detects_a_device_that_stores_nothing() {
    let bytes: Vec<u8> = (0..200_u32).map(|i| (i * 37 % 251) as u8).collect();
    let error = stateful::run(&device(), &bytes).unwrap_err().to_string();
    assert!(error.contains("operation"), "{error}");
}

/// The message says how to reproduce the failure.
#[test]
fn a_differential_test_detects_a_device_that_stores_nothing() {
    let error = differential::run_all(&device(), &device(), (3, 2)).unwrap_err().to_string();
    assert!(error.starts_with("KV_CONFORMANCE_SEED=3 KV_CONFORMANCE_RUNS=1: "), "{error}");
}
