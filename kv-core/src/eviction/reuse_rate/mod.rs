//! The content that will be missed least goes first: the default policy.
//!
//! How soon content is used again is counted by *class* (was it the end of a sequence, how often
//! was it used, in which turn of a conversation) and by *age* in requests. From these counts
//! follows for each class and age the most uses per request of waiting that keeping such a block
//! may bring: the Gittins index of a job that ends with the next use. The candidate with the least
//! index goes. In a busy conversation service this keeps content through the pause in which nobody
//! has read the answer yet, and gives up first turns before tenth turns; with one class, or where
//! the chance falls with age, it is least recently used first.
//!
//! Counts are taken of content that was evicted too, as long as it is remembered, so they do not
//! depend on what the policy did. As long as little was seen of a class, it is taken to be used as
//! all classes are at each age, more or less often by one factor; and an age that nobody has
//! reached to be like the age before.
//!
//! # Source
//! Beckmann, Chen, Cidon, *LHD: Improving Cache Hit Rate by Maximizing Hit Density* (2018), for
//! hits per room and time; Gittins, *Bandit Processes and Dynamic Allocation Indices* (1979).
mod cohorts;
mod contents;
mod rates;

use std::sync::Arc;

use cohorts::Cohorts;
use contents::{Content, Contents, NONE, short_key};
use rates::Rates;

use crate::eviction::priority::Levels;
use crate::eviction::{BlockInfo, Clock, EvictionPolicy, Priority};
use crate::ids::BlockId;

/// Conclusions are drawn again after one in so many of the requests there were, but no more seldom
/// than after so many requests.
const LESSON_SHARE: u32 = 32;
const REQUESTS_PER_LESSON_MAX: u32 = 128;

/// Least expected use per room and time first, among the blocks of the default priority; those of
/// lower levels go before, those of higher levels after them, least recently used first.
///
/// Each call takes O(1), or O(log n) with durations of priorities, a request further time that
/// depends on its own blocks and the numbers of classes and ages. Contents are remembered up to
/// four times the number of blocks after they are gone; about 500 bytes for each block, allocated
/// at once.
#[derive(Debug)]
pub struct ReuseRate {
    /// Idle blocks of all levels but the default one.
    levels: Levels,
    contents: Contents,
    cohorts: Cohorts,
    rates: Rates,
    /// Requests so far, and until conclusions are drawn.
    now: u32,
    requests_to_lesson: u32,
    released: Released,
    /// The latest new content and its number: often the parent of the next.
    stored: (u64, u32),
}

/// The block released last, to know the next one as the block before it.
#[derive(Debug, Clone, Copy, Default)]
struct Released {
    /// The content before it.
    parent: u64,
    /// The latest turn of the blocks behind.
    turn: u8,
    /// The class it is ranked by, unless it was the last of its sequence: those are often of no
    /// use to anybody, and must not drag along the blocks before them.
    rank: Option<u8>,
}

impl ReuseRate {
    /// For blocks `0..num_blocks`; durations of priorities run by `clock`.
    pub fn new(num_blocks: u32, clock: Arc<dyn Clock>) -> Self {
        let contents = Contents::new(num_blocks);
        Self {
            levels: Levels::new(num_blocks, clock),
            cohorts: Cohorts::new(contents.len()),
            contents,
            rates: Rates::new(),
            now: 0,
            requests_to_lesson: 0,
            released: Released::default(),
            stored: (0, NONE),
        }
    }

    fn learn(&mut self) {
        let order = self.rates.learn();
        self.cohorts.rank(order);
    }

    /// The turn of new content behind `parent`: one more, unless its parent is as new.
    fn turn_behind(&self, parent: Option<u64>) -> u8 {
        let Some(key) = parent else { return 1 };
        let (latest, content) = self.stored;
        let content = if latest == key { Some(content) } else { self.contents.find(key) };
        let Some(parent) = content.map(|content| self.contents.get(content)) else { return 1 };
        let is_new = parent.uses <= 1 && !parent.is_idle && parent.block != NONE;
        if is_new { parent.turn } else { parent.turn.saturating_add(1) }
    }

