//! Counters of all tiers.
use std::collections::BTreeMap;
use std::time::Duration;

use super::breaker::BreakerState;
use crate::chunk::ChunkErrorKind;
use crate::store::{StoreError, StoreErrorKind};

/// Counts of all tiers since their creation.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct TiersStats {
    /// Chunks in host memory.
    pub host_chunks: u64,
    /// Their bytes.
    pub host_bytes: u64,
    /// Bytes of host memory for chunks.
    pub host_capacity: u64,
    /// Chunks that host memory gave up for others.
    pub host_evictions: u64,
    /// Chunks copied from the device.
    pub offloaded: u64,
    /// Chunks of which a block had left the device before it was copied.
    pub offload_missed: u64,
    /// Blocks that no chunk can hold: of an adapter without a digest, with too many contents of
    /// placeholder tokens, or whose earlier blocks were never seen.
    pub unnamed_blocks: u64,
    /// Prefetches that have begun.
    pub prefetches: u64,
    /// Prefetches whose wait limit passed before everything had come.
    pub late: u64,
    /// Tokens brought to the device for prompts that started.
    pub loaded_tokens: u64,
    /// Tokens that a store had and that were sooner computed than read.
    pub cheaper_to_compute: u64,
    /// Imports for which the device had too few free blocks.
    pub no_room: u64,
    /// One entry for each store, in the order of the options.
    pub stores: Vec<StoreStats>,
}

/// Counts of one store since its creation.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct StoreStats {
    /// Chunks looked up.
    pub lookups: u64,
    /// Chunks among them that the store said it had.
    pub found: u64,
    /// Chunks read and verified.
    pub reads: u64,
    /// Their bytes.
    pub read_bytes: u64,
    /// Time of these reads, added up over threads.
    pub read_time: Duration,
    /// Chunks that were gone when they were read.
    pub missed: u64,
    /// Chunks that a check refused, by check.
    pub refused: BTreeMap<ChunkErrorKind, u64>,
    /// Chunks written.
    pub writes: u64,
    /// Their bytes.
    pub written_bytes: u64,
    /// Time of these writes, added up over threads.
    pub write_time: Duration,
    /// Chunks that were there already.
    pub were_there: u64,
    /// Writes dropped because too many were waiting when host memory gave their chunks up.
    pub dropped_by_queue: u64,
    /// Writes dropped because the store's breaker was open when host memory gave their chunks up,
    /// or opened while they waited after that.
    pub dropped_by_breaker: u64,
    /// Writes put off because the day's bytes were used up, to the next day if host memory has
    /// their chunks then.
    pub dropped_by_budget: u64,
    /// Failed calls.
    pub failures: u64,
    /// The last of them.
    pub last_failure: Option<String>,
    /// The same by kind.
    pub failures_by_kind: BTreeMap<StoreErrorKind, Failures>,
    /// The breaker of lookups and reads.
    pub reads_breaker: BreakerState,
    /// The breaker of writes and removals.
    pub writes_breaker: BreakerState,
    /// Times that a breaker opened.
    pub breaker_opened: u64,
    /// Bytes per second of one thread's reads, a moving average.
    pub bytes_per_second: Option<f64>,
}

/// Failures of one kind.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Failures {
    /// Failed calls.
    pub count: u64,
    /// The last of them.
    pub last: String,
}

impl StoreStats {
    /// Counts a failure.
    pub(super) fn note_failure(&mut self, error: &StoreError) {
        let last = describe(error);
        self.failures += 1;
        self.last_failure = Some(last.clone());
        let of_kind = self.failures_by_kind.entry(error.kind()).or_default();
        *of_kind = Failures { count: of_kind.count + 1, last };
    }
}

/// Writes an error and its causes on one line.
fn describe(error: &StoreError) -> String {
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}
