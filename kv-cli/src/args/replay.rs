//! Arguments of `kv replay`.
use std::fmt;
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use clap::{ArgGroup, Args};
use kv::error::UnknownName;
use kv::events::Tier;
use kv::tier::policy::WriteRule;
use kv::tier::{Bytes, BytesError, WritePolicy};

use super::at_least_1;
use super::fleet::{FleetArgsError, ReplayFleetArgs};
use super::states::{MinOfStates, ReplayStateArgs};
use crate::replay::{
    FleetOptions, HintSource, Policy, Sizes, TierOption, TierOptions, TierSize, tier_name,
};

/// Replay a request trace through the engine, the cache and its tiers, without a model.
///
/// TRACE is of Mooncake (JSON lines of `timestamp`, `input_length`, `output_length` and `hash_ids`,
/// an id per 512 tokens), of Qwen's service Bailian (the same with `chat_id` and `parent_chat_id`,
/// an id per 16 tokens), of Azure (a CSV of TIMESTAMP,ContextTokens,GeneratedTokens, with or
/// without `NumImages`) or of `BurstGPT` (a CSV of Timestamp,Model,Request tokens,Response
/// tokens,Total tokens,Log Type, with or without Session ID and Elapsed time), plain or compressed
/// with zstd. Requests run one at a time, in the file's order. A request hits the tokens of its
/// input up to the first that is not cached, without the last token, which is always computed; then
/// all of them are cached. A request larger than the cache is refused. Generated tokens are not
/// cached.
///
/// A CSV has lengths only: every block is new, and there are no hits. It shows evictions, peak
/// blocks and time.
///
/// Policies of caches: lru (least recently used first), lfu (least frequently used first), priority
/// (by the caller's priorities, of which a trace has none) and default (lowest expected reuse
/// first). And two limits: min evicts the block whose next use is the latest, by the rest of the
/// trace; infinite evicts nothing, and its capacity is the number of blocks it used.
///
/// --hints tells the policy, when a request ends, whether and when its conversation goes on. Hints
/// change the order of eviction alone, and policies that do not learn from them ignore them.
///
/// --tier puts a lower tier below the cache, and the report says what requests load from it and
/// what is written to it. With --prefill, a request loads what disk and store have if that is
/// sooner than computing it: if latency + bytes / bandwidth < tokens / prefill. Tiers are in the
/// order host, disk, store. Requests still run one at a time: neither loads nor writes wait for
/// each other.
///
/// --state-bytes is for models with recurrent states, of which a cache keeps snapshots. Each policy
/// and capacity runs with rows alone, then with every --snapshots; infinite has no limit of
/// snapshots either. Prompts are computed in steps that end where the cache wants a snapshot.
///
/// --instances simulates a fleet: a router sends every request, at its time by the trace's clock,
/// to one of N instances with a cache of --capacity-blocks each, which compute their prompts one
/// after another. The report says by route which share of the tokens is reused, how late the first
/// token comes (waiting and prefill), how much the busiest instance computes of the mean, and what
/// the events cost that a router with the route kv reads. Caches evict the least recently used
/// block.
#[derive(Debug, Args)]
#[command(
    group = ArgGroup::new("sized").args(["tier", "state_bytes"]).multiple(true),
    allow_negative_numbers = true,
    after_help = "Examples:
  kv replay conversation.jsonl.zst
  kv replay conversation.jsonl.zst --policy lru --policy min --capacity-blocks 1000 \\
    --capacity-blocks 10000 --plot hits.svg
  kv replay qwen_traceA_blksz_16.jsonl --policy lru --policy reuse-rate
  kv replay own.jsonl --tokens-per-id 64 --block-size 16
  kv replay azure.csv --block-size 32 --capacity-blocks 100000 --json
  kv replay conversation.jsonl.zst --capacity-blocks 1000 --tier host=5859 --tier disk=30000
  kv replay conversation.jsonl.zst --capacity-blocks 1000 --tier host=64GiB --tier disk=1TB \\
    --write disk=publish --bytes-per-token 33792 --prefill 22000 --bandwidth host=25GB/s \\
    --bandwidth disk=1.3GB/s --latency disk=500us
  kv replay conversation.jsonl.zst --capacity-blocks 24000 --bytes-per-token 65536 \\
    --state-bytes 78446592 --snapshots 10% --snapshots 2000
  kv replay conversation.jsonl.zst --instances 8 --capacity-blocks 3000
  kv replay conversation.jsonl.zst --instances 100 --copies 10 --capacity-blocks 1000 \\
    --route hash --route kv --event-lag 1 --restart 60"
)]
pub(crate) struct ReplayArgs {
    /// The trace
    #[arg(value_name = "TRACE")]
    pub(crate) trace: PathBuf,

