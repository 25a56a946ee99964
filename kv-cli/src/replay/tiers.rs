//! Tiers below the replayed cache: what a request finds in them, what they get, and the time that
//! they save.
//!
//! A block of the replay is a chunk here, also the last, partial one of a prompt. The tiers get the
//! blocks of every request, also of one that is larger than the cache. What they hold does not
//! depend on the speeds: a chunk that is computed because loading would take longer is written as
//! any other.
use std::sync::Arc;
use std::time::Duration;

use kv::events::Tier;
use kv::eviction::{BlockInfo, Clock, Eviction, Priority, SystemClock};
use kv::tier::WritePolicy;
use kv::tier::policy::{LoadDecision, LoadOrCompute, WriteRule};
use serde::Serialize;

use super::run::{Observer, RequestBlock};
use super::tier_stack::{BoundedTier, StackBlock, TierStack};
use super::trace::{Request, Trace};
use crate::num::{to_f64, to_u32};

/// The tiers of the command line.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct TierOptions {
    /// From the fastest to the slowest.
    pub(crate) tiers: Vec<TierOption>,
    /// Eviction of every tier.
    pub(crate) eviction: Eviction,
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

/// A tier that is smaller than one block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("--tier {tier}: {bytes} bytes hold no block of {block_bytes}")]
pub(super) struct TooSmall {
    tier: &'static str,
    bytes: u64,
    block_bytes: u64,
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
        Some(token_bytes.saturating_mul(trace.block_size.get().into()))
    }

    /// Returns the blocks of every tier.
    pub(super) fn capacities(&self, trace: &Trace) -> Result<Vec<u32>, TooSmall> {
        let capacity = |option: &TierOption| match option.size {
            TierSize::Blocks(blocks) => Ok(blocks),
            TierSize::Bytes(bytes) => {
                let block_bytes = self.block_bytes(trace).unwrap_or(0);
                let blocks = bytes.checked_div(block_bytes).filter(|blocks| *blocks > 0);
                let tier = name(option.tier);
                let blocks = blocks.ok_or(TooSmall { tier, bytes, block_bytes })?;
                Ok(u32::try_from(blocks).unwrap_or(u32::MAX))
            }
        };
        self.tiers.iter().map(capacity).collect()
    }
}

/// Tiers, and what their use came to.
pub(super) struct TierReplay<'o> {
    options: &'o TierOptions,
    capacities: &'o [u32],
    block_tokens: u32,
    block_bytes: Option<u64>,
    stack: TierStack,
    counts: Vec<Counts>,
    device_tokens: u64,
    /// Tokens reused because of the tiers: those that were loaded, and those on the device that
    /// follow them.
    saved_tokens: u64,
    /// Consecutive blocks of the current request in one place.
    runs: Vec<Run>,
    blocks: Vec<StackBlock>,
}

/// Sums of one tier.
#[derive(Debug, Clone, Copy, Default)]
struct Counts {
    tokens: u64,
    blocks: u64,
    runs: u64,
    loaded_tokens: u64,
    load_time: Duration,
}

/// Consecutive blocks in one place: a tier, or the device.
#[derive(Debug, Clone, Copy)]
struct Run {
    tier: Option<usize>,
    tokens: u32,
    blocks: u32,
}

impl<'o> TierReplay<'o> {
    pub(super) fn new(options: &'o TierOptions, capacities: &'o [u32], trace: &Trace) -> Self {
        // Neither priorities nor times: nothing depends on the clock.
        let clock: Arc<dyn Clock> = Arc::new(SystemClock::new());
        let all = trace.num_blocks().max(1);
        let mut tiers = Vec::new();
        for (index, (option, capacity)) in options.tiers.iter().zip(capacities).enumerate() {
            // More blocks than the trace has would stay empty.
            let capacity = (*capacity).min(all);
            let policy = options.eviction.policy(capacity, &clock);
            tiers.push(BoundedTier::new(capacity, effective_rule(index, option), policy));
        }
        Self {
            options,
            capacities,
            block_tokens: trace.block_size.get(),
            block_bytes: options.block_bytes(trace),
            counts: vec![Counts::default(); tiers.len()],
            stack: TierStack::new(tiers, trace.num_blocks()),
            device_tokens: 0,
            saved_tokens: 0,
            runs: Vec::new(),
            blocks: Vec::new(),
        }
    }

