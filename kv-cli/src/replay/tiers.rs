//! Tiers below the replayed cache: those that a cache has, with stores in memory, and what their
//! use came to.
//!
//! A block is a chunk here. What the tiers hold and what is loaded is decided by `kv_tier`; the
//! times of loads follow from the blocks that it has loaded.
use std::time::Duration;

use kv::backend::NullBackend;
use kv::events::Tier;
use kv::tier::policy::{LoadOrCompute, WriteRule};
use kv::tier::{ChunkSpec, Identity, ModelDigest, StoreOptions, TieredCache, TiersStats, Wait};
use kv::{GroupId, KvCache, Stats};
use serde::Serialize;

use super::packed::PackedStore;
use super::trace::Trace;
use crate::num::{to_f64, to_usize};

/// The tiers of the command line.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct TierOptions {
    /// From the fastest to the slowest.
    pub(crate) tiers: Vec<TierOption>,
    pub(crate) bytes_per_token: Option<u32>,
    /// Speed of prefill; with it, every tier has a bandwidth and there are bytes per token.
    pub(crate) prefill_tokens_per_second: Option<u32>,
}

/// One tier of the command line.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct TierOption {
    pub(crate) tier: Tier,
    pub(crate) size: TierSize,
    pub(crate) rule: WriteRule,
    pub(crate) bytes_per_second: Option<u64>,
    pub(crate) latency: Duration,
}

/// The size of a tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TierSize {
    Blocks(u32),
    Bytes(u64),
}

/// A tier that is too small.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(super) enum TooSmall {
    #[error("--tier {tier}: {bytes} bytes hold no block of {block_bytes}")]
    NoBlock { tier: &'static str, bytes: u64, block_bytes: u64 },
    #[error("--tier host: {blocks} block, host memory has at least {HOST_BLOCKS_MIN}")]
    Host { blocks: u32 },
}

/// Returns the name of a tier in arguments and reports.
pub(crate) fn name(tier: Tier) -> &'static str {
    match tier {
        Tier::Device => "device",
        Tier::Host => "host",
        Tier::Disk => "disk",
        Tier::Store => "store",
        _ => "other",
    }
}

impl TierOptions {
    fn block_bytes(&self, trace: &Trace) -> Option<u64> {
        let token_bytes = u64::from(self.bytes_per_token?);
        Some(token_bytes * u64::from(trace.block_size.get()))
    }

    /// Returns the blocks of every tier.
    pub(super) fn capacities(&self, trace: &Trace) -> Result<Vec<u32>, TooSmall> {
        let capacity = |option: &TierOption| {
            let blocks = match option.size {
                TierSize::Blocks(blocks) => blocks,
                TierSize::Bytes(bytes) => {
                    let block_bytes = self.block_bytes(trace).unwrap_or(0);
                    let blocks = bytes.checked_div(block_bytes).filter(|blocks| *blocks > 0);
                    let tier = name(option.tier);
                    let blocks = blocks.ok_or(TooSmall::NoBlock { tier, bytes, block_bytes })?;
                    // More count as that many.
                    u32::try_from(blocks).unwrap_or(u32::MAX)
                }
            };
            let is_small = option.tier == Tier::Host && blocks < HOST_BLOCKS_MIN;
            if is_small { Err(TooSmall::Host { blocks }) } else { Ok(blocks) }
        };
        self.tiers.iter().map(capacity).collect()
    }

    /// Returns the blocks of the host memory through which blocks pass where it is no tier: those
    /// of 64 MiB, or of the longest request if the bytes of a block are unknown.
    fn passage_blocks(&self, trace: &Trace) -> u32 {
        const BYTES: u64 = 64 << 20;
        let blocks = match self.block_bytes(trace) {
            Some(block_bytes) => u32::try_from(BYTES / block_bytes).unwrap_or(u32::MAX),
            None => trace.longest_blocks(),
        };
        blocks.max(HOST_BLOCKS_MIN)
    }
}

