//! The heart of the cache.
#![forbid(unsafe_code)]
pub mod backend;
pub mod block;
mod cache;
mod element;
pub mod error;
mod format;
pub mod front;
mod geometry;
mod ids;
mod num;
pub mod plan;
mod spec;
mod storage;
mod tensor;

pub use backend::{AnyBackend, Backend};
pub use cache::{KvCache, StartOptions, Step, StepInput, Usage};
pub use element::{DType, Element};
pub use error::{
    BlocksExhausted, CacheError, DeviceError, DeviceErrorKind, PlanError, SpecError, UnknownName,
};
pub use format::KvFormat;
pub use front::{InferenceParams, KvCacheManager};
pub use geometry::{BlockOrder, PlaneLayout, PlaneShape, QkvFormat};
pub use ids::{BlockId, GroupId, LayerId, SequenceId, Slot};
pub use plan::{AttentionOptions, Determinism, Mask};
pub use spec::{CacheSpec, CacheSpecBuilder, GroupBuilder, GroupSpec, MemoryUsage};
pub use storage::{KvStorage, Plane, PlaneView, StorageView};
pub use tensor::{
    Dims, TensorData, TensorDataMut, TensorView, TensorViewMut, TokenRows, TokenTensor,
    TokenTensorMut,
};
