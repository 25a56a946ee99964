//! Prompts whose blocks are looked for: from the request to the start of its sequence.
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kv_core::backend::Backend;
use kv_core::events::Tier;
use kv_core::eviction::Return;
use kv_core::invariant::Invariant;
use kv_core::num::to_u32;
use kv_core::reuse::{Import, PrefixProbe};
use kv_core::{CacheError, KvCache, SequenceId, StartOptions};

use super::prompted::Prompt;
use super::search::StateSearch;
use super::{ChunkOf, GROUP, TierError, Tiers, Wait};
use crate::chain::{Chain, ChunkAt, absent, last_key, reach};
use crate::chunk::Verified;
use crate::store::after;

/// Time after its deadline that a store is still waited for.
pub(super) const GRACE: Duration = Duration::from_millis(20);

/// A prompt whose blocks are being looked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PrefetchId(pub(super) u64);

/// A verified chunk of host memory, and where it came from.
pub(super) type Held<C> = (Verified<Arc<C>>, Tier);

/// The search for one prompt's blocks.
#[derive(Debug)]
pub(super) struct Prefetch<C> {
    pub(super) probe: PrefixProbe,
    /// That of the cache when the chains were named.
    pub(super) encoding_key: u128,
    /// Empty if a group has no names: nothing can come then.
    pub(super) chains: Vec<Chain>,
    pub(super) began: Instant,
    pub(super) wait: Wait,
    pub(super) stage: Stage,
    /// Stores that have a chunk, by group and chunk.
    pub(super) found: HashMap<(usize, ChunkAt), u64>,
    /// Chunks that are here, by group and chunk. Held chunks stay in host memory.
    pub(super) held: HashMap<(usize, ChunkAt), Held<C>>,
    /// The search for recurrent states, in a cache with states.
    pub(super) search: Option<StateSearch>,
    /// Set while chunks are awaited that no store has yet.
    pub(super) again: Option<Again>,
}

/// The schedule of repeated lookups of chunks that the stores did not have.
#[derive(Debug)]
pub(super) struct Again {
    pub(super) until: Instant,
    pub(super) next: Instant,
    pub(super) pause: Duration,
    /// Tokens that are awaited.
    pub(super) tokens: u32,
}

#[derive(Debug)]
pub(super) enum Stage {
    /// Lookups in the stores are on their way.
    Looking {
        answers_left: usize,
        until: Instant,
    },
    /// Chunks are being read: the queue of those that no store reads yet, and the number of the
    /// others.
    Reading {
        queue: VecDeque<(usize, ChunkAt)>,
        outstanding: usize,
        until: Instant,
    },
    Done,
}

impl<C> Prefetch<C> {
    /// Returns whether the whole chunks of some tokens are here or on the device.
    pub(super) fn has(&self, tokens: u32) -> bool {
        if self.search.is_some() {
            return self.held_state().is_some_and(|(len, _)| len >= tokens);
        }
        let has = |chain: &Chain, chunk: u32| {
            let group = usize::from(chain.group().0);
            self.held.contains_key(&(group, ChunkAt::Whole(chunk)))
        };
        let [all, upto] = [
            reach(&self.probe, &self.chains, tokens, |_, _| true),
            reach(&self.probe, &self.chains, tokens, has),
        ];
        self.probe.hit(upto) >= self.probe.hit(all)
    }
}

impl<B: Backend> Tiers<B> {
    /// Does what [`TieredCache::prefetch`](crate::TieredCache::prefetch) does.
    pub(crate) fn prefetch(
        &mut self,
        cache: &KvCache<B>,
        prompt: &[u32],
        options: &StartOptions<'_>,
    ) -> PrefetchId {
        self.prefetch_within(cache, prompt, options, self.wait)
    }

