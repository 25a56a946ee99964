//! The shared count of bytes of all processes of a folder, which keeps their sum in bounds.
//!
//! A process adds a file's bytes before it writes the file, and subtracts them after it has removed
//! one. A process that ends in between leaves the count too high, never too low; the next listing
//! corrects it. Locks are `flock`s, which the kernel drops with the process.
//!
//! | file | what it is |
//! |---|---|
//! | `kv-tier.usage` | the count; locked while it is changed |
//! | `kv-tier.changes` | locked shared to write or remove files, exclusively to correct the count |
//! | `kv-tier.evict` | locked for good by the process that evicts |
// Reads bytes that may be anything.
#![warn(clippy::arithmetic_side_effects, clippy::indexing_slicing)]
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, TryLockError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use rustix::{fs, io};

use super::error::failed;
use crate::store::check_deadline;
use crate::{StoreError, StoreErrorKind};

/// The counts that the processes of a folder share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Usage {
    /// Bytes of all files, and of those that are being written; `None` until a listing tells.
    pub(super) held: Option<u64>,
    /// Bytes of all files that were ever finished.
    pub(super) finished: u64,
    /// Room that a process which does not evict has not found since the last look.
    pub(super) wanted: u64,
}

#[derive(Debug)]
pub(super) struct Ledger {
    usage: OwnedFd,
    changes: OwnedFd,
    evict: OwnedFd,
    /// Locks of files do not tell the threads of a process apart.
    threads: Mutex<()>,
    /// Set while a thread waits to correct the count; new changes of this process begin after it.
    is_excluding: AtomicBool,
}

impl Ledger {
    /// Opens the files, and makes them if there are none.
    pub(super) fn open(root: &OwnedFd) -> io::Result<Self> {
        let flags = OFlags::CREATE | OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let open = |name| fs::openat(root, name, flags, Mode::from_raw_mode(0o666));
        let (usage, changes, evict) = (open(USAGE)?, open(CHANGES)?, open(EVICT)?);
        // Without locks nothing holds; better now than later.
        match fs::flock(&evict, FlockOperation::NonBlockingLockShared) {
            Ok(()) => fs::flock(&evict, FlockOperation::Unlock)?,
            Err(Errno::WOULDBLOCK) => {}
            Err(errno) => return Err(errno),
        }
        Ok(Self {
            usage,
            changes,
            evict,
            threads: Mutex::new(()),
            is_excluding: AtomicBool::new(false),
        })
    }

    /// Returns whether the files were removed, with the folder or without it.
    pub(super) fn is_removed(&self) -> bool {
        match fs::fstat(&self.usage) {
            Ok(stat) => stat.st_nlink == 0,
            // A network file system says it this way.
            Err(errno) => errno == Errno::STALE,
        }
    }

    /// Sets the count of a new folder to 0, if no process has.
    pub(super) fn start(&self, deadline: Instant) -> Result<(), StoreError> {
        self.change(deadline, |usage| _ = usage.held.get_or_insert(0))
    }

    /// Changes the count.
    pub(super) fn change<R>(
        &self,
        deadline: Instant,
        change: impl FnOnce(&mut Usage) -> R,
    ) -> Result<R, StoreError> {
        let _threads = lock_until(&self.threads, deadline)?;
        let _processes = Locked::new(&self.usage, EXCLUSIVE, deadline)?;
        let before = self.load()?;
        let mut usage = before;
        let result = change(&mut usage);
        if usage != before {
            self.save(usage)?;
        }
        Ok(result)
    }

    /// Uncounts a file that was removed or not written.
    pub(super) fn release(&self, charge: u64) {
        // Without the lock the count stays too high until the next listing.
        let _ = self.change(grace(), |usage| {
            usage.held = usage.held.map(|held| held.saturating_sub(charge));
        });
    }

    /// Enters the files' writers and removers; the guard ends that.
    pub(super) fn enter(&self, root: &OwnedFd, deadline: Instant) -> Result<OwnedFd, StoreError> {
        while self.is_excluding.load(Ordering::Relaxed) {
            pause(deadline)?;
        }
        // A descriptor of one's own, because a lock belongs to the descriptor.
        let flags = OFlags::CREATE | OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let file = fs::openat(root, CHANGES, flags, Mode::from_raw_mode(0o666))
            .map_err(|errno| failed("open of", CHANGES, errno))?;
        wait_for_lock(&file, FlockOperation::NonBlockingLockShared, deadline)?;
        Ok(file)
    }

