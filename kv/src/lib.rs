//! One KV cache for transformers, on every device that was built in.
//!
//! A KV cache keeps the keys and values of every token a model has seen. This crate is what users
//! import: all of `kv-core`, the backends behind features, and [`Device`] to pick one at run time.
//!
//! ```
//! # #[cfg(feature = "cpu")] {
//! use kv::{AttentionOptions, CacheSpec, Device, KvCache, QkvFormat, SequenceId, StartOptions};
//! use kv::{StepInput, TensorView, TensorViewMut};
//!
//! let spec = CacheSpec::builder().layers(1).kv_heads(1).head_dim(4).paged(16, 64).build()?;
//! let mut cache = KvCache::new(Device::open("cpu")?, spec)?;
//! let (seq, prompt) = (SequenceId(0), [11, 22]);
//! let reused = cache.start(seq, &prompt, StartOptions::default())?; // tokens that need no step
//! let mut step = cache.begin_step(&[StepInput::prompt(seq, &prompt, reused)])?;
//! assert_eq!(step.positions(), [0, 1]); // what RoPE needs
//! let (k, v) = ([1.0_f32; 8], [1.0_f32, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]);
//! let (q, mut out) = ([0.0_f32; 8], [0.0_f32; 8]);
//! let view = |data| TensorView::host::<f32>(data, &[2, 1, 4]); // [tokens, heads, head_dim]
//! step.write(0, view(&k), view(&v), QkvFormat::Thd)?;
//! let out_view = TensorViewMut::host(&mut out, &[2, 1, 4]);
//! step.attend(0, view(&q), out_view, &AttentionOptions::causal(0.7))?;
//! step.commit()?; // lengths advance
//! // Token 0 sees itself, token 1 the mean of both.
//! assert_eq!(out, [1.0, 2.0, 3.0, 4.0, 3.0, 4.0, 5.0, 6.0]);
//! # }
//! # Ok::<(), kv::Error>(())
//! ```
//!
//! # Features
//! | feature | gives |
//! |---|---|
//! | `cpu` (default) | the backend `cpu`, and the module `kv::cpu` |
//! | `cuda` | the backend `cuda`, and the module `kv::cuda`; builds without CUDA |
//! | `wgpu` | the backend `wgpu`, and the module `kv::wgpu`: Vulkan, Metal and DX12 |
//!
//! Features only add names; which device is used is always the program's choice.
#![forbid(unsafe_code)]

mod device;
mod failure;

pub use device::{Adapter, Device};
pub use failure::Error;
pub use kv_core::*;
/// The CPU backend with its own types, for callers that want no type erasure.
#[cfg(feature = "cpu")]
pub use kv_cpu as cpu;
/// The CUDA backend with its own types.
#[cfg(feature = "cuda")]
pub use kv_cuda as cuda;
/// Stored formats to the bit, and the calibration of a model.
pub use kv_quant as quant;
/// The WebGPU backend with its own types: devices and buffers of the caller's own, and the list of
/// adapters.
#[cfg(feature = "wgpu")]
pub use kv_wgpu as wgpu;

/// Compiles and runs the examples of the project's documents.
#[cfg(all(doctest, feature = "cpu"))]
mod documents {
    #[doc = include_str!("../../README.md")]
    struct Readme;
    #[doc = include_str!("../../docs/unsafe.md")]
    struct UnsafePolicy;
}
