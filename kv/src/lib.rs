//! One KV cache for transformers, on every device that was built in.
//!
//! A KV cache keeps the keys and values of every token a model has seen. This crate is what users
//! import: the cache and what its steps take at the root, everything else in modules, one backend
//! for each Cargo feature, and [`Device`] to choose a backend at run time.
//!
//! | to | see |
//! |---|---|
//! | open a device | [`Device`], and [`cpu`], `cuda`, `wgpu` for a backend with its own options |
//! | describe a cache | [`CacheSpec`], [`KvFormat`]; every setting is in [`spec`] |
//! | run a model over it | [`KvCache`], [`Step`], [`StepInput`], [`StartOptions`] |
//! | attend | [`AttentionOptions`], [`Mask`] |
//! | hand in tensors | [`TensorView`], [`TensorViewMut`], [`Axes`], [`DType`] |
//! | handle errors | [`Error`]; the narrow errors are in [`error`] |
//! | share prefixes between prompts | [`KvCache::start`], [`reuse`] |
//! | choose what is evicted | [`eviction`] |
//! | store K and V in 3 to 8 bits | [`quant`] |
//! | keep blocks outside the device | `tier`: chunks, and stores on disk, in Redis and in S3 |
//! | run many requests in continuous batches | `engine`: a scheduler for any model |
//! | schedule requests | [`scheduling`]: admission, blocks that a step takes |
//! | watch a cache | [`Stats`], [`Usage`]; for routers [`events`], for simulations [`block`] |
//! | write a backend | [`backend`] |
//!
//! ```
//! # #[cfg(feature = "cpu")] {
//! use kv::{AttentionOptions, Axes, CacheSpec, Device, KvCache, SequenceId, StartOptions};
//! use kv::{StepInput, TensorView, TensorViewMut};
//!
//! let spec = CacheSpec::builder().layers(1).kv_heads(1).head_dim(4).paged(16, 64).build()?;
//! let mut cache = KvCache::new(Device::open("cpu")?, spec)?;
//! let (seq, prompt) = (SequenceId(0), [11, 22]);
//! cache.start(seq, &prompt, StartOptions::default())?; // finds the tokens that are cached
//! let mut step = cache.begin_step(&[StepInput::prompt(seq, &prompt)])?;
//! assert_eq!(step.positions(), [0, 1]); // what RoPE needs
//! let (k, v) = ([1.0_f32; 8], [1.0_f32, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]);
//! let (q, mut out) = ([0.0_f32; 8], [0.0_f32; 8]);
//! let view = |data| TensorView::host::<f32>(data, &[2, 1, 4]); // [tokens, heads, head_dim]
//! step.write(0, view(&k), view(&v), Axes::Thd)?;
//! let out_view = TensorViewMut::host(&mut out, &[2, 1, 4]);
//! let options = AttentionOptions::causal(0.5); // 1 / sqrt(head_dim)
//! step.attend(0, view(&q), out_view, &options)?;
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
//! | `emulated` | for tests: the device `emulated`, CUDA kernels that this machine's CPU runs |
//! | `tier` | the module `kv::tier`: lower tiers in host memory and on disk |
//! | `tier-redis` | `tier`, and a store in Redis or Valkey |
//! | `tier-seal` | `tier`, and encryption of what goes to a store |
//! | `tier-object` | `tier`, and a store in S3; brings 130 crates |
//! | `engine` | the module `kv::engine`: a scheduler over a cache and its tiers; brings `tier` |
//!
//! Features only add names; which device is used is always the program's choice.
//!
#![forbid(unsafe_code)]

mod device;
mod failure;

pub use device::{Adapter, Device};
pub use failure::Error;
pub use kv_core::block;
pub use kv_core::error;
pub use kv_core::events;
pub use kv_core::eviction;
#[doc(hidden)]
pub use kv_core::num;
pub use kv_core::reuse;
pub use kv_core::scheduling;
pub use kv_core::{
    AttentionOptions, Axes, BlockId, BlockOrder, CacheError, CacheSpec, DType, Element, GroupId,
    KvCache, KvCacheBuilder, KvFormat, LayerId, Mask, SequenceId, StartOptions, Stats, Step,
    StepInput, TensorView, TensorViewMut, Usage, bf16, f16,
};
#[cfg(feature = "cpu")]
#[doc(inline)]
pub use kv_cpu as cpu;
#[cfg(feature = "cuda")]
#[doc(inline)]
pub use kv_cuda as cuda;
#[cfg(feature = "engine")]
#[doc(inline)]
pub use kv_engine as engine;
#[cfg(feature = "tier")]
#[doc(inline)]
pub use kv_tier as tier;
#[cfg(feature = "wgpu")]
#[doc(inline)]
pub use kv_wgpu as wgpu;

pub mod backend {
    //! What a backend implements and is given: the contract, checked plans, tensors, planes.
    //!
    //! The clauses of the contract, and the test that proves each, are listed in
    //! [`kv_core::backend`]. [`AnyBackend`] is any backend of any type;
    //! [`Device::open`](crate::Device::open) returns one.
    pub use kv_core::backend::{
        AnyBackend, AnyBuffer, AnyChunk, AnyFence, AnyHostPool, AnyPendingChunk, AnyQueue,
        AnyReadback, AxisOrder, Backend, BlockPlanes, Capabilities, ChunkLayout, ChunkShape, Dims,
        Fence, HostChunk, HostOutputs, HostPool, KvStorage, NullBackend, NullBuffer, NullControl,
        NullFence, NullQueue, NullReadback, PendingChunk, Place, Plane, PlaneLayout, PlaneRole,
        PlaneShape, PlaneView, Queue, QueueChunk, QueueHostPool, QueuePendingChunk, Readback,
        Reserved, Slot, SlotMap, StorageView, Strided, StridedError, TensorData, TensorDataMut,
        TokenRows, TokenTensor, TokenTensorMut, kernels,
    };
    pub use kv_core::calibration::{HeadConstants, PlaneConstants};
    pub use kv_core::{StateSlots, plan};
}

pub mod quant {
    //! Stored formats to the bit, the calibration of a model, and files that hold one.
    pub use kv_core::calibration::{
        Calibration, CalibrationError, LayerCalibration, PlaneCalibration,
    };
    pub use kv_core::{ScaleGroup, Scaling};
    pub use kv_quant::stored::{
        FULL_PRECISION_PREFIX, NoScales, Source, Stored, StoredError, bits_per_value,
    };
    pub use kv_quant::{calibrate, file};
}

pub mod spec {
    //! Settings of a cache and of its groups of layers.
    pub use kv_core::plan::Determinism;
    pub use kv_core::spec::{
        CacheSpecBuilder, GroupBuilder, GroupSpec, KeyMean, LateLayers, MemoryUsage, PrefixReuse,
        PublishAt, SnapshotsSpec, StateFormat, StatePart, StatesBuilder, StatesSpec, Transform,
        Window,
    };
}

/// Compiles and runs the examples of the project's documents.
#[cfg(all(doctest, feature = "cpu"))]
mod documents {
    #[doc = include_str!("../../docs/unsafe.md")]
    struct UnsafePolicy;
}