    /// Tokens per block; in a trace with ids a divisor or a multiple of the tokens per id. Default:
    /// the tokens per id, or 16 in a trace without ids
    #[arg(long, value_name = "N", value_parser = non_zero)]
    pub(crate) block_size: Option<NonZeroU32>,

    /// Tokens per entry of `hash_ids`; default: 512 in a Mooncake trace and 16 in one of Qwen
    #[arg(long, value_name = "N", value_parser = non_zero)]
    pub(crate) tokens_per_id: Option<NonZeroU32>,

    /// Blocks of the cache, may be repeated; default: a 128th, a 32nd, an eighth and half of the
    /// trace's different blocks, rounded to two digits
    #[arg(long, value_name = "N", value_parser = at_least_1)]
    pub(crate) capacity_blocks: Vec<u32>,

    /// Eviction policy: lru, lfu, priority, reuse-rate, infinite or min; may be repeated. Default:
    /// lru, reuse-rate, infinite and min; with --tier: reuse-rate
    #[arg(long, value_name = "NAME")]
    pub(crate) policy: Vec<Policy>,

    /// What requests say of the return of their conversation, as the field `return` of a JSON line
    /// does: oracle (what the rest of the trace shows) or noisy=P (the same, and with probability P
    /// what another request would say). Default: what the trace says
    #[arg(long, value_name = "oracle|noisy=P")]
    pub(crate) hints: Option<HintSource>,

    /// A tier below the cache: host, disk or store, and its size in blocks, or in bytes with a unit
    /// such as GB or GiB; once per tier
    #[arg(long, value_name = "TIER=BLOCKS|SIZE")]
    pub(crate) tier: Vec<TierArg>,

    /// When disk or store, or both, get a block: publish (when it is on the device), leave (when
    /// host memory evicts it; without a host tier the same as publish), reuse:N (at its Nth use) or
    /// never. Default: disk leave, store publish for prompts from 256 tokens. Host memory gets
    /// every block
    #[arg(long, value_name = "[TIER=]WHEN", requires = "tier")]
    pub(crate) write: Vec<ForTier<WritePolicy>>,

    /// Bytes of K and V per token, as `kv plan` prints them
    #[arg(long, value_name = "N", value_parser = at_least_1, requires = "sized")]
    pub(crate) bytes_per_token: Option<u32>,

    #[command(flatten)]
    pub(crate) states: ReplayStateArgs,

    #[command(flatten)]
    fleet: ReplayFleetArgs,

    /// Tokens per second that the model computes of a prompt; with --instances 22000 unless given,
    /// with --tier beside --bytes-per-token and --bandwidth
    #[arg(long, value_name = "N", value_parser = at_least_1)]
    pub(crate) prefill: Option<u32>,

    /// Bytes per second that a tier, or every tier, can be read at, such as 1.3GB/s
    #[arg(long, value_name = "[TIER=]SIZE/s", requires = "prefill")]
    pub(crate) bandwidth: Vec<ForTier<Bandwidth>>,

    /// Time until the first byte of a load from a tier, or from every tier, such as 500us, 2ms or
    /// 1s; default: 0
    #[arg(long, value_name = "[TIER=]TIME", requires = "prefill")]
    pub(crate) latency: Vec<ForTier<Latency>>,

    /// Draw the token hit ratio against the capacity, one line per policy, with tiers two; of a
    /// fleet, one line per route, and the time to the first token beside it
    #[arg(long, value_name = "FILE.svg")]
    pub(crate) plot: Option<PathBuf>,

    /// Print one JSON list instead of a table
    #[arg(long)]
    pub(crate) json: bool,
}

impl ReplayArgs {
    /// Returns tokens per block and per id, if they are given.
    pub(crate) fn sizes(&self) -> Sizes {
        Sizes { block: self.block_size, id: self.tokens_per_id }
    }

