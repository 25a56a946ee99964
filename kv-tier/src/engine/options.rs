//! Settings of the tiers.
use std::str::FromStr;
use std::time::Duration;

use kv_core::events::Tier;

use crate::policy::WriteRule;
use crate::store::BlockStore;

/// Settings of [`TieredCache`](crate::TieredCache): host memory, the stores below it, and how long
/// a prompt waits for them.
///
/// ```
/// use kv::events::Tier;
/// use kv::tier::policy::{WritePolicy, WriteRule};
/// use kv::tier::{MemoryStore, StoreOptions, TierOptions};
///
/// let options = TierOptions::new()
///     .with_host(64 << 20)
///     .with_store(Box::new(MemoryStore::new(1 << 30)))
///     .with_store_options(
///         Box::new(MemoryStore::new(1 << 30)),
///         StoreOptions::new(Tier::Store).with_write(WriteRule::new(WritePolicy::OnPublish)),
///     );
/// # drop(options);
/// ```
#[derive(Debug)]
pub struct TierOptions {
    pub(super) host_bytes: u64,
    /// Whether host memory keeps chunks for later prompts.
    pub(super) keeps_host: bool,
    pub(super) in_flight_bytes: u64,
    pub(super) chunk_blocks: Option<u32>,
    pub(super) stores: Vec<(Box<dyn BlockStore>, StoreOptions)>,
    pub(super) wait: Wait,
}

impl Default for TierOptions {
    fn default() -> Self {
        Self {
            host_bytes: 64 << 20,
            keeps_host: false,
            in_flight_bytes: 32 << 20,
            chunk_blocks: None,
            stores: Vec::new(),
            wait: Wait::default(),
        }
    }
}

impl TierOptions {
    /// Creates the default settings: no tier, and 64 MiB of host memory through which chunks pass.
    pub fn new() -> Self {
        Self::default()
    }

    /// Makes host memory of this size a tier. All chunks pass through host memory; without this
    /// call they leave it at once, so that chunks due for a store at their eviction are written
    /// when they are published.
    #[must_use]
    pub fn with_host(mut self, bytes: u64) -> Self {
        self.host_bytes = bytes;
        self.keeps_host = true;
        self
    }

    /// Sets the host memory through which chunks pass where it is no tier; 64 MiB by default. All
    /// chunks that a prompt gets from stores must fit it at a time. Its last chunks are found there
    /// until others need the room.
    #[must_use]
    pub fn with_passage(mut self, bytes: u64) -> Self {
        self.host_bytes = bytes;
        self.keeps_host = false;
        self
    }

    /// Sets how many bytes are copied from the device at a time; 32 MiB by default. Blocks on their
    /// way are held, so that no sequence can take them.
    #[must_use]
    pub fn with_in_flight(mut self, bytes: u64) -> Self {
        self.in_flight_bytes = bytes;
        self
    }

    /// Sets the blocks of a chunk, for all groups, in place of the number that
    /// [`ChunkSpec::new`](crate::ChunkSpec::new) chooses. Smaller chunks lose fewer tokens at the
    /// end of a prompt, larger ones cost less for each byte. Caches with different numbers never
    /// find each other's chunks.
    #[must_use]
    pub fn with_chunk_blocks(mut self, blocks: u32) -> Self {
        self.chunk_blocks = Some(blocks);
        self
    }

    /// Adds a store with the default settings of its tier. A chunk that several stores have is read
    /// from the first one.
    #[must_use]
    pub fn with_store(self, store: Box<dyn BlockStore>) -> Self {
        let options = StoreOptions::new(store.tier());
        self.with_store_options(store, options)
    }

    /// Adds a store. 64 of them are the most.
    #[must_use]
    pub fn with_store_options(mut self, store: Box<dyn BlockStore>, options: StoreOptions) -> Self {
        self.stores.push((store, options));
        self
    }

    /// Sets the time that a prompt waits for chunks from stores.
    #[must_use]
    pub fn with_wait(mut self, wait: Wait) -> Self {
        self.wait = wait;
        self
    }
}

/// The time that a prompt waits for chunks from stores. All chunks that have come by then are used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Wait {
    /// As long as computing the missing tokens would take, and not at all if the measured rates of
    /// the stores say that reading takes longer ([`LoadOrCompute`](crate::policy::LoadOrCompute)).
    /// Before [`TieredCache::note_compute`](crate::TieredCache::note_compute) has told the speed of
    /// computing, until all has come.
    #[default]
    Compute,
    /// Until all has come, if the rates of the stores say that reading takes less time than
    /// computing, and not at all otherwise. Has no limit of time: for simulations, in which the
    /// rates are [given](StoreOptions::with_rates) and time is no measure.
    IfFaster,
    /// This long.
    For(Duration),
    /// Until all has come, or was given up by the stores' deadlines.
    All,
    /// Not at all: a prompt takes the chunks in host memory.
    None,
}

/// A text that is no [`Wait`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("expected compute, all, none, or a time such as 200ms or 2s")]
#[non_exhaustive]
pub struct WaitError;

