//! Lower tiers of a KV cache: chunks of blocks in host memory, on disk and in existing stores.
//!
//! A *chunk* is a run of consecutive full blocks of one group, with a header that describes it. A
//! tier brings chunks back as idle blocks with reusable content, and the cache finds them as it
//! finds any other block. What is late, missing or wrong is never offered: the cache then finds a
//! shorter prefix, and the step computes the rest.
//!
//! | module | owns |
//! |---|---|
//! | [`chunk`] | the format of a chunk: its geometry, its header, and the checks before it is used |
//! | [`identity`] | model, adapters and tenant, and the roots of names that follow from them |
//! | [`name`] | names of chunks |
//! | [`store`] | the contract of a place that keeps chunks by name |
#![forbid(unsafe_code)]
pub mod chunk;
mod hex;
pub mod identity;
pub mod name;
pub mod store;

pub use chunk::{
    ChunkContent, ChunkError, ChunkErrorKind, ChunkSpec, ChunkSpecError, EncodeError, Expectation,
    Header, Verified,
};
pub use identity::{ChunkRoot, DigestError, Identity, ModelDigest, UnknownAdapter};
pub use name::ChunkName;
pub use store::{BlockStore, ChunkAddress, Put, StoreError, StoreErrorKind};
