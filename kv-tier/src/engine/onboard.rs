//! Onboard: lookups in stores, reads to host memory, and blocks for a prompt that starts.
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kv_core::backend::{Backend, HostPool, Queue};
use kv_core::error::{DeviceError, DeviceErrorKind};
use kv_core::events::Tier;
use kv_core::invariant::Invariant;
use kv_core::num::{to_u32, to_u64};
use kv_core::reuse::{Import, ImportBlock, PrefixProbe};
use kv_core::{BlockId, CacheError, GroupId, KvCache, SequenceId, StartOptions};

use super::guarded::{Read, after};
use super::offload::bit;
use super::{ChunkOf, Done, GroupTier, Reading, Report, TierError, Tiers, Wait};
use crate::chain::{Chain, chunk_of, last_key, missing, reach};
use crate::chunk::Verified;
use crate::policy::{ChunkEvent, LoadDecision, LoadOrCompute};
use crate::record::Record;

const GROUP: &str = "groups are those of the cache that the tiers were made for";
const STORE: &str = "stores are numbered as in the options";

/// How long after its deadline a store is waited for.
pub(super) const GRACE: Duration = Duration::from_millis(20);

/// A prompt whose blocks are being looked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PrefetchId(u64);

/// A verified chunk of host memory, and where it came from.
type Held<C> = (Verified<Arc<C>>, Tier);

/// The search for one prompt's blocks.
#[derive(Debug)]
pub(super) struct Prefetch<C> {
    probe: PrefixProbe,
    /// That of the cache when the chains were named.
    encoding_key: u128,
    /// Empty if a group has no names: nothing can come then.
    chains: Vec<Chain>,
    began: Instant,
    wait: Wait,
    stage: Stage,
    /// Stores that have a chunk, by group and chunk.
    found: HashMap<(usize, u32), u64>,
    /// Chunks that are here, by group and chunk. Held chunks stay in host memory.
    held: HashMap<(usize, u32), Held<C>>,
    /// Set while chunks are awaited that no store has yet.
    again: Option<Again>,
}

/// When stores are asked again for what they did not have.
#[derive(Debug)]
struct Again {
    until: Instant,
    next: Instant,
    pause: Duration,
    /// Tokens that are awaited.
    tokens: u32,
}

/// An import whose copies to the device failed. Some may have been recorded before, and must not
/// reach blocks that were given to others.
#[derive(Debug)]
pub(super) struct Abandoned<C> {
    import: Import,
    /// A chunk of each group that was copied from.
    chunks: Vec<(GroupId, Verified<Arc<C>>)>,
}

#[derive(Debug)]
enum Stage {
    /// Stores are being asked what they have.
    Looking {
        answers_left: usize,
        until: Instant,
    },
    /// Chunks are being read: those that no store has been asked for yet, and the number of the
    /// others.
    Reading {
        queue: VecDeque<(usize, u32)>,
        outstanding: usize,
        until: Instant,
    },
    Done,
}

impl<C> Prefetch<C> {
    /// Returns whether the whole chunks of some tokens are here or on the device.
    fn has(&self, tokens: u32) -> bool {
        let has = |chain: &Chain, chunk: u32| {
            self.held.contains_key(&(usize::from(chain.group().0), chunk))
        };
        let [all, upto] = [
            reach(&self.probe, &self.chains, tokens, |_, _| true),
            reach(&self.probe, &self.chains, tokens, has),
        ];
        self.probe.hit(upto) >= self.probe.hit(all)
    }
}

impl<B: Backend> Tiers<B> {
    /// Begins to look for the blocks of a prompt that the device lacks, in host memory and stores.
    /// Call it as soon as the prompt is known.
    ///
    /// What it finds stays in host memory until [`Self::start`] or [`Self::cancel`].
    pub fn prefetch(
        &mut self,
        cache: &KvCache<B>,
        prompt: &[u32],
        options: &StartOptions<'_>,
    ) -> PrefetchId {
        self.prefetch_within(cache, prompt, options, self.wait)
    }

