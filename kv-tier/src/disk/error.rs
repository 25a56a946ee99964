//! Failures of a folder: when it is opened, and in operations.
use std::io;
use std::path::PathBuf;

use rustix::io::Errno;

use crate::{StoreError, StoreErrorKind};

/// A folder that cannot be opened as a store. Nothing of it was changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DiskOpenError {
    /// The capacity holds no file.
    #[error("a capacity of {given} bytes holds no file, at least {least} are needed")]
    Capacity {
        /// Bytes that were given.
        given: u64,
        /// The smallest capacity.
        least: u64,
    },
    /// The path is no folder, or a folder with other content.
    #[error("{} is not a folder of kv-tier: {found}", path.display())]
    NotAStore {
        /// The path.
        path: PathBuf,
        /// The content of the folder.
        found: String,
    },
    /// A newer version of this library made the folder.
    #[error("{} has version {found}, this library knows {known}", path.display())]
    Version {
        /// The path.
        path: PathBuf,
        /// Version of the folder.
        found: u64,
        /// The newest version that is known here.
        known: u64,
    },
    /// An operation of the file system failed.
    #[error("cannot {operation} in {}", path.display())]
    Io {
        /// The path.
        path: PathBuf,
        /// The operation.
        operation: &'static str,
        /// The cause.
        source: io::Error,
    },
}

impl DiskOpenError {
    /// Returns the kind of failure that this is for a store that was open before.
    pub(super) fn kind(&self) -> StoreErrorKind {
        match self {
            Self::Io { source, .. } => {
                Errno::from_io_error(source).map_or(StoreErrorKind::Other, kind)
            }
            Self::Capacity { .. } | Self::NotAStore { .. } | Self::Version { .. } => {
                StoreErrorKind::Denied
            }
        }
    }
}

/// Makes an error of an operation on a path.
pub(super) fn failed(operation: &str, path: &str, errno: Errno) -> StoreError {
    StoreError::new(kind(errno), format!("{operation} {path}")).with_source(io::Error::from(errno))
}

/// Makes an error of a kind, without a cause.
pub(super) fn refused(kind: StoreErrorKind, operation: &str, path: &str) -> StoreError {
    StoreError::new(kind, format!("{operation} {path}"))
}

fn kind(errno: Errno) -> StoreErrorKind {
    match errno {
        Errno::NOSPC | Errno::DQUOT | Errno::FBIG => StoreErrorKind::Full,
        Errno::ACCESS | Errno::PERM | Errno::ROFS => StoreErrorKind::Denied,
        // The folder was deleted, its file system is gone, or the disk fails.
        Errno::NOENT | Errno::NOTDIR | Errno::STALE | Errno::IO | Errno::NODEV | Errno::NXIO => {
            StoreErrorKind::Unavailable
        }
        _ => StoreErrorKind::Other,
    }
}
