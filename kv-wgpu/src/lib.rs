//! The WebGPU backend of the KV cache: WGSL shaders on Vulkan, Metal and DX12.
//!
//! [`WgpuBackend`] implements the contract of [`kv_core::backend`] on an adapter of wgpu, or on a
//! device and buffers that the caller owns. Without an adapter, opening returns
//! [`Unsupported`](kv_core::error::DeviceErrorKind::Unsupported), with the reason.
//!
//! A [`WgpuQueue`] records: calls become dispatches of one command encoder, which goes to the
//! device when the queue is submitted. A decode step is therefore one submission, and the host
//! reads nothing back during it. All queues of a device share its one WebGPU queue and run in the
//! order in which they are submitted.
//!
//! Inputs in host memory are sent with the submission. An output in host memory is written to
//! memory of the queue and downloaded before the call returns, which costs a submission and a wait
//! for every call; where a thread may not block, it is refused. Shaders need neither 16-bit floats
//! nor subgroups: rows of 16 and 8 bits are packed into words. Where the device has subgroups, sums
//! among neighbouring invocations use them.
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
/// The version of wgpu whose types this crate's API uses.
pub use wgpu;