/// Reads `compute`, `all`, `none`, or a time such as `200ms` or `2s`.
impl FromStr for Wait {
    type Err = WaitError;

    fn from_str(text: &str) -> Result<Self, WaitError> {
        match text {
            "compute" => Ok(Self::Compute),
            "all" => Ok(Self::All),
            "none" => Ok(Self::None),
            _ => {
                let (number, unit) = if let Some(number) = text.strip_suffix("ms") {
                    (number, 1e-3)
                } else {
                    (text.strip_suffix('s').unwrap_or_default(), 1.0)
                };
                let seconds = number.parse::<f64>().ok().map(|number| number * unit);
                let time = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
                time.map(Self::For).ok_or(WaitError)
            }
        }
    }
}

/// Settings of one store.
#[derive(Debug, Clone)]
pub struct StoreOptions {
    pub(super) write: WriteRule,
    pub(super) threads: usize,
    pub(super) lookup_deadline: Duration,
    pub(super) read_deadline: Duration,
    pub(super) write_deadline: Duration,
    pub(super) writes_max: usize,
    pub(super) bytes_per_day: Option<u64>,
    pub(super) state_lookups: usize,
    pub(super) rates: Option<(Duration, f64)>,
}

impl StoreOptions {
    /// Creates the default settings for a store of a tier.
    ///
    /// | | disk | store |
    /// |---|---|---|
    /// | writes | when host memory gives a chunk up | when a chunk is published |
    /// | threads | 4 | 4 |
    /// | deadline of a lookup | 50 ms | 100 ms |
    /// | deadline of the reads of a prompt | 2 s | 2 s |
    /// | deadline of a write | 5 s | 5 s |
    /// | waiting writes | 256 | 256 |
    /// | lookups of recurrent states | 4,096 | 64 |
    pub fn new(tier: Tier) -> Self {
        let (lookup, state_lookups) = if tier == Tier::Store { (100, 64) } else { (50, 4096) };
        Self {
            write: WriteRule::of_tier(tier),
            threads: 4,
            lookup_deadline: Duration::from_millis(lookup),
            read_deadline: Duration::from_secs(2),
            write_deadline: Duration::from_secs(5),
            writes_max: 256,
            bytes_per_day: None,
            state_lookups,
            rates: None,
        }
    }

    /// Sets which chunks are written, and when.
    #[must_use]
    pub fn with_write(mut self, rule: WriteRule) -> Self {
        self.write = rule;
        self
    }
    /// Sets the number of threads; half of them, at least one, write.
    #[must_use]
    pub fn with_threads(mut self, threads: usize) -> Self {
        self.threads = threads;
        self
    }
    /// Sets the deadline of the lookups of one prompt.
    #[must_use]
    pub fn with_lookup_deadline(mut self, deadline: Duration) -> Self {
        self.lookup_deadline = deadline;
        self
    }
    /// Sets the deadline of all reads of one prompt.
    #[must_use]
    pub fn with_read_deadline(mut self, deadline: Duration) -> Self {
        self.read_deadline = deadline;
        self
    }
    /// Sets the deadline of one write.
    #[must_use]
    pub fn with_write_deadline(mut self, deadline: Duration) -> Self {
        self.write_deadline = deadline;
        self
    }
    /// Sets how many writes may wait, at least one. The others are sent when there is room; they
    /// are dropped and counted if host memory has to give their chunks up before.
    #[must_use]
    pub fn with_waiting_writes(mut self, writes: usize) -> Self {
        self.writes_max = writes;
        self
    }
    /// Limits the bytes that are written within 24 hours. The wear of a disk is limited so.
    #[must_use]
    pub fn with_bytes_per_day(mut self, bytes: u64) -> Self {
        self.bytes_per_day = Some(bytes);
        self
    }
    /// Sets at how many lengths of a prompt the store is asked for recurrent states. A state may be
    /// behind any number of tokens, and an object store answers each by a request of its own. The
    /// [stops](kv_core::StartOptions::with_stops) of the prompt and the lengths just before them
    /// come first, then the longest.
    #[must_use]
    pub fn with_state_lookups(mut self, lengths: usize) -> Self {
        self.state_lookups = lengths;
        self
    }
    /// Sets the latency and the bytes per second of reads, by all threads together, in place of the
    /// measured ones: what [`Wait::Compute`] and [`Wait::IfFaster`] compare with computing.
    #[must_use]
    pub fn with_rates(mut self, latency: Duration, bytes_per_second: f64) -> Self {
        self.rates = Some((latency, bytes_per_second));
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_are_words_or_times() {
        assert_eq!("compute".parse(), Ok(Wait::Compute));
        assert_eq!("all".parse(), Ok(Wait::All));
        assert_eq!("none".parse(), Ok(Wait::None));
        assert_eq!("200ms".parse(), Ok(Wait::For(Duration::from_millis(200))));
        assert_eq!("1.5s".parse(), Ok(Wait::For(Duration::from_millis(1500))));
        for text in ["", "s", "ms", "2", "-1s", "NaNs", "2m", "forever"] {
            assert_eq!(text.parse::<Wait>(), Err(WaitError), "{text}");
        }
    }
}
