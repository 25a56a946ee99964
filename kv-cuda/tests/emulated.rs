//! Runs the conformance suite on the emulator: the backend's own host code and kernels, on the CPU.
use std::process::ExitCode;

fn main() -> ExitCode {
    kv_testkit::run("emulated", open)
}

#[cfg(feature = "emulated")]
fn open() -> Result<kv_cuda::CudaBackend, kv_core::error::DeviceError> {
    kv_cuda::CudaBackend::emulated(&kv_cuda::EmulatorOptions::default())
}

#[cfg(not(feature = "emulated"))]
fn open() -> Result<kv_core::backend::AnyBackend, kv_core::error::DeviceError> {
    let unsupported = kv_core::error::DeviceErrorKind::Unsupported;
    Err(kv_core::error::DeviceError::new(unsupported, "open")
        .with_detail("feature `emulated` is off"))
}
