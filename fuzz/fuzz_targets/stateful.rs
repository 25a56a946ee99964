//! Stateful fuzzing of a cache with prefix reuse: the operations and checks of the conformance case
//! `random/reuse`, on bytes that the fuzzer chooses.
#![no_main]

use std::sync::OnceLock;

use kv_core::backend::AnyBackend;
use kv_cpu::{CpuBackend, CpuOptions};
use libfuzzer_sys::fuzz_target;

static DEVICE: OnceLock<AnyBackend> = OnceLock::new();

fuzz_target!(|bytes: &[u8]| {
    let device = DEVICE.get_or_init(|| {
        AnyBackend::new(CpuBackend::open(CpuOptions::default()).expect("the CPU is there"))
    });
    if let Err(error) = kv_testkit::stateful::run(device, bytes) {
        panic!("{error}");
    }
});
