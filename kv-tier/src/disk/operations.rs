//! The operations of a store, on the state that its calls and the listing thread share.
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;
use std::time::Instant;

use kv_core::num::to_u64;

use super::error::refused;
use super::files::{Part, Status, charge};
use super::ledger::Ledger;
use super::{Inner, index, path};
use crate::store::check_deadline;
use crate::{ChunkAddress, Put, StoreError, StoreErrorKind};

impl Inner {
    pub(super) fn contains(
        &self,
        chunks: &[ChunkAddress],
        deadline: Instant,
    ) -> Result<Vec<bool>, StoreError> {
        check_deadline(deadline, "lookup on disk")?;
        let mut are_there: Vec<_> = {
            let index = self.index();
            chunks.iter().map(|chunk| index.contains(chunk)).collect()
        };
        for (chunk, is_there) in chunks.iter().zip(&mut are_there).filter(|(_, known)| !**known) {
            check_deadline(deadline, "lookup on disk")?;
            if let Some(status) = self.files.status(&path::of(chunk))?.filter(|s| s.is_file) {
                self.index().insert(*chunk, charge(status.length), status.modified);
                *is_there = true;
            }
        }
        let mut index = self.index();
        for (chunk, _) in chunks.iter().zip(&are_there).rev().filter(|(_, is_there)| **is_there) {
            index.renew(chunk);
        }
        Ok(are_there)
    }

    pub(super) fn get(
        &self,
        chunk: &ChunkAddress,
        into: &mut [u8],
        deadline: Instant,
    ) -> Result<Option<usize>, StoreError> {
        check_deadline(deadline, "read from disk")?;
        let path = path::of(chunk);
        let Some((bytes, status)) = self.files.read(&path, into, Part::Whole, deadline)? else {
            self.index().remove(chunk);
            return Ok(None);
        };
        let mut index = self.index();
        if index.contains(chunk) {
            index.renew_old(chunk);
        } else {
            index.insert(*chunk, charge(status.length), status.modified);
        }
        let must_stamp = self.ledger.is_some() && index.must_stamp(chunk, STAMP_AFTER);
        drop(index);
        if must_stamp {
            self.files.stamp(&path);
        }
        Ok(Some(bytes))
    }

    pub(super) fn put(
        &self,
        chunk: &ChunkAddress,
        bytes: &[u8],
        deadline: Instant,
    ) -> Result<Put, StoreError> {
        const WRITE: &str = "write of";
        check_deadline(deadline, "write to disk")?;
        let path = path::of(chunk);
        let Some(ledger) = &self.ledger else {
            return Err(refused(StoreErrorKind::Denied, WRITE, &path));
        };
        if bytes.is_empty() {
            return Err(refused(StoreErrorKind::Corrupt, WRITE, &path));
        }
        let length = to_u64(bytes.len());
        match self.files.status(&path)? {
            None => {}
            // A folder, a link, a pipe: nothing that a store has made.
            Some(status) if !status.is_file => {
                let removed = self.remove(std::slice::from_ref(chunk), deadline);
                if removed.as_ref().is_err_and(|error| error.kind() == StoreErrorKind::Denied) {
                    return Err(refused(StoreErrorKind::Corrupt, "no file at", &path));
                }
                removed?;
            }
            Some(status) if status.length == length => {
                self.index().insert(*chunk, charge(length), status.modified);
                return Ok(Put::WasThere);
            }
            Some(_) => self.remove(std::slice::from_ref(chunk), deadline)?,
        }
        loop {
            let entered = ledger.enter(self.files.root(), deadline)?;
            if self.reserve(ledger, charge(length), &path, deadline)? {
                let put = self.write(ledger, chunk, (&path, bytes), deadline);
                drop(entered);
                return put;
            }
            drop(entered);
            let was_listed = self.listing_state().is_complete;
            if was_listed {
                self.request_listing();
                return Err(refused(StoreErrorKind::Unavailable, "count of bytes for", &path));
            }
            self.wait_listed(deadline);
            check_deadline(deadline, "listing before a write")?;
        }
    }

    /// Writes a file whose bytes are counted already.
    fn write(
        &self,
        ledger: &Ledger,
        chunk: &ChunkAddress,
        (path, bytes): (&str, &[u8]),
        deadline: Instant,
    ) -> Result<Put, StoreError> {
        let need = charge(to_u64(bytes.len()));
        let mut put = self.files.write(path, bytes, deadline);
        let mut is_written = matches!(put, Ok(Put::New));
        if is_written {
            // Known before it is counted as finished, so that a listing does not count it twice.
            self.index().insert(*chunk, need, index::now());
            if let Err(error) = self.finish(ledger, need) {
                self.index().remove(chunk);
                is_written = self.files.remove(path).is_err();
                put = Err(error);
            }
        }
        if !is_written {
            ledger.release(need);
        }
        self.reserved.fetch_sub(need, Ordering::Relaxed);
        if put.as_ref().is_err_and(|error| error.kind() == StoreErrorKind::Full) {
            self.shrink(ledger);
        }
        put
    }

    pub(super) fn remove(
        &self,
        chunks: &[ChunkAddress],
        deadline: Instant,
    ) -> Result<(), StoreError> {
        remove(self.ledger.as_ref(), self.files.root(), chunks, deadline, |chunk| {
            self.remove_one(chunk)
        })
    }

    /// Removes a file; returns the bytes that it counted for.
    fn remove_one(&self, chunk: &ChunkAddress) -> Result<u64, StoreError> {
        let path = path::of(chunk);
        let known = self.index().get(chunk).map(|entry| entry.charge);
        let counted = match known {
            Some(charge) => charge,
            None => self.files.status(&path)?.map_or(0, Status::charge),
        };
        let was_there = self.files.remove(&path)?;
        self.index().remove(chunk);
        Ok(if was_there { counted } else { 0 })
    }
}

/// Removes files by `remove_one`, which returns the bytes that a file counted for, and uncounts
/// them. After one that cannot be removed it goes on, and returns the first error.
pub(super) fn remove(
    ledger: Option<&Ledger>,
    root: &OwnedFd,
    chunks: &[ChunkAddress],
    deadline: Instant,
    mut remove_one: impl FnMut(&ChunkAddress) -> Result<u64, StoreError>,
) -> Result<(), StoreError> {
    const REMOVAL: &str = "removal from disk";
    check_deadline(deadline, REMOVAL)?;
    let Some(ledger) = ledger else {
        return Err(StoreError::new(StoreErrorKind::Denied, REMOVAL));
    };
    let _entered = ledger.enter(root, deadline)?;
    let (mut freed, mut outcome) = (0_u64, Ok(()));
    for chunk in chunks {
        if let Err(error) = check_deadline(deadline, REMOVAL) {
            outcome = outcome.and(Err(error));
            break;
        }
        match remove_one(chunk) {
            // Lengths of files may be anything.
            Ok(bytes) => freed = freed.saturating_add(bytes),
            Err(error) => outcome = outcome.and(Err(error)),
        }
    }
    if freed > 0 {
        ledger.release(freed);
    }
    outcome
}

/// Age of a file's time, in microseconds, from which on a use sets it anew.
const STAMP_AFTER: u64 = 60_000_000;
