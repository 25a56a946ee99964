//! Policies of tiers: when a chunk is written to a tier, and whether loading it beats computing it.
//!
//! Pure functions of what the caller knows: no clock, no counter and no I/O.
//!
//! # When a chunk is written
//!
//! | tier | default | why |
//! |---|---|---|
//! | host | `publish` | a copy is cheap, and an eviction or preemption needs none later |
//! | disk | `leave` | hits as `publish` has them, fewer writes; `reuse:2` loses hits |
//! | store | `publish`, prompts from 256 tokens | others cannot see the chunk otherwise |
//!
//! `reuse:2` loses hits because most content that returns has left the device by its second use.
//! Short prompts are computed sooner than they are found in a store.
use std::fmt;
use std::num::NonZeroU32;
use std::str::FromStr;
use std::time::Duration;

use kv_core::UnknownName;
use kv_core::events::Tier;
use kv_core::eviction::Priority;
use kv_core::num::to_f64;

/// When a tier gets a chunk. As text: `publish`, `leave`, `reuse:N`, `never`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum WritePolicy {
    /// As soon as the chunk's blocks can be found on the device, and at a later use or a flush if
    /// the tier does not have it: it was evicted, the write failed, or the prompt was too short
    /// until then.
    OnPublish,
    /// When the tier above gives the chunk up, and at a flush.
    OnLeave,
    /// At its Nth use, the first of which is its publication, and at a flush after it: 1 is the
    /// same as [`Self::OnPublish`].
    OnReuse(NonZeroU32),
    /// At no time: the tier is only read.
    Never,
}

impl fmt::Display for WritePolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::OnPublish => f.write_str("publish"),
            Self::OnLeave => f.write_str("leave"),
            Self::OnReuse(uses) => write!(f, "reuse:{uses}"),
            Self::Never => f.write_str("never"),
        }
    }
}

impl FromStr for WritePolicy {
    type Err = UnknownName;

    fn from_str(text: &str) -> Result<Self, UnknownName> {
        let uses = || text.strip_prefix("reuse:")?.parse().ok();
        match text {
            "publish" => Ok(Self::OnPublish),
            "leave" => Ok(Self::OnLeave),
            "never" => Ok(Self::Never),
            _ => uses().map(Self::OnReuse).ok_or_else(|| {
                UnknownName::new("write policy", text, "publish, leave, reuse:N (N from 1), never")
            }),
        }
    }
}

/// What happened to a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ChunkEvent {
    /// Its blocks can be found on the device from now on: they were computed or imported.
    Published,
    /// A prompt found it, on the device or in a tier, or a prefix with it was pinned.
    Reused,
    /// Host memory evicts the chunk; an eviction from the device is another matter.
    Left,
    /// The tier above is about to end with everything in it.
    Flush,
}

/// What decides whether a chunk is written, besides the event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "a literal names each field")]
pub struct ChunkFacts {
    /// Whether the tier has the chunk, or a write of it is on its way.
    pub is_present: bool,
    /// Uses so far, the event included if it is one: the publication, and each prompt that found
    /// the chunk.
    pub uses: u32,
    /// Tokens of the longest known prompt that the chunk is a part of, not those up to its own end:
    /// without its first chunks, no prefix is found.
    pub prompt_tokens: u32,
    /// Whether some of its tokens were generated.
    pub is_generated: bool,
    /// Whether the caller has pinned a prefix that it is a part of.
    pub is_pinned: bool,
    /// Lowest level of its blocks' priorities.
    pub level: u8,
}

impl Default for ChunkFacts {
    /// Describes a chunk of a long prompt at its first use.
    fn default() -> Self {
        Self {
            is_present: false,
            uses: 1,
            prompt_tokens: u32::MAX,
            is_generated: false,
            is_pinned: false,
            level: Priority::DEFAULT_LEVEL,
        }
    }
}

/// Which chunks a tier gets, and when.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct WriteRule {
    policy: WritePolicy,
    prompt_tokens_min: u32,
    accepts_generated: bool,
}

impl WriteRule {
    /// Creates a rule for every chunk, generated tokens included.
    pub const fn new(policy: WritePolicy) -> Self {
        Self { policy, prompt_tokens_min: 0, accepts_generated: true }
    }

    /// Returns the default of a tier, as the table of [this module](self) has it. A store gets no
    /// generated tokens: answers of one conversation rarely match another one.
    pub const fn of_tier(tier: Tier) -> Self {
        match tier {
            Tier::Host => Self::new(WritePolicy::OnPublish),
            Tier::Disk => Self::new(WritePolicy::OnLeave),
            Tier::Store => {
                Self::new(WritePolicy::OnPublish).with_prompt_tokens_min(256).with_generated(false)
            }
            // The device has what was computed, and a tier of the future what its caller says.
            _ => Self::new(WritePolicy::Never),
        }
    }

    /// Changes when chunks are written, and not which.
    #[must_use]
    pub const fn with_policy(mut self, policy: WritePolicy) -> Self {
        self.policy = policy;
        self
    }

    /// Refuses chunks of shorter prompts.
    #[must_use]
    pub const fn with_prompt_tokens_min(mut self, tokens: u32) -> Self {
        self.prompt_tokens_min = tokens;
        self
    }

    /// Accepts or refuses chunks with generated tokens.
    #[must_use]
    pub const fn with_generated(mut self, is_accepted: bool) -> Self {
        self.accepts_generated = is_accepted;
        self
    }

    /// Returns when chunks are written.
    pub const fn policy(&self) -> WritePolicy {
        self.policy
    }

