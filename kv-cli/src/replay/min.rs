//! The best that any policy can do: it knows the trace's future.
use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::sync::Arc;

use kv::BlockId;
use kv::eviction::{BlockInfo, EvictionPolicy, Priority};

use super::trace::Trace;
use crate::num::{to_u32, to_usize};

/// Never asked for again: later than everything.
const NEVER: u32 = u32::MAX;

/// Gives up the block that is asked for again last, or never (L. A. Belady's MIN).
///
/// Where ids name whole prefixes, a block is asked for only behind the block before it, so that its
/// next use is later: tails go before heads, whatever is kept can be found, and no policy that
/// stores what requests bring, as a cache must, hits more blocks.
#[derive(Debug)]
pub(super) struct Min {
    trace: Arc<Trace>,
    /// For every id asked for: when it is asked for next.
    next: Vec<u32>,
    /// For every id, after the request at hand.
    upcoming: Vec<u32>,
    /// Requests begun.
    num_requests: usize,
    /// Of the request at hand.
    blocks: Vec<u32>,
    /// Number in the trace of each block's content.
    numbers: Vec<u32>,
    /// Of each block that is a candidate.
    turns: Vec<Option<Turn>>,
    candidates: BTreeSet<(Turn, u32)>,
    arrivals: u64,
}

/// When a block is asked for next, and its part of the id; of those never asked for again, the
/// first to become idle goes first. The greatest goes.
type Turn = (u32, u32, Reverse<u64>);

impl Min {
    /// For blocks `0..num_blocks` and requests in the order of the trace, each behind a
    /// [`tick`](EvictionPolicy::tick).
    pub(super) fn new(trace: Arc<Trace>, num_blocks: u32) -> Self {
        let asked = trace.all_ids().unwrap_or_default();
        let num_ids = asked.iter().max().map_or(0, |id| to_usize(*id).saturating_add(1));
        let mut next = vec![NEVER; asked.len()];
        // From the end: who asked last asks next.
        let mut upcoming = vec![NEVER; num_ids];
        for (at, (id, next)) in asked.iter().zip(&mut next).enumerate().rev() {
            if let Some(upcoming) = upcoming.get_mut(to_usize(*id)) {
                *next = std::mem::replace(upcoming, to_u32(at));
            }
        }
        Self {
            next,
            upcoming,
            num_requests: 0,
            blocks: Vec::new(),
            numbers: vec![0; to_usize(num_blocks)],
            turns: vec![None; to_usize(num_blocks)],
            candidates: BTreeSet::new(),
            arrivals: 0,
            trace,
        }
    }

    fn turn(&mut self, block: BlockId) -> Option<Turn> {
        let number = *self.numbers.get(to_usize(block.0))?;
        let split = self.trace.blocks_per_id().get();
        let id = number.checked_div(split)?;
        let next = self.upcoming.get(to_usize(id)).copied().unwrap_or(NEVER);
        let part = if next == NEVER { 0 } else { number.checked_rem(split)? };
        self.arrivals = self.arrivals.saturating_add(1);
        Some((next, part, Reverse(self.arrivals)))
    }
}

impl EvictionPolicy for Min {
    fn tick(&mut self) {
        let Some(request) = self.trace.requests().get(self.num_requests) else {
            return;
        };
        self.num_requests = self.num_requests.saturating_add(1);
        self.trace.blocks(request, &mut self.blocks);
        let (first, ids) = self.trace.ids(request);
        let next = self.next.get(to_usize(first)..).unwrap_or_default();
        for (id, next) in ids.iter().zip(next) {
            if let Some(upcoming) = self.upcoming.get_mut(to_usize(*id)) {
                *upcoming = *next;
            }
        }
    }
    fn stored(&mut self, block: BlockId, info: &BlockInfo) {
        let number = self.blocks.get(to_usize(info.index)).copied();
        if let (Some(number), Some(place)) = (number, self.numbers.get_mut(to_usize(block.0))) {
            *place = number;
        }
    }
    fn reused(&mut self, block: BlockId) {
        self.dropped(block);
    }
    fn idle(&mut self, block: BlockId) {
        let turn = self.turn(block);
        if let Some(place) = self.turns.get_mut(to_usize(block.0)).filter(|place| place.is_none()) {
            *place = turn;
            self.candidates.extend(turn.map(|turn| (turn, block.0)));
        }
    }
    fn dropped(&mut self, block: BlockId) {
        let turn = self.turns.get_mut(to_usize(block.0)).and_then(Option::take);
        if let Some(turn) = turn {
            self.candidates.remove(&(turn, block.0));
        }
    }
    fn set_priority(&mut self, _: BlockId, _: Priority) {}
    fn evict(&mut self) -> Option<BlockId> {
        let (_, block) = self.candidates.pop_last()?;
        if let Some(place) = self.turns.get_mut(to_usize(block)) {
            *place = None;
        }
        Some(BlockId(block))
    }
}