    /// Does what [`Self::prefetch`] does, with another limit of waiting.
    pub fn prefetch_within(
        &mut self,
        cache: &KvCache<B>,
        prompt: &[u32],
        options: &StartOptions<'_>,
        wait: Wait,
    ) -> PrefetchId {
        let began = Instant::now();
        self.stats.prefetches = self.stats.prefetches.saturating_add(1);
        let id = self.stats.prefetches;
        let probe = cache.probe_keys(prompt, options);
        let chains = self.chains(cache, &probe);
        let mut prefetch = Prefetch {
            probe,
            encoding_key: cache.encoding_key(),
            chains,
            began,
            wait,
            stage: Stage::Done,
            found: HashMap::new(),
            held: HashMap::new(),
            again: None,
        };
        let answers_left = if wait == Wait::None { 0 } else { self.look_up(id, &prefetch) };
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

    /// Returns whether a prompt need not wait any longer: all that can come is here, or its wait
    /// limit has passed. Also `true` for a prefetch that has ended.
    pub fn is_ready(&self, prefetch: PrefetchId) -> bool {
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
            Wait::All => return None,
            Wait::For(time) => time,
            Wait::Compute => {
                let tokens = of.probe.limit().saturating_sub(of.probe.cached());
                let seconds = self.compute.get()? * f64::from(tokens);
                Duration::try_from_secs_f64(seconds).ok()?
            }
        };
        Some(after(of.began, limit))
    }

    /// Ends a prefetch whose prompt will not start. `false` if it has ended already.
    pub fn cancel(&mut self, prefetch: PrefetchId) -> bool {
        self.prefetches.remove(&prefetch.0).is_some()
    }

