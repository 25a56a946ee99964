//! A folder that keeps chunks as files: on a disk of this machine, or on a shared file system.
//!
//! ```text
//! cache/kv-tier.json                    version and capacity; other folders are refused
//! cache/kv-tier.{usage,changes,evict}   the count of bytes, and locks
//! cache/<root>/<2>/<2>/<name>           one file a chunk, its bytes and nothing else
//! ```
//!
//! # What is atomic
//! A file appears whole or not at all: it is written without a name (`O_TMPFILE`) and linked when
//! its last byte was accepted. Other file systems (overlays of some containers, some network file
//! systems) get `.tmp` and a rename; a listing sweeps `.tmp` files of killed processes. A finished
//! file never changes and is only removed; its readers read it to its end.
//!
//! # What survives
//! The end of the process in any way, `kill -9` included: everything that a `put` has returned for.
//! Power loss: nothing is synced, so a file is whole, absent, or damaged. The reader finds damage
//! by the chunk's CRC; the next `put` replaces a file of another length than its chunk's.
//!
//! # Speed
//! A transfer bypasses the page cache (`O_DIRECT`) if its memory and its length are multiples of
//! 4,096 bytes, as for the chunks of this crate. A chunk is then one `pwrite` or `pread` at the
//! speed of the disk, for a tenth of the CPU time, and displaces no files from memory. Other
//! transfers are buffered. [`DirectIo::Off`] turns it off; a file system without it is found out
//! when the folder is opened. Calls block; their threads are the caller's.
//!
//! # Capacity
//! A bound that is never passed, over all processes: bytes are counted before they are written and
//! uncounted after they are removed, in a file that is locked for the microseconds of the change. A
//! process that is killed in between leaves the count too high, until the next listing. Two things
//! may leave more bytes than the bound until the listing at the next start has removed them: power
//! loss, after which the count may be old, and a start with a smaller capacity. Where a file does
//! not fit, the least recently used ones are removed, down to 31/32 of the bound. A lookup that
//! names a chain from its front makes heads more recent than tails, so that tails go first. The
//! file system's free space has a floor. Without room on the disk the write fails with
//! [`Full`](crate::StoreErrorKind::Full), and for a minute the capacity is what is there. A file
//! that cannot be removed is skipped and counted.
//!
//! # Several processes
//! Processes may share a folder, over a network file system too if it has `flock`. The first
//! process evicts and sets the capacity; when it ends, the next one that needs room takes over.
//! Other processes read and write. Without room they get `Full`, and the first process makes room
//! within a tenth of a second. All processes find a written chunk, and miss a removed one. The time
//! of a file is the time of its last use, to a minute, so that all agree on its age.
//!
//! # A folder that is removed
//! The folder has no chunks, and the next write makes it again; [`BlockStore::take_repaired`] says
//! so. The same holds for a folder of which everything was removed. A moved folder goes on.
//!
//! # Memory
//! About 300 bytes for each file. The index is rebuilt by listing after the folder was opened,
//! never by reading; until then a lookup costs a `stat`, and a write that needs room waits.
mod error;
mod files;
mod folder;
mod index;
mod ledger;
mod listing;
mod open;
mod operations;
mod options;
mod path;
mod room;
mod walk;

use std::fmt;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kv_core::events::Tier;
use kv_core::num::to_u64;

pub use self::error::DiskOpenError;
pub use self::folder::DiskFolder;
pub use self::options::{DirectIo, DiskOptions};

use self::files::Files;
use self::index::Index;
use self::ledger::Ledger;
use crate::listing::{ListChunks, Listed, remove_listed};
use crate::{BlockStore, ChunkAddress, Put, Scope, StoreError, StoreErrorKind};

/// Keeps chunks as files of a folder. The [module](self) has the guarantees.
///
/// ```
/// use std::time::{Duration, Instant};
///
/// use kv::tier::{BlockStore, ChunkAddress, ChunkName, DiskOptions, DiskStore};
///
/// let folder = tempfile::tempdir()?;
/// let store = DiskStore::open(folder.path(), DiskOptions::new(1 << 30))?;
/// let chunk = ChunkAddress { root: ChunkName::new([1; 32]), name: ChunkName::new([2; 32]) };
/// let deadline = Instant::now() + Duration::from_secs(1);
/// store.put(&chunk, b"bytes", deadline)?;
/// drop(store);
///
/// let store = DiskStore::open(folder.path(), DiskOptions::new(1 << 30))?;
/// let mut into = [0; 8];
/// assert_eq!(store.get(&chunk, &mut into, deadline)?, Some(5));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct DiskStore {
    root: PathBuf,
    options: DiskOptions,
    /// Replaced when the folder was removed.
    opened: RwLock<Opened>,
    repaired: Mutex<Option<StoreError>>,
}

/// A folder that was opened, and the thread that lists it.
#[derive(Debug)]
struct Opened {
    inner: Arc<Inner>,
    listing: Option<JoinHandle<()>>,
}

