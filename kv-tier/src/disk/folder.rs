//! A folder of chunks in the hands of a tool: listed, read and repaired, but not used as a tier.
use std::ops::ControlFlow;
use std::path::Path;
use std::time::{Duration, Instant};

use kv_core::events::Tier;
use rustix::fs::{AtFlags, statat};
use rustix::io::Errno;

use super::error::{DiskOpenError, failed, refused};
use super::files::{Files, Part, Status, status};
use super::ledger::Ledger;
use super::operations::remove;
use super::walk::{Entry, walk};
use super::{open, path};
use crate::listing::{ListChunks, Listed, ListedChunk, remove_listed};
use crate::store::check_deadline;
use crate::{BlockStore, ChunkAddress, Put, Scope, StoreError, StoreErrorKind};

/// A folder that a [`DiskStore`](super::DiskStore) made, for tools that list, check and repair it.
///
/// It keeps no index, evicts nothing and does not change the capacity, and other processes may use
/// the folder meanwhile. It writes no chunks.
#[derive(Debug)]
pub struct DiskFolder {
    files: Files,
    /// `None` if the folder is only read.
    ledger: Option<Ledger>,
}

impl DiskFolder {
    /// Opens a folder. One without write access can be listed and read.
    ///
    /// # Errors
    /// [`DiskOpenError::NotAStore`] for a folder that no store has made, [`DiskOpenError::Version`]
    /// for one of a newer version, [`DiskOpenError::Io`] for what the file system refuses.
    pub fn open(root: impl AsRef<Path>) -> Result<Self, DiskOpenError> {
        let (files, ledger) = open::existing(root.as_ref())?;
        Ok(Self { files, ledger })
    }

    /// Removes a file and the folders that have become empty; returns the bytes that it counted
    /// for.
    fn remove_one(&self, chunk: &ChunkAddress) -> Result<u64, StoreError> {
        let path = path::of(chunk);
        let counted = self.files.status(&path)?.map_or(0, Status::charge);
        let was_there = self.files.remove(&path)?;
        // A writer that has just made such a folder fails once, as with a store that is down.
        let mut folder = path::folder(&path);
        while folder != "." && self.files.remove_empty(folder) {
            folder = path::folder(folder);
        }
        Ok(if was_there { counted } else { 0 })
    }
}

impl ListChunks for DiskFolder {
    fn list(
        &self,
        _: Duration,
        visit: &mut dyn FnMut(Listed) -> ControlFlow<()>,
    ) -> Result<(), StoreError> {
        list(&self.files, visit)
    }

    fn get_front(
        &self,
        chunk: &ChunkAddress,
        into: &mut [u8],
        deadline: Instant,
    ) -> Result<Option<usize>, StoreError> {
        read_front(&self.files, chunk, into, deadline)
    }
}

/// Lists the files of a folder.
pub(super) fn list(
    files: &Files,
    visit: &mut dyn FnMut(Listed) -> ControlFlow<()>,
) -> Result<(), StoreError> {
    let walked = walk(files.root(), &|| true, &mut |entry| match listed(entry) {
        Some(listed) => visit(listed),
        None => ControlFlow::Continue(()),
    });
    match walked.failure {
        Some(errno) => Err(failed("listing of", ".", errno)),
        None => Ok(()),
    }
}

/// Reads the beginning of a file, without making it more recently used.
pub(super) fn read_front(
    files: &Files,
    chunk: &ChunkAddress,
    into: &mut [u8],
    deadline: Instant,
) -> Result<Option<usize>, StoreError> {
    check_deadline(deadline, "read from disk")?;
    let read = files.read(&path::of(chunk), into, Part::Front, deadline)?;
    Ok(read.map(|(bytes, _)| bytes))
}

/// Describes an entry; `None` for a store's own file and for one that was removed meanwhile.
fn listed(entry: &Entry<'_>) -> Option<Listed> {
    let is_own =
        entry.parents.is_empty() && entry.name.to_bytes().starts_with(path::OWN.as_bytes());
    if is_own {
        return None;
    }
    let status = match statat(entry.folder, entry.name, AtFlags::SYMLINK_NOFOLLOW) {
        Err(Errno::NOENT) => return None,
        found => found.ok().map(|stat| status(&stat)),
    };
    match entry.chunk().zip(status.filter(|status| status.is_file)) {
        Some((address, status)) => {
            Some(Listed::Chunk(ListedChunk { address, bytes: status.length }))
        }
        None => Some(Listed::Other { path: entry.path() }),
    }
}

impl BlockStore for DiskFolder {
    fn tier(&self) -> Tier {
        Tier::Disk
    }

    /// Looks chunks up by a `stat` each, without making them more recently used.
    fn contains(
        &self,
        chunks: &[ChunkAddress],
        deadline: Instant,
    ) -> Result<Vec<bool>, StoreError> {
        let contains = |chunk| {
            check_deadline(deadline, "lookup on disk")?;
            Ok(self.files.status(&path::of(chunk))?.is_some_and(|status| status.is_file))
        };
        chunks.iter().map(contains).collect()
    }

    /// Reads a file, without making it more recently used.
    fn get(
        &self,
        chunk: &ChunkAddress,
        into: &mut [u8],
        deadline: Instant,
    ) -> Result<Option<usize>, StoreError> {
        check_deadline(deadline, "read from disk")?;
        let read = self.files.read(&path::of(chunk), into, Part::Whole, deadline)?;
        Ok(read.map(|(bytes, _)| bytes))
    }

    /// Refuses the write as denied.
    fn put(&self, chunk: &ChunkAddress, _: &[u8], _: Instant) -> Result<Put, StoreError> {
        Err(refused(StoreErrorKind::Denied, "write of", &path::of(chunk)))
    }

    /// Removes files, and folders that are empty then; after one that cannot be removed it goes on,
    /// and returns the first error.
    fn remove(&self, chunks: &[ChunkAddress], deadline: Instant) -> Result<(), StoreError> {
        remove(self.ledger.as_ref(), self.files.root(), chunks, deadline, |chunk| {
            self.remove_one(chunk)
        })
    }

    fn remove_all(&self, scope: &Scope, deadline: Instant) -> Result<u64, StoreError> {
        remove_listed(self, scope, deadline)
    }
}
