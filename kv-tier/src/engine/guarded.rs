//! A store behind guards of its callers: deadlines, circuit breakers, counters.
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use kv_core::events::Tier;
use kv_core::num::{to_f64, to_u64};

use super::breaker::{Breaker, Permit};
use super::lane::Hung;
use super::options::StoreOptions;
use super::rates::TransferRates;
use super::stats::StoreStats;
use crate::chunk::{ChunkError, ChunkErrorKind, Verified, verify};
use crate::record::Record;
use crate::store::{BlockStore, ChunkAddress, Put, Scope, StoreError, StoreErrorKind, after};

/// A store behind two circuit breakers, one for reads and one for writes: a store that is full or
/// read-only is still read.
pub(super) struct GuardedStore {
    store: Box<dyn BlockStore>,
    options: StoreOptions,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    reads: Breaker,
    writes: Breaker,
    rates: TransferRates,
    stats: StoreStats,
    spent: DayBudget,
}

/// A removal that a store carries out.
#[derive(Debug, Clone)]
pub(super) enum Removal {
    Chunks(Vec<ChunkAddress>),
    Scope(Scope),
}

impl fmt::Display for Removal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Chunks(chunks) => write!(f, "removal of {} chunks", chunks.len()),
            Self::Scope(scope) => write!(f, "removal of {scope}"),
        }
    }
}

/// The reason for which a write did not reach the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum NotWritten {
    /// The breaker opened while it waited, or no thread was left for it.
    Breaker,
    /// The bytes of the day are used up.
    Budget {
        /// Start of the next day.
        until: Instant,
    },
    /// The store failed.
    Failed,
    /// The chunk was forgotten while it waited.
    Forgotten,
}

/// The outcome of a read.
#[derive(Debug)]
pub(super) enum Read<C> {
    /// The chunk that was wanted.
    Verified(Verified<Arc<C>>),
    /// The store has no such chunk, or another one under its name.
    Missing,
    /// The store failed, or its breaker is open.
    Failed,
}

impl GuardedStore {
    pub(super) fn new(store: Box<dyn BlockStore>, options: StoreOptions) -> Self {
        Self { store, options, state: Mutex::default() }
    }

    pub(super) fn tier(&self) -> Tier {
        self.store.tier()
    }
    pub(super) fn options(&self) -> &StoreOptions {
        &self.options
    }
    /// Returns the latency and the bytes per second of reads by all threads: those that were given,
    /// or else those that were measured.
    pub(super) fn read_rates(&self) -> (Duration, Option<f64>) {
        if let Some((latency, bytes_per_second)) = self.options.rates {
            return (latency, Some(bytes_per_second));
        }
        let rates = self.lock().rates;
        let threads = to_f64(to_u64(self.options.threads));
        (rates.latency(), rates.bytes_per_second().map(|one| one * threads))
    }
    pub(super) fn stats(&self) -> StoreStats {
        let state = self.lock();
        StoreStats {
            reads_breaker: state.reads.state(),
            writes_breaker: state.writes.state(),
            breaker_opened: state.reads.opened() + state.writes.opened(),
            bytes_per_second: state.rates.bytes_per_second(),
            ..state.stats.clone()
        }
    }

    /// Returns which of a prompt's chunks are there, in their order, as far as the store says: up
    /// to the first missing one if `stops` says so.
    pub(super) fn lookup(&self, permit: Permit, chunks: &[ChunkAddress], stops: bool) -> Vec<bool> {
        /// Chunks of one question.
        const BATCH: usize = 64;
        let start = Instant::now();
        let deadline = after(start, self.options.lookup_deadline);
        let mut found = Vec::with_capacity(chunks.len());
        for (number, batch) in chunks.chunks(BATCH).enumerate() {
            let permit = if number == 0 { permit } else { Permit::Call };
            if !self.lock().reads.is_valid(permit) {
                break;
            }
            let answer = guarded(|| self.store.contains(batch, deadline), "lookup");
            self.note_repaired();
            let mut state = self.lock();
            let Ok(mut answer) = state.note_read_result(answer) else { break };
            state.rates.note_lookup(start.elapsed());
            answer.resize(batch.len(), false);
            let has_all = answer.iter().all(|is_there| *is_there);
            found.extend(answer);
            if stops && !has_all {
                break;
            }
        }
        let mut state = self.lock();
        let there = found.iter().filter(|is_there| **is_there).count();
        state.stats.lookups += to_u64(chunks.len());
        state.stats.found += to_u64(there);
        drop(state);
        found
    }