    /// Content that aged is in use again, or forgotten.
    fn leave(&mut self, content: u32) {
        let cohort = self.contents.get(content).cohort;
        if cohort != NONE {
            self.set_candidate(content, false);
            self.cohorts.leave(cohort);
            if let Some(slot) = self.contents.get_mut(content) {
                slot.cohort = NONE;
            }
        }
    }

    /// A use: counted at the age the content has.
    fn count_use(&mut self, content: u32) {
        let Content { cohort, uses, .. } = self.contents.get(content);
        if cohort != NONE {
            let (class, bin) = self.cohorts.class_and_bin(cohort);
            self.rates.used(class, bin);
            self.leave(content);
        }
        if let Some(slot) = self.contents.get_mut(content) {
            slot.uses = uses.saturating_add(1);
        }
    }

    fn set_candidate(&mut self, content: u32, is_candidate: bool) {
        let cohort = self.contents.get(content).cohort;
        if cohort == NONE || is_candidate == self.contents.is_candidate(content) {
            return;
        }
        if is_candidate {
            let is_first = self.contents.first_candidate(cohort).is_none();
            self.contents.push_candidate(cohort, content);
            if is_first {
                self.cohorts.set_candidates(cohort, true);
            }
        } else if self.contents.remove_candidate(cohort, content) {
            self.cohorts.set_candidates(cohort, false);
        }
    }

    /// The class of a block just released, and the class to rank it by: no worse than the blocks
    /// behind it, which are of no use without it.
    fn classify(&mut self, content: &Content) -> (u8, u8) {
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

    /// The block no longer holds its content.
    fn remove(&mut self, block: u32) {
        self.levels.remove(block);
        if let Some(content) = self.contents.of_block(block) {
            self.set_candidate(content, false);
            if let Some(cohort) = self.contents.remove_from_block(content) {
                self.cohorts.leave(cohort);
            }
        }
    }

    /// Puts an idle block where its level belongs.
    fn place(&mut self, block: u32, content: u32) {
        let is_default = self.levels.priority(block).level == Priority::DEFAULT_LEVEL;
        self.set_candidate(content, is_default);
        if !is_default {
            self.levels.push(block);
        }
    }
}

impl EvictionPolicy for ReuseRate {
    fn tick(&mut self) {
        self.now = self.now.wrapping_add(1);
        self.cohorts.advance(self.now, &mut self.rates);
        self.requests_to_lesson = self.requests_to_lesson.saturating_sub(1);
        if self.requests_to_lesson == 0 {
            self.requests_to_lesson = (self.now / LESSON_SHARE).clamp(1, REQUESTS_PER_LESSON_MAX);
            self.learn();
        }
    }

    fn stored(&mut self, block: BlockId, info: &BlockInfo) {
        self.remove(block.0);
        self.levels.set(block.0, info.priority);
        let key = short_key(info.key);
        let parent = info.parent.map(short_key);
        let known = self.contents.find(key);
        if let Some(content) = known.filter(|content| self.contents.get(*content).block == NONE) {
            self.count_use(content);
            self.contents.bring_back(content, block.0);
            return;
        }
        let copied = known.map(|content| self.contents.get(content));
        let (uses, turn) = copied.map_or_else(
            || (1, self.turn_behind(parent)),
            |of| (of.uses.saturating_add(1), of.turn),
        );
        let Some((content, left)) = self.contents.allocate() else { return };
        if let Some(cohort) = left {
            self.cohorts.leave(cohort);
        }
        let parent = parent.unwrap_or(0);
        let (is_found, is_idle) = (copied.is_none(), false);
        let block = block.0;
        let new = Content { key, parent, block, cohort: NONE, uses, turn, is_found, is_idle };
        self.contents.insert(content, new);
        self.stored = (key, content);
    }

    fn reused(&mut self, block: BlockId) {
        if let Some(content) = self.contents.of_block(block.0) {
            self.levels.remove(block.0);
            self.count_use(content);
            if let Some(slot) = self.contents.get_mut(content) {
                slot.is_idle = false;
            }
        }
    }

