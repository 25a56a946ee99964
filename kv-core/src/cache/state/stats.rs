//! Counters of what a cache has done so far.
use crate::cache::state::CacheState;

/// What a cache has done since it was created. [`Usage`](crate::Usage) says how full it is now.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Stats {
    /// Prompts looked up by sequences that started; those that resume after a preemption not
    /// included.
    pub requests: u64,
    /// Tokens of these prompts.
    pub query_tokens: u64,
    /// Reused tokens among them.
    pub hit_tokens: u64,
    /// Prompts looked up again after a preemption.
    pub resumed_requests: u64,
    /// Tokens of these prompts.
    pub resumed_query_tokens: u64,
    /// Reused tokens among them.
    pub resumed_hit_tokens: u64,
    /// Reused full blocks of all requests, in all groups.
    pub hit_blocks: u64,
    /// Tokens reused from a block that continues differently, in both kinds of hits.
    pub partial_hit_tokens: u64,
    /// Sequences that were preempted.
    pub preemptions: u64,
    /// Blocks copied because they are shared or in the index.
    pub cow_copies: u64,
    /// Blocks whose content became reusable, in all groups.
    pub stored_blocks: u64,
    /// Blocks filled with content that was cached already, in all groups: full ones were replaced
    /// by the cached one, and partial ones were not kept when their sequence ended.
    pub duplicate_blocks: u64,
    /// Evicted blocks, in all groups.
    pub evictions: u64,
}

impl CacheState {
    /// Returns what the cache has done so far.
    pub fn stats(&self) -> Stats {
        let mut stats = self.stats;
        for pool in self.groups.iter().map(|group| group.pool.stats()) {
            stats.stored_blocks = stats.stored_blocks.saturating_add(pool.stored);
            stats.duplicate_blocks = stats.duplicate_blocks.saturating_add(pool.duplicates);
            stats.evictions = stats.evictions.saturating_add(pool.evictions);
        }
        stats
    }

    /// Counts the lookup that [`Self::start`] just used.
    pub(super) fn note_lookup(&mut self, tokens: u32, resumed: bool) {
        let found = &self.lookup.found;
        let hits = u64::from(found.tokens());
        let blocks = self.groups.iter().enumerate().fold(0_u64, |n, (index, group)| {
            let needed = found.needed(index, group.window, &group.slot_map());
            n.saturating_add(u64::from(needed.num_blocks(found.part > 0)))
        });
        let stats = &mut self.stats;
        let [requests, asked, hit] = if resumed {
            [
                &mut stats.resumed_requests,
                &mut stats.resumed_query_tokens,
                &mut stats.resumed_hit_tokens,
            ]
        } else {
            [&mut stats.requests, &mut stats.query_tokens, &mut stats.hit_tokens]
        };
        *requests = requests.saturating_add(1);
        *asked = asked.saturating_add(u64::from(tokens));
        *hit = hit.saturating_add(hits);
        self.stats.hit_blocks = self.stats.hit_blocks.saturating_add(blocks);
        let part = u64::from(self.lookup.found.part);
        self.stats.partial_hit_tokens = self.stats.partial_hit_tokens.saturating_add(part);
    }
}
