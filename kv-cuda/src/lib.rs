//! The CUDA backend of the KV cache.
mod backend;
mod buffer;
mod constants;
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
#[cfg(test)]
#[cfg(feature = "emulated")]
mod tests;
mod waiter;

pub use backend::CudaBackend;
pub use buffer::CudaBuffer;
#[cfg(feature = "emulated")]
pub use emulated::EmulatorOptions;
pub use queue::{CudaFence, CudaQueue, CudaReadback};
pub use step::StepLimits;
