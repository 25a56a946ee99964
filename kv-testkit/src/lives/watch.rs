//! Checks the choices of an eviction policy, by a search through a plain list of blocks.
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kv_core::BlockId;
use kv_core::eviction::{BlockInfo, Clock, Eviction, EvictionPolicy, ManualClock, Priority};

use super::happened::{Happened, Lived};

/// A policy and its rules: it knows every cached block and evicts only candidates, one of the
/// lowest level that has not expired, and the oldest one where the policy says so.
#[derive(Debug)]
pub(super) struct Watch {
    inner: Box<dyn EvictionPolicy>,
    eviction: Eviction,
    clock: Arc<ManualClock>,
    seen: Arc<Mutex<Watched>>,
}

/// Observations of one policy.
#[derive(Debug, Default)]
pub(super) struct Watched {
    blocks: BTreeMap<BlockId, Known>,
    arrivals: u64,
    /// The first rule that was broken.
    broken: Option<String>,
    lived: Lived,
}

/// A cached block.
#[derive(Debug, Clone, Copy)]
struct Known {
    priority: Priority,
    /// The time when it became idle, and its number in the order of arrival among the candidates.
    idle: Option<(Duration, u64)>,
}

impl Known {
    /// Returns when the level of a candidate expires.
    fn end(&self) -> Option<Duration> {
        let duration = self.priority.duration;
        let lasting = duration.filter(|_| self.priority.level != Priority::DEFAULT_LEVEL);
        Some(self.idle?.0 + lasting?)
    }
}

impl Watch {
    /// Wraps the policy for `num_blocks` blocks.
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

/// Locks the observations.
pub(super) fn lock(seen: &Mutex<Watched>) -> MutexGuard<'_, Watched> {
    seen.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Watched {
    pub(super) fn broken(&self) -> Option<&str> {
        self.broken.as_deref()
    }
    /// Returns the behaviours seen in evictions.
    pub(super) fn lived(&self) -> Lived {
        self.lived
    }
    pub(super) fn num_known(&self) -> usize {
        self.blocks.len()
    }
    /// Returns the priority of a cached block, and whether it is a candidate.
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

    /// Gives expired blocks the default level; each becomes the youngest candidate.
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

    /// Checks that `chosen` was allowed, and removes it from the candidates.
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
            self.breaks(|| format!("{eviction} evicted {named:?}, among (level, arrival): {all:?}"));
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
            self.seen().breaks(|| format!("{block} was stored twice"));
        }
        self.inner.stored(block, info);
    }
    fn reused(&mut self, block: BlockId) {
        let mut seen = self.seen();
        match seen.blocks.get_mut(&block) {
            Some(known) => known.idle = None,
            None => seen.breaks(|| format!("{block} is reused but not cached")),
        }
        drop(seen);
        self.inner.reused(block);
    }
    fn computed_again(&mut self, block: BlockId) {
        let mut seen = self.seen();
        match seen.blocks.get_mut(&block) {
            Some(known) => known.idle = None,
            None => seen.breaks(|| format!("{block} is computed again but not cached")),
        }
        drop(seen);
        self.inner.computed_again(block);
    }
    fn idle(&mut self, block: BlockId) {
        let now = self.clock.now();
        if self.seen().of(block).is_none_or(|(_, is_idle)| is_idle) {
            self.seen().breaks(|| format!("{block} becomes idle but is not cached or is idle already"));
        }
        self.seen().arrive(block, now);
        self.inner.idle(block);
    }
    fn dropped(&mut self, block: BlockId) {
        if self.seen().blocks.remove(&block).is_none() {
            self.seen().breaks(|| format!("{block} is dropped but not cached"));
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
            None => seen.breaks(|| format!("{block} gets a priority but is not cached")),
            // Its duration starts again, and policies with levels make it the youngest candidate.
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