/// Blocks of host memory, which `kv_tier` needs to pass one on while another comes.
const HOST_BLOCKS_MIN: u32 = 2;

/// Where blocks are below the device, and what their use came to.
pub(super) struct TierReplay<'o> {
    options: &'o TierOptions,
    block_tokens: u32,
    block_bytes: Option<u64>,
    /// Host memory, a tier or not, and the stores in their order.
    places: Vec<Place<'o>>,
}

/// Host memory or a store.
struct Place<'o> {
    tier: Tier,
    /// `None` for host memory that is no tier.
    option: Option<&'o TierOption>,
    capacity: u32,
    /// `None` for host memory.
    store: Option<PackedStore>,
    counts: Counts,
}

/// Sums of one place.
#[derive(Debug, Clone, Copy, Default)]
struct Counts {
    tokens: u64,
    blocks: u64,
    /// Requests that loaded something.
    loads: u64,
    load_time: Duration,
}

impl<'o> TierReplay<'o> {
    /// Puts the tiers below a cache.
    pub(super) fn open(
        options: &'o TierOptions,
        capacities: &[u32],
        trace: &Trace,
        cache: KvCache<NullBackend>,
    ) -> anyhow::Result<(Self, TieredCache<NullBackend>)> {
        let chunk = ChunkSpec::new(cache.state().spec(), GroupId(0))?.with_blocks(1)?;
        let chunk_bytes = u64::try_from(chunk.chunk_bytes())?;
        let block_bytes = options.block_bytes(trace);
        // More blocks than the trace has would stay empty.
        let all = trace.contents_max().max(HOST_BLOCKS_MIN);
        let mut given = options.tiers.iter().zip(capacities.iter().copied()).peekable();
        let host = given.next_if(|(option, _)| option.tier == Tier::Host);
        let tiers = kv::tier::TierOptions::new().with_chunk_blocks(1);
        let (mut tiers, host) = if let Some((option, capacity)) = host {
            let tiers = tiers.with_host(chunk_bytes * u64::from(capacity.min(all)));
            (tiers, Place::new(Tier::Host, Some(option), capacity))
        } else {
            let capacity = options.passage_blocks(trace);
            let tiers = tiers.with_passage(chunk_bytes * u64::from(capacity.min(all)));
            (tiers, Place::new(Tier::Host, None, capacity))
        };
        let is_timed = options.prefill_tokens_per_second.is_some();
        tiers = tiers.with_wait(if is_timed { Wait::IfFaster } else { Wait::All });
        let mut places = vec![host];
        for (option, capacity) in given {
            let store = PackedStore::new(option.tier, to_usize(capacity.min(all)));
            let mut lane = lane(option);
            if let Some((speed, block_bytes)) = option.bytes_per_second.zip(block_bytes) {
                // A chunk here stands for a block of the model.
                let rate = to_f64(speed) * to_f64(chunk_bytes) / to_f64(block_bytes);
                lane = lane.with_rates(option.latency, rate);
            }
            tiers = tiers.with_store_options(Box::new(store.clone()), lane);
            let place = Place::new(option.tier, Some(option), capacity);
            places.push(Place { store: Some(store), ..place });
        }
        let identity = Identity::new(ModelDigest::of_bytes(b"kv replay"));
        let cache = TieredCache::new(cache, identity, tiers)?;
        let block_tokens = trace.block_size.get();
        Ok((Self { options, block_tokens, block_bytes, places }, cache))
    }

    /// Returns the time that the model takes to compute tokens; nothing if it is not known.
    pub(super) fn prefill_time(&self, tokens: u32) -> Duration {
        let speed = self.options.prefill_tokens_per_second;
        let seconds = speed.map_or(0.0, |speed| f64::from(tokens) / f64::from(speed));
        Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
    }

