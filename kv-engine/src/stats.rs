//! Counts of a run.
use kv_core::Usage;
use kv_core::scheduling::CacheState;

use crate::num::{per_second, to_f64, to_u64, to_usize};

/// Statistics of one run.
///
/// The time of a step that mixes prefill and decode is divided by tokens.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct Stats {
    /// Seconds of all steps.
    pub seconds: f64,
    /// Tokens of all prompts.
    pub prompt_tokens: usize,
    /// New tokens of all requests.
    pub generated_tokens: usize,
    /// Committed steps.
    pub steps: usize,
    /// Computed tokens that filled the cache, including recomputation after a preemption.
    prefill_tokens: usize,
    prefill_seconds: f64,
    decode_tokens: usize,
    decode_seconds: f64,
    /// Number of preemptions.
    pub preemptions: usize,
    /// Bytes of K and V per token over all layers; rows of the full-precision prefix takes more.
    pub bytes_per_token: u64,
    /// Bytes of the cache.
    pub cache_bytes: u64,
    /// Number of blocks.
    pub blocks_total: u32,
    /// The most blocks held after any step.
    pub blocks_peak: u32,
    /// Draft tokens in all steps.
    pub drafted_tokens: u64,
    /// Accepted draft tokens.
    pub accepted_tokens: u64,
    /// The cache's own counts.
    pub cache: kv_core::Stats,
    /// Blocks with reusable content.
    pub blocks_cached: u32,
    /// Slots of held blocks, and those without a token, summed over steps.
    slots_held: u64,
    slots_wasted: u64,
}

impl Stats {
    /// Adds a step. `decode` is the number of tokens that continued a text, and of those that
    /// stayed.
    pub(crate) fn note_step(&mut self, seconds: f64, tokens: usize, decode: (u32, u32)) {
        let (decode, kept) = (to_usize(decode.0), to_usize(decode.1));
        let prefill = tokens - decode;
        let part = to_f64(to_u64(decode)) / to_f64(to_u64(tokens.max(1)));
        self.steps += 1;
        self.prefill_tokens += prefill;
        self.decode_tokens += kept;
        self.decode_seconds += seconds * part;
        self.prefill_seconds += seconds * (1.0 - part);
    }

    pub(crate) fn note_drafts(&mut self, drafted: u32, accepted: u32) {
        self.drafted_tokens += u64::from(drafted);
        self.accepted_tokens += u64::from(accepted);
    }

    /// Copies the cache's counts.
    pub(crate) fn note_cache(&mut self, cache: &CacheState) {
        let (usage, memory) = (cache.usage(), cache.spec().memory());
        self.cache = cache.stats();
        self.blocks_total = usage.blocks_total;
        self.blocks_cached = usage.blocks_cached;
        self.bytes_per_token = memory.bytes_per_token;
        self.cache_bytes = memory.all_bytes();
    }

    /// Returns the tokens reused from cached prompts in whole blocks and in parts of blocks,
    /// including those of preempted requests.
    pub fn reused(&self) -> (u64, u64) {
        let part = self.cache.partial_hit_tokens;
        let all = self.cache.hit_tokens + self.cache.resumed_hit_tokens;
        (all - part, part)
    }

    /// Returns the share of prompt tokens that were cached when the prompts arrived, without
    /// recomputation.
    pub fn hit_ratio(&self) -> f64 {
        per_second(self.cache.hit_tokens, to_f64(to_u64(self.prompt_tokens)))
    }

    /// Returns the share of draft tokens that were accepted.
    pub fn acceptance_ratio(&self) -> f64 {
        per_second(self.accepted_tokens, to_f64(self.drafted_tokens))
    }

    /// Returns generated tokens over steps.
    pub fn tokens_per_step(&self) -> f64 {
        per_second(to_u64(self.generated_tokens), to_f64(to_u64(self.steps)))
    }

    pub(crate) fn note_usage(&mut self, usage: &Usage, block_size: u32) {
        self.blocks_peak = self.blocks_peak.max(usage.blocks_used);
        self.slots_held += u64::from(usage.blocks_used) * u64::from(block_size);
        self.slots_wasted += usage.slots_wasted;
    }

    /// Returns generated tokens per second of the whole time.
    pub fn tokens_per_s(&self) -> f64 {
        per_second(to_u64(self.generated_tokens), self.seconds)
    }

    /// Returns tokens that filled the cache per second of their share of the time.
    pub fn prefill_tokens_per_s(&self) -> f64 {
        per_second(to_u64(self.prefill_tokens), self.prefill_seconds)
    }

    /// Returns tokens that continued a text per second of their share of the time.
    pub fn decode_tokens_per_s(&self) -> f64 {
        per_second(to_u64(self.decode_tokens), self.decode_seconds)
    }

    /// Returns the share of held slots without a token, over all steps.
    pub fn waste_ratio(&self) -> f64 {
        per_second(self.slots_wasted, to_f64(self.slots_held))
    }

    /// Returns the bytes of the blocks held at the peak.
    pub fn peak_bytes(&self) -> u64 {
        let block = self.cache_bytes.checked_div(u64::from(self.blocks_total)).unwrap_or(0);
        block * u64::from(self.blocks_peak)
    }
}
