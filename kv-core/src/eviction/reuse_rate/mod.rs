//! Eviction by expected reuse: the default policy.
//!
//! The time to reuse is counted by *cell*, which is a combination of features of content, and by
//! *age* in requests. For each cell and age these counts give the highest rate of uses per request
//! of waiting that keeping such a block may bring: the Gittins index of a job that ends with the
//! next use. The candidate with the lowest index is evicted. In a busy conversation service the
//! policy keeps content through the pause in which the user reads the answer, and evicts first
//! turns before tenth turns. With one cell, or if the chance of reuse falls with age, the policy is
//! LRU.
//!
//! A cell with few observations is assumed to be used like all content at each age, times the
//! effects of its features, and an age without observations to be like the age before. Evicted
//! content is counted too while it is remembered, so the counts do not depend on the policy's
//! choices.
//!
//! # Source
//! Beckmann, Chen, Cidon, *LHD: Improving Cache Hit Rate by Maximizing Hit Density* (2018), for
//! hits per space and time; Gittins, *Bandit Processes and Dynamic Allocation Indices* (1979).
mod cohorts;
mod contents;
mod features;
mod rates;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use cohorts::{Cohorts, Spot};
use contents::{Content, Contents, Status, short_key};
use features::{Features, Request, gap, hint};
use rates::{Rates, bin_of};

use crate::eviction::priority::Levels;
use crate::eviction::{BlockInfo, Clock, EvictionPolicy, Priority, Return};
use crate::ids::BlockId;

/// Rates are recomputed after 1/32 of the requests so far, but at least every 128 requests.
const LESSONS_SHARE: u32 = 32;
const LESSONS_INTERVAL_MAX: u32 = 128;

/// Requests after which rates are recomputed at the latest when content has new features.
const LESSON_DELAY_MAX: u32 = 4;

/// Unknown blocks of a request that are told apart.
const RUN_MAX: u8 = 32;

/// Evicts the block with the lowest expected use per space and time first, among the blocks of the
/// default priority. Blocks of lower levels are evicted earlier, blocks of higher levels later,
/// least recently used first.
///
/// Each call takes O(1), or O(log n) with durations of priorities; the beginning of a request takes
/// additional time that depends on its own blocks and, every 128 requests, on the number of
/// combinations of features seen. Four evicted contents per block are remembered, and 32,768 at
/// least. The policy takes 94 bytes for each block, a megabyte in a small pool, allocated at once,
/// and some for each of the last 16,384 requests.
#[derive(Debug)]
pub struct ReuseRate {
    levels: Levels,
    contents: Contents,
    cohorts: Cohorts,
    rates: Rates,
    requests: u32,
    /// Requests until rates are recomputed.
    until_lesson: u32,
    released: Released,
    /// The block about to become idle, and the grade of what its sequence said.
    hinted: Option<(BlockId, u8)>,
}

/// The block released last, to recognise the next one as its predecessor.
#[derive(Debug, Clone, Copy, Default)]
struct Released {
    /// Key of the content before it.
    parent: u32,
    request: Request,
    /// The cell by which the content is ranked. `None` for the last of its sequence: such blocks
    /// are often useless, and must not affect the rank of the blocks before them.
    rank: Option<u16>,
}

impl ReuseRate {
    /// Creates the policy for blocks `0..num_blocks`; durations of priorities use `clock`.
    pub fn new(num_blocks: u32, clock: Arc<dyn Clock>) -> Self {
        Self {
            levels: Levels::new(num_blocks, clock),
            cohorts: Cohorts::new(num_blocks),
            contents: Contents::new(num_blocks),
            rates: Rates::new(),
            requests: 0,
            until_lesson: 0,
            released: Released::default(),
            hinted: None,
        }
    }

    /// Returns the bytes of host memory.
    #[cfg(test)]
    pub(crate) fn host_bytes(&self) -> usize {
        let [levels, contents] = [self.levels.host_bytes(), self.contents.host_bytes()];
        let [cohorts, rates] = [self.cohorts.host_bytes(), self.rates.host_bytes()];
        [levels, contents, cohorts, rates].iter().sum()
    }

    fn learn(&mut self) {
        self.until_lesson = (self.requests / LESSONS_SHARE).clamp(1, LESSONS_INTERVAL_MAX);
        self.cohorts.rank(self.rates.learn());
    }

    /// Returns the statistics of new content after `parent`, which it continues.
    fn follow(&mut self, parent: u32) -> Content {
        let known = self.contents.find(parent).and_then(|at| Some((at, self.contents.get(at)?)));
        let (turn, run, gap) = match known.map(|(_, before)| (before.turn + 1, before)) {
            None => (1, 1, 0),
            // Of the same request.
            Some((_, Content { turn, status: Status::Used { run: run @ 1.., gap }, .. })) => {
                (turn, (run + 1).min(RUN_MAX), gap)
            }
            Some((
                later,
                Content { continuations: 0..=1, status: Status::Used { gap, .. }, .. },
            )) => (later, 1, gap),
            // Shared content says nothing of this conversation.
            Some((later, _)) => (later, 1, 0),
        };
        if let Some((at, before)) = known {
            let continuations = before.continuations + 1;
            self.contents.set(at, Content { continuations, ..before });
        }
        Content { uses: 1, turn, continuations: 0, status: Status::Used { run, gap } }
    }

    /// Ends the time in which content aged, and counts its use if `is_used`; returns its age.
    fn end_age(&mut self, content: Content, is_used: bool) -> u32 {
        let Status::Idle { cell, since } = content.status else { return 0 };
        let age = self.cohorts.age(since);
        if is_used {
            self.rates.used(cell, bin_of(age));
        }
        self.cohorts.leave(cell, since);
        age
    }

