//! Lookups in stores, and the choice of the chunks to read.
use std::sync::Arc;
use std::time::{Duration, Instant};

use kv_core::backend::Backend;
use kv_core::invariant::Invariant;
use kv_core::num::to_u64;

use super::done::{Done, Report};
use super::prefetch::{Again, GRACE, Prefetch, PrefetchId, Stage};
use super::read::first;
use super::search::StateSearch;
use super::write::bit;
use super::{ChunkOf, GROUP, STORE, Tiers, Wait};
use crate::chain::{Chain, ChunkAt, absent, missing, reach};
use crate::policy::{LoadDecision, LoadOrCompute};
use crate::store::after;

impl<B: Backend> Tiers<B> {
    /// Asks every store for the chunks that are not here; returns the number of answers to come.
    pub(super) fn look_up(&self, id: u64, of: &mut Prefetch<ChunkOf<B>>) -> usize {
        let mut questions = 0_usize;
        for (group, chain) in of.chains.iter().enumerate() {
            let absent = absent(&of.probe, chain).into_iter().map(ChunkAt::Whole);
            let chunks: Vec<_> = absent.filter(|at| !self.is_in_host(of, (group, *at))).collect();
            // With a window, the last chunks may be there without the first.
            let [_, others] = of.probe.needed_indices(chain.group(), of.probe.limit());
            let stops = others.start == 0;
            for store in 0..self.stores.len() {
                questions += self.ask_for(id, of, (store, group), (&chunks, stops));
            }
        }
        questions + self.look_up_states(id, of)
    }

    /// Returns whether a chunk of a prompt is in host memory.
    pub(super) fn is_in_host(
        &self,
        of: &Prefetch<ChunkOf<B>>,
        (group, at): (usize, ChunkAt),
    ) -> bool {
        let name = of.chains.get(group).invariant(GROUP).name(&of.probe, at);
        self.groups.get(group).invariant(GROUP).host.contains(&name)
    }

    /// Asks a store for chunks of one group, up to the first that it lacks if `stops` says so;
    /// returns the number of answers to come.
    pub(super) fn ask_for(
        &self,
        id: u64,
        of: &Prefetch<ChunkOf<B>>,
        (store, group): (usize, usize),
        (chunks, stops): (&[ChunkAt], bool),
    ) -> usize {
        let lane = self.stores.get(store).invariant(STORE);
        if chunks.is_empty() {
            return 0;
        }
        let Some(permit) = lane.store.begin_lookup() else { return 0 };
        let chain = of.chains.get(group).invariant(GROUP);
        let addresses: Vec<_> = chunks.iter().map(|at| chain.address(&of.probe, *at)).collect();
        let answer = move |chunks: Vec<ChunkAt>, found: Vec<bool>| Done::Found {
            prefetch: id,
            store,
            group,
            chunks,
            found,
        };
        let mut report = Report::new(&self.sender, answer(Vec::new(), Vec::new()));
        let (asked, chunks) = (Arc::clone(&lane.store), chunks.to_vec());
        // Deadlines may be any times.
        let limit = lane.store.options().lookup_deadline.saturating_add(GRACE);
        lane.lane.push_urgent(limit, move || {
            let found = asked.lookup(permit, &addresses, stops);
            report.set(answer(chunks, found));
        });
        1
    }

