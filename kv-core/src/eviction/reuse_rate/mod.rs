//! Eviction by expected reuse: the default policy.
//!
//! The time to reuse is counted by *class* of content (whether a sequence ended with it, number of
//! uses, turn in a conversation) and by *age* in requests. For each class and age these counts give
//! the highest rate of uses per request of waiting that keeping such a block may bring: the Gittins
//! index of a job that ends with the next use. The candidate with the lowest index is evicted. In a
//! busy conversation service the policy keeps content through the pause in which the user reads the
//! answer, and evicts first turns before tenth turns. With one class, or if the chance of reuse
//! falls with age, the policy is LRU.
//!
//! Evicted content is counted too while it is remembered, so the counts do not depend on the
//! policy's choices. A class with few observations is assumed to be used like all classes at each
//! age, times one factor; an age without observations is assumed to be like the age before.
//!
//! # Source
//! Beckmann, Chen, Cidon, *LHD: Improving Cache Hit Rate by Maximizing Hit Density* (2018), for
//! hits per space and time; Gittins, *Bandit Processes and Dynamic Allocation Indices* (1979).
mod cohorts;
mod contents;
mod rates;

use std::sync::Arc;

use cohorts::Cohorts;
use contents::{Contents, Held, Place, short_key};
use rates::{Rates, bin_of};

use crate::eviction::priority::Levels;
use crate::eviction::{BlockInfo, Clock, EvictionPolicy, Priority};
use crate::ids::BlockId;
use crate::invariant::Invariant;

/// Rates are recomputed after 1/32 of the requests so far, but at least every 128 requests.
const RECOMPUTE_SHARE: u32 = 32;
const RECOMPUTE_INTERVAL_MAX: u32 = 128;

/// Evicts the block with the lowest expected use per space and time first, among the blocks of the
/// default priority. Blocks of lower levels are evicted earlier, blocks of higher levels later,
/// least recently used first.
///
/// Each call takes O(1), or O(log n) with durations of priorities; the beginning of a request takes
/// additional time that depends on its own blocks and the numbers of classes and ages. Up to four
/// evicted contents per block are remembered. The policy takes 93 bytes for each block, allocated
/// at once, and some for each of the last 16,384 requests.
#[derive(Debug)]
pub struct ReuseRate {
    levels: Levels,
    contents: Contents,
    cohorts: Cohorts,
    rates: Rates,
    /// Requests until rates are recomputed.
    requests_to_recompute: u32,
    released: Released,
    /// The latest new content and its block: often the parent of the next.
    stored: Option<(u64, u32)>,
}

/// The block released last, to recognise the next one as its predecessor.
#[derive(Debug, Clone, Copy, Default)]
struct Released {
    /// Key of the content before it.
    parent: u32,
    /// The latest turn of the blocks after it.
    turn: u8,
    /// The class by which the content is ranked. `None` for the last of its sequence: such blocks
    /// are often useless, and must not affect the rank of the blocks before them.
    rank: Option<u8>,
}

impl ReuseRate {
    /// Creates the policy for blocks `0..num_blocks`; durations of priorities use `clock`.
    pub fn new(num_blocks: u32, clock: Arc<dyn Clock>) -> Self {
        Self {
            levels: Levels::new(num_blocks, clock),
            cohorts: Cohorts::new(num_blocks),
            contents: Contents::new(num_blocks),
            rates: Rates::new(),
            requests_to_recompute: 0,
            released: Released::default(),
            stored: None,
        }
    }

    /// Returns the bytes of host memory.
    #[cfg(test)]
    pub(crate) fn host_bytes(&self) -> usize {
        let [levels, contents] = [self.levels.host_bytes(), self.contents.host_bytes()];
        let [cohorts, rates] = [self.cohorts.host_bytes(), self.rates.host_bytes()];
        [levels, contents, cohorts, rates].iter().sum()
    }

    fn recompute(&mut self) {
        let order = self.rates.recompute();
        self.cohorts.rank(order);
    }

    /// Returns the turn of new content after `parent`: one more, unless its parent is new too; at
    /// most 255.
    fn turn_after(&self, parent: Option<u64>) -> u8 {
        let Some(key) = parent else { return 1 };
        let latest = self.stored.filter(|&(latest, block)| {
            latest == key && self.contents.held(block).is_some_and(|held| held.is_named(key))
        });
        let place = latest.map(|(_, block)| Place::Block(block));
        let place = place.or_else(|| self.contents.find(key));
        match place {
            None => 1,
            Some(Place::Gone(at)) => self.contents.gone(at).turn.saturating_add(1),
            Some(Place::Block(block)) => self.contents.held(block).map_or(1, |parent| {
                let is_new = parent.uses <= 1 && parent.class().is_none();
                if is_new { parent.turn } else { parent.turn.saturating_add(1) }
            }),
        }
    }