    /// Marks the content of a slot as in use again and returns its statistics.
    fn use_again(&mut self, slot: u32, is_timed: bool) -> Option<Content> {
        let before = self.contents.get(slot)?;
        let gap = gap(self.end_age(before, is_timed));
        let status = Status::Used { run: 0, gap };
        let content = Content { uses: before.uses + 1, status, ..before };
        self.contents.set(slot, content);
        Some(content)
    }

    /// Returns the cell of content just released, and the cell to rank it by: no worse than the
    /// blocks after it, which are useless without it.
    fn classify(&mut self, block: u32, content: Content, request: Request) -> (u16, u16) {
        let [key, parent] = self.contents.keys(block);
        let is_last = self.released.parent != key;
        if is_last {
            self.released = Released { request, ..Released::default() };
        }
        let released = &mut self.released;
        released.parent = parent;
        released.request.turn = released.request.turn.max(content.turn);
        let features =
            Features::new(content, is_last, Request { hint: request.hint, ..released.request });
        let before = self.rates.num_cells();
        let cell = self.rates.cell(features);
        if self.rates.num_cells() > before {
            self.cohorts.add_cells(self.rates.num_cells());
            self.until_lesson = self.until_lesson.min(LESSON_DELAY_MAX);
        }
        let behind = released.rank.filter(|rank| self.rates.rate(cell) < self.rates.rate(*rank));
        let rank = behind.unwrap_or(cell);
        released.rank = (!is_last).then_some(rank);
        (cell, rank)
    }

    /// Returns the place of an idle block among the candidates.
    fn spot(&mut self, block: u32) -> Option<Spot> {
        let Status::Idle { since, .. } = self.contents.get(block)?.status else { return None };
        Some(Spot { level: self.levels.level(block), rank: *self.contents.rank_mut(block), since })
    }

    /// Makes an idle block a candidate.
    fn place(&mut self, block: u32) {
        if let Some(spot) = self.spot(block) {
            self.cohorts.push(block, spot);
            self.levels.begin(block);
        }
    }

    /// Removes a candidate.
    fn take_out(&mut self, block: u32) {
        self.levels.end(block);
        self.cohorts.remove(block);
    }

    /// Removes a block's content.
    fn remove(&mut self, block: u32) {
        self.take_out(block);
        if let Some(forgotten) = self.contents.lose(block) {
            self.end_age(forgotten, false);
        }
    }
}

impl EvictionPolicy for ReuseRate {
    fn tick(&mut self) {
        self.cohorts.advance(&mut self.rates);
        self.requests = self.requests.saturating_add(1);
        self.until_lesson = self.until_lesson.saturating_sub(1);
        if self.until_lesson == 0 {
            self.learn();
        }
    }

    fn stored(&mut self, block: BlockId, info: &BlockInfo) {
        self.remove(block.0);
        self.levels.set(block.0, info.priority);
        let keys = [short_key(info.key), info.parent.map_or(0, short_key)];
        // A copy of content that another block has counts as new.
        let gone = self.contents.find(keys[0]).filter(|slot| !self.contents.is_held(*slot));
        let known = gone.and_then(|slot| self.use_again(slot, true));
        gone.map(|slot| self.contents.remove(slot));
        let content = known.unwrap_or_else(|| self.follow(keys[1]));
        self.contents.insert(block.0, keys, content);
    }

    fn reused(&mut self, block: BlockId) {
        self.take_out(block.0);
        self.use_again(block.0, true);
    }

    /// Counts a use without an age: the request may have found a part of the block, and released
    /// it, just before.
    fn computed_again(&mut self, block: BlockId) {
        self.take_out(block.0);
        self.use_again(block.0, false);
    }

    /// Hides the block; age and cell stay, and the duration of the level goes on.
    fn held(&mut self, block: BlockId) {
        self.cohorts.hide(block.0);
    }

    fn hinted(&mut self, block: BlockId, said: Option<Return>) {
        self.hinted = Some((block, hint(said)));
    }

    fn idle(&mut self, block: BlockId) {
        let said = self.hinted.take().filter(|(of, _)| *of == block);
        if self.cohorts.show(block.0) {
            self.spot(block.0).map(|spot| self.cohorts.open(spot));
            return;
        }
        let Some(content) = self.contents.get(block.0) else { return };
        let Status::Used { run, gap } = content.status else { return };
        let hint = said.map_or(0, |(_, hint)| hint);
        let (cell, rank) = self.classify(block.0, content, Request { turn: 0, run, gap, hint });
        let since = self.cohorts.now();
        self.cohorts.enter(cell);
        self.rates.reached(cell, 0, 1.0);
        *self.contents.rank_mut(block.0) = rank;
        self.contents.set(block.0, Content { status: Status::Idle { cell, since }, ..content });
        self.place(block.0);
    }

    fn dropped(&mut self, block: BlockId) {
        self.remove(block.0);
    }

    fn set_priority(&mut self, block: BlockId, priority: Priority) {
        let before = self.levels.level(block.0);
        self.levels.end(block.0);
        self.levels.set(block.0, priority);
        if [before, self.levels.level(block.0)] != [Priority::DEFAULT_LEVEL; 2] {
            self.cohorts.remove(block.0);
            self.place(block.0);
        }
    }

    fn evict(&mut self) -> Option<BlockId> {
        while let Some(block) = self.levels.expired() {
            self.cohorts.remove(block);
            self.place(block);
        }
        let block = self.cohorts.next()?;
        self.remove(block);
        Some(BlockId(block))
    }
}
