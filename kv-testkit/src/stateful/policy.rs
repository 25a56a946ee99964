//! Checks the choices of an eviction policy, by a search through a plain list of blocks.
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kv_core::BlockId;
use kv_core::eviction::{
    BlockInfo, Clock, Eviction, EvictionPolicy, ManualClock, Priority, Return,
};

use super::coverage::{Behaviour, Coverage};

/// A policy with its rules, checked: it knows every cached block and evicts only candidates, of the
/// lowest level that has not expired, and the oldest where the policy's rule says so.
#[derive(Debug)]
pub(super) struct CheckedPolicy {
    inner: Box<dyn EvictionPolicy>,
    eviction: Eviction,
    clock: Arc<ManualClock>,
    seen: Arc<Mutex<Observations>>,
}

/// Observations of one policy.
#[derive(Debug, Default)]
pub(super) struct Observations {
    blocks: BTreeMap<BlockId, CachedBlock>,
    arrivals: u64,
    /// The first rule that was broken.
    broken: Option<String>,
    coverage: Coverage,
    /// The block whose hint was reported and that becomes idle next.
    told: Option<BlockId>,
}

/// A cached block.
#[derive(Debug, Clone, Copy)]
struct CachedBlock {
    priority: Priority,
    /// The time when it became idle, and its number in the order of arrival among the candidates.
    idle: Option<(Duration, u64)>,
    /// Whether it is held for a reader and keeps that place without being a candidate.
    is_held: bool,
}

impl CachedBlock {
    /// Returns when the level of a candidate expires.
    fn expiry(&self) -> Option<Duration> {
        let duration = self.priority.duration;
        let lasting = duration.filter(|_| self.priority.level != Priority::DEFAULT_LEVEL);
        Some(self.idle?.0 + lasting?)
    }
}

impl CheckedPolicy {
    /// Wraps the policy for `num_blocks` blocks.
    pub(super) fn new(
        eviction: Eviction,
        num_blocks: u32,
        clock: &Arc<ManualClock>,
    ) -> (Self, Arc<Mutex<Observations>>) {
        let seen = Arc::new(Mutex::new(Observations::default()));
        let shared: Arc<dyn Clock> = Arc::clone(clock) as _;
        let inner = eviction.policy(num_blocks, &shared);
        let clock = Arc::clone(clock);
        (Self { inner, eviction, clock, seen: Arc::clone(&seen) }, seen)
    }

    fn seen(&self) -> MutexGuard<'_, Observations> {
        lock(&self.seen)
    }
}