    /// Starts a sequence on a prompt that was prefetched: brings to the device what has come, and
    /// returns the number of tokens that need not be computed. The prefetch ends.
    ///
    /// If the device has too few free blocks for what has come, the sequence starts without it.
    ///
    /// # Errors
    /// [`TierError::UnknownPrefetch`]; [`TierError::OtherOptions`] if salt, adapter, contents or
    /// reuse are not those of the prefetch; [`TierError::Cache`] with the errors of
    /// [`KvCache::start`], or if a copy to the device failed. The prefetch has ended then too, and
    /// no sequence has started.
    pub fn start(
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
            // Blocks that could not be zeroed stay out of use, and are zeroed by a later call.
            let finished = cache.finish_import(import);
            let has_ended = matches!(finished, Ok(()) | Err(CacheError::Device(_)));
            has_ended.then_some(()).invariant("no step is open, and nobody else ends the import");
            // The import held blocks that the sequence computes anew, perhaps the last ones.
            if matches!(started, Err(CacheError::Exhausted(_))) {
                started = cache.start(sequence, prompt.prompt(), options);
            }
        }
        Ok(started?)
    }

    /// Brings to the device what has come for a prompt, for callers that start the sequence
    /// themselves, in an open step perhaps; `None` if nothing has come or the device has too few
    /// free blocks. The prefetch ends.
    ///
    /// The blocks are held until [`KvCache::finish_import`], which the caller calls after the
    /// sequence has started. It finds them as it finds other cached blocks.
    ///
    /// # Errors
    /// Those of [`Self::start`] without those of [`KvCache::start`].
    pub fn bring(
        &mut self,
        cache: &mut KvCache<B>,
        prefetch: PrefetchId,
        options: &StartOptions<'_>,
    ) -> Result<Option<Import>, TierError> {
        self.take_results();
        let mut of = self.prefetches.remove(&prefetch.0).ok_or(TierError::UnknownPrefetch)?;
        if !matches!(of.stage, Stage::Done) || of.again.is_some() {
            self.stats.late = self.stats.late.saturating_add(1);
        }
        let fresh = cache.probe_keys(of.probe.prompt(), options);
        let is_current = of.encoding_key == cache.encoding_key();
        let has_space = (fresh.salt(), fresh.adapter()) == (of.probe.salt(), of.probe.adapter());
        let groups = self.groups.iter().map(|group| group.spec.group());
        let same_keys = |group| last_key(&fresh, group) == last_key(&of.probe, group);
        if !has_space || (is_current && !groups.clone().all(same_keys)) {
            return Err(TierError::OtherOptions);
        }
        if !is_current {
            // The constants have changed: what was found has other bytes than it would have now.
            of.chains.clear();
            of.held.clear();
        }
        of.probe = fresh;
        for group in 0..of.chains.len() {
            let absent = absent(&of.probe, of.chains.get(group).invariant(GROUP));
            for chunk in absent {
                self.hold(&mut of, (group, chunk));
            }
        }
        self.import(cache, &of)
    }

    fn prompt(&self, prefetch: PrefetchId) -> Result<PrefixProbe, TierError> {
        let of = self.prefetches.get(&prefetch.0).ok_or(TierError::UnknownPrefetch)?;
        Ok(of.probe.clone())
    }

    /// Waits until a prompt [is ready](Self::is_ready), for programs that have nothing else to do.
    ///
    /// # Errors
    /// [`TierError::StepOpen`]; those of [`Self::poll`].
    pub fn wait(&mut self, cache: &mut KvCache<B>, prefetch: PrefetchId) -> Result<(), TierError> {
        /// How long one wait for a thread lasts at most, beside which copies of the device go on.
        const PAUSE: Duration = Duration::from_millis(1);
        if cache.is_step_open() {
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

    pub(super) fn chains(&mut self, cache: &KvCache<B>, probe: &PrefixProbe) -> Vec<Chain> {
        let space = (probe.salt(), probe.adapter());
        let roots = (0..self.groups.len()).map(|at| self.root(cache.encoding_key(), at, space));
        let Some(roots) = roots.collect::<Option<Vec<_>>>() else { return Vec::new() };
        let chains: Vec<_> = roots.into_iter().map(|root| Chain::new(probe, root)).collect();
        let tokens = to_u32(probe.prompt().len());
        for chain in &chains {
            (0..chain.len()).for_each(|chunk| self.prompted.insert(*chain.name(chunk), tokens));
        }
        chains
    }

    /// Holds a chunk of a prompt if it is in host memory; returns whether it is held.
    fn hold(&self, of: &mut Prefetch<ChunkOf<B>>, (group, chunk): (usize, u32)) -> bool {
        if of.held.contains_key(&(group, chunk)) {
            return true;
        }
        let name = of.chains.get(group).invariant(GROUP).name(chunk);
        let Some(entry) = self.groups.get(group).invariant(GROUP).host.get(name) else {
            return false;
        };
        of.held.insert((group, chunk), (entry.chunk.clone(), Tier::Host));
        true
    }

    /// Asks every store for the chunks that are not here; returns the number of answers to come.
    fn look_up(&self, id: u64, of: &Prefetch<ChunkOf<B>>) -> usize {
        let mut questions = 0_usize;
        for (group, chain) in of.chains.iter().enumerate() {
            let host = &self.groups.get(group).invariant(GROUP).host;
            let absent = absent(&of.probe, chain).into_iter();
            let chunks: Vec<u32> = absent.filter(|at| !host.contains(chain.name(*at))).collect();
            if chunks.is_empty() {
                continue;
            }
            // With a window, the last chunks may be there without the first.
            let [_, others] = of.probe.needed_indices(chain.group(), of.probe.limit());
            let stops = others.start == 0;
            for (store, lane) in self.stores.iter().enumerate() {
                let Some(permit) = lane.store.begin_lookup() else { continue };
                questions = questions.saturating_add(1);
                let addresses: Vec<_> = chunks.iter().map(|at| chain.address(*at)).collect();
                let answer = move |chunks: Vec<u32>, found: Vec<bool>| Done::Found {
                    prefetch: id,
                    store,
                    group,
                    chunks,
                    found,
                };
                let mut report = Report::new(&self.sender, answer(Vec::new(), Vec::new()));
                let (asked, chunks) = (Arc::clone(&lane.store), chunks.clone());
                let limit = lane.store.options().lookup_deadline.saturating_add(GRACE);
                lane.lane.push_urgent(limit, move || {
                    let found = asked.lookup(permit, &addresses, stops);
                    report.set(answer(chunks, found));
                });
            }
        }
        questions
    }

    pub(super) fn note_found(
        &mut self,
        prefetch: u64,
        store: usize,
        (group, chunks): (usize, &[u32]),
        found: &[bool],
    ) {
        let Some(of) = self.prefetches.get_mut(&prefetch) else { return };
        let Stage::Looking { answers_left, .. } = &mut of.stage else { return };
        *answers_left = answers_left.saturating_sub(1);
        let is_last = *answers_left == 0;
        for (chunk, _) in chunks.iter().zip(found).filter(|(_, is_there)| **is_there) {
            *of.found.entry((group, *chunk)).or_default() |= bit(store);
        }
        if is_last {
            self.plan(prefetch);
        }
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

    /// Lets a prefetch ask the stores again and again until it has the blocks of `tokens` tokens.
    pub(super) fn look_until(&mut self, prefetch: PrefetchId, until: Instant, tokens: u32) {
        const FIRST: Duration = Duration::from_millis(2);
        if let Some(of) = self.prefetches.get_mut(&prefetch.0) {
            of.again = Some(Again { until, next: after(of.began, FIRST), pause: FIRST, tokens });
        }
    }

    /// Asks the stores once more for chunks that are awaited, if it is time.
    fn look_again(&mut self, id: u64, now: Instant) {
        const PAUSE_MAX: Duration = Duration::from_millis(50);
        let Some(mut of) = self.prefetches.remove(&id) else { return };
        if of.again.as_ref().is_some_and(|again| now >= again.until || of.has(again.tokens)) {
            of.again = None;
        }
        let mut answers_left = None;
        if let Some(again) = of.again.as_mut().filter(|again| now >= again.next) {
            again.pause = again.pause.saturating_mul(2).min(PAUSE_MAX);
            again.next = after(now, again.pause);
            of.found.clear();
            answers_left = Some(self.look_up(id, &of));
        }
        if let Some(answers_left) = answers_left.filter(|left| *left > 0) {
            of.stage = Stage::Looking { answers_left, until: self.lookups_until(now) };
        }
        self.prefetches.insert(id, of);
        if answers_left == Some(0) {
            self.plan(id);
        }
    }

    /// Returns when the answers of stores that are asked now are waited for no longer.
    fn lookups_until(&self, now: Instant) -> Instant {
        let longest = self.stores.iter().map(|lane| lane.store.options().lookup_deadline).max();
        after(now, longest.unwrap_or_default().saturating_add(GRACE))
    }

    /// Decides what to read of what the stores have.
    fn plan(&mut self, id: u64) {
        let Some(mut of) = self.prefetches.remove(&id) else { return };
        of.stage = Stage::Done;
        let can_come = |chain: &Chain, chunk: u32| {
            let group = usize::from(chain.group().0);
            let host = &self.groups.get(group).invariant(GROUP).host;
            host.contains(chain.name(chunk)) || of.found.contains_key(&(group, chunk))
        };
        let mut upto = reach(&of.probe, &of.chains, u32::MAX, can_come);
        // All of it must fit host memory at a time.
        while let Some(less) = self.shortened(&of, upto) {
            upto = reach(&of.probe, &of.chains, less, can_come);
        }
        let mut needed = Vec::new();
        for (group, chain) in of.chains.iter().enumerate() {
            needed.extend(missing(&of.probe, chain, upto).into_iter().map(|at| (group, at)));
        }
        let mut queue = needed;
        queue.retain(|at| !self.hold(&mut of, *at));
        let hit = of.probe.hit(upto);
        // In the order of the prompt, whatever the group.
        queue.sort_by_key(|(group, chunk)| {
            of.chains.get(*group).map_or(0, |chain| chain.spec().span(*chunk).end)
        });
        if hit > of.probe.cached() && !queue.is_empty() {
            if of.wait != Wait::Compute || self.pays(&of, &queue, hit) {
                let times = self.stores.iter().map(|lane| lane.store.options().read_deadline);
                let until = after(Instant::now(), times.max().unwrap_or_default());
                of.stage = Stage::Reading { queue: queue.into(), outstanding: 0, until };
            } else {
                let tokens = u64::from(hit.saturating_sub(of.probe.cached()));
                let cheaper = &mut self.stats.cheaper_to_compute;
                *cheaper = cheaper.saturating_add(tokens);
            }
        }
        self.prefetches.insert(id, of);
        self.begin_reads(id);
    }

    /// Returns fewer tokens than `upto` if host memory has no room for all chunks that they need.
    fn shortened(&self, of: &Prefetch<ChunkOf<B>>, upto: u32) -> Option<u32> {
        let fits = of.chains.iter().zip(&self.groups).map(|(chain, group)| {
            let missing = missing(&of.probe, chain, upto);
            let last = missing.get(group.capacity.saturating_sub(1))?;
            let end = chain.spec().span(*last).end;
            (missing.len() > group.capacity && end < upto).then_some(end)
        });
        fits.flatten().min()
    }

    /// Returns whether reading some chunks takes less time than computing their tokens.
    fn pays(&self, of: &Prefetch<ChunkOf<B>>, queue: &[(usize, u32)], hit: u32) -> bool {
        let mut bytes = vec![0_u64; self.stores.len()];
        for at in queue {
            let store = of.found.get(at).map_or(0, |stores| first(*stores));
            let group = self.groups.get(at.0).invariant(GROUP);
            let bytes = bytes.get_mut(store).invariant(STORE);
            *bytes = bytes.saturating_add(to_u64(group.spec.chunk_bytes()));
        }
        // Stores work side by side: the slowest one decides.
        let tokens = hit.saturating_sub(of.probe.cached());
        let prefill = self.compute.get().map(f64::recip);
        self.stores.iter().zip(bytes).filter(|(_, bytes)| *bytes > 0).all(|(lane, bytes)| {
            let rates = lane.store.rates();
            let threads = u32::try_from(lane.store.options().threads).unwrap_or(u32::MAX);
            let load = LoadOrCompute {
                tokens,
                bytes,
                latency: rates.latency(),
                bytes_per_second: rates.bytes_per_second().map(|one| one * f64::from(threads)),
                prefill_tokens_per_second: prefill,
            };
            matches!(load.decide(), LoadDecision::Load(_))
        })
    }

    /// Begins as many of a prefetch's reads as host memory has room for.
    fn begin_reads(&mut self, id: u64) {
        let Some(mut of) = self.prefetches.remove(&id) else { return };
        if let Stage::Reading { mut queue, mut outstanding, until } =
            std::mem::replace(&mut of.stage, Stage::Done)
        {
            while let Some(&(group, chunk)) = queue.front() {
                let chain = of.chains.get(group).invariant(GROUP);
                let name = *chain.name(chunk);
                let tier = self.groups.get_mut(group).invariant(GROUP);
                if let Some(entry) = tier.host.get(&name) {
                    of.held.insert((group, chunk), (entry.chunk.clone(), Tier::Host));
                } else if let Some(reading) = tier.reading.get_mut(&name) {
                    reading.waiters.push(id);
                    outstanding = outstanding.saturating_add(1);
                } else {
                    let Some(into) = self.take_chunk(group) else { break };
                    let store = of.found.get(&(group, chunk)).map_or(0, |stores| first(*stores));
                    let record = Arc::new(chain.record(&of.probe, chunk));
                    let tier = self.groups.get_mut(group).invariant(GROUP);
                    let given_up = after(until, GRACE);
                    let waiters = vec![id];
                    let reading = Reading { store, index: chunk, until: given_up, waiters };
                    tier.reading.insert(name, reading);
                    outstanding = outstanding.saturating_add(1);
                    let of_store = self.stores.get(store).invariant(STORE);
                    let asked = Arc::clone(&of_store.store);
                    // A chunk that is refused is removed too.
                    let limit = given_up.saturating_duration_since(Instant::now());
                    let limit = limit.saturating_add(asked.options().lookup_deadline);
                    let failed = Read::Failed;
                    let done = Done::Read { record: Arc::clone(&record), store, read: failed };
                    let mut report = Report::new(&self.sender, done);
                    of_store.lane.push_urgent(limit, move || {
                        let read = asked.read(&record, into, until);
                        report.set(Done::Read { record, store, read });
                    });
                }
                queue.pop_front();
            }
            let is_leaving = self.groups.iter().any(GroupTier::is_leaving);
            // Without anything on its way, no room comes before the prompt starts.
            if outstanding > 0 || (!queue.is_empty() && is_leaving) {
                of.stage = Stage::Reading { queue, outstanding, until };
            }
        }
        self.prefetches.insert(id, of);
    }

    pub(super) fn note_read(&mut self, record: &Arc<Record>, store: usize, read: Read<ChunkOf<B>>) {
        let group = usize::from(record.group().0);
        let tier = self.groups.get_mut(group).invariant(GROUP);
        let waiters = match tier.reading.get(&record.name) {
            Some(reading) if reading.store == store => {
                tier.reading.remove(&record.name).map_or_else(Vec::new, |reading| reading.waiters)
            }
            // It was given up, and perhaps another store was asked.
            _ => Vec::new(),
        };
        let chunk = match read {
            Read::Verified(chunk) => Some(chunk),
            Read::Missing | Read::Failed => None,
        };
        if let Some(chunk) = &chunk
            && tier.host.insert(chunk.clone(), Arc::clone(record), bit(store))
        {
            self.announcements.extend(record.stored(Tier::Host));
        }
        self.resolve((group, record.index), store, waiters, chunk.as_ref());
    }

    /// Gives a chunk that was read, or none, to the prefetches that wait for it.
    fn resolve(
        &mut self,
        at: (usize, u32),
        store: usize,
        waiters: Vec<u64>,
        chunk: Option<&Verified<Arc<ChunkOf<B>>>>,
    ) {
        let from = self.stores.get(store).invariant(STORE).store.tier();
        for id in waiters {
            let Some(of) = self.prefetches.get_mut(&id) else { continue };
            let Stage::Reading { queue, outstanding, .. } = &mut of.stage else { continue };
            *outstanding = outstanding.saturating_sub(1);
            let others = of.found.get_mut(&at).map_or(0, |stores| {
                *stores &= !bit(store);
                *stores
            });
            match chunk {
                Some(chunk) => {
                    of.held.insert(at, (chunk.clone(), from));
                }
                // Another store has it.
                None if others != 0 => queue.push_front(at),
                // Of this group, nothing after the gap is of use.
                None => queue.retain(|(of, chunk)| *of != at.0 || *chunk < at.1),
            }
            if *outstanding == 0 && queue.is_empty() {
                of.stage = Stage::Done;
            }
        }
    }

    /// Gives up reads that have not returned: others may ask for the same chunks again.
    fn expire_reads(&mut self) {
        if self.groups.iter().all(|group| group.reading.is_empty()) {
            return;
        }
        let now = Instant::now();
        let mut expired = Vec::new();
        for (group, tier) in self.groups.iter_mut().enumerate() {
            let late = tier.reading.extract_if(|_, reading| now >= reading.until);
            expired.extend(late.map(|(_, reading)| (group, reading)));
        }
        for (group, Reading { store, index, waiters, .. }) in expired {
            self.resolve((group, index), store, waiters, None);
        }
    }

    /// Brings the blocks that have come to the device; `None` if there are none, or no room.
    fn import(
        &mut self,
        cache: &mut KvCache<B>,
        of: &Prefetch<ChunkOf<B>>,
    ) -> Result<Option<Import>, TierError> {
        let has = |chain: &Chain, chunk: u32| {
            of.held.contains_key(&(usize::from(chain.group().0), chunk))
        };
        let upto = reach(&of.probe, &of.chains, u32::MAX, has);
        if of.probe.hit(upto) <= of.probe.cached() {
            return Ok(None);
        }
        let mut import = match cache.reserve_import(&of.probe, upto) {
            Ok(import) => import,
            Err(CacheError::Exhausted(_)) => {
                self.stats.no_room = self.stats.no_room.saturating_add(1);
                return Ok(None);
            }
            Err(error) => return Err(error.into()),
        };
        let before = of.probe.cached();
        let brought = self.copy_in(cache, of, &import).and_then(|tiers| {
            // All blocks from one tier in a row are published at once.
            tiers
                .chunk_by(|a, b| a.1 == b.1)
                .filter_map(|run| run.last())
                .try_for_each(|(end, tier)| Ok(cache.publish_import(&mut import, *end, *tier)?))
        });
        match brought {
            Ok(()) => {
                let tokens = u64::from(import.hit().saturating_sub(before));
                self.stats.loaded_tokens = self.stats.loaded_tokens.saturating_add(tokens);
                self.note_uses(of, &import);
                Ok(Some(import))
            }
            Err(error) => {
                let groups = self.groups.iter().map(|group| group.spec.group());
                let chunk_of = |id: GroupId| {
                    let held = of.held.iter().find(|((at, _), _)| *at == usize::from(id.0));
                    held.map(|(_, (chunk, _))| (id, chunk.clone()))
                };
                let chunks = groups.filter_map(chunk_of).collect();
                self.abandoned.push(Abandoned { import, chunks });
                // If the device still fails, the next call tries again.
                let _: Result<(), TierError> = self.finish_abandoned(cache);
                Err(error)
            }
        }
    }

    /// Ends the imports whose copies failed, once the copies that were recorded before are done.
    ///
    /// # Errors
    /// Those of the device: the blocks stay held.
    pub(super) fn finish_abandoned(&mut self, cache: &mut KvCache<B>) -> Result<(), TierError> {
        while let Some(Abandoned { chunks, .. }) = self.abandoned.last() {
            for (group, chunk) in chunks {
                let after = cache.queue_mut().submit()?;
                let storage = cache.storage(*group).invariant(GROUP).view();
                let of = self.groups.get_mut(usize::from(group.0)).invariant(GROUP);
                // The fence of no copy is that of the copies before.
                let fence = of.pool.copy_in(&after, storage, &[], chunk.get_ref(), 0)?;
                cache.queue_mut().wait_for(&fence)?;
            }
            let Some(Abandoned { import, .. }) = self.abandoned.pop() else { break };
            cache.finish_import(import)?;
        }
        Ok(())
    }

    /// Copies the bytes of an import's blocks, and lets the queue wait for them. Returns the ends
    /// of blocks in ascending order, each with the tier that its bytes came from.
    fn copy_in(
        &mut self,
        cache: &mut KvCache<B>,
        of: &Prefetch<ChunkOf<B>>,
        import: &Import,
    ) -> Result<Vec<(u32, Tier)>, TierError> {
        let after = cache.queue_mut().submit()?;
        let mut tiers: Vec<(u32, Tier)> = Vec::with_capacity(import.blocks().len());
        let mut blocks: Vec<BlockId> = Vec::new();
        let same_chunk = |a: &ImportBlock, b: &ImportBlock| {
            let chain = of.chains.get(usize::from(a.group.0)).invariant(GROUP);
            let chunk = |block: &ImportBlock| chunk_of(chain.spec(), block.index);
            a.group == b.group && chunk(a) == chunk(b) && a.index.checked_add(1) == Some(b.index)
        };
        for run in import.blocks().chunk_by(same_chunk) {
            let Some(first) = run.first() else { continue };
            let group = usize::from(first.group.0);
            let chain = of.chains.get(group).invariant(GROUP);
            let chunk = chunk_of(chain.spec(), first.index);
            let held = of.held.get(&(group, chunk));
            let (bytes, tier) = held.invariant("an import needs only chunks that are here");
            // The name says what the chunk is; its header must say the same.
            let record = chain.record(&of.probe, chunk);
            let checked = bytes.check_header(&record.expectation());
            checked.map_err(|error| {
                DeviceError::new(DeviceErrorKind::Driver, "use a chunk of host memory")
                    .with_detail(error.to_string())
            })?;
            blocks.clear();
            blocks.extend(run.iter().map(|block| block.block));
            let place = first.index.saturating_sub(chain.spec().first_block(chunk));
            let storage = cache.storage(first.group).invariant(GROUP).view();
            let tier_of = self.groups.get_mut(group).invariant(GROUP);
            let chunk: &ChunkOf<B> = bytes.get_ref();
            let fence = tier_of.pool.copy_in(&after, storage, &blocks, chunk, place)?;
            cache.queue_mut().wait_for(&fence)?;
            tiers.extend(run.iter().map(|block| (block.end, *tier)));
        }
        tiers.sort_by_key(|(end, _)| *end);
        Ok(tiers)
    }

    /// Counts the use of an import's chunks, and lets stores with a rule for it have them.
    fn note_uses(&mut self, of: &Prefetch<ChunkOf<B>>, import: &Import) {
        for (group, chain) in of.chains.iter().enumerate() {
            let used = missing(&of.probe, chain, import.upto());
            // The first chunk is the most recently used one.
            for chunk in used.into_iter().rev() {
                let host = &mut self.groups.get_mut(group).invariant(GROUP).host;
                host.touch(chain.name(chunk));
                let Some(entry) = host.get_mut(chain.name(chunk)) else { continue };
                entry.uses = entry.uses.saturating_add(1);
                let record = Arc::clone(&entry.record);
                self.decide_writes(&record, ChunkEvent::Reused);
            }
        }
    }
}

/// Returns the first of some stores, which is preferred.
fn first(stores: u64) -> usize {
    kv_core::num::to_usize(stores.trailing_zeros())
}

/// Returns the whole chunks of a prompt with a block that is not on the device and that some number
/// of reused tokens needs.
fn absent(probe: &PrefixProbe, chain: &Chain) -> Vec<u32> {
    let blocks = probe.blocks(chain.group()).filter(|block| block.cached.is_none());
    let mut chunks: Vec<_> = blocks.map(|block| chunk_of(chain.spec(), block.index)).collect();
    chunks.dedup();
    chunks.retain(|chunk| *chunk < chain.len());
    chunks
}
