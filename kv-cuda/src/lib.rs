//! The CUDA backend of the KV cache.
#[doc(hidden)]
pub mod code;
mod driver;
mod gpu;
mod params;

pub use driver::CudaOptions;