    /// Splits the blocks up to the first that is nowhere into runs.
    fn find_runs(&mut self, request: &Request) {
        self.runs.clear();
        let mut left = request.tokens;
        for block in &self.blocks {
            let tier = if block.is_on_device { None } else { self.stack.find(block.number) };
            if tier.is_none() && !block.is_on_device {
                return;
            }
            let tokens = left.min(self.block_tokens);
            left -= tokens;
            match self.runs.last_mut().filter(|run| run.tier == tier) {
                Some(run) => {
                    run.tokens += tokens;
                    run.blocks += 1;
                }
                None => self.runs.push(Run { tier, tokens, blocks: 1 }),
            }
        }
    }

    /// Counts the runs and decides for each whether it is loaded. The first that is not ends the
    /// reuse: what follows it cannot be found until it is computed.
    fn count_runs(&mut self) {
        let (mut is_first, mut is_reused) = (true, true);
        for run in &self.runs {
            let tokens = u64::from(run.tokens);
            let Some(tier) = run.tier else {
                self.device_tokens += tokens;
                // The device alone finds its first run.
                if is_reused && !is_first {
                    self.saved_tokens += tokens;
                }
                is_first = false;
                continue;
            };
            is_first = false;
            let loading = self.loading(tier, run.tokens, run.blocks.into());
            let counts = &mut self.counts[tier];
            counts.tokens += tokens;
            counts.blocks += u64::from(run.blocks);
            counts.runs += 1;
            is_reused = is_reused && matches!(loading.decide(), LoadDecision::Load(_));
            if is_reused {
                counts.loaded_tokens += tokens;
                let time = loading.load_time().unwrap_or_default();
                counts.load_time = counts.load_time.saturating_add(time);
                self.saved_tokens += tokens;
            }
        }
    }

    fn loading(&self, tier: usize, tokens: u32, blocks: u64) -> LoadOrCompute {
        let option = self.options.tiers.get(tier);
        LoadOrCompute {
            tokens,
            bytes: self.block_bytes.unwrap_or(0).saturating_mul(blocks),
            latency: option.map_or(Duration::ZERO, |option| option.latency),
            bytes_per_second: option.and_then(|option| option.bytes_per_second).map(to_f64),
            prefill_tokens_per_second: self.options.prefill_tokens_per_second.map(f64::from),
        }
    }

    /// Returns the figures of a trace that was replayed.
    pub(super) fn report(&self, trace: &Trace) -> TierReport {
        let ratio = |tokens: u64| to_f64(tokens) / to_f64(trace.total_tokens.max(1));
        let lines = self.options.tiers.iter().enumerate().zip(self.capacities);
        let lines = lines.zip(self.counts.iter().zip(self.stack.tiers()));
        let tiers: Vec<_> = lines
            .map(|(((index, option), capacity), (counts, tier))| {
                let bytes = |blocks: u64| self.block_bytes.map(|each| each.saturating_mul(blocks));
                let per_day = |n: u64| per_day(n, trace.span()?);
                TierLine {
                    tier: name(option.tier),
                    write: effective_rule(index, option).policy().to_string(),
                    capacity_blocks: *capacity,
                    hit_tokens: counts.tokens,
                    token_hit_ratio: ratio(counts.tokens),
                    written_blocks: tier.written(),
                    written_blocks_per_day: per_day(tier.written()),
                    written_bytes: bytes(tier.written()),
                    written_bytes_per_day: bytes(tier.written()).and_then(per_day),
                    evictions: tier.evictions(),
                    loading: self.options.prefill_tokens_per_second.map(|_| Loading {
                        loaded_tokens: counts.loaded_tokens,
                        slower_tokens: counts.tokens.saturating_sub(counts.loaded_tokens),
                        load_seconds: counts.load_time.as_secs_f64(),
                        break_even_bytes_per_second: self.mean_run(index, counts),
                    }),
                }
            })
            .collect();
        let below = tiers.iter().map(|tier| tier.hit_tokens).sum::<u64>();
        let hit_tokens = self.device_tokens + below;
        let times = self.options.prefill_tokens_per_second.map(|speed| {
            let prefill_seconds_saved = to_f64(self.saved_tokens) / f64::from(speed);
            let load_seconds =
                self.counts.iter().map(|counts| counts.load_time.as_secs_f64()).sum();
            let first_token_seconds_saved = prefill_seconds_saved - load_seconds;
            Times { prefill_seconds_saved, load_seconds, first_token_seconds_saved }
        });
        let (device_hit_tokens, token_hit_ratio) = (self.device_tokens, ratio(hit_tokens));
        let device_token_hit_ratio = ratio(device_hit_tokens);
        TierReport {
            hit_tokens,
            token_hit_ratio,
            device_hit_tokens,
            device_token_hit_ratio,
            tiers,
            times,
        }
    }

