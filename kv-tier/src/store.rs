//! The contract of a place that keeps chunks by name: a folder, Redis, S3, or a caller's own.
use std::error::Error;
use std::fmt;
use std::sync::Arc;
use std::time::Instant;

use kv_core::events::Tier;

use crate::name::ChunkName;

/// The address of a chunk in a store: the root that names its model, format and tenant, and its
/// name. A store may keep roots apart, so that one can be listed or removed as a whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[expect(clippy::exhaustive_structs, reason = "two names")]
pub struct ChunkAddress {
    /// Root of the chain of names.
    pub root: ChunkName,
    /// Name of the chunk.
    pub name: ChunkName,
}

/// Keeps chunks by name.
///
/// Every method blocks, and is called on threads of this crate only. A method returns by its
/// deadline; what it began may end later and must affect no other call then. Chunks are immutable:
/// two writers of one name write the same bytes. A caller trusts nothing that a store returns: it
/// verifies every chunk that it has read.
pub trait BlockStore: fmt::Debug + Send + Sync + 'static {
    /// Returns the tier, for events and statistics.
    fn tier(&self) -> Tier;

    /// Returns which chunks are present, in the order of `chunks`. A hint: a chunk may vanish
    /// before it is read.
    ///
    /// # Errors
    /// [`StoreErrorKind::Timeout`] past the deadline, and the failures of the store.
    fn contains(&self, chunks: &[ChunkAddress], deadline: Instant)
    -> Result<Vec<bool>, StoreError>;

    /// Reads a chunk to the beginning of `into`, and returns its number of bytes; `None` if there
    /// is none. Writes nothing past the end of `into`.
    ///
    /// # Errors
    /// [`StoreErrorKind::Corrupt`] for an empty chunk and for one longer than `into`;
    /// [`StoreErrorKind::Timeout`] past the deadline; the failures of the store.
    fn get(
        &self,
        chunk: &ChunkAddress,
        into: &mut [u8],
        deadline: Instant,
    ) -> Result<Option<usize>, StoreError>;

    /// Writes a chunk. All of it becomes visible, or nothing.
    ///
    /// # Errors
    /// [`StoreErrorKind::Full`] without room, [`StoreErrorKind::Timeout`] past the deadline, and
    /// the failures of the store.
    fn put(&self, chunk: &ChunkAddress, bytes: &[u8], deadline: Instant)
    -> Result<Put, StoreError>;

    /// Removes chunks; those that are not there count as removed.
    ///
    /// # Errors
    /// [`StoreErrorKind::Timeout`] past the deadline, and the failures of the store. Some chunks
    /// may have been removed.
    fn remove(&self, chunks: &[ChunkAddress], deadline: Instant) -> Result<(), StoreError>;
}

macro_rules! forward {
    ($owner:ident) => {
        impl<S: BlockStore + ?Sized> BlockStore for $owner<S> {
            fn tier(&self) -> Tier {
                (**self).tier()
            }
            fn contains(
                &self,
                chunks: &[ChunkAddress],
                deadline: Instant,
            ) -> Result<Vec<bool>, StoreError> {
                (**self).contains(chunks, deadline)
            }
            fn get(
                &self,
                chunk: &ChunkAddress,
                into: &mut [u8],
                deadline: Instant,
            ) -> Result<Option<usize>, StoreError> {
                (**self).get(chunk, into, deadline)
            }
            fn put(
                &self,
                chunk: &ChunkAddress,
                bytes: &[u8],
                deadline: Instant,
            ) -> Result<Put, StoreError> {
                (**self).put(chunk, bytes, deadline)
            }
            fn remove(&self, chunks: &[ChunkAddress], deadline: Instant) -> Result<(), StoreError> {
                (**self).remove(chunks, deadline)
            }
        }
    };
}
forward!(Arc);
forward!(Box);

/// Refuses to begin an operation after its deadline.
pub(crate) fn check_deadline(deadline: Instant, operation: &str) -> Result<(), StoreError> {
    if Instant::now() < deadline {
        return Ok(());
    }
    Err(StoreError::new(StoreErrorKind::Timeout, operation))
}

/// The outcome of a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "a chunk was there or was not")]
pub enum Put {
    /// The chunk was written.
    New,
    /// The store had the chunk already.
    WasThere,
}

/// A failure of a store.
#[derive(Debug, thiserror::Error)]
#[error("{operation}: {kind}")]
pub struct StoreError {
    kind: StoreErrorKind,
    operation: String,
    source: Option<Box<dyn Error + Send + Sync>>,
}

impl StoreError {
    /// Creates an error of an operation, such as `read of cache/ab/cd`.
    pub fn new(kind: StoreErrorKind, operation: impl Into<String>) -> Self {
        Self { kind, operation: operation.into(), source: None }
    }

    /// Adds the cause.
    #[must_use]
    pub fn with_source(mut self, source: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        self.source = Some(source.into());
        self
    }

    /// Returns the kind.
    pub const fn kind(&self) -> StoreErrorKind {
        self.kind
    }
}

/// The kind of a store's failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum StoreErrorKind {
    /// The store cannot be reached.
    Unavailable,
    /// The deadline passed.
    Timeout,
    /// The store has no room.
    Full,
    /// The store refuses the operation: no permission, a read-only folder.
    Denied,
    /// The store returned something that cannot be a chunk.
    Corrupt,
    /// Anything else.
    Other,
}

impl fmt::Display for StoreErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Unavailable => "the store cannot be reached",
            Self::Timeout => "the deadline passed",
            Self::Full => "the store has no room",
            Self::Denied => "the store refuses it",
            Self::Corrupt => "what came cannot be a chunk",
            Self::Other => "the store failed",
        })
    }
}