    /// Counts a use of ageing content at its age.
    fn count_use(&mut self, age: Option<(u8, u32)>) {
        if let Some((class, since)) = age {
            self.rates.used(class, bin_of(self.cohorts.age(since)));
            self.cohorts.leave(class, since);
        }
    }

    /// Returns the class of a block just released, and the class to rank it by: no worse than the
    /// blocks after it, which are useless without it.
    fn classify(&mut self, content: &Held) -> (u8, u8) {
        let is_last = self.released.parent != content.key;
        let turn = if is_last { content.turn } else { content.turn.max(self.released.turn) };
        let class = rates::class(content.uses, turn, is_last);
        let behind = self.released.rank.filter(|_| !is_last);
        let better = behind.filter(|rank| self.rates.rate(class) < self.rates.rate(*rank));
        let rank = better.unwrap_or(class);
        let passed_on = (!is_last).then_some(rank);
        self.released = Released { parent: content.parent, turn, rank: passed_on };
        (class, rank)
    }

    /// Removes a candidate.
    fn take_out(&mut self, block: u32) {
        self.levels.end(block);
        self.cohorts.remove(block);
    }

    /// Removes a block's content.
    fn remove(&mut self, block: u32) {
        self.take_out(block);
        let forgotten = self.contents.remove(block);
        if let Some((class, since)) = forgotten.and_then(|forgotten| forgotten.age) {
            self.cohorts.leave(class, since);
        }
    }

    /// Makes an idle block a candidate by its level.
    fn place(&mut self, block: u32, content: &Held) {
        let level = self.levels.level(block);
        if level == Priority::DEFAULT_LEVEL {
            self.cohorts.push(block, content.rank, content.since);
        } else {
            self.cohorts.push_level(block, level);
        }
        self.levels.begin(block);
    }

    /// Marks the content of a block as in use again and returns its statistics. Uses are counted up
    /// to 255.
    fn mark_used(&mut self, block: u32) -> Option<Held> {
        let before = self.contents.held(block)?;
        self.take_out(block);
        let held = self.contents.held_mut(block)?;
        held.uses = held.uses.saturating_add(1);
        held.set_class(None);
        Some(before)
    }
}

impl EvictionPolicy for ReuseRate {
    fn tick(&mut self) {
        self.cohorts.advance(&mut self.rates);
        // 0 before the first request.
        self.requests_to_recompute = self.requests_to_recompute.saturating_sub(1);
        if self.requests_to_recompute == 0 {
            let requests = self.cohorts.now() / RECOMPUTE_SHARE;
            self.requests_to_recompute = requests.clamp(1, RECOMPUTE_INTERVAL_MAX);
            self.recompute();
        }
    }

    fn stored(&mut self, block: BlockId, info: &BlockInfo) {
        self.remove(block.0);
        self.levels.set(block.0, info.priority);
        let key = short_key(info.key);
        let parent = info.parent.map(short_key);
        // Uses are counted up to 255.
        let (uses, turn) = match self.contents.find(key) {
            Some(Place::Gone(at)) => {
                let gone = self.contents.gone(at);
                self.contents.forget(at);
                self.count_use(gone.age);
                (gone.uses.saturating_add(1), gone.turn)
            }
            // A copy, or another content with the same key.
            Some(Place::Block(other)) => {
                let uses = |held: Held| (held.uses.saturating_add(1), held.turn);
                self.contents.held(other).map_or((1, 1), uses)
            }
            None => {
                let turn = self.turn_after(parent);
                self.stored = Some((key, block.0));
                (1, turn)
            }
        };
        self.contents.insert(block.0, key, Held::new((key, parent), uses, turn));
    }

    fn reused(&mut self, block: BlockId) {
        if let Some(before) = self.mark_used(block.0) {
            self.count_use(before.class().map(|class| (class, before.since)));
        }
    }

    /// Counts a use without an age: the request may have found a part of the block, and released
    /// it, just before.
    fn computed_again(&mut self, block: BlockId) {
        if let Some(before) = self.mark_used(block.0)
            && let Some(class) = before.class()
        {
            self.cohorts.leave(class, before.since);
        }
    }

    /// Hides the block; age and class stay, and the duration of the level goes on.
    fn held(&mut self, block: BlockId) {
        self.cohorts.hide(block.0);
    }

    fn idle(&mut self, block: BlockId) {
        if self.cohorts.show(block.0) {
            let level = self.levels.level(block.0);
            let content = self.contents.held(block.0).invariant("a candidate has content");
            self.cohorts.note_shown((content.rank, content.since), level);
            return;
        }
        let Some(known) = self.contents.held(block.0).filter(|held| held.class().is_none()) else {
            return;
        };
        let (class, rank) = self.classify(&known);
        let since = self.cohorts.now();
        self.cohorts.enter(class);
        self.rates.reached(class, 0, 1.0);
        if let Some(held) = self.contents.held_mut(block.0) {
            (held.rank, held.since) = (rank, since);
            held.set_class(Some(class));
            let held = *held;
            self.place(block.0, &held);
        }
        if self.rates.take_in_use(rank) {
            self.recompute();
        }
    }