    /// Does what [`TieredCache::prefetch_within`](crate::TieredCache::prefetch_within) does.
    pub(crate) fn prefetch_within(
        &mut self,
        cache: &KvCache<B>,
        prompt: &[u32],
        options: &StartOptions<'_>,
        wait: Wait,
    ) -> PrefetchId {
        let began = Instant::now();
        self.stats.prefetches += 1;
        let id = self.stats.prefetches;
        self.groups.iter_mut().for_each(|of| of.host.begin_request());
        let probe = cache.state().probe_keys(prompt, options);
        let chains = self.chains(cache, &probe, options.hint());
        let search = StateSearch::new(cache, &probe, (options.stops(), self.state_lookups()));
        let mut prefetch = Prefetch {
            search,
            probe,
            encoding_key: cache.state().encoding_key(),
            chains,
            began,
            wait,
            stage: Stage::Done,
            found: HashMap::new(),
            held: HashMap::new(),
            again: None,
        };
        let answers_left = if wait == Wait::None { 0 } else { self.look_up(id, &mut prefetch) };
        if answers_left > 0 {
            let until = self.lookups_until(began);
            prefetch.stage = Stage::Looking { answers_left, until };
        }
        self.prefetches.insert(id, prefetch);
        if answers_left == 0 {
            self.plan(id);
        }
        PrefetchId(id)
    }

    /// Does what [`TieredCache::is_ready`](crate::TieredCache::is_ready) does.
    pub(crate) fn is_ready(&self, prefetch: PrefetchId) -> bool {
        let Some(of) = self.prefetches.get(&prefetch.0) else { return true };
        let now = Instant::now();
        match of.stage {
            Stage::Done => of.again.as_ref().is_none_or(|again| now >= again.until),
            Stage::Looking { until, .. } | Stage::Reading { until, .. } => {
                now >= until || self.wait_until(of).is_some_and(|until| now >= until)
            }
        }
    }

    /// Returns when a prompt stops to wait.
    fn wait_until(&self, of: &Prefetch<ChunkOf<B>>) -> Option<Instant> {
        let limit = match of.wait {
            Wait::None => Duration::ZERO,
            Wait::All | Wait::IfFaster => return None,
            Wait::For(time) => time,
            Wait::Compute => {
                let tokens = of.probe.limit() - of.probe.reused();
                let seconds = self.compute.get()? * f64::from(tokens);
                Duration::try_from_secs_f64(seconds).ok()?
            }
        };
        Some(after(of.began, limit))
    }

    /// Does what [`TieredCache::cancel`](crate::TieredCache::cancel) does.
    pub(crate) fn cancel(&mut self, prefetch: PrefetchId) -> bool {
        self.prefetches.remove(&prefetch.0).is_some()
    }

    /// Does what [`TieredCache::start`](crate::TieredCache::start) does.
    pub(crate) fn start(
        &mut self,
        cache: &mut KvCache<B>,
        prefetch: PrefetchId,
        sequence: SequenceId,
        options: StartOptions<'_>,
    ) -> Result<u32, TierError> {
        let prompt = self.prompt(prefetch)?;
        let import = self.bring(cache, prefetch, &options)?;
        let mut started = cache.start(sequence, prompt.prompt(), options);
        if let Some(import) = import {
            let finished = cache.finish_import(import).ok();
            finished.invariant("no step is open, and nobody else ends the import");
            // The import held blocks that the sequence computes anew, perhaps the last ones.
            if matches!(started, Err(CacheError::Exhausted(_))) {
                started = cache.start(sequence, prompt.prompt(), options);
            }
        }
        Ok(started?)
    }

    /// Brings the prefetched blocks of a prompt to the device, in the blocks of the import. The
    /// prefetch ends.
    pub(crate) fn bring(
        &mut self,
        cache: &mut KvCache<B>,
        prefetch: PrefetchId,
        options: &StartOptions<'_>,
    ) -> Result<Option<Import>, TierError> {
        self.take_results();
        let mut of = self.prefetches.remove(&prefetch.0).ok_or(TierError::UnknownPrefetch)?;
        if !matches!(of.stage, Stage::Done) || of.again.is_some() {
            self.stats.late += 1;
        }
        let fresh = cache.state().probe_keys(of.probe.prompt(), options);
        let is_current = of.encoding_key == cache.state().encoding_key();
        let has_space = (fresh.salt(), fresh.adapter()) == (of.probe.salt(), of.probe.adapter());
        let groups = self.groups.iter().map(|group| group.spec.named_by());
        let same_keys = |group| last_key(&fresh, group) == last_key(&of.probe, group);
        if !has_space || (is_current && !groups.clone().all(same_keys)) {
            return Err(TierError::OtherOptions);
        }
        if !is_current {
            // The constants have changed: chunks found under the old ones are of no use.
            of.chains.clear();
            of.held.clear();
        }
        of.probe = fresh;
        for group in 0..of.chains.len() {
            let absent = absent(&of.probe, of.chains.get(group).invariant(GROUP));
            for chunk in absent {
                self.hold(&mut of, (group, ChunkAt::Whole(chunk)));
            }
        }
        self.hold_states(&mut of);
        self.import(cache, &of)
    }

