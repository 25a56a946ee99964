//! The contract of a place that keeps chunks by name: a folder, Redis, S3, or a caller's own.
use std::error::Error;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kv_core::events::Tier;

use crate::chunk::{ChunkError, read_header};
use crate::identity::ModelDigest;
use crate::name::ChunkName;

/// The address of a chunk in a store: its root, which stands for model, format and tenant, and its
/// name. A store may keep roots apart, to list or remove one as a whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[expect(clippy::exhaustive_structs, reason = "two names")]
pub struct ChunkAddress {
    /// Root of the chain of names.
    pub root: ChunkName,
    /// Name of the chunk.
    pub name: ChunkName,
}

/// A store of chunks by name.
///
/// Every method blocks, and is called on threads of this crate only. A method returns by its
/// deadline; work that it leaves running must affect no later call. Chunks are immutable: two
/// writers of one name write the same bytes. Callers verify every chunk that they read.
pub trait BlockStore: fmt::Debug + Send + Sync + 'static {
    /// Returns the tier, for events and statistics.
    fn tier(&self) -> Tier;

    /// Checks which chunks are present, in the order of `chunks`. The result is a hint: a chunk may
    /// vanish before it is read.
    ///
    /// # Errors
    /// [`StoreErrorKind::Timeout`] past the deadline, and the failures of the store.
    fn contains(&self, chunks: &[ChunkAddress], deadline: Instant)
    -> Result<Vec<bool>, StoreError>;

    /// Reads a chunk to the beginning of `into` and returns its number of bytes, or `None` if the
    /// chunk is absent. Writes nothing past the end of `into`.
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

    /// Writes a chunk, whole or not at all. A chunk without bytes is refused as
    /// [`StoreErrorKind::Corrupt`], or read back as such.
    ///
    /// # Errors
    /// [`StoreErrorKind::Full`] without room, [`StoreErrorKind::Timeout`] past the deadline, and
    /// the failures of the store.
    fn put(&self, chunk: &ChunkAddress, bytes: &[u8], deadline: Instant)
    -> Result<Put, StoreError>;

    /// Removes chunks. Absent chunks count as removed.
    ///
    /// # Errors
    /// [`StoreErrorKind::Timeout`] past the deadline, and the failures of the store. Some chunks
    /// may have been removed.
    fn remove(&self, chunks: &[ChunkAddress], deadline: Instant) -> Result<(), StoreError>;

    /// Removes all chunks in a scope and returns their number. A store that cannot list its content
    /// refuses.
    ///
    /// # Errors
    /// [`StoreErrorKind::Unsupported`] of a store that cannot, and nothing has changed;
    /// [`StoreErrorKind::Timeout`] past the deadline, and the failures of the store. Some chunks
    /// may have been removed.
    fn remove_all(&self, scope: &Scope, deadline: Instant) -> Result<u64, StoreError> {
        let _ = deadline;
        Err(StoreError::new(StoreErrorKind::Unsupported, format!("removal of {scope}")))
    }

    /// Returns a failure that no call has returned because the store repairs it itself: a removed
    /// folder that is made again, for example. Each is returned once, and counted like others.
    fn take_repaired(&self) -> Option<StoreError> {
        None
    }
}

/// The chunks that [`BlockStore::remove_all`] removes.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Scope {
    /// All chunks of some roots: of a salt, for example.
    Roots(Vec<ChunkName>),
    /// All chunks of a model, whatever their format, salt and adapter.
    Model(ModelDigest),
}

impl Scope {
    /// Returns whether a chunk is in the scope. `header` reads the beginning of the chunk to some
    /// memory, where the address does not tell.
    pub(crate) fn has(
        &self,
        chunk: &ChunkAddress,
        header: impl FnMut(&mut [u8]) -> Result<Option<usize>, StoreError>,
    ) -> Result<bool, StoreError> {
        match self {
            Self::Roots(roots) => Ok(roots.iter().any(|root| is_same(root, &chunk.root))),
            Self::Model(model) => Ok(model_of(header)? == Some(*model)),
        }
    }
}

impl fmt::Display for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Roots(_) => "all chunks of a salt",
            Self::Model(_) => "all chunks of a model",
        })
    }
}

/// Compares a root with that of a listed chunk, of which there may be the first 8 bytes and zeroes.
fn is_same(root: &ChunkName, listed: &ChunkName) -> bool {
    let is_cut = |listed: &[u8; 32]| {
        let (front, rest) = listed.split_at(8);
        root.as_bytes().starts_with(front) && rest.iter().all(|byte| *byte == 0)
    };
    root == listed || is_cut(listed.as_bytes())
}

/// Reads the model of a chunk; `None` for bytes that are no chunk.
fn model_of(
    mut header: impl FnMut(&mut [u8]) -> Result<Option<usize>, StoreError>,
) -> Result<Option<ModelDigest>, StoreError> {
    const FRONT: usize = 4_096;
    const FRONT_MAX: usize = 1 << 22;
    let mut bytes = vec![0; FRONT];
    loop {
        let read = match header(&mut bytes) {
            Ok(read) => read.unwrap_or(0),
            Err(error) if error.kind() == StoreErrorKind::Corrupt => return Ok(None),
            Err(error) => return Err(error),
        };
        match read_header(bytes.get(..read).unwrap_or_default()) {
            Ok(header) => return Ok(Some(header.model())),
            // The header has more pages.
            Err(ChunkError::Length { expected, .. }) if read == bytes.len() => {
                // A length that no header has is refused below.
                let expected = usize::try_from(expected).unwrap_or(usize::MAX);
                if expected <= bytes.len() || expected > FRONT_MAX {
                    return Ok(None);
                }
                bytes.resize(expected, 0);
            }
            Err(_) => return Ok(None),
        }
    }
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
            fn remove_all(&self, scope: &Scope, deadline: Instant) -> Result<u64, StoreError> {
                (**self).remove_all(scope, deadline)
            }
            fn take_repaired(&self) -> Option<StoreError> {
                (**self).take_repaired()
            }
        }
    };
}
forward!(Arc);
forward!(Box);

/// Adds a wait to an instant. One that no clock reaches is a century.
pub(crate) fn after(now: Instant, wait: Duration) -> Instant {
    const CENTURY: Duration = Duration::from_hours(24 * 365 * 100);
    now.checked_add(wait.min(CENTURY)).unwrap_or(now)
}

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
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
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
    /// The store was removed, with all that it had.
    Removed,
    /// The store returned something that cannot be a chunk.
    Corrupt,
    /// The store does not support the operation: it does not list its content.
    Unsupported,
    /// Anything else.
    Other,
}

impl StoreErrorKind {
    /// Returns the kind in one word, for labels of metrics.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Unavailable => "unavailable",
            Self::Timeout => "timeout",
            Self::Full => "full",
            Self::Denied => "denied",
            Self::Removed => "removed",
            Self::Corrupt => "corrupt",
            Self::Unsupported => "unsupported",
            Self::Other => "other",
        }
    }
}

impl fmt::Display for StoreErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Unavailable => "the store cannot be reached",
            Self::Timeout => "the deadline passed",
            Self::Full => "the store has no room",
            Self::Denied => "the store refuses it",
            Self::Removed => "the store was removed, with all that it had",
            Self::Corrupt => "what came cannot be a chunk",
            Self::Unsupported => "the store cannot list what it keeps",
            Self::Other => "the store failed",
        })
    }
}