    /// Reads one chunk to `into` and verifies it. Removes a wrong chunk from the store.
    pub(super) fn read<C>(&self, record: &Record, mut into: C, deadline: Instant) -> Read<C>
    where
        C: AsRef<[u8]> + AsMut<[u8]>,
    {
        if self.begin_lookup().is_none() {
            return Read::Failed;
        }
        let (address, start) = (record.address(), Instant::now());
        let answer = guarded(|| self.store.get(&address, into.as_mut(), deadline), "read");
        let time = start.elapsed();
        let is_corrupt =
            answer.as_ref().is_err_and(|error| error.kind() == StoreErrorKind::Corrupt);
        let answer = self.lock().note_read_result(answer);
        let bytes = match answer {
            Ok(Some(bytes)) => bytes,
            Ok(None) => {
                let mut state = self.lock();
                state.stats.missed += 1;
                return Read::Missing;
            }
            Err(()) if is_corrupt => {
                self.refuse(&address, ChunkErrorKind::Length);
                return Read::Missing;
            }
            Err(()) => return Read::Failed,
        };
        let chunk = match check(record, into, bytes) {
            Ok(chunk) => chunk,
            Err(error) => {
                self.refuse(&address, error.kind());
                return Read::Missing;
            }
        };
        let mut state = self.lock();
        state.rates.note_read(bytes, time);
        state.stats.reads += 1;
        state.stats.read_bytes += to_u64(bytes);
        state.stats.read_time += time;
        drop(state);
        Read::Verified(chunk)
    }

    /// Counts a wrong chunk, and removes it unless others may want it.
    fn refuse(&self, address: &ChunkAddress, kind: ChunkErrorKind) {
        let mut state = self.lock();
        let refused = state.stats.refused.entry(kind).or_default();
        *refused += 1;
        drop(state);
        if kind.is_foreign() || self.begin_write().is_none() {
            return;
        }
        let deadline = after(Instant::now(), self.options.lookup_deadline);
        let removed = guarded(|| self.store.remove(&[*address], deadline), "removal");
        // It cannot be removed by this user: it is refused again next time. A failure is counted.
        if !removed.as_ref().is_err_and(|error| error.kind() == StoreErrorKind::Denied) {
            let _: Result<(), ()> = self.lock().note_write_result(removed);
        }
    }

    /// Writes one chunk.
    pub(super) fn write(
        &self,
        permit: Permit,
        address: &ChunkAddress,
        bytes: &[u8],
    ) -> Result<Put, NotWritten> {
        let (now, length) = (Instant::now(), to_u64(bytes.len()));
        let mut state = self.lock();
        if !state.writes.is_valid(permit) {
            return Err(NotWritten::Breaker);
        }
        let taken = state.spent.take(now, length, self.options.bytes_per_day);
        taken.map_err(|until| NotWritten::Budget { until })?;
        drop(state);
        let deadline = after(now, self.options.write_deadline);
        let put = guarded(|| self.store.put(address, bytes, deadline), "write");
        self.note_repaired();
        let mut state = self.lock();
        if !matches!(put, Ok(Put::New)) {
            state.spent.give_back(length);
        }
        let put = state.note_write_result(put).map_err(|()| NotWritten::Failed)?;
        let counters = &mut state.stats;
        match put {
            Put::New => {
                counters.writes += 1;
                counters.written_bytes += length;
                counters.write_time += now.elapsed();
            }
            Put::WasThere => counters.were_there += 1,
        }
        Ok(put)
    }

    /// Removes chunks that must be forgotten, whatever the state of the breaker.
    pub(super) fn remove(&self, removal: &Removal, deadline: Instant) -> Result<(), StoreError> {
        let remove = || match removal {
            Removal::Chunks(chunks) => {
                let mut batches = chunks.chunks(REMOVED_AT_ONCE);
                batches.try_for_each(|chunks| self.store.remove(chunks, deadline))
            }
            Removal::Scope(scope) => self.store.remove_all(scope, deadline).map(drop),
        };
        let removed = guarded(remove, "removal");
        // A store that cannot list works as it should.
        if !removed.as_ref().is_err_and(|error| error.kind() == StoreErrorKind::Unsupported) {
            let State { writes, stats, .. } = &mut *self.lock();
            count(writes, stats, &removed);
        }
        removed
    }

