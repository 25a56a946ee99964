//! The core of a KV cache: geometry, blocks, sequences, checked plans and the backend contract.
//!
//! A KV cache keeps the keys and values of every token that a transformer has processed. This crate
//! decides where they are stored and which sequence may read them; a backend crate moves and reads
//! the bytes. It does no I/O, starts no thread and contains no unsafe code.
//!
//! | to | see |
//! |---|---|
//! | describe a cache | [`CacheSpec`], [`KvFormat`], [`BlockOrder`] |
//! | run a model over it | [`KvCache`], [`Step`], [`StepInput`], [`AttentionOptions`] |
//! | pass tensors | [`TensorView`], [`TensorViewMut`], [`QkvFormat`] |
//! | write a backend | [`backend`], [`plan`], [`PlaneView`] |
//! | choose one at run time | [`AnyBackend`] |
//!
//! ```
//! use kv_core::backend::NullBackend;
//! use kv_core::{AttentionOptions, CacheSpec, KvCache, QkvFormat, SequenceId, StartOptions};
//! use kv_core::{StepInput, TensorView, TensorViewMut};
//!
//! let spec = CacheSpec::builder().layers(1).kv_heads(1).head_dim(2).paged(16, 64).build()?;
//! let mut cache = KvCache::new(NullBackend::new(), spec)?;
//! let seq = SequenceId(0);
//! cache.start(seq, &[11, 12], StartOptions::default())?;
//! let mut step = cache.begin_step(&[StepInput::tokens(seq, &[11, 12])])?;
//! let (k, v, q, mut out) = ([0_f32; 4], [0_f32; 4], [0_f32; 4], [0_f32; 4]);
//! let dims = [2, 1, 2]; // tokens, heads, head_dim
//! step.write(0, TensorView::host(&k, &dims), TensorView::host(&v, &dims), QkvFormat::Thd)?;
//! let out = TensorViewMut::host(&mut out, &dims);
//! step.attend(0, TensorView::host(&q, &dims), out, &AttentionOptions::causal(0.7))?;
//! step.commit()?;
//! assert_eq!(cache.seq_len(seq), Some(2));
//! # Ok::<(), kv_core::CacheError>(())
//! ```
#![forbid(unsafe_code)]
pub mod backend;
pub mod block;
mod cache;
pub mod calibration;
pub mod error;
pub mod events;
pub mod eviction;
mod geometry;
mod ids;
#[doc(hidden)]
pub mod invariant;
#[doc(hidden)]
pub mod num;
pub mod plan;
pub mod reuse;
mod slot_map;
mod spec;
mod storage;
mod tensor;

pub use backend::{AnyBackend, Backend};
pub use cache::{
    Admission, BlockDemand, BlockHold, CacheState, Import, ImportBlock, KvCache, Pin, PinId,
    PrefixProbe, ProbedBlock, StartOptions, Stats, Step, StepInput, Usage,
};
pub use calibration::{Calibration, CalibrationError};
pub use error::{
    BlocksExhausted, CacheError, DeviceError, DeviceErrorKind, PlanError, SpecError, UnknownName,
};
pub use geometry::{BlockOrder, PlaneLayout, PlaneShape, QkvFormat};
pub use half::{bf16, f16};
pub use ids::{BlockId, GroupId, LayerId, SequenceId, Slot};
pub use kv_format::{DType, Element, KvFormat, ScaleGroup, Scaling};
pub use plan::{AttentionOptions, Determinism, Mask};
pub use slot_map::{Place, SlotMap};
pub use spec::{
    CacheSpec, CacheSpecBuilder, GroupBuilder, GroupSpec, KeyMean, LateLayers, MemoryUsage,
    PrefixReuse, PublishAt, Transform, Window,
};
pub use storage::{KvStorage, Plane, PlaneView, StorageView};
pub use tensor::{
    Dims, TensorData, TensorDataMut, TensorView, TensorViewMut, TokenRows, TokenTensor,
    TokenTensorMut,
};