    /// Returns the fleet; `None` for one cache.
    pub(crate) fn fleet(&self) -> Result<Option<FleetOptions>, FleetArgsError> {
        self.fleet.options(self.prefill, &self.policy)
    }

    /// Refuses options of one cache that contradict each other.
    pub(crate) fn check(&self) -> Result<(), ReplayArgsError> {
        if self.fleet()?.is_none() {
            self.tiers()?;
            self.states.options(self.bytes_per_token, &self.policy)?;
        }
        Ok(())
    }

    /// Returns the tiers, from the fastest to the slowest; `None` without any.
    pub(crate) fn tiers(&self) -> Result<Option<TierOptions>, TierArgsError> {
        let is_missing = [
            ("--tier", self.tier.is_empty()),
            ("--bytes-per-token", self.bytes_per_token.is_none()),
            ("--bandwidth", self.bandwidth.is_empty()),
        ];
        let missing = is_missing.into_iter().find(|(_, is_missing)| *is_missing);
        if let (Some(_), Some((option, _))) = (self.prefill, missing) {
            return Err(TierArgsError::Prefill { option });
        }
        let mut given: Vec<_> = self.tier.iter().map(|arg| (arg.tier, arg.size)).collect();
        given.sort_by_key(|(tier, _)| TIERS.iter().position(|known| known == tier));
        let tiers: Vec<_> = given.iter().map(|(tier, _)| Some(*tier)).collect();
        check_once("--tier", &tiers)?;
        check("--write", &self.write, &tiers)?;
        let is_of_host = |given: &ForTier<WritePolicy>| given.tier == Some(Tier::Host);
        if self.write.iter().any(|given| is_of_host(given) && given.value != WritePolicy::OnPublish)
        {
            return Err(TierArgsError::HostWrite);
        }
        check("--bandwidth", &self.bandwidth, &tiers)?;
        check("--latency", &self.latency, &tiers)?;
        let option = |(tier, size): (Tier, TierSize)| {
            if matches!(size, TierSize::Bytes(_)) && self.bytes_per_token.is_none() {
                return Err(TierArgsError::NoBytesPerToken { tier: tier_name(tier) });
            }
            let rule = WriteRule::of_tier(tier);
            let rule = match of_tier(&self.write, tier) {
                Some(policy) if tier != Tier::Host => rule.with_policy(policy),
                _ => rule,
            };
            let bandwidth = of_tier(&self.bandwidth, tier);
            if self.prefill.is_some() && bandwidth.is_none() {
                return Err(TierArgsError::NoBandwidth { tier: tier_name(tier) });
            }
            let latency = of_tier(&self.latency, tier).map_or(Duration::ZERO, |latency| latency.0);
            let bytes_per_second = bandwidth.map(|bandwidth| bandwidth.0);
            Ok(TierOption { tier, size, rule, bytes_per_second, latency })
        };
        let tiers = given.into_iter().map(option).collect::<Result<Vec<_>, _>>()?;
        Ok((!tiers.is_empty()).then_some(TierOptions {
            tiers,
            bytes_per_token: self.bytes_per_token,
            prefill_tokens_per_second: self.prefill,
        }))
    }
}

/// Tiers below a device, from the fastest to the slowest.
const TIERS: [Tier; 3] = [Tier::Host, Tier::Disk, Tier::Store];

