//! The CUDA backend of the KV cache.
mod backend;
mod buffer;
mod constants;
#[allow(dead_code, unused_imports, reason = "the attend operation is to start it")]
mod decode;
#[cfg(feature = "emulated")]
mod emulated;
mod gpu;
mod num;
mod op;
mod params;
mod queue;
mod scratch;
mod staging;
mod step;
mod tensors;
mod waiter;

pub use backend::CudaBackend;
pub use buffer::CudaBuffer;
#[cfg(feature = "emulated")]
pub use emulated::EmulatorOptions;
pub use queue::{CudaFence, CudaQueue, CudaReadback};
pub use step::StepLimits;