    fn prompt(&self, prefetch: PrefetchId) -> Result<PrefixProbe, TierError> {
        let of = self.prefetches.get(&prefetch.0).ok_or(TierError::UnknownPrefetch)?;
        Ok(of.probe.clone())
    }

    /// Does what [`TieredCache::wait`](crate::TieredCache::wait) does.
    pub(crate) fn wait(
        &mut self,
        cache: &mut KvCache<B>,
        prefetch: PrefetchId,
    ) -> Result<(), TierError> {
        /// Longest wait for a thread between two looks at copies of the device.
        const PAUSE: Duration = Duration::from_millis(1);
        if cache.state().is_step_open() {
            return Err(TierError::StepOpen);
        }
        loop {
            self.poll(cache)?;
            if self.is_ready(prefetch) {
                return Ok(());
            }
            if let Ok(done) = self.done.recv_timeout(PAUSE) {
                self.take_result(done);
            }
        }
    }

    /// Names the whole chunks of a prompt; none if a group has no names.
    pub(super) fn name_chains(&mut self, cache: &KvCache<B>, probe: &PrefixProbe) -> Vec<Chain> {
        let space = (probe.salt(), probe.adapter());
        let roots =
            (0..self.groups.len()).map(|at| self.root(cache.state().encoding_key(), at, space));
        let Some(roots) = roots.collect::<Option<Vec<_>>>() else { return Vec::new() };
        roots.into_iter().map(|root| Chain::new(probe, root)).collect()
    }

    /// Names the whole chunks of a prompt, and notes that they are no generated text, and what the
    /// caller expects of it.
    pub(super) fn chains(
        &mut self,
        cache: &KvCache<B>,
        probe: &PrefixProbe,
        hint: Option<Return>,
    ) -> Vec<Chain> {
        let chains = self.name_chains(cache, probe);
        let prompt = Prompt { tokens: to_u32(probe.prompt().len()), hint };
        for chain in &chains {
            chain.prompted_names().for_each(|name| self.prompted.insert(name, prompt));
        }
        chains
    }

    /// Holds a chunk of a prompt if it is in host memory; returns whether it is held.
    pub(super) fn hold(
        &self,
        of: &mut Prefetch<ChunkOf<B>>,
        (group, at): (usize, ChunkAt),
    ) -> bool {
        if of.held.contains_key(&(group, at)) {
            return true;
        }
        let name = of.chains.get(group).invariant(GROUP).name(&of.probe, at);
        let Some(entry) = self.groups.get(group).invariant(GROUP).host.get(&name) else {
            return false;
        };
        of.held.insert((group, at), (entry.chunk.clone(), Tier::Host));
        true
    }

    /// Begins reads that have room now, and ends stages whose time is over.
    pub(super) fn advance_prefetches(&mut self) {
        self.expire_reads();
        if self.prefetches.is_empty() {
            return;
        }
        let now = Instant::now();
        let mut ids: Vec<_> = self.prefetches.keys().copied().collect();
        // First come, first served.
        ids.sort_unstable();
        for id in ids {
            let Some(of) = self.prefetches.get(&id) else { continue };
            match of.stage {
                Stage::Looking { until, .. } if now >= until => self.plan(id),
                Stage::Reading { until, .. } if now >= until => {
                    let of = self.prefetches.get_mut(&id);
                    of.invariant("a prefetch was just there").stage = Stage::Done;
                }
                Stage::Reading { .. } => self.begin_reads(id),
                Stage::Done => self.look_again(id, now),
                Stage::Looking { .. } => {}
            }
        }
    }
}