    /// Counts the loads of one request by the counts of the cache before and after it.
    pub(super) fn note_request(&mut self, before: &Stats, after: &Stats) {
        for at in 0..self.places.len() {
            let tier = self.places[at].tier;
            let tokens = hits(after, tier) - hits(before, tier);
            if tokens == 0 {
                continue;
            }
            let blocks = tokens.div_ceil(self.block_tokens.into());
            let time = self.loading(at, tokens, blocks).load_time().unwrap_or_default();
            let counts = &mut self.places[at].counts;
            counts.tokens += tokens;
            counts.blocks += blocks;
            counts.loads += 1;
            // A store without a bandwidth takes for ever.
            counts.load_time = counts.load_time.saturating_add(time);
        }
    }

    fn loading(&self, place: usize, tokens: u64, blocks: u64) -> LoadOrCompute {
        let option = self.places[place].option;
        // The bytes of a token may be any number.
        LoadOrCompute {
            tokens: u32::try_from(tokens).unwrap_or(u32::MAX),
            bytes: self.block_bytes.unwrap_or(0).saturating_mul(blocks),
            latency: option.map_or(Duration::ZERO, |option| option.latency),
            bytes_per_second: option.and_then(|option| option.bytes_per_second).map(to_f64),
            prefill_tokens_per_second: self.options.prefill_tokens_per_second.map(f64::from),
        }
    }

    /// Returns the figures of a trace that was replayed.
    pub(super) fn report(
        &self,
        trace: &Trace,
        device_hit_tokens: u64,
        stats: &TiersStats,
    ) -> TierReport {
        let ratio = |tokens: u64| to_f64(tokens) / to_f64(trace.total_tokens.max(1));
        let line = |(index, place): (usize, &Place<'_>)| {
            let bytes = |blocks: u64| self.block_bytes.map(|each| each.saturating_mul(blocks));
            let per_day = |n: u64| per_day(n, trace.span()?);
            let written = match index.checked_sub(1).and_then(|store| stats.stores.get(store)) {
                Some(store) => store.writes,
                None => stats.offloaded,
            };
            TierLine {
                tier: name(place.tier),
                write: place
                    .option
                    .map_or(PASSAGE.to_owned(), |option| option.rule.policy().to_string()),
                capacity_blocks: place.capacity,
                hit_tokens: place.counts.tokens,
                token_hit_ratio: ratio(place.counts.tokens),
                written_blocks: written,
                written_blocks_per_day: per_day(written),
                written_bytes: bytes(written),
                written_bytes_per_day: bytes(written).and_then(per_day),
                evictions: match &place.store {
                    Some(store) => store.evictions(),
                    None => stats.host_evictions,
                },
                loading: self.options.prefill_tokens_per_second.map(|_| Loading {
                    load_seconds: place.counts.load_time.as_secs_f64(),
                    break_even_bytes_per_second: self.mean_load(index),
                }),
            }
        };
        let tiers: Vec<_> = self.places.iter().enumerate().map(line).collect();
        let below = tiers.iter().map(|tier| tier.hit_tokens).sum::<u64>();
        let times = self.options.prefill_tokens_per_second.map(|speed| {
            let prefill_seconds_saved = to_f64(stats.loaded_tokens) / f64::from(speed);
            let times = self.places.iter().map(|place| place.counts.load_time.as_secs_f64());
            let load_seconds = times.sum();
            Times {
                prefill_seconds_saved,
                load_seconds,
                first_token_seconds_saved: prefill_seconds_saved - load_seconds,
                slower_tokens: stats.cheaper_to_compute,
            }
        });
        let hit_tokens = device_hit_tokens + below;
        TierReport {
            hit_tokens,
            token_hit_ratio: ratio(hit_tokens),
            device_hit_tokens,
            device_token_hit_ratio: ratio(device_hit_tokens),
            tiers,
            times,
        }
    }

