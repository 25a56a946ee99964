//! The WebGPU backend of the KV cache: WGSL shaders on Vulkan, Metal and DX12.
//!
//! [`WgpuBackend`] implements the contract of [`kv_core::backend`] on an adapter of wgpu, or on a
//! device and buffers of the caller's own. A machine without an adapter gets
//! [`Unsupported`](kv_core::DeviceErrorKind::Unsupported), with the reason.
//!
//! A [`WgpuQueue`] records: calls become dispatches of one command encoder, which goes to the
//! device when the queue is submitted. So a decode step is one submission, and nothing of it is
//! read by the host. All queues of a device share its one WebGPU queue, and run in the order in
//! which they are submitted.
//!
//! Inputs in host memory go along with the submission. An output in host memory is written to
//! memory of the queue, and downloaded before the call returns: a submission and a wait for every
//! call. Where a thread may not wait, it is refused. Neither 16-bit floats nor subgroups are
//! needed: rows of 16 and 8 bits are packed into words. Where there are subgroups, sums among
//! neighbours go through them.
#![forbid(unsafe_code)]

mod adapter;
mod arena;
mod backend;
mod buffer;
mod device;
mod fence;
mod op;
mod params;
mod pipelines;
mod queue;
mod recording;
mod scratch;
mod shaders;
mod signal;
mod steps;
mod subgroups;
mod tensors;
#[cfg(test)]
mod tests;

pub use adapter::{AdapterFacts, AdapterName, adapters};
pub use backend::{WgpuBackend, WgpuOptions};
pub use buffer::WgpuBuffer;
pub use fence::{WgpuFence, WgpuReadback};
pub use queue::WgpuQueue;
/// The wgpu that this crate's types are of.
pub use wgpu;
