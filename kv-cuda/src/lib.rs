//! The CUDA backend of the KV cache.
#[doc(hidden)]
pub mod code;
mod gpu;
mod params;
