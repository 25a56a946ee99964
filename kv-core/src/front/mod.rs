//! The two classic front ends, thin layers over [`KvCache`](crate::KvCache).
//!
//! [`InferenceParams`] serves callers who come from TransformerEngine, [`KvCacheManager`] those who
//! come from an engine with one fixed slot a sequence. Neither owns a second cache: both plan,
//! check and store through the core, and both know nothing of how a block is encoded.
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
