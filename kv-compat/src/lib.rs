//! The calls of two other KV cache interfaces, for engines that are ported to [`kv_core`].
//!
//! An engine that was written against one of the interfaces below changes its cache and keeps its
//! calls. New code uses [`KvCache`](kv_core::KvCache), which also has prefix reuse, forks and
//! windows. This crate uses the public API of `kv_core` alone, so it runs on every backend.
//!
//! | interface | type here | calls of a forward pass |
//! |---|---|---|
//! | TransformerEngine | [`InferenceParams`] | `pre_step`; in every layer `step`, `attend` |
//! | fixed slots | [`KvCacheManager`] | in every layer `append_kv`, `attend`; `advance_seq_len` |
//!
//! A slot is a part of the cache that holds one sequence at a time, as in tiny-llm's
//! `KVCacheManager`. Names, arguments and the order of calls are the original's. Where an original
//! accepts what corrupts its memory, these types return an error before anything changes; the
//! documentation of each type says what differs.
//!
//! `InferenceParams` stores K and V in f32, f16 or bf16, paged or not; a [`CacheManager`] decides
//! which sequence has which pages. [`BlockManager`] is the built-in one, over a `KvCache`, and a
//! program may wrap or replace it. `KvCacheManager` stores any format that needs no calibration.
//! Tokens have no ids in either interface, so no prompt is reused.
//!
//! ```
//! use kv_compat::{InferenceConfig, InferenceParams};
//! use kv::backend::NullBackend;
//! use kv::{AttentionOptions, DType, TensorView, TensorViewMut};
//!
//! let config = InferenceConfig::new(2, 16).num_heads_kv(1).head_dim_k(2).dtype(DType::F32);
//! let mut params = InferenceParams::new(NullBackend::new(), config)?;
//! params.allocate_memory(0)?;
//! for tokens in [3, 1, 1] {
//!     params.pre_step(&[(7_u64, tokens)])?; // a prompt, then a token at a time
//!     let rows = vec![0.0_f32; 6];
//!     let rows = TensorView::host(&rows, &[3, 1, 2]);
//!     params.step(0, rows, rows, "thd")?;
//!     let mut out = [0.0_f32; 6];
//!     let out = TensorViewMut::host(&mut out, &[3, 1, 2]);
//!     params.attend(0, rows, out, &AttentionOptions::causal(0.7))?;
//! }
//! assert_eq!(params.sequence_length(7), 5);
//! # Ok::<(), kv::CacheError>(())
//! ```
#![forbid(unsafe_code)]
mod block_manager;
mod buffers;
mod config;
mod manager;
mod params;
mod slots;

pub use block_manager::BlockManager;
pub use config::{FormatArg, InferenceConfig, OutputFormat};
pub use manager::{CacheManager, CacheManagerConfig, PageConfig, TrackedSequence};
pub use params::{CacheView, InferenceParams, StepOutput};
pub use slots::{KvCacheManager, SlotConfig, SlotView};
