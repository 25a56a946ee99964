//! The CPU backend of the KV cache.
//!
//! Host memory is the device: [`CpuBackend`] implements the contract of [`kv_core::backend`] with
//! attention, writes and copies that use a caller's tensors in place. The inner loops exist once
//! and are instantiated for scalar code, AVX2, AVX-512 and NEON; planes of 16 and 8 bits use AMX
//! matrix products where the CPU has them. The instruction set ([`Isa`]) is chosen when the backend
//! is opened, and `KV_CPU_ISA` pins it.
//!
//! Element types of q, k, v and out are independent of the stored format; sums are kept in `f32`.
//! Results are the same bits on repeat and for any number of threads, as long as the plan is the
//! same.
//!
//! ```
//! use kv::backend::{Backend, KvStorage, Plane, PlaneLayout, PlaneShape, Queue};
//! use kv::block::BlockTables;
//! use kv::backend::plan::{AttendArgs, BatchEntry, Determinism, PlanBuffers, WriteArgs};
//! use kv::{
//!     AttentionOptions, BlockId, BlockOrder, KvFormat, Axes, TensorView, TensorViewMut,
//! };
//! use kv::cpu::{CpuBackend, CpuOptions};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let backend = CpuBackend::open(CpuOptions::default().with_threads(1))?;
//! let mut queue = backend.queue()?;
//!
//! // Two blocks of four tokens, one kv head of eight values.
//! let layout = PlaneLayout::new(PlaneShape {
//!     num_blocks: 2,
//!     block_size: 4,
//!     num_kv_heads: 1,
//!     head_dim: 8,
//!     order: BlockOrder::Hnd,
//!     format: KvFormat::Bf16,
//! })?;
//! let mut storage = KvStorage::new(&backend, [layout, layout])?;
//! storage.allocate(&backend, 0)?;
//! let plane = |which| storage.plane(0, which).ok_or("layer 0 has no memory");
//! let (k_plane, v_plane) = (plane(Plane::Key)?, plane(Plane::Value)?);
//!
//! // A sequence of five tokens in blocks 1 and 0, all of them new.
//! let mut tables = BlockTables::new(2, 2);
//! tables.ensure_rows(1);
//! tables.push(0, BlockId(1))?;
//! tables.push(0, BlockId(0))?;
//! let batch = [BatchEntry { row: 0, cached: 0, new_tokens: 5, queries: 5 }];
//! let mut buffers = PlanBuffers::default();
//! let (write, attend) = buffers.plan(&layout, &tables, &batch, 1, Determinism::Fast)?;
//!
//! let (k, v) = (vec![0.0_f32; 5 * 8], vec![3.0_f32; 5 * 8]);
//! let [k, v] = [&k, &v].map(|rows| TensorView::host(rows, &[5, 1, 8]));
//! queue.write_kv(&write, WriteArgs::new(&write, k, v, Axes::Thd, k_plane, v_plane)?)?;
//!
//! // Two query heads share the kv head; every weighted mean of threes is three.
//! let q = vec![1.0_f32; 5 * 2 * 8];
//! let mut out = vec![0.0_f32; 5 * 2 * 8];
//! let q = TensorView::host(&q, &[5, 2, 8]);
//! let to = TensorViewMut::host(&mut out, &[5, 2, 8]);
//! let options = AttentionOptions::causal(0.25);
//! let args = AttendArgs::new(&attend, q, to, None, [k_plane, v_plane], options)?;
//! queue.attend(&attend, args)?;
//! assert!(out.iter().all(|x| (x - 3.0).abs() < 1e-5));
//! # Ok(())
//! # }
//! ```
#![allow(unsafe_code, reason = "memory that several threads write: docs/unsafe.md")]
mod access;
mod aligned;
mod attend;
mod backend;
mod buffer;
mod context;
mod host_memory;
mod layout;
mod ops;
mod queue;
mod scratch;
mod threads;

#[cfg(test)]
mod tests;

pub use attend::AttendShape;
pub use backend::{CpuBackend, CpuOptions};
pub use buffer::CpuBuffer;
pub use host_memory::HostMemory;
pub use kv_cpu_kernels::Isa;
pub use queue::{CpuFence, CpuQueue, CpuReadback};
#[cfg(feature = "rayon")]
pub use threads::RayonWorkers;
pub use threads::{SpawnWorkers, Workers};
