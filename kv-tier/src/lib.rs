//! Lower tiers of a KV cache: chunks of blocks in host memory, on disk and in existing stores.
//!
//! A *chunk* is a run of consecutive full blocks of one group, with a header that describes it. A
//! tier brings chunks back as idle blocks with reusable content, and the cache finds them like
//! other blocks. Chunks that are late, missing or wrong are never offered: the cache then finds a
//! shorter prefix, and the step computes the rest.
//!
//! | module | owns |
//! |---|---|
//! | the root | [`TieredCache`]: a cache whose chunks move to host memory and stores |
//! | [`chunk`] | format of a chunk: geometry, header, and the checks before it is used |
//! | `disk` | a folder that keeps chunks as files, bounded, shared by processes (Linux) |
//! | [`handoff`] | message with which another engine finds the chunks of a prompt |
//! | [`identity`] | model, adapters and tenant, and the roots of names that follow from them |
//! | [`listing`] | listing of a store's content, for tools |
//! | [`memory`] | a bounded map that keeps chunks |
//! | [`name`] | names of chunks |
//! | `object` | a store in S3, with the feature `object` |
//! | [`policy`] | when a chunk is written to a tier, and whether loading it beats computing it |
//! | `redis` | a store in Redis or Valkey, with the feature `redis` |
//! | `sealed` | a store that encrypts the chunks of another store, with the feature `seal` |
//! | [`session`] | one sequence in a file: its format, `dump` and `load` |
//! | [`store`] | the contract of a place that keeps chunks by name |
#![forbid(unsafe_code)]
mod address;
mod bytes;
mod chain;
pub mod chunk;
#[cfg(target_os = "linux")]
pub mod disk;
mod engine;
pub mod handoff;
mod hex;
pub mod identity;
pub mod listing;
pub mod memory;
pub mod name;
#[cfg(feature = "object")]
pub mod object;
pub mod policy;
mod record;
#[cfg(feature = "redis")]
pub mod redis;
#[cfg(any(feature = "redis", feature = "object"))]
mod remote;
#[cfg(feature = "seal")]
pub mod sealed;
pub mod session;
pub mod store;
mod tiered;

pub use address::{StoreUrl, TierAddress, TierAddressError};
pub use bytes::{Bytes, BytesError};
pub use chunk::{
    ChunkContent, ChunkError, ChunkErrorKind, ChunkSpec, ChunkSpecError, EncodeError, Expectation,
    Header, Verified,
};
#[cfg(target_os = "linux")]
pub use disk::{DirectIo, DiskFolder, DiskOpenError, DiskOptions, DiskStats, DiskStore};
pub use engine::{
    BreakerState, Export, ExportId, ExportState, Failures, ForgetFailure, Forgotten, PrefetchId,
    StoreOptions, StoreStats, TierError, TierOptions, TiersStats, Unwritten, Wait, WaitError,
};
pub use handoff::{Handoff, HandoffError};
pub use identity::{ChunkRoot, DigestError, Identity, ModelDigest, UnknownAdapter};
pub use listing::{ListChunks, Listed, ListedChunk};
pub use memory::MemoryStore;
pub use name::ChunkName;
pub use policy::WritePolicy;
#[cfg(any(feature = "redis", feature = "object"))]
pub use remote::StoreUrlError;
#[cfg(feature = "seal")]
pub use sealed::SealedStore;
pub use session::{Session, SessionError, SessionInfo};
pub use store::{BlockStore, ChunkAddress, Put, Scope, StoreError, StoreErrorKind};
pub use tiered::TieredCache;