    /// Decides whether the tier gets a chunk at an event. The first row that applies decides:
    ///
    /// | condition | decision | why |
    /// |---|---|---|
    /// | the policy is `Never` | skip | the tier is only read |
    /// | the tier has it | skip | chunks never change |
    /// | level 0 | skip | the caller wants it evicted first |
    /// | it is pinned | write | the caller wants it kept: at any event |
    /// | it has generated tokens, and the rule refuses them | skip | see below |
    /// | the prompt is too short | skip | computed sooner than found |
    /// | `OnPublish`, published, reused or flush | write | the bytes are here |
    /// | `OnReuse(n)`, the same at `n` uses or more | write | |
    /// | `OnLeave`, left or flush | write | the last moment with the bytes |
    /// | otherwise | skip | another event decides |
    ///
    /// Generated tokens rarely match a prompt of another conversation. A longer prompt is a new
    /// event for its first chunks, so those that were too short until then are written.
    pub fn decide(&self, event: ChunkEvent, chunk: &ChunkFacts) -> WriteDecision {
        let is_kept_out = self.policy == WritePolicy::Never || chunk.is_present || chunk.level == 0;
        let is_accepted = (self.accepts_generated || !chunk.is_generated)
            && chunk.prompt_tokens >= self.prompt_tokens_min
            && self.is_due(event, chunk.uses);
        if !is_kept_out && (chunk.is_pinned || is_accepted) {
            WriteDecision::Write
        } else {
            WriteDecision::Skip
        }
    }

    fn is_due(&self, event: ChunkEvent, uses: u32) -> bool {
        let is_use = matches!(event, ChunkEvent::Published | ChunkEvent::Reused);
        // What was due at a use before and was not written is due at the end too.
        let is_flush = event == ChunkEvent::Flush;
        match self.policy {
            WritePolicy::OnPublish => is_use || is_flush,
            WritePolicy::OnLeave => !is_use,
            WritePolicy::OnReuse(needed) => (is_use || is_flush) && uses >= needed.get(),
            WritePolicy::Never => false,
        }
    }
}

/// Whether a chunk is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[expect(clippy::exhaustive_enums, reason = "written or not")]
pub enum WriteDecision {
    /// The tier gets it.
    Write,
    /// The tier does not get it, at this event.
    Skip,
}

/// Decides whether to load content that a tier has, or to compute it again.
///
/// ```
/// use std::time::Duration;
///
/// use kv::tier::policy::{LoadDecision, LoadOrCompute};
///
/// // 2,048 tokens of an 8B model in 4 bits, from a disk; a GPU computes 22,000 a second.
/// let load = LoadOrCompute {
///     tokens: 2048,
///     bytes: 2048 * 33_792,
///     latency: Duration::from_millis(1),
///     bytes_per_second: Some(1.3e9),
///     prefill_tokens_per_second: Some(22_000.0),
/// };
/// assert_eq!(load.decide(), LoadDecision::Load);
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
#[expect(clippy::exhaustive_structs, reason = "a literal names each field")]
pub struct LoadOrCompute {
    /// Tokens that would be computed otherwise.
    pub tokens: u32,
    /// Bytes to load for them.
    pub bytes: u64,
    /// Time until the tier's first byte, and whatever else does not depend on the bytes.
    pub latency: Duration,
    /// Measured bandwidth of the tier; `None` before the first measurement.
    pub bytes_per_second: Option<f64>,
    /// Measured speed of prefill; `None` before the first measurement.
    pub prefill_tokens_per_second: Option<f64>,
}

impl LoadOrCompute {
    /// Loads what comes sooner than it is computed: if `latency + bytes / bytes_per_second` is less
    /// than `tokens / prefill_tokens_per_second`. Loads if one of the speeds is unknown: the first
    /// load measures the tier, and prefill is the slow way until it is measured.
    pub fn decide(&self) -> LoadDecision {
        let Some(compute) = self.compute_time() else {
            return LoadDecision::Load;
        };
        // A latency as long as computing decides before the bandwidth is known.
        let load = self.load_time().unwrap_or(self.latency);
        if load < compute { LoadDecision::Load } else { LoadDecision::Compute }
    }

    /// Returns the time to load; `None` if the bandwidth is unknown. At a bandwidth that is not
    /// above 0 it is [`Duration::MAX`].
    pub fn load_time(&self) -> Option<Duration> {
        let moved = time(to_f64(self.bytes), self.bytes_per_second?);
        Some(self.latency.saturating_add(moved))
    }

    /// Returns the time to compute; `None` if the speed is unknown. At a speed that is not above 0
    /// it is [`Duration::MAX`].
    pub fn compute_time(&self) -> Option<Duration> {
        Some(time(f64::from(self.tokens), self.prefill_tokens_per_second?))
    }

    /// Returns the bytes per second at which loading takes as long as computing; `None` if no
    /// bandwidth makes up for the latency, or the speed of prefill is unknown.
    pub fn break_even_bandwidth(&self) -> Option<f64> {
        let left = self.compute_time()?.checked_sub(self.latency)?;
        (!left.is_zero()).then(|| to_f64(self.bytes) / left.as_secs_f64())
    }
}

/// Whether content is loaded or computed again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[expect(clippy::exhaustive_enums, reason = "one or the other")]
pub enum LoadDecision {
    /// It is loaded.
    Load,
    /// It is computed again.
    Compute,
}

/// Returns the time of an amount at a speed; an endless one is the longest.
fn time(amount: f64, per_second: f64) -> Duration {
    Duration::try_from_secs_f64(amount / per_second).unwrap_or(Duration::MAX)
}

#[cfg(test)]
mod tests;