    /// Counts calls that have not returned by their deadlines. If no thread is left, the breaker
    /// opens.
    pub(super) fn note_hung(&self, hung: &Hung) {
        if *hung == Hung::default() {
            return;
        }
        let mut state = self.lock();
        let late = |operation| StoreError::new(StoreErrorKind::Timeout, operation);
        for _ in 0..hung.urgent {
            let error = late("lookup or read that has not returned");
            let _: Result<(), ()> = state.note_read_result(Err(error));
        }
        for _ in 0..hung.other {
            let error = late("write that has not returned");
            let _: Result<(), ()> = state.note_write_result(Err(error));
        }
        let now = Instant::now();
        if hung.blocks_urgent {
            state.reads.trip(now);
        }
        if hung.blocks_other {
            state.writes.trip(now);
        }
    }
    /// Counts a failure that the store has repaired: it answers, so its breaker stays closed.
    fn note_repaired(&self) {
        if let Some(error) = self.store.take_repaired() {
            self.lock().stats.note_failure(&error);
        }
    }
    /// Counts a write that found the queue full when host memory gave its chunk up.
    pub(super) fn note_dropped_by_queue(&self) {
        let mut state = self.lock();
        state.stats.dropped_by_queue += 1;
    }
    /// Counts a write that is not repeated, or not on this day. Failures have been counted.
    pub(super) fn note_dropped(&self, why: NotWritten) {
        let stats = &mut self.lock().stats;
        let dropped = match why {
            NotWritten::Breaker => &mut stats.dropped_by_breaker,
            NotWritten::Budget { .. } => &mut stats.dropped_by_budget,
            NotWritten::Failed | NotWritten::Forgotten => return,
        };
        *dropped += 1;
    }
    /// Returns whether a lookup may reach the store now; its permit goes to [`Self::lookup`].
    pub(super) fn begin_lookup(&self) -> Option<Permit> {
        self.lock().reads.admits(Instant::now())
    }
    /// Returns whether a write may reach the store now; its permit goes to [`Self::write`].
    pub(super) fn begin_write(&self) -> Option<Permit> {
        self.lock().writes.admits(Instant::now())
    }
    /// Returns when the breaker of writes lets the next one through; `None` while it is closed.
    pub(super) fn retry_at(&self) -> Option<Instant> {
        self.lock().writes.retry_at()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Verifies a read chunk. Bytes past the end of a short answer belong to an earlier chunk and must
/// not complete this one.
fn check<C>(record: &Record, chunk: C, bytes: usize) -> Result<Verified<Arc<C>>, ChunkError>
where
    C: AsRef<[u8]> + AsMut<[u8]>,
{
    let expected = chunk.as_ref().len();
    if bytes != expected {
        let (expected, got) = (to_u64(expected), to_u64(bytes));
        return Err(ChunkError::Length { expected, got });
    }
    verify(Arc::new(chunk), &record.expectation())
}

impl State {
    fn note_read_result<T>(&mut self, result: Result<T, StoreError>) -> Result<T, ()> {
        note(&mut self.reads, &mut self.stats, result)
    }
    fn note_write_result<T>(&mut self, result: Result<T, StoreError>) -> Result<T, ()> {
        note(&mut self.writes, &mut self.stats, result)
    }
}

/// Counts a result for a breaker and in the statistics.
fn note<T>(
    breaker: &mut Breaker,
    stats: &mut StoreStats,
    result: Result<T, StoreError>,
) -> Result<T, ()> {
    count(breaker, stats, &result);
    result.map_err(drop)
}

fn count<T>(breaker: &mut Breaker, stats: &mut StoreStats, result: &Result<T, StoreError>) {
    // A store that returns bytes of no chunk has answered.
    let failure = result.as_ref().err().filter(|error| error.kind() != StoreErrorKind::Corrupt);
    let Some(error) = failure else { return breaker.succeeded() };
    stats.note_failure(error);
    breaker.failed(Instant::now());
}

/// Calls a store; a panic of a caller's store is a failure like any other.
fn guarded<T>(
    call: impl FnOnce() -> Result<T, StoreError>,
    operation: &str,
) -> Result<T, StoreError> {
    // A store that panicked is called again only through its shared reference, as before.
    catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(|_| {
        Err(StoreError::new(StoreErrorKind::Other, format!("{operation}, which panicked")))
    })
}

/// The bytes written in the last day, in a window that moves by days.
#[derive(Debug, Default)]
struct DayBudget {
    began: Option<Instant>,
    spent: u64,
}

impl DayBudget {
    const DAY: Duration = Duration::from_hours(24);

    /// Takes the bytes of a write before it begins, so that writes side by side stay within the
    /// limit; if they are not left, returns when the next day begins.
    fn take(&mut self, now: Instant, bytes: u64, limit: Option<u64>) -> Result<(), Instant> {
        let mut began = *self.began.get_or_insert(now);
        if now.saturating_duration_since(began) >= Self::DAY {
            *self = Self { began: Some(now), spent: 0 };
            began = now;
        }
        let spent = self.spent + bytes;
        if limit.is_some_and(|limit| spent > limit) {
            return Err(after(began, Self::DAY));
        }
        self.spent = spent;
        Ok(())
    }
    /// Gives back the unused bytes of a write, which may have begun on another day.
    fn give_back(&mut self, bytes: u64) {
        self.spent = self.spent.saturating_sub(bytes);
    }
}

/// Chunks of one call that removes them.
const REMOVED_AT_ONCE: usize = 256;

impl fmt::Debug for GuardedStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GuardedStore")
            .field("store", &self.store)
            .field("options", &self.options)
            .finish_non_exhaustive()
    }
}
