//! Which block an eviction policy must give up, told by a list that is gone through from end to
//! end.
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kv_core::BlockId;
use kv_core::eviction::{BlockInfo, Clock, Eviction, EvictionPolicy, ManualClock, Priority};

use super::happened::{Happened, Lived};

/// A policy, and what it is held to: it knows every block with content, gives up only candidates,
/// and of these one of the lowest level that still holds; the oldest one, where it says so.
#[derive(Debug)]
pub(super) struct Watch {
    inner: Box<dyn EvictionPolicy>,
    eviction: Eviction,
    clock: Arc<ManualClock>,
    seen: Arc<Mutex<Watched>>,
}

/// What was seen of one policy.
#[derive(Debug, Default)]
pub(super) struct Watched {
    blocks: BTreeMap<BlockId, Known>,
    arrivals: u64,
    /// The first promise that was broken.
    broken: Option<String>,
    lived: Lived,
}

/// A block with content.
#[derive(Debug, Clone, Copy)]
struct Known {
    priority: Priority,
    /// Since when nobody holds it, and the number of its arrival among the candidates.
    idle: Option<(Duration, u64)>,
}

impl Known {
    /// When the level of a candidate runs out.
    fn end(&self) -> Option<Duration> {
        let duration = self.priority.duration;
        let lasting = duration.filter(|_| self.priority.level != Priority::DEFAULT_LEVEL);
        Some(self.idle?.0 + lasting?)
    }
}

impl Watch {
    /// Holds a policy of `num_blocks` blocks to what it promises.
    pub(super) fn new(
        eviction: Eviction,
        num_blocks: u32,
        clock: &Arc<ManualClock>,
    ) -> (Self, Arc<Mutex<Watched>>) {
        let seen = Arc::new(Mutex::new(Watched::default()));
        let shared: Arc<dyn Clock> = Arc::clone(clock) as _;
        let inner = eviction.policy(num_blocks, &shared);
        let clock = Arc::clone(clock);
        (Self { inner, eviction, clock, seen: Arc::clone(&seen) }, seen)
    }

    fn seen(&self) -> MutexGuard<'_, Watched> {
        lock(&self.seen)
    }
}

/// What was seen so far.
pub(super) fn lock(seen: &Mutex<Watched>) -> MutexGuard<'_, Watched> {
    seen.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Watched {
    pub(super) fn broken(&self) -> Option<&str> {
        self.broken.as_deref()
    }
    /// What happened in evictions.
    pub(super) fn lived(&self) -> Lived {
        self.lived
    }
    pub(super) fn num_known(&self) -> usize {
        self.blocks.len()
    }
    /// Priority of a block with content, and whether it is a candidate.
    pub(super) fn of(&self, block: BlockId) -> Option<(Priority, bool)> {
        let known = self.blocks.get(&block)?;
        Some((known.priority, known.idle.is_some()))
    }

    fn breaks(&mut self, what: impl FnOnce() -> String) {
        if self.broken.is_none() {
            self.broken = Some(what());
        }
    }

    fn arrive(&mut self, block: BlockId, now: Duration) {
        self.arrivals += 1;
        let arrival = self.arrivals;
        if let Some(known) = self.blocks.get_mut(&block) {
            known.idle = Some((now, arrival));
        }
    }

    /// Levels that ran out are the default one from here on, and such a block is its youngest.
    fn expire(&mut self, now: Duration) {
        let end = |(block, known): (&BlockId, &Known)| Some((known.end()?, *block));
        let mut ends: Vec<_> = self.blocks.iter().filter_map(end).collect();
        ends.retain(|(end, _)| *end <= now);
        ends.sort_unstable();
        for (_, block) in ends {
            self.lived.add(Happened::LevelRanOut);
            self.blocks.entry(block).and_modify(|known| known.priority = Priority::default());
            self.arrive(block, now);
        }
    }

    /// Judges the choice of `named`, which is no candidate any more.
    fn evict(&mut self, eviction: Eviction, named: Option<BlockId>) {
        let candidate = |(block, known): (&BlockId, &Known)| {
            Some((known.priority.level, known.idle?.1, *block))
        };
        let all: Vec<_> = self.blocks.iter().filter_map(candidate).collect();
        let (first, oldest) = (all.iter().min(), all.iter().min_by_key(|(_, age, _)| *age));
        let chosen = all.iter().find(|(_, _, block)| Some(*block) == named);
        let is_right = match (eviction, chosen) {
            (_, None) => all.is_empty() && named.is_none(),
            (Eviction::Lru, chosen) => chosen == oldest,
            (Eviction::Priority, chosen) => chosen == first,
            (Eviction::Default, Some((level, ..))) => first.is_some_and(|(low, ..)| low == level),
            _ => true,
        };
        if !is_right {
            self.breaks(|| format!("{eviction} gave up {named:?}, of (level, arrival): {all:?}"));
        }
        let has_levels = all.iter().any(|(level, ..)| first.is_some_and(|(low, ..)| low < level));
        if has_levels && matches!(eviction, Eviction::Priority | Eviction::Default) {
            self.lived.add(Happened::EvictedByLevel);
        }
        if let Some(block) = named {
            self.blocks.remove(&block);
        }
    }
}

impl EvictionPolicy for Watch {
    fn tick(&mut self) {
        self.inner.tick();
    }
    fn stored(&mut self, block: BlockId, info: &BlockInfo) {
        let known = Known { priority: info.priority, idle: None };
        if self.seen().blocks.insert(block, known).is_some() {
            self.seen().breaks(|| format!("{block} got content twice"));
        }
        self.inner.stored(block, info);
    }
    fn reused(&mut self, block: BlockId) {
        let mut seen = self.seen();
        match seen.blocks.get_mut(&block) {
            Some(known) => known.idle = None,
            None => seen.breaks(|| format!("{block} without content is reused")),
        }
        drop(seen);
        self.inner.reused(block);
    }
    fn computed_again(&mut self, block: BlockId) {
        let mut seen = self.seen();
        match seen.blocks.get_mut(&block) {
            Some(known) => known.idle = None,
            None => seen.breaks(|| format!("{block} without content is computed again")),
        }
        drop(seen);
        self.inner.computed_again(block);
    }
    fn idle(&mut self, block: BlockId) {
        let now = self.clock.now();
        if self.seen().of(block).is_none_or(|(_, is_idle)| is_idle) {
            self.seen().breaks(|| format!("{block} becomes a candidate out of turn"));
        }
        self.seen().arrive(block, now);
        self.inner.idle(block);
    }
    fn dropped(&mut self, block: BlockId) {
        if self.seen().blocks.remove(&block).is_none() {
            self.seen().breaks(|| format!("{block} without content loses it"));
        }
        self.inner.dropped(block);
    }
    fn set_priority(&mut self, block: BlockId, priority: Priority) {
        let (now, eviction) = (self.clock.now(), self.eviction);
        let mut seen = self.seen();
        let known = seen.blocks.get_mut(&block).map(|known| {
            known.priority = priority;
            known.idle.is_some()
        });
        match known {
            None => seen.breaks(|| format!("{block} without content gets a priority")),
            // The time of its level begins anew, and policies by level make it the youngest.
            Some(true) if eviction != Eviction::Lru => seen.arrive(block, now),
            Some(_) => {}
        }
        drop(seen);
        self.inner.set_priority(block, priority);
    }
    fn evict(&mut self) -> Option<BlockId> {
        let now = self.clock.now();
        if matches!(self.eviction, Eviction::Priority | Eviction::Default) {
            self.seen().expire(now);
        }
        let named = self.inner.evict();
        self.seen().evict(self.eviction, named);
        named
    }
}