    /// Returns the bandwidth at which loading the mean run takes as long as computing it.
    fn mean_run(&self, tier: usize, counts: &Counts) -> Option<f64> {
        let tokens = u32::try_from(counts.tokens.checked_div(counts.runs)?).ok()?;
        let mean = self.loading(tier, tokens, 1);
        let blocks = to_f64(counts.blocks) / to_f64(counts.runs);
        Some(mean.break_even_bandwidth()? * blocks)
    }
}

/// Returns the rule of a tier in its place. A device gives blocks up without notice, so a tier
/// right below it cannot wait for that.
fn effective_rule(index: usize, option: &TierOption) -> WriteRule {
    match option.rule.policy() {
        WritePolicy::OnLeave if index == 0 => option.rule.with_policy(WritePolicy::OnPublish),
        _ => option.rule,
    }
}

impl Observer for TierReplay<'_> {
    fn looked_up(&mut self, request: &Request, numbers: &[u32], blocks: &[RequestBlock]) {
        self.blocks.clear();
        self.blocks.extend(numbers.iter().zip(blocks).enumerate().map(
            |(index, (number, block))| {
                let parent = (index > 0).then_some(block.parent);
                let (key, priority) = (block.key, Priority::default());
                let info = BlockInfo { key, parent, index: to_u32(index), priority };
                StackBlock { number: *number, info, is_on_device: block.block.is_some() }
            },
        ));
        self.find_runs(request);
        self.count_runs();
        self.stack.request(&self.blocks, request.tokens);
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
    /// Tokens that the device or a tier had.
    pub(super) hit_tokens: u64,
    pub(super) token_hit_ratio: f64,
    /// Those of them that the device had.
    pub(super) device_hit_tokens: u64,
    pub(super) device_token_hit_ratio: f64,
    pub(super) tiers: Vec<TierLine>,
    #[serde(flatten)]
    pub(super) times: Option<Times>,
}

/// Seconds of all requests.
#[derive(Debug, Clone, Copy, Serialize)]
pub(super) struct Times {
    /// Prefill of the tokens that are reused because of the tiers.
    pub(super) prefill_seconds_saved: f64,
    /// Loading them.
    pub(super) load_seconds: f64,
    /// The difference.
    pub(super) first_token_seconds_saved: f64,
}

/// The figures of one tier.
#[derive(Debug, Clone, Serialize)]
pub(super) struct TierLine {
    pub(super) tier: &'static str,
    /// The write policy.
    pub(super) write: String,
    pub(super) capacity_blocks: u32,
    /// Tokens that this tier had, and no faster one.
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

/// The loads from one tier.
#[derive(Debug, Clone, Copy, Serialize)]
pub(super) struct Loading {
    pub(super) loaded_tokens: u64,
    /// Hit tokens that were computed: loading takes longer, for them or for tokens before them.
    pub(super) slower_tokens: u64,
    pub(super) load_seconds: f64,
    /// The bandwidth at which loading a run of the mean length takes as long as computing it.
    pub(super) break_even_bytes_per_second: Option<f64>,
}

#[cfg(test)]
mod tests;