    /// A use, but at an age that says nothing: the request may have found a part of the block, and
    /// let go of it, just before.
    fn computed_again(&mut self, block: BlockId) {
        if let Some(content) = self.contents.of_block(block.0) {
            self.levels.remove(block.0);
            self.leave(content);
            if let Some(slot) = self.contents.get_mut(content) {
                (slot.uses, slot.is_idle) = (slot.uses.saturating_add(1), false);
            }
        }
    }

    fn idle(&mut self, block: BlockId) {
        let Some(content) = self.contents.of_block(block.0) else { return };
        let known = self.contents.get(content);
        if known.is_idle {
            return;
        }
        let (class, rank) = self.classify(&known);
        let cohort = self.cohorts.enter(class, rank, self.now).unwrap_or(NONE);
        self.rates.reached(class, 0, 1.0);
        if let Some(slot) = self.contents.get_mut(content) {
            slot.cohort = cohort;
            slot.is_idle = true;
        }
        self.place(block.0, content);
        if self.rates.take_in_use(rank) {
            self.learn();
        }
    }

    fn dropped(&mut self, block: BlockId) {
        self.remove(block.0);
    }

    fn set_priority(&mut self, block: BlockId, priority: Priority) {
        let Some(content) = self.contents.of_block(block.0) else { return };
        self.levels.set(block.0, priority);
        if self.contents.get(content).is_idle {
            self.levels.remove(block.0);
            self.place(block.0, content);
        }
    }

    fn evict(&mut self) -> Option<BlockId> {
        while let Some(block) = self.levels.expired() {
            if let Some(content) = self.contents.of_block(block) {
                self.place(block, content);
            }
        }
        let of_level = self.levels.first();
        let low = of_level.filter(|(level, _)| *level < Priority::DEFAULT_LEVEL);
        let block = low.or_else(|| self.first_of_default_level().or(of_level))?.1;
        self.remove(block);
        Some(BlockId(block))
    }
}

impl ReuseRate {
    /// The candidate of the default level that will be missed least.
    fn first_of_default_level(&self) -> Option<(u8, u32)> {
        let content = self.contents.first_candidate(self.cohorts.first()?)?;
        Some((Priority::DEFAULT_LEVEL, self.contents.get(content).block))
    }
}

#[cfg(test)]
mod tests {
    #![expect(clippy::arithmetic_side_effects, reason = "a test that overflows fails")]
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

    /// One request after another with a block that is never asked for again.
    fn fill(policy: &mut ReuseRate, first: u128, num_blocks: u32) {
        for block in 0..num_blocks {
            policy.tick();
            let found = policy.evict().unwrap_or(BlockId(block));
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
        // The last blocks, 2 and 5, are a class of their own.
        let inside = [0..2, 3..5].map(|prompt| {
            let of_prompt = order.iter().copied().filter(|block| prompt.contains(block));
            of_prompt.collect::<Vec<_>>()
        });
        assert_eq!(inside, [[1, 0], [4, 3]]);
    }

    #[test]
    fn what_is_forgotten_makes_room_and_the_memory_stays_as_it_is() {
        let mut policy = policy(4);
        let capacity = policy.contents.len();
        assert_eq!(capacity, 20);
        for round in 0..50 {
            fill(&mut policy, round * 4, 4);
        }
        assert_eq!(policy.contents.len(), capacity);
        assert!(policy.contents.find(short_key(BlockKey(199))).is_some());
        assert!(policy.contents.find(short_key(BlockKey(180))).is_some(), "remembered 16 more");
        assert!(policy.contents.find(short_key(BlockKey(179))).is_none(), "the 21st is forgotten");
    }

    #[test]
    fn content_that_returns_is_known_by_its_uses() {
        let mut policy = policy(2);
        fill(&mut policy, 0, 2);
        fill(&mut policy, 10, 2); // 0 and 1 are gone, but remembered
        policy.tick();
        let block = policy.evict().unwrap();
        policy.stored(block, &info(1, None));
        let content = policy.contents.of_block(block.0).unwrap();
        assert_eq!(policy.contents.get(content).uses, 2);
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
                let content = policy.contents.of_block(block).unwrap();
                assert_eq!(policy.contents.get(content).turn, turn, "block {block}");
            }
            (0..range.end).rev().for_each(|block| policy.idle(BlockId(block)));
        }
    }
}
