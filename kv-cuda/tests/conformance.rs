//! Runs the conformance suite on a card, skipped without one; with `--backend emulated` on the
//! emulator: the backend's own host code and kernels, on the CPU.
//!
//! One program for both: they are one type.
use std::process::ExitCode;

use kv_core::error::DeviceError;
use kv_cuda::{CudaBackend, CudaOptions};

fn main() -> ExitCode {
    let args: Vec<_> = std::env::args().collect();
    let is_emulated = args.iter().any(|arg| arg == "--backend=emulated")
        || args.windows(2).any(|pair| pair == ["--backend", "emulated"]);
    if is_emulated {
        kv_testkit::run("emulated", open_emulated)
    } else {
        kv_testkit::run("cuda", || CudaBackend::open(&CudaOptions::default()))
    }
}

#[cfg(feature = "emulated")]
fn open_emulated() -> Result<CudaBackend, DeviceError> {
    CudaBackend::emulated(&kv_cuda::EmulatorOptions::default())
}

#[cfg(not(feature = "emulated"))]
fn open_emulated() -> Result<CudaBackend, DeviceError> {
    let unsupported = kv_core::error::DeviceErrorKind::Unsupported;
    Err(DeviceError::new(unsupported, "open").with_detail("feature `emulated` is off"))
}