    /// Returns the bandwidth at which the mean load takes as long as computing it.
    fn mean_load(&self, place: usize) -> Option<f64> {
        let counts = self.places[place].counts;
        let mean = self.loading(place, counts.tokens.checked_div(counts.loads)?, 1);
        let blocks = to_f64(counts.blocks) / to_f64(counts.loads);
        Some(mean.break_even_bandwidth()? * blocks)
    }
}

impl<'o> Place<'o> {
    fn new(tier: Tier, option: Option<&'o TierOption>, capacity: u32) -> Self {
        Self { tier, option, capacity, store: None, counts: Counts::default() }
    }
}

/// Returns the settings of a store that never fails: calls in their order on one thread, no limit
/// of time or of waiting writes.
fn lane(option: &TierOption) -> StoreOptions {
    const LONG: Duration = Duration::from_hours(1);
    StoreOptions::new(option.tier)
        .with_write(option.rule)
        .with_threads(1)
        .with_lookup_deadline(LONG)
        .with_read_deadline(LONG)
        .with_write_deadline(LONG)
        .with_waiting_writes(usize::MAX)
}

/// Returns the tokens that requests have reused from a tier.
fn hits(stats: &Stats, tier: Tier) -> u64 {
    match tier {
        Tier::Host => stats.host_hit_tokens,
        Tier::Disk => stats.disk_hit_tokens,
        Tier::Store => stats.store_hit_tokens,
        _ => 0,
    }
}

/// Scales a count of a time to a day.
fn per_day(n: u64, span: Duration) -> Option<u64> {
    let day = Duration::from_hours(24).as_millis();
    u64::try_from((u128::from(n) * day).checked_div(span.as_millis())?).ok()
}

/// The figures of all tiers.
#[derive(Debug, Clone, Serialize)]
pub(super) struct TierReport {
    /// Tokens that were reused: from the device or from a tier.
    pub(super) hit_tokens: u64,
    pub(super) token_hit_ratio: f64,
    /// Those of them that the device had.
    pub(super) device_hit_tokens: u64,
    pub(super) device_token_hit_ratio: f64,
    pub(super) tiers: Vec<TierLine>,
    #[serde(flatten)]
    pub(super) times: Option<Times>,
}

/// Times of all requests.
#[derive(Debug, Clone, Copy, Serialize)]
pub(super) struct Times {
    /// Prefill of the tokens that are reused because of the tiers.
    pub(super) prefill_seconds_saved: f64,
    /// Loading them.
    pub(super) load_seconds: f64,
    /// The difference.
    pub(super) first_token_seconds_saved: f64,
    /// Tokens that a store had and that were computed, because loading takes longer.
    pub(super) slower_tokens: u64,
}

/// The figures of one tier.
#[derive(Debug, Clone, Serialize)]
pub(super) struct TierLine {
    pub(super) tier: &'static str,
    /// The write policy; for host memory that is no tier, that blocks pass through it.
    pub(super) write: String,
    pub(super) capacity_blocks: u32,
    /// Tokens that were loaded from this tier: no faster one had them.
    pub(super) hit_tokens: u64,
    pub(super) token_hit_ratio: f64,
    pub(super) written_blocks: u64,
    /// By the clock of the trace.
    pub(super) written_blocks_per_day: Option<u64>,
    pub(super) written_bytes: Option<u64>,
    pub(super) written_bytes_per_day: Option<u64>,
    pub(super) evictions: u64,
    #[serde(flatten)]
    pub(super) loading: Option<Loading>,
}

impl TierLine {
    /// Returns whether this is host memory that is no tier.
    pub(super) fn is_passage(&self) -> bool {
        self.write == PASSAGE
    }
}

/// How blocks get to host memory that is no tier.
const PASSAGE: &str = "pass";

/// The loads from one tier.
#[derive(Debug, Clone, Copy, Serialize)]
pub(super) struct Loading {
    pub(super) load_seconds: f64,
    /// The bandwidth at which the mean load of a request takes as long as computing it.
    pub(super) break_even_bytes_per_second: Option<f64>,
}

#[cfg(test)]
mod tests;
