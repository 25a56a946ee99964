//! Room for a file: the bound, the count that all processes share, and eviction.
use std::mem;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::Inner;
use super::error::refused;
use super::ledger::{Ledger, Usage, grace, lock_until};
use super::path;
use crate::store::check_deadline;
use crate::{StoreError, StoreErrorKind};

impl Inner {
    /// Counts a file before it is written; evicts others where it does not fit. `false` if the
    /// folder must be listed first.
    pub(super) fn reserve(
        &self,
        ledger: &Ledger,
        need: u64,
        path: &str,
        deadline: Instant,
    ) -> Result<bool, StoreError> {
        let full = || Err(refused(StoreErrorKind::Full, "room for", path));
        loop {
            let reserved =
                ledger.change(deadline, |usage| self.try_reserve(ledger, usage, need))?;
            let (held, limit) = match reserved {
                Reserved::Done => return Ok(true),
                Reserved::Unknown => return Ok(false),
                Reserved::Full => return full(),
                Reserved::Over { held, limit } => (held, limit),
            };
            if !self.is_evictor.swap(true, Ordering::Relaxed) {
                // The process that evicted before has gone, and its index with it.
                self.request_listing();
            }
            if !self.listing_state().is_complete {
                return Ok(false);
            }
            let _evicting = lock_until(&self.evicting, deadline)?;
            let goal = goal(held, limit, need);
            if self.evict(ledger, goal, deadline)? == 0 {
                self.request_listing();
                return full();
            }
        }
    }

    /// Counts a reserved file as finished; a listing that has not seen it adds it then.
    pub(super) fn finish(&self, ledger: &Ledger, charge: u64) -> Result<(), StoreError> {
        ledger.change(grace(), |usage| {
            usage.finished = usage.finished.wrapping_add(charge);
            self.finished.fetch_add(charge, Ordering::Relaxed);
        })
    }

    /// Evicts down to the bound: it may have become smaller since the files were written.
    pub(super) fn trim(&self, ledger: &Ledger, deadline: Instant) -> Result<(), StoreError> {
        if !self.is_evictor.load(Ordering::Relaxed) {
            return Ok(());
        }
        let _entered = ledger.enter(self.files.root(), deadline)?;
        let _evicting = lock_until(&self.evicting, deadline)?;
        let held = ledger.change(deadline, |usage| usage.held)?.unwrap_or(0);
        let goal = held.saturating_sub(self.limit(held));
        if goal > 0 {
            self.evict(ledger, goal, deadline)?;
        }
        Ok(())
    }

    /// Reduces the capacity to the present bytes for a while: the disk has no room.
    pub(super) fn shrink(&self, ledger: &Ledger) {
        let held = ledger.change(grace(), |usage| usage.held).ok().flatten();
        let mut shrunk = self.shrunk.lock().unwrap_or_else(PoisonError::into_inner);
        *shrunk = held.map(|held| (held, Instant::now()));
    }

    /// Returns the most bytes that files may count for now.
    pub(super) fn limit(&self, held: u64) -> u64 {
        let mut limit = self.capacity;
        let shrunk = *self.shrunk.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((bytes, _)) = shrunk.filter(|(_, since)| since.elapsed() < SHRUNK_FOR) {
            limit = limit.min(bytes);
        }
        if let Some((free, size)) = self.files.space() {
            let floor = self.options.floor().unwrap_or(size / FLOOR_PART);
            // Saturating: files and file systems may report anything.
            let written = held.saturating_sub(self.reserved.load(Ordering::Relaxed));
            limit = limit.min(written.saturating_add(free).saturating_sub(floor));
        }
        limit
    }

    /// Makes the room that other processes have not found, if this one evicts.
    pub(super) fn serve(&self, ledger: &Ledger, deadline: Instant) -> Result<(), StoreError> {
        if !self.is_evictor.load(Ordering::Relaxed) {
            return Ok(());
        }
        let wanted = ledger.change(deadline, |usage| mem::take(&mut usage.wanted))?;
        if wanted == 0 {
            return Ok(());
        }
        let _entered = ledger.enter(self.files.root(), deadline)?;
        let _evicting = lock_until(&self.evicting, deadline)?;
        let held = ledger.change(deadline, |usage| usage.held)?.unwrap_or(0);
        let goal = goal(held, self.limit(held), wanted);
        if self.evict(ledger, goal, deadline)? < goal {
            // Files that other processes have written are not known here yet.
            self.request_listing();
        }
        Ok(())
    }

    // Charges of files are read from disks, where they may be anything: no overflow here.
    fn try_reserve(&self, ledger: &Ledger, usage: &mut Usage, need: u64) -> Reserved {
        let Some(held) = usage.held else { return Reserved::Unknown };
        let (after, limit) = (held.saturating_add(need), self.limit(held));
        if after <= limit {
            usage.held = Some(after);
            self.reserved.fetch_add(need, Ordering::Relaxed);
            Reserved::Done
        } else if need > limit {
            Reserved::Full
        } else if ledger.try_evict() {
            Reserved::Over { held, limit }
        } else {
            usage.wanted = usage.wanted.max(need);
            Reserved::Full
        }
    }

    /// Removes the least recently used files until `goal` bytes are free; returns how many are.
    fn evict(&self, ledger: &Ledger, goal: u64, deadline: Instant) -> Result<u64, StoreError> {
        let (mut freed, mut tries) = (0_u64, self.index().len());
        let mut outcome = Ok(());
        while freed < goal && tries > 0 && outcome.is_ok() {
            tries -= 1;
            let Some(chunk) = self.index().oldest() else { break };
            if let Ok(was_there) = self.files.remove(&path::of(&chunk)) {
                let entry = self.index().remove(&chunk);
                if let Some(entry) = entry.filter(|_| was_there) {
                    // Lengths of files may be anything.
                    freed = freed.saturating_add(entry.charge);
                    self.evictions.fetch_add(1, Ordering::Relaxed);
                }
            } else {
                self.index().renew(&chunk);
                self.skipped_removals.fetch_add(1, Ordering::Relaxed);
            }
            outcome = check_deadline(deadline, "eviction");
        }
        ledger.release(freed);
        outcome.map(|()| freed)
    }
}

/// Returns the bytes to evict, so that `need` more fit below the low mark. Saturating, because
/// charges of files may be anything.
fn goal(held: u64, limit: u64, need: u64) -> u64 {
    let low = limit - limit / LOW_MARK_PART;
    held.saturating_add(need).saturating_sub(low)
}

enum Reserved {
    Done,
    /// It does not fit, and nothing that this process may do changes that.
    Full,
    /// Others must go first.
    Over {
        held: u64,
        limit: u64,
    },
    /// The amount is unknown.
    Unknown,
}

/// Divisor of the limit: the part that is evicted at a time.
const LOW_MARK_PART: u64 = 32;
/// Divisor of the file system: the part that stays free by default.
const FLOOR_PART: u64 = 20;
/// Time that the capacity stays reduced after a write found no room on the disk.
const SHRUNK_FOR: Duration = Duration::from_mins(1);
