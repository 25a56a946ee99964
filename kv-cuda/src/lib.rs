//! The CUDA backend of the KV cache.
//!
//! [`CudaBackend`] implements the contract of [`kv_core::backend`] on a card of compute capability
//! 8.0 or later. Building it needs no part of CUDA; the driver is loaded when a device is opened,
//! and a machine without one gets [`Unsupported`](kv_core::error::DeviceErrorKind::Unsupported).
//!
//! A [`CudaQueue`] is a stream. Inputs in host memory are staged through page-locked memory. An
//! output in host memory is written to memory of the queue and downloaded before the call returns,
//! which costs a wait for every call; it is refused during a capture. The plan of a step is sent to
//! the device once, when the step begins, and all layers share it. With [`StepLimits`] its lists
//! keep their addresses, as a captured graph of launches requires.
//!
//! Device memory comes from a pool, which can be reserved when the device is opened
//! ([`CudaOptions::with_reserved_bytes`]). Dropping a buffer does not wait: its memory is reused
//! once every stream has passed the work submitted so far.
//!
//! Blocks can be copied to page-locked host memory and back, on a stream beside the queue's:
//! [`CudaHostPool`].
//!
//! A program that holds its stream and memory through cudarc shares them without unsafe code:
//! [`CudaBackend::queue_on_stream`], [`CudaBackend::lend`].
//!
//! With the feature `emulated`, the same host code and the same kernels run on the CPU
//! (`CudaBackend::emulated`): slow, for tests, and without a card.
#![allow(unsafe_code, reason = "the driver: docs/unsafe.md")]
mod backend;
mod buffer;
mod capture;
#[doc(hidden)]
pub mod code;
mod constants;
mod decode;
mod driver;
#[cfg(feature = "emulated")]
mod emulated;
mod fence;
mod gpu;
mod host_pool;
mod lend;
mod op;
mod params;
mod pins;
mod queue;
mod reclaim;
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
pub use capture::CudaGraph;
pub use driver::{CardFacts, CudaOptions, cards};
#[cfg(feature = "emulated")]
pub use emulated::EmulatorOptions;
pub use fence::{CudaFence, CudaReadback};
pub use host_pool::{CudaChunk, CudaHostPool, CudaPendingChunk};
pub use queue::CudaQueue;
pub use step::StepLimits;