/// Content and counts of a [`DiskStore`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
#[expect(clippy::struct_excessive_bools, reason = "independent facts")]
pub struct DiskStats {
    /// Bytes that all processes' files count for, `None` until a listing tells or without write
    /// access.
    pub held_bytes: Option<u64>,
    /// The most that they may count for now: less than the capacity if the disk has less room.
    pub limit_bytes: u64,
    /// Files that this process knows.
    pub known_files: u64,
    /// Bytes that they count for.
    pub known_bytes: u64,
    /// Whether the folder has been listed since it was opened.
    pub is_listed: bool,
    /// Whether this process evicts.
    pub is_evictor: bool,
    /// Whether writes are denied.
    pub is_read_only: bool,
    /// Whether the page cache is bypassed.
    pub is_direct: bool,
    /// Files that this process evicted.
    pub evictions: u64,
    /// Attempts to evict a file that could not be removed.
    pub skipped_removals: u64,
}

impl DiskStore {
    /// Opens a folder, and creates it if it is absent. A folder without write access, and one on a
    /// file system that is only read, is opened as with [`DiskOptions::with_read_only`].
    ///
    /// # Errors
    /// [`DiskOpenError::Capacity`] below 4,096 bytes; [`DiskOpenError::NotAStore`] for a folder
    /// with other content; [`DiskOpenError::Version`] for one of a newer version;
    /// [`DiskOpenError::Io`] for what the file system refuses, `flock` included.
    pub fn open(root: impl AsRef<Path>, options: DiskOptions) -> Result<Self, DiskOpenError> {
        let root = root.as_ref();
        // The process may go to another folder before this one is made again.
        let absolute = std::path::absolute(root).unwrap_or_else(|_| root.into());
        let opened = RwLock::new(Opened::open(root, options)?);
        Ok(Self { root: absolute, options, opened, repaired: Mutex::default() })
    }

    /// Returns the folder, even if it was removed.
    fn inner(&self) -> Arc<Inner> {
        Arc::clone(&self.opened.read().unwrap_or_else(PoisonError::into_inner).inner)
    }

    /// Returns the folder unless it was removed.
    fn present(&self) -> Option<Arc<Inner>> {
        let inner = self.inner();
        if !inner.is_removed() {
            return Some(inner);
        }
        if !inner.is_noted.swap(true, Ordering::Relaxed) {
            let operation = format!("use of the folder {}", self.root.display());
            let error = StoreError::new(StoreErrorKind::Removed, operation);
            *self.repaired.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
        }
        None
    }

    /// Returns the folder, which is made again if it was removed.
    fn present_or_made(&self) -> Result<Arc<Inner>, StoreError> {
        if let Some(inner) = self.present() {
            return Ok(inner);
        }
        let mut opened = self.opened.write().unwrap_or_else(PoisonError::into_inner);
        if !opened.inner.is_removed() {
            // Another write was first.
            return Ok(Arc::clone(&opened.inner));
        }
        let made = Opened::open(&self.root, self.options).map_err(|error| {
            let operation = format!("creation of the folder {}", self.root.display());
            StoreError::new(error.kind(), operation).with_source(error)
        })?;
        let inner = Arc::clone(&made.inner);
        let removed = std::mem::replace(&mut *opened, made);
        drop(opened);
        // Waits for a thread, for which others need not wait. It may have had the right to evict.
        drop(removed);
        if inner.ledger.as_ref().is_some_and(Ledger::try_evict) {
            inner.is_evictor.store(true, Ordering::Relaxed);
        }
        Ok(inner)
    }

    /// Waits until the folder was listed; returns whether it was by `deadline`.
    pub fn wait_listed(&self, deadline: Instant) -> bool {
        self.inner().wait_listed(deadline)
    }

    /// Returns statistics. The count of bytes is read from the folder: it may take until `deadline`
    /// if another process holds its lock, and is `None` then.
    pub fn stats(&self, deadline: Instant) -> DiskStats {
        self.inner().stats(deadline)
    }
}

impl Opened {
    fn open(root: &Path, options: DiskOptions) -> Result<Self, DiskOpenError> {
        let opened = open::open(root, &options)?;
        let inner = Arc::new(Inner {
            files: opened.files,
            ledger: opened.ledger,
            options,
            capacity: opened.capacity,
            index: Mutex::default(),
            evicting: Mutex::default(),
            shrunk: Mutex::default(),
            listing: Mutex::default(),
            listing_changed: Condvar::new(),
            is_stopping: AtomicBool::new(false),
            is_evictor: AtomicBool::new(opened.is_evictor),
            reserved: AtomicU64::new(0),
            finished: AtomicU64::new(0),
            evictions: AtomicU64::new(0),
            skipped_removals: AtomicU64::new(0),
            is_noted: AtomicBool::new(false),
        });
        let listing = listing::start(&inner).map_err(|source| DiskOpenError::Io {
            path: root.into(),
            operation: "start the thread that lists",
            source,
        })?;
        Ok(Self { inner, listing: Some(listing) })
    }
}

impl BlockStore for DiskStore {
    fn tier(&self) -> Tier {
        Tier::Disk
    }

