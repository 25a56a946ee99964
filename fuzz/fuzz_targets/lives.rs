//! Sequences that share prefixes, in whatever order a fuzzer finds worth trying: the same
//! operations and the same checks as the conformance case `random/reuse`.
#![no_main]

use std::sync::OnceLock;

use kv_cpu::{CpuBackend, CpuOptions};
use kv_testkit::Shared;
use libfuzzer_sys::fuzz_target;

static DEVICE: OnceLock<Shared<CpuBackend>> = OnceLock::new();

fuzz_target!(|bytes: &[u8]| {
    let device = DEVICE.get_or_init(|| {
        Shared::new(CpuBackend::open(CpuOptions::default()).expect("the CPU is there"))
    });
    if let Err(error) = kv_testkit::lives::live(device, bytes) {
        panic!("{error}");
    }
});