/// Locks the observations.
pub(super) fn lock(seen: &Mutex<Observations>) -> MutexGuard<'_, Observations> {
    seen.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Observations {
    pub(super) fn broken(&self) -> Option<&str> {
        self.broken.as_deref()
    }
    /// Returns the behaviours seen in evictions.
    pub(super) fn coverage(&self) -> Coverage {
        self.coverage
    }
    pub(super) fn num_known(&self) -> usize {
        self.blocks.len()
    }
    /// Returns the priority of a cached block, and whether it is a candidate.
    pub(super) fn of(&self, block: BlockId) -> Option<(Priority, bool)> {
        let known = self.blocks.get(&block)?;
        Some((known.priority, known.idle.is_some() && !known.is_held))
    }

    fn report(&mut self, what: impl FnOnce() -> String) {
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

    /// Makes a held block a candidate again, in its place; `false` for any other.
    fn end_hold(&mut self, block: BlockId) -> bool {
        let known = self.blocks.get_mut(&block);
        known.is_some_and(|known| std::mem::take(&mut known.is_held))
    }

    /// Gives expired blocks the default level; each becomes the youngest candidate.
    fn expire(&mut self, now: Duration) {
        let expiry = |(block, known): (&BlockId, &CachedBlock)| Some((known.expiry()?, *block));
        let mut ends: Vec<_> = self.blocks.iter().filter_map(expiry).collect();
        ends.retain(|(expiry, _)| *expiry <= now);
        ends.sort_unstable();
        for (_, block) in ends {
            self.coverage.add(Behaviour::LevelExpired);
            self.blocks.entry(block).and_modify(|known| known.priority = Priority::default());
            self.arrive(block, now);
        }
    }

    /// Checks that the choice was allowed, and removes it from the candidates.
    fn evict(&mut self, eviction: Eviction, chosen: Option<BlockId>) {
        let candidate = |(block, known): (&BlockId, &CachedBlock)| {
            let (_, arrival) = known.idle.filter(|_| !known.is_held)?;
            Some((known.priority.level, arrival, *block))
        };
        let all: Vec<_> = self.blocks.iter().filter_map(candidate).collect();
        let (first, oldest) = (all.iter().min(), all.iter().min_by_key(|(_, age, _)| *age));
        let found = all.iter().find(|(_, _, block)| Some(*block) == chosen);
        let is_right = match (eviction, found) {
            (_, None) => all.is_empty() && chosen.is_none(),
            (Eviction::Lru, found) => found == oldest,
            (Eviction::Priority, found) => found == first,
            (Eviction::ReuseRate, Some((level, ..))) => first.is_some_and(|(low, ..)| low == level),
            _ => true,
        };
        if !is_right {
            self.report(|| {
                format!("{eviction} evicted {chosen:?}, among (level, arrival): {all:?}")
            });
        }
        let has_levels = all.iter().any(|(level, ..)| first.is_some_and(|(low, ..)| low < level));
        if has_levels && matches!(eviction, Eviction::Priority | Eviction::ReuseRate) {
            self.coverage.add(Behaviour::EvictedByLevel);
        }
        if let Some(block) = chosen {
            self.blocks.remove(&block);
        }
    }
}

impl EvictionPolicy for CheckedPolicy {
    fn tick(&mut self) {
        self.inner.tick();
    }
    fn stored(&mut self, block: BlockId, info: &BlockInfo) {
        let known = CachedBlock { priority: info.priority, idle: None, is_held: false };
        if self.seen().blocks.insert(block, known).is_some() {
            self.seen().report(|| format!("{block} was stored twice"));
        }
        self.inner.stored(block, info);
    }
    fn reused(&mut self, block: BlockId) {
        let mut seen = self.seen();
        match seen.blocks.get_mut(&block) {
            Some(known) => (known.idle, known.is_held) = (None, false),
            None => seen.report(|| format!("{block} is reused but not cached")),
        }
        drop(seen);
        self.inner.reused(block);
    }
    fn computed_again(&mut self, block: BlockId) {
        let mut seen = self.seen();
        match seen.blocks.get_mut(&block) {
            Some(known) => (known.idle, known.is_held) = (None, false),
            None => seen.report(|| format!("{block} is computed again but not cached")),
        }
        drop(seen);
        self.inner.computed_again(block);
    }
    fn held(&mut self, block: BlockId) {
        let mut seen = self.seen();
        match seen.blocks.get_mut(&block).filter(|known| known.idle.is_some() && !known.is_held) {
            Some(known) => known.is_held = true,
            None => seen.report(|| format!("{block} is held but no candidate")),
        }
        drop(seen);
        self.inner.held(block);
    }
    fn idle(&mut self, block: BlockId) {
        let told = self.seen().told.take();
        if let Some(told) = told.filter(|told| *told != block) {
            self.seen().report(|| format!("{block} becomes idle after a hint for {told}"));
        }
        if self.seen().end_hold(block) {
            return self.inner.idle(block);
        }
        let now = self.clock.now();
        if self.seen().of(block).is_none_or(|(_, is_idle)| is_idle) {
            self.seen()
                .report(|| format!("{block} becomes idle but is not cached or is idle already"));
        }
        self.seen().arrive(block, now);
        self.inner.idle(block);
    }
    fn hinted(&mut self, block: BlockId, hint: Option<Return>) {
        let mut seen = self.seen();
        if seen.of(block).is_none_or(|(_, is_idle)| is_idle) {
            seen.report(|| format!("a hint for {block}, which is not cached or is idle"));
        }
        if let Some(before) = seen.told.replace(block) {
            seen.report(|| format!("{before} has a hint and does not become idle"));
        }
        seen.coverage.add_many(Behaviour::Hinted, u64::from(hint.is_some()));
        drop(seen);
        self.inner.hinted(block, hint);
    }
    fn dropped(&mut self, block: BlockId) {
        if self.seen().blocks.remove(&block).is_none() {
            self.seen().report(|| format!("{block} is dropped but not cached"));
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
            None => seen.report(|| format!("{block} gets a priority but is not cached")),
            // Its duration starts again, and policies with levels make it the youngest candidate.
            Some(true) if eviction != Eviction::Lru => seen.arrive(block, now),
            Some(_) => {}
        }
        drop(seen);
        self.inner.set_priority(block, priority);
    }
    fn evict(&mut self) -> Option<BlockId> {
        let now = self.clock.now();
        if matches!(self.eviction, Eviction::Priority | Eviction::ReuseRate) {
            self.seen().expire(now);
        }
        let chosen = self.inner.evict();
        self.seen().evict(self.eviction, chosen);
        chosen
    }
}