    /// Waits until no process writes or removes files, and excludes all of them.
    pub(super) fn exclude(&self, deadline: Instant) -> Result<Locked<'_>, StoreError> {
        self.is_excluding.store(true, Ordering::Relaxed);
        let locked = Locked::new(&self.changes, EXCLUSIVE, deadline);
        self.is_excluding.store(false, Ordering::Relaxed);
        locked
    }

    /// Returns whether this process evicts; it becomes the one that does if there is none.
    pub(super) fn try_evict(&self) -> bool {
        fs::flock(&self.evict, EXCLUSIVE).is_ok()
    }

    fn load(&self) -> Result<Usage, StoreError> {
        let mut bytes = [0; USAGE_BYTES];
        let read = io::pread(&self.usage, &mut bytes, 0)
            .map_err(|errno| failed("read of", USAGE, errno))?;
        let (numbers, _) = bytes.as_chunks::<8>();
        let &[magic, held, finished, wanted] = numbers else { return Ok(UNKNOWN) };
        if read != USAGE_BYTES || magic != MAGIC {
            return Ok(UNKNOWN);
        }
        let [held, finished, wanted] = [held, finished, wanted].map(u64::from_le_bytes);
        Ok(Usage { held: (held != u64::MAX).then_some(held), finished, wanted })
    }

    fn save(&self, usage: Usage) -> Result<(), StoreError> {
        let mut bytes = [0; USAGE_BYTES];
        let numbers = [usage.held.unwrap_or(u64::MAX), usage.finished, usage.wanted];
        let [held, finished, wanted] = numbers.map(u64::to_le_bytes);
        let numbers = [MAGIC, held, finished, wanted];
        for (to, from) in bytes.iter_mut().zip(numbers.as_flattened()) {
            *to = *from;
        }
        match io::pwrite(&self.usage, &bytes, 0) {
            Ok(USAGE_BYTES) => Ok(()),
            Ok(_) => Err(failed("write of", USAGE, Errno::NOSPC)),
            Err(errno) => Err(failed("write of", USAGE, errno)),
        }
    }
}

/// A lock of a file, until it is dropped.
#[derive(Debug)]
pub(super) struct Locked<'a>(&'a OwnedFd);

impl<'a> Locked<'a> {
    fn new(
        file: &'a OwnedFd,
        operation: FlockOperation,
        deadline: Instant,
    ) -> Result<Self, StoreError> {
        wait_for_lock(file, operation, deadline)?;
        Ok(Self(file))
    }
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        let _ = fs::flock(self.0, FlockOperation::Unlock);
    }
}

/// Locks a mutex, or gives up at the deadline: its owner may be blocked in the kernel.
pub(super) fn lock_until<T>(
    mutex: &Mutex<T>,
    deadline: Instant,
) -> Result<MutexGuard<'_, T>, StoreError> {
    loop {
        match mutex.try_lock() {
            Ok(guard) => return Ok(guard),
            Err(TryLockError::Poisoned(poisoned)) => return Ok(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => pause(deadline)?,
        }
    }
}

/// The deadline of a count that must be brought to an end.
pub(super) fn grace() -> Instant {
    let now = Instant::now();
    now.checked_add(GRACE).unwrap_or(now)
}

fn wait_for_lock(
    file: &OwnedFd,
    operation: FlockOperation,
    deadline: Instant,
) -> Result<(), StoreError> {
    loop {
        match fs::flock(file, operation) {
            Ok(()) => return Ok(()),
            Err(Errno::WOULDBLOCK | Errno::INTR) => pause(deadline)?,
            Err(errno) => {
                return Err(StoreError::new(StoreErrorKind::Unavailable, LOCK)
                    .with_source(std::io::Error::from(errno)));
            }
        }
    }
}

fn pause(deadline: Instant) -> Result<(), StoreError> {
    check_deadline(deadline, LOCK)?;
    thread::sleep(PAUSE);
    Ok(())
}

const LOCK: &str = "lock of the folder";
/// Between two attempts to take a lock. It is held for microseconds.
const PAUSE: Duration = Duration::from_micros(50);
const GRACE: Duration = Duration::from_millis(50);
const EXCLUSIVE: FlockOperation = FlockOperation::NonBlockingLockExclusive;
const USAGE: &str = "kv-tier.usage";
const CHANGES: &str = "kv-tier.changes";
const EVICT: &str = "kv-tier.evict";
const MAGIC: [u8; 8] = *b"KVUSAGE1";
const USAGE_BYTES: usize = 32;
const UNKNOWN: Usage = Usage { held: None, finished: 0, wanted: 0 };
