//! Counters of a cache since its creation.
use crate::cache::state::CacheState;
use crate::events::Tier;

/// Counters of a cache since it was created. [`Usage`](crate::Usage) has the current fill.
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
    /// Tokens, of both kinds of hits, whose blocks an [import](crate::reuse::Import) brought from
    /// host memory and no sequence had used since. In caches with several groups, those of the
    /// group for which most were brought.
    pub host_hit_tokens: u64,
    /// The same from disk.
    pub disk_hit_tokens: u64,
    /// The same from a store that other machines read too.
    pub store_hit_tokens: u64,
    /// Tokens, of both kinds of hits, whose rows were cached and were computed again, because no
    /// recurrent state was kept behind them.
    pub stateless_tokens: u64,
    /// Snapshots of recurrent states that became reusable, in all groups.
    pub stored_snapshots: u64,
    /// Evicted snapshots, in all groups.
    pub evicted_snapshots: u64,
    /// Sequences that were preempted.
    pub preemptions: u64,
    /// Blocks copied because they are shared or in the index.
    pub cow_copies: u64,
    /// Blocks whose content became reusable, in all groups.
    pub stored_blocks: u64,
    /// Blocks filled with content that was cached already, in all groups: full blocks were replaced
    /// by the cached one, and partial ones were dropped when their sequence ended.
    pub duplicate_blocks: u64,
    /// Evicted blocks, in all groups.
    pub evictions: u64,
}

/// Tokens from host memory, disk and stores.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct ByTier([u32; 3]);

impl ByTier {
    pub(super) fn add(&mut self, tier: Tier, tokens: u32) {
        let [host, disk, store] = &mut self.0;
        let of_tier = match tier {
            Tier::Device => return,
            Tier::Host => host,
            Tier::Disk => disk,
            Tier::Store => store,
        };
        *of_tier += tokens;
    }
    /// Raises the tokens of each tier to those of another group.
    pub(super) fn raise_to(&mut self, other: Self) {
        for (tokens, other) in self.0.iter_mut().zip(other.0) {
            *tokens = other.max(*tokens);
        }
    }
}

impl CacheState {
    /// Returns the counters of the cache since its creation.
    pub fn stats(&self) -> Stats {
        let mut stats = self.stats;
        for pool in self.groups.iter().map(|group| group.pool.stats()) {
            stats.stored_blocks += pool.stored;
            stats.duplicate_blocks += pool.duplicates;
            stats.evictions += pool.evictions;
        }
        for snapshots in self.states.iter().filter_map(|group| group.snapshots.as_ref()) {
            let pool = snapshots.pool.stats();
            stats.stored_snapshots += pool.stored;
            stats.evicted_snapshots += pool.evictions;
        }
        stats
    }

    /// Counts the tokens of one start that came from each lower tier.
    pub(super) fn note_imported(&mut self, tokens: ByTier) {
        let stats = &mut self.stats;
        let all =
            [&mut stats.host_hit_tokens, &mut stats.disk_hit_tokens, &mut stats.store_hit_tokens];
        for (all, tokens) in all.into_iter().zip(tokens.0) {
            *all += u64::from(tokens);
        }
    }

    /// Counts the lookup that [`Self::start`] just used.
    pub(super) fn note_lookup(&mut self, tokens: u32, resumed: bool) {
        let found = &self.lookup.found;
        let hits = u64::from(found.tokens());
        let blocks = self.groups.iter().enumerate().fold(0_u64, |n, (index, group)| {
            let needed = found.needed(index, group.window, &group.slot_map());
            n + u64::from(needed.num_blocks(found.part > 0))
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
        *requests += 1;
        *asked += u64::from(tokens);
        *hit += hits;
        self.stats.hit_blocks += blocks;
        if !self.states.is_empty() {
            let found = &self.lookup.found;
            self.stats.stateless_tokens += u64::from(found.rows - found.tokens());
        }
        self.stats.partial_hit_tokens += u64::from(self.lookup.found.part);
    }
}
