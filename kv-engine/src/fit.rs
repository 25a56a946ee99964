//! The blocks that one request needs alone, and advice if the cache has fewer.
use kv_core::CacheSpec;
use kv_core::spec::GroupSpec;

/// The size of one request. Sizes may be any numbers: a request that needs more than `u32::MAX`
/// blocks needs `u32::MAX`, more than any pool has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RequestSize {
    /// Tokens of the prompt.
    pub prompt: u32,
    /// Most tokens per chunk.
    pub chunk: u32,
    /// Tokens per sequence at the end of the request.
    pub tokens: u32,
    /// Number of sequences that continue the prompt: the beams.
    pub width: u32,
    /// Whether everything is recomputed for each token, also in chunks.
    pub forget: bool,
}

/// A group of layers with too few blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Shortage {
    /// Index of the group.
    pub group: usize,
    /// Number of groups of the cache.
    pub num_groups: usize,
    /// Blocks of the group that the request needs.
    pub needed: u32,
    /// Blocks that the group has.
    pub available: u32,
    /// Changes that let the request run.
    pub advice: Advice,
}

/// Changes that let a request run: any one of these, or fewer new tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Advice {
    /// A limit of tokens per step with which it fits.
    pub chunk: Option<u32>,
    /// Whether fewer beams are possible.
    pub has_beams: bool,
    /// For a paged cache: the block size and number of blocks with which it fits.
    pub paged: Option<(u32, u32)>,
}

impl RequestSize {
    /// Returns the largest number of blocks of a group that the request holds at any time.
    pub fn blocks(&self, group: &GroupSpec) -> u32 {
        let map = group.slot_map();
        if group.window().is_none() {
            // Steps of any size: no block is freed before the end.
            let all = map.blocks_reserved(self.tokens);
            return self.of_all(all, map.full_blocks(self.shared()).min(all));
        }
        let prefill = if self.forget { self.tokens } else { self.prompt.min(self.tokens) };
        let chunk = self.chunk.max(1);
        let mut most = 0_u32;
        // Recomputed beams share a step, so their chunks may begin anywhere.
        let stride = if self.forget && self.width > 1 { 1 } else { chunk };
        let mut begin = 0_u32;
        while begin < prefill {
            let end = begin + chunk.min(prefill - begin);
            most = most.max(held(group, begin, end).of_one);
            begin = begin.saturating_add(stride);
        }
        if self.forget {
            return self.of_all(most, 0);
        }
        most.max(self.while_generating(group))
    }

    /// Returns the number of leading tokens that all sequences share.
    fn shared(&self) -> u32 {
        if self.forget { 0 } else { self.prompt }
    }

    /// Returns the largest number of blocks that its sequences hold while they grow token by token.
    fn while_generating(&self, group: &GroupSpec) -> u32 {
        if self.width <= 1 {
            return group.blocks_to_grow(self.tokens);
        }
        let full = group.slot_map().full_blocks(self.prompt);
        let totals = (self.prompt..self.tokens).map(|len| {
            let held = held(group, len, len + 1);
            // The prompt's full blocks that are still in the window.
            let shared = full.saturating_sub(held.live) + held.sink_blocks.min(full);
            self.of_all(held.of_one, shared.min(held.of_one))
        });
        totals.max().unwrap_or(0)
    }

    /// Returns the blocks of all sequences, each with `one` blocks, the first `shared` of which are
    /// common.
    fn of_all(&self, one: u32, shared: u32) -> u32 {
        let own = one - shared;
        own.saturating_mul(self.width.max(1)).saturating_add(shared)
    }

    /// Finds the first group whose pool is too small.
    pub(crate) fn check(&self, spec: &CacheSpec) -> Result<(), Shortage> {
        let groups = spec.groups();
        let short = |size: &Self| {
            let of = |(index, group): (usize, &GroupSpec)| {
                let (needed, available) = (size.blocks(group), group.num_blocks());
                (needed > available).then_some((index, needed, available))
            };
            groups.iter().enumerate().find_map(of)
        };
        let Some((group, needed, available)) = short(self) else {
            return Ok(());
        };
        let halves = std::iter::successors(Some(self.chunk), |n| Some(n / 2).filter(|n| *n > 0));
        let fits = |chunk: &u32| short(&Self { chunk: *chunk, ..*self }).is_none();
        let pages = groups.first().filter(|group| groups.len() == 1 && !group.is_contiguous());
        let advice = Advice {
            chunk: halves.skip(1).find(fits),
            has_beams: self.width > 1,
            paged: pages.map(|group| (group.block_size(), needed)),
        };
        Err(Shortage { group, num_groups: groups.len(), needed, available, advice })
    }
}

/// Blocks of a sequence in a step with tokens `begin..end`.
struct Held {
    of_one: u32,
    /// First block after the sink tokens that the step's first query sees.
    live: u32,
    /// Blocks of sink tokens.
    sink_blocks: u32,
}

fn held(group: &GroupSpec, begin: u32, end: u32) -> Held {
    let map = group.slot_map();
    let sink_blocks = group.window().map_or(0, |window| map.blocks(window.sink_tokens));
    let live = group.window().map_or(0, |window| {
        let first = window.begin(begin);
        if first >= begin { map.full_blocks(begin) } else { map.place(first).index }
    });
    let live = live.max(sink_blocks);
    let left = live - sink_blocks;
    Held { of_one: map.blocks_reserved(end).saturating_sub(left), live, sink_blocks }
}