    pub(super) fn note_found(
        &mut self,
        prefetch: u64,
        store: usize,
        (group, chunks): (usize, &[ChunkAt]),
        found: &[bool],
    ) {
        let Some(of) = self.prefetches.get_mut(&prefetch) else { return };
        let Stage::Looking { answers_left, .. } = &mut of.stage else { return };
        *answers_left -= 1;
        let is_last = *answers_left == 0;
        let tier = self.stores.get(store).invariant(STORE).store.tier();
        for (chunk, is_there) in chunks.iter().zip(found) {
            if *is_there {
                *of.found.entry((group, *chunk)).or_default() |= bit(store);
            } else {
                let chain = of.chains.get(group).invariant(GROUP);
                let name = || chain.name(&of.probe, *chunk);
                self.announcements.lacks_if_known(tier, name, bit(store).into());
            }
        }
        if !is_last {
            return;
        }
        let Some(mut of) = self.prefetches.remove(&prefetch) else { return };
        let answers_left = self.look_up_states(prefetch, &mut of);
        if answers_left > 0 {
            let until = self.lookups_until(Instant::now());
            of.stage = Stage::Looking { answers_left, until };
        }
        self.prefetches.insert(prefetch, of);
        if answers_left == 0 {
            self.plan(prefetch);
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
    pub(super) fn look_again(&mut self, id: u64, now: Instant) {
        const PAUSE_MAX: Duration = Duration::from_millis(50);
        let Some(mut of) = self.prefetches.remove(&id) else { return };
        if of.again.as_ref().is_some_and(|again| now >= again.until || of.has(again.tokens)) {
            of.again = None;
        }
        let mut answers_left = None;
        if let Some(again) = of.again.as_mut().filter(|again| now >= again.next) {
            again.pause = (again.pause * 2).min(PAUSE_MAX);
            again.next = after(now, again.pause);
            of.found.clear();
            of.search.iter_mut().for_each(StateSearch::begin_again);
            answers_left = Some(self.look_up(id, &mut of));
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
    pub(super) fn lookups_until(&self, now: Instant) -> Instant {
        let longest = self.stores.iter().map(|lane| lane.store.options().lookup_deadline).max();
        // Deadlines may be any times.
        after(now, longest.unwrap_or_default().saturating_add(GRACE))
    }

    /// Chooses the chunks to read among those that the stores have.
    pub(super) fn plan(&mut self, id: u64) {
        let Some(mut of) = self.prefetches.remove(&id) else { return };
        of.stage = Stage::Done;
        let (hit, mut queue) = match of.search {
            Some(_) => self.state_to_come(&of).unwrap_or_default(),
            None => self.rows_to_come(&of),
        };
        queue.retain(|at| !self.hold(&mut of, *at));
        // In the order of the prompt, whatever the group.
        queue.sort_by_key(|(group, at)| match at {
            ChunkAt::Whole(at) => of.chains.get(*group).invariant(GROUP).spec().span(*at).end,
            ChunkAt::Upto(len) => *len,
        });
        if hit > of.probe.reused() && !queue.is_empty() {
            let must_pay = matches!(of.wait, Wait::Compute | Wait::IfFaster);
            if !must_pay || self.pays(&of, &queue, hit) {
                let times = self.stores.iter().map(|lane| lane.store.options().read_deadline);
                let until = after(Instant::now(), times.max().unwrap_or_default());
                of.stage = Stage::Reading { queue: queue.into(), outstanding: 0, until };
            } else {
                // Tokens beyond the cached ones, if any.
                let tokens = u64::from(hit - of.probe.reused());
                let cheaper = &mut self.stats.cheaper_to_compute;
                *cheaper += tokens;
            }
        }
        self.prefetches.insert(id, of);
        self.begin_reads(id);
    }

    /// Returns the most tokens whose rows can come, and the chunks that they need.
    fn rows_to_come(&self, of: &Prefetch<ChunkOf<B>>) -> (u32, Vec<(usize, ChunkAt)>) {
        let can_come = |chain: &Chain, chunk: u32| {
            let at = (usize::from(chain.group().0), ChunkAt::Whole(chunk));
            self.is_in_host(of, at) || of.found.contains_key(&at)
        };
        let mut upto = reach(&of.probe, &of.chains, u32::MAX, can_come);
        // All of it must fit host memory at a time.
        while let Some(less) = self.shortened(of, upto) {
            upto = reach(&of.probe, &of.chains, less, can_come);
        }
        let mut needed = Vec::new();
        for (group, chain) in of.chains.iter().enumerate() {
            let missing = missing(&of.probe, chain, upto).into_iter();
            needed.extend(missing.map(|at| (group, ChunkAt::Whole(at))));
        }
        (of.probe.hit(upto), needed)
    }

    /// Returns fewer tokens than `upto` if host memory has no room for all chunks that they need.
    fn shortened(&self, of: &Prefetch<ChunkOf<B>>, upto: u32) -> Option<u32> {
        let fits = of.chains.iter().zip(&self.groups).map(|(chain, group)| {
            let missing = missing(&of.probe, chain, upto);
            let last = missing.get(group.capacity - 1)?;
            let end = chain.spec().span(*last).end;
            (missing.len() > group.capacity && end < upto).then_some(end)
        });
        fits.flatten().min()
    }

    /// Returns whether reading some chunks takes less time than computing their tokens.
    fn pays(&self, of: &Prefetch<ChunkOf<B>>, queue: &[(usize, ChunkAt)], hit: u32) -> bool {
        let mut bytes = vec![0_u64; self.stores.len()];
        for at in queue {
            let store = of.found.get(at).map_or(0, |stores| first(*stores));
            let group = self.groups.get(at.0).invariant(GROUP);
            let bytes = bytes.get_mut(store).invariant(STORE);
            *bytes += to_u64(group.spec.chunk_bytes());
        }
        // Stores work side by side: the slowest one decides.
        let tokens = hit - of.probe.reused();
        let prefill = self.compute.get().map(f64::recip);
        self.stores.iter().zip(bytes).filter(|(_, bytes)| *bytes > 0).all(|(lane, bytes)| {
            let (latency, bytes_per_second) = lane.store.read_rates();
            let load = LoadOrCompute {
                tokens,
                bytes,
                latency,
                bytes_per_second,
                prefill_tokens_per_second: prefill,
            };
            load.decide() == LoadDecision::Load
        })
    }
}
