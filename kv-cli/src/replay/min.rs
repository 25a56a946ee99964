//! Belady's MIN, the optimal eviction policy: it knows the rest of the trace.
use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::sync::Arc;

use kv::BlockId;
use kv::eviction::{BlockInfo, EvictionPolicy, Priority};

use super::run::Position;
use super::trace::{Request, Trace};
use crate::num::{to_u32, to_usize};

/// The next use of a block that is never used again: later than all others.
const NEVER: u32 = u32::MAX;

/// Evicts the block whose next use is the latest, or that is never used again (L. A. Belady's MIN).
///
/// If ids name whole prefixes, a block is used only after the block before it, so its next use is
/// later: tails are evicted before heads, and every kept block can be found.
#[derive(Debug)]
pub(super) struct Min {
    trace: Arc<Trace>,
    position: Position,
    /// Blocks of the cache: larger requests are refused, and use nothing.
    num_blocks: u32,
    /// For every requested id: the next request for it.
    next: Vec<u32>,
    /// For every id: its next use after the current request.
    upcoming: Vec<u32>,
    /// Number of requests begun.
    num_requests: usize,
    /// Blocks of the current request.
    blocks: Vec<u32>,
    /// Number in the trace of each block's content.
    numbers: Vec<u32>,
    /// Keys of the blocks that are candidates.
    next_uses: Vec<Option<NextUse>>,
    candidates: BTreeSet<(NextUse, u32)>,
    arrivals: u64,
}

/// The next use of a block, and its part of the id; of blocks that are never used again, the first
/// to become idle comes first. The largest key is evicted.
type NextUse = (u32, u32, Reverse<u64>);

impl Min {
    /// Makes the policy for blocks `0..num_blocks`; `position` is that of the request that runs.
    pub(super) fn new(trace: Arc<Trace>, num_blocks: u32, position: Position) -> Self {
        let requested = trace.all_ids().unwrap_or_default();
        let num_ids = requested.iter().max().map_or(0, |id| to_usize(*id) + 1);
        let mut next = vec![NEVER; requested.len()];
        // Backwards: the last use is the next one of the use before it.
        let mut upcoming = vec![NEVER; num_ids];
        for request in trace.requests().iter().rev().filter(|one| fits(one, num_blocks)) {
            let (first, ids) = trace.ids(request);
            for (offset, id) in ids.iter().enumerate().rev() {
                let at = first + to_u32(offset);
                next[to_usize(at)] = std::mem::replace(&mut upcoming[to_usize(*id)], at);
            }
        }
        Self {
            position,
            num_blocks,
            next,
            upcoming,
            num_requests: 0,
            blocks: Vec::new(),
            numbers: vec![0; to_usize(num_blocks)],
            next_uses: vec![None; to_usize(num_blocks)],
            candidates: BTreeSet::new(),
            arrivals: 0,
            trace,
        }
    }

    /// Goes on to the request that runs.
    fn follow(&mut self) {
        let end = self.position.get() + 1;
        let begun = self.num_requests.min(end);
        for request in &self.trace.requests()[begun..end] {
            if !fits(request, self.num_blocks) {
                continue;
            }
            self.trace.blocks(request, &mut self.blocks);
            let (first, ids) = self.trace.ids(request);
            for (id, next) in ids.iter().zip(&self.next[to_usize(first)..]) {
                self.upcoming[to_usize(*id)] = *next;
            }
        }
        self.num_requests = end;
    }

    fn next_use(&mut self, block: BlockId) -> NextUse {
        let number = self.numbers[to_usize(block.0)];
        let split = self.trace.blocks_per_id();
        // In a trace without ids, no block is used again.
        let next = self.upcoming.get(to_usize(number / split)).copied().unwrap_or(NEVER);
        let part = if next == NEVER { 0 } else { number % split };
        self.arrivals += 1;
        (next, part, Reverse(self.arrivals))
    }
}

impl EvictionPolicy for Min {
    fn stored(&mut self, block: BlockId, info: &BlockInfo) {
        self.follow();
        self.numbers[to_usize(block.0)] = self.blocks[to_usize(info.index)];
    }
    fn reused(&mut self, block: BlockId) {
        self.dropped(block);
    }
    fn idle(&mut self, block: BlockId) {
        self.follow();
        let next_use = self.next_use(block);
        let place = &mut self.next_uses[to_usize(block.0)];
        if place.is_none() {
            *place = Some(next_use);
            self.candidates.insert((next_use, block.0));
        }
    }
    fn dropped(&mut self, block: BlockId) {
        if let Some(next_use) = self.next_uses[to_usize(block.0)].take() {
            self.candidates.remove(&(next_use, block.0));
        }
    }
    fn set_priority(&mut self, _: BlockId, _: Priority) {}
    fn evict(&mut self) -> Option<BlockId> {
        let (_, block) = self.candidates.pop_last()?;
        self.next_uses[to_usize(block)] = None;
        Some(BlockId(block))
    }
}

/// Returns whether the engine runs a request in a cache of `num_blocks` blocks.
fn fits(request: &Request, num_blocks: u32) -> bool {
    request.num_blocks <= num_blocks
}