    fn dropped(&mut self, block: BlockId) {
        self.remove(block.0);
    }

    fn set_priority(&mut self, block: BlockId, priority: Priority) {
        let Some(content) = self.contents.held(block.0) else { return };
        let is_idle = content.class().is_some();
        let before = self.levels.level(block.0);
        if is_idle {
            self.levels.end(block.0);
        }
        self.levels.set(block.0, priority);
        let stays = [before, self.levels.level(block.0)] == [Priority::DEFAULT_LEVEL; 2];
        if is_idle && !stays {
            self.cohorts.remove(block.0);
            self.place(block.0, &content);
        }
    }

    fn evict(&mut self) -> Option<BlockId> {
        while let Some(block) = self.levels.expired() {
            self.cohorts.remove(block);
            if let Some(content) = self.contents.held(block) {
                self.place(block, &content);
            }
        }
        let of_level = self.cohorts.first_by_level();
        let low = of_level.filter(|(level, _)| *level < Priority::DEFAULT_LEVEL);
        let of_level = of_level.map(|(_, block)| block);
        let low = low.map(|(_, block)| block);
        let block = low.or_else(|| self.cohorts.first_by_rate()).or(of_level)?;
        self.remove(block);
        Some(BlockId(block))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::eviction::ManualClock;
    use crate::reuse::BlockKey;

    fn policy(num_blocks: u32) -> ReuseRate {
        ReuseRate::new(num_blocks, Arc::new(ManualClock::new()))
    }

    fn info(key: u128, parent: Option<u128>) -> BlockInfo {
        let parent = parent.map(BlockKey);
        BlockInfo { key: BlockKey(key), parent, index: 0, priority: Priority::default() }
    }

    /// Runs requests with one block each that is never reused; the first ones find the pool empty.
    fn fill(policy: &mut ReuseRate, first: u128, num_blocks: u32) {
        for block in 0..num_blocks {
            policy.tick();
            let found = if first == 0 { BlockId(block) } else { policy.evict().unwrap() };
            policy.stored(found, &info(first + u128::from(block), None));
            policy.idle(found);
        }
    }

    #[test]
    fn inside_a_prompt_tails_go_before_heads() {
        let mut policy = policy(6);
        for prompt in 0..2 {
            policy.tick();
            for at in 0..3_u32 {
                let key = u128::from(prompt * 3 + at);
                let block = BlockId(prompt * 3 + at);
                policy.stored(block, &info(key, key.checked_sub(1).filter(|_| at > 0)));
            }
            (0..3).rev().for_each(|at| policy.idle(BlockId(prompt * 3 + at)));
        }
        (0..8).for_each(|_| policy.tick());
        let order: Vec<_> = std::iter::from_fn(|| policy.evict()).map(|block| block.0).collect();
        assert_eq!(order.len(), 6);
        // The last blocks, 2 and 5, have a class of their own.
        let inside = [0..2, 3..5].map(|prompt| {
            let of_prompt = order.iter().copied().filter(|block| prompt.contains(block));
            of_prompt.collect::<Vec<_>>()
        });
        assert_eq!(inside, [[1, 0], [4, 3]]);
    }

    #[test]
    fn forgotten_contents_free_their_places_and_memory_is_constant() {
        let mut policy = policy(4);
        let capacity = policy.contents.capacity();
        assert_eq!(capacity, 20);
        for round in 0..50 {
            fill(&mut policy, round * 4, 4);
        }
        assert_eq!(policy.contents.capacity(), capacity);
        assert!(policy.contents.find(short_key(BlockKey(199))).is_some());
        assert!(policy.contents.find(short_key(BlockKey(180))).is_some(), "remembered 16 more");
        assert!(policy.contents.find(short_key(BlockKey(179))).is_none(), "the 21st is forgotten");
    }

    #[test]
    fn returning_content_keeps_its_uses() {
        let mut policy = policy(2);
        fill(&mut policy, 0, 2);
        fill(&mut policy, 10, 2); // 0 and 1 are evicted, but remembered
        policy.tick();
        let block = policy.evict().unwrap();
        policy.stored(block, &info(1, None));
        assert_eq!(policy.contents.held(block.0).unwrap().uses, 2);
    }

    #[test]
    fn a_longer_prompt_is_the_next_turn() {
        let mut policy = policy(8);
        for (turn, range) in [(1, 0..2_u32), (2, 2..4), (3, 4..5)] {
            policy.tick();
            (0..range.start).for_each(|block| policy.reused(BlockId(block)));
            for block in range.clone() {
                let key = u128::from(block);
                policy.stored(BlockId(block), &info(key, key.checked_sub(1)));
                assert_eq!(policy.contents.held(block).unwrap().turn, turn, "block {block}");
            }
            (0..range.end).rev().for_each(|block| policy.idle(BlockId(block)));
        }
    }
}
