//! The core of a KV cache: geometry, blocks, sequences, checked plans and the backend contract.
//!
//! A KV cache keeps the keys and values of every token that a transformer has processed. This crate
//! decides where they are stored and which sequence may read them; a backend crate moves and reads
//! the bytes. It does no I/O, starts no thread and contains no unsafe code.
//!
//! | to | see |
//! |---|---|
//! | describe a cache | [`CacheSpec`], [`KvFormat`]; every setting is in [`spec`] |
//! | run a model over it | [`KvCache`], [`Step`], [`StepInput`], [`AttentionOptions`] |
//! | pass tensors | [`TensorView`], [`TensorViewMut`], [`Axes`] |
//! | handle errors | [`CacheError`]; the narrow errors are in [`error`] |
//! | share prefixes between prompts | [`KvCache::start`], [`reuse`] |
//! | choose what is evicted | [`eviction`] |
//! | schedule requests, or simulate a cache | [`scheduling`], [`block`] |
//! | watch a cache | [`Stats`], [`Usage`]; for routers [`events`] |
//! | write a backend | [`backend`], [`plan`] |
//! | choose one at run time | [`AnyBackend`](backend::AnyBackend) |
//!
//! ```
//! use kv::backend::NullBackend;
//! use kv::{AttentionOptions, Axes, CacheSpec, KvCache, SequenceId, StartOptions};
//! use kv::{StepInput, TensorView, TensorViewMut};
//!
//! let spec = CacheSpec::builder().layers(1).kv_heads(1).head_dim(2).paged(16, 64).build()?;
//! let mut cache = KvCache::new(NullBackend::new(), spec)?;
//! let seq = SequenceId(0);
//! cache.start(seq, &[11, 12], StartOptions::default())?;
//! let mut step = cache.begin_step(&[StepInput::tokens(seq, &[11, 12])])?;
//! let (k, v, q, mut out) = ([0_f32; 4], [0_f32; 4], [0_f32; 4], [0_f32; 4]);
//! let dims = [2, 1, 2]; // tokens, heads, head_dim
//! step.write(0, TensorView::host(&k, &dims), TensorView::host(&v, &dims), Axes::Thd)?;
//! let out = TensorViewMut::host(&mut out, &dims);
//! step.attend(0, TensorView::host(&q, &dims), out, &AttentionOptions::causal(0.7))?;
//! step.commit()?;
//! assert_eq!(cache.state().seq_len(seq), Some(2));
//! # Ok::<(), kv::CacheError>(())
//! ```
#![forbid(unsafe_code)]
pub mod backend;
pub mod block;
mod cache;
pub mod calibration;
mod dims;
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
mod priority;
pub mod reuse;
mod slot_map;
pub mod spec;
mod storage;
mod tensor;

pub use cache::{KvCache, KvCacheBuilder, StartOptions, StateSlots, Stats, Step, StepInput, Usage};
pub use error::{CacheError, UnknownName};
pub use geometry::{Axes, BlockOrder};
pub use half::{bf16, f16};
pub use ids::{BlockId, GroupId, LayerId, SequenceId};
pub use kv_format::{DType, Element, KvFormat, ScaleGroup, Scaling};
pub use plan::{AttentionOptions, Mask};
pub use spec::CacheSpec;
pub use tensor::{TensorView, TensorViewMut};

pub mod scheduling {
    //! Queries for a scheduler: whether a prompt fits, the blocks that a step takes, and the rest
    //! of a cache's bookkeeping.
    pub use crate::cache::{Admission, BlockDemand, CacheState, GroupUsage, HitByKind};
}
