//! The CUDA backend of the KV cache.
mod backend;
mod buffer;
#[doc(hidden)]
pub mod code;
mod constants;
mod driver;
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
pub use driver::CudaOptions;
#[cfg(feature = "emulated")]
pub use emulated::EmulatorOptions;
pub use queue::{CudaFence, CudaQueue, CudaReadback};
pub use step::StepLimits;