/// Options that contradict each other.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ReplayArgsError {
    #[error(transparent)]
    Fleet(#[from] FleetArgsError),
    #[error(transparent)]
    Tiers(#[from] TierArgsError),
    #[error(transparent)]
    States(#[from] MinOfStates),
}

/// Options of tiers that contradict each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum TierArgsError {
    #[error("{option} is given twice for {tier}")]
    Twice { option: &'static str, tier: &'static str },
    #[error("{option} {tier}=..: there is no --tier {tier}")]
    NoTier { option: &'static str, tier: &'static str },
    #[error("--tier {tier} in bytes needs --bytes-per-token")]
    NoBytesPerToken { tier: &'static str },
    #[error("--write host=..: host memory gets every block when it is published")]
    HostWrite,
    #[error("--prefill needs {option}, unless it is that of a fleet (--instances)")]
    Prefill { option: &'static str },
    #[error("--prefill needs --bandwidth {tier}=..: there is none for this tier")]
    NoBandwidth { tier: &'static str },
}

fn check_once(option: &'static str, tiers: &[Option<Tier>]) -> Result<(), TierArgsError> {
    for (index, tier) in tiers.iter().enumerate() {
        if tiers.iter().skip(index + 1).any(|other| other == tier) {
            let tier = tier.map_or("all tiers", tier_name);
            return Err(TierArgsError::Twice { option, tier });
        }
    }
    Ok(())
}

fn check<T>(
    option: &'static str,
    given: &[ForTier<T>],
    tiers: &[Option<Tier>],
) -> Result<(), TierArgsError> {
    let named: Vec<_> = given.iter().map(|given| given.tier).collect();
    check_once(option, &named)?;
    match named.into_iter().flatten().find(|tier| !tiers.contains(&Some(*tier))) {
        Some(tier) => Err(TierArgsError::NoTier { option, tier: tier_name(tier) }),
        None => Ok(()),
    }
}

/// Returns the value for a tier, or else the one for all tiers.
fn of_tier<T: Copy>(given: &[ForTier<T>], tier: Tier) -> Option<T> {
    let value = |tier| given.iter().find(|given| given.tier == tier).map(|given| given.value);
    value(Some(tier)).or_else(|| value(None))
}

fn parse_tier(name: &str) -> Result<Tier, UnknownName> {
    let found = TIERS.into_iter().find(|tier| tier_name(*tier) == name);
    found.ok_or_else(|| UnknownName::new("tier", name, "host, disk, store"))
}

/// A value of `--tier`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TierArg {
    tier: Tier,
    size: TierSize,
}

impl FromStr for TierArg {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (tier, size) =
            text.split_once('=').ok_or("expected TIER=BLOCKS or TIER=SIZE, such as host=64GiB")?;
        let tier = parse_tier(tier).map_err(|error| error.to_string())?;
        let has_unit = size.contains(|character: char| character.is_ascii_alphabetic());
        let size = if has_unit {
            let Bytes(bytes) = size.parse().map_err(|error: BytesError| error.to_string())?;
            TierSize::Bytes(bytes)
        } else {
            TierSize::Blocks(at_least_1(size)?)
        };
        Ok(Self { tier, size })
    }
}

/// A value for one tier, or for every tier that has none of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ForTier<T> {
    tier: Option<Tier>,
    value: T,
}

impl<T: FromStr<Err: fmt::Display>> FromStr for ForTier<T> {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (tier, value) = match text.split_once('=') {
            Some((tier, value)) => {
                (Some(parse_tier(tier).map_err(|error| error.to_string())?), value)
            }
            None => (None, text),
        };
        Ok(Self { tier, value: value.parse::<T>().map_err(|error| error.to_string())? })
    }
}

/// Bytes per second, more than 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Bandwidth(u64);

impl FromStr for Bandwidth {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let bytes = text.strip_suffix("/s").ok_or("expected bytes per second, such as 1.3GB/s")?;
        match bytes.parse().map_err(|error: BytesError| error.to_string())? {
            Bytes(0) => Err("more than 0 is needed".to_owned()),
            Bytes(bytes) => Ok(Self(bytes)),
        }
    }
}

/// A time with its unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Latency(Duration);

impl FromStr for Latency {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let units = [("us", 1e-6), ("ms", 1e-3), ("s", 1.0)];
        let number =
            units.into_iter().find_map(|(unit, seconds)| Some((text.strip_suffix(unit)?, seconds)));
        let is_digit = |character: char| character.is_ascii_digit() || character == '.';
        let seconds = number.filter(|(number, _)| number.chars().all(is_digit)).and_then(
            |(number, seconds)| {
                let number: f64 = number.parse().ok()?;
                Duration::try_from_secs_f64(number * seconds).ok()
            },
        );
        seconds.map(Self).ok_or_else(|| "expected a time such as 500us, 2ms or 1s".to_owned())
    }
}

fn non_zero(text: &str) -> Result<NonZeroU32, String> {
    at_least_1(text).and_then(|n| NonZeroU32::new(n).ok_or_else(|| "0".to_owned()))
}

#[cfg(test)]
mod tests;
