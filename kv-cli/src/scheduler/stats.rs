//! What a run counted.
use kv::{Backend, KvCache, Usage};

use crate::num::{per_second, to_f64, to_u64, to_usize};

/// Figures of one run.
///
/// The time of a step that mixes prefill and decode is shared between the two by tokens.
#[derive(Debug, Clone, Default)]
pub(crate) struct Stats {
    pub(crate) seconds: f64,
    pub(crate) prompt_tokens: usize,
    pub(crate) generated_tokens: usize,
    pub(crate) steps: usize,
    /// Tokens that were computed to fill the cache, again after a preemption included.
    prefill_tokens: usize,
    prefill_seconds: f64,
    decode_tokens: usize,
    decode_seconds: f64,
    pub(crate) preemptions: usize,
    /// K and V of one token over all layers; sinks take more.
    pub(crate) bytes_per_token: u64,
    pub(crate) cache_bytes: u64,
    pub(crate) blocks_total: u32,
    /// The most blocks held after any step.
    pub(crate) blocks_peak: u32,
    /// Guesses brought to a step, and those of them that the model confirmed.
    pub(crate) drafted_tokens: u64,
    pub(crate) accepted_tokens: u64,
    /// What the cache itself counted.
    pub(crate) cache: kv::Stats,
    /// Blocks at the end whose content a further prompt could reuse.
    pub(crate) blocks_cached: u32,
    /// Slots of held blocks, and those of them without a token, summed over steps.
    slots_held: u64,
    slots_wasted: u64,
}

impl Stats {
    /// `decode`: tokens of the step that continued a text, and those of them that stayed.
    pub(super) fn note_step(&mut self, seconds: f64, tokens: usize, decode: (u32, u32)) {
        let (decode, kept) = (to_usize(decode.0), to_usize(decode.1));
        let prefill = tokens.saturating_sub(decode);
        let part = to_f64(to_u64(decode)) / to_f64(to_u64(tokens.max(1)));
        self.steps = self.steps.saturating_add(1);
        self.prefill_tokens = self.prefill_tokens.saturating_add(prefill);
        self.decode_tokens = self.decode_tokens.saturating_add(kept);
        self.decode_seconds += seconds * part;
        self.prefill_seconds += seconds * (1.0 - part);
    }

    pub(super) fn note_drafts(&mut self, drafted: u32, accepted: u32) {
        self.drafted_tokens = self.drafted_tokens.saturating_add(drafted.into());
        self.accepted_tokens = self.accepted_tokens.saturating_add(accepted.into());
    }

    /// Takes what the cache says of itself when the run is over.
    pub(super) fn note_end<B: Backend>(&mut self, cache: &KvCache<B>) {
        let (usage, memory) = (cache.usage(), cache.spec().memory());
        self.cache = cache.stats();
        self.blocks_total = usage.blocks_total;
        self.blocks_cached = usage.blocks_cached;
        self.bytes_per_token = memory.bytes_per_token;
        self.cache_bytes = memory.bytes_total.saturating_add(memory.bytes_constants);
    }

    /// Tokens taken over from cached prompts in blocks of their own, and in parts of blocks;
    /// requests that came back included.
    pub(crate) fn reused(&self) -> (u64, u64) {
        let part = self.cache.partial_hit_tokens;
        let all = self.cache.hit_tokens.saturating_add(self.cache.resumed_hit_tokens);
        (all.saturating_sub(part), part)
    }

    /// Part of the prompts' tokens that were cached when the prompts came; without what was
    /// computed again.
    pub(crate) fn hit_ratio(&self) -> f64 {
        per_second(self.cache.hit_tokens, to_f64(to_u64(self.prompt_tokens)))
    }

    /// Part of the guesses that the model confirmed.
    pub(crate) fn acceptance_ratio(&self) -> f64 {
        per_second(self.accepted_tokens, to_f64(self.drafted_tokens))
    }

    /// Generated tokens over steps.
    pub(crate) fn tokens_per_step(&self) -> f64 {
        per_second(to_u64(self.generated_tokens), to_f64(to_u64(self.steps)))
    }

    pub(super) fn note_usage(&mut self, usage: &Usage, block_size: u32) {
        self.blocks_peak = self.blocks_peak.max(usage.blocks_used);
        let held = u64::from(usage.blocks_used).saturating_mul(u64::from(block_size));
        self.slots_held = self.slots_held.saturating_add(held);
        self.slots_wasted = self.slots_wasted.saturating_add(usage.slots_wasted);
    }

    /// Generated tokens over the whole time.
    pub(crate) fn tokens_per_s(&self) -> f64 {
        per_second(to_u64(self.generated_tokens), self.seconds)
    }

    pub(crate) fn prefill_tokens_per_s(&self) -> f64 {
        per_second(to_u64(self.prefill_tokens), self.prefill_seconds)
    }

    pub(crate) fn decode_tokens_per_s(&self) -> f64 {
        per_second(to_u64(self.decode_tokens), self.decode_seconds)
    }

    /// Part of the held slots that held no token, over all steps.
    pub(crate) fn waste_ratio(&self) -> f64 {
        per_second(self.slots_wasted, to_f64(self.slots_held))
    }

    /// Bytes of the blocks held at the peak.
    pub(crate) fn peak_bytes(&self) -> u64 {
        let block = self.cache_bytes.checked_div(u64::from(self.blocks_total)).unwrap_or(0);
        block.saturating_mul(u64::from(self.blocks_peak))
    }
}
