//! Errors of a measurement of stores.
use std::error::Error;
use std::io;
use std::path::PathBuf;

use kv::tier::StoreError;

/// A store that cannot be measured.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TierError {
    /// The folder is in memory: it says nothing about a disk.
    #[error("{} is in memory (tmpfs), not on a disk", path.display())]
    InMemory {
        /// The folder.
        path: PathBuf,
    },
    /// The file system has no direct I/O, without which a read measures the page cache.
    #[error("the file system of {} has no direct I/O", path.display())]
    NoDirectIo {
        /// The folder.
        path: PathBuf,
        /// The system's refusal.
        source: io::Error,
    },
    /// Folders of chunks need Linux.
    #[error("lower tiers are measured on Linux only")]
    NotHere,
    /// A store that this program was built without.
    #[error("{store} is not in this program: it was built without feature `{feature}`")]
    NotBuilt {
        /// The store.
        store: &'static str,
        /// The feature.
        feature: &'static str,
    },
    /// An address that the plain client beside a store cannot use.
    #[error("{given:?}: expected {expected}")]
    Address {
        /// The address.
        given: String,
        /// The form that is expected.
        expected: &'static str,
    },
    /// An operation of the system failed.
    #[error("{operation}")]
    Io {
        /// The operation.
        operation: &'static str,
        /// The cause.
        source: io::Error,
    },
    /// A store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Something else failed, or was not as it must be.
    #[error(transparent)]
    Other(Box<dyn Error + Send + Sync>),
}

impl TierError {
    /// Makes an error of an operation of the system.
    pub(super) fn io<E: Into<io::Error>>(operation: &'static str) -> impl Fn(E) -> Self {
        move |source| Self::Io { operation, source: source.into() }
    }

    /// Makes an error of another one, or of words.
    pub(crate) fn other(error: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self::Other(error.into())
    }
}
