//! Errors of the tiers.
use kv_core::CacheError;
use kv_core::error::DeviceError;

use crate::chunk::ChunkSpecError;

/// An error of [`TieredCache`](crate::TieredCache). No failure of a store is one: such failures are
/// counted, and the prompt is computed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TierError {
    /// The blocks of the cache cannot be chunked.
    #[error(transparent)]
    Chunk(#[from] ChunkSpecError),
    /// The cache refused a call, or its device failed.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// The cache keeps no list of changes:
    /// [`CacheSpecBuilder::changes`](kv_core::spec::CacheSpecBuilder::changes) sets its length.
    #[error("the cache lists no changes of blocks: build its spec with `changes`")]
    NoChanges,
    /// The cache reuses no prefixes.
    #[error("the cache reuses no prefixes, so that no block can come from a tier")]
    NoReuse,
    /// Too little host memory.
    #[error("{bytes} bytes of host memory do not hold {chunks} chunks of each group, {min} do")]
    HostTooSmall {
        /// Bytes given.
        bytes: u64,
        /// Chunks that each group needs.
        chunks: u32,
        /// Bytes that are enough.
        min: u64,
    },
    /// Too many stores.
    #[error("{stores} stores, 64 are the most")]
    TooManyStores {
        /// Stores given.
        stores: usize,
    },
    /// No thread could be started.
    #[error("no thread for a store")]
    Thread(#[source] std::io::Error),
    /// A prefetch that was started or cancelled already, or is of other tiers.
    #[error("the prefetch has ended or is of other tiers")]
    UnknownPrefetch,
    /// Salt, adapter, contents, backoff or reuse are not those of the prefetch.
    #[error("the options are not those that the prompt was prefetched with")]
    OtherOptions,
    /// Everything cannot be forgotten now.
    #[error("a sequence, a pin, a hold or an import holds a block")]
    Held,
    /// A step is open.
    #[error("a step is open")]
    StepOpen,
}

impl From<DeviceError> for TierError {
    fn from(error: DeviceError) -> Self {
        Self::Cache(error.into())
    }
}