    /// Looks chunks up in memory, and those that this process does not know by a `stat` each:
    /// another one may have written them. The chunks that are there become the most recently used
    /// ones, the first of `chunks` last to be evicted.
    fn contains(
        &self,
        chunks: &[ChunkAddress],
        deadline: Instant,
    ) -> Result<Vec<bool>, StoreError> {
        match self.present() {
            Some(inner) => inner.contains(chunks, deadline),
            None => Ok(vec![false; chunks.len()]),
        }
    }

    fn get(
        &self,
        chunk: &ChunkAddress,
        into: &mut [u8],
        deadline: Instant,
    ) -> Result<Option<usize>, StoreError> {
        self.inner().get(chunk, into, deadline)
    }

    /// Writes a file. No bytes are refused as [`Corrupt`](crate::StoreErrorKind::Corrupt), a folder
    /// that is only read answers [`Denied`](crate::StoreErrorKind::Denied). A file with another
    /// number of bytes is damaged, and replaced.
    fn put(
        &self,
        chunk: &ChunkAddress,
        bytes: &[u8],
        deadline: Instant,
    ) -> Result<Put, StoreError> {
        let inner = self.present_or_made()?;
        match inner.put(chunk, bytes, deadline) {
            // While it was written.
            Err(_) if inner.is_removed() => self.present_or_made()?.put(chunk, bytes, deadline),
            put => put,
        }
    }

    /// Removes files; after one that cannot be removed it goes on, and returns the first error.
    fn remove(&self, chunks: &[ChunkAddress], deadline: Instant) -> Result<(), StoreError> {
        match self.present() {
            Some(inner) => inner.remove(chunks, deadline),
            None => Ok(()),
        }
    }

    fn take_repaired(&self) -> Option<StoreError> {
        self.repaired.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    fn remove_all(&self, scope: &Scope, deadline: Instant) -> Result<u64, StoreError> {
        remove_listed(self, scope, deadline)
    }
}

impl ListChunks for DiskStore {
    fn list(
        &self,
        _: Duration,
        visit: &mut dyn FnMut(Listed) -> ControlFlow<()>,
    ) -> Result<(), StoreError> {
        self.present().map_or(Ok(()), |inner| folder::list(&inner.files, visit))
    }

    fn get_front(
        &self,
        chunk: &ChunkAddress,
        into: &mut [u8],
        deadline: Instant,
    ) -> Result<Option<usize>, StoreError> {
        let Some(inner) = self.present() else { return Ok(None) };
        folder::read_front(&inner.files, chunk, into, deadline)
    }
}

impl fmt::Debug for DiskStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DiskStore")
            .field("root", &self.root)
            .field("options", &self.options)
            .finish_non_exhaustive()
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        self.inner.stop_listing();
        if let Some(listing) = self.listing.take() {
            // A panic of the thread has been reported, and broke nothing that is used after this.
            let _ = listing.join();
        }
    }
}

/// The state that the calls and the listing thread share.
#[derive(Debug)]
struct Inner {
    files: Files,
    /// `None` if the folder is only read.
    ledger: Option<Ledger>,
    options: DiskOptions,
    capacity: u64,
    index: Mutex<Index>,
    /// One thread evicts at a time.
    evicting: Mutex<()>,
    /// The capacity since a write found no room, and the time of that write.
    shrunk: Mutex<Option<(u64, Instant)>>,
    listing: Mutex<listing::State>,
    listing_changed: Condvar,
    is_stopping: AtomicBool,
    is_evictor: AtomicBool,
    /// Bytes that are counted and not written yet, of this process.
    reserved: AtomicU64,
    /// Bytes of files that this process has finished.
    finished: AtomicU64,
    evictions: AtomicU64,
    skipped_removals: AtomicU64,
    /// Whether it was told that the folder was removed.
    is_noted: AtomicBool,
}

impl Inner {
    /// Returns whether the folder was removed, or everything in it. One that is only read has
    /// nothing to be made again.
    fn is_removed(&self) -> bool {
        self.ledger.as_ref().is_some_and(Ledger::is_removed)
    }

    fn stats(&self, deadline: Instant) -> DiskStats {
        let ledger = self.ledger.as_ref();
        let held = ledger.and_then(|l| l.change(deadline, |usage| usage.held).ok().flatten());
        let is_listed = self.listing_state().is_complete;
        let index = self.index();
        DiskStats {
            held_bytes: held,
            limit_bytes: self.limit(held.unwrap_or_else(|| index.charged())),
            known_files: to_u64(index.len()),
            known_bytes: index.charged(),
            is_listed,
            is_evictor: self.is_evictor.load(Ordering::Relaxed),
            is_read_only: ledger.is_none(),
            is_direct: self.files.is_direct(),
            evictions: self.evictions.load(Ordering::Relaxed),
            skipped_removals: self.skipped_removals.load(Ordering::Relaxed),
        }
    }

    fn index(&self) -> MutexGuard<'_, Index> {
        self.index.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn listing_state(&self) -> MutexGuard<'_, listing::State> {
        self.listing.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
