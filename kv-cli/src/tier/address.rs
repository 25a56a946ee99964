//! The place that `kv tier` looks at.
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use kv::tier::{ListChunks, StoreUrl, TierAddress, TierAddressError};

/// A place of chunks: a folder, given by its path or as `--tier` takes it, or a store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Place {
    Folder(PathBuf),
    Store(StoreUrl),
}

impl Place {
    /// Opens the place. Nothing is created, and no server connected to.
    pub(crate) fn open(&self) -> anyhow::Result<Box<dyn ListChunks>> {
        match self {
            #[cfg(target_os = "linux")]
            Self::Folder(folder) => Ok(Box::new(kv::tier::DiskFolder::open(folder)?)),
            #[cfg(not(target_os = "linux"))]
            Self::Folder(_) => Err(TierAddressError::NoFolders.into()),
            Self::Store(url) => Ok(url.open()?),
        }
    }
}

impl FromStr for Place {
    type Err = PlaceError;

    fn from_str(text: &str) -> Result<Self, PlaceError> {
        if !text.contains("://") && !text.starts_with("host=") && !text.starts_with("disk=") {
            return Ok(Self::Folder(text.into()));
        }
        match text.parse()? {
            TierAddress::Host { .. } => Err(PlaceError::HostMemory),
            TierAddress::Disk { folder, .. } => Ok(Self::Folder(folder)),
            TierAddress::Store(url) => Ok(Self::Store(url)),
        }
    }
}

/// Writes no password.
impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Folder(folder) => folder.display().fmt(f),
            Self::Store(url) => url.fmt(f),
        }
    }
}

/// A text that names no place of chunks.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PlaceError {
    #[error(transparent)]
    Address(#[from] TierAddressError),
    #[error("host memory belongs to one process, nobody else can look at it")]
    HostMemory,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_a_folder_or_a_store() {
        let place = |text: &str| text.parse::<Place>();
        for text in ["cache", "disk=cache:20GiB"] {
            assert_eq!(place(text).expect(text), Place::Folder("cache".into()));
        }
        let refused = |text: &str| place(text).expect_err(text);
        assert!(matches!(refused("host=2GiB"), PlaceError::HostMemory));
        let no_size = refused("disk=cache");
        assert!(matches!(no_size, PlaceError::Address(TierAddressError::NoSize { .. })));
        let scheme = refused("http://x");
        assert!(matches!(scheme, PlaceError::Address(TierAddressError::Scheme { .. })));
    }
}
