//! The CUDA backend of the KV cache.
#[cfg(feature = "emulated")]
#[allow(dead_code, reason = "CudaBackend opens it")]
mod emulated;
mod gpu;
mod params;

#[cfg(feature = "emulated")]
pub use emulated::EmulatorOptions;
